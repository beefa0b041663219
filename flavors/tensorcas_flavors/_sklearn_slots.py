"""The places of a scikit-learn model in which something stands, and a fact of what stands there.

A slot is an attribute of an object, or an item of a container. Its fact is JSON:

* a plain value, as `_plain_values` writes it: it can be put into a live model;
* ``{}``: there is no such attribute;
* ``{"n": …}``: a list of fitted numbers, which are a row: its name, and whether they are numpy's;
* ``{"r": …}``: a `numpy.random.RandomState` or `numpy.random.Generator`, which can be made anew: name of the row of
  its state, position in it and the next normal number; or the kind of generator, its state and its seed;
* ``{"x": …}``: words for what is stored elsewhere (arrays, trees, seeds, boosters); the class of an object, or the
  keys or size of a container, whose slots follow; or a digest of all else, which another must equal.

Slots of one pattern are many where a list holds many objects. If their facts differ, runs of equal ones are stored:
``{"e": [length, fact, …]}``.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from tensorcas_flavors import _generic_facts
from tensorcas_flavors._pickling import dump_skeleton
from tensorcas_flavors._plain_values import Encoder, NotPlainError, is_taken, take_value
from tensorcas_flavors._sklearn_walk import Flat, Graph, is_space_tree
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

ABSENT: dict[str, Any] = {}
"""Fact of an attribute that is not there."""
RANDOM_STATE = "r"
NUMBERS = "n"
EACH = "e"
OTHER = "x"

_DIGEST_BYTES = 8
_MAX_TEXT = 4096
_MAX_INT = 1 << 63
_CACHES: Mapping[str, Any] = {"_cached_dict": None, "_stop_words_id": ABSENT}
"""Attributes that scikit-learn computes from others when it needs them, and what stands for those."""
_SIZES = frozenset(("n_features_in_", "_n_features", "n_samples_fit_"))
"""Compiled code follows these, and they are equal wherever arrays are of equal shape."""
_N_SPACE = 13
_SPACE_NUMBERS = {4: "leaf_size", 7: "n_trims", 8: "n_leaves", 9: "n_splits", 10: "n_calls"}
_SPACE_SIZES = (5, 6)
_SPACE_METRIC = 11
"""Positions in the state of a tree of points."""

TWISTER = "MT19937"
"""The generator of a `numpy.random.RandomState`."""
PLAIN_GENERATORS: dict[str, Any] = {kind.__name__: kind for kind in (np.random.PCG64, np.random.PCG64DXSM)}
"""Those of a `numpy.random.Generator` whose state is a few numbers."""
RANDOM_KINDS = (np.random.RandomState, np.random.Generator)
_ROW: dict[str, Any] = {OTHER: ["row"]}
_LEFT_OUT: dict[str, Any] = {OTHER: ["not pickled"]}
_SEED: dict[str, Any] = {OTHER: ["seed"]}
_SCALARS = frozenset((np.bool_, np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64))
_MAY_BE_PLAIN = frozenset((int, float, bytes, bytearray, list, tuple, dict, set, frozenset))
_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_BY_ALL, _BY_STATE = "all", "state"


class Slot(NamedTuple):
    """An item of a container, or an attribute: ``container[key]``."""

    container: Any
    """None if nothing else can be put there."""
    key: Any
    path: str
    value: Any
    fact: Any


class Owner(NamedTuple):
    """An object with attributes."""

    path: str
    attributes: dict[str, Any]
    facts: dict[str, Any]
    """By name of the attribute."""


@dataclass(frozen=True, slots=True)
class Slots:
    """All slots of a model, by pattern, in the order of a walk."""

    owners: dict[str, list[Owner]] = field(default_factory=dict)
    items: dict[str, list[Slot]] = field(default_factory=dict)

    def attributes(self) -> dict[str, list[Any]]:
        """Return by pattern how many objects there are, and the facts of attributes by name."""
        return {
            pattern: [
                len(owners),
                {
                    name: as_one([owner.facts.get(name, ABSENT) for owner in owners])
                    for name in dict.fromkeys(name for owner in owners for name in owner.facts)
                },
            ]
            for pattern, owners in self.owners.items()
        }

    def items_as_one(self) -> dict[str, list[Any]]:
        """Return by pattern how many items there are, and their facts."""
        return {pattern: [len(slots), as_one([slot.fact for slot in slots])] for pattern, slots in self.items.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What is stored of a model outside of facts."""

    adapter: str
    """The adapter's name, for errors."""
    graph: Graph
    trees: Collection[int]
    """Ids of the trees that are records of a table."""
    random_rows: Mapping[bytes, str]
    """Names of the rows that hold states of random number generators, by content."""
    number_rows: Mapping[int, str]
    """Names of the rows that hold all the numbers of a list, by id of the list."""
    has_seeds: bool
    """Whether seeds of single trees are a row."""


def find_slots(model: Any, stored: Stored, *, is_live: bool) -> Slots:
    """Find the slots of a model.

    Args:
        model: The estimator.
        stored: What of it has rows.
        is_live: Whether the slots are to be filled. What a pickle of the model leaves out is a slot then, too.

    Raises:
        AdapterError: Something in the model cannot be pickled.
    """
    return _Walk(stored, is_live=is_live).run(model)


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two facts are equal; a 1 is no True and no 1.0."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is int or kind is str or kind is bool:
        return bool(one == other)
    if kind is float:
        return bool(one.hex() == other.hex())
    return json.dumps(one) == json.dumps(other)


def as_one(facts: list[Any]) -> Any:
    """Return the fact that all of these are, or an object with runs: the length and the fact of each."""
    runs: list[Any] = []
    for fact in facts:
        if runs and is_same(runs[-1], fact):
            runs[-2] += 1
        else:
            runs += [1, fact]
    return runs[1] if len(runs) == 2 else {EACH: runs}


def as_many(fact: Any, n: int) -> list[Any] | None:
    """Return what `as_one` made one of; None unless these are ``n`` facts."""
    if type(fact) is not dict or EACH not in fact:
        return [fact] * n
    runs = fact[EACH]
    if type(runs) is not list or len(runs) % 2 or any(type(each) is not int or each < 1 for each in runs[::2]):
        return None
    if sum(runs[::2]) != n:
        return None
    return [each for length, each in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]


class SpaceTreeItems:
    """The state of a k-d tree or ball tree, as a container of which items can be set."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def __getitem__(self, key: int) -> Any:
        return self._tree.__getstate__()[key]

    def __setitem__(self, key: int, value: Any) -> None:
        state = list(self._tree.__getstate__())
        state[key] = value
        self._tree.__setstate__(tuple(state))


class _LiveEncoder(Encoder):
    """Writes plain values of a live model as JSON, where `Encoder` writes those of a pickle's tree."""

    def _container(self, part: Any, depth: int) -> tuple[Any, int]:
        kind = type(part)
        if kind is tuple:
            return self._all("t", part, depth)
        if kind is list:
            return self._all(None, part, depth)
        if kind is dict:
            return self._all("d", [each for pair in part.items() for each in pair], depth)
        if kind is set or kind is frozenset:
            content, n_values = self._all(None, list(part), depth)
            return {"s" if kind is set else "z": sorted(content, key=json.dumps)}, n_values
        described = take_value(part) if is_taken(kind) else None
        if described is None:
            raise NotPlainError
        return self._all("v", described[1:], depth)


class _Visit(NamedTuple):
    part: Any
    pattern: str
    path: str


class _Walk:
    """One pass over a model, level by level."""

    def __init__(self, about: Stored, *, is_live: bool) -> None:
        self._about = about
        self._is_live = is_live
        self._filled = {*about.graph.names, *about.graph.boosters, *about.trees}
        self._number_rows: Mapping[int, str] = {} if is_live else about.number_rows
        self._seeded = {id(held) for held in about.graph.seeded} if about.has_seeds else set()
        self._encode = _LiveEncoder().encode
        self._paths: dict[int, str] = {}
        self._digests: dict[int, Any] = {}
        self._scalars: dict[tuple[type, bytes], Any] = {}
        self._words: dict[tuple[Any, ...], Any] = {}
        self._found: list[_Visit] = []
        self._slots = Slots()

    def run(self, model: Any) -> Slots:
        self._slots.items[""] = [Slot(None, 0, "", model, self._fact(model, "", ""))]
        while self._found:
            found, self._found = self._found, []
            for visit in found:
                self._visit(visit)
        return self._slots

    def _fact(self, part: Any, pattern: str, path: str) -> Any:
        """Return the fact of what stands in a slot; what has slots itself is visited later."""
        kind = type(part)
        if part is None or kind is bool or (kind is int and -_MAX_INT <= part < _MAX_INT):
            return part
        if kind is str:
            return part if len(part) <= _MAX_TEXT else {OTHER: ["text", _digest(part.encode("utf-8", "surrogatepass"))]}
        if id(part) in self._filled:
            return _ROW
        if kind in _SCALARS:
            # Ensembles hold the same ones many times.
            key = kind, part.tobytes()
            if key not in self._scalars:
                self._scalars[key] = self._encode(part)
            return self._scalars[key]
        if kind is np.ndarray and part.dtype != object:
            return {OTHER: ["array", _digest(*_contents(part))]}
        if id(part) in self._number_rows:
            return {NUMBERS: [self._number_rows[id(part)], type(part[0]) is not float]}
        if kind in _MAY_BE_PLAIN or is_taken(kind):
            try:
                return self._encode(part)
            except NotPlainError:
                pass
        if id(part) in self._digests:
            return self._digests[id(part)]
        if id(part) in self._paths:
            return self._word("again", self._paths[id(part)])
        said = self._said(part)
        if said is None:
            digest = self._digest_of_masked if kind is np.ma.MaskedArray else self._digest_of
            fact = self._digests[id(part)] = {OTHER: [kind.__qualname__, digest(part)]}
            return fact
        self._paths[id(part)] = path
        if kind in RANDOM_KINDS:
            return {RANDOM_STATE: self._random_state(part)}
        self._found.append(_Visit(part, pattern, path))
        return self._word(*said)

    def _word(self, *words: Any) -> Any:
        """Return one fact for equal words, since many are compared."""
        return self._words.setdefault(words, {OTHER: list(words)})

    def _said(self, part: Any) -> tuple[Any, ...] | None:
        """Say in words what has slots, or is a random state; None for all else."""
        kind: Any = type(part)
        if kind is np.ndarray:
            return "objects", str(part.shape)
        if kind is tuple:
            return "tuple", len(part)
        if is_space_tree(part):
            state = part.__getstate__()
            if len(state) != _N_SPACE:
                return None
            return *_name(kind), *(state[i] for i in _SPACE_SIZES), self._digest_of(state[_SPACE_METRIC])
        if kind is np.random.RandomState:
            return _name(kind) if part.get_state(legacy=False)["bit_generator"] == TWISTER else None
        if kind is np.random.Generator:
            return None if _generator_state(part) is None else _name(kind)
        way = None if kind is np.ma.MaskedArray else _way(kind)
        if way is None or (way == _BY_STATE and not _pickles_what_it_holds(part)):
            return None
        if isinstance(part, dict):
            keys = [self._fact_of_key(key) for key in part]
            made_by = self._digest_of(part.default_factory) if isinstance(part, defaultdict) else None
            return *_name(kind), _digest(json.dumps(keys).encode()), made_by
        return (*_name(kind), len(part)) if isinstance(part, list) else _name(kind)

    def _fact_of_key(self, key: Any) -> Any:
        try:
            return self._encode(key)
        except NotPlainError:
            return {OTHER: self._digest_of(key)}

    def _visit(self, visit: _Visit) -> None:
        part = visit.part
        if isinstance(part, dict):
            self._visit_items(visit, part, [(key, str(key)) for key in part])
        elif isinstance(part, list):
            self._visit_items(visit, part, [(i, str(i)) for i in range(len(part))])
        elif isinstance(part, tuple):
            self._visit_items(visit, None, [(i, str(i)) for i in range(len(part))])
        elif isinstance(part, np.ndarray):
            self._visit_items(visit, Flat(part), [(i, str(i)) for i in range(part.size)])
        elif is_space_tree(part):
            self._visit_items(visit, SpaceTreeItems(part), list(_SPACE_NUMBERS.items()))
        attributes = getattr(part, "__dict__", None)
        if attributes:
            self._visit_attributes(visit, attributes)

    def _visit_items(self, visit: _Visit, container: Any, keys: list[tuple[Any, str]]) -> None:
        slots = self._slots.items.setdefault(visit.pattern, [])
        pattern = f"{visit.pattern}/*" if visit.pattern else "*"
        for key, name in keys:
            path = f"{visit.path}/{name}" if visit.path else name
            value = (visit.part if container is None else container)[key]
            slots.append(Slot(container, key, path, value, self._fact(value, pattern, path)))

    def _visit_attributes(self, visit: _Visit, attributes: dict[str, Any]) -> None:
        part = visit.part
        kind: Any = type(part)
        pickled = part.__getstate__() if _way(kind) == _BY_STATE else attributes
        facts: dict[str, Any] = {}
        is_seeded = id(attributes) in self._seeded
        for name, value in attributes.items():
            if name not in pickled:
                if self._is_live and not _is_of_sklearn(kind):
                    facts[name] = _LEFT_OUT
            elif name in _CACHES and not self._is_live:
                facts[name] = _CACHES[name]
            elif is_seeded and name == "random_state":
                facts[name] = _SEED
            else:
                pattern = f"{visit.pattern}/{name}" if visit.pattern else name
                path = f"{visit.path}/{name}" if visit.path else name
                fact = self._fact(value, pattern, path)
                facts[name] = {OTHER: [fact]} if name in _SIZES else fact
        owners = self._slots.owners.setdefault(f"{visit.pattern}:{kind.__qualname__}", [])
        owners.append(Owner(visit.path, attributes, facts))

    def _random_state(self, part: Any) -> list[Any]:
        """Return what makes a random state anew; of a live one it does not matter."""
        if self._is_live:
            return []
        if isinstance(part, np.random.Generator):
            return _generator_state(part) or []
        state: Any = part.get_state(legacy=False)
        row = self._about.random_rows.get(state["state"]["key"].tobytes())
        if row is None:
            raise AdapterError(self._about.adapter, "a random state changes while it is saved")
        return [row, state["state"]["pos"], state["has_gauss"], state["gauss"]]

    def _digest_of_masked(self, part: Any) -> str:
        mask = np.ma.getmaskarray(part)
        shown = np.array(np.ma.getdata(part))
        # What is masked may be whatever was in memory.
        shown[mask] = None if shown.dtype == object else np.zeros((), shown.dtype)
        fill_value = vars(part)["_fill_value"]
        if fill_value is None:
            # It is computed when somebody asks for it, and then kept.
            fill_value = np.ma.default_fill_value(part.dtype)
        content = self._digest_of(shown).encode() if shown.dtype == object else b"".join(_contents(shown))
        return _digest(content, mask.tobytes(), repr(np.asarray(fill_value).item()).encode())

    def _digest_of(self, part: Any) -> str:
        """Return a digest of what pickle says of something, without what is stored as rows."""
        memo: dict[int, object] = {}
        skeleton = dump_skeleton(
            self._about.adapter, part, lambda held: "row" if id(held) in self._filled else None, memo=memo
        )
        facts = _generic_facts.facts_of(skeleton, memo)
        return _digest(facts.rest.encode(), json.dumps([hole.value for hole in facts.holes]).encode())


def _generator_state(generator: np.random.Generator) -> list[Any] | None:
    """Return what makes a generator anew: its kind, its state and its seed, from which others are spawned."""
    bits: Any = generator.bit_generator
    if type(bits) not in PLAIN_GENERATORS.values() or type(bits.seed_seq) is not np.random.SeedSequence:
        return None
    try:
        # What an encoder has written it knows by its id, which a copy does not have for long.
        return [type(bits).__name__, *(_LiveEncoder().encode(state) for state in (bits.state, bits.seed_seq.state))]
    except NotPlainError:
        return None


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _is_of_sklearn(kind: type) -> bool:
    return kind.__module__.startswith("sklearn.")


@lru_cache(maxsize=4096)
def _way(kind: Hashable) -> str | None:
    """Tell how objects of a class are pickled: by their attributes, some or all, and items; None if in another way."""
    assert isinstance(kind, type)
    if kind in (dict, list, OrderedDict, defaultdict):
        return _BY_ALL
    if (
        issubclass(kind, _CODE)
        or kind in cloudpickle.Pickler.dispatch_table
        or not kind.__dictoffset__
        or _has_slots(kind)
    ):
        return None
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return None
    if any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__")):
        return None
    if issubclass(kind, list | dict):
        if kind.__iter__ is not (list if issubclass(kind, list) else dict).__iter__:
            return None
        if issubclass(kind, dict) and kind.items is not dict.items:
            return None
    elif issubclass(kind, tuple | set | frozenset | np.ndarray | str | bytes | int | float | complex | bytearray):
        return None
    if not _is_sklearns(getattr(kind, "__setstate__", None)):
        return None
    getstate = kind.__getstate__
    if getstate is object.__getstate__ or getattr(getstate, "__module__", "") == "sklearn.base":
        return _BY_ALL
    return _BY_STATE


def _pickles_what_it_holds(part: Any) -> bool:
    """Tell whether the state that an object pickles is some of its attributes."""
    state = part.__getstate__()
    held = vars(part)
    return type(state) is dict and all(
        name == "_sklearn_version" or (name in held and held[name] is value) for name, value in state.items()
    )


def _is_sklearns(method: Any) -> bool:
    return method is None or str(getattr(method, "__module__", "")).startswith("sklearn.")


def _has_slots(kind: type) -> bool:
    slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    return any({*([names] if isinstance(names, str) else names)} - {"__dict__", "__weakref__"} for names in slots)


def _contents(array: Array) -> Iterator[bytes]:
    """Yield what tells an array from others."""
    # Extended precision has padding bytes of arbitrary value.
    content = repr(array.tolist()).encode() if array.dtype.char in "gG" else array.tobytes()
    yield from (str((array.dtype, array.shape)).encode(), content)


def _digest(*contents: bytes) -> str:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for content in contents:
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.hexdigest()
