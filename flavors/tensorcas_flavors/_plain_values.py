"""Plain values as JSON: what can be put into a live object without reading a pickle.

Plain are None, booleans, numbers, texts, bytes, dates and times, scalars of numpy's, and lists, tuples, dicts and sets
of such. Each value has one JSON form, in which equal bits are equal text and a ``1`` is no ``1.0`` and no ``True``.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from tensorcas_flavors._skeleton_tree import BYTEARRAY, DICT, FROZENSET, LIST, SET, Node, Part
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.dtypes import dtype_name, parse_dtype
from tensorcas_mlflow.errors import AdapterError, FormatError

VALUE = "value"
"""First word of the reference that stands for a value which pickle would call something to make."""

_MAX_VALUES = 1_000_000
_MAX_DEPTH = 50
_MAX_JSON_INT = 1 << 63
_MAX_SCALAR_BYTES = 4096


class NotPlainError(Exception):
    """Something is no plain value."""


def take_value(part: object) -> tuple[Any, ...] | None:
    """Return the reference that stands for a scalar, a date or the like in a skeleton; None for anything else."""
    described = _described(part)
    return None if described is None else (VALUE, *described)


def _described(part: Any) -> tuple[Any, ...] | None:
    kind = type(part)
    if kind is complex:
        return "complex", part.real, part.imag
    if kind is datetime or kind is time:
        return None if part.tzinfo is not None or part.fold else (kind.__name__, part.isoformat())
    if kind is date:
        return "date", part.isoformat()
    if kind is timedelta:
        return "timedelta", part.days, part.seconds, part.microseconds
    if kind is Decimal:
        return "Decimal", str(part)
    if kind.__module__ == "numpy" and part.nbytes <= _MAX_SCALAR_BYTES:
        try:
            return "numpy", dtype_name(part.dtype), part.tobytes()
        except ValueError:
            return None
    return None


_IS_TAKEN = frozenset((complex, datetime, date, time, timedelta, Decimal))


def is_taken(kind: type) -> bool:
    """Tell whether `take_value` may have something to say of instances of a class."""
    return kind in _IS_TAKEN or (issubclass(kind, np.generic) and kind.__module__ == "numpy" and kind is not np.void)


def make_value(adapter: str, word: Any, *facts: Any) -> Any:
    """Make what `take_value` took: the value that ``(VALUE, word, *facts)`` stands for.

    Raises:
        AdapterError: Nothing is described so.
    """
    make = _MAKERS.get(word) if type(word) is str else None
    try:
        if make is not None:
            return make(*facts)
    except (ValueError, TypeError, ArithmeticError, FormatError):
        pass
    raise AdapterError(adapter, f"a value cannot be read: {(word, *facts)!r:.100}")


def _numpy(name: str, data: bytes) -> Any:
    (scalar,) = np.frombuffer(data, dtype=parse_dtype(name))
    return scalar


_MAKERS: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "datetime": datetime.fromisoformat,
    "time": time.fromisoformat,
    "date": date.fromisoformat,
    "timedelta": timedelta,
    "Decimal": Decimal,
    "numpy": _numpy,
}


def is_value(part: Any) -> bool:
    """Tell whether a part of a tree stands for what `take_value` took."""
    return type(part) is Part and type(part.ref) is tuple and part.ref[0] == VALUE


class Encoder:
    """Writes parts of one tree as JSON; what it has found of a container it keeps."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int] | None] = {}

    def encode(self, part: Any) -> Any:
        """Return a part of the tree as JSON.

        Raises:
            NotPlainError: It is not plain, too large, too deep, or something in it is met elsewhere too.
        """
        return self._encode(part, 0)[0]

    def _encode(self, part: Any, depth: int) -> tuple[Any, int]:
        """Return the JSON, and how many values are in it."""
        kind = type(part)
        if kind is bool or part is None or kind is str:
            return part, 1
        if kind is int:
            return (part if -_MAX_JSON_INT <= part < _MAX_JSON_INT else {"i": hex(part)}), 1
        if kind is float:
            return (part if part - part == 0 else {"f": struct.pack(">d", part).hex()}), 1
        if kind is bytes:
            return {"b": base64.b64encode(part).decode()}, 1
        if id(part) not in self._known:
            if depth > _MAX_DEPTH:
                raise NotPlainError
            self._known[id(part)] = None
            value, n_values = self._container(part, depth + 1)
            if n_values <= _MAX_VALUES:
                self._known[id(part)] = value, n_values
        known = self._known[id(part)]
        if known is None:
            raise NotPlainError
        return known

    def _container(self, part: Any, depth: int) -> tuple[Any, int]:
        if type(part) is tuple:
            return self._all("t", part, depth)
        if is_value(part):
            return self._all("v", part.ref[1:], depth)
        if type(part) is not Node or part.is_shared:
            raise NotPlainError
        if part.kind == LIST:
            return self._all(None, part.elements, depth)
        if part.kind == DICT:
            return self._all("d", [each for pair in part.pairs for each in pair], depth)
        if part.kind == BYTEARRAY:
            return {"y": base64.b64encode(part.elements[0]).decode()}, 1
        if part.kind in (SET, FROZENSET):
            content, n_values = self._all(None, part.elements, depth)
            # The order in which a set is walked differs from process to process.
            return {"s" if part.kind == SET else "z": sorted(content, key=json.dumps)}, n_values
        raise NotPlainError

    def _all(self, word: str | None, parts: Any, depth: int) -> tuple[Any, int]:
        found = [self._encode(part, depth) for part in parts]
        values = [value for value, _ in found]
        return (values if word is None else {word: values}), 1 + sum(n for _, n in found)


def decode(adapter: str, value: Any) -> Any:
    """Make the value that some JSON stands for.

    Raises:
        AdapterError: `Encoder` has not written it.
    """
    if type(value) in (bool, int, float, str, type(None)):
        return value
    if type(value) is list:
        return [decode(adapter, each) for each in value]
    try:
        ((word, content),) = value.items()
        if word == "v":
            return make_value(adapter, *(decode(adapter, each) for each in content))
        return _DECODERS[word]([decode(adapter, each) for each in content] if type(content) is list else content)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise AdapterError(adapter, f"a value cannot be read: {str(value)[:100]}") from error


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "b": lambda text: base64.b64decode(text, validate=True),
    "y": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "t": tuple,
    "s": set,
    "z": frozenset,
    "d": _pairs,
}


def with_tail(skeleton: Array, value: Any, end: bytes) -> Array:
    """Return a skeleton with JSON after its pickle: the text, its length in 8 bytes, and ``end``."""
    text = json.dumps(value, separators=(",", ":")).encode()
    tail = text + len(text).to_bytes(_LENGTH_BYTES, "little") + end
    return np.concatenate([skeleton, np.frombuffer(tail, dtype=np.uint8)])


def read_tail(adapter: str, skeleton: Array | None, end: bytes) -> Any:
    """Return the JSON after a skeleton's pickle, None if there is none. No pickle is read.

    Raises:
        AdapterError: What is there is no JSON.
    """
    data = b"" if skeleton is None else skeleton.tobytes()
    if not data.endswith(end):
        return None
    stop = len(data) - len(end) - _LENGTH_BYTES
    start = stop - int.from_bytes(data[max(stop, 0) :][:_LENGTH_BYTES], "little")
    try:
        return json.loads(data[max(start, 0) : max(stop, 0)])
    except (ValueError, RecursionError) as error:
        raise AdapterError(adapter, f"the end of the skeleton cannot be read: {error}") from error


_LENGTH_BYTES = 8
