"""The figures of stores and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.errors import CorruptError, StoreNotFoundError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import disk_usage, plan_gc, run_stats, store_stats
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.stored_bytes import bytes_below

KB = 4096


def save(store: Store, run_id: str, step: int, tensors: dict[str, Any], **more: Any) -> Ref:
    with store.write_checkpoint(tensors) as pending:
        return pending.commit(RefTarget(run_id=run_id, step=step, **more))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two runs: three steps that share all but one chunk, and a step that shares everything."""
    store = Store.init(tmp_path / "store", chunk_bytes=KB)
    for step in range(3):
        save(store, "one", step * 10, {"fixed": np.arange(1024), "w": np.full(512, step)})
    save(store, "two", 0, {"fixed": np.arange(1024)})
    return store


def test_run_stats_count_the_steps_chunks_and_bytes_of_a_run(store: Store) -> None:
    found = run_stats(store, "one")

    assert (found.run_id, found.checkpoints, found.files, found.steps) == ("one", 3, 0, (0, 10, 20))
    assert (found.total_chunks, found.unique_chunks, found.dedup_ratio) == (9, 5, 0.5556)
    assert found.total_bytes == 3 * (1024 + 512) * 8
    assert found.saved_ratio == round(2 * 1024 / (3 * (1024 + 512)), 4)


def test_store_stats_count_the_runs_chunks_and_bytes_of_a_store(store: Store) -> None:
    found = store_stats(store)

    assert (found.runs, found.checkpoints, found.files) == (2, 4, 0)
    assert (found.total_chunks, found.unique_chunks, found.dedup_ratio) == (11, 5, 0.4545)
    assert found.total_bytes == (3 * (1024 + 512) + 1024) * 8


def test_a_run_that_keeps_nothing_saves_nothing(store: Store) -> None:
    found = run_stats(store, "three")

    assert (found.checkpoints, found.steps, found.total_chunks) == (0, (), 0)
    assert (found.dedup_ratio, found.saved_ratio) == (1.0, 0.0)


@pytest.mark.parametrize("database", [False, True], ids=["files", "database"])
def test_every_byte_of_the_store_is_counted(tmp_path: Path, database: bool) -> None:
    store = Store.init(tmp_path / "store", chunk_bytes=KB, database=database)
    dropped = [save(store, "one", step, {"w": np.arange(8 * KB) * step, "b": np.full(9, step)}) for step in range(3)]
    store.drop(dropped[0])
    (tmp_path / "file").write_bytes(bytes(5000))
    with store.write_file(tmp_path / "file") as pending:
        pending.commit(RefTarget(path="data/file"))
    store.backend.put_new("index/" + "0" * 32 + ".segment", [b"segment"])
    store.backend.put_new("condemned/" + "0" * 32, [condemned_bytes(frozenset(), frozenset())])
    store.backend.put_new("quarantine/" + "0" * 32, [b"damaged"])
    store.backend.put_new("census/" + "0" * 32, [b"census"])
    store.backend.put_new("maintenance/" + "0" * 32, [b"a round"])
    (tmp_path / "store" / ".tensorcas" / ".DS_Store").write_bytes(b"of another program")
    with store.write_checkpoint({"w": np.arange(7)}):
        found = disk_usage(store.backend)
        on_disk = bytes_below(tmp_path / "store")

    assert found.total == on_disk == sum(found[kind] for kind in found if kind != "total")
    assert all(found[kind] > 0 for kind in found if kind != "database" and not database)
    assert (found.database > 0) is database
    assert (found.database > 8_800) if database else (found.packs > 3 * KB)


def test_files_and_models_are_counted_with_their_chunks(store: Store, tmp_path: Path) -> None:
    before = store_stats(store)
    (tmp_path / "file").write_bytes(b"1" * 10_000)
    with store.write_file(tmp_path / "file") as pending:
        pending.commit(RefTarget(path="data/file", run_id="one"))
    save(store, "one", 30, {"w": np.full(512, 9)}, copy_path="models/m/artifacts/data/checkpoint.arrow", model_id="m")
    after, run = store_stats(store), run_stats(store, "one")

    assert (after.files - before.files, after.checkpoints - before.checkpoints) == (1, 1)
    assert after.total_bytes - before.total_bytes == 10_000 + 4096
    assert (run.files, run.steps) == (1, (0, 10, 20, 30))


def test_figures_are_read_as_attributes_or_as_items_and_become_json(store: Store) -> None:
    found = run_stats(store, "one")

    assert found["total_chunks"] == found.total_chunks
    assert dict(found) == {name: getattr(found, name) for name in found}
    assert json.loads(json.dumps(dict(found), default=dict))["disk"]["packs"] == found.disk.packs
    assert found == run_stats(store, "one")
    with pytest.raises(KeyError):
        found["get"]


def test_a_tensor_store_gives_the_figures_of_its_run_and_of_the_store(tmp_path: Path) -> None:
    class Arrays:
        def extract(self, model: dict[str, Any]) -> dict[str, Any]:
            return model

        def reconstruct(self, tensors: Any, original: Any = None) -> Any:
            return tensors

    with TensorCasStore(tmp_path, "run", Arrays()) as opened:
        opened.save({"w": np.arange(4)}, 1)
        found = opened.stats()

    assert (found["run_id"], found["checkpoints"], found["total_bytes"]) == ("run", 1, 32)
    assert TensorCasStore.store_stats(tmp_path)["runs"] == 1
    assert found["disk_bytes"] == bytes_below(tmp_path)


def test_figures_of_a_missing_store_raise_and_make_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        TensorCasStore.store_stats(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_cannot_be_read_is_an_error_and_not_a_smaller_figure(store: Store) -> None:
    [ref] = [ref for ref in store.checkpoints() if ref.run_id == "two"]
    store.backend.delete(f"manifests/{ref.manifest}")

    with pytest.raises(CorruptError, match="run two step 0"):
        store_stats(store)
    assert run_stats(store, "one").checkpoints == 3


def test_a_step_that_is_dropped_and_collected_meanwhile_is_not_counted(tmp_path: Path) -> None:
    class Meanwhile(LocalBackend):
        """Files; the second step is dropped and collected just before the first manifest is read."""

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            if key.startswith("manifests/") and dropped:
                other = Store.open_backend(LocalBackend(tmp_path))
                other.drop(dropped.pop())
                plan_gc(other, grace_s=0).execute()
            return super().get(key, max_bytes=max_bytes)

    dropped: list[Ref] = []
    store = Store.init_backend(Meanwhile(tmp_path))
    save(store, "run", 1, {"w": np.arange(5)})
    dropped.append(save(store, "run", 2, {"w": np.arange(6)}))

    assert run_stats(store, "run").checkpoints == 1
