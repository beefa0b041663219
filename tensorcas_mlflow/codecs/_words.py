"""Words into planes of their bytes, and back: those of the words, or of what differs from a base, which may be grouped.

Compiled loops do it in one pass over memory. Without them numpy takes a step for each part of it, in blocks that stay
in the processor's cache from one step to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import _native
from tensorcas_mlflow.codecs._groups import Groups
from tensorcas_mlflow.codecs._scratch import SCRATCH
from tensorcas_mlflow.codecs._sizes import BLOCK_WORDS

_SIGNED: Mapping[int, Any] = {1: np.dtype("<i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


def room_for_planes(n_words: int, width: int) -> Any:
    """Give memory for the planes of words, one behind the other; this thread's scratch memory."""
    return SCRATCH.area("planes", n_words * width)


def planes_in(room: Any, width: int) -> list[Any]:
    """Part what `room_for_planes` gave among the planes, the least significant bytes first."""
    n_words = len(room) // width
    return [room[place * n_words : (place + 1) * n_words] for place in range(width)]


def split(words: Any, base: Any = None, groups: Groups | None = None) -> list[Any]:
    """Take words apart into planes.

    Args:
        words: Unsigned words, 1-d.
        base: As many of the same type: then the planes are of the zigzag differences. None for those of the words.
        groups: Of the base: then the planes are in the order of the groups. None for the order of the words.

    Returns:
        The planes, the least significant bytes first; ``words``, or this thread's scratch memory.
    """
    n_words, width = len(words), words.itemsize
    if n_words == 0 or (width == 1 and base is None):
        return [words.view(np.uint8)] * width
    room = room_for_planes(n_words, width)
    if _native.KERNELS is not None:
        _native.KERNELS.split(words, room, width, base, *_order(groups))
    else:
        if base is not None:
            out = SCRATCH.area("differences", words.nbytes).view(words.dtype)
            subtract(words, base, out)
            words = out
        _split(words if groups is None else groups.part(words), planes_in(room, width))
    return planes_in(room, width)


def join(room: Any, words: Any, base: Any = None, groups: Groups | None = None) -> None:
    """Put words together from planes; the reverse of `split`.

    Args:
        room: The planes, the least significant bytes first, one behind the other.
        words: Where the words go.
        base: As of `split`; other memory than ``words``.
        groups: As of `split`.
    """
    if len(words) == 0:
        return
    if _native.KERNELS is not None:
        _native.KERNELS.join(words, room, words.itemsize, base, *_order(groups))
        return
    grouped = words if groups is None else groups.area(words.dtype)
    _join(planes_in(room, words.itemsize), grouped)
    if groups is not None:
        groups.join(groups.split(grouped), words)
    if base is not None:
        add(words, base)


def subtract(words: Any, base: Any, out: Any) -> None:
    """Compute zigzag differences: words that are small where two are near.

    Args:
        words: Unsigned words, 1-d.
        base: As many of the same type.
        out: As many, for the differences; may be ``words``.
    """
    signed, top = _SIGNED[words.itemsize], 8 * words.itemsize - 1
    signs = _block("signs", words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        x, b, r = (each[begin : begin + BLOCK_WORDS] for each in (words, base, out))
        s = signs[: len(x)]
        np.subtract(x, b, out=r)
        np.right_shift(r.view(signed), top, out=s.view(signed))
        np.left_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)


def add(words: Any, base: Any) -> None:
    """Turn differences into the words they were made of, in place; the reverse of `subtract`."""
    signs = _block("signs", words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        r, b = words[begin : begin + BLOCK_WORDS], base[begin : begin + BLOCK_WORDS]
        s = signs[: len(r)]
        np.bitwise_and(r, 1, out=s)
        np.negative(s, out=s)
        np.right_shift(r, 1, out=r)
        np.bitwise_xor(r, s, out=r)
        np.add(r, b, out=r)


def _order(groups: Groups | None) -> tuple[Any, int, int]:
    return (None, 1, 1) if groups is None else (groups.classes, groups.n_groups, groups.unit)


def _block(use: str, dtype: Any) -> Any:
    return SCRATCH.area(use, BLOCK_WORDS * dtype.itemsize).view(dtype)


def _split(words: Any, planes: Sequence[Any]) -> None:
    shifted = _block("words", words.dtype)
    for begin in range(0, len(words), BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        part = shifted[: len(block)]
        for place, plane in enumerate(planes):
            # A cast to a narrower type keeps the low byte, and is several times as fast as a copy with strides.
            np.copyto(plane[begin : begin + len(block)], np.right_shift(block, 8 * place, out=part), casting="unsafe")


def _join(planes: Sequence[Any], words: Any) -> None:
    # Differences are small: their top planes are often nothing but zeros.
    while len(planes) > 1 and not planes[-1].any():
        planes = planes[:-1]
    for begin in range(0, len(words), BLOCK_WORDS):
        block = words[begin : begin + BLOCK_WORDS]
        end = begin + len(block)
        np.copyto(block, planes[-1][begin:end])
        for plane in planes[-2::-1]:
            np.left_shift(block, 8, out=block)
            np.bitwise_or(block, plane[begin:end], out=block)
