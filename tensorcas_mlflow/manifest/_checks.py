"""What is checked of all rows of a manifest at once: names and shapes from a store are hostile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow._arrow import text_buffers
from tensorcas_mlflow.chunking import Offsets, RowCuts, offsets_of
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_TENSOR_BYTES, NOT_IN_NAMES

_NOT_IN_NAMES = np.frombuffer(NOT_IN_NAMES.encode(), dtype=np.uint8)
_MAX_EXACT_BITS = 62
"""Products of no more bits than these fit an int64."""


def check_names(names: Any) -> None:
    """See that texts are names of tensors, as `tensor.Spec` has them; empty ones are.

    Args:
        names: A pyarrow array of valid UTF-8.

    Raises:
        FormatError: One is none.
    """
    offsets, data = text_buffers(names)
    if np.diff(offsets).max(initial=0) > MAX_NAME_BYTES:
        raise FormatError(f"a manifest has a name of more than {MAX_NAME_BYTES} bytes")
    # Hardly any name has a control character at all, and the least byte of all names is found in one pass.
    if len(data) and data.min() <= _NOT_IN_NAMES.max() and np.isin(data, _NOT_IN_NAMES).any():
        raise FormatError("a manifest has a name with a zero byte or a line break")


def row_sizes(shape_at: Offsets, sides: Offsets, itemsizes: Offsets) -> Offsets:
    """Say how many bytes each row has.

    Args:
        shape_at: Where the sides of each row begin, and, last, where those of the last one end.
        sides: The sides of all rows, one after the other.
        itemsizes: For each row the size of an element in bytes.

    Raises:
        FormatError: A row has a negative side, too many of them, or more bytes than can be. An empty row may not have
            impossible sides either: numpy refuses to make it.
    """
    n_dimensions = np.diff(shape_at)
    most = int(n_dimensions.max(initial=0))
    if most > MAX_DIMENSIONS:
        raise FormatError(f"a manifest has a tensor of {most} dimensions, more than {MAX_DIMENSIONS}")
    least, greatest = int(sides.min(initial=1)), int(sides.max(initial=1))
    if least < 0:
        raise FormatError("a manifest has a tensor of a negative shape")
    factors = np.maximum(sides, 1) if least == 0 else sides
    if most * greatest.bit_length() + int(itemsizes.max(initial=1)).bit_length() > _MAX_EXACT_BITS:
        # What does not fit 64 bits wraps round, and would look small.
        about = _products(shape_at, n_dimensions, factors.astype(np.float64), itemsizes.astype(np.float64))
        if about.max() > 2 * MAX_TENSOR_BYTES:
            raise FormatError("a manifest has a tensor of an impossible shape")
    sizes: Offsets = _products(shape_at, n_dimensions, factors, itemsizes)
    if sizes.max(initial=0) > MAX_TENSOR_BYTES:
        raise FormatError("a manifest has a tensor of an impossible shape")
    if least == 0:
        sizes[np.searchsorted(shape_at, np.flatnonzero(sides == 0), side="right") - 1] = 0
    return sizes


def _products(shape_at: Offsets, n_dimensions: Offsets, factors: Any, itemsizes: Any) -> Any:
    """Multiply what each row has of factors with each other and with its item size."""
    products = itemsizes.copy()
    most = int(n_dimensions.max(initial=0))
    if len(factors) == most * len(products):
        for dimension in range(most):
            products *= factors[dimension::most]
        return products
    rows = np.arange(len(products))
    for dimension in range(most):
        rows = rows[n_dimensions[rows] > dimension]
        products[rows] *= factors[shape_at[rows] + dimension]
    return products


def row_cuts(cuts: Sequence[Any]) -> RowCuts | None:
    """Put the cuts of rows together, each an int64 array or None; None if no row has any."""
    given = np.array([each is not None for each in cuts], dtype=bool)
    if not given.any():
        return None
    values = [np.asarray(each, dtype=np.int64) for each in cuts if each is not None]
    counts = np.zeros(len(cuts), dtype=np.int64)
    counts[given] = [len(each) for each in values]
    return RowCuts(given=given, at=offsets_of(counts), values=np.concatenate(values))
