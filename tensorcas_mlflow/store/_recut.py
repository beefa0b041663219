"""Search for tables that rows were inserted in or dropped from, and sources that cut them as their earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, digest_all
from tensorcas_mlflow.base.tensors import Offsets, chunk_ends, pieces_of, ranges
from tensorcas_mlflow.chunk_io import ChunkReader
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout.manifests import Columns, Manifest, Row, Rows
from tensorcas_mlflow.layout.packs import Mask
from tensorcas_mlflow.store._base_plans import BasePlan
from tensorcas_mlflow.store._choose import MAX_SAVED_DEPTH, is_float, sample_number
from tensorcas_mlflow.store._shifts import (
    LEAST_TABLE_BYTES,
    Run,
    find_runs,
    find_split,
    has_rows_of,
    pieces_of_runs,
    row_hashes,
    row_heads,
)
from tensorcas_mlflow.store._sources import Moves, ReadRows, Source

_LEAST_SHARE = 1 / 200
"""Share of a table that new cuts have to save."""
_SAMPLED_BYTES = 16 << 20
"""One such table is looked at for so many new bytes: the look reads a chunk."""
_LEAST_READ_BYTES = 512 << 10
"""Size of a table from which on a look reads a chunk that no plan has."""
_MOST_SAMPLED = 8
_NEW_SHARE = 0.5
"""Share of its bytes that are new in such a table; rows that repeat, or that move by a whole chunk, are not."""
_FOUND_SHARE = 0.5
"""If fewer of its rows are found as they were, all of them may have changed a little."""
_N_CANDIDATES = 4
_READ_BYTES = 16 << 20
"""Bytes of an earlier version held at a time."""


class Recut(Source):
    """A source with other cuts in some of its rows."""

    def __init__(self, source: Source, chunk_bytes: int, rows: Mapping[int, tuple[Any, Moves]]) -> None:
        """Cut and hash these rows.

        Args:
            source: The source.
            chunk_bytes: The store's chunk size.
            rows: The cuts of each, in bytes, and the earlier chunks, by its number.
        """
        self.is_live, self.first_row, self.known_words = source.is_live, source.first_row, source.known_words
        self.inputs, self.derived = source.inputs, source.derived
        self.moves = {number: moves for number, (_, moves) in rows.items()}
        self._source = source
        self._whole = {number: source.whole(number) for number in rows}
        before = source.columns
        n_bytes = before.n_bytes
        self._ends = {number: chunk_ends(int(n_bytes[number]), chunk_bytes, cuts) for number, (cuts, _) in rows.items()}
        cut: list[Row] = [before.row(number) for number in range(len(before))]
        for number, (cuts, _) in rows.items():
            digests = digest_all(pieces_of(self._whole[number], self._ends[number]))
            cut[number] = Row(spec=cut[number].spec, cuts=cuts, digests=digests)
        self.rows = Rows(Columns.of_rows(cut))
        self.carried = source.carried | {cut[number].spec.name for number in rows}
        self.sizes = self.columns.chunk_sizes(chunk_bytes)
        # The number that each chunk has in the source; -1 for those cut anew.
        counts = np.diff(self.columns.chunk_at)
        self._number = ranges(before.chunk_at[:-1], counts)
        self._number[self.columns.chunks_of(np.array(sorted(rows)))] = -1

    @property
    def itemsizes(self) -> Any:
        return self._source.itemsizes

    def holds(self, chunks: Any) -> Mask:
        numbers = self._number[chunks]
        is_here: Mask = numbers < 0
        is_here[~is_here] = self._source.holds(numbers[~is_here])
        return is_here

    def whole(self, row: int) -> memoryview:
        return self._whole[row] if row in self._whole else self._source.whole(row)

    def _keeps(self, rows: Any) -> bool:
        return self._source._keeps(rows) and not self._whole.keys() & set(rows.tolist())

    def _reader(self) -> ReadRows:
        read = self._source._reader()

        def data_of(chunks: Any, rows: Any) -> list[Any]:
            numbers = self._number[chunks]
            is_kept = numbers >= 0
            kept = iter(read(numbers[is_kept], rows[is_kept]) if is_kept.any() else ())
            first = self.columns.chunk_at
            pieces: list[Any] = []
            for chunk, row, is_same in zip(chunks.tolist(), rows.tolist(), is_kept.tolist(), strict=True):
                if is_same:
                    pieces.append(next(kept))
                    continue
                ends, at = self._ends[row], chunk - int(first[row])
                pieces.append(self._whole[row][int(ends[at - 1]) if at else 0 : int(ends[at])])
            return pieces

        return data_of


def recut(
    source: Source,
    new: Any,
    reader: ChunkReader,
    chunk_bytes: int,
    candidates: Sequence[Manifest],
    plan: BasePlan | None,
    least_bytes: int,
) -> Recut | None:
    """Find the tables of a save with new chunks, whose rows an earlier checkpoint has at other places.

    Args:
        source: The rows of the save, and their bytes.
        new: Numbers of its new chunks, ascending.
        reader: The store's.
        chunk_bytes: The store's chunk size.
        candidates: Earlier checkpoints and files, the likeliest first.
        plan: The possible bases of the new chunks; a table with a base that it resembles did not shift.
        least_bytes: Least size of a table of the shape that it had.

    Returns:
        The source with other cuts; None if there is no such table.
    """
    columns = source.columns
    of_new = columns.rows_of(new)
    n_new = np.bincount(of_new, weights=source.sizes[new], minlength=len(columns))
    is_wanted = columns.is_tensor & (n_new >= np.maximum(LEAST_TABLE_BYTES, _LEAST_SHARE * columns.n_bytes))
    has_base = np.zeros(len(columns), dtype=bool)
    if plan is not None:
        has_base[of_new[plan.has(new)]] = True
    is_wanted &= ~has_base | (columns.n_bytes >= least_bytes)
    known = _known(candidates, chunk_bytes)
    found: dict[int, tuple[Any, Moves]] = {}
    n_looks = min(1 + int(n_new.sum()) // _SAMPLED_BYTES, _MOST_SAMPLED)
    sampled: dict[int, bool] = {}
    """Whether the tables of a first dimension have shifted."""
    rows = np.flatnonzero(is_wanted)
    for number in rows[np.argsort(-columns.n_bytes[rows], kind="stable")].tolist():
        # A base has the shape of its table. Most tables of a training have one, so only some are looked at.
        shape = columns.shape(number)
        if not shape or (has_base[number] and not sampled.get(shape[0], len(sampled) < n_looks)):
            continue
        with_name = [
            (manifest, at) for manifest, rows_of in known if (at := rows_of.get(columns.name(number))) is not None
        ]
        if not with_name:
            continue
        row = columns.row(number)
        if row.cuts is not None and row.spec.name not in source.carried:
            continue
        versions = _versions(row, with_name)
        if not versions or not source.holds(columns.chunks_of(np.array([number]))).all():
            continue
        data, before = source.whole(number), versions[0]
        if before.spec.shape == row.spec.shape and np.array_equal(before.ends(chunk_bytes), row.ends(chunk_bytes)):
            side = row.spec.shape[0]
            if side not in sampled:
                if row.spec.n_bytes < least_bytes or len(sampled) >= n_looks:
                    continue
                mine = new[slice(*new.searchsorted(columns.chunk_at[number : number + 2]).tolist())]
                is_new = n_new[number] >= _NEW_SHARE * row.spec.n_bytes
                sampled[side] = bool(is_new) and _has_shifted(source, number, mine, plan, before, reader)
            if not sampled[side]:
                continue
        cut = _first_cut(row, versions, data, reader, chunk_bytes, int(n_new[number]))
        if cut is not None:
            found[number] = cut
    return Recut(source, chunk_bytes, found) if found else None


def _first_cut(
    row: Row, versions: Sequence[Row], data: Any, reader: ChunkReader, chunk_bytes: int, n_new: int
) -> tuple[Any, Moves] | None:
    """Cut a table like the first of its versions that it shares rows with."""
    for before in versions:
        try:
            if before is not versions[0] and not _is_version(before, data, reader, chunk_bytes):
                continue
            cut = _cut_like(row, before, data, reader, chunk_bytes, n_new)
        except (NotFoundError, FormatError, BackendError):
            continue  # it was deleted meanwhile, or is damaged
        if cut is not None:
            return cut
    return None


def _known(candidates: Sequence[Manifest], chunk_bytes: int) -> list[tuple[Manifest, Mapping[str, int]]]:
    """Return the first of some manifests with the numbers of their rows by name."""
    known: list[tuple[Manifest, Mapping[str, int]]] = []
    for manifest in candidates[:_N_CANDIDATES]:
        with suppress(FormatError):  # two of its many rows may have one name
            if manifest.chunk_bytes == chunk_bytes:
                known.append((manifest, manifest.by_name.numbers))
    return known


def _versions(row: Row, with_name: Sequence[tuple[Manifest, int]]) -> list[Row]:
    """Return earlier versions of a table among rows of its name: of its dtype, and its dimensions but for the first."""
    found: dict[bytes, Row] = {}
    for manifest, at in with_name:
        before = manifest.columns.row(at)
        is_same = (before.spec.dtype, before.spec.shape[1:]) == (row.spec.dtype, row.spec.shape[1:])
        if is_same and before.spec.shape and before.spec.n_bytes:
            found.setdefault(before.digests.tobytes(), before)
    return list(found.values())


def _is_version(before: Row, data: memoryview, reader: ChunkReader, chunk_bytes: int) -> bool:
    """Tell whether a table has rows of the middle of another one; read one chunk of that."""
    ends = before.ends(chunk_bytes)
    at = _middle(np.diff(ends, prepend=0))
    start = int(ends[at - 1]) if at else 0
    chunk = memoryview(bytearray(int(ends[at]) - start))
    reader.read(before.digests[at : at + 1], [chunk], verify=True)
    return has_rows_of(data, chunk, start, before.spec.n_bytes // before.spec.shape[0], elsewhere=False)


def _middle(sizes: Any) -> int:
    """Return the number of the middle one of the longest chunks: earlier shifts leave short ones between them."""
    longest = np.flatnonzero(sizes == sizes.max())
    return int(longest[sample_number(len(longest))])


def _has_shifted(
    source: Source, number: int, mine: Any, plan: BasePlan | None, before: Row, reader: ChunkReader
) -> bool:
    """Tell whether a table has rows of the chunk that was in the middle of it, and has them at another place."""
    based = mine[:0] if plan is None else mine[plan.has(mine)]
    of_middle = based if len(based) else mine
    chunk, first = int(of_middle[_middle(source.sizes[of_middle])]), int(source.columns.chunk_at[number])
    if plan is not None and len(based):
        behind = plan.behind(chunk, MAX_SAVED_DEPTH)
        data = behind[0].data if behind else b""
    elif before.spec.n_bytes < _LEAST_READ_BYTES:
        return False
    else:  # of a stranger by its sketches, which tell nothing of rows at other places
        data = memoryview(bytearray(int(source.sizes[chunk])))
        try:
            reader.read(before.digests[chunk - first : chunk - first + 1], [data], verify=True)
        except (NotFoundError, FormatError, BackendError):
            return False
    start = int(source.sizes[first:chunk].sum())
    row_bytes = source.columns.spec(number).n_bytes // source.columns.shape(number)[0]
    return has_rows_of(source.whole(number), data, start, row_bytes, elsewhere=True)


def _cut_like(
    row: Row, before: Row, data: memoryview, reader: ChunkReader, chunk_bytes: int, n_new: int
) -> tuple[Any, Moves] | None:
    """Cut a table where the chunks of its earlier version end.

    Args:
        row: The table.
        before: The earlier version.
        data: Bytes of the table.
        reader: The store's.
        chunk_bytes: The store's chunk size.
        n_new: Bytes of the table that the store lacks, as it is cut now.

    Returns:
        Its cuts, and the earlier chunks; None if other cuts save too little.

    Raises:
        NotFoundError: The earlier version is not stored any more.
        FormatError: It is damaged.
        BackendError: The storage failed.
    """
    row_bytes = row.spec.n_bytes // row.spec.shape[0]
    ends, mine = before.ends(chunk_bytes), row.ends(chunk_bytes)
    n = min(len(ends), len(mine))
    is_other = (ends[:n] != mine[:n]) | (before.digests[:n] != row.digests[:n]).any(axis=1)
    first = int(is_other.argmax()) if is_other.any() else n
    # The rows before the first other chunk did not move.
    start = int(ends[first - 1]) // row_bytes * row_bytes if first else 0
    runs = _runs_from(start, row, before, data, ends, reader)
    pieces = pieces_of_runs(runs, row.spec.n_bytes, ends, chunk_bytes)
    n_left = sum(piece.size for piece in pieces if piece.chunk < 0)
    if n_new - n_left < max(LEAST_TABLE_BYTES, _LEAST_SHARE * row.spec.n_bytes):
        return None
    cuts = np.cumsum([piece.size for piece in pieces])
    mine = chunk_ends(row.spec.n_bytes, chunk_bytes, cuts)
    of_piece = cuts.searchsorted(mine)
    chunk = np.array([piece.chunk for piece in pieces])[of_piece]
    has = chunk >= 0
    digests = np.zeros((len(mine), DIGEST_BYTES), dtype=np.uint8)
    digests[has] = before.digests[chunk[has]]
    sizes = np.where(has, np.diff(ends, prepend=0)[chunk], 0)
    offsets = np.array([piece.offset for piece in pieces])[of_piece]
    return cuts, Moves(digests=digests, sizes=sizes, offsets=offsets)


def _runs_from(start: int, row: Row, before: Row, data: memoryview, ends: Offsets, reader: ChunkReader) -> list[Run]:
    """Find the runs that a table shares with its earlier version; all bytes before ``start`` are equal."""
    row_bytes, skipped = row.spec.n_bytes // row.spec.shape[0], start * row.spec.shape[0] // row.spec.n_bytes
    n_new, n_old = row.spec.shape[0] - skipped, before.spec.shape[0] - skipped
    new = row_hashes([data[start:]], row_bytes, n_new)
    runs = find_runs(new, row_hashes(_stored_pieces(before, ends, reader, start), row_bytes, n_old), row_bytes)
    n_found = sum(run.stop - run.start for run in runs)
    is_number = before.spec.dtype is not None and is_float(before.spec.dtype.lstrip(">"))
    if 0 < n_old != n_new and is_number and n_found < _FOUND_SHARE * (row.spec.n_bytes - start):
        dtype = before.spec.numpy_dtype
        old = row_heads(_stored_pieces(before, ends, reader, start), row_bytes, dtype)
        runs = find_split(row_heads([data[start:]], row_bytes, dtype), old, row_bytes) or runs
    runs = [Run(run.start + start, run.stop + start, run.source + start) for run in runs]
    if start and runs and runs[0].start == runs[0].source == start:
        return [Run(0, runs[0].stop, 0), *runs[1:]]
    return [Run(0, start, 0), *runs] if start else runs


def _stored_pieces(row: Row, ends: Offsets, reader: ChunkReader, start: int) -> Iterator[Buffer]:
    """Read the bytes of a stored table from some place on, some at a time."""
    begins = np.append(0, ends[:-1])
    borders = [0, *(np.flatnonzero(np.diff(begins // _READ_BYTES)) + 1).tolist(), len(ends)]
    for first, stop in pairwise(borders):
        first = max(first, int(ends.searchsorted(start, side="right")))
        if first >= stop:
            continue
        begin = int(begins[first])
        block = memoryview(bytearray(int(ends[stop - 1]) - begin))
        reader.read(row.digests[first:stop], pieces_of(block, ends[first:stop] - begin), verify=True)
        yield block[max(0, start - begin) :]
