"""A disk that fails, fills up or refuses at any call: an error of ours, nothing lost, and the next save works."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store, _ingest
from tests.crash.recorder import LOOKS, WRITES, Fault
from tests.crash.world import World, allowed, check, chunk, long_file, look

CODES = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, errno.EDQUOT, errno.EACCES)


def prepare(world: World) -> None:
    world.save(1, "abc")
    world.save(2, "cde")
    world.upload("model/MLmodel", b"some text")
    world.upload("model/weights.bin", long_file("fgh"))
    world.save(3, "kl")
    world.drop(3)


def compaction(world: World) -> None:
    world.drop(1)
    world.collect()


def optimization(world: World) -> None:
    world.save(4, "Ac")
    world.derive(4, "A")
    world.collect()


def load(world: World) -> None:
    store = world.opened()
    for ref in store.checkpoints():
        store.read_tensors(store.manifest(ref))
    verify(store, full=True)  # which says what cannot be read


ACTS: dict[str, Callable[[World], None]] = {
    "save": lambda world: world.save(4, "abx") and None,
    "replace": lambda world: world.save(1, "xyz") and None,
    "collect": lambda world: world.collect(max_waste=1) and None,
    "compact": compaction,
    "optimize": optimization,
    "drop": lambda world: world.drop(1),
    "upload": lambda world: world.upload("model/weights.bin", long_file("fghijklm")),
    "write a text": lambda world: world.upload("model/MLmodel", b"another text"),
    "write a text over a file": lambda world: world.upload("model/weights.bin", b"a text"),
    "remove": lambda world: world.remove("model", "MLmodel", "weights.bin"),
    "load": load,
}


@pytest.fixture(params=["files", "database"], autouse=True)
def _places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give new stores a database, with a checkpoint after every few commits, or none."""
    monkeypatch.setenv("TENSORCAS_DATABASE", str(request.param == "database"))
    monkeypatch.setattr("tensorcas_mlflow.backends._database._CHECKPOINT_BYTES", 24 << 10)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(_ingest, "_LOOK_BYTES", 4096)
    world = World(_made(tmp_path / "prepared"))
    with world.recorder.installed():
        prepare(world)
    return world.top


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


MAY = {
    ("step", "1"): {b"abc"},
    ("step", "2"): {b"cde"},
    ("step", "3"): {None, b"kl"},
    ("file", "model/MLmodel"): {b"some text"},
    ("file", "model/weights.bin"): {long_file("fgh")},
}


def try_faults(
    act: Callable[[World], None],
    prepared: Path,
    tmp_path: Path,
    faults: Iterator[Fault],
    *,
    short: bool = False,
    full: int = 1,
) -> int:
    """Let one act meet faults, one after the other, until one is too late to be met; returns how many were met."""
    for number, fault in enumerate(faults):
        top = tmp_path / f"try-{number}"
        shutil.copytree(prepared, top)
        world = World(top)
        world.recorder.fault = fault
        world.recorder.short_writes = short
        words = f"call {fault.nth}: {fault.error!r}"
        error = None
        try:
            with world.recorder.installed():
                act(world)
        except Exception as caught:  # noqa: BLE001 -- which errors come out is what is looked at
            error = caught
            error.add_note(words)
        if fault.nth >= 0:
            return number
        if not isinstance(error, BackendError | MlflowException | None):
            raise AssertionError(f"{words} ended in {error!r}") from error
        del error
        Database.close_all()  # it keeps its connections open otherwise
        assert world.recorder.open_descriptors() == [], words
        may = {key: contents | allowed(world.recorder.log).get(key, set()) for key, contents in MAY.items()}
        may |= {key: contents for key, contents in allowed(world.recorder.log).items() if key not in MAY}
        for key, contents in allowed(world.recorder.log).items():
            if key in MAY and None not in contents:
                may[key] = contents  # it was done
        try:
            if number % full == 0:
                check(top, may, tmp_path, saves_first=number % 2 == 0)
            found = look(World(top), may, tmp_path)
            assert all(found.get(key) in contents for key, contents in may.items())
        except BaseException as failure:
            failure.add_note(words)
            raise
    return 0


def each(every: int, begin: int = 0, **options: object) -> Iterator[Fault]:
    """One call after the other fails, each in the next of the ways there are."""
    codes = itertools.cycle(CODES)
    for nth in itertools.count(begin, every):
        code = next(codes)
        yield Fault(nth, OSError(code, os.strerror(code)), **options)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("act", ["save", "compact", "optimize", "upload", "write a text over a file"])
def test_a_disk_that_fails_at_some_call_loses_nothing(prepared: Path, tmp_path: Path, act: str) -> None:
    n_met = try_faults(ACTS[act], prepared, tmp_path, each(31))

    assert n_met > 1


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_a_disk_that_fails_at_any_call_in_any_way_loses_nothing(prepared: Path, tmp_path: Path, act: str) -> None:
    faults = (Fault(nth, OSError(code, os.strerror(code))) for nth in itertools.count() for code in CODES)
    # In full after one in 31, so that over six ways the turn comes to all of them.
    n_met = try_faults(ACTS[act], prepared, tmp_path, faults, full=31)

    print(f"{act}: {n_met} faults")
    assert n_met >= 6 * 3


@pytest.mark.long
@pytest.mark.parametrize("act", ["save", "upload"])
def test_a_disk_that_is_full_from_some_call_on_loses_nothing(prepared: Path, tmp_path: Path, act: str) -> None:
    needs_room = frozenset({"create", "write", "fsync", "link", "mkdir", "rename", "replace"})
    faults = (
        Fault(nth, OSError(errno.ENOSPC, "No space left on device"), needs_room, lasts=True)
        for nth in itertools.count(0, 9)
    )

    assert try_faults(ACTS[act], prepared, tmp_path, faults) > 1


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_a_disk_that_fails_for_good_from_any_call_on_loses_nothing(prepared: Path, tmp_path: Path, act: str) -> None:
    n_met = try_faults(ACTS[act], prepared, tmp_path, each(1, lasts=True), full=2)

    assert n_met >= 3


@pytest.mark.long
@pytest.mark.parametrize("act", ACTS)
def test_a_disk_that_fails_when_it_has_done_as_asked_loses_nothing(prepared: Path, tmp_path: Path, act: str) -> None:
    done = WRITES - {"create"}
    n_met = try_faults(ACTS[act], prepared, tmp_path, each(1, calls=done, after=True), full=2)

    assert act == "load" or n_met > 0


def test_a_disk_that_writes_a_part_of_what_it_is_given_keeps_all(prepared: Path, tmp_path: Path) -> None:
    for act in ("save", "replace", "upload", "write a text"):
        late = iter([Fault(10_000, OSError())])
        try_faults(ACTS[act], prepared, tmp_path / act.replace(" ", "-"), late, short=True)
        top = tmp_path / act.replace(" ", "-") / "try-0"
        found = look(World(top), MAY, tmp_path)

        assert len(found) == (5 if act == "save" else 4)
        assert verify(Store.open(World(top).root), full=True).problems == ()


# A database repeats a checkpoint that fails behind a commit; `test_database_cuts` cuts after failed syncs.
@pytest.mark.parametrize("kind", ["fsync", "sync"])
@pytest.mark.parametrize("_places", ["files"], indirect=True)
def test_a_commit_fails_if_any_of_its_fsyncs_failed_once(prepared: Path, tmp_path: Path, kind: str) -> None:
    n_failed = 0
    for nth in range(20):
        top = tmp_path / f"try-{nth}"
        shutil.copytree(prepared, top)
        world = World(top)
        world.recorder.fault = Fault(nth, OSError(errno.EIO, "Input/output error"), frozenset({kind}))
        with world.recorder.installed():
            store = world.opened()
            try:
                with store.write_checkpoint({"a": chunk("a"), "new": chunk("n")}) as pending:
                    pending.commit(RefTarget(run_id="run", step=9))
            except BackendError:
                n_failed += 1
            else:
                break

    # Of a pack, a manifest and a ref.
    assert n_failed == world.recorder.calls.count(kind)
    assert n_failed >= 3


def test_a_store_that_is_read_only_can_be_read(prepared: Path, tmp_path: Path) -> None:
    world = World(prepared)
    world.recorder.fault = Fault(0, OSError(errno.EROFS, "Read-only file system"), WRITES, lasts=True)
    with world.recorder.installed():
        found = look(world, MAY, tmp_path)
        report = verify(Store.open(world.root), full=True)
        shown = [info.path for info in world.repository.list_artifacts("model")]
        load(world)
        with pytest.raises(BackendError, match="Read-only"):
            world.save(9, "new")
        with pytest.raises(MlflowException, match="Read-only"):
            world.upload("model/new", b"text")

    assert found["step", "1"] == b"abc"
    assert found["file", "model/MLmodel"] == b"some text"
    assert report.problems == ()
    assert shown == ["model/MLmodel", "model/weights.bin"]
    assert LOOKS


# --- interrupts


def interrupted(world: World, nth: int, *, after: bool) -> bool:
    """Press the keys at one call of a save; says whether it came to that."""
    world.recorder.fault = Fault(nth, KeyboardInterrupt(), after=after, calls=WRITES | LOOKS)
    try:
        world.save(4, "abx")
    except KeyboardInterrupt:
        return True
    finally:
        world.recorder.fault = None
    return False


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_at_any_call_of_a_save_loses_nothing(prepared: Path, tmp_path: Path, after: bool) -> None:
    letters = "abm", "abn"
    n_calls = 0
    top = tmp_path / "one"
    shutil.copytree(prepared, top)
    world = World(top)
    with world.recorder.installed():
        while interrupted(world, n_calls, after=after):
            n_calls += 1
            # The same store object goes on.
            world.save(5, letters[n_calls % 2])
            world.drop(4)
    may = {**MAY, ("step", "4"): {None, b"abx"}, ("step", "5"): {letters[n_calls % 2].encode()}}
    check(top, may, tmp_path, saves_first=True)

    assert n_calls > 20
