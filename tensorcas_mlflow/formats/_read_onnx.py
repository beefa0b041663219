"""ONNX models: the tensors in them, and those whose bytes are in files beside them.

Source: ``onnx-ml.proto`` of ONNX (github.com/onnx/onnx) and its ``docs/ExternalData.md``. `tensorcas_mlflow.containers`
reads the same messages as they pass by, and passes over small ones; here all are read, at any place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.containers import ONNX_DTYPES, item_bytes, onnx_field
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import Beside, ByteSource, HeldSource

_WINDOW_BYTES = 64 << 10
_FIELD_BYTES = 20
_MAX_FIELDS = 4_000_000
"""Some ten seconds' work."""
_MAX_DEPTH = 64
_MAX_TEXT_BYTES = 64 << 10
_MAX_HELD_BYTES = 64 << 20
"""Of numbers that are written as varints, or one by one."""
_MAX_DATA_BYTES = 16 << 20
"""In one piece."""
_MIN_NUMBERS = 16
"""So many numbers of an attribute may be weights, as those of trees are."""

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _RAW_DATA, _DOUBLE_DATA, _UINT64_DATA = 4, 5, 7, 9, 10, 11
_WIDTHS = {_FLOAT_DATA: 4, _DOUBLE_DATA: 8}
_TYPED = {_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _DOUBLE_DATA, _UINT64_DATA}
_EXTERNAL = 1
_KINDS = {8: "strings", 21: "uint4", 22: "int4", 23: "float4_e2m1", 25: "uint2", 26: "int2"}


class _Field(NamedTuple):
    number: int
    wire_type: int
    value: int
    """A varint, or the size of bytes."""
    start: int
    """First byte of what follows the tag and the size."""


def list_onnx(source: ByteSource, beside: Beside | None = None) -> Listing:
    """List an ONNX model: its initializers, and the tensors of its nodes' attributes, in graphs within graphs too.

    A tensor of an attribute is called as the node's first output, with the attribute's name unless that is ``value``.
    In graphs within graphs a name may be there already; the second is given a number. Left out are sparse tensors,
    strings, numbers smaller than a byte, and the numbers of an attribute if they are more than a few.

    Args:
        source: The model.
        beside: Opens files beside it, by name.

    Raises:
        FormatError: It is not sound, or its tensors are in a file that cannot be opened from here.
        BackendError: Such a file is not there.
    """
    return _Model(source, beside).listing()


@dataclass(slots=True)
class _Tensor:
    """What the fields of a tensor say."""

    name: str = ""
    data_type: int = 0
    dims: list[int] = field(default_factory=list)
    raw: _Field | None = None
    typed: list[_Field] = field(default_factory=list)
    location: int = 0
    external: dict[str, str] = field(default_factory=dict)


class _Model:
    """One model under way."""

    def __init__(self, source: ByteSource, beside: Beside | None) -> None:
        self._source = source
        self._beside = beside
        self._sources: list[ByteSource] = [source]
        self._numbers: dict[str, int] = {}
        """Of the files beside it."""
        self._places = Places()
        self._held: int | None = None
        self._window = memoryview(b"")
        self._window_at = 0
        self._n_fields = 0

    def listing(self) -> Listing:
        for each in self._fields(0, self._source.size):
            match each.number:
                case 7:
                    self._graph(each, 0)
                case 20:
                    for graph in self._inside(each):
                        if graph.number in (1, 2):
                            self._graph(graph, 1)
                case 25:
                    for part in self._inside(each):
                        if part.number == 7:
                            self._node(part, 1)
                        elif part.number == 11:
                            self._attribute(part, "", 1)
        return Listing(format="onnx", sources=self._sources, places=self._places, left_out=self._places.left_out)

    # --- messages

    def _graph(self, message: _Field, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise FormatError("its graphs are in each other too deep")
        for each in self._inside(message):
            match each.number:
                case 1:
                    self._node(each, depth)
                case 5:
                    self._tensor(each, "")
                case 15:
                    self._sparse(each, "")

    def _node(self, message: _Field, depth: int) -> None:
        name, output, attributes = "", "", []
        for each in self._inside(message):
            if each.number == 2:
                output = output or self._text(each)
            elif each.number == 3:
                name = self._text(each)
            elif each.number == 5:
                attributes.append(each)
        for attribute in attributes:
            self._attribute(attribute, output or name, depth)

    def _attribute(self, message: _Field, owner: str, depth: int) -> None:
        own, parts, n_numbers = "", [], 0
        for each in self._inside(message):
            if each.number == 1:
                own = self._text(each)
            elif each.number in (7, 8):
                n_numbers += each.value // 4 if each.number == 7 and each.wire_type == _BYTES else 1
            elif each.number in (5, 6, 10, 11, 22, 23):
                parts.append(each)
        name = owner if own == "value" else ".".join(filter(None, (owner, own)))
        for each in parts:
            if each.number in (5, 10):
                self._tensor(each, name)
            elif each.number in (6, 11):
                self._graph(each, depth + 1)
            elif each.number in (22, 23):
                self._sparse(each, name)
        if n_numbers >= _MIN_NUMBERS:
            self._places.leave_out(self._places.unused(name or "attribute"), f"{n_numbers} numbers of an attribute")

    def _sparse(self, message: _Field, name: str) -> None:
        for each in self._inside(message):
            if each.number == 1 and not name:
                name = self._read(each).name
        self._places.leave_out(self._places.unused(name or "sparse"), "sparse")

    def _tensor(self, message: _Field, name: str) -> None:
        tensor = self._read(message)
        name = self._places.unused(name or tensor.name or "tensor")
        dtype, shape = ONNX_DTYPES.get(tensor.data_type), tuple(tensor.dims)
        if dtype is None:
            self._places.leave_out(name, _KINDS.get(tensor.data_type, f"data type {tensor.data_type}"))
            return
        n_bytes = math.prod(shape) * item_bytes(dtype)
        if not n_bytes:
            nth, start = 0, 0
        elif tensor.location == _EXTERNAL:
            nth, start = self._outside(name, tensor, n_bytes)
        elif tensor.raw is not None:
            self._check(name, n_bytes, tensor.raw.value)
            nth, start = 0, tensor.raw.start
        else:
            found = self._typed(name, tensor, dtype, n_bytes)
            if found is None:
                self._places.leave_out(name, f"{dtype}, {n_bytes} bytes of it written number by number")
                return
            nth, start = found
        file_bytes = self._sources[nth].size
        self._places.add(name, dtype, shape, start=start, n_bytes=n_bytes, file_bytes=file_bytes, source=nth)

    def _read(self, message: _Field) -> _Tensor:
        tensor = _Tensor()
        for each in self._inside(message):
            match each.number:
                case 1:
                    tensor.dims += self._whole_numbers(each)
                case 2:
                    tensor.data_type = each.value
                case 3:
                    raise FormatError("a tensor is in segments, which nobody writes")
                case 8:
                    tensor.name = self._text(each)
                case 9:
                    tensor.raw = each
                case 13:
                    entry = {part.number: self._text(part) for part in self._inside(each) if part.number in (1, 2)}
                    tensor.external[entry.get(1, "")] = entry.get(2, "")
                case 14:
                    tensor.location = each.value
                case number if number in _TYPED:
                    tensor.typed.append(each)
        return tensor

    # --- where a tensor's bytes are

    def _outside(self, name: str, tensor: _Tensor, n_bytes: int) -> tuple[int, int]:
        """Find a tensor in a file beside the model."""
        said = tensor.external
        location = said.get("location", "").removeprefix("./")
        numbers = [said.get("offset", "0"), said.get("length", str(n_bytes))]
        if not location or not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in numbers):
            raise FormatError(f"tensor {name[:80]!r} does not say where it is")
        start, length = map(int, numbers)
        self._check(name, n_bytes, length)
        if self._beside is None:
            raise FormatError(
                f"the bytes of tensor {name[:80]!r} are in {location[:80]!r}: open the model with that file beside it"
            )
        if location not in self._numbers:
            self._numbers[location] = len(self._sources)
            self._sources.append(self._beside(location))
        return self._numbers[location], start

    def _typed(self, name: str, tensor: _Tensor, dtype: str, n_bytes: int) -> tuple[int, int] | None:
        """Find a tensor whose elements are in a field of their kind; None if there are too many to be held."""
        if not tensor.typed or len({each.number for each in tensor.typed}) > 1:
            raise FormatError(f"tensor {name[:80]!r} has no data, or some of two kinds")
        number, first = tensor.typed[0].number, tensor.typed[0]
        if number in _WIDTHS and len(tensor.typed) == 1 and first.wire_type == _BYTES:
            self._check(name, n_bytes, first.value)
            return 0, first.start
        n_held = sum(each.value if each.wire_type == _BYTES else 8 for each in tensor.typed)
        held = 0 if self._held is None else self._sources[self._held].size
        if max(n_held, n_bytes) > _MAX_DATA_BYTES or held + n_bytes > _MAX_HELD_BYTES:
            return None
        data = b"".join(map(self._numbers_of, tensor.typed))
        if number not in _WIDTHS:
            values = np.frombuffer(data, np.uint64)
            # Numbers of a float's bits, and whole ones of any width, are the low bytes of what is written.
            width = item_bytes(dtype)
            data = values.astype(f"u{width}").tobytes()
        self._check(name, n_bytes, len(data))
        if self._held is None:
            self._held = len(self._sources)
            self._sources.append(HeldSource(self._source.name))
        source = self._sources[self._held]
        assert isinstance(source, HeldSource)
        return self._held, source.add(data)

    def _numbers_of(self, each: _Field) -> bytes:
        if each.number in _WIDTHS:
            n_bytes = each.value if each.wire_type == _BYTES else _WIDTHS[each.number]
            return bytes(self._source.read(each.start, n_bytes))
        if each.wire_type == _VARINT:
            return each.value.to_bytes(8, "little")
        return _varints(self._source.read(each.start, each.value)).tobytes()

    def _check(self, name: str, wanted: int, n_bytes: int) -> None:
        if wanted != n_bytes:
            raise FormatError(f"tensor {name[:80]!r} has {n_bytes} bytes, and its shape and dtype want {wanted}")

    # --- fields

    def _inside(self, message: _Field) -> Iterator[_Field]:
        if message.wire_type != _BYTES:
            raise FormatError("a message is a number")
        return self._fields(message.start, message.start + message.value)

    def _fields(self, start: int, stop: int) -> Iterator[_Field]:
        at = start
        while at < stop:
            self._n_fields += 1
            if self._n_fields > _MAX_FIELDS:
                raise FormatError(f"it has more than {_MAX_FIELDS} fields")
            offset = at - self._window_at
            if not 0 <= offset <= len(self._window) - _FIELD_BYTES:
                n_bytes = min(_WINDOW_BYTES, self._source.size - at)
                self._window, self._window_at, offset = self._source.read(at, n_bytes), at, 0
            number, wire_type, value, end = onnx_field(self._window, offset)
            at = self._window_at + end
            found = _Field(number, wire_type, value, at)
            if wire_type == _BYTES:
                at += value
            elif wire_type != _VARINT:
                width = 8 if wire_type == _FIXED_64 else 4
                found = found._replace(start=at - width)
            if at > stop:
                raise FormatError("a field goes beyond the message that it is part of")
            yield found

    def _text(self, each: _Field) -> str:
        if each.wire_type != _BYTES or each.value > _MAX_TEXT_BYTES:
            raise FormatError(f"a text of {each.value} bytes")
        return bytes(self._source.read(each.start, each.value)).decode("utf-8")

    def _whole_numbers(self, each: _Field) -> list[int]:
        if each.wire_type == _VARINT:
            return [each.value]
        if each.value > _MAX_TEXT_BYTES:
            raise FormatError("a tensor of too many dimensions")
        values: list[int] = _varints(self._source.read(each.start, each.value)).tolist()
        return values


def _varints(data: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Read varints that follow each other."""
    raw = np.frombuffer(data, np.uint8)
    if not len(raw):
        return np.empty(0, np.uint64)
    ends = np.flatnonzero(raw < 128) + 1
    starts = np.concatenate(([0], ends[:-1]))
    if not len(ends) or ends[-1] != len(raw) or (ends - starts).max() > 10:
        raise FormatError("numbers that do not end")
    nth = np.arange(len(raw)) - np.repeat(starts, ends - starts)
    parts = (raw & 127).astype(np.uint64) << (7 * nth).astype(np.uint64)
    return np.asarray(np.add.reduceat(parts, starts), np.uint64)
