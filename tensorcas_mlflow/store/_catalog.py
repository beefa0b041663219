"""The index of one open store: what this process knows of where chunks lie."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.index import (
    MAX_SEGMENT_BYTES,
    Mask,
    Table,
    make_table,
    merge_tables,
    only_packs,
    pack_key,
    read_segment,
    segment_bytes,
)
from tensorcas_mlflow.pack import ENTRY, Entries, read_table
from tensorcas_mlflow.threads import Lock

_log = logging.getLogger(__name__)

_MAX_TABLES = 8
_MAX_LISTINGS = 3
_FOLD_AT = 64
"""Loose packs after which their tables are folded into one segment."""
_TAIL_BYTES = 64 * 1024
_MAX_REMEMBERED = 4096
"""Digests of which the last look-up is remembered; comparing more would take time of its own."""
_MAX_MANIFESTS = 4096
"""Names of manifests remembered; beyond it all are forgotten, which costs an equal save its own copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where some chunks lie."""

    found: Mask
    """For each chunk whether a copy is known."""
    pack: Any
    """For each chunk a position in ``packs``."""
    packs: list[str]
    entries: Entries


class Catalog:
    """Tables of packs, gathered from a backend and searched together. Shared by threads."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = Lock()
        self._tables: list[Table] = []
        self._packs: set[str] = set()
        self._segments: set[str] = set()
        self._loose: dict[str, str] = {}
        """Keys of index blobs that are of one pack only, by its name."""
        self._gone: set[str] = set()
        self._manifests: dict[str, str] = {}
        self._last: tuple[tuple[bytes, list[Table], set[str]], Places] | None = None

    def refresh(self) -> None:
        """Read what others have added to the index since the last time."""
        with self._lock:
            # Somebody may fold segments while they are read: what is gone by then is in one that came meanwhile.
            for _ in range(_MAX_LISTINGS):
                if self._read_index():
                    return

    def refresh_from_packs(self) -> None:
        """Read the table of every pack anew: packs are the truth, and the index, which may be wrong, a cache."""
        with self._lock:
            self._tables.clear()
            self._packs.clear()
            self._load_packs(name for name, _ in list_packs(self._backend))

    def publish(self, name: str, entries: Entries) -> None:
        """Put a pack this process has just written into the index, for others and for itself."""
        if self._backend.is_carrier:
            # Others would have to fetch the whole pack for its table, so the table gets a blob of its own, which goes
            # by the name of the pack.
            segment = segment_bytes(make_table({name: entries}))
            self._backend.put_new(f"index/{name}.arrow", [segment], durable=False)
            self._segments.add(name)
        else:
            mark_loose(self._backend, name)
        self.add(name, entries)

    def add(self, name: str, entries: Entries) -> None:
        """Take up a pack."""
        with self._lock:
            self._packs.add(name)
            self._tables.append(make_table({name: entries}))
            self._merge()

    def forget(self, packs: Collection[str]) -> None:
        """Leave out packs that are gone for good: a pack's name is never used again."""
        with self._lock:
            self._gone.update(packs)

    def know_manifest(self, digest: str, name: str) -> None:
        """Remember under what name this process has written a manifest, so that an equal save can share it."""
        if len(self._manifests) >= _MAX_MANIFESTS:
            self._manifests.clear()
        self._manifests[digest] = name

    def known_manifest(self, digest: str) -> str | None:
        """The name of a manifest of that digest, which may be gone or condemned by now."""
        return self._manifests.get(digest)

    def find(self, digests: Digests, excluded: Collection[str] = ()) -> Places:
        """Look up many digests at once.

        Args:
            digests: What to look for, shape ``(n, 32)``.
            excluded: Packs whose copies do not count.
        """
        with self._lock:
            tables = list(self._tables)
            without = self._gone | set(excluded)
        if len(digests) > _MAX_REMEMBERED:
            return _find(tables, without, digests)
        # A state that has not changed is looked up again and again.
        asked = (digests.tobytes(), tables, without)
        last = self._last
        if last is None or last[0] != asked:
            self._last = last = (asked, _find(tables, without, digests))
        return last[1]

    def fold(self) -> None:
        """Fold the tables of loose packs into one segment, once there are many.

        Markers are removed only after the segment is there, and a chunk that the index has lost is found again in its
        pack, so nothing depends on this being done, or done once.
        """
        with self._lock:
            if len(self._loose) < _FOLD_AT:
                return
            loose = sorted(self._loose)
            tables = [only_packs(table, set(loose)) for table in self._tables]
            name = uuid.uuid4().hex
            try:
                self._backend.put_new(f"index/{name}.arrow", [segment_bytes(merge_tables(tables))])
                self._segments.add(name)
                for pack in loose:
                    self._backend.delete(self._loose[pack])
                self._loose.clear()
            except BackendError as error:
                _log.warning("the index could not be folded, which costs time but no data: %s", error)

    def _read_index(self) -> bool:
        """List the index once; returns whether all that was listed was still there."""
        loose: list[str] = []
        is_whole = True
        self._loose.clear()
        for info in list(self._backend.list("index")):
            name, _, ending = info.key.removeprefix("index/").partition(".")
            if ending == "loose":
                self._loose[name] = info.key
                loose.append(name)
            elif ending == "arrow":
                if name not in self._segments and not self._load_segment(name, info.key):
                    is_whole = False
                elif name in self._packs:
                    self._loose[name] = info.key
        self._load_packs(loose)
        return is_whole

    def _load_segment(self, name: str, key: str) -> bool:
        try:
            table = read_segment(key, self._backend.get(key, max_bytes=MAX_SEGMENT_BYTES))
        except BlobNotFoundError:
            return False
        except CorruptError as error:
            _log.warning("%s; chunks are looked up in their packs instead", error)
            self._segments.add(name)
            return True
        self._segments.add(name)
        new = set(table.packs) - self._packs
        if new:
            self._packs |= new
            self._tables.append(only_packs(table, new))
            self._merge()
        return True

    def _load_packs(self, names: Iterable[str]) -> None:
        tables: dict[str, Entries] = {}
        for name in names:
            if name in self._packs or name in self._gone:
                continue
            try:
                tables[name] = read_pack_table(self._backend, name)
            except BlobNotFoundError:
                self._gone.add(name)
            except CorruptError as error:
                _log.warning("%s; what it holds cannot be found", error)
                self._gone.add(name)
        if tables:
            self._packs |= tables.keys()
            self._tables.append(make_table(tables))
            self._merge()

    def _merge(self) -> None:
        if len(self._tables) > _MAX_TABLES:
            self._tables = [merge_tables(self._tables)]


def _find(tables: list[Table], without: set[str], digests: Digests) -> Places:
    packs: list[str] = []
    found = np.zeros(len(digests), dtype=bool)
    pack = np.zeros(len(digests), dtype=np.int64)
    entries = np.zeros(len(digests), dtype=ENTRY)
    for table in reversed(tables):
        open_ = np.flatnonzero(~found)
        if len(open_) == 0:
            break
        usable = None
        if without:
            usable = np.array([name not in without for name in table.packs], dtype=bool)
        rows = table.find(digests[open_], usable)
        hits = rows >= 0
        at, rows = open_[hits], rows[hits]
        found[at] = True
        entries[at] = table.entries[rows]
        pack[at] = table.pack[rows].astype(np.int64) + len(packs)
        packs.extend(table.packs)
    return Places(found=found, pack=pack, packs=packs, entries=entries)


def list_packs(backend: Backend) -> list[tuple[str, int]]:
    """List the packs of a store: name and size."""
    found: list[tuple[str, int]] = []
    for info in backend.list("packs"):
        name, _, ending = info.key.removeprefix("packs/").partition(".")
        if ending == "pack":
            found.append((name, info.size))
    return found


def read_pack_table(backend: Backend, name: str) -> Entries:
    """Read the table of a pack, in one read if the pack is small.

    Raises:
        BlobNotFoundError: The pack is gone.
        CorruptError: It is damaged.
    """
    key = pack_key(name)
    info = backend.stat(key)
    if info is None:
        raise BlobNotFoundError(key)
    tail = bytearray(min(info.size, _TAIL_BYTES))
    begin = info.size - len(tail)
    backend.read_into(key, begin, memoryview(tail))

    def read(start: int, stop: int) -> bytes | bytearray:
        if start >= begin:
            return tail[start - begin : stop - begin]
        longer = bytearray(stop - start)
        backend.read_into(key, start, memoryview(longer))
        return longer

    return read_table(key, info.size, read)


def mark_loose(backend: Backend, name: str) -> None:
    """Put a new pack into the index."""
    with contextlib.suppress(BlobExistsError):
        backend.put_new(f"index/{name}.loose", [], durable=False)
