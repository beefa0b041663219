"""Hostile arguments for digests (``hash.c``)."""

from __future__ import annotations

from types import ModuleType

import blake3
import numpy as np

from tests.native.fuzz import bytes_of, number


def use_some_kernel(core: ModuleType, rng: np.random.Generator) -> None:
    names = sorted(core.hash_kernels())
    core.use_hash_kernel(names[rng.integers(0, len(names))])


def fuzz_digest(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    data = memoryview(bytes_of(rng, 600_000))[int(rng.integers(0, 9)) :]

    assert core.digest(data) == blake3.blake3(data).digest()


def fuzz_hash_each(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    most = (0, 64, 1_025, 9_000, 300_000)[rng.integers(0, 5)]
    pieces = [bytes_of(rng, most) for _ in range(rng.integers(0, 40))]
    out = bytearray(32 * len(pieces) + int(rng.integers(0, 20) == 0))
    core.hash_each(pieces, out, number(rng, (1, 2, 3)))

    assert bytes(out) == b"".join(blake3.blake3(piece).digest() for piece in pieces)


def fuzz_hash_spans(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    data = bytes_of(rng, 9_000)
    ends = np.sort(rng.integers(-1 if rng.integers(0, 9) == 0 else 0, len(data) + 1, (rng.integers(0, 40), 2)), axis=1)
    if rng.integers(0, 9) == 0 and ends.size:
        ends.flat[rng.integers(0, ends.size)] = number(rng, (0,))
    starts, stops = (np.ascontiguousarray(column, dtype="i8") for column in ends.T)
    out = bytearray(32 * len(starts))
    core.hash_spans(data, starts, stops, out, number(rng, (1, 2)))

    pieces = [data[start:stop] for start, stop in ends]
    assert bytes(out) == b"".join(blake3.blake3(piece).digest() for piece in pieces)


def fuzz_copy_rows(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    most = (0, 64, 3_000, 300_000, 700_000)[rng.integers(0, 5)]
    rows, sizes, chunk_at = [], [], [0]
    for _ in range(rng.integers(0, 9)):
        row = bytes_of(rng, most)
        ends = np.unique(rng.integers(1, len(row) + 1, rng.integers(1, 6))) if row else np.empty(0, "i8")
        sizes += np.diff(ends, prepend=0, append=len(row)).tolist() if row else []
        chunk_at.append(len(sizes))
        rows.append(row)
    data = b"".join(rows)
    digests = [blake3.blake3(data[sum(sizes[:at]) : sum(sizes[: at + 1])]).digest() for at in range(len(sizes))]
    is_known = rng.integers(0, 2, len(sizes))
    known = b"".join(digest if same else bytes(32) for digest, same in zip(digests, is_known, strict=True))
    columns = [np.array(chunk_at, "i8"), np.array(sizes, "i8")]
    if rng.integers(0, 4) == 0:
        column = columns[rng.integers(0, 2)]
        column[rng.integers(0, len(column)) if len(column) else slice(0)] = number(rng, (0, 1))
    n_bytes = len(data) + int(rng.integers(0, 20) == 0)
    area, is_copied, out = bytearray(n_bytes), bytearray(len(sizes)), bytearray(32 * len(sizes))
    knows = bool(rng.integers(0, 2))
    core.copy_rows(rows, *columns, known if knows else None, area, is_copied, out, number(rng, (1, 2, 3)))

    if columns[1].tolist() == sizes:
        assert bytes(out) == b"".join(digests)
        begin = 0
        for size, copied, same in zip(sizes, is_copied, is_known, strict=True):
            assert copied == (not (knows and same))
            assert not copied or area[begin : begin + size] == data[begin : begin + size]
            begin += size
