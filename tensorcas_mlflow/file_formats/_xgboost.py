"""XGBoost's binary models (``.ubj``), in UBJSON.

The splitter makes one stretch of skeleton, with the long arrays cut out. A model that grows by a tree grows in the
middle, and cuts chosen by content keep the trees that it had, with their short arrays. A row of its own is for a long
array: the weights of a linear model, or the nodes of a deep tree. The lister names every array of numbers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tensorcas_mlflow.base.dtypes import dtype_name
from tensorcas_mlflow.base.ubjson import ARRAY_HEAD, NUMBER_DTYPES, TokenReader
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource, MemorySource, SourceStream
from tensorcas_mlflow.file_formats._tape import FilePart, Skeleton, SkippingTape, Tape, Tensor

_WINDOW_BYTES = 1 << 20
_MIN_TENSOR_BYTES = 8 << 10
"""With half of this, the rows of trees 13 deep cost more than they save; with twice this, few such trees have any."""

_BEGINNING = re.compile(rb"\{L\0{7}(?:\x06Config|\x07learner|\x07version)[{\[L]")
_KEY = re.compile(rb"[A-Za-z0-9_.-]{1,64}\Z")
_MAX_KEY_BYTES = 64
_BEFORE_ARRAY_BYTES = _MAX_KEY_BYTES + 13
_MAX_ELEMENTS = 1 << 40

_BLOCK_BYTES = 256 << 10
_MAX_DEPTH = 64
_MAX_VALUES = 4_000_000
"""Some ten seconds' work."""
_MAX_LISTED_KEY_BYTES = 512
_NUMBERS = {marker: struct.Struct(f">{code}") for marker, code in zip("iUIlLdD", "bBhiqfd", strict=True)}
_OTHER_BYTES = {"C": 1, "Z": 0, "N": 0, "T": 0, "F": 0}
"""Sizes of other values."""


def is_xgboost(head: memoryview) -> bool:
    """Recognise a binary model by its first key: a model, or a booster as it is pickled."""
    return _BEGINNING.match(head) is not None


def split_xgboost(tape: Tape) -> Iterator[FilePart]:
    """Announce the parts of a model, to the end of the file.

    Arrays are found by their first bytes; the tree around them is not walked.
    """
    while not tape.is_at_end():
        window = tape.peek(_WINDOW_BYTES)
        told = 0
        for start, tensor in _long_arrays(window):
            yield Skeleton(n_bytes=start - told)
            yield tensor
            told = start + tensor.n_bytes
        # The head of the next array may lie across the window's end.
        rest = len(window) - told - (_BEFORE_ARRAY_BYTES if len(window) == _WINDOW_BYTES else 0)
        if rest > 0:
            yield Skeleton(n_bytes=rest)


def _long_arrays(window: memoryview) -> Iterator[tuple[int, Tensor]]:
    """Find the long arrays that begin in a window, each with the position of its first number."""
    at = 0
    while match := ARRAY_HEAD.search(window, at):
        dtype = NUMBER_DTYPES[match[1].decode()]
        n_elements = int.from_bytes(match[2], "big")
        n_bytes = n_elements * dtype.itemsize
        at = match.end()
        if n_elements > _MAX_ELEMENTS:
            continue  # the bytes look like a head by chance, or are damaged
        if n_bytes >= _MIN_TENSOR_BYTES:
            key = _KEY.search(bytes(window[max(0, match.start() - _MAX_KEY_BYTES) : match.start()]))
            name = key[0].decode() if key else ""
            yield at, Tensor(n_bytes=n_bytes, name=name, dtype=dtype_name(dtype), shape=(n_elements,))
        at += n_bytes


def list_xgboost(source: ByteSource) -> Listing:
    """List a model's arrays of numbers, by the keys and positions of their paths.

    A typed array keeps its big-endian dtype. An array whose numbers carry their types gets a dtype that holds them all.

    Raises:
        FormatError: The file is malformed or too long to be read. A `ValueError` says the same.
    """
    return _ModelLister(source).listing()


@dataclass(slots=True)
class _OpenValue:
    """An object or array around the current value."""

    name: str
    n_left: int | None
    """Number of an array's elements; None for an object."""
    n_elements: int = 0
    numbers: list[float] | None = field(default_factory=list)
    """The elements so far, if all of them are numbers."""
    markers: set[str] = field(default_factory=set)
    """The numbers' markers."""

    def below(self, key: object) -> str:
        """Return the name of a value in it."""
        return f"{self.name}.{key}" if self.name else f"{key}"


class _TapeReader(TokenReader):
    """Reader of a file, which skips the numbers of typed arrays."""

    def __init__(self, source: ByteSource) -> None:
        self.n_bytes = source.size
        self.tape = SkippingTape(SourceStream(source), block_bytes=_BLOCK_BYTES)

    @property
    def position(self) -> int:  # type: ignore[override]
        return self.tape.position

    def take(self, n_bytes: int) -> bytes:
        data = bytes(self.tape.peek(n_bytes)) if self.position + n_bytes <= self.n_bytes else b""
        self.skip(n_bytes)
        return data

    def skip(self, n_bytes: int) -> None:
        """Skip bytes without reading them."""
        if self.position + n_bytes > self.n_bytes:
            raise ValueError(f"the document ends at {self.n_bytes}, too early")
        self.tape.skip(n_bytes)


class _ModelLister:
    """Lister of one model."""

    def __init__(self, source: ByteSource) -> None:
        self._reader = _TapeReader(source)
        self._held = MemorySource(source.name)
        self._table = LocationTable(source, self._held)

    def listing(self) -> Listing:
        stack: list[_OpenValue] = []
        reader = self._reader
        self._value(stack, "")
        for _ in range(_MAX_VALUES):
            while stack and stack[-1].n_left == stack[-1].n_elements:
                self._end(stack.pop())
            if not stack:
                break
            top = stack[-1]
            if top.n_left is not None:
                nth, top.n_elements = top.n_elements, top.n_elements + 1
                self._value(stack, top.below(nth))
            elif bytes(reader.tape.peek(1)) == b"}":
                reader.skip(1)
                stack.pop()
            else:
                self._value(stack, top.below(reader.text(_MAX_LISTED_KEY_BYTES)))
        else:
            raise FormatError(f"it has more than {_MAX_VALUES} values")
        if reader.position != reader.n_bytes:
            raise FormatError(f"{reader.n_bytes - reader.position} bytes follow the model")
        return self._table.listing("xgboost")

    def _value(self, stack: list[_OpenValue], name: str) -> None:
        """Read a value, or the beginning of an object or array."""
        reader = self._reader
        marker = reader.marker()
        within = stack[-1] if stack and stack[-1].n_left is not None else None
        if marker in _NUMBERS:
            layout = _NUMBERS[marker]
            (number,) = layout.unpack(reader.take(layout.size))
            if within is not None and within.numbers is not None:
                within.numbers.append(number)
                within.markers.add(marker)
            return
        if within is not None:
            within.numbers = None
        if marker in _OTHER_BYTES:
            reader.skip(_OTHER_BYTES[marker])
        elif marker == "S":
            reader.skip(reader.length())
        elif marker not in "{[":
            raise FormatError(f"no value begins with {marker!r}")
        elif len(stack) >= _MAX_DEPTH:
            raise FormatError("its values nest too deep")
        elif marker == "{":
            stack.append(_OpenValue(name, None))
        else:
            self._array(stack, name)

    def _array(self, stack: list[_OpenValue], name: str) -> None:
        reader = self._reader
        dtype, count = reader.array_head()
        if dtype is None:
            stack.append(_OpenValue(name, count))
            return
        n_bytes = count * dtype.itemsize
        self._table.add(name, dtype_name(dtype), (count,), start=reader.position, n_bytes=n_bytes)
        reader.skip(n_bytes)

    def _end(self, array: _OpenValue) -> None:
        """Add an array whose numbers carry their types."""
        if not array.numbers:
            return
        dtype = "float64"
        if not array.markers & {"d", "D"}:
            dtype = "int64"
        elif array.markers == {"d"}:
            dtype = "float32"
        data = np.array(array.numbers, dtype).tobytes()
        start = self._held.add(data)
        self._table.add(array.name, dtype, (len(array.numbers),), start=start, n_bytes=len(data), source=1)
