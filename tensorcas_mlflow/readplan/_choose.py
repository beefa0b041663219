"""Which way what is wanted of one pack is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tensorcas_mlflow import config
from tensorcas_mlflow.readplan._extents import MAX_GAP_BYTES, MAX_READ_BYTES
from tensorcas_mlflow.readplan._rule import Rule

Way = Literal["pread", "direct", "map", "uring", "ranges"]
"""``pread``: positioned reads of the page cache, on threads; ``direct``: past it (O_DIRECT); ``map``: a mapped file;
``uring``: io_uring; ``ranges``: requests to a backend, which are all that storage without files of this machine has."""
WAYS: tuple[Way, ...] = get_args(Way)
_WARM_SHARE = 0.5
LEAST_ASKED_BYTES = 2 << 20
"""Looking whether less of a pack is in memory would take longer than it could save."""
_LEAST_ASKED_IN_ALL_BYTES = 4 << 20
"""The same of what is wanted of all packs: the disk gives less in about the time that many threads take to begin."""
_LEAST_STRETCH_BYTES = 256 << 10
"""Direct reads of shorter stretches bring more than is wanted, and none is ahead of any other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is wanted of one pack, and where it lies."""

    n_bytes: int
    """Stored bytes that are wanted."""
    total_bytes: int
    """Stored bytes that are wanted of all packs at once."""
    n_chunks: int
    """How many chunks these are."""
    is_raw: bool = False
    """Whether nothing of it has to be decoded."""
    n_stretches: int = 1
    """Into how many stretches those of this pack fall that do not touch."""
    is_remote: bool = False
    pack_bytes: int | None = None
    """Size of the pack, if it is a file of this machine; None if not."""
    share_in_memory: Callable[[], float] = lambda: 1.0
    """Estimates how much of it the page cache holds, from 0 to 1; asked only where it matters."""
    can_direct: Callable[[], bool] = lambda: False
    """Tells whether the file system has direct reads."""
    can_ring: Callable[[], bool] = lambda: False
    """Tells whether io_uring can be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way, and how it is gone."""

    way: Way
    reason: str
    read_bytes: int
    """Reads are no longer, unless a single chunk is."""
    gap_bytes: int
    """Two chunks nearer than this are read together."""
    waits: bool
    """Whether threads wait for a disk or another machine most of the time, so that more of them are used than there are
    cores."""
    is_alone: bool = False
    """Whether the calling thread does it by itself."""
    is_exact: bool = False
    """Whether the system is to read nothing ahead, as only a part of the pack is wanted."""


def way_named(name: str) -> Way:
    """Check the name of a way.

    Raises:
        ValueError: There is none of that name.
    """
    for way in WAYS:
        if way == name:
            return way
    raise ValueError(f"a way of reading is one of {', '.join(WAYS)}, not {name!r}")


def way_of_environment() -> Way | None:
    """The way that TENSORCAS_READ names; None where it names none, or ``auto``.

    Raises:
        ValueError: It names something else.
    """
    name = config.reading_way()
    if name is None:
        return None
    try:
        return way_named(name)
    except ValueError as error:
        raise ValueError(f"TENSORCAS_READ: {error}") from None


def choose(situation: Situation, rule: Rule, forced: Way | None = None) -> Choice:
    """Choose the way for one pack.

    Args:
        situation: What is wanted.
        rule: By which numbers.
        forced: A way to take wherever it can be had.
    """
    if situation.pack_bytes is None:
        told = "" if forced in (None, "ranges") else f"; {forced} reads need a file of this machine"
        what = "it lies on another machine" if situation.is_remote else "it is no file"
        return _ranges(situation, rule, what + told)
    if forced == "ranges":
        return _ranges(situation, rule, "it was asked for")
    if forced is not None:
        missing = _missing(situation, forced)
        if missing is None:
            return _taken(situation, rule, forced, "it was asked for", is_cold=forced in ("direct", "uring"))
        chosen = choose(situation, rule)
        return replace(chosen, reason=f"{missing}; {chosen.reason}")
    if situation.n_bytes < LEAST_ASKED_BYTES:
        return _taken(situation, rule, "pread", "it is little", is_cold=False, is_exact=True)
    if situation.total_bytes < _LEAST_ASKED_IN_ALL_BYTES:
        return _taken(situation, rule, "pread", "it is little", is_cold=False)
    share = situation.share_in_memory()
    told = f"{share:.0%} of it is in memory"
    if share >= _WARM_SHARE:
        return _taken(situation, rule, "pread", told, is_cold=False)
    if rule.uses_ring and situation.can_ring():
        return _taken(situation, rule, "uring", f"{told}, and io_uring measured best here", is_cold=True)
    is_long = situation.n_bytes >= situation.n_stretches * _LEAST_STRETCH_BYTES
    if situation.n_bytes >= rule.direct_from_bytes and is_long and situation.can_direct():
        return _taken(situation, rule, "direct", f"{told}, and it is long", is_cold=True)
    return _taken(situation, rule, "pread", told, is_cold=True)


def _missing(situation: Situation, way: Way) -> str | None:
    """Say why a way cannot be had; None if it can."""
    if way == "direct" and not situation.can_direct():
        return "the file system has no direct reads"
    if way == "uring" and not situation.can_ring():
        return "io_uring cannot be had"
    return None


def _taken(situation: Situation, rule: Rule, way: Way, reason: str, *, is_cold: bool, is_exact: bool = False) -> Choice:
    assert situation.pack_bytes is not None
    return Choice(
        way=way,
        reason=reason,
        read_bytes=rule.cold_read_bytes if is_cold else rule.warm_read_bytes,
        gap_bytes=rule.gap_bytes,
        waits=is_cold,
        is_alone=not is_cold and _is_for_one(situation, rule),
        is_exact=is_exact or 2 * situation.n_bytes < situation.pack_bytes,
    )


def _ranges(situation: Situation, rule: Rule, reason: str) -> Choice:
    return Choice(
        way="ranges",
        reason=reason,
        read_bytes=MAX_READ_BYTES,
        gap_bytes=MAX_GAP_BYTES,
        waits=situation.is_remote,
        is_alone=not situation.is_remote and _is_for_one(situation, rule),
    )


def _is_for_one(situation: Situation, rule: Rule) -> bool:
    """Tell whether threads would gain nothing."""
    # Of small chunks most of the time goes to Python, where one thread waits for the other.
    pays_from = rule.raw_threads_from_bytes if situation.is_raw else rule.threads_from_bytes
    few = max(pays_from, situation.n_chunks * rule.least_chunk_bytes)
    return situation.total_bytes < few
