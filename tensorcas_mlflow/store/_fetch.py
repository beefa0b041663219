"""The ways of reading: each fetches the stored bytes of one task, raw chunks straight into place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tensorcas_mlflow.backends import PAGE_BYTES, Backend, BlobFile, Scratch, aligned_buffer
from tensorcas_mlflow.readplan import Choice
from tensorcas_mlflow.store._open_files import OpenFiles
from tensorcas_mlflow.store._take import Stored
from tensorcas_mlflow.store._target import Target
from tensorcas_mlflow.store._tasks import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Result of a task."""

    stored: Stored
    scratch: Any = None
    """A buffer with ``stored`` in it, to be given back; None for none."""
    block: memoryview | None = None
    """All bytes read, if they are in one piece and nobody changes them: for the cache."""


Fetch = Callable[[Task, Target], Fetched]
"""Executes a task.

Raises:
    BlobNotFoundError: The pack is gone.
    CorruptError: It ends before the end of the read.
    BackendError: The storage fails to deliver it.
"""


class Ways:
    """All ways of reading one backend, for the time of one load."""

    def __init__(self, backend: Backend, files: OpenFiles) -> None:
        self._backend = backend
        self.files = files
        self.scratch = Scratch()

    def of(self, choice: Choice) -> Fetch:
        """Return the function of a way; ``uring`` reads single tasks like ``pread``."""
        if choice.way == "ranges":
            return self._ranges
        if choice.way == "direct":
            return self._direct
        if choice.way == "map":
            return self._map
        return self._pread_exactly if choice.is_exact else self._pread

    def _pread_exactly(self, task: Task, target: Target) -> Fetched:
        with self.files.using(task.key) as file:
            if file is not None:
                file.read_at_random()
            return self._pread(task, target)

    def _pread(self, task: Task, target: Target) -> Fetched:
        with self.files.using(task.key) as file:
            if file is None:
                return self._ranges(task, target)
            if _overlaps(task):
                block = self.scratch.take(task.stop - task.start)
                file.read_into(task.start, [block.data[: task.stop - task.start]])
                return Fetched(stored=_strips_in(task, block.data), scratch=block)
            return self._scatter(file, task, target)

    def _scatter(self, file: BlobFile, task: Task, target: Target) -> Fetched:
        """Read raw chunks into place and the rest into a buffer, in one call."""
        n_aside = task.stop - task.start - sum([strip.n_bytes for strip in task.strips if strip.is_plain])
        scratch = self.scratch.take(n_aside) if n_aside else None
        aside = memoryview(b"") if scratch is None else scratch.data
        outs: list[memoryview] = []
        stored: list[memoryview | None] = []
        at = used = 0
        for strip in task.strips:
            if strip.start > at:
                outs.append(aside[used : used + strip.start - at])
                used += strip.start - at
            if strip.is_plain:
                outs.append(memory_of(task, strip.first, strip.n_bytes, target))
                stored.append(None)
            else:
                outs.append(aside[used : used + strip.n_bytes])
                stored.append(outs[-1])
                used += strip.n_bytes
            at = strip.start + strip.n_bytes
        file.read_into(task.start, outs)
        return Fetched(stored=stored, scratch=scratch)

    def _direct(self, task: Task, target: Target) -> Fetched:
        with self.files.using(task.key) as file:
            if file is None or not file.is_direct:
                return self._pread(task, target)
            scratch = self.scratch.take(task.stop - task.start + 2 * PAGE_BYTES)
            block = file.read_direct(task.start, task.stop, scratch)
        return Fetched(stored=_strips_in(task, block), scratch=scratch)

    def _map(self, task: Task, target: Target) -> Fetched:
        with self.files.using(task.key) as file:
            if file is None:
                return self._ranges(task, target)
            stretch = file.map(task.start, task.stop)
        stretch.populate(task.start, task.stop)
        return Fetched(stored=_strips_in(task, stretch.data[task.start - stretch.begin :].data))

    def _ranges(self, task: Task, target: Target) -> Fetched:
        n_bytes = task.stop - task.start
        strip = task.strips[0]
        if strip.is_plain and strip.n_bytes == n_bytes and len(task.strips) == 1:
            block = memory_of(task, 0, n_bytes, target)
            self._backend.read_into(task.key, task.start, block)
            return Fetched(stored=[None], block=block)
        # Not scratch: the cache keeps it until the load has ended.
        block = aligned_buffer(n_bytes).data
        self._backend.read_into(task.key, task.start, block)
        return Fetched(stored=_strips_in(task, block), block=block)


def memory_of(task: Task, first: int, n_bytes: int, target: Target) -> memoryview:
    """Return the memory of a strip that begins with the member at a position."""
    chunk = task.members[first]
    start = int(target.start[chunk])
    return target.blocks[int(target.block[chunk])][start : start + n_bytes]


def stored_in(task: Task, block: memoryview) -> Fetched:
    """Return the result of a task served by the cache."""
    return Fetched(stored=_strips_in(task, block))


def _strips_in(task: Task, block: memoryview) -> list[memoryview | None]:
    return [block[strip.start : strip.start + strip.n_bytes] for strip in task.strips]


def _overlaps(task: Task) -> bool:
    """Tell whether two chunks share bytes of the pack: a repeated chunk, or the entries of a hostile table."""
    at = 0
    for strip in task.strips:
        if strip.start < at:
            return True
        at = strip.start + strip.n_bytes
    return False
