"""Execution of read tasks: fetch, decode in place, verify, and retry chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import PAGE_BYTES, Backend, BlobFile, Scratch, aligned_buffer
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Digests, digest
from tensorcas_mlflow.chunk_io._cache import ExtentCache
from tensorcas_mlflow.chunk_io._catalog import Places, distinct
from tensorcas_mlflow.chunk_io._plan import OpenFiles, Target, Task, TaskGroup, cached_tasks, tasks_of
from tensorcas_mlflow.chunk_io._ways import WayChoice
from tensorcas_mlflow.codecs import MOST_OVERHEAD_BYTES, RAW, codec_numbered
from tensorcas_mlflow.errors import BackendError, CorruptError, FormatError
from tensorcas_mlflow.layout import pack_key, pack_name

Payloads = Sequence[memoryview | None]
"""Result of a read, strip by strip; None for a strip already in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Chunks to read, and the place of each."""

    digests: Digests
    target: Target
    verify: bool

    def some(self, chunks: Any) -> Wanted:
        """Return some of them, by number."""
        return Wanted(digests=self.digests[chunks], target=self.target.some(chunks), verify=self.verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An unreadable or damaged copy of a chunk."""

    chunk: int
    """Its number among the wanted chunks."""
    key: str
    """Key of the pack."""
    reason: str
    error: BackendError | None = None
    """The storage's error, if the storage failed."""
    base: bytes | None = None
    """Digest of the base, if the damage is in the base, in the pack of ``key``."""


def check_sizes(places: Places, wanted: Wanted) -> list[Damage]:
    """Return the chunks with impossible entries, before an entry costs memory."""
    sizes = wanted.target.n_bytes
    raw_bytes, stored_bytes = places.entries["raw_bytes"], places.entries["stored_bytes"].astype(np.int64)
    is_raw = places.entries["codec"] == RAW.number
    wrong = (raw_bytes != sizes) | (is_raw & (stored_bytes != sizes)) | (stored_bytes > 2 * sizes + MOST_OVERHEAD_BYTES)
    return [
        Damage(
            chunk=at,
            key=pack_key(places.packs[int(places.pack[at])]),
            reason=f"its entry states {raw_bytes[at]} bytes in {stored_bytes[at]}, the manifest {sizes[at]}",
        )
        for at in np.flatnonzero(wrong).tolist()
    ]


def take(task: Task, stored: Payloads, places: Places, wanted: Wanted) -> list[Damage]:
    """Decode a read into place, and verify it; return the damage. No chunk may be a delta.

    Args:
        task: The task of the read.
        stored: Its stored bytes.
        places: Places of all wanted chunks.
        wanted: All wanted chunks.
    """
    damaged = _decode(task, stored, places, wanted.target)
    if not wanted.verify:
        return damaged
    return damaged + _check(task, wanted, {damage.chunk for damage in damaged})


def _decode(task: Task, stored: Payloads, places: Places, target: Target) -> list[Damage]:
    damaged: list[Damage] = []
    for strip, data in zip(task.strips, stored, strict=True):
        if data is None:
            continue
        members = task.members[strip.first : strip.stop]
        if strip.is_plain:
            first = int(members[0])
            start = int(target.start[first])
            target.blocks[int(target.block[first])][start : start + strip.n_bytes] = data
            continue
        entries = places.entries[members]
        begins = (task.begins[strip.first : strip.stop] - strip.start).tolist()
        lengths, codecs = entries["stored_bytes"].tolist(), entries["codec"].tolist()
        for chunk, begin, length, codec in zip(members.tolist(), begins, lengths, codecs, strict=True):
            try:
                codec_numbered(codec).decode_into(data[begin : begin + length], target.view(chunk))
            except FormatError as error:
                damaged.append(Damage(chunk=chunk, key=task.key, reason=str(error)))
    return damaged


def _check(task: Task, wanted: Wanted, known: set[int]) -> list[Damage]:
    """Compare the chunks of a read with their digests; return the new mismatches."""
    target, members = wanted.target, task.members
    starts = target.start[members]
    stops = (starts + target.n_bytes[members]).tolist()
    blocks = target.blocks
    where = zip(target.block[members].tolist(), starts.tolist(), stops, strict=True)
    actual = [digest(blocks[block][start:stop]) for block, start, stop in where]
    expected = wanted.digests[members]
    if b"".join(actual) == expected.tobytes():
        return []
    return [
        Damage(chunk=chunk, key=task.key, reason=f"its bytes hash to {found.hex()}")
        for chunk, found, digest_of in zip(members.tolist(), actual, expected, strict=True)
        if found != digest_of.tobytes() and chunk not in known
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Result of a task."""

    stored: Payloads
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

    def of(self, choice: WayChoice) -> Fetch:
        """Return the function of a way."""
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


KeepExtent = Callable[[str, int, memoryview], None]
"""Called with each verified read of the storage: the pack, the start there, and the bytes, unchanged until the load
has ended."""


class ChunkFetch:
    """Reading of chunks from given places. None of them is a delta."""

    def __init__(self, backend: Backend, ways: Ways, places: Places, wanted: Wanted) -> None:
        self.damaged: list[Damage] = []
        """Copies found damaged so far."""
        self._backend = backend
        self._places = places
        self._wanted = wanted
        self._ways = ways

    def run(self, groups: Sequence[TaskGroup], keep: KeepExtent | None = None, *, is_alone: bool = False) -> None:
        """Execute a plan.

        Args:
            groups: The plan.
            keep: Called with each verified read.
            is_alone: Whether the calling thread reads alone, whatever the plan is.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        for waits in (False, True):
            tasks = [(group.choice, task) for group in groups if group.choice.waits == waits for task in group.tasks]

            def run(each: tuple[WayChoice, Task]) -> None:
                self._run_task(*each, keep)

            if len(tasks) <= 1 or is_alone or all(choice.is_alone for choice, _ in tasks):
                for each in tasks:
                    run(each)
            else:
                threads.run_all(run, tasks, waits=waits)

    def run_cached(self, tasks: Sequence[Task], *, is_alone: bool = False) -> list[Any]:
        """Take chunks from the cache; return the missing ones, in groups. ``is_alone`` is that of `run`."""
        missed: list[Any] = []

        def run(task: Task) -> None:
            if not self._take_cached(task):
                missed.append(task.members)

        if len(tasks) == 1 or is_alone:
            for task in tasks:
                run(task)
        else:
            threads.run_all(run, tasks, waits=self._backend.is_remote)
        return missed

    def _take_cached(self, task: Task) -> bool:
        """Take chunks from the cache; return False if they are gone or wrong, and remove them from the cache."""
        assert task.cached is not None
        block = task.cached.read()
        if block is None:
            return False
        if take(task, stored_in(task, block).stored, self._places, self._wanted):
            task.cached.discard()
            return False
        if self._backend.tally is not None:
            self._backend.tally.add_cached(len(task.members))
        return True

    def _run_task(self, choice: WayChoice, task: Task, keep: KeepExtent | None) -> None:
        fetch = self._ways.of(choice)
        waiting = [task]
        while waiting:
            each = waiting.pop()
            try:
                fetched = fetch(each, self._wanted.target)
            except CorruptError as error:
                waiting += self._split(each, choice, f"it cannot be read: {error.reason}", None)
                continue
            except BackendError as error:
                # A failed request to a remote store says nothing about the blob.
                if self._backend.is_remote:
                    raise
                waiting += self._split(each, choice, str(error), error)
                continue
            try:
                found = take(each, fetched.stored, self._places, self._wanted)
            finally:
                self._ways.scratch.give_back(fetched.scratch)
            self.damaged.extend(found)
            if keep is not None and fetched.block is not None and not found:
                keep(pack_name(each.key), each.start, fetched.block)

    def _split(self, task: Task, choice: WayChoice, reason: str, error: BackendError | None) -> list[Task]:
        """Split a failed read into single chunks; if it has a single chunk, report the chunk as damaged."""
        if len(task.members) == 1:
            self.damaged.append(Damage(chunk=int(task.members[0]), key=task.key, reason=reason, error=error))
            return []
        # A truncated pack, or one bad sector of a disk, does not damage the chunks around it.
        target = self._wanted.target
        return [part for member in task.members for part in tasks_of(self._places, target, np.array([member]), choice)]


def find_cached(
    cache: ExtentCache, store_id: str, places: Places, target: Target, chunks: Any
) -> tuple[list[Task], Any]:
    """Find chunks in the cache; return the reads of them, and the missing chunks."""
    tasks: list[Task] = []
    left = [np.empty(0, dtype=np.intp)]
    for number in distinct(places.pack[chunks]):
        mine = chunks[places.pack[chunks] == number]
        entries = places.entries[mine]
        found = cache.open_pack(store_id, places.packs[number]).find(entries["offset"], entries["stored_bytes"])
        left.append(mine[~found.held])
        tasks += cached_tasks(places, target, mine, pack_key(places.packs[number]), found.reads)
    return tasks, np.concatenate(left)
