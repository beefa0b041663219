"""A power cut or a kill may come at any moment: what was committed is there bit for bit, and nothing needs a human."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import Payload, pack_key
from tensorcas_mlflow.maintenance import plan_gc, plan_repair
from tensorcas_mlflow.store import Store, protocol
from tests.crash.cuts import Cuts
from tests.crash.disk import Disk, Entry, Mark, Named, Plain, put_down
from tests.crash.recorder import Fault, Recorder
from tests.crash.scenarios import SCENARIOS, Scenario
from tests.crash.world import CHUNK_BYTES, World, chunk, empty, long_file
from tests.faulty import SimulatedCrash

pytestmark = pytest.mark.usefixtures("store_of_files")
"""`test_database_cuts` cuts stores with a database."""


def recorded(scenario: Scenario, top: Path) -> tuple[World, int]:
    """Let programs do something; returns also how many calls came before what is to be cut."""
    world = World(empty(top))
    with world.recorder.installed():
        scenario.before(world)
        n_before = len(world.recorder.log)
        world.begin()
        scenario.act(world)
    return world, n_before


def check_cuts(name: str, tmp_path: Path, *, n_drawn: int, stride: int) -> Cuts:
    world, n_before = recorded(SCENARIOS[name], tmp_path / "run")
    log = world.recorder.log
    cuts = Cuts(tmp_path / "cut")
    cuts.check(log, world.recorder.folders, at=range(n_before, len(log) + 1), n_drawn=n_drawn, stride=stride)
    print(f"{name}: {len(log) - n_before} calls, {cuts.n_states} states, {cuts.n_checked} checked")
    return cuts


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["the first save", "saves in the place of others", "a text, a file and a text at one path", "a compaction"]
)
def test_a_cut_at_some_moment_loses_nothing_that_was_committed(tmp_path: Path, name: str) -> None:
    cuts = check_cuts(name, tmp_path, n_drawn=1, stride=59)

    assert cuts.n_states > 500
    assert cuts.n_checked > 1


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cut_at_any_moment_loses_nothing_that_was_committed(tmp_path: Path, name: str) -> None:
    cuts = check_cuts(name, tmp_path, n_drawn=4, stride=1)

    assert cuts.n_checked > 15


def killed(scenario: Scenario, top: Path, nth: int) -> World | None:
    """Let a process be killed at one call, and others come after it; None if there are not so many calls."""
    world = World(empty(top))
    with world.recorder.installed():
        scenario.before(world)
        world.begin()
        world.recorder.kill(nth)
        with suppress(SimulatedCrash, BackendError, MlflowException):  # SQLite and MLflow raise errors of their own
            scenario.act(world)
        if not world.recorder.is_dead:
            return None
        world.recorder.revive()
        world.begin()
        come_after(world)
    return world


def come_after(world: World) -> None:
    """Continue in other processes, which rely on blobs that a killed process left without a sync."""
    world.collect()
    world.begin()
    world.save(5, "abd")
    world.upload("notes/five.txt", b"five")
    world.save(6, "xyz")
    world.drop(5)
    world.collect()
    world.save(7, "ab")


def check_kills(name: str, tmp_path: Path, *, every: int, n_drawn: int, stride: int) -> tuple[int, int]:
    cuts = Cuts(tmp_path / "cut")
    nth = n_kills = 0
    while (world := killed(SCENARIOS[name], tmp_path / f"run-{nth}", nth)) is not None:
        log = world.recorder.log
        cuts.check(log, world.recorder.folders, at=_ends(log), n_drawn=n_drawn, stride=stride)
        nth += every
        n_kills += 1
    print(f"{name}: {n_kills} kills, {cuts.n_states} states, {cuts.n_checked} checked")
    return n_kills, cuts.n_checked


def _ends(log: Sequence[Entry]) -> list[int]:
    """Return the positions after the last acknowledged results, and the end of the log."""
    marks = [n for n, entry in enumerate(log) if any(isinstance(effect, Mark) for effect in entry)]
    return [n + 1 for n in marks[-6:]] + [len(log)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["the first save", "a compaction"])
def test_a_cut_after_others_went_on_where_one_was_killed_loses_nothing(tmp_path: Path, name: str) -> None:
    n_kills, n_checked = check_kills(name, tmp_path, every=43, n_drawn=1, stride=31)

    assert n_kills > 1
    assert n_checked > 2


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cut_after_others_went_on_where_any_was_killed_loses_nothing(tmp_path: Path, name: str) -> None:
    n_kills, n_checked = check_kills(name, tmp_path, every=1, n_drawn=2, stride=17)

    assert n_kills > 20
    assert n_checked > 20


def check_second_cuts(name: str, tmp_path: Path, *, n_first: int, n_drawn: int, stride: int) -> int:
    """Cut, go on with what was left, and cut again."""
    draw = random.Random(name)
    world, n_before = recorded(SCENARIOS[name], tmp_path / "run")
    log = world.recorder.log
    cuts = Cuts(tmp_path / "cut")
    for number in range(n_first):
        disk = Disk(folders=world.recorder.folders)
        for entry in log[: draw.randrange(n_before, len(log))]:
            disk.apply(entry)
        fate = draw.choice([Plain("none", "none"), Plain("all", "none"), Plain("made", "none"), Plain("all", "torn")])
        top = empty(tmp_path / f"again-{number}")
        put_down(disk.tree(fate), top)
        second = World(top)
        with second.recorder.installed():
            come_after(second)
        again = second.recorder
        cuts.check(again.log, again.folders, at=range(1, len(again.log) + 1, 3), n_drawn=n_drawn, stride=stride)
    print(f"{name}: {n_first} first cuts, {cuts.n_states} states, {cuts.n_checked} checked")
    return cuts.n_checked


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_second_cut_after_a_first_loses_nothing(tmp_path: Path, name: str) -> None:
    assert check_second_cuts(name, tmp_path, n_first=3, n_drawn=2, stride=7) > 10


# --- the disk itself


def test_disk_of_the_tests_forgets_unsynced_bytes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with recorder.installed():
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "file").write_bytes(b"bytes")
    disk = Disk(folders=recorder.folders)
    for entry in recorder.log:
        disk.apply(entry)

    assert disk.tree(Plain("none", "none")) == {}
    assert disk.tree(Plain("all", "none"))["made/file"][1] == b""
    assert disk.tree(Plain("all", "torn"))["made/file"][1] == b"by"
    assert disk.tree(Plain("all", "all"))["made/file"][1] == b"bytes"


def test_replaying_the_record_makes_the_same_folder(tmp_path: Path) -> None:
    world, _ = recorded(SCENARIOS["a text, a file and a text at one path"], tmp_path / "run")
    disk = Disk(folders=world.recorder.folders)
    for entry in world.recorder.log:
        disk.apply(entry)
    put_down(disk.tree(Plain()), empty(tmp_path / "again"))

    def files(top: Path) -> dict[str, bytes | None]:
        return {p.relative_to(top).as_posix(): p.read_bytes() if p.is_file() else None for p in top.rglob("*")}

    assert files(tmp_path / "again") == files(tmp_path / "run")


# --- each rule by itself


def check_end(world: World, tmp_path: Path) -> None:
    """Cut after all that was done."""
    log = world.recorder.log
    cuts = Cuts(tmp_path.with_name(f"{tmp_path.name}-cut"))
    cuts.check(log, world.recorder.folders, at=[len(log)], n_drawn=8)

    assert cuts.n_checked > 2


def test_a_commit_that_has_returned_is_there_after_a_cut(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")

    check_end(world, tmp_path)


def test_copies_of_a_compaction_are_durable_before_the_old_pack_goes(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abcd")
        world.save(2, "ab")
        world.drop(1)
        world.collect()

    check_end(world, tmp_path)


def test_a_folder_is_durable_that_a_process_made_which_was_then_killed(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        (world.root / ".tensorcas").mkdir(parents=True)  # the other one did no more
        world.save(1, "abc")

    check_end(world, tmp_path)


def test_a_pack_is_durable_that_a_process_put_which_was_then_killed(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.begin()
        world.recorder.fault = Fault(0, SimulatedCrash(), calls=frozenset({"sync"}), lasts=True)
        with pytest.raises(SimulatedCrash):
            world.save(2, "def")
        world.recorder.revive()
        world.begin()
        world.opened().catalog.refresh_from_packs()
        n_packs = len(list(world.opened().backend.list("packs")))
        world.save(3, "def")

    assert len(list(world.opened().backend.list("packs"))) == n_packs == 2
    check_end(world, tmp_path)


def test_a_ref_that_a_process_was_killed_over_is_durable_before_what_it_replaced_goes(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.begin()
        world.recorder.fault = Fault(0, SimulatedCrash(), calls=frozenset({"rename"}), lasts=True, after=True)
        with pytest.raises(SimulatedCrash):
            world.save(1, "def")
        world.recorder.revive()
        world.begin()
        world.collect()

    check_end(world, tmp_path)


def test_a_dropped_ref_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.save(2, "def")
        world.drop(1)
        world.collect()

    check_end(world, tmp_path)


def test_a_text_is_durable_before_the_file_it_replaces_goes(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.upload("notes", long_file("ab"))
        world.upload("notes", b"a text")

    check_end(world, tmp_path)


def test_an_intent_that_lost_its_bytes_in_a_cut_does_not_keep_collections_waiting(tmp_path: Path) -> None:
    for letters, blank in (("abc", b""), ("def", bytes(300))):
        store = Store.open(tmp_path, create=True)
        with store.write_checkpoint({letter: chunk(letter) for letter in letters}) as pending:
            pending.commit(RefTarget(run_id="run", step=len(blank)))
        store.backend.put_new("intents/" + "a" * 32, [blank])

        plan_gc(store).execute()

        assert list(store.backend.list("intents")) == []
        assert len(store.checkpoints()) == 1 + bool(blank)


def put_copy(world: World, letters: str) -> None:
    """Put a pack of chunks without asking who has stored them, as a process does that knows of nothing yet."""
    protocol.write_packs(
        world.opened().backend,
        world.opened().catalog,
        (
            Payload(
                digest=digest(chunk(letter)),
                raw_bytes=CHUNK_BYTES,
                codec=RAW,
                typesize=1,
                data=chunk(letter).data,
                begins_row=True,
            )
            for letter in letters
        ),
    )


def killed_over_a_copy(world: World, letters: str) -> None:
    """Let a process put such a pack, and be killed there."""
    world.recorder.fault = Fault(0, SimulatedCrash(), calls=frozenset({"sync"}), lasts=True)
    with pytest.raises(SimulatedCrash):
        put_copy(world, letters)
    world.recorder.revive()
    world.begin()


def test_a_copy_whose_writer_was_killed_is_durable_before_the_other_copy_goes(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "abc")
        world.save(2, "d")
        killed_over_a_copy(world, "abcd")  # most that is needed lies there, so this one stays
        report = world.collect()

    assert report.n_packs == 2
    check_end(world, tmp_path)


def is_removal(entry: Entry, name: str) -> bool:
    """Tell whether a name was taken from a file."""
    return any(isinstance(effect, Named) and (effect.name, effect.node) == (name, None) for effect in entry)


def test_a_damaged_pack_goes_only_when_the_other_copy_is_durable_and_never_comes_back(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.recorder.installed():
        world.save(1, "d")
        # More that is needed lies in the one that is damaged than in any other: a collection that met it would keep it.
        backend = world.opened().backend
        before = set(protocol.list_packs(backend))
        put_copy(world, "abcd")
        world.save(2, "abc")
        [(name, _)] = set(protocol.list_packs(backend)) - before
        data = bytearray(backend.get(pack_key(name)))
        data[100] ^= 1
        backend.delete(pack_key(name))
        backend.put_new(pack_key(name), [data])
        killed_over_a_copy(world, "abc")
        begin = len(world.recorder.log)
        report = plan_repair(world.opened()).execute()
    log = world.recorder.log
    [gone] = [at for at in range(begin, len(log)) if is_removal(log[at], f"{name}.pack")]
    cuts = Cuts(tmp_path.with_name(f"{tmp_path.name}-cut"))
    cuts.check(log, world.recorder.folders, at=[gone + 1, len(log)], n_drawn=8)

    assert report.packs_gone == (pack_key(name),)
    assert cuts.n_checked > 2


def test_disk_of_the_tests_loses_the_pages_of_a_failed_sync_unless_they_are_written_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a" * 10_000)
    recorder = Recorder(tmp_path)
    with recorder.installed(), open(tmp_path / "file", "wb") as file:
        file.write(b"b" * 10_000)
        file.flush()
        recorder.fault = Fault(0, OSError(5, "Input/output error"), frozenset({"fsync"}))
        with pytest.raises(OSError, match="error"):
            os.fsync(file.fileno())
        os.pwrite(file.fileno(), b"c", 5000)
        os.fsync(file.fileno())
    disk = Disk(folders=recorder.folders)
    for entry in recorder.log:
        disk.apply(entry)
    kept = b"b" * 904 + b"c" + b"b" * 3191

    assert disk.tree(Plain())["file"][1] == (tmp_path / "file").read_bytes()
    assert disk.tree(Plain("all", "none"))["file"][1] == b"a" * 4096 + kept + b"a" * (10_000 - 8192)
