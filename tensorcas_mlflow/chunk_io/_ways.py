"""Choice of a way to read: extents, the thresholds between ways, and the plan as a printable value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tensorcas_mlflow.backends import PAGE_BYTES, SCRATCH_BYTES
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.layout.packs import Positions

# ``docs/design/reading.md`` explains these thresholds.
_THREADS_FROM_BYTES = 1 << 20
"""Less than this is read by the calling thread alone, if some of it needs decoding."""
_RAW_THREADS_FROM_BYTES = 3 << 20
"""The same if nothing needs decoding: then waking a thread costs as much as reading and hashing 1 MiB."""
_WARM_READ_BYTES = 1 << 20
"""Size of one thread's reads from memory: small enough to stay in its core's cache until decoding and hashing."""
_COLD_READ_BYTES = SCRATCH_BYTES - 16 * PAGE_BYTES
"""Size of one thread's reads from the disk; many are under way. Direct reads fetch up to two pages more."""
LOCAL_GAP_BYTES = 16 << 10
"""Chunks of a local file nearer to each other than this are read together."""
_DIRECT_FROM_BYTES = 4 << 20
"""From this size on, the wanted bytes of one pack outside of memory are read past the page cache."""

MAX_GAP_BYTES = 64 * 1024
"""Chunks nearer to each other than this are read together: reading the gap costs less than a second read."""
MAX_READ_BYTES = 8 << 20
"""Longer reads are split, so threads share them and memory stays bounded."""


class Extent(NamedTuple):
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


Way = Literal["pread", "direct", "map", "ranges"]
"""``pread``: positioned reads of the page cache, on threads; ``direct``: past it (O_DIRECT); ``map``: a memory-mapped
file; ``ranges``: requests to a backend, the only way for storage without files of this machine."""
WAYS: tuple[Way, ...] = get_args(Way)
_WARM_SHARE = 0.5
LEAST_ASKED_BYTES = 2 << 20
"""Below this size, checking whether a pack is in memory takes longer than it could save."""
_LEAST_ASKED_IN_ALL_BYTES = 4 << 20
"""The same for all packs together: the disk delivers less in about the time many threads take to start."""
_LEAST_STRETCH_BYTES = 256 << 10
"""Direct reads of shorter stretches fetch more than is wanted, and readahead does not help them."""


class Situation(NamedTuple):
    """Wanted bytes of one pack, and their storage."""

    n_bytes: int
    """Stored bytes wanted of this pack."""
    total_bytes: int
    """Stored bytes wanted of all packs together."""
    n_chunks: int
    """Number of wanted chunks."""
    is_raw: bool = False
    """True if none of it needs decoding."""
    n_stretches: int = 1
    """Number of separate stretches the wanted chunks of this pack form."""
    is_remote: bool = False
    pack_bytes: int | None = None
    """Size of the pack, if it is a file of this machine; otherwise None."""
    share_in_memory: Callable[[], float] = lambda: 1.0
    """Estimates the share of it in the page cache, from 0 to 1; called only if it matters."""
    can_direct: Callable[[], bool] = lambda: False
    """Tells whether the file system supports direct reads."""


class WayChoice(NamedTuple):
    """A way, and its parameters."""

    way: Way
    reason: str
    read_bytes: int
    """Maximum size of a read, unless a single chunk is longer."""
    gap_bytes: int
    """Chunks nearer to each other than this are read together."""
    waits: bool
    """True if threads spend most of their time waiting for a disk or another machine, so more threads than cores are
    used."""
    is_alone: bool = False
    """True if the calling thread reads alone."""
    is_exact: bool = False
    """True to turn readahead off, as only a part of the pack is wanted."""

    @property
    def is_of_file(self) -> bool:
        """True if the reads are of a file's descriptor, by position."""
        return self.way in ("pread", "direct")


PLAIN_READ = WayChoice(
    way="pread", reason="it failed once", read_bytes=_WARM_READ_BYTES, gap_bytes=0, waits=False, is_alone=True
)
"""The way to read a single chunk again."""
BASES_READ = PLAIN_READ._replace(reason="they are bases", gap_bytes=LOCAL_GAP_BYTES)
"""The way to read the bases of deltas that are in memory."""


def way_named(name: str) -> Way:
    """Check the name of a way.

    Raises:
        ValueError: No way has this name.
    """
    for way in WAYS:
        if way == name:
            return way
    raise ValueError(f"a way of reading is one of {', '.join(WAYS)}, not {name!r}")


def way_of_environment() -> Way | None:
    """Return the way in TENSORCAS_READ; None if it is unset or ``auto``.

    Raises:
        ValueError: It is neither.
    """
    name = config.reading_way()
    if name is None:
        return None
    try:
        return way_named(name)
    except ValueError as error:
        raise ValueError(f"TENSORCAS_READ: {error}") from None


def choose(situation: Situation, forced: Way | None = None) -> WayChoice:
    """Choose the way for one pack.

    Args:
        situation: The wanted bytes.
        forced: A way to use if it is available.
    """
    if situation.pack_bytes is None:
        told = "" if forced in (None, "ranges") else f"; {forced} reads need a file of this machine"
        what = "it lies on another machine" if situation.is_remote else "it is no file"
        return _ranges(situation, what + told)
    if forced == "ranges":
        return _ranges(situation, "it was asked for")
    if forced is not None:
        missing = _missing(situation, forced)
        if missing is None:
            return _taken(situation, forced, "it was asked for", is_cold=forced == "direct")
        chosen = choose(situation)
        return chosen._replace(reason=f"{missing}; {chosen.reason}")
    if situation.n_bytes < LEAST_ASKED_BYTES:
        return _taken(situation, "pread", "it is small", is_cold=False, is_exact=True)
    if situation.total_bytes < _LEAST_ASKED_IN_ALL_BYTES:
        return _taken(situation, "pread", "it is small", is_cold=False)
    share = situation.share_in_memory()
    told = f"{share:.0%} of it is in memory"
    if share >= _WARM_SHARE:
        return _taken(situation, "pread", told, is_cold=False)
    is_long = situation.n_bytes >= situation.n_stretches * _LEAST_STRETCH_BYTES
    if situation.n_bytes >= _DIRECT_FROM_BYTES and is_long and situation.can_direct():
        return _taken(situation, "direct", f"{told}, and it is long", is_cold=True)
    return _taken(situation, "pread", told, is_cold=True)


def _missing(situation: Situation, way: Way) -> str | None:
    """Return the reason a way is unavailable; None if it is available."""
    if way == "direct" and not situation.can_direct():
        return "the file system does not support direct reads"
    return None


def _taken(situation: Situation, way: Way, reason: str, *, is_cold: bool, is_exact: bool = False) -> WayChoice:
    assert situation.pack_bytes is not None
    return WayChoice(
        way=way,
        reason=reason,
        read_bytes=_COLD_READ_BYTES if is_cold else _WARM_READ_BYTES,
        gap_bytes=LOCAL_GAP_BYTES,
        waits=is_cold,
        is_alone=not is_cold and _is_for_one(situation),
        is_exact=is_exact or 2 * situation.n_bytes < situation.pack_bytes,
    )


def _ranges(situation: Situation, reason: str) -> WayChoice:
    return WayChoice(
        way="ranges",
        reason=reason,
        read_bytes=MAX_READ_BYTES,
        gap_bytes=MAX_GAP_BYTES,
        waits=situation.is_remote,
        is_alone=not situation.is_remote and _is_for_one(situation),
    )


def _is_for_one(situation: Situation) -> bool:
    """Tell whether threads would gain nothing."""
    return situation.total_bytes < (_RAW_THREADS_FROM_BYTES if situation.is_raw else _THREADS_FROM_BYTES)


class PackRead(NamedTuple):
    """The reads of one pack."""

    key: str
    """Key of the pack."""
    n_chunks: int
    n_bytes: int
    """Stored bytes of the chunks."""
    n_reads: int
    read_bytes: int
    """Size of the reads: the chunks, and the gaps between near ones."""
    choice: WayChoice

    def __str__(self) -> str:
        many = "1 read" if self.n_reads == 1 else f"{self.n_reads:,} reads"
        chunks = "1 chunk" if self.n_chunks == 1 else f"{self.n_chunks:,} chunks"
        how = "by the caller alone" if self.choice.is_alone else "on threads"
        said = f"{self.key}: {chunks}, {size_text(self.n_bytes)} stored; {many} by {self.choice.way} {how}, "
        return f"{said}because {self.choice.reason}"


class ReadPlan(NamedTuple):
    """The way some tensors of a checkpoint would be read now. The page cache changes, and the plan with it."""

    n_tensors: int
    n_bytes: int
    """Size of the tensors."""
    n_mapped: int
    """Tensors read as views of memory-mapped packs, without a copy."""
    n_cached: int
    """Chunks read from the chunk cache."""
    packs: tuple[PackRead, ...]

    @property
    def ways(self) -> dict[str, int]:
        """Stored bytes by way."""
        bytes_by_way: Counter[str] = Counter()
        for pack in self.packs:
            bytes_by_way[pack.choice.way] += pack.n_bytes
        return dict(bytes_by_way)

    def __str__(self) -> str:
        tensors = "1 tensor" if self.n_tensors == 1 else f"{self.n_tensors:,} tensors"
        lines = [f"{tensors}, {size_text(self.n_bytes)}"]
        if self.n_mapped:
            lines.append(f"{self.n_mapped:,} of them stored raw and in one piece: views of mapped packs")
        if self.n_cached:
            lines.append(f"{self.n_cached:,} chunks from the chunk cache")
        lines += [str(pack) for pack in self.packs]
        return "\n".join(lines)
