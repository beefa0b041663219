"""Stores with a damaged database: what a verification names, what saves and loads do, and what a repair brings back."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.backends._records import stored_key
from tensorcas_mlflow.backends._rows import Known, Rows
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import label_of

N_STEPS = 6


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(step, step + 640, dtype=np.float32), "b": np.full(8, step, np.float32)}


def save(store: Store, step: int) -> None:
    with store.write_checkpoint(arrays(step)) as pending:
        pending.commit(RefTarget(run_id="run", step=step))


def key_of_step(step: int) -> str:
    return RefTarget(run_id="run", step=step).key


def loads(store: Store, step: int) -> None:
    """Load a step, and compare every byte."""
    ref = store.ref(key_of_step(step))
    loaded = store.read_tensors(store.manifest(ref))
    assert {name: array.tobytes() for name, array in loaded.items()} == {
        name: array.tobytes() for name, array in arrays(step).items()
    }


def steps_of(root: Path) -> list[int]:
    """Load every step of a store, and return the steps."""
    store = Store.open(root)
    steps = sorted(ref.step for ref in store.checkpoints() if ref.step is not None)
    for step in steps:
        loads(store, step)
    return steps


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with a database and some steps, one of them dropped."""
    store = Store.init(tmp_path / "root", chunk_bytes=4096, database=True)
    for step in range(N_STEPS):
        save(store, step)
    store.drop(store.checkpoints()[1])
    return tmp_path / "root"


def change(root: Path, statement: str, *values: object) -> None:
    """Change the database behind the back of the checks, as a disk does: without a later time of its file."""
    end_of_process()
    database = root / ".tensorcas/blobs.db"
    before = database.stat()
    connection = sqlite3.connect(database, isolation_level=None)
    try:
        assert connection.execute(statement, values).rowcount > 0
    finally:
        connection.close()
    os.utime(database, ns=(before.st_atime_ns, before.st_mtime_ns))


def end_of_process() -> None:
    """Close the connections of this process, so that the write-ahead log is in the database."""
    gc.collect()
    Database.close_all()


def record_of(root: Path, key: str) -> int:
    connection = sqlite3.connect(root / ".tensorcas/blobs.db", isolation_level=None)
    connection.text_factory = bytes
    try:
        row = Rows(connection, Known()).find(key)
    finally:
        connection.close()
    assert row is not None
    return row.record


def test_an_empty_and_a_sound_database_are_no_finding(root: Path, tmp_path: Path) -> None:
    empty = Store.init(tmp_path / "empty", database=True)
    for store in (empty, Store.open(root)):
        assert verify(store, full=True).problems == ()
        assert plan_repair(store).is_empty


def test_lost_bytes_of_a_ref_are_named_and_cost_that_ref_alone(root: Path) -> None:
    key = key_of_step(5)
    change(root, "UPDATE records SET data = zeroblob(9) WHERE number = ?", record_of(root, key))
    report = verify(Store.open(root))
    assert {problem.checkpoint for problem in report.problems if problem.key == key} == {label_of(key)}
    plan = plan_repair(Store.open(root))
    assert [loss.key for loss in plan.losses if loss.key.startswith("refs/")] == [key]
    assert key in str(plan)
    done = plan.execute()

    assert [loss.key for loss in done.losses] == [key]
    assert not done.is_whole
    store = Store.open(root)
    for step in (0, 2, 3, 4):
        loads(store, step)
    with pytest.raises(CorruptError):
        store.ref(key)
    assert [problem.key for problem in verify(store, full=True).problems] == [key]


@pytest.mark.long
def test_lost_ref_keeps_its_chunks_until_it_is_given_up_or_restored(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "backup")
    key = key_of_step(5)
    change(root, "UPDATE records SET data = zeroblob(9) WHERE number = ?", record_of(root, key))
    plan_repair(Store.open(root)).execute()
    store = Store.open(root)
    assert plan_gc(store, grace_s=0).unread_refs.keys() == {key}
    plan_gc(store, grace_s=0).execute()
    done = plan_repair(store, sources=[Store.open(tmp_path / "backup")]).execute()

    assert key in done.restored
    assert steps_of(root) == [0, 2, 3, 4, 5]
    assert verify(Store.open(root), full=True).problems == ()


@pytest.mark.long
def test_damaged_rows_cost_nothing_if_their_records_are_whole(root: Path) -> None:
    key = key_of_step(5)
    change(root, "UPDATE blobs SET place = place + 1 WHERE key = ?", stored_key(key))
    change(root, "DELETE FROM blobs WHERE key = ?", stored_key(key_of_step(0)))
    assert len(verify(Store.open(root)).problems) >= 1
    done = plan_repair(Store.open(root)).execute()

    assert done.losses == ()
    assert steps_of(root) == [0, 2, 3, 4, 5]
    assert verify(Store.open(root), full=True).problems == ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("statement", "said", "lost"),
    [
        ("UPDATE records SET time = time + 1 WHERE number = 3", "commit 3 is not what was committed", set()),
        ("UPDATE records SET hash = zeroblob(16) WHERE number = 3", "commit 3 is not what was committed", set()),
        ("UPDATE records SET after = zeroblob(16) WHERE number = 3", "commit 3 is damaged", set()),
        ("DELETE FROM records WHERE number = 6", "commits 6 to 6 are missing", {5}),
        ("DELETE FROM records WHERE number = 7", "it ends with commit 6", set()),
    ],
)
def test_changed_commits_are_named_and_a_repair_loses_no_other_checkpoint(
    root: Path, statement: str, said: str, lost: set[int]
) -> None:
    change(root, statement)
    assert said in str(verify(Store.open(root)))
    done = plan_repair(Store.open(root)).execute()

    assert {loss.key for loss in done.losses if loss.key.startswith("refs")} == set(map(key_of_step, lost))
    if lost:
        assert set(steps_damaged(root)) == lost
        plan_gc(Store.open(root), grace_s=0, abandon=list(map(key_of_step, lost))).execute()
    assert steps_of(root) == sorted({0, 2, 3, 4, 5} - lost)
    assert verify(Store.open(root), full=True).problems == ()


@pytest.mark.long
def test_older_database_that_was_put_back_is_named_and_repaired_with_its_loss(root: Path, tmp_path: Path) -> None:
    database, older = root / ".tensorcas/blobs.db", tmp_path / "older"
    end_of_process()
    shutil.copy(database, older)
    store = Store.open(root)
    save(store, 6)
    del store
    end_of_process()
    shutil.copy(older, database)
    with pytest.raises(CorruptError, match="put back"):
        Store.open(root).checkpoints()
    assert "put back" in str(verify(Store.open(root)))
    done = plan_repair(Store.open(root)).execute()

    assert [loss.key for loss in done.losses] == ["blobs.db"]
    assert steps_of(root) == [0, 2, 3, 4, 5]
    assert plan_repair(Store.open(root)).is_empty


@pytest.mark.long
@pytest.mark.parametrize("folder", ["index", "condemned", "refs", "manifests", "packs"])
def test_saves_go_on_beside_a_damaged_listing_with_one_warning(
    root: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    if folder == "condemned":
        change(root, "INSERT INTO state VALUES (?, 1, 1)", folder.encode())
    else:
        change(root, "UPDATE state SET n = n + 1 WHERE name = ?", folder.encode())
    store = Store.open(root)
    with caplog.at_level(logging.WARNING):
        for step in (4, 7, 8):
            save(store, step)
    n_warned = sum("tensorcas repair" in record.getMessage() for record in caplog.records)
    assert n_warned == 1 if folder in ("index", "condemned") else n_warned <= 1
    for step in (0, 2, 3, 4, 5, 7, 8):
        loads(Store.open(root), step)
    plan_repair(Store.open(root)).execute()

    assert steps_of(root) == [0, 2, 3, 4, 5, 7, 8]
    assert verify(Store.open(root), full=True).problems == ()


@pytest.mark.long
def test_saves_go_on_as_files_if_no_page_can_be_read(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = root / ".tensorcas/blobs.db"
    end_of_process()
    database.write_bytes(bytes(database.stat().st_size))
    store = Store.open(root)
    with caplog.at_level(logging.WARNING):
        for step in (7, 8):
            save(store, step)
    assert sum("tensorcas repair" in record.getMessage() for record in caplog.records) == 1
    for step in (7, 8):
        loads(Store.open(root), step)
    with pytest.raises(CorruptError):
        Store.open(root).ref(key_of_step(5))
    done = plan_repair(Store.open(root)).execute()

    assert [loss.key for loss in done.losses] == ["blobs.db"]
    assert steps_of(root) == [7, 8]


@pytest.mark.long
def test_the_command_repairs_a_damaged_database(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = key_of_step(5)
    change(root, "UPDATE records SET data = zeroblob(9) WHERE number = ?", record_of(root, key))

    assert main(["verify", "--root", str(root)]) == 3
    assert main(["repair", "--root", str(root), "--dry-run"]) == 3
    assert steps_damaged(root) == [5]
    assert main(["repair", "--root", str(root), "--yes"]) == 3
    assert "rebuilt the database with " in capsys.readouterr().out
    assert main(["repair", "--root", str(root), "--yes"]) == 3
    assert main(["gc", "--root", str(root), "--abandon", key, "--yes"]) == 0
    assert main(["repair", "--root", str(root), "--yes"]) == 0
    assert main(["verify", "--root", str(root)]) == 0
    assert steps_of(root) == [0, 2, 3, 4]


def steps_damaged(root: Path) -> list[int]:
    """Return the steps of the damaged refs."""
    return [int(key.rpartition("@")[2]) for key in Store.open(root).readable_checkpoints()[1]]
