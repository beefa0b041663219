"""Parts that are taken out of a pickle of any Python object, and put back: arrays, long strings and bytes, buffers.

Each part becomes one row; many small similar arrays become one row together, a family. A row is named by the path of
attributes, keys and positions that leads to the part. `name_parts` looks only at memory (``__dict__``, slots, dicts,
lists, tuples and the like) and runs no code of the model. A part without a path, such as a column of a DataFrame, gets
a number: ``__array__/0``, ``__bytes__/0``, ``__buffer__/0``.

The reference to an array is the name of its row. Other references are tuples of a word, the row's name and a number,
where equal numbers are one object, and of facts that the row lacks:

* ``array``: the memory order, whether it is writable, the dtype and the shape;
* ``jax.Array``: the name of the random generator of keys or None, and whether the dtype is weak;
* ``member`` of a family: its number is its position there; its first element and its shape follow;
* ``value`` is no part, but spells out a value such as a date; see `tensorcas_flavors._facts`.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
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

from tensorcas_flavors._facts import MEMBER, VALUE, is_taken, make_value, take_value
from tensorcas_flavors._jax_arrays import Kind, is_jax_array, make_array, take_array
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.dtypes import dtype_name
from tensorcas_mlflow.errors import AdapterError

_MAX_ITEMS = 1_000_000
"""Number of attributes and items that are looked at, in about a second, before the rest gets numbers."""
MIN_FAMILY = 256
"""So many similar small arrays are one row, and so many items of one container get no name each: a row costs some
hundred bytes at each step."""
MAX_MEMBER_BYTES = 255
_MAX_PATH_CHARS = 200
_WITHOUT_PARTS = frozenset({int, float, complex, bool, type(None), range, slice})
_SERIES = frozenset({str, bytes, bytearray})
_NOT_ENTERED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, np.dtype, np.generic)
_PLAIN_KEYS = (str, int, float, bool, type(None))
_KEPT_IN_PATHS = " /()[]<>=,;:+@$&!?'"
_is_component = re.compile(rf"[A-Za-z0-9_.~{re.escape(_KEPT_IN_PATHS)}-]+").fullmatch
"""Matches texts that `quote` returns as they are."""
_Descriptors = list[tuple[str, Any]]


class PartNames(NamedTuple):
    """Paths of an object's parts, by their ids; two parts may have one path."""

    paths: dict[int, str]
    """Path of each part, as in ``weights.layers.0.W``: the shortest one, of several the first."""
    families: dict[int, str]
    """Name of the family of an array that is one of many small ones of one dtype: the path with ``*`` for positions."""


def name_parts(model: object, min_bytes: int) -> PartNames:
    """Find arrays of numbers, and long strings and bytes, in an object.

    Args:
        model: The object. It must stay alive and unchanged as long as the result is used.
        min_bytes: Shorter strings and bytes are left out.

    Returns:
        Paths, which follow from the object's structure alone.
    """
    names: dict[int, str] = {}
    kin: dict[tuple[str, np.dtype[Any]], list[int]] = {}
    seen = {id(model)}
    descriptors_of: dict[type, _Descriptors] = {}
    pending: deque[tuple[str, str, object]] = deque([("", "", model)])
    of_jax: dict[type, bool] = {}
    n_left = _MAX_ITEMS
    while pending and n_left >= 0:
        path, pattern, part = pending.popleft()
        for key, is_one_of_many, child in _children(part, descriptors_of):
            n_left -= 1
            if n_left < 0:
                break
            kind = type(child)
            if kind in _WITHOUT_PARTS or (kind in _SERIES and len(child) < min_bytes) or id(child) in seen:
                continue
            if issubclass(kind, _NOT_ENTERED) or len(path) > _MAX_PATH_CHARS:
                continue
            seen.add(id(child))
            text = str(key)[:_MAX_PATH_CHARS]
            component = text if _is_component(text) else _quoted(text)
            star = "*" if is_one_of_many else component
            child_path = f"{path}.{component}" if path else component
            child_pattern = f"{pattern}.{star}" if pattern else star
            if kind not in of_jax:
                of_jax[kind] = is_jax_array(child)
            if kind in _SERIES or of_jax[kind] or (issubclass(kind, np.ndarray) and not child.dtype.hasobject):
                names[id(child)] = child_path
                if kind is np.ndarray and child.nbytes <= MAX_MEMBER_BYTES:
                    kin.setdefault((child_pattern, child.dtype), []).append(id(child))
                if kind is np.ndarray or not issubclass(kind, np.ndarray):
                    continue
            pending.append((child_path, child_pattern, child))
    families: dict[int, str] = {}
    taken: dict[str, int] = {}
    for (pattern, _), members in kin.items():
        if len(members) >= MIN_FAMILY:
            n_before = taken.get(pattern, 0)
            taken[pattern] = n_before + 1
            families.update(dict.fromkeys(members, f"{pattern}~{n_before + 1}" if n_before else pattern))
    return PartNames(names, families)


def _children(part: Any, descriptors_of: dict[type, _Descriptors]) -> Iterable[tuple[object, bool, Any]]:
    """Return for each part of an object the attribute, key or position, whether that is one of many, and the part."""
    kind = type(part)
    if kind is dict and set(map(type, part)) == {str}:
        return zip(part, repeat(len(part) >= MIN_FAMILY), part.values())
    if kind is list or kind is tuple:
        return zip(range(len(part)), repeat(len(part) >= MIN_FAMILY), part)
    return _parts_of(part, descriptors_of)


def _parts_of(part: Any, descriptors_of: dict[type, _Descriptors]) -> Iterator[tuple[object, bool, Any]]:
    """Yield the parts of any object; see `_children`."""
    # ``__class__`` may name another class than the real one.
    kind = type(part)
    if issubclass(kind, dict):
        is_many = dict.__len__(part) >= MIN_FAMILY
        for i, (key, value) in enumerate(dict.items(part)):
            yield key if _is_plain_key(key) else i, is_many, value
    elif (base := next((each for each in (list, tuple, deque) if issubclass(kind, each)), None)) is not None:
        is_many = base.__len__(part) >= MIN_FAMILY
        for i, value in enumerate(base.__iter__(part)):
            yield i, is_many, value
    elif issubclass(kind, np.ndarray) and part.dtype == object:
        for i, value in enumerate(np.ndarray.flatten(part)):
            yield i, part.size >= MIN_FAMILY, value
    if kind is dict:
        return
    if kind not in descriptors_of:
        descriptors_of[kind] = list(_descriptors(kind))
    for name, descriptor in descriptors_of[kind]:
        try:
            value = descriptor.__get__(part)
        except (AttributeError, TypeError):
            continue  # the slot is not set, or belongs to another class
        if name == "__dict__":
            for key, held in value.items():
                yield key, False, held
        else:
            yield name, False, value


def _descriptors(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the descriptors that only read memory; others, such as a property, may run code."""
    for cls in kind.__mro__:
        for name, value in vars(cls).items():
            is_slot = type(value) is MemberDescriptorType and not name.startswith("__")
            if is_slot or (name == "__dict__" and type(value) in (MemberDescriptorType, GetSetDescriptorType)):
                yield name, value


def _is_plain_key(key: object) -> bool:
    """Tell whether a key has a short text that no code of its own makes."""
    return all(
        type(item) in _PLAIN_KEYS and (type(item) is not int or item.bit_length() <= 64)
        for item in (key if type(key) is tuple else (key,))
    )


def _quoted(text: str) -> str:
    """Return the text of a key as a path component: no star, control character or empty string."""
    return quote(text, safe=_KEPT_IN_PATHS, errors="surrogatepass") or "%"


_MIN_BUFFER_BYTES = 256
"""Smaller buffers stay in the pickle: a row costs about a hundred bytes at each step."""
MIN_BYTES_BYTES = 4096
"""Shorter strings and bytes stay in the pickle, which is cut by content like their rows."""
ARRAY = "array"
JAX = "jax.Array"
_ARRAYS = "__array__/"
_BYTES = "__bytes__/"
_BUFFERS = "__buffer__/"
Reference = str | tuple[Any, ...]


class TakenPart(NamedTuple):
    """Part that became one row, or a stretch of one."""

    name: str
    """Name of the row."""
    live: Array
    """Memory of the part, or a copy of it."""
    is_held: bool
    """True if ``live`` is memory of the model itself."""
    start: int | None = None
    """First element in the row of a family; None for a part with its own row."""

    def stored(self, row: Array) -> Array:
        """Return the part's values in a stored row, whose dtype and shape are those of its own row."""
        if self.start is None:
            return row
        return row.reshape(-1)[self.start : self.start + self.live.size].reshape(self.live.shape)


class TakenParts:
    """Parts that one pickling takes out, in order of appearance."""

    def __init__(self, model: object) -> None:
        self.parts: dict[Any, TakenPart] = {}
        """By name of the row; for members of families by that name and a number."""
        self._names, self._family_of = name_parts(model, MIN_BYTES_BYTES)
        self._families: dict[str, list[Array]] = {}
        self._n_elements: dict[str, int] = {}
        self._refs: dict[int, Reference] = {}
        self._kept: list[object] = []
        self._taken: set[str] = set()
        self._views: dict[int, Array] = {}
        self._of_files: set[int] = set()
        """Ids of the views of memory maps."""
        self._numbers = {_ARRAYS: 0, _BYTES: 0, _BUFFERS: 0}
        self._is_value: dict[type, bool] = {}
        self._is_of_jax: dict[type, bool] = {}
        self._is_storable: dict[np.dtype[Any], bool] = {}

    def take_out(self, part: object) -> Reference | None:
        """Claim a part; see `dump_skeleton`."""
        kind = type(part)
        if kind is np.ndarray:
            return self._take_array(part)  # type: ignore[arg-type]
        if kind is str or kind is bytes or kind is bytearray:
            return self._take_bytes(part) if len(part) >= MIN_BYTES_BYTES else None  # type: ignore[arg-type]
        if kind is np.memmap:
            return self._take_array(self.view_of(part))  # type: ignore[arg-type]
        try:
            is_value = self._is_value[kind]
        except KeyError:
            is_value = self._is_value[kind] = is_taken(kind)
            self._is_of_jax[kind] = is_jax_array(part)
        if self._is_of_jax[kind]:
            return self._take_jax_array(part)
        return take_value(part) if is_value else None

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Claim a buffer; see `dump_skeleton`."""
        array = np.frombuffer(buffer.raw(), dtype=np.uint8)
        if len(array) < _MIN_BUFFER_BYTES:
            return False
        name = self._number(_BUFFERS)
        self.parts[name] = TakenPart(name, array, False)
        return True

    def view_of(self, array: Array) -> Array:
        """Return the plain array that is stored in place of one of a subclass, under its name; see `dump_skeleton`."""
        view = self._views.get(id(array))
        if view is None:
            view = self._views[id(array)] = np.ndarray.view(array, np.ndarray)
            self._kept.append(array)
            if id(array) in self._names:
                self._names[id(view)] = self._names[id(array)]
            if type(array) is np.memmap:
                self._of_files.add(id(view))
        return view

    def rows(self) -> dict[str, Array]:
        """Return the rows."""
        rows = {part.name: part.live for part in self.parts.values() if part.start is None}
        for name, members in self._families.items():
            is_even = len({member.shape for member in members}) == 1
            rows[name] = np.stack(members) if is_even else np.concatenate([member.reshape(-1) for member in members])
        return rows

    def _take_array(self, array: Array) -> Reference | None:
        dtype, flags = array.dtype, array.flags
        if dtype.hasobject:
            return None
        if id(array) in self._refs:
            return self._refs[id(array)]
        try:
            is_storable = self._is_storable[dtype]
        except KeyError:
            is_storable = self._is_storable[dtype] = _is_storable(dtype)
        row = array if is_storable else _bytes_of(array)
        # How a file is mapped is no property of the array.
        is_writeable = flags.writeable or id(array) in self._of_files
        facts: tuple[Any, ...] = (None if flags.c_contiguous else memory_order(array), is_writeable)
        if row is not array or dtype.names is not None or dtype.metadata is not None:
            # Equal dtypes may differ in metadata, titles and alignment, so the pickle keeps the dtype itself.
            facts += (dtype, array.shape)
        if facts == (None, True) and array.nbytes <= MAX_MEMBER_BYTES:
            if id(array) in self._family_of:
                return self._take_member(array, self._family_of[id(array)])
            if id(array) not in self._names:
                return self._take_member(array, f"{_ARRAYS}{dtype_name(dtype)}")
        name = self._take(_ARRAYS, array, row)
        if facts == (None, True):
            return self._refer(array, name)
        return self._refer(array, (ARRAY, name, len(self._refs), *facts))

    def _take_jax_array(self, part: Any) -> Reference:
        if id(part) in self._refs:
            return self._refs[id(part)]
        row, kind = take_array(self._names.get(id(part), type(part).__name__), part)
        name = self._take(_ARRAYS, part, row)
        # The part cannot change, though the row may be its memory.
        self.parts[name] = self.parts[name]._replace(is_held=False)
        return self._refer(part, (JAX, name, len(self._refs), kind.kind, kind.impl, kind.is_weak))

    def _take_member(self, array: Array, family: str) -> Reference:
        if family not in self._families:
            while family in self._taken:
                family += "~"
            self._taken.add(family)
        members = self._families.setdefault(family, [])
        start = self._n_elements.get(family, 0)
        self._n_elements[family] = start + array.size
        self.parts[family, len(members)] = TakenPart(family, array, id(array) in self._names, start)
        members.append(array)
        return self._refer(array, (MEMBER, family, len(members) - 1, start, array.shape))

    def _take_bytes(self, part: str | bytes | bytearray) -> Reference:
        if id(part) in self._refs:
            return self._refs[id(part)]
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        name = self._take(_BYTES, part, np.frombuffer(data, dtype=np.uint8))
        return self._refer(part, (type(part).__name__, name, len(self._refs)))

    def _take(self, prefix: str, part: object, row: Array) -> str:
        name = self._names.get(id(part))
        is_held = False
        if name is None or name in self._taken or name.startswith((_ARRAYS, _BYTES, _BUFFERS, SKELETON)):
            name = self._number(prefix)
        else:
            is_held = part is row or isinstance(part, bytearray)
            is_held |= isinstance(part, np.ndarray) and not is_held and np.may_share_memory(part, row)
        self._taken.add(name)
        self.parts[name] = TakenPart(name, row, is_held)
        return name

    def _refer(self, part: object, ref: Reference) -> Reference:
        self._kept.append(part)
        self._refs[id(part)] = ref
        return ref

    def _number(self, prefix: str) -> str:
        name = f"{prefix}{self._numbers[prefix]}"
        self._numbers[prefix] += 1
        return name


class StoredParts:
    """Parts of a stored model."""

    def __init__(self, adapter: str, rows: Mapping[str, Array]) -> None:
        self._adapter = adapter
        self._rows = rows
        self._parts: dict[Any, object] = {}

    def put_back(self, ref: Any) -> object:
        """Return the part of a reference; see `load_skeleton`."""
        if type(ref) is str:
            ref = (ARRAY, ref, ref)
        kind, *facts = ref
        if kind == VALUE:
            return make_value(self._adapter, *facts)
        name, number, *facts = facts
        key = (name, number) if kind == MEMBER else number
        if key not in self._parts:
            if kind == MEMBER:
                self._parts[key] = self._member(name, *facts)
            elif kind == JAX:
                self._parts[key] = make_array(name, self.row(name), Kind(*facts))
            else:
                self._parts[key] = self._array(name, *facts) if kind == ARRAY else self._bytes(kind, name)
        return self._parts[key]

    def buffers(self) -> Iterator[Array]:
        """Yield the buffers, in the order in which they were taken."""
        n = 0
        while f"{_BUFFERS}{n}" in self._rows:
            yield self.row(f"{_BUFFERS}{n}")
            n += 1

    def row(self, name: str) -> Array:
        """Return a row.

        Raises:
            AdapterError: There is no row of that name.
        """
        if name not in self._rows:
            raise AdapterError(self._adapter, f"the model's row {name!r} is missing")
        return self._rows[name]

    def _bytes(self, kind: str, name: str) -> str | bytes | bytearray:
        data = self.row(name).tobytes()
        if kind == "str":
            return data.decode("utf-8", "surrogatepass")
        return bytearray(data) if kind == "bytearray" else data

    def _member(self, name: str, start: int, shape: tuple[int, ...]) -> Array:
        stretch = self.row(name).reshape(-1)[start : start + math.prod(shape)]
        if stretch.size != math.prod(shape):
            raise AdapterError(self._adapter, f"the row {name!r} holds fewer arrays than the model has")
        return stretch.reshape(shape).copy()

    def _array(
        self, name: str, order: Any = None, is_writeable: bool = True, dtype: Any = None, shape: Any = None
    ) -> Array:
        array = self.row(name)
        if dtype is not None:
            row, array = array, np.empty(shape, dtype=dtype)
            if row.dtype == dtype:
                array[...] = row
            else:
                array.reshape(-1).view(np.uint8)[...] = row
        if order is not None:
            array = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
        elif not array.flags.writeable:
            array = array.copy()
        array.flags.writeable = is_writeable
        return array


def memory_order(array: Array) -> tuple[int, ...] | None:
    """Return the axes of an array from the slowest to the fastest in memory.

    Returns:
        None for an array in C order, and for one with gaps; pickle restores both in C order.
    """
    if array.flags.c_contiguous:
        return None
    order = tuple(int(axis) for axis in np.argsort([-stride for stride in array.strides], kind="stable"))
    return order if array.transpose(order).flags.c_contiguous else None


def _is_storable(dtype: np.dtype[Any]) -> bool:
    try:
        dtype_name(dtype)
    except ValueError:
        return False
    return True


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
