"""Extents: the places of many chunks, sorted and joined into few reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_GAP_BYTES = 64 * 1024
"""Chunks nearer to each other than this are read together: reading the gap costs less than a second read."""
MAX_READ_BYTES = 8 << 20
"""Longer reads are split, so threads share them and memory stays bounded."""

Positions = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One read: a range of one pack, and the chunks in it."""

    pack: int
    start: int
    stop: int
    members: Positions
    """Numbers of the planned chunks in it, in order of offset."""


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
        pack: For each chunk the number of its pack.
        offset: For each chunk its start in its pack.
        stored_bytes: For each chunk its size in its pack.
        max_gap_bytes: Chunks nearer to each other than this are read together.
        max_read_bytes: Longer reads are split, between chunks.

    Yields:
        Extents, ascending by pack and start; together they hold every chunk whole.
    """
    if len(pack) == 0:
        return
    order = np.lexsort((offset, pack))
    packs = pack[order].astype(np.int64)
    starts = offset[order].astype(np.int64)
    stops = starts + stored_bytes[order].astype(np.int64)
    far = np.empty(len(order), dtype=bool)
    far[0] = True
    # Chunks do not overlap in a pack (but a caller may want one chunk twice), so the previous one ends last.
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
