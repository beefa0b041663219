"""Where to cut bytes that grow or shrink in the middle, such as a model's text: places chosen by content.

A place is a cut if a hash of the 32 bytes before it is small. So a cut depends on what lies around it and not on its
offset: bytes put in or taken out change the chunk they fall into, perhaps one or two after it, and no others.

The hash is the gear hash of W. Xia et al., "Ddelta: A Deduplication-Inspired Fast Delta Compression Approach",
Performance Evaluation 79 (2014): h(i) = sum over k of gear[b(i - k)] * 2**k, modulo 2**32. A byte 32 places back is
shifted out, which bounds the window. The rule with a least and a greatest size is that of "FastCDC" by the same group,
USENIX ATC 2016. Summing up one byte after another is slow in Python; numpy gets the sums of windows of 2, 4, 8, 16 and
32 bytes in five passes, each from two shifted copies of the last.
"""

from __future__ import annotations

from hashlib import shake_256

import numpy as np

from tensorcas_mlflow.adapter import Array

WINDOW_BYTES = 32
MIN_BYTES = 1 << 10
"""The least distance of cuts in what is shorter than 1 MiB."""

# Cuts are written down with the chunks, so a later release may choose others; it would store such bytes once more.
_GEAR = np.frombuffer(shake_256(b"tensorcas gear").digest(1024), dtype="<u4").astype(np.uint32)
_BLOCK_BYTES = 1 << 15  # what fits a processor's cache four times over, as uint32


def piece_sizes(n_bytes: int) -> tuple[int, int, int]:
    """Return the least, the wanted and the greatest distance of cuts in so many bytes.

    A chunk costs some 45 bytes at every step it is part of, and a change costs a chunk or two: together least where
    chunks grow with the root of the size. They double in steps, so that bytes that grow keep their cuts for long.
    """
    n_doublings = min(((n_bytes >> 20).bit_length() + 1) // 2, 4)
    least = MIN_BYTES << n_doublings
    return least, 3 * least, 16 * least


def content_cuts(data: Array) -> list[int]:
    """Say where to cut bytes so that what two versions of them have in common gives the same chunks.

    Args:
        data: 1-d uint8, of any length.

    Returns:
        Ascending offsets, the last one the length; empty for no bytes. Two neighbours, and 0 and the first, are as far
        apart as `piece_sizes` says; only the last piece may be shorter. The same bytes give the same offsets, on any
        machine.
    """
    n_bytes = len(data)
    least, wanted, greatest = piece_sizes(n_bytes)
    # As small are one in so many hashes. Larger pieces are ended by fewer, but by some of the same.
    small = np.uint32(2**32 // (wanted - least))
    cuts: list[int] = []
    last = 0
    sums = np.empty((2, WINDOW_BYTES + _BLOCK_BYTES), dtype=np.uint32)
    for start in range(0, n_bytes, _BLOCK_BYTES):
        stop = min(start + _BLOCK_BYTES, n_bytes)
        # A cut is judged by the bytes before it, so those before the block are hashed along.
        before = max(start - WINDOW_BYTES, 0)
        places = before + 1 + np.flatnonzero(_hashes(data[before:stop], sums) < small)
        while True:
            at = np.searchsorted(places, max(last + least, start + 1))
            end = int(places[at]) if at < len(places) else n_bytes + 1
            end = min(end, last + greatest)
            if end > stop:
                break
            cuts.append(end)
            last = end
    if n_bytes > last:
        cuts.append(n_bytes)
    return cuts


def _hashes(data: Array, sums: Array) -> Array:
    """Return the hash of the window that ends with each byte; in the first 31 places it is of what there is."""
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
