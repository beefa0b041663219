"""Target of a figure, and the check against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.harness._report import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for one figure."""

    what: str
    """The measured quantity, with its reference."""
    bound: float
    kind: Literal["at most", "at least"]
    unit: str
    """Unit of the number: ``x``, ``%``, ``ms``, …"""

    def judge(self, case: str, got: float) -> Verdict:
        """Compare a figure of one case with the bound."""
        is_met = got <= self.bound if self.kind == "at most" else got >= self.bound
        return Verdict(
            what=self.what,
            case=case,
            target=f"{self.kind} {self.bound:g} {self.unit}",
            got=f"{got:.3g} {self.unit}",
            is_met=is_met,
        )


def at_most(bound: float, unit: str, what: str) -> Target:
    """Return a target for an upper bound."""
    return Target(what=what, bound=bound, kind="at most", unit=unit)


def at_least(bound: float, unit: str, what: str) -> Target:
    """Return a target for a lower bound."""
    return Target(what=what, bound=bound, kind="at least", unit=unit)
