"""XGBoost's binary models (``.ubj``): one stretch of skeleton, but for the long arrays in it.

Source: Universal Binary JSON, draft 12 (ubjson.org), as XGBoost writes it (``UBJWriter`` in its
``src/common/json.cc``): keys and lengths are ``L`` and 8 bytes, arrays of numbers are ``[$<type>#L<length>`` and the
numbers, big-endian.

A model that grows by a tree grows in the middle, and cuts chosen by content keep the trees it had, the short arrays of
those trees with them. A row of its own is for what is long: the weights of a linear model, the nodes of a deep tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tensorcas_mlflow.containers._parts import Part, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import Tape

_WINDOW_BYTES = 1 << 20
_MIN_TENSOR_BYTES = 8 << 10
"""With half of this, the rows of trees 13 deep cost more than they save; with twice this, few such trees have any."""

_BEGINNING = re.compile(rb"\{L\0{7}(?:\x06Config|\x07learner|\x07version)[{\[L]")
_ARRAY = re.compile(rb"\[\$([iUIlLdD])#L(.{8})", re.DOTALL)
_KEY = re.compile(rb"[A-Za-z0-9_.-]{1,64}\Z")
_MAX_KEY_BYTES = 64
_BEFORE_ARRAY_BYTES = _MAX_KEY_BYTES + 13
_MAX_ELEMENTS = 1 << 40
UBJSON_DTYPES = {
    b"i": ("int8", 1),
    b"U": ("uint8", 1),
    b"I": (">int16", 2),
    b"l": (">int32", 4),
    b"L": (">int64", 8),
    b"d": (">float32", 4),
    b"D": (">float64", 8),
}


def is_xgboost(head: memoryview) -> bool:
    """Tell whether a file begins as XGBoost's binary models do: a model, or a booster as it is pickled."""
    return _BEGINNING.match(head) is not None


def split_xgboost(tape: Tape) -> Iterator[Part]:
    """Announce the parts of such a file, to its end.

    Arrays are found by what they begin with, and the tree around them is not walked.
    """
    while not tape.is_at_end():
        window = tape.peek(_WINDOW_BYTES)
        told = 0
        for start, tensor in _long_arrays(window):
            yield Skeleton(n_bytes=start - told)
            yield tensor
            told = start + tensor.n_bytes
        # What the next array begins with may lie across the window's end.
        rest = len(window) - told - (_BEFORE_ARRAY_BYTES if len(window) == _WINDOW_BYTES else 0)
        if rest > 0:
            yield Skeleton(n_bytes=rest)


def _long_arrays(window: memoryview) -> Iterator[tuple[int, Tensor]]:
    """Find the long arrays that begin in a window, each with the place of its first number."""
    at = 0
    while match := _ARRAY.search(window, at):
        dtype, width = UBJSON_DTYPES[match[1]]
        n_elements = int.from_bytes(match[2], "big")
        at = match.end()
        if n_elements > _MAX_ELEMENTS:
            continue  # by accident in other bytes, or damaged
        if n_elements * width >= _MIN_TENSOR_BYTES:
            key = _KEY.search(bytes(window[max(0, match.start() - _MAX_KEY_BYTES) : match.start()]))
            name = key[0].decode() if key else ""
            yield at, Tensor(n_bytes=n_elements * width, name=name, dtype=dtype, shape=(n_elements,))
        at += n_elements * width
