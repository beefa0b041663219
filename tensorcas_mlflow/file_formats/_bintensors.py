"""Bintensors files (``.bt``): safetensors' layout with a binary header.

The format is that of https://github.com/GnosisFoundation/bintensors, version 0.2: the size of the header in 8 bytes,
the header, the tensors without holes. The header is in bincode 2's standard configuration
(https://github.com/bincode-org/bincode/blob/trunk/docs/spec.md: little-endian integers of variable size): metadata, an
``Option<BTreeMap<String, String>>``, and a ``Vec`` of name, dtype, shape and position. Up to 7 spaces pad it to a
multiple of 8.

A written file has the bytes of the library (0.2). The library itself is not used: it lets any bytes follow the decoded
header (this module lets only padding follow), copies all tensors into memory, and writes headers that it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, Spec
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import (
    HeaderEntry,
    check_shape,
    item_bytes,
    parts_of_entries,
    sorted_entries,
)
from tensorcas_mlflow.file_formats._layout import (
    FileLayout,
    FlatLayout,
    check_dtypes,
    check_header,
    pad,
    starts_of,
    texts_of,
)
from tensorcas_mlflow.file_formats._listing import Listing, listing_of_entries
from tensorcas_mlflow.file_formats._source import ByteSource
from tensorcas_mlflow.file_formats._tape import FilePart, Tape

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_MAX_TENSORS = 1 << 20

_DTYPES = (
    *("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "int16", "uint16", "float16"),
    *("bfloat16", "int32", "uint32", "float32", "float64", "int64", "uint64"),
)
"""The dtypes, by their number in the file."""
_CODES = {name: code for code, name in enumerate(_DTYPES)}
_ITEM_BYTES = tuple(map(item_bytes, _DTYPES))

# First byte of a longer number -> the number of bytes that follow.
_WIDTHS = {251: 2, 252: 4, 253: 8}
_LEAST = {2: 251, 4: 1 << 16, 8: 1 << 32}


def is_bintensors(head: memoryview) -> bool:
    """Recognise a bintensors file by the beginning of a valid header: the format has no magic number."""
    n_bytes = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if n_bytes > _MAX_HEADER_BYTES or n_bytes % 8 or n_bytes < 8 or len(head) < _LENGTH_BYTES + 2:
        return False
    reader = _HeaderReader(bytes(head[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes]))
    try:
        reader.metadata()
        if reader.number() == 0:
            reader.end()
        else:
            reader.tensor()
    except IndexError:
        # The header continues behind these bytes. Names of metadata were valid texts so far.
        return reader.at > 2 and n_bytes > len(head) - _LENGTH_BYTES
    except (FormatError, ValueError):
        return False
    return True


def split_bintensors(tape: Tape) -> Iterator[FilePart]:
    """Announce the header, then the tensors in the order of their positions; raises as `_read_header`."""
    header = tape.peek_length_prefixed()
    _, entries = _read_header(header)
    yield from parts_of_entries(_LENGTH_BYTES + len(header), entries)


def list_bintensors(source: ByteSource) -> Listing:
    """List a bintensors file.

    The library refuses, and so does this function, what is refused of safetensors. This function also refuses bytes
    hidden behind the decoded header, numbers in more bytes than they need, and repeated keys of the metadata.

    Raises:
        FormatError: The file is malformed. A `ValueError` and an `IndexError` say the same.
    """
    header = source.read_length_prefixed(_MAX_HEADER_BYTES)
    metadata, entries = _read_header(header)
    return listing_of_entries("bintensors", source, entries, _LENGTH_BYTES + len(header), metadata)


def _read_header(header: memoryview) -> tuple[dict[str, str], list[HeaderEntry]]:
    """Return the metadata, and the tensors in the order of their positions.

    Raises:
        FormatError: The header is malformed. A `ValueError` and an `IndexError` say the same.
    """
    reader = _HeaderReader(bytes(header))
    metadata = reader.metadata()
    n_tensors = reader.number()
    if n_tensors > _MAX_TENSORS:
        raise FormatError(f"a bintensors file of {n_tensors} tensors")
    entries = [reader.tensor() for _ in range(n_tensors)]
    reader.end()
    return metadata, sorted_entries(entries)


class _HeaderReader:
    """Cursor over a header; an `IndexError` says that the header ends too early."""

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data

    def number(self) -> int:
        """Read an unsigned integer of at most 64 bits, in the shortest form."""
        first = self._data[self.at]
        self.at += 1
        if first < 251:
            return first
        width = _WIDTHS.get(first)
        if width is None:
            raise FormatError(f"a number of more than 64 bits at byte {self.at - 1} of the header")
        number = int.from_bytes(self._take(width), "little")
        if number < _LEAST[width]:
            raise FormatError(f"a number in more bytes than it needs at byte {self.at - width - 1} of the header")
        return number

    def text(self) -> str:
        return self._take(self.number()).decode()

    def metadata(self) -> dict[str, str]:
        tag = self.number()
        if tag > 1:
            raise FormatError(f"its metadata is incomplete: the tag is {tag}, not 0 or 1")
        found: dict[str, str] = {}
        for _ in range(self.number() if tag else 0):
            key = self.text()
            if key in found:
                raise FormatError(f"its metadata has the key {key[:80]!r} twice")
            found[key] = self.text()
        return found

    def tensor(self) -> HeaderEntry:
        name = self.text()
        code = self.number()
        if code >= len(_DTYPES):
            raise FormatError(f"tensor {name[:80]!r} has a dtype that does not exist: {code}")
        n_dimensions = self.number()
        if n_dimensions > MAX_DIMENSIONS:
            raise FormatError(f"tensor {name[:80]!r} has {n_dimensions} dimensions")
        shape = tuple([self.number() for _ in range(n_dimensions)])
        begin, end = self.number(), self.number()
        check_shape(name, shape, _ITEM_BYTES[code], end - begin)
        return HeaderEntry(name, _DTYPES[code], _DTYPES[code], shape, begin, end)

    def end(self) -> None:
        """Check that only padding follows."""
        if self._data[self.at :].strip(b" ") or len(self._data) - self.at > 7:
            raise FormatError(f"its header goes on after the tensors, at byte {self.at}")

    def _take(self, n_bytes: int) -> bytes:
        taken = self._data[self.at : self.at + n_bytes]
        if len(taken) < n_bytes:
            raise IndexError("the header ends too early")
        self.at += n_bytes
        return taken


def lay_out_bintensors(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay out one file.

    Raises:
        ValueError: The format has no such dtype, or the header gets too long.
    """
    check_dtypes(specs, _CODES, "bintensors")
    ordered = sorted(specs, key=lambda spec: (-_CODES[spec.dtype or ""], spec.name))
    texts = texts_of(metadata)
    header = bytearray([1 if texts else 0])
    if texts:
        header += _write_number(len(texts))
        for name, text in texts.items():
            header += _write_text(name) + _write_text(text)
    header += _write_number(len(ordered))
    for spec, start in zip(ordered, starts_of(ordered), strict=True):
        header += _write_text(spec.name) + bytes([_CODES[spec.dtype or ""]])
        for number in (len(spec.shape), *spec.shape, start, start + spec.n_bytes):
            header += _write_number(number)
    padded = pad(bytes(header), 8)
    check_header(padded, "bintensors")
    return [FlatLayout("", head=len(padded).to_bytes(8, "little") + padded, specs=ordered)]


def _write_number(number: int) -> bytes:
    """Encode a whole number from 0 on: in one byte, or in 2, 4 or 8 behind a byte that gives the width."""
    if number <= 250:
        return bytes([number])
    for mark, n_bytes in ((251, 2), (252, 4)):
        if number < 1 << (8 * n_bytes):
            return bytes([mark]) + number.to_bytes(n_bytes, "little")
    return b"\xfd" + number.to_bytes(8, "little")


def _write_text(text: str) -> bytes:
    data = text.encode()
    return _write_number(len(data)) + data
