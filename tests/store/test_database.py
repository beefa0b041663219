"""Stores with a database for small blobs: checkpoints are read right in every way, and saves take next to no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.chunk_io import _fetch
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import CheckpointExistsError, RefusedError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.stored_bytes import bytes_below

N_STEPS = 3


def arrays(step: int, size: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(step)
    return {name: drawn.standard_normal(size, dtype=np.float32) for name in ("a", "b", "c")}


def files_of(root: Path) -> set[str]:
    """Return the names of the files of a store, without those that come and go with its database's connections."""
    names = {path.name for path in (root / ".tensorcas").rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith("blobs.")} | (names & {"blobs.db"})


@pytest.fixture(params=[8, 20_000], ids=["packs in shared records", "packs in own records"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Store, int]:
    """A store with a database and a few steps, and the size of the arrays."""
    store = Store.init(tmp_path / "root", chunk_bytes=16384, database=True)
    for step in range(N_STEPS):
        with store.write_checkpoint(arrays(step, request.param), policy="fast") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    assert files_of(tmp_path / "root") == {"format", "blobs.db"}
    return Store.open(tmp_path / "root"), request.param


@pytest.mark.parametrize("way", ["pread", "direct", "map", None])
@pytest.mark.parametrize("verify", [True, False])
def test_packs_in_the_database_are_read_in_every_way(saved: tuple[Store, int], way: Any, *, verify: bool) -> None:
    store, size = saved
    for step in range(N_STEPS):
        ref = store.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        found = store.read_tensors(store.manifest(ref), verify=verify, way=way)

        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in arrays(step, size).items()
        }


def test_no_chunk_in_the_database_is_read_twice(saved: tuple[Store, int], monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = saved
    again: list[Any] = []
    run_part = _fetch._Reading._run_part

    def note(self: Any, choice: Any, chunks: Any, **options: Any) -> None:
        again.append(chunks)
        run_part(self, choice, chunks, **options)

    monkeypatch.setattr(_fetch._Reading, "_run_part", note)
    ref = store.ref(RefTarget(run_id="run", step=1).key)
    assert ref is not None
    store.read_tensors(store.manifest(ref), way="pread")

    assert again == []


def test_an_abandoned_save_leaves_nothing_in_the_database(tmp_path: Path) -> None:
    store = Store.init(tmp_path, database=True)
    with store.write_checkpoint(arrays(0, 8)) as pending:
        pending.commit(RefTarget(run_id="run", step=0))
    before = {info.key for info in blobs_of(store)}

    with store.write_checkpoint(arrays(1, 8)) as pending:
        pending.write()
    with pytest.raises(CheckpointExistsError), store.write_checkpoint(arrays(2, 8)) as pending:
        pending.commit(RefTarget(run_id="run", step=0), replace=False)
    assert {info.key for info in blobs_of(store)} == before
    # The process knew the packs of these saves, and may not rely on them.
    with store.write_checkpoint(arrays(1, 8)) as pending:
        ref = pending.commit(RefTarget(run_id="run", step=1))
    found = Store.open(tmp_path).read_tensors(store.manifest(ref))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in arrays(1, 8).items()
    }
    assert files_of(tmp_path) == {"format", "blobs.db"}


def blobs_of(store: Store) -> list[Any]:
    folders = ("packs", "manifests", "refs", "index", "intents", "condemned", "census")
    return [info for folder in folders for info in store.backend.list(folder)]


@pytest.mark.long
def test_a_small_step_costs_less_than_400_bytes_besides_its_tensors(tmp_path: Path) -> None:
    store = Store.init(tmp_path, database=True)
    n_bytes: list[int] = []
    for step in range(64):
        with store.write_checkpoint(arrays(step, 8)) as pending:
            pending.commit(RefTarget(run_id="0123456789abcdef0123456789abcdef", step=step))
        n_bytes.append(bytes_below(tmp_path))

    grown = np.diff(n_bytes)
    assert grown.mean() - 3 * 8 * 4 < 400


def test_a_store_whose_database_does_not_show_is_not_opened(tmp_path: Path) -> None:
    store = Store.init(tmp_path, database=True)
    elsewhere = MemoryBackend()
    elsewhere.put_new("format", [store.backend.get("format")])
    for backend in (LocalBackend(tmp_path / ".tensorcas"), elsewhere):
        with pytest.raises(RefusedError, match="has a database"):
            Store.open_backend(backend)
    (tmp_path / ".tensorcas/blobs.db").unlink()

    with pytest.raises(RefusedError, match=r"no file `blobs\.db`"):
        Store.open(tmp_path)


def test_new_stores_on_a_local_disk_have_a_database_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Store.init(tmp_path / "default").backend.has_database
    assert not Store.init(tmp_path / "files", database=False).backend.has_database
    monkeypatch.setenv("TENSORCAS_DATABASE", "false")
    assert not Store.init(tmp_path / "by the environment").backend.has_database
    assert Store.open(tmp_path / "default").backend.has_database
    monkeypatch.delenv("TENSORCAS_DATABASE")
    assert not Store.open(tmp_path / "files").backend.has_database
    monkeypatch.setattr("tensorcas_mlflow.backends._folder.is_on_local_disk", lambda folder: False)
    assert not Store.init(tmp_path / "elsewhere").backend.has_database
    with pytest.raises(RefusedError, match="not on a local disk"):
        Store.init(tmp_path / "nowhere", database=True)


def test_copy_of_a_store_has_the_way_of_a_new_store(saved: tuple[Store, int], tmp_path: Path) -> None:
    _, size = saved
    for source, name, has_database in (("root", "files", False), ("files", "database", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TENSORCAS_DATABASE", str(has_database))
            assert main(["copy", str(tmp_path / source), str(tmp_path / name)]) == 0
        copied = Store.open(tmp_path / name)
        assert copied.backend.has_database is has_database
        assert [
            copied.read_tensors(copied.manifest(ref))["a"].tobytes()
            for ref in sorted(copied.checkpoints(), key=lambda ref: ref.step or 0)
        ] == [arrays(step, size)["a"].tobytes() for step in range(N_STEPS)]


def test_small_steps_make_next_to_no_files(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    for step in range(20):
        with store.write_checkpoint(arrays(step, 100)) as pending:
            pending.commit(RefTarget(run_id="run", step=step))

    assert sum(path.is_file() for path in tmp_path.rglob("*")) <= 5
