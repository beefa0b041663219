"""XGBoost's binary models (``.ubj``): every array of numbers in them.

Source: Universal Binary JSON, draft 12 (ubjson.org), as ``UBJReader`` in XGBoost's ``src/common/json.cc`` reads it:
keys are ``L``, 8 bytes and a text; an array has its length before it and, if it has one type, that; an object ends at
its brace.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from tensorcas_mlflow.containers import UBJSON_DTYPES, SkippingTape
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, HeldSource, SourceStream

_BLOCK_BYTES = 256 << 10
_MAX_DEPTH = 64
_MAX_VALUES = 4_000_000
"""Some ten seconds' work."""
_MAX_KEY_BYTES = 512
_WHOLE = "iUIlL"
_NUMBERS = {kind: struct.Struct(f">{word}") for kind, word in zip(_WHOLE + "dD", "bBhiqfd", strict=True)}
"""Numbers, by what stands before one."""
_OTHER_BYTES = {"C": 1, "Z": 0, "N": 0, "T": 0, "F": 0}
"""Sizes of other values."""


def list_xgboost(source: ByteSource) -> Listing:
    """List a model's arrays of numbers, by the keys and positions that lead to them.

    An array that says one type is as the file has it, which is big-endian; one whose numbers each say theirs has a type
    that holds them all.

    Raises:
        FormatError: It is not sound, or too long to be looked through. So does a `struct.error` say.
    """
    return _Model(source).listing()


@dataclass(slots=True)
class _Open:
    """An object or array that the walk is in."""

    name: str
    n_left: int | None
    """Elements of an array that are to come; None for an object."""
    n_elements: int = 0
    numbers: list[float] | None = field(default_factory=list)
    """Its elements so far, if all of them are numbers."""
    kinds: set[str] = field(default_factory=set)
    """What stands before them."""


class _Model:
    """One model under way."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._tape = SkippingTape(SourceStream(source), block_bytes=_BLOCK_BYTES)
        self._held = HeldSource(source.name)
        self._places = Places()

    def listing(self) -> Listing:
        stack: list[_Open] = []
        self._value(stack, "")
        for _ in range(_MAX_VALUES):
            while stack and stack[-1].n_left == stack[-1].n_elements:
                self._end(stack.pop())
            if not stack:
                break
            top = stack[-1]
            if top.n_left is not None:
                nth, top.n_elements = top.n_elements, top.n_elements + 1
                self._value(stack, f"{top.name}.{nth}" if top.name else f"{nth}")
            elif bytes(self._tape.peek(1)) == b"}":
                self._tape.pass_over(1)
                stack.pop()
            else:
                key = self._key()
                self._value(stack, f"{top.name}.{key}" if top.name else key)
        else:
            raise FormatError(f"it has more than {_MAX_VALUES} values")
        if self._tape.position != self._source.size:
            raise FormatError(f"{self._source.size - self._tape.position} bytes follow the model")
        sources: list[ByteSource] = [self._source, self._held]
        return Listing(format="xgboost", sources=sources, places=self._places)

    def _value(self, stack: list[_Open], name: str) -> None:
        """Read a value, or the beginning of one that has others in it."""
        kind = self._take(1).decode("latin-1")
        within = stack[-1] if stack and stack[-1].n_left is not None else None
        if kind in _NUMBERS:
            number = self._number(kind)
            if within is not None and within.numbers is not None:
                within.numbers.append(number)
                within.kinds.add(kind)
            return
        if within is not None:
            within.numbers = None
        if kind in _OTHER_BYTES:
            self._pass(_OTHER_BYTES[kind])
        elif kind == "S":
            self._pass(self._length())
        elif kind in "{[":
            if len(stack) >= _MAX_DEPTH:
                raise FormatError("its values are in each other too deep")
            if kind == "{":
                stack.append(_Open(name, None))
            else:
                self._array(stack, name)
        else:
            raise FormatError(f"no value begins with {kind!r}")

    def _array(self, stack: list[_Open], name: str) -> None:
        mark = self._take(1)
        kind = b""
        if mark == b"$":
            kind, mark = self._take(1), self._take(1)
        if mark != b"#":
            raise FormatError("an array that does not say its length")
        n_elements = self._length()
        if not kind:
            if n_elements > self._source.size:
                raise FormatError("an array that is longer than the file")
            stack.append(_Open(name, n_elements))
            return
        if kind not in UBJSON_DTYPES:
            raise FormatError(f"an array of the type {kind!r}")
        dtype, width = UBJSON_DTYPES[kind]
        self._places.add(
            name,
            dtype,
            (n_elements,),
            start=self._tape.position,
            n_bytes=n_elements * width,
            file_bytes=self._source.size,
        )
        self._pass(n_elements * width)

    def _end(self, array: _Open) -> None:
        """Add an array whose numbers each say their type."""
        if not array.numbers:
            return
        dtype = "int64" if array.kinds <= {*_WHOLE} else "float32" if array.kinds == {"d"} else "float64"
        data = np.array(array.numbers, dtype).tobytes()
        start = self._held.add(data)
        self._places.add(
            array.name,
            dtype,
            (len(array.numbers),),
            start=start,
            n_bytes=len(data),
            file_bytes=self._held.size,
            source=1,
        )

    def _key(self) -> str:
        if self._take(1) != b"L":
            raise FormatError("an object with something else than a key")
        n_bytes = int(self._number("L"))
        if not 0 <= n_bytes <= _MAX_KEY_BYTES:
            raise FormatError(f"a key of {n_bytes} bytes")
        return self._take(n_bytes).decode("utf-8")

    def _length(self) -> int:
        kind = self._take(1).decode("latin-1")
        n_elements = int(self._number(kind)) if kind in _WHOLE else -1
        if n_elements < 0:
            raise FormatError("a length that is none")
        return n_elements

    def _number(self, kind: str) -> float:
        layout = _NUMBERS[kind]
        number: float = layout.unpack(self._take(layout.size))[0]
        return number

    def _take(self, n_bytes: int) -> bytes:
        data = bytes(self._tape.peek(n_bytes))
        self._pass(n_bytes)
        return data

    def _pass(self, n_bytes: int) -> None:
        if self._tape.position + n_bytes > self._source.size:
            raise FormatError("it ends too early")
        self._tape.pass_over(n_bytes)
