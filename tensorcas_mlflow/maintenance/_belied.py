"""Comparison of the index with the packs' own tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tensorcas_mlflow.layout.packs import Entries, Segment, Table, as_rows


def belied_packs(segment: Table | Segment, table: Table, entries_of: Callable[[str], Entries | None]) -> list[str]:
    """Find the packs whose own tables contradict a segment.

    Args:
        segment: The segment; its rows are read some at a time.
        table: The rows of the packs' own tables. Some may be left out, at a cost.
        entries_of: Returns a pack's own table, in any order; None for a pack that is gone or cannot be read.

    Returns:
        Their names, in the segment's order.

    Raises:
        CorruptError: Some bytes of the segment have changed.
        BlobNotFoundError: The segment is gone.
    """
    own = [entries_of(name) for name in segment.packs]
    numbers = np.array([table.numbers.get(name, len(table.packs)) for name in segment.packs], np.int64)
    n_rows = np.zeros(len(own), np.int64)
    is_doubtful = np.zeros(len(own), dtype=bool)
    for entries, pack in segment.parts():
        n_rows += np.bincount(pack, minlength=len(own))
        rows = table.find(np.ascontiguousarray(entries["digest"]), packs=numbers[pack])
        differs = rows < 0
        there = np.flatnonzero(~differs)
        differs[there] = as_rows(entries)[there] != as_rows(table.entries.take(rows[there]))
        is_doubtful[pack[differs]] = True
    is_doubtful |= n_rows != [0 if each is None else len(each) for each in own]
    doubtful = [number for number in np.flatnonzero(is_doubtful).tolist() if own[number] is not None]
    if not doubtful:
        return []
    said: dict[int, list[Entries]] = {number: [] for number in doubtful}
    for entries, pack in segment.parts():
        for number in np.intersect1d(pack, doubtful).tolist():
            said[number].append(entries[pack == number])
    return [segment.packs[number] for number, parts in said.items() if _sorted(*parts) != _sorted(own[number])]


def _sorted(*parts: Entries | None) -> bytes:
    """Write entries so that equal ones are equal bytes, in whatever order they stand."""
    return b"".join(sorted(row.tobytes() for part in parts if part is not None for row in part))
