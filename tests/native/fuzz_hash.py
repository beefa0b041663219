"""Hostile arguments for digests (``hash.c``)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
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


def fuzz_check_stored(core: ModuleType, rng: np.random.Generator) -> None:
    use_some_kernel(core, rng)
    data = [bytes_of(rng, (0, 3_000, 2_500_000)[rng.integers(0, 3)]) for _ in range(2)]
    count = int(rng.integers(0, 60))
    file = np.sort(rng.integers(0, 2, count))
    ends = [np.sort(rng.integers(0, len(data[number]) + 1, 2)) for number in file]
    starts = np.array([end[0] for end in ends], dtype="u8")
    sizes = np.array([end[1] - end[0] for end in ends], dtype="u8")
    if rng.integers(0, 2):
        order = np.lexsort((starts, file))
        file, starts, sizes = file[order], starts[order], sizes[order]
    whole = [data[number][start : start + size] for number, start, size in zip(file, starts, sizes, strict=True)]
    expected = np.array([list(blake3.blake3(piece).digest()[:16]) for piece in whole], "u1").reshape(-1, 16)
    is_damaged = rng.integers(0, 9, count) == 0
    expected[is_damaged, rng.integers(0, 16)] ^= 1
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        for opened, written in ((one, data[0]), (other, data[1])):
            opened.write(written)
            opened.flush()
            if rng.integers(0, 2):
                with contextlib.suppress(OSError):  # not every file system can
                    fcntl.fcntl(opened, fcntl.F_SETFL, os.O_DIRECT)
        sources = np.array([one.fileno(), other.fileno()], "i4")[file]
        if rng.integers(0, 9) == 0 and count:
            starts[rng.integers(0, count)] = abs(number(rng, (0,)))
            sizes[rng.integers(0, count)] = abs(number(rng, (0, 1)))
            sources[rng.integers(0, count)] = -1
            core.check_stored(sources, starts, sizes, expected, np.zeros(count, bool), 2)
            return
        is_good = np.zeros(count + int(rng.integers(0, 20) == 0), bool)
        core.check_stored(sources, starts, sizes, expected, is_good, number(rng, (1, 2)))

    assert (is_good == ~is_damaged).all()


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
