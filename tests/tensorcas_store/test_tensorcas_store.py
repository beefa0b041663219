"""The store of one run, as a program without MLflow uses it."""

from __future__ import annotations

import math
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_mlflow.errors import (
    AdapterError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConflictError,
    StoreNotFoundError,
)
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.faulty import FaultyBackend, SimulatedCrash


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

    assert store.delete_checkpoint(2)
    assert not store.delete_checkpoint(2)

    assert store.list_checkpoints() == [-1, 0, 10, 10**12]
    assert equal(store.load(10), model(1))
    with pytest.raises(CheckpointNotFoundError):
        store.load(2)


def test_into_and_original_are_one_argument_of_load(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1)
    one, other, both = model(0), model(0), model(0)

    assert store.load(1, into=one) is one
    assert store.load(1, original=other) is other
    assert store.load(1, both, into=both) is both
    assert equal(one, model(1))
    assert equal(other, model(1))
    with pytest.raises(ValueError, match="two names of one argument"):
        store.load(1, one, into=other)


def test_policy_of_a_save_chooses_between_speed_and_size(tmp_path: Path) -> None:
    ramp = {"w": np.arange(100_000)}
    sizes = {}
    for policy in ("fast", "balanced"):
        with open_store(tmp_path / policy) as store:
            store.save(ramp, 1, policy=policy)
            assert equal(store.load(1), ramp)
            sizes[policy] = store.stats().disk.total

    assert sizes["balanced"] < sizes["fast"] // 2
    with pytest.raises(ValueError, match="not 'quick'"):
        open_store(tmp_path / "fast").save(ramp, 2, policy="quick")


def test_store_can_be_closed_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1)

    store.close()
    store.close()

    assert open_store(tmp_path).list_checkpoints() == [1]


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
    "\0",
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


@pytest.mark.long
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

    for call in (lambda: store.save(model(1), step), lambda: store.delete_checkpoint(step)):
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
    open_store(tmp_path, chunk_bytes=4096)

    assert open_store(tmp_path, chunk_bytes=8192).store.chunk_bytes == 4096


def test_a_step_is_not_given_to_another_adapter_than_it_was_saved_by(tmp_path: Path) -> None:
    class Other(Arrays):
        name = "other"

    TensorCasStore(tmp_path, "run", Named()).save(model(1), step=1)

    with pytest.raises(AdapterError, match="saved by the adapter named"):
        TensorCasStore(tmp_path, "run", Other()).load(step=1)


# --- saving a step again


def test_a_step_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 7, metrics={"loss": 1})
    store.save(model(2), 7, overwrite=True)

    assert equal(store.load(7), model(2))
    assert store.list_checkpoints_with_metrics() == [{"step": 7, "metrics": None}]


def test_overwriting_a_step_that_is_not_there_saves_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 7, overwrite=True)

    assert equal(store.load(7), model(1))


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("store_of_files")
def test_a_death_while_a_step_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path: Path, when: Any) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 7)
    nth = 0
    while True:
        backend = FaultyBackend(store.store.backend)
        dying = open_store(tmp_path)
        dying.store = Store.open_backend(backend)
        backend.crash(nth, when=when)
        try:
            dying.save(model(2), 7, overwrite=True)
        except SimulatedCrash:
            assert any(equal(open_store(tmp_path).load(7), model(n)) for n in (1, 2))
            nth += 1
            continue
        break

    assert nth > 3
    assert equal(open_store(tmp_path).load(7), model(2))


# --- which adapter


class Named(Arrays):
    name = "named"


def test_a_model_finds_its_adapter_by_itself(tmp_path: Path) -> None:
    fitted = LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    store = TensorCasStore(tmp_path, "run")
    store.save(fitted, step=1)

    assert store.load(1).coef_.tobytes() == fitted.coef_.tobytes()
    assert TensorCasStore(tmp_path, "run", SklearnAdapter()).load(1).coef_.tobytes() == fitted.coef_.tobytes()


def test_a_step_of_an_adapter_without_a_name_needs_it_again(tmp_path: Path) -> None:
    open_store(tmp_path).save(model(1), 1)

    with pytest.raises(AdapterError, match="without a name"):
        TensorCasStore(tmp_path, "run").load(1)
    assert equal(TensorCasStore(tmp_path, "run").load_tensors(1), model(1))


def test_options_reach_the_adapter_and_others_are_refused(tmp_path: Path) -> None:
    class Scaled(Named):
        options = frozenset({"scale"})

        def reconstruct(self, tensors: Any, original: Any = None, scale: int = 1) -> Any:
            return {name: array * scale for name, array in tensors.items()}

    store = TensorCasStore(tmp_path, "run", Scaled())
    store.save({"w": np.arange(3)}, 1)

    assert store.load(1, scale=2)["w"].tolist() == [0, 2, 4]
    assert store.load(1, scale=None)["w"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="named has no option device"):
        store.load(1, device="cpu")


# --- what is said of a step


def test_the_last_step_is_loaded_where_none_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="of run 'run'"):
        store.load()
    for step in (9, 10, -3):
        store.save(model(step + 3), step)

    assert equal(store.load(), model(13))
    assert equal(store.load_tensors(), model(13))


def test_metrics_and_the_parent_step_are_kept_with_a_step(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 2, metrics={"loss": np.float32(0.5), "n": 3, "worst": math.inf})
    ref = store.save(model(1), 1, parent_step=2)

    assert ref.parent_step == 2
    assert open_store(tmp_path).list_checkpoints_with_metrics() == [
        {"step": 1, "metrics": None},
        {"step": 2, "metrics": {"loss": 0.5, "n": 3.0, "worst": math.inf}},
    ]


@pytest.mark.parametrize("metrics", [{"loss": "low"}, {"loss": None}, {3: 0.5}, {"loss": 10**400}, {"loss": "0.5"}])
def test_metrics_that_are_no_numbers_are_refused_before_anything_is_stored(tmp_path: Path, metrics: Any) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ValueError, match="metric"):
        store.save(model(1), 1, metrics=metrics)

    assert list(store.store.backend.list("packs")) == []


def test_metrics_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="metrics are a mapping of names to numbers"):
        open_store(tmp_path / "store").save({"w": np.ones(3)}, step=1, metrics=[("loss", 1)])  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", [math.nan, -1])
def test_a_grace_that_is_no_time_is_refused(tmp_path: Path, figure: float) -> None:
    with pytest.raises(ValueError, match="grace_s must not be negative"):
        open_store(tmp_path / "store").gc(grace_s=figure)


@pytest.mark.parametrize("options", [{"grace_s": "24"}, {"max_waste": None}, {"max_waste": True}])
def test_figures_of_a_collection_that_are_no_numbers_are_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))} is a number, not"):
        open_store(tmp_path / "store").gc(**options)


@pytest.mark.parametrize(
    ("run_id", "error"), [(5, TypeError), (b"x", TypeError), (None, TypeError), ("\ud800", ValueError)]
)
def test_a_run_id_that_is_no_text_is_refused(tmp_path: Path, run_id: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="a run id "):
        open_store(tmp_path / "store", run_id)
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_pickled_says_what_to_send(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="send its root and run id"):
        pickle.dumps(open_store(tmp_path / "store"))


def test_the_best_step_is_that_of_the_smallest_or_largest_value(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step, loss in enumerate([math.nan, 0.5, 0.25, 0.25, 0.75, None]):
        store.save(model(1), step, metrics=None if loss is None else {"loss": loss})

    assert store.best("loss") == 2
    assert store.best("loss", mode="max") == 4
    assert store.best("accuracy") is None
    with pytest.raises(ValueError, match="mode"):
        store.best("loss", mode="most")  # type: ignore[arg-type]


def test_a_metric_that_is_nowhere_a_number_has_no_best_step(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1, metrics={"loss": math.nan})

    assert store.best("loss") is None


# --- the store as a whole


def test_gc_removes_what_only_a_deleted_step_needed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1)
    store.save(model(2), 2)
    store.delete_checkpoint(1)
    report = store.gc(max_waste=0)

    assert report.n_packs == 1
    assert report.freed_bytes > 30_000
    assert equal(open_store(tmp_path).load(2), model(2))


def test_strange_files_among_the_steps_of_a_run_are_not_listed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(model(1), 1)
    for key in ("refs/runs/run/@x", "refs/runs/run/@", "refs/runs/run/ema/@5"):
        store.store.backend.put_new(key, [b"?"])

    assert store.list_checkpoints() == [1]


@pytest.mark.long
def test_the_package_gives_the_store_and_imports_nothing_for_it_before_it_is_asked() -> None:
    script = """
import sys
sys.modules.pop("__future__", None)  # an editable install imports it before the script begins
before = set(sys.modules)
import tensorcas_mlflow
assert set(sys.modules) - before == {"tensorcas_mlflow"}, set(sys.modules) - before
assert "TensorCasStore" in dir(tensorcas_mlflow)
from tensorcas_mlflow import TensorCasStore
assert not {"mlflow", "torch", "sklearn", "xgboost", "pandas"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_a_file_of_another_format_becomes_a_step_and_a_step_a_file(tmp_path: Path) -> None:
    arrays = {"w": np.arange(5000.0), "x": np.ones((2, 3), np.float16)}
    np.savez(tmp_path / "in.npz", **arrays)
    with TensorCasStore(tmp_path / "store", run_id="run") as store:
        store.import_file(tmp_path / "in.npz", step=4)

        written = store.export_file(tmp_path / "out.safetensors")

        assert store.list_checkpoints() == [4]
        assert written.n_tensors == 2
        assert store.open(4).digest() == store.open().digest()
        store.import_file(tmp_path / "out.safetensors", step=5)
        assert store.open(5).tensors_digest() == store.open(4).tensors_digest()


def test_import_of_the_store_from_its_old_module_names_the_new_one() -> None:
    with pytest.raises(ImportError, match="from tensorcas_mlflow import TensorCasStore"):
        exec("from tensorcas_mlflow.store import TensorCasStore", {})
    with pytest.raises(ImportError, match="cannot import name 'TensorCasStores'"):
        exec("from tensorcas_mlflow.store import TensorCasStores", {})


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_store_that_is_gone_is_no_empty_one(tmp_path: Path, is_made_anew: bool) -> None:
    store = TensorCasStore(tmp_path / "root", "run")
    store.save({"w": np.ones(100)}, step=1, metrics={"loss": 1.0})
    shutil.rmtree(tmp_path / "root")
    if is_made_anew:
        TensorCasStore(tmp_path / "root", "run").save({"w": np.ones(100)}, step=2)

    for call in (store.list_checkpoints, partial(store.best, "loss"), store.stats, partial(store.delete_checkpoint, 2)):
        with pytest.raises((StoreNotFoundError, ConflictError)):
            call()
