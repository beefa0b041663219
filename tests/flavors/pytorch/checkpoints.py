"""Arrays and checkpoints for the tests of filling parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_flavors.pytorch import PyTorchAdapter, _in_place
from tensorcas_mlflow.adapter import Array, NotFilled
from tensorcas_mlflow.base.tensors import Spec
from tests.flavors.pytorch.models import ADAPTER, stored

BOTH = [
    "bool",
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
EXTENSIONS = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
SHAPES: list[tuple[int, ...]] = [(), (0,), (2, 0, 3), (5,), (3, 4), (2, 1, 3)]


class Checkpoint:
    """Tensors that are read when they are asked for, and what was asked for."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = dict(arrays)
        self.specs = {name: Spec.of(name, array) for name, array in self.arrays.items()}
        self.into: list[str] = []
        self.apart: list[list[str]] = []
        self.names: list[str] = []

    @classmethod
    def of(cls, model: Any) -> Checkpoint:
        return cls({name: array for name, array in stored(model).items() if name != "__skeleton__"})

    def read(self, names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        assert len(set(names)) == len(names)
        self.names += names
        if out is None:
            self.apart.append(list(names))
            return {name: self.arrays[name].copy() for name in names}
        for name in names:
            assert out[name].flags.carray
            assert (out[name].dtype, out[name].shape) == (self.arrays[name].dtype, self.arrays[name].shape)
            out[name][...] = self.arrays[name]
        self.into += names
        return out

    def fill(self, model: Any, **options: Any) -> NotFilled:
        return ADAPTER.fill_weights(model, self.specs, self.read, **options)


def read_into_live_tensors(monkeypatch: pytest.MonkeyPatch) -> list[Checkpoint]:
    """Let `reconstruct` with an original call `Adapter.fill`, for rows of any size.

    Returns:
        The checkpoint of each call.
    """
    monkeypatch.setattr(_in_place, "LEAST_BYTES", 0)
    monkeypatch.setattr(_in_place, "LEAST_ROW_BYTES", 1)
    made: list[Checkpoint] = []
    rebuild = PyTorchAdapter.reconstruct

    def reconstruct(self: PyTorchAdapter, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        if original is None:
            return rebuild(self, tensors, **options)
        made.append(Checkpoint(tensors))
        return self.fill(original, made[-1].specs, made[-1].read, check=list, **options)

    monkeypatch.setattr(PyTorchAdapter, "reconstruct", reconstruct)
    return made


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def some_array(dtype: str, shape: tuple[int, ...]) -> Array:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = int(np.prod(shape)) * kind.itemsize
    low = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    return low.view(kind).reshape(shape)
