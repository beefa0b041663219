"""What a scikit-learn model holds besides arrays and trees, in a form that needs no pickle to read.

With ``into=`` the pickle is not read. So these facts follow it in the skeleton: what is a plain value can be put into a
live model, and a live model that differs in anything else is refused:

* ``sizes``: how many members each ensemble has, by its path;
* ``numbers``: names of the rows that repeat fitted numbers for readers of tensors;
* ``attributes`` and ``items``: how many objects and items there are of each pattern, and the facts of what stands in
  their slots; see `_sklearn_slots`.

The skeleton ends with the facts as JSON; see `with_tail`. In it a text that is one of the strings of the pickle, which
are a row that hardly changes, is ``#`` and its number there; others begin with ``=``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensorcas_flavors._generic_facts import REMEDY
from tensorcas_flavors._plain_values import decode, read_tail, with_tail
from tensorcas_flavors._sklearn_parts import RANDOM
from tensorcas_flavors._sklearn_sizes import n_members
from tensorcas_flavors._sklearn_slots import (
    ABSENT,
    NUMBERS,
    OTHER,
    PLAIN_GENERATORS,
    RANDOM_KINDS,
    RANDOM_STATE,
    TWISTER,
    Slot,
    Slots,
    Stored,
    as_many,
    find_slots,
    is_same,
)
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

_END = b"TCSKF1\n"
_MAX_SAID = 64


@dataclass(frozen=True, slots=True)
class Facts:
    """What is said at the end of a skeleton; see the head of this module."""

    sizes: dict[str, int] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    attributes: dict[str, list[Any]] = field(default_factory=dict)
    items: dict[str, list[Any]] = field(default_factory=dict)


class Change(NamedTuple):
    """Something to put into a live model."""

    container: Any
    key: Any
    value: Any
    """`ABSENT` for an attribute that is to be dropped."""


def facts_of(model: Any, stored: Stored) -> Facts:
    """Return the facts of a model that can be pickled.

    Raises:
        AdapterError: Something in it cannot be pickled by itself.
    """
    graph = stored.graph
    sizes = {path: n_members(ensemble) for path, ensemble in graph.ensembles.items()}
    slots = find_slots(model, stored, is_live=False)
    return Facts(sizes, list(graph.numbers), slots.attributes(), slots.items_as_one())


def with_facts(skeleton: Array, facts: Facts, strings: Mapping[str, int]) -> Array:
    """Return a skeleton with facts at its end; ``strings`` are the numbers of those that are stored."""
    given = {name: getattr(facts, name) for name in Facts.__dataclass_fields__ if getattr(facts, name)}
    return with_tail(
        skeleton, _with_texts(given, lambda text: f"#{strings[text]}" if text in strings else f"={text}"), _END
    )


def read_facts(adapter: str, skeleton: Array | None, strings: Callable[[], Sequence[str]]) -> Facts:
    """Return the facts at the end of a skeleton. No pickle is read.

    Raises:
        AdapterError: There are none, or they are damaged.
    """
    tables = read_tail(adapter, skeleton, _END)
    if tables is None:
        raise AdapterError(adapter, f"the stored model does not say what an original must be like: {REMEDY}")
    try:
        known = strings()
        facts = Facts(**_with_texts(tables, lambda text: known[int(text[1:])] if text[0] == "#" else text[1:]))
        given = [getattr(facts, name) for name in Facts.__dataclass_fields__]
        kinds = [type(getattr(Facts(), name)) for name in Facts.__dataclass_fields__]
        pairs = [*facts.attributes.values(), *facts.items.values()]
        if [type(each) for each in given] != kinds or {type(n) for n in facts.sizes.values()} - {int}:
            raise ValueError("they are of another kind")
        if any(type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int for pair in pairs):
            raise ValueError("they are of another kind")
        if any(type(by_name) is not dict for _, by_name in facts.attributes.values()):
            raise ValueError("they are of another kind")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AdapterError(adapter, f"the end of the skeleton cannot be read: {error}") from error
    return facts


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON with other texts in it; words of one letter, which say what an object stands for, stay."""
    kind = type(value)
    if kind is str:
        return change(value)
    if kind is list:
        return [_with_texts(each, change) for each in value]
    if kind is dict:
        return {
            key if len(key) == 1 and key.isalpha() else change(key): _with_texts(each, change)
            for key, each in value.items()
        }
    return value


def changes(model: Any, about: Stored, facts: Facts, rows: Mapping[str, Array]) -> Iterator[Change]:
    """Find what of a live model is to be replaced, and change nothing.

    Args:
        model: The live estimator.
        about: What of it has rows.
        facts: Of the stored model.
        rows: Of the stored model.

    Yields:
        What to put where.

    Raises:
        AdapterError: The live model differs in something that only the pickle says.
    """
    adapter = about.adapter
    live = find_slots(model, about, is_live=True)
    made: dict[int, Any] = {}
    """Random states, and what takes their places."""
    again: list[Slot] = []
    for slot, fact in _pairs(adapter, live, facts):
        if is_same(slot.fact, fact):
            if type(slot.value) in RANDOM_KINDS:
                again.append(slot)
            continue
        if slot.container is None or not (_can_fill(fact) and (_can_fill(slot.fact) or fact == ABSENT)):
            raise _misfit(adapter, _difference(adapter, slot, fact))
        value = _made(adapter, fact, rows)
        if type(value) in RANDOM_KINDS and type(slot.value) in RANDOM_KINDS:
            made[id(slot.value)] = value
        yield Change(slot.container, slot.key, value)
    for slot in again:
        if id(slot.value) in made:
            if slot.container is None:
                raise _misfit(adapter, f"{slot.path!r} cannot be changed in place")
            yield Change(slot.container, slot.key, made[id(slot.value)])


def _pairs(adapter: str, live: Slots, facts: Facts) -> Iterator[tuple[Slot, Any]]:
    """Yield each slot of a live model, also those of attributes that it lacks, with the stored fact."""
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
                yield Slot(owner.attributes, name, path, value, owner.facts.get(name, ABSENT)), fact
    lost = (facts.items.keys() - live.items.keys()) | (facts.attributes.keys() - live.owners.keys())
    more = (live.items.keys() - facts.items.keys()) | (live.owners.keys() - facts.attributes.keys())
    differing = lost | {pattern for pattern in more if not pattern.startswith(tuple(dropped))}
    if differing:
        raise _misfit(adapter, f"only one of the two has parts of {min(differing)!r}")


def _stored(adapter: str, path: str, fact: Any, n: int) -> list[Any]:
    """Return as many facts as there are slots in the live model."""
    n_stored, content = fact
    stored = as_many(content, n)
    if stored is None or n_stored != n:
        raise _misfit(
            adapter, f"{path!r} and what is like it are there {n} times, and {n_stored} times in the stored one"
        )
    return stored


def _can_fill(fact: Any) -> bool:
    return type(fact) is not dict or OTHER not in fact


def _difference(adapter: str, slot: Slot, fact: Any) -> str:
    said = [_say(adapter, each) for each in (slot.fact, fact)]
    is_fixed = _can_fill(slot.fact) and _can_fill(fact)
    why = "cannot be changed in place" if is_fixed else "can only be unpickled"
    return f"{slot.path!r} is {said[0]} in it, {said[1]} in the stored one, and {why}"


def _say(adapter: str, fact: Any) -> str:
    if fact == ABSENT:
        return "absent"
    if type(fact) is dict and RANDOM_STATE in fact:
        return "a random state"
    if type(fact) is dict and NUMBERS in fact:
        return "a list of numbers"
    return (repr(decode(adapter, fact)) if _can_fill(fact) else " ".join(map(str, fact[OTHER])))[:_MAX_SAID]


def _made(adapter: str, fact: Any, rows: Mapping[str, Array]) -> Any:
    """Make what can be put into a slot."""
    if type(fact) is not dict or not {NUMBERS, RANDOM_STATE} & fact.keys():
        return ABSENT if fact == ABSENT else decode(adapter, fact)
    try:
        if NUMBERS in fact:
            row, is_numpys = fact[NUMBERS]
            return list(rows[row]) if is_numpys else rows[row].tolist()
        if fact[RANDOM_STATE][0] in PLAIN_GENERATORS:
            name, bit_state, seed = fact[RANDOM_STATE]
            bits = PLAIN_GENERATORS[name](np.random.SeedSequence(**decode(adapter, seed)))
            bits.state = decode(adapter, bit_state)
            return np.random.Generator(bits)
        row, position, has_gauss, next_gauss = fact[RANDOM_STATE]
        if not row.startswith(RANDOM):
            raise ValueError(row)
        state = np.random.RandomState(0)
        state.set_state((TWISTER, rows[row], position, has_gauss, decode(adapter, next_gauss)))
        return state
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AdapterError(adapter, f"a part of the model cannot be read: {fact!r:.100}") from error


def _misfit(adapter: str, reason: str) -> AdapterError:
    return AdapterError(adapter, f"the stored model does not fit the original: {reason}: {REMEDY}")
