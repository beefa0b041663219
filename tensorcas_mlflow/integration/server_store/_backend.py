"""Backend on a shelf: the backend contract, minus conditional writes."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import re
import tempfile
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from tensorcas_mlflow.backends import Backend, BlobInfo, Children, FoundFile, Token, check_key, is_key
from tensorcas_mlflow.base.digest import Buffer, digest
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.integration.server_store._shelf import (
    BrokenOffError,
    Entry,
    NoAnswerError,
    Shelf,
    UnreachableError,
)
from tensorcas_mlflow.layout import STAND_INS

MAX_BYTES = 2 << 30
"""Bound on the bytes kept, apart from the blob fetched last."""
MAX_FILES = 128


class Download:
    """A fetched blob, in an open file without a name: it is deleted with the last reference to this object."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, start: int, out: memoryview) -> bool:
        """Fill a buffer with bytes from ``start`` on; returns False if the blob ends before it is full."""
        at = 0
        while at < len(out):
            n_read = os.preadv(self._descriptor, [out[at:]], start + at)
            if n_read == 0:
                return False
            at += n_read
        return True


class Downloads:
    """A thread-safe, least-recently-used cache of fetched blobs by key."""

    def __init__(self, *, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._lock = Lock()
        self._kept: OrderedDict[str, Download] = OrderedDict()
        self._turns: dict[str, Lock] = {}

    def get(self, key: str, fetch: Callable[[Path], None]) -> Download:
        """Return a blob, fetching it if absent; two threads do not fetch the same one.

        Args:
            key: Its key; the content of a key never changes.
            fetch: Writes it to the path it is given.
        """
        with self._lock:
            kept = self._find(key)
            if kept is not None:
                return kept
            turn = self._turns.setdefault(key, Lock())
        with turn:
            with self._lock:
                kept = self._find(key)
            if kept is None:
                kept = _download(fetch)
                with self._lock:
                    self._kept[key] = kept
                    self._turns.pop(key, None)
                    self._drop_old()
            return kept

    def _find(self, key: str) -> Download | None:
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def _drop_old(self) -> None:
        # A thread that still reads an evicted file keeps it open until done.
        total = sum(kept.size for kept in self._kept.values())
        while len(self._kept) > 1 and (total > self._max_bytes or len(self._kept) > self._max_files):
            total -= self._kept.popitem(last=False)[1].size


def _download(fetch: Callable[[Path], None]) -> Download:
    # The name is removed at once, so nothing stays behind, however this process ends.
    with tempfile.TemporaryDirectory(prefix="tensorcas-") as folder:
        path = Path(folder, "blob")
        fetch(path)
        return Download(path)


_log = logging.getLogger(__name__)

_DRAWN = re.compile(
    r"(?:packs|index|intents|condemned)/[0-9a-f]{32}(?:\.\w+)?"
    r"|manifests/[0-9a-f]{64}\.[0-9a-f]{8}"
    rf"|(?:refs/copies/[0-9a-f]{{64}}|{STAND_INS})/@[0-9a-f]{{32}}"
)
"""Keys drawn at random (``docs/format.md``): they are unique, so no check is needed."""

_MAX_SEEN = 1 << 16
_MAX_FETCHES = 3
"""Attempts at fetching a blob whose download breaks off."""


class CarrierBackend(Backend):
    """Blobs as files of a `Shelf`, under `LocalBackend`'s names for them.

    Once a call has returned, every later call of any process sees its effect, and a successful `put` leaves a complete
    blob. The rest of the contract is narrower:

    * A blob may **stay cut short**, or empty, if its writer dies or loses the connection during the put: see `Shelf`.
      At a random key nobody uses that blob, since its save never continued. Only refs replace other blobs, and a
      complete stand-in exists by then. So every reader of a blob must check that it is complete; the readers of packs,
      manifests, index segments, intents and refs do.
    * ``put_new`` looks, then puts. At a random key it does not look. Two processes that put the same key at the same
      moment may both succeed, and the later blob stays. So only refs are put at keys that are not random, except the
      store's ``format``, and every creator of a store writes the same bytes there.
    * ``promote`` looks at the intent, puts the ref, and **looks at the intent again**. If the intent is gone, a
      collector has given this save up and may have missed the ref; the ref is removed again and the save starts over.
      A replaced ref stays until the new one is known to be safe. ``withdraw`` does not exclude ``promote``: both may
      happen between the two looks. Therefore carriers mark their intents (``carrier``), and a collector withdraws a
      marked intent only if told to by its id.
    * The process may die inside ``promote``. Then the intent stays, with or without the ref. If the intent was
      withdrawn at that moment as well, the ref of an unfinished save may stay without its chunks.
    * ``modified_s`` is the present time, since servers do not report it; a token is the blob's size.
    * ``durable`` means as durable as an upload is in the server's own storage.
    * Reading a part of a blob downloads all of it once; such blobs are cached for a while (`Downloads`).

    A key segment with ``%`` and two hex digits would reach the server decoded. It is written like long ones in
    ``docs/format.md``: ``~`` and a hash of the segment. Listings show such keys in that form.
    """

    is_carrier = True

    def __init__(self, shelf: Shelf, *, uri: str) -> None:
        self.uri = uri
        self._shelf = shelf
        self._downloads = Downloads()
        self._lock = Lock()
        self._seen: dict[str, int] = {}
        """Sizes of blobs found by the last look. Some servers answer a request for a missing file with a server error,
        and clients then retry for minutes. So only blobs already seen are fetched."""
        self._doubtful: set[str] = set()
        """Intents of saves with an unanswered last request: the server may still carry it out, so they must stay."""
        self._is_unreachable = False
        """True if the server left the last put unanswered."""

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        path = _path(key)
        with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
            file = _write(Path(scratch, posixpath.basename(path)), pieces, key)
            if not _DRAWN.fullmatch(key) and self.stat(key) is not None:
                raise BlobExistsError(key)
            return self._put(key, file)

    def promote(self, source: str, dest: str, data: Buffer, *, token: Token, replace: bool) -> None:
        self._check_intent(source, token)
        takes_place = not _DRAWN.fullmatch(dest) and self.stat(dest) is not None
        if takes_place and not replace:
            raise BlobExistsError(dest)
        stand_in = f"{STAND_INS}/@{uuid.uuid4().hex}"
        first = stand_in if takes_place else dest
        try:
            self._put_ref(first, data)
            try:
                # A collector that withdraws the intent after this look surveys the refs later still, and finds this
                # one.
                self._check_intent(source, token)
            except BlobNotFoundError:
                self._take_back(first, data)
                raise
            is_safe = True
            if takes_place:
                self._put_ref(dest, data)
                is_safe = self.stat(source) is not None
        except NoAnswerError:
            self._doubtful.add(source)
            raise
        self._tidy(source, *([stand_in] if takes_place and is_safe else []))

    def withdraw(self, key: str, token: Token, *, own: Iterable[str] | None = None) -> bool:
        if key in self._doubtful or self._is_unreachable:
            # Each call to an unreachable server waits through all retries again, and the abandoned save already has its
            # error.
            _log.warning(
                "the intent %r stays, since the server may still carry out the last request; %s", key, _ABANDON
            )
            return False
        info = self.stat(key)
        if info is None or info.token != token:
            return False
        self.delete(key)
        return True

    def stat(self, key: str) -> BlobInfo | None:
        folder, name = posixpath.split(_path(key))
        for entry in self._look(folder):
            if entry.name == name and entry.size is not None:
                return _info(key, entry.size)
        return None

    def missing(self, keys: Iterable[str]) -> set[str]:
        paths = {key: _path(key) for key in keys}
        folders = {posixpath.dirname(path) for path in paths.values()}
        there = {
            posixpath.join(folder, entry.name)
            for folder in folders
            for entry in self._look(folder)
            if entry.size is not None
        }
        return {key for key, path in paths.items() if path not in there}

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
            file = Path(scratch, "blob")
            self._fetch(key, file, max_bytes)
            _check_size(key, file.stat().st_size, max_bytes)
            return file.read_bytes()

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        _path(key)
        blob = self._downloads.get(key, lambda file: self._fetch(key, file, None))
        if not blob.read_into(start, out):
            raise CorruptError(key, f"it ends before byte {start + len(out)}")

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        folders = [prefix]
        while folders:
            folder = folders.pop()
            found = self.list_dir(folder)
            yield from (info for info in found.facts() if after is None or info.key > after)
            folders.extend(f"{folder}/{name}" for name in found.segments)

    def list_dir(self, prefix: str, *, most: int | None = None) -> Children:
        path = _path(prefix)
        entries = [entry for entry in self._look(path) if is_key(f"{path}/{entry.name}")]
        sizes = {entry.name: entry.size for entry in entries if entry.size is not None}
        segments = {entry.name for entry in entries if entry.size is None}
        return Children(
            dict.fromkeys(sizes, True),
            segments,
            lambda: [_info(f"{path}/{name}", sizes[name]) for name in sorted(sizes)],
        )

    def files(self) -> Iterator[FoundFile]:
        folders = [""]
        while folders:
            folder = folders.pop()
            for entry in self._shelf.entries(folder):
                path = posixpath.join(folder, entry.name)
                if entry.size is None:
                    folders.append(path)
                else:
                    yield FoundFile(path, entry.size)

    def delete(self, *keys: str) -> None:
        for path in map(_path, keys):
            self._shelf.delete(path)
            self._forget(path)

    # --- inside

    def _check_intent(self, key: str, token: Token) -> None:
        info = self.stat(key)
        if info is None or info.token != token:
            raise BlobNotFoundError(key)

    def _take_back(self, key: str, data: Buffer) -> None:
        """Remove a ref put by this save, unless another process has since replaced it."""
        with contextlib.suppress(BlobNotFoundError):
            if self.get(key) == data:
                self.delete(key)

    def _put_ref(self, key: str, data: Buffer) -> None:
        with tempfile.TemporaryDirectory(prefix="tensorcas-") as scratch:
            self._put(key, _write(Path(scratch, posixpath.basename(_path(key))), [data], key))

    def _put(self, key: str, file: Path) -> Token:
        size = file.stat().st_size
        try:
            self._shelf.put(_path(key), file)
        except UnreachableError:
            self._is_unreachable = True
            raise
        self._is_unreachable = False
        self._see(posixpath.dirname(_path(key)), [Entry(name=file.name, size=size)])
        return _token(size)

    def _tidy(self, *keys: str) -> None:
        """Remove leftovers of a successful commit. A failure to remove them does not make the commit fail."""
        for key in keys:
            try:
                self.delete(key)
            except BackendError as error:
                _log.warning("a save is committed, but %s; %s", error, _ABANDON)

    def _look(self, folder: str) -> Sequence[Entry]:
        entries = self._shelf.entries(folder)
        self._see(folder, entries)
        return entries

    def _see(self, folder: str, entries: Sequence[Entry]) -> None:
        with self._lock:
            if len(self._seen) > _MAX_SEEN:
                self._seen.clear()
            for entry in entries:
                if entry.size is not None:
                    self._seen[posixpath.join(folder, entry.name)] = entry.size

    def _fetch(self, key: str, file: Path, max_bytes: int | None) -> None:
        path = _path(key)
        if path not in self._seen:
            self._look(posixpath.dirname(path))
        size = self._seen.get(path)
        if size is None:
            raise BlobNotFoundError(key)
        _check_size(key, size, max_bytes)
        for n_left in reversed(range(_MAX_FETCHES)):
            try:
                self._shelf.fetch(path, file)
            except BlobNotFoundError:
                self._forget(path)
                raise BlobNotFoundError(key) from None
            except UnreachableError:
                raise
            except NoAnswerError as error:
                # The response for a file deleted while it is served breaks off.
                if self.stat(key) is None:
                    self._forget(path)
                    raise BlobNotFoundError(key) from error
                if n_left == 0 or not isinstance(error, BrokenOffError):
                    raise
            else:
                return

    def _forget(self, path: str) -> None:
        with self._lock:
            self._seen.pop(path, None)


_ABANDON = "once it is dead for certain, `tensorcas gc --abandon ID` withdraws it"
_QUOTED = re.compile(r"%[0-9A-Fa-f]{2}")


def _path(key: str) -> str:
    """Return the path of a key's file on the shelf."""
    return "/".join(map(_plain_segment, check_key(key).split("/")))


def _plain_segment(segment: str) -> str:
    if not _QUOTED.search(segment):
        return segment
    mark = "@" if segment.startswith("@") else ""
    return f"{mark}~{digest(unquote_to_bytes(segment.removeprefix('@'))).hex()[:32]}"


def _write(file: Path, pieces: Iterable[Buffer], key: str) -> Path:
    with file.open("wb") as out:
        # Errors of the pieces are not this storage's, so only the writing is translated.
        for piece in pieces:
            try:
                out.write(piece)
            except OSError as error:
                raise BackendError("write", key, f"{type(error).__name__}: {error}") from error
    return file


def _check_size(key: str, size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise CorruptError(key, f"it has {size} bytes, more than the {max_bytes} it may have")


def _info(key: str, size: int) -> BlobInfo:
    return BlobInfo(key=key, size=size, modified_s=time.time(), token=_token(size))


def _token(size: int) -> Token:
    return str(size)
