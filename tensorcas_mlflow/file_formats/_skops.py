"""Files of skops: zip archives of arrays, with a ``schema.json`` that describes the object they are parts of.

Source: ``skops/io/_numpy.py``, ``_scipy.py`` and ``_persist.py``. A member's name is an object's memory address; the
path in the schema stays the same from one save to the next.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import strict_json
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._numpy import add_npy_member, list_npz
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, SliceSource
from tensorcas_mlflow.file_formats._zip import list_members, read_member

_SCHEMA = "schema.json"
_MAX_SCHEMA_BYTES = 64 << 20
_BETWEEN = frozenset({"content", "attrs", "__reduce__", "args", "state"})
"""Keys of the schema itself."""
_MAX_NODES = 4_000_000
_MAX_PATH = 1000


def is_skops(members: Sequence[FileRange]) -> bool:
    """Recognise a file of skops by its members."""
    return any(member.name == _SCHEMA for member in members)


def list_skops(source: ByteSource, members: Sequence[FileRange]) -> Listing:
    """List the arrays of a file of skops, each by the attributes, keys and positions of its path.

    An array is listed for each path to it. A sparse matrix has several arrays. Objects and bytes are left out.

    Raises:
        FormatError: The file is malformed. A `struct.error` and a `zlib.error` say the same.
    """
    by_name = {member.name: member for member in members}
    text = read_member(source, by_name[_SCHEMA], _MAX_SCHEMA_BYTES)
    if zlib.crc32(text) != by_name[_SCHEMA].crc32:
        raise FormatError("its schema does not have its CRC-32")
    schema = strict_json(text)
    table = LocationTable(source)
    seen = {_SCHEMA}
    for path, node in _nodes(schema):
        kind, file = node.get("type"), node.get("file")
        name = table.unused(path or "array")
        if kind == "json":
            table.leave_out(name, "objects")
        if type(file) is not str:
            continue
        member = by_name.get(file)
        if member is None:
            raise FormatError(f"its schema names {file[:80]!r}, which is missing")
        seen.add(file)
        if kind == "numpy":
            add_npy_member(table, member, name)
        elif kind == "scipy" and not member.is_deflated:
            inner = SliceSource(source, member.start, member.n_bytes, source.name)
            table.join(list_npz(inner, list_members(inner)), f"{name}.".__add__)
        else:
            table.leave_out(name, "a compressed sparse matrix" if kind == "scipy" else "bytes")
    for name in sorted(by_name.keys() - seen):
        table.leave_out(table.unused(name), "no array")
    return table.listing("skops")


def _nodes(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every array, and every other object with a file, with its path, in the order of the schema."""
    left: list[tuple[str, Any]] = [("", root)]
    n_nodes = 0
    while left:
        path, value = left.pop()
        n_nodes += 1
        if n_nodes > _MAX_NODES or len(path) > _MAX_PATH:
            raise FormatError("its schema is too long to be read")
        if type(value) is dict:
            if type(value.get("__loader__")) is str and ("file" in value or "type" in value):
                yield path, value
            items = [(path if key in _BETWEEN else _below(path, key), each) for key, each in value.items()]
        elif type(value) is list:
            items = [(_below(path, str(nth)), each) for nth, each in enumerate(value)]
        else:
            continue
        left += reversed(items)


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
