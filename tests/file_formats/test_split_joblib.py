"""Files of joblib, which have their arrays between the opcodes of a pickle."""

from __future__ import annotations

import io
import pickle
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor

from tensorcas_mlflow.file_formats import PlainBytes
from tests.file_formats.parts import joined, kinds, take_apart, tensors


def dumped(value: Any, **settings: Any) -> bytes:
    out = io.BytesIO()
    joblib.dump(value, out, **settings)
    return out.getvalue()


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_file_of_joblib_gives_its_arrays(protocol: int) -> None:
    array = np.arange(900.0)
    columns = np.asfortranarray(np.arange(1200.0).reshape(30, 40))
    data = dumped({"a": array, "small": np.arange(3), "columns": columns, "last": 2 * array}, protocol=protocol)
    found = tensors(data)

    assert joined(take_apart(data)) == data
    assert {name: (tensor.dtype, tensor.shape) for name, (tensor, _) in found.items()} == {
        "a": ("float64", (900,)),
        "columns": ("float64", (40, 30)),
        "last": ("float64", (900,)),
    }
    assert found["columns"][1] == columns.T.tobytes()
    assert found["last"][1] == (2 * array).tobytes()


def test_arrays_inside_and_after_a_joblib_array_of_objects_are_found() -> None:
    objects = np.empty(3, dtype=object)
    objects[:] = [np.arange(900.0), {"inner": np.arange(901.0)}, None]
    data = dumped({"objects": objects, "last": np.arange(902.0)})

    assert joined(take_apart(data)) == data
    assert {name: tensor.shape for name, (tensor, _) in tensors(data).items()} == {
        "objects.0": (900,),
        "objects.0.inner": (901,),
        "last": (902,),
    }


def test_a_forest_dumped_by_joblib_has_the_tensors_that_it_has_pickled() -> None:
    x = np.random.default_rng(7).normal(size=(1200, 5))
    forest = RandomForestRegressor(3, random_state=0).fit(x, x.sum(axis=1))
    in_pickle = tensors(pickle.dumps(forest))
    in_joblib = tensors(dumped(forest))

    assert in_joblib == in_pickle


def test_a_file_that_joblib_compressed_is_plain() -> None:
    assert kinds(dumped({"a": np.arange(900.0)}, compress=3)) == [PlainBytes]
