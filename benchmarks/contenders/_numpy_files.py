"""Formats of numpy and Python themselves. Neither knows bfloat16, so it is stored as unsigned 16-bit numbers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.contenders._contender import Contender
from benchmarks.data import Array, Case

_MARK = "bfloat16:"


def plain_arrays(case: Case) -> dict[str, Array]:
    """Return arrays of numpy's own dtypes; their names mark the bfloat16 ones."""
    return {
        f"{_MARK}{name}" if array.dtype == ml_dtypes.bfloat16 else name: array.view(np.uint16)
        if array.dtype == ml_dtypes.bfloat16
        else array
        for name, array in case.arrays.items()
    }


def from_plain(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Reverse `plain_arrays`."""
    return {
        name.removeprefix(_MARK): array.view(ml_dtypes.bfloat16) if name.startswith(_MARK) else array
        for name, array in arrays.items()
    }


class PickleFile(Contender):
    """Pickle of a dict of arrays, protocol 5."""

    name = "pickle 5"

    def save(self, case: Case, folder: Path) -> None:
        with open(folder / "model.pickle", "wb") as file:
            pickle.dump(plain_arrays(case), file, protocol=5)

    def load(self, folder: Path) -> Mapping[str, Any]:
        with open(folder / "model.pickle", "rb") as file:
            return from_plain(pickle.load(file))


class NumpyZip(Contender):
    """`np.savez`."""

    name = "np.savez"

    def save(self, case: Case, folder: Path) -> None:
        np.savez(folder / "model.npz", allow_pickle=False, **plain_arrays(case))

    def load(self, folder: Path) -> Mapping[str, Any]:
        with np.load(folder / "model.npz") as file:
            return from_plain(dict(file.items()))

    def read_one(self, folder: Path, name: str) -> Any:
        with np.load(folder / "model.npz") as file:
            return file[name] if name in file.files else file[f"{_MARK}{name}"].view(ml_dtypes.bfloat16)
