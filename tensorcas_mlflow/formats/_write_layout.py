"""What a file is to hold, known before any of it is written, and the tensors that flow into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.formats._listing import Tensors
from tensorcas_mlflow.tensor import Spec

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors that are written, and those that there are in all."""


class Feed:
    """The bytes of tensors, handed out one tensor after the other and counted.

    What gives the tensors is not trusted: a file with fewer bytes than its header says must never get its name.
    """

    def __init__(self, tensors: Tensors, specs: Sequence[Spec], progress: Progress | None) -> None:
        """Begin to read tensors.

        Args:
            tensors: What gives them.
            specs: Which, in the order in which `pieces` is going to be asked for them.
            progress: Told how far it has come, if anybody wants to know.
        """
        self._stream = tensors.stream([spec.name for spec in specs])
        self._progress = progress
        self._n_all = sum(spec.n_bytes for spec in specs)
        self._n_done = 0

    def pieces(self, spec: Spec) -> Iterator[memoryview]:
        """Give the next tensor's bytes, all of them.

        Raises:
            CorruptError: What gives the tensors gives other bytes, or too few.
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
    """One file that is to be written: which tensors it holds, and how long it gets."""

    name: str
    """What it is called in a folder; a file by itself has whatever name it is given."""
    n_bytes: int
    """Its size."""
    specs: Sequence[Spec]
    """Its tensors, in the order in which they are written."""

    @abstractmethod
    def write(self, out: BinaryIO, feed: Feed) -> None:
        """Write it.

        Args:
            out: An empty file that can be written at any place.
            feed: Gives the tensors in the order of ``specs``.
        """


class FlatLayout(FileLayout):
    """A header, then the tensors' bytes."""

    def __init__(self, name: str, *, head: bytes = b"", specs: Sequence[Spec] = (), alignment: int = 1) -> None:
        """Lay a file out.

        Args:
            name: See `FileLayout.name`.
            head: What comes first.
            specs: The tensors, in their order.
            alignment: Behind the header each begins at a multiple of this, with zeros before it.
        """
        self.name = name
        self.specs = specs
        self._head = head
        self._starts = starts_of(specs, alignment)
        end = self._starts[-1] + specs[-1].n_bytes if specs else 0
        self.n_bytes = len(head) + end

    def write(self, out: BinaryIO, feed: Feed) -> None:
        out.write(self._head)
        end = 0
        for spec, start in zip(self.specs, self._starts, strict=True):
            if start > end:
                out.write(bytes(start - end))
            for piece in feed.pieces(spec):
                out.write(piece)
            end = start + spec.n_bytes


def starts_of(specs: Sequence[Spec], alignment: int = 1) -> list[int]:
    """Say where each of some tensors begins that lie one after the other, counted from where the first one does."""
    starts: list[int] = []
    end = 0
    for spec in specs:
        starts.append(end + -end % alignment)
        end = starts[-1] + spec.n_bytes
    return starts


def strides_of(shape: tuple[int, ...]) -> list[int]:
    """Give the strides of C order in elements, as torch counts them: a side of 0 counts as one of 1."""
    strides: list[int] = []
    stride = 1
    for side in reversed(shape):
        strides.append(stride)
        stride *= max(side, 1)
    return strides[::-1]


def check_dtypes(specs: Iterable[Spec], known: Iterable[str], what: str) -> None:
    """Refuse tensors of dtypes that a format does not have, each by its name.

    Args:
        specs: The tensors.
        known: Names of the dtypes that it has.
        what: Who does not have them, for the error.

    Raises:
        ValueError: There are such tensors.
    """
    known = frozenset(known)
    refuse([(spec, f"has the dtype {spec.dtype}") for spec in specs if spec.dtype not in known], what)


def refuse(tensors: Sequence[tuple[Spec, str]], what: str) -> None:
    """Refuse tensors that a format cannot hold.

    Args:
        tensors: Which, and what each has or is.
        what: Who cannot hold them.

    Raises:
        ValueError: There are any; the message names them all.
    """
    if tensors:
        listed = ", ".join(f"{spec.name!r} {why}" for spec, why in tensors)
        raise ValueError(f"{what} cannot hold {len(tensors)} of these tensors: {listed}")


def pad(header: bytes, alignment: int) -> bytes:
    """Lengthen a header with spaces to a multiple."""
    return header + b" " * (-len(header) % alignment)
