"""Files of bhckpt 0.1 (``.bckpt``): a table in JSON, and the blocks of bytes that it names.

Source: the package's writer. ``BCK1``; the size of a first object in 4 bytes, and the object: the architecture, and the
numbers of tensors and bytes; the size of the table in 4 bytes, and the table: an array of objects with a tensor's name,
shape, dtype, codec, size and position; the blocks, without gaps.

The package's own reader and writer check nothing. This module refuses a table that the writer would not write.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import (
    JSON_SPACE,
    HeaderEntry,
    check_shape,
    dtype_by_word,
    item_bytes,
    json_entries,
    parts_of_entries,
    sorted_entries,
    strict_json,
    whole_number,
)
from tensorcas_mlflow.file_formats._listing import Listing, listing_of_entries
from tensorcas_mlflow.file_formats._source import ByteSource, SourceStream
from tensorcas_mlflow.file_formats._tape import FilePart, Tape

_MAX_HEADER_BYTES = 64 << 20
_MAGIC = b"BCK1"
_LENGTH = struct.Struct("<I")
_MAX_ARCH_BYTES = 1 << 20
_MAX_TENSORS = 1 << 20
_BLOCK_BYTES = 4096

_PLAIN_CODECS = frozenset({"", "none", "raw", "fp16"})
"""``fp16`` is the writer's default, whatever the dtype."""

_ENTRY = re.compile(JSON_SPACE + rb"(\{[^{}]{0,4096}+\})")


def is_bhckpt(head: memoryview) -> bool:
    """Recognise a bhckpt file by its magic number."""
    return bytes(head[:4]) == _MAGIC


def split_bhckpt(tape: Tape) -> Iterator[FilePart]:
    """Announce the header, then the tensors in the order of their positions; raises as `_read_header`."""
    n_bytes, _, entries = _read_header(tape)
    yield from parts_of_entries(n_bytes, entries)


def list_bhckpt(source: ByteSource) -> Listing:
    """List a file of bhckpt; the architecture is the metadata's ``arch``.

    Its library refuses nothing. This function refuses holes, shared bytes, bytes behind the last tensor, sizes that do
    not fit shape and dtype, repeated names, and a first object that counts other tensors than the table. A tensor with
    a codec is left out.

    Raises:
        FormatError: The file is malformed. A `struct.error` says the same.
    """
    n_bytes, arch, entries = _read_header(Tape(SourceStream(source), block_bytes=_BLOCK_BYTES))
    return listing_of_entries("bhckpt", source, entries, n_bytes, {"arch": arch})


def _read_header(tape: Tape) -> tuple[int, Any, list[HeaderEntry]]:
    """Read the bytes before the blocks, without taking them.

    Returns:
        The size of the header; the architecture, any JSON value; and the tensors in the order of their positions.

    Raises:
        FormatError: The header is malformed or too long. A `struct.error` says the same.
    """
    (n_arch_bytes,) = _LENGTH.unpack_from(tape.peek(8), 4)
    if n_arch_bytes > _MAX_ARCH_BYTES:
        raise FormatError(f"an architecture of {n_arch_bytes} bytes")
    table = 8 + n_arch_bytes + 4
    (n_table_bytes,) = _LENGTH.unpack_from(tape.peek(table), table - 4)
    n_bytes = table + n_table_bytes
    if n_bytes > _MAX_HEADER_BYTES:
        raise FormatError(f"a table of {n_table_bytes} bytes")
    header = tape.peek(n_bytes)
    if len(header) < n_bytes:
        raise FormatError("it ends in its header")
    first = strict_json(header[8 : table - 4])
    entries: list[HeaderEntry] = []
    for match in json_entries(header[table:], _ENTRY, b"[]"):
        entries.append(_entry(strict_json(match[1])))
        if len(entries) > _MAX_TENSORS:
            raise FormatError(f"a table of more than {_MAX_TENSORS} tensors")
    ordered = sorted_entries(entries)
    end = ordered[-1].end if ordered else 0
    if type(first) is not dict or (first.get("n_tensors"), first.get("total_bytes")) != (len(ordered), end):
        raise FormatError(f"its header counts other tensors than the table, which has {len(ordered)} of {end} bytes")
    return n_bytes, first.get("arch"), ordered


def _entry(fields: dict[str, Any]) -> HeaderEntry:
    name, kind, codec, shape = fields.get("name"), fields.get("dtype"), fields.get("codec"), fields.get("shape")
    if not all(type(text) is str for text in (name, kind, codec)) or type(shape) is not list:
        raise FormatError(f"its table gives tensor {str(name)[:80]!r} no dtype, codec or shape")
    begin, n_bytes = whole_number(fields.get("off")), whole_number(fields.get("size"))
    if whole_number(fields.get("nbytes")) != n_bytes:
        raise FormatError(f"its table gives tensor {str(name)[:80]!r} two sizes")
    sides = tuple(map(whole_number, shape))
    dtype = dtype_by_word(str(kind))
    if codec not in _PLAIN_CODECS and codec != kind:
        return HeaderEntry(str(name), f"{kind}, codec {codec}", None, sides, begin, begin + n_bytes)
    if dtype is not None:
        check_shape(str(name), sides, item_bytes(dtype), n_bytes)
    return HeaderEntry(str(name), str(kind), dtype, sides, begin, begin + n_bytes)
