"""Arrays of subclasses are rows with the bytes of plain arrays, and memory maps come back without their files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.flavors.arrays import Bare, Unit, noted, odd
from tests.stored_bytes import bytes_below

ADAPTERS: dict[str, tuple[Adapter, Any]] = {
    "generic": (GenericAdapter(), np.ones(3)),
    "pytorch": (PyTorchAdapter(), torch.ones(3)),
}


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape or (4, 5))


def masked(seed: int, **options: Any) -> Any:
    return np.ma.MaskedArray(numbers(seed), mask=numbers(seed + 9) > 0, **options)


def named(seed: int) -> Any:
    values: Any = [(seed, 2.0), (3, 4.0)]
    return np.array(values, dtype=[("a", "i4"), ("b", "f8")])


KINDS: dict[str, Callable[[int], Any]] = {
    "matrix": lambda s: np.asmatrix(numbers(s)),
    "masked": masked,
    "masked without a mask": lambda s: np.ma.MaskedArray(numbers(s)),
    "masked with a fill value": lambda s: masked(s, fill_value=7, hard_mask=True),
    "masked records": lambda s: np.ma.array(named(s), mask=np.array([(0, 1), (1, 0)], dtype=[("a", "?"), ("b", "?")])),
    "masked objects": lambda s: np.ma.MaskedArray(np.array([s, "a"], dtype=object), mask=[False, True]),
    "records": lambda s: named(s).view(np.recarray),
    "texts": lambda s: np.array(["a", f"b{s}"]).view(np.char.chararray),
    "bare": lambda s: numbers(s).view(Bare),
    "bare, in Fortran order": lambda s: np.asfortranarray(numbers(s)).view(Bare),
    "objects": lambda s: np.array([s, "a"], dtype=object).view(Bare),
    "noted": lambda s: noted(numbers(s), "a note"),
    "noted by an array": lambda s: noted(numbers(s), numbers(s + 5, 3)),
    "unit": lambda s: noted(numbers(s), "m", Unit),
    "unit, in Fortran order": lambda s: noted(np.asfortranarray(numbers(s)), "m", Unit),
    "own pickle": lambda s: odd([1.0, 2.0]),
}


def described(array: Any) -> Any:
    plain = np.ma.getdata(array).view(np.ndarray)
    content = plain.tolist() if plain.dtype == object else plain.tobytes()
    facts = type(array), array.dtype, array.shape, content, plain.flags.f_contiguous, str(getattr(array, "note", None))
    if not isinstance(array, np.ma.MaskedArray):
        return facts
    return *facts, array.mask is np.ma.nomask, array.mask.tolist(), repr(array.fill_value), array.hardmask


def stored(adapter: Adapter, model: Any) -> dict[str, Array]:
    return {name: np.array(row, order="C") for name, row in adapter.extract(model).items()}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    return ADAPTERS[request.param][0]


def state(adapter: Adapter, array: Any) -> dict[str, Any]:
    return {"w": array, "beside": ADAPTERS[adapter.name][1].copy() if adapter.name == "generic" else torch.ones(3)}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryClass:
    def test_array_comes_back_as_it_was(self, adapter: Adapter, kind: str) -> None:
        array = KINDS[kind](0)

        back = adapter.reconstruct(stored(adapter, state(adapter, array)))

        assert described(back["w"]) == described(array)

    def test_live_array_is_filled_in_place(self, adapter: Adapter, kind: str) -> None:
        array, live = KINDS[kind](0), state(adapter, KINDS[kind](1))
        before = live["w"]

        adapter.reconstruct(stored(adapter, state(adapter, array)), live)

        assert live["w"] is before
        assert described(before) == described(array)


@pytest.mark.parametrize("pair", [(False, True), (True, False)], ids=["saved read-only", "filled read-only"])
def test_arrays_that_may_be_written_to_or_not_have_equal_facts(pair: tuple[bool, bool]) -> None:
    adapter = ADAPTERS["generic"][0]
    saved, live = ({"w": numbers(0), "unit": noted(numbers(1), "m", Unit)} for _ in range(2))
    for each, may_write in zip((saved, live), pair, strict=True):
        each["w"].flags.writeable = may_write

    assert adapter.reconstruct(stored(adapter, saved), live) is live


@pytest.mark.parametrize("kind", ["matrix", "masked", "bare", "noted", "unit", "bare, in Fortran order"])
def test_array_has_the_bytes_of_the_plain_one(adapter: Adapter, kind: str) -> None:
    array = KINDS[kind](0)

    rows = stored(adapter, state(adapter, array))

    plain = np.ascontiguousarray(np.ma.getdata(array).view(np.ndarray))
    assert any(row.dtype == plain.dtype and row.tobytes() == plain.tobytes() for row in rows.values())


def mapped(folder: Path, seed: int, mode: Any, order: Any = "C") -> Any:
    path = folder / f"{seed}{mode[0]}.npy"
    np.save(path, np.asarray(numbers(seed), order=order))
    return np.load(path, mmap_mode=mode)


class TestMemoryMaps:
    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("mode", ["r", "r+", "c"])
    def test_map_comes_back_as_an_array_without_its_file(
        self, adapter: Adapter, mode: str, order: str, tmp_path: Path
    ) -> None:
        array = mapped(tmp_path, 0, mode, order)
        rows = stored(adapter, state(adapter, array))
        Path(array.filename).unlink()

        back = adapter.reconstruct(rows)["w"]

        assert type(back) is np.ndarray
        assert back.flags.writeable
        assert back.flags.f_contiguous == (order == "F")
        assert np.array_equal(back, numbers(0))

    def test_rows_are_those_of_the_plain_array(self, adapter: Adapter, tmp_path: Path) -> None:
        first = stored(adapter, state(adapter, mapped(tmp_path, 0, "r")))
        second = stored(adapter, state(adapter, numbers(0)))

        assert list(first) == list(second)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)

    @pytest.mark.parametrize("mode", ["r+", "c"])
    def test_writable_map_is_filled_in_place(self, adapter: Adapter, mode: str, tmp_path: Path) -> None:
        live = state(adapter, mapped(tmp_path, 1, mode))
        before = live["w"]

        adapter.reconstruct(stored(adapter, state(adapter, numbers(0))), live)
        before.flush()

        assert live["w"] is before
        assert np.array_equal(before, numbers(0))
        assert np.array_equal(np.load(before.filename), numbers(0 if mode == "r+" else 1))

    def test_plain_array_is_filled_with_a_stored_map(self, adapter: Adapter, tmp_path: Path) -> None:
        live = state(adapter, numbers(1))

        adapter.reconstruct(stored(adapter, state(adapter, mapped(tmp_path, 0, "r"))), live)

        assert np.array_equal(live["w"], numbers(0))

    def test_map_for_reading_is_refused_by_its_file_unless_it_is_equal(self, adapter: Adapter, tmp_path: Path) -> None:
        live = state(adapter, mapped(tmp_path, 1, "r"))

        with pytest.raises(
            AdapterError, match=r"'w'.* maps the file .*1r.npy for reading alone.*: map it with mode='r\+'"
        ):
            adapter.reconstruct(stored(adapter, state(adapter, numbers(0))), live)
        adapter.reconstruct(stored(adapter, state(adapter, numbers(1))), live)

        assert np.array_equal(live["w"], numbers(1))

    def test_map_held_twice_is_one_array_again(self, adapter: Adapter, tmp_path: Path) -> None:
        array = mapped(tmp_path, 0, "r")

        rows = stored(adapter, state(adapter, [array, array]))
        back = adapter.reconstruct(rows)["w"]

        assert back[0] is back[1]
        assert sum(row.shape == array.shape for row in rows.values()) == 1

    @pytest.mark.parametrize("make", [PCA, KNeighborsClassifier], ids=["pca", "neighbours"])
    def test_estimator_with_maps_is_stored_like_one_without(self, make: Callable[[], Any], tmp_path: Path) -> None:
        adapter = SklearnAdapter()
        x, y = numbers(0, 60, 5), np.arange(60) % 2
        model = make().fit(x, y)
        joblib.dump(model, tmp_path / "model.joblib")
        mapping = joblib.load(tmp_path / "model.joblib", mmap_mode="r")
        assert any(isinstance(value, np.memmap) for value in vars(mapping).values())
        live = make().fit(numbers(1, 60, 5), y)
        method = "predict_proba" if hasattr(model, "predict_proba") else "transform"

        rows, of_maps = stored(adapter, model), stored(adapter, mapping)
        adapter.reconstruct(of_maps, live)
        other = make().fit(numbers(2, 60, 5), y)
        adapter.reconstruct(stored(adapter, other), mapping)

        arrays = rows.keys() - {SKELETON, "__strings__"}
        assert all(rows[name].tobytes() == of_maps[name].tobytes() for name in arrays)
        for one in (live, adapter.reconstruct(of_maps)):
            assert np.array_equal(getattr(one, method)(x), getattr(model, method)(x))
        assert np.array_equal(getattr(mapping, method)(x), getattr(other, method)(x))


def test_equal_arrays_of_any_class_share_their_chunks(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path / "store", "run")
    values = numbers(0, 300, 300)
    np.save(tmp_path / "w.npy", values)
    store.save({"w": values}, step=1)
    before = bytes_below(tmp_path / "store")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        classes = [np.load(tmp_path / "w.npy", mmap_mode="r"), np.asmatrix(values), np.ma.MaskedArray(values)]
    store.save(dict(enumerate([*classes, noted(values, "m", Unit)])), step=2)

    assert bytes_below(tmp_path / "store") - before < 0.05 * values.nbytes
