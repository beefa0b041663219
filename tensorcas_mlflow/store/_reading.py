"""Execution of a read plan: on threads, through the cache, and again in single chunks after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend, BlobFile, Ring
from tensorcas_mlflow.errors import BackendError, CorruptError
from tensorcas_mlflow.extent_cache import ExtentCache
from tensorcas_mlflow.index import pack_key, pack_name
from tensorcas_mlflow.readplan import Choice
from tensorcas_mlflow.store._fetch import Ways, stored_in
from tensorcas_mlflow.store._lookup import Places, distinct
from tensorcas_mlflow.store._plan import Group
from tensorcas_mlflow.store._take import Damage, Wanted, take
from tensorcas_mlflow.store._target import Target
from tensorcas_mlflow.store._tasks import Task, cached_tasks, tasks_of

Keep = Callable[[str, int, memoryview], None]
"""Called with each verified read of the storage: the pack, the start there, and the bytes, unchanged until the load
has ended."""


class Reading:
    """Reading of chunks from given places. None of them is a delta."""

    def __init__(self, backend: Backend, ways: Ways, places: Places, wanted: Wanted) -> None:
        self.damaged: list[Damage] = []
        """Copies found damaged so far."""
        self._backend = backend
        self._places = places
        self._wanted = wanted
        self._ways = ways

    def run(self, groups: Sequence[Group], keep: Keep | None = None, *, is_alone: bool = False) -> None:
        """Execute a plan.

        Args:
            groups: The plan.
            keep: Called with each verified read.
            is_alone: Whether the calling thread reads alone, whatever the plan is.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        ring = [] if is_alone else [group for group in groups if group.choice.way == "uring"]
        self._run_ring([(group.choice, task) for group in ring for task in group.tasks])
        for waits in (False, True):
            mine = [group for group in groups if group not in ring and group.choice.waits == waits]
            tasks = [(group.choice, task) for group in mine for task in group.tasks]

            def run(each: tuple[Choice, Task]) -> None:
                self._run_task(*each, keep)

            if len(tasks) <= 1 or is_alone or all(choice.is_alone for choice, _ in tasks):
                for each in tasks:
                    run(each)
            else:
                threads.run_all(run, tasks, waits=waits)

    def _run_ring(self, tasks: Sequence[tuple[Choice, Task]]) -> None:
        """Read through io_uring, and decode completed reads on the pool; repeat failed reads one by one."""
        if not tasks:
            return
        with contextlib.ExitStack() as opened:
            files: dict[str, BlobFile | None] = {}
            for _, task in tasks:
                if task.key not in files:
                    files[task.key] = opened.enter_context(self._ways.files.using(task.key))
            descriptors = {key: -1 if file is None else file.descriptor for key, file in files.items()}
            ring = opened.enter_context(contextlib.closing(Ring[tuple[Choice, Task]]()))

            def take_block(read: tuple[tuple[Choice, Task], bytearray | None]) -> None:
                (choice, task), block = read
                if block is None:
                    self._run_task(choice, task, None)
                    return
                file = files[task.key]
                if file is not None:
                    file.count(len(block))
                stored = stored_in(task, memoryview(block)).stored
                self.damaged.extend(take(task, stored, self._places, self._wanted))
                ring.give_back(block)

            wanted = ((each, descriptors[each[1].key], each[1].start, each[1].stop - each[1].start) for each in tasks)
            threads.run_all(take_block, ring.read(wanted))

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

    def _run_task(self, choice: Choice, task: Task, keep: Keep | None) -> None:
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

    def _split(self, task: Task, choice: Choice, reason: str, error: BackendError | None) -> list[Task]:
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
