"""What to read: from the places of many chunks to few reads, sorted and near ones joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_GAP_BYTES = 64 * 1024
"""Two chunks nearer than this are read together: reading over the gap costs less than a second read."""
MAX_READ_BYTES = 8 << 20
"""Longer reads are split, so that threads share them and memory stays bounded."""

Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One read: a range of one pack, and the chunks in it."""

    pack: int
    start: int
    stop: int
    members: Positions
    """Which of the planned chunks lie in it, by their number, in order of offset."""


def plan_reads(
    pack: Any,
    offset: Any,
    stored_bytes: Any,
    *,
    max_gap_bytes: int = MAX_GAP_BYTES,
    max_read_bytes: int = MAX_READ_BYTES,
) -> Iterator[Extent]:
    """Join the places of chunks into reads.

    Args:
        pack: For each chunk a number that tells packs apart.
        offset: For each chunk where it begins in its pack.
        stored_bytes: For each chunk how long it is there.
        max_gap_bytes: Two chunks nearer than this are read together.
        max_read_bytes: Longer reads are split, between chunks.

    Yields:
        Extents, ascending by pack and start, that together hold every chunk whole.
    """
    if len(pack) == 0:
        return
    order = np.lexsort((offset, pack))
    packs = pack[order].astype(np.int64)
    starts = offset[order].astype(np.int64)
    stops = starts + stored_bytes[order].astype(np.int64)
    far = np.empty(len(order), dtype=bool)
    far[0] = True
    # Chunks do not overlap in a pack (but one chunk may be wanted twice), so the one before ends last.
    far[1:] = (packs[1:] != packs[:-1]) | (starts[1:] > stops[:-1] + max_gap_bytes)
    groups = np.flatnonzero(far).tolist()
    for begin, end in zip(groups, [*groups[1:], len(order)], strict=True):
        first = begin
        while first < end:
            limit = starts[first] + max_read_bytes
            last = max(first + 1, begin + int(np.searchsorted(stops[begin:end], limit, side="right")))
            yield Extent(
                pack=int(packs[first]),
                start=int(starts[first]),
                stop=int(stops[first:last].max()),
                members=order[first:last],
            )
            first = last
