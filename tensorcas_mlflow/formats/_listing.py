"""What a file of a foreign format says of its tensors: what they are, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.formats._arrays import check_bytes, read_array, read_pieces
from tensorcas_mlflow.formats._source import ByteSource
from tensorcas_mlflow.tensor import Spec

EXAMPLE_INPUT = "example input"
"""Type, in ``left_out``, of a tensor with which a model was traced."""
OTHER_FILE = "another file"
"""Type, in ``left_out``, of a file beside those of a folder's checkpoint; its name stands for a tensor's."""


def left_out_parts(left_out: Mapping[str, str]) -> dict[str, str]:
    """Return what is left out of a checkpoint itself, by name, with its type.

    Example inputs and other files are no part of it: who writes its tensors need not allow that they are left out.
    """
    return {name: kind for name, kind in left_out.items() if kind not in (EXAMPLE_INPUT, OTHER_FILE)}


class Tensors(Protocol):
    """Tensors that can be written into a file of any format; read as they are wanted, and never all at once."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Plain JSON values."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tensors that cannot be read and are none of these, by name, with what their file calls their type."""
        ...

    def specs(self) -> Sequence[Spec]:
        """Describe the tensors, in order; no two are named alike, and each has a dtype."""
        ...

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Read tensors one after the other, holding some 16 MiB at a time.

        Args:
            names: Which, in the order in which they are wanted.

        Yields:
            A name and bytes of that tensor, in C order of its elements. Of a large tensor come several pieces, one
            after the other; of an empty one comes none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One tensor of a file, and where it lies."""

    spec: Spec
    source: int
    """Which of the listing's files it lies in."""
    start: int
    """First byte in that file."""
    n_bytes: int
    """Size of the stretch that its elements lie in: with ``strides`` it may be more or less than the tensor's own."""
    strides: tuple[int, ...] | None = None
    """Elements from one to the next in each dimension, where it is not C order."""
    deflated: int | None = None
    """Where the stretch is a raw DEFLATE stream (RFC 1951): how many bytes come before the elements once it is
    inflated."""
    swapped: bool = False
    """Whether the bytes of each number lie in the other order than this machine's."""
    checksum: tuple[int, int] | None = None
    """The CRC-32 of the file's member that the elements are the end of, and that of the bytes of it that come before
    the stretch; it is checked when they are read."""

    @property
    def is_plain(self) -> bool:
        """Whether its bytes lie as a store has them: one after the other, in C order."""
        return self.strides is None and self.deflated is None and not self.swapped


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The tensors of one file or of several that belong together: a `Tensors`, too.

    All of it has been checked against the files' sizes: every place lies in its file.
    """

    format: str
    """Its name: ``safetensors``, ``torch``, …"""
    sources: Sequence[ByteSource]
    places: Mapping[str, Place]
    """By the tensor's name, in the order of the file."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values that the file has beside its tensors."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tensors that numpy has no dtype for, by name, with what the file calls their type."""

    def specs(self) -> list[Spec]:
        """Describe the tensors, in order."""
        return [place.spec for place in self.places.values()]

    def array(self, name: str) -> Array:
        """Give one tensor: a view of the mapped file where it lies there in C order, and else a new array.

        Raises:
            KeyError: There is none of that name.
            CorruptError: It is damaged, where that shows.
            BackendError: The storage does not give it.
        """
        place = self.places[name]
        return read_array(self.sources[place.source], place)

    def check(self, place: Place, data: memoryview) -> None:
        """See that bytes that somebody else has read of a plain place are what the file says; raises `CorruptError`."""
        check_bytes(self.sources[place.source], place, data)

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Read tensors one after the other; see `Tensors.stream`.

        One that lies in another than C order, in a file that is not mapped or a stretch that is deflated, goes through
        a temporary file if it is large.
        """
        for name in names:
            place = self.places[name]
            for piece in read_pieces(self.sources[place.source], place):
                yield name, piece
