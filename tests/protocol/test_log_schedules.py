"""No order of the calls of processes that share logs breaks the contract, and each rule is needed for that."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import LoggedBackend, _log_folder, _log_view, _log_watch, _log_writer, _logs
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_view import LogView
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, FormatError
from tests.protocol.log_processes import Act, Run, explore

REF = "refs/runs/run/@1"


def save(name: str, *, replace: bool = True, ref: str = REF) -> Act:
    """A process that commits a pack and a ref, under an intent that exists already."""

    def act(backend: LoggedBackend) -> str:
        intent = backend.stat(f"intents/{name}")
        if intent is None:
            return "BlobNotFoundError"
        backend.put_all([(f"packs/{name}", [f"pack of {name}".encode()])])
        try:
            backend.promote(f"intents/{name}", ref, name.encode(), token=intent.token, replace=replace)
        except (BlobExistsError, BlobNotFoundError) as error:
            return type(error).__name__
        return "done"

    return act


def withdraw(key: str) -> Act:
    """A process that withdraws a blob as it found it."""

    def act(backend: LoggedBackend) -> bool:
        info = backend.stat(key)
        return info is not None and backend.withdraw(key, info.token)

    return act


def withdraw_old(backend: LoggedBackend) -> bool:
    """Withdraw the ref that was there at the start."""
    return backend.withdraw(REF, (backend.root / "token").read_text())


def survey(backend: LoggedBackend) -> tuple[list[str], list[str]]:
    intents = [info.key for info in backend.list("intents")]
    return intents, [info.key for info in backend.list("refs")]


def survey_again(backend: LoggedBackend) -> tuple[list[str], list[str]]:
    """Survey with a view of the logs that is older than the survey."""
    list(backend.list("refs"))
    return survey(backend)


def read_ref(backend: LoggedBackend) -> str:
    try:
        return backend.get(REF).decode()
    except BlobNotFoundError:
        return ""


def read_ref_again(backend: LoggedBackend) -> str:
    """Read a ref with a view of the logs that is older than the reading."""
    read_ref(backend)
    return read_ref(backend)


def delete_ref(backend: LoggedBackend) -> None:
    backend.delete(REF)


def replaced(folder: Path) -> None:
    """Make a store with a ref in each of two logs, the later one in place of the earlier one."""
    backend = LoggedBackend(folder)
    backend.make_logs()
    committed(backend, "old")
    _log_writer.close_writer(backend._view)
    (first,) = (folder / "logs").glob("*.log")
    # As if another process still wrote to the first log. Readers read it before the second one.
    with LockedFile.alone_in(str(first)):
        while (created := backend._folder.create_log())[0] < first.stem:
            LockedFile.release(created[1])
            os.unlink(backend._folder.log_path(created[0]))
        LockedFile.release(created[1])
        committed(backend, "new")
    _log_writer.close_writer(backend._view)


def committed(backend: LoggedBackend, name: str, ref: str = REF) -> None:
    """Commit as a process that is gone afterwards."""
    key = f"intents/{name}"
    token = backend.put_new(key, [b"x"])
    backend.put_all([(f"packs/{name}", [f"pack of {name}".encode()])])
    backend.promote(key, ref, name.encode(), token=token, replace=True)


def prepared(*intents: str, saved: Sequence[str] = (), refs: bool = False, deleted: int = 0) -> Callable[[Path], None]:
    """Make a store with intents, and steps in the log of a process that is gone."""

    def prepare(folder: Path) -> None:
        backend = LoggedBackend(folder)
        backend.make_logs()
        for name in intents:
            backend.put_new(f"intents/{name}", [b"x"])
        for number, name in enumerate(saved):
            committed(backend, name, f"refs/runs/{name}/@1" if refs else REF)
            if number < deleted:
                backend.delete(f"refs/runs/{name}/@1")
                backend.delete(f"packs/{name}")
        if (found := backend.stat(REF)) is not None:
            (folder / "token").write_text(found.token)
        _log_writer.close_writer(backend._view)

    return prepare


def state(run: Run) -> dict[str, bytes]:
    """Read everything as a new process."""
    backend = LoggedBackend(run.folder)
    keys = [info.key for prefix in ("packs", "refs") for info in backend.list(prefix)]
    assert len(keys) == len(set(keys))
    return {key: backend.get(key) for key in keys}


def has_saved(found: Mapping[str, bytes], name: str, ref: str = REF) -> bool:
    is_there = found.get(ref) == name.encode()
    if is_there:
        assert found[f"packs/{name}"] == f"pack of {name}".encode()
    return is_there


@dataclass(frozen=True)
class Cast:
    """Processes, and the contract between them."""

    prepare: Callable[[Path], None]
    acts: Mapping[str, Act]
    check: Callable[[Run], None]
    mortal: Sequence[str] = ()

    def explore(self, most_changes: int) -> int:
        return explore(self.prepare, self.acts, self.check, most_changes=most_changes, mortal=self.mortal)


def check_fence(run: Run) -> None:
    found = state(run)
    if run.has_died("save"):
        # Whoever comes next withdraws the intent, unless it was consumed.
        later = LoggedBackend(run.folder)
        is_withdrawn = run.said("withdraw") or withdraw("intents/a")(later)
        assert not (is_withdrawn and has_saved(found, "a"))
        assert not list(later.list("intents"))
    else:
        assert (run.said("save") == "done") == has_saved(found, "a") == (not run.said("withdraw"))


def check_one_of_two(run: Run) -> None:
    results = {name: run.said(name) for name in ("a", "b") if not run.has_died(name)}
    found = state(run)
    won = [name for name, result in results.items() if result == "done"]
    assert len(won) <= 1
    assert set(results.values()) <= {"done", "BlobExistsError"}
    if won:
        assert has_saved(found, won[0])
    else:
        assert REF in found


def check_replaced(run: Run) -> None:
    assert run.said("save") == "done"
    assert has_saved(state(run), "a")


def check_survey(run: Run) -> None:
    intents, refs = run.said("survey")
    assert intents or refs


def check_both(run: Run) -> None:
    found = state(run)
    for name in ("a", "b"):
        if not run.has_died(name):
            assert run.said(name) == "done"
            assert has_saved(found, name, f"refs/runs/{name}/@1")
    assert has_saved(found, "old", "refs/runs/old/@1")


def steps(backend: LoggedBackend) -> dict[str, bytes]:
    return {info.key: backend.get(info.key) for info in backend.list("refs")}


def tidied(backend: LoggedBackend) -> int:
    return backend._logs.tidy()


def drop(name: str) -> Act:
    def act(backend: LoggedBackend) -> None:
        backend.delete(f"refs/runs/{name}/@1")
        backend.delete(f"packs/{name}")

    return act


def check_tidied(run: Run) -> None:
    for name in ("tidy", "drop", "save"):
        if any(each.name == name for each in run.processes):
            run.said(name)
    found = state(run)
    has_dropped = any(each.name == "drop" and not each.is_dead for each in run.processes)
    assert has_saved(found, "last", "refs/runs/last/@1")
    if has_dropped:
        assert "packs/dropped" not in found
        assert "refs/runs/dropped/@1" not in found
    if any(each.name == "save" for each in run.processes) and not run.has_died("save"):
        assert run.said("save") == "done"
        assert has_saved(found, "new", "refs/runs/new/@1")
    if any(each.name == "read" for each in run.processes):
        assert run.said("read") == {"refs/runs/last/@1": b"last"}


OLD = ["one", "two", "three", "last"]
IDLE = prepared(saved=OLD, refs=True, deleted=3)


def rewritten(folder: Path) -> None:
    """Make a store whose log has been rewritten, and is worth it again: nobody skips its records."""
    prepared(saved=[*OLD[:3], *"abc", "last"], refs=True, deleted=3)(folder)
    backend = LoggedBackend(folder)
    backend._view.refresh()
    [log] = backend._view.logs()
    assert backend._logs._rewriter()._rewrite(log)
    for name in "abc":
        drop(name)(backend)
    _log_writer.close_writer(backend._view)


CASTS = {
    "a save and its withdrawal": Cast(
        prepared("a"), {"save": save("a"), "withdraw": withdraw("intents/a")}, check_fence
    ),
    "a save that dies and its withdrawal": Cast(
        prepared("a"), {"save": save("a"), "withdraw": withdraw("intents/a")}, check_fence, mortal=["save"]
    ),
    "two saves of one step": Cast(
        prepared("a", "b"), {"a": save("a", replace=False), "b": save("b", replace=False)}, check_one_of_two
    ),
    "a save in place of a step, and a withdrawal of that step": Cast(
        prepared("a", saved=["old"]), {"save": save("a"), "withdraw": withdraw_old}, check_replaced
    ),
    "a save into a new log, and a survey with an earlier view": Cast(
        prepared("a"), {"save": save("a"), "survey": survey_again}, check_survey
    ),
    "a deletion of a ref in two logs and a reader": Cast(
        replaced, {"read": read_ref, "delete": delete_ref}, lambda run: check_not_old(run)
    ),
    "a save and a survey": Cast(prepared("a"), {"save": save("a"), "survey": survey}, check_survey),
    "two saves after an idle log": Cast(
        prepared("a", "b", saved=["old"], refs=True),
        {name: save(name, ref=f"refs/runs/{name}/@1") for name in ("a", "b")},
        check_both,
    ),
    "two saves after an idle log, one of which dies": Cast(
        prepared("a", "b", saved=["old"], refs=True),
        {name: save(name, ref=f"refs/runs/{name}/@1") for name in ("a", "b")},
        check_both,
        mortal=["a", "b"],
    ),
    "a rewriting and a deletion": Cast(
        prepared(saved=["one", "two", "three", "dropped", "last"], refs=True, deleted=3),
        {"tidy": tidied, "drop": drop("dropped")},
        check_tidied,
    ),
    "a rewriting that dies and a deletion": Cast(
        prepared(saved=["one", "two", "three", "dropped", "last"], refs=True, deleted=3),
        {"tidy": tidied, "drop": drop("dropped")},
        check_tidied,
        mortal=["tidy"],
    ),
    "a rewriting and a reader": Cast(IDLE, {"read": steps, "tidy": tidied}, check_tidied),
    "a rewriting and a save": Cast(
        prepared("new", saved=OLD, refs=True, deleted=3),
        {"tidy": tidied, "save": save("new", ref="refs/runs/new/@1")},
        check_tidied,
    ),
    "two rewritings": Cast(rewritten, {"tidy": tidied, "read": tidied}, lambda run: check_tidied_twice(run)),
}


def check_not_old(run: Run) -> None:
    assert run.said("read") in ("new", "")


def check_tidied_twice(run: Run) -> None:
    run.said("tidy")
    run.said("read")
    assert has_saved(state(run), "last", "refs/runs/last/@1")


@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_of_processes_that_share_logs_breaks_the_contract(name: str) -> None:
    assert CASTS[name].explore(1) > 10


@pytest.mark.long
@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_with_two_preemptions_of_processes_that_share_logs_breaks_the_contract(name: str) -> None:
    assert CASTS[name].explore(2) > 100


@pytest.mark.parametrize(
    "name",
    [
        "a save that dies and its withdrawal",
        "a deletion of a ref in two logs and a reader",
        "two saves after an idle log",
        "a rewriting and a deletion",
        "a rewriting and a reader",
        "a rewriting and a save",
    ],
)
def test_no_schedule_of_processes_that_index_logs_breaks_the_contract(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("_INDEXED_BYTES", "_INDEXED_AGAIN_BYTES"):
        monkeypatch.setattr(_log_view, bound, 1)
    assert CASTS[name].explore(1) > 10


WATCHED: dict[str, Cast] = {
    **CASTS,
    "a deletion of a ref in two logs and a reader with an earlier view": Cast(
        replaced, {"read": read_ref_again, "delete": delete_ref}, check_not_old
    ),
}


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every process watch the logs from its first look on."""
    if _log_watch._library() is None:
        pytest.skip("this system reports no changes of files")
    monkeypatch.setattr(LogView, "may_watch", True)
    monkeypatch.setattr(_log_view, "_WATCHED_AT", 0)
    monkeypatch.setattr(_log_view, "_WATCHED_LOGS", 1)
    monkeypatch.setattr(_log_watch, "_MOST", 100)


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("name", WATCHED)
def test_no_schedule_of_processes_that_watch_logs_breaks_the_contract(name: str) -> None:
    assert WATCHED[name].explore(1) > 10


@pytest.mark.long
@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("name", WATCHED)
def test_no_schedule_with_two_preemptions_of_processes_that_watch_logs_breaks_the_contract(name: str) -> None:
    assert WATCHED[name].explore(2) > 100


# --- each rule switched off

Patch = Callable[[pytest.MonkeyPatch], None]


def without_lock(matches: Callable[[str], bool]) -> Patch:
    """Let locks of some files be no locks."""

    def switch_off(patch: pytest.MonkeyPatch) -> None:
        lock = LockedFile.lock

        def maybe_lock(descriptor: int, *, waits: bool = True) -> bool:
            path = os.path.realpath(f"/proc/self/fd/{descriptor}")
            return matches(path) or lock(descriptor, waits=waits)

        patch.setattr(LockedFile, "lock", maybe_lock)

    return switch_off


def intents_are_not_consumed(patch: pytest.MonkeyPatch) -> None:
    append = _logs.Logs.append
    patch.setattr(_logs.Logs, "append", lambda self, blobs, consumed=(), *, syncs: append(self, blobs, syncs=syncs))


def intent_goes_before_the_append(patch: pytest.MonkeyPatch) -> None:
    append = _logs.Logs.append

    def remove_then_append(self: _logs.Logs, blobs: Any, consumed: Any = (), *, syncs: bool) -> Any:
        for intent in consumed:
            _logs.os.unlink(f"{os.path.dirname(self.folder.path)}/{intent}")
        return append(self, blobs, consumed, syncs=syncs)

    patch.setattr(_logs.Logs, "append", remove_then_append)


def no_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_log_folder.LogFolder, "generation", lambda self: 0)


def log_is_not_announced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_log_folder.LogFolder, "begin_generation", lambda self: None)
    generation = _log_folder.LogFolder.generation
    # As if a log had been created and announced before.
    patch.setattr(_log_folder.LogFolder, "generation", lambda self: generation(self) or (0, 0, 0))


def records_before_tombstones(patch: pytest.MonkeyPatch) -> None:
    read_log, read_dead = LogView._read_log, LogView._read_dead

    def read_both(self: LogView, log: Any, **options: bool) -> None:
        read_log(self, log, **options)
        read_dead(self, log)

    patch.setattr(LogView, "_read_log", read_both)
    patch.setattr(LogView, "_read_dead", lambda self, log: False)


def tombstones_in_one_pass(patch: pytest.MonkeyPatch) -> None:
    read = LogView._read_tombstones
    patch.setattr(LogView, "_read_tombstones", lambda self, damages: read(self, damages) and False)


def append_behind_a_torn_record(patch: pytest.MonkeyPatch) -> None:
    """Take over any idle log at the end of its file."""
    adopted = _log_writer._adopted

    def take_over(view: LogView) -> Any:
        fstat = os.fstat
        view.refresh()
        ends = {log.path: log for log in view._logs.values()}

        def lies(descriptor: int) -> Any:
            found = fstat(descriptor)
            log = ends.get(os.path.realpath(f"/proc/self/fd/{descriptor}"))
            if log is None:
                return found
            return os.stat_result([*found[:6], log.end, *found[7:]])

        with patch.context() as inner:
            inner.setattr(_log_writer.os, "fstat", lies, raising=False)
            result = adopted(view)
        if result is not None:
            log_id, descriptor, _ = result
            end = os.lseek(descriptor, 0, os.SEEK_END)
            return log_id, descriptor, end
        return None

    patch.setattr(_log_writer, "_adopted", take_over)


def two_rewrite_at_once(path: str) -> bool:
    return path.endswith("/logs")


RULES: dict[str, tuple[Patch, str]] = {
    "the intent is locked": (without_lock(lambda path: "/intents/" in path), "a save and its withdrawal"),
    "the folder of the ref is locked: two saves": (
        without_lock(lambda path: "/refs/" in path),
        "two saves of one step",
    ),
    "the folder of the ref is locked: a withdrawal": (
        without_lock(lambda path: "/refs/" in path),
        "a save in place of a step, and a withdrawal of that step",
    ),
    "a record names the intent it consumes": (intents_are_not_consumed, "a save that dies and its withdrawal"),
    "append before the intent is removed": (intent_goes_before_the_append, "a save and a survey"),
    "one process at a time appends to a log": (
        without_lock(lambda path: path.endswith(".log")),
        "two saves after an idle log",
    ),
    "a log is not removed under its writer": (
        without_lock(lambda path: path.endswith(".log")),
        "a rewriting and a save",
    ),
    "nobody appends behind a torn record": (
        append_behind_a_torn_record,
        "two saves after an idle log, one of which dies",
    ),
    "a tombstone and a rewriting of its log exclude each other": (
        without_lock(lambda path: path.endswith(".dead")),
        "a rewriting and a deletion",
    ),
    "a reader lists the logs again": (no_generation, "a rewriting and a reader"),
    "a log is announced before its first record": (
        log_is_not_announced,
        "a save into a new log, and a survey with an earlier view",
    ),
    "tombstones are read before records": (
        records_before_tombstones,
        "a deletion of a ref in two logs and a reader",
    ),
    "tombstones are read until there are no new ones": (
        tombstones_in_one_pass,
        "a deletion of a ref in two logs and a reader",
    ),
    "one process at a time rewrites logs": (without_lock(two_rewrite_at_once), "two rewritings"),
}


@pytest.mark.parametrize("rule", RULES)
def test_logs_without_one_of_their_rules_break_the_contract(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off, cast = RULES[rule]
    switch_off(monkeypatch)

    with pytest.raises((AssertionError, BackendError, BlobNotFoundError, FormatError)):
        CASTS[cast].explore(2)
