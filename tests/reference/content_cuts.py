"""Content-defined cuts with numpy; `tensorcas_mlflow.base.content_cuts` says what they are."""

from __future__ import annotations

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.content_cuts import _GEAR, WINDOW_BYTES, ContentCutter

_BLOCK_BYTES = 1 << 15


class ReferenceCutter(ContentCutter):
    """A cutter that hashes whole blocks of places at once."""

    def _scan(self, before: Array, data: Array) -> list[int]:
        sums = np.empty((2, WINDOW_BYTES + min(len(data), _BLOCK_BYTES)), dtype=np.uint32)
        cuts: list[int] = []
        stop = self._n_bytes - len(data)
        for at in range(0, len(data), _BLOCK_BYTES):
            end = at + _BLOCK_BYTES
            if stop + _BLOCK_BYTES < self.last + self._sizes(self.last)[0] and end < len(data):
                # No cut is possible in this block.
                stop += _BLOCK_BYTES
                before = data[end - WINDOW_BYTES : end]
                continue
            # The bytes before a place decide on its cut, so those before the block are hashed along.
            hashed = np.concatenate((before, data[at:end]))
            hashes = _hashes(hashed, sums)[len(before) :]
            stop += len(hashes)
            cuts += self._cuts_in(hashes, stop)
            before = hashed[-WINDOW_BYTES:]
        return cuts

    def _cuts_in(self, hashes: Array, stop: int) -> list[int]:
        """Choose cuts by hashes of consecutive places; the last place is ``stop``."""
        start = stop - len(hashes)
        cuts: list[int] = []
        found: tuple[int, Array] | None = None
        while True:
            least, wanted, greatest = self._sizes(self.last)
            # One in so many hashes is as small. Fewer end larger pieces, but some of the same.
            small = 2**32 // (wanted - least)
            if found is None or found[0] != small:
                found = small, start + 1 + np.flatnonzero(hashes < np.uint32(small))
            places = found[1]
            at = np.searchsorted(places, self.last + least)
            end = int(places[at]) if at < len(places) else stop + 1
            end = min(end, self.last + greatest)
            if end > stop:
                return cuts
            cuts.append(end)
            self.last = end


def _hashes(data: Array, sums: Array) -> Array:
    """Return the hash of the window ending with each byte; the first 31 windows are incomplete."""
    old, new = sums[0, : len(data)], sums[1, : len(data)]
    np.take(_GEAR, data, out=old, mode="clip")
    width = 1
    while width < WINDOW_BYTES:
        new[:width] = old[:width]
        np.left_shift(old[:-width], np.uint32(width), out=new[width:])
        new[width:] += old[width:]
        old, new = new, old
        width *= 2
    return old
