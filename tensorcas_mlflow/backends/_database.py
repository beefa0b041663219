"""The database of a folder's small blobs: connections, transactions, checkpoints (``docs/design/database.md``)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from tensorcas_mlflow.backends._local import HOST, STAGING
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._rows import (
    APPLICATION_ID,
    NAME,
    SCHEMA,
    VERSION,
    Change,
    Contents,
    DamagedError,
    Rows,
)
from tensorcas_mlflow.base.files import new_name, sync_folder
from tensorcas_mlflow.errors import NewerFormatError, RefusedError

T = TypeVar("T")

WAL, SHM, HEAD, UNSYNCED = f"{NAME}-wal", f"{NAME}-shm", "blobs.head", "blobs.unsynced"
DATABASE_FILES = frozenset({NAME, WAL, SHM, HEAD, UNSYNCED, f"{NAME}-journal"})
"""Names of the files that belong to the database."""
_LEAST_VERSION = (3, 35, 0)
_CHECKPOINT_BYTES = 1 << 20
"""Size of the write-ahead log from which on a commit is followed by a checkpoint."""
_TIMEOUT_S = 60.0
_CHECKPOINT_TIMEOUT_S = 0.05
"""A reader that is stopped in the middle of a read must not hold up whoever commits."""
_MAX_IDLE = 16
_FORK_WAIT_S = 10.0
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA})


class _Gate:
    """Counts the calls of SQLite under way, and holds forks off until there is none.

    A child has the locks inside of the library as they were at the fork, and nobody to release them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._n = 0

    def __enter__(self) -> None:
        with self._lock:
            self._n += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._n -= 1

    def close(self) -> None:
        """Wait until no call is under way, and let none begin."""
        until = time.monotonic() + _FORK_WAIT_S
        while True:
            self._lock.acquire()
            if self._n == 0 or time.monotonic() > until:
                return
            self._lock.release()
            time.sleep(0.0005)

    def open(self) -> None:
        """Let calls begin, in the process that has forked."""
        self._lock.release()

    def renew(self) -> None:
        """Begin anew, in the child."""
        self._lock = threading.RLock()
        self._n = 0
        Database.forget_all()


_gate = _Gate()


class Database:
    """One database. For many threads; a process made by fork has connections of its own."""

    _all: ClassVar[weakref.WeakSet[Database]] = weakref.WeakSet()

    def __init__(self, folder: str) -> None:
        """Use a folder, in which a database may be, or be created later."""
        self.path = f"{folder}{os.sep}{NAME}"
        self._folder = folder
        self._lock = threading.RLock()
        self._idle: list[Rows] = []
        self._file = (-1, -1)
        """Device and inode of the file that the idle connections have open."""
        self.contents = Contents()
        self.checked: set[str] = set()
        """Folders of keys that were found whole since the file was opened."""
        self._n_wal_bytes = 0
        """Size of the write-ahead log at the last checkpoint that could not empty it."""
        self._is_there = False
        self._store: tuple[int, int] | None = None
        self._n_commits = 0
        """Number of the last commit that this object has seen in the open file."""
        Database._all.add(self)

    @property
    def is_there(self) -> bool:
        """True if the folder has a database, or had one: then a missing one is a loss, unless the store is another."""
        if not self._is_there and os.path.lexists(self.path):
            self._is_there = True
            self._store = self._stamp()
        return self._is_there

    def _stamp(self) -> tuple[int, int] | None:
        """Return what tells one store at this place from another."""
        try:
            found = os.stat(f"{self._folder}{os.sep}format")
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def forget_another(self) -> bool:
        """Forget a missing database if the store is another one by now; return whether it is."""
        if os.path.lexists(self.path) or self._store == self._stamp():
            return False
        self._is_there = False
        return True

    def create(self) -> None:
        """Create the database, durably, unless there is one; the caller holds no lock.

        Raises:
            RefusedError: The system's SQLite is too old.
            OSError: The disk fails, or the file system has no locks.
        """
        check_library()
        with LockedFile.alone_in(self._folder):
            if os.path.lexists(self.path):
                return
            new = self.new_path()
            with _gate, _translated():
                connection = connect_new(new)
                try:
                    connection.execute("UPDATE state SET inode = ?", (os.stat(new).st_ino,))
                finally:
                    connection.close()
            self._rename(new)

    def new_path(self) -> str:
        """Return the path of a file under way."""
        return f"{self._folder}{os.sep}{STAGING}{os.getpid()}-{HOST}-{new_name()}"

    def _rename(self, new: str) -> None:
        """Give a whole new database its name, durably."""
        descriptor = os.open(new, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(new, self.path)
        sync_folder(self._folder)

    def n_bytes(self) -> int:
        """Return the bytes of its file once the write-ahead log is in it; if it cannot be read, of both files now."""
        try:
            return self.read(Rows.n_bytes)
        except DamagedError:
            return _size_of(self.path) + _size_of(self._folder + os.sep + WAL)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Lock a file that no transaction locks; yield False if somebody else has it."""
        with _try_lock(f"{self._folder}{os.sep}format") as is_alone:
            yield is_alone

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Keep everybody from writing, without a look at the database."""
        with LockedFile.alone_in(self._folder), _gate:
            yield

    def put_in_place(self, new: str, aside: str) -> None:
        """Put a new database into the place of this one, which is moved aside; inside of `replacing`."""
        os.makedirs(os.path.dirname(aside), exist_ok=True)
        with self._lock:
            self._begin_anew()
        for name in (WAL, SHM, HEAD):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._folder + os.sep + name, aside + name.removeprefix(NAME))
        os.link(self.path, aside)
        self._rename(new)

    # --- transactions

    def read(self, act: Callable[[Rows], T], *, together: bool = False) -> T:
        """Read through some connection.

        Args:
            act: Reads.
            together: Whether all its statements see one state.

        Raises:
            DamagedError: The database is damaged where this call needs it.
            OSError: The disk fails.
        """
        with _gate, _translated():
            rows = self._take()
            try:
                if not together:
                    found = act(rows)
                else:
                    rows.connection.execute("BEGIN")
                    try:
                        found = act(rows)
                    finally:
                        rows.connection.execute("COMMIT")
            except sqlite3.Error:
                self._close(rows)
                raise
            except BaseException:
                self._give(rows)
                raise
            self._give(rows)
            return found

    def write(self, act: Callable[[Change], T], *, durable: bool) -> T:
        """Do one transaction. While it runs nobody else writes, in any process.

        Args:
            act: Reads and writes.
            durable: Whether it survives a power cut, once this has returned, with all transactions before it.

        Raises:
            DamagedError: The database is damaged; nothing is changed.
            OSError: The disk fails; nothing is changed, as far as this machine sees.
        """
        with LockedFile.alone_in(self._folder), _gate, _translated():
            rows = self._take_to_write()
            try:
                result = self._write(rows, act, durable=durable)
            except BaseException:
                self._close(rows)
                raise
            try:
                self._checkpoint_if_due(rows)
            except (OSError, sqlite3.Error):
                # The transaction is done; whoever writes next repeats the checkpoint, and fails if that does.
                self._note_unsynced()
                self._close(rows)
            else:
                self._give(rows)
            return result

    def _write(self, rows: Rows, act: Callable[[Change], T], *, durable: bool) -> T:
        run = rows.connection.execute
        run(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        run("BEGIN IMMEDIATE")
        try:
            change = Change(rows.connection, self.contents)
            if change.before.commits < self._n_commits:
                raise DamagedError(
                    f"commits {change.before.commits + 1} to {self._n_commits} are gone: it was put back"
                )
            self._check_file(change)
            result = act(change)
            change.save()
            run("COMMIT")
        except BaseException as error:
            if isinstance(error, sqlite3.Error) and error.sqlite_errorcode in _FAILED_SYNCS:
                self._note_unsynced()
            with contextlib.suppress(sqlite3.Error):
                run("ROLLBACK")
            raise
        change.keep()
        self._n_commits = change.n_commits
        return result

    def try_out(self, act: Callable[[Change], None]) -> int:
        """Do one transaction and undo it; return the bytes of the pages in use after it."""
        with LockedFile.alone_in(self._folder), _gate, _translated():
            rows = self._take_to_write()
            try:
                rows.connection.execute("BEGIN IMMEDIATE")
                try:
                    change = Change(rows.connection, Contents())
                    act(change)
                    n_bytes = change.used_bytes()
                finally:
                    rows.connection.execute("ROLLBACK")
            except BaseException:
                self._close(rows)
                raise
            self._give(rows)
            return n_bytes

    def _check_file(self, change: Change) -> None:
        """Check a database that was copied or put back since the last write: pages of two states would get worse."""
        inode = os.stat(self.path).st_ino
        if change.before.inode == inode:
            return
        from tensorcas_mlflow.backends._mend import problems_of

        problems = problems_of(change)
        if problems:
            raise DamagedError(f"it is no whole copy: {problems[0]}")
        change.set(inode=inode)

    # --- durability

    def settle(self) -> None:
        """Make all earlier transactions durable, whoever made them."""
        self.write(lambda change: None, durable=True)

    def _checkpoint_if_due(self, rows: Rows) -> None:
        size = _size_of(self._folder + os.sep + WAL)
        if size < self._n_wal_bytes:
            self._n_wal_bytes = 0
        if size - self._n_wal_bytes >= _CHECKPOINT_BYTES:
            self._checkpoint(rows)

    def _checkpoint(self, rows: Rows) -> bool:
        """Copy the write-ahead log into the database and empty it, as far as no reader needs it; the lock is held.

        The mark changes before each: a log that does not belong to its database shows by it.
        """
        self._mark(rows)
        run = rows.connection.execute
        run("PRAGMA synchronous = FULL")
        run(f"PRAGMA busy_timeout = {int(_CHECKPOINT_TIMEOUT_S * 1000)}")
        [(is_busy, *_)] = run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        run(f"PRAGMA busy_timeout = {int(_TIMEOUT_S * 1000)}")
        self._n_wal_bytes = _size_of(self._folder + os.sep + WAL) if is_busy else 0
        if not is_busy:
            self._note_head(rows)
        return not is_busy

    def _mark(self, rows: Rows) -> None:
        run = rows.connection.execute
        run("PRAGMA synchronous = NORMAL")
        run("BEGIN IMMEDIATE")
        try:
            run("UPDATE mark SET number = number + 1")
            run("UPDATE state SET mark = (SELECT number FROM mark)")
        except BaseException:
            run("ROLLBACK")
            raise
        run("COMMIT")

    def _note_head(self, rows: Rows) -> None:
        """Write the number and hash of the last commit beside the database: one that is put back has fewer."""
        state = rows.state()
        new = self.new_path()
        with contextlib.suppress(OSError):  # only a witness
            with open(new, "wb") as file:
                file.write(b"%d %s\n" % (state.commits, state.hash.hex().encode()))
            os.rename(new, self._folder + os.sep + HEAD)

    def check_head(self, rows: Rows, *, again: bool = False) -> None:
        """Check that the database has all commits that it had at its last checkpoint, and its own write-ahead log.

        Raises:
            DamagedError: It is older.
        """
        if "" in self.checked and not again:
            return
        state = rows.state()
        if state.mark != rows.mark():
            raise DamagedError("its write-ahead log belongs to another state of it")
        with contextlib.suppress(FileNotFoundError, ValueError):
            with open(self._folder + os.sep + HEAD, "rb") as file:
                number, hash_ = file.read(200).split()
            if len(hash_) != 64:  # it was torn by a power cut
                raise ValueError
            last = rows.commit(int(number)) if int(number) else None
            if int(number) > state.commits:
                raise DamagedError(
                    f"commits {state.commits + 1} to {int(number)} are lost: it is an older one that was put back"
                )
            if last is not None and last.hash.hex() != hash_.decode():
                raise DamagedError(f"commit {int(number)} is another one: it is a database that was put back")
        self.checked.add("")

    def _note_unsynced(self) -> None:
        """Note that a sync has failed: the disk may have lost what others wrote before."""
        with contextlib.suppress(OSError), open(self._folder + os.sep + UNSYNCED, "wb"):
            pass

    def shrink(self) -> None:
        """Give free pages back to the file system."""
        with LockedFile.alone_in(self._folder), _gate, _translated():
            rows = self._take_to_write()
            try:
                rows.connection.execute("PRAGMA synchronous = NORMAL")
                rows.connection.executescript("PRAGMA incremental_vacuum")  # `execute` would give back one page
                self._checkpoint(rows)
            except BaseException:
                self._close(rows)
                raise
            self._give(rows)

    # --- connections

    def _take(self) -> Rows:
        found = os.stat(self.path)
        with self._lock:
            if (found.st_dev, found.st_ino) != self._file:
                self._begin_anew()
                self._file = (found.st_dev, found.st_ino)
            if self._idle:
                return self._idle.pop()
        return Rows(self._connect(), self.contents)

    def _take_to_write(self) -> Rows:
        """Return a connection; the lock is held."""
        found = os.stat(self.path)
        if found.st_nlink > 1:
            self._leave_links()
        rows = self._take()
        with self._lock:
            has_log = all(os.path.lexists(f"{self._folder}{os.sep}{name}") for name in (WAL, SHM))
        if not has_log and rows.connection.execute("SELECT count(*) FROM state").fetchall():
            has_log = all(os.path.lexists(f"{self._folder}{os.sep}{name}") for name in (WAL, SHM))
        if not has_log:
            # Somebody has removed them: the connections of this process go on with files that have no name.
            self._close(rows)
            with self._lock:
                self._begin_anew()
            rows = self._take()
            rows.connection.execute("SELECT count(*) FROM state").fetchall()
        if os.path.lexists(self._folder + os.sep + UNSYNCED):
            if not self._checkpoint(rows):
                raise OSError("a sync has failed, and a reader holds up its repetition")
            os.unlink(self._folder + os.sep + UNSYNCED)
        return rows

    def _leave_links(self) -> None:
        """Take a file of its own: another name of this one is a copy of the store by hard links; the lock is held."""
        new = self.new_path()
        rows = self._take()
        try:
            target = sqlite3.connect(new, isolation_level=None)
            try:
                rows.connection.backup(target)
            finally:
                target.close()
        finally:
            self._close(rows)
        with self._lock:
            self._begin_anew()
        for name in (WAL, SHM):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder + os.sep + name)
        self._rename(new)

    def _give(self, rows: Rows) -> None:
        with self._lock:
            if rows.contents is self.contents and len(self._idle) < _MAX_IDLE:
                self._idle.append(rows)
                return
        self._close(rows)

    def _close(self, rows: Rows) -> None:
        with contextlib.suppress(sqlite3.Error):
            rows.connection.close()

    def _begin_anew(self) -> None:
        """Forget the connections and what was learned through them; other threads close those that they use."""
        idle, self._idle = self._idle, []
        self.contents = Contents()
        self.checked = set()
        self._file = (-1, -1)
        self._n_commits = 0
        for rows in idle:
            self._close(rows)

    def _connect(self) -> sqlite3.Connection:
        is_writable = os.access(self.path, os.W_OK) and os.access(self._folder, os.W_OK)
        mode = "mode=rw" if is_writable else _read_only_mode(self._folder)
        connection = sqlite3.connect(
            f"file:{quote(self.path)}?{mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_TIMEOUT_S,
            cached_statements=64,
        )
        try:
            connection.text_factory = bytes
            run = connection.execute
            for setting in _SETTINGS:
                run(f"PRAGMA {setting}").fetchall()
            [(application,)] = run("PRAGMA application_id").fetchall()
            [(version,)] = run("PRAGMA user_version").fetchall()
            if application != APPLICATION_ID:
                raise DamagedError("it is no database of a store")
            if version > VERSION:
                raise NewerFormatError("the database of the store", version, VERSION)
            if is_writable and run("PRAGMA journal_mode").fetchall() != [(b"wal",)]:
                raise DamagedError("it has no write-ahead log")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Empty the write-ahead log, unless somebody else is at work, and close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        if not idle:
            return
        try:
            with _gate, contextlib.suppress(OSError, sqlite3.Error, DamagedError), _try_lock(self._folder) as is_alone:
                found = os.stat(self.path)
                if is_alone and (found.st_dev, found.st_ino) == self._file and _size_of(self._folder + os.sep + WAL):
                    self._checkpoint(idle[0])
        finally:
            with _gate:
                for rows in idle:
                    self._close(rows)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @classmethod
    def forget_all(cls) -> None:
        """Leave the connections of the parent alone, in a child made by fork: to close one would touch its locks."""
        for each in list(cls._all):
            for rows in each._idle:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(rows.connection))
            each._lock = threading.RLock()
            each._idle = []
            each.contents = Contents()

    @classmethod
    def close_all(cls) -> None:
        """Close all connections of this process."""
        for each in list(cls._all):
            each.close()


_SETTINGS = (
    "mmap_size = 0",
    "wal_autocheckpoint = 0",
    "secure_delete = OFF",
    "cache_size = -4000",
    "trusted_schema = OFF",
    "cell_size_check = ON",
    "temp_store = MEMORY",
)
"""Of each connection; ``docs/design/database.md`` gives the reasons."""
_FAILED_SYNCS = frozenset(
    {sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_CLOSE}
)


def connect_new(path: str) -> sqlite3.Connection:
    """Create an empty database."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.text_factory = bytes
        connection.executescript(SCHEMA)
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def check_library() -> None:
    """Check that the SQLite of this Python can keep small blobs.

    Raises:
        RefusedError: It cannot.
    """
    if sqlite3.sqlite_version_info < _LEAST_VERSION or sqlite3.threadsafety == 0:
        raise RefusedError(
            "create",
            NAME,
            f"Python's SQLite {sqlite3.sqlite_version} is too old, or was built without threads: it must be "
            f"{'.'.join(map(str, _LEAST_VERSION))} or later; TENSORCAS_DATABASE=false makes stores without a database",
        )


def _read_only_mode(folder: str) -> str:
    """Return how to open a database that this process may not write: without locks, if nobody has written lately."""
    return "mode=ro" if _size_of(folder + os.sep + WAL) else "mode=ro&immutable=1"


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _try_lock(folder: str) -> Iterator[bool]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield LockedFile.lock(descriptor, waits=False)
    finally:
        LockedFile.release(descriptor)


class _translated:  # noqa: N801 -- used like contextlib.suppress
    """Translation of SQLite's errors: damage, or an OSError that the backend translates further."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, sqlite3.Error):
            return
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        if code & 0xFF == sqlite3.SQLITE_CANTOPEN:
            os.close(os.open(os.devnull, os.O_RDONLY))  # says so if there are too many open files
        if not isinstance(error, sqlite3.OperationalError) or code & 0xFF in _CORRUPT:
            raise DamagedError(f"SQLite says: {error}") from error
        raise OSError(_ERRNOS.get(code & 0xFF, 5), f"{NAME}: {error}") from error


_ERRNOS = {sqlite3.SQLITE_FULL: 28, sqlite3.SQLITE_READONLY: 30, sqlite3.SQLITE_NOMEM: 12, sqlite3.SQLITE_PERM: 13}

atexit.register(Database.close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_gate.close, after_in_parent=_gate.open, after_in_child=_gate.renew)
