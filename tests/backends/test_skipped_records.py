"""Records of other processes are read only when one of their blobs is wanted, and that changes no answer."""

from __future__ import annotations

import errno
import os
import random
import struct
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensorcas_mlflow.backends._log_reader import LogReader
from tensorcas_mlflow.backends._log_records import HEAD_BYTES, HEADER_BYTES, LogBlob, encode_record
from tensorcas_mlflow.backends._log_skipped import SkippedRecords

from tensorcas_mlflow.backends import (
    LoggedBackend,
    _log_reader,
    _log_records,
    _log_skipped,
    _log_view,
    _log_writer,
)
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError
from tensorcas_mlflow.layout import PackWriter, Payload
from tests.backends.test_logged import commit, made
from tests.python_calls import calls_of


@pytest.fixture
def pair(tmp_path: Path) -> tuple[LoggedBackend, LoggedBackend]:
    """Two backends of a folder, as two processes have; the first one's log is known to the second."""
    one = made(tmp_path)
    commit(one, "first")
    other = LoggedBackend(tmp_path)
    assert other.get("refs/@first") == b"first"
    return one, other


def pack_of(*chunks: bytes) -> tuple[bytes, np.ndarray]:
    """Return a pack, and the digests of its chunks."""
    writer = PackWriter()
    payloads = [
        Payload(digest=digest(c), raw_bytes=len(c), codec=RAW, typesize=1, data=c, begins_row=True) for c in chunks
    ]
    data = b"".join(map(bytes, writer.pieces(iter(payloads))))
    return data, np.frombuffer(b"".join(map(digest, chunks)), np.uint8).reshape(-1, 32)


def n_skipped(backend: LoggedBackend) -> int:
    return len(backend._view._skipped.all())


def test_records_are_skipped_until_one_of_their_blobs_is_wanted(pair: tuple[LoggedBackend, LoggedBackend]) -> None:
    one, other = pair
    for number in range(12):
        commit(one, str(number))
    with calls_of("LogReader._record", "LogView._add") as reads:
        assert other.stat("refs/@none") is None
        assert other.missing(["packs/none"]) == {"packs/none"}
    assert reads == []
    assert n_skipped(other) == 12

    assert other.get("packs/7") == b"7" * 100
    assert n_skipped(other) == 11
    assert {info.key for info in other.list_dir("refs")[0]} == {f"refs/@{name}" for name in ("first", *range(12))}
    assert n_skipped(other) == 0


def test_chunks_of_a_skipped_pack_are_found(pair: tuple[LoggedBackend, LoggedBackend]) -> None:
    one, other = pair
    packs = {}
    for number in range(4):
        name, chunks = uuid.uuid4().hex, [b"%d" % number * 200, b"%d!" % number * 300]
        data, digests = pack_of(*chunks)
        packs[f"packs/{name}.pack"] = digests
        intent = f"intents/{name}"
        token = one.put_new(intent, [b"x"], durable=False)
        one.put_all([(f"packs/{name}.pack", [data])])
        one.promote(intent, f"refs/@{number}", b"ref", token=token, replace=False)
    assert other.stat("refs/@none") is None
    assert n_skipped(other) == 4

    for key, digests in packs.items():
        assert other.find_packs(digests[1:]) == {key}
    assert other.find_packs(np.zeros((3, 32), np.uint8)) == set()
    assert n_skipped(other) == 0


def test_intent_consumed_by_a_skipped_record_is_withdrawn_by_nobody(pair: tuple[LoggedBackend, LoggedBackend]) -> None:
    one, other = pair
    intent = f"intents/{uuid.uuid4().hex}"
    token = one.put_new(intent, [b"x"], durable=False)
    path = one.root / intent
    kept = path.with_name("kept")
    os.link(path, kept)
    one.promote(intent, "refs/@new", b"new", token=token, replace=False)
    os.rename(kept, path)  # as if the process had died before the removal

    assert not other.withdraw(intent, token)
    with pytest.raises(BlobNotFoundError):
        other.promote(intent, "refs/@late", b"late", token=token, replace=False)
    assert other.stat("refs/@late") is None


def test_deletion_of_a_skipped_ref_is_known_before_another_takes_its_place(
    pair: tuple[LoggedBackend, LoggedBackend],
) -> None:
    one, other = pair
    commit(one, "a")
    assert other.stat("refs/@none") is None
    assert n_skipped(other) == 1
    one.delete("refs/@a")
    assert other.stat("refs/@none") is None

    [log] = other._view.undurable_deletions("refs/@a")
    assert log in other._view.logs()
    assert other.stat("refs/@a") is None
    assert other.get("packs/a") == b"a" * 100


def test_skipped_blobs_are_found_after_a_rewriting_of_their_log(pair: tuple[LoggedBackend, LoggedBackend]) -> None:
    one, other = pair
    for number in range(9):
        commit(one, str(number))
    assert other.stat("refs/@none") is None
    for number in range(8):
        for key in (f"refs/@{number}", f"packs/{number}", f"manifests/{number}"):
            one.delete(key)
    before = set(one._view.logs())
    one.sweep(0)
    assert not before & set(one._view.logs())

    assert other._view.find("refs/@8") is not None  # as of the last look
    assert other.get("packs/8") == b"8" * 100
    assert {info.key for info in other.list("refs")} == {"refs/@first", "refs/@8"}


def test_skipped_blob_is_found_in_the_index_of_the_log_that_took_the_place_of_its_own(
    pair: tuple[LoggedBackend, LoggedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("_INDEXED_BYTES", "_INDEXED_AGAIN_BYTES"):
        monkeypatch.setattr(_log_view, bound, 1)
    one, other = pair
    data, digests = pack_of(os.urandom(100))
    for number in range(9):
        commit(one, str(number))
    intent = f"intents/{uuid.uuid4().hex}"
    token = one.put_new(intent, [b"x"], durable=False)
    one.put_all([("packs/wanted", [data])])
    one.promote(intent, "refs/@wanted", b"ref", token=token, replace=False)
    assert other.stat("refs/@none") is None
    for number in range(9):
        for key in (f"refs/@{number}", f"packs/{number}", f"manifests/{number}"):
            one.delete(key)
    one.sweep(0)

    # As of the last look: the process does not know yet that the log is another one.
    assert other.find_packs(digests) == {"packs/wanted"}
    assert other._view.find("packs/wanted") is not None
    assert any(log.index is not None for log in other._view._logs.values())


def lost_after_a_failed_sync(
    one: LoggedBackend, other: LoggedBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Fail the sync of a commit whose bytes the disk loses, after another process has skipped its record."""

    def fail(descriptor: int) -> None:
        assert other.stat("refs/@none") is None
        raise OSError(errno.EIO, "the disk failed")

    log = _log_writer.writer_of(one._view).id
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(BackendError):
            commit(one, name)
    _log_writer.close_writer(one._view)
    path = one._folder.log_path(log)
    [at] = [at for found, at in other._view._skipped.all() if found == log]
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes(os.path.getsize(path) - at))
    return log


def test_process_that_skipped_a_record_which_the_disk_lost_says_so_and_goes_on(
    pair: tuple[LoggedBackend, LoggedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    log = lost_after_a_failed_sync(one, other, "lost", monkeypatch)

    assert other.stat("refs/@first") is not None
    assert log in other._view.failed
    assert other.missing(["packs/lost"]) == {"packs/lost"}
    with pytest.raises(BackendError, match="save again"):
        commit(other, "mine")
    commit(other, "again")
    assert other.get("refs/@again") == b"again"
    assert other.get("packs/first") == b"first" * 100
    assert other.stat("refs/@lost") is None
    assert other.missing(["packs/lost"]) == {"packs/lost"}


def test_damage_of_a_durable_record_is_no_loss_of_a_failed_sync(
    pair: tuple[LoggedBackend, LoggedBackend],
) -> None:
    one, other = pair
    commit(one, "second")
    commit(one, "third")
    assert other.stat("refs/@none") is None
    places = sorted(other._view._skipped.all())
    log, at = places[0]
    assert at < other._view._logs[log].durable <= places[1][1]
    with open(one._folder.log_path(log), "r+b") as file:
        file.seek(at + HEAD_BYTES + 4)
        file.write(b"damaged")
    one._folder.mark_failed(log)

    with pytest.raises(FormatError):
        other.get("refs/@second")
    with pytest.raises(FormatError):
        list(other.list("refs"))


def test_damage_in_a_log_that_was_taken_over_refuses_no_commit_for_the_index(
    pair: tuple[LoggedBackend, LoggedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    commit(one, "second")
    commit(one, "third")
    _log_writer.close_writer(one._view)
    assert other.stat("refs/@none") is None
    log, at = sorted(other._view._skipped.all())[0]
    writer = _log_writer.writer_of(other._view)
    assert writer.id == log
    with open(one._folder.log_path(log), "r+b") as file:
        file.seek(at + HEAD_BYTES + 4)
        file.write(b"damaged")
    for bound in ("_INDEXED_BYTES", "_INDEXED_AGAIN_BYTES"):
        monkeypatch.setattr(_log_view, bound, 1)
    commit(other, "mine")

    assert other.get("refs/@mine") == b"mine"
    assert not Path(one._folder.index_path(log)).exists()
    _log_writer.close_writer(other._view)


def test_places_of_read_records_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log_skipped, "_LEAST_PURGED", 64)
    skipped = SkippedRecords()
    for number in range(2000):
        keys = b"".join(_log_records.key_hash(f"{number} {name}") for name in "abcd")
        skipped.note(f"log {number // 100}", summary_of(number, keys))
        if number % 10:
            skipped.remove((f"log {number // 100}", number))
        if number % 100 == 99:
            skipped.forget(f"log {number // 100 - 1}")

    assert sorted(skipped.all()) == [("log 19", at) for at in range(1900, 2000, 10)]
    assert len(skipped._by_key) < 300
    assert skipped.with_keys([_log_records.key_hash("1950 c")]) == [("log 19", 1950)]
    assert skipped.with_keys([_log_records.key_hash("1951 c")]) == []


def summary_of(offset: int, keys: bytes) -> _log_records.SkippedRecord:
    return _log_records.SkippedRecord(
        offset=offset,
        end=offset + 1,
        body_start=offset + 1,
        body_digest=b"",
        durable_before=0,
        keys=keys,
        words=keys[:4],
        check=b"",
    )


def test_index_of_a_log_that_was_taken_over_names_the_skipped_blobs(
    pair: tuple[LoggedBackend, LoggedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    for number in range(20):
        commit(one, str(number))
    _log_writer.close_writer(one._view)
    assert other.stat("refs/@none") is None
    assert n_skipped(other) == 20
    for bound in ("_INDEXED_BYTES", "_INDEXED_AGAIN_BYTES"):
        monkeypatch.setattr(_log_view, bound, 1)
    commit(other, "mine")
    _log_writer.close_writer(other._view)
    third = LoggedBackend(one.root)

    for name in ("first", *map(str, range(20)), "mine"):
        assert third.get(f"packs/{name}") == name.encode() * 100
    assert any(log.written is not None for log in other._view._logs.values())


def test_blob_outside_of_the_usual_folders_is_listed_at_once(pair: tuple[LoggedBackend, LoggedBackend]) -> None:
    one, other = pair
    intent = f"intents/{uuid.uuid4().hex}"
    token = one.put_new(intent, [b"x"], durable=False)
    one.put_all([("elsewhere/a", [b"a"])])
    one.promote(intent, "refs/@new", b"new", token=token, replace=False)

    assert other.names("elsewhere") == {"a"}
    assert [info.key for info in other.list("elsewhere")] == ["elsewhere/a"]


@pytest.mark.parametrize("seed", range(6))
def test_process_that_skips_answers_as_one_that_has_read_everything(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    one, other = made(tmp_path), LoggedBackend(tmp_path)
    keys = [f"{folder}{number}" for number in range(12) for folder in ("refs/@", "packs/", "manifests/")]
    for number in range(60):
        act = draw.choice(["commit", "commit", "replace", "delete", "look", "sweep"])
        name = str(number % 12)
        if act == "delete":
            one.delete(draw.choice(keys))
        elif act == "sweep" and number % 7 == 0:
            one.sweep(0)
        elif act != "look" and not any(one.stat(f"{folder}/{name}") for folder in ("packs", "manifests")):
            commit(one, name, replace=one.stat(f"refs/@{name}") is not None)
        key = draw.choice(keys)
        assert (other.stat(key) is None) == (LoggedBackend(tmp_path).stat(key) is None), key
        if draw.random() < 0.1:
            folder = draw.choice(["refs", "packs", "manifests"])
            fresh = LoggedBackend(tmp_path)
            assert other.names(folder) == fresh.names(folder)
            assert other.list_dir(folder) == fresh.list_dir(folder)


def written(
    path: Path, blobs: list[LogBlob], change: Callable[[bytearray], None] | None = None
) -> tuple[LogReader, int, int]:
    """Write a log of one record; ``change`` changes its bytes, whose digest is then made right."""
    log = uuid.uuid4().hex
    pieces, _ = encode_record(log, HEADER_BYTES, blobs, ["intents/a"], durable_before=HEADER_BYTES, prefix=None)
    data = bytearray(b"".join(pieces))
    if change is not None:
        change(data)
        front = bytes(data[: HEAD_BYTES - 16] + data[HEAD_BYTES:])
        named = bytes.fromhex(log) + HEADER_BYTES.to_bytes(8, "little") + front
        data[HEAD_BYTES - 16 : HEAD_BYTES] = digest(named)[:16]
    path.write_bytes(_log_records.header(log, 1) + data)
    descriptor = os.open(path, os.O_RDONLY)
    return LogReader(log, descriptor, path.name), descriptor, len(data) + HEADER_BYTES


BLOBS = [LogBlob(key="refs/@a", data=b"ref", is_commit=True, version=1), LogBlob(key="packs/a", data=b"pack" * 99)]


def test_summary_of_other_keys_than_the_record_has_is_impossible(tmp_path: Path) -> None:
    def lie(data: bytearray) -> None:
        data[HEAD_BYTES + 2] ^= 1

    reader, descriptor, size = written(tmp_path / "log", BLOBS, lie)
    try:
        with pytest.raises(CorruptError, match="impossible contents"):
            reader.records(HEADER_BYTES, size)
    finally:
        os.close(descriptor)


def test_record_that_hides_a_key_of_another_folder_is_impossible(tmp_path: Path) -> None:
    def lie(data: bytearray) -> None:
        data[5] &= ~4

    reader, descriptor, size = written(tmp_path / "log", [LogBlob(key="elsewhere/a", data=b"a")], lie)
    try:
        with pytest.raises(CorruptError, match="impossible contents"):
            reader.records(HEADER_BYTES, size)
    finally:
        os.close(descriptor)


def test_record_that_is_taken_back_while_it_is_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [LogBlob(key="packs/a", data=os.urandom(10_000))]
    reader, descriptor, size = written(tmp_path / "log", blobs)
    pread = os.pread

    def cut(descriptor: int, n_bytes: int, at: int) -> bytes:
        data = pread(descriptor, n_bytes, at)
        os.truncate(tmp_path / "log", HEADER_BYTES + 10)
        return data

    monkeypatch.setattr(os, "pread", cut)
    try:
        assert reader.record(HEADER_BYTES, size) is None
    finally:
        os.close(descriptor)


def test_summary_that_is_longer_than_its_record_is_no_summary(tmp_path: Path) -> None:
    def stretch(data: bytearray) -> None:
        struct.pack_into("<H", data, HEAD_BYTES, 0xFFFF)

    reader, descriptor, size = written(tmp_path / "log", BLOBS, stretch)
    try:
        assert reader.records(HEADER_BYTES, size, skips=True) == ([], HEADER_BYTES, None)
        assert _log_reader.read_summaries(reader._id, descriptor, HEADER_BYTES, size) == ([], HEADER_BYTES)
    finally:
        os.close(descriptor)


def test_both_ways_to_read_summaries_agree(tmp_path: Path) -> None:
    pack, digests = pack_of(b"a" * 100, b"b" * 100)
    blobs = [BLOBS[0], LogBlob(key="packs/a", data=pack), LogBlob(key="manifests/a", data=b"rows")]
    reader, descriptor, size = written(tmp_path / "log", blobs)
    try:
        summaries, end = _log_reader.read_summaries(reader._id, descriptor, HEADER_BYTES, size)
        records, stop, damage = reader.records(HEADER_BYTES, size, skips=True)
        [whole] = reader.records(HEADER_BYTES, size)[0]
    finally:
        os.close(descriptor)

    [summary] = summaries
    assert (records, stop, damage) == (summaries, size, None)
    assert end == size
    keys = ("refs/@a", "packs/a", "manifests/a", "intents/a")
    assert summary.keys == b"".join(map(_log_records.key_hash, keys))
    assert summary.words == np.ascontiguousarray(digests[:, :4]).tobytes()
    assert isinstance(whole, _log_records.Record)
    assert [row.key for row in whole.rows] == list(keys[:3])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_record_with_a_body_is_skipped_if_the_body_is_whole(tmp_path: Path, *, is_damaged: bool) -> None:
    reader, descriptor, size = written(tmp_path / "log", [BLOBS[0], BLOBS[1]._replace(in_body=True)])
    if is_damaged:
        with (tmp_path / "log").open("r+b") as file:
            file.seek(size - 1)
            file.write(b"!")
    try:
        skipped, end, _ = reader.records(HEADER_BYTES, size, skips=True)
        read, stop, _ = reader.records(HEADER_BYTES, size)
    finally:
        os.close(descriptor)

    assert end == stop == (HEADER_BYTES if is_damaged else size)
    assert [type(record) for record in skipped] == [_log_records.SkippedRecord] * (not is_damaged)
    assert [record.body_digest for record in skipped] == [record.body_digest for record in read]


def test_large_record_is_skipped_until_its_blob_is_wanted(pair: tuple[LoggedBackend, LoggedBackend]) -> None:
    one, other = pair
    intent = f"intents/{uuid.uuid4().hex}"
    token = one.put_new(intent, [b"x"], durable=False)
    data, digests = pack_of(os.urandom(50_000), os.urandom(100))
    one.put_all([("packs/large", [data])])
    one.promote(intent, "refs/@large", b"ref", token=token, replace=False)
    assert other.stat("refs/@none") is None
    assert n_skipped(other) == 1

    assert other.find_packs(digests[:1]) == {"packs/large"}
    assert other.get("packs/large") == data
    assert n_skipped(other) == 0
