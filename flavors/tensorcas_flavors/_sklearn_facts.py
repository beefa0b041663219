"""What a scikit-learn model holds besides arrays and trees, in a form that needs no pickle to read.

With ``into=`` the pickle is not read. So these facts follow it in the skeleton: what is a plain value can be put into a
live model, and a live model that differs in anything else is refused:

* ``sizes``: how many members each ensemble has, by its path;
* ``numbers``: names of the rows that repeat fitted numbers for readers of tensors;
* ``attributes`` and ``items``: facts of what stands in each slot, in runs; see `_sklearn_slots`.

The skeleton ends with the facts as JSON; see `with_tail`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensorcas_flavors._generic_facts import REMEDY
from tensorcas_flavors._plain_values import decode, read_tail, with_tail
from tensorcas_flavors._sklearn_parts import RANDOM
from tensorcas_flavors._sklearn_sizes import n_members
from tensorcas_flavors._sklearn_slots import (
    ABSENT,
    OTHER,
    RANDOM_STATE,
    TWISTER,
    Slot,
    Slots,
    Stored,
    find_slots,
    from_runs,
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
    attributes: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
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
    return Facts(sizes, list(graph.numbers), slots.attributes_as_runs(), slots.items_as_runs())


def with_facts(skeleton: Array, facts: Facts) -> Array:
    """Return a skeleton with facts at its end."""
    given = {name: getattr(facts, name) for name in Facts.__dataclass_fields__ if getattr(facts, name)}
    return with_tail(skeleton, given, _END)


def read_facts(adapter: str, skeleton: Array | None) -> Facts:
    """Return the facts at the end of a skeleton. No pickle is read.

    Raises:
        AdapterError: There are none, or they are damaged.
    """
    tables = read_tail(adapter, skeleton, _END)
    if tables is None or (type(tables) is dict and "items" not in tables):
        raise AdapterError(adapter, f"the stored model does not say what an original must be like: {REMEDY}")
    try:
        facts = Facts(**tables)
        if not all(type(getattr(facts, name)) is type(getattr(Facts(), name)) for name in Facts.__dataclass_fields__):
            raise ValueError("they are of another kind")
        if {type(n) for n in facts.sizes.values()} - {int} or {type(t) for t in facts.attributes.values()} - {dict}:
            raise ValueError("they are of another kind")
    except (ValueError, TypeError) as error:
        raise AdapterError(adapter, f"the end of the skeleton cannot be read: {error}") from error
    return facts


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
            if type(slot.value) is np.random.RandomState:
                again.append(slot)
            continue
        if slot.container is None or not (_can_fill(fact) and (_can_fill(slot.fact) or fact == ABSENT)):
            raise _misfit(adapter, _difference(slot, fact))
        if _is_random_state(fact):
            made[id(slot.value)] = _random_state(adapter, fact[RANDOM_STATE], rows)
            yield Change(slot.container, slot.key, made[id(slot.value)])
        else:
            yield Change(slot.container, slot.key, ABSENT if fact == ABSENT else decode(adapter, fact))
    for slot in again:
        if id(slot.value) in made:
            if slot.container is None:
                raise _misfit(adapter, f"{slot.path!r} cannot be changed in place")
            yield Change(slot.container, slot.key, made[id(slot.value)])


def _pairs(adapter: str, live: Slots, facts: Facts) -> Iterator[tuple[Slot, Any]]:
    """Yield each slot of a live model, also those of attributes that it lacks, with the stored fact."""
    for pattern, slots in live.items.items():
        if pattern in facts.items:
            yield from zip(slots, _stored(adapter, slots[0].path, facts.items[pattern], len(slots)), strict=True)
    for pattern, owners in live.owners.items():
        runs = facts.attributes.get(pattern, {})
        names = dict.fromkeys([*(name for owner in owners for name in owner.facts), *runs])
        for name in names if pattern in facts.attributes else ():
            stored = _stored(adapter, owners[0].path, runs.get(name, [len(owners), ABSENT]), len(owners))
            for owner, fact in zip(owners, stored, strict=True):
                path = f"{owner.path}/{name}" if owner.path else name
                value = owner.attributes.get(name)
                yield Slot(owner.attributes, name, path, value, owner.facts.get(name, ABSENT)), fact
    if live.items.keys() != facts.items.keys() or live.owners.keys() != facts.attributes.keys():
        raise _misfit(adapter, "its parts are others")


def _stored(adapter: str, path: str, runs: Any, n: int) -> list[Any]:
    stored = from_runs(runs, n)
    if stored is None:
        raise _misfit(adapter, f"{path!r} and what is like it are there {n} times, and otherwise in the stored one")
    return stored


def _can_fill(fact: Any) -> bool:
    return type(fact) is not dict or OTHER not in fact


def _is_random_state(fact: Any) -> bool:
    return type(fact) is dict and RANDOM_STATE in fact


def _difference(slot: Slot, fact: Any) -> str:
    if _can_fill(slot.fact) and _can_fill(fact):
        return f"{slot.path!r} differs, and cannot be changed in place"
    said = [_say(each) for each in (slot.fact, fact)]
    return f"{slot.path!r} is {said[0]} in it, {said[1]} in the stored one, and can only be unpickled"


def _say(fact: Any) -> str:
    if fact == ABSENT:
        return "absent"
    if _is_random_state(fact):
        return "a random state"
    return repr(fact[OTHER] if not _can_fill(fact) else fact)[:_MAX_SAID]


def _random_state(adapter: str, facts: Any, rows: Mapping[str, Array]) -> np.random.RandomState:
    try:
        row, position, has_gauss, gauss = facts
        state = np.random.RandomState(0)
        if not row.startswith(RANDOM):
            raise ValueError(row)
        state.set_state((TWISTER, rows[row], position, has_gauss, decode(adapter, gauss)))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise AdapterError(adapter, f"a random state cannot be read: {error}") from error
    return state


def _misfit(adapter: str, reason: str) -> AdapterError:
    return AdapterError(adapter, f"the stored model does not fit the original: {reason}: {REMEDY}")
