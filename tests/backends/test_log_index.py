"""An index of a log saves reading the log, and changes no answer."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorcas_mlflow.backends._log_index import LogIndex, index_bytes, read_index
from tensorcas_mlflow.backends._log_records import HEADER_BYTES, MARK_AT

from tensorcas_mlflow.backends import LoggedBackend, _log_view, _log_writer
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store

N_STEPS = 120


@pytest.fixture(autouse=True)
def _small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("_INDEXED_BYTES", "_INDEXED_AGAIN_BYTES"):
        monkeypatch.setattr(_log_view, bound, 4 << 10)


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(step, step + 32, dtype=np.float32), "b": np.full(8, step, np.float32)}


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


def save(store: Store, step: int) -> None:
    with store.write_checkpoint(arrays(step)) as pending:
        pending.commit(target(step))


def close(store: Store) -> None:
    assert isinstance(store.backend, LoggedBackend)
    _log_writer.close_writer(store.backend._view)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = Store.init(tmp_path / "root", logs=True)
    for step in range(N_STEPS):
        save(store, step)
    for step in (3, 50):
        ref = store.ref(target(step).key)
        assert ref is not None
        store.drop(ref)
    close(store)
    return tmp_path / "root"


def the_file(root: Path, ending: str) -> Path:
    (found,) = (root / ".tensorcas" / "logs").glob(f"*.{ending}")
    return found


def view_of(store: Store) -> _log_view.LogView:
    assert isinstance(store.backend, LoggedBackend)
    return store.backend._view


def load(store: Store, step: int) -> bool:
    ref = store.ref(target(step).key)
    if ref is None:
        return False
    found = store.read_tensors(store.manifest(ref))
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in arrays(step).items()
    }
    return True


def blobs(backend: LoggedBackend) -> dict[str, tuple[int, float, str, bytes]]:
    infos = [info for prefix in ("packs", "manifests", "refs") for info in backend.list(prefix)]
    return {info.key: (info.size, info.modified_s, info.token, backend.get(info.key)) for info in infos}


def test_the_latest_step_is_loaded_without_reading_the_whole_log(root: Path) -> None:
    store = Store.open(root)
    names = {info.key for info in store.backend.list_dir("refs/runs/run")[0]}
    assert load(store, N_STEPS - 1)

    (log,) = view_of(store)._logs.values()
    assert names == {target(step).key for step in range(N_STEPS) if step not in (3, 50)}
    assert log.index is not None
    assert log.index.end > the_file(root, "log").stat().st_size * 0.7
    assert len(log.single_reads) < 5


def test_an_index_changes_no_answer(root: Path) -> None:
    with_index = Store.open(root)
    there = {step for step in range(N_STEPS) if load(with_index, step)}
    listed = blobs(LoggedBackend(root / ".tensorcas"))
    the_file(root, "index").unlink()

    assert there == set(range(N_STEPS)) - {3, 50}
    assert blobs(LoggedBackend(root / ".tensorcas")) == listed
    assert {step for step in range(N_STEPS) if load(Store.open(root), step)} == there


def flipped(data: bytes, at: int) -> bytes:
    out = bytearray(data)
    out[at] ^= 1
    return bytes(out)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: flipped(data, 3),
        lambda data: flipped(data, 30),
        lambda data: flipped(data, len(data) - 5),
    ],
    ids=["half", "empty", "magic", "end", "columns"],
)
def test_a_damaged_index_is_ignored(root: Path, damage: Callable[[bytes], bytes]) -> None:
    path = the_file(root, "index")
    path.write_bytes(damage(path.read_bytes()))
    store = Store.open(root)

    assert all(load(store, step) == (step not in (3, 50)) for step in range(N_STEPS))
    assert all(log.index is None for log in view_of(store)._logs.values())


@pytest.mark.parametrize("part", [2, 100], ids=["half", "almost all"])
def test_an_index_that_is_newer_than_its_log_proves_the_loss(
    root: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = the_file(root, "log")
    whole = path.read_bytes()
    # The mark in the header does not tell of it.
    path.write_bytes(whole[:MARK_AT] + bytes(HEADER_BYTES - MARK_AT) + whole[HEADER_BYTES : len(whole) // part])
    the_file(root, "dead").unlink()
    if part == 100:  # smaller than any log with an index
        monkeypatch.undo()

    with pytest.raises(CorruptError, match="tensorcas repair"):
        load(Store.open(root), 0)
    with pytest.raises(CorruptError, match="tensorcas repair"):
        save(Store.open(root), N_STEPS)
    assert [problem.key for problem in verify(Store.open(root)).problems] == [f"logs/{path.name}"]
    plan_repair(Store.open(root)).execute()
    store = Store.open(root)
    there = [step for step in range(N_STEPS) if load(store, step)]
    assert there == list(range(len(there)))
    assert len(there) < N_STEPS
    assert verify(store, full=True).problems == ()


def test_damage_of_an_indexed_record_is_an_error_of_a_read_and_of_verify(root: Path) -> None:
    store = Store.open(root)
    backend = store.backend
    assert isinstance(backend, LoggedBackend)
    key = target(7).key
    assert backend.stat(key) is not None
    entry = backend._view.find(key)
    assert entry is not None
    path = the_file(root, "log")
    path.write_bytes(flipped(path.read_bytes(), entry.record + 60))

    with pytest.raises(CorruptError, match=f"the record at byte {entry.record} is damaged"):
        Store.open(root).ref(key)
    with pytest.raises(CorruptError, match=f"byte {entry.record}"):
        list(Store.open(root).backend.list("packs"))
    assert [problem.key for problem in verify(Store.open(root)).problems] == [f"logs/{path.name}"]


def test_a_process_with_an_index_saves_shares_and_collects(root: Path) -> None:
    store = Store.open(root)
    save(store, N_STEPS)
    with store.write_checkpoint(arrays(2)) as pending:
        assert pending.n_new_bytes == 0
        pending.commit(target(1002))
    for step in range(10, N_STEPS):
        ref = store.ref(target(step).key)
        if ref is not None:
            store.drop(ref)
    close(store)
    plan_gc(Store.open(root), grace_s=0).execute()

    fresh = Store.open(root)
    assert {step for step in range(N_STEPS + 1) if load(fresh, step)} == {*range(10), N_STEPS} - {3}
    assert verify(fresh, full=True).problems == ()
    names = [path.name.partition(".") for path in (root / ".tensorcas" / "logs").iterdir()]
    logs = {stem for stem, _, ending in names if ending == "log"}
    assert {stem for stem, _, ending in names if ending in ("dead", "index")} <= logs


def test_an_index_grows_with_its_log(root: Path) -> None:
    before = the_file(root, "index").read_bytes()
    store = Store.open(root)
    for step in range(N_STEPS, 2 * N_STEPS):
        save(store, step)
    close(store)

    assert the_file(root, "index").stat().st_size > len(before)
    fresh = Store.open(root)
    assert all(load(fresh, step) for step in range(100, 2 * N_STEPS))


def test_a_consumed_intent_in_an_index_cannot_be_withdrawn(root: Path) -> None:
    backend = LoggedBackend(root / ".tensorcas")
    intent = f"intents/{uuid.uuid4().hex}"
    token = backend.put_new(intent, [b"x"])
    kept = (root / ".tensorcas" / intent).read_bytes()
    backend.put_all([("packs/p", [b"pack"])])
    backend.promote(intent, "refs/runs/run/@9999", b"ref", token=token, replace=False)
    # As if the process had died before it removed the intent.
    (root / ".tensorcas" / intent).write_bytes(kept)
    log = backend._view.find("refs/runs/run/@9999")
    assert log is not None
    backend._view._logs[log.log].written = None
    backend._view.write_index(log.log, backend._view._logs[log.log].end)
    _log_writer.close_writer(backend._view)

    other = LoggedBackend(root / ".tensorcas")
    info = other.stat(intent)
    assert info is not None
    assert not other.withdraw(intent, info.token)
    assert all(each.index is not None for each in other._view._logs.values())


def test_a_reader_finds_the_blobs_of_an_indexed_log_that_is_rewritten_meanwhile(root: Path, tmp_path: Path) -> None:
    reader = Store.open(root)
    assert load(reader, 0)
    store = Store.open(root)
    for step in range(20, N_STEPS):
        if step != 50:
            ref = store.ref(target(step).key)
            assert ref is not None
            store.drop(ref)
    close(store)
    plan_gc(Store.open(root), grace_s=0).execute()

    assert load(reader, 5)
    assert not load(reader, 30)
    shutil.rmtree(root)


def test_a_process_that_opens_its_store_anew_for_each_save_writes_indexes(tmp_path: Path) -> None:
    Store.init(tmp_path / "root", logs=True)
    for step in range(N_STEPS):
        save(Store.open(tmp_path / "root"), step)
    close(Store.open(tmp_path / "root"))

    store = Store.open(tmp_path / "root")
    assert load(store, N_STEPS - 1)
    (log,) = view_of(store)._logs.values()
    assert log.index is not None
    assert log.index.end > the_file(tmp_path / "root", "log").stat().st_size * 0.7


@pytest.mark.parametrize(
    "change",
    [
        lambda index: {"commit_keys": ["refs/../../x", *index.commit_keys[1:]]},
        lambda index: {"commits": changed(index.commits, "start", 1 << 63)},
        lambda index: {"commits": changed(index.commits, "record", 1 << 31)},
    ],
    ids=["key", "start", "record"],
)
def test_a_forged_index_is_ignored(root: Path, change: Callable[[LogIndex], dict[str, Any]]) -> None:
    path = the_file(root, "index")
    index = read_index(path.stem, path.read_bytes())
    assert index is not None
    path.write_bytes(index_bytes(path.stem, replace(index, **change(index))))
    store = Store.open(root)

    assert all(load(store, step) == (step not in (3, 50)) for step in range(N_STEPS))


def changed(commits: np.ndarray, name: str, value: int) -> np.ndarray:
    out = commits.copy()
    out[name][0] = value
    return out


def test_a_log_that_a_collection_has_rewritten_has_an_index(root: Path) -> None:
    store = Store.open(root)
    for step in range(0, N_STEPS, 3):
        ref = store.ref(target(step).key)
        if ref is not None:
            store.drop(ref)
    for step in range(0, N_STEPS, 2):
        ref = store.ref(target(step).key)
        if ref is not None:
            store.drop(ref)
    before = the_file(root, "log")
    close(store)
    plan_gc(Store.open(root), grace_s=0).execute()

    assert the_file(root, "log") != before
    fresh = Store.open(root)
    assert load(fresh, N_STEPS - 1)
    (log,) = view_of(fresh)._logs.values()
    assert log.index is not None
    assert all(load(Store.open(root), step) == bool(step % 2 and step % 3) for step in range(N_STEPS))
    assert verify(Store.open(root), full=True).problems == ()
