"""ONNX models: a protobuf message in which the tensors' bytes lie as they are, found by walking its fields forward.

Source: ``onnx-ml.proto`` of ONNX (github.com/onnx/onnx), IR versions 3 to 14, and protobuf's wire format
(protobuf.dev/programming-guides/encoding). A field is a varint of its number and wire type, and its value.

Only messages that may hold tensors are walked. Their fields mostly come in the order of their numbers; a tensor's name
then stands before ``raw_data``, and behind ``float_data``, which is looked over to find it.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Part, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError

_WINDOW_BYTES = 1 << 20
_FIELD_BYTES = 20
"""A field's number and wire type, and a number or a length: two varints."""
_MAX_LOOK_OVER_BYTES = 8 << 20
"""How large a payload is looked over to find the name behind it."""
_BEHIND_BYTES = 4096
_MAX_DEPTH = 64
_MAX_DIMENSIONS = 64
_MIN_MESSAGE_BYTES = 2 * MIN_TENSOR_BYTES
"""A shorter message is not walked: a tensor in it would be small, and most nodes are short."""
_MAX_FIELDS = 100_000
_MIN_FIELD_BYTES = 8
"""Beyond the first so many fields, a file with shorter ones on average is not worth walking."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# The messages that may hold tensors: field number -> what lies there.
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
# A tensor in a node has no name of its own as a rule; the node's first output is what users call it.
_NAMES = {"node": 2, "tensor": 8}
# Of these fields a message has one, perhaps many thousand times over, and nothing to walk behind it.
_ONLY_DATA = {"attribute": frozenset((2, 3, 4, 7, 8, 9)), "tensor": frozenset((4, 5, 6, 7, 9, 10, 11))}
_DIMS, _DATA_TYPE = 1, 2
_FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA = 4, 9, 10
"""The fields of a tensor whose elements have a fixed width; the others are varints and strings."""

# TensorProto.DataType -> dtype. Elements smaller than a byte are packed, for which numpy has no word.
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

# ModelProto: field number -> wire type. Only files with these fields and no others are taken for ONNX.
_MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_GRAPH_FIELDS = (1, 2, 5, 10, 11, 12, 13, 14, 15, 16)
_TEXTS = (2, 3, 4, 6)
_GRAPH = 7
_MAX_IR_VERSION = 127


def is_onnx(head: memoryview) -> bool:
    """Tell whether a file begins as an ONNX model does, which has no magic number.

    It begins with its IR version, as serializers write it. What follows up to the graph must be fields of a model, of
    their wire types, texts must be texts, and the graph must begin with a field of a graph.
    """
    if len(head) < 2 or head[0] != 1 << 3 or not 0 < head[1] <= _MAX_IR_VERSION:
        return False
    at = 2
    try:
        while True:
            number, wire_type, value, at = onnx_field(head, at)
            if _MODEL_FIELDS.get(number) != wire_type:
                return False
            if number == _GRAPH:
                first, wire_type, _, _ = onnx_field(head, at)
                return first in _GRAPH_FIELDS and wire_type == _BYTES
            if number in _TEXTS:
                bytes(head[at : at + value]).decode()
            at += value if wire_type == _BYTES else 0
    except (FormatError, IndexError, UnicodeDecodeError):
        return False


def split_onnx(tape: Tape) -> Iterator[Part]:
    """Announce the parts of an ONNX model: its tensors' bytes, and the messages around them."""
    return _Walk(tape).parts()


@dataclass(slots=True)
class _Message:
    """A message around the field that the walk has come to, and what its fields have said so far."""

    kind: str
    end: int
    """One past its last byte, as a position of the tape."""
    name: str = ""
    """Its own, or else that of the node around it."""
    is_named: bool = False
    data_type: int = 0
    dims: list[int] = field(default_factory=list)

    def note(self, number: int, value: int) -> None:
        """Remember a number, if it is one that matters."""
        if self.kind == "tensor":
            if number == _DIMS:
                self.dims.append(value)
                if len(self.dims) > _MAX_DIMENSIONS:
                    raise FormatError(f"a tensor of more than {_MAX_DIMENSIONS} dimensions")
            elif number == _DATA_TYPE:
                self.data_type = value

    def note_bytes(self, number: int, value: memoryview) -> None:
        """Remember a name, or dimensions that are packed."""
        if number == _NAMES.get(self.kind):
            if self.kind == "tensor" or not self.name:
                self.name = bytes(value).decode("utf-8", "replace")
                self.is_named = True
        elif number == _DIMS and self.kind == "tensor":
            at = 0
            while at < len(value):
                side, at = _varint(value, at)
                self.note(_DIMS, side)

    def spec(self, number: int, n_bytes: int) -> tuple[str | None, tuple[int, ...] | None]:
        """Give the dtype and shape of a tensor whose elements are in this field, as far as they agree with its size."""
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


class _Walk:
    """Goes through the fields of a model, into the messages that may hold tensors and past all others."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._messages = [_Message("model", sys.maxsize)]
        self._n_fields = 0
        self._window = memoryview(b"")
        self._start = tape.position
        """Where the window begins."""
        self._at = 0
        """Where the next field begins in the window, or beyond it."""
        self._told = 0
        """Up to where in the window, or beyond it, parts have been announced."""

    def parts(self) -> Iterator[Part]:
        while True:
            if self._at + _FIELD_BYTES > len(self._window):
                yield from self._skeleton()
                self._start, self._at, self._told = self._tape.position, 0, 0
                self._window = self._tape.peek(_WINDOW_BYTES)
                if not self._window:
                    return
            message = self._innermost()
            number, wire_type, value, self._at = onnx_field(self._window, self._at)
            if wire_type != _BYTES:
                message.note(number, value)
            else:
                end = self._start + self._at + value
                if end > message.end:
                    raise FormatError("a field goes beyond the message that it is part of")
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
        """Leave the messages that have come to their end, and return the one around the next field."""
        position = self._start + self._at
        while position >= self._messages[-1].end:
            if position > self._messages.pop().end:
                raise FormatError("a field goes beyond the message that it is part of")
        self._n_fields += 1
        if self._n_fields > _MAX_FIELDS + position // _MIN_FIELD_BYTES:
            raise FormatError(f"{self._n_fields} fields in {position} bytes are more than a model has")
        return self._messages[-1]

    def _skeleton(self) -> Iterator[Part]:
        """Announce what lies between the last part and the next field."""
        if self._at > self._told:
            n_bytes, self._told = self._at - self._told, self._at
            yield Skeleton(n_bytes=n_bytes)

    def _ahead(self, n_bytes: int) -> memoryview:
        """Look at so many bytes from where the walk stands, which may lie across the window's end."""
        if self._at + n_bytes <= len(self._window):
            return self._window[self._at : self._at + n_bytes]
        return self._tape.peek(self._at - self._told + n_bytes)[self._at - self._told :]

    def _elements(self, message: _Message, number: int, n_bytes: int) -> Iterator[Part]:
        """Announce a tensor whose elements begin where the walk stands."""
        if n_bytes < MIN_TENSOR_BYTES:
            return
        yield from self._skeleton()
        if not message.is_named and n_bytes <= _MAX_LOOK_OVER_BYTES:
            self._look_over(message, n_bytes)
        dtype, shape = message.spec(number, n_bytes)
        yield Tensor(n_bytes=n_bytes, name=message.name, dtype=dtype, shape=shape)
        self._told = self._at + n_bytes

    def _look_over(self, message: _Message, n_bytes: int) -> None:
        """Note what stands behind a tensor's elements, which begin where the tape stands."""
        ahead = self._tape.peek(min(n_bytes + _BEHIND_BYTES, message.end - self._tape.position))
        at = n_bytes
        with contextlib.suppress(FormatError, IndexError):
            while at < len(ahead):
                number, wire_type, value, at = onnx_field(ahead, at)
                if wire_type == _BYTES:
                    message.note_bytes(number, ahead[at : at + value])
                    at += value
                else:
                    message.note(number, value)


def onnx_field(view: memoryview, at: int) -> tuple[int, int, int, int]:
    """Read what a field begins with.

    Returns:
        Its number, its wire type, its value if that is a varint or its length if it is bytes (0 for others), and the
        place behind what has been read, which for bytes is their first.

    Raises:
        FormatError: No field begins so.
        IndexError: The end comes first.
    """
    tag = view[at]
    at += 1
    if tag > 127:
        tag, at = _varint(view, at - 1)
    wire_type = tag & 7
    value = 0
    if wire_type in (_VARINT, _BYTES):
        value = view[at]
        at += 1
        if value > 127:
            value, at = _varint(view, at - 1)
    elif wire_type == _FIXED32:
        at += 4
    elif wire_type == _FIXED64:
        at += 8
    else:
        raise FormatError(f"no field of a model is of wire type {wire_type}")
    if tag < 8:
        raise FormatError("no field has the number 0")
    return tag >> 3, wire_type, value, at


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """Read a varint, and return it with the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise FormatError("a varint of more than 10 bytes")
