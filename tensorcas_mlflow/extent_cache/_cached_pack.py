"""The cached extents of one pack, with lookups of many chunks at once."""

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
    """One read of the cache, and its chunks."""

    members: Int64s
    """Numbers of the requested chunks it holds."""
    begins: Int64s
    """Start of each member in the result of `read`."""
    _file: ExtentFile
    _start: int
    _stop: int

    def read(self) -> memoryview | None:
        """Read and verify; any thread may.

        Returns:
            Stored bytes, each member's from its place in ``begins`` on, in memory of the caller's own; None if they
            are gone from the cache or were damaged; damaged ones are removed.
        """
        try:
            return self._file.read(self._start, self._stop)
        except CorruptError:
            self.discard()
        except OSError:
            pass
        return None

    def discard(self) -> None:
        """Remove this read's extents from the cache: they are as put, and turned out to be wrong."""
        with contextlib.suppress(OSError):
            os.unlink(self._file.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The requested chunks in the cache, and their reads."""

    held: np.ndarray[Any, np.dtype[np.bool_]]
    """For each requested chunk, whether the cache has it."""
    reads: list[CachedRead]
    """The reads; each chunk in the cache is a member of one of them."""


class CachedPack:
    """The cached extents of a pack at the time of opening. Some may be gone by now; then a read returns None."""

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
        # Extents of several loads may overlap. Of those beginning at or before a chunk, the one reaching farthest
        # holds the chunk if any does.
        farthest = np.maximum.accumulate(np.where(stops == reach, np.arange(len(stops)), 0))
        self._farthest = order[farthest]

    @property
    def n_extents(self) -> int:
        """Return the number of extents."""
        return len(self._starts)

    def find(self, offsets: Any, lengths: Any) -> Found:
        """Look many chunks up, and plan the reads of those found.

        Args:
            offsets: For each chunk its start in the pack; any integer dtype.
            lengths: For each chunk its size in the pack.

        Returns:
            The chunks found, and reads of some 8 MiB each: chunks near each other in a file are read together.
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
        # In whole blocks, as reads and digests cover blocks: chunks of one block are one read.
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
