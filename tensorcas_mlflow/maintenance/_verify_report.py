"""What a look at a store has found."""

from __future__ import annotations

from dataclasses import dataclass

from tensorcas_mlflow.blob_names import strangers_text
from tensorcas_mlflow.errors import StarvedError, in_words


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
        where = [in_words(self.checkpoint, self.tensors), self.key or ""]
        return f"{', '.join(filter(None, where))}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a look at a whole store has found. Printing it says so in words."""

    n_refs: int
    """Checkpoints and files looked at."""
    n_packs: int
    n_chunks: int
    """Chunks in the packs, needed or not."""
    n_read: int = 0
    """Those of them that were read; a chunk that lies in several packs counts each time."""
    full: bool
    """Whether what was read was decoded and compared with the chunks' digests, and not only their stored bytes."""
    seed: int | None = None
    """What a sample was drawn by, to draw the same again; None where none was drawn."""
    problems: tuple[Problem, ...]
    """Empty for a store that is sound."""
    strangers: tuple[str, ...] = ()
    """Files between the blobs that are not of the store. Nothing reads or deletes them."""

    def __str__(self) -> str:
        how_many = {0: "none of them", self.n_chunks: "every one"}.get(self.n_read, f"{self.n_read} of them")
        if self.n_chunks == 0:
            how_many = "every one" if self.full else "none of them"
        how = " as it is stored" if self.n_read and not self.full else ""
        chunks = f"{self.n_chunks} chunks, {how_many} read{how}"
        found = {0: "no problem found", 1: "1 problem"}.get(len(self.problems), f"{len(self.problems)} problems")
        summary = f"{self.n_refs} checkpoints and files, {self.n_packs} packs, {chunks}: {found}"
        notes = [f"note: {strangers_text(self.strangers)} ignored"] if self.strangers else []
        return "\n".join([*map(str, self.problems), *notes, summary])


def reason_of(error: Exception) -> str:
    """Say what is wrong with a blob, without naming it.

    Raises:
        StarvedError: The error is one, which says nothing of any blob.
    """
    if isinstance(error, StarvedError):
        raise error
    return str(getattr(error, "reason", error))
