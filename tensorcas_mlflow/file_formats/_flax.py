"""Files of Flax: a tree of arrays in MessagePack, as `flax.serialization.to_bytes` writes it.

Sources: ``flax/serialization.py``, and MessagePack's specification (github.com/msgpack/msgpack/blob/master/spec.md).
The tree is maps with texts for keys. An array is an extension object of type 1. Its content is MessagePack again: an
array of the shape, the name of the numpy dtype, and the elements in C order. An array of more than 1 GiB is a map: its
shape, and flat arrays that follow each other.

Splitter and lister walk forward through the same tokens. Numbers and texts in the tree are not read.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_NAME_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import check_shape, dtype_by_word, item_bytes, tensor_or_skeleton
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource, JoinedSource, SourceStream
from tensorcas_mlflow.file_formats._tape import FilePart, Skeleton, SkippingTape, Tape

_ARRAY = 1
"""Type of an extension object that is an array."""
_NUMBERS = frozenset({2, 3, 255})
"""Types of extension objects that are numbers: a complex one, one of numpy, and a time."""
_UNNAMED = "array"
"""Name of an array that is the whole file."""
_CHUNKED, _SHAPE, _CHUNKS = "__msgpack_chunked_array__", "shape", "chunks"

_WINDOW_BYTES = 64 << 10
_ARRAY_HEAD_BYTES = 512
"""The shape and the dtype of an array take fewer."""
_LOOK_BYTES = MAX_NAME_BYTES + 2 * _ARRAY_HEAD_BYTES
"""A key and the beginning of its value take fewer."""
_MAX_DEPTH = 64
_FREE_TOKENS = 1_000_000
_TOKEN_EVERY_BYTES = 8
"""Least average distance of tokens, beyond the first `_FREE_TOKENS`, for a file to be worth walking."""
_MAX_NAMES_BYTES = 64 << 20
"""Limit for the names of all arrays: a path repeats the keys of all maps around."""
_LEAST_BYTES = 4096
"""From this size on, bytes that are no array may be weights."""

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCC: 1, 0xD0: 1, 0xCD: 2, 0xD1: 2, 0xCE: 4, 0xD2: 4, 0xCA: 4, 0xCF: 8}
_FIXED |= {0xD3: 8, 0xCB: 8}
"""Bytes behind the first one of nil, booleans and numbers."""
_SIZED = {0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4), 0xC4: ("bytes", 1), 0xC5: ("bytes", 2)}
_SIZED |= {0xC6: ("bytes", 4), 0xC7: ("object", 1), 0xC8: ("object", 2), 0xC9: ("object", 4)}
_SIZED |= {0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)}
"""Kind of a token, and the size of the length behind its first byte."""
_OF_FIXED_OBJECT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}

_RARE_DTYPE = re.compile(r"u?int[24]|float[468]_[a-z0-9]{1,16}")


class _Token(NamedTuple):
    kind: str
    """``number``, ``text``, ``bytes``, ``object``, ``list`` or ``map``."""
    length: int
    """Number of bytes behind the head; of elements of a list; of pairs of a map."""
    head_bytes: int
    type: int = 0
    """Type of an extension object."""


class _Found(NamedTuple):
    """An array, or other bytes, which come next on the tape."""

    path: tuple[str, ...]
    n_bytes: int
    kind: str
    """The file's own name of the dtype, or of a type that is left out."""
    shape: tuple[int, ...] | None = None
    """None: no array."""


@dataclass(slots=True)
class _Level:
    """A map or a list around the current token."""

    left: int
    """Number of its values to come."""
    is_map: bool
    key: str = ""
    nth: int = 0


def is_flax(head: memoryview) -> bool:
    """Recognise a tree by its first tokens: maps with texts for keys, up to the first array."""
    # A map that is not empty, or an array as the whole file.
    if len(head) < 2 or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF, 0xC7, 0xC8, 0xC9)):
        return False
    tape = Tape(io.BytesIO(head))
    try:
        for part in _walk(tape):
            if isinstance(part, _Found) and part.shape is not None:
                return True
            tape.take(part.n_bytes)
    except (FormatError, UnicodeDecodeError):
        pass
    return False


def split_flax(tape: Tape) -> Iterator[FilePart]:
    """Announce the arrays, and the tree around them.

    Raises:
        FormatError: The tree is malformed. A `UnicodeDecodeError` says the same.
    """
    for part in _walk(tape):
        if isinstance(part, Skeleton):
            yield part
        else:
            yield from tensor_or_skeleton(part.n_bytes, _name_of(part.path), _dtype_of(part.kind), part.shape)


def list_flax(source: ByteSource) -> Listing:
    """List the arrays of a tree by their paths, with points between the keys.

    Left out are arrays of dtypes without a name, unknown extension objects, and bytes from 4 KiB on. Bytes behind the
    tree are refused.

    Raises:
        FormatError: The file is malformed. A `UnicodeDecodeError` says the same.
    """
    tape = SkippingTape(SourceStream(source), block_bytes=_WINDOW_BYTES)
    shapes: dict[tuple[str, ...], list[int]] = {}
    places: list[tuple[_Found, int]] = []
    for part in _walk(tape, shapes):
        if tape.position + part.n_bytes > source.size:
            raise FormatError("it ends in its tree")
        if isinstance(part, _Found):
            places.append((part, tape.position))
        tape.skip(part.n_bytes)
    if tape.position != source.size:
        raise FormatError(f"its tree ends at byte {tape.position}, and the file at byte {source.size}")
    table = LocationTable(source)
    n_names_bytes = 0
    owned = [(_owner(place[0].path, shapes), place) for place in places]
    paths: set[tuple[str, ...]] = set()
    for path, group in groupby(owned, itemgetter(0)):
        pieces = [place for _, place in group]
        if path in paths or (len(pieces) > 1 and path not in shapes):
            raise FormatError(f"a map has the key {path[-1][:80]!r} twice")
        paths.add(path)
        name = table.unused(_name_of(path))
        n_names_bytes += len(name)
        if n_names_bytes > _MAX_NAMES_BYTES:
            raise FormatError("the names of its arrays are too long")
        if path in shapes:
            _add_chunked(table, name, shapes.pop(path), pieces)
            continue
        ((found, start),) = pieces
        dtype = _dtype_of(found.kind)
        if dtype is None or found.shape is None:
            table.leave_out(name, found.kind)
        else:
            table.add(name, dtype, found.shape, start=start, n_bytes=found.n_bytes)
    if shapes:
        raise FormatError("a large array has no chunks, or some apart from the others")
    return table.listing("flax")


def _name_of(path: tuple[str, ...]) -> str:
    return ".".join(path) or _UNNAMED


def _owner(path: tuple[str, ...], shapes: Mapping[tuple[str, ...], Any]) -> tuple[str, ...]:
    """Return the path of the array that an array is or, in a large array, is a part of."""
    return path[:-2] if path[-2:-1] == (_CHUNKS,) and path[:-2] in shapes else path


def _add_chunked(table: LocationTable, name: str, sides: list[int], chunks: list[tuple[_Found, int]]) -> None:
    """Add an array of several chunks."""
    kinds = {found.kind for found, _ in chunks}
    dtype = _dtype_of(chunks[0][0].kind)
    if len(kinds) > 1 or [found.path[-1] for found, _ in chunks] != [str(nth) for nth in range(len(chunks))]:
        raise FormatError(f"the chunks of array {name[:80]!r} do not make it whole")
    if dtype is None:
        table.leave_out(name, chunks[0][0].kind)
        return
    whole = JoinedSource(name, table.sources[0], [(start, found.n_bytes) for found, start in chunks])
    table.sources.append(whole)
    table.add(name, dtype, tuple(sides), start=0, n_bytes=whole.size, source=len(table.sources) - 1)


def _dtype_of(kind: str) -> str | None:
    """Return the name of a dtype for numpy's name; None if there is none."""
    if not _RARE_DTYPE.fullmatch(kind):
        return dtype_by_word(kind)
    try:
        return kind if parse_dtype(kind).itemsize == 1 else None
    except FormatError:
        return None


def _walk(tape: Tape, shapes: dict[tuple[str, ...], list[int]] | None = None) -> Iterator[Skeleton | _Found]:
    """Announce the bytes of the tree, and the arrays and other bytes in it.

    Args:
        tape: The file. The caller takes each part.
        shapes: Receives the shapes of large arrays, by their paths.

    Raises:
        FormatError: The tree is malformed, or the file ends in it. A `UnicodeDecodeError` says the same.
    """
    levels = [_Level(1, is_map=False)]
    window, at, n_tokens = memoryview(b""), 0, 0
    is_last = False
    while levels:
        level = levels[-1]
        if not level.left:
            levels.pop()
            continue
        if at + _LOOK_BYTES > len(window) and (not is_last or at > len(window)):
            if at:
                yield Skeleton(n_bytes=at)
            window, at = tape.peek(_WINDOW_BYTES), 0
            is_last = len(window) < _WINDOW_BYTES
        n_tokens += 1
        if n_tokens > _FREE_TOKENS + (tape.position + at) // _TOKEN_EVERY_BYTES:
            raise FormatError(f"a tree of more than {n_tokens} values in {tape.position + at} bytes")
        at = _read_key(window, at, level)
        token = _token(window, at)
        start, at = at, at + token.head_bytes
        if token.kind in ("list", "map"):
            if len(levels) > _MAX_DEPTH:
                raise FormatError("its tree nests too deep")
            levels.append(_Level(token.length, is_map=token.kind == "map"))
            continue
        found = None
        if token.kind == "object" and token.type == _ARRAY:
            n_head_bytes, kind, shape, n_bytes = _read_array(window[at : at + _ARRAY_HEAD_BYTES], token.length)
            at += n_head_bytes
            found = _Found(_path(levels), n_bytes, kind, shape)
        elif token.kind == "object" and token.type not in _NUMBERS:
            found = _Found(_path(levels), token.length, f"an extension object of the type {token.type}")
        elif token.length >= _LEAST_BYTES and token.kind in ("bytes", "object"):
            found = _Found(_path(levels), token.length, token.kind)
        else:
            if shapes is not None and token.kind == "number":
                _note_shape(shapes, levels, window[start : at + token.length])
            at += token.length
        if found is not None:
            yield Skeleton(n_bytes=at)
            yield found
            window, at, is_last = memoryview(b""), 0, False
    if at:
        yield Skeleton(n_bytes=at)


def _path(levels: Sequence[_Level]) -> tuple[str, ...]:
    return tuple(level.key for level in levels[1:])


def _read_key(window: memoryview, at: int, level: _Level) -> int:
    """Go on to a level's next value, and return the position behind its key."""
    level.key = str(level.nth)
    level.nth += 1
    level.left -= 1
    if level.is_map:
        token = _token(window, at)
        if token.kind != "text" or token.length > MAX_NAME_BYTES:
            raise FormatError("a map with a key that is no name")
        at += token.head_bytes + token.length
        level.key = bytes(window[at - token.length : at]).decode()
    return at


def _note_shape(shapes: dict[tuple[str, ...], list[int]], levels: Sequence[_Level], token: memoryview) -> None:
    """Remember a number of a large array's shape, or that a map is a large array."""
    path = _path(levels)
    if path[-1:] == (_CHUNKED,):
        shapes[path[:-1]] = []
    elif path[-2:-1] == (_SHAPE,) and path[:-2] in shapes:
        sides = shapes[path[:-2]]
        if path[-1] != str(len(sides)) or len(sides) >= MAX_DIMENSIONS:
            raise FormatError("a large array with an impossible shape")
        sides.append(_whole_number(token))


def _read_array(head: memoryview, n_object_bytes: int) -> tuple[int, str, tuple[int, ...], int]:
    """Read the beginning of an array.

    Returns:
        The size of what has been read; the file's name of the dtype; the shape; and the size of the elements.
    """
    whole, sides, at = _token(head, 0), _token(head, 1), 1
    at += sides.head_bytes
    if (whole.kind, whole.length, whole.head_bytes, sides.kind) != ("list", 3, 1, "list"):
        raise FormatError("an array without shape, dtype and elements")
    if sides.length > MAX_DIMENSIONS:
        raise FormatError(f"an array of {sides.length} dimensions")
    shape = []
    for _ in range(sides.length):
        side = _token(head, at)
        shape.append(_whole_number(head[at : at + side.head_bytes + side.length]))
        at += side.head_bytes + side.length
    word = _token(head, at)
    at += word.head_bytes + word.length
    kind = bytes(head[at - word.length : at]).decode("ascii")
    data = _token(head, at)
    at += data.head_bytes
    if word.kind not in ("text", "bytes") or data.kind not in ("text", "bytes") or at + data.length != n_object_bytes:
        raise FormatError("an array without shape, dtype and elements")
    dtype = _dtype_of(kind)
    if dtype is not None:
        check_shape("", shape, item_bytes(dtype), data.length)
    return at, kind, tuple(shape), data.length


def _token(window: memoryview, at: int) -> _Token:
    """Read the head of a token.

    Raises:
        FormatError: There is no such token, or the file ends in it.
    """
    if at >= len(window):
        raise FormatError("it ends in its tree")
    first = window[at]
    if first < 0x80 or first >= 0xE0:
        return _Token("number", 0, 1)
    if first < 0x90:
        return _Token("map", first & 15, 1)
    if first < 0xA0:
        return _Token("list", first & 15, 1)
    if first < 0xC0:
        return _Token("text", first & 31, 1)
    if first in _FIXED:
        return _Token("number", _FIXED[first], 1)
    kind, width = _SIZED.get(first, ("object", 0))
    length = int.from_bytes(window[at + 1 : at + 1 + width], "big") if width else _OF_FIXED_OBJECT.get(first, -1)
    head_bytes = 1 + width + (kind == "object")
    if length < 0 or at + head_bytes > len(window):
        raise FormatError(f"no value begins with the byte {first}")
    return _Token(kind, length, head_bytes, window[at + 1 + width] if kind == "object" else 0)


def _whole_number(token: memoryview) -> int:
    """Read a number of a shape."""
    first = token[0]
    if first < 0x80 and len(token) == 1:
        return first
    if first not in (0xCC, 0xCD, 0xCE, 0xCF) or len(token) != 1 + _FIXED[first]:
        raise FormatError("an array with a side that is no whole number")
    return int.from_bytes(token[1:], "big")
