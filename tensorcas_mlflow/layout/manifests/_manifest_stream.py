"""Reading of our own Arrow streams without pyarrow, whose import takes longer than reading a checkpoint.

`read_own` knows one schema of a manifest and one way to lay it out: those of `_manifest_arrow`. It checks every offset
before it reads there. It refuses nothing: of any other stream, damaged ones among them, it returns None, and pyarrow
decides.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import DIGEST_BYTES
from tensorcas_mlflow.base.tensors import RowCuts
from tensorcas_mlflow.base.texts import Texts

SCHEMA_KEY = b"tensorcas"
_CONTINUATION = 0xFFFFFFFF
_END = b"\xff\xff\xff\xff\0\0\0\0"
_VERSION = 4
"""Number of Arrow's metadata version 5."""
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _UTF8, _LIST, _FIXED = 2, 5, 12, 15
"""Numbers of Arrow's types and messages (``Schema.fbs``, ``Message.fbs``)."""
_COLUMNS = (("name", _UTF8), ("dtype", _UTF8), ("shape", _INT), ("chunks", _FIXED), ("cuts", _INT))
"""Each column with its type; for a column of lists, with that of its items."""
_N_NODES, _N_BUFFERS = 8, 18
_MOST_COLUMNS = 16
_BLOCK_BYTES = 1 << 15


class OwnStream(NamedTuple):
    """Contents of a manifest's stream."""

    said: bytes
    """The head, as JSON."""
    names: Texts
    dtypes: tuple[str | None, ...]
    """The distinct dtypes."""
    dtype: Any
    """For each row the number of its dtype."""
    shape_offsets: Any
    sides: Any
    chunk_offsets: Any
    digests: Any
    cuts: RowCuts | None


def read_own(stream: Any, *, max_rows: int | None = None) -> OwnStream | None:
    """Read a stream laid out as this release writes it; None for any other.

    Args:
        stream: The bytes.
        max_rows: Maximum number of rows.
    """
    data = memoryview(stream)
    try:
        schema, at, _ = _message(data, 0, _SCHEMA)
        batch, body_at, body_bytes = _message(data, at, _RECORD_BATCH)
        body = data[body_at : body_at + body_bytes]
        if len(body) != body_bytes or data[body_at + body_bytes :] not in (b"", _END):
            return None
        said = _said(schema)
        _check_columns(schema)
        return _contents(said, batch, body, max_rows)
    except (struct.error, ValueError):
        return None


class _StrangeError(ValueError):
    """A stream laid out in another way."""


class _Table:
    """A table of a flatbuffer. No read leaves the buffer."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        vtable = at - _read("<i", data, at)
        self._places = struct.unpack(f"<{(_read('<H', data, vtable) - 4) // 2}H", _slice(data, vtable, 4))

    def _place(self, field: int) -> int:
        place = self._places[field] if field < len(self._places) else 0
        return self._at + place if place else 0

    def has(self, field: int) -> bool:
        return self._place(field) > 0

    def number(self, field: int, form: str) -> int:
        place = self._place(field)
        return _read(form, self._data, place) if place else 0

    def _target(self, field: int) -> int:
        place = self._place(field)
        if not place:
            raise _StrangeError
        return place + _read("<I", self._data, place)

    def table(self, field: int) -> _Table:
        return _Table(self._data, self._target(field))

    def text(self, field: int) -> bytes:
        at = self._target(field)
        return bytes(self._data[at + 4 : at + 4 + _read("<I", self._data, at)])

    def tables(self, field: int) -> list[_Table]:
        at = self._target(field)
        places = range(at + 4, at + 4 + 4 * min(_read("<I", self._data, at), _MOST_COLUMNS), 4)
        return [_Table(self._data, place + _read("<I", self._data, place)) for place in places]

    def pairs(self, field: int, n: int) -> list[tuple[int, int]]:
        """Return the structs of a vector of ``n``, two numbers each."""
        at = self._target(field)
        if _read("<I", self._data, at) != n:
            raise _StrangeError
        numbers = struct.unpack_from(f"<{2 * n}q", self._data, at + 4)
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def _read(form: str, data: memoryview, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise _StrangeError
    number: int = struct.unpack_from(form, data, at)[0]
    return number


def _slice(data: memoryview, vtable: int, begin: int) -> memoryview:
    size = _read("<H", data, vtable)
    found = data[vtable + begin : vtable + size - size % 2]
    if size < begin or len(found) != size - size % 2 - begin:
        raise _StrangeError
    return found


def _message(data: memoryview, at: int, kind: int) -> tuple[_Table, int, int]:
    """Return the header of a message, the place of its body, and the body's size."""
    continuation, size = struct.unpack_from("<Ii", data, at)
    head = data[at + 8 : at + 8 + max(size, 0)]
    if continuation != _CONTINUATION or len(head) != size:
        raise _StrangeError
    message = _Table(head, _read("<I", head, 0))
    body_bytes = message.number(3, "<q")
    if message.number(0, "<h") != _VERSION or message.number(1, "<B") != kind or body_bytes < 0:
        raise _StrangeError
    return message.table(2), at + 8 + size, body_bytes


def _said(schema: _Table) -> bytes:
    """Check the number of columns of a schema, and return the head in its metadata."""
    fields, metadata = schema.tables(1), schema.tables(2)
    if schema.number(0, "<h") != 0 or len(fields) != len(_COLUMNS) or len(metadata) != 1:
        raise _StrangeError
    if metadata[0].text(0) != SCHEMA_KEY:
        raise _StrangeError
    return metadata[0].text(1)


def _check_columns(schema: _Table) -> None:
    for field, (name, kind) in zip(schema.tables(1), _COLUMNS, strict=True):
        if kind == _UTF8:
            _check_field(field, name, kind)
        else:
            _check_field(field, name, _LIST)
            children = field.tables(5)
            if len(children) != 1:
                raise _StrangeError
            _check_field(children[0], "item", kind, 8 if kind == _INT else DIGEST_BYTES)


def _check_field(field: _Table, name: str, kind: int, n_bytes: int = 0) -> None:
    is_known = (
        field.text(0) == name.encode()
        and field.number(1, "<B") == 1
        and field.number(2, "<B") == kind
        and not field.has(4)
        and not field.has(6)
    )
    about = field.table(3)
    if kind == _INT:
        is_known &= about.number(0, "<i") == 8 * n_bytes and about.number(1, "<B") == 1  # signed
    elif kind == _FIXED:
        is_known &= about.number(0, "<i") == n_bytes
    if not is_known:
        raise _StrangeError


def _contents(said: bytes, batch: _Table, body: memoryview, max_rows: int | None) -> OwnStream:
    n = batch.number(0, "<q")
    if n <= 0 or (max_rows is not None and n > max_rows) or batch.has(3) or batch.has(4):
        raise _StrangeError
    nodes, places = batch.pairs(1, _N_NODES), batch.pairs(2, _N_BUFFERS)
    buffers = _buffers(body, places)
    names, dtypes, shapes, sides, chunks, digests, cuts, cut_values = nodes
    if any(length != n for length, _ in (names, dtypes, shapes, chunks, cuts)):
        raise _StrangeError
    for (_, n_nulls), validity in (
        (names, buffers[0]),
        (shapes, buffers[6]),
        (sides, buffers[8]),
        (chunks, buffers[10]),
        (digests, buffers[12]),
        (cut_values, buffers[16]),
    ):
        if n_nulls or len(validity):
            raise _StrangeError
    shape_at = _offsets(buffers[7], n, sides[0])
    chunk_at = _offsets(buffers[11], n, digests[0])
    different, dtype = _dtypes(_texts(buffers[4], buffers[5], n), _validity(buffers[3], n, dtypes[1]))
    return OwnStream(
        said=said,
        names=_texts(buffers[1], buffers[2], n),
        dtypes=different,
        dtype=dtype,
        shape_offsets=shape_at,
        sides=_numbers(buffers[9], "<i8", int(shape_at[-1])),
        chunk_offsets=chunk_at,
        digests=_numbers(buffers[13], "u1", int(chunk_at[-1]) * DIGEST_BYTES).reshape(-1, DIGEST_BYTES),
        cuts=_cuts(buffers[15], buffers[17], n, _validity(buffers[14], n, cuts[1]), cut_values[0]),
    )


def _buffers(body: memoryview, places: Sequence[tuple[int, int]]) -> list[memoryview]:
    """Return the buffers at places in a body, each with a size."""
    buffers = [body[at : at + size] if min(at, size) >= 0 else body[:0] for at, size in places]
    if any(len(buffer) != size for buffer, (_, size) in zip(buffers, places, strict=True)):
        raise _StrangeError
    return buffers


def _numbers(buffer: memoryview, dtype: str, n: int) -> Any:
    """View the first numbers of a buffer; the buffer may be longer."""
    if n == 0:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, n)  # ValueError: it is shorter


def _offsets(buffer: memoryview, n: int, n_items: int) -> Any:
    at = _numbers(buffer, "<i4", n + 1)
    if at[0] != 0 or at[-1] != n_items or not (at[1:] >= at[:-1]).all():
        raise _StrangeError
    return at


def _texts(offsets: memoryview, data: memoryview, n: int) -> Texts:
    at = _numbers(offsets, "<i4", n + 1)
    found = np.frombuffer(data, np.uint8)[: max(int(at[-1]), 0)]
    if at[0] != 0 or len(found) != at[-1] or not (at[1:] >= at[:-1]).all():
        raise _StrangeError
    if len(found) and found.max() >= 128:
        str(found.data, "utf-8")  # UnicodeDecodeError is a ValueError
        starts = at[at < len(found)]
        if (found[starts] & 0xC0 == 0x80).any():
            raise _StrangeError  # a text starts inside of a character
    return Texts(at, found)


def _validity(bits: memoryview, n: int, n_nulls: int) -> Any:
    """Return for each row whether it has a value; None if each has."""
    if n_nulls == 0 and len(bits) == 0:
        return None
    given = np.unpackbits(_numbers(bits, "u1", (n + 7) // 8), count=n, bitorder="little").astype(bool)
    if n - np.count_nonzero(given) != n_nulls:
        raise _StrangeError
    return given


def _dtypes(texts: Texts, given: Any) -> tuple[tuple[str | None, ...], Any]:
    """Return the distinct dtypes, and for each row the number of its dtype."""
    if given is None:
        steps = np.diff(texts.at)
        n_bytes = int(steps[0])
        # Most checkpoints have one dtype, and one comparison costs less than a lookup of each.
        if (steps == n_bytes).all() and repeats(texts.data, n_bytes):
            return (texts[0],), np.broadcast_to(np.intp(0), len(texts))
        different, codes = texts.distinct()
        return tuple(different), np.array(codes, dtype=np.intp)
    rows = np.flatnonzero(given)
    different, found = texts.take(rows).distinct()
    numbers = np.full(len(texts), len(different), dtype=np.intp)
    numbers[rows] = found
    return (tuple(different) if len(rows) == len(texts) else (*different, None)), numbers


def repeats(data: Any, n_bytes: int) -> bool:
    """Tell whether bytes repeat their first ``n_bytes`` throughout."""
    pattern = np.tile(data[:n_bytes], -(-_BLOCK_BYTES // max(1, n_bytes)))
    blocks = range(0, len(data), len(pattern) or 1)
    return all(np.array_equal(block := data[at : at + len(pattern)], pattern[: len(block)]) for at in blocks)


def _cuts(offsets: memoryview, values: memoryview, n: int, given: Any, n_values: int) -> RowCuts | None:
    at = _offsets(offsets, n, n_values)
    if given is None:
        given = np.ones(n, dtype=bool)
    if np.diff(at)[~given].any():
        raise _StrangeError
    if not given.any():
        return None
    return RowCuts(given=given, at=at.astype(np.int64), values=_numbers(values, "<i8", n_values))
