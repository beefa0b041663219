"""The recorder sees SQLite's calls to the disk and fails them, so that cuts of a database mean something."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.crash import sqlite_calls
from tests.crash.disk import Disk, Entry, Mark, Named, Plain, Synced, Tree, fates, put_down
from tests.crash.recorder import Fault, Recorder
from tests.crash.world import empty
from tests.faulty import SimulatedCrash

DATABASE = "blobs.db"
really_open = open
"""The real one, which works also when the recorder is dead."""


def connect(top: Path, *, synchronous: str = "FULL") -> sqlite3.Connection:
    connection = sqlite3.connect(top / DATABASE, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={synchronous}")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute("CREATE TABLE IF NOT EXISTS blobs (key TEXT PRIMARY KEY, data BLOB)")
    return connection


def put(connection: sqlite3.Connection, *keys: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for key in keys:
        connection.execute("INSERT INTO blobs VALUES (?, ?)", (key, data_of(key)))
    connection.execute("COMMIT")


def checkpoint(connection: sqlite3.Connection) -> None:
    assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)


def data_of(key: str) -> bytes:
    return key.encode() * 2500


def keys_in(top: Path) -> set[str]:
    """Return the keys in a database; none if it is not there.

    Raises:
        sqlite3.DatabaseError: The database is damaged.
    """
    if not (top / DATABASE).exists():
        return set()
    with closing(sqlite3.connect(top / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        if (found := connection.execute("PRAGMA integrity_check").fetchall()) != [("ok",)]:
            raise sqlite3.DatabaseError(str(found))
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchall():
            return set()
        return {key for key, data in connection.execute("SELECT key, data FROM blobs") if data == data_of(key)}


def disk_of(recorder: Recorder) -> Disk:
    disk = Disk(folders=recorder.folders)
    for entry in recorder.log:
        disk.apply(entry)
    return disk


def held_in(top: Path) -> dict[str, bytes]:
    held = {}
    for name in os.listdir(top):
        if not name.endswith(sqlite_calls.WAL_INDEX):
            with really_open(top / name, "rb") as file:
                held[name] = file.read()
    return held


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with Recorder(empty(tmp_path / "run")).installed() as recorder:
        yield recorder


@pytest.fixture
def top(recorder: Recorder) -> Path:
    return Path(recorder.top)


# --- cuts


def two_writers(recorder: Recorder, synchronous: str) -> None:
    """Commit rows over two connections, checkpoint, close, go on with another connection, and mark the rows."""
    top = Path(recorder.top)
    first, second = (connect(top, synchronous=synchronous) for _ in range(2))
    for n in range(6):
        put((first, second)[n % 2], f"{n} a", f"{n} b")
        recorder.mark({f"{n} a", f"{n} b"})
        if n == 3:
            checkpoint(first)
    first.close()
    second.close()  # the last one checkpoints and deletes the WAL
    with closing(connect(top, synchronous=synchronous)) as third:
        put(third, "6")
        recorder.mark({"6"})


def states(log: list[Entry], folders: set[int]) -> Iterator[tuple[str, Tree, set[str]]]:
    """Yield each state in which a cut may leave the disk once, with the rows that were committed before."""
    disk, committed, seen = Disk(folders=folders), set[str](), set[bytes]()
    for n, entry in enumerate(log, 1):
        disk.apply(entry)
        committed |= {key for effect in entry if isinstance(effect, Mark) for key in effect.said}
        for fate in fates(disk, n_drawn=4, seed=n):
            tree = disk.tree(fate)
            mark = hashlib.blake2b(repr((sorted(tree.items()), sorted(committed))).encode()).digest()
            if mark not in seen:
                seen.add(mark)
                yield f"cut after {n} calls: {fate}", tree, set(committed)


def losses(tmp_path: Path, synchronous: str) -> Iterator[str | None]:
    """Cut a program after each of its calls, and yield of each state what is lost or damaged; None if nothing is."""
    recorder = Recorder(empty(tmp_path / "run"))
    with recorder.installed():
        two_writers(recorder, synchronous)
    for number, (words, tree, committed) in enumerate(states(recorder.log, recorder.folders)):
        put_down(tree, top := empty(tmp_path / f"cut {number}"))
        try:
            lost = committed - keys_in(top)
        except sqlite3.DatabaseError as error:
            yield f"{words}: {error}"
        else:
            yield f"{words}: {sorted(lost)} are gone" if lost else None


@pytest.mark.long
def test_committed_rows_are_there_after_a_cut_at_any_call_of_sqlite(tmp_path: Path) -> None:
    found = list(losses(tmp_path, "FULL"))

    assert set(found) == {None}
    assert len(found) > 200


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
def test_a_cut_loses_rows_of_a_database_that_does_not_sync_each_commit(tmp_path: Path, synchronous: str) -> None:
    assert any(losses(tmp_path, synchronous))


def test_the_log_replayed_in_full_is_what_is_on_the_disk(recorder: Recorder, top: Path) -> None:
    with closing(connect(top)) as connection:
        put(connection, "a", "b")
        checkpoint(connection)
        put(connection, "c")
        tree = disk_of(recorder).tree(Plain())

        assert {name: data for name, (_, data) in tree.items()} == held_in(top)
        assert {*os.listdir(top)} == {*tree, f"{DATABASE}{sqlite_calls.WAL_INDEX}"}


def test_the_folder_is_durable_after_the_first_sync_of_a_new_wal(recorder: Recorder, top: Path) -> None:
    with closing(connect(top)) as connection:
        put(connection, "a")
        effects = [effect for entry in recorder.log for effect in entry]
    [wal] = [each for each in effects if isinstance(each, Named) and each.name.endswith("-wal")]
    synced = [each.node for each in effects[effects.index(wal) :] if isinstance(each, Synced)]

    assert synced[:2] == [wal.node, 0]
    assert synced.count(0) == 1


def test_a_database_can_be_recorded_that_has_a_wal_index_already(tmp_path: Path) -> None:
    top = empty(tmp_path / "run")
    with closing(connect(top)) as other:
        put(other, "a")
        recorder = Recorder(top)
        with recorder.installed(), closing(connect(top)) as connection:
            put(connection, "b")
        tree = disk_of(recorder).tree(Plain())
        put_down(tree, empty(tmp_path / "cut"))

    assert set(tree) == {DATABASE, f"{DATABASE}-wal"}
    assert keys_in(tmp_path / "cut") == {"a", "b"}


# --- errors

FAILURES: dict[str, tuple[str, int, str, Callable[[sqlite3.Connection], None]]] = {
    "a sync of a commit": ("fsync", errno.EIO, "SQLITE_IOERR_FSYNC", lambda connection: put(connection, "b")),
    "a write of a commit": ("write", errno.EIO, "SQLITE_IOERR_WRITE", lambda connection: put(connection, "b")),
    "a write on a full disk": ("write", errno.ENOSPC, "SQLITE_FULL", lambda connection: put(connection, "b")),
    "the end of a checkpoint": ("ftruncate", errno.EIO, "SQLITE_IOERR_TRUNCATE", checkpoint),
    "the sync of a checkpoint": ("fsync", errno.EIO, "SQLITE_IOERR_FSYNC", checkpoint),
}


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_the_disk_is_an_error_of_sqlite(recorder: Recorder, top: Path, name: str, after: bool) -> None:
    call, number, code, act = FAILURES[name]
    with closing(connect(top)) as connection:
        put(connection, "a")
        recorder.fault = Fault(0, OSError(number, "as told"), frozenset({call}), after=after)

        with pytest.raises(sqlite3.OperationalError) as raised:
            act(connection)

        assert raised.value.sqlite_errorname == code
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        assert connection.execute("SELECT key FROM blobs").fetchall() == [("a",)]
        put(connection, "b")
    assert keys_in(top) == {"a", "b"}


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
def test_a_database_that_cannot_be_made_is_an_error_and_leaves_nothing_open(
    recorder: Recorder, top: Path, after: bool
) -> None:
    recorder.fault = Fault(0, OSError(errno.EACCES, "as told"), frozenset({"create"}), after=after)

    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        connect(top)

    assert recorder.open_descriptors() == []
    assert (top / DATABASE).exists() is after
    connect(top).close()


@pytest.mark.parametrize(
    ("call", "nth", "code"),
    [
        ("unlink", 0, "SQLITE_IOERR_DELETE"),
        ("sync", 1, "SQLITE_IOERR_DIR_FSYNC"),  # the one before is that of the new journal, which SQLite lets fail
    ],
)
def test_a_journal_that_cannot_be_deleted_is_an_error(
    recorder: Recorder, top: Path, call: str, nth: int, code: str
) -> None:
    with closing(sqlite3.connect(top / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=EXTRA")
        connection.execute("CREATE TABLE blobs (key)")
        recorder.fault = Fault(nth, OSError(errno.EIO, "as told"), frozenset({call}))

        with pytest.raises(sqlite3.OperationalError) as raised:
            connection.execute("INSERT INTO blobs VALUES ('a')")

        assert raised.value.sqlite_errorname == code


def test_sqlite_commits_although_the_folder_of_a_new_wal_cannot_be_synced(recorder: Recorder, top: Path) -> None:
    recorder.fault = Fault(0, OSError(errno.EIO, "as told"), frozenset({"sync"}), lasts=True)
    with closing(connect(top)) as connection:
        put(connection, "a")

    assert "sync" in recorder.calls
    assert disk_of(recorder).tree(Plain("none", "none")) == {}


def test_an_error_inside_of_a_call_is_raised_when_the_recorder_is_done(tmp_path: Path) -> None:
    recorder = Recorder(empty(tmp_path / "run"))

    with pytest.raises(ZeroDivisionError), recorder.installed():  # noqa: PT012 -- raised at the end of the block
        recorder.fault = Fault(0, ZeroDivisionError())
        with pytest.raises(sqlite3.OperationalError):
            connect(tmp_path / "run")


# --- kills


def work(top: Path, connections: list[sqlite3.Connection]) -> None:
    """Make each call that changes the disk, and begin again."""
    connections.append(connect(top))
    put(connections[0], "b")
    checkpoint(connections[0])
    connections[0].close()
    connections[:] = [connect(top)]


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("call", ["create", "write", "fsync", "sync", "ftruncate", "unlink"])
def test_nothing_is_recorded_or_done_after_a_kill(recorder: Recorder, top: Path, call: str, after: bool) -> None:
    with closing(connect(top)) as before:
        put(before, "a")
    recorder.fault = Fault(0, SimulatedCrash(), frozenset({call}), lasts=True, after=after)
    connections: list[sqlite3.Connection] = []
    with pytest.raises(sqlite3.OperationalError):
        work(top, connections)
    n_entries, held = len(recorder.log), held_in(top)

    for connection in connections:
        with suppress(sqlite3.ProgrammingError), pytest.raises(sqlite3.OperationalError):  # it may be closed
            put(connection, "c")
        connection.close()
    with pytest.raises(sqlite3.OperationalError):
        connect(top)

    assert recorder.is_dead
    assert len(recorder.log) == n_entries
    assert held_in(top) == held
    recorder.revive()
    with closing(connect(top)) as connection:
        put(connection, "d")
        assert {"a", "d"} <= {key for (key,) in connection.execute("SELECT key FROM blobs")} <= {"a", "b", "d"}


def test_a_connection_of_the_dead_does_nothing_when_it_is_closed_after_others_began(
    recorder: Recorder, top: Path
) -> None:
    dead = connect(top)
    put(dead, "a")
    recorder.kill(0)
    with pytest.raises(sqlite3.OperationalError):
        put(dead, "b")
    recorder.revive()
    n_entries, held = len(recorder.log), held_in(top)

    dead.close()

    assert len(recorder.log) == n_entries
    assert held_in(top) == held
    assert f"{DATABASE}-wal" in held


# --- traces


def test_nothing_is_left_of_the_recorder_when_it_is_done(tmp_path: Path) -> None:
    shim = sqlite_calls._shim()
    assert isinstance(shim, sqlite_calls._Shim)

    def traces() -> tuple[object, ...]:
        """Return the default VFS, whether ours is registered, and the function that opens folders."""
        find = shim._library.sqlite3_vfs_find
        return find(None).contents.zName, bool(find(sqlite_calls.VFS_NAME)), shim.system_call("openDirectory")

    before = traces()
    recorder = Recorder(empty(tmp_path / "run"))
    with recorder.installed():
        during = traces()
        still_open = connect(tmp_path / "run")
        put(still_open, "a")
    n_entries = len(recorder.log)
    put(still_open, "b")
    with closing(connect(tmp_path / "run")) as another:
        put(another, "c")
    still_open.close()

    assert traces() == before
    assert during == (sqlite_calls.VFS_NAME, True, ctypes.cast(shim._open_directory, ctypes.c_void_p).value)
    assert len(recorder.log) == n_entries
    assert shim._files == {}
    assert keys_in(tmp_path / "run") == {"a", "b", "c"}


@pytest.mark.long
def test_an_interpreter_may_end_with_connections_open_that_were_recorded(tmp_path: Path) -> None:
    program = """
import pathlib, sys
from tests.crash.recorder import Recorder
from tests.crash.test_sqlite_calls import connect, put
top = pathlib.Path(sys.argv[1])
with Recorder(top).installed():
    left = connect(top)
    put(left, "a")
put(left, "b")
"""
    top = empty(tmp_path / "run")
    subprocess.run([sys.executable, "-c", program, top], check=True, cwd=Path(__file__).parents[2])

    assert keys_in(top) == {"a", "b"}


def test_databases_elsewhere_are_not_recorded(recorder: Recorder, tmp_path: Path) -> None:
    recorder.kill(0)
    with closing(connect(empty(tmp_path / "elsewhere"))) as connection:
        put(connection, "a")

    assert keys_in(tmp_path / "elsewhere") == {"a"}
    assert len(recorder.log) == 1
    assert recorder.calls == []
