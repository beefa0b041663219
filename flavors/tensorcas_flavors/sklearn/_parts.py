"""Parts that are taken out of a scikit-learn model's pickle, and put back: arrays, trees, seeds, boosters and strings.

A reference in the pickle is a tuple that starts with a word. Members of families, trees and seeds are referred to as
"the next one": the records of two hundred trees are then equal bytes, which compress to next to nothing. An estimator
that differs from an earlier one in such parts alone is referred to as "like that one, with the next ones". Strings are
referred to by number: most of a skeleton is strings, and unlike the rest they are the same at every step. So are
long lists and dicts of strings or numbers, whose JSON stands among the strings.

The rows of a booster of XGBoost are those of its own adapter, under the path of the booster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Any

import numpy as np

from tensorcas_flavors._facts import decode, encode_long, json_text
from tensorcas_flavors.sklearn._trees import TreeShape, build_trees, is_tree, read_trees, tree_shape
from tensorcas_flavors.sklearn._walk import Graph, is_booster, is_fortran, is_storable, packed, unused
from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError

_XGBOOST = XGBoostAdapter()


def booster_rows(path: str, booster: Any) -> dict[str, Array]:
    """Return the rows of a booster.

    Raises:
        AdapterError: It has not been trained, or holds what cannot be stored exactly.
    """
    return {f"{path}/{name}": row for name, row in _XGBOOST.extract(booster).items()}


def booster_paths(names: Collection[str]) -> list[str]:
    """Return the paths of the boosters among names of rows."""
    return [name.removesuffix(f"/{SKELETON}") for name in names if name.endswith(f"/{SKELETON}")]


def split_off(tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Split rows into those of no booster, and those of each booster by its path."""
    rest = dict(tensors)
    boosters = {}
    for path in booster_paths(tensors):
        names = [name for name in rest if name.startswith(f"{path}/")]
        boosters[path] = {name.removeprefix(f"{path}/"): rest.pop(name) for name in names}
    return rest, boosters


def booster_cuts(path: str, rows: Mapping[str, Array]) -> dict[str, Sequence[int]]:
    """Return the cuts of a booster's rows; see `Adapter.cuts`."""
    return {f"{path}/{name}": ends for name, ends in _XGBOOST.cuts(rows).items()}


def make_booster(rows: Mapping[str, Array]) -> Any:
    """Rebuild a booster from its rows.

    Raises:
        AdapterError: The rows are not those of a booster.
    """
    booster = _XGBOOST.reconstruct(rows)
    if not is_booster(booster):
        raise AdapterError(_XGBOOST.name, f"a {type(booster).__name__} is stored where a booster was")
    return booster


def fill_booster(rows: Mapping[str, Array], booster: Any) -> None:
    """Give a live booster the stored trees and parameters; no pickle is read.

    Raises:
        AdapterError: The rows are not those of a booster; the live one stays as it was.
    """
    _XGBOOST.reconstruct(rows, booster)


TREES = "trees"
SEEDS = "random_states"
STRINGS = "__strings__"
RESERVED = (SKELETON, TREES, SEEDS, STRINGS)
UNNAMED = "__array__/"
RANDOM = "__random__/"
ROWS = "#rows"
_MIN_UNNAMED_BYTES = 256


# Modules of classes whose instances hold attributes alone, and of which an ensemble has many.
_ALIKE = ("sklearn.tree._classes", "sklearn.ensemble._hist_gradient_boosting.predictor")
_MAX_TEMPLATES = 4
_EXACT = (bool, int, str, type(None))
_FLOATS = (float, np.float64)
Reference = tuple[Any, ...] | int


class TakenEstimatorParts:
    """Parts that one pickling takes out, in order of appearance."""

    def __init__(self, graph: Graph, odd_trees: set[int]) -> None:
        """Take parts of the model of a graph, but not the trees with these ids; pickling keeps those."""
        self.arrays: dict[str, Array] = {}
        self.families: dict[str, list[Array]] = {}
        self.trees: dict[str, tuple[TreeShape, list[Any]]] = {}
        self.seeds: list[int] = []
        self.boosters: dict[str, tuple[Any, dict[str, Array]]] = {}
        self.strings: dict[Any, int] = {}
        """Number of each string, and of each long list and dict by its id."""
        self.long: dict[Any, Any] = {}
        """JSON of each long list and dict, by its id."""
        self.graph = graph
        self._odd_trees = odd_trees
        self._names = set(graph.taken)
        self._tables: dict[TreeShape, str] = {}
        self._refs: dict[Reference, Reference] = {}
        self._again: dict[int, Reference] = {}
        self._n_again = 0
        self._unnamed: dict[tuple[Any, ...], str] = {}
        self._copies: list[Any] = []
        self._templates: dict[type, list[Any]] = {}
        self._takers: dict[type, Callable[[Any], Reference | None] | None] = {}

    def take_out(self, part: object) -> Reference | None:
        """Claim a part of the model; see `dump_skeleton`."""
        kind = type(part)
        if kind is str:
            return self.strings.setdefault(part, len(self.strings))
        try:
            take = self._takers[kind]
        except KeyError:
            take = self._takers[kind] = self._taker(kind)
        return None if take is None else take(part)

    @property
    def kinds(self) -> Set[type]:
        """Classes of the objects that the pickle holds."""
        return self._takers.keys()

    def tree_ids(self) -> set[int]:
        """Return the ids of the trees that are records of a table."""
        return {id(tree) for _, trees in self.trees.values() for tree in trees}

    def random_rows(self) -> dict[bytes, str]:
        """Return the names of the rows that hold states of random generators, by content."""
        return {array.tobytes(): name for name, array in self.arrays.items() if name.startswith(RANDOM)}

    def tensors(self) -> dict[str, Array]:
        """Return the parts as named arrays."""
        tensors = {name: _pack(np.asarray(array)) for name, array in self.arrays.items()}
        for name, members in self.families.items():
            if len({member.shape for member in members}) == 1:
                tensors[name] = np.asarray(_pack(np.stack(members)))
            else:
                tensors[name] = np.asarray(_pack(np.concatenate(members)))
                tensors[name + ROWS] = np.array([len(member) for member in members], dtype=np.int64)
        tensors.update({name: read_trees(trees) for name, (_, trees) in self.trees.items()})
        if self.seeds:
            tensors[SEEDS] = np.array(self.seeds, dtype=np.int64)
        for _, rows in self.boosters.values():
            tensors.update(rows)
        texts = [self.long.get(key, key) for key in self.strings]
        tensors[STRINGS] = np.frombuffer(json_text(texts).encode("utf-8", "surrogatepass"), np.uint8)
        return tensors

    def _taker(self, kind: type) -> Callable[[Any], Reference | None] | None:
        if kind is np.ndarray or kind is np.memmap:
            return self._take_array
        if kind is int:
            return self._take_seed if self.graph.seeds else None
        if kind is list or kind is dict:
            return self._take_long
        if kind.__name__ == "Tree" and kind.__module__ == "sklearn.tree._tree":
            return self._take_tree
        if kind.__qualname__ == "Booster" and kind.__module__ == "xgboost.core":
            return self._take_booster
        return self._take_alike if kind.__module__ in _ALIKE else None

    def _take_long(self, part: Any) -> Reference | None:
        if id(part) not in self.long:
            value = encode_long(part)
            if value is None:
                return None
            self.long[id(part)] = value
            self._copies.append(part)
        return self.strings.setdefault(id(part), len(self.strings))

    def _take_seed(self, number: int) -> Reference | None:
        if id(number) not in self.graph.seeds or number.bit_length() > 63:
            return None
        self.seeds.append(number)
        return self._ref("seed")

    def _take_alike(self, part: Any) -> Reference | None:
        """Take an estimator or predictor that differs from an earlier one in its tree, seed and arrays alone."""
        if id(part) in self._again:
            return self._again[id(part)]
        templates = self._templates.setdefault(type(part), [])
        for template in reversed(templates):
            if template is part:
                return None
            differing = self._differing(vars(template), vars(part))
            if differing is not None:
                parts = tuple((key, self.take_out(vars(part)[key])) for key in differing)
                return self._next(part, "like", template, parts)
        # The pickler writes this one out, so that later ones can refer to it.
        templates.append(part)
        del templates[:-_MAX_TEMPLATES]
        return None

    def _differing(self, template: Mapping[str, Any], attributes: Mapping[str, Any]) -> list[str] | None:
        """Return the names of attributes that differ from a template's; None if one of them cannot be taken alone."""
        if list(template) != list(attributes):
            return None
        differing = []
        for (key, value), model in zip(attributes.items(), template.values(), strict=True):
            if value is model:
                continue
            kind = type(value)
            is_same = kind is type(model) and (
                (kind in _EXACT and value == model)
                or (kind in _FLOATS and value.hex() == model.hex())
                or (isinstance(value, np.integer) and value == model)
            )
            if kind is int and id(value) in self.graph.seeds and value.bit_length() < 64:
                differing.append(key)
            elif not is_same:
                is_next = id(value) in self.graph.families or (is_tree(value) and id(value) not in self._odd_trees)
                if not is_next or id(value) in self._again:
                    return None
                differing.append(key)
        return differing

    def _take_array(self, array: Array) -> Reference | None:
        if id(array) in self._again:
            return self._again[id(array)]
        if not is_storable(array.dtype):
            return None
        family = self.graph.families.get(id(array))
        if family is not None:
            self.families.setdefault(family, []).append(array)
            return self._next(array, "member", family, *_dtype_if_padded(array))
        name = self.graph.names.get(id(array))
        if name is None:
            return self._take_unnamed(array)
        return self._take_whole(array, name)

    def _take_unnamed(self, array: Array) -> Reference | None:
        """Take an array that only pickling creates, such as the state of a random number generator."""
        if array.nbytes < _MIN_UNNAMED_BYTES:
            return None
        # numpy pickles the state of a RandomState twice, and each load needs its own array.
        content = (array.dtype, array.shape, blake2b(array.tobytes()).digest())
        if content in self._unnamed:
            self._copies.append(array)
            return self._next(array, "copy", self._unnamed[content], *_layout(array))
        is_random = array.dtype == np.uint32 and array.shape == (624,)
        prefix = RANDOM if is_random else UNNAMED
        n_before = sum(name.startswith(prefix) for name in self._unnamed.values())
        name = self._unnamed[content] = unused(f"{prefix}{n_before}", self._names)
        return self._take_whole(array, name)

    def _take_whole(self, array: Array, name: str) -> Reference:
        self.arrays[name] = array
        ref = self._ref("array", name, *_layout(array))
        self._again[id(array)] = ref
        return ref

    def _take_tree(self, tree: Any) -> Reference | None:
        if id(tree) in self._again:
            return self._again[id(tree)]
        if id(tree) in self._odd_trees:
            return None
        shape = tree_shape(tree)
        if shape not in self._tables:
            self._tables[shape] = TREES if not self._tables else unused(TREES, self._names)
        name = self._tables[shape]
        self.trees.setdefault(name, (shape, []))[1].append(tree)
        return self._next(tree, "tree", name, shape.n_features, *shape.n_classes)

    def _take_booster(self, booster: Any) -> Reference:
        if id(booster) in self._again:
            return self._again[id(booster)]
        # A booster that no attribute leads to has no path.
        path, _ = self.graph.boosters.get(id(booster)) or (unused("booster", self._names), booster)
        self.boosters[path] = booster, booster_rows(path, booster)
        return self._next(booster, "booster", path)

    def _next(self, part: object, *ref: Any) -> Reference:
        """Return a reference to the next part of a kind, and remember the part in case it comes again."""
        self._again[id(part)] = ("again", self._n_again)
        self._n_again += 1
        return self._ref(*ref)

    def _ref(self, *ref: Any) -> Reference:
        # Equal references are one object, so that the pickle spells each out once.
        return self._refs.setdefault(ref, ref)


class StoredEstimatorParts:
    """Parts of a stored model, in the order in which its pickle asks for them."""

    def __init__(self, adapter: str, tensors: Mapping[str, Array]) -> None:
        self._adapter = adapter
        self._tensors = tensors
        self._whole: dict[str, Array] = {}
        self._queues: dict[str, Iterator[Any]] = {}
        self._again: list[Any] = []
        self._values: Any = None

    def put_back(self, ref: Any) -> object:
        """Return the part of a reference; see `load_skeleton`."""
        if type(ref) is int:
            if self._values is None:
                self._values = decode(self._adapter, self.strings())
            return self._values[ref]
        word, *facts = ref
        if word == "array":
            return self._whole_array(*facts)
        if word == "seed":
            return self._next(SEEDS, lambda: iter(self.tensor(SEEDS).tolist()))
        if word == "again":
            return self._again[facts[0]]
        part: object
        if word == "member":
            name, *dtype = facts
            member = self._next(name, lambda: split_family(self._adapter, self._tensors, name))
            part = unpack(member, "C", *dtype).copy()
        elif word == "copy":
            part = unpack(self.tensor(facts[0]), *facts[1:]).copy(order=facts[1])
        elif word == "tree":
            name, n_features, *n_classes = facts
            shape = TreeShape(n_features, tuple(n_classes))
            part = self._next(name, lambda: iter(build_trees(self._adapter, self.tensor(name), shape)))
        elif word == "booster":
            prefix = f"{facts[0]}/"
            rows = {name: self._tensors[name] for name in self._tensors if name.startswith(prefix)}
            part = make_booster({name.removeprefix(prefix): row for name, row in rows.items()})
        elif word == "like":
            part = self._alike(*facts)
        else:
            raise AdapterError(self._adapter, f"the skeleton asks for an unknown kind of part, {word!r}")
        self._again.append(part)
        return part

    def tensor(self, name: str) -> Array:
        """Return a stored array.

        Raises:
            AdapterError: There is no array of that name.
        """
        if name not in self._tensors:
            raise AdapterError(self._adapter, f"the model's tensor {name!r} is missing")
        return self._tensors[name]

    def check_all_used(self) -> None:
        """Refuse parts that are left over.

        Raises:
            AdapterError: A family, a table or the seeds hold more than the pickle asked for.
        """
        for name, queue in self._queues.items():
            if next(queue, None) is not None:
                raise AdapterError(self._adapter, f"the tensor {name!r} holds more parts than the model has")

    def _alike(self, template: Any, parts: tuple[tuple[str, Reference], ...]) -> Any:
        part = object.__new__(type(template))
        attributes = {**vars(template), **{key: self.put_back(ref) for key, ref in parts}}
        if hasattr(part, "get_params"):
            # An estimator's __setstate__ compares versions, and that of the template has done so.
            vars(part).update(attributes)
        else:
            part.__setstate__(attributes)
        return part

    def strings(self) -> list[Any]:
        """Return the stored strings, and the JSON of long lists and dicts.

        Raises:
            AdapterError: The strings are missing or damaged.
        """
        try:
            return list(json.loads(self.tensor(STRINGS).tobytes()))
        except (ValueError, TypeError, RecursionError) as error:
            raise AdapterError(self._adapter, f"the strings cannot be read: {error}") from error

    def _whole_array(self, name: str, order: str, *dtype: Any) -> Array:
        if name not in self._whole:
            self._whole[name] = unpack(self.tensor(name), order, *dtype)
        return self._whole[name]

    def _next(self, name: str, start: Any) -> Any:
        if name not in self._queues:
            self._queues[name] = start()
        part = next(self._queues[name], None)
        if part is None:
            raise AdapterError(self._adapter, f"the tensor {name!r} holds fewer parts than the model has")
        return part


def split_family(adapter: str, tensors: Mapping[str, Array], name: str) -> Iterator[Array]:
    """Yield the members of a family, as views.

    Raises:
        AdapterError: The family is missing, or its row counts do not add up.
    """
    if name not in tensors:
        raise AdapterError(adapter, f"the model's tensor {name!r} is missing")
    family = np.atleast_1d(tensors[name])
    rows = tensors.get(name + ROWS)
    if rows is None:
        return iter(family)
    counts = rows.tolist() if rows.ndim == 1 and rows.dtype.kind in "iu" else [-1]
    if min(counts, default=0) < 0 or sum(counts) != len(family):
        raise AdapterError(adapter, f"the row counts of {name!r} do not add up")
    return iter(np.split(family, np.cumsum(counts)[:-1].tolist()))


def _dtype_if_padded(array: Array) -> tuple[np.dtype[Any], ...]:
    return () if packed(array.dtype) == array.dtype else (array.dtype,)


def _layout(array: Array) -> tuple[Any, ...]:
    return ("F" if is_fortran(array) else "C", *_dtype_if_padded(array))


def _pack(array: Array) -> Array:
    # Padding between fields holds whatever was in memory.
    return array.astype(packed(array.dtype)) if _dtype_if_padded(array) else array


def unpack(array: Array, order: str, dtype: np.dtype[Any] | None = None) -> Array:
    """Return a stored array in its former memory order and, where its fields had padding, its former dtype."""
    if dtype is not None and dtype != array.dtype:
        padded = np.zeros(array.shape, dtype=dtype)
        padded[...] = array
        array = padded
    if order == "F":
        array = np.asfortranarray(array)
    return array if array.flags.writeable else array.copy(order="K")
