"""Tensors and plain bytes in the store's view: a name, a dtype, a shape, and bytes to cut into chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.dtypes import DType, dtype_name, parse_dtype
from tensorcas_mlflow.errors import FormatError

MAX_NAME_BYTES = 4096
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 1 << 56
NOT_IN_NAMES = "\0\n\r"
ALIGNMENT = 64
"""Alignment of arrays in memory, in bytes, as in frameworks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Name, dtype and shape of a manifest's row. Checked once, here: names and shapes from a store may be hostile."""

    name: str
    dtype: str | None
    """The dtype's name, or None for a stretch of plain bytes."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _is_name(self.name) or not 0 <= len(self.shape) <= MAX_DIMENSIONS:
            raise FormatError(f"not a tensor's name and shape: {self.name[:80]!r}, {len(self.shape)} dimensions")
        # numpy refuses an empty array with impossible sides too.
        sides = math.prod(side for side in self.shape if side)
        if min(self.shape, default=0) < 0 or sides * self.numpy_dtype.itemsize > MAX_TENSOR_BYTES:
            raise FormatError(f"tensor {self.name!r} has an impossible shape")
        if self.dtype is None and len(self.shape) != 1:
            raise FormatError(f"the bytes {self.name!r} must have one dimension")

    @property
    def numpy_dtype(self) -> DType:
        """Dtype of the row as an array; plain bytes are uint8."""
        return np.dtype(np.uint8) if self.dtype is None else _dtype_called(self.dtype)

    @property
    def n_bytes(self) -> int:
        """Size of the row's bytes."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @classmethod
    def of(cls, name: str, array: Array) -> Spec:
        """Describe an array.

        Raises:
            ValueError: The name is empty, too long or unprintable, or the dtype cannot be stored.
        """
        if not name or not _is_name(name):
            raise ValueError(f"not a tensor's name: {name[:80]!r} (1 to {MAX_NAME_BYTES} bytes, no NUL, no newline)")
        if name == SKELETON:
            if array.dtype != np.uint8 or array.ndim != 1:
                raise ValueError(f"{SKELETON} must be 1-d uint8, not {array.ndim}-d {array.dtype}")
            return cls(name=name, dtype=None, shape=array.shape)
        return cls(name=name, dtype=dtype_name(array.dtype), shape=array.shape)


@lru_cache(maxsize=64)
def _dtype_called(name: str) -> DType:
    return parse_dtype(name)


def _is_name(name: str) -> bool:
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    return n_bytes <= MAX_NAME_BYTES and not any(character in name for character in NOT_IN_NAMES)


def bytes_of(array: Array) -> memoryview:
    """View an array's elements in C order as bytes; copy them only if they are in another order."""
    contiguous = np.ascontiguousarray(array)
    if contiguous.size == 0:
        return memoryview(b"")
    return contiguous.reshape(-1).view(np.uint8).data


def pieces_of(data: memoryview, ends: Any) -> list[memoryview]:
    """Cut bytes at ascending offsets, the last one their size."""
    return [data[start:stop] for start, stop in pairwise([0, *ends.tolist()])]


def empty_array(spec: Spec) -> Array:
    """Allocate an array at a multiple of 64 bytes, as the frameworks do.

    Their kernels choose by the address: at another alignment, a model would predict other last digits.
    """
    if spec.n_bytes == 0:
        return np.empty(spec.shape, dtype=spec.numpy_dtype)
    return aligned_bytes(spec.n_bytes).view(spec.numpy_dtype).reshape(spec.shape)


def aligned_bytes(n_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate bytes at a multiple of `ALIGNMENT`."""
    block = np.empty(n_bytes + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + n_bytes]
