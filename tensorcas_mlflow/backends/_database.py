"""The database of a folder's small blobs: connections, transactions, checkpoints (``docs/design/database.md``)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import quote
from zlib import crc32

from tensorcas_mlflow.backends._checks import damages_in, gap_of
from tensorcas_mlflow.backends._local import HOST, STAGING, _alone_in
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._records import NewBlob
from tensorcas_mlflow.backends._rows import (
    APPLICATION_ID,
    NAME,
    SCHEMA,
    VERSION,
    Change,
    DamagedError,
    Draft,
    Known,
    Rows,
)
from tensorcas_mlflow.backends._salvage import Salvage
from tensorcas_mlflow.base.files import new_name, sync_folder
from tensorcas_mlflow.errors import NewerFormatError, RefusedError

T = TypeVar("T")

WAL, SHM, LOST, HEAD, UNSYNCED = f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-wal-lost", "blobs.head", "blobs.unsynced"
REPLACING = "blobs.replacing"
DATABASE_FILES = frozenset({NAME, WAL, SHM, LOST, HEAD, UNSYNCED, REPLACING, f"{NAME}-journal"})
"""Names of the files that belong to the database."""
_LEAST_VERSION = (3, 35, 0)
_CHECKPOINT_BYTES = 4 << 20
"""Size of the write-ahead log from which on a commit is followed by a checkpoint."""
_TIMEOUT_S = 60.0
_CHECKPOINT_TIMEOUT_S = 0.05
"""A reader that is stopped in the middle of a read must not hold up whoever commits."""
_MAX_IDLE = 16
_MOST_VALUE_BYTES = 16 << 20
_FORK_WAIT_S = 10.0
_NOT_WRITABLE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA})


class _Gate:
    """Knows the calls of SQLite under way, and holds forks off until there is none.

    SQLite keeps the locks that a process has on a file in a table. A child has the table and none of the locks, so no
    connection may be open at a fork, and none of the parent's is used in the child.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.calls: set[weakref.ref[_Call]] = set()
        """Those that are dropped without an end are over: an interrupt may come between begin and body."""
        self._pid = os.getpid()
        self.opening = threading.RLock()
        """Held while a connection is opened or closed and counted: to close the last one removes the log."""

    def close(self) -> None:
        """Wait until no call is under way, let none begin, and close all connections."""
        until = time.monotonic() + _FORK_WAIT_S
        while True:
            self._lock.acquire()
            if not self.calls or time.monotonic() > until:
                break
            self._lock.release()
            time.sleep(0.0005)
        if not self.calls:
            Database.close_all()

    def open(self) -> None:
        """Let calls begin, in the process that has forked."""
        self._lock.release()

    def renew(self) -> None:
        """Begin anew, in the child."""
        self._lock, self.opening = threading.RLock(), threading.RLock()
        self.calls = set()
        self._pid = os.getpid()
        _inherited.update(_opened)
        _opened.clear()
        Database.renew_all()


_gate = _Gate()


class _Call:
    """A call of SQLite, whose errors become ours."""

    def __enter__(self) -> None:
        if _gate._pid != os.getpid():
            _gate.renew()  # a library has forked by itself
        self._here = weakref.ref(self, _gate.calls.discard)
        with _gate._lock:
            _gate.calls.add(self._here)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with _gate._lock:
            _gate.calls.discard(self._here)
        if isinstance(error, sqlite3.Error):
            raise _translated(error) from error


class _Opened:
    """The connections of this process to one file."""

    def __init__(self, logs: tuple[int, int]) -> None:
        self.n = 0
        self.logs = logs
        """Inodes of the write-ahead log and its index. All connections of a process have the same ones open."""
        self.has_name = False
        """True once the name of the write-ahead log is durable."""


_opened: dict[tuple[int, int], _Opened] = {}
"""By device and inode. To close the last connection to a database empties and deletes its write-ahead log."""
_inherited: set[tuple[int, int]] = set()
"""Files that the parent of this process had open at the fork."""


class Head(NamedTuple):
    """The file ``blobs.head``: the last commits, by a witness outside of the database."""

    number: int
    """Number of the last commit at the last checkpoint, and its hash."""
    hash: bytes
    inode: int
    """Inode and time of change of the database after that checkpoint."""
    modified_ns: int
    later: dict[int, int]
    """Numbers of the durable commits since then, and the names of their keys."""

    @property
    def last(self) -> int:
        """Return the number of the last commit that it knows."""
        return max(self.later, default=self.number)

    @classmethod
    def read(cls, path: str) -> Head | None:
        """Read it; None if there is none that is whole."""
        try:
            with open(path, "rb") as file:
                first, *lines = file.read().split(b"\n")
            facts, _, check = first.rpartition(b" ")
            if int(check) != crc32(facts):
                return None
            number, hash_, inode, modified_ns = facts.split(b" ")
            pairs = [line.split(b" ") for line in lines[:-1]]  # the last one is cut, or empty
            later = {int(number): int(name) for number, name in pairs}
            return cls(int(number), bytes.fromhex(hash_.decode()), int(inode), int(modified_ns), later)
        except (OSError, ValueError, UnicodeDecodeError):
            return None

    def write(self, path: str, new: str) -> None:
        """Replace it; a failure costs a check of the whole database."""
        facts = b"%d %s %d %d" % (self.number, self.hash.hex().encode(), self.inode, self.modified_ns)
        lines = b"".join(b"%d %d\n" % each for each in self.later.items())
        with contextlib.suppress(OSError):
            with open(new, "wb") as file:
                file.write(b"%b %d\n%b" % (facts, crc32(facts), lines))
            os.rename(new, path)


class Database:
    """One database. For many threads; a process made by fork has connections of its own.

    Its owner closes it.
    """

    _all: ClassVar[weakref.WeakSet[Database]] = weakref.WeakSet()

    def __init__(self, folder: str) -> None:
        """Use a folder, in which a database may be, or be created later."""
        self.path = f"{folder}{os.sep}{NAME}"
        self._folder = folder
        self._wal, self._shm = self._beside(WAL), self._beside(SHM)
        self._head, self._unsynced = self._beside(HEAD), self._beside(UNSYNCED)
        self._lock = threading.RLock()
        self._idle: list[Rows] = []
        self._known = Known()
        self._is_unsynced = False
        """True after a failed sync that was not repeated, also if no file says so."""
        self._n_wal_bytes = 0
        """Size of the write-ahead log at the last checkpoint that could not empty it."""
        self.is_there = False
        """True once there was a database here: then a missing one is a loss, unless the store is another."""
        self._store: tuple[int, int] | None = None
        Database._all.add(self)

    def look(self) -> bool:
        """Tell whether the folder has a database, or had one."""
        if not self.is_there and os.path.lexists(self.path):
            self.is_there = True
            self._store = self._stamp()
        return self.is_there

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
        self.is_there = False
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
            with self.building() as new:
                with _Call():
                    connect_new(new).close()
                self._rename(new)

    def new_path(self) -> str:
        """Return the path of a file under way."""
        return f"{self._folder}{os.sep}{STAGING}{os.getpid()}-{HOST}-{new_name()}"

    @contextlib.contextmanager
    def building(self) -> Iterator[str]:
        """Yield the path of a new database, and remove what is left there in the end: it may have filled the disk."""
        new = self.new_path()
        # SQLite lets no group write into the files that it creates.
        os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        try:
            yield new
        finally:
            for ending in ("", "-wal", "-shm", "-journal"):
                with contextlib.suppress(OSError):
                    os.unlink(new + ending)

    def _rename(self, new: str) -> None:
        """Give a whole new database its name, durably; the lock is held."""
        descriptor = os.open(new, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if os.path.lexists(self._wal) or os.path.lexists(self._beside(LOST)):
            mark = self._beside(REPLACING)
            with open(mark, "wb") as file:
                file.write(_mark_of(new))
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self._folder)
        os.rename(new, self.path)
        self._end_replacement()
        sync_folder(self._folder)
        with self._lock:
            self._begin_anew(_file_of(os.stat(self.path)))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._head)

    def _end_replacement(self) -> None:
        """Remove the write-ahead log of a database that was replaced, also by a process that died; the lock is held.

        SQLite would copy it into the new one.
        """
        mark = self._beside(REPLACING)
        try:
            with open(mark, "rb") as file:
                is_replaced = file.read() == _mark_of(self.path)
        except FileNotFoundError:
            return
        if is_replaced:
            for name in (WAL, SHM, LOST):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._beside(name))
            sync_folder(self._folder)
        os.unlink(mark)

    def _beside(self, name: str) -> str:
        return f"{self._folder}{os.sep}{name}"

    def n_bytes(self) -> int:
        """Return the bytes of its file once the write-ahead log is in it; if it cannot be read, of both files now."""
        try:
            return self.read(Rows.n_bytes)
        except DamagedError:
            return _size_of(self.path) + _size_of(self._wal)

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Keep everybody from writing, without a look at the database."""
        with LockedFile.alone_in(self._folder):
            Database.close_all()
            with _Call():
                if _file_of(os.stat(self.path)) in _opened:
                    raise OSError(errno.EBUSY, "another thread of this process uses the database")
                self._end_replacement()
                yield

    def salvage(self) -> Salvage:
        """Read what is whole; inside of `replacing`.

        To open and close the file outside of SQLite takes all locks from this process.
        """
        return Salvage(self.path, self._beside(LOST), self._wal)

    def last_commit(self) -> int:
        """Return the number of the last commit that there ever was, as far as its head says."""
        head = Head.read(self._head)
        return 0 if head is None else head.last

    def put_in_place(self, new: str, aside: str) -> None:
        """Put a new database into the place of this one, whose files get other names; inside of `replacing`.

        Raises:
            OSError: The disk fails, or has failed when the connection to the new one was closed: SQLite says nothing
                then.
        """
        if _size_of(f"{new}-wal"):
            raise OSError(errno.EIO, f"the write-ahead log of a new {NAME} could not be copied into it")
        os.makedirs(os.path.dirname(aside), exist_ok=True)
        for name, ending in ((NAME, ""), (WAL, "-wal"), (LOST, "-lost"), (HEAD, "-head")):
            with contextlib.suppress(FileNotFoundError):
                os.link(self._beside(name), aside + ending)
        sync_folder(os.path.dirname(aside))
        self._rename(new)

    # --- transactions

    def read(self, act: Callable[[Rows], T], *, is_locked: bool = False) -> T:
        """Read one state through some connection.

        Args:
            act: Reads.
            is_locked: Whether the caller holds the lock.

        Raises:
            DamagedError: The database is damaged where this call needs it.
            OSError: The disk fails.
        """
        with _Call():
            rows = self._take(is_locked=is_locked)
            try:
                rows.connection.execute("BEGIN")
                return act(rows)
            finally:
                self._give(rows)

    def draft(self, blobs: Sequence[NewBlob]) -> Draft | None:
        """Encode blobs for the next `write`, which others wait for."""
        return self._known.draft(blobs)

    def write(self, act: Callable[[Change], T], *, durable: bool, then: Callable[[T], None] | None = None) -> T:
        """Do one transaction. While it runs nobody else writes, in any process.

        Args:
            act: Reads and writes.
            durable: Whether it survives a power cut, once this has returned, with all transactions before it.
            then: Called with the result once the transaction is committed, before anybody else writes.

        Raises:
            DamagedError: The database is damaged; nothing is changed.
            OSError: The disk fails; nothing is changed, as far as this machine sees.
        """
        with self._writing() as rows:
            run = rows.connection.execute
            rows.wait_for_disk(durable)
            if durable:
                self._name_log()
            run("BEGIN IMMEDIATE")
            change = Change(rows.connection, rows.known)
            result = act(change)
            change.save()
            try:
                run("COMMIT")
            except sqlite3.OperationalError:
                self._note_unsynced()
                raise
            change.keep()
            if then is not None:
                then(result)
            if durable:
                self._note_commits(change)
            try:  # noqa: SIM105 -- every save passes here, and a context manager takes three calls
                self._checkpoint_if_due(rows)
            except (sqlite3.Error, OSError):
                pass  # the transaction is done
            return result

    def try_out(self, act: Callable[[Change], None]) -> int:
        """Do one transaction, give free pages back, and undo all of it; return the bytes that its file would have."""
        with self._writing() as rows:
            rows.connection.execute("BEGIN IMMEDIATE")
            change = Change(rows.connection, Known())
            act(change)
            change.vacuum()
            return change.n_bytes()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Rows]:
        """Lock the database, and yield a connection to it; what is not committed in the end is undone."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            LockedFile.lock(descriptor)
            with _Call():
                rows = self._take_to_write()
                try:
                    yield rows
                finally:
                    self._give(rows)
        finally:
            LockedFile.release(descriptor)

    # --- durability

    def settle(self) -> None:
        """Make all earlier transactions durable, whoever made them."""
        self.write(Change.touch, durable=True)

    def _name_log(self) -> None:
        """Make the name of the write-ahead log durable: SQLite ignores a failure of that."""
        opened = _opened[self._known.file]
        if not opened.has_name:
            sync_folder(self._folder)
            opened.has_name = True

    def _note_commits(self, change: Change) -> None:
        """Note commits that are durable beside the database: a write-ahead log that ends too early shows by it."""
        if not change.committed:
            return
        path = self._head
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
            try:
                found = os.fstat(descriptor)
                # A full disk or a power cut may have cut the last line.
                if found.st_nlink == 1 and os.pread(descriptor, 1, found.st_size - 1) == b"\n":
                    os.write(descriptor, b"".join(b"%d %d\n" % each for each in change.committed))
                    return
            finally:
                os.close(descriptor)
            # A copy of the store by hard links has it, too.
            head = Head.read(path)
            if head is not None:
                head.later.update(change.committed)
                head.write(path, self.new_path())

    def _checkpoint_if_due(self, rows: Rows) -> None:
        size = _size_of(self._wal)
        if size < self._n_wal_bytes:
            self._n_wal_bytes = 0
        if size - self._n_wal_bytes >= _CHECKPOINT_BYTES or rows.known.is_suspect:
            self._checkpoint(rows)

    def _checkpoint(self, rows: Rows) -> bool:
        """Copy the write-ahead log into the database and empty it, as far as no reader needs it; the lock is held."""
        run = rows.connection.execute
        rows.wait_for_disk(True)
        run(f"PRAGMA busy_timeout = {int(_CHECKPOINT_TIMEOUT_S * 1000)}")
        try:
            [(is_busy, *_)] = run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.OperationalError:
            self._note_unsynced()
            raise
        run(f"PRAGMA busy_timeout = {int(_TIMEOUT_S * 1000)}")
        self._n_wal_bytes = _size_of(self._wal) if is_busy else 0
        found, path = os.stat(self.path), self._head
        head = Head.read(path) if is_busy else None
        if head is None:
            state = rows.state()
            head = Head(state.commits, state.hash, 0, 0, {})
        head = head._replace(inode=found.st_ino, modified_ns=found.st_mtime_ns)
        head.write(path, self.new_path())
        rows.known.head_number, rows.known.modified_ns = head.number, head.modified_ns
        rows.known.is_suspect = False
        return not is_busy

    def _note_unsynced(self) -> None:
        """Note that a sync has failed: the disk may have lost what others wrote before."""
        self._is_unsynced = True
        with contextlib.suppress(OSError), open(self._unsynced, "wb"):
            pass

    def shrink(self) -> None:
        """Give free pages back to the file system."""
        with self._writing() as rows:
            rows.wait_for_disk(False)
            rows.connection.execute("BEGIN IMMEDIATE")
            rows.vacuum()
            rows.connection.execute("COMMIT")
            self._checkpoint(rows)

    # --- looks

    def _look(self, rows: Rows) -> None:
        """Compare the database with what its head says; note what is wrong."""
        head = Head.read(self._head)  # before the state: commits may follow
        found = os.stat(self.path)
        known, problem = rows.known, None
        rows.connection.execute("BEGIN")
        try:
            self._compare(rows, head, found)
        except DamagedError as error:
            problem = error.problem
        except sqlite3.Error as error:
            damage = _translated(error)
            if not isinstance(damage, DamagedError):
                raise damage from error
            problem = damage.problem
        finally:
            rows.connection.execute("ROLLBACK")
        known.problem = problem  # not before: other threads read meanwhile
        known.modified_ns = found.st_mtime_ns
        known.head_number = -1 if head is None else head.number

    def _compare(self, rows: Rows, head: Head | None, found: os.stat_result) -> None:
        known, (last, hash_, _) = rows.known, rows.state()
        lost: dict[int, int] = {}
        known.is_suspect = head is None or last > head.last
        if head is not None:
            if head.number > last:
                raise DamagedError(f"commits {last + 1} to {head.last} are lost: it is an older one that was put back")
            if head.number and rows.hash_of(head.number) != head.hash:
                raise DamagedError(f"commit {head.number} is not the one that was there: another one was put back")
            lost = {name: number for number, name in head.later.items() if number > last}
            if lost:
                with contextlib.suppress(OSError):
                    os.link(self._wal, self._beside(LOST))
            if head.last - last > len(lost):
                raise DamagedError(f"commits {last + 1} to {head.last} are lost")
            known.is_suspect |= (head.inode, head.modified_ns) != (found.st_ino, found.st_mtime_ns)
            known.is_suspect |= head.number <= known.head_number and head.modified_ns != known.modified_ns
        known.lost = lost
        is_alone = not _size_of(self._wal)
        if known.is_suspect and not (is_alone and head is not None and (head.number, head.hash) == (last, hash_)):
            # A ref is checked by its last commit, so it is enough that no commit is missing.
            gap = gap_of(rows)
            if gap is not None:
                raise DamagedError(f"it is no whole copy: {gap}")

    # --- connections

    def _take(self, *, is_locked: bool = False) -> Rows:
        with _gate.opening:
            file, logs = self._seen()
            opened = _opened.get(file)
        # Each call comes here, so there are few others in it.
        if opened is None:
            self._check_names(file)
        elif opened.n and opened.logs != logs:
            if _file_of(os.lstat(self.path)) != file:  # a repair is replacing all of them
                return self._take(is_locked=is_locked)
            if opened.logs[0]:
                raise DamagedError(f"{WAL} or {SHM} was removed or replaced while this process has them open")
            with self._lock:  # it reads the file alone, and by now somebody writes
                self._begin_anew(file)
            if file in _opened:
                raise OSError(errno.EAGAIN, "another thread of this process still reads the database as it was")
            return self._take(is_locked=is_locked)
        with self._lock:
            if file != self._known.file:
                self._begin_anew(file)
            if self._idle:
                return self._idle.pop()
        with contextlib.nullcontext() if is_locked or opened is not None else _alone_in(self._folder):
            rows = self._open(file, opened, logs)
        if rows is None:
            return self._take(is_locked=is_locked)
        if not rows.known.modified_ns:
            try:
                self._look(rows)
            except BaseException:
                self._close(rows)
                raise
        return rows

    def _open(self, file: tuple[int, int], opened: _Opened | None, logs: tuple[int, int]) -> Rows | None:
        """Open a connection; None if the files are no longer what the caller has seen."""
        with _gate.opening:
            if opened is not _opened.get(file):
                return None
            if opened is None:
                self._end_replacement()
            rows = Rows(self._connect(), self._known)
            _, found = self._seen()
            if found[0] or logs[0]:
                logs = found
            if _file_of(os.stat(self.path)) != file or rows.known.file != file:
                rows.connection.close()
                return None
            _opened.setdefault(file, _Opened(logs)).n += 1
            return rows

    def _check_names(self, file: tuple[int, int]) -> None:
        """Check that the files may be opened: none is a link, and no parent of this process has them open."""
        for name in (NAME, WAL, SHM):
            if os.path.islink(self._beside(name)):
                raise RefusedError(
                    "use", NAME, f"{self._beside(name)!r} is a symbolic link, and nothing of a store lies behind one"
                )
        if file in _inherited:
            raise OSError(
                errno.EDEADLK,
                "this process was forked in the middle of a call of its parent: start processes by spawn, or fork them "
                "before",
            )

    def _take_to_write(self) -> Rows:
        """Return a connection to a whole database; the lock is held."""
        if os.stat(self.path).st_nlink > 1:
            self._leave_links()
        rows = self._take(is_locked=True)
        try:
            if os.stat(self.path).st_mtime_ns != rows.known.modified_ns:
                rows = self._look_again(rows)
            rows.check_whole()
            if rows.known.lost:
                raise DamagedError(f"commits {sorted(rows.known.lost.values())} are lost")
            if rows.known.is_suspect:
                # Pages of two states would get worse.
                for damage in damages_in(rows, is_quick=True):
                    raise DamagedError(f"it is no whole copy: {damage.reason}")
            if self._is_unsynced or os.path.lexists(self._unsynced):
                if not self._checkpoint(rows):
                    raise OSError("a sync has failed, and a reader holds up its repetition")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._unsynced)
                self._is_unsynced = False
        except BaseException:
            self._give(rows)
            raise
        return rows

    def _look_again(self, rows: Rows) -> Rows:
        """Look at a file that has changed, through a new connection: others may have pages in memory that are gone."""
        with _gate.opening:
            fresh = Rows(self._connect(), rows.known)
            _opened[rows.known.file].n += 1
        try:
            self._look(fresh)
        except BaseException:
            self._close(fresh)
            raise
        with self._lock:
            idle, self._idle = [rows, *self._idle], []
        for each in idle:
            self._close(each)
        return fresh

    def _leave_links(self) -> None:
        """Take a file of its own: another name of this one is a copy of the store by hard links; the lock is held."""
        rows = self._take(is_locked=True)
        with self.building() as new:
            try:
                rows.check_whole()
                target = sqlite3.connect(new, isolation_level=None)
                try:
                    rows.connection.backup(target)
                finally:
                    target.close()
            finally:
                self._give(rows)
            self._rename(new)

    def _give(self, rows: Rows) -> None:
        try:
            if rows.connection.in_transaction:
                rows.connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._close(rows)
            return
        with self._lock:
            if rows.known is self._known and len(self._idle) < _MAX_IDLE:
                self._idle.append(rows)
                return
        self._close(rows)

    def _close(self, rows: Rows) -> None:
        file = rows.known.file
        with _gate.opening:
            opened = _opened[file]
            with contextlib.suppress(FileNotFoundError):
                if file == _file_of(os.stat(self.path)) and opened.logs[0] and opened.logs != self._seen()[1]:
                    # Nobody knows to which state of the database its write-ahead log belongs, and to close it copies
                    # that.
                    _leave_open(rows)
                    return
            with contextlib.suppress(sqlite3.Error):
                rows.connection.close()
            opened.n -= 1
            if not opened.n:
                _opened.pop(file, None)

    def _begin_anew(self, file: tuple[int, int]) -> None:
        """Forget the connections and what was learned through them; other threads close those that they use."""
        idle, self._idle = self._idle, []
        self._known = Known(file)
        for rows in idle:
            self._close(rows)

    def _seen(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return device and inode of the database, and the inodes of its write-ahead log and of the index of that.

        Without a log they are 0 and the time of change of the database: somebody else may have come, written and gone.
        """
        found = os.lstat(self.path)
        try:
            logs = os.lstat(self._wal).st_ino, os.lstat(self._shm).st_ino
        except FileNotFoundError:
            logs = 0, found.st_mtime_ns
        return (found.st_dev, found.st_ino), logs

    def _connect(self) -> sqlite3.Connection:
        if os.access(self.path, os.W_OK) and os.access(self._folder, os.W_OK):
            try:
                return self._connect_by("mode=rw", is_writable=True)
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _NOT_WRITABLE:
                    raise
        return self._connect_by(_read_only_mode(self._folder), is_writable=False)

    def _connect_by(self, mode: str, *, is_writable: bool) -> sqlite3.Connection:
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
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_VALUE_BYTES)
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
            if run("SELECT type, name, sql FROM sqlite_schema").fetchall() != _schema():
                raise DamagedError("its tables are others")
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
        with _Call():
            try:
                with contextlib.suppress(OSError, sqlite3.Error, DamagedError), _try_lock(self._folder) as is_alone:
                    known = idle[0].known
                    is_same = _file_of(os.stat(self.path)) == known.file and _opened[known.file].logs == self._seen()[1]
                    if is_alone and is_same and not known.problem and not known.lost and _size_of(self._wal):
                        self._checkpoint(idle[0])
            finally:
                for rows in idle:
                    self._close(rows)
                self._known = Known()

    @classmethod
    def renew_all(cls) -> None:
        """Take new locks, and leave the connections of the parent alone, in a child made by fork."""
        for each in list(cls._all):
            each._lock = threading.RLock()
            for rows in each._idle:
                _leave_open(rows)
            each._idle = []

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


def connect_new(path: str) -> sqlite3.Connection:
    """Create an empty database."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.text_factory = bytes
        connection.executescript(SCHEMA)
        Change(connection, Known(), is_new=True).save()
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


@cache
def _schema() -> list[Any]:
    """Return the tables that a database has, as SQLite says them."""
    connection = connect_new(":memory:")
    try:
        return connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()
    finally:
        connection.close()


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


def _leave_open(rows: Rows) -> None:
    """Let nobody close a connection."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(rows.connection))


def _file_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _mark_of(path: str) -> bytes:
    """Return what tells a new database from the one before."""
    found = os.stat(path)
    return b"%d %d" % (found.st_ino, found.st_mtime_ns)


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


def _translated(error: sqlite3.Error) -> Exception:
    """Return what an error of SQLite's means: damage, or an OSError that the backend translates further."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if isinstance(error, sqlite3.ProgrammingError):
        return error
    if not isinstance(error, sqlite3.OperationalError) or code & 0xFF in _CORRUPT:
        return DamagedError(f"SQLite says: {error}")
    if code & 0xFF == sqlite3.SQLITE_CANTOPEN:
        os.close(os.open(os.devnull, os.O_RDONLY))  # says so if there are too many open files
    number = _ERRNOS.get(code & 0xFF, errno.EIO)
    return OSError(number, f"{os.strerror(number)}: {NAME}: {error}")


_ERRNOS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_PERM: errno.EACCES,
}

atexit.register(Database.close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_gate.close, after_in_parent=_gate.open, after_in_child=_gate.renew)
