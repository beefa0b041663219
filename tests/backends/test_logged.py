"""A folder with logs keeps every promise of the contract, and agrees with a dict."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorcas_mlflow.backends._log_digests import PACK, RECORD

from tensorcas_mlflow.backends import (
    PAGE_BYTES,
    LoggedBackend,
    _log_folder,
    _log_rewriter,
    _log_view,
    _log_writer,
    aligned_buffer,
)
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, RefusedError
from tensorcas_mlflow.layout import PackWriter, Payload
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.testing import BackendConformance


def made(folder: Path) -> LoggedBackend:
    backend = LoggedBackend(folder)
    backend.make_logs()
    return backend


class TestLoggedBackend(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LoggedBackend:
        return made(tmp_path / "store")


class TestLoggedBackendWithoutLogs(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> LoggedBackend:
        return LoggedBackend(tmp_path / "store")


def commit(backend: LoggedBackend, name: str, *, ref: str = "", replace: bool = False) -> None:
    intent = f"intents/{uuid.uuid4().hex}"
    token = backend.put_new(intent, [b"x"], durable=False)
    backend.put_all([(f"packs/{name}", [name.encode() * 100]), (f"manifests/{name}", [b"rows of " + name.encode()])])
    backend.promote(intent, f"refs/@{ref or name}", name.encode(), token=token, replace=replace)


def commit_and_delete_most(backend: LoggedBackend) -> None:
    """Commit eight refs, and delete all but the last, so that a sweep rewrites their log."""
    for number in range(8):
        commit(backend, str(number))
    for number in range(7):
        for key in (f"packs/{number}", f"manifests/{number}", f"refs/@{number}"):
            backend.delete(key)


def files(backend: LoggedBackend) -> list[str]:
    return sorted(p.relative_to(backend.root).as_posix() for p in backend.root.rglob("*") if p.is_file())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files and folders that are synced."""
    names: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return names


def test_a_small_save_appends_one_record_and_syncs_one_file(tmp_path: Path, synced: list[str]) -> None:
    backend = made(tmp_path)
    commit(backend, "a")
    synced.clear()
    commit(backend, "b")

    log, _ = files(backend)
    assert synced == [os.path.basename(log)]


def test_a_log_is_synced_for_the_blobs_that_may_not_be_durable_alone(tmp_path: Path, synced: list[str]) -> None:
    one, other = made(tmp_path), LoggedBackend(tmp_path)
    commit(one, "a")
    [log] = [Path(name).name for name in files(one) if name.endswith(".log")]
    synced.clear()
    for key, is_synced in (("a", True), ("a", False), ("b", True), ("a", False), ("b", False)):
        if key == "b" and is_synced:
            commit(one, "b")
            synced.clear()
        assert other.missing([f"packs/{key}"]) == set()
        assert (log in synced) == is_synced, key
        synced.clear()


@pytest.mark.parametrize("way", ["appended", "replaced"])
def test_a_copy_of_a_log_is_synced_though_its_records_say_that_they_are_durable(
    way: str, tmp_path: Path, synced: list[str]
) -> None:
    """A tool that mirrors a store brings more records, in the same file or in another one."""
    one = made(tmp_path / "one")
    commit(one, "a")
    commit(one, "b")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    [log] = (tmp_path / "one").rglob("*.log")
    mirrored = tmp_path / "copy" / log.relative_to(tmp_path / "one")
    reader = LoggedBackend(tmp_path / "copy")
    synced.clear()
    assert reader.missing(["packs/a"]) == set()
    assert log.name in synced
    commit(one, "c")
    commit(one, "d")
    if way == "appended":
        with mirrored.open("ab") as file:
            file.write(log.read_bytes()[mirrored.stat().st_size :])
    else:
        shutil.copy(log, tmp_path / "new")
        (tmp_path / "new").rename(mirrored)
    synced.clear()
    assert reader.missing(["packs/c"]) == set()
    assert log.name in synced


def test_another_file_in_the_place_of_a_synced_log_is_synced_too(tmp_path: Path, synced: list[str]) -> None:
    one, other = made(tmp_path), LoggedBackend(tmp_path)
    commit(one, "a")
    commit(one, "b")
    assert other.missing(["packs/a"]) == set()
    [log] = tmp_path.rglob("*.log")
    data, inode = log.read_bytes(), log.stat().st_ino
    shutil.copy(log, tmp_path / "new")
    (tmp_path / "new").rename(log)
    assert log.stat().st_ino != inode
    synced.clear()

    assert other.missing(["packs/a"]) == set()
    assert log.name in synced
    assert log.read_bytes() == data


def test_logs_of_one_process_are_read_by_another(tmp_path: Path) -> None:
    one = made(tmp_path)
    commit(one, "a")
    other = LoggedBackend(tmp_path)

    assert other.get("packs/a") == b"a" * 100
    commit(one, "b")
    assert {info.key for info in other.list("refs")} == {"refs/@a", "refs/@b"}
    one.delete("packs/a")
    assert other.stat("packs/a") is None
    with pytest.raises(BlobNotFoundError):
        other.get("packs/a")


def test_a_large_blob_is_a_file_and_its_name_is_durable_before_the_record(tmp_path: Path) -> None:
    backend = made(tmp_path)
    token = backend.put_new("intents/x", [b"x"], durable=False)
    backend.put_all([("packs/large", [bytes(1 << 19)] * 3)])
    backend.promote("intents/x", "refs/@x", b"ref", token=token, replace=False)

    assert "packs/large" in files(backend)
    assert backend._durable == {"packs/large"}


def test_a_blob_in_a_log_is_read_in_every_way_of_a_file(tmp_path: Path) -> None:
    backend = made(tmp_path)
    commit(backend, "a")
    data = bytes(range(256)) * 64
    backend.put_all([("packs/b", [data])])
    commit(backend, "c")
    with backend.open_file("packs/b") as file:
        out = bytearray(100)
        file.read_into(1000, [memoryview(out)[:60], memoryview(out)[60:]])
        stretch = file.map(5000, 6000)

        assert file.size == len(data)
        assert file.base % 64 == 0
        assert bytes(out) == data[1000:1100]
        assert bytes(stretch.data[5000 - stretch.begin : 6000 - stretch.begin]) == data[5000:6000]
        if file.open_direct():
            assert bytes(file.read_direct(3000, 4000, aligned_buffer(3 * PAGE_BYTES))) == data[3000:4000]
        for read in (
            lambda: file.read_into(len(data) - 10, [memoryview(bytearray(11))]),
            lambda: file.map(0, len(data) + 1),
        ):
            with pytest.raises(CorruptError, match="ends before"):
                read()


def test_a_store_that_is_swept_keeps_live_blobs_and_frees_the_rest(tmp_path: Path) -> None:
    backend = made(tmp_path)
    for number in range(8):
        commit(backend, str(number))
    (before,) = (path for path in files(backend) if path.endswith(".log"))
    for number in range(7):
        for key in (f"packs/{number}", f"manifests/{number}", f"index/{number}.loose", f"refs/@{number}"):
            backend.delete(key)

    assert backend.sweep(3600) > 0
    assert before not in files(backend)
    assert backend.get("packs/7") == LoggedBackend(tmp_path).get("packs/7") == b"7" * 100
    assert [info.key for info in LoggedBackend(tmp_path).list("refs")] == ["refs/@7"]
    for key in ("packs/7", "manifests/7", "index/7.loose", "refs/@7"):
        backend.delete(key)
    backend.sweep(3600)
    assert [path for path in files(backend) if path.startswith("logs/")] == ["logs/generation"]


def test_replaced_refs_do_not_come_back_once_the_last_one_is_deleted(tmp_path: Path) -> None:
    backend = made(tmp_path)
    for _ in range(3):
        commit(backend, "a", replace=True)
        for key in ("packs/a", "manifests/a"):
            backend.delete(key)
        _log_writer.close_writer(backend._view)
    backend.delete("refs/@a")

    assert LoggedBackend(tmp_path).stat("refs/@a") is None


def test_the_next_process_appends_to_the_log_of_the_last_one(tmp_path: Path) -> None:
    made(tmp_path)
    for number in range(5):
        backend = LoggedBackend(tmp_path)
        commit(backend, str(number))
        _log_writer.close_writer(backend._view)

    assert [path.partition(".")[2] for path in files(backend)] == ["log", ""]
    assert len(list(backend.list("refs"))) == 5


def test_a_store_with_logs_is_not_changed_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(made(tmp_path), "a")
    monkeypatch.setattr("tensorcas_mlflow.backends._logged.is_on_local_disk", lambda folder: False)
    backend = LoggedBackend(tmp_path)

    assert backend.get("refs/@a") == b"a"
    with pytest.raises(RefusedError, match="not on a local disk"):
        commit(backend, "b")
    with pytest.raises(RefusedError, match="not on a local disk"):
        LoggedBackend(tmp_path / "new").make_logs()


def test_a_look_lists_the_folder_only_if_a_log_was_created_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path)
    commit(one, "a")
    other = LoggedBackend(tmp_path)
    for backend in (one, other):
        backend.stat("refs/@a")
    listed: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or listdir(path))
    commit(one, "b")

    assert other.stat("refs/@b") is not None
    assert not listed
    one._logs.tidy()
    commit(one, "c")
    assert other.stat("refs/@c") is not None


def test_calls_made_together_look_at_the_logs_once_and_later_calls_look_again(tmp_path: Path) -> None:
    one, other = made(tmp_path), LoggedBackend(tmp_path)
    commit(one, "a")

    with other.reading_together(), other.reading_together():
        commit(one, "b")
        assert other.missing(["packs/a", "packs/b"]) == {"packs/b"}
        assert other.names("manifests") == {"a"}
        assert other.stat("manifests/b") is None
    assert other.missing(["packs/a", "packs/b"]) == set()
    assert other.names("manifests") == {"a", "b"}


def test_blob_is_found_while_another_thread_appends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(tmp_path)
    backend.put_all([("packs/a", [b"a"])])
    is_appending, may_append = threading.Event(), threading.Event()
    append = backend._logs.append

    def slow(*args: Any, **options: Any) -> Any:
        is_appending.set()
        assert may_append.wait(30)
        return append(*args, **options)

    monkeypatch.setattr(backend._logs, "append", slow)
    with ThreadPoolExecutor(1) as writer:
        flushed = writer.submit(backend.missing, [])
        assert is_appending.wait(30)
        threading.Timer(0.1, may_append.set).start()
        found = backend.get("packs/a")
        flushed.result(30)

    assert found == b"a"


def test_blob_that_is_written_after_the_look_of_several_calls_is_read_all_the_same(tmp_path: Path) -> None:
    reader, writer = made(tmp_path), LoggedBackend(tmp_path)
    commit(reader, "a")
    with reader.reading_together():
        reader.get("packs/a")
        commit(writer, "b")

        assert reader.get("packs/b") == b"b" * 100


def test_a_blob_of_a_collection_is_a_file_in_a_store_with_logs(tmp_path: Path) -> None:
    backend = made(tmp_path)
    for number in range(2):
        token = backend.put_new(f"intents/{number}", [b"x"], durable=False)
        backend.put_all([(f"packs/{number}", [b"held"])])
        backend.promote(f"intents/{number}", "condemned/@generation", b"%d" % number, token=token, replace=True)

    assert "condemned/@generation" in files(backend)
    assert LoggedBackend(tmp_path).get("condemned/@generation") == b"1"
    assert LoggedBackend(tmp_path).get("packs/0") == b"held"
    assert list(backend.list("intents")) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks"), OSError(errno.EOPNOTSUPP, "no flock"), None])
def test_a_store_on_a_file_system_without_working_locks_has_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(fcntl, "flock", flock)
    backend = LoggedBackend(tmp_path / "store")

    with pytest.raises(RefusedError, match="does not lock files"):
        backend.make_logs()
    assert not backend.has_logs
    commit(backend, "a")
    assert LoggedBackend(tmp_path / "store").get("refs/@a") == b"a"


def test_a_discarded_blob_leaves_nothing_behind(tmp_path: Path) -> None:
    backend = made(tmp_path)
    commit(backend, "a")
    before = {path: (tmp_path / path).read_bytes() for path in files(backend)}
    backend.put_all([("packs/b", [b"b" * 100]), ("manifests/b", [b"rows"])])
    backend.discard(["packs/b", "manifests/b", "packs/a", "packs/c"])

    assert backend.missing(["packs/a", "packs/b", "manifests/b"]) == {"packs/b", "manifests/b"}
    assert {path: (tmp_path / path).read_bytes() for path in files(backend)} == before
    backend.put_all([("packs/b", [b"again"])])
    assert backend.get("packs/b") == b"again"


def test_a_blob_without_its_digests_in_a_log_is_read_with_them(tmp_path: Path) -> None:
    writer = PackWriter()
    payloads = [
        Payload(digest=digest(data), raw_bytes=len(data), codec=RAW, typesize=1, data=data, begins_row=True)
        for data in (b"one" * 30, b"two")
    ]
    pack = b"".join(bytes(piece) for piece in writer.pieces(payloads))
    ref = record_bytes({"format": 1, "name": "x"})
    backend = made(tmp_path)
    token = backend.put_new("intents/a", [b"x"])
    backend.put_all([("packs/a", [pack]), ("packs/b", [pack[:-1]])])
    backend.promote("intents/a", "refs/@a", ref, token=token, replace=False)

    other = LoggedBackend(tmp_path)
    assert other.get("packs/a") == pack
    assert other.get("packs/b") == pack[:-1]
    assert other.get("refs/@a") == ref
    stored = {row.key: row.kind for row in (other._view.find(key).row for key in ("packs/a", "packs/b", "refs/@a"))}
    assert stored == {"packs/a": PACK, "packs/b": 0, "refs/@a": RECORD}
    found = other.find_packs(np.frombuffer(digest(b"two"), np.uint8).reshape(1, 32))
    assert found == {"packs/a"}


@pytest.mark.parametrize("copy", ["files", "hard links"])
def test_a_store_and_its_copy_append_to_logs_of_different_names(tmp_path: Path, copy: str) -> None:
    one = made(tmp_path / "one")
    commit(one, "a")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copy2 if copy == "files" else os.link)
    two = LoggedBackend(tmp_path / "two")
    commit(one, "b")
    commit(two, "c")
    _log_writer.close_writer(two._view)

    assert LoggedBackend(tmp_path / "two").stat("refs/@b") is None
    names = {folder: {path.name for path in (tmp_path / folder / "logs").glob("*.log")} for folder in ("one", "two")}
    (new,) = names["two"] - names["one"]
    shutil.copy2(tmp_path / "two" / "logs" / new, tmp_path / "one" / "logs" / new)
    assert {info.key for info in LoggedBackend(tmp_path / "one").list("refs")} == {"refs/@a", "refs/@b", "refs/@c"}


def test_remains_of_a_removed_log_are_swept(tmp_path: Path) -> None:
    backend = made(tmp_path)
    commit(backend, "a")
    kept = files(backend)
    for ending in ("dead", "index"):
        (tmp_path / "logs" / f"{uuid.uuid4().hex}.{ending}").write_bytes(bytes(32))

    assert backend.sweep(3600) == 64
    assert files(backend) == kept


def test_a_log_that_could_not_be_created_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(tmp_path)

    def refuse(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(_log_folder, "write_all", refuse)
    with pytest.raises(BackendError, match="disk full"):
        commit(backend, "a")

    assert not list((tmp_path / "logs").glob("*.log"))
    monkeypatch.undo()
    commit(backend, "b")
    assert [info.key for info in LoggedBackend(tmp_path).list("refs")] == ["refs/@b"]


def test_a_full_disk_during_a_rewriting_leaves_the_log_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit_and_delete_most(backend)
    before = {path for path in files(backend) if path.endswith(".log")}
    write_all = _log_rewriter.write_all

    def refuse(descriptor: int, data: bytes) -> None:
        if data[:4] == b"TCLR":
            raise OSError(errno.ENOSPC, "disk full")
        write_all(descriptor, data)

    monkeypatch.setattr(_log_rewriter, "write_all", refuse)
    with pytest.raises(BackendError, match="disk full"):
        backend.sweep(3600)
    monkeypatch.undo()

    assert {path for path in files(backend) if path.endswith(".log")} == before
    assert LoggedBackend(tmp_path).get("packs/7") == b"7" * 100


def test_a_log_of_blobs_that_share_most_bytes_is_rewritten_once_most_are_deleted(tmp_path: Path) -> None:
    backend = made(tmp_path)
    shared = os.urandom(8000)
    for number in range(40):
        intent = f"intents/{uuid.uuid4().hex}"
        token = backend.put_new(intent, [b"x"], durable=False)
        backend.put_all([(f"manifests/{number}", [shared, os.urandom(500)])])
        backend.promote(intent, f"refs/@{number}", b"ref", token=token, replace=False)
    (log,) = (tmp_path / "logs").glob("*.log")
    before = log.stat().st_size
    for number in range(30):
        for key in (f"manifests/{number}", f"refs/@{number}"):
            backend.delete(key)

    backend.sweep(3600)
    (log,) = (tmp_path / "logs").glob("*.log")
    assert log.stat().st_size < before * 0.6
    assert backend.sweep(3600) == 0


def test_a_log_with_a_torn_tail_is_rewritten_by_a_sweep(tmp_path: Path) -> None:
    backend = made(tmp_path)
    backend.put_all([("manifests/large", [os.urandom(5000)])])
    commit(backend, "a")
    _log_writer.close_writer(backend._view)
    (log,) = (tmp_path / "logs").glob("*.log")
    with log.open("ab") as file:
        file.write(b"TCLR" + bytes(1000))

    assert LoggedBackend(tmp_path).sweep(3600) > 900
    commit(LoggedBackend(tmp_path), "b")
    assert len(list((tmp_path / "logs").glob("*.log"))) == 1
    assert LoggedBackend(tmp_path).get("packs/a") == b"a" * 100


def test_a_commit_syncs_its_blobs_that_another_commit_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    tokens = {name: backend.put_new(f"intents/{name}", [b"x"], durable=False) for name in "ab"}
    backend.put_all([("packs/of-b", [b"pack"])])
    fsync, synced = os.fsync, list[str]()

    def fail(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".log"):
            synced.append(path)
            if len(synced) == 1:
                raise OSError(errno.EIO, "no disk")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BackendError, match="no disk"):
        backend.promote("intents/a", "refs/@a", b"a", token=tokens["a"], replace=False)
    backend.promote("intents/b", "refs/@b", b"b", token=tokens["b"], replace=False)

    # No sync makes the first log durable any more.
    first, *others = synced
    assert not os.path.exists(first)
    assert first not in others
    assert LoggedBackend(tmp_path).get("packs/of-b") == b"pack"
    assert backend._unsynced == {}


def fail_a_sync(monkeypatch: pytest.MonkeyPatch, ending: str = ".log") -> list[tuple[Path, int]]:
    """Let the next sync of such a file fail; return a list that gets the file and its durable size then."""
    failed: list[tuple[Path, int]] = []
    fsync, sizes = os.fsync, dict[str, int]()

    def sync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not failed and path.endswith(ending):
            failed.append((Path(path), sizes.get(path, 0)))
            raise OSError(errno.EIO, "no disk")
        fsync(descriptor)
        sizes[path] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", sync)
    return failed


def cut_power(failed: list[tuple[Path, int]]) -> None:
    """Take from the files the bytes of their failed syncs, which no later sync of them has brought to the disk."""
    for path, durable in failed:
        if path.exists():
            os.truncate(path, durable)


def test_failed_sync_takes_the_ref_of_its_commit_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(tmp_path)
    commit(backend, "before")
    fail_a_sync(monkeypatch)

    with pytest.raises(BackendError, match="no disk"):
        commit(backend, "a")
    for each in (backend, LoggedBackend(tmp_path)):
        assert [info.key for info in each.list("refs")] == ["refs/@before"]
        assert each.stat("refs/@a") is None
    commit(backend, "again", ref="a")
    assert LoggedBackend(tmp_path).get("refs/@a") == b"again"


def test_failed_sync_of_a_replacement_leaves_the_old_or_the_new_ref(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit(backend, "a")
    fail_a_sync(monkeypatch)
    with pytest.raises(BackendError, match="no disk"):
        commit(backend, "b", ref="a", replace=True)

    after = LoggedBackend(tmp_path)
    name = after.get("refs/@a").decode()
    assert name in "ab"
    assert after.get(f"packs/{name}") == name.encode() * 100
    backend.delete("refs/@a")
    assert LoggedBackend(tmp_path).stat("refs/@a") is None


@pytest.mark.parametrize("who", ["the same process", "another process"])
def test_save_that_relies_on_a_record_of_a_failed_sync_writes_it_again(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit(backend, "before")
    failed = fail_a_sync(monkeypatch)
    with pytest.raises(BackendError, match="no disk"):
        commit(backend, "a")
    later = backend if who == "the same process" else LoggedBackend(tmp_path)

    assert later.missing(["packs/a", "packs/before"]) == set()
    commit(later, "b")
    cut_power(failed)

    after = LoggedBackend(tmp_path)
    assert {info.key for info in after.list("refs")} == {"refs/@before", "refs/@b"}
    for name in ("before", "a", "b"):
        assert after.get(f"packs/{name}") == name.encode() * 100


def test_record_of_a_failed_sync_that_the_disk_has_lost_is_relied_on_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit(backend, "before")
    failed = fail_a_sync(monkeypatch)
    token = backend.put_new("intents/x", [b"x"], durable=False)
    backend.put_all([("packs/large", [os.urandom(100_000)])])
    with pytest.raises(BackendError, match="no disk"):
        backend.promote("intents/x", "refs/@x", b"x", token=token, replace=False)
    other = LoggedBackend(tmp_path)
    assert other.stat("packs/large") is not None
    [(path, _)] = failed
    with path.open("r+b") as file:
        file.seek(-50_000, os.SEEK_END)
        file.write(bytes(4096))

    with pytest.raises(BackendError, match="the disk has lost the last records"):
        other.missing(["packs/large"])
    assert other.missing(["packs/large", "packs/before"]) == {"packs/large"}
    commit(other, "b")
    assert {info.key for info in LoggedBackend(tmp_path).list("refs")} == {"refs/@before", "refs/@b"}


@pytest.mark.parametrize("ending", [".log", ".dead"])
def test_failed_sync_of_another_process_log_is_known_to_every_process(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    for name in "ab":
        commit(backend, name)
    backend.delete("refs/@b")
    _log_writer.close_writer(backend._view)
    failed = fail_a_sync(monkeypatch, ending)
    other = LoggedBackend(tmp_path)
    with pytest.raises(BackendError, match="no disk"):
        other.settle("refs")

    LoggedBackend(tmp_path).settle("refs")
    cut_power(failed)
    after = LoggedBackend(tmp_path)
    assert [info.key for info in after.list("refs")] == ["refs/@a"]
    assert after.get("packs/a") == b"a" * 100


def test_failed_sync_of_a_tombstone_is_known_to_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(tmp_path)
    for name in "ab":
        commit(backend, name)
    info = backend.stat("refs/@b")
    assert info is not None
    failed = fail_a_sync(monkeypatch, ".dead")
    with pytest.raises(BackendError, match="no disk"):
        backend.withdraw("refs/@b", info.token)
    _log_writer.close_writer(backend._view)

    LoggedBackend(tmp_path).settle("refs")
    cut_power(failed)
    assert [info.key for info in LoggedBackend(tmp_path).list("refs")] == ["refs/@a"]


def test_failed_sync_of_a_log_that_is_being_rewritten_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit_and_delete_most(backend)
    _log_writer.close_writer(backend._view)
    fail_a_sync(monkeypatch)

    with pytest.raises(BackendError, match="no disk"):
        LoggedBackend(tmp_path).sweep(3600)
    after = LoggedBackend(tmp_path)
    assert after.get("packs/7") == b"7" * 100
    assert after._view.failed
    commit(after, "b")
    assert sorted(info.key for info in LoggedBackend(tmp_path).list("refs")) == ["refs/@7", "refs/@b"]


@pytest.mark.parametrize("ending", [".log", ".dead"])
def test_process_whose_log_another_one_could_not_sync_commits_again(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    for name in "ab":
        commit(backend, name)
    backend.delete("refs/@b")
    failed = fail_a_sync(monkeypatch, ending)
    with pytest.raises(BackendError, match="no disk"):
        LoggedBackend(tmp_path).settle("refs")

    commit(backend, "c")
    cut_power(failed)
    assert sorted(info.key for info in LoggedBackend(tmp_path).list("refs")) == ["refs/@a", "refs/@c"]


def test_nobody_appends_to_an_idle_log_whose_sync_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(tmp_path)
    commit(backend, "a")
    backend.put_all([("packs/unsynced", [b"pack"])])
    backend._flush()
    _log_writer.close_writer(backend._view)
    failed = fail_a_sync(monkeypatch)
    durable = os.path.getsize(next((tmp_path / "logs").glob("*.log"))) - 1
    with pytest.raises(BackendError, match="no disk"):
        commit(LoggedBackend(tmp_path), "b")

    commit(LoggedBackend(tmp_path), "c")
    cut_power([(path, durable) for path, _ in failed])
    assert sorted(info.key for info in LoggedBackend(tmp_path).list("refs")) == ["refs/@a", "refs/@c"]


def test_refused_commit_deletes_its_ref_before_another_process_rewrites_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit(backend, "before")
    fail_a_sync(monkeypatch)
    release = _log_writer.LockedFile.release

    def released(descriptor: int) -> None:
        is_log = os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log")
        release(descriptor)
        if is_log:
            monkeypatch.setattr(_log_writer.LockedFile, "release", release)
            LoggedBackend(tmp_path).settle("refs")

    monkeypatch.setattr(_log_writer.LockedFile, "release", released)
    with pytest.raises(BackendError, match="no disk"):
        commit(backend, "a")
    assert sorted(info.key for info in LoggedBackend(tmp_path).list("refs")) == ["refs/@before"]


def test_refused_commit_keeps_a_newer_ref_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = made(tmp_path)
    write_index = _log_view.LogView.write_index

    def replaced(view: _log_view.LogView, name: str, end: int) -> None:
        monkeypatch.setattr(_log_view.LogView, "write_index", write_index)
        backend.delete("refs/@a")
        commit(backend, "newer", ref="a")
        raise OSError(errno.EIO, "no disk")

    monkeypatch.setattr(_log_view.LogView, "write_index", replaced)
    with pytest.raises(BackendError, match="no disk"):
        commit(backend, "a")
    assert LoggedBackend(tmp_path).get("refs/@a") == b"newer"


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("who", ["the same process", "another process"])
def test_deleted_ref_does_not_come_back_in_place_of_a_newer_one_after_a_power_cut(
    who: str, is_indexed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_indexed:
        monkeypatch.setattr(_log_view, "_INDEXED_BYTES", 1)
        monkeypatch.setattr(_log_view, "_INDEXED_AGAIN_BYTES", 1)
    durable: dict[str, int] = {}
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        durable[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", sync)
    backend = made(tmp_path)
    commit(backend, "old", ref="a")
    commit(backend, "older", ref="a", replace=True)
    backend.delete("refs/@a")
    commit(backend, "b")
    later = backend if who == "the same process" else LoggedBackend(tmp_path)
    commit(later, "new", ref="a")

    cut_power([(path, durable.get(str(path), 0)) for path in (tmp_path / "logs").glob("*.dead")])
    assert LoggedBackend(tmp_path).get("refs/@a") == b"new"


def test_commit_is_refused_if_another_process_has_found_its_blobs_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit(backend, "before")
    token = backend.put_new("intents/x", [b"x"], durable=False)
    backend.put_all([("packs/large", [os.urandom(100_000)])])
    backend._flush()
    _log_writer.close_writer(backend._view)
    failed = fail_a_sync(monkeypatch)
    other = LoggedBackend(tmp_path)
    with pytest.raises(BackendError, match="no disk"):
        other.settle("packs")
    [(path, _)] = failed
    with path.open("r+b") as file:
        file.seek(-50_000, os.SEEK_END)
        file.write(bytes(4096))
    with pytest.raises(BackendError, match="the disk has lost"):
        other.settle("packs")

    with pytest.raises(BackendError, match="the disk has lost packs/large"):
        backend.promote("intents/x", "refs/@x", b"x", token=token, replace=False)
    backend.discard(["packs/large"])
    commit(backend, "b")
    assert {info.key for info in LoggedBackend(tmp_path).list("refs")} == {"refs/@before", "refs/@b"}


def test_kill_before_the_removal_of_a_log_with_a_failed_sync_keeps_each_ref_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    for name in "ab":
        commit(backend, name)
    failed = fail_a_sync(monkeypatch)
    with pytest.raises(BackendError, match="no disk"):
        commit(backend, "refused")

    def die(folder: _log_folder.LogFolder, log: str) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(_log_folder.LogFolder, "remove_log", die)
        with pytest.raises(SystemExit):
            LoggedBackend(tmp_path).settle("refs")
    commit(LoggedBackend(tmp_path), "c")
    cut_power(failed)

    other = LoggedBackend(tmp_path)
    assert sorted(info.key for info in other.list("refs")) == ["refs/@a", "refs/@b", "refs/@c"]
    assert other.get("packs/a") == b"a" * 100
    other.delete("refs/@a")
    other.sweep(3600)
    assert sorted(info.key for info in LoggedBackend(tmp_path).list("refs")) == ["refs/@b", "refs/@c"]


def test_replaced_ref_does_not_come_back_after_a_failed_sync_of_its_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = made(tmp_path)
    commit(backend, "old", ref="a")
    monkeypatch.setattr(_log_writer, "_writers", _log_writer._writers.copy())
    _log_writer._writers.clear()
    other = LoggedBackend(tmp_path)
    commit(other, "new", ref="a", replace=True)
    failed = fail_a_sync(monkeypatch, ".dead")
    with pytest.raises(BackendError, match="no disk"):
        other.delete("refs/@a")
    _log_writer.close_writer(other._view)
    monkeypatch.undo()
    _log_writer.close_writer(backend._view)

    other.delete("refs/@a")
    cut_power(failed)
    assert LoggedBackend(tmp_path).stat("refs/@a") is None
