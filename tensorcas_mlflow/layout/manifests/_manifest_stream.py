"""Arrow streams of manifests, written and read without pyarrow, whose import takes longer than reading a checkpoint.

Every manifest has the same columns. So the two messages before its rows are constants around some numbers and the head,
and the constants are those that Arrow's own library writes. A reader compares them, checks every offset before it reads
there, and refuses any other stream.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES
from tensorcas_mlflow.base.tensors import RowCuts, offsets_of
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout.manifests._rows import Columns

_CONTINUATION = b"\xff\xff\xff\xff"
_MESSAGE = struct.Struct("<4sI")
"""What stands before a message: a mark, and its size."""
_END = _CONTINUATION + bytes(4)
_SCHEMA = struct.Struct("<44sI24sI4sI")
"""A schema's message up to its head: constants, and the places of the columns and of the key, and the head's size."""
_HEAD_AT = _MESSAGE.size + _SCHEMA.size
_SCHEMA_BEGIN = (
    bytes.fromhex("1000000000000a000e000600050008000a000000000104001000000000000a000c000000040008000a000000"),
    bytes.fromhex("04000000010000000c00000008000c000400080008000000"),
    bytes.fromhex("04000000"),
)
_KEY = b"\x09\0\0\0tensorcas\0\0\0"
_COLUMNS = bytes.fromhex(
    "05000000680100002c010000c40000006400000004000000bcfeffff0000010c140000001c00000004000000"
    "0100000014000000040000006375747300000000b0feffffe8feffff00000102100000001800000004000000"
    "00000000040000006974656d0000000048ffffff000000014000000018ffffff0000010c140000001c000000"
    "040000000100000014000000060000006368756e6b7300000cffffff44ffffff0000010f100000001c000000"
    "0400000000000000040000006974656d0000060008000400060000002000000074ffffff0000010c14000000"
    "1c00000004000000010000001400000005000000736861706500000068ffffffa0ffffff0000010210000000"
    "200000000400000000000000040000006974656d0000000008000c0008000700080000000000000140000000"
    "d8ffffff0000010510000000180000000400000000000000050000006474797065000000c8ffffff10001400"
    "0800060007000c00000010001000000000000105100000001c0000000400000000000000040000006e616d65"
    "000000000400040004000000"
)
"""The columns ``name``, ``dtype``, ``shape``, ``chunks`` and ``cuts`` (``docs/format.md``, Manifests)."""
_BATCH = struct.Struct("<32sq24sqIi36qIi16q")
"""A batch's message: constants, the size of its body, the rows, the place and size of each buffer, and each column's
and item's number of values and of nulls."""
_BATCH_BEGIN = (
    bytes.fromhex("14000000000000000c0016000600050008000c000c0000000003040018000000"),
    bytes.fromhex("00000a0018000c00040008000a0000003c01000010000000"),
)
_N_BUFFERS, _N_NODES = 18, 8
_BLOCK_BYTES = 1 << 15


def write_stream(said: str, columns: Columns, *, max_bytes: int) -> bytes:
    """Write a stream.

    Args:
        said: The head, as JSON.
        columns: The rows.
        max_bytes: Bound of the stream.

    Raises:
        ValueError: It is too long to be read again.
    """
    n, n_chunks = len(columns), len(columns.digests)
    if n_chunks >= 1 << 31:
        raise ValueError(f"a checkpoint of {n_chunks} chunks is too large: create a store with larger chunks")
    names, cuts = (
        columns.names,
        columns.cuts or RowCuts(np.zeros(n, bool), np.zeros(n + 1, np.int64), np.empty(0, np.int64)),
    )
    has_dtype = np.array([name is not None for name in columns.dtypes], dtype=bool)[columns.dtype]
    dtypes = [(name or "").encode() for name in columns.dtypes]
    dtype_at = offsets_of(np.array([*map(len, dtypes)], dtype=np.int64)[columns.dtype])
    of_rows = b"".join(map(dtypes.__getitem__, columns.dtype.tolist()))
    buffers = (
        *(b"", _bytes(names.at, "<i4"), _bytes(names.data, "u1")),
        *(_bits(has_dtype), _bytes(dtype_at, "<i4"), of_rows),
        *(b"", _bytes(columns.shape_at, "<i4"), b"", _bytes(columns.sides, "<i8")),
        *(b"", _bytes(columns.chunk_at, "<i4"), b"", _bytes(columns.digests, "u1")),
        *(_bits(cuts.given), _bytes(cuts.at, "<i4"), b"", _bytes(cuts.values, "<i8")),
    )
    places: list[int] = []
    body: list[bytes] = []
    n_body = 0
    for buffer in buffers:
        places += n_body, len(buffer)
        body += buffer, bytes(-len(buffer) % 8)
        n_body += len(buffer) + -len(buffer) % 8
    no_dtype, no_cuts = n - np.count_nonzero(has_dtype), n - np.count_nonzero(cuts.given)
    counts = (n, 0, n, no_dtype, n, 0, len(columns.sides), 0, n, 0, n_chunks, 0, n, no_cuts, len(cuts.values), 0)
    head = said.encode()
    text = head.ljust(_padded(len(head)), b"\0")
    one, two, three = _SCHEMA_BEGIN
    schema = _SCHEMA.pack(one, 56 + len(text), two, 12 + len(text), three, len(head)) + text + _KEY + _COLUMNS
    schema += bytes(-len(schema) % 8)
    one, two = _BATCH_BEGIN
    batch = _BATCH.pack(one, n_body, two, n, 0, _N_BUFFERS, *places, 0, _N_NODES, *counts)
    before = [message for each in (schema, batch) for message in (_MESSAGE.pack(_CONTINUATION, len(each)), each)]
    n_bytes = sum(map(len, before)) + n_body + len(_END)
    if n_bytes > max_bytes:
        raise ValueError(f"a manifest of {n_bytes} bytes is too long to be read again")
    return b"".join([*before, *body, _END])


def _bytes(values: Any, dtype: str) -> bytes:
    return np.asarray(values, dtype).tobytes()


def _bits(given: Any) -> bytes:
    return b"" if given.all() else np.packbits(given, bitorder="little").tobytes()


def looks_like_stream(begin: bytes) -> bool:
    """Tell from a file's first 64 KiB whether it may be a manifest; `read_head` and `read_columns` decide."""
    n_head = _head_size(begin)
    return n_head is not None and (_HEAD_AT + n_head >= len(begin) - len(_KEY) or read_head(begin) is not None)


def read_head(stream: bytes) -> bytes | None:
    """Return the head of a stream, as JSON, also of one with the columns of a later release; None if it has none."""
    n_head = _head_size(stream)
    if n_head is None or not stream.startswith(_KEY, _HEAD_AT + _padded(n_head)):
        return None
    return stream[_HEAD_AT : _HEAD_AT + n_head]


def _head_size(stream: bytes) -> int | None:
    if len(stream) < _HEAD_AT or stream[:4] != _CONTINUATION:
        return None
    one, _, two, to_key, three, n_head = _SCHEMA.unpack_from(stream, _MESSAGE.size)
    return n_head if (one, two, three, to_key) == (*_SCHEMA_BEGIN, 12 + _padded(n_head)) else None


def _padded(n_head: int) -> int:
    """Return the size of a head with the zero bytes behind it."""
    return n_head + 4 - n_head % 4


def read_columns(stream: bytes, n_head: int, *, max_rows: int | None = None) -> Columns:
    """Return the rows of a stream.

    Args:
        stream: The bytes.
        n_head: Size of the head.
        max_rows: Maximum number of rows; more are refused before they are read.

    Raises:
        FormatError: The stream has other columns or is damaged, or contradicts itself.
    """
    try:
        return _columns(memoryview(stream), _padded(n_head), max_rows)
    except (struct.error, ValueError, OverflowError) as error:
        raise FormatError(f"not a manifest: {error}") from None


def _columns(stream: memoryview, n_text: int, max_rows: int | None) -> Columns:
    n_schema = _SCHEMA.size + n_text + len(_KEY) + len(_COLUMNS)
    n_schema += -n_schema % 8
    begin, at = _HEAD_AT + n_text + len(_KEY), _MESSAGE.size + n_schema
    _need(_SCHEMA.unpack_from(stream, _MESSAGE.size)[1] == 56 + n_text, "its columns are elsewhere")
    _need(stream[begin : begin + len(_COLUMNS)] == _COLUMNS, "it has other columns")
    sizes = [_MESSAGE.unpack_from(stream, each) for each in (0, at)]
    _need(sizes == [(_CONTINUATION, n_schema), (_CONTINUATION, _BATCH.size)], "it is not one plain record batch")
    one, n_body, two, n, _, n_buffers, *numbers = _BATCH.unpack_from(stream, at + _MESSAGE.size)
    places, n_nodes, counts = numbers[: 2 * _N_BUFFERS], numbers[2 * _N_BUFFERS + 1], numbers[2 * _N_BUFFERS + 2 :]
    _need((one, two, n_buffers, n_nodes) == (*_BATCH_BEGIN, _N_BUFFERS, _N_NODES), "its rows are laid out otherwise")
    body = stream[at + _MESSAGE.size + _BATCH.size :]
    _need(0 <= n_body <= len(body) and body[n_body:] in (b"", _END), "it has another length")
    if max_rows is not None and n > max_rows:
        raise FormatError(f"a manifest of {n} rows, more than {max_rows}")
    buffers = [body[at : at + size] for at, size in zip(places[::2], places[1::2], strict=True)]
    _need(min(places) >= 0 and [*map(len, buffers)] == places[1::2], "a column is not in it")
    n_nulls = counts[1::2]
    _need(n >= 0 and all(counts[at] == n for at in (0, 2, 4, 8, 12)), "its columns have different lengths")
    _need(not any(n_nulls[at] for at in (0, 2, 3, 4, 5, 7)), "it leaves out a required value")
    _need(not any(len(buffers[at]) for at in (0, 6, 8, 10, 12, 16)), "it leaves out a required value")
    shape_at, chunk_at = _offsets(buffers[7], n, counts[6]), _offsets(buffers[11], n, counts[10])
    different, dtype = _dtypes(_texts(buffers[4], buffers[5], n), _validity(buffers[3], n, n_nulls[1]))
    return Columns(
        names=_texts(buffers[1], buffers[2], n),
        dtypes=different,
        dtype=dtype,
        shape_offsets=shape_at,
        sides=_numbers(buffers[9], "<i8", int(shape_at[-1])),
        chunk_offsets=chunk_at,
        digests=_numbers(buffers[13], "u1", int(chunk_at[-1]) * DIGEST_BYTES).reshape(-1, DIGEST_BYTES),
        cuts=_cuts(buffers[15], buffers[17], n, _validity(buffers[14], n, n_nulls[6]), counts[14]),
    )


def _need(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _numbers(buffer: memoryview, dtype: str, n: int) -> Any:
    """View the first numbers of a buffer; the buffer may be longer."""
    if n == 0:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, n)  # ValueError: it is shorter


def _offsets(buffer: memoryview, n: int, n_items: int) -> Any:
    at = _numbers(buffer, "<i4", n + 1)
    _need(at[0] == 0 and at[-1] == n_items and bool((at[1:] >= at[:-1]).all()), "its offsets are not in order")
    return at


def _texts(offsets: memoryview, data: memoryview, n: int) -> Texts:
    at = _numbers(offsets, "<i4", n + 1)
    found = np.frombuffer(data, np.uint8)[: max(int(at[-1]), 0)]
    _offsets(offsets, n, len(found))
    if len(found) and found.max() >= 128:
        str(found.data, "utf-8")  # UnicodeDecodeError is a ValueError
        starts = at[at < len(found)]
        _need(not (found[starts] & 0xC0 == 0x80).any(), "a text starts inside of a character")
    return Texts(at, found)


def _validity(bits: memoryview, n: int, n_nulls: int) -> Any:
    """Return for each row whether it has a value; None if each has."""
    if n_nulls == 0 and len(bits) == 0:
        return None
    given = np.unpackbits(_numbers(bits, "u1", (n + 7) // 8), count=n, bitorder="little").astype(bool)
    _need(n - np.count_nonzero(given) == n_nulls, "a column has another number of values")
    return given


def _dtypes(texts: Texts, given: Any) -> tuple[tuple[str | None, ...], Any]:
    """Return the distinct dtypes, and for each row the number of its dtype."""
    if given is None:
        steps = np.diff(texts.at)
        n_bytes = int(steps[0]) if len(steps) else 0
        # Most checkpoints have one dtype, and one comparison costs less than a lookup of each.
        if len(steps) and (steps == n_bytes).all() and _repeats(texts.data, n_bytes):
            return (texts[0],), np.broadcast_to(np.intp(0), len(texts))
        different, codes = texts.distinct()
        return tuple(different), np.array(codes, dtype=np.intp)
    rows = np.flatnonzero(given)
    different, found = texts.take(rows).distinct()
    numbers = np.full(len(texts), len(different), dtype=np.intp)
    numbers[rows] = found
    return (tuple(different) if len(rows) == len(texts) else (*different, None)), numbers


def _repeats(data: Any, n_bytes: int) -> bool:
    """Tell whether bytes repeat their first ``n_bytes`` throughout."""
    pattern = np.tile(data[:n_bytes], -(-_BLOCK_BYTES // max(1, n_bytes)))
    blocks = range(0, len(data), len(pattern) or 1)
    return all(np.array_equal(block := data[at : at + len(pattern)], pattern[: len(block)]) for at in blocks)


def _cuts(offsets: memoryview, values: memoryview, n: int, given: Any, n_values: int) -> RowCuts | None:
    at = _offsets(offsets, n, n_values)
    if given is None:
        given = np.ones(n, dtype=bool)
    _need(not np.diff(at)[~given].any(), "it has cuts of a row that has none")
    if not given.any():
        return None
    return RowCuts(given=given, at=at.astype(np.int64), values=_numbers(values, "<i8", n_values))
