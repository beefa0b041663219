"""What a figure is to reach, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.harness._report import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound for one figure."""

    what: str
    """What is measured, against what."""
    bound: float
    kind: Literal["at most", "at least"]
    unit: str
    """What stands behind the number: ``x``, ``%``, ``ms``, …"""

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
    """Make a target that is met from below."""
    return Target(what=what, bound=bound, kind="at most", unit=unit)


def at_least(bound: float, unit: str, what: str) -> Target:
    """Make a target that is met from above."""
    return Target(what=what, bound=bound, kind="at least", unit=unit)
