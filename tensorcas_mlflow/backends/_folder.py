"""Folder of blobs with a database for the small ones: a save is one transaction (``docs/design/database.md``)."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from tensorcas_mlflow.backends._contract import BlobInfo, Children, FoundFile, Token, check_key
from tensorcas_mlflow.backends._database import DATABASE_FILES, HEAD, SHM, WAL, Database
from tensorcas_mlflow.backends._file import BlobFile
from tensorcas_mlflow.backends._local import LocalBackend, _translated, token_of, write_all
from tensorcas_mlflow.backends._locked_file import LockedFile
from tensorcas_mlflow.backends._records import NewBlob
from tensorcas_mlflow.backends._rows import NAME, REFS, Change, DamagedError, Row, Rows
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.files import is_on_local_disk
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CorruptError,
    RefusedError,
    StoreNotFoundError,
)

T = TypeVar("T")

_MOST_BYTES = 256 << 10
"""Bound of a blob in the database. A larger one is a file: SQLite would write it twice."""
_MOST_KEY_BYTES = 4096
"""Bound of the key of a blob in the database. No system has a file at a longer one, and refuses it when it is put."""
_MOST_HELD_BYTES = 8 << 20
"""Bound of the blobs kept in memory for the next commit."""
_is_in_files = re.compile(rf"(?:format|intents|quarantine)(?:/|\Z)|.{{{_MOST_KEY_BYTES + 1}}}").match
"""Matches the keys of blobs that are always files, whose first segments are these or which are too long for a row.

An intent lasts as long as its save. As a file it takes a fifth of the time of a transaction, and no turn among writers.
"""


class FolderBackend(LocalBackend):
    """Blobs as files below a folder, and the small ones in its database if it has one.

    Without the file ``blobs.db`` it is a `LocalBackend`. Where a key has both, the file counts: it was written when the
    database was damaged.
    """

    def __init__(self, root: Path, *, uri: str | None = None) -> None:
        super().__init__(root, uri=uri)
        self._database = Database(self._top)
        weakref.finalize(self, _close, self._database).atexit = False  # all of them are closed then
        self._holding = Lock()
        self._held: dict[str, bytes] = {}
        """Blobs that the next commit writes, by key."""
        self._n_held_bytes = 0
        self._flushed: set[str] = set()
        """Keys of blobs that were held and are in the database since: the next commit relies on them."""
        self._is_local = False
        self._has_warned = False

    @property
    def has_database(self) -> bool:  # type: ignore[override]  # it may change when the store is created
        """True if small blobs go to a database."""
        return self._database.is_there or self._database.look()

    def prepare(self, *, database: bool | None = None) -> None:
        if database is False or self.has_database:
            return
        try:
            with _translated("create", NAME):
                os.makedirs(self._top, exist_ok=True)
                self._check_may_change()
                if not LockedFile.works_in(self._top):
                    raise RefusedError("create", NAME, f"the file system of {self._top!r} does not lock files")
                self._database.create()
        except RefusedError:
            if database:
                raise

    # --- writing

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        if not self._may_write_rows(key):
            return super().put_new(key, pieces, durable=durable)
        data, rest = _drawn(pieces)
        if os.path.lexists(self._path(key)):
            raise BlobExistsError(key)
        if rest is not None:
            if self._exists(key):
                raise BlobExistsError(key)
            return super().put_new(key, chain(data, rest), durable=durable)
        blob = NewBlob(key, b"".join(data))

        def put(change: Change) -> Token:
            if change.taken([key]):
                raise BlobExistsError(key)
            return change.add([blob], is_series=False)[0].token

        try:
            return self._write("write", key, put, durable=durable)
        except DamagedError as error:
            self._warn(error)
            return super().put_new(key, [blob.data], durable=durable)

    def put_all(self, blobs: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
        if not self.has_database:
            super().put_all(blobs)
            return
        if not self._is_local:
            self._check_may_change()
        small: dict[str, bytes] = {}
        large = self._too_big(blobs, small)
        if (first := next(large, None)) is not None:
            super().put_all(chain([first], large))
        try:
            taken = self._read("look at", NAME, lambda rows: rows.taken([*small]))
        except DamagedError as error:
            self._warn(error)
            taken = []
        if taken:
            raise BlobExistsError(taken[0])
        # Not before the large ones are there: any commit of this process writes what is held, and a small blob may be
        # the marker of a large one.
        with self._holding:
            self._held.update(small)
            self._n_held_bytes += sum(map(len, small.values()))
        if self._n_held_bytes > _MOST_HELD_BYTES:
            self._flush()

    def _too_big(
        self, blobs: Iterable[tuple[str, Iterable[Buffer]]], small: dict[str, bytes]
    ) -> Iterator[tuple[str, Iterable[Buffer]]]:
        """Collect the small blobs, and yield the others."""
        for key, pieces in blobs:
            if check_key(key) in self._held or key in small or os.path.lexists(self._path(key)):
                raise BlobExistsError(key)
            data, rest = _drawn(pieces)
            if rest is not None or _is_in_files(key):
                if self._exists(key):
                    raise BlobExistsError(key)
                yield key, chain(data, rest or ())
            else:
                small[key] = b"".join(data)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        if not self._may_write_rows(dest):
            self._flush()
            super().promote(source, dest, data, token=token, replace=replace)
            return
        data = bytes(data)
        intent_path, path = self._path(source), self._path(dest)
        if os.path.lexists(path):
            self._promote_to_file(source, dest, data, token=token, replace=replace)
            return
        if self._unsettled:
            with _translated("commit", dest):
                self._settle_names()
        with self._holding:
            held = [NewBlob(key, blob) for key, blob in self._held.items()]
            draft = self._database.draft([NewBlob(dest, data), *held])

            def commit(change: Change) -> bool:
                if os.path.lexists(path):
                    return False  # another process has met damage meanwhile, and the file would count
                # Under the lock that a withdrawal takes.
                if _token_at(intent_path) != token:
                    raise BlobNotFoundError(source)
                if len(change.taken(list(self._flushed))) < len(self._flushed):
                    raise BlobNotFoundError(source)  # an earlier state of the store was put back: the save begins anew
                last = change.find(dest)
                if last is not None and not replace:
                    raise BlobExistsError(dest)
                if last is not None:
                    change.remove(last)
                change.add([NewBlob(dest, data), *self._not_there(change, held)], is_series=True, draft=draft)
                return True

            try:
                is_done = self._write("commit", dest, commit, durable=True, then=partial(_consume, intent_path))
            except DamagedError as error:
                self._warn(error)
                is_done = False
            except BlobNotFoundError:
                self._flushed.clear()  # a collection may have taken the save for dead, and deleted them
                raise
            if is_done:
                self._forget_held()
                self._flushed.clear()
                return
        self._promote_to_file(source, dest, data, token=token, replace=replace)

    def _promote_to_file(self, source: str, dest: str, data: bytes, *, token: Token, replace: bool) -> None:
        """Promote where the ref is a file, or where the database cannot be written."""
        with self._holding:
            self._flush_to_files()
        self._settle_database()  # the ref may need rows that nobody has made durable
        with self._alone("commit", dest):
            if not replace and self._is_taken(dest):
                raise BlobExistsError(dest)
            super().promote(source, dest, data, token=token, replace=replace)

    def _is_taken(self, dest: str) -> bool:
        """Tell whether there is a ref, while the lock is held; one whose row is damaged is not there."""
        if os.path.lexists(self._path(dest)):
            return True
        try:
            return self._database.read(lambda rows: rows.find(dest), is_locked=True) is not None
        except DamagedError:
            return False

    def _not_there(self, rows: Rows, held: list[NewBlob]) -> list[NewBlob]:
        """Return the held blobs without those that a process forked from this one has written."""
        there = set(rows.taken([blob.key for blob in held]))
        for blob in held:
            if blob.key in there and ((row := rows.find(blob.key)) is None or rows.data(blob.key, row) != blob.data):
                raise BlobExistsError(blob.key)
        return [blob for blob in held if blob.key not in there]

    def _settle_names(self) -> None:
        """Make the names of new files durable."""
        unsettled = dict(self._unsettled)
        if not unsettled:
            return
        self._settled.settle(*set(unsettled.values()))
        self._remember(unsettled.keys())
        for key in unsettled:
            self._unsettled.pop(key, None)

    def _forget_held(self) -> None:
        self._held, self._n_held_bytes = {}, 0

    def _flush(self) -> None:
        """Write the held blobs, not durably: from now on others see them."""
        with self._holding:
            if not self._held:
                return
            held = [NewBlob(key, data) for key, data in self._held.items()]

            def put(change: Change) -> None:
                change.add(self._not_there(change, held), is_series=True)

            try:
                self._write("write", NAME, put, durable=False)
            except DamagedError as error:
                self._warn(error)
                self._flush_to_files()
                return
            self._flushed.update(self._held)
            self._forget_held()

    def _flush_to_files(self) -> None:
        super().put_all([(key, [data]) for key, data in self._held.items()])
        self._forget_held()

    def _flush_below(self, prefix: str) -> None:
        """Write the held blobs if a listing of a prefix has to show any of them."""
        with self._holding:
            is_shown = bool(self._held) and any(key.startswith(prefix) for key in self._held)
        if is_shown:
            self._flush()

    def _forget(self, keys: Iterable[str]) -> None:
        """Forget held blobs; what is written already stays."""
        with self._holding:
            for key in keys:
                self._n_held_bytes -= len(self._held.pop(key, b""))
                self._flushed.discard(key)

    # --- deleting

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        self._forget(own or ())
        if own is None:
            self._flush()
        if not self._may_write_rows(key):
            if not self.has_database:
                return super().withdraw(key, token)
            with self._alone("withdraw", key):  # a commit looks for its intent under this lock
                return super().withdraw(key, token)
        if os.path.lexists(self._path(key)):
            self._remove_below(key)
            return super().withdraw(key, token)
        return self._write("withdraw", key, lambda change: _remove(change, key, token), durable=True)

    def _remove_below(self, key: str) -> None:
        """Remove the row below a file: without the file it would count again."""
        try:
            self._write("delete", key, lambda change: _remove(change, key), durable=True)
        except DamagedError:
            if _is_ref(key):
                raise
            # Other keys never come back, so the file was written for want of a row.

    def delete(self, *keys: str) -> None:
        rows: list[str] = []
        for key in keys:
            if not self._may_write_rows(key):
                super().delete(key)
                continue
            if key in self._held:
                self._flush()
            if os.path.lexists(self._path(key)):
                self._remove_below(key)
                super().delete(key)
            else:
                rows.append(key)
        if rows:
            self._write("delete", rows[0], lambda change: [_remove(change, key) for key in rows], durable=False)

    # --- reading

    def stat(self, key: str) -> BlobInfo | None:
        if not self._may_have_rows(key):
            return super().stat(key)
        row = self._find(key)
        file = super().stat(key) if row is None or _is_ref(key) else None
        if file is not None or row is None:
            return file
        return _info(key, row)

    def missing(self, keys: Iterable[str]) -> set[str]:
        keys = list(map(check_key, keys))
        if not self.has_database:
            return super().missing(keys)
        self._flush()
        # The next durable transaction makes all earlier ones durable.
        try:
            rows = set(self._read("look at", NAME, lambda rows: rows.taken(keys)))
        except DamagedError:  # what it hides is of no use to the caller
            rows = set()
        others = [key for key in keys if key not in rows]
        return super().missing(others) if others else set()

    def settle(self, prefix: str) -> None:
        if self.has_database:
            self._flush()
            self._settle_database()
        super().settle(prefix)

    def _settle_database(self) -> None:
        try:
            with _translated("sync", NAME):
                self._database.settle()
        except DamagedError as error:
            self._warn(error)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = self._data(key)
        if data is None:
            return super().get(key, max_bytes=max_bytes)
        if max_bytes is not None and len(data) > max_bytes:
            raise CorruptError(key, f"it has {len(data)} bytes, more than the {max_bytes} it may have")
        return data

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        data = self._data(key)
        if data is None:
            super().read_into(key, start, out)
        elif start + len(out) > len(data):
            raise CorruptError(key, f"it ends before byte {start + len(out)}")
        else:
            out[:] = data[start : start + len(out)]

    def open_file(self, key: str) -> BlobFile:
        data = self._data(key)
        return super().open_file(key) if data is None else BlobFile(key, _in_memory(data), "")

    def _data(self, key: str) -> bytes | None:
        """Read a blob from the database; None if it is a file, or nowhere."""
        if not self._may_have_rows(key):
            return None
        with self._holding:
            if key in self._held:
                return self._held[key]
        is_ref = _is_ref(key)
        if is_ref and os.path.lexists(self._path(key)):
            return None

        def read(rows: Rows) -> bytes | None:
            row = rows.find(key)
            data = None if row is None else rows.data(key, row)
            if is_ref:
                rows.check_ref(key, row)
            elif row is None and not os.path.lexists(self._path(key)):
                rows.check_absent(key)
            return data

        return self._unless_in_file("read", key, read)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        found = {info.key: info for info in super().list(prefix, after=after)}
        damage: DamagedError | None = None
        try:
            rows = self._below(prefix, Rows.below)
        except DamagedError as error:
            rows, damage = [], error
            self._warn(error)
            with contextlib.suppress(DamagedError):
                rows = self._read("list", prefix, lambda rows: rows.below(prefix, []))
        for key, row in rows:
            if after is None or key > after:
                found.setdefault(key, _info(key, row))
        yield from found.values()
        if damage is not None:
            raise damage

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        files = super().list_dir(prefix)
        blobs, segments = dict(files.blobs), set(files.segments)
        begin = len(prefix) + 1
        for key in self._below(prefix, Rows.keys):
            name, is_deeper, _ = key[begin:].partition("/")
            if is_deeper:
                segments.add(name)
            else:
                blobs[name] = True

        def facts() -> list[BlobInfo]:
            found = {info.key: info for info in files.facts()}
            for key, row in self._below(prefix, Rows.below):
                if "/" not in key[begin:]:
                    found.setdefault(key, _info(key, row))
            return [found[key] for key in sorted(found)]

        return Children(blobs, segments, facts)

    def _below(self, prefix: str, look: Callable[[Rows, str], Sequence[T]]) -> Sequence[T]:
        """Look for what lies below a prefix, once no row is missing below its first segment."""
        if not self._may_have_rows(prefix):
            return []
        self._flush_below(prefix)

        def checked(rows: Rows) -> Sequence[T]:
            rows.check_absent(prefix)
            return look(rows, prefix)

        return self._read("list", prefix, checked)

    # --- bytes

    def files(self) -> Iterator[FoundFile]:
        # They are gone, or nearly, once nobody writes; what the log adds to the database counts there.
        for file in super().files():
            if file.path == NAME:
                yield FoundFile(NAME, self._n_database_bytes(), is_own=True)
            elif file.path not in (WAL, SHM, HEAD):
                yield file._replace(is_own=True) if file.path in DATABASE_FILES else file

    def _n_database_bytes(self) -> int:
        with _translated("read", NAME):
            return self._database.n_bytes()

    def freed_by(self, deleted: Mapping[str, int], *, older_than_s: float) -> int:
        if not self.has_database:
            return super().freed_by(deleted, older_than_s=older_than_s)
        self._flush()
        in_rows: list[str] = []

        def delete(change: Change) -> None:
            for key in deleted:
                if _remove(change, key):
                    in_rows.append(key)
            change.tidy()

        with _translated("read", NAME):
            after = self._database.try_out(delete)
            before = self._database.n_bytes()
        files = {key: size for key, size in deleted.items() if key not in set(in_rows)}
        return super().freed_by(files, older_than_s=older_than_s) + before - after

    def sweep(self, older_than_s: float) -> int:
        freed = super().sweep(older_than_s)
        if self.has_database:
            self._flush()
            before = self._n_database_bytes()
            self._write("sweep", NAME, Change.tidy, durable=False)
            with _translated("sweep", NAME):
                self._database.shrink()
            freed += before - self._n_database_bytes()
        return freed

    # --- damage

    def check_database(self, check: Callable[[Rows], T]) -> T:
        """Look at all of the database."""
        self._flush()
        return self._read("check", NAME, check)

    def replace_database(self, build: Callable[[Database, str], T]) -> T:
        """Let a function put another database into the place of this one, while nobody writes."""
        with _translated("mend", NAME), self._database.replacing():
            result = build(self._database, self._top)
        self._has_warned = False
        return result

    # ---

    def _may_have_rows(self, key: str) -> bool:
        """Tell whether a blob, or blobs below a prefix, may be in the database."""
        return not _is_in_files(check_key(key)) and (self._database.is_there or self._database.look())

    def _may_write_rows(self, key: str) -> bool:
        """Tell whether a blob goes to the database if it is small, and check that this process may change the store."""
        if self.has_database and not self._is_local:
            self._check_may_change()
        return self._may_have_rows(key)

    def _check_may_change(self) -> None:
        """Check that the store lies on a local disk: SQLite needs memory that all processes share."""
        if not self._is_local:
            self._is_local = is_on_local_disk(self._top)
        if not self._is_local:
            raise RefusedError(
                "change",
                NAME,
                f"{self._top!r} is not on a local disk of this machine, and a store with a database is changed on one "
                "only; TENSORCAS_DATABASE=false makes new stores without one, also that of `tensorcas copy`",
            )

    def _exists(self, key: str) -> bool:
        """Tell whether a key is taken; one whose row is damaged is not."""
        try:
            return os.path.lexists(self._path(key)) or self._find(key) is not None
        except DamagedError as error:
            self._warn(error)
            return False

    def _find(self, key: str) -> Row | None:
        """Return the row of a key."""
        if key in self._held:
            self._flush()
        check_key(key)

        def find(rows: Rows) -> Row | None:
            row = rows.find(key)
            if row is None and _is_ref(key):
                rows.check_ref(key, None)
            return row

        return self._unless_in_file("look at", key, find)

    def _unless_in_file(self, action: str, key: str, act: Callable[[Rows], T | None]) -> T | None:
        """Read what the database has at a key; None if it is damaged there, and a file has the blob."""
        try:
            return self._read(action, key, act)
        except DamagedError:
            if os.path.lexists(self._path(key)):
                return None
            raise

    def _read(self, action: str, key: str, act: Callable[[Rows], T]) -> T:
        try:
            return self._database.read(act)
        except FileNotFoundError:
            self._check_there()
            with _translated(action, key):
                raise
        except OSError:
            with _translated(action, key):
                raise
        except DamagedError as error:
            raise DamagedError(error.problem, key) from error

    def _write(
        self,
        action: str,
        key: str,
        act: Callable[[Change], T],
        *,
        durable: bool,
        then: Callable[[T], None] | None = None,
    ) -> T:
        try:
            return self._database.write(act, durable=durable, then=then)
        except FileNotFoundError:
            self._check_there()
            with _translated(action, key):
                raise
        except OSError:
            with _translated(action, key):
                raise

    @contextlib.contextmanager
    def _alone(self, action: str, key: str) -> Iterator[None]:
        """Keep everybody else from writing to the database."""
        try:
            with _translated(action, key), LockedFile.alone_in(self._top):
                yield
        except BackendError:
            self._check_there()
            raise

    def _check_there(self) -> None:
        if not os.path.isdir(self._top):
            raise StoreNotFoundError(self.uri)
        if self._database.forget_another():
            raise BackendError("use", NAME, f"the store at {self.uri!r} is another one by now: try again")

    def _warn(self, error: DamagedError) -> None:
        if not self._has_warned:
            self._has_warned = True
            from logging import getLogger  # a read of a sound store needs none

            getLogger(__name__).warning("%s; until then saves to %s go on beside what is damaged", error, self.uri)


def _remove(change: Change, key: str, token: Token | None = None) -> bool:
    """Delete a blob, if it is there and has a token; return whether it was."""
    row = change.find(key)
    if row is None or (token is not None and row.token != token):
        return False
    change.remove(row)
    if _is_ref(key):
        change.log_deletion(key)
    return True


def _consume(intent_path: str, is_done: bool) -> None:
    """Remove an intent once its ref is there, and not before: a survey reads the intents, and then the refs."""
    if is_done:
        with contextlib.suppress(OSError):  # the commit stands, and the intent is garbage
            os.unlink(intent_path)


def _token_at(path: str) -> Token | None:
    """Return the token of a file; None if there is none."""
    try:
        return token_of(os.lstat(path))
    except FileNotFoundError:
        return None


def _drawn(pieces: Iterable[Buffer]) -> tuple[list[bytes], Iterator[Buffer] | None]:
    """Draw the pieces of a blob; the rest of them if it is too large for the database, which begins with the last one.

    Pieces that are drawn are copied, since they may change afterwards.
    """
    data: list[bytes] = []
    n_bytes = 0
    drawn = iter(pieces)
    for piece in drawn:
        view = memoryview(piece).cast("B")
        n_bytes += view.nbytes
        if n_bytes > _MOST_BYTES:
            return data, chain([piece], drawn)
        data.append(bytes(view))
    return data, None


def _is_ref(key: str) -> bool:
    return key.partition("/")[0] == REFS


def _in_memory(data: bytes) -> int:
    """Return the descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("tensorcas", os.MFD_CLOEXEC)
            write_all(descriptor, data)
            return descriptor
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return os.dup(file.fileno())


def _info(key: str, row: Row) -> BlobInfo:
    return BlobInfo(key, row.size, (row.time or 0) / 1e3, row.token)


def _close(database: Database) -> None:
    with contextlib.suppress(Exception):  # nobody is there to be told
        database.close()
