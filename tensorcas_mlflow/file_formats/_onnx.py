"""ONNX models: a protobuf message that holds the tensors' bytes, or names files beside it that do.

Sources: ``onnx-ml.proto`` of ONNX (github.com/onnx/onnx), IR versions 3 to 14, and its ``docs/ExternalData.md``.

The splitter walks forward, into messages that may hold large tensors and past all others. Fields mostly come in the
order of their numbers: a tensor's name stands before ``raw_data``, and behind ``float_data``, which is looked past for
it. The lister has random access and reads every tensor.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import item_bytes
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._protobuf import BYTES, FIXED64, VARINT, read_field, read_varint, read_varints
from tensorcas_mlflow.file_formats._source import ByteSource, MemorySource, OpenSibling
from tensorcas_mlflow.file_formats._tape import MIN_TENSOR_BYTES, FilePart, Skeleton, Tape, Tensor

_WINDOW_BYTES = 1 << 20
_FIELD_BYTES = 20
"""Longest beginning of a field: two varints, of its number and wire type, and of a number or a length."""
_MAX_LOOK_OVER_BYTES = 8 << 20
"""Largest payload that is looked past for the name behind it."""
_BEHIND_BYTES = 4096
_MAX_DEPTH = 64
_MAX_DIMENSIONS = 64
_MIN_MESSAGE_BYTES = 2 * MIN_TENSOR_BYTES
"""Shortest message that is walked: a shorter one holds no large tensor, and most nodes are short."""
_MAX_FIELDS = 100_000
_MIN_FIELD_BYTES = 8
"""Least average size of a field, beyond the first `_MAX_FIELDS`, for a file to be worth walking."""

_READ_BYTES = 64 << 10
_MAX_LISTED_FIELDS = 4_000_000
"""Some ten seconds' work."""
_MAX_TEXT_BYTES = 64 << 10
_MAX_HELD_BYTES = 64 << 20
"""Limit for all numbers written as varints or one by one, which are held in memory."""
_MAX_DATA_BYTES = 16 << 20
"""Limit for one such tensor."""
_MIN_NUMBERS = 16
"""An attribute with this many numbers may hold weights, as trees' attributes do."""

# The messages that may hold tensors: field number -> kind of the message.
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "tensor": {},
}
# A tensor in a node rarely has a name of its own; users know it by the node's first output.
_NAMES = {"node": 2, "tensor": 8}
# A message has one of these fields, perhaps many thousand times over, and nothing to walk behind it.
_ONLY_DATA = {"attribute": frozenset((2, 3, 4, 7, 8, 9)), "tensor": frozenset((4, 5, 6, 7, 9, 10, 11))}
_DIMS, _DATA_TYPE = 1, 2
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _RAW_DATA, _DOUBLE_DATA, _UINT64_DATA = 4, 5, 7, 9, 10, 11
_WIDTHS = {_FLOAT_DATA: 4, _DOUBLE_DATA: 8}
"""Fields of elements with a fixed width. The other typed fields hold varints."""
_TYPED = {_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _DOUBLE_DATA, _UINT64_DATA}
_EXTERNAL = 1
_KINDS = {8: "strings", 21: "uint4", 22: "int4", 23: "float4_e2m1", 25: "uint2", 26: "int2"}

# TensorProto.DataType -> dtype. Elements smaller than a byte are packed: numpy has no dtype for them.
ONNX_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    24: "float8_e8m0fnu",
}
_ITEM_BYTES = {name: parse_dtype(name).itemsize for name in ONNX_DTYPES.values()}

_COMPLEX64, _COMPLEX128 = 14, 15

# ModelProto: field number -> wire type. A file with any other field is not taken for ONNX.
_MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_GRAPH_FIELDS = (1, 2, 5, 10, 11, 12, 13, 14, 15, 16)
_TEXTS = (2, 3, 4, 6)
_GRAPH = 7
_MAX_IR_VERSION = 127


def is_onnx(head: memoryview) -> bool:
    """Recognise an ONNX model, which has no magic number, by its first fields.

    The first field is the IR version, as serializers write it. Up to the graph, all fields must be fields of a model
    with the right wire types, texts must be UTF-8, and the graph must begin with a field of a graph.
    """
    if len(head) < 2 or head[0] != 1 << 3 or not 0 < head[1] <= _MAX_IR_VERSION:
        return False
    at = 2
    try:
        while True:
            number, wire_type, value, at = read_field(head, at)
            if _MODEL_FIELDS.get(number) != wire_type:
                return False
            if number == _GRAPH:
                first, wire_type, _, _ = read_field(head, at)
                return first in _GRAPH_FIELDS and wire_type == BYTES
            if number in _TEXTS:
                bytes(head[at : at + value]).decode()
            at += value if wire_type == BYTES else 0
    except (FormatError, IndexError, UnicodeDecodeError):
        return False


def split_onnx(tape: Tape) -> Iterator[FilePart]:
    """Announce the tensors' bytes, and the messages around them."""
    return _ModelSplitter(tape).parts()


@dataclass(slots=True)
class _Message:
    """A message around the current field, with the values of its fields so far."""

    kind: str
    end: int
    """One past its last byte, as a position on the tape."""
    name: str = ""
    """Its own name, or that of the node around it."""
    is_named: bool = False
    data_type: int = 0
    dims: list[int] = field(default_factory=list)

    def note(self, number: int, value: int) -> None:
        """Remember the value of a number field that matters."""
        if self.kind == "tensor":
            if number == _DIMS:
                self.dims.append(value)
                if len(self.dims) > _MAX_DIMENSIONS:
                    raise FormatError(f"a tensor of more than {_MAX_DIMENSIONS} dimensions")
            elif number == _DATA_TYPE:
                self.data_type = value

    def note_bytes(self, number: int, value: memoryview) -> None:
        """Remember a name, or packed dimensions."""
        if number == _NAMES.get(self.kind):
            if self.kind == "tensor" or not self.name:
                self.name = bytes(value).decode("utf-8", "backslashreplace")
                self.is_named = True
        elif number == _DIMS and self.kind == "tensor":
            at = 0
            while at < len(value):
                side, at = read_varint(value, at)
                self.note(_DIMS, side)

    def spec(self, number: int, n_bytes: int) -> tuple[str | None, tuple[int, ...] | None]:
        """Return the dtype and shape of a tensor with elements in this field, as far as they agree with its size."""
        if number == _RAW_DATA:
            dtype = ONNX_DTYPES.get(self.data_type)
        elif number == _FLOAT_DATA:
            dtype = "complex64" if self.data_type == _COMPLEX64 else "float32"
        else:
            dtype = "complex128" if self.data_type == _COMPLEX128 else "float64"
        if dtype is None or n_bytes % _ITEM_BYTES[dtype]:
            return None, None
        is_whole = math.prod(self.dims) * _ITEM_BYTES[dtype] == n_bytes
        return dtype, tuple(self.dims) if is_whole else None


class _ModelSplitter:
    """Splitter of one model: a walk into messages that may hold tensors, and past all others."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._messages = [_Message("model", sys.maxsize)]
        self._n_fields = 0
        self._window = memoryview(b"")
        self._start = tape.position
        """Position of the window."""
        self._at = 0
        """Position of the next field in the window, or beyond it."""
        self._told = 0
        """Position behind the last announced part, in the window or beyond it."""

    def parts(self) -> Iterator[FilePart]:
        while True:
            if self._at + _FIELD_BYTES > len(self._window):
                yield from self._skeleton()
                self._start, self._at, self._told = self._tape.position, 0, 0
                self._window = self._tape.peek(_WINDOW_BYTES)
                if not self._window:
                    return
            message = self._innermost()
            number, wire_type, value, self._at = read_field(self._window, self._at)
            if wire_type != BYTES:
                message.note(number, value)
            else:
                end = self._start + self._at + value
                if end > message.end:
                    raise FormatError("a field exceeds its message")
                kind = _CHILDREN[message.kind].get(number)
                if kind is not None and value >= _MIN_MESSAGE_BYTES and len(self._messages) < _MAX_DEPTH:
                    self._messages.append(_Message(kind, end, message.name))
                    continue
                if message.kind == "tensor" and number in (_FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA):
                    yield from self._elements(message, number, value)
                elif value <= _BEHIND_BYTES:
                    message.note_bytes(number, self._ahead(value))
                self._at += value
            if number in _ONLY_DATA.get(message.kind, ()):
                self._at = message.end - self._start

    def _innermost(self) -> _Message:
        """Leave the finished messages, and return the one around the next field."""
        position = self._start + self._at
        while position >= self._messages[-1].end:
            if position > self._messages.pop().end:
                raise FormatError("a field exceeds its message")
        self._n_fields += 1
        if self._n_fields > _MAX_FIELDS + position // _MIN_FIELD_BYTES:
            raise FormatError(f"{self._n_fields} fields in {position} bytes are more than a model has")
        return self._messages[-1]

    def _skeleton(self) -> Iterator[FilePart]:
        """Announce the bytes between the last part and the next field."""
        if self._at > self._told:
            n_bytes, self._told = self._at - self._told, self._at
            yield Skeleton(n_bytes=n_bytes)

    def _ahead(self, n_bytes: int) -> memoryview:
        """Return the next bytes, which may lie across the window's end."""
        if self._at + n_bytes <= len(self._window):
            return self._window[self._at : self._at + n_bytes]
        return self._tape.peek(self._at - self._told + n_bytes)[self._at - self._told :]

    def _elements(self, message: _Message, number: int, n_bytes: int) -> Iterator[FilePart]:
        """Announce the tensor whose elements come next."""
        if n_bytes < MIN_TENSOR_BYTES:
            return
        yield from self._skeleton()
        if not message.is_named and n_bytes <= _MAX_LOOK_OVER_BYTES:
            self._look_over(message, n_bytes)
        dtype, shape = message.spec(number, n_bytes)
        yield Tensor(n_bytes=n_bytes, name=message.name, dtype=dtype, shape=shape)
        self._told = self._at + n_bytes

    def _look_over(self, message: _Message, n_bytes: int) -> None:
        """Remember the fields behind a tensor's elements, which come next on the tape."""
        ahead = self._tape.peek(min(n_bytes + _BEHIND_BYTES, message.end - self._tape.position))
        at = n_bytes
        with contextlib.suppress(FormatError, IndexError):
            while at < len(ahead):
                number, wire_type, value, at = read_field(ahead, at)
                if wire_type == BYTES:
                    message.note_bytes(number, ahead[at : at + value])
                    at += value
                else:
                    message.note(number, value)


class _Field(NamedTuple):
    number: int
    wire_type: int
    value: int
    """A varint, or the size of bytes."""
    start: int
    """First byte behind the tag and the size."""


def list_onnx(source: ByteSource, beside: OpenSibling | None = None) -> Listing:
    """List the initializers of a model, and the tensors of its nodes' attributes, in nested graphs, too.

    A tensor of an attribute has the name of the node's first output, and the attribute's name unless that is ``value``.
    A name that repeats in a nested graph gets a number. Left out are sparse tensors, strings, numbers smaller than a
    byte, and long lists of numbers in attributes.

    Args:
        source: The model.
        beside: Opens files beside it, by name.

    Raises:
        FormatError: The model is malformed, or its tensors are in a file that cannot be opened from here.
        BackendError: Such a file is missing.
    """
    return _ModelReader(source, beside).listing()


@dataclass(slots=True)
class _TensorFields:
    """Values of the fields of one tensor."""

    name: str = ""
    data_type: int = 0
    dims: list[int] = field(default_factory=list)
    raw: _Field | None = None
    typed: list[_Field] = field(default_factory=list)
    location: int = 0
    external: dict[str, str] = field(default_factory=dict)


class _ModelReader:
    """Lister of one model."""

    def __init__(self, source: ByteSource, beside: OpenSibling | None) -> None:
        self._source = source
        self._beside = beside
        self._table = LocationTable(source)
        self._numbers: dict[str, int] = {}
        """Index of each file beside it, in the table's sources."""
        self._held: int | None = None
        """Index of the source that holds numbers in memory."""
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
        return self._table.listing("onnx")

    # --- messages

    def _graph(self, message: _Field, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise FormatError("its graphs nest too deep")
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
                n_numbers += each.value // 4 if each.number == 7 and each.wire_type == BYTES else 1
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
            self._table.leave_out(self._table.unused(name or "attribute"), f"{n_numbers} numbers of an attribute")

    def _sparse(self, message: _Field, name: str) -> None:
        for each in self._inside(message):
            if each.number == 1 and not name:
                name = self._read(each).name
        self._table.leave_out(self._table.unused(name or "sparse"), "sparse")

    def _tensor(self, message: _Field, name: str) -> None:
        tensor = self._read(message)
        name = self._table.unused(name or tensor.name or "tensor")
        dtype, shape = ONNX_DTYPES.get(tensor.data_type), tuple(tensor.dims)
        if dtype is None:
            self._table.leave_out(name, _KINDS.get(tensor.data_type, f"data type {tensor.data_type}"))
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
                self._table.leave_out(name, f"{dtype}, {n_bytes} bytes of it written number by number")
                return
            nth, start = found
        self._table.add(name, dtype, shape, start=start, n_bytes=n_bytes, source=nth)

    def _read(self, message: _Field) -> _TensorFields:
        tensor = _TensorFields()
        for each in self._inside(message):
            match each.number:
                case 1:
                    tensor.dims += self._whole_numbers(each)
                case 2:
                    tensor.data_type = each.value
                case 3:
                    raise FormatError("a tensor is in segments, which no program writes")
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

    # --- the bytes of a tensor

    def _outside(self, name: str, tensor: _TensorFields, n_bytes: int) -> tuple[int, int]:
        """Return the file and position of a tensor outside the model."""
        said = tensor.external
        location = said.get("location", "").removeprefix("./")
        numbers = [said.get("offset", "0"), said.get("length", str(n_bytes))]
        if not location or not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in numbers):
            raise FormatError(f"tensor {name[:80]!r} has no valid location")
        start, length = map(int, numbers)
        self._check(name, n_bytes, length)
        if self._beside is None:
            raise FormatError(
                f"the bytes of tensor {name[:80]!r} are in {location[:80]!r}: open the model with that file beside it"
            )
        if location not in self._numbers:
            self._numbers[location] = len(self._table.sources)
            self._table.sources.append(self._beside(location))
        return self._numbers[location], start

    def _typed(self, name: str, tensor: _TensorFields, dtype: str, n_bytes: int) -> tuple[int, int] | None:
        """Return the source and position of elements in a typed field; None if there are too many to hold in memory."""
        if not tensor.typed or len({each.number for each in tensor.typed}) > 1:
            raise FormatError(f"tensor {name[:80]!r} has no data, or some of two kinds")
        number, first = tensor.typed[0].number, tensor.typed[0]
        if number in _WIDTHS and len(tensor.typed) == 1 and first.wire_type == BYTES:
            self._check(name, n_bytes, first.value)
            return 0, first.start
        n_held = sum(each.value if each.wire_type == BYTES else 8 for each in tensor.typed)
        held = 0 if self._held is None else self._table.sources[self._held].size
        if max(n_held, n_bytes) > _MAX_DATA_BYTES or held + n_bytes > _MAX_HELD_BYTES:
            return None
        data = b"".join(map(self._numbers_of, tensor.typed))
        if number not in _WIDTHS:
            values = np.frombuffer(data, np.uint64)
            # The bits of a small float, and whole numbers of any width, are the low bytes of the varint.
            width = item_bytes(dtype)
            data = values.astype(f"u{width}").tobytes()
        self._check(name, n_bytes, len(data))
        if self._held is None:
            self._held = len(self._table.sources)
            self._table.sources.append(MemorySource(self._source.name))
        source = self._table.sources[self._held]
        assert isinstance(source, MemorySource)
        return self._held, source.add(data)

    def _numbers_of(self, each: _Field) -> bytes:
        if each.number in _WIDTHS:
            n_bytes = each.value if each.wire_type == BYTES else _WIDTHS[each.number]
            return bytes(self._source.read(each.start, n_bytes))
        if each.wire_type == VARINT:
            return each.value.to_bytes(8, "little")
        return read_varints(self._source.read(each.start, each.value)).tobytes()

    def _check(self, name: str, wanted: int, n_bytes: int) -> None:
        if wanted != n_bytes:
            raise FormatError(f"tensor {name[:80]!r} has {n_bytes} bytes, and its shape and dtype want {wanted}")

    # --- fields

    def _inside(self, message: _Field) -> Iterator[_Field]:
        if message.wire_type != BYTES:
            raise FormatError("a message has the wire type of a number")
        return self._fields(message.start, message.start + message.value)

    def _fields(self, start: int, stop: int) -> Iterator[_Field]:
        at = start
        while at < stop:
            self._n_fields += 1
            if self._n_fields > _MAX_LISTED_FIELDS:
                raise FormatError(f"it has more than {_MAX_LISTED_FIELDS} fields")
            offset = at - self._window_at
            if not 0 <= offset <= len(self._window) - _FIELD_BYTES:
                n_bytes = min(_READ_BYTES, self._source.size - at)
                self._window, self._window_at, offset = self._source.read(at, n_bytes), at, 0
            number, wire_type, value, end = read_field(self._window, offset)
            at = self._window_at + end
            found = _Field(number, wire_type, value, at)
            if wire_type == BYTES:
                at += value
            elif wire_type != VARINT:
                width = 8 if wire_type == FIXED64 else 4
                found = found._replace(start=at - width)
            if at > stop:
                raise FormatError("a field exceeds its message")
            yield found

    def _text(self, each: _Field) -> str:
        if each.wire_type != BYTES or each.value > _MAX_TEXT_BYTES:
            raise FormatError(f"a text of {each.value} bytes")
        return bytes(self._source.read(each.start, each.value)).decode("utf-8")

    def _whole_numbers(self, each: _Field) -> list[int]:
        if each.wire_type == VARINT:
            return [each.value]
        if each.value > _MAX_TEXT_BYTES:
            raise FormatError("a tensor of too many dimensions")
        values: list[int] = read_varints(self._source.read(each.start, each.value)).tolist()
        return values
