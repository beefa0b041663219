"""The read plan of some chunks: for each pack a way, and the tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobFile, has_ring
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.readplan import (
    LEAST_ASKED_BYTES,
    Choice,
    PackRead,
    Situation,
    Way,
    choose,
    plan_reads,
    rule_of_machine,
)
from tensorcas_mlflow.store._lookup import Places, distinct
from tensorcas_mlflow.store._open_files import OpenFiles
from tensorcas_mlflow.store._target import Target
from tensorcas_mlflow.store._tasks import Task, tasks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tasks executed in one way."""

    choice: Choice
    tasks: list[Task]


class Planner:
    """Chooser of the ways of one load."""

    def __init__(self, backend: Backend, files: OpenFiles, way: Way | None) -> None:
        """Create a planner.

        Args:
            backend: The backend of the packs.
            files: Opener of the packs.
            way: A way to use if it is available; None leaves the choice to the rule.
        """
        self._backend = backend
        self._files = files
        self._way = way
        self.rule = rule_of_machine()
        """The rule for choosing ways."""

    def groups(self, places: Places, target: Target, chunks: Any) -> list[Group]:
        """Plan the reads of some wanted chunks, by number.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        if len(chunks) == 0:
            return []
        stored = places.entries["stored_bytes"][chunks].astype(np.int64)
        pack = places.pack[chunks]
        of_pack = np.bincount(pack, weights=stored)
        total = int(stored.sum())
        # Small amounts need no check of their pack, and are planned at once, however many packs there are.
        is_little = of_pack[pack] < LEAST_ASKED_BYTES
        large = distinct(pack[~is_little])
        groups = [self._group(places, target, chunks[pack == number], total, len(chunks)) for number in large]
        if is_little.any():
            groups.append(self._group(places, target, chunks[is_little], total, len(chunks)))
        return groups

    def reads(self, places: Places, target: Target, chunks: Any) -> tuple[PackRead, ...]:
        """Return for each pack the planned read of some wanted chunks.

        Raises:
            BlobNotFoundError: A pack is gone.
        """
        out: list[PackRead] = []
        for group in self.groups(places, target, chunks):
            by_key: dict[str, list[Task]] = {}
            for task in group.tasks:
                by_key.setdefault(task.key, []).append(task)
            for key, tasks in by_key.items():
                members = np.concatenate([task.members for task in tasks])
                out.append(
                    PackRead(
                        key=key,
                        n_chunks=len(members),
                        n_bytes=int(places.entries["stored_bytes"][members].astype(np.int64).sum()),
                        n_reads=len(tasks),
                        read_bytes=sum(task.stop - task.start for task in tasks),
                        choice=group.choice,
                    )
                )
        return tuple(sorted(out, key=lambda each: each.key))

    def _group(self, places: Places, target: Target, chunks: Any, total: int, n_chunks: int) -> Group:
        """Plan one large pack, or all packs with small amounts."""
        key = pack_key(places.packs[int(places.pack[chunks[0]])])
        entries = places.entries.take(chunks)
        try:
            with self._files.using(key) as file:
                choice = choose(self._situation(entries, file, total, n_chunks), self.rule, self._way)
        except BlobNotFoundError:
            raise
        except (BackendError, CorruptError):
            # The read finds this out again, and reports the affected chunks.
            choice = choose(self._situation(entries, None, total, n_chunks), self.rule)
        return Group(choice=choice, tasks=tasks_of(places, target, chunks, choice))

    def _situation(self, entries: Any, file: BlobFile | None, total: int, n_chunks: int) -> Situation:
        n_bytes = int(entries["stored_bytes"].astype(np.int64).sum())
        is_raw = bool((entries["codec"] == RAW.number).all())
        if file is None:
            return Situation(
                n_bytes=n_bytes,
                is_raw=is_raw,
                total_bytes=total,
                n_chunks=n_chunks,
                is_remote=self._backend.is_remote,
            )
        extents = plan_reads(
            np.zeros(len(entries), np.int64),
            entries["offset"],
            entries["stored_bytes"],
            max_gap_bytes=self.rule.gap_bytes,
            max_read_bytes=file.size,
        )
        stretches = [(extent.start, extent.stop) for extent in extents]
        return Situation(
            n_bytes=n_bytes,
            is_raw=is_raw,
            n_stretches=len(stretches),
            total_bytes=total,
            n_chunks=n_chunks,
            pack_bytes=file.size,
            share_in_memory=lambda: file.share_in_memory(stretches),
            can_direct=file.open_direct,
            can_ring=has_ring,
        )
