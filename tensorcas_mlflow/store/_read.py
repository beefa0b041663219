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
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.readplan import Extent, plan_reads
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


def read_rows(
    backend: Backend, catalog: Catalog, rows: Sequence[Row], chunk_bytes: int, *, verify: bool
) -> list[Array]:
    """Read whole rows into new arrays.

    Returns:
        One array a row, C-contiguous and writable; plain bytes as 1-d uint8.

    Raises:
        ChunkNotFoundError: No pack of this store holds a chunk.
        CorruptChunkError: A chunk is damaged. Without ``verify`` only damage that keeps it from being decoded is seen.
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
    read_chunks(backend, catalog, joined, outs, verify=verify)
    return arrays


def iter_chunks(backend: Backend, catalog: Catalog, manifest: Manifest, *, verify: bool) -> Iterator[memoryview]:
    """Yield the bytes of all rows, one after the other, some 16 MiB at a time; raises as `read_rows` does."""
    sizes = chunk_sizes([row.ends(manifest.chunk_bytes) for row in manifest.rows])
    stops = sizes.cumsum()
    begin = 0
    while begin < len(sizes):
        base = int(stops[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(stops, base + _FILE_BATCH_BYTES, side="right")))
        block = memoryview(bytearray(int(stops[end - 1]) - base))
        outs = pieces_of(block, stops[begin:end] - base)
        read_chunks(backend, catalog, manifest.digests[begin:end], outs, verify=verify)
        yield block
        begin = end


def empty_array(spec: Spec) -> Array:
    """Allocate an array as the frameworks do, at a multiple of 64 bytes.

    Their kernels go by the address: from another one, a model would predict other last digits.
    """
    if spec.n_bytes == 0:
        return np.empty(spec.shape, dtype=spec.numpy_dtype)
    block = np.empty(spec.n_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + spec.n_bytes].view(spec.numpy_dtype).reshape(spec.shape)


def read_chunks(backend: Backend, catalog: Catalog, digests: Digests, outs: list[memoryview], *, verify: bool) -> None:
    """Read chunks, each into a buffer of its size; raises as `read_rows` does."""
    wanted = _Wanted(digests=digests, outs=outs)
    is_anew = False
    for attempt in range(_MAX_ATTEMPTS):
        places = _locate(catalog, digests)
        try:
            _read_at(backend, places, wanted, verify=verify)
            return
        except BlobNotFoundError:
            # A collector has moved what this reader was about to read; the copy is in the index.
            gone = {places.packs[n] for n in np.unique(places.pack) if backend.stat(pack_key(places.packs[n])) is None}
            if attempt == _MAX_ATTEMPTS - 1 or not gone:
                raise
            catalog.forget(gone)
            catalog.refresh()
        except CorruptChunkError:
            if is_anew:
                raise
            # Perhaps it is the index that is damaged: it carries no digest, a pack's table does.
            catalog.refresh_from_packs()
            is_anew = True


def _locate(catalog: Catalog, digests: Digests) -> Places:
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


def _read_at(backend: Backend, places: Places, wanted: _Wanted, *, verify: bool) -> None:
    entries = places.entries
    sizes = np.fromiter((len(out) for out in wanted.outs), dtype=np.int64, count=len(wanted.outs))
    wrong = np.flatnonzero(entries["raw_bytes"] != sizes)
    if len(wrong):
        at = int(wrong[0])
        raise CorruptChunkError(
            wanted.digests[at].tobytes().hex(),
            pack_key(places.packs[int(places.pack[at])]),
            f"its entry says {int(entries['raw_bytes'][at])} bytes, the manifest {int(sizes[at])}",
        )

    def read(extent: Extent) -> None:
        key = pack_key(places.packs[extent.pack])
        members = entries[extent.members]
        offsets, lengths = members["offset"].tolist(), members["stored_bytes"].tolist()
        numbers = members["codec"].tolist()
        if len(numbers) == 1 and numbers[0] == RAW.number and lengths[0] == len(wanted.outs[extent.members[0]]):
            # Raw and alone: from the storage straight into place.
            _read_range(backend, key, extent.start, wanted.outs[extent.members[0]])
            _check(wanted, int(extent.members[0]), key, verify=verify)
            return
        block = np.empty(extent.stop - extent.start, dtype=np.uint8).data
        _read_range(backend, key, extent.start, block)
        for at, offset, length, number in zip(extent.members.tolist(), offsets, lengths, numbers, strict=True):
            begin = offset - extent.start
            try:
                codec_numbered(number).decode_into(block[begin : begin + length], wanted.outs[at])
            except FormatError as error:
                raise CorruptChunkError(wanted.digests[at].tobytes().hex(), key, str(error)) from error
            _check(wanted, at, key, verify=verify)

    if (entries["codec"] != RAW.number).any():
        load_codecs()
    extents = list(plan_reads(places.pack, entries["offset"], entries["stored_bytes"]))
    if len(extents) == 1:
        read(extents[0])
    else:
        threads.run_all(read, extents, waits=backend.is_remote)


def _read_range(backend: Backend, key: str, start: int, out: memoryview) -> None:
    try:
        backend.read_into(key, start, out)
    except CorruptError as error:
        raise CorruptChunkError("(several)", key, error.reason) from error


def _check(wanted: _Wanted, at: int, key: str, *, verify: bool) -> None:
    if verify:
        expected: Any = wanted.digests[at].tobytes()
        actual = digest(wanted.outs[at])
        if actual != expected:
            raise CorruptChunkError(expected.hex(), key, f"its bytes hash to {actual.hex()}")
