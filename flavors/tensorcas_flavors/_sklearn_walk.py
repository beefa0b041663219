"""Readable names for the arrays and numbers of an object graph: the path of attributes and keys that leads to each.

Names come from structure alone, never from values, so equal models get equal names, and a live model of the same
structure can be filled by name, without its pickle.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from tensorcas_flavors._forest import is_tree
from tensorcas_flavors._sklearn_boosters import is_booster, is_foreign_booster
from tensorcas_flavors._sklearn_sizes import is_ensemble
from tensorcas_mlflow.adapter import Array

_MIN_FAMILY = 8
_MAX_MEMBER_BYTES = 1 << 16
_LEAVES = (str, bytes, bytearray, int, complex, type(None), np.generic, np.dtype)
_NUMBERS = (float, np.inexact)
_NOTHING_INSIDE = frozenset((str, bytes, int, bool, type(None)))
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_WITHOUT_NUMBERS = ("sklearn._loss", "pandas.", "polars.", "pyarrow.")
_SPACE_TREES = ("sklearn.neighbors._kd_tree", "sklearn.neighbors._ball_tree")
_SPACE_STATE = {"data": 0, "idx_array": 1, "node_data": 2, "node_bounds": 3, "sample_weight": 12}


class Place(NamedTuple):
    """Where an object holds another: ``container[key]`` can be set; in a tuple, as item ``item`` of what is there."""

    container: Any
    key: Any
    item: int | None = None


# Of these the place matters: they are replaced, or hold what is and cannot be changed themselves.
_PLACED = (np.ndarray, tuple, float, np.inexact)


@dataclass(slots=True)
class Graph:
    """Where the arrays, trees and seeds of a model are. Keys are ids of parts of a model that must stay alive."""

    arrays: list[Array] = field(default_factory=list)
    """The named arrays, so that nothing that pickling makes can take the id of one that it drops."""

    names: dict[int, str] = field(default_factory=dict)
    """Name of each array that an attribute, key or position leads to."""
    families: dict[int, str] = field(default_factory=dict)
    """Name of the family of each array that is one of many small alike."""
    places: dict[int, list[Place | None]] = field(default_factory=dict)
    """Everywhere an array is held; None for a place that cannot be set."""
    numbers: dict[str, list[tuple[Place, Any]]] = field(default_factory=dict)
    """Fitted numbers with a fraction, by name of the row they are stored in; more than one in the row of a family."""
    trees: dict[int, list[tuple[dict[str, Any], str]]] = field(default_factory=dict)
    """Attribute dicts, and the keys in them, that hold each tree."""
    seeds: set[int] = field(default_factory=set)
    """The integers that seed single trees; empty unless there are many."""
    seeded: list[dict[str, Any]] = field(default_factory=list)
    """The attribute dicts that hold a tree and its seed, in the order in which a pickle has them."""
    taken: set[str] = field(default_factory=set)
    """The names in use, reserved ones included."""
    objects: list[Any] = field(default_factory=list)
    """Everything with attributes, and the trees of points."""
    ensembles: dict[str, Any] = field(default_factory=dict)
    """Fitted ensembles whose members are alike, by path."""
    boosters: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """The path of each booster of XGBoost, and the booster."""

    def number_rows(self) -> dict[str, Array]:
        """Return the numbers as arrays: 0-d, or 1-d for a family."""
        rows = {name: np.array([number for _, number in found]) for name, found in self.numbers.items()}
        return {name: row if len(row) > 1 else row.reshape(()) for name, row in rows.items()}


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


def is_space_tree(part: object) -> bool:
    """Tell whether an object is a k-d tree or ball tree of scikit-learn's, without importing it."""
    return type(part).__module__ in _SPACE_TREES and hasattr(part, "__getstate__")


class SpaceTreeState:
    """The arrays of a k-d tree or ball tree, as a container of which items can be set."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __getitem__(self, name: str) -> Array | None:
        array: Array | None = self.tree.__getstate__()[_SPACE_STATE[name]]
        return array

    def __setitem__(self, name: str, array: Array) -> None:
        state = list(self.tree.__getstate__())
        state[_SPACE_STATE[name]] = array
        self.tree.__setstate__(tuple(state))


class Flat:
    """An array of objects, as a container of which items can be set: they may be lists and arrays themselves."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __getitem__(self, key: int) -> Any:
        return self._array.flat[key]

    def __setitem__(self, key: int, value: Any) -> None:
        self._array[np.unravel_index(key, self._array.shape)] = value


def walk(model: object, reserved: Collection[str]) -> Graph:
    """Find the arrays, numbers, trees and seeds of a model, and give arrays and numbers names that are not reserved.

    A path has one component per attribute, key or position, separated by slashes. The second item of a list of
    ``(name, estimator)`` pairs is found under the name, as in ``steps/clf/coef_``.
    At least 8 arrays of at most 64 KiB whose paths differ in positions only, and whose dtypes and rows are alike,
    are a family, named by the path with the positions starred, as in ``estimators_/*/classes_``; so are 8 numbers.
    Numbers are floats that fitting made; hyperparameters are not among them.
    """
    graph = Graph(taken=set(reserved))
    kin: dict[tuple[str, np.dtype[Any], tuple[int, ...]], list[int]] = {}
    numbers: list[tuple[str, str, Any, Place]] = []
    seeds: set[int] = set()
    visited: set[int] = set()
    pending: list[tuple[str, str, object, Place | None, bool]] = [("", "", model, None, True)]
    while pending:
        path, pattern, part, place, is_fitted = pending.pop()
        if isinstance(part, _NUMBERS):
            if is_fitted and place is not None and place.item is None:
                numbers.append((path, pattern, part, place))
            continue
        if isinstance(part, (*_LEAVES, *_CODE)):
            continue
        is_array = type(part) is np.ndarray and part.dtype != object
        if is_array:
            graph.places.setdefault(id(part), []).append(place)
        if id(part) in visited:
            if isinstance(part, tuple):
                # Replacing an array here would leave the tuple's other holders with the old one.
                graph.places.update({id(value): [None] for value in part if type(value) is np.ndarray})
            continue
        visited.add(id(part))
        if is_booster(part):
            graph.boosters[id(part)] = unused(path, graph.taken), part
            continue
        if is_foreign_booster(part):
            continue
        is_tensor = is_array and is_storable(part.dtype)  # type: ignore[attr-defined]
        if isinstance(part, np.ndarray) and part.dtype != object:
            # The attributes of a subclass, such as a masked array, are no business of ours: its pickle makes them.
            if is_tensor:
                graph.arrays.append(part)
                graph.names[id(part)] = unused(path, graph.taken)
                if path != pattern and part.ndim and part.nbytes <= _MAX_MEMBER_BYTES and not is_fortran(part):
                    kin.setdefault((pattern, part.dtype, part.shape[1:]), []).append(id(part))
            continue
        attributes = getattr(part, "__dict__", None)
        # The steps of a pipeline are a hyperparameter, and yet what they hold was fitted.
        is_fitted = is_fitted or (attributes is not None and hasattr(type(part), "fit"))
        if attributes is not None:
            graph.objects.append(part)
            for key, value in attributes.items():
                if is_tree(value):
                    graph.trees.setdefault(id(value), []).append((attributes, key))
                    if type(attributes.get("random_state")) is int:
                        seeds.add(id(attributes["random_state"]))
                        graph.seeded.append(attributes)
        elif is_space_tree(part):
            graph.objects.append(part)
        if is_ensemble(part):
            graph.ensembles[path] = part
        parameters = _parameters(type(part))  # type: ignore[arg-type]  # mypy takes classes for unhashable
        prefix, starred = (f"{path}/", f"{pattern}/") if path else ("", "")
        children = []
        for component, is_position, value, child_place in _children(part, place):
            is_kept = is_fitted if parameters is None else component not in parameters
            if is_kept or not isinstance(value, _NUMBERS):
                star = "*" if is_position else component
                children.append((prefix + component, starred + star, value, child_place, is_kept))
        pending.extend(reversed(children))
    for (pattern, _, _), members in kin.items():
        if len(members) >= _MIN_FAMILY:
            graph.families.update(dict.fromkeys(members, unused(pattern, graph.taken)))
    graph.numbers = _name_numbers(numbers, graph.taken)
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


@lru_cache(maxsize=1024)
def _parameters(cls: Hashable) -> frozenset[str] | None:
    """Return the attributes of a class's instances under which no number is a fitted one; None if it does not say.

    Those are hyperparameters, and reports on them. All that a loss of scikit-learn holds follows from hyperparameters,
    and what tables hold besides arrays is their own business.
    """
    assert isinstance(cls, type)
    if cls.__module__.startswith(_WITHOUT_NUMBERS):
        return _Everything()
    if not hasattr(cls, "_get_param_names"):
        return None
    names = {"best_params_", "cv_results_"}
    # A class may fix a hyperparameter of its base.
    for base in cls.__mro__:
        if isinstance(base.__dict__.get("__init__"), FunctionType):
            names.update(inspect.signature(base.__dict__["__init__"]).parameters)
    return frozenset(names)


class _Everything(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


def _name_numbers(numbers: list[tuple[str, str, Any, Place]], taken: set[str]) -> dict[str, list[tuple[Place, Any]]]:
    """Return numbers by name of their row; many alike ones share one."""
    kin: dict[tuple[str, np.dtype[Any]], list[tuple[str, tuple[Place, Any]]]] = {}
    for path, pattern, number, place in numbers:
        dtype = np.dtype(type(number))
        if is_storable(dtype):
            kin.setdefault((pattern, dtype), []).append((path, (place, number)))
    named: dict[str, list[tuple[Place, Any]]] = {}
    for (pattern, _), members in kin.items():
        if len(members) >= _MIN_FAMILY:
            named[unused(pattern, taken)] = [member for _, member in members]
        else:
            named.update({unused(path, taken): [member] for path, member in members})
    return named


def _children(part: object, place: Place | None) -> Iterator[tuple[str, bool, object, Place | None]]:
    """Yield path component, whether it is a mere position, value, and place of what an object holds.

    Args:
        part: The object.
        place: Where it lies itself, if it is a tuple.
    """
    if isinstance(part, dict):
        for i, (key, value) in enumerate(part.items()):
            if type(value) not in _NOTHING_INSIDE:
                is_text = isinstance(key, str)
                yield _component(key) if is_text else str(i), not is_text, value, _place(part, key, value)
    elif isinstance(part, list | tuple):
        is_plain = type(part) is tuple and place is not None and place.item is None
        for i, value in enumerate(part):
            if type(value) in _NOTHING_INSIDE:
                continue
            if isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], str):
                yield _component(value[0]), False, value[1], None
                for j, more in enumerate(value[2:], start=2):
                    yield f"{_component(value[0])}/{j}", False, more, None
            elif isinstance(part, list):
                yield str(i), True, value, _place(part, i, value)
            else:
                yield str(i), True, value, place._replace(item=i) if place and is_plain else None
    elif isinstance(part, np.ndarray):
        for i, value in enumerate(part.flat if part.dtype == object else ()):
            yield str(i), True, value, _place(Flat(part), i, value)
    elif is_space_tree(part):
        state = SpaceTreeState(part)
        for name in _SPACE_STATE:
            yield name, False, state[name], Place(state, name)
    attributes = getattr(part, "__dict__", {})
    for key, value in attributes.items():
        if type(value) not in _NOTHING_INSIDE:
            yield _component(key), False, value, _place(attributes, key, value)


def _place(container: Any, key: Any, value: object) -> Place | None:
    return Place(container, key) if isinstance(value, _PLACED) else None


@lru_cache(maxsize=4096)
def _component(key: str) -> str:
    """Return a key as a path component: no slash, star, control character or empty string."""
    return quote(key, safe=" ()[]<>=,;:+@$&!?'") or "%"
