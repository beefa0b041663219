"""Layouts of files to be written, complete before the first byte, and the tensors that flow into them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from tensorcas_mlflow.base.progress import ByteProgress
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.file_formats._listing import Tensors

_MAX_HEADER_BYTES = 100_000_000


class Feed:
    """The bytes of tensors, handed out one tensor after the other and counted.

    The source of the tensors is not trusted: a file with fewer bytes than its header says must never get its name.
    """

    def __init__(self, tensors: Tensors, specs: Sequence[Spec], progress: ByteProgress | None) -> None:
        """Begin to read tensors.

        Args:
            tensors: The source.
            specs: The tensors, in the order of the calls of `pieces`.
            progress: Called after each piece.
        """
        self._stream = tensors.stream([spec.name for spec in specs])
        self._progress = progress
        self._n_all = sum(spec.n_bytes for spec in specs)
        self._n_done = 0

    def pieces(self, spec: Spec) -> Iterator[memoryview]:
        """Yield all bytes of the next tensor.

        Raises:
            CorruptError: The source gives other bytes, or too few.
        """
        n_left = spec.n_bytes
        while n_left:
            name, piece = next(self._stream, ("", memoryview(b"")))
            if name != spec.name or not 0 < piece.nbytes <= n_left:
                raise CorruptError(spec.name, f"{n_left} of its {spec.n_bytes} bytes were not given")
            n_left -= piece.nbytes
            yield piece
            self._n_done += piece.nbytes
            if self._progress is not None:
                self._progress(self._n_done, self._n_all)


class FileLayout(ABC):
    """One file to be written: its tensors and its size."""

    name: str
    """File name in a folder; a file by itself gets any name."""
    n_bytes: int
    """Size of the file."""
    specs: Sequence[Spec]
    """The tensors, in the order in which they are written."""

    @abstractmethod
    def write(self, out: BinaryIO, feed: Feed) -> None:
        """Write the file.

        Args:
            out: An empty file that can be written at any position.
            feed: The tensors, in the order of ``specs``.
        """


class FlatLayout(FileLayout):
    """A header, then the tensors' bytes."""

    def __init__(self, name: str, *, head: bytes = b"", specs: Sequence[Spec] = (), alignment: int = 1) -> None:
        """Lay out a file.

        Args:
            name: See `FileLayout.name`.
            head: The header.
            specs: The tensors, in order.
            alignment: Each tensor begins at a multiple of this behind the header; zeros fill the gaps.
        """
        self.name = name
        self.specs = specs
        self.head = head
        self._starts = starts_of(specs, alignment)
        end = self._starts[-1] + specs[-1].n_bytes if specs else 0
        self.n_bytes = len(head) + end

    def write(self, out: BinaryIO, feed: Feed) -> None:
        out.write(self.head)
        end = 0
        for spec, start in zip(self.specs, self._starts, strict=True):
            if start > end:
                out.write(bytes(start - end))
            for piece in feed.pieces(spec):
                out.write(piece)
            end = start + spec.n_bytes


def starts_of(specs: Sequence[Spec], alignment: int = 1) -> list[int]:
    """Return the position of each tensor in a row of tensors, counted from the first."""
    starts: list[int] = []
    end = 0
    for spec in specs:
        starts.append(end + -end % alignment)
        end = starts[-1] + spec.n_bytes
    return starts


def strides_of(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of C order in elements, as torch counts them: a side of 0 counts as 1."""
    strides: list[int] = []
    stride = 1
    for side in reversed(shape):
        strides.append(stride)
        stride *= max(side, 1)
    return strides[::-1]


def texts_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Turn metadata into texts, sorted by key: a text stays as it is, any other value becomes JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
        for name, value in sorted(metadata.items())
    }


def check_dtypes(specs: Iterable[Spec], known: Iterable[str], what: str) -> None:
    """Refuse tensors of dtypes that a format lacks, each by its name.

    Args:
        specs: The tensors.
        known: The format's dtypes.
        what: The format, for the message.

    Raises:
        ValueError: There are such tensors.
    """
    known = frozenset(known)
    refuse([(spec, f"has the dtype {spec.dtype}") for spec in specs if spec.dtype not in known], what)


def refuse(tensors: Sequence[tuple[Spec, str]], what: str) -> None:
    """Refuse tensors that a format cannot hold.

    Args:
        tensors: The tensors, each with the reason.
        what: The format.

    Raises:
        ValueError: There are any; the message names them all.
    """
    if tensors:
        listed = ", ".join(f"{spec.name!r} {why}" for spec, why in tensors)
        raise ValueError(f"{what} cannot hold {len(tensors)} of these tensors: {listed}")


def pad(header: bytes, alignment: int) -> bytes:
    """Lengthen a header with spaces to a multiple."""
    return header + b" " * (-len(header) % alignment)


def check_header(header: bytes, what: str) -> None:
    """Refuse a header that no reader of the format takes.

    Raises:
        ValueError: It is too long.
    """
    if len(header) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"a {what} header of {len(header)} bytes is too long, {_MAX_HEADER_BYTES} are allowed: write shards, or "
            "fewer or shorter names and metadata"
        )
