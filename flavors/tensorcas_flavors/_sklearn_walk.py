"""Readable names for the arrays of an object graph: the path of attributes and keys that leads to each.

Names come from structure alone, never from values, so equal models get equal names, and a live model of the same
structure can be filled by name, without its pickle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from urllib.parse import quote

import numpy as np

from tensorcas_flavors._forest import is_tree
from tensorcas_mlflow.adapter import Array

_MIN_FAMILY = 8
_MAX_MEMBER_BYTES = 1 << 16
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, np.dtype)
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


@dataclass(slots=True)
class Graph:
    """Where the arrays, trees and seeds of a model are. Keys are ids of parts of a model that must stay alive."""

    arrays: list[Array] = field(default_factory=list)
    """The named arrays, so that nothing that pickling makes can take the id of one that it drops."""

    names: dict[int, str] = field(default_factory=dict)
    """Name of each array that an attribute, key or position leads to."""
    families: dict[int, str] = field(default_factory=dict)
    """Name of the family of each array that is one of many small alike."""
    trees: dict[int, list[tuple[dict[str, Any], str]]] = field(default_factory=dict)
    """Attribute dicts, and the keys in them, that hold each tree."""
    seeds: set[int] = field(default_factory=set)
    """The integers that seed single trees; empty unless there are many."""
    taken: set[str] = field(default_factory=set)
    """The names in use, reserved ones included."""


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Tell whether arrays of a dtype are numbers whose bytes are all significant: those that become tensors."""
    if dtype.names is not None:
        return all(is_storable(dtype[name].base) and dtype[name].names is None for name in dtype.names)
    if dtype.type.__module__ == "ml_dtypes":
        return True
    # Extended precision ("g", "G") has padding bytes of arbitrary value.
    return dtype.isnative and dtype.kind in "biufc" and dtype.char not in "gG"


def packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype without the padding between its fields; a dtype that has none is returned as it is."""
    if dtype.names is None:
        return dtype
    return np.dtype([(name, dtype[name]) for name in dtype.names])


def is_fortran(array: Array) -> bool:
    """Tell whether an array lies in memory column by column, and only so."""
    return array.flags.f_contiguous and not array.flags.c_contiguous


def walk(model: object, reserved: Collection[str]) -> Graph:
    """Find the arrays, trees and seeds of a model, and give the arrays names that are not reserved.

    A path has one component per attribute, key or position, separated by slashes. The second item of a list of
    ``(name, estimator)`` pairs is found under the name, as in ``steps/clf/coef_``.
    At least 8 arrays of at most 64 KiB whose paths differ in positions only, and whose dtypes and rows are alike,
    are a family, named by the path with the positions starred, as in ``estimators_/*/classes_``.
    """
    graph = Graph(taken=set(reserved))
    kin: dict[tuple[str, np.dtype[Any], tuple[int, ...]], list[int]] = {}
    seeds: set[int] = set()
    visited: set[int] = set()
    pending: list[tuple[str, str, object]] = [("", "", model)]
    while pending:
        path, pattern, part = pending.pop()
        if isinstance(part, (*_LEAVES, *_CODE)) or id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, np.ndarray) and part.dtype != object:
            # The attributes of a subclass, such as a masked array, are no business of ours: its pickle makes them.
            if type(part) is np.ndarray and is_storable(part.dtype):
                graph.arrays.append(part)
                graph.names[id(part)] = unused(path, graph.taken)
                if path != pattern and part.ndim and part.nbytes <= _MAX_MEMBER_BYTES and not is_fortran(part):
                    kin.setdefault((pattern, part.dtype, part.shape[1:]), []).append(id(part))
            continue
        attributes = getattr(part, "__dict__", {})
        for key, value in attributes.items():
            if is_tree(value):
                graph.trees.setdefault(id(value), []).append((attributes, key))
                if type(attributes.get("random_state")) is int:
                    seeds.add(id(attributes["random_state"]))
        children = [
            (f"{path}/{step}".lstrip("/"), f"{pattern}/{'*' if is_position else step}".lstrip("/"), child)
            for step, is_position, child in _children(part)
        ]
        pending.extend(reversed(children))
    for (pattern, _, _), members in kin.items():
        if len(members) >= _MIN_FAMILY:
            graph.families.update(dict.fromkeys(members, unused(pattern, graph.taken)))
    if len(seeds) >= _MIN_FAMILY:
        graph.seeds = seeds
    return graph


def unused(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, made from another, and take it."""
    candidate = name
    n_tries = 1
    while candidate in taken:
        n_tries += 1
        candidate = f"{name}~{n_tries}"
    taken.add(candidate)
    return candidate


def _children(part: object) -> Iterator[tuple[str, bool, object]]:
    """Yield path component, whether it is a mere position, and value of what an object holds."""
    if isinstance(part, dict):
        for i, (key, value) in enumerate(part.items()):
            yield _component(key) if isinstance(key, str) else str(i), not isinstance(key, str), value
    elif isinstance(part, list | tuple):
        for i, value in enumerate(part):
            if isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], str):
                yield _component(value[0]), False, value[1]
                for j, more in enumerate(value[2:], start=2):
                    yield f"{_component(value[0])}/{j}", False, more
            else:
                yield str(i), True, value
    elif isinstance(part, np.ndarray):
        for i, value in enumerate(part.flat if part.dtype == object else ()):
            yield str(i), True, value
    for key, value in getattr(part, "__dict__", {}).items():
        yield _component(key), False, value


def _component(key: str) -> str:
    """Return a key as a path component: no slash, star, control character or empty string."""
    return quote(key, safe=" ()[]<>=,;:+@$&!?'") or "%"
