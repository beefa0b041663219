"""One sample in a process of its own, for cold caches or for figures of memory and disk reads."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness._cache import drop_from_cache, resident_share
from benchmarks.harness._report import Section
from benchmarks.harness._series import Series

MOST_LEFT = 0.02
"""Tolerated share of a folder's pages in the page cache; more is not cold."""

PRELOADED = ("safetensors.torch", "benchmarks.contenders")
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources used by one call."""

    seconds: float
    peak_bytes: int
    """Peak memory of the process during the call, less its memory before; mapped pages count."""
    read_bytes: int
    """Bytes fetched from the disk, counted by the kernel; read-ahead counts, the page cache does not."""
    written_bytes: int
    """Bytes sent to the disk, counted by the kernel."""
    called_read_bytes: int
    """Bytes requested with `read` and the like, cached or not; mapped pages do not count."""
    called_written_bytes: int
    """Bytes passed to `write` and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A measurement in a process of its own."""

    prepare: Callable[..., Callable[[], Any]]
    """A function of a module; in the fresh process it is called with ``args`` and returns the function to measure."""
    args: tuple[Any, ...]
    """Arguments; picklable."""
    cold: Path | None = None
    """A folder to drop from the page cache just before; None leaves it warm."""


def interleave_apart(jobs: Mapping[str, Job], n_rounds: int, section: Section) -> dict[str, tuple[Usage, ...]]:
    """Do each job once in every round, each time in a process of its own, and return their usages.

    Args:
        jobs: Jobs by name.
        n_rounds: Number of rounds; all of them count.
        section: Gets a note on whether the cold cases were cold.

    Raises:
        RuntimeError: A process died, or raised; the message has its error.
    """
    names = list(jobs)
    taken: dict[str, list[Usage]] = {name: [] for name in names}
    still_there = 0.0
    for number in range(n_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            usage, share = _in_own_process(jobs[name])
            taken[name].append(usage)
            still_there = max(still_there, share)
    if still_there > MOST_LEFT:
        section.note(f"not cold: {still_there:.0%} of a folder stayed in the page cache")
    elif any(job.cold for job in jobs.values()):
        section.note("cold: files are synced and dropped from the page cache (`posix_fadvise`) before each sample")
    return {name: tuple(usages) for name, usages in taken.items()}


def series_of(usages: Sequence[Usage], figure: str) -> Series:
    """One of the figures of some samples, as a series."""
    return Series(tuple(float(getattr(usage, figure)) for usage in usages))


def _in_own_process(job: Job) -> tuple[Usage, float]:
    # The server has imported everything and done nothing; its forks are as good as fresh interpreters.
    _context.set_forkserver_preload(list(PRELOADED))
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_measure, args=(theirs, job.prepare, job.args))
    process.start()
    theirs.close()
    share = 0.0
    try:
        _receive(ours)
        if job.cold is not None:
            drop_from_cache(job.cold)
            share = resident_share(job.cold)
        ours.send(None)
        usage = _receive(ours)
        assert isinstance(usage, Usage)
        return usage, share
    finally:
        ours.close()
        process.join()


def _receive(connection: Connection[Any, Any]) -> Any:
    try:
        answer = connection.recv()
    except EOFError:
        raise RuntimeError("the measuring process died") from None
    if isinstance(answer, str):
        raise RuntimeError(f"the measuring process failed: {answer}")
    return answer


def _measure(
    connection: Connection[Any, Any], prepare: Callable[..., Callable[[], Any]], args: tuple[Any, ...]
) -> None:
    try:
        act = prepare(*args)
        # Memory freed by the preparation would otherwise be reused without being counted.
        ctypes.CDLL(None).malloc_trim(0)
        connection.send(())
        connection.recv()
        # 5 resets the high-water mark of this process to its present memory; see proc_pid_clear_refs(5).
        Path("/proc/self/clear_refs").write_text("5")
        held, io = _status("VmRSS"), _io()
        begin = time.perf_counter()
        act()
        seconds = time.perf_counter() - begin
        after, peak = _io(), _status("VmHWM")
        connection.send(
            Usage(
                seconds=seconds,
                peak_bytes=max(0, peak - held),
                read_bytes=after["read_bytes"] - io["read_bytes"],
                written_bytes=after["write_bytes"] - io["write_bytes"],
                called_read_bytes=after["rchar"] - io["rchar"],
                called_written_bytes=after["wchar"] - io["wchar"],
            )
        )
    except Exception as error:  # noqa: BLE001  # whatever it is, the process that waits must hear of it
        connection.send(f"{type(error).__name__}: {error}")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
