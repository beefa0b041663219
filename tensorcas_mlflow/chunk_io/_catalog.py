"""Catalog: the known places of one open store's chunks, from the index and the tables of packs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobInfo, DamagedError
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Digests, prefixes
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.chunk_io._places import (
    LastLookups,
    Places,
    Searched,
    find_chains,
    find_places,
    follow,
    rows_that_take,
)
from tensorcas_mlflow.chunk_io._recent_chunks import RecentChunks
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, StarvedError
from tensorcas_mlflow.layout import Generation, Identity, is_blob_key, list_blobs
from tensorcas_mlflow.layout.manifests import Hints, Manifest, read_hints, read_pack_hints
from tensorcas_mlflow.layout.packs import (
    Entries,
    Mask,
    Positions,
    Segment,
    Table,
    drawn_s,
    list_packs,
    list_segments,
    make_table,
    mark_loose,
    merge_segments,
    merge_tables,
    only_packs,
    open_segment,
    pack_key,
    read_pack_table,
    segment_bytes,
    segment_key,
    segment_name,
    to_merge,
)

T = TypeVar("T")

_MERGED_AT = 8
"""A table is merged with the next one unless it has more than so many times its rows. So a search covers few tables,
and each row moves a few times at most, however many packs arrive one by one."""
_MAX_LISTINGS = 3
_FOLD_AT = 64
"""Number of loose packs at which their tables are folded into one segment."""
_MOST_MERGED_BYTES = 32 << 20
"""Savers merge segments up to this size, in a fifth of a second; collections merge all."""
_BYTES_PER_TABLE = 256 << 10
"""A request for the table of another process's pack is worth so many bytes that a save need not write."""
_BYTES_PER_LOCAL_TABLE = 64 << 10
"""The same for a read from a local disk. What saves leave unread is for the process that folds the packs."""
_MAX_HINTS = 4
_MOST_HINTED_LISTED = 500
_MAX_LATEST = 8
_MAX_REMEMBERED = 4096
"""Bound of the digests of a remembered lookup; comparing more would take too long."""
_LATE_S = 3600.0
"""Time allowed between drawing a pack's name and its arrival in a remote store, with inaccurate clocks, for processes
that list new packs meanwhile. A later pack is found after a failed lookup."""
_MAX_MANIFESTS = 4096
"""Bound of remembered names of manifests; beyond it all are forgotten, and an equal save writes its own copy."""


def _warn(text: str, error: Exception) -> None:
    from logging import getLogger

    getLogger(__name__).warning(text, error)


class Catalog:
    """Tables of packs, read from a backend and searched together. Shared by threads."""

    def __init__(self, backend: Backend, store_id: str) -> None:
        self.identity = Identity(backend, store_id)
        self.recent = RecentChunks(backend)
        self._backend = backend
        self._store_id = store_id
        self._lock = Lock()
        self._tables: list[Table] = []
        """Tables in memory: of single packs, and of small segments."""
        self._large: dict[str, Segment] = {}
        """Segments that are searched by ranges, by name; searched last."""
        self._hints: list[Table] = []
        """Hints of recently read manifests; searched after the tables."""
        self._hinted: set[str] = set()
        """Packs in the hints of manifests with deltas read last, whose tables nobody has wanted yet."""
        self._packs: set[str] = set()
        self._segments: set[str] = set()
        self._loose: dict[str, str | None] = {}
        """Packs outside of shared segments, by name, each with the key of its own index blob if it has one. Of a local
        store some are unread."""
        self._listed: set[str] = set()
        """Names of the blobs of the index in the last listing, all segments read; empty after one that was not."""
        self._gone: set[str] = set()
        self._unreadable: set[str] = set()
        """Packs with damaged tables."""
        self.refusal: BackendError | None = None
        """The reason a pack's table may not be read, if any. A missing chunk may be in that pack."""
        self._lost: dict[str, None] = {}
        """Packs named in the index and missing in the store, in the order of discovery."""
        self._distrusted: set[tuple[str, bytes]] = set()
        """Copies found damaged: the pack and the digest of each."""
        self._n_reread = 0
        """Number of refreshes from packs."""
        self._has_bad_segments = False
        """True if a segment is damaged, so packs may exist outside of the index."""
        self._manifests: dict[str, str] = {}
        self._lately = LastLookups()
        self._newest = ""
        """Name of the newest pack listed in a remote store."""
        self._seen: tuple[Generation | None, set[str]] = (None, set())

    def copied(self, backend: Backend) -> Catalog:
        """Return a catalog with the same knowledge, reading through another backend of the same blobs."""
        other = Catalog(backend, self._store_id)
        with self._lock:
            other._tables, other._hints, other._large = list(self._tables), list(self._hints), dict(self._large)
            other._packs, other._segments = set(self._packs), set(self._segments)
            other._loose, other._lost = dict(self._loose), dict(self._lost)
            other._listed = self._listed
            other._gone, other._unreadable = set(self._gone), set(self._unreadable)
            other._distrusted, other._newest = set(self._distrusted), self._newest
            other._has_bad_segments = self._has_bad_segments
        return other

    def refresh(self, *, n_bytes: int | None = None) -> set[str]:
        """Read the additions to the index since the last time.

        Args:
            n_bytes: The most bytes that the result can save: packs whose tables cost more than that is worth stay
                unread. None to read all.

        Returns:
            Keys of packs that existed at the time of the call or later.
        """
        with self._lock:
            if self._backend.is_remote:
                return self._read_new_packs(None if n_bytes is None else 1 + n_bytes // _BYTES_PER_TABLE)
            # The first reading of a process finds what there was before, and others write only meanwhile.
            most = n_bytes // _BYTES_PER_LOCAL_TABLE if n_bytes is not None and self._listed else None
            # Another process may fold segments during the reading: the rows of a deleted one are in a new one.
            for _ in range(_MAX_LISTINGS):
                if self._read_index(most):
                    break
            return set()

    def look_at_latest(self, digests: Digests) -> None:
        """Read the tables of the latest packs in a local store's index, until they hold some chunks, or of a few packs.

        Most readers want the latest checkpoint. Of a remote store, read the tables of the packs in hints.
        """
        if self._backend.is_remote:
            self.look_at_hinted()
            return
        with self._lock:
            loose = [
                (info.modified_s, name)
                for info in self._index()
                for name, _, ending in (info.key.removeprefix("index/").partition("."),)
                if ending == "loose" and self._is_new(name)
            ]
            for _, name in sorted(loose, reverse=True)[:_MAX_LATEST]:
                self._load_packs({name: None})
                digests = digests[~self.find(digests).found]
                if len(digests) == 0:
                    break

    def look_at_hinted(self) -> None:
        """Read the tables of the packs in the hints of manifests with deltas read last, unless they are known."""
        with self._lock:
            new = {name for name in self._hinted if self._is_new(name)}
            self._hinted.clear()
            if not new:
                return
            # The packs of one chain were mostly written one soon after the other, so one request tells their sizes.
            since_s = drawn_s(min(new)) - 1
            sizes = dict(islice(list_packs(self._backend, since_s=since_s), _MOST_HINTED_LISTED))
            self._load_packs({name: sizes.get(name) for name in sorted(new)})

    def refresh_from_packs(self) -> None:
        """Read the table of every pack anew: packs are the truth, and the index a cache and possibly wrong.

        A pack that was gone may be back: somebody has restored a backup in place.
        """
        with self._lock:
            self._n_reread += 1
            before = self._tables, self._hints, self._packs, self._unreadable, self._large
            self._tables, self._hints, self._packs, self._unreadable, self._large = [], [], set(), set(), {}
            try:
                packs = dict(list_packs(self._backend))
                self._gone -= packs.keys()
                for name in self._lost.keys() & packs.keys():
                    del self._lost[name]
                self._load_packs(packs)
            except BaseException:
                # Known packs are not listed again; forgetting them would store their chunks again.
                self._tables, self._hints, self._packs, self._unreadable, self._large = before
                raise
            # If a pack's own table is damaged, its index entries are the only source; a reader verifies what it reads
            # there.
            known = self._unreadable & before[2]
            if known:
                self._packs |= known
                self._tables += [only_packs(table, known) for table in before[0]]
                self._large = {name: segment for name, segment in before[4].items() if known & set(segment.packs)}
                self._merge()

    def seen(self, generation: Generation | None) -> set[str]:
        """Return the keys of blobs of a remote store known to exist; the caller adds to them.

        Args:
            generation: The caller's listing of condemned lists. Keys of another generation are forgotten: their blobs
                may have been deleted.
        """
        if generation is None:
            return set()
        with self._lock:
            if self._seen[0] != generation:
                self._seen = (generation, set())
            return self._seen[1]

    def publish(self, name: str, entries: Entries, *, is_marked: bool = False) -> None:
        """Add a pack of this process to the index, for other processes and for itself.

        Args:
            is_marked: Whether it was put together with its marker.
        """
        if self._backend.is_carrier:
            # Other processes would have to fetch the whole pack for its table. So the table gets a blob of its own,
            # named after the pack.
            segment = segment_bytes(make_table({name: entries}))
            self._backend.put_new(segment_key(name), [segment], durable=False)
            self._segments.add(name)
        elif self._backend.is_remote:
            self._loose[name] = None
        elif not is_marked:
            mark_loose(self._backend, name)
        self.add(name, entries)

    def add(self, name: str, entries: Entries) -> None:
        """Add a pack to the catalog, unless another thread has found it in the index already."""
        with self._lock:
            if name in self._packs:
                return
            self._tables.append(make_table({name: entries}))
            self._packs.add(name)  # last: after an interrupt the pack is looked up again
            self._merge()

    def forget(self, packs: Collection[str]) -> None:
        """Remove packs that are gone: a pack's name is never used again."""
        with self._lock:
            self._gone.update(packs)

    def miss(self, packs: Collection[str]) -> None:
        """Remove packs a reader found missing although the index named them."""
        with self._lock:
            self._gone.update(packs)
            self._lost |= dict.fromkeys(packs)

    def miss_all_gone(self) -> None:
        """List the existing packs, and remove all others: for a reader that has missed several in a row."""
        with self._lock:
            known = set(self._packs)
        # A pack known before the listing and absent from it is gone for good.
        self.miss(known - dict(list_packs(self._backend)).keys() - self._gone)

    def distrust(self, pack: str, digest: bytes) -> None:
        """Remember a copy found damaged: no save of this process may rely on it."""
        with self._lock:
            self._distrusted.add((pack, digest))

    def knowledge(self) -> tuple[Any, ...]:
        """Return a value for comparison: while it is the same, lookups for a save find the same copies."""
        with self._lock:
            ignored = frozenset(self._gone), frozenset(self._unreadable), frozenset(self._distrusted)
            return [*self._large.values(), *self._hints, *self._tables], *ignored

    def doubts(self) -> tuple[int, ...]:
        """Return a value for comparison: while it is the same, a local store's chunks that were sound still are."""
        with self._lock:
            # Names and copies are only added, except by a refresh from packs.
            return self._n_reread, len(self._gone), len(self._unreadable), len(self._distrusted)

    def suspects(self) -> list[str]:
        """Return the keys of packs that may have held a lost chunk: damaged tables, then lost packs, latest first."""
        with self._lock:
            return [pack_key(name) for name in (*sorted(self._unreadable), *reversed(self._lost))]

    def take_hints_of(self, manifests: Iterable[Manifest]) -> None:
        """Add the hinted places of chunks of manifests.

        Hints of packs are kept until the tables of these packs are wanted, or until the next call with some.
        """
        hinted: set[str] = set()
        for manifest in manifests:
            if not manifest.hints:
                continue
            hints = read_hints(manifest.hints, manifest.stored_digests)
            if hints is not None:
                self._take_hints(hints)
            else:
                hinted |= read_pack_hints(manifest.hints) or set()
        if hinted:
            with self._lock:
                self._hinted = hinted

    def _take_hints(self, hints: Hints) -> None:
        table = Table(
            packs=hints.packs, pack=hints.pack, entries=hints.entries, prefix=prefixes(hints.entries["digest"])
        )
        with self._lock:
            self._hints = [table, *self._hints[: _MAX_HINTS - 1]]

    def know_manifest(self, digest: str, name: str) -> None:
        """Remember the name of a manifest written by this process, so an equal save can share it."""
        if len(self._manifests) >= _MAX_MANIFESTS:
            self._manifests.clear()
        self._manifests[digest] = name

    def known_manifest(self, digest: str) -> str | None:
        """Return the name of a manifest with a digest; it may be gone or condemned by now."""
        return self._manifests.get(digest)

    def find(self, digests: Digests, excluded: Collection[str] = ()) -> Places:
        """Look up many digests at once.

        Args:
            digests: The digests to find, shape ``(n, 32)``.
            excluded: Packs to ignore, together with deltas based on them.
        """
        # A save asks for the same digests several times, and saves of an unchanged state again and again.
        look_up = find_places if len(digests) > _MAX_REMEMBERED else self._lately.find
        return self._search(lambda tables, without: look_up(tables, digests, without), excluded)

    def follow(self, places: Places, excluded: Collection[str] = ()) -> Sequence[Places]:
        """Return the bases of chunks, level by level; see `follow`."""
        if places.chain is not None:
            return places.chain
        return self._search(lambda tables, without: follow(tables, places, without), excluded)

    def find_chains(self, places: Places, excluded: Collection[str] = ()) -> tuple[Mask, set[str]]:
        """Follow deltas to their bases, and those to theirs; see `find_chains`."""
        return self._search(lambda tables, without: find_chains(tables, places, without), excluded)

    def find_sound(self, digests: Digests, excluded: Collection[str]) -> Places:
        """Look up chunks for a save to rely on: like `find`, without damaged copies and the chunks that need them."""
        with self._lock:
            doubted, without = set(self._distrusted), {*excluded, *self._unreadable}
        places = self.find(digests, without)
        waiting = [(np.arange(len(digests)), frozenset(without))] if doubted else []
        while waiting:
            rows, besides = waiting.pop()
            for pack, again in places.by_pack(rows[self._rows_that_take(places.some(rows), doubted)]):
                others = besides | {pack}
                places = places.replaced(again, self.find(digests[again], others))
                waiting.append((again, others))
        return places

    def _rows_that_take(self, places: Places, copies: Collection[tuple[str, bytes]]) -> Positions:
        return self._search(lambda tables, _: rows_that_take(tables, places, copies), ())

    def _search(self, look_up: Callable[[list[Searched], set[str]], T], excluded: Collection[str]) -> T:
        """Return the result of a lookup, given the tables to search, the last one first, and the packs to ignore."""
        while True:
            with self._lock:
                tables: list[Searched] = [*self._large.values(), *reversed(self._hints), *self._tables]
                without = self._gone | set(excluded)
            try:
                return look_up(tables, without)
            except BlobNotFoundError as error:
                # Another process has merged a segment of a remote store into another one, and removed it.
                with self._lock:
                    if segment_name(error.key) not in self._large:
                        raise
                    self._forget_segment(segment_name(error.key))
                self.refresh()

    def fold(self) -> None:
        """Fold the tables of loose packs into one segment, once there are many, and merge small segments.

        Markers, and the segments that a new one replaces, are removed only after the new one exists, and the pack
        itself supplies a chunk lost from the index. So nothing depends on folding, or on folding once.
        """
        with self._lock:
            if len(self._loose) < _FOLD_AT:
                return
            try:
                with self._backend.alone() as is_alone:
                    if is_alone:
                        self._fold()
            except BlobNotFoundError:
                pass  # another process has merged these segments at the same moment
            except (BackendError, FormatError) as error:
                _warn("the index could not be folded, which costs time but no data: %s", error)

    def _fold(self) -> None:
        # Another process may have folded most of them since the last look.
        if self._backend.is_remote:
            self._read_segments()
        else:
            self._read_index(0)
        if len(self._loose) >= _FOLD_AT:
            loose = sorted(self._loose)
            self._load_packs(dict.fromkeys(loose))
            tables = [only_packs(table, set(loose)) for table in self._tables]
            name = new_name()
            self._backend.put_new(segment_key(name), [segment_bytes(merge_tables(tables))])
            self._segments.add(name)
            # Packs published meanwhile are not in this segment.
            self._backend.delete(*filter(None, map(self._loose.get, loose)))
            for pack in loose:
                del self._loose[pack]
        merge_segments(self._backend, to_merge(list_segments(self._backend), most_bytes=_MOST_MERGED_BYTES))

    def _index(self) -> Iterator[BlobInfo]:
        """List the index as far as a damaged database shows it: the packs themselves are there for the rest."""
        with suppress(DamagedError):
            yield from list_blobs(self._backend, "index")

    def _read_index(self, most: int | None) -> bool:
        """List the index once; return whether all segments in the listing still existed when read.

        Args:
            most: Read the tables of so many loose packs at most, or of the only one that is unread; None for all.
        """
        try:
            listed = set(self._backend.list_dir("index").blobs)
        except DamagedError:
            listed = {info.key.removeprefix("index/") for info in self._index()}
        if not self._listed:
            self._loose.clear()
        for gone in self._listed - listed:
            self._loose.pop(gone.partition(".")[0], None)
            self._forget_segment(gone.partition(".")[0])
        is_whole = True
        # Each of many small saves adds one marker, so most of the listing is known.
        for file in sorted(listed - self._listed):
            name, _, ending = file.partition(".")
            key = f"index/{file}"
            if not is_blob_key(key):
                continue
            if ending == "loose":
                self._loose[name] = key
            elif name not in self._segments and not self._load_segment(name, key):
                is_whole = False
            elif name in self._packs:
                self._loose[name] = key
        unread = sorted(set(self._loose).difference(self._packs, self._gone, self._unreadable))
        self._load_packs(dict.fromkeys(unread[:most] if len(unread) > 1 else unread))
        self._listed = listed if is_whole else set()
        if self._has_bad_segments:
            self._load_packs(dict(list_packs(self._backend)))
            self._has_bad_segments = False
        return is_whole

    def _read_new_packs(self, most: int | None) -> set[str]:
        """List the packs of a remote store from about the newest known one on, and read the tables of new ones.

        A pack needs no marker there, since one request lists a thousand and can begin anywhere. Segments are read only
        if many packs are new, because each segment covers many packs.

        Args:
            most: Read so many tables at most, those of the largest packs; a later call reads others.
        """
        found = self._list_new_packs(most_new=_FOLD_AT)
        if found is None:
            self._newest = max([self._newest, *self._read_segments()])
            found = self._list_new_packs(most_new=None)
        assert found is not None
        new = {name: size for name, size in found.items() if self._is_new(name)}
        if most is not None and len(new) > most:
            new = dict(sorted(new.items(), key=lambda item: (-item[1], item[0]))[:most])
        self._load_packs(new)
        self._loose.update(dict.fromkeys(new))
        return {pack_key(name) for name in found}

    def _list_new_packs(self, *, most_new: int | None) -> dict[str, int] | None:
        """List packs and their sizes; None if more than so many are new: the listing then stops."""
        # Clocks differ, so a pack may arrive after one with a greater name. No clock moves this limit into the future.
        newest_s = min(drawn_s(self._newest), time.time())
        found: dict[str, int] = {}
        n_new = 0
        for name, size in list_packs(self._backend, since_s=newest_s - _LATE_S):
            found[name] = size
            n_new += self._is_new(name)
            if most_new is not None and n_new > most_new:
                return None
        self._newest = max([self._newest, *found])
        return found

    def _read_segments(self) -> set[str]:
        """Read the new segments of a remote store.

        Returns:
            The packs that only they tell of; none if a segment is unsound, since older packs may be in none then.
        """
        listed = list(list_blobs(self._backend, "index"))
        names = {segment_name(info.key): info for info in listed if info.key.endswith(".segment")}
        for gone in self._large.keys() - names.keys():
            self._forget_segment(gone)
        loaded = set(self._packs)
        for name, info in names.items():
            if name not in self._segments:
                self._load_segment(name, info.key, size=info.size)
        folded = set() if self._has_bad_segments else self._packs - loaded
        self._has_bad_segments = False
        return folded

    def _load_segment(self, name: str, key: str, *, size: int | None = None) -> bool:
        """Open a segment; return whether it still existed."""
        try:
            opened = open_segment(self._backend, key, size=size)
        except BlobNotFoundError:
            return False
        except FormatError as error:
            _warn("%s; chunks are looked up in their packs instead", error)
            self._segments.add(name)
            self._has_bad_segments = True
            return True
        new = set(opened.packs) - self._packs
        if self._backend.is_remote:  # in a folder a pack leaves with its marker
            for pack in opened.packs:
                self._loose.pop(pack, None)
        if isinstance(opened, Segment):
            self._large[name] = opened
            # Rows of packs that it covers need no memory.
            others = self._packs.difference(opened.packs)
            self._tables = [table for table in (only_packs(table, others) for table in self._tables) if len(table)]
        elif new:
            self._tables.append(only_packs(opened, new))
            self._merge()
        self._packs |= new
        self._segments.add(name)
        return True

    def _forget_segment(self, name: str) -> None:
        """Forget a segment that is searched by ranges, and what only it has told."""
        segment = self._large.pop(name, None)
        if segment is not None:
            told = {pack for table in (*self._tables, *self._large.values()) for pack in table.packs}
            self._packs -= set(segment.packs) - told
            self._newest = ""  # packs of any age are listed again, and found in the segment that replaces this one

    def _load_packs(self, packs: Mapping[str, int | None]) -> list[Entries]:
        """Read the tables of packs, given by name and, if known, size; return those that are new and readable."""
        tables: dict[str, Entries] = {}

        def load(name: str) -> None:
            try:
                tables[name] = read_pack_table(self._backend, name, size=packs[name])
            except BlobNotFoundError:
                self._gone.add(name)
                self._lost[name] = None
            except CorruptError as error:
                _warn("%s; chunks in it cannot be found", error)
                self._unreadable.add(name)
            except BackendError as error:
                # A failed request to a remote store says nothing about the blob; a bad sector here affects one pack.
                if self._backend.is_remote or isinstance(error, StarvedError):
                    raise
                if isinstance(error.__cause__, PermissionError):
                    self.refusal = error
                _warn("%s; chunks in it cannot be found", error)
                self._unreadable.add(name)

        new = [name for name in packs if self._is_new(name)]
        if self._backend.is_remote and len(new) > 1:
            threads.run_all(load, new, waits=True)
        else:
            for name in new:
                load(name)
        if tables:
            self._tables.append(make_table({name: tables[name] for name in new if name in tables}))
            self._packs |= tables.keys()
            self._merge()
        return list(tables.values())

    def _is_new(self, pack: str) -> bool:
        return pack not in self._packs and pack not in self._gone and pack not in self._unreadable

    def _merge(self) -> None:
        """Merge small tables; a lookup still finds the latest copy of a chunk first."""
        tables = list(self._tables)
        while len(tables) > 1 and len(tables[-2]) <= _MERGED_AT * len(tables[-1]):
            latest = tables.pop()
            tables[-1] = merge_tables([latest, tables[-1]])
        self._tables = tables
