"""GGUF files, the format of llama.cpp: a header that names every tensor, then the tensors one after the other.

Source: ``docs/gguf.md`` of ggml (github.com/ggml-org/ggml), versions 2 and 3, either byte order; the sizes of quantized
blocks are those of ``ggml-common.h`` there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Part, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import MAX_PEEK_BYTES, Tape
from tensorcas_mlflow.errors import FormatError

_MAGIC = b"GGUF"
_STEP_BYTES = 1 << 20
_FIRST_PEEK_BYTES = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_DIMENSIONS = 8  # ggml itself reads 4
_MAX_NESTING = 4
_MAX_VALUES = 1 << 16
"""Pairs of a key and a value, and arrays in arrays. A model has some dozens; a vocabulary is one array of texts."""
_MAX_ALIGNMENT = 1 << 16

# ggml_type -> dtype (None for what numpy has no word for), size of a block, and how many elements are in it.
_TYPES: dict[int, tuple[str | None, int, int]] = {
    0: ("float32", 4, 1),
    1: ("float16", 2, 1),
    2: (None, 18, 32),  # Q4_0
    3: (None, 20, 32),  # Q4_1
    6: (None, 22, 32),  # Q5_0
    7: (None, 24, 32),  # Q5_1
    8: (None, 34, 32),  # Q8_0
    10: (None, 84, 256),  # Q2_K
    11: (None, 110, 256),  # Q3_K
    12: (None, 144, 256),  # Q4_K
    13: (None, 176, 256),  # Q5_K
    14: (None, 210, 256),  # Q6_K
    15: (None, 292, 256),  # Q8_K
    16: (None, 66, 256),  # IQ2_XXS
    17: (None, 74, 256),  # IQ2_XS
    18: (None, 98, 256),  # IQ3_XXS
    19: (None, 50, 256),  # IQ1_S
    20: (None, 18, 32),  # IQ4_NL
    21: (None, 110, 256),  # IQ3_S
    22: (None, 82, 256),  # IQ2_S
    23: (None, 136, 256),  # IQ4_XS
    24: ("int8", 1, 1),
    25: ("int16", 2, 1),
    26: ("int32", 4, 1),
    27: ("int64", 8, 1),
    28: ("float64", 8, 1),
    29: (None, 56, 256),  # IQ1_M
    30: ("bfloat16", 2, 1),
    34: (None, 54, 256),  # TQ1_0
    35: (None, 66, 256),  # TQ2_0
    39: (None, 17, 32),  # MXFP4
    40: (None, 36, 64),  # NVFP4
    41: (None, 18, 128),  # Q1_0
}

# gguf_metadata_value_type -> size of one; strings and arrays say theirs themselves.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9


class _Info(NamedTuple):
    offset: int
    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    n_bytes: int | None
    """None for a type that this module does not know."""


def is_gguf(head: memoryview) -> bool:
    """Tell whether a file begins as a GGUF file of version 2 or 3 does, in either byte order."""
    return bytes(head[:4]) == _MAGIC and bytes(head[4:8]) in (b"\2\0\0\0", b"\3\0\0\0", b"\0\0\0\3")


def split_gguf(tape: Tape) -> Iterator[Part]:
    """Announce the parts of a GGUF file: its header, and its tensors in the order of their offsets."""
    start = tape.position
    order = ">" if tape.peek(8)[7] else "<"
    header = _Header(tape, order)
    n_tensors, n_pairs = header.take("QQ", at=8)
    if n_tensors > _MAX_TENSORS:
        raise FormatError(f"a GGUF file with {n_tensors} tensors")
    header.expect(n_pairs)
    for _ in range(n_pairs):
        header.take_pair()
        if header.at >= _STEP_BYTES:
            yield header.so_far()
    infos: list[_Info] = []
    for _ in range(n_tensors):
        infos.append(header.take_info())
        if header.at >= _STEP_BYTES:
            yield header.so_far()
    if header.at:
        yield header.so_far()
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
        if n_bytes >= MIN_TENSOR_BYTES:
            yield Tensor(n_bytes=n_bytes, name=info.name, dtype=info.dtype, shape=info.shape)
        elif n_bytes:
            yield Skeleton(n_bytes=n_bytes)
    n_bytes = tape.position - start
    padding = tape.peek(_aligned(n_bytes, header.alignment) - n_bytes)
    if padding:
        yield Skeleton(n_bytes=len(padding))


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class _Header:
    """Reads what stands before the tensors; it goes on while bytes come, whatever counts and lengths say."""

    def __init__(self, tape: Tape, order: str) -> None:
        self.at = 0
        """How far the header has been read, counted from where the tape stands."""
        self.alignment = 32
        self._n_values_left = _MAX_VALUES
        self._tape = tape
        self._order = order
        self._long = struct.Struct(f"{order}Q")
        self._short = struct.Struct(f"{order}I")
        self._window = memoryview(b"")

    def so_far(self) -> Skeleton:
        """Announce what has been read since the last time."""
        n_bytes, self.at, self._window = self.at, 0, memoryview(b"")
        return Skeleton(n_bytes=n_bytes)

    def expect(self, n_values: int) -> None:
        """Say that so many pairs or inner arrays are to be read, each of which takes a while.

        Raises:
            FormatError: No model has that many.
        """
        self._n_values_left -= n_values
        if self._n_values_left < 0:
            raise FormatError(f"a GGUF file with more than {_MAX_VALUES} values")

    def take(self, layout: str, *, at: int | None = None) -> tuple[int, ...]:
        """Read some numbers, from where it stands or from a place further on."""
        layout = self._order + layout
        start = self.at if at is None else at
        self.at = start + struct.calcsize(layout)
        self._need(self.at)
        return struct.unpack_from(layout, self._window, start)

    def take_pair(self) -> None:
        """Read one key and skip its value; the key of the alignment is the only one that matters here."""
        key = self._take_string()
        kind = self._take_short()
        if key == b"general.alignment" and kind == _UINT32:
            self.alignment = self._take_short()
            if not 0 < self.alignment <= _MAX_ALIGNMENT:
                raise FormatError(f"tensors cannot be aligned to {self.alignment} bytes")
        else:
            self._skip(kind, 1, depth=0)

    def take_info(self) -> _Info:
        """Read what the header says of one tensor."""
        name = self._take_string().decode("utf-8", "replace")
        n_dimensions = self._take_short()
        if n_dimensions > _MAX_DIMENSIONS:
            raise FormatError(f"tensor {name[:80]!r} has {n_dimensions} dimensions")
        *sides, kind, offset = self.take(f"{n_dimensions}QIQ")
        dtype, block_bytes, block_elements = _TYPES.get(kind, (None, 0, 0))
        if not block_bytes:
            return _Info(offset, name, None, None, None)
        n_elements = math.prod(sides)
        # A block never crosses rows; the first dimension is the one whose neighbours lie side by side.
        if block_elements > 1 and (not sides or sides[0] % block_elements):
            raise FormatError(f"the rows of tensor {name[:80]!r} are no whole blocks")
        if dtype is not None and self._order == ">" and block_bytes > 1:
            dtype = None if dtype == "bfloat16" else ">" + dtype
        shape = tuple(reversed(sides)) if dtype is not None else None
        return _Info(offset, name, dtype, shape, n_elements // block_elements * block_bytes)

    def _skip(self, kind: int, count: int, *, depth: int) -> None:
        """Skip so many values of one type."""
        if kind in _VALUE_BYTES:
            self.at += count * _VALUE_BYTES[kind]
            self._need(self.at)
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
        """Skip so many strings; a vocabulary has hundreds of thousands."""
        window, length_at = self._window, self._long.unpack_from
        for _ in range(count):
            at = self.at + 8
            if at > len(window):
                self._need(at)
                window = self._window
            self.at = at + int(length_at(window, at - 8)[0])
        self._need(self.at)

    def _take_short(self) -> int:
        at = self.at
        self._need(at + 4)
        self.at = at + 4
        return int(self._short.unpack_from(self._window, at)[0])

    def _take_string(self) -> bytes:
        at = self.at + 8
        self._need(at)
        self.at = at + int(self._long.unpack_from(self._window, at - 8)[0])
        self._need(self.at)
        return bytes(self._window[at : self.at])

    def _need(self, n_bytes: int) -> None:
        """Have so many bytes of the header in the window."""
        if n_bytes > len(self._window):
            ahead = min(max(_FIRST_PEEK_BYTES, 2 * len(self._window)), MAX_PEEK_BYTES)
            self._window = self._tape.peek(max(n_bytes, ahead))
            if n_bytes > len(self._window):
                raise FormatError("the file ends in its header")
