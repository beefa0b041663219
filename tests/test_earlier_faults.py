"""Faults that an earlier checkpoint store for these frameworks had, and this one has not.

Some are looked for elsewhere already, in these modules of ``tests/``:

| fault | test |
|---|---|
| a change in place is not seen | test_tensorcas_store: weights_that_change_in_place_load_right_at_every_step |
| saving a step again destroys it | test_tensorcas_store: a_step_saved_twice_leaves_the_first_intact |
| a death while a step is replaced destroys it | test_tensorcas_store: a_death_while_a_step_is_replaced_… |
| a run's name leads out of the root | test_tensorcas_store: a_run_id_is_a_name_and_never_a_path |
| gc deletes the chunks of an unreadable manifest | test_gc_damage: collection_stops_at_an_unreadable_blob_… |
| gc deletes what a save under way relies on | test_gc: collection_spares_chunks_a_pending_save_relies_on; protocol/ |
| gc never collects what a killed save wrote | test_kill: a_crash_at_any_call_leaves_only_garbage |
| some kinds of arrays do not come back | test_checkpoints: every_kind_of_array_is_read_back_bit_for_bit |
| figures leave out most of what is on disk | test_stats: every_byte_of_the_store_is_counted |
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from sklearn.ensemble import GradientBoostingRegressor

from tensorcas_flavors.pytorch import PyTorchAdapter
from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.stored_bytes import bytes_below

N_STEPS = 20


def files_below(folder: Path) -> list[Path]:
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names]


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 6))
    return X, X @ rng.normal(size=6) + rng.normal(size=200)


class Net(torch.nn.Module):
    """A backbone that is frozen, statistics that move with every batch, and a head that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(6, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 1)
        self.backbone.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(x)).relu())


def same_state(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and bytes(one[name].contiguous().view(-1).view(torch.uint8).numpy())
        == bytes(other[name].contiguous().view(-1).view(torch.uint8).numpy())
        for name in one
        if one[name].numel()
    )


def detached(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# --- every step of one store object loads as it was saved


@pytest.mark.long
def test_each_of_20_epochs_of_a_network_loads_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    X, y = (torch.as_tensor(array, dtype=torch.float32) for array in data())
    model, store, wanted = Net(), TensorCasStore(tmp_path, "run"), []
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for epoch in range(N_STEPS):
        for batch in range(0, 200, 50):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(X[batch : batch + 50])[:, 0], y[batch : batch + 50]).backward()
            optimizer.step()
        store.save(model, epoch)
        wanted.append(detached(model))

    for epoch in range(N_STEPS):
        assert same_state(store.load(epoch).state_dict(), wanted[epoch])
        assert same_state(store.load(epoch, original=Net()).state_dict(), wanted[epoch])
    assert len({bytes(state["head.weight"].numpy()) for state in wanted}) == N_STEPS


@pytest.mark.long
def test_each_of_20_steps_of_a_booster_that_grows_loads_as_it_was(tmp_path: Path) -> None:
    X, y = data()
    matrix, booster = xgboost.DMatrix(X, y), None
    store, wanted = TensorCasStore(tmp_path, "run", XGBoostAdapter()), []
    for step in range(N_STEPS):
        booster = xgboost.train({"max_depth": 3, "nthread": 1}, matrix, num_boost_round=2, xgb_model=booster)
        store.save(booster, step)
        wanted.append(bytes(booster.save_raw("ubj")))

    assert [bytes(store.load(step).save_raw("ubj")) for step in range(N_STEPS)] == wanted


@pytest.mark.long
def test_each_of_20_steps_of_an_ensemble_that_grows_loads_as_it_was(tmp_path: Path) -> None:
    X, y = data()
    model = GradientBoostingRegressor(n_estimators=2, warm_start=True, random_state=0)
    store, wanted = TensorCasStore(tmp_path, "run", SklearnAdapter()), []
    for step in range(N_STEPS):
        model.set_params(n_estimators=2 * (step + 1)).fit(X, y)
        store.save(model, step)
        wanted.append(model.predict(X).tobytes())

    assert [store.load(step).predict(X).tobytes() for step in range(N_STEPS)] == wanted


# --- what an adapter could not do


def test_odd_tensors_come_back_to_the_bit(tmp_path: Path) -> None:
    state = {
        "bfloat16": torch.randn(5, 3).to(torch.bfloat16),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "steps": torch.tensor(7),
    }
    store = TensorCasStore(tmp_path, "run")
    store.save(state, 1)
    loaded = store.load(1)

    assert same_state(loaded, state)
    assert (loaded["scalar"].shape, loaded["empty"].shape) == (torch.Size([]), torch.Size([0, 4]))


def test_an_early_step_of_an_ensemble_needs_no_template_and_no_model_of_its_size(tmp_path: Path) -> None:
    X, y = data()
    model = GradientBoostingRegressor(n_estimators=10, warm_start=True, random_state=0).fit(X, y)
    store = TensorCasStore(tmp_path, "run", SklearnAdapter())
    store.save(model, 10)
    wanted = model.predict(X)
    model.set_params(n_estimators=20).fit(X, y)
    store.save(model, 20)
    early = store.load(10)
    filled = store.load(10, original=copy.deepcopy(model))

    assert len(early.estimators_) == len(filled.estimators_) == 10
    assert early.predict(X).tobytes() == filled.predict(X).tobytes() == wanted.tobytes()
    assert early.set_params(n_estimators=20).fit(X, y).predict(X).tobytes() == model.predict(X).tobytes()
    assert filled.n_estimators == 10
    assert filled.set_params(n_estimators=20).fit(X, y).predict(X).tobytes() == model.predict(X).tobytes()
    assert store.load(20, original=store.load(10)).predict(X).tobytes() == model.predict(X).tobytes()


def boosters() -> list[Any]:
    X, y = data()
    return [xgboost.train({"max_depth": 2, "nthread": 1}, xgboost.DMatrix(X, sign * y), 3) for sign in (1, -1)]


def ensembles() -> list[Any]:
    X, y = data()
    return [GradientBoostingRegressor(n_estimators=3, random_state=0).fit(X, sign * y) for sign in (1, -1)]


def networks() -> list[Any]:
    return [Net(), Net()]


@pytest.mark.parametrize(
    ("adapter", "models", "content"),
    [
        (XGBoostAdapter(), boosters, lambda model: bytes(model.save_raw("ubj"))),
        (SklearnAdapter(), ensembles, lambda model: model.predict(data()[0]).tobytes()),
        (PyTorchAdapter(), networks, lambda model: [bytes(array.numpy()) for array in model.state_dict().values()]),
    ],
    ids=["xgboost", "sklearn", "pytorch"],
)
def test_one_adapter_object_serves_two_models_in_turn(
    tmp_path: Path, adapter: Any, models: Callable[[], list[Any]], content: Callable[[Any], Any]
) -> None:
    one, other = models()
    first, second = TensorCasStore(tmp_path, "one", adapter), TensorCasStore(tmp_path, "other", adapter)
    for step in range(2):
        first.save(one, step)
        second.save(other, step)

    assert content(one) != content(other)
    for step in range(2):
        assert content(first.load(step)) == content(one)
        assert content(second.load(step)) == content(other)


# --- where a store lies


def test_a_root_may_be_moved_and_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monkeypatch.chdir(tmp_path)
    TensorCasStore("here", "run").save(model, 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").rename(tmp_path / "elsewhere" / "renamed")
    moved = TensorCasStore(tmp_path / "elsewhere" / "renamed", "run")
    moved.save(model, 2)

    assert moved.list_checkpoints() == [1, 2]
    assert same_state(moved.load(1).state_dict(), model.state_dict())
    assert not (tmp_path / "here").exists()


# --- what a step costs


@pytest.mark.long
def test_a_gap_between_steps_costs_nothing(tmp_path: Path) -> None:
    model = Net()
    store = TensorCasStore(tmp_path, "run")
    store.save(model, 100)
    before = bytes_below(tmp_path)
    steps = (200, 1_000_000, 3, *range(1_000, 10_000, 200))  # many, since the file grows by whole pages
    for step in steps:
        store.save(model, step)

    # A ref a step: a few hundred bytes, and no chunk and no manifest.
    assert store.stats().disk.packs == TensorCasStore.store_stats(tmp_path).disk.packs
    assert bytes_below(tmp_path) - before < len(steps) * 500
    assert len(list(store.store.backend.list("packs"))) == len(list(store.store.backend.list("manifests"))) == 1


RESUMED = """
import sys
import numpy as np
from tensorcas_mlflow import TensorCasStore

class Arrays:
    def extract(self, model):
        return model
    def reconstruct(self, tensors, original=None):
        return tensors

frozen = np.random.default_rng(0).normal(size=50_000)
store = TensorCasStore(sys.argv[1], "run", Arrays())
store.save({"frozen": frozen, "head": np.full(10, int(sys.argv[2]))}, int(sys.argv[2]))
"""


@pytest.mark.long
def test_a_resumed_run_writes_only_what_is_new(tmp_path: Path) -> None:
    sizes = []
    for step in (1, 2, 30):
        subprocess.run([sys.executable, "-c", RESUMED, str(tmp_path), str(step)], check=True, timeout=120)
        sizes.append(bytes_below(tmp_path))

    assert sizes[0] > 300_000
    assert sizes[1] - sizes[0] < 3_000
    assert sizes[2] - sizes[1] < 3_000
    assert TensorCasStore(tmp_path, "run").load_tensors(30)["head"].tolist() == [30] * 10


@pytest.mark.usefixtures("store_of_files")
def test_a_thousand_small_tensors_make_few_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = TensorCasStore(tmp_path, "run")
    state = {f"layer.{n}.weight": torch.as_tensor(rng.normal(size=(32, 32)).astype("f4")) for n in range(1000)}
    store.save(state, 1)
    n_files = len(files_below(tmp_path))
    store.save(state, 2)

    # The settings, a pack, its place in the index, the manifest, the ref; then one ref more.
    assert n_files == 5
    assert len(files_below(tmp_path)) == 6
    assert same_state(store.load(2), state)


@pytest.mark.long
def test_a_history_is_smaller_than_its_pickles_with_every_byte_counted(tmp_path: Path) -> None:
    X, y = data()
    model = GradientBoostingRegressor(n_estimators=5, warm_start=True, random_state=0)
    store, pickled = TensorCasStore(tmp_path, "run"), 0
    for step in range(N_STEPS):
        model.set_params(n_estimators=5 * (step + 1)).fit(X, y)
        store.save(model, step)
        pickled += len(pickle.dumps(model))

    taken = bytes_below(tmp_path)
    found = store.stats()
    assert found.disk_bytes == taken
    assert found.disk_bytes < pickled / 8
    assert len(files_below(tmp_path)) <= 4 * N_STEPS + 1


# --- what must outlast a crash of the machine


@pytest.mark.usefixtures("store_of_files")
def test_all_that_a_step_needs_is_durable_before_its_ref_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TensorCasStore(tmp_path, "run", PyTorchAdapter())
    store.save(Net(), 0)
    events: list[tuple[str, str]] = []
    fsync, rename, link = os.fsync, os.rename, os.link

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        events.append(("fsync", f"{found.st_dev}-{found.st_ino}"))

    def record_name(kind: Any, act: Callable[..., None]) -> Callable[..., None]:
        def named(source: Any, dest: Any, **options: Any) -> None:
            act(source, dest, **options)
            events.append((kind, str(dest)))

        return named

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_name("name", rename))
    monkeypatch.setattr(os, "link", record_name("name", link))
    store.save(Net(), 1)
    monkeypatch.undo()

    def identity(path: Path) -> str:
        return f"{path.stat().st_dev}-{path.stat().st_ino}"

    below = tmp_path / ".tensorcas"
    committed = next(at for at, event in enumerate(events) if event[0] == "name" and "/refs/" in event[1])
    durable = {name for kind, name in events[:committed] if kind == "fsync"}
    durable_after = {name for kind, name in events[committed:] if kind == "fsync"}
    for folder in ("packs", "manifests"):
        newest = max((below / folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        assert {identity(newest), identity(below / folder)} <= durable
    assert identity(below / "refs/runs/run/@1") in durable
    assert identity(below / "refs/runs/run") in durable_after


# --- collection


def test_gc_refuses_where_a_manifest_cannot_be_read_and_the_others_stay_whole(tmp_path: Path) -> None:
    models = networks()
    store = TensorCasStore(tmp_path, "run")
    refs = [store.save(model, step) for step, model in enumerate(models)]
    store.store.backend.delete(f"manifests/{refs[0].manifest}")
    store.store.backend.put_new(f"manifests/{refs[0].manifest}", [b"unreadable"])
    before = bytes_below(tmp_path)

    with pytest.raises(CorruptError, match="run run step 0"):
        store.gc(grace_s=0, max_waste=0)
    assert bytes_below(tmp_path) == before
    assert same_state(store.load(1).state_dict(), models[1].state_dict())


def test_step_saved_while_gc_is_about_to_delete_its_chunks_is_whole(tmp_path: Path) -> None:
    model = Net()
    store = TensorCasStore(tmp_path, "run")
    store.save(model, 1)
    store.delete_checkpoint(1)
    # The plan names every chunk of the model; the model is saved before it is carried out.
    plan = plan_gc(Store.open(tmp_path), grace_s=0)
    store.save(model, 2)
    plan.execute()

    assert same_state(TensorCasStore(tmp_path, "run").load(2).state_dict(), model.state_dict())
