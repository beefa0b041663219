"""No order of the calls of processes that share a database breaks the contract, and each rule is needed for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import FolderBackend, _database, _folder, damages_of, rebuild
from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._rows import Change, Rows
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, FormatError
from tests.protocol.database_processes import Act, Run, explore

REF = "refs/runs/run/@1"


def save(name: str, *, replace: bool = True, ref: str = REF) -> Act:
    """A process that commits a pack and a ref, under an intent that exists already."""

    def act(backend: FolderBackend) -> str:
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

    def act(backend: FolderBackend) -> bool:
        info = backend.stat(key)
        return info is not None and backend.withdraw(key, info.token)

    return act


def withdraw_old(backend: FolderBackend) -> bool:
    """Withdraw the ref that was there at the start."""
    return backend.withdraw(REF, (backend.root / "token").read_text())


def survey(backend: FolderBackend) -> tuple[list[str], list[str]]:
    backend.stat(REF)  # its first connection waits for writers
    intents = [info.key for info in backend.list("intents")]
    return intents, [info.key for info in backend.list("refs")]


def read_ref(backend: FolderBackend) -> str:
    try:
        return backend.get(REF).decode()
    except BlobNotFoundError:
        return ""


def read_ref_again(backend: FolderBackend) -> tuple[str, str]:
    """Read a ref twice, over one connection."""
    return read_ref(backend), read_ref(backend)


def put(name: str) -> Act:
    """A process that creates a blob at a key that another one uses too."""

    def act(backend: FolderBackend) -> str:
        try:
            backend.put_new("index/common", [name.encode()])
        except BlobExistsError:
            return "taken"
        return "done"

    return act


def closing(act: Act) -> Act:
    """A process that ends while others work: it may make a checkpoint, and may be the last one of the database."""

    def act_and_close(backend: FolderBackend) -> object:
        result = act(backend)
        backend._database.close()
        return result

    return act_and_close


def mended(backend: FolderBackend) -> int:
    return rebuild(backend).n_blobs


def delete_ref(backend: FolderBackend) -> None:
    backend.delete(REF)


def committed(backend: FolderBackend, name: str, ref: str = REF) -> None:
    """Commit as a process that is gone afterwards."""
    key = f"intents/{name}"
    token = backend.put_new(key, [b"x"])
    backend.put_all([(f"packs/{name}", [f"pack of {name}".encode()])])
    backend.promote(key, ref, name.encode(), token=token, replace=True)


def prepared(*intents: str, saved: Sequence[str] = (), refs: bool = False, deleted: int = 0) -> Callable[[Path], None]:
    """Make a store with intents, and steps by a process that is gone."""

    def prepare(folder: Path) -> None:
        backend = FolderBackend(folder)
        backend.prepare(database=True)
        for name in intents:
            backend.put_new(f"intents/{name}", [b"x"])
        for number, name in enumerate(saved):
            committed(backend, name, f"refs/runs/{name}/@1" if refs else REF)
            if number < deleted:
                backend.delete(f"refs/runs/{name}/@1")
                backend.delete(f"packs/{name}")
        if (found := backend.stat(REF)) is not None:
            (folder / "token").write_text(found.token)
        Database.close_all()

    return prepare


def state(run: Run) -> dict[str, bytes]:
    """Read everything as a new process."""
    backend = FolderBackend(run.folder)
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
        # Whoever comes next withdraws the intent, unless it was consumed, and finds the ref committed under it.
        later = FolderBackend(run.folder)
        is_withdrawn = run.said("withdraw") or withdraw("intents/a")(later)
        assert is_withdrawn or has_saved(found, "a")
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


def steps(backend: FolderBackend) -> dict[str, bytes]:
    return {info.key: backend.get(info.key) for info in backend.list("refs")}


def tidied(backend: FolderBackend) -> int:
    return backend.sweep(0)


def drop(name: str) -> Act:
    def act(backend: FolderBackend) -> None:
        backend.delete(f"refs/runs/{name}/@1")
        backend.delete(f"packs/{name}")

    return act


def check_tidied(run: Run) -> None:
    names = {each.name for each in run.processes}
    for name in names:
        if not run.has_died(name):
            run.said(name)
    found = state(run)
    assert has_saved(found, "last", "refs/runs/last/@1")
    if "drop" in names:
        assert "packs/dropped" not in found
        assert "refs/runs/dropped/@1" not in found
    if "save" in names:
        assert run.said("save") == "done"
        assert has_saved(found, "new", "refs/runs/new/@1")
    if "read" in names:
        assert run.said("read") == {"refs/runs/last/@1": b"last"}
    assert damages_of(FolderBackend(run.folder)) == []
    assert not (run.folder / "packs").exists()  # nobody has taken the database for a damaged one


def check_not_old(run: Run) -> None:
    run.said("delete")
    assert run.said("read") in [("new", "new"), ("new", ""), ("", "")]
    assert REF not in state(run)


def check_new_or_old(run: Run) -> None:
    assert run.said("save") == "done"
    assert run.said("read") in [("old", "old"), ("old", "a"), ("a", "a")]
    assert has_saved(state(run), "a")


def check_put_once(run: Run) -> None:
    assert sorted(run.said(name) for name in ("a", "b")) == ["done", "taken"]
    [won] = [name for name in ("a", "b") if run.said(name) == "done"]
    assert FolderBackend(run.folder).get("index/common") == won.encode()


def check_created(run: Run) -> None:
    for name in ("a", "b"):
        assert run.said(name) == "done"
    found = state(run)
    assert all(has_saved(found, name, f"refs/runs/{name}/@1") for name in ("a", "b"))


def create_and_save(name: str) -> Act:
    def act(backend: FolderBackend) -> str:
        backend.prepare(database=True)
        committed(backend, name, f"refs/runs/{name}/@1")
        return "done"

    return act


OLD = ["one", "two", "three", "last"]
DROPPED = prepared(saved=["one", "two", "three", "dropped", "last"], refs=True, deleted=3)
IDLE = prepared(saved=OLD, refs=True, deleted=3)
WAITING = prepared("new", saved=OLD, refs=True, deleted=3)
SAVE_NEW = save("new", ref="refs/runs/new/@1")
TWO_SAVES = {name: save(name, ref=f"refs/runs/{name}/@1") for name in ("a", "b")}

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
    "a save in place of a step, and a reader": Cast(
        prepared("a", saved=["old"]), {"read": read_ref_again, "save": save("a")}, check_new_or_old
    ),
    "two blobs at one key": Cast(prepared(), {"a": put("a"), "b": put("b")}, check_put_once),
    "a deletion of a ref and a reader": Cast(
        prepared(saved=["old", "new"]), {"read": read_ref_again, "delete": delete_ref}, check_not_old
    ),
    "a save and a survey": Cast(prepared("a"), {"save": save("a"), "survey": survey}, check_survey),
    "two saves": Cast(prepared("a", "b", saved=["old"], refs=True), TWO_SAVES, check_both),
    "two saves, one of which dies": Cast(
        prepared("a", "b", saved=["old"], refs=True), TWO_SAVES, check_both, mortal=["a", "b"]
    ),
    "two saves of processes that end": Cast(
        prepared("a", "b", saved=["old"], refs=True),
        {name: closing(act) for name, act in TWO_SAVES.items()},
        check_both,
    ),
    "a sweep and a deletion": Cast(DROPPED, {"tidy": tidied, "drop": drop("dropped")}, check_tidied),
    "a sweep that dies and a deletion": Cast(
        DROPPED, {"tidy": tidied, "drop": drop("dropped")}, check_tidied, mortal=["tidy"]
    ),
    "a sweep and a reader": Cast(IDLE, {"read": steps, "tidy": tidied}, check_tidied),
    "a sweep and a save": Cast(WAITING, {"tidy": tidied, "save": SAVE_NEW}, check_tidied),
    "two sweeps": Cast(DROPPED, {"tidy": tidied, "again": tidied}, check_tidied),
    "a repair and a save": Cast(WAITING, {"tidy": mended, "save": SAVE_NEW}, check_tidied),
    "a repair that dies and a save": Cast(WAITING, {"tidy": mended, "save": SAVE_NEW}, check_tidied, mortal=["tidy"]),
    "a repair and a reader": Cast(IDLE, {"read": steps, "tidy": mended}, check_tidied),
    "two processes that create the database": Cast(
        lambda folder: folder.mkdir(), {name: create_and_save(name) for name in ("a", "b")}, check_created
    ),
}


BRIEF = [
    "a save that dies and its withdrawal",
    "two saves of one step",
    "a save in place of a step, and a withdrawal of that step",
    "a save in place of a step, and a reader",
    "two blobs at one key",
    "a deletion of a ref and a reader",
    "a save and a survey",
    "a sweep and a deletion",
    "a sweep and a reader",
    "a repair and a save",
    "a repair and a reader",
]
"""The casts that are explored at each change."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BRIEF else pytest.mark.long) for name in CASTS]
)
def test_no_schedule_of_processes_that_share_a_database_breaks_the_contract(name: str) -> None:
    assert CASTS[name].explore(1) > 10


@pytest.mark.long
@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_with_two_preemptions_of_processes_that_share_a_database_breaks_the_contract(name: str) -> None:
    assert CASTS[name].explore(2) > 100


CHECKPOINTED = ["a save in place of a step, and a reader", "two blobs at one key"]


@pytest.fixture
def _always_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_database, "_CHECKPOINT_BYTES", 1)


@pytest.mark.usefixtures("_always_checkpoints")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CHECKPOINTED else pytest.mark.long) for name in CASTS]
)
def test_no_schedule_of_processes_with_a_checkpoint_after_each_commit_breaks_the_contract(name: str) -> None:
    assert CASTS[name].explore(1) > 10


# --- each rule switched off

Patch = Callable[[pytest.MonkeyPatch], None]


def without_lock(patch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for a lock."""
    lock = LockedFile.lock
    patch.setattr(LockedFile, "lock", lambda descriptor, *, waits=True: waits or lock(descriptor, waits=False))
    patch.setattr(LockedFile, "works_in", lambda folder: True)


def intents_are_not_consumed(patch: pytest.MonkeyPatch) -> None:
    write = Database.write
    patch.setattr(Database, "write", lambda self, act, *, durable, then=None: write(self, act, durable=durable))


def taken_keys_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    taken = Change.taken
    patch.setattr(Change, "taken", lambda self, keys: [] if keys == ["index/common"] else taken(self, keys))


def withdrawals_ask_for_no_token(patch: pytest.MonkeyPatch) -> None:
    remove = _folder._remove
    patch.setattr(_folder, "_remove", lambda change, key, token=None: remove(change, key))


def reads_see_many_states(patch: pytest.MonkeyPatch) -> None:
    """Read without a transaction."""

    def read(self: Database, act: Callable[[Rows], Any]) -> Any:
        rows = self._take()
        try:
            return act(rows)
        finally:
            self._give(rows)

    patch.setattr(Database, "read", read)


def intents_are_consumed_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    write = Database.write

    def write_after(self: Database, act: Callable[[Change], Any], *, durable: bool, then: Any = None) -> Any:
        def act_after(change: Change) -> Any:
            result = act(change)
            if then is not None:
                then(result)
            return result

        return write(self, act_after, durable=durable)

    patch.setattr(Database, "write", write_after)


def withdrawals_take_no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FolderBackend, "_alone", lambda self, action, key: contextlib.nullcontext())


def moved_files_are_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Go on with a connection to a database that another one has replaced."""
    seen = Database._seen
    patch.setattr(Database, "_seen", lambda self: ((0, 0), seen(self)[1]))
    patch.setattr(_database, "_file_of", lambda found: (0, 0))


RULES: dict[str, tuple[Patch, str]] = {
    "one process at a time writes": (without_lock, "two saves"),
    "a repair keeps writers out": (without_lock, "a repair and a save"),
    "a commit consumes its intent": (intents_are_not_consumed, "a save and its withdrawal"),
    "an intent is consumed after the commit": (intents_are_consumed_before_the_commit, "a save and a survey"),
    "an intent is withdrawn under the lock": (withdrawals_take_no_lock, "a save and its withdrawal"),
    "a key is looked at in the transaction that takes it": (taken_keys_are_not_looked_at, "two blobs at one key"),
    "a ref is withdrawn by its token": (
        withdrawals_ask_for_no_token,
        "a save in place of a step, and a withdrawal of that step",
    ),
    "a ref and its commit are read in one state": (reads_see_many_states, "a save in place of a step, and a reader"),
    "a database that was replaced is noticed": (moved_files_are_not_noticed, "a repair and a save"),
}


@pytest.mark.parametrize("rule", RULES)
def test_database_without_one_of_its_rules_breaks_the_contract(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_off, cast = RULES[rule]
    switch_off(monkeypatch)

    # A reader's first connection waits for writers, so a survey must have begun before the save.
    n_changes = 2 if rule == "an intent is consumed after the commit" else 1
    with pytest.raises((AssertionError, BackendError, BlobNotFoundError, FormatError)):
        CASTS[cast].explore(n_changes)
