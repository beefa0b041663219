"""Tasks: reads for single threads, planned from the places of chunks, and strips of chunks moved as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.extent_cache import CachedRead
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.readplan import Choice, plan_reads
from tensorcas_mlflow.store._lookup import Places
from tensorcas_mlflow.store._target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Consecutive chunks of one read, all handled in one way."""

    first: int
    """Position of the first among the members of the read."""
    stop: int
    """One past the last."""
    start: int
    """Its start in the read."""
    n_bytes: int
    """Its size in the read."""
    is_plain: bool
    """Whether the chunks are raw and have the same layout in memory as in the pack, so one copy moves all. The small
    gaps between them are unused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One read, of a pack or of the cache, and its chunks."""

    key: str
    """Key of the pack."""
    members: Any
    """Numbers of the wanted chunks in it, in order of offset."""
    begins: Any
    """Start of each in the read."""
    start: int
    stop: int
    """Range of the pack's bytes; meaningless for the cache."""
    strips: list[Strip]
    """All members, in order."""
    cached: CachedRead | None = None


def tasks_of(places: Places, target: Target, chunks: Any, choice: Choice) -> list[Task]:
    """Plan the reads of some wanted chunks, by number, from their packs."""
    offset = places.entries["offset"].astype(np.int64)
    extents = list(
        plan_reads(
            places.pack[chunks],
            offset[chunks],
            places.entries["stored_bytes"][chunks],
            max_gap_bytes=choice.gap_bytes,
            max_read_bytes=choice.read_bytes,
        )
    )
    members = [chunks[extent.members] for extent in extents]
    begins = [offset[each] - extent.start for each, extent in zip(members, extents, strict=True)]
    strips = _strips(places, target, members, begins)
    return [
        Task(
            key=pack_key(places.packs[extent.pack]),
            members=each,
            begins=begin,
            start=extent.start,
            stop=extent.stop,
            strips=strip,
        )
        for extent, each, begin, strip in zip(extents, members, begins, strips, strict=True)
    ]


def cached_tasks(places: Places, target: Target, chunks: Any, key: str, reads: Iterable[CachedRead]) -> list[Task]:
    """Plan the reads of some wanted chunks, by number, from the cache, given the cached reads."""
    found = list(reads)
    members = [chunks[read.members] for read in found]
    strips = _strips(places, target, members, [read.begins for read in found])
    return [
        Task(key=key, members=each, begins=read.begins, start=0, stop=0, strips=strip, cached=read)
        for read, each, strip in zip(found, members, strips, strict=True)
    ]


def _strips(places: Places, target: Target, members: list[Any], begins: list[Any]) -> list[list[Strip]]:
    """Split the members of each read into strips."""
    if not members:
        return []
    order, begin = np.concatenate(members), np.concatenate(begins)
    read = np.repeat(np.arange(len(members)), [len(each) for each in members])
    entries = places.entries[order]
    stored = entries["stored_bytes"].astype(np.int64)
    is_raw = entries["codec"] == RAW.number
    block, start = target.block[order], target.start[order]
    joins = (read[1:] == read[:-1]) & (is_raw[1:] == is_raw[:-1])
    gap = begin[1:] - begin[:-1] - stored[:-1]
    # Rows begin at multiples of 64 bytes, in packs and in memory: the gap between two is the same in both.
    same_gap = (gap >= 0) & (gap <= target.slack[order[:-1]]) & (gap == start[1:] - start[:-1] - stored[:-1])
    joins &= ~is_raw[1:] | (same_gap & (block[1:] == block[:-1]))
    firsts = np.flatnonzero(np.append(True, ~joins))
    stops = np.append(firsts[1:], len(order))
    of_read = np.bincount(read).cumsum() - np.bincount(read)
    lengths = np.maximum.reduceat(begin + stored, firsts) - begin[firsts]
    out: list[list[Strip]] = [[] for _ in members]
    columns = (read[firsts], firsts - of_read[read[firsts]], stops - firsts, begin[firsts], lengths, is_raw[firsts])
    for number, first, n_members, at, n_bytes, plain in zip(*(column.tolist() for column in columns), strict=True):
        out[number].append(Strip(first=first, stop=first + n_members, start=at, n_bytes=n_bytes, is_plain=plain))
    return out
