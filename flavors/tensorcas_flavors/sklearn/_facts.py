"""Facts of a scikit-learn model, from which a live one is filled without reading the stored pickle.

`tensorcas_flavors._facts` describes an object by its pickle. The pickle of an ensemble describes thousands of members,
so these facts come from a walk over the model itself, which describes similar members once. They follow the pickle in
the skeleton as JSON:

* ``sizes``: the number of members of each ensemble, by its path;
* ``numbers``: names of the rows that repeat fitted numbers for readers of tensors;
* ``aliases``: by path the name of an array to which another path leads, too: a copy may have two arrays there;
* ``attributes`` and ``items``: by pattern the number of objects and items, and the facts of their slots.

A slot is an attribute of an object, or an item of a container. Its fact is

* a plain value, as `Encoder` writes it, which can be put into a live model;
* ``{}`` for an attribute that is absent;
* ``{"r": …}`` for a `numpy.random.RandomState` or `numpy.random.Generator`, which can be made anew: the name of the row
  of its state, its position there and its next normal number; or the kind of generator, its state and its seed;
* ``{"x": …}`` for all else: words for a part that is stored elsewhere (an array, tree, seed or booster); the class of
  an object, or the keys or size of a container, whose slots follow; or a digest that a live model must equal.

One pattern has many slots where a list holds many objects. Slots with different facts are stored as runs of equal ones:
``{"e": [length, fact, …]}``. A text that is also a string of the pickle is ``#`` and its number among the strings,
which are a row that hardly changes; other texts begin with ``=``. A list or dict that
is one JSON value among the strings is ``#`` and its number, too.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from tensorcas_flavors._facts import (
    Encoder,
    LivePlace,
    NotPlainError,
    Slot,
    decode,
    facts_of,
    is_same_json,
    is_taken,
    misfit,
    no_facts,
    read_tail,
    with_tail,
)
from tensorcas_flavors._pickling import view_of_map
from tensorcas_flavors.sklearn._parts import RANDOM, TakenEstimatorParts
from tensorcas_flavors.sklearn._walk import CODE, SpaceTree, is_space_tree, n_members
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

ABSENT: dict[str, Any] = {}
"""Fact of an attribute that is absent."""

_RANDOM_STATE, _RUNS, _OTHER = "r", "e", "x"
_ROW: dict[str, Any] = {_OTHER: ["row"]}
_LEFT_OUT: dict[str, Any] = {_OTHER: ["not pickled"]}
_SEED: dict[str, Any] = {_OTHER: ["seed"]}
_DIGEST_BYTES = 8
_MAX_TEXT = 4096
_MAX_INT = 1 << 63
_MAX_SHOWN = 64
_CACHES: Mapping[str, Any] = {"_cached_dict": None, "_stop_words_id": ABSENT}
"""Attributes that scikit-learn computes when it needs them, and the facts that are stored instead."""
_SIZES = frozenset(("n_features_in_", "_n_features", "n_samples_fit_"))
"""Attributes that compiled code follows; they are equal wherever arrays are of equal shape."""
_N_SPACE = 13
_SPACE_NUMBERS = {4: "leaf_size", 7: "n_trims", 8: "n_leaves", 9: "n_splits", 10: "n_calls"}
_SPACE_SIZES = (5, 6)
_SPACE_METRIC = 11
"""Positions in the state of a k-d tree or ball tree."""
_TWISTER = "MT19937"
"""The bit generator of a `numpy.random.RandomState`."""
_PLAIN_GENERATORS: dict[str, Any] = {kind.__name__: kind for kind in (np.random.PCG64, np.random.PCG64DXSM)}
"""Bit generators whose state is a few numbers."""
_RANDOM_KINDS = (np.random.RandomState, np.random.Generator)
_SCALARS = frozenset((np.bool_, np.int32, np.int64, np.uint32, np.uint64, np.float32, np.float64))
_MAY_BE_PLAIN = frozenset((int, float, bytes, bytearray, list, tuple, dict, set, frozenset))
_BY_ALL, _BY_STATE = "all", "state"


class AttributeOwner(NamedTuple):
    """Object with attributes."""

    path: str
    attributes: dict[str, Any]
    facts: dict[str, Any]
    """By name of the attribute."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of a model, by pattern, in the order of a walk."""

    owners: dict[str, list[AttributeOwner]] = field(default_factory=dict)
    """Objects with attributes."""
    items: dict[str, list[Slot]] = field(default_factory=dict)
    """Items of containers."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a stored model; see the head of this module."""

    sizes: dict[str, int] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, list[Any]] = field(default_factory=dict)
    items: dict[str, list[Any]] = field(default_factory=dict)


class Change(NamedTuple):
    """Replacement of one value in a live model."""

    place: LivePlace
    value: Any
    """`ABSENT` for an attribute that is to be dropped."""


def model_facts(adapter: str, model: Any, parts: TakenEstimatorParts) -> ModelFacts:
    """Return the facts of a model that was just taken apart.

    Raises:
        AdapterError: Something in the model cannot be pickled by itself.
    """
    graph = parts.graph
    slots = _Walk(adapter, parts, has_seeds=bool(graph.seeds), is_live=False).run(model)
    attributes: dict[str, list[Any]] = {}
    for pattern, owners in slots.owners.items():
        names = dict.fromkeys(name for owner in owners for name in owner.facts)
        facts = {name: _as_one([owner.facts.get(name, ABSENT) for owner in owners]) for name in names}
        attributes[pattern] = [len(owners), facts]
    return ModelFacts(
        sizes={path: n_members(ensemble) for path, ensemble in graph.ensembles.items()},
        numbers=list(graph.numbers),
        aliases={path: name for path, name in graph.aliases.items() if name in parts.arrays},
        attributes=attributes,
        items={pattern: [len(held), _as_one([slot.fact for slot in held])] for pattern, held in slots.items.items()},
    )


def with_facts(skeleton: Array, facts: ModelFacts, strings: Mapping[Any, int]) -> Array:
    """Return a skeleton with facts at its end; ``strings`` has the number of each stored string."""
    given = {name: getattr(facts, name) for name in ModelFacts.__dataclass_fields__ if getattr(facts, name)}
    return with_tail(skeleton, _with_texts(given, lambda text: f"#{strings[text]}" if text in strings else f"={text}"))


def read_facts(adapter: str, skeleton: Array | None, strings: Callable[[], Sequence[Any]]) -> ModelFacts:
    """Read the facts at the end of a skeleton. No pickle is read.

    Raises:
        AdapterError: There are no facts, or they are damaged.
    """
    tables = read_tail(adapter, skeleton)
    if tables is None:
        raise no_facts(adapter)
    try:
        known = strings()
        facts = ModelFacts(**_with_texts(tables, lambda text: known[int(text[1:])] if text[0] == "#" else text[1:]))
        given = [getattr(facts, name) for name in ModelFacts.__dataclass_fields__]
        kinds = [type(getattr(ModelFacts(), name)) for name in ModelFacts.__dataclass_fields__]
        pairs = [*facts.attributes.values(), *facts.items.values()]
        if [type(each) for each in given] != kinds or {type(n) for n in facts.sizes.values()} - {int}:
            raise ValueError("they are of another kind")
        is_odd = any(type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int for pair in pairs)
        if is_odd or any(type(by_name) is not dict for _, by_name in facts.attributes.values()):
            raise ValueError("they are of another kind")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AdapterError(adapter, f"the end of the skeleton cannot be read: {error}") from error
    return facts


def _with_texts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return JSON with changed texts, and tuples of the id of a long list or dict; one-letter words of facts stay."""
    kind = type(value)
    if kind is str or kind is tuple:
        return change(value if kind is str else value[0])
    if kind is list:
        return [_with_texts(each, change) for each in value]
    if kind is dict:
        return {
            key if len(key) == 1 and key.isalpha() else change(key): _with_texts(each, change)
            for key, each in value.items()
        }
    return value


def plan_changes(
    adapter: str,
    model: Any,
    parts: TakenEstimatorParts,
    facts: ModelFacts,
    rows: Mapping[str, Array],
    *,
    has_seeds: bool,
) -> Iterator[Change]:
    """Compare a live model with a stored one, and plan the replacement of its values. Nothing changes.

    Args:
        adapter: The adapter's name, for errors.
        model: The live estimator.
        parts: Taken from the live model.
        facts: Of the stored model.
        rows: Of the stored model.
        has_seeds: Whether the seeds of single trees are a row of the stored model.

    Raises:
        AdapterError: The live model differs in something that only the pickle can restore.
    """
    live = _Walk(adapter, parts, has_seeds=has_seeds, is_live=True).run(model)
    made: dict[int, Any] = {}
    """New random states, by id of the live ones."""
    again: list[Slot] = []
    for slot, fact in _pairs(adapter, live, facts):
        if is_same_json(slot.fact, fact):
            if type(slot.value) in _RANDOM_KINDS:
                again.append(slot)
            continue
        if slot.place is None or not (_can_fill(fact) and (_can_fill(slot.fact) or fact == ABSENT)):
            raise misfit(adapter, _difference(adapter, slot, fact))
        value = _made(adapter, fact, rows)
        if type(value) in _RANDOM_KINDS and type(slot.value) in _RANDOM_KINDS:
            made[id(slot.value)] = value
        yield Change(slot.place, value)
    for slot in again:
        if id(slot.value) in made:
            if slot.place is None:
                raise misfit(adapter, f"{slot.path!r} cannot be changed in place")
            yield Change(slot.place, made[id(slot.value)])


def _pairs(adapter: str, live: Slots, facts: ModelFacts) -> Iterator[tuple[Slot, Any]]:
    """Yield each slot of a live model with the stored fact, slots of attributes that it lacks included."""
    dropped: list[str] = []
    for pattern, slots in live.items.items():
        if pattern in facts.items:
            stored = _stored(adapter, slots[0].path if slots else pattern, facts.items[pattern], len(slots))
            yield from zip(slots, stored, strict=True)
    for pattern, owners in live.owners.items():
        if pattern not in facts.attributes:
            continue
        n, by_name = facts.attributes[pattern]
        for name in dict.fromkeys([*(name for owner in owners for name in owner.facts), *by_name]):
            stored = _stored(adapter, owners[0].path, (n, by_name.get(name, ABSENT)), len(owners))
            if all(fact == ABSENT for fact in stored):
                dropped.append(f"{pattern.rpartition(':')[0]}/{name}".removeprefix("/"))
            for owner, fact in zip(owners, stored, strict=True):
                path = f"{owner.path}/{name}" if owner.path else name
                value = owner.attributes.get(name)
                yield Slot(path, owner.facts.get(name, ABSENT), value, LivePlace(owner.attributes, name)), fact
    lost = (facts.items.keys() - live.items.keys()) | (facts.attributes.keys() - live.owners.keys())
    more = (live.items.keys() - facts.items.keys()) | (live.owners.keys() - facts.attributes.keys())
    differing = lost | {pattern for pattern in more if not pattern.startswith(tuple(dropped))}
    if differing:
        raise misfit(adapter, f"only one of the two has parts of {min(differing)!r}")


def _stored(adapter: str, path: str, stored: Any, n: int) -> list[Any]:
    """Return as many stored facts as the live model has slots."""
    n_stored, content = stored
    facts = _as_many(content, n)
    if facts is None or n_stored != n:
        raise misfit(adapter, f"it has {n} parts such as {path!r}, and the stored one has {n_stored}")
    return facts


def _can_fill(fact: Any) -> bool:
    return type(fact) is not dict or _OTHER not in fact


def _difference(adapter: str, slot: Slot, fact: Any) -> str:
    live, stored = (_shown(adapter, each) for each in (slot.fact, fact))
    is_fixed = _can_fill(slot.fact) and _can_fill(fact)
    why = "cannot be changed in place" if is_fixed else "can only be unpickled"
    return f"{slot.path!r} is {live} in it, {stored} in the stored one, and {why}"


def _shown(adapter: str, fact: Any) -> str:
    if fact == ABSENT:
        return "absent"
    if type(fact) is dict and _RANDOM_STATE in fact:
        return "a random state"
    return (repr(decode(adapter, fact)) if _can_fill(fact) else " ".join(map(str, fact[_OTHER])))[:_MAX_SHOWN]


def _made(adapter: str, fact: Any, rows: Mapping[str, Array]) -> Any:
    """Return the value that a fact puts into a slot."""
    if type(fact) is not dict or _RANDOM_STATE not in fact:
        return ABSENT if fact == ABSENT else decode(adapter, fact)
    try:
        if fact[_RANDOM_STATE][0] in _PLAIN_GENERATORS:
            name, bit_state, seed = fact[_RANDOM_STATE]
            bits = _PLAIN_GENERATORS[name](np.random.SeedSequence(**decode(adapter, seed)))
            bits.state = decode(adapter, bit_state)
            return np.random.Generator(bits)
        row, position, has_gauss, next_gauss = fact[_RANDOM_STATE]
        if not row.startswith(RANDOM):
            raise ValueError(row)
        state = np.random.RandomState(0)
        state.set_state((_TWISTER, rows[row], position, has_gauss, decode(adapter, next_gauss)))
        return state
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AdapterError(adapter, f"a part of the model cannot be read: {fact!r:.100}") from error


def _as_one(facts: list[Any]) -> Any:
    """Return the fact that all of these are, or an object with runs: the length and the fact of each."""
    runs: list[Any] = []
    for fact in facts:
        if runs and is_same_json(runs[-1], fact):
            runs[-2] += 1
        else:
            runs += [1, fact]
    return runs[1] if len(runs) == 2 else {_RUNS: runs}


def _as_many(fact: Any, n: int) -> list[Any] | None:
    """Invert `_as_one`; return None if these are not ``n`` facts."""
    if type(fact) is not dict or _RUNS not in fact:
        return [fact] * n
    runs = fact[_RUNS]
    if type(runs) is not list or len(runs) % 2 or any(type(each) is not int or each < 1 for each in runs[::2]):
        return None
    if sum(runs[::2]) != n:
        return None
    return [each for length, each in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]


class _Visit(NamedTuple):
    part: Any
    pattern: str
    path: str


class _Walk:
    """Pass over a model, level by level."""

    def __init__(self, adapter: str, parts: TakenEstimatorParts, *, has_seeds: bool, is_live: bool) -> None:
        """Prepare a pass.

        Args:
            adapter: The adapter's name, for errors.
            parts: Taken from the model; they have no facts of their own.
            has_seeds: Whether the seeds of single trees are a row.
            is_live: Whether the slots are to be filled. Attributes that a pickle leaves out have slots then, too.
        """
        graph = parts.graph
        self._adapter = adapter
        self._is_live = is_live
        self._filled = {*graph.names, *graph.boosters, *parts.tree_ids()}
        self._random_rows = {} if is_live else parts.random_rows()
        self._long = parts.long if is_live else {key: (key,) for key in parts.long}
        self._seeded = {id(held) for held in graph.seeded} if has_seeds else set()
        self._encode = Encoder().encode
        self._paths: dict[int, str] = {}
        self._digests: dict[int, Any] = {}
        self._scalars: dict[tuple[type, bytes], Any] = {}
        self._words: dict[tuple[Any, ...], Any] = {}
        self._found: list[_Visit] = []
        self._slots = Slots()

    def run(self, model: Any) -> Slots:
        """Return the slots of a model.

        Raises:
            AdapterError: Something in the model cannot be pickled by itself.
        """
        self._slots.items[""] = [Slot("", self._fact(model, "", ""), model, None)]
        while self._found:
            found, self._found = self._found, []
            for visit in found:
                self._visit(visit)
        return self._slots

    def _fact(self, part: Any, pattern: str, path: str) -> Any:
        """Return the fact of a value; the walk visits later a value that has slots itself."""
        kind = type(part)
        if part is None or kind is bool or (kind is int and -_MAX_INT <= part < _MAX_INT):
            return part
        if kind is str:
            return (
                part if len(part) <= _MAX_TEXT else {_OTHER: ["text", _digest(part.encode("utf-8", "surrogatepass"))]}
            )
        if id(part) in self._filled:
            return _ROW
        if kind in _SCALARS:
            # Ensembles hold equal scalars many times.
            key = kind, part.tobytes()
            if key not in self._scalars:
                self._scalars[key] = self._encode(part)
            return self._scalars[key]
        if (kind is np.ndarray or kind is np.memmap) and part.dtype != object:
            return {_OTHER: ["array", _digest(*_contents(part))]}
        if id(part) in self._long:
            return self._long[id(part)]
        if kind in _MAY_BE_PLAIN or is_taken(kind):
            try:
                return self._encode(part)
            except NotPlainError:
                pass
        if id(part) in self._digests:
            return self._digests[id(part)]
        if id(part) in self._paths:
            return self._word("again", self._paths[id(part)])
        words = self._describe(part)
        if words is None:
            digest = self._digest_of_masked if kind is np.ma.MaskedArray else self._digest_of
            fact = self._digests[id(part)] = {_OTHER: [kind.__qualname__, digest(part)]}
            return fact
        self._paths[id(part)] = path
        if kind in _RANDOM_KINDS:
            return {_RANDOM_STATE: self._random_state(part)}
        self._found.append(_Visit(part, pattern, path))
        return self._word(*words)

    def _word(self, *words: Any) -> Any:
        """Return one object for equal facts, since many are compared."""
        return self._words.setdefault(words, {_OTHER: list(words)})

    def _describe(self, part: Any) -> tuple[Any, ...] | None:
        """Describe in words a value with slots, or a random state; None for all else."""
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
            return _name(kind) if part.get_state(legacy=False)["bit_generator"] == _TWISTER else None
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
            return {_OTHER: self._digest_of(key)}

    def _visit(self, visit: _Visit) -> None:
        part = visit.part
        if isinstance(part, dict):
            self._visit_items(visit, part, ((key, str(key), value) for key, value in part.items()))
        elif isinstance(part, list):
            self._visit_items(visit, part, ((i, str(i), value) for i, value in enumerate(part)))
        elif isinstance(part, tuple):
            self._visit_items(visit, None, ((i, str(i), value) for i, value in enumerate(part)))
        elif isinstance(part, np.ndarray):
            self._visit_items(visit, part, ((i, str(i), value) for i, value in enumerate(part.flat)))
        elif is_space_tree(part):
            tree = SpaceTree(part)
            self._visit_items(visit, tree, ((i, name, tree[i]) for i, name in _SPACE_NUMBERS.items()))
        attributes = getattr(part, "__dict__", None)
        if attributes and not _forgets_attributes(type(part)):
            self._visit_attributes(visit, attributes)

    def _visit_items(self, visit: _Visit, container: Any, items: Iterable[tuple[Any, str, Any]]) -> None:
        slots = self._slots.items.setdefault(visit.pattern, [])
        pattern = f"{visit.pattern}/*" if visit.pattern else "*"
        for key, name, value in items:
            path = f"{visit.path}/{name}" if visit.path else name
            place = None if container is None else LivePlace(container, key)
            slots.append(Slot(path, self._fact(value, pattern, path), value, place))

    def _visit_attributes(self, visit: _Visit, attributes: dict[str, Any]) -> None:
        part = visit.part
        kind: Any = type(part)
        pickled = part.__getstate__() if _way(kind) == _BY_STATE else attributes
        facts: dict[str, Any] = {}
        is_seeded = id(attributes) in self._seeded
        for name, value in attributes.items():
            if name not in pickled:
                if self._is_live and not _is_sklearns(kind):
                    facts[name] = _LEFT_OUT
            elif name in _CACHES and not self._is_live:
                facts[name] = _CACHES[name]
            elif is_seeded and name == "random_state":
                facts[name] = _SEED
            else:
                pattern = f"{visit.pattern}/{name}" if visit.pattern else name
                path = f"{visit.path}/{name}" if visit.path else name
                fact = self._fact(value, pattern, path)
                facts[name] = {_OTHER: [fact]} if name in _SIZES else fact
        owners = self._slots.owners.setdefault(f"{visit.pattern}:{kind.__qualname__}", [])
        owners.append(AttributeOwner(visit.path, attributes, facts))

    def _random_state(self, part: Any) -> list[Any]:
        """Return the fact from which a random state can be made; nothing for a live one, which is replaced."""
        if self._is_live:
            return []
        if isinstance(part, np.random.Generator):
            return _generator_state(part) or []
        state: Any = part.get_state(legacy=False)
        row = self._random_rows.get(state["state"]["key"].tobytes())
        if row is None:
            raise AdapterError(self._adapter, "a random state changes while it is saved")
        return [row, state["state"]["pos"], state["has_gauss"], state["gauss"]]

    def _digest_of_masked(self, part: Any) -> str:
        mask = np.ma.getmaskarray(part)
        shown = np.array(np.ma.getdata(part))
        # Masked elements hold whatever was in memory.
        shown[mask] = None if shown.dtype == object else np.zeros((), shown.dtype)
        fill_value = vars(part)["_fill_value"]
        if fill_value is None:
            # numpy computes it on the first access, and then keeps it.
            fill_value = np.ma.default_fill_value(part.dtype)
        content = self._digest_of(shown).encode() if shown.dtype == object else b"".join(_contents(shown))
        return _digest(content, mask.tobytes(), repr(np.asarray(fill_value).item()).encode())

    def _digest_of(self, part: Any) -> str:
        """Return a digest of a value's pickle without the parts that are rows."""
        facts = facts_of(
            self._adapter, part, lambda held: "row" if id(held) in self._filled else None, view_of=view_of_map
        )
        return _digest(facts.rest.encode(), json.dumps([slot.fact for slot in facts.slots]).encode())


def _generator_state(generator: np.random.Generator) -> list[Any] | None:
    """Return a generator's kind, its state and its seed, from which it spawns others; None if they are not plain."""
    bits: Any = generator.bit_generator
    if type(bits) not in _PLAIN_GENERATORS.values() or type(bits.seed_seq) is not np.random.SeedSequence:
        return None
    try:
        # An encoder knows containers by their ids, and these states are copies that die at once.
        return [type(bits).__name__, *(Encoder().encode(state) for state in (bits.state, bits.seed_seq.state))]
    except NotPlainError:
        return None


def _name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


@lru_cache(maxsize=4096)
def _way(kind: Hashable) -> str | None:
    """Tell whether all attributes and items of a class's objects are pickled, or a state; None if pickle does else."""
    assert isinstance(kind, type)
    if kind in (dict, list, OrderedDict, defaultdict):
        return _BY_ALL
    if (
        issubclass(kind, CODE)
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
    """Tell whether the pickled state of an object is some of its attributes."""
    state = part.__getstate__()
    held = vars(part)
    return type(state) is dict and all(
        name == "_sklearn_version" or (name in held and held[name] is value) for name, value in state.items()
    )


def _forgets_attributes(kind: type) -> bool:
    """Tell whether a class's objects come back from a pickle without their attributes, as a `sklearn.utils.Bunch`."""
    return issubclass(kind, dict) and hasattr(kind, "__setstate__")


def _is_sklearns(method: Any) -> bool:
    return method is None or str(getattr(method, "__module__", "")).startswith("sklearn.")


def _has_slots(kind: type) -> bool:
    slots = (base.__dict__.get("__slots__", ()) for base in kind.__mro__)
    return any({*([names] if isinstance(names, str) else names)} - {"__dict__", "__weakref__"} for names in slots)


def _contents(array: Array) -> Iterator[bytes]:
    """Yield bytes that differ for different arrays."""
    # Extended precision has padding bytes of arbitrary value.
    content = repr(array.tolist()).encode() if array.dtype.char in "gG" else array.tobytes()
    yield from (str((array.dtype, array.shape)).encode(), content)


def _digest(*contents: bytes) -> str:
    hashed = blake2b(digest_size=_DIGEST_BYTES)
    for content in contents:
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return hashed.hexdigest()
