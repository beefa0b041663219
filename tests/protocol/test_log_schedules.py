"""No order of the calls of processes that share logs breaks the contract, and each rule is needed for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import LoggedBackend, _logs
from tensorcas_mlflow.errors import BlobExistsError, BlobNotFoundError
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
            committed(backend, name, f"refs/runs/run/@{name}" if refs else REF)
            if number < deleted:
                backend.delete(f"refs/runs/run/@{name}")
                backend.delete(f"packs/{name}")
        if (found := backend.stat(REF)) is not None:
            (folder / "token").write_text(found.token)
        _logs.close_writer(backend._logs)

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
    most_changes: int = 2
    mortal: Sequence[str] = ()

    def explore(self) -> int:
        return explore(self.prepare, self.acts, self.check, most_changes=self.most_changes, mortal=self.mortal)


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
            assert has_saved(found, name, f"refs/runs/run/@{name}")
    assert has_saved(found, "old", "refs/runs/run/@old")


def steps(backend: LoggedBackend) -> dict[str, bytes]:
    return {info.key: backend.get(info.key) for info in backend.list("refs")}


def tidied(backend: LoggedBackend) -> int:
    return backend._logs.tidy()


def drop(name: str) -> Act:
    def act(backend: LoggedBackend) -> None:
        backend.delete(f"refs/runs/run/@{name}")
        backend.delete(f"packs/{name}")

    return act


def check_tidied(run: Run) -> None:
    for name in ("tidy", "drop", "save"):
        if any(each.name == name for each in run.processes):
            run.said(name)
    found = state(run)
    has_dropped = any(each.name == "drop" and not each.is_dead for each in run.processes)
    assert has_saved(found, "last", "refs/runs/run/@last")
    if has_dropped:
        assert "packs/dropped" not in found
        assert "refs/runs/run/@dropped" not in found
    if any(each.name == "save" for each in run.processes) and not run.has_died("save"):
        assert run.said("save") == "done"
        assert has_saved(found, "new", "refs/runs/run/@new")
    if any(each.name == "read" for each in run.processes):
        assert run.said("read") == {"refs/runs/run/@last": b"last"}


OLD = ["one", "two", "three", "last"]
IDLE = prepared(saved=OLD, refs=True, deleted=3)
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
    "a save and a survey": Cast(prepared("a"), {"save": save("a"), "survey": survey}, check_survey),
    "two saves after an idle log": Cast(
        prepared("a", "b", saved=["old"], refs=True),
        {name: save(name, ref=f"refs/runs/run/@{name}") for name in ("a", "b")},
        check_both,
    ),
    "two saves after an idle log, one of which dies": Cast(
        prepared("a", "b", saved=["old"], refs=True),
        {name: save(name, ref=f"refs/runs/run/@{name}") for name in ("a", "b")},
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
        {"tidy": tidied, "save": save("new", ref="refs/runs/run/@new")},
        check_tidied,
    ),
    "two rewritings": Cast(IDLE, {"tidy": tidied, "read": tidied}, lambda run: check_tidied_twice(run)),
}


def check_tidied_twice(run: Run) -> None:
    run.said("tidy")
    run.said("read")
    assert has_saved(state(run), "last", "refs/runs/run/@last")


@pytest.mark.parametrize("name", CASTS)
def test_no_schedule_of_processes_that_share_logs_breaks_the_contract(name: str) -> None:
    assert CASTS[name].explore() > 10
