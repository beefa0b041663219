"""A store that is put back, or copied by hard links, under open processes loses nothing that was saved since."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import FolderBackend
from tensorcas_mlflow.backends._database import SHM
from tensorcas_mlflow.errors import BlobNotFoundError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair, verify
from tensorcas_mlflow.store import Store


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(step, step + 64, dtype=np.float32), "b": np.full(8, step, np.float32)}


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


def save(store: Store, step: int, content: int | None = None) -> None:
    with store.write_checkpoint(arrays(step if content is None else content)) as pending:
        pending.commit(target(step))


def drop(store: Store, step: int) -> None:
    ref = store.ref(target(step).key)
    assert ref is not None
    store.drop(ref)


def load(store: Store, step: int) -> int | None:
    """Return the number of the arrays at a step; None if there is none."""
    ref = store.ref(target(step).key)
    if ref is None:
        return None
    found = store.read_tensors(store.manifest(ref))
    content = int(found["b"][0])
    assert all(found[name].tobytes() == array.tobytes() for name, array in arrays(content).items())
    return content


def steps(store: Store) -> set[int]:
    listed = {int(info.key.rpartition("@")[2]) for info in store.backend.list("refs")}
    assert all(load(store, step) is not None for step in listed)
    return listed


def end_process(store: Store) -> None:
    """Close the database, as the end of a process does."""
    assert isinstance(store.backend, FolderBackend)
    store.backend._database.close()


def in_its_place(backup: Path, root: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(backup, root, copy_function=shutil.copy2)


def over_it(backup: Path, root: Path) -> None:
    subprocess.run(["cp", "-a", f"{backup}/.", str(root)], check=True)


def beside_the_moved_one(backup: Path, root: Path) -> None:
    root.rename(root.with_name("moved"))
    shutil.copytree(backup, root)


def file_by_file(backup: Path, root: Path) -> None:
    """As rsync does it: each file is replaced by another one, and files that the backup lacks go."""
    for path in content(root).keys() - content(backup).keys():
        (root / path).unlink()
    for path in content(backup):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(backup / path, root / "tmp")
        (root / "tmp").replace(root / path)


WAYS = [in_its_place, over_it, beside_the_moved_one, file_by_file]


@pytest.mark.parametrize("way", WAYS)
def test_open_processes_go_on_with_a_store_that_was_put_back(way: Callable[[Path, Path], None], tmp_path: Path) -> None:
    root, backup = tmp_path / "store", tmp_path / "backup"
    writer = Store.init(root, database=True)
    for step in range(3):
        save(writer, step)
    shutil.copytree(root, backup)
    for step in range(3, 8):
        save(writer, step)
    drop(writer, 1)
    reader = Store.open(root)
    assert steps(reader) == {0, 2, 3, 4, 5, 6, 7}

    way(backup, root)
    there = steps(Store.open(root))
    assert {0, 2} <= there
    for store in (writer, reader):
        assert steps(store) == there
        assert load(store, 7) is None
    save(reader, 20)
    save(writer, 21)
    end_process(writer)
    save(Store.open(root), 22)

    for store in (writer, reader, Store.open(root)):
        assert steps(store) == there | {20, 21, 22}
    assert verify(Store.open(root), full=True).problems == ()


@pytest.mark.parametrize("way", WAYS)
def test_process_that_did_not_look_finds_what_others_saved_after_the_store_was_put_back(
    way: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """Other records have the same numbers by then."""
    root, backup = tmp_path / "store", tmp_path / "backup"
    store = Store.init(root, database=True)
    for step in range(3):
        save(store, step)
    drop(store, 0)
    end_process(store)
    shutil.copytree(root, backup)
    for step in range(3, 6):
        save(store, step)
    drop(store, 1)
    end_process(store)
    reader = Store.open(root)
    assert steps(reader) == {2, 3, 4, 5}

    way(backup, root)
    other = Store.open(root)
    for step in range(3, 7):
        save(other, step, content=step + 1)
    drop(other, 2)
    end_process(other)

    assert {step: load(reader, step) for step in range(8)} == {
        0: None, 1: 1, 2: None, 3: 4, 4: 5, 5: 6, 6: 7, 7: None,
    }  # fmt: skip
    assert steps(reader) == {1, 3, 4, 5, 6}


def begin(backend: FolderBackend, name: str) -> tuple[str, str]:
    """Create an intent, and write a pack and a manifest for its commit."""
    intent = f"intents/{uuid.uuid4().hex}"
    token = backend.put_new(intent, [b"x"], durable=False)
    backend.put_all([(f"packs/{name}", [name.encode() * 100]), (f"manifests/{name}", [b"rows of " + name.encode()])])
    return intent, token


@pytest.mark.parametrize("way", WAYS)
def test_commit_whose_blobs_went_with_the_state_before_is_refused(
    way: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    root, backup = tmp_path / "store", tmp_path / "backup"
    backend = FolderBackend(root)
    backend.prepare(database=True)
    intent, token = begin(backend, "b")
    shutil.copytree(root, backup)
    assert backend.missing(["packs/b"]) == set()  # it writes the blobs
    way(backup, root)

    with pytest.raises(BlobNotFoundError, match=intent):
        backend.promote(intent, "refs/@b", b"b", token=token, replace=False)
    assert backend.stat("refs/@b") is None
    backend.withdraw(intent, token, own=["packs/b", "manifests/b"])
    intent, token = begin(backend, "b")
    backend.promote(intent, "refs/@b", b"b", token=token, replace=False)
    assert FolderBackend(root).get("packs/b") == b"b" * 100


@pytest.mark.parametrize("way", WAYS)
def test_save_whose_blobs_went_with_the_state_before_begins_anew(
    way: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    root, backup = tmp_path / "store", tmp_path / "backup"
    store = Store.init(root, database=True)
    with store.write_checkpoint(arrays(1)) as pending:
        shutil.copytree(root, backup)
        store.backend.settle("packs")  # it writes the blobs
        way(backup, root)
        pending.commit(target(1))

    assert steps(Store.open(root)) == {1}
    assert verify(Store.open(root), full=True).problems == ()


def test_blobs_of_a_save_that_was_given_up_hold_no_later_one_up(tmp_path: Path) -> None:
    store = Store.init(tmp_path, database=True)
    store.backend.put_all([(f"packs/{0:032x}.pack", [b"of a save that has died"])])
    store.backend.settle("packs")
    Store.open(tmp_path).backend.delete(f"packs/{0:032x}.pack")

    save(store, 1)
    assert steps(Store.open(tmp_path)) == {1}


@pytest.mark.parametrize("way", WAYS)
def test_saves_after_an_earlier_state_was_put_back_stay(way: Callable[[Path, Path], None], tmp_path: Path) -> None:
    root, backup = tmp_path / "store", tmp_path / "backup"
    store = Store.init(root, database=True)
    for step in range(3):
        save(store, step)
    end_process(store)
    shutil.copytree(root, backup)
    for step in range(3, 8):
        save(store, step)
    for step in range(3, 8):
        drop(store, step)
    end_process(store)
    way(backup, root)

    for step in range(3, 8):
        save(Store.open(root), step)
    for each in (store, Store.open(root)):
        assert steps(each) == set(range(8))
    assert verify(Store.open(root), full=True).problems == ()


# --- snapshots by hard links


def linked(root: Path, copy: Path) -> Path:
    """Copy a store as ``cp -al`` does."""
    shutil.copytree(root, copy, copy_function=os.link)
    return copy


def content(root: Path) -> dict[str, bytes]:
    """Return all files but the index of the write-ahead log, which readers change and SQLite makes anew."""
    paths = [path for path in root.rglob("*") if path.is_file() and path.name != SHM]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("changed", ["original", "snapshot"])
@pytest.mark.parametrize("database", [True, False], ids=["database", "files"])
def test_snapshot_by_hard_links_and_its_original_do_not_change_each_other(
    database: bool, changed: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    store = Store.init(root, database=database)
    for step in range(6):
        save(store, step)
    drop(store, 5)
    snapshot = linked(root, tmp_path / "snapshot")
    if changed == "snapshot":
        root, snapshot, store = snapshot, root, Store.open(snapshot)
    kept = content(snapshot)
    for step in (0, 1):
        drop(store, step)
    assert content(snapshot) == kept
    save(store, 2, content=20)
    save(store, 6)
    drop(store, 3)
    assert content(snapshot) == kept
    end_process(store) if database else None
    save(Store.open(root), 7)
    plan_gc(Store.open(root), grace_s=0).execute()
    plan_optimize(Store.open(root)).execute()
    plan_gc(Store.open(root), grace_s=0).execute()

    assert content(snapshot) == kept
    assert steps(Store.open(snapshot)) == {0, 1, 2, 3, 4}
    assert load(Store.open(snapshot), 2) == 2
    for each in (store, Store.open(root)):
        assert {step: load(each, step) for step in (2, 4, 6, 7)} == {2: 20, 4: 4, 6: 6, 7: 7}
        assert steps(each) == {2, 4, 6, 7}
    for each in (root, snapshot):
        assert verify(Store.open(each), full=True).problems == ()


@pytest.mark.parametrize("database", [True, False], ids=["database", "files"])
def test_ref_of_a_store_with_a_snapshot_is_withdrawn(database: bool, tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", database=database)
    save(store, 0)
    info = store.backend.stat(target(0).key)
    assert info is not None
    linked(tmp_path / "root", tmp_path / "snapshot")

    assert store.backend.withdraw(info.key, info.token)
    assert not store.backend.withdraw(info.key, info.token)
    assert steps(store) == set()
    assert steps(Store.open(tmp_path / "snapshot")) == {0}


@pytest.mark.parametrize("database", [True, False], ids=["database", "files"])
def test_snapshot_that_is_taken_during_a_save_does_not_change(database: bool, tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", database=database)
    save(store, 0)
    with store.write_checkpoint(arrays(1)) as pending:
        snapshot = linked(tmp_path / "root", tmp_path / "snapshot")
        kept = content(snapshot)
        pending.commit(target(1))

    assert content(snapshot) == kept
    assert steps(store) == {0, 1}
    assert steps(Store.open(snapshot)) == {0}


def test_damaged_database_of_a_snapshot_is_repaired(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", database=True)
    for step in range(3):
        save(store, step)
    end_process(store)
    snapshot = linked(tmp_path / "root", tmp_path / "snapshot")
    database = tmp_path / "root" / ".tensorcas" / "blobs.db"
    with open(database, "r+b") as file:
        file.write(bytes(100))

    for root in (tmp_path / "root", snapshot):
        assert verify(Store.open(root)).problems
        plan_repair(Store.open(root)).execute()
        assert steps(Store.open(root)) == {0, 1, 2}
        assert verify(Store.open(root), full=True).problems == ()


# --- all of it


def check_history(folder: Path, seed: int) -> None:
    """Save, delete, collect, snapshot and put back at random with several open processes; compare with a dict."""
    rng = random.Random(seed)
    root = folder / "store"
    stores = [Store.init(root, database=True)]
    expected: dict[int, int] = {}
    backups: list[tuple[Path, dict[int, int]]] = []
    snapshots: list[tuple[Path, dict[int, int]]] = []
    for number in range(rng.randrange(10, 40)):
        act, store, step = rng.random(), rng.choice(stores), rng.randrange(5)
        if act < 0.45:
            save(store, step, content=number)
            expected[step] = number
        elif act < 0.6 and step in expected:
            drop(store, step)
            del expected[step]
        elif act < 0.7:
            stores.append(Store.open(root))
        elif act < 0.75:
            end_process(store)
        elif act < 0.85:
            backups.append((folder / f"backup-{number}", dict(expected)))
            shutil.copytree(root, backups[-1][0])
        elif act < 0.9:
            snapshots.append((linked(root, folder / f"snapshot-{number}"), dict(expected)))
        elif backups:
            backup, expected = rng.choice(backups)
            expected = dict(expected)
            rng.choice([in_its_place, file_by_file])(backup, root)
        else:
            plan_gc(Store.open(root), grace_s=0).execute()
        for each in (rng.choice(stores), Store.open(root)):
            assert {at: load(each, at) for at in steps(each)} == expected
    for snapshot, kept in snapshots:
        opened = Store.open(snapshot)
        assert {at: load(opened, at) for at in steps(opened)} == kept
    assert verify(Store.open(root), full=True).problems == ()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_saves_snapshots_and_backups_agrees_with_a_dict(seed: int, tmp_path: Path) -> None:
    check_history(tmp_path, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 60))
def test_any_long_series_of_histories_with_snapshots_and_backups_agrees_with_a_dict(seed: int, tmp_path: Path) -> None:
    check_history(tmp_path, seed)
