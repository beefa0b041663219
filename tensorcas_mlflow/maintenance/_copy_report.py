"""What a copy would do, is doing, and has done, as values."""

from __future__ import annotations

from dataclasses import dataclass

from tensorcas_mlflow._texts import size_text

_N_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that could not be copied."""

    what: str
    """A ref in words, or the key or path of what cannot be read."""
    reason: str
    tensors: tuple[str, ...] = ()
    """Tensors that are damaged."""

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.tensors[:_N_NAMES]))
        more = f" and {len(self.tensors) - _N_NAMES} more" if len(self.tensors) > _N_NAMES else ""
        return f"{self.what}: {self.reason}" + (f" (tensor {names}{more})" if names else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """What a copy would move, as things stand. Printing it says so in words."""

    n_new: int
    """Checkpoints and files that the destination does not have, or that are to be replaced there."""
    n_there: int
    """Those it has already."""
    kept: tuple[str, ...]
    """Those of which it has another one, which stays."""
    failed: tuple[Failure, ...]
    n_chunks: int
    """Chunks it does not hold."""
    chunk_bytes: int
    """Bytes of them as they are stored."""

    def __str__(self) -> str:
        return (
            f"{self.n_new} checkpoints and files to copy, {self.n_there} are there already; "
            f"{self.n_chunks} chunks to move ({size_text(self.chunk_bytes)})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy has done."""

    n_copied: int
    n_there: int
    """Checkpoints and files that the destination had already."""
    kept: tuple[str, ...]
    """Those of which it had another one, which has stayed."""
    dropped: tuple[str, ...]
    """Those that were dropped or saved anew in the source meanwhile; they are left out."""
    failed: tuple[Failure, ...]
    read_bytes: int
    written_bytes: int

    def __str__(self) -> str:
        dropped = f", {len(self.dropped)} were dropped or saved anew meanwhile" if self.dropped else ""
        failed = f", {len(self.failed)} failed" if self.failed else ""
        kept = f", {len(self.kept)} are others there and were kept" if self.kept else ""
        return (
            f"copied {self.n_copied} checkpoints and files, {self.n_there} were there already{kept}{dropped}{failed}; "
            f"read {size_text(self.read_bytes)}, wrote {size_text(self.written_bytes)}"
        )
