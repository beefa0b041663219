"""Tensors that a checkpoint keeps as boxes: a part is read from the boxes that it touches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.layout.manifests import Manifest, Rows
from tensorcas_mlflow.reader._slices import ElementPositions, Selection, select

_ASSEMBLE = "assemble"


class Box(NamedTuple):
    """One box of a tensor."""

    row: int
    """Number of its row in `BoxedTensors.manifest`."""
    offsets: tuple[int, ...]
    """Its first element along each axis of the tensor."""
    shape: tuple[int, ...]
    """Its sides."""


class BoxedTensors(NamedTuple):
    """The boxes of a checkpoint."""

    manifest: Manifest
    """The boxes as rows, of the dtypes of their tensors."""
    boxes: Mapping[int, tuple[Box, ...]]
    """The boxes of each tensor, by the tensor's row in the checkpoint. Together they are the tensor."""


def boxed_tensors(manifest: Manifest) -> BoxedTensors | None:
    """Find the tensors that are put together from boxes, exactly; None if there is none."""
    table = manifest.table
    found: dict[int, tuple[Box, ...]] = {}
    inputs: list[int] = []
    names: list[str] = []
    for each in manifest.derived:
        is_exact = len({int(table.dtype[row]) for row in (each.row, *each.inputs)}) == 1
        if each.function != _ASSEMBLE or not is_exact:
            continue
        tensor = manifest.columns.name(each.row)
        boxes: list[Box] = []
        for row, offsets in zip(each.inputs, each.params["offsets"], strict=True):
            boxes.append(Box(len(inputs), tuple(offsets), table.shape(row)))
            # For errors. The number makes the name unique.
            names.append(f"{tensor}, box {len(inputs)} at {list(offsets)}")
            inputs.append(row)
        found[each.row] = tuple(boxes)
    if not found:
        return None
    columns = dataclasses.replace(table.take(np.array(inputs, dtype=np.int64)), names=Texts.of(names))
    parts = Manifest(
        kind=manifest.kind,
        chunk_bytes=manifest.chunk_bytes,
        store_id=manifest.store_id,
        flavor=None,
        rows=Rows(columns),
        label=manifest.label,
    )
    return BoxedTensors(parts, found)


def select_from_boxes(
    boxes: tuple[Box, ...], selection: Selection, dtype: Any, read: Callable[[int, Selection], Array]
) -> Array:
    """Read the elements at the places of a selection, and no others.

    Args:
        boxes: The boxes of the tensor.
        selection: A selection of its elements, at least one.
        dtype: Its numpy dtype.
        read: Reads a selection of a box, given the box's row.

    Returns:
        An array with a side for each axis of the tensor; see `Selection.places`.
    """
    shape = tuple(map(len, selection.places))
    found = np.empty(0, dtype)
    for box in boxes:
        index, target = _part_in(box, selection)
        if any(part.start == part.stop for part in target):
            continue
        part = read(box.row, select(box.shape, index))
        if part.shape == shape:
            return part
        if found.shape != shape:
            found = np.empty(shape, dtype)
        found[target] = part
    return found


def in_one_box(boxes: tuple[Box, ...], selection: Selection) -> tuple[int, Selection] | None:
    """Return the row of the box with all elements at the places of a selection, and the selection of them there.

    None if several boxes have some.
    """
    shape = tuple(map(len, selection.places))
    for box in boxes:
        index, target = _part_in(box, selection)
        if tuple(part.stop - part.start for part in target) == shape:
            return box.row, select(box.shape, index)
    return None


def _part_in(box: Box, selection: Selection) -> tuple[tuple[ElementPositions | slice, ...], tuple[slice, ...]]:
    """Return an index of a box for the places of a selection that lie in it, and the position of these among all."""
    index: list[ElementPositions | slice] = []
    target: list[slice] = []
    for places, offset, side in zip(selection.places, box.offsets, box.shape, strict=True):
        low, high = _count_below(places, offset), _count_below(places, offset + side)
        target.append(slice(low, high))
        index.append(_moved(places[low:high], offset))
    return tuple(index), tuple(target)


def _count_below(places: ElementPositions, bound: int) -> int:
    """Count the places below a bound."""
    if isinstance(places, range):
        return len(range(places.start, min(places.stop, bound), places.step))
    return int(np.searchsorted(places, bound))


def _moved(places: ElementPositions, offset: int) -> ElementPositions | slice:
    """Return an index of a box for places of its tensor."""
    if isinstance(places, range):
        return slice(places.start - offset, places.stop - offset, places.step)
    return places - offset
