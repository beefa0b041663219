"""The store of one run, as a program without MLflow uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.errors import AdapterError, CheckpointExistsError, CheckpointNotFoundError
from tensorcas_mlflow.store import TensorCasStore


class Arrays:
    """The least adapter there is: a model is a dict of arrays."""

    def extract(self, model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(model)

    def reconstruct(self, tensors: Mapping[str, np.ndarray], original: Any = None) -> dict[str, np.ndarray]:
        if original is not None:
            for name, array in tensors.items():
                original[name][...] = array
            return original
        return dict(tensors)


def open_store(root: Path, run_id: str = "run", **options: int) -> TensorCasStore:
    return TensorCasStore(root, run_id, Arrays(), **options)


def model(step: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(step).normal(size=(50, 100)), "fixed": np.arange(1_000)}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(one[name].tobytes() == other[name].tobytes() for name in one)


def test_weights_that_change_in_place_load_right_at_every_step(tmp_path: Path) -> None:
    live = model(0)
    wanted = []
    with open_store(tmp_path) as store:
        for step in range(5):
            live["w"] += 1.0
            live["w"][step] = step
            store.save(live, step)
            wanted.append({name: array.copy() for name, array in live.items()})

        for step in (4, 0, 3, 1, 2):
            assert equal(store.load(step), wanted[step])
            assert equal(open_store(tmp_path).load(step), wanted[step])


def test_a_live_model_is_filled_in_place(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1)
    live = model(2)
    array = live["w"]

    assert store.load(1, original=live) is live
    assert array.tobytes() == model(1)["w"].tobytes()


def test_a_step_saved_twice_leaves_the_first_intact(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 7)

    for other in (store, open_store(tmp_path)):
        with pytest.raises(CheckpointExistsError, match="step 7 of run 'run'"):
            other.save(model(2), 7)
    assert equal(store.load(7), model(1))


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(CheckpointNotFoundError) as caught:
        store.load(5)
    assert str(caught.value) == "there is no checkpoint for step 5 of run 'run'"

    for step in (10, 2):
        store.save(model(step), step)
    with pytest.raises(CheckpointNotFoundError) as caught:
        store.load(5)
    assert str(caught.value) == "there is no checkpoint for step 5 of run 'run'; there are steps 2, 10"


def test_steps_are_listed_ascending_and_can_be_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step in (10, -1, 2, 0, 10**12):
        store.save(model(1), step)
    assert store.list_checkpoints() == [-1, 0, 2, 10, 10**12]

    store.delete_checkpoint(2)
    store.delete_checkpoint(2)

    assert store.list_checkpoints() == [-1, 0, 10, 10**12]
    assert equal(store.load(10), model(1))
    with pytest.raises(CheckpointNotFoundError):
        store.load(2)


def test_a_deleted_step_can_be_saved_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1)
    store.delete_checkpoint(1)
    store.save(model(2), 1)

    assert equal(store.load(1), model(2))


RUN_IDS = [
    "../../x",
    "/etc/passwd",
    "..",
    ".",
    "a/b",
    "a\\b",
    "@1",
    "~x",
    "模型",
    "a b",
    "%2e%2e",
    "x" * 500,
    "\n",
    "\udc80",
]


@pytest.mark.parametrize("run_id", RUN_IDS, ids=repr)
def test_a_run_id_is_a_name_and_never_a_path(tmp_path: Path, run_id: str) -> None:
    root = tmp_path / "deep" / "er" / "root"
    store = open_store(root, run_id)
    store.save(model(1), 1)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and root / ".tensorcas" not in path.parents]

    assert outside == []
    assert equal(open_store(root, run_id).load(1), model(1))
    assert open_store(root, run_id).list_checkpoints() == [1]


def test_runs_do_not_see_each_others_steps(tmp_path: Path) -> None:
    for n, run_id in enumerate(RUN_IDS):
        open_store(tmp_path, run_id).save(model(n), n)

    for n, run_id in enumerate(RUN_IDS):
        assert open_store(tmp_path, run_id).list_checkpoints() == [n]


def test_an_empty_run_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run id"):
        open_store(tmp_path, "")


@pytest.mark.parametrize("step", [1.5, "1", None])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:
    store = open_store(tmp_path)

    for call in (lambda: store.save(model(1), step), lambda: store.load(step), lambda: store.delete_checkpoint(step)):
        with pytest.raises(ValueError, match="whole number"):
            call()


def test_a_numpy_step_is_a_step(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), np.int64(3))

    assert store.list_checkpoints() == [3]
    assert equal(store.load(3), model(1))


def test_two_store_objects_share_what_they_write(tmp_path: Path) -> None:
    one, two = open_store(tmp_path, "one"), open_store(tmp_path, "two")
    one.save(model(1), 1)
    two.save(model(1), 1)
    two.save(model(2), 2)
    one.save(model(2), 2)

    assert equal(one.load(2), model(2))
    assert equal(two.load(1), model(1))
    assert len(list(one.store.backend.list("packs"))) == 2


def test_an_existing_store_keeps_its_chunk_size(tmp_path: Path) -> None:
    open_store(tmp_path, chunk_size=4096)

    assert open_store(tmp_path, chunk_size=8192).store.chunk_bytes == 4096


def test_a_step_is_not_given_to_another_adapter_than_it_was_saved_by(tmp_path: Path) -> None:
    class Named(Arrays):
        name = "named"

    class Other(Arrays):
        name = "other"

    TensorCasStore(tmp_path, "run", Named()).save(model(1), step=1)

    with pytest.raises(AdapterError, match="saved by the adapter named"):
        TensorCasStore(tmp_path, "run", Other()).load(step=1)
