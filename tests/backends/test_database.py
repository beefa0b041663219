"""The database of a folder's small blobs: transactions, copies, threads, forks, failed syncs and damage."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tensorcas_mlflow.backends import FolderBackend, _database, _mend, _salvage, damages_of, rebuild
from tensorcas_mlflow.backends._database import HEAD, SHM, WAL, Head
from tensorcas_mlflow.backends._local import LocalBackend
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._records import stored_key
from tensorcas_mlflow.backends._rows import NAME, PAGE_BYTES, Change, DamagedError, Rows
from tensorcas_mlflow.backends._salvage import name_of_row
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    CorruptError,
    RefusedError,
    StoreNotFoundError,
)

FORK = multiprocessing.get_context("fork")


def made(folder: Path) -> FolderBackend:
    backend = FolderBackend(folder)
    backend.prepare(database=True)
    return backend


def blob_of(name: str) -> bytes:
    return random.Random(name).randbytes(600)


def commit(backend: FolderBackend, name: str, *, data: bytes | None = None, replace: bool = False) -> None:
    """Save a pack, a manifest and a ref of a name."""
    intent, twin = f"intents/{uuid.uuid4().hex}", uuid.uuid4().hex
    token = backend.put_new(intent, [b"x"], durable=False)
    packs = (
        [] if replace else [(f"packs/{name}", [blob_of(name)]), (f"manifests/{name}", [b"rows of " + name.encode()])]
    )
    backend.put_all([*packs, (f"packs/{twin}", [b"twin"])])
    backend.promote(intent, f"refs/@{name}", name.encode() if data is None else data, token=token, replace=replace)


def refs(backend: FolderBackend) -> set[str]:
    return {info.key.removeprefix("refs/@") for info in backend.list("refs")}


def check_whole(backend: FolderBackend, names: set[str]) -> None:
    assert refs(backend) == names
    for name in names:
        assert backend.get(f"refs/@{name}") == name.encode()
        assert backend.get(f"packs/{name}") == blob_of(name)
    assert damages_of(backend) == []


def in_child(act: Callable[[], None]) -> int:
    """Run something in a forked child; return its exit code."""
    child = FORK.Process(target=act)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def killed_after(folder: Path, names: list[str]) -> None:
    """Let a process commit and be killed, so that the write-ahead log is left."""

    def act() -> None:
        backend = FolderBackend(folder)
        for name in names:
            commit(backend, name)
        os._exit(9)

    assert in_child(act) == 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two refs, which no process has open."""
    killed_after(made(tmp_path / "store").root, ["a", "b"])
    return tmp_path / "store"


# --- transactions


def test_blobs_of_a_commit_are_seen_by_others_together_with_it(tmp_path: Path) -> None:
    one, other = made(tmp_path), FolderBackend(tmp_path)
    token = one.put_new("intents/1", [b"x"])
    one.put_all([("packs/1", [b"pack"])])
    assert other.stat("packs/1") is None
    assert one.get("packs/1") == b"pack"

    one.promote("intents/1", "refs/@1", b"ref", token=token, replace=False)

    assert (other.get("packs/1"), other.get("refs/@1"), other.stat("intents/1")) == (b"pack", b"ref", None)


def test_small_blob_shows_no_sooner_than_the_large_ones_of_its_call(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    backend.prepare()

    def blobs() -> Iterator[tuple[str, list[bytes]]]:
        yield "packs/large", [bytes(1 << 20)]
        yield "index/large.loose", [b""]
        # Any listing, and any commit of the process, writes what the backend holds.
        assert not backend.list_dir("index").blobs
        assert backend.stat("packs/large") is None
        yield "packs/other", [bytes(1 << 20)]

    backend.put_all(blobs())

    assert set(backend.list_dir("index").blobs) == {"large.loose"}
    assert backend.missing(["packs/large", "packs/other"]) == set()


def test_call_that_fails_leaves_no_small_blob_without_its_large_one(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    backend.prepare()

    def blobs() -> Iterator[tuple[str, list[bytes]]]:
        yield "packs/large", [bytes(1 << 20)]
        yield "index/large.loose", [b""]
        raise RuntimeError("the next cannot be encoded")

    with pytest.raises(RuntimeError, match="encoded"):
        backend.put_all(blobs())

    assert not backend.list_dir("index").blobs
    assert backend.stat("packs/large") is None


def test_deletion_of_many_blobs_waits_for_other_writers_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FolderBackend(folder)
    begun: list[bool] = []
    write = _database.Database.write

    def noted(self: _database.Database, act: Callable[[Change], Any], **options: Any) -> Any:
        begun.append(options["durable"])
        return write(self, act, **options)

    monkeypatch.setattr(_database.Database, "write", noted)
    backend.delete("packs/a", "packs/none", "manifests/a", "packs/b")

    assert begun == [False]
    assert {info.key for info in FolderBackend(folder).list("manifests")} == {"manifests/b"}


@pytest.mark.long
def test_work_that_one_does_alone_keeps_no_commit_waiting(folder: Path) -> None:
    one, other = FolderBackend(folder), FolderBackend(folder)
    one.put_new("format", [b"{}"])
    with one.alone() as is_alone, other.alone() as are_two:
        commit(other, "alone")

    assert (is_alone, are_two) == (True, False)
    assert one.get("refs/@alone")


def test_blob_of_a_save_that_gives_up_leaves_nothing_behind(tmp_path: Path) -> None:
    backend = made(tmp_path)
    token = backend.put_new("intents/1", [b"x"], durable=False)
    backend.put_all([("packs/1", [b"one"]), ("packs/2", [b"two"])])
    assert backend.withdraw("intents/1", token, own=["packs/1", "packs/3"])
    backend.settle("refs")

    assert [info.key for info in backend.list("packs")] == ["packs/2"]


def test_promote_of_a_taken_ref_writes_none_of_its_blobs(tmp_path: Path) -> None:
    backend, other = made(tmp_path), FolderBackend(tmp_path)
    commit(other, "a")
    token = backend.put_new("intents/1", [b"x"])
    backend.put_all([("packs/1", [b"one"])])
    with pytest.raises(BlobExistsError):
        backend.promote("intents/1", "refs/@a", b"new", token=token, replace=False)

    assert other.get("refs/@a") == b"a"
    assert other.stat("packs/1") is None
    assert other.stat("intents/1") is not None


def test_large_blob_is_a_file(tmp_path: Path) -> None:
    backend = made(tmp_path)
    backend.put_all([("packs/small", [b"s" * 1000]), ("packs/large", [b"l" * 200_000, b"l" * 200_000])])

    assert backend.get("packs/large") == b"l" * 400_000
    assert [path.name for path in (tmp_path / "packs").iterdir()] == ["large"]


def test_blob_is_read_in_every_way_of_a_file(tmp_path: Path) -> None:
    backend = made(tmp_path)
    backend.put_new("packs/1", [bytes(range(200))])
    out = bytearray(10)
    file = backend.open_file("packs/1")
    file.read_into(5, [memoryview(out)])

    assert bytes(out) == bytes(range(5, 15))
    file.close()


def test_tokens_of_a_key_never_come_back(tmp_path: Path) -> None:
    backend = made(tmp_path)
    tokens = []
    for _ in range(5):
        tokens.append(backend.put_new("refs/@a", [b"same"]))
        backend.delete("refs/@a")

    assert len(set(tokens)) == 5
    backend.put_new("refs/@a", [b"same"])
    assert not any(backend.withdraw("refs/@a", token) for token in tokens)


@pytest.mark.long
def test_blobs_of_one_process_are_read_by_another(folder: Path) -> None:
    killed_after(folder, ["c"])

    check_whole(FolderBackend(folder), {"a", "b", "c"})


@pytest.mark.long
def test_blob_is_found_while_another_thread_writes_it(tmp_path: Path) -> None:
    backend = made(tmp_path)
    done = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        while not done.is_set():
            try:
                for name in refs(backend):
                    assert backend.get(f"packs/{name}") == blob_of(name)
            except BaseException as error:  # noqa: BLE001 -- raised below
                errors.append(error)
                return

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(30):
        commit(backend, str(number))
    done.set()
    for thread in threads:
        thread.join()

    assert errors == []
    check_whole(backend, set(map(str, range(30))))


def test_manifest_that_names_another_one_of_its_commit_is_read(tmp_path: Path) -> None:
    """Its own name is the hash of all of it."""
    backend = made(tmp_path)
    first = b"a manifest"
    second = b"derived from " + digest(first).hex().encode()
    keys = [f"manifests/{digest(data).hex()}" for data in (first, second)]
    token = backend.put_new("intents/1", [b"x"])
    backend.put_all([(keys[0], [first]), (keys[1], [second])])
    backend.promote("intents/1", "refs/@1", b"ref", token=token, replace=False)

    assert list(map(FolderBackend(tmp_path).get, keys)) == [first, second]


def test_key_that_is_too_long_is_refused_and_later_saves_succeed(folder: Path) -> None:
    backend = FolderBackend(folder)
    with pytest.raises(BackendError, match="too long"):
        backend.put_all([("packs/" + "/".join(["a" * 200] * 400), [b"x"])])
    commit(backend, "c")

    check_whole(backend, {"a", "b", "c"})


def test_backend_that_is_dropped_closes_its_connections(folder: Path) -> None:
    backend = FolderBackend(folder)
    commit(backend, "c")
    assert (folder / WAL).exists()
    del backend

    assert not (folder / WAL).exists()


def test_connections_of_a_dropped_backend_that_cannot_be_closed_bother_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk below a mount may be gone."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    closed: list[object] = []

    def close(self: _database.Database) -> None:
        closed.append(self)
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patch:
        patch.setattr(_database.Database, "close", close)
        backend = FolderBackend(folder)
        del backend

    assert closed
    assert not shown


@pytest.mark.long
def test_threads_that_open_and_close_the_store_again_and_again_read_it(folder: Path) -> None:
    """The last connection of a process that is closed removes the log, maybe while another thread opens one."""
    errors: list[BaseException] = []

    def work() -> None:
        for _ in range(150):
            backend = FolderBackend(folder)
            try:
                assert backend.get("refs/@a") == b"a"
            except BaseException as error:  # noqa: BLE001 -- raised below
                errors.append(error)
            backend._database.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []


# --- durability


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders that are synced, and the modes of SQLite's transactions."""
    names: list[str] = []
    monkeypatch.setattr(_database, "sync_folder", lambda folder: names.append("folder"))
    connect = _database.Database._connect

    def traced(self: _database.Database) -> sqlite3.Connection:
        connection = connect(self)
        connection.set_trace_callback(lambda line: names.append(line) if "synchronous" in line else None)
        return connection

    monkeypatch.setattr(_database.Database, "_connect", traced)
    return names


def test_commit_is_synced_and_an_intent_is_not(folder: Path, synced: list[str]) -> None:
    backend = FolderBackend(folder)
    token = backend.put_new("intents/1", [b"x"], durable=False)
    assert synced == []
    backend.promote("intents/1", "refs/@1", b"ref", token=token, replace=False)

    assert synced == ["PRAGMA synchronous = FULL", "folder"]


def test_name_of_a_new_log_is_synced_before_the_first_commit(folder: Path, synced: list[str]) -> None:
    """SQLite ignores it if that fails."""
    backend = FolderBackend(folder)
    commit(backend, "c")
    assert synced.count("folder") == 1
    commit(backend, "d")
    assert synced.count("folder") == 1
    backend._database.close()
    assert not (folder / WAL).exists()
    commit(backend, "e")

    assert synced.count("folder") == 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the commits of statements that contain a text fail as SQLite fails if a sync does."""
    texts: list[str] = []
    connect = _database.Database._connect

    class Failing:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection

        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if any(text in statement for text in texts):
                texts.clear()
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
                raise error
            return self._connection.execute(statement, *values)

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

    monkeypatch.setattr(_database.Database, "_connect", lambda self: Failing(connect(self)))
    return texts


def test_failed_sync_takes_the_ref_of_its_commit_back(folder: Path, failing: list[str]) -> None:
    backend = FolderBackend(folder)
    failing.append("COMMIT")
    with pytest.raises(BackendError):
        commit(backend, "c")

    check_whole(FolderBackend(folder), {"a", "b"})
    assert refs(backend) == {"a", "b"}


def test_failed_sync_of_a_replacement_leaves_the_old_ref(folder: Path, failing: list[str]) -> None:
    backend = FolderBackend(folder)
    assert backend.get("refs/@a") == b"a"
    token = backend.put_new("intents/1", [b"x"])
    failing.append("COMMIT")
    with pytest.raises(BackendError):
        backend.promote("intents/1", "refs/@a", b"new", token=token, replace=True)

    assert FolderBackend(folder).get("refs/@a") == b"a"


def test_failed_sync_of_another_process_is_known_to_every_process(folder: Path, failing: list[str]) -> None:
    """What others have written may be gone from the disk, though the page cache has it."""
    one, other = FolderBackend(folder), FolderBackend(folder)
    other.put_new("packs/1", [b"x"], durable=False)
    one.put_new("packs/2", [b"x"])
    failing.append("COMMIT")
    with pytest.raises(BackendError):
        commit(one, "c")
    before = (folder / NAME).stat().st_mtime_ns
    commit(other, "d")

    assert (folder / NAME).stat().st_mtime_ns > before
    assert not (folder / "blobs.unsynced").exists()
    check_whole(other, {"a", "b", "d"})


def test_failed_sync_is_not_forgotten_before_it_is_repeated(folder: Path, failing: list[str]) -> None:
    """A reader may hold up the checkpoint that repeats it."""
    one, reader = FolderBackend(folder), FolderBackend(folder)
    failing.append("COMMIT")
    with pytest.raises(BackendError):
        commit(one, "c")

    def meanwhile(rows: Rows) -> None:
        rows.state()
        with pytest.raises(BackendError, match="a reader holds up"):
            commit(one, "d")
        assert (folder / "blobs.unsynced").exists()

    reader._database.read(meanwhile)
    commit(one, "f")
    assert not (folder / "blobs.unsynced").exists()
    check_whole(one, {"a", "b", "f"})


def test_failed_sync_that_no_file_notes_is_known_to_its_process(folder: Path, failing: list[str]) -> None:
    """The disk may be full, too."""
    backend = FolderBackend(folder)
    backend._database._unsynced = str(folder / "none" / "blobs.unsynced")
    failing.append("COMMIT")
    with pytest.raises(BackendError):
        commit(backend, "c")
    before = (folder / NAME).stat().st_mtime_ns
    commit(backend, "d")

    assert (folder / NAME).stat().st_mtime_ns > before
    check_whole(backend, {"a", "b", "d"})


def test_failed_checkpoint_fails_no_commit_that_is_done(
    folder: Path, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_database, "_CHECKPOINT_BYTES", 1)
    backend = FolderBackend(folder)
    backend.settle("refs")
    failing.append("wal_checkpoint")
    commit(backend, "c")
    commit(backend, "d")

    assert not (folder / "blobs.unsynced").exists()
    check_whole(backend, {"a", "b", "c", "d"})


@pytest.mark.parametrize("ends", [lambda one: one._database.shrink(), lambda one: one._database.close()])
def test_failed_sync_of_any_checkpoint_is_noted(
    folder: Path, failing: list[str], ends: Callable[[FolderBackend], None]
) -> None:
    """Others may have written what the disk has lost, and rely on it."""
    one, other = FolderBackend(folder), FolderBackend(folder)
    other.put_new("packs/1", [b"x"], durable=False)
    assert refs(one) == {"a", "b"}
    failing.append("wal_checkpoint")
    with contextlib.suppress(OSError):
        ends(one)

    assert (folder / "blobs.unsynced").exists()
    commit(other, "c")
    assert not (folder / "blobs.unsynced").exists()


def test_line_of_a_commit_that_is_cut_does_not_become_a_part_of_the_next_one(folder: Path) -> None:
    backend = FolderBackend(folder)
    backend._database.close()
    commit(backend, "c")
    with open(folder / HEAD, "ab") as file:
        file.write(b"1")
    commit(backend, "d")
    head = Head.read(str(folder / HEAD))

    assert head is not None
    assert (head.number, list(head.later)) == (1, [2, 3, 4])
    check_whole(FolderBackend(folder), {"a", "b", "c", "d"})


def test_full_disk_fails_a_save_and_leaves_the_store_as_it_is(folder: Path) -> None:
    backend = FolderBackend(folder)
    assert refs(backend) == {"a", "b"}
    for rows in backend._database._idle:
        [(n_pages,)] = rows.connection.execute("PRAGMA page_count").fetchall()
        rows.connection.execute(f"PRAGMA max_page_count = {n_pages}")
    with pytest.raises(BackendError, match="full"):
        backend.put_new("packs/big", [os.urandom(100_000)])

    check_whole(FolderBackend(folder), {"a", "b"})


# --- copies


@pytest.mark.long
def test_folder_that_this_process_may_not_write_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderBackend(folder).settle("refs")
    assert not (folder / WAL).exists()
    access = os.access
    monkeypatch.setattr(_database.os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    before = sorted(os.listdir(folder))

    reader = FolderBackend(folder)
    check_whole(reader, {"a", "b"})
    assert sorted(os.listdir(folder)) == before
    monkeypatch.undo()
    killed_after(folder, ["c"])
    check_whole(reader, {"a", "b", "c"})


@pytest.mark.long
def test_reader_without_permission_finds_what_others_saved_who_are_gone_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FolderBackend(folder).settle("refs")
    assert not (folder / WAL).exists()
    access = os.access
    monkeypatch.setattr(_database.os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    reader = FolderBackend(folder)
    check_whole(reader, {"a", "b"})
    code = f"""
from pathlib import Path
from tests.backends.test_database import FolderBackend, commit
backend = FolderBackend(Path({str(folder)!r}))
commit(backend, "c")
commit(backend, "a", data=b"new", replace=True)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not (folder / WAL).exists()

    assert refs(reader) == {"a", "b", "c"}
    assert reader.get("refs/@a") == b"new"


def test_store_on_a_network_file_system_is_read_and_not_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.backends._folder.is_on_local_disk", lambda folder: False)
    backend = FolderBackend(folder)

    assert refs(backend) == {"a", "b"}
    with pytest.raises(RefusedError, match="not on a local disk"):
        backend.put_new("packs/1", [b"x"])


@pytest.mark.parametrize("without", [(), (SHM,), (HEAD,), (SHM, HEAD)], ids=str)
def test_copy_by_files_is_the_store(folder: Path, tmp_path: Path, without: tuple[str, ...]) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    for name in without:
        (tmp_path / "copy" / name).unlink()
    copy = FolderBackend(tmp_path / "copy")
    check_whole(copy, {"a", "b"})
    commit(copy, "c")

    check_whole(copy, {"a", "b", "c"})
    check_whole(FolderBackend(folder), {"a", "b"})


@pytest.mark.long
def test_copies_taken_during_saves_are_states_that_existed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File by file, in any order, with checkpoints in between."""
    monkeypatch.setattr(_database, "_CHECKPOINT_BYTES", 4000)
    backend = made(tmp_path / "store")
    rng = random.Random(1)
    n_refused = 0
    for number in range(40):
        copy = tmp_path / f"copy-{number}"
        copy.mkdir()
        names = [NAME, WAL, HEAD]
        rng.shuffle(names)
        n_before = number * 3
        for at, name in enumerate(names):
            commit(backend, str(number * 3 + at))
            shutil.copy2(tmp_path / "store" / name, copy / name)
        found = FolderBackend(copy)
        try:
            n_refs = len(refs(found))
            check_whole(found, set(map(str, range(n_refs))))
            assert n_before <= n_refs <= n_before + 3
        except CorruptError:
            n_refused += 1
    assert 0 < n_refused < 40


def linked(folder: Path, to: Path) -> Path:
    subprocess.run(["cp", "-al", folder, to], check=True)
    return to


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("changed", ["store", "snapshot"])
def test_snapshot_by_hard_links_and_its_original_do_not_change_each_other(
    folder: Path, tmp_path: Path, changed: str, is_open: bool
) -> None:
    backend = FolderBackend(folder)
    assert refs(backend) == {"a", "b"}
    if not is_open:
        backend._database.close()
    snapshot = linked(folder, tmp_path / "snapshot")
    kept, root = (snapshot, folder) if changed == "store" else (folder, snapshot)
    before = {path.name: path.read_bytes() for path in kept.iterdir() if path.is_file() and path.name != SHM}
    for name in "cde":
        commit(FolderBackend(root), name)

    assert {name: (kept / name).read_bytes() for name in before} == before
    check_whole(FolderBackend(root), {"a", "b", "c", "d", "e"})
    check_whole(FolderBackend(kept), {"a", "b"})


def test_moved_store_is_found_at_its_new_place_and_the_process_goes_on_when_it_is_back(
    folder: Path, tmp_path: Path
) -> None:
    backend = FolderBackend(folder)
    commit(backend, "c")
    folder.rename(tmp_path / "moved")
    with pytest.raises(StoreNotFoundError):
        backend.get("refs/@c")
    check_whole(FolderBackend(tmp_path / "moved"), {"a", "b", "c"})
    (tmp_path / "moved").rename(folder)

    commit(backend, "d")
    check_whole(backend, {"a", "b", "c", "d"})


def test_log_that_is_removed_under_a_process_is_an_error_and_loses_nothing(folder: Path) -> None:
    def act() -> None:
        backend = FolderBackend(folder)
        commit(backend, "c")
        (folder / WAL).unlink()
        with pytest.raises(CorruptError, match="removed or replaced"):
            backend.get("refs/@c")
        commit(backend, "d")
        assert backend.get("refs/@d") == b"d"
        os._exit(9)

    FolderBackend(folder).settle("refs")
    assert in_child(act) == 9
    assert FolderBackend(folder).get("refs/@d") == b"d"
    with pytest.raises(CorruptError, match="lost"):
        FolderBackend(folder).get("refs/@c")


@pytest.mark.long
def test_older_database_that_is_put_back_is_named(folder: Path, tmp_path: Path) -> None:
    FolderBackend(folder).settle("refs")
    shutil.copy2(folder / NAME, tmp_path / NAME)
    killed_after(folder, ["c"])
    FolderBackend(folder).settle("refs")
    FolderBackend(folder).settle("refs")
    for name in (WAL, SHM):
        (folder / name).unlink(missing_ok=True)
    shutil.copy2(tmp_path / NAME, folder / NAME)
    backend = FolderBackend(folder)

    for key in ("refs/@a", "refs/@c"):
        with pytest.raises(CorruptError, match="lost"):
            backend.get(key)
    assert damages_of(backend) != []


def test_older_database_is_no_whole_one_while_a_writer_looks_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FolderBackend(folder).settle("refs")
    shutil.copy2(folder / NAME, tmp_path / NAME)
    backend = FolderBackend(folder)
    commit(backend, "c")
    del backend
    shutil.copy2(tmp_path / NAME, folder / NAME)
    backend = FolderBackend(folder)
    with pytest.raises(CorruptError, match="lost"):
        backend.get("refs/@a")
    compare = _database.Database._compare
    found: list[object] = []

    def compare_meanwhile(self: _database.Database, *arguments: Any) -> Any:
        try:
            found.append(backend.get("refs/@a"))
        except CorruptError as error:
            found.append(error)
        return compare(self, *arguments)

    monkeypatch.setattr(_database.Database, "_compare", compare_meanwhile)
    os.utime(folder / NAME)
    backend.put_new("packs/1", [b"x"])

    assert [type(each) for each in found] == [DamagedError]


@pytest.mark.long
def test_log_of_another_state_is_named(folder: Path, tmp_path: Path) -> None:
    """An older database beside a newer log, as a backup that is copied over a store leaves it."""
    backend = FolderBackend(folder)
    backend.settle("refs")
    backend._database.close()
    shutil.copytree(folder, tmp_path / "backup")
    for name in map(str, range(30)):
        commit(backend, name)
    backend._database.close()
    killed_after(folder, ["f"])
    assert (folder / WAL).stat().st_size > 0
    subprocess.run(["cp", "-a", f"{tmp_path}/backup/.", str(folder)], check=True)

    found = FolderBackend(folder)
    n_damaged = 0
    for name in ("a", "b", "f", *map(str, range(30))):
        try:
            assert found.get(f"refs/@{name}") == name.encode()
            assert found.get(f"packs/{name}") == blob_of(name)
        except CorruptError:
            n_damaged += 1
    assert n_damaged > 0
    assert damages_of(found) != []


# --- forks


def test_child_of_a_fork_and_its_parent_go_on(folder: Path) -> None:
    backend = FolderBackend(folder)
    commit(backend, "c")

    def act() -> None:
        assert refs(backend) == {"a", "b", "c"}
        commit(backend, "d")
        os._exit(9)

    assert in_child(act) == 9
    commit(backend, "e")
    check_whole(backend, {"a", "b", "c", "d", "e"})


@pytest.mark.long
def test_processes_that_fork_from_one_another_lose_nothing(folder: Path) -> None:
    backend = FolderBackend(folder)

    def act(number: int) -> None:
        for turn in range(5):
            commit(backend, f"{number}-{turn}")
        os._exit(9)

    commit(backend, "c")
    children = [FORK.Process(target=act, args=(number,)) for number in range(3)]
    for child in children:
        child.start()
        commit(backend, f"p{child.pid}")
    for child in children:
        child.join(60)

    assert [child.exitcode for child in children] == [9, 9, 9]
    assert len(refs(backend)) == 3 + 3 + 15
    assert damages_of(backend) == []


def test_no_connection_is_open_at_a_fork(folder: Path) -> None:
    """A child would have SQLite's table of the locks of its parent, and none of the locks."""
    backend = FolderBackend(folder)
    commit(backend, "c")
    assert _database._opened

    assert in_child(lambda: os._exit(len(_database._inherited))) == 0


@pytest.mark.long
def test_fork_waits_for_a_transaction_of_another_thread(folder: Path) -> None:
    backend = FolderBackend(folder)
    began, end = threading.Event(), threading.Event()

    def pieces() -> None:
        def act(change: object) -> None:
            began.set()
            end.wait(10)

        backend._database.write(act, durable=False)

    writer = threading.Thread(target=pieces)
    writer.start()
    began.wait(10)
    threading.Timer(0.3, end.set).start()

    def child() -> None:
        commit(FolderBackend(folder), "c")
        os._exit(9)

    assert in_child(child) == 9
    assert end.is_set()
    writer.join()


@pytest.mark.long
def test_child_of_a_fork_in_the_middle_of_a_call_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_database, "_FORK_WAIT_S", 0.1)
    backend = FolderBackend(folder)

    def child() -> None:
        try:
            FolderBackend(folder).get("refs/@a")
        except BackendError as error:
            os._exit(9 if "forked" in str(error) else 1)
        os._exit(0)

    assert backend._database.read(lambda rows: in_child(child)) == 9
    check_whole(backend, {"a", "b"})


@pytest.mark.long
def test_fork_does_not_wait_for_a_call_that_was_interrupted_at_its_begin(folder: Path) -> None:
    backend = FolderBackend(folder)

    def begin(n_steps: int) -> bool:
        """Begin a call, and interrupt that after so many lines of the gate; return whether it had as many."""
        n_left = n_steps

        def watch(frame: FrameType, event: str, value: object) -> object:
            nonlocal n_left
            if not (frame.f_code.co_filename == _database.__file__ and frame.f_code.co_name == "__enter__"):
                return watch if event == "call" else None
            n_left -= event in ("line", "return")
            if n_left == 0:
                n_left = -1
                raise KeyboardInterrupt
            return watch

        sys.settrace(watch)
        try:
            backend._database.read(lambda rows: None)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
            # A trace may come between a lock and its release, where no interrupt does.
            with contextlib.suppress(RuntimeError):
                _database._gate._lock.release()
        return False

    n_steps = 1
    while begin(n_steps):
        began = time.monotonic()
        assert in_child(lambda: os._exit(len(_database._inherited))) == 0
        assert time.monotonic() - began < _database._FORK_WAIT_S / 2
        n_steps += 1
    assert n_steps > 3


# --- space


@pytest.mark.long
def test_freed_bytes_are_what_a_deletion_frees(folder: Path) -> None:
    backend = FolderBackend(folder)
    for number in range(150):
        commit(backend, str(number))
    backend.sweep(0)
    keys = [info for info in backend.list("packs") if info.key != "packs/a"]
    said = backend.freed_by({info.key: info.size for info in keys}, older_than_s=0)
    before = (folder / NAME).stat().st_size
    for info in keys:
        backend.delete(info.key)

    assert backend.sweep(0) == said > 50_000
    assert before - (folder / NAME).stat().st_size == said
    assert backend.get("packs/a") == blob_of("a")


def test_sweep_gives_space_back_while_another_process_has_the_store_open(folder: Path) -> None:
    one, other = FolderBackend(folder), FolderBackend(folder)
    commit(one, "big", data=b"r")
    one.put_new("packs/large", [os.urandom(100_000)])
    assert other.get("packs/large")
    one.sweep(0)
    one.delete("packs/large")
    before = (folder / NAME).stat().st_size

    assert one.sweep(0) > 90_000
    assert before - (folder / NAME).stat().st_size > 90_000
    assert refs(other) == {"a", "b", "big"}


def test_full_disk_during_a_sweep_leaves_the_database_as_it_is(folder: Path, failing: list[str]) -> None:
    backend = FolderBackend(folder)
    for number in range(20):
        commit(backend, str(number))
    for number in range(19):
        backend.delete(f"packs/{number}")
    failing.append("INSERT INTO records")
    with pytest.raises(BackendError):
        backend.sweep(0)

    assert damages_of(FolderBackend(folder)) == []
    assert FolderBackend(folder).get("packs/19") == blob_of("19")


# --- damage

KEYS = [f"{kind}/{name}" for name in "ab" for kind in ("packs", "manifests")] + ["refs/@a", "refs/@b"]


def expected(key: str) -> bytes:
    kind, _, name = key.partition("/")
    name = name.removeprefix("@")
    return {"packs": blob_of(name), "manifests": b"rows of " + name.encode(), "refs": name.encode()}[kind]


def read_all(folder: Path) -> tuple[set[str], set[str]]:
    """Return the keys that are read and those that are an error, which names the key or the database."""
    backend = FolderBackend(folder)
    right, damaged = set(), set()
    for key in KEYS:
        try:
            assert backend.get(key) == expected(key)
            right.add(key)
        except CorruptError as error:
            damaged.add(error.key)
    return right, damaged


def flips(path: Path, n: int) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of a file with one of them flipped, in every page and at places drawn at random."""
    whole = path.read_bytes()
    rng = random.Random(0)
    pages = range(0, len(whole) - PAGE_BYTES + 1, PAGE_BYTES)
    places = [page + at for page in pages for at in (rng.randrange(PAGE_BYTES), rng.choice([0, 3, 4, 5, 6, 8]))]
    for place in [*places, *(rng.randrange(len(whole)) for _ in range(n))]:
        damaged = bytearray(whole)
        damaged[place] ^= rng.choice([0xFF, 1 << rng.randrange(8)])
        yield place, bytes(damaged)


@pytest.mark.long
@pytest.mark.parametrize("name", [NAME, WAL])
def test_flipped_byte_costs_what_it_hits_and_nothing_in_silence(folder: Path, tmp_path: Path, name: str) -> None:
    if name == NAME:
        backend = FolderBackend(folder)
        backend.settle("refs")
        backend._database.close()
        assert not (folder / WAL).exists()
    n_right = n_damaged = 0
    for place, damaged in flips(folder / name, 10):
        copy = tmp_path / f"at-{place}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(SHM))
        (copy / name).write_bytes(damaged)
        right, bad = read_all(copy)
        n_right, n_damaged = n_right + len(right), n_damaged + len(bad)
        saved = FolderBackend(copy)
        commit(saved, "new")
        assert FolderBackend(copy).get("refs/@new") == b"new"
        if bad:
            assert damages_of(FolderBackend(copy)) != []
            lost = {each.key for each in rebuild(FolderBackend(copy)).lost}
            # A record that is gone has the names of its packs and manifests; the rows have their hashes.
            lost |= {key for key in KEYS if name_of_row(stored_key(key)) in lost}
            right_now, bad_now = set(), set()
            mended = FolderBackend(copy)
            for key in KEYS:
                is_there = mended.stat(key) is not None and not mended.get(key).startswith(b"lost: ")
                (right_now if is_there else bad_now).add(key)
                assert not is_there or mended.get(key) == expected(key)
            assert right <= right_now, (place, right - right_now)
            assert bad_now <= lost, place
            assert mended.get("refs/@new") == b"new"
            assert damages_of(mended) == []
        shutil.rmtree(copy)
    assert n_right > 0
    assert n_damaged > 0


@pytest.mark.parametrize("name", [NAME, WAL])
def test_file_that_is_cut_loses_nothing_in_silence(folder: Path, tmp_path: Path, name: str) -> None:
    if name == NAME:
        FolderBackend(folder).settle("refs")
    n_bytes = (folder / name).stat().st_size
    for size in {0, 1, 100, n_bytes // 2, n_bytes - PAGE_BYTES, n_bytes - 1}:
        copy = tmp_path / f"at-{size}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(SHM))
        os.truncate(copy / name, size)
        right, bad = read_all(copy)

        assert right | bad == set(KEYS)
        assert bad or size == n_bytes - 1, size


def test_saves_go_on_in_files_while_a_database_is_damaged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    FolderBackend(folder).settle("refs")
    for name in (WAL, SHM):
        (folder / name).unlink(missing_ok=True)
    with open(folder / NAME, "r+b") as file:
        file.write(b"\xff" * 100)
    backend = FolderBackend(folder)
    commit(backend, "c")
    commit(backend, "d")

    for each in (backend, FolderBackend(folder)):
        assert each.get("refs/@c") == b"c"
        assert each.get("packs/d") == blob_of("d")
    assert caplog.text.count("tensorcas repair") == 1
    rebuild(backend)
    check_whole(backend, {"a", "b", "c", "d"})


# --- refs in files


@pytest.fixture
def with_file(folder: Path) -> FolderBackend:
    """The store with a ref that is a file, as a save leaves it that has met damage."""
    backend = FolderBackend(folder)
    LocalBackend.put_new(backend, "refs/@f", [b"file"])
    return backend


def test_ref_in_a_file_is_replaced_after_all_connections_were_closed(with_file: FolderBackend) -> None:
    """A fork in another thread closes them, and a repair in another process replaces the files."""
    token = with_file.put_new("intents/1", [b"x"], durable=False)
    with_file._database.close()
    done = threading.Thread(
        target=with_file.promote,
        args=("intents/1", "refs/@f", b"new"),
        kwargs={"token": token, "replace": True},
        daemon=True,
    )
    done.start()
    done.join(20)

    assert not done.is_alive()
    assert with_file.get("refs/@f") == b"new"
    assert with_file.stat("intents/1") is None


def test_rows_are_durable_before_a_ref_in_a_file_that_needs_them(
    with_file: FolderBackend, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = with_file.put_new("intents/1", [b"x"], durable=False)
    with_file.put_all([("packs/1", [b"pack"])])
    assert with_file.missing(["packs/1"]) == set()  # it writes the pack, not durably
    done: list[list[str]] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (done.append(list(synced)), rename(*paths)))
    synced.clear()
    with_file.promote("intents/1", "refs/@f", b"new", token=token, replace=True)

    assert done[0][:2] == ["PRAGMA synchronous = FULL", "folder"]


@pytest.mark.long
def test_withdrawal_of_a_ref_in_a_file_spares_the_one_that_replaces_it(
    with_file: FolderBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FolderBackend(with_file.root)
    found = with_file.stat("refs/@f")
    token = other.put_new("intents/1", [b"x"], durable=False)
    replacing = threading.Thread(
        target=other.promote,
        args=("intents/1", "refs/@f", b"new"),
        kwargs={"token": token, "replace": True},
    )
    unlink = os.unlink

    def meanwhile(path: str) -> None:
        if str(path).endswith("@f") and replacing.ident is None:
            replacing.start()
            replacing.join(1)
        unlink(path)

    monkeypatch.setattr(os, "unlink", meanwhile)
    assert found is not None
    with_file.withdraw("refs/@f", found.token)
    replacing.join()

    assert other.get("refs/@f") == b"new"


def test_intent_of_a_ref_in_a_file_cannot_be_withdrawn_after_the_ref_was_written(
    with_file: FolderBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FolderBackend(with_file.root)
    token = with_file.put_new("intents/1", [b"x"], durable=False)
    withdrawn: list[bool] = []
    withdrawing = threading.Thread(target=lambda: withdrawn.append(other.withdraw("intents/1", token)))
    rename = os.rename

    def meanwhile(*paths: str) -> None:
        rename(*paths)
        withdrawing.start()

    monkeypatch.setattr(os, "rename", meanwhile)
    alone_in = LockedFile.alone_in

    @contextlib.contextmanager
    def left(path: str) -> Iterator[int]:
        with alone_in(path) as descriptor:
            yield descriptor
        if threading.current_thread() is not withdrawing:
            withdrawing.join(1)

    monkeypatch.setattr(LockedFile, "alone_in", left)
    with_file.promote("intents/1", "refs/@f", b"new", token=token, replace=True)
    withdrawing.join()

    assert with_file.get("refs/@f") == b"new"
    assert withdrawn == [False]


def test_ref_that_became_a_file_before_a_commit_is_replaced_by_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has met damage that this one does not see."""
    backend = FolderBackend(folder)
    token = backend.put_new("intents/1", [b"x"], durable=False)
    write = backend._database.write

    def later(act: Callable[[Change], object], **options: Any) -> object:
        monkeypatch.undo()
        LocalBackend.put_new(FolderBackend(folder), "refs/@a", [b"file"])
        return write(act, **options)

    monkeypatch.setattr(backend._database, "write", later)
    backend.promote("intents/1", "refs/@a", b"new", token=token, replace=True)

    assert FolderBackend(folder).get("refs/@a") == b"new"


# --- repair


@pytest.mark.long
def test_repair_finds_what_the_log_had_of_a_process_that_ends_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last connection that closes copies the log into the database and removes it."""
    begin, end = FORK.Event(), FORK.Event()

    def other() -> None:
        backend = FolderBackend(folder)
        commit(backend, "c")
        begin.set()
        end.wait(20)
        backend._database.close()

    child = FORK.Process(target=other)
    child.start()
    assert begin.wait(20)
    read = _salvage._read

    def meanwhile(path: str) -> bytes:
        data = read(path)
        if data:
            end.set()
            child.join(20)
        return data

    monkeypatch.setattr(_salvage, "_read", meanwhile)
    rebuilt = rebuild(FolderBackend(folder))

    assert rebuilt.lost == []
    check_whole(FolderBackend(folder), {"a", "b", "c"})


def test_repair_on_a_disk_that_is_full_in_the_end_fails_and_leaves_the_database(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite says nothing if it cannot copy the log of a connection that closes."""
    before = sorted(os.listdir(folder))
    connect = _mend.connect_new

    class Full:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection
            connection.execute("PRAGMA wal_autocheckpoint = 0")

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

        def close(self) -> None:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            try:
                self._connection.close()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                signal.signal(signal.SIGXFSZ, handler)

    monkeypatch.setattr(_mend, "connect_new", lambda path: Full(connect(path)))
    with pytest.raises(BackendError, match="could not be copied"):
        rebuild(FolderBackend(folder))

    check_whole(FolderBackend(folder), {"a", "b"})
    assert set(os.listdir(folder)) <= {*before, WAL, SHM, HEAD}


@pytest.mark.long
def test_log_of_the_damaged_database_is_not_copied_into_the_new_one_of_a_repair_that_was_killed(folder: Path) -> None:
    backend = FolderBackend(folder)
    names = {str(number) for number in range(60)}
    for name in sorted(names):
        commit(backend, name)
    for name in sorted(names)[:40]:
        backend.delete(f"refs/@{name}")
        backend.delete(f"packs/{name}")
    backend._database.close()
    killed_after(folder, ["c", "d", "e"])

    def repair() -> None:
        rename = os.rename

        def die_after(source: str, dest: str) -> None:
            rename(source, dest)
            if dest == str(folder / NAME):
                os._exit(9)

        os.rename = die_after  # type: ignore[assignment]
        rebuild(FolderBackend(folder))

    assert in_child(repair) == 9
    assert (folder / WAL).stat().st_size

    check_whole(FolderBackend(folder), {"a", "b", "c", "d", "e", *sorted(names)[40:]})
    assert not (folder / "blobs.replacing").exists()
