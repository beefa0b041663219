"""Content-defined boundaries for bytes that grow or shrink in the middle: a model's text, or a file of any format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import shake_256
from math import isqrt

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.native import core

WINDOW_BYTES = 32
MIN_BYTES = 1 << 10
"""The least distance between cuts in data shorter than 1 MiB."""

# Manifests record the cuts, so a later release may choose others; it would store such bytes once more.
_GEAR = np.frombuffer(shake_256(b"tensorcas gear").digest(1024), dtype="<u4").astype(np.uint32)


def piece_sizes(n_bytes: int) -> tuple[int, int, int]:
    """Return the least, the wanted and the greatest distance between cuts for a size in bytes.

    A chunk costs some 45 bytes at every step that includes it, and a change costs a chunk or two. The total is smallest
    if chunks grow with the root of the size. They double in steps, so growing bytes keep their cuts for long.
    """
    n_doublings = min(((n_bytes >> 20).bit_length() + 1) // 2, 4)
    least = MIN_BYTES << n_doublings
    return least, 3 * least, 16 * least


def opaque_sizes(chunk_bytes: int) -> tuple[int, int, int]:
    """Return the least, the wanted and the greatest distance between cuts in a file of an unknown format.

    A piece is one chunk. The search begins at half of it and mostly ends soon: a fifth of all bytes is hashed for cuts.
    A later start would hash fewer, but two versions of a file would take many pieces until two of their cuts coincide:
    12 on average from three quarters on, and 2 from half.
    """
    least = chunk_bytes // 2
    return least, least + chunk_bytes // 8, chunk_bytes


def group_ends(part_ends: Sequence[int], row_bytes: int, *, least: int = 4096, growth: int = 180) -> list[int]:
    """Group consecutive parts of a growing tensor into chunks, from its start, so that growth moves no boundary.

    A chunk costs every later manifest its digest, and rewriting the last, ragged group costs half its bytes,
    compressed. With n bytes stored, groups of sqrt(64 / ratio * n) bytes cost least.

    Args:
        part_ends: One past the last row of each part, ascending.
        row_bytes: Bytes of a row.
        least: Bytes of a group at the start of the tensor; less for rows that hardly compress.
        growth: 64, divided by the ratio to which such groups compress.

    Returns:
        One past the last row of each group. A group holds one part at least.
    """
    groups = []
    start = 0
    for end in part_ends:
        if (end - start) * row_bytes >= max(least, isqrt(growth * start * row_bytes)):
            groups.append(end)
            start = end
    if part_ends and start != part_ends[-1]:
        groups.append(part_ends[-1])
    return groups


def content_cuts(data: Array) -> list[int]:
    """Return cuts that give equal chunks for the common parts of two versions of some bytes.

    Args:
        data: 1-d uint8, of any length.

    Returns:
        Ascending offsets, the last one the length; empty for no bytes. The distances between neighbours, and from 0
        to the first, are within the limits of `piece_sizes`; only the last piece may be shorter. The same bytes give
        the same offsets, on any machine.
    """
    sizes = piece_sizes(len(data))
    cutter = ContentCutter(lambda _: sizes)
    cuts = cutter.feed(data)
    if len(data) > cutter.last:
        cuts.append(len(data))
    return cuts


class ContentCutter:
    """Content-defined cuts for a stream of unknown length: pieces grow with the offset instead of the size."""

    def __init__(self, sizes: Callable[[int], tuple[int, int, int]] = piece_sizes) -> None:
        """Begin at offset 0.

        Args:
            sizes: Returns the sizes of a piece for the offset of its start.
        """
        self.last = 0
        """Offset of the last cut; 0 before the first."""
        self._sizes = sizes
        self._n_bytes = 0
        self._open = [np.empty(0, dtype=np.uint8)]
        """The bytes since the last search, preceded by as many bytes as a window has."""
        self._first = sizes(0)[0]
        """The first possible place of a cut."""

    def feed(self, data: Array) -> list[int]:
        """Take the next bytes; the division of the bytes into calls changes nothing.

        Returns:
            The cuts in them, as ascending offsets from the very first byte; the end is no cut by itself.
        """
        self._open.append(data)
        self._n_bytes += len(data)
        # A file of many small tensors has a few bytes between any two of them, too few to search.
        return self._look() if self._n_bytes >= self._first else []

    def _look(self) -> list[int]:
        """Find the cuts in the open bytes."""
        before, *rest = self._open
        data = rest[0] if len(rest) == 1 else np.concatenate(rest)
        cuts = self._scan(before, data)
        self._open = [np.concatenate((before, data[-WINDOW_BYTES:]))[-WINDOW_BYTES:]]
        self._first = max(self._n_bytes + 1, self.last + self._sizes(self.last)[0])
        return cuts

    def _scan(self, before: Array, data: Array) -> list[int]:
        """Find the cuts in some bytes."""
        start = self._n_bytes - len(data)
        cuts: list[int] = []
        while True:
            least, wanted, greatest = self._sizes(self.last)
            first, stop = max(self.last + least - start, 1), min(self.last + greatest - start, len(data))
            found = 0
            if first <= stop:
                found = core.find_cut(before, data, first, stop, 2**32 // (wanted - least), _GEAR)
            if not found:
                if self.last + greatest > self._n_bytes:
                    return cuts
                found = stop
            self.last = start + found
            cuts.append(self.last)
