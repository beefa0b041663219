"""What splitters say of a file: which stretch comes next, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.tensor import MAX_NAME_BYTES

MIN_TENSOR_BYTES = 64
"""A smaller tensor stays in the skeleton: a row of its own would cost more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What is left of a file without its tensors: headers, pickles, texts. It is cut into chunks by its content."""

    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Bytes that nobody understands, or that are compressed; they are cut at fixed distances."""

    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """The elements of one tensor, without gaps, in C order of ``shape``. A row of its own in the manifest."""

    n_bytes: int
    """May be a beginning only, with `More` to follow."""
    name: str = ""
    """As its users know it, such as ``encoder.weight``; "" where the file gives it none. Made unique by the caller."""
    dtype: str | None = None
    """A name of `tensorcas_mlflow.dtypes`, or None where the file does not say it, or not yet."""
    shape: tuple[int, ...] | None = None
    """None: one dimension, as long as the bytes that come."""
    cuts: Sequence[int] | None = None
    """Byte offsets at which a chunk ends, the last one the tensor's size; None for the fixed grid."""

    def __post_init__(self) -> None:
        # What a file calls its tensors may be anything; a name is for finding one, and no reason to refuse the file.
        if not self.name.isprintable() or len(self.name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            object.__setattr__(self, "name", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """The tensor just announced goes on: for a splitter that learns where one ends only when it is there."""

    n_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a file says of tensors that have passed, where its table comes after them. It has no bytes of its own."""

    tensors: Mapping[str, Tensor]
    """By the name with which a tensor was announced, what should have been announced. Without a dtype it has a new name
    only."""


Part = Skeleton | Plain | Tensor | More

Splitter = Callable[[Tape], Iterator[Part | Learned]]
"""Announces the parts of a file one after the other, from where the tape stands.

When it is resumed, whoever called it has taken the bytes of the part it has announced from the tape; a splitter itself
only peeks. It may announce more bytes than there are: the file is truncated then. It need not go to the end of the
file, and raises `FormatError` (or what `split` takes for one) for a file that is not what it thought; what is left is
plain bytes then, and nothing is lost. It imports nothing that a file names, and calls nothing.
"""
