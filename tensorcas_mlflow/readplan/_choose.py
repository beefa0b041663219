"""Choice of the way to read the wanted bytes of one pack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tensorcas_mlflow import config
from tensorcas_mlflow.readplan._extents import MAX_GAP_BYTES, MAX_READ_BYTES
from tensorcas_mlflow.readplan._rule import Rule

Way = Literal["pread", "direct", "map", "uring", "ranges"]
"""``pread``: positioned reads of the page cache, on threads; ``direct``: past it (O_DIRECT); ``map``: a memory-mapped
file; ``uring``: io_uring; ``ranges``: requests to a backend, the only way for storage without files of this machine."""
WAYS: tuple[Way, ...] = get_args(Way)
_WARM_SHARE = 0.5
LEAST_ASKED_BYTES = 2 << 20
"""Below this size, checking whether a pack is in memory takes longer than it could save."""
_LEAST_ASKED_IN_ALL_BYTES = 4 << 20
"""The same for all packs together: the disk delivers less in about the time many threads take to start."""
_LEAST_STRETCH_BYTES = 256 << 10
"""Direct reads of shorter stretches fetch more than is wanted, and readahead does not help them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Wanted bytes of one pack, and their storage."""

    n_bytes: int
    """Stored bytes wanted of this pack."""
    total_bytes: int
    """Stored bytes wanted of all packs together."""
    n_chunks: int
    """Number of wanted chunks."""
    is_raw: bool = False
    """Whether none of it needs decoding."""
    n_stretches: int = 1
    """Number of separate stretches the wanted chunks of this pack form."""
    is_remote: bool = False
    pack_bytes: int | None = None
    """Size of the pack, if it is a file of this machine; otherwise None."""
    share_in_memory: Callable[[], float] = lambda: 1.0
    """Estimates the share of it in the page cache, from 0 to 1; called only if it matters."""
    can_direct: Callable[[], bool] = lambda: False
    """Tells whether the file system supports direct reads."""
    can_ring: Callable[[], bool] = lambda: False
    """Tells whether io_uring is available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A way, and its parameters."""

    way: Way
    reason: str
    read_bytes: int
    """Maximum size of a read, unless a single chunk is longer."""
    gap_bytes: int
    """Chunks nearer to each other than this are read together."""
    waits: bool
    """Whether threads spend most of their time waiting for a disk or another machine, so more threads than cores are
    used."""
    is_alone: bool = False
    """Whether the calling thread reads alone."""
    is_exact: bool = False
    """Whether to turn readahead off, as only a part of the pack is wanted."""


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


def choose(situation: Situation, rule: Rule, forced: Way | None = None) -> Choice:
    """Choose the way for one pack.

    Args:
        situation: The wanted bytes.
        rule: The rule to apply.
        forced: A way to use if it is available.
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
        return _taken(situation, rule, "pread", "it is small", is_cold=False, is_exact=True)
    if situation.total_bytes < _LEAST_ASKED_IN_ALL_BYTES:
        return _taken(situation, rule, "pread", "it is small", is_cold=False)
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
    """Return the reason a way is unavailable; None if it is available."""
    if way == "direct" and not situation.can_direct():
        return "the file system does not support direct reads"
    if way == "uring" and not situation.can_ring():
        return "io_uring is not available"
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
    # For small chunks Python takes most of the time, and its threads wait for each other.
    pays_from = rule.raw_threads_from_bytes if situation.is_raw else rule.threads_from_bytes
    few = max(pays_from, situation.n_chunks * rule.least_chunk_bytes)
    return situation.total_bytes < few
