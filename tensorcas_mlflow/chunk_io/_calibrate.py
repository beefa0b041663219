"""Calibration: measure the rule for reading on this machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tensorcas_mlflow.backends import PAGE_BYTES, Backend, BlobFile, Ring, Scratch, has_ring
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.chunk_io._ways import NEVER_DIRECT, Rule, keep_rule
from tensorcas_mlflow.layout import list_packs, pack_key

LEAST_BYTES = 32 << 20
"""Less data than this gives no reliable figures."""
_MOST_BYTES = 256 << 20
_ROUNDS = 3
_READ_BYTES = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
_CLEARLY = 1.1
"""A way is faster if it takes less time by this factor; a smaller difference may be chance."""

_Stretch = tuple[BlobFile, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured speed of one way."""

    what: str
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{self.what}: {size_text(self.bytes_per_s)}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements and the resulting rule."""

    rule: Rule
    measured: tuple[Measured, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.measured), f"rule: {self.rule.source}"])


def calibrate(files: Sequence[BlobFile]) -> Calibration:
    """Measure the fastest way to read files, for some seconds.

    Args:
        files: Open packs; some 256 MiB of them are read several times, and evicted from memory in between.

    Raises:
        ValueError: They are too short for a measurement.
    """
    stretches, total = _stretches(files)
    if total < LEAST_BYTES:
        raise ValueError(f"there are only {size_text(total)} to measure with; {size_text(LEAST_BYTES)} are needed")
    pread, read_direct = _read_with(Scratch())
    warm = {
        f"in memory, {size_text(n_bytes)} a read": _timed(_each(stretches, n_bytes), pread, total)
        for n_bytes in _READ_BYTES
    }
    best = max(range(len(_READ_BYTES)), key=lambda at: list(warm.values())[at])
    measured = [Measured(what=what, bytes_per_s=speed) for what, speed in warm.items()]
    rule = replace(Rule(), warm_read_bytes=_READ_BYTES[best])
    cold: dict[str, float] = {}
    if _drop(stretches):
        pieces = list(_each(stretches, rule.cold_read_bytes))
        cold["pread"] = _timed(pieces, pread, total, drop=lambda: _drop(stretches))
        if all(file.open_direct() for file in files):
            cold["direct"] = _timed(pieces, read_direct, total, drop=lambda: _drop(stretches))
        if has_ring():
            cold["uring"] = _timed_ring(pieces, total, drop=lambda: _drop(stretches))
    measured += [Measured(what=f"from the disk, {way}", bytes_per_s=speed) for way, speed in cold.items()]
    why = f"{size_text(_READ_BYTES[best])} a read was fastest in memory; "
    if not cold:
        why += "the disk could not be measured, as its files stay in memory"
    elif cold.get("uring", 0.0) > _CLEARLY * max(cold["pread"], cold.get("direct", 0.0)):
        rule = replace(rule, uses_ring=True)
        why += "io_uring was fastest from the disk"
    elif cold.get("direct", 0.0) > _CLEARLY * cold["pread"]:
        why += "past the page cache was fastest from the disk"
    else:
        rule = replace(rule, direct_from_bytes=NEVER_DIRECT)
        why += "the page cache was as fast as any way from the disk"
    source = f"measured on this machine on {time.strftime('%Y-%m-%d', time.gmtime())}: {why}"
    return Calibration(rule=replace(rule, source=source), measured=tuple(measured))


def _stretches(files: Sequence[BlobFile]) -> tuple[list[_Stretch], int]:
    out: list[_Stretch] = []
    total = 0
    for file in sorted(files, key=lambda each: -each.size):
        n_bytes = min(file.size, _MOST_BYTES - total) // PAGE_BYTES * PAGE_BYTES
        if n_bytes:
            out.append((file, 0, n_bytes))
            total += n_bytes
    return out, total


def _each(stretches: Sequence[_Stretch], n_bytes: int) -> Iterator[_Stretch]:
    for file, start, stop in stretches:
        for at in range(start, stop, n_bytes):
            yield file, at, min(at + n_bytes, stop)


def _timed(
    pieces: Iterator[_Stretch] | Sequence[_Stretch],
    read: Callable[[_Stretch], None],
    total: int,
    *,
    drop: Callable[[], bool] | None = None,
) -> float:
    """Read all pieces some times; return the median speed in bytes a second."""
    listed = list(pieces)
    times: list[float] = []
    if drop is None:
        threads.run_all(read, listed)
    for _ in range(_ROUNDS):
        if drop is not None:
            drop()
        begin = time.perf_counter()
        threads.run_all(read, listed, waits=drop is not None)
        times.append(time.perf_counter() - begin)
    return total / median(times)


def _timed_ring(pieces: Sequence[_Stretch], total: int, *, drop: Callable[[], bool]) -> float:
    times: list[float] = []
    for _ in range(_ROUNDS):
        drop()
        begin = time.perf_counter()
        with contextlib.closing(Ring[int]()) as ring:
            for _, block in ring.read((0, file.descriptor, start, stop - start) for file, start, stop in pieces):
                if block is not None:
                    ring.give_back(block)
        times.append(time.perf_counter() - begin)
    return total / median(times)


def _read_with(scratch: Scratch) -> tuple[Callable[[_Stretch], None], Callable[[_Stretch], None]]:
    """Return the functions that read a stretch, through the page cache and past it."""

    def pread(piece: _Stretch) -> None:
        file, start, stop = piece
        buffer = scratch.take(stop - start)
        file.read_into(start, [buffer.data[: stop - start]])
        scratch.give_back(buffer)

    def read_direct(piece: _Stretch) -> None:
        file, start, stop = piece
        buffer = scratch.take(stop - start + 2 * PAGE_BYTES)
        file.read_direct(start, stop, buffer)
        scratch.give_back(buffer)

    return pread, read_direct


def _drop(stretches: Sequence[_Stretch]) -> bool:
    """Evict files from memory; return whether they are gone."""
    for file, _, _ in stretches:
        file.forget_cached()
    return all(file.share_in_memory([(start, stop)]) < 0.1 for file, start, stop in stretches)


_MOST_MEASURED = 16
"""Number of packs opened for the measurement."""


def calibrate_on(backend: Backend) -> Calibration:
    """Measure on the largest packs of a store, and keep the rule; see `Store.calibrate`."""
    with contextlib.ExitStack() as opened:
        files: list[BlobFile] = []
        for name, _ in sorted(list_packs(backend), key=lambda pack: -pack[1])[:_MOST_MEASURED]:
            file = backend.open_file(pack_key(name))
            if file is not None:
                files.append(opened.enter_context(file))
        found = calibrate(files)
    keep_rule(found.rule)
    return found
