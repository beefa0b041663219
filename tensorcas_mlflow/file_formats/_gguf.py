"""GGUF files, the format of llama.cpp: a header that names every tensor, then the tensors one after the other.

Source: ``docs/gguf.md`` of ggml (github.com/ggml-org/ggml), versions 2 and 3, either byte order; ``ggml-common.h``
there has the sizes of quantized blocks.

The library ``gguf`` is not used: it maps a file of this machine, and checks neither sizes nor positions.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import tensor_or_skeleton
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource, SourceStream
from tensorcas_mlflow.file_formats._tape import MAX_PEEK_BYTES, FilePart, Skeleton, Tape

_BLOCK_BYTES = 64 << 10
_MAGIC = b"GGUF"
_STEP_BYTES = 1 << 20
_FIRST_PEEK_BYTES = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 8
_MAX_LISTED_DIMENSIONS = 4
"""The largest number that ggml itself reads."""
_MAX_NAME_BYTES = 64
_MAX_NESTING = 4
_MAX_VALUES = 1 << 16
"""Largest number of key-value pairs and inner arrays. A model has some dozens; a vocabulary is one array of texts."""
_MAX_ALIGNMENT = 1 << 16
_MAX_KEPT_BYTES = 1 << 20
"""Metadata behind this many bytes is dropped. A chat template has some 10 KiB."""

# ggml_type -> name, dtype (None for a type without a numpy dtype), size of a block in bytes and in elements.
_TYPES: dict[int, tuple[str, str | None, int, int]] = {
    0: ("F32", "float32", 4, 1),
    1: ("F16", "float16", 2, 1),
    2: ("Q4_0", None, 18, 32),
    3: ("Q4_1", None, 20, 32),
    6: ("Q5_0", None, 22, 32),
    7: ("Q5_1", None, 24, 32),
    8: ("Q8_0", None, 34, 32),
    10: ("Q2_K", None, 84, 256),
    11: ("Q3_K", None, 110, 256),
    12: ("Q4_K", None, 144, 256),
    13: ("Q5_K", None, 176, 256),
    14: ("Q6_K", None, 210, 256),
    15: ("Q8_K", None, 292, 256),
    16: ("IQ2_XXS", None, 66, 256),
    17: ("IQ2_XS", None, 74, 256),
    18: ("IQ3_XXS", None, 98, 256),
    19: ("IQ1_S", None, 50, 256),
    20: ("IQ4_NL", None, 18, 32),
    21: ("IQ3_S", None, 110, 256),
    22: ("IQ2_S", None, 82, 256),
    23: ("IQ4_XS", None, 136, 256),
    24: ("I8", "int8", 1, 1),
    25: ("I16", "int16", 2, 1),
    26: ("I32", "int32", 4, 1),
    27: ("I64", "int64", 8, 1),
    28: ("F64", "float64", 8, 1),
    29: ("IQ1_M", None, 56, 256),
    30: ("BF16", "bfloat16", 2, 1),
    34: ("TQ1_0", None, 54, 256),
    35: ("TQ2_0", None, 66, 256),
    39: ("MXFP4", None, 17, 32),
    40: ("NVFP4", None, 36, 64),
    41: ("Q1_0", None, 18, 128),
}

# gguf_metadata_value_type -> size of one value; strings and arrays carry their own size.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufTensor(NamedTuple):
    """A header's entry for one tensor."""

    offset: int
    """First byte, counted from the beginning of the tensors."""
    name: str
    """Name, with surrogates for bytes that are not UTF-8."""
    kind: str
    """ggml's name of the type."""
    dtype: str | None
    shape: tuple[int, ...] | None
    n_bytes: int | None
    """None for a type that this module does not know."""
    n_dimensions: int


def is_gguf(head: memoryview) -> bool:
    """Recognise a GGUF file of version 2 or 3, in either byte order, by its magic number and version."""
    return bytes(head[:4]) == _MAGIC and bytes(head[4:8]) in (b"\2\0\0\0", b"\3\0\0\0", b"\0\0\0\3")


def split_gguf(tape: Tape) -> Iterator[FilePart]:
    """Announce the header, then the tensors in the order of their offsets."""
    start = tape.position
    header = GgufHeader(tape)
    for n_walked in header.walk():
        yield Skeleton(n_bytes=n_walked)
    infos = header.tensors
    data_at = start + _aligned(tape.position - start, header.alignment)
    infos.sort(key=lambda info: (info.offset, info.n_bytes != 0))
    for nth, info in enumerate(infos):
        gap = data_at + info.offset - tape.position
        if gap < 0:
            raise FormatError(f"tensor {info.name!r} begins {-gap} bytes before the end of the one before it")
        if gap:
            yield Skeleton(n_bytes=gap)
        n_bytes = info.n_bytes
        if n_bytes is None and nth + 1 < len(infos):
            n_bytes = infos[nth + 1].offset - info.offset
        if n_bytes is None:
            raise FormatError(f"tensor {info.name!r} is the last one, and of an unknown type")
        yield from tensor_or_skeleton(n_bytes, info.name, info.dtype, info.shape)
    n_all = tape.position - start
    padding = tape.peek(_aligned(n_all, header.alignment) - n_all)
    if padding:
        yield Skeleton(n_bytes=len(padding))


def _aligned(offset: int, alignment: int) -> int:
    """Return the next multiple of an alignment."""
    return -(-offset // alignment) * alignment


class GgufHeader:
    """Reader for the bytes before the tensors. Counts and lengths of the file allocate nothing in advance."""

    def __init__(self, tape: Tape, *, keep: bool = False) -> None:
        """Stand before a file's first byte.

        Args:
            tape: The file; it is only peeked.
            keep: Whether to keep the numbers and texts of the metadata. Arrays are never kept.
        """
        self.alignment = 32
        self.metadata: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        self._at = 0
        """Position of the next field, counted from the tape's position."""
        self._keys: set[bytes] = set()
        self._n_kept_bytes_left = _MAX_KEPT_BYTES if keep else 0
        self._n_values_left = _MAX_VALUES
        self._tape = tape
        self._order = ">" if tape.peek(8)[7] else "<"
        self._long = struct.Struct(f"{self._order}Q")
        self._short = struct.Struct(f"{self._order}I")
        self._window = memoryview(b"")

    def walk(self) -> Iterator[int]:
        """Read the header.

        Yields:
            The number of bytes read; the caller takes them from the tape before it goes on.

        Raises:
            FormatError: The header is malformed.
        """
        n_tensors, n_pairs = self.take("QQ", at=8)
        if n_tensors > _MAX_TENSORS:
            raise FormatError(f"a GGUF file with {n_tensors} tensors")
        self.expect(n_pairs)
        for _ in range(n_pairs):
            self.take_pair()
            if self._at >= _STEP_BYTES:
                yield self._so_far()
        for _ in range(n_tensors):
            self.tensors.append(self.take_info())
            if self._at >= _STEP_BYTES:
                yield self._so_far()
        if self._at:
            yield self._so_far()

    def _so_far(self) -> int:
        n_bytes, self._at, self._window = self._at, 0, memoryview(b"")
        return n_bytes

    def expect(self, n_values: int) -> None:
        """Count pairs or inner arrays before reading them.

        Raises:
            FormatError: There are too many.
        """
        self._n_values_left -= n_values
        if self._n_values_left < 0:
            raise FormatError(f"a GGUF file with more than {_MAX_VALUES} values")

    def take(self, layout: str, *, at: int | None = None) -> tuple[int, ...]:
        """Read numbers from the current position, or from one further on."""
        layout = self._order + layout
        start = self._at if at is None else at
        self._at = start + struct.calcsize(layout)
        self._need(self._at)
        return struct.unpack_from(layout, self._window, start)

    def take_pair(self) -> None:
        """Read one key and its value; only the alignment matters here."""
        key = self._take_string()
        if key in self._keys:
            raise FormatError(f"a GGUF file with the key {key[:80]!r} twice")
        self._keys.add(key)
        kind = self._take_short()
        if key == b"general.alignment" and kind == _UINT32:
            self.alignment = self._take_short()
            if not 0 < self.alignment <= _MAX_ALIGNMENT:
                raise FormatError(f"tensors cannot be aligned to {self.alignment} bytes")
        elif self._n_kept_bytes_left > len(key) and (kind in _SCALARS or kind == _STRING):
            self._keep(key.decode(), kind)
        else:
            self._skip(kind, 1, depth=0)

    def _keep(self, key: str, kind: int) -> None:
        value: Any
        if kind == _STRING:
            text = self._take_string()
            self._n_kept_bytes_left -= len(text)
            if self._n_kept_bytes_left < 0:
                return
            value = text.decode()
        else:
            (value,) = self.take(_SCALARS[kind])
        self._n_kept_bytes_left -= len(key) + 8
        if not isinstance(value, float) or math.isfinite(value):
            self.metadata[key] = value

    def take_info(self) -> GgufTensor:
        """Read the entry of one tensor."""
        name = self._take_string().decode("utf-8", "surrogateescape")
        n_dimensions = self._take_short()
        if n_dimensions > _MAX_DIMENSIONS:
            raise FormatError(f"tensor {name[:80]!r} has {n_dimensions} dimensions")
        *sides, kind, offset = self.take(f"{n_dimensions}QIQ")
        word, dtype, block_bytes, block_elements = _TYPES.get(kind, (f"type {kind}", None, 0, 0))
        if not block_bytes:
            return GgufTensor(offset, name, word, None, None, None, n_dimensions)
        n_elements = math.prod(sides)
        # A block never crosses rows; neighbours in the first dimension are adjacent.
        if block_elements > 1 and (not sides or sides[0] % block_elements):
            raise FormatError(f"the rows of tensor {name[:80]!r} are not whole blocks")
        if dtype is not None and self._order == ">" and block_bytes > 1:
            dtype = None if dtype == "bfloat16" else ">" + dtype
        shape = tuple(reversed(sides)) if dtype is not None else None
        return GgufTensor(offset, name, word, dtype, shape, n_elements // block_elements * block_bytes, n_dimensions)

    def _skip(self, kind: int, count: int, *, depth: int) -> None:
        """Skip values of one type."""
        if kind in _VALUE_BYTES:
            self._at += count * _VALUE_BYTES[kind]
            self._need(self._at)
        elif kind == _STRING:
            self._skip_strings(count)
        elif kind == _ARRAY and depth < _MAX_NESTING:
            self.expect(count)
            for _ in range(count):
                inner, n_values = self.take("IQ")
                self._skip(inner, n_values, depth=depth + 1)
        else:
            raise FormatError(f"no GGUF value is of type {kind}")

    def _skip_strings(self, count: int) -> None:
        """Skip strings; a vocabulary has hundreds of thousands."""
        window, length_at = self._window, self._long.unpack_from
        for _ in range(count):
            at = self._at + 8
            if at > len(window):
                self._need(at)
                window = self._window
            self._at = at + int(length_at(window, at - 8)[0])
        self._need(self._at)

    def _take_short(self) -> int:
        at = self._at
        self._need(at + 4)
        self._at = at + 4
        return int(self._short.unpack_from(self._window, at)[0])

    def _take_string(self) -> bytes:
        at = self._at + 8
        self._need(at)
        self._at = at + int(self._long.unpack_from(self._window, at - 8)[0])
        self._need(self._at)
        return bytes(self._window[at : self._at])

    def _need(self, n_bytes: int) -> None:
        """Extend the window to ``n_bytes`` bytes of the header."""
        if n_bytes > len(self._window):
            ahead = min(max(_FIRST_PEEK_BYTES, 2 * len(self._window)), MAX_PEEK_BYTES)
            self._window = self._tape.peek(max(n_bytes, ahead))
            if n_bytes > len(self._window):
                raise FormatError("the file ends in its header")


def list_gguf(source: ByteSource) -> Listing:
    """List a GGUF file, with the numbers and texts of its metadata.

    The specification and ``gguf.cpp`` refuse, and so does this function: repeated keys and names; names of more than 64
    bytes; more than 4 dimensions; positions that are not multiples of the alignment; and gaps between tensors other
    than padding. Quantized tensors are left out.

    Raises:
        FormatError: The file is malformed. A `ValueError` and a `struct.error` say the same.
    """
    tape = Tape(SourceStream(source), block_bytes=_BLOCK_BYTES)
    header = GgufHeader(tape, keep=True)
    for n_bytes in header.walk():
        tape.take(n_bytes)
    data_at = _aligned(tape.position, header.alignment)
    table = LocationTable(source)
    end: int | None = 0  # of the tensors so far; None if the size of the last one is unknown
    for tensor in sorted(header.tensors, key=lambda tensor: (tensor.offset, tensor.n_bytes != 0)):
        if len(tensor.name.encode("utf-8", "surrogateescape")) > _MAX_NAME_BYTES:
            raise FormatError(f"a tensor's name has more than {_MAX_NAME_BYTES} bytes: {tensor.name[:80]!r}")
        if tensor.n_dimensions > _MAX_LISTED_DIMENSIONS:
            raise FormatError(f"tensor {tensor.name!r} has {tensor.n_dimensions} dimensions")
        if tensor.offset % header.alignment or (end is not None and tensor.offset != _aligned(end, header.alignment)):
            raise FormatError(f"tensor {tensor.name!r} does not begin where the one before it ends")
        end = None if tensor.n_bytes is None else tensor.offset + tensor.n_bytes
        if data_at + (end or tensor.offset) > source.size:
            raise FormatError(f"tensor {tensor.name!r} exceeds the file")
        if tensor.dtype is None or tensor.shape is None or end is None:
            table.leave_out(tensor.name, tensor.kind)
        else:
            table.add(
                tensor.name,
                tensor.dtype.removeprefix(">"),
                tensor.shape,
                start=data_at + tensor.offset,
                n_bytes=end - tensor.offset,
                swapped=tensor.dtype.startswith(">"),
            )
    if end is not None and source.size > data_at + _aligned(end, header.alignment):
        raise FormatError(f"{source.size - data_at - end} bytes follow the last tensor")
    return table.listing("gguf", header.metadata)
