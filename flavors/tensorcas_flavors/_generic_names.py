"""Names for the parts of any Python object: the path of attributes, keys and positions that leads to each.

Only what lies openly in the object is looked at (``__dict__``, slots, dicts, lists, tuples and the like), and no code
of the model's is run for it. What is found no such way, such as the columns of a DataFrame, is numbered by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

_MAX_ITEMS = 1_000_000
"""How many attributes and items are looked at before the rest gets numbers: about a second's work."""
MIN_FAMILY = 256
"""So many small arrays that are found alike are one row, and so many items of one container are not named one by one:
a row costs some hundred bytes at each step."""
MAX_MEMBER_BYTES = 255
_MAX_PATH = 200
_ATOMS = frozenset({int, float, complex, bool, type(None), range, slice})
_SERIES = frozenset({str, bytes, bytearray})
_NOT_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, np.dtype, np.generic)
_KEYS = (str, int, float, bool, type(None))

Slots = list[tuple[str, Any]]


class Names(NamedTuple):
    """The paths of an object's parts, by their ids; two parts may have the same."""

    paths: dict[int, str]
    """Of each, as in ``weights.layers.0.W``; the shortest one, of several the first."""
    families: dict[int, str]
    """Of arrays that are one of many small ones of one dtype: their path with ``*`` for the items that differ."""


def name_parts(model: object, min_bytes: int) -> Names:
    """Find arrays of numbers, and long strings and bytes, in an object.

    Args:
        model: Where to look. It must stay as it is, and alive, as long as the answer is used.
        min_bytes: Strings and bytes that are shorter are left out.

    Returns:
        Paths that follow from the object's structure alone.
    """
    names: dict[int, str] = {}
    kin: dict[tuple[str, np.dtype[Any]], list[int]] = {}
    seen = {id(model)}
    slots_of: dict[type, Slots] = {}
    pending: deque[tuple[str, str, object]] = deque([("", "", model)])
    n_left = _MAX_ITEMS
    while pending and n_left >= 0:
        path, pattern, part = pending.popleft()
        for key, is_one_of_many, child in _children(part, slots_of):
            n_left -= 1
            if n_left < 0:
                break
            kind = type(child)
            if kind in _ATOMS or (kind in _SERIES and len(child) < min_bytes) or id(child) in seen:
                continue
            if issubclass(kind, _NOT_ENTERED) or len(path) > _MAX_PATH:
                continue
            seen.add(id(child))
            component = _component(key)
            star = "*" if is_one_of_many else component
            child_path = f"{path}.{component}" if path else component
            child_pattern = f"{pattern}.{star}" if pattern else star
            if kind in _SERIES or (kind is np.ndarray and not child.dtype.hasobject):
                names[id(child)] = child_path
                if kind is np.ndarray and child.nbytes <= MAX_MEMBER_BYTES:
                    kin.setdefault((child_pattern, child.dtype), []).append(id(child))
            else:
                pending.append((child_path, child_pattern, child))
    families: dict[int, str] = {}
    taken: dict[str, int] = {}
    for (pattern, _), members in kin.items():
        if len(members) >= MIN_FAMILY:
            n_before = taken.get(pattern, 0)
            taken[pattern] = n_before + 1
            families.update(dict.fromkeys(members, f"{pattern}~{n_before + 1}" if n_before else pattern))
    return Names(names, families)


def _children(part: Any, slots_of: dict[type, Slots]) -> Iterator[tuple[object, bool, Any]]:
    """Yield what an object holds: the attribute, key or position it is held at, whether that is one of many, and it."""
    # What a class says its objects' class is (``__class__``) may be something else than what they are.
    kind = type(part)
    if issubclass(kind, dict):
        is_many = dict.__len__(part) >= MIN_FAMILY
        for i, (key, value) in enumerate(dict.items(part)):
            yield key if _is_plain(key) else i, is_many, value
    elif (base := next((each for each in (list, tuple, deque) if issubclass(kind, each)), None)) is not None:
        is_many = base.__len__(part) >= MIN_FAMILY
        for i, value in enumerate(base.__iter__(part)):
            yield i, is_many, value
    elif issubclass(kind, np.ndarray) and part.dtype == object:
        for i, value in enumerate(np.ndarray.flatten(part)):
            yield i, part.size >= MIN_FAMILY, value
    if kind in (dict, list, tuple):
        return
    if kind not in slots_of:
        slots_of[kind] = list(_slots(kind))
    for name, slot in slots_of[kind]:
        try:
            value = slot.__get__(part)
        except (AttributeError, TypeError):
            continue  # a slot that is not set, or is of another class than it says
        if name == "__dict__":
            for key, held in value.items():
                yield key, False, held
        else:
            yield name, False, value


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the descriptors that read memory. What else stands in a class may run code, a property to begin with."""
    for cls in kind.__mro__:
        for name, value in vars(cls).items():
            is_slot = type(value) is MemberDescriptorType and not name.startswith("__")
            if is_slot or (name == "__dict__" and type(value) in (MemberDescriptorType, GetSetDescriptorType)):
                yield name, value


def _is_plain(key: object) -> bool:
    """Tell whether a key says what it is in a few characters, and without code of its own."""
    return all(
        type(item) in _KEYS and (type(item) is not int or item.bit_length() <= 64)
        for item in (key if type(key) is tuple else (key,))
    )


def _component(key: object) -> str:
    """Return a key as a path component: no dot, star, control character or empty string."""
    return quote(str(key)[:_MAX_PATH], safe=" /()[]<>=,;:+@$&!?'", errors="replace") or "%"
