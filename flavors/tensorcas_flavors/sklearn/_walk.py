"""Walk over a scikit-learn model: readable names for its arrays and numbers, and its ensembles, trees and boosters.

A name is the path of attributes and keys that leads to the array. Names come from structure alone, never from values,
so equal models get equal names, and a live model of the same structure can be filled by name, without its pickle.

`Resizing` gives a live ensemble as many members as a stored one has, before it is filled. It drops members that are too
many, and adds copies of the last one for members that lack.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from tensorcas_flavors._facts import Items, LivePlace
from tensorcas_flavors.sklearn._trees import is_tree
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError


def is_booster(part: object) -> bool:
    """Tell whether an object is an `xgboost.Booster`, without importing XGBoost."""
    return type(part).__qualname__ == "Booster" and type(part).__module__ == "xgboost.core"


def is_foreign_booster(part: object) -> bool:
    """Tell whether an object is a `lightgbm.Booster`: its model is a text, and its attributes vary."""
    return type(part).__qualname__ == "Booster" and type(part).__module__ == "lightgbm.basic"


_MEMBERS = {
    "BaseForest": "estimators_",
    "BaseBagging": "estimators_",
    "BaseWeightBoosting": "estimators_",
    "BaseGradientBoosting": "estimators_",
    "BaseHistGradientBoosting": "_predictors",
}
_BESIDE_MEMBERS = ("estimators_features_", "_decision_path_lengths", "_average_path_length_per_tree")
PER_STAGE = frozenset(
    (
        "_seeds",
        "train_score_",
        "validation_score_",
        "oob_improvement_",
        "oob_scores_",
        "estimator_weights_",
        "estimator_errors_",
    )
)
"""Attributes of ensembles that are arrays with a number for each member."""


def is_ensemble(part: object) -> bool:
    """Tell whether an object is a fitted ensemble of scikit-learn whose members are all alike."""
    return _members_key(part) is not None


def n_members(ensemble: Any) -> int:
    """Return the number of members of an ensemble; for boosted trees, of stages."""
    return len(_members(ensemble))


class Resizing:
    """Change of the sizes of a model's ensembles, which can be undone."""

    def __init__(self, adapter: str, find: Callable[[], Graph], sizes: Mapping[str, int], n_rows: int) -> None:
        """Give each ensemble of a live model the stored size; if one cannot have it, the model stays as it was.

        Args:
            adapter: The adapter's name, for errors.
            find: Walks the live model.
            sizes: Numbers of members in the stored model, by path.
            n_rows: Number of stored rows: no ensemble can have more members.

        Raises:
            AdapterError: An ensemble without a member has to grow, or a size is impossible.
        """
        self._adapter = adapter
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self.graph = find()
        try:
            # Members may be ensembles too. Another walk finds those inside of new members.
            while self._resize(sizes, n_rows):
                self.graph = find()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put back the former members."""
        for attributes, key, value in reversed(self._undo):
            attributes[key] = value
        self._undo.clear()

    def _resize(self, sizes: Mapping[str, int], n_rows: int) -> bool:
        changed: list[str] = []
        for path, ensemble in self.graph.ensembles.items():
            n_live, n_stored = n_members(ensemble), sizes.get(path)
            is_inside = any(path.startswith(f"{outer}/" if outer else "") for outer in changed)
            if n_stored is None or n_live == n_stored or is_inside:
                continue
            if not 0 <= n_stored <= n_rows:
                raise AdapterError(self._adapter, f"the stored model cannot have {n_stored} members: it is damaged")
            if not n_live:
                raise AdapterError(
                    self._adapter,
                    f"{n_stored} members are stored, and the original has none to make them from: "
                    "fit it with one member first, or load a new model, without an original",
                )
            self._resize_one(ensemble, n_live, n_stored)
            changed.append(path)
        return bool(changed)

    def _resize_one(self, ensemble: Any, n_live: int, n_stored: int) -> None:
        attributes = vars(ensemble)
        for key in (_members_key(ensemble) or "", *_BESIDE_MEMBERS):
            if key in attributes and len(attributes[key]) == n_live:
                self._undo.append((attributes, key, attributes[key]))
                attributes[key] = _resized(attributes[key], n_stored)


def _members_key(part: object) -> str | None:
    attributes = getattr(part, "__dict__", {})
    if "estimators_" not in attributes and "_predictors" not in attributes:
        return None
    for base in type(part).__mro__:
        key = _MEMBERS.get(base.__name__)
        if key in attributes and base.__module__.startswith("sklearn.ensemble."):
            return key
    return None


def _members(ensemble: Any) -> Any:
    return vars(ensemble)[_members_key(ensemble) or ""]


def _resized(members: Any, n: int) -> Any:
    if n <= len(members):
        return members[:n].copy() if isinstance(members, np.ndarray) else members[:n]
    shared = _shared(members)
    added = [copy.deepcopy(members[-1], dict(shared)) for _ in range(n - len(members))]
    if not isinstance(members, np.ndarray):
        return type(members)([*members, *added])
    grown: Array = np.concatenate([members, np.array(added, dtype=object).reshape(-1, *members.shape[1:])])
    return grown


def _shared(members: Any) -> dict[int, Any]:
    """Return by id the parts that copies of the last member share with it.

    Those are the parts that it shares with the first member, and random states.
    """
    own = walk([members[-1]], ())
    shared: dict[int, Any] = {}
    if len(members) > 1:
        first = walk([members[0]], ())
        of_first = {id(part) for part in (*first.objects, *first.arrays)}
        shared = {id(part): part for part in (*own.objects, *own.arrays) if id(part) in of_first}
    for part in own.objects:
        # Trees that are grown one after the other draw from one state.
        states = (value for value in getattr(part, "__dict__", {}).values() if _is_random(value))
        shared.update((id(state), state) for state in states)
    return shared


def _is_random(value: object) -> bool:
    return type(value).__module__.startswith("numpy.random")


_MIN_FAMILY = 8
_MAX_MEMBER_BYTES = 1 << 16
_LEAVES = (str, bytes, bytearray, int, complex, type(None), np.generic, np.dtype)
_NUMBERS = (float, np.inexact)
_FLOATS = ({float}, {np.float32}, {np.float64})
_NOTHING_INSIDE = frozenset((str, bytes, int, bool, type(None), np.bool_, np.int32, np.int64, np.uint32, np.uint64))
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_WITHOUT_NUMBERS = ("sklearn._loss", "pandas.", "polars.", "pyarrow.")
_SPACE_TREES = ("sklearn.neighbors._kd_tree", "sklearn.neighbors._ball_tree")
SPACE_ARRAYS = {"data": 0, "idx_array": 1, "node_data": 2, "node_bounds": 3, "sample_weight": 12}
"""Positions of the arrays in the state of a k-d tree or ball tree."""
_PLACED = (np.ndarray, tuple, float, np.inexact)
"""Classes of parts whose places matter: they are replaced, or they are immutable and hold parts that are replaced."""


@dataclass(slots=True)
class Graph:
    """Arrays, trees and seeds of a model and their places. Keys are ids of parts of a model that must stay alive."""

    arrays: list[Array] = field(default_factory=list)
    """The named arrays; they stay alive, so that no array that pickling makes gets the id of one that it drops."""
    names: dict[int, str] = field(default_factory=dict)
    """Name of each array that an attribute, key or position leads to."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name of the array at each further path that leads to a named one."""
    families: dict[int, str] = field(default_factory=dict)
    """Name of the family of each array that is one of many small similar ones."""
    places: dict[int, list[LivePlace | None]] = field(default_factory=dict)
    """All places that hold an array; None for a place that cannot be set."""
    numbers: dict[str, list[Any]] = field(default_factory=dict)
    """Fitted floats by name of their row; the row of a family has several."""
    trees: dict[int, list[tuple[dict[str, Any], str]]] = field(default_factory=dict)
    """Attribute dicts that hold each tree, and its keys there."""
    seeds: set[int] = field(default_factory=set)
    """The integers that seed single trees; empty unless there are many."""
    seeded: list[dict[str, Any]] = field(default_factory=list)
    """The attribute dicts that hold a tree and its seed, in the order of a pickle."""
    taken: set[str] = field(default_factory=set)
    """The names in use, reserved ones included."""
    objects: list[Any] = field(default_factory=list)
    """Objects with attributes, and k-d trees and ball trees."""
    ensembles: dict[str, Any] = field(default_factory=dict)
    """Fitted ensembles of similar members, by path."""
    boosters: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """Each booster of XGBoost, with its path."""

    def number_rows(self) -> dict[str, Array]:
        """Return the fitted numbers as arrays: 0-d, or 1-d for a family."""
        return {name: np.array(held if len(held) > 1 else held[0]) for name, held in self.numbers.items()}


def is_plain_array(part: object) -> bool:
    """Tell whether an object is an array without a class of its own; one that maps a file is."""
    return type(part) is np.ndarray or type(part) is np.memmap


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Tell whether arrays of a dtype become tensors: they hold numbers, and each of their bytes is significant."""
    if dtype.names is not None:
        return all(is_storable(dtype[name].base) and dtype[name].names is None for name in dtype.names)
    if dtype.type.__module__ == "ml_dtypes":
        return True
    # Extended precision ("g", "G") has padding bytes of arbitrary value.
    return dtype.isnative and dtype.kind in "biufc" and dtype.char not in "gG"


def packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype without the padding between its fields, or the dtype itself if it has none."""
    if dtype.names is None:
        return dtype
    return np.dtype([(name, dtype[name]) for name in dtype.names])


def is_fortran(array: Array) -> bool:
    """Tell whether an array is in Fortran order and not also in C order."""
    return array.flags.f_contiguous and not array.flags.c_contiguous


def is_space_tree(part: object) -> bool:
    """Tell whether an object is a k-d tree or ball tree of scikit-learn, without importing scikit-learn."""
    return type(part).__module__ in _SPACE_TREES and hasattr(part, "__getstate__")


class SpaceTree(Items):
    """State of a k-d tree or ball tree as a container, by position."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __getitem__(self, key: int) -> Any:
        return self.tree.__getstate__()[key]

    def __setitem__(self, key: int, value: Any) -> None:
        state = list(self.tree.__getstate__())
        state[key] = value
        self.tree.__setstate__(tuple(state))


class _Found(NamedTuple):
    """One value that a model holds, and how the walk came to it."""

    path: str
    pattern: str
    """The path with stars for positions."""
    part: Any
    place: LivePlace | None
    is_fitted: bool


class _Walk:
    """A walk over a model, which looks at each object once."""

    def __init__(self, reserved: Collection[str]) -> None:
        self.graph = Graph(taken=set(reserved))
        self._kin: dict[tuple[str, np.dtype[Any], tuple[int, ...]], list[int]] = {}
        self._numbers: list[tuple[str, str, list[Any]]] = []
        self._seeds: set[int] = set()
        self._visited: set[int] = set()

    def look_at(self, found: _Found) -> list[_Found]:
        """Note what a value is; return what it holds."""
        path, pattern, part, place, is_fitted = found
        if isinstance(part, _NUMBERS):
            if is_fitted and place is not None and not place.is_in_tuple:
                self._numbers.append((path, pattern, [part]))
            return []
        if isinstance(part, (*_LEAVES, *CODE)):
            return []
        if is_plain_array(part) and part.dtype != object:
            self.graph.places.setdefault(id(part), []).append(place)
        if id(part) in self._visited:
            self._meet_again(path, part)
            return []
        self._visited.add(id(part))
        if is_booster(part):
            self.graph.boosters[id(part)] = unused(path, self.graph.taken), part
            return []
        if is_foreign_booster(part):
            return []
        if isinstance(part, np.ndarray) and part.dtype != object:
            # The pickle restores a subclass, such as a masked array, with its attributes.
            if is_plain_array(part) and is_storable(part.dtype):
                self._add_array(path, pattern, part)
            return []
        return self._look_into(found)

    def _meet_again(self, path: str, part: Any) -> None:
        graph = self.graph
        if isinstance(part, tuple):
            # Replacing an array here would leave the tuple's other holders with the old one.
            graph.places.update({id(value): [None] for value in part if is_plain_array(value)})
        elif id(part) in graph.names:
            graph.aliases[path] = graph.names[id(part)]

    def _add_array(self, path: str, pattern: str, array: Any) -> None:
        self.graph.arrays.append(array)
        self.graph.names[id(array)] = unused(path, self.graph.taken)
        if path != pattern and array.ndim and array.nbytes <= _MAX_MEMBER_BYTES and not is_fortran(array):
            self._kin.setdefault((pattern, array.dtype, array.shape[1:]), []).append(id(array))

    def _look_into(self, found: _Found) -> list[_Found]:
        """Note an object and its trees and seeds; return what it holds."""
        path, pattern, part, place, is_fitted = found
        attributes = getattr(part, "__dict__", None)
        # The steps of a pipeline are a hyperparameter, and yet they hold fitted values.
        is_fitted = is_fitted or (attributes is not None and hasattr(type(part), "fit"))
        if attributes is not None:
            self.graph.objects.append(part)
            self._add_trees(attributes)
        elif is_space_tree(part):
            self.graph.objects.append(part)
        if is_ensemble(part):
            self.graph.ensembles[path] = part
        parameters = _parameters(type(part))  # type: ignore[arg-type]  # mypy takes classes for unhashable
        prefix, starred = (f"{path}/", f"{pattern}/") if path else ("", "")
        if type(part) is list and len(part) >= _MIN_FAMILY and set(map(type, part)) in _FLOATS:
            if is_fitted:
                self._numbers.append((prefix, f"{starred}*", part))
            return []
        children = []
        for component, is_position, value, child_place in _children(part, place):
            is_kept = is_fitted if parameters is None else component not in parameters
            if is_kept or not isinstance(value, _NUMBERS):
                star = "*" if is_position else component
                children.append(_Found(prefix + component, starred + star, value, child_place, is_kept))
        return children

    def _add_trees(self, attributes: dict[str, Any]) -> None:
        for key, value in attributes.items():
            if is_tree(value):
                self.graph.trees.setdefault(id(value), []).append((attributes, key))
                if type(attributes.get("random_state")) is int:
                    self._seeds.add(id(attributes["random_state"]))
                    self.graph.seeded.append(attributes)

    def end(self) -> Graph:
        """Name the families and the numbers."""
        graph = self.graph
        for (pattern, _, _), members in self._kin.items():
            if len(members) >= _MIN_FAMILY:
                graph.families.update(dict.fromkeys(members, unused(pattern, graph.taken)))
        graph.numbers = _name_numbers(self._numbers, graph.taken)
        if len(self._seeds) >= _MIN_FAMILY:
            graph.seeds = self._seeds
        return graph


def walk(model: object, reserved: Collection[str]) -> Graph:
    """Find the arrays, numbers, trees and seeds of a model, and give arrays and numbers unreserved names.

    A path has one component per attribute, key or position, separated by slashes. In a list of ``(name, estimator)``
    pairs the name stands for the position, as in ``steps/clf/coef_``. At least 8 arrays of at most 64 KiB are a family
    if their paths differ in positions only and their dtypes and rows are equal. The family's name has stars for the
    positions, as in ``estimators_/*/classes_``. At least 8 numbers are a family likewise. Numbers are floats
    that fitting made; hyperparameters are not among them.
    """
    looks = _Walk(reserved)
    pending = [_Found("", "", model, None, True)]
    while pending:
        pending.extend(reversed(looks.look_at(pending.pop())))
    return looks.end()


def unused(name: str, taken: set[str]) -> str:
    """Derive a name that is not taken from another one, and take it."""
    candidate = name
    n_tries = 1
    while candidate in taken:
        n_tries += 1
        candidate = f"{name}~{n_tries}"
    taken.add(candidate)
    return candidate


@lru_cache(maxsize=1024)
def _parameters(cls: Hashable) -> frozenset[str] | None:
    """Return the attributes of a class's instances that hold no fitted numbers; None if the class does not tell.

    Those are hyperparameters, and reports on them. A loss of scikit-learn follows from hyperparameters as a whole, and
    the numbers in tables stay in the pickle.
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


def _name_numbers(found: list[tuple[str, str, list[Any]]], taken: set[str]) -> dict[str, list[Any]]:
    """Return numbers by name of their row; many similar ones share a row."""
    kin: dict[tuple[str, np.dtype[Any]], list[tuple[str, list[Any]]]] = {}
    for path, pattern, numbers in found:
        dtype = np.dtype(type(numbers[0]))
        if is_storable(dtype):
            kin.setdefault((pattern, dtype), []).append((path, numbers))
    named: dict[str, list[Any]] = {}
    for (pattern, _), members in kin.items():
        together = [number for _, numbers in members for number in numbers]
        if len(together) >= _MIN_FAMILY:
            named[unused(pattern, taken)] = together
        else:
            named.update({unused(path, taken): numbers for path, numbers in members})
    return named


def _children(part: object, place: LivePlace | None) -> Iterator[tuple[str, bool, object, LivePlace | None]]:
    """Yield of each value that an object holds the path component, whether that is a position, the value and its place.

    Args:
        part: The object.
        place: Its own place, if it is a tuple.
    """
    values = part.values() if type(part) is dict else part if type(part) is list else (part,)
    if _NOTHING_INSIDE.issuperset(map(type, values)):
        return
    if isinstance(part, dict):
        for i, (key, value) in enumerate(part.items()):
            if type(value) not in _NOTHING_INSIDE:
                is_text = isinstance(key, str)
                yield _component(key) if is_text else str(i), not is_text, value, _place(part, key, value)
    elif isinstance(part, list | tuple):
        yield from _elements(part, place)
    elif isinstance(part, np.ndarray):
        for i, value in enumerate(part.flat if part.dtype == object else ()):
            yield str(i), True, value, _place(part, i, value)
    elif is_space_tree(part):
        tree = SpaceTree(part)
        for name, position in SPACE_ARRAYS.items():
            yield name, False, tree[position], LivePlace(tree, position)
    attributes = getattr(part, "__dict__", {})
    for key, value in attributes.items():
        if type(value) not in _NOTHING_INSIDE:
            yield _component(key), False, value, _place(attributes, key, value)


def _elements(
    part: list[Any] | tuple[Any, ...], place: LivePlace | None
) -> Iterator[tuple[str, bool, object, LivePlace | None]]:
    """Yield the same of each value in a list or a tuple; a name before a value stands for its position."""
    is_plain = type(part) is tuple and place is not None and not place.is_in_tuple
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
            yield str(i), True, value, LivePlace(place, i) if place and is_plain else None


def _place(container: Any, key: Any, value: object) -> LivePlace | None:
    return LivePlace(container, key) if isinstance(value, _PLACED) else None


@lru_cache(maxsize=4096)
def _component(key: str) -> str:
    """Return a key as a path component: no slash, star, control character or empty string."""
    return quote(key, safe=" ()[]<>=,;:+@$&!?'", errors="surrogatepass") or "%"
