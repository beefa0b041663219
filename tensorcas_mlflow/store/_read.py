"""Reading tensors: locate, plan, read, decode straight into place, verify."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import MOST_OVERHEAD_BYTES, RAW, codec_numbered, load_codecs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    ChunkNotFoundError,
    CorruptChunkError,
    CorruptError,
    FormatError,
)
from tensorcas_mlflow.extent_cache import CachedRead, ExtentCache, Filling
from tensorcas_mlflow.index import pack_key, pack_name
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.readplan import plan_reads
from tensorcas_mlflow.store._catalog import Catalog, Places
from tensorcas_mlflow.store._deltas import Bases
from tensorcas_mlflow.store._owner import NOBODY, Owner
from tensorcas_mlflow.tensor import empty_array, pieces_of

_FILE_BATCH_BYTES = 16 << 20
_MAX_ATTEMPTS = 100
"""How often a chunk may be moved under a reader. Each time a whole collection has to fall into one read, which happens
many times in a row only where collectors that rewrite everything run without a pause and the reader hardly does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Chunks to read, and where each is to go."""

    digests: Digests
    outs: list[memoryview]
    verify: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Damage:
    """A copy of a chunk that cannot be read or is not what it should be."""

    chunk: int
    """Its number among those that are wanted."""
    key: str
    """Of the pack."""
    reason: str
    error: BackendError | None = None
    """What the storage said, if it is that which failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unread:
    """A read that has failed."""

    reason: str
    error: BackendError | None
    """What the storage said, if it is that which failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One read, of the storage or of the cache, and the chunks it brings."""

    key: str
    """Of the pack."""
    members: Any
    """Which of the wanted chunks, by number."""
    begins: Any
    """Where each begins in what is read."""
    start: int
    stop: int
    """Which bytes of the pack; for the cache they mean nothing."""
    cached: CachedRead | None


class ChunkReader:
    """Reads chunks of one store: from the local cache what is there, and the rest from the storage.

    Every method raises:
        ChunkNotFoundError: No pack of this store holds a chunk.
        CorruptChunkError: A chunk is damaged. Without ``verify`` only damage that keeps it from being decoded is seen.
    """

    def __init__(self, backend: Backend, catalog: Catalog, *, cache: ExtentCache | None = None, store_id: str = ""):
        """Read from a backend.

        Args:
            backend: Where the packs are.
            catalog: Of that backend.
            cache: What keeps what was read on local disk; None keeps nothing.
            store_id: What the cache knows the store by.
        """
        self._backend = backend
        self._catalog = catalog
        self._bases = Bases(backend)
        self._cache = cache
        self._store_id = store_id

    def rows(self, rows: Sequence[Row], chunk_bytes: int, *, verify: bool, label: str | None = None) -> list[Array]:
        """Read whole rows into new arrays.

        Args:
            rows: Which.
            chunk_bytes: Of their manifest.
            verify: Whether to check each chunk against its digest.
            label: What the rows are of, for errors.

        Returns:
            One array a row, C-contiguous and writable; plain bytes as 1-d uint8.
        """
        arrays: list[Array] = []
        digests: list[Digests] = []
        outs: list[memoryview] = []
        for row in rows:
            array = empty_array(row.spec)
            arrays.append(array)
            if array.size:
                flat = array.reshape(-1).view(np.uint8).data
                outs.extend(pieces_of(flat, row.ends(chunk_bytes)))
                digests.append(row.digests)
        joined = np.concatenate(digests) if digests else np.empty((0, DIGEST_BYTES), np.uint8)
        self.read(joined, outs, verify=verify, owner=Owner(label=label, rows=rows))
        return arrays

    def pieces(self, manifest: Manifest, *, verify: bool) -> Iterator[memoryview]:
        """Yield the bytes of all rows, one after the other, some 16 MiB at a time."""
        sizes = manifest.chunk_sizes
        stops = sizes.cumsum()
        begin = 0
        while begin < len(sizes):
            base = int(stops[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(stops, base + _FILE_BATCH_BYTES, side="right")))
            block = memoryview(bytearray(int(stops[end - 1]) - base))
            outs = pieces_of(block, stops[begin:end] - base)
            owner = Owner(label=manifest.label, rows=manifest.rows, first=begin)
            self.read(manifest.digests[begin:end], outs, verify=verify, owner=owner)
            yield block
            begin = end

    def read(self, digests: Digests, outs: list[memoryview], *, verify: bool, owner: Owner = NOBODY) -> None:
        """Read chunks, each into a buffer of its size.

        Of a chunk that is damaged in one pack and whole in another the whole copy is taken.

        Args:
            digests: Which.
            outs: Where each is to go.
            verify: Whether to check each against its digest.
            owner: Whose they are, for errors.
        """
        wanted = _Wanted(digests=digests, outs=outs, verify=verify)
        everything = np.arange(len(outs))
        damaged = self._read_from(wanted, everything, frozenset(), owner)
        if any(damage.error is None for damage in damaged):
            # Perhaps it is the index that is damaged: a pack's table carries a digest of its own.
            self._catalog.refresh_from_packs()
            damaged = self._read_from(wanted, _chunks_of(damaged), frozenset(), owner)
        if damaged:
            self._read_other_copies(wanted, damaged, owner)

    def _read_other_copies(self, wanted: _Wanted, damaged: list[_Damage], owner: Owner) -> None:
        """Read chunks of which one copy is damaged from other packs; an error tells of the first copy."""
        lost: list[_Damage] = []
        waiting = [(frozenset[str](), damaged, damaged)]
        while waiting:
            without, found, told = waiting.pop()
            first = {damage.chunk: damage for damage in told}
            by_pack: dict[str, list[_Damage]] = {}
            for damage in found:
                by_pack.setdefault(pack_name(damage.key), []).append(damage)
                if damage.error is None:
                    self._catalog.distrust(pack_name(damage.key), wanted.digests[damage.chunk].tobytes())
            for pack, group in by_pack.items():
                chunks, besides = _chunks_of(group), without | {pack}
                places = self._catalog.find(wanted.digests[chunks], besides)
                lost += [first[chunk] for chunk in chunks[~places.found].tolist()]
                again = self._read_from(wanted, chunks[places.found], besides, owner)
                if again:
                    waiting.append((besides, again, [first[damage.chunk] for damage in again]))
        if not lost:
            return
        damage = min(lost, key=lambda each: (each.error is not None, each.chunk))
        if damage.error is not None:
            raise damage.error
        names = owner.names(sorted(each.chunk for each in lost))
        digest_text = wanted.digests[damage.chunk].tobytes().hex()
        raise CorruptChunkError(digest_text, damage.key, damage.reason, owner.label, names)

    def _read_from(self, wanted: _Wanted, chunks: Any, without: frozenset[str], owner: Owner) -> list[_Damage]:
        """Read some of the wanted chunks from any packs but some; returns which copies were damaged."""
        part = _some(wanted, chunks)
        n_moves = 0
        while True:
            places = self._locate(part.digests, without, chunks, owner)
            try:
                return self._read_at(places, part, chunks)
            except BlobNotFoundError:
                # A collector has moved what this reader was about to read; the copy is in the index.
                used = {places.packs[number] for number in np.unique(places.pack)}
                used |= self._catalog.find_chains(places)[1]
                moved = {pack_name(key) for key in self._backend.missing(map(pack_key, used))}
                n_moves += 1
                if n_moves == _MAX_ATTEMPTS or not moved:
                    raise
                self._catalog.miss(moved)
                self._catalog.refresh()

    def _locate(self, digests: Digests, without: frozenset[str], chunks: Any, owner: Owner) -> Places:
        catalog = self._catalog
        places = catalog.find(digests, without)
        # Packs twice: a chunk that is moved while they are listed may be in a new one that is not listed yet.
        for refresh in (catalog.refresh, catalog.refresh_from_packs, catalog.refresh_from_packs):
            if places.found.all():
                return places
            refresh()
            places = catalog.find(digests, without)
        if not places.found.all():
            missing = np.flatnonzero(~places.found)
            names, suspects = owner.names(chunks[missing]), tuple(catalog.suspects())
            digest_text = digests[missing[0]].tobytes().hex()
            raise ChunkNotFoundError(digest_text, len(missing), owner.label, names, suspects)
        return places

    def _read_at(self, places: Places, wanted: _Wanted, numbers: Any) -> list[_Damage]:
        """Read chunks from places; returns those that are damaged there, by ``numbers``."""
        damaged = _check_sizes(places, wanted)
        if (places.entries["codec"] != RAW.number).any():
            load_codecs()
        possible = np.delete(np.arange(len(wanted.outs)), [damage.chunk for damage in damaged])
        if self._cache is None:
            self._run(_reads(places, possible), places, wanted, None, damaged)
        else:
            tasks, left = self._cached_reads(self._cache, places, possible)
            with self._cache.filling(self._store_id) as filling:
                # What has gone from the cache, or was damaged there, comes from the storage like all that never was
                # there.
                left = np.concatenate([left, *self._run(tasks, places, wanted, None, damaged)])
                self._run(_reads(places, left), places, wanted, filling, damaged)
        return [replace(damage, chunk=int(numbers[damage.chunk])) for damage in damaged]

    def _cached_reads(self, cache: ExtentCache, places: Places, chunks: Any) -> tuple[list[_Task], Any]:
        """Find chunks in the cache; returns how to read them, and the chunks that are not there."""
        tasks: list[_Task] = []
        left = [np.empty(0, dtype=np.intp)]
        for number in np.unique(places.pack).tolist():
            mine = chunks[places.pack[chunks] == number]
            entries = places.entries[mine]
            found = cache.open_pack(self._store_id, places.packs[number]).find(
                entries["offset"], entries["stored_bytes"]
            )
            left.append(mine[~found.held])
            key = pack_key(places.packs[number])
            tasks += [
                _Task(key=key, members=mine[read.members], begins=read.begins, start=0, stop=0, cached=read)
                for read in found.reads
            ]
        return tasks, np.concatenate(left)

    def _run(
        self,
        tasks: Sequence[_Task],
        places: Places,
        wanted: _Wanted,
        filling: Filling | None,
        damaged: list[_Damage],
    ) -> list[Any]:
        """Carry reads out, noting what is damaged; returns the chunks, in groups, that the cache did not have."""
        missed: list[Any] = []

        def run(task: _Task) -> None:
            if task.cached is not None:
                if not _take_cached(task, task.cached, places, wanted, self._bases):
                    missed.append(task.members)
                return
            waiting = [task]
            while waiting:
                each = waiting.pop()
                block = self._fetch(each, wanted, places)
                if not isinstance(block, _Unread):
                    found = _take(each, block, places, wanted, self._bases)
                    damaged.extend(found)
                    if filling is not None and not found:
                        filling.add(pack_name(each.key), each.start, block)
                elif len(each.members) == 1:
                    chunk = int(each.members[0])
                    damaged.append(_Damage(chunk=chunk, key=each.key, reason=block.reason, error=block.error))
                else:
                    # A pack cut short, or one bad sector of a disk, is no reason to call all near it damaged.
                    for member in each.members:
                        waiting.extend(_reads(places, np.array([member])))

        if len(tasks) == 1:
            run(tasks[0])
        else:
            threads.run_all(run, tasks, waits=self._backend.is_remote)
        return missed

    def _fetch(self, task: _Task, wanted: _Wanted, places: Places) -> memoryview | _Unread:
        first = int(task.members[0])
        entry = places.entries[first]
        is_lone = len(task.members) == 1 and int(entry["codec"]) == RAW.number
        # A raw chunk alone goes from the storage straight into place.
        block = wanted.outs[first] if is_lone else np.empty(task.stop - task.start, dtype=np.uint8).data
        try:
            self._backend.read_into(task.key, task.start, block)
        except CorruptError as error:
            return _Unread(reason=f"it cannot be read: {error.reason}", error=None)
        except BackendError as error:
            # Far away, a request that fails says nothing of the blob.
            if self._backend.is_remote:
                raise
            return _Unread(reason=str(error), error=error)
        return block


def _some(wanted: _Wanted, chunks: Any) -> _Wanted:
    if len(chunks) == len(wanted.outs):
        return wanted
    outs = [wanted.outs[chunk] for chunk in chunks.tolist()]
    return _Wanted(digests=wanted.digests[chunks], outs=outs, verify=wanted.verify)


def _chunks_of(damaged: Sequence[_Damage]) -> Any:
    return np.array(sorted(damage.chunk for damage in damaged), dtype=np.intp)


def _reads(places: Places, chunks: Any) -> list[_Task]:
    """Plan how to read some of the wanted chunks from the storage."""
    entries = places.entries[chunks]
    return [
        _Task(
            key=pack_key(places.packs[extent.pack]),
            members=chunks[extent.members],
            begins=entries["offset"][extent.members].astype(np.int64) - extent.start,
            start=extent.start,
            stop=extent.stop,
            cached=None,
        )
        for extent in plan_reads(places.pack[chunks], entries["offset"], entries["stored_bytes"])
    ]


def _take_cached(task: _Task, read: CachedRead, places: Places, wanted: _Wanted, bases: Bases) -> bool:
    """Take chunks out of the cache; False if they have gone or are wrong, and then the cache has them no more."""
    block = read.read()
    if block is None:
        return False
    if _take(task, block, places, wanted, bases):
        read.discard()
        return False
    return True


def _take(task: _Task, block: memoryview, places: Places, wanted: _Wanted, bases: Bases) -> list[_Damage]:
    """Decode what was read into place, and check it; returns what is damaged."""
    damaged: list[_Damage] = []
    members = places.entries[task.members]
    lengths, numbers = members["stored_bytes"].tolist(), members["codec"].tolist()
    for at, begin, length, number in zip(task.members.tolist(), task.begins.tolist(), lengths, numbers, strict=True):
        out = wanted.outs[at]
        if block is not out:
            try:
                base = bases.of(places.entries[at])
                codec_numbered(number).decode_into(block[begin : begin + length], out, base)
            except ChunkNotFoundError as error:
                raise BlobNotFoundError(error.suspects[0]) from error
            except FormatError as error:
                damaged.append(_Damage(chunk=at, key=task.key, reason=str(error)))
                continue
        if wanted.verify:
            actual: Any = digest(out)
            if actual != wanted.digests[at].tobytes():
                damaged.append(_Damage(chunk=at, key=task.key, reason=f"its bytes hash to {actual.hex()}"))
    return damaged


def _check_sizes(places: Places, wanted: _Wanted) -> list[_Damage]:
    """Give the chunks whose entries cannot be right, so that what they say costs no memory."""
    sizes = np.fromiter((len(out) for out in wanted.outs), dtype=np.int64, count=len(wanted.outs))
    raw_bytes, stored_bytes = places.entries["raw_bytes"], places.entries["stored_bytes"].astype(np.int64)
    is_raw = places.entries["codec"] == RAW.number
    wrong = (raw_bytes != sizes) | (is_raw & (stored_bytes != sizes)) | (stored_bytes > 2 * sizes + MOST_OVERHEAD_BYTES)
    return [
        _Damage(
            chunk=at,
            key=pack_key(places.packs[int(places.pack[at])]),
            reason=f"its entry says {raw_bytes[at]} bytes in {stored_bytes[at]}, the manifest {sizes[at]}",
        )
        for at in np.flatnonzero(wrong).tolist()
    ]
