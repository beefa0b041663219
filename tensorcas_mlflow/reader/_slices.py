"""Byte ranges for an index of numpy into an array, and the chunks with these bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.base.tensors import Offsets, distinct

ElementPositions = range | Offsets
"""Positions of one axis, ascending, each once. An axis may have very many."""

_MOST_RUNS = 1 << 20
"""More runs are merged, together with the gaps between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Some elements of an array in C order, as runs of adjacent elements."""

    index: Any
    """As numpy takes it, for the window."""
    window: tuple[int, ...]
    """Shape of the smallest range of axis 0, with all of the other axes, around all selected elements."""
    origin: int
    """The window's first element in the array."""
    starts: Offsets
    """Starts of the runs, in elements, ascending."""
    stops: Offsets
    """Ends of the runs, exclusive; runs do not overlap. They may hold more than the requested elements."""
    places: tuple[ElementPositions, ...]
    """Selected places of each axis, ascending, each once."""
    index_of_places: Any
    """As numpy takes it, for an array of the elements at these places alone."""

    @property
    def n_read(self) -> int:
        """The number of elements in all runs."""
        return int((self.stops - self.starts).sum())

    @property
    def is_one_run(self) -> bool:
        """True if the chosen elements are one stretch."""
        return len(self.starts) == 1 and self.n_read == math.prod(map(len, self.places))


def select(shape: tuple[int, ...], index: Any) -> Selection:
    """Convert an index into a selection of an array's elements.

    Args:
        shape: Of the array.
        index: Whole numbers, slices with any step, ``...``, ``None``, and at most one list or 1-d array of whole
            numbers or of bools, as numpy has them.

    Raises:
        IndexError: It is out of bounds, has too many dimensions, or is of another kind.
    """
    axes, given = _axes(shape, index)
    chosen = [_places(part, axis, side) for axis, (part, side) in enumerate(zip(axes, shape, strict=True))]
    places, of_places = tuple(chosen), _of_places(given, shape, chosen)
    if any(len(axis) == 0 for axis in chosen):
        none = np.empty(0, dtype=np.int64)
        return Selection(
            index=given, window=shape, origin=0, starts=none, stops=none, places=places, index_of_places=of_places
        )
    window, origin = shape, 0
    if shape:
        first, stop = int(chosen[0][0]), int(chosen[0][-1]) + 1
        window, origin = (stop - first, *shape[1:]), first * math.prod(shape[1:])
        given = _moved(given, len(shape), shape[0], first)
    # Behind the last restricted axis, all elements are contiguous.
    last = max((at for at, places in enumerate(chosen) if len(places) < shape[at]), default=-1)
    while last >= 0 and math.prod(len(places) for places in chosen[:last]) * _n_runs(chosen[last]) > _MOST_RUNS:
        chosen[last] = range(int(chosen[last][0]), int(chosen[last][-1]) + 1)
        last = max(last - 1, 0)
    starts, stops = _elements(shape, chosen, last)
    return Selection(
        index=given,
        window=window,
        origin=origin,
        starts=starts,
        stops=stops,
        places=places,
        index_of_places=of_places,
    )


def divided(
    shape: tuple[int, ...], whole: Selection, is_small: Callable[[Selection], bool]
) -> Iterator[tuple[tuple[slice, ...], Selection]]:
    """Divide a selection into small ones, or ones of one run each.

    Yields:
        The position of each part in an array of all selected places (`Selection.places`), and the part itself, a
        selection of exactly those elements.
    """
    waiting = [tuple(slice(0, len(places)) for places in whole.places)]
    while waiting:
        box = waiting.pop()
        part = select(shape, tuple(_as_index(axis[side]) for axis, side in zip(whole.places, box, strict=True)))
        at = next((at for at, side in enumerate(box) if side.stop - side.start > 1), None)
        if at is None or part.is_one_run or is_small(part):
            yield box, part
            continue
        half = (box[at].start + box[at].stop) // 2
        for side in (slice(half, box[at].stop), slice(box[at].start, half)):
            waiting.append((*box[:at], side, *box[at + 1 :]))


def _as_index(places: ElementPositions) -> Any:
    return slice(places.start, places.stop, places.step) if isinstance(places, range) else places


def _of_places(index: tuple[Any, ...], shape: tuple[int, ...], chosen: list[ElementPositions]) -> tuple[Any, ...]:
    """Write an index for an array of only the selected places."""
    n_axes = sum(part is not None and part is not Ellipsis for part in index)
    written: list[Any] = []
    axis = 0
    for part in index:
        if part is None or part is Ellipsis:
            written.append(part)
            axis += len(shape) - n_axes if part is Ellipsis else 0
            continue
        if isinstance(part, slice):
            written.append(slice(None, None, -1 if part.step is not None and part.step < 0 else None))
        elif not isinstance(part, np.ndarray):
            written.append(0)
        elif part.dtype.kind == "b":
            written.append(np.arange(len(chosen[axis])))
        else:
            written.append(np.searchsorted(chosen[axis], part.astype(np.int64) % max(shape[axis], 1)))
        axis += 1
    return tuple(written)


def _elements(shape: tuple[int, ...], chosen: list[ElementPositions], last: int) -> tuple[Offsets, Offsets]:
    """Return the runs of elements for the places of each axis; behind axis ``last`` each axis has one run."""
    if last < 0:
        return np.zeros(1, np.int64), np.array([math.prod(shape)], dtype=np.int64)
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    first, stop = _runs(chosen[last])
    starts, stops = first * strides[last], stop * strides[last]
    below = range(last + 1, len(shape))
    # Points strictly inside a run stay as they are.
    starts = starts + sum(int(chosen[at][0]) * strides[at] for at in below)
    stops = stops - sum(int(shape[at] - 1 - chosen[at][-1]) * strides[at] for at in below)
    for at in reversed(range(last)):
        base = (_array(chosen[at]) * strides[at])[:, None]
        starts, stops = (base + starts).reshape(-1), (base + stops).reshape(-1)
    joins = np.flatnonzero(starts[1:] > stops[:-1])
    return starts[np.concatenate(([0], joins + 1))], stops[np.concatenate((joins, [len(stops) - 1]))]


def _moved(index: tuple[Any, ...], n_dimensions: int, side: int, first: int) -> tuple[Any, ...]:
    """Write an index for the range of axis 0 from ``first`` on; the selected elements lie in it."""
    n_axes = sum(part is not None and part is not Ellipsis for part in index)
    skipped = (None, Ellipsis) if n_axes == n_dimensions else (None,)
    nth = next(nth for nth, part in enumerate(index) if not any(part is each for each in skipped))
    part: Any = index[nth]
    if part is Ellipsis:
        return index  # all of axis 0
    if isinstance(part, slice):
        start, stop, step = part.indices(side)
        stop -= first
        part = slice(start - first, None if step < 0 and stop < 0 else stop, step)
    elif isinstance(part, np.ndarray):
        part = (np.flatnonzero(part) if part.dtype.kind == "b" else part.astype(np.int64) % side) - first
    else:
        part = part % side - first
    return (*index[:nth], part, *index[nth + 1 :])


def _axes(shape: tuple[int, ...], index: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the index of each axis, and the index in numpy's own terms."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [_part(part) for part in parts]
    n_axes = sum(part is not None and part is not Ellipsis for part in parts)
    if sum(part is Ellipsis for part in parts) > 1 or n_axes > len(shape):
        raise IndexError(f"a tensor of shape {shape} has fewer axes than {index!r:.200} names, or it names ... twice")
    if sum(isinstance(part, np.ndarray) for part in parts) > 1:
        raise IndexError("a part is chosen by one list of numbers at most: read it, and choose more then")
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    at = next(nth for nth, part in enumerate(parts) if part is Ellipsis)
    filled = [*parts[:at], *[slice(None)] * (len(shape) - n_axes), *parts[at + 1 :]]
    return [part for part in filled if part is not None], tuple(parts)


def _part(part: Any) -> Any:
    if part is None or part is Ellipsis or isinstance(part, slice):
        return part
    is_many = isinstance(part, Sequence) and not isinstance(part, str | bytes)
    if is_many or (hasattr(part, "__array__") and np.ndim(part) > 0):
        array = np.asarray(part)
        if array.size == 0:
            array = array.astype(np.int64)
        if array.ndim == 1 and array.dtype.kind in "iub":
            return array
    elif not isinstance(part, bool | np.bool_):
        try:
            return operator.index(part)
        except TypeError:
            pass
    raise IndexError(f"a part is chosen by whole numbers, slices, ..., None or a list of numbers, not {part!r:.200}")


def _places(part: Any, axis: int, side: int) -> ElementPositions:
    """Return the selected places of one axis, ascending."""
    if isinstance(part, slice):
        places = range(side)[part]
        return places if places.step > 0 else places[::-1]
    if isinstance(part, np.ndarray):
        if part.dtype.kind == "b":
            if len(part) != side:
                raise IndexError(f"{len(part)} bools do not choose from axis {axis} with size {side}")
            return np.flatnonzero(part)
        found = distinct(part.astype(np.int64))
        if len(found) and not -side <= found[0] <= found[-1] < side:
            raise _out_of_bounds(int(found[0] if found[0] < -side else found[-1]), axis, side)
        return distinct(found % side) if side else found
    if not -side <= part < side:
        raise _out_of_bounds(part, axis, side)
    place = part % side
    return range(place, place + 1)


def _out_of_bounds(place: int, axis: int, side: int) -> IndexError:
    return IndexError(f"index {place} is out of bounds for axis {axis} with size {side}")


def _n_runs(places: ElementPositions) -> int:
    if isinstance(places, range):
        return 1 if places.step == 1 else len(places)
    return 1 + int((np.diff(places) > 1).sum())


def _runs(places: ElementPositions) -> tuple[Offsets, Offsets]:
    if isinstance(places, range) and places.step == 1:
        return np.array([places.start]), np.array([places.stop])
    found = _array(places)
    ends = np.flatnonzero(np.diff(found) > 1)
    starts = found[np.concatenate(([0], ends + 1))]
    return starts, found[np.concatenate((ends, [len(found) - 1]))] + 1


def _array(places: ElementPositions) -> Offsets:
    if isinstance(places, range):
        return np.arange(places.start, places.stop, places.step, dtype=np.int64)
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksToFill:
    """Chunks to read to fill memory with runs of bytes: each touched chunk once, and whole."""

    chunks: Offsets
    """Their numbers, ascending."""
    outs: list[memoryview]
    """A buffer for each: its place in the memory, or one beside it if it has bytes outside."""
    block: memoryview
    aside: list[tuple[memoryview, int, int]]
    """Buffers beside the memory, and the begin and the end of their chunks, counted from its first byte."""

    @classmethod
    def of(cls, ends: Offsets, starts: Offsets, stops: Offsets, block: memoryview) -> ChunksToFill:
        """Find the chunks.

        Args:
            ends: The ends of the chunks, ascending.
            starts: See `Contents.fill`.
            stops: See `Contents.fill`.
            block: See `Contents.fill`.
        """
        first, last = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, stops - 1, side="right")
        # The count starts at the first chunk of all: a file may have very many before this one.
        lowest = int(first[0])
        steps = np.zeros(int(last[-1]) - lowest + 2, dtype=np.int64)
        np.add.at(steps, first - lowest, 1)
        np.add.at(steps, last - lowest + 1, -1)
        chunks = lowest + np.flatnonzero(steps.cumsum()[:-1])
        base, size = int(starts[0]), len(block)
        begins = np.where(chunks > 0, ends[chunks - 1], 0) - base
        outs: list[memoryview] = []
        aside: list[tuple[memoryview, int, int]] = []
        for begin, end in zip(begins.tolist(), (ends[chunks] - base).tolist(), strict=True):
            if begin >= 0 and end <= size:
                outs.append(block[begin:end])
            else:
                outs.append(np.empty(end - begin, dtype=np.uint8).data)
                aside.append((outs[-1], begin, end))
        return cls(chunks=chunks, outs=outs, block=block, aside=aside)

    @property
    def n_bytes_aside(self) -> int:
        """Bytes of the buffers beside the memory."""
        return sum(len(data) for data, _, _ in self.aside)

    def finish(self) -> None:
        """Copy what lies beside the memory, once all chunks are read."""
        size = len(self.block)
        for data, begin, end in self.aside:
            low, high = max(begin, 0), min(end, size)
            self.block[low:high] = data[low - begin : high - begin]
