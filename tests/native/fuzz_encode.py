"""Hostile arguments for the encoder (``encode_methods.c``). Every payload it makes must decode to its chunk."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import blake3
import numpy as np

from tensorcas_mlflow.chunk_io._decode import CHUNK, FILE, LINK, PART, READ
from tensorcas_mlflow.codecs import DELTA, PLANES, Transform, codec_numbered
from tensorcas_mlflow.layout.packs import ENTRY
from tensorcas_mlflow.store._base_plans import NAMED
from tensorcas_mlflow.store._encode import _ENCODING
from tests.native.fuzz import bytes_of, number

WIDTHS = (1, 2, 4, 8)
ITEMSIZES = (1, 2, 3, 4, 7, 8, 12, 73, 255, 256, 300, 65_535, 70_000)
SIZES = (0, 1, 31, 32, 600, 4_096, 9_000, 40_000, 300_000)


def chunk(rng: np.random.Generator) -> bytes:
    """Return bytes of some kind: numbers, noise, zeros, or what repeats."""
    n_bytes = int(rng.integers(0, SIZES[rng.integers(0, len(SIZES))] + 1))
    kind = rng.integers(0, 5)
    if kind == 0:
        return rng.bytes(n_bytes)
    if kind == 1:
        return bytes(n_bytes)
    if kind == 2:
        return (b"the quick brown fox jumps " * (n_bytes // 26 + 1))[:n_bytes]
    numbers = rng.standard_normal(n_bytes // 4 + 1, dtype=np.float32)
    return (numbers if kind == 3 else numbers.view("u4") >> 16).tobytes()[:n_bytes]


def near(rng: np.random.Generator, raw: bytes) -> bytes:
    """Return as many bytes, most of them alike; sometimes more or fewer."""
    data = np.frombuffer(raw, np.uint8).copy()
    kind = rng.integers(0, 12)
    if kind == 0:
        return bytes_of(rng, len(raw) + 9)
    words = data[: len(data) // 4 * 4].view("<u4")
    words += rng.integers(0, 1 << rng.integers(1, 20), len(words)).astype("<u4") * np.uint32(rng.integers(1, 4))
    if kind == 1:
        words[:] = np.frombuffer(raw, np.uint8)[: 4 * len(words)].view("<u4") + (words >> 8 & 0x7FFF | 0x8000) // 3_000
    return data.tobytes()


def codings(rng: np.random.Generator, width: int) -> bytes | None:
    if rng.integers(0, 3) == 0:
        return None
    n = width if width in WIDTHS and rng.integers(0, 12) else int(rng.integers(0, 10))
    return bytes(rng.integers(0, 3 if rng.integers(0, 9) else 256, n).tolist())


def decoded(number_of_codec: int, payload: Any, n_bytes: int, base: Any = None) -> bytes:
    if n_bytes == 0:
        return b""  # no chunk is empty
    out = bytearray(n_bytes)
    codec_numbered(number_of_codec).decode_into(payload, memoryview(out), base)
    return bytes(out)


def fuzz_encode_best(core: ModuleType, rng: np.random.Generator) -> None:
    raw = chunk(rng)
    codec, typesize, payload = core.encode_best(raw, number(rng, ITEMSIZES))

    assert 1 <= typesize <= 255
    assert payload is None or decoded(codec, payload, len(raw)) == raw


def fuzz_encode_planes(core: ModuleType, rng: np.random.Generator) -> None:
    raw, itemsize = chunk(rng), number(rng, ITEMSIZES)
    payload = core.encode_planes(raw, itemsize, codings(rng, itemsize), int(rng.integers(0, 4)))

    assert decoded(PLANES.number, payload, len(raw)) == raw


def fuzz_encode_delta(core: ModuleType, rng: np.random.Generator) -> None:
    raw, itemsize = chunk(rng), number(rng, WIDTHS)
    base = near(rng, raw)
    transform, unit = number(rng, tuple(Transform)), number(rng, (1, 2, 4))
    payload = core.encode_delta(raw, itemsize, base, transform, unit, codings(rng, itemsize), int(rng.integers(1, 3)))

    assert decoded(DELTA.number, payload, len(raw), base) == raw


def fuzz_choices(core: ModuleType, rng: np.random.Generator) -> None:
    raw, width = chunk(rng), number(rng, WIDTHS)
    base = near(rng, raw)
    of_planes = core.choose_codings(raw, width, base if rng.integers(0, 2) else None)

    assert len(of_planes) == width
    assert 0 <= core.estimate_share(raw, width, base) <= 1
    transform, unit = core.choose_transform(raw, width, base, of_planes, bool(rng.integers(0, 2)))
    assert transform in tuple(Transform)
    assert unit in (1, 2, 4)


def fuzz_compress(core: ModuleType, rng: np.random.Generator) -> None:
    raw = chunk(rng)

    assert decoded(1, core.compress(raw, number(rng, (0, 1, 3, 9, 12))), len(raw)) == raw


def fuzz_encode_records(core: ModuleType, rng: np.random.Generator) -> None:
    raw = chunk(rng)

    payload = core.encode_records(raw, number(rng, (1, 3, 12, 255, 256, 65_535)))
    assert decoded(2, payload, len(raw)) == raw


def encodings(rng: np.random.Generator) -> Any:
    """Return encodings, most of them possible."""
    rows = np.zeros(int(rng.integers(1, 4)), dtype=_ENCODING)
    for row in rows:
        width = number(rng, WIDTHS)
        row["plain_share"] = rng.uniform(0, 1.5)
        row["itemsize"] = width & 0xFFFFFFFF
        row["effort"] = rng.integers(1, 3)
        row["has_codings"], row["has_delta"], row["has_delta_codings"] = rng.integers(0, 2, 3)
        row["transform"] = number(rng, (0, 1, 2, 3)) & 255
        row["unit"] = number(rng, (1, 8 // width if width in (2, 4) else 1)) & 255
        row["codings"], row["delta_codings"] = (bytes(rng.integers(0, 3, 8).tolist()) for _ in range(2))
    return rows


def named_bases(bases: Any) -> Any:
    """Return names for bases, right ones."""
    named = np.zeros(len(bases), NAMED)
    for row, base in zip(named, bases, strict=True):
        row["digest"] = np.frombuffer(blake3.blake3(base or b"").digest(), np.uint8)
    return named


def stored_bases(core: ModuleType, rng: np.random.Generator, bases: Any) -> tuple[Any, ...]:
    """Return tables of bases in one file without a name, most of them right; keep its descriptor as the last value."""
    payloads = [core.encode_planes(base or b"", 4, None, 1) for base in bases]
    descriptor = os.memfd_create("bases")
    os.write(descriptor, b"".join(payloads)[: None if rng.integers(0, 9) else 7])
    n, sizes = len(bases), np.array([len(each) for each in payloads], np.int64)
    reads, links, chunks, parts = (np.zeros(n, dtype) for dtype in (READ, LINK, CHUNK, PART))
    reads["start"], reads["n_bytes"], reads["source"], reads["kind"] = sizes.cumsum() - sizes, sizes, descriptor, FILE
    links["n_stored"], links["read"], links["codec"] = sizes, np.arange(n), PLANES.number
    links["n_bytes"] = chunks["n_bytes"] = [len(base or b"") for base in bases]
    chunks["first_link"], chunks["n_links"], chunks["digest"] = np.arange(n), 1, named_bases(bases)["digest"]
    for name in ("read", "chunk"):
        parts[f"first_{name}"], parts[f"last_{name}"] = np.arange(n), np.arange(n) + 1
    numbers = np.array([-1 if base is None else at for at, base in enumerate(bases)], np.int32)
    tables = [reads, links, chunks, parts]
    if n and rng.integers(0, 3) == 0:
        table = tables[rng.integers(0, 4)]
        field = table[rng.choice([name for name in table.dtype.names if name not in ("digest", "source")])]
        field[rng.integers(0, n)] = number(rng, (0, 1, 2, 4, 64, 257)) & int(np.iinfo(field.dtype).max)
    if n and rng.integers(0, 9) == 0:
        numbers[rng.integers(0, n)] = number(rng, (0, 1, n)) & 0x7FFFFFFF
    return *tables, numbers, descriptor


def fuzz_encode_group(core: ModuleType, rng: np.random.Generator) -> None:
    data = [chunk(rng) for _ in range(rng.integers(0, 50 if rng.integers(0, 4) == 0 else 5))]
    n = len(data)
    bases: Any = [near(rng, raw) if rng.integers(0, 2) else None for raw in data] if rng.integers(0, 4) else None
    rows = encodings(rng)
    digests = b"".join(blake3.blake3(raw).digest() for raw in data)
    if digests and rng.integers(0, 20) == 0:
        digests = bytes(32) + digests[32:]
    how = rng.integers(-2, len(rows), n).astype(np.int32)
    if n and rng.integers(0, 20) == 0:
        how[0] = number(rng, (0,)) & 0x7FFFFFFF
    entries = np.empty(n + int(rng.integers(0, 30) == 0), ENTRY)
    checks = bool(rng.integers(0, 2))
    named = named_bases(bases) if bases is not None and rng.integers(0, 3) else None
    if named is not None and n and rng.integers(0, 9) == 0:
        named["digest"][0, 0] ^= 1
    *tables, descriptor = stored_bases(core, rng, bases) if named is not None and rng.integers(0, 2) else (None, -1)
    try:
        _encode_group(core, rng, data, bases, digests, rows, how, entries, named, tables, checks=checks)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _encode_group(
    core: ModuleType,
    rng: np.random.Generator,
    data: Any,
    bases: Any,
    digests: bytes,
    rows: Any,
    how: Any,
    entries: Any,
    named: Any,
    tables: Any,
    *,
    checks: bool,
) -> None:
    n = len(data)
    changed, baseless, payloads, first, first_bytes = core.encode_group(
        data,
        None if tables[0] is not None else bases,
        rng.choice(ITEMSIZES, n).astype(np.uint32),
        how,
        rng.integers(0, 2, n).astype(bool),
        rng.integers(0, 2, n).astype(bool),
        digests,
        rows,
        checks,
        entries.view(np.uint8),
        named,
        None if tables[0] is None else tuple(tables),
    )

    if changed >= 0:
        assert checks
        return
    if baseless >= 0:
        assert named is not None
        return
    out = memoryview(payloads)
    assert 0 <= first_bytes <= len(out)
    for at, (entry, raw) in enumerate(zip(entries, data, strict=True)):
        begin = int(entry["offset"]) + (first_bytes if at >= first else 0)
        stored = out[begin : begin + int(entry["stored_bytes"])].tobytes()
        base = bases[at] if bases is not None and entry["codec"] == DELTA.number else None
        assert decoded(int(entry["codec"]), stored, len(raw), base) == raw
