"""Plain Python values as values of UBJSON: the attributes of XGBoost's Python objects."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from tensorcas_flavors._ubjson import Value, narrowest, write


def encode(value: Any, depth: int = 10) -> Value:
    """Turn a plain Python value into one that UBJSON has; `decode` turns it back exactly.

    Text, whole numbers, booleans, None and lists stand for themselves and a float is a float64. All else is an object
    with one or two members, the first of which names the type.

    Raises:
        ValueError: The value is not plain, or nests deeper than ``depth``, in particular if it contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        narrowest(value)  # raises if it does not fit
        return value
    if kind is float:
        return np.float64(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        items = np.asarray(value).reshape(-1)
        if items.dtype.isnative and write(items):  # raises if UBJSON has no such type
            return {"array": items, "shape": list(value.shape)} if kind is np.ndarray else {"number": items}
    if depth > 0 and kind is list:
        return [encode(item, depth - 1) for item in value]
    if depth > 0 and kind is tuple:
        return {"tuple": [encode(item, depth - 1) for item in value]}
    if depth > 0 and kind in (dict, OrderedDict) and all(type(key) is str for key in value):
        return {kind.__name__: {key: encode(member, depth - 1) for key, member in value.items()}}
    raise ValueError(f"a {kind.__name__} is not plain")


def decode(value: Value) -> Any:
    """Turn what `encode` returned into the value it was given.

    Raises:
        ValueError: `encode` returns no such thing.
    """
    match value:
        case np.float64():
            return float(value)
        case np.generic():
            raise ValueError(f"a {type(value).__name__} stands for nothing")
        case list():
            return [decode(item) for item in value]
        case {"tuple": list(items)}:
            return tuple(decode(item) for item in items)
        case {"dict": dict(members)}:
            return {key: decode(member) for key, member in members.items()}
        case {"OrderedDict": dict(members)}:
            return OrderedDict((key, decode(member)) for key, member in members.items())
        case {"number": np.ndarray() as items} if len(items) == 1:
            return items.astype(items.dtype.newbyteorder("="))[0]
        case {"array": np.ndarray() as items, "shape": [*shape]} if all(type(n) is int for n in shape):
            return items.astype(items.dtype.newbyteorder("=")).reshape(shape)
        case dict() | np.ndarray():
            raise ValueError("an object stands for nothing")
        case _:
            return value
