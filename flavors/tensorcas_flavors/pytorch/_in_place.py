"""Filling of live tensors straight from the store, without a second copy of them.

A plan of the filling is made twice. The first has memory that is never touched in place of the stored tensors, and
shows which live tensor gets which row. The second has the live tensors themselves in place of the rows that can be read
straight into them, and new memory for all others. The rows are read between the check of the second plan and its
execution, which then copies these tensors to themselves.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors.pytorch._fill import plan_filling
from tensorcas_flavors.pytorch._layout import ARRAY, NUMBERS, ModelLayout, as_tensors, read_layout
from tensorcas_flavors.pytorch._modules import PARTLY_FILLED
from tensorcas_flavors.pytorch._objects import is_tensor
from tensorcas_flavors.pytorch._tensors import (
    Copy,
    StorageView,
    as_array,
    dtype_name,
    extent_of,
    geometry,
    memory_refusal,
    overlapping,
    refusal,
    row_dtype,
    row_major,
)
from tensorcas_flavors.pytorch._tree import ModuleFacts, NamedItems, OpaqueFacts, PickleOnly, StoredObject, read_stored
from tensorcas_mlflow.adapter import SKELETON, Array, CheckTensors, ReadTensors, StoredTensor
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.errors import AdapterError, TensorCasError

if TYPE_CHECKING:
    import torch

LEAST_BYTES = 1 << 20
"""Smaller models are read into new memory: two plans take longer than a copy."""
LEAST_ROW_BYTES = 4096
"""Smaller rows are read into new memory."""
_ALIGNMENT = 64


def fill_in_place(
    original: Any,
    stored: Mapping[str, StoredTensor],
    read: ReadTensors,
    check: CheckTensors | None,
    *,
    strict: bool,
) -> Any:
    """Fill a live object; see `tensorcas_flavors.pytorch._fill.fill`.

    A row is read straight into a live tensor on the CPU that is contiguous, has the row's dtype, shares memory with no
    other, and is filled with this row alone. The others, and all rows of a module that changes its state dict on
    loading, are read into new memory before anything changes.

    Args:
        original: See there.
        stored: The rows.
        read: Reader of the rows.
        check: Check of the rows to read straight into live tensors, before the first one changes; None if only a read
            finds damage.
        strict: See there.

    Raises:
        AdapterError: See there.
        TensorCasError: A row cannot be read. If the object is filled in part by then, a note of the error says so.
    """
    rows = dict(read([SKELETON])) if SKELETON in stored else {}
    layout = read_layout(rows)
    live, aliases = _live_tensors(original, stored, read, rows, layout, strict=strict)
    rest = [name for name in stored if name not in rows and name not in live]
    rows |= read(rest)
    rows |= {name: as_array(tensor) for name, tensor in live.items()}
    plan, filled = plan_filling(original, _stored(layout, stored, rows, live), strict=strict)
    if live:
        if check is not None:
            check(list(live))
        _read_into(read, {name: tensor for name, tensor in live.items() if name not in aliases})
    plan.execute()
    return filled


def _stored(
    layout: ModelLayout, stored: Mapping[str, StoredTensor], rows: Mapping[str, Array], live: Mapping[str, torch.Tensor]
) -> Any:
    """Read the stored value from rows, with live tensors in place of some."""
    ordered = {name: rows[name] for name in stored}
    return read_stored(layout, ordered, {**as_tensors(ordered, layout), **live}, skip_missing=True)


def _read_into(read: ReadTensors, live: Mapping[str, torch.Tensor]) -> None:
    import torch

    try:
        read(list(live), out={name: as_array(tensor) for name, tensor in live.items()})
    except TensorCasError as error:
        error.add_note(PARTLY_FILLED)
        raise
    finally:
        # Autograd does not see writes by numpy: a graph that needs the old values must fail.
        for tensor in live.values():
            torch.autograd.graph.increment_version(tensor)


def _live_tensors(
    original: Any,
    stored: Mapping[str, StoredTensor],
    read: ReadTensors,
    rows: dict[str, Array],
    layout: ModelLayout,
    *,
    strict: bool,
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Choose the rows to read straight into live tensors.

    Args:
        rows: Takes the rows that the first plan needs.

    Returns:
        The live tensor of each such row; and the rows that are other names of one of them.
    """
    sizes = {name: _n_bytes(spec) for name, spec in stored.items()}
    first_of = _aliases(layout, stored)
    in_storages = {view.name for views in layout.storages for view in views}
    late = [
        name
        for name, n_bytes in sizes.items()
        if n_bytes >= LEAST_ROW_BYTES
        and stored[name].dtype not in (None, "uint8")  # the states of generators are uint8
        and layout.kinds.get(name) not in (ARRAY, NUMBERS)
        and (name in first_of or name not in in_storages)
    ]
    if sum(sizes[name] for name in late) < LEAST_BYTES:
        return {}, set()
    rows |= read([name for name in stored if name not in rows and name not in set(late)])
    untouched = _untouched({name: stored[name] for name in late})
    at = {array.ctypes.data: name for name, array in untouched.items()}
    try:
        value = _stored(layout, stored, rows | untouched, {})
        uses = _uses(value)
        plan, _ = plan_filling(original, value, strict=strict, has_values=False)
    except AdapterError:
        return {}, set()  # values may decide whether the object fits
    copies = [*plan.copies, *plan.replaced]
    by_row: dict[str, list[Copy]] = {}
    for copy in copies:
        if _address(copy.source) in at:
            by_row.setdefault(at[_address(copy.source)], []).append(copy)
    alone = _alone(copies, at)
    live = {}
    for name, found in by_row.items():
        target, address = found[0].target, untouched[name].ctypes.data
        if uses[address] == len(found) and name in alone and all(_takes(each, stored[name]) for each in found):
            live[name] = target.detach()
    names = {name: live[first] for name, first in first_of.items() if first in live}
    return live | names, names.keys() - live.keys()


def _n_bytes(spec: StoredTensor) -> int:
    return math.prod(spec.shape) * parse_dtype(spec.dtype or "uint8").itemsize


def _aliases(layout: ModelLayout, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Return the rows that are names of one contiguous tensor, each with the first of its names."""
    found: dict[str, str] = {}
    for views in layout.storages:
        specs = [stored.get(view.name) for view in views]
        first = views[0]
        if all(
            spec is not None
            and specs[0] is not None
            and (view.offset, view.stride) == (0, first.stride)
            and (spec.dtype, tuple(spec.shape)) == (specs[0].dtype, tuple(specs[0].shape))
            and _is_row_major(view, spec)
            for view, spec in zip(views, specs, strict=True)
        ):
            found |= {view.name: first.name for view in views}
    return found


def _is_row_major(view: StorageView, spec: StoredTensor) -> bool:
    return view.stride == row_major(spec.shape)


def _untouched(stored: Mapping[str, StoredTensor]) -> dict[str, Array]:
    """Return arrays for rows, in memory that nobody writes, so that the system never provides it."""
    starts, end = {}, _ALIGNMENT
    for name, spec in stored.items():
        starts[name] = end
        end += -(-_n_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
    block = np.empty(end, dtype=np.uint8)
    return {
        name: np.ndarray(spec.shape, parse_dtype(spec.dtype or "uint8"), block.data, starts[name])
        for name, spec in stored.items()
    }


def _uses(value: Any) -> Counter[int]:
    """Count the objects that use each stored tensor, by address; `_SHARED` stands for one with several uses."""
    uses: Counter[int] = Counter()
    seen: dict[int, Any] = {}
    shared: set[int] = set()
    stack: list[tuple[Any, bool]] = [(value, False)]
    while stack:
        part, is_shared = stack.pop()
        if not is_tensor(part) and not isinstance(part, _CONTAINERS):
            continue
        is_shared |= id(part) in seen
        if id(part) in shared:
            continue
        if is_tensor(part):
            uses[_address(part)] += _SHARED if is_shared else 1
        if is_shared:
            shared.add(id(part))
        seen[id(part)] = part
        stack += [(each, is_shared) for each in _parts(part)]
    return uses


_SHARED = 1_000_000


_CONTAINERS = (Mapping, list, tuple, deque, StoredObject, PickleOnly, NamedItems, ModuleFacts, OpaqueFacts)


def _parts(part: Any) -> Sequence[Any]:
    attributes = [*vars(part).values()] if hasattr(part, "__dict__") else []
    if isinstance(part, Mapping):
        return [*part.values(), *attributes]
    if isinstance(part, list | tuple | deque):
        return [*part, *attributes]
    if isinstance(part, StoredObject):
        return [part.state, part.beside, part.modules.entry]
    if isinstance(part, PickleOnly):
        return [part.facts.entry]
    if isinstance(part, NamedItems):
        return part.items
    if isinstance(part, ModuleFacts):
        return [part.attributes, part.of_tensors]
    if isinstance(part, OpaqueFacts):
        return part.taken
    return attributes


def _takes(copy: Copy, spec: StoredTensor) -> bool:
    """Tell whether a copy gives a row's very bytes to a live tensor."""
    target, source = copy.target, copy.source
    return (
        copy.may_alias
        and is_tensor(target)
        and target.is_cpu
        and target.dtype == source.dtype
        and target.shape == source.shape == tuple(spec.shape)
        and target.is_contiguous()
        and source.is_contiguous()
        and not target.is_inference()
        and refusal(target) is None
        and refusal(source) is None
        and memory_refusal(target, geometry(target)) is None
        and spec.dtype == row_dtype(dtype_name(target), target.itemsize)
    )


def _alone(copies: Sequence[Copy], at: Mapping[int, str]) -> set[str]:
    """Return the rows whose live tensors share memory with no tensor that another row fills."""
    extents = {number: extent for number, copy in enumerate(copies) if (extent := extent_of(copy.target)) is not None}
    found: set[str] = set()
    mixed: set[str] = set()
    for group in overlapping(list(extents), extents):
        names = {at.get(_address(copies[number].source)) for number in group}
        is_one = len(names) == 1 and len({extents[number] for number in group}) == 1
        for name in names:
            if name is not None:
                (found if is_one and name not in found else mixed).add(name)
    return found - mixed


def _address(source: Any) -> int:
    try:
        return int(source.data_ptr()) if is_tensor(source) else 0
    except RuntimeError:  # it is made of other tensors
        return 0
