"""What a file of a foreign format says of its tensors: what they are, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.formats._source import ByteSource
from tensorcas_mlflow.tensor import Spec, bytes_of

_PIECE_BYTES = 16 << 20


class Tensors(Protocol):
    """Tensors that can be written into a file of any format; read as they are wanted, and never all at once."""

    metadata: Mapping[str, Any]
    """Plain JSON values."""

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

    @property
    def is_plain(self) -> bool:
        """Whether its bytes lie as a store has them: one after the other, in C order."""
        return self.strides is None and self.deflated is None


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
        raise NotImplementedError

    def stream(self, names: Sequence[str]) -> Iterator[tuple[str, memoryview]]:
        """Read tensors one after the other; see `Tensors.stream`."""
        for name in names:
            place = self.places[name]
            if not place.is_plain:
                data = bytes_of(self.array(name))
                for start in range(0, len(data), _PIECE_BYTES):
                    yield name, data[start : start + _PIECE_BYTES]
                continue
            source = self.sources[place.source]
            for start in range(place.start, place.start + place.n_bytes, _PIECE_BYTES):
                yield name, source.read(start, min(_PIECE_BYTES, place.start + place.n_bytes - start))
