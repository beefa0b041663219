"""Every byte of a log may be flipped, and the log cut anywhere: what is loaded is right, and what is lost is named."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tensorcas_mlflow.backends import LoggedBackend, _log_folder, _log_reader, _log_view, _log_writer
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_reader import LogReader
from tensorcas_mlflow.backends._log_records import (
    CLOSED,
    HEAD_BYTES,
    HEADER_BYTES,
    MARK_AT,
    Record,
    read_tombstones,
)
from tensorcas_mlflow.errors import BackendError, FormatError, TensorCasError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store

N_STEPS = 4


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(step, step + 64, dtype=np.float32), "b": np.full(8, step, np.float32)}


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with logs, some steps and a dropped one."""
    store = Store.init(tmp_path / "root", chunk_bytes=4096, logs=True)
    for step in range(N_STEPS):
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(target(step))
    ref = store.ref(target(1).key)
    assert ref is not None
    store.drop(ref)
    assert isinstance(store.backend, LoggedBackend)
    _log_writer.close_writer(store.backend._view)
    return tmp_path / "root"


def the_file(folder: Path, ending: str) -> Path:
    (found,) = (folder / ".tensorcas" / "logs").glob(f"*.{ending}")
    return found


def look(folder: Path) -> tuple[set[int], bool]:
    """Load every step; return those that are there, and whether anything was said to be wrong."""
    there: set[int] = set()
    is_said = False
    store = Store.open(folder)
    try:
        list(store.backend.list("refs"))
    except FormatError:
        is_said = True
    for step in range(N_STEPS):
        try:
            ref = store.ref(target(step).key)
            if ref is None:
                continue
            loaded = store.read_tensors(store.manifest(ref))
            assert {name: array.tobytes() for name, array in loaded.items()} == {
                name: array.tobytes() for name, array in arrays(step).items()
            }
            there.add(step)
        except TensorCasError:
            is_said = True
    return there, is_said


def damaged(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        for bit in (0, 7):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            yield at, bytes(flipped)


def check(folder: Path, ending: str, made: Callable[[bytes], Iterator[tuple[int, bytes]]], every: int) -> None:
    path = the_file(folder, ending)
    whole = path.read_bytes()
    kept = {0, 2, 3}
    assert look(folder) == (kept, False)

    for number, (at, data) in enumerate(made(whole)):
        if number % every:
            continue
        path.write_bytes(data)
        there, is_said = look(folder)
        assert is_said or there == kept, (at, there)
    path.write_bytes(whole)


@pytest.mark.parametrize("ending", ["log", "dead"])
def test_flipped_bits_of_a_log_lose_nothing_in_silence(folder: Path, ending: str) -> None:
    check(folder, ending, damaged, every=37 if ending == "log" else 1)


@pytest.mark.long
def test_no_flipped_bit_of_a_log_loses_anything_in_silence(folder: Path) -> None:
    check(folder, "log", damaged, every=1)


def test_a_cut_of_a_log_is_named_and_a_repair_gives_a_prefix_of_its_commits(folder: Path, tmp_path: Path) -> None:
    path = the_file(folder, "log")
    whole = path.read_bytes()
    (folder / ".tensorcas" / "logs" / f"{path.stem}.dead").unlink()
    found: set[frozenset[int]] = set()
    for number, size in enumerate(range(0, len(whole), 53)):
        path.write_bytes(whole[:size])
        assert look(folder) == (set(), True)
        with pytest.raises(FormatError, match=f"logs/{path.stem}.log.*tensorcas repair"):
            save(folder, 9)
        assert [problem.key for problem in verify(Store.open(folder)).problems] == [f"logs/{path.name}"]
        if number % 4 == 0:
            repaired = tmp_path / f"{size}"
            shutil.copytree(folder, repaired)
            plan_repair(Store.open(repaired)).execute()
            save(repaired, 9)
            assert verify(Store.open(repaired), full=True).problems == ()
            found.add(frozenset(loads(repaired)))

    assert found == {frozenset(range(n)) for n in range(N_STEPS)}


def save(folder: Path, step: int) -> None:
    store = Store.open(folder)
    with store.write_checkpoint(arrays(step)) as pending:
        pending.commit(target(step))


def test_a_replaced_checkpoint_is_not_loaded_while_its_replacement_is_cut_off(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=4096, logs=True)
    for step in (5, 6):
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(target(1))
    path = the_file(tmp_path, "log")
    os.truncate(path, records_of(tmp_path)[-1].offset)

    for opened in (store, Store.open(tmp_path)):
        with pytest.raises(FormatError, match=f"logs/{path.stem}.log.*tensorcas repair"):
            opened.ref(target(1).key)


def test_blobs_that_are_written_after_a_log_was_cut_do_not_hide_the_loss(folder: Path) -> None:
    path = the_file(folder, "log")
    os.truncate(path, records_of(folder)[-1].offset)
    backend = LoggedBackend(folder / ".tensorcas")
    for number in range(20):
        backend.put_all([(f"packs/{number}", [os.urandom(1000)])])
        with contextlib.suppress(FormatError):
            backend.missing([f"packs/{number}"])

    with pytest.raises(FormatError, match=f"logs/{path.stem}.log"):
        list(LoggedBackend(folder / ".tensorcas").list("refs"))
    assert [problem.key for problem in verify(Store.open(folder)).problems] == [f"logs/{path.name}"]


@pytest.mark.parametrize("n_lost", [0, 1, 20, 10_000])
def test_a_torn_save_that_was_not_acknowledged_blocks_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, n_lost: int
) -> None:
    """Its process was killed before the sync; then the power was cut."""
    store = Store.open(folder)
    size = the_file(folder, "log").stat().st_size

    def die(self: _log_writer.LogWriter, end: int, view: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_log_writer.LogWriter, "sync", die)
    with pytest.raises(KeyboardInterrupt), store.write_checkpoint(arrays(8)) as pending:
        pending.commit(target(8))
    monkeypatch.undo()
    assert isinstance(store.backend, LoggedBackend)
    _log_writer.close_writer(store.backend._view)
    path = the_file(folder, "log")
    os.truncate(path, max(size, path.stat().st_size - n_lost))

    assert look(folder)[1] is False
    save(folder, 9)
    assert verify(Store.open(folder), full=True).problems == ()


def test_a_cut_of_a_closed_log_is_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_log_writer, "_FULL_BYTES", HEADER_BYTES + 1)
    store = Store.open(folder)
    for step in (7, 8):
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(target(step))
    for path in (folder / ".tensorcas" / "logs").glob("*.log"):
        dead = path.with_suffix(".dead")
        found = read_tombstones(path.stem, dead.read_bytes(), dead.name)[0] if dead.exists() else []
        if any(place.row == CLOSED for place in found):
            whole = path.read_bytes()
            path.write_bytes(whole[:MARK_AT] + bytes(HEADER_BYTES - MARK_AT) + whole[HEADER_BYTES:-1])
            with pytest.raises(FormatError, match=path.stem):
                list(LoggedBackend(folder / ".tensorcas").list("refs"))
            path.write_bytes(whole)
            break
    else:
        pytest.fail("no log was closed")


def test_damage_of_a_log_is_an_error_of_every_search_that_finds_nothing(folder: Path) -> None:
    path = the_file(folder, "log")
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 100] ^= 1
    path.write_bytes(data)
    backend = LoggedBackend(folder / ".tensorcas")

    for call in (
        lambda: list(backend.list("refs")),
        lambda: backend.list_dir("refs/runs/run"),
        lambda: backend.stat("refs/runs/run/@9"),
        lambda: backend.get("refs/runs/run/@9"),
        lambda: backend.missing(["packs/absent"]),
        lambda: backend.withdraw("intents/x", backend.put_new("intents/x", [b"x"])),
    ):
        with pytest.raises(FormatError, match=f"logs/{path.stem}.log.*byte {HEADER_BYTES}"):
            call()


def records_of(folder: Path) -> list[Record]:
    path = the_file(folder, "log")
    with path.open("rb") as file:
        return LogReader(path.stem, file.fileno(), path.name).records(0, path.stat().st_size)[0]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def loads(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    store = Store.open(folder)
    refs = {step: store.ref(target(step).key) for step in range(N_STEPS)}
    return {step: store.read_tensors(store.manifest(ref)) for step, ref in refs.items() if ref is not None}


def test_a_replaced_checkpoint_is_not_loaded_while_its_replacement_is_damaged(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=4096, logs=True)
    for step in (5, 6, 7):  # the third save keeps the second from being the last
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(target(1 if step < 7 else 7))
    path = the_file(tmp_path / "root", "log")
    (_, replacement, _), _, _ = LogReader(path.stem, os.open(path, os.O_RDONLY), path.name).records(
        0, path.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[replacement.offset + 60] ^= 1
    path.write_bytes(data)
    opened = Store.open(tmp_path / "root")

    with pytest.raises(FormatError, match=f"logs/{path.stem}.log"):
        opened.ref(target(1).key)
    with pytest.raises(FormatError, match=f"logs/{path.stem}.log"), opened.write_checkpoint(arrays(8)) as pending:
        pending.commit(target(1))


@pytest.mark.parametrize("part", ["header", "head", "meta"])
def test_repair_keeps_the_whole_records_of_a_damaged_log_and_names_what_is_lost(folder: Path, part: str) -> None:
    path = the_file(folder, "log")
    damaged = records_of(folder)[2]
    at = {"header": 40, "head": damaged.offset + 9, "meta": damaged.offset + HEAD_BYTES + 30}[part]
    flip(path, at)
    start = 0 if part == "header" else damaged.offset
    kept = {0, 2, 3} if part == "header" else {0, 3}

    problems = verify(Store.open(folder)).problems
    plan = plan_repair(Store.open(folder))
    assert [problem.key for problem in problems] == [f"logs/{path.name}"]
    assert part == "header" or f"from byte {start} to byte {damaged.end}" in problems[0].reason
    assert [finding.key for finding in plan.findings] == [f"logs/{path.name}"]
    report = plan.execute()

    assert report.mended_logs == (f"logs/{path.name}",)
    assert [loss.key for loss in report.losses] == ([] if part == "header" else [f"logs/{path.name}"])
    assert not path.exists()
    assert {step: sorted(found) for step, found in loads(folder).items()} == {step: ["b", "w"] for step in kept}
    assert verify(Store.open(folder), full=True).problems == ()
    [kept_bytes] = (folder / ".tensorcas" / "quarantine").iterdir()
    assert f'"key": "logs/{path.name}"' in kept_bytes.read_text("latin-1")


def test_repair_replaces_a_pack_with_a_flipped_byte_in_the_body_of_a_record(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=16384, logs=True)
    drawn = np.random.default_rng(0)
    for step in range(2):
        with store.write_checkpoint({"w": drawn.standard_normal(20_000)}, policy="fast") as pending:
            pending.commit(target(step))
    assert isinstance(store.backend, LoggedBackend)
    _log_writer.close_writer(store.backend._view)
    record = records_of(tmp_path)[0]
    (pack,) = (row for row in record.rows if row.in_body)
    flip(the_file(tmp_path, "log"), pack.start + 1000)

    assert [problem.key for problem in verify(Store.open(tmp_path), full=True).problems] == [pack.key]
    report = plan_repair(Store.open(tmp_path)).execute()
    assert report.packs_gone == (pack.key,)
    assert [(loss.key, loss.tensors) for loss in report.losses] == [(target(0).key, ("w",))]
    assert len(verify(Store.open(tmp_path), full=True).problems) == 1


def test_repair_rewrites_a_log_that_is_cut_after_it_was_closed(folder: Path) -> None:
    path = the_file(folder, "log")
    size = path.stat().st_size
    _log_folder.LogFolder(str(folder / ".tensorcas")).mark_closed(path.stem, size)
    path.write_bytes(path.read_bytes()[:-1])

    [problem] = verify(Store.open(folder)).problems
    assert problem.key == f"logs/{path.name}"
    assert f"to byte {size} are damaged" in problem.reason
    plan_repair(Store.open(folder)).execute()
    assert loads(folder).keys() == {0, 2}
    assert verify(Store.open(folder)).problems == ()


def test_repair_names_a_damaged_tombstone(folder: Path) -> None:
    dead = the_file(folder, "dead")
    flip(dead, 3)

    [problem] = verify(Store.open(folder)).problems
    assert problem.key == f"logs/{dead.name}"
    assert "the tombstone at byte 0 is damaged" in problem.reason
    report = plan_repair(Store.open(folder)).execute()
    assert report.mended_logs == (f"logs/{dead.name}",)
    assert loads(folder).keys() == {0, 1, 2, 3}
    assert verify(Store.open(folder)).problems == ()


def test_repair_leaves_a_damaged_log_to_the_process_that_appends_to_it(folder: Path) -> None:
    path = the_file(folder, "log")
    flip(path, records_of(folder)[1].offset + 9)
    with LockedFile.alone_in(str(path)):
        report = plan_repair(Store.open(folder)).execute()

    assert list(report.left) == [f"logs/{path.name}"]
    assert "end that process" in report.left[f"logs/{path.name}"]
    assert path.exists()


def test_too_little_memory_to_read_a_log_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LogReader, *args: object) -> bytes:
        raise zstandard.ZstdError("zstd decompress error: Allocation error : not enough memory")

    monkeypatch.setattr(_log_reader, "grown", refuse)
    with pytest.raises(MemoryError):
        list(LoggedBackend(folder / ".tensorcas").list("refs"))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_an_error_of_the_system_while_a_log_is_read_is_an_error_of_the_backend(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for bound in ("_INDEXED_BYTES", "_INDEXED_AGAIN_BYTES"):
        monkeypatch.setattr(_log_view, bound, 256)
    store = Store.open(folder)
    with store.write_checkpoint(arrays(9)) as pending:
        pending.commit(target(9))
    assert isinstance(store.backend, LoggedBackend)
    _log_writer.close_writer(store.backend._view)
    backend = LoggedBackend(folder / ".tensorcas")
    assert backend.stat(target(9).key) is not None
    os_open = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".log"):
            raise OSError(number, os.strerror(number))
        return os_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    (log,) = backend._view._logs.values()
    assert log.index is not None
    digests = np.zeros((1, 32), np.uint8)
    digests[0, :4] = np.frombuffer(log.index.words[:1].tobytes(), np.uint8)
    for call in (
        lambda: list(backend.list("packs")),
        lambda: backend.list_dir("packs"),
        lambda: backend.find_packs(digests),
        lambda: backend.get(target(2).key),
        lambda: list(backend.paths()),
    ):
        with pytest.raises(BackendError):
            call()


def test_a_log_whose_header_is_lost_is_damaged(folder: Path) -> None:
    path = the_file(folder, "log")
    with path.open("r+b") as file:
        file.write(bytes(HEADER_BYTES))

    with pytest.raises(FormatError, match="its header is damaged"):
        list(Store.open(folder).backend.list("refs"))
    assert [problem.key for problem in verify(Store.open(folder)).problems] == [f"logs/{path.name}"]
    plan_repair(Store.open(folder)).execute()
    assert loads(folder).keys() == {0, 2, 3}
    assert verify(Store.open(folder)).problems == ()


def test_damage_is_known_while_another_thread_looks_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(the_file(folder, "log"), records_of(folder)[1].offset + 9)
    backend = LoggedBackend(folder / ".tensorcas")
    with pytest.raises(FormatError):
        list(backend.list("refs"))
    lstat, n_checks = os.lstat, 0

    def look_between(path: str) -> os.stat_result:
        nonlocal n_checks
        if path.endswith((".dead", "generation")):
            n_checks += 1
            with pytest.raises(FormatError):
                backend._view.check()
        return lstat(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", look_between)
        patch.setattr(os, "lstat", look_between)
        backend._view.refresh()

    assert n_checks > 1


def test_a_power_cut_during_the_rewriting_of_a_log_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root"
    store = Store.init(folder, logs=True)
    for step in range(60):
        with store.write_checkpoint({"w": np.random.default_rng(step).random(100)}) as pending:
            pending.commit(target(step))
    for step in range(40):
        ref = store.ref(target(step).key)
        assert ref is not None
        store.drop(ref)
    old = the_file(folder, "log")
    kept = old.read_bytes(), old.with_suffix(".dead").read_bytes()
    copies: list[tuple[str, bytes]] = []
    fsync = os.fsync

    def cut(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".log") and path != str(old):
            # The disk has some pages of the copy, and not the one in the middle.
            data = bytearray(Path(path).read_bytes())
            data[4096:8192] = bytes(4096)
            copies.append((path, bytes(data)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", cut)
    plan_gc(store, grace_s=0).execute()
    monkeypatch.undo()
    [(path, data)] = copies
    old.write_bytes(kept[0])
    old.with_suffix(".dead").write_bytes(kept[1])
    Path(path).write_bytes(data)

    assert len(list(Store.open(folder).backend.list("refs"))) == 20
    assert verify(Store.open(folder)).problems == ()
