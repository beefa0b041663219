"""Reading tensors: locate, plan, read, decode straight into place, verify."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import RAW, codec_numbered, load_codecs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.errors import BlobNotFoundError, ChunkNotFoundError, CorruptChunkError, CorruptError, FormatError
from tensorcas_mlflow.extent_cache import CachedRead, ExtentCache, Filling
from tensorcas_mlflow.index import pack_key, pack_name
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.readplan import plan_reads
from tensorcas_mlflow.store._catalog import Catalog, Places
from tensorcas_mlflow.store._sources import chunk_sizes
from tensorcas_mlflow.tensor import Spec, pieces_of

_ALIGNMENT = 64
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
        self._cache = cache
        self._store_id = store_id

    def rows(self, rows: Sequence[Row], chunk_bytes: int, *, verify: bool) -> list[Array]:
        """Read whole rows into new arrays.

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
        self.read(joined, outs, verify=verify)
        return arrays

    def pieces(self, manifest: Manifest, *, verify: bool) -> Iterator[memoryview]:
        """Yield the bytes of all rows, one after the other, some 16 MiB at a time."""
        sizes = chunk_sizes([row.ends(manifest.chunk_bytes) for row in manifest.rows])
        stops = sizes.cumsum()
        begin = 0
        while begin < len(sizes):
            base = int(stops[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(stops, base + _FILE_BATCH_BYTES, side="right")))
            block = memoryview(bytearray(int(stops[end - 1]) - base))
            outs = pieces_of(block, stops[begin:end] - base)
            self.read(manifest.digests[begin:end], outs, verify=verify)
            yield block
            begin = end

    def read(self, digests: Digests, outs: list[memoryview], *, verify: bool) -> None:
        """Read chunks, each into a buffer of its size."""
        wanted = _Wanted(digests=digests, outs=outs, verify=verify)
        is_anew = False
        for attempt in range(_MAX_ATTEMPTS):
            places = self._locate(digests)
            try:
                self._read_at(places, wanted)
                return
            except BlobNotFoundError:
                # A collector has moved what this reader was about to read; the copy is in the index.
                used = {places.packs[number] for number in np.unique(places.pack)}
                gone = {pack_name(key) for key in self._backend.missing(map(pack_key, used))}
                if attempt == _MAX_ATTEMPTS - 1 or not gone:
                    raise
                self._catalog.forget(gone)
                self._catalog.refresh()
            except CorruptChunkError:
                if is_anew:
                    raise
                # Perhaps it is the index that is damaged: it carries no digest, a pack's table does.
                self._catalog.refresh_from_packs()
                is_anew = True

    def _locate(self, digests: Digests) -> Places:
        catalog = self._catalog
        places = catalog.find(digests)
        # Packs twice: a chunk that is moved while they are listed may be in a new one that is not listed yet.
        for refresh in (catalog.refresh, catalog.refresh_from_packs, catalog.refresh_from_packs):
            if places.found.all():
                return places
            refresh()
            places = catalog.find(digests)
        if not places.found.all():
            missing = np.flatnonzero(~places.found)
            raise ChunkNotFoundError(digests[missing[0]].tobytes().hex(), len(missing))
        return places

    def _read_at(self, places: Places, wanted: _Wanted) -> None:
        _check_sizes(places, wanted)
        if (places.entries["codec"] != RAW.number).any():
            load_codecs()
        everything = np.arange(len(wanted.outs))
        if self._cache is None:
            self._run(_reads(places, everything), places, wanted, None)
            return
        tasks, left = self._cached_reads(self._cache, places, everything)
        with self._cache.filling(self._store_id) as filling:
            # What has gone from the cache, or was damaged there, comes from the storage like all that never was there.
            left = np.concatenate([left, *self._run(tasks, places, wanted, None)])
            self._run(_reads(places, left), places, wanted, filling)

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

    def _run(self, tasks: Sequence[_Task], places: Places, wanted: _Wanted, filling: Filling | None) -> list[Any]:
        """Carry reads out; returns the chunks, in groups, that the cache did not have after all."""
        missed: list[Any] = []

        def run(task: _Task) -> None:
            if task.cached is not None:
                if not _take_cached(task, task.cached, places, wanted):
                    missed.append(task.members)
                return
            block = self._fetch(task, places, wanted)
            _take(task, block, places, wanted)
            if filling is not None:
                filling.add(pack_name(task.key), task.start, block)

        if len(tasks) == 1:
            run(tasks[0])
        else:
            threads.run_all(run, tasks, waits=self._backend.is_remote)
        return missed

    def _fetch(self, task: _Task, places: Places, wanted: _Wanted) -> memoryview:
        first = int(task.members[0])
        entry = places.entries[first]
        is_lone = len(task.members) == 1 and int(entry["codec"]) == RAW.number
        # A raw chunk alone goes from the storage straight into place.
        block = wanted.outs[first] if is_lone else np.empty(task.stop - task.start, dtype=np.uint8).data
        try:
            self._backend.read_into(task.key, task.start, block)
        except CorruptError as error:
            raise CorruptChunkError("(several)", task.key, error.reason) from error
        return block


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


def _take_cached(task: _Task, read: CachedRead, places: Places, wanted: _Wanted) -> bool:
    """Take chunks out of the cache; False if they have gone or are wrong, and then the cache has them no more."""
    block = read.read()
    if block is None:
        return False
    try:
        _take(task, block, places, wanted)
    except CorruptChunkError:
        read.discard()
        return False
    return True


def _take(task: _Task, block: memoryview, places: Places, wanted: _Wanted) -> None:
    """Decode what was read into place, and check it."""
    members = places.entries[task.members]
    lengths, numbers = members["stored_bytes"].tolist(), members["codec"].tolist()
    for at, begin, length, number in zip(task.members.tolist(), task.begins.tolist(), lengths, numbers, strict=True):
        out = wanted.outs[at]
        if block is not out:
            try:
                codec_numbered(number).decode_into(block[begin : begin + length], out)
            except FormatError as error:
                raise CorruptChunkError(wanted.digests[at].tobytes().hex(), task.key, str(error)) from error
        if wanted.verify:
            expected: Any = wanted.digests[at].tobytes()
            actual = digest(out)
            if actual != expected:
                raise CorruptChunkError(expected.hex(), task.key, f"its bytes hash to {actual.hex()}")


def _check_sizes(places: Places, wanted: _Wanted) -> None:
    sizes = np.fromiter((len(out) for out in wanted.outs), dtype=np.int64, count=len(wanted.outs))
    raw_bytes = places.entries["raw_bytes"]
    is_raw = places.entries["codec"] == RAW.number
    wrong = np.flatnonzero((raw_bytes != sizes) | (is_raw & (places.entries["stored_bytes"] != sizes)))
    if len(wrong):
        at = int(wrong[0])
        raise CorruptChunkError(
            wanted.digests[at].tobytes().hex(),
            pack_key(places.packs[int(places.pack[at])]),
            f"its entry says {int(raw_bytes[at])} bytes, the manifest {int(sizes[at])}",
        )


def empty_array(spec: Spec) -> Array:
    """Allocate an array as the frameworks do, at a multiple of 64 bytes.

    Their kernels go by the address: from another one, a model would predict other last digits.
    """
    if spec.n_bytes == 0:
        return np.empty(spec.shape, dtype=spec.numpy_dtype)
    block = np.empty(spec.n_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + spec.n_bytes].view(spec.numpy_dtype).reshape(spec.shape)
