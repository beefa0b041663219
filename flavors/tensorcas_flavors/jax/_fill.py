"""Filling of a live JAX state: new arrays in the places of its arrays.

Arrays of JAX cannot change. So all new arrays are made first, with the shardings of the old ones, and the objects that
can change (variables of nnx, a dict or list at the root) get them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tensorcas_flavors._facts import decode, is_same_json, misfit
from tensorcas_flavors._jax_arrays import (
    ADAPTER,
    KEY,
    Kind,
    is_of_jax,
    is_shape,
    is_spread,
    key_dtype,
    make_array,
    make_spread,
)
from tensorcas_flavors.jax._layout import Layout
from tensorcas_flavors.jax._tree import Leaf, Tree, is_nnx_object, is_variable
from tensorcas_mlflow.adapter import Array, ReadTensors, StoredTensor
from tensorcas_mlflow.base.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.base.tensors import group_by_bytes

ReadSlice = Callable[[str, Any], Array]
_GROUP_BYTES = 64 << 20
"""Bytes of rows that are read at a time, before they go to their devices."""
_MOST_NAMED = 5


def fill(
    original: Any,
    layout: Layout,
    stored: Mapping[str, StoredTensor],
    read: ReadTensors,
    *,
    strict: bool,
    read_slice: ReadSlice | None = None,
) -> Any:
    """Fill a live state.

    Args:
        original: The state; its arrays may be deleted, or be `jax.ShapeDtypeStruct`.
        layout: Description of the stored state.
        stored: The rows.
        read: Reader of the rows.
        strict: See `tensorcas_flavors.jax.JaxAdapter`.
        read_slice: Reader of parts of a row by name and index, for arrays with elements on devices of other processes.
            By default all of a row is read.

    Returns:
        The filled state.

    Raises:
        AdapterError: The stored state does not fit; nothing is changed.
        TensorCasError: A row cannot be read; nothing is changed.
    """
    tree = Tree(original)
    known = _stored_leaves(original, tree, layout, strict=strict)
    if strict:
        _check_static(tree, layout)
    problems = [f"{leaf.name!r} {problem}" for leaf in known for problem in _problems(leaf, layout, stored, strict)]
    if problems:
        more = f", and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise misfit(ADAPTER, "; ".join(problems[:_MOST_NAMED]) + more)
    names = {leaf.name for leaf in known}
    twice = [pair for pair in _held_twice(tree) if names.issuperset(pair)]
    leaves = {leaf.name: leaf.value for leaf in tree.leaves}
    leaves |= {leaf.name: layout.value(leaf.name) for leaf in known if leaf.name in layout.values}
    targets = {leaf.name: leaf.value for leaf in known if leaf.name in layout.rows}
    for first, second in twice:
        _check_equal(first, second, layout, stored, read)
    if read_slice is not None:
        for name in [name for name, live in targets.items() if is_spread(live) and layout.rows[name].kind != KEY]:
            shape = tuple(stored[name].shape)
            leaves[name] = make_spread(name, shape, layout.rows[name], partial(read_slice, name), targets.pop(name))
    for group in group_by_bytes(targets, lambda name: _n_bytes(stored[name]), _GROUP_BYTES):
        rows = dict(read(group))
        for name in group:
            leaves[name] = make_array(name, rows.pop(name), layout.rows[name], like=targets[name])
    filled, changes = tree.filled(leaves)
    for change in changes:
        change()
    return filled


def _stored_leaves(original: Any, tree: Tree, layout: Layout, *, strict: bool) -> list[Leaf]:
    """Return the leaves of a live state that are stored.

    Raises:
        AdapterError: Leaves are missing, or there are others.
    """
    stored, live = set(layout.names()), {leaf.name for leaf in tree.leaves}
    missing = [leaf.name for leaf in tree.leaves if leaf.name not in stored]
    unexpected = [name for name in layout.names() if name not in live]
    if strict and type(original) is dict:
        # As for all nests, entries at the top that `original` does not name are left out.
        tops = {leaf.path[0] for leaf in tree.leaves if leaf.path} | {str(key) for key in original}
        unexpected = [name for name in unexpected if any(name == top or name.startswith(f"{top}.") for top in tops)]
    # A shape alone cannot stay as it is.
    shapes = [leaf.name for leaf in tree.leaves if leaf.name not in stored and is_shape(leaf.value)]
    if (strict and missing) or shapes or len(missing) == len(tree.leaves):
        raise misfit(ADAPTER, f"it has {_named(shapes or missing)}, not stored")
    if strict and unexpected:
        raise misfit(ADAPTER, f"it lacks {_named(unexpected)}, stored")
    # With strict=False, a None where an array is stored stays, as a node without leaves does.
    kept = {leaf.name for leaf in tree.leaves if leaf.value is None and leaf.name in layout.rows} if not strict else ()
    return [leaf for leaf in tree.leaves if leaf.name in stored and leaf.name not in kept]


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    return shown + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")


def _check_static(tree: Tree, layout: Layout) -> None:
    for path, values in tree.static_values().items():
        known = layout.static.get(path, {})
        for name, value in values.items():
            if name in known and not is_same_json(value, known[name]):
                place = f"{path}.{name}".lstrip(".")
                raise misfit(
                    ADAPTER,
                    f"{place!r} is no leaf, and is {decode(ADAPTER, value)!r:.60} in it and "
                    f"{decode(ADAPTER, known[name])!r:.60} as stored; set it, or pass strict=False to keep it",
                )


def _problems(leaf: Leaf, layout: Layout, stored: Mapping[str, StoredTensor], strict: bool) -> Iterator[str]:
    name, live = leaf.name, leaf.value
    if name in layout.opaque:
        if strict:
            yield "is stored as a pickle alone; strict=False keeps the one in it"
    elif name in layout.code:
        if not callable(live):
            yield f"is a {type(live).__name__} in it, and a function or class is stored"
    elif name in layout.values:
        yield from _value_problems(live, layout.value(name))
    else:
        yield from _row_problems(live, stored[name], layout.rows[name])


def _value_problems(live: Any, value: Any) -> Iterator[str]:
    is_other = (live is None) != (value is None) or callable(live)
    if is_other or (_is_array(live) and (tuple(live.shape) != () or _family(value) != _family(live))):
        yield f"is {_text_of(live)} in it, and the plain value {_text_of(value)} is stored"


def _row_problems(live: Any, spec: StoredTensor, kind: Kind) -> Iterator[str]:
    shape = tuple(spec.shape)
    text = f"{spec.dtype}{list(shape)}"
    if kind.kind == KEY:
        dtype = key_dtype(kind.impl)
        shape = shape[: len(shape) - len(dtype._impl.key_shape)] if hasattr(dtype, "_impl") else shape[:-1]
        text = f"{dtype}{list(shape)}"
        if not is_of_jax(live) or live.dtype != dtype or tuple(live.shape) != shape:
            yield f"is {_text_of(live)} in it, and {text} is stored"
    elif _is_array(live):
        if str(live.dtype) != str(parse_dtype(spec.dtype or "uint8")) or tuple(live.shape) != shape:
            yield f"is {_text_of(live)} in it, and {text} is stored"
    elif shape != () or _family(live) != _family(np.empty((), parse_dtype(spec.dtype or "uint8"))):
        yield f"is {_text_of(live)} in it, and {text} is stored"


def _is_array(part: Any) -> bool:
    return is_of_jax(part) or isinstance(part, np.ndarray)


def _text_of(part: Any) -> str:
    return f"{part.dtype}{list(part.shape)}" if _is_array(part) else repr(part)[:60]


def _family(part: Any) -> str | None:
    """Return the family of numbers of a scalar: a training may begin with an int, and go on with an array of one."""
    dtype = getattr(part, "dtype", None)
    if dtype is None:
        return {bool: "bool", int: "int", float: "float", complex: "complex"}.get(type(part))
    name = str(dtype)
    return next((family for family in ("bool", "int", "complex", "float") if family in name), None)


def _held_twice(tree: Tree) -> list[tuple[str, str]]:
    """Return pairs of leaves of one object of nnx, which can have one value only."""
    found: dict[tuple[int, Any], str] = {}
    pairs: list[tuple[str, str]] = []
    for node in tree.nodes():
        if not (is_variable(node.part) or is_nnx_object(node.part)):
            continue
        for key, child in zip(node.keys, node.children, strict=True):
            if isinstance(child, Leaf):
                first = found.setdefault((id(node.part), key), child.name)
                if first != child.name:
                    pairs.append((first, child.name))
    return pairs


def _check_equal(
    first: str, second: str, layout: Layout, stored: Mapping[str, StoredTensor], read: ReadTensors
) -> None:
    if first in layout.rows and second in layout.rows:
        rows = read([first, second])
        one, other = (np.ascontiguousarray(rows[name]).reshape(-1).view(np.uint8) for name in (first, second))
        is_equal = stored[first].dtype == stored[second].dtype and np.array_equal(one, other)
    else:
        is_equal = first in layout.values and is_same_json(layout.values[first], layout.values.get(second))
        is_equal |= first in {*layout.code, *layout.opaque} and second in {*layout.code, *layout.opaque}
    if not is_equal:
        raise misfit(ADAPTER, f"{first!r} and {second!r} are one object in it, and different values are stored")


def _n_bytes(spec: StoredTensor) -> int:
    return math.prod(spec.shape) * parse_dtype(spec.dtype or "uint8").itemsize


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Description of a row that was read already."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, row: Array) -> RowFacts:
        """Describe a row."""
        return cls(name, dtype_name(row.dtype), row.shape)
