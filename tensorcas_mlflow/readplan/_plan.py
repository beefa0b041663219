"""The planned reads as a printable value."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.readplan._choose import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRead:
    """The reads of one pack."""

    key: str
    """Key of the pack."""
    n_chunks: int
    n_bytes: int
    """Stored bytes of the chunks."""
    n_reads: int
    read_bytes: int
    """Size of the reads: the chunks, and the gaps between near ones."""
    choice: Choice

    def __str__(self) -> str:
        many = "1 read" if self.n_reads == 1 else f"{self.n_reads:,} reads"
        chunks = "1 chunk" if self.n_chunks == 1 else f"{self.n_chunks:,} chunks"
        how = "by the caller alone" if self.choice.is_alone else "on threads"
        said = f"{self.key}: {chunks}, {size_text(self.n_bytes)} stored; {many} by {self.choice.way} {how}, "
        return f"{said}because {self.choice.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The way some tensors of a checkpoint would be read now. The page cache changes, and the plan with it."""

    n_tensors: int
    n_bytes: int
    """Size of the tensors."""
    n_mapped: int
    """Tensors read as views of memory-mapped packs, without a copy."""
    n_cached: int
    """Chunks read from the chunk cache."""
    packs: tuple[PackRead, ...]
    rule: str
    """Origin of the rule's numbers."""

    @property
    def ways(self) -> dict[str, int]:
        """Stored bytes by way."""
        bytes_by_way: Counter[str] = Counter()
        for pack in self.packs:
            bytes_by_way[pack.choice.way] += pack.n_bytes
        return dict(bytes_by_way)

    def __str__(self) -> str:
        tensors = "1 tensor" if self.n_tensors == 1 else f"{self.n_tensors:,} tensors"
        lines = [f"{tensors}, {size_text(self.n_bytes)}"]
        if self.n_mapped:
            lines.append(f"{self.n_mapped:,} of them stored raw and in one piece: views of mapped packs")
        if self.n_cached:
            lines.append(f"{self.n_cached:,} chunks from the chunk cache")
        lines += [str(pack) for pack in self.packs]
        lines.append(f"rule: {self.rule}")
        return "\n".join(lines)
