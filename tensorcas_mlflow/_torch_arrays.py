"""Tensors as arrays over the same memory, and placeholders that take none."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError

_SMALL_BYTES = 1 << 16


def placeholder(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor whose elements nobody may read: a large one takes addresses and no memory."""
    sides = tuple(shape)
    n_bytes = math.prod(sides) * dtype.itemsize
    if n_bytes <= _SMALL_BYTES:
        return torch.zeros(sides, dtype=dtype)
    return torch.frombuffer(_addresses(n_bytes), dtype=torch.uint8).view(dtype).view(sides)


def array_placeholder(dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return an array like `placeholder`."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(_addresses(math.prod(shape) * np.dtype(dtype).itemsize), dtype=dtype).reshape(shape)


def _addresses(n_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, n_bytes, flags=flags)


def address_of(array: Array) -> int:
    """Return the address of an array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """Return the elements of a tensor as an array; it shares the memory of a contiguous tensor of this machine."""
    kind = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = parse_dtype(kind)
    except FormatError:
        dtype = None
    if dtype is None or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"the tensor {name!r} has the dtype {kind} and the layout {tensor.layout}, and a store keeps dense tensors "
            "of numpy's and ml_dtypes' dtypes: leave it out of the state, or save it as another dtype"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Array = np.frombuffer(memoryview(b""), dtype=dtype) if plain.numel() == 0 else None  # type: ignore[assignment]
    if array is None:
        array = plain.reshape(-1).view(torch.uint8).numpy().view(dtype)
    return array.reshape(tuple(tensor.shape))
