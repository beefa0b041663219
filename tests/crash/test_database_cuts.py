"""A power cut or a kill at any call of SQLite loses nothing that was committed to the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tensorcas_mlflow.backends import FolderBackend, damages_of, rebuild
from tensorcas_mlflow.errors import BackendError, FormatError
from tests.crash.cuts import Cuts
from tests.crash.disk import SyncFailed
from tests.crash.recorder import Fault
from tests.crash.scenarios import SCENARIOS, Scenario, first_save, two_saves
from tests.crash.test_cuts import _ends, check_cuts, check_end, check_kills, check_second_cuts, recorded
from tests.crash.world import World, empty, forget_stores
from tests.faulty import SimulatedCrash


@pytest.fixture(autouse=True)
def _database(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give new stores a database, with a checkpoint after every few commits."""
    monkeypatch.setenv("TENSORCAS_DATABASE", "true")
    monkeypatch.setattr("tensorcas_mlflow.backends._database._CHECKPOINT_BYTES", 24 << 10)
    forget_stores()
    yield
    forget_stores()


@pytest.mark.long
@pytest.mark.parametrize("name", ["the first save", "a compaction"])
def test_a_cut_at_some_moment_loses_nothing_that_was_committed_to_a_database(tmp_path: Path, name: str) -> None:
    cuts = check_cuts(name, tmp_path, n_drawn=1, stride=131)

    assert cuts.n_states > 500
    assert cuts.n_checked > 1


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cut_at_any_moment_loses_nothing_that_was_committed_to_a_database(tmp_path: Path, name: str) -> None:
    cuts = check_cuts(name, tmp_path, n_drawn=4, stride=1)

    assert cuts.n_checked > 15


@pytest.mark.long
@pytest.mark.parametrize("name", ["a compaction"])
def test_a_cut_after_others_went_on_with_the_database_of_a_killed_one_loses_nothing(tmp_path: Path, name: str) -> None:
    n_kills, n_checked = check_kills(name, tmp_path, every=97, n_drawn=1, stride=61)

    assert n_kills > 1
    assert n_checked > 2


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cut_after_others_went_on_with_the_database_of_any_killed_one_loses_nothing(
    tmp_path: Path, name: str
) -> None:
    n_kills, n_checked = check_kills(name, tmp_path, every=1, n_drawn=2, stride=17)

    assert n_kills > 20
    assert n_checked > 20


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_second_cut_after_a_first_loses_nothing_that_was_committed_to_a_database(tmp_path: Path, name: str) -> None:
    assert check_second_cuts(name, tmp_path, n_first=12, n_drawn=1, stride=7) > 10


# --- each rule by itself


def backend_of(world: World) -> FolderBackend:
    backend = world.opened().backend
    assert isinstance(backend, FolderBackend)
    return backend


def test_a_commit_to_a_database_that_has_returned_is_there_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sync of its own: no checkpoint follows it."""
    monkeypatch.setattr("tensorcas_mlflow.backends._database._CHECKPOINT_BYTES", 1 << 20)
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "a")
        world.save(2, "b")

    check_end(world, tmp_path)


def test_a_database_is_durable_that_a_process_made_which_was_then_killed(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.recorder.fault = Fault(0, SimulatedCrash(), frozenset({"rename"}), lasts=True, after=True)
        with pytest.raises(SimulatedCrash):
            world.opened()
        world.recorder.revive()
        world.begin()
        world.save(1, "abc")

    check_end(world, tmp_path)


@pytest.mark.long
def test_blobs_of_a_killed_process_are_durable_before_a_commit_that_relies_on_them_returns(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.begin()
        store = world.opened()
        backend_of(world).put_new("packs/other", [b"of another process"], durable=False)
        world.recorder.kill(0)
        with pytest.raises((SimulatedCrash, BackendError)):
            world.save(2, "def")
        world.recorder.revive()
        world.begin()
        world.save(3, "abd")

    assert store is not world.opened()
    check_end(world, tmp_path)


@pytest.mark.long
def test_a_withdrawn_ref_does_not_come_back_in_a_cut(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.save(2, "def")
        backend = backend_of(world)
        [info] = [info for info in backend.list("refs") if info.key.endswith("@1")]
        assert backend.withdraw(info.key, info.token)
    log = world.recorder.log
    cuts = Cuts(tmp_path.with_name(f"{tmp_path.name}-cut"))
    cuts = Cuts(tmp_path.with_name(f"{tmp_path.name}-cut"))
    log = world.recorder.log
    may = {("step", "1"): {None}, ("step", "2"): {b"def"}}
    cuts.check(log, world.recorder.folders, at=[len(log)], n_drawn=8, may=may)

    assert cuts.n_checked > 2


@pytest.mark.long
def test_a_deleted_ref_does_not_come_back_in_a_cut_after_settle(tmp_path: Path) -> None:
    """A collection deletes the files of its packs then. SQLite syncs nothing for a transaction without changes."""
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.save(2, "def")
        backend = backend_of(world)
        [info] = [info for info in backend.list("refs") if info.key.endswith("@1")]
        backend.delete(info.key)
        backend.settle("refs")
    log = world.recorder.log
    cuts = Cuts(tmp_path.with_name(f"{tmp_path.name}-cut"))
    may = {("step", "1"): {None}, ("step", "2"): {b"def"}}
    cuts.check(log, world.recorder.folders, at=[len(log)], n_drawn=8, may=may)

    assert cuts.n_checked > 2


def shrinking(world: World) -> None:
    """Delete most, and give the pages back to the disk, which moves others."""
    for step in range(3, 6):
        world.save(step, "abcdefgh"[:step])
    for step in range(3, 5):
        world.drop(step)
    world.collect()
    backend_of(world).sweep(0)
    world.begin()
    world.save(1, "xyz")


def closing(world: World) -> None:
    """Come and go: the last connection to be closed makes a checkpoint and deletes the write-ahead log."""
    for step in (3, 4):
        world.save(step, "ab")
        world.begin()


SHRINKING, CLOSING = Scenario(two_saves, shrinking), Scenario(first_save, closing)


@pytest.mark.long
@pytest.mark.parametrize("scenario", [SHRINKING, CLOSING], ids=["a shrinking", "a closing"])
def test_a_cut_while_pages_move_loses_nothing_that_was_committed(tmp_path: Path, scenario: Scenario) -> None:
    assert cut_at_any(scenario, tmp_path, stride=131).n_checked > 1


@pytest.mark.long
@pytest.mark.parametrize("scenario", [SHRINKING, CLOSING], ids=["a shrinking", "a closing"])
def test_no_cut_while_pages_move_loses_anything_that_was_committed(tmp_path: Path, scenario: Scenario) -> None:
    assert cut_at_any(scenario, tmp_path, stride=1).n_checked > 50


def cut_at_any(scenario: Scenario, tmp_path: Path, *, stride: int) -> Cuts:
    world, n_before = recorded(scenario, tmp_path / "run")
    log = world.recorder.log
    cuts = Cuts(tmp_path / "cut")
    cuts.check(log, world.recorder.folders, at=range(n_before, len(log) + 1), n_drawn=3, stride=stride)
    print(f"{len(log) - n_before} calls, {cuts.n_states} states, {cuts.n_checked} checked")
    return cuts


# --- repair


def damaged(world: World) -> None:
    """Let a database say that it has a blob more than it has: listings are refused, and nothing is lost."""
    two_saves(world)
    world.begin()
    connection = sqlite3.connect(f"{world.root}/.tensorcas/blobs.db", isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("UPDATE state SET n = n + 1 WHERE name = CAST('refs' AS BLOB)")
    # The commits of the next process lie in the write-ahead log of this one.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    world.held = connection  # type: ignore[attr-defined]


def repair(world: World) -> None:
    backend = backend_of(world)
    assert damages_of(backend)
    rebuild(backend)
    world.save(3, "abx")


def mended_if_damaged(top: Path) -> None:
    """Do as the error says."""
    world = World(top)
    try:
        backend = backend_of(world)
    except FormatError as error:
        raise AssertionError("the store cannot be opened") from error
    if damages_of(backend):
        rebuild(backend)
    forget_stores()


@pytest.mark.parametrize("stride", [131, pytest.param(1, marks=pytest.mark.long)])
def test_a_cut_during_a_repair_leaves_the_old_database_or_the_new_one(tmp_path: Path, stride: int) -> None:
    world, n_before = recorded(Scenario(damaged, repair), tmp_path / "run")
    cuts = Cuts(tmp_path / "cut", first=mended_if_damaged)
    log = world.recorder.log
    cuts.check(log, world.recorder.folders, at=range(n_before, len(log) + 1), n_drawn=3, stride=stride)

    assert cuts.n_checked > 1


# --- failed syncs


def saves_despite_a_failure(tmp_path: Path, nth: int, kind: str) -> bool:
    """Let one sync fail, go on, and cut; return whether it came to that sync.

    What a failed sync should have written is lost, unless it is written again.
    """
    world = World(empty(tmp_path / f"{kind}-{nth}"))
    with world.recorder.installed():
        world.save(1, "abc")
        world.begin()
        fault = world.recorder.fault = Fault(nth, OSError(5, "Input/output error"), frozenset({kind}))
        with suppress(BackendError):
            backend_of(world).put_new("intents/" + "b" * 32, [b"not durable"], durable=False)
        for step in (2, 3, 4):
            with suppress(BackendError):
                world.save(step, "abcdefgh"[step:])
        if fault.nth >= 0:
            return False
        n_middle = len(world.recorder.log)
        world.begin()
        world.save(5, "xy")
    assert kind == "sync" or any(isinstance(effect, SyncFailed) for entry in world.recorder.log for effect in entry)
    log = world.recorder.log
    # After the end the write-ahead log has gone, and all of it is in the database.
    cuts = Cuts(tmp_path / f"cut-{kind}-{nth}")
    cuts.check(log, world.recorder.folders, at=[*_ends(log[:n_middle]), len(log)], n_drawn=0)
    return True


@pytest.mark.parametrize("kind", [pytest.param("fsync", marks=pytest.mark.long), "sync"])
def test_what_others_committed_is_there_after_a_sync_that_has_failed_and_a_cut(tmp_path: Path, kind: str) -> None:
    n_met = 0
    while saves_despite_a_failure(tmp_path, n_met, kind):
        n_met += 1

    assert n_met > (3 if kind == "fsync" else 0)
