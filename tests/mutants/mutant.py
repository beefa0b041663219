"""A fault in our own code, and the test that must see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The package with one rule taken out: the test that injects the fault the rule is for must then fail."""

    fault: str
    """What the test does to the store, the machine or the process, in a few words; no two mutants have the same."""
    test: str
    """The test's node id, from the project's root. It may be a long one."""
    path: str
    """The module that is changed, from the project's root."""
    before: str
    """What stands there, exactly once."""
    after: str
    """What stands there instead."""

    def source(self) -> str:
        """The changed module."""
        text = (ROOT / self.path).read_text()
        assert text.count(self.before) == 1, f"{self.path} has {text.count(self.before)} times: {self.before}"
        return text.replace(self.before, self.after)
