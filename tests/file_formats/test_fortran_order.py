"""Arrays in Fortran order, in every format that writes them raw: rows of a store with the shape of the transpose."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import scipy.io

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Row
from tensorcas_mlflow.store import Store

Array = np.ndarray[Any, np.dtype[Any]]

WRITERS: dict[str, Callable[[Path, Array], Any]] = {
    "npy": lambda path, array: np.save(path.with_suffix(".npy"), array),
    "npz": lambda path, array: np.savez(path.with_suffix(".npz"), a=array),
    "mat": lambda path, array: scipy.io.savemat(path.with_suffix(".mat"), {"a": array}),
    "mat, of an array in C order": lambda path, array: scipy.io.savemat(
        path.with_suffix(".mat"), {"a": np.ascontiguousarray(array)}
    ),
    "joblib": lambda path, array: joblib.dump({"a": array}, path),
    "pickle, protocol 3": lambda path, array: path.write_bytes(pickle.dumps({"a": array}, 3)),
    "pickle, protocol 5": lambda path, array: path.write_bytes(pickle.dumps({"a": array}, 5)),
}


def stored(store: Store, folder: Path) -> list[Row]:
    """Store the only file of a folder, and return its rows of tensors."""
    [path] = folder.iterdir()
    with store.write_file(path) as pending:
        ref = pending.commit(RefTarget(path=f"{folder.name}/{path.name}"))
    return [row for row in store.manifest(ref).rows if row.spec.dtype is not None]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
@pytest.mark.parametrize("shape", [(60, 50), (7, 20, 30), (3, 4, 10, 20)])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_an_array_in_fortran_order_is_a_row_of_its_transpose(
    write: Callable[[Path, Array], Any], shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    store = Store.init(tmp_path / "store")
    array = np.asfortranarray(np.random.default_rng(0).normal(scale=1000, size=shape).astype(dtype))
    (tmp_path / "transpose").mkdir()
    (tmp_path / "file").mkdir()
    np.save(tmp_path / "transpose/a.npy", np.ascontiguousarray(array.T))
    write(tmp_path / "file/a", array)
    [transpose] = stored(store, tmp_path / "transpose")
    [row] = stored(store, tmp_path / "file")

    assert (row.spec.dtype, row.spec.shape) == (dtype, shape[::-1])
    assert (row.digests == transpose.digests).all()
