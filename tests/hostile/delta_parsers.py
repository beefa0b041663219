"""Parsers of deltas and of records of bases: samples, a reader for each, and a way to make its digest fit again."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import BlobInfo, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io._places import find_places
from tensorcas_mlflow.codecs import DELTA, PLANES, RAW, ZSTD, Codec, Transform
from tensorcas_mlflow.layout.packs import (
    Base,
    PackWriter,
    Payload,
    base_rows,
    bases_of,
    is_delta,
    make_table,
    pack_key,
    read_segment,
    read_table,
    segment_bytes,
    with_bases,
)
from tensorcas_mlflow.maintenance import (
    census_bytes,
    inventory_of_manifests,
    inventory_of_packs,
    merge_inventories,
    read_census,
)
from tensorcas_mlflow.maintenance._chunks import check_chunks, shard_of
from tensorcas_mlflow.store.protocol import intent_bytes, parse_intent

N_WORDS = 1_001
GUARD = 64
NAME, OTHER = "a" * 32, "b" * 32


def words(seed: int) -> bytes:
    """Numbers like those of the next seed, and a tail."""
    start = np.random.default_rng(1).normal(0, 0.02, N_WORDS).astype(np.float32)
    moved = np.random.default_rng(seed).normal(0, 1e-5, N_WORDS).astype(np.float32)
    return (start + moved).tobytes() + b"end"


BASE, CHUNK, NEXT = words(1), words(2), words(3)


def deltas() -> list[bytes]:
    """Payloads of each transform, and of each inner codec."""
    made = [bytes(DELTA.encode_as(CHUNK, width, BASE, each)) for each in Transform for width in (1, 2, 4, 8)]
    few = BASE[:700] + CHUNK[700:800] + BASE[800:]
    of_few = (Transform.SPARSE, Transform.NUDGED)
    made += [bytes(DELTA.encode_as(few, width, BASE, each)) for each in of_few for width in (1, 2, 4, 8)]
    inner = [bytes([codec.number, 0x20]) + bytes(codec.encode(CHUNK, 4)) for codec in (RAW, ZSTD, PLANES)]
    return made + inner


def planes() -> list[bytes]:
    """Payloads of words of each size, and of all zeros."""
    return [PLANES.encode(raw, width) for raw in (CHUNK, bytes(len(CHUNK))) for width in (1, 2, 4, 8)]


def read_delta(data: bytes) -> None:
    """Decode a payload against the base it was made with, and against another one."""
    for base in (BASE, bytes(len(BASE)), NEXT):
        _decode(DELTA, data, base)


def read_planes(data: bytes) -> None:
    """Decode byte planes."""
    _decode(PLANES, data, None)


def _decode(codec: Codec, data: bytes, base: bytes | None) -> None:
    """Decode into the middle of a buffer; nothing may be written around it."""
    n_bytes = len(CHUNK)
    out = bytearray(b"\xa5" * (n_bytes + 2 * GUARD))
    before = b"" if base is None else bytes(base)
    try:
        codec.decode_into(data, memoryview(out)[GUARD : GUARD + n_bytes], base)
    finally:
        assert out[:GUARD] + out[-GUARD:] == b"\xa5" * 2 * GUARD, "written outside of the buffer"
        assert (base or b"") == before, "the base was written to"


@cache
def pack() -> bytes:
    """A pack with a chunk in full, a delta against it, one against that, and one against a chunk elsewhere."""
    steps: list[tuple[bytes, Base | None, bytes]] = [
        (BASE, None, b""),
        (CHUNK, Base(pack=NAME, digest=digest(BASE)), BASE),
        (NEXT, Base(pack=NAME, digest=digest(CHUNK), depth=1), CHUNK),
        (words(4), Base(pack=OTHER, digest=digest(BASE), depth=7), BASE),
    ]
    made = [
        Payload(
            digest=digest(raw),
            raw_bytes=len(raw),
            codec=RAW if base is None else DELTA,
            typesize=4,
            data=raw if base is None else DELTA.encode(raw, 4, base_raw),
            begins_row=False,
            base=base,
        )
        for raw, base, base_raw in steps
    ]
    return b"".join(bytes(piece) for piece in PackWriter().pieces(made))


def table_of(blob: bytes) -> Any:
    return read_table(pack_key(NAME), len(blob), lambda start, stop: blob[start:stop])


def read_pack(blob: bytes) -> None:
    """Read a pack's table, follow what it says of bases, and decode all of it."""
    entries = table_of(blob)
    table = make_table({NAME: entries})
    rows = base_rows(table)
    assert (rows[~is_delta(table.entries)] == -1).all()
    with_bases(table)
    inventory_of_packs({NAME: entries}, {NAME: len(blob)})
    for base in bases_of(entries[is_delta(entries)]):
        assert len(base.pack) == 32
    backend = MemoryBackend()
    backend.put_new(pack_key(NAME), [blob])
    small = np.flatnonzero(table.entries["raw_bytes"] <= 4 * len(CHUNK))[:50]
    check_chunks(backend, shard_of(table, small), decode=True)


def segment() -> bytes:
    return segment_bytes(make_table({NAME: table_of(pack()), OTHER: table_of(pack())[:2]}))


def read_a_segment(data: bytes) -> None:
    table = read_segment("index/x.segment", data)
    base_rows(table)
    wanted = np.ascontiguousarray(table.entries["digest"][:100])
    find_places([table], wanted, without=[OTHER])


def census() -> bytes:
    tables = {NAME: table_of(pack()), OTHER: table_of(pack())[:2]}
    manifests = inventory_of_manifests([("0" * 64, 100, np.ascontiguousarray(tables[NAME]["digest"]))])
    packs = inventory_of_packs(tables, dict.fromkeys(tables, len(pack())))
    return b"".join(census_bytes(merge_inventories([manifests, packs])))


def with_census_digest(blob: bytes) -> bytes:
    return blob[:32] + digest(blob[64:] + blob[:32]) + blob[64:]


def read_a_census(data: bytes) -> None:
    inventory = read_census("census/x", data)
    half = inventory.only(manifests=inventory.manifests[:1], packs=dict(list(inventory.sizes.items())[:1]))
    merged = merge_inventories([half, inventory])
    assert len(merged.entry_base) == len(merged.entry_chunk)
    read_census("census/y", b"".join(census_bytes(merged)))


def intent() -> bytes:
    digests = np.frombuffer(digest(BASE) + digest(CHUNK), np.uint8).reshape(-1, 32)
    return intent_bytes("0" * 64, digests, bases=[NAME, OTHER])


def read_an_intent(data: bytes) -> None:
    found = parse_intent(BlobInfo(key="intents/x", size=len(data), modified_s=0.0, token=""), data)
    for name in found.bases:
        MemoryBackend().stat(pack_key(name))
