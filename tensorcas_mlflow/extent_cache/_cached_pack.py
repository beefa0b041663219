"""What the cache holds of one pack, looked up for many chunks at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.extent_cache._file import BLOCK_BYTES, ExtentFile, Int64s
from tensorcas_mlflow.readplan import plan_reads


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRead:
    """One read of the cache, and the chunks it brings."""

    members: Int64s
    """Which of the chunks asked for it holds, by their number."""
    begins: Int64s
    """Where each member begins in what `read` returns."""
    _file: ExtentFile
    _start: int
    _stop: int

    def read(self) -> memoryview | None:
        """Read and verify; any thread may.

        Returns:
            Stored bytes, each member's from its place in ``begins`` on, in memory of the caller's own; None if they
            have gone from the cache or were damaged, which removes them.
        """
        try:
            return self._file.read(self._start, self._stop)
        except CorruptError:
            self.discard()
        except OSError:
            pass
        return None

    def discard(self) -> None:
        """Remove from the cache what this read brings: the cache gave what was put, and that turned out to be wrong."""
        with contextlib.suppress(OSError):
            os.unlink(self._file.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Which chunks are in the cache, and how to read them."""

    held: np.ndarray[Any, np.dtype[np.bool_]]
    """For each chunk asked for, whether the cache has it."""
    reads: list[CachedRead]
    """Each chunk that is held is a member of one of them."""


class CachedPack:
    """What was there of a pack when it was opened. Some of it may be gone by now; then a read brings None."""

    def __init__(self, files: Sequence[ExtentFile]) -> None:
        self._files = files
        self._starts = _joined([file.starts for file in files])
        self._stops = _joined([file.stops for file in files])
        self._positions = _joined([file.positions for file in files])
        self._payloads = np.array([file.payload_bytes for file in files], dtype=np.int64)
        self._numbers = np.repeat(np.arange(len(files)), [len(file.starts) for file in files])
        order = np.argsort(self._starts, kind="stable")
        self._sorted_starts = self._starts[order]
        stops = self._stops[order]
        reach = np.maximum.accumulate(stops)
        # Extents of several loads may overlap. Of those that begin at or before a chunk, the one that reaches farthest
        # holds the chunk if any does.
        farthest = np.maximum.accumulate(np.where(stops == reach, np.arange(len(stops)), 0))
        self._farthest = order[farthest]

    @property
    def n_extents(self) -> int:
        """How many extents there are."""
        return len(self._starts)

    def find(self, offsets: Any, lengths: Any) -> Found:
        """Look many chunks up, and plan how to read those that are held.

        Args:
            offsets: For each chunk where it begins in the pack; any integer dtype.
            lengths: For each chunk how many bytes it has there.

        Returns:
            What is held, and reads of some 8 MiB each: chunks that lie near each other in a file are read together.
        """
        offsets, lengths = np.asarray(offsets).astype(np.int64), np.asarray(lengths).astype(np.int64)
        if not len(self._starts):
            return Found(held=np.zeros(len(offsets), dtype=bool), reads=[])
        place = np.searchsorted(self._sorted_starts, offsets, side="right") - 1
        extent = self._farthest[np.maximum(place, 0)]
        # Not offsets + lengths, which could overflow.
        held = (place >= 0) & (lengths > 0) & (offsets <= self._stops[extent] - lengths)
        chosen = np.flatnonzero(held)
        extent = extent[chosen]
        positions = self._positions[extent] + offsets[chosen] - self._starts[extent]
        numbers = self._numbers[extent]
        # In whole blocks, as these are what is read and hashed: chunks of one block are one read.
        begins = positions // BLOCK_BYTES * BLOCK_BYTES
        ends = -(-(positions + lengths[chosen]) // BLOCK_BYTES) * BLOCK_BYTES
        ends = np.minimum(ends, self._payloads[numbers])
        reads = [
            CachedRead(
                members=chosen[read.members],
                begins=positions[read.members] - read.start,
                _file=self._files[read.pack],
                _start=read.start,
                _stop=read.stop,
            )
            for read in plan_reads(numbers, begins, ends - begins)
        ]
        return Found(held=held, reads=reads)


def _joined(arrays: list[Int64s]) -> Int64s:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)
