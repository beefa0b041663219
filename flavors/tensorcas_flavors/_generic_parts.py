"""What is taken out of a pickle of any Python object, and put back: arrays, long strings and bytes, buffers.

Each becomes one row. A row is named by the path that leads to the part, or else numbered, by what it is:
``__array__/0``, ``__bytes__/0``, ``__buffer__/0``. References in the pickle are tuples of the part's kind, its row and
a number; equal numbers are one object. For an array that its row alone does not say all of, they go on with its memory
order, whether it is writable, its dtype and its shape.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tensorcas_flavors._generic_names import name_parts
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.dtypes import dtype_name
from tensorcas_mlflow.errors import AdapterError

MIN_ARRAY_BYTES = 256
"""Smaller arrays and buffers stay in the pickle: a row costs about a hundred bytes at each step."""
MIN_BYTES_BYTES = 4096
"""Shorter strings and bytes stay in the pickle, which is cut by content as they would be."""

ARRAY = "__array__/"
BYTES = "__bytes__/"
BUFFER = "__buffer__/"

Reference = tuple[Any, ...]


class TakenParts:
    """The parts that one pickling takes out, in order of appearance."""

    def __init__(self, model: object) -> None:
        self.rows: dict[str, Array] = {}
        self.held: set[str] = set()
        """Rows that are memory of the model itself. Others may be of copies."""
        self._names = name_parts(model, MIN_BYTES_BYTES)
        self._refs: dict[int, Reference] = {}
        self._kept: list[object] = []
        self._numbers = {ARRAY: 0, BYTES: 0, BUFFER: 0}

    def take_out(self, part: object) -> Reference | None:
        """Claim a part; see `dump_skeleton`."""
        kind = type(part)
        if kind is np.ndarray:
            return self._take_array(part)  # type: ignore[arg-type]
        if kind is str or kind is bytes or kind is bytearray:
            return self._take_bytes(part) if len(part) >= MIN_BYTES_BYTES else None  # type: ignore[arg-type]
        return None

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Claim a buffer; see `dump_skeleton`."""
        array = np.frombuffer(buffer.raw(), dtype=np.uint8)
        if len(array) < MIN_ARRAY_BYTES:
            return False
        self.rows[self._number(BUFFER)] = array
        return True

    def _take_array(self, array: Array) -> Reference | None:
        if array.nbytes < MIN_ARRAY_BYTES or array.dtype.hasobject:
            return None
        if id(array) in self._refs:
            return self._refs[id(array)]
        row = array if _is_storable(array.dtype) else _bytes_of(array)
        facts: tuple[Any, ...] = (memory_order(array), array.flags.writeable)
        if row is not array or array.dtype.names is not None or array.dtype.metadata is not None:
            # Equal dtypes may differ in metadata, titles and alignment; so the pickle keeps the dtype itself.
            facts += (array.dtype, array.shape)
        return self._take(ARRAY, "array", array, row, *(() if facts == (None, True) else facts))

    def _take_bytes(self, part: str | bytes | bytearray) -> Reference:
        if id(part) in self._refs:
            return self._refs[id(part)]
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        return self._take(BYTES, type(part).__name__, part, np.frombuffer(data, dtype=np.uint8))

    def _take(self, prefix: str, kind: str, part: object, row: Array, *facts: Any) -> Reference:
        name = self._names.get(id(part))
        if name is None or name in self.rows or name.startswith((ARRAY, BYTES, BUFFER, SKELETON)):
            name = self._number(prefix)
        elif isinstance(part, bytearray) or (isinstance(part, np.ndarray) and np.may_share_memory(part, row)):
            self.held.add(name)
        self.rows[name] = row
        self._kept.append(part)
        ref = self._refs[id(part)] = (kind, name, len(self._refs), *facts)
        return ref

    def _number(self, prefix: str) -> str:
        name = f"{prefix}{self._numbers[prefix]}"
        self._numbers[prefix] += 1
        return name


class PartsToPutBack:
    """The parts of a model, from its rows."""

    def __init__(self, adapter: str, rows: Mapping[str, Array]) -> None:
        self._adapter = adapter
        self._rows = rows
        self._parts: dict[int, object] = {}

    def put_back(self, ref: Any) -> object:
        """Return the part that a reference stands for; see `load_skeleton`."""
        kind, name, number, *facts = ref
        if number not in self._parts:
            self._parts[number] = self._array(name, *facts) if kind == "array" else self._bytes(kind, name)
        return self._parts[number]

    def buffers(self) -> Iterator[Array]:
        """Yield the buffers, in the order in which they were taken."""
        n = 0
        while f"{BUFFER}{n}" in self._rows:
            yield self.row(f"{BUFFER}{n}")
            n += 1

    def row(self, name: str) -> Array:
        """Return a row.

        Raises:
            AdapterError: There is none of that name.
        """
        if name not in self._rows:
            raise AdapterError(self._adapter, f"the model's row {name!r} is missing")
        return self._rows[name]

    def _bytes(self, kind: str, name: str) -> str | bytes | bytearray:
        data = self.row(name).tobytes()
        if kind == "str":
            return data.decode("utf-8", "surrogatepass")
        return bytearray(data) if kind == "bytearray" else data

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
        None for an array that lies in C order, or in no order at all, with gaps: pickle brings both back in C order.
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
