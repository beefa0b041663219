"""Memory-mapped tensors: views of packs, without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import BlobFile, MappedStretch
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Digests, digest
from tensorcas_mlflow.base.tensors import ALIGNMENT, Offsets, distinct, ranges
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.chunk_io._plan import OpenFiles, dtypes_of
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.layout.manifests import Columns
from tensorcas_mlflow.layout.packs import pack_key

_NEAR_BYTES = 64 << 10
"""A gap between two wanted rows below this size is read with them."""
_AHEAD = 8
"""Number of parts prefetched from the disk while one is hashed."""
_CHECKED_BYTES = 4 << 20
"""Bytes one thread hashes at a time."""


class _Pieces(NamedTuple):
    """Rows stored raw and in one piece each, by position among the wanted rows."""

    rows: Offsets
    pack: Offsets
    start: Offsets
    stop: Offsets


def mappable(places: Places, columns: Columns, rows: Offsets, chunk_bytes: int) -> Offsets:
    """Find the rows that can be views of a mapped pack; return their positions among ``rows``."""
    return _find_pieces(places, columns, rows, chunk_bytes).rows


def map_rows(
    files: OpenFiles,
    places: Places,
    columns: Columns,
    rows: Offsets,
    chunk_bytes: int,
    digests: Digests | None,
    *,
    is_private: bool = False,
) -> dict[int, Array]:
    """Map the mappable rows.

    Args:
        files: Opener of packs.
        places: Places of the rows' chunks, one after the other.
        columns: Columns of the manifest.
        rows: Numbers of the wanted rows.
        chunk_bytes: The manifest's chunk size.
        digests: Digests of the chunks; None skips verification.
        is_private: Whether the arrays are writable; writes never reach the packs.

    Returns:
        Arrays by position among ``rows``, without unmappable rows and rows with another digest.
    """
    pieces = _find_pieces(places, columns, rows, chunk_bytes)
    arrays: dict[int, Array] = {}
    dtypes = dtypes_of(columns)
    for number in distinct(pieces.pack).tolist():
        mine = np.flatnonzero(pieces.pack == number)
        key = pack_key(places.packs[number])
        try:
            with files.using(key) as file:
                if file is None:
                    continue
                begin, end = int(pieces.start[mine].min()), int(pieces.stop[mine].max())
                stretch = file.map(begin, end, is_private=is_private)
                is_cold = digests is not None and _is_cold(file, pieces, mine)
        except (BlobNotFoundError, CorruptError, BackendError):
            continue  # the ordinary read reports the error
        whole = pieces.rows[mine]
        begins = pieces.start[mine] - stretch.begin
        if digests is not None:
            is_good = _check(stretch, begins, columns, rows, whole, chunk_bytes, digests, is_cold=is_cold)
            whole, begins = whole[is_good], begins[is_good]
        data = stretch.mapped
        shapes = columns.shapes(rows[whole])
        of_type = columns.dtype[rows[whole]].tolist()
        for at, dtype, shape, begin in zip(whole.tolist(), of_type, shapes, begins.tolist(), strict=True):
            arrays[at] = np.ndarray(shape, dtypes[dtype], data, begin)
    return arrays


def _find_pieces(places: Places, columns: Columns, rows: Offsets, chunk_bytes: int) -> _Pieces:
    counts = columns.chunk_at[rows + 1] - columns.chunk_at[rows]
    some = np.flatnonzero(counts)
    if len(some) == 0:
        none = np.empty(0, dtype=np.int64)
        return _Pieces(rows=none, pack=none, start=none, stop=none)
    firsts = (counts.cumsum() - counts)[some]
    entries = places.entries
    offset, stored = entries["offset"].astype(np.int64), entries["stored_bytes"].astype(np.int64)
    fits = places.found & (entries["codec"] == RAW.number)
    fits &= (stored == columns.chunk_sizes(chunk_bytes, rows)) & (entries["raw_bytes"] == entries["stored_bytes"])
    follows = np.ones(len(offset), dtype=bool)
    follows[1:] = (places.pack[1:] == places.pack[:-1]) & (offset[1:] == offset[:-1] + stored[:-1])
    follows[firsts] = offset[firsts] % ALIGNMENT == 0
    good = np.logical_and.reduceat(fits & follows, firsts)
    chosen, first = some[good], firsts[good]
    return _Pieces(
        rows=chosen,
        pack=places.pack[first],
        start=offset[first],
        stop=offset[first] + columns.n_bytes[rows[chosen]],
    )


def _is_cold(file: BlobFile, pieces: _Pieces, mine: Offsets) -> bool:
    """Tell whether some of the mapped bytes are not in memory."""
    stretches = list(zip(pieces.start[mine].tolist(), pieces.stop[mine].tolist(), strict=True))
    return file.share_in_memory(stretches) < 1


def _runs(begins: Offsets, ends: Offsets) -> list[tuple[int, int]]:
    """Merge adjacent stretches: wanted rows may be far apart, and in any order."""
    gaps = begins[1:] - ends[:-1]
    borders = np.flatnonzero((gaps < 0) | (gaps >= _NEAR_BYTES))
    firsts, lasts = np.append(0, borders + 1), np.append(borders, len(ends) - 1)
    return [(int(begins[first]), int(ends[last])) for first, last in zip(firsts, lasts, strict=True)]


def _check(
    stretch: MappedStretch,
    begins: Offsets,
    columns: Columns,
    rows: Offsets,
    whole: Offsets,
    chunk_bytes: int,
    digests: Digests,
    *,
    is_cold: bool,
) -> Any:
    """Return which of some mapped rows hash to their digests."""
    counts = columns.chunk_at[rows + 1] - columns.chunk_at[rows]
    expected = digests[ranges((counts.cumsum() - counts)[whole], counts[whole])]
    sizes = columns.chunk_sizes(chunk_bytes, rows[whole])
    of_row = np.repeat(np.arange(len(whole)), counts[whole])
    in_rows = sizes.cumsum() - sizes
    row_begins = columns.n_bytes[rows[whole]].cumsum() - columns.n_bytes[rows[whole]]
    starts = begins[of_row] + in_rows - row_begins[of_row]
    is_good = np.ones(len(whole), dtype=bool)
    data = stretch.data.data
    borders = np.flatnonzero(np.diff(in_rows // _CHECKED_BYTES, prepend=-1)).tolist()

    def runs_of(part: int) -> list[tuple[int, int]]:
        low, high = parts[part]
        return _runs(stretch.begin + starts[low:high], stretch.begin + starts[low:high] + sizes[low:high])

    def announce(part: int) -> None:
        # Without prefetching, the first touch also reads the bytes behind, and one thread at a time.
        if is_cold and part < len(parts):
            for first, stop in runs_of(part):
                stretch.announce(first, stop)

    def check(part: int) -> None:
        low, high = parts[part]
        begin, end = starts[low:high], starts[low:high] + sizes[low:high]
        try:
            announce(part + _AHEAD)
            for first, stop in runs_of(part):
                stretch.populate(first, stop)
        except BackendError:
            is_good[of_row[low:high]] = False
            return
        actual = [digest(data[start:stop]) for start, stop in zip(begin.tolist(), end.tolist(), strict=True)]
        if b"".join(actual) != expected[low:high].tobytes():
            differs = [found != said.tobytes() for found, said in zip(actual, expected[low:high], strict=True)]
            is_good[of_row[low:high][differs]] = False

    parts = list(zip(borders, [*borders[1:], len(sizes)], strict=True))
    try:
        for part in range(_AHEAD):
            announce(part)
    except BackendError:
        is_cold = False  # a bad sector is found again if it matters
    if len(parts) == 1:
        check(0)
    else:
        threads.run_all(check, range(len(parts)))
    return is_good
