"""What a header says of one tensor, in the formats whose header names every tensor and where it lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Part, Skeleton, Tensor
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS, MAX_TENSOR_BYTES


class TensorFact(NamedTuple):
    """One tensor. Its shape and its dtype, where it has one, fit its size."""

    name: str
    kind: str
    """What the file calls its dtype."""
    dtype: str | None
    """A name of `tensorcas_mlflow.dtypes`; None where there is none for it."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    """One past the last."""


def check_shape(name: str, shape: Sequence[int], item_bytes: int, n_bytes: int) -> None:
    """Check that a tensor of this shape can be, and has this size.

    Raises:
        FormatError: It has not.
    """
    # Sides of an empty tensor may not be impossible either: numpy refuses to make it.
    if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise FormatError(f"tensor {name[:80]!r} has an impossible shape")
    if math.prod(shape) * item_bytes != n_bytes:
        raise FormatError(f"tensor {name[:80]!r} has {n_bytes} bytes, which is not the size of its shape and dtype")
    if not n_bytes and math.prod(filter(None, shape)) * item_bytes > MAX_TENSOR_BYTES:
        raise FormatError(f"tensor {name[:80]!r} has an impossible shape")


@lru_cache(maxsize=64)
def item_bytes(dtype: str) -> int:
    """Get the size of one element."""
    return parse_dtype(dtype).itemsize


def in_order(facts: Iterable[TensorFact]) -> list[TensorFact]:
    """Sort tensors by where they lie.

    Raises:
        FormatError: There are holes between them, or some of them share bytes, or two of them have one name.
    """
    ordered = sorted(facts, key=itemgetter(4, 5))
    begins = [fact.begin for fact in ordered]
    ends = [0, *(fact.end for fact in ordered)]
    if begins != ends[:-1]:
        fact, end = next((fact, end) for fact, end in zip(ordered, ends, strict=False) if fact.begin != end)
        what = "is a hole before" if fact.begin > end else "are bytes of another tensor in"
        raise FormatError(f"there {what} tensor {fact.name[:80]!r}")
    if len({fact.name for fact in ordered}) < len(ordered):
        raise FormatError("two tensors have one name")
    return ordered


def parts_of(facts: Iterable[TensorFact]) -> Iterator[Part]:
    """Announce tensors that lie one after the other."""
    for fact in facts:
        n_bytes = fact.end - fact.begin
        if n_bytes >= MIN_TENSOR_BYTES:
            shape = fact.shape if fact.dtype else None
            yield Tensor(n_bytes=n_bytes, name=fact.name, dtype=fact.dtype, shape=shape)
        elif n_bytes:
            yield Skeleton(n_bytes=n_bytes)
