"""Arrays of every kind come back bit for bit, with their memory order and flags."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.tensors import Spec

ADAPTER = GenericAdapter()


class Subclass(np.ndarray):
    pass


def round_trip(model: Any) -> Any:
    tensors = ADAPTER.extract(model)
    rows = {name: np.empty(row.shape, dtype=Spec.of(name, row).numpy_dtype) for name, row in tensors.items()}
    for name, row in tensors.items():
        rows[name][...] = row
    return ADAPTER.reconstruct(rows)


def described(array: Any) -> tuple[Any, ...]:
    """All that is to come back of an array; pickle itself loses some read-only flags and the byte order of times."""
    dtype = (array.dtype, array.dtype.metadata, array.dtype.isalignedstruct, array.dtype.fields)
    elements = array.tolist() if array.dtype.hasobject else array.tobytes()
    return type(array), dtype, array.shape, array.flags.writeable, elements


RNG = np.random.default_rng(0)
BASE = RNG.normal(size=(12, 10, 8))
ALIGNED = np.zeros(50, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True))
PACKED = np.ones(50, dtype=[("a", "u1"), ("b", ">f4", (2,))])
TITLED = np.ones(50, dtype=[(("a title", "a"), "f8")])

ARRAYS: dict[str, Array] = {
    "C order": BASE,
    "Fortran order": np.asfortranarray(BASE),
    "transposed": BASE.transpose(1, 0, 2),
    "transposed with gaps": BASE.transpose(1, 0, 2)[:, ::2],
    "strided": BASE[:, ::2],
    "backwards": BASE[::-1],
    "broadcast": np.broadcast_to(np.arange(8.0), (100, 8)),
    "one column": np.asfortranarray(BASE.reshape(-1, 1)),
    "big-endian": BASE.astype(">f8"),
    "big-endian times": np.arange(100).astype(">M8[s]"),
    "times": np.arange(100).astype("M8[ns]"),
    "durations": np.arange(100).astype("m8[25us]"),
    "strings": np.array(["é", "abc"] * 50),
    "bytes": np.array([b"a", b"abc"] * 90),
    "bools": np.arange(300) % 3 == 0,
    "halves": BASE.astype(np.float16),
    "complex": BASE * 1j,
    "long doubles": BASE.astype(np.longdouble),
    "bfloat16": BASE.astype(ml_dtypes.bfloat16),
    "NaN payloads": np.array([0x7FF8000000000001, 0xFFF0000000000001] * 40, dtype=np.uint64).view(np.float64),
    "records": PACKED,
    "aligned records": ALIGNED,
    "records with titles": TITLED,
    "opaque": np.ones(50, dtype="V16"),
    "0-d": np.array("x" * 300),
    "with metadata": np.zeros(100, dtype=np.dtype("f8", metadata={"unit": "m"})),
    "objects": np.array([None, "a", 3] * 30, dtype=object),
    "variable strings": np.array(["a", "b" * 40] * 60, dtype=np.dtypes.StringDType()),
    "many dimensions": np.zeros((1,) * 30 + (99,)),
    "empty": np.empty((3, 0, 5), order="F"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_bit_for_bit_in_the_memory_order_of_pickle(name: str) -> None:
    array = ARRAYS[name]

    again = round_trip({"w": array})["w"]

    if array.size:
        assert again.strides == pickle.loads(pickle.dumps(array, protocol=5)).strides
    assert described(again) == described(array)
    assert again.flags.aligned


@pytest.mark.parametrize("name", ["C order", "Fortran order", "strided", "aligned records", "big-endian times"])
def test_a_read_only_array_comes_back_read_only(name: str) -> None:
    array = ARRAYS[name].copy(order="K")
    array.flags.writeable = False

    again = round_trip([array, array.copy()])

    assert [part.flags.writeable for part in again] == [False, True]


@pytest.mark.parametrize(
    "array",
    [
        np.ones(99).view(Subclass),
        np.ones(999).view(Subclass),
        np.ma.masked_array(np.arange(999), np.arange(999) % 2 == 0),
        np.rec.array([(i, float(i)) for i in range(99)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=lambda array: type(array).__name__,
)
def test_subclasses_of_arrays_come_back(array: Any) -> None:
    again = round_trip([array])[0]

    assert described(again) == described(array)
    assert np.array_equal(np.ma.getmaskarray(again), np.ma.getmaskarray(array))
