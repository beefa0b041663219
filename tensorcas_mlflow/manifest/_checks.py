"""Checks of all rows of a manifest at once: names and shapes from a store may be hostile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow._arrow import text_buffers
from tensorcas_mlflow.chunking import Offsets, RowCuts, blocks_of, offsets_of
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_TENSOR_BYTES, NOT_IN_NAMES

_NOT_IN_NAMES = np.frombuffer(NOT_IN_NAMES.encode(), dtype=np.uint8)


def check_names(names: Any) -> None:
    """Check that texts are names of tensors, by the rules of `tensor.Spec`; empty ones are allowed.

    Args:
        names: A pyarrow array of valid UTF-8.

    Raises:
        FormatError: One is no such name.
    """
    offsets, data = text_buffers(names)
    if step_range(offsets)[1] > MAX_NAME_BYTES:
        raise FormatError(f"a manifest has a name of more than {MAX_NAME_BYTES} bytes")
    # Hardly any name contains a control character, and one pass finds the least byte of all names.
    if len(data) and data.min() <= _NOT_IN_NAMES.max() and np.isin(data, _NOT_IN_NAMES).any():
        raise FormatError("a manifest has a name with a zero byte or a line break")


def step_range(offsets: Any) -> tuple[int, int]:
    """Return the least and the greatest difference between neighbours of ascending offsets; zeros if there is none."""
    least, greatest = [], []
    for block in blocks_of(len(offsets) - 1):
        steps = offsets[block.start + 1 : block.stop + 1] - offsets[block]
        least.append(int(steps.min()))
        greatest.append(int(steps.max()))
    return min(least, default=0), max(greatest, default=0)


def check_shapes(shape_at: Any, sides: Offsets, itemsizes: Offsets) -> None:
    """Check that shapes are possible.

    Args:
        shape_at: Start of each row's sides, and, last, the end of the last row's.
        sides: The sides of all rows, one after the other.
        itemsizes: For each row the size of an element in bytes.

    Raises:
        FormatError: A row has a negative side, too many sides, or an impossible number of bytes. Empty rows must not
            have impossible sides either: numpy refuses to build them.
    """
    _, most = step_range(shape_at)
    if most > MAX_DIMENSIONS:
        raise FormatError(f"a manifest has a tensor of {most} dimensions, more than {MAX_DIMENSIONS}")
    if sides.min(initial=0) < 0:
        raise FormatError("a manifest has a tensor of a negative shape")
    n_bits = most * int(sides.max(initial=1)).bit_length() + int(itemsizes.max(initial=1)).bit_length()
    if n_bits < MAX_TENSOR_BYTES.bit_length():
        return  # no product of so many such numbers overflows
    factors = np.maximum(sides, 1)
    # A product beyond 64 bits wraps around, and would look small.
    about = row_sizes(shape_at, factors.astype(np.float64), itemsizes.astype(np.float64))
    if about.max() > 2 * MAX_TENSOR_BYTES or row_sizes(shape_at, factors, itemsizes).max() > MAX_TENSOR_BYTES:
        raise FormatError("a manifest has a tensor of an impossible shape")


def row_sizes(shape_at: Any, sides: Any, itemsizes: Any) -> Any:
    """Return the size of each row in bytes, for arguments checked by `check_shapes`.

    The first of ``shape_at`` need not be 0, so the function serves some consecutive rows too.
    """
    least, most = step_range(shape_at)
    sizes = itemsizes.copy()
    if least == most:
        for dimension in range(most):
            sizes *= sides[int(shape_at[0]) + dimension : int(shape_at[-1]) : most]
        return sizes
    n_dimensions = np.diff(shape_at)
    rows = np.arange(len(sizes))
    for dimension in range(most):
        rows = rows[n_dimensions[rows] > dimension]
        sizes[rows] *= sides[shape_at[rows] + dimension]
    return sizes


def row_cuts(cuts: Sequence[Any]) -> RowCuts | None:
    """Combine the cuts of rows, each an int64 array or None; None if no row has any."""
    given = np.array([each is not None for each in cuts], dtype=bool)
    if not given.any():
        return None
    values = [np.asarray(each, dtype=np.int64) for each in cuts if each is not None]
    counts = np.zeros(len(cuts), dtype=np.int64)
    counts[given] = [len(each) for each in values]
    return RowCuts(given=given, at=offsets_of(counts), values=np.concatenate(values))
