"""Files of one store's logs: their names and generation, tombstones, and the creation and removal of logs."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator

from tensorcas_mlflow.backends._local import NewFile, write_all
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._log_records import HEADER_BYTES, TOMBSTONE, closing, header, inode_in
from tensorcas_mlflow.base.files import new_name, sync_folder
from tensorcas_mlflow.errors import RefusedError

FOLDER = "logs"
_GENERATION = "generation"
_NAME = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[0-9a-f]{32}\.(log|dead|index)")
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
WRITE_LOG = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags that open a file of a log for writing."""

Generation = tuple[int, int, int, int]
"""Device, inode, size and time of change of the file of that name; one that was put back may have the same size."""


class _IsOn:
    """True if the store has logs.

    A save asks many times. After the folder is found, an attribute of the instance answers without a call.
    """

    def __get__(self, folder: LogFolder, owner: type) -> bool:
        if not os.path.isdir(folder.path):
            return False
        folder.__dict__["is_on"] = True
        return True


class LogFolder:
    """The folder ``logs`` of one store.

    Methods raise OSError, unless they say otherwise; the caller translates it.
    """

    def __init__(self, top: str) -> None:
        """Name the folder below a store's folder; it need not exist."""
        self.path = f"{top}{os.sep}{FOLDER}"
        self._top = top
        self._prefix = f"{self.path}{os.sep}"
        self._generation = self._prefix + _GENERATION

    is_on = _IsOn()

    def log_path(self, log: str) -> str:
        """Return the path of a log."""
        return f"{self._prefix}{log}.log"

    def dead_path(self, log: str) -> str:
        """Return the path of a log's tombstones."""
        return f"{self._prefix}{log}.dead"

    def index_path(self, log: str) -> str:
        """Return the path of a log's index."""
        return f"{self._prefix}{log}.index"

    def is_ours(self, path: str) -> bool:
        """Tell whether a file, by its path below the store's folder, belongs to the logs."""
        folder, _, name = path.rpartition("/")
        return folder == FOLDER and (name == _GENERATION or _FILE.fullmatch(name) is not None)

    def n_bytes(self, log: str) -> int:
        """Return the size of a log with its tombstones and its index."""
        return sum(map(file_bytes, (self.log_path(log), self.dead_path(log), self.index_path(log))))

    def names(self) -> set[str]:
        """List the names of all logs; none if the folder is gone.

        Raises:
            RefusedError: The folder is a symbolic link.
        """
        if os.path.islink(self.path):
            raise _link_error(self.path)
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            self.__dict__.pop("is_on", None)
            return set()
        return {name[:-4] for name in names if name.endswith(".log") and _NAME.fullmatch(name[:-4])}

    def generation(self) -> Generation | None:
        """Return the generation; None before the first log.

        Raises:
            RefusedError: The folder or the file is a symbolic link.
        """
        try:
            # Somebody may have moved the folder, and put a link in its place, while this process has a log open.
            if stat.S_ISLNK(os.lstat(self.path).st_mode):
                raise _link_error(self.path)
            found = os.lstat(self._generation)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(found.st_mode):
            raise _link_error(self._generation)
        return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns

    def begin_generation(self) -> None:
        """Make every process list the logs again."""
        is_written = False
        while not is_written:
            descriptor = os.open(self._generation, WRITE_LOG | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                if _is_its_own(descriptor, self._generation):
                    write_all(descriptor, b".")
                    is_written = stat_at(descriptor, self._generation) is not None
            finally:
                os.close(descriptor)

    def existing(self, intents: Iterable[str]) -> list[str]:
        """Return those of some intents whose files exist."""
        names_in: dict[str, set[str]] = {}
        found = []
        for intent in intents:
            folder, _, name = intent.rpartition("/")
            if folder not in names_in:
                names_in[folder] = _names_in(self._top + os.sep + folder)
            if name in names_in[folder]:
                found.append(intent)
        return found

    @contextlib.contextmanager
    def locked_dead(self, log: str) -> Iterator[int]:
        """Lock the tombstones of a log, in a file that no other store has, and yield its descriptor."""
        path = self.dead_path(log)
        while True:
            with LockedFile.alone_in(path, WRITE_LOG | os.O_CREAT | os.O_APPEND) as descriptor:
                if _is_its_own(descriptor, path):
                    yield descriptor
                    return

    def append_dead(self, log: str, lines: bytes, *, durable: bool) -> None:
        """Append tombstones of one log, unless the log is gone."""
        with self.locked_dead(log) as descriptor:
            # A rewriting of the log holds this lock until the log is gone.
            if not os.path.exists(self.log_path(log)):
                return
            size = os.fstat(descriptor).st_size
            whole = size // TOMBSTONE.size * TOMBSTONE.size
            if whole != size:  # left by a killed process
                os.ftruncate(descriptor, whole)
            try:
                write_all(descriptor, lines)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, whole)
                raise
            if durable:
                try:
                    os.fsync(descriptor)
                except OSError:
                    # A later sync may succeed although these tombstones are lost.
                    with contextlib.suppress(OSError):
                        write_all(descriptor, closing(log, 0))
                    raise
        if durable:
            sync_folder(self.path)

    def mark_closed(self, log: str, end: int) -> None:
        """Tell every process that nobody appends to a log any more, unless the disk fails."""
        with contextlib.suppress(OSError):
            self.append_dead(log, closing(log, end), durable=False)

    def mark_failed(self, log: str) -> None:
        """Tell every process that a sync of a log has failed, unless the disk fails again."""
        self.mark_closed(log, 0)

    def create_log(self) -> tuple[str, int, int]:
        """Create a log, locked; return its name, descriptor and end."""
        log = new_name()
        path = self.log_path(log)
        file = NewFile(path, _refuse_folder)
        try:
            descriptor = os.dup(file.descriptor)
            try:
                LockedFile.lock(descriptor)
                file.write(header(log, inode_of(descriptor)))
                # A header that is not whole is damage, so a power cut must not leave the name without it.
                file.sync()
                file.replace()
                self.begin_generation()
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                LockedFile.release(descriptor)
                raise
        finally:
            file.close()
        return log, descriptor, HEADER_BYTES

    def remove_log(self, log: str) -> None:
        """Remove a log, and then its tombstones and its index."""
        self.begin_generation()
        os.unlink(self.log_path(log))
        # Durably: without its tombstones the log would come back to life.
        sync_folder(self.path)
        for path in (self.dead_path(log), self.index_path(log)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def remove_orphans(self) -> int:
        """Remove tombstones and indexes without a log, with the folder locked; return the bytes freed."""
        names = [name for name in os.listdir(self.path) if _FILE.fullmatch(name) and not name.endswith(".log")]
        orphans = [name for name in names if not os.path.lexists(self.log_path(name.partition(".")[0]))]
        if orphans:
            # The removal of the log may not be durable yet.
            sync_folder(self.path)
        freed = 0
        for name in orphans:
            path = self._prefix + name
            with contextlib.suppress(FileNotFoundError):
                n_bytes = os.lstat(path).st_size
                os.unlink(path)
                freed += n_bytes
        return freed


def _names_in(path: str) -> set[str]:
    """List the names in a folder; none if it is gone."""
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        return set()


def file_bytes(path: str) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def stat_at(descriptor: int, path: str) -> os.stat_result | None:
    """Return the state of an open file; None if another file has its name, or none."""
    try:
        found = os.fstat(descriptor)
        return found if os.path.samestat(found, os.lstat(path)) else None
    except FileNotFoundError:
        return None


def _is_its_own(descriptor: int, path: str) -> bool:
    """Tell whether an open file still has its name, and no other; give the store a file of its own if it has another.

    A second name belongs to a copy of the store by hard links: what changes in place changes there, too.
    """
    found = stat_at(descriptor, path)
    if found is None:
        return False
    if found.st_nlink > 1:
        file = NewFile(path, _refuse_folder)
        try:
            file.write(read_at(descriptor, 0, found.st_size))
            file.sync()
            file.replace()
        finally:
            file.close()
    return found.st_nlink == 1


def _refuse_folder(folder: str) -> None:
    """Create no folder: without its folder the store is gone."""
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)


def inode_of(descriptor: int) -> int:
    """Return the inode of an open file."""
    return os.fstat(descriptor).st_ino


def is_original(descriptor: int) -> bool:
    """Tell whether an open log lies in the file in which it was created, and not in a copy of that file."""
    return inode_in(os.pread(descriptor, HEADER_BYTES, 0)) == inode_of(descriptor)


def read_at(descriptor: int, start: int, size: int) -> bytes:
    """Read a part of an open file; shorter if the file is."""
    pieces = []
    while size > 0:
        piece = os.pread(descriptor, min(size, 1 << 30), start)
        if not piece:
            break
        pieces.append(piece)
        start, size = start + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_file(path: str) -> int:
    """Open a log, its tombstones or its index for reading.

    Raises:
        RefusedError: It is a symbolic link.
    """
    try:
        return os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _link_error(path) from None
        raise


class SyncError(OSError):
    """A sync that failed: the system may have given up the bytes, and the next sync then succeeds without them."""

    def __init__(self, log: str, error: OSError) -> None:
        super().__init__(*error.args)
        self.log = log


def sync_open(log: str, descriptor: int) -> None:
    """Make the bytes of an open log, or of its open tombstones, durable.

    Raises:
        SyncError: The disk failed.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise SyncError(log, error) from error


def sync_file(log: str, path: str) -> None:
    """Open a log, or its tombstones, and make the bytes durable.

    Raises:
        SyncError: The disk failed.
    """
    descriptor = open_file(path)
    try:
        sync_open(log, descriptor)
    finally:
        os.close(descriptor)


def _link_error(path: str) -> RefusedError:
    """Return the error for a symbolic link in place of a file or folder of the logs."""
    name = os.path.basename(path)
    key = FOLDER if name == FOLDER else f"{FOLDER}/{name}"
    reason = f"{path!r} is a symbolic link, and nothing of a store lies behind one"
    return RefusedError("use", key, f"{reason}; put the file or folder itself in its place")
