"""Runs of rows that two versions of a table share at different places, and the chunks that follow from them.

A table on the fixed grid shares no chunk with its earlier version behind a row that was inserted or dropped. So a save
that finds such a table looks for the rows of the earlier one, wherever they lie now, and cuts where the earlier chunks
end. A wrong guess costs bytes and no more: digests decide what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.base.tensors import Offsets

LEAST_TABLE_BYTES = 16 << 10
"""A smaller table is stored again as it is."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_WINDOW_BYTES = 64
"""Shorter rows are found by several neighbours together: one alone is often equal to another by chance."""
_ANCHOR_BYTES = 512
"""Of many short rows, about one in so many bytes is looked for; the rows between are compared at its distance."""
_LEAST_RUN_BYTES = 2048
"""A shorter run that moved by itself is stored again: its chunk would take as long to describe."""
_BLOCK_WORDS = 1 << 18
_N_HEAD = 4
_NEAR_SHARE = 0.5
"""Rows are near each other if they differ by less than so much of the difference from rows elsewhere."""
_COMPARED_BYTES = 256
_FEW = 8
_PIECES_OF_GRID = 4
"""Bound of the chunks of a table, for each chunk that it would have on the fixed grid: many shifts leave small ones."""
_FREE_PIECES = 16
_JOINED_SHARE = 512
"""Neighbours that together take at most one part in so many of the table become one chunk."""
_LEAST_JOINED_BYTES = 1024


class Run(NamedTuple):
    """Neighbouring rows of a table that are those of an earlier version, but for some changed values."""

    start: int
    """First byte in the table."""
    stop: int
    """One past the last byte."""
    source: int
    """First byte in the earlier version."""


class Piece(NamedTuple):
    """A chunk of a table, and the bytes of an earlier version that it is likely to have."""

    size: int
    """Its size. New bytes may take more than a chunk."""
    chunk: int
    """Number of the earlier chunk; -1 for new bytes."""
    offset: int
    """Place of the bytes in that chunk."""


def row_hashes(pieces: Iterable[Buffer], row_bytes: int, n_rows: int) -> Any:
    """Return a hash of each row of a table.

    Args:
        pieces: The bytes of the table; a row may begin in one piece and end in another.
        row_bytes: Size of a row.
        n_rows: Number of the rows.
    """
    hashes = np.empty(n_rows, dtype=np.uint64)
    width = next(width for width in (4, 2, 1) if row_bytes % width == 0)
    n_words = row_bytes // width
    factors = np.random.default_rng(0).integers(1, 2**63, n_words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    step = max(1, _BLOCK_WORDS // n_words)
    at = 0
    for rows in _whole_rows(pieces, row_bytes):
        words = rows.view(f"<u{width}")
        for begin in range(0, len(words), step):
            block = words[begin : begin + step]
            hashes[at : at + len(block)] = _dot(block, factors)
            at += len(block)
    return _mixed(hashes)


def row_heads(pieces: Iterable[Buffer], row_bytes: int, dtype: Any) -> Any:
    """Return the first numbers of each row of a table, in double precision; see `row_hashes`."""
    if dtype.kind == "c":
        dtype = np.dtype(f"{dtype.byteorder}f{dtype.itemsize // 2}")
    n_bytes = min(row_bytes, _N_HEAD * dtype.itemsize)
    heads = [np.ascontiguousarray(rows[:, :n_bytes]) for rows in _whole_rows(pieces, row_bytes)]
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.concatenate(heads).view(dtype).astype(np.float64))


def _whole_rows(pieces: Iterable[Buffer], row_bytes: int) -> Iterator[Any]:
    """Yield the rows of a table, some at a time: their bytes, a line each."""
    rest = b""
    for piece in pieces:
        data = memoryview(piece).cast("B")
        if rest:
            missing = row_bytes - len(rest)
            rest, data = rest + data[:missing].tobytes(), data[missing:]
            if len(rest) < row_bytes:
                continue
            yield np.frombuffer(rest, np.uint8).reshape(1, row_bytes)
        n_whole = len(data) // row_bytes
        if n_whole:
            yield np.frombuffer(data, np.uint8, n_whole * row_bytes).reshape(n_whole, row_bytes)
        rest = data[n_whole * row_bytes :].tobytes()


def _dot(rows: Any, factors: Any) -> Any:
    return rows[:, 0] * factors[0] if len(factors) == 1 else rows.astype(np.uint64) @ factors


def _mixed(hashes: Any) -> Any:
    hashes = (hashes ^ hashes >> np.uint64(31)) * _MIX
    return hashes ^ hashes >> np.uint64(29)


def find_runs(new: Any, old: Any, row_bytes: int) -> list[Run]:
    """Find the runs of rows that a table shares with an earlier version.

    Args:
        new: Hashes of its rows.
        old: Those of the earlier version.
        row_bytes: Size of a row.

    Returns:
        The runs, ascending, without overlaps.
    """
    width = 1
    while width * row_bytes < _WINDOW_BYTES and width < min(len(new), len(old)) // 2:
        width *= 2
    every = np.uint64(max(1, _ANCHOR_BYTES // row_bytes))
    here, there = (_single(_windows(hashes, width), every) for hashes in (new, old))
    _, at, behind = np.intersect1d(here[0], there[0], assume_unique=True, return_indices=True)
    place, source = here[1][at], there[1][behind]
    order = place.argsort()
    place, source = place[order], source[order]
    least = max(1, _LEAST_RUN_BYTES // row_bytes)
    begins, ends = _stretches(place, source)
    is_long = place[ends] - place[begins] + width >= min(least, len(new) // 2)
    kept = np.repeat(is_long, ends - begins + 1)
    place, source = place[kept], source[kept]
    begins, ends = _stretches(place, source)
    runs: list[Run] = []
    firsts, lasts, distances = place[begins].tolist(), (place[ends] + width).tolist(), (place - source)[begins].tolist()
    stop = 0
    for number, (first, last, distance) in enumerate(zip(firsts, lasts, distances, strict=True)):
        # Rows between two runs belong to the first one as far as they are equal to its next rows, then to the second.
        first = max(first, stop)
        first -= _n_equal(new[stop:first][::-1], old[max(0, stop - distance) : max(0, first - distance)][::-1])
        until = firsts[number + 1] if number + 1 < len(firsts) else len(new)
        last = min(last, until)
        last += _n_equal(new[last:until], old[last - distance : max(0, until - distance)])
        if last > first:
            runs.append(Run(first * row_bytes, last * row_bytes, (first - distance) * row_bytes))
            stop = last
    return runs


def _windows(hashes: Any, width: int) -> Any:
    """Return a hash of each row and its successors, so many rows in all."""
    size = 1
    while size < width:
        hashes = _mixed(hashes[:-size] * _MIX + hashes[size:])
        size *= 2
    return hashes


def _single(hashes: Any, every: Any) -> tuple[Any, Any]:
    """Return the hashes that occur once, or some of them by their values, and their places."""
    at = np.flatnonzero(hashes % every == 0) if every > 1 else np.arange(len(hashes))
    order = at[hashes[at].argsort(kind="stable")]
    ordered = hashes[order]
    is_other = np.ones(len(ordered) + 1, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_other[1:-1])
    is_single = is_other[1:] & is_other[:-1]
    return ordered[is_single], order[is_single]


def _stretches(place: Any, source: Any) -> tuple[Any, Any]:
    """Return the numbers of the first and the last of neighbouring anchors that moved by the same distance."""
    if not len(place):
        return place, place
    borders = np.flatnonzero(np.diff(place - source)) + 1
    return np.append(0, borders), np.append(borders, len(place)) - 1


def _n_equal(one: Any, other: Any) -> int:
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


def find_split(new: Any, old: Any, row_bytes: int) -> list[Run]:
    """Find the one place where rows were inserted or dropped while all others changed a little.

    Args:
        new: The first numbers of the rows of a table, as `row_heads` returns them.
        old: Those of an earlier version with more rows or fewer.
        row_bytes: Size of a row.

    Returns:
        The runs before and behind the place; none if the rows are not near each other.
    """
    more = len(new) - len(old)
    n = min(len(new), len(old))
    added, dropped = max(more, 0), max(-more, 0)
    before, behind = _distance(new[:n], old[:n]), _distance(new[added:], old[dropped:])
    with np.errstate(all="ignore"):
        costs = np.append(0, before.cumsum()) + np.append(0, behind[::-1].cumsum())[::-1]
        at = int(costs.argmin())
        if not costs[at] < _NEAR_SHARE * _distance(new[:n], np.roll(old[:n], n // 3, axis=0)).sum():
            return []
    runs = [Run(0, at, 0), Run(at + added, len(new), at + dropped)]
    return [Run(*(number * row_bytes for number in run)) for run in runs if run.stop > run.start]


def _distance(one: Any, other: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.abs(one - other).sum(axis=1))


def has_rows_of(data: Buffer, chunk: Buffer, start: int, row_bytes: int, *, elsewhere: bool) -> bool:
    """Tell whether a table has rows of an earlier version; look for a few of them.

    Args:
        data: The bytes of the table.
        chunk: Some bytes of the earlier version.
        start: Their place in it.
        row_bytes: Size of a row.
        elsewhere: Whether a row at its earlier place does not count.
    """
    old, new = np.frombuffer(chunk, np.uint8), np.frombuffer(data, np.uint8)
    width = next(width for width in (8, 4, 2, 1) if row_bytes % width == 0)
    words, stride = new[: len(new) // width * width].view(f"<u{width}"), row_bytes // width
    n_bytes = min(max(row_bytes, _WINDOW_BYTES), _COMPARED_BYTES) // width * width
    for quarter in (1, 2, 3):
        row = -(-(start + quarter * len(old) // 4) // row_bytes)
        key = old[row * row_bytes - start :][:n_bytes]
        if len(key) < n_bytes or (elsewhere and np.array_equal(new[row * row_bytes :][:n_bytes], key)):
            continue
        wanted = key.view(f"<u{width}")
        places = np.flatnonzero(words[::stride] == wanted[0]) * stride
        places = places[places + len(wanted) <= len(words)]
        for number in range(1, len(wanted)):
            if len(places) <= _FEW:
                break
            places = places[words[places + number] == wanted[number]]
        if any(np.array_equal(words[at : at + len(wanted)], wanted) for at in places[:_FEW].tolist()):
            return True
    return False


def pieces_of_runs(runs: Sequence[Run], n_bytes: int, ends: Offsets, chunk_bytes: int) -> list[Piece]:
    """Cut a table where the chunks of its earlier version end.

    Args:
        runs: The rows that both share.
        n_bytes: Size of the table.
        ends: The ends of the earlier chunks.
        chunk_bytes: The store's chunk size.
    """
    most = _PIECES_OF_GRID * (n_bytes // chunk_bytes) + _FREE_PIECES
    if len(runs) > most:
        return [Piece(n_bytes, -1, 0)]
    pieces = _joined([*_cut(runs, n_bytes, ends)], chunk_bytes, max(_LEAST_JOINED_BYTES, n_bytes // _JOINED_SHARE))
    sizes = np.array([piece.size for piece in pieces])
    while len(pieces) > most:
        both = sizes[1:] + sizes[:-1]
        at = int(both.argmin())
        pieces[at : at + 2] = [Piece(int(both[at]), -1, 0)]
        sizes[at] = both[at]
        sizes = np.delete(sizes, at + 1)
    return pieces


def _cut(runs: Iterable[Run], n_bytes: int, ends: Offsets) -> Iterator[Piece]:
    stop = 0
    for run in runs:
        if run.start > stop:
            yield Piece(run.start - stop, -1, 0)
        last = run.source + run.stop - run.start
        first_chunk, last_chunk = np.searchsorted(ends, [run.source + 1, last]).tolist()
        at = run.source
        for chunk in range(first_chunk, last_chunk + 1):
            end = min(int(ends[chunk]), last)
            yield Piece(end - at, chunk, at - (int(ends[chunk - 1]) if chunk else 0))
            at = end
        stop = run.stop
    if n_bytes > stop:
        yield Piece(n_bytes - stop, -1, 0)


def _joined(pieces: list[Piece], chunk_bytes: int, most: int) -> list[Piece]:
    """Join small neighbours."""
    out: list[Piece] = []
    for piece in pieces:
        if out and out[-1].size + piece.size <= min(most, chunk_bytes):
            before = out[-1]
            follows = before.chunk == piece.chunk >= 0 and before.offset + before.size == piece.offset
            out[-1] = Piece(before.size + piece.size, *((before.chunk, before.offset) if follows else (-1, 0)))
        else:
            out.append(piece)
    return out
