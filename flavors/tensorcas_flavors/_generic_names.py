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
from typing import Any
from urllib.parse import quote

import numpy as np

_MAX_ITEMS = 200_000
"""How many attributes and items are looked at before the rest gets numbers: a fraction of a second's work."""
_MAX_PATH = 200
_ATOMS = frozenset({int, float, complex, bool, type(None), range, slice})
_SERIES = frozenset({str, bytes, bytearray})
_NOT_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, np.dtype, np.generic)
_KEYS = (str, int, float, bool, type(None))

Slots = list[tuple[str, Any]]


def name_parts(model: object, min_bytes: int) -> dict[int, str]:
    """Find arrays of numbers, and long strings and bytes, in an object.

    Args:
        model: Where to look. It must stay as it is, and alive, as long as the answer is used.
        min_bytes: Strings and bytes that are shorter are left out.

    Returns:
        The path of each by its id, as in ``weights.layers.0.W``; the shortest one, of several the first. Paths
        follow from the object's structure alone. Two parts may have the same.
    """
    names: dict[int, str] = {}
    seen = {id(model)}
    slots_of: dict[type, Slots] = {}
    pending: deque[tuple[str, object]] = deque([("", model)])
    n_left = _MAX_ITEMS
    while pending:
        path, part = pending.popleft()
        for key, child in _children(part, slots_of):
            n_left -= 1
            if n_left < 0:
                return names
            kind = type(child)
            if kind in _ATOMS or (kind in _SERIES and len(child) < min_bytes) or id(child) in seen:
                continue
            if isinstance(child, _NOT_ENTERED) or len(path) > _MAX_PATH:
                continue
            seen.add(id(child))
            child_path = f"{path}.{_component(key)}" if path else _component(key)
            if kind in _SERIES or (kind is np.ndarray and not child.dtype.hasobject):
                names[id(child)] = child_path
            else:
                pending.append((child_path, child))
    return names


def _children(part: Any, slots_of: dict[type, Slots]) -> Iterator[tuple[object, Any]]:
    """Yield what an object holds, with the attribute, key or position it is held at."""
    if isinstance(part, dict):
        for i, (key, value) in enumerate(dict.items(part)):
            yield key if _is_plain(key) else i, value
    elif isinstance(part, list | tuple | deque):
        yield from enumerate(part)
    elif isinstance(part, np.ndarray) and part.dtype == object:
        yield from enumerate(part.flat)
    kind = type(part)
    if kind in (dict, list, tuple):
        return
    if kind not in slots_of:
        slots_of[kind] = list(_slots(kind))
    for name, slot in slots_of[kind]:
        try:
            value = slot.__get__(part)
        except AttributeError:
            continue  # a slot that is not set
        if name == "__dict__":
            yield from value.items()
        else:
            yield name, value


def _slots(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the descriptors that read memory. What else stands in a class may run code, a property to begin with."""
    for cls in kind.__mro__:
        for name, value in vars(cls).items():
            is_slot = type(value) is MemberDescriptorType and not name.startswith("__")
            if is_slot or (name == "__dict__" and type(value) is GetSetDescriptorType):
                yield name, value


def _is_plain(key: object) -> bool:
    """Tell whether a key says what it is in a few characters, and without code of its own."""
    return all(
        type(item) in _KEYS and (type(item) is not int or item.bit_length() <= 64)
        for item in (key if type(key) is tuple else (key,))
    )


def _component(key: object) -> str:
    """Return a key as a path component: no dot, control character or empty string."""
    return quote(str(key)[:_MAX_PATH], safe=" /()[]<>=,;:+@$&!?'*", errors="replace") or "%"
