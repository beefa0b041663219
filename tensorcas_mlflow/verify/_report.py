"""What a look at a store has found."""

from __future__ import annotations

from dataclasses import dataclass

_N_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something in a store that is not as it should be, and what it breaks. Printing it says so in words."""

    key: str | None
    """The blob at fault, ``packs/….pack`` for a chunk; None for a chunk of which nobody can say where it was."""
    reason: str
    checkpoint: str | None = None
    """The checkpoint or file that suffers, in words; None where none does."""
    tensors: tuple[str, ...] = ()
    """Those of its tensors that suffer."""

    def __str__(self) -> str:
        where = [] if self.checkpoint is None else [self.checkpoint]
        if self.tensors:
            names = ", ".join(repr(name) for name in self.tensors[:_N_NAMES])
            more = f" and {len(self.tensors) - _N_NAMES} more" if len(self.tensors) > _N_NAMES else ""
            where.append(f"tensors {names}{more}" if len(self.tensors) > 1 else f"tensor {names}")
        where += [] if self.key is None else [self.key]
        return f"{', '.join(where)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a look at a whole store has found. Printing it says so in words."""

    n_refs: int
    """Checkpoints and files looked at."""
    n_packs: int
    n_chunks: int
    """Chunks in the packs, needed or not."""
    full: bool
    """Whether each of them was read and decoded."""
    problems: tuple[Problem, ...]
    """Empty for a store that is sound."""

    def __str__(self) -> str:
        chunks = f"{self.n_chunks} chunks, {'every one' if self.full else 'none of them'} read"
        found = {0: "no problem found", 1: "1 problem"}.get(len(self.problems), f"{len(self.problems)} problems")
        summary = f"{self.n_refs} checkpoints and files, {self.n_packs} packs, {chunks}: {found}"
        return "\n".join([*map(str, self.problems), summary])


def reason_of(error: Exception) -> str:
    """Say what is wrong with a blob, without naming it."""
    return str(getattr(error, "reason", error))
