"""Whether stored values are equal, and whether memory that targets share is given equal ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors._generic_facts import REMEDY
from tensorcas_flavors._torch_generators import state_of
from tensorcas_flavors._torch_storages import overlapping
from tensorcas_flavors._torch_tensors import as_array, extent_bytes, pytorch_error, raw_view
from tensorcas_flavors._torch_tree import is_tensor
from tensorcas_mlflow.adapter import Array

if TYPE_CHECKING:
    import torch


def is_same(one: Any, other: Any, _met: set[tuple[int, int]] | None = None) -> bool:
    """Tell whether two nests of plain values, tensors and what was read are equal, types and bits included."""
    met = set() if _met is None else _met
    if one is other or (id(one), id(other)) in met:
        return True
    if is_tensor(one) and is_tensor(other):
        return bool(one.dtype == other.dtype) and _is_same_array(as_array(one.cpu()), as_array(other.cpu()))
    if type(one) is not type(other):
        return False
    met.add((id(one), id(other)))
    if isinstance(one, np.ndarray | np.generic):
        return _is_same_array(np.asarray(one), np.asarray(other))
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            is_same(key, other_key, met) and is_same(part, other_part, met)
            for (key, part), (other_key, other_part) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(is_same(part, again, met) for part, again in zip(one, other, strict=True))
    if is_dataclass(one):
        return all(is_same(getattr(one, each.name), getattr(other, each.name), met) for each in fields(one))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    state = state_of(one)
    return bool(one == other) if state is None else is_same(state, state_of(other), met)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Memory that is to be filled."""

    where: str
    """What to call it in errors."""
    target: Any
    """A tensor or an array."""
    source: Any
    """The like, of the same shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    start: int
    stop: int
    first: int
    """Address of the first element."""
    stride: tuple[int, ...]
    """Bytes from one index to the next, per axis."""


def check_memory(filled: Sequence[Filled]) -> None:
    """See that no memory is given one value and then another.

    Raises:
        AdapterError: It is.
    """
    by_device: dict[str, dict[int, _Extent]] = {}
    for n, each in enumerate(filled):
        extent = _extent_of(each.target)
        if extent is not None and extent.stop > extent.start:
            device = "cpu" if isinstance(each.target, np.ndarray) else str(each.target.device)
            by_device.setdefault(device, {})[n] = extent
    for extents in by_device.values():
        for group in overlapping(list(extents), extents):
            if len(group) > 1:
                _check_group([filled[n] for n in group], [extents[n] for n in group])


def _check_group(group: Sequence[Filled], extents: Sequence[_Extent]) -> None:
    if len({(_extent_of(each.source), each.source.dtype, each.target.dtype) for each in group} | {*extents}) == 2:
        return  # one tensor for all
    base = min(extent.start for extent in extents)
    memory = np.zeros(max(extent.stop for extent in extents) - base, dtype=np.uint8)
    words = []
    for each, extent in zip(group, extents, strict=True):
        values = _as_filled(each)
        kind = raw_view(values)
        view: Array = np.ndarray(values.shape, kind, memory, extent.first - base, extent.stride)
        words.append((view, np.ascontiguousarray(values).view(kind).reshape(values.shape)))
        view[...] = words[-1][1]
    for each, (view, wanted) in zip(group, words, strict=True):
        if view.tobytes() != wanted.tobytes():
            others = ", ".join(repr(other.where) for other in group if other is not each)
            raise pytorch_error(
                f"{each.where!r} shares memory with {others}, and different values are stored for them: {REMEDY}"
            )


def _as_filled(each: Filled) -> Array:
    if isinstance(each.target, np.ndarray):
        return each.source  # type: ignore[no-any-return]
    return as_array(each.source.detach().to("cpu", each.target.dtype))


def _extent_of(target: torch.Tensor | Array) -> _Extent | None:
    if isinstance(target, np.ndarray):
        start, stop = np.lib.array_utils.byte_bounds(target)
        return _Extent(start=start, stop=stop, first=target.ctypes.data, stride=target.strides)
    try:
        start = target.data_ptr()
        stop = start + extent_bytes(target.shape, target.stride(), target.itemsize)
    except RuntimeError:  # it has no memory
        return None
    stride = tuple(step * target.itemsize for step in target.stride())
    return _Extent(start=start, stop=stop, first=start, stride=stride) if start else None


def _is_same_array(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
