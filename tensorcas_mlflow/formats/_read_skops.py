"""Files of skops, a zip archive of arrays and of a text, ``schema.json``, that says what object they are parts of.

Source: ``skops/io/_numpy.py``, ``_scipy.py`` and ``_persist.py``. Members are called by where an object lay in memory;
what does not change from one save to the next is the way to it in the schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensorcas_mlflow.containers import strict_json
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._read_numpy import add_npy, list_npz
from tensorcas_mlflow.formats._source import ByteSource, PartSource
from tensorcas_mlflow.formats._zip_directory import Member, list_members, read_member

_SCHEMA = "schema.json"
_MAX_SCHEMA_BYTES = 64 << 20
_BETWEEN = frozenset({"content", "attrs", "__reduce__", "args", "state"})
"""Keys of the schema's own."""
_MAX_NODES = 4_000_000
_MAX_PATH = 1000


def is_skops(members: Sequence[Member]) -> bool:
    """Tell the members of a file of skops from those of other archives."""
    return any(member.name == _SCHEMA for member in members)


def list_skops(source: ByteSource, members: Sequence[Member]) -> Listing:
    """List the arrays of a file of skops, each by the attributes, keys and positions that lead to it.

    An array that is in several places is listed for each. A sparse matrix has several arrays. Objects, and bytes, are
    left out.

    Raises:
        FormatError: It is not sound. So do a `struct.error` and a `zlib.error` say.
    """
    by_name = {member.name: member for member in members}
    schema = strict_json(read_member(source, by_name[_SCHEMA], _MAX_SCHEMA_BYTES))
    places = Places()
    sources = [source]
    seen = {_SCHEMA}
    for path, node in _nodes(schema):
        kind, file = node.get("type"), node.get("file")
        name = places.unused(path or "array")
        if kind == "json":
            places.leave_out(name, "objects")
        if type(file) is not str:
            continue
        member = by_name.get(file)
        if member is None:
            raise FormatError(f"{file[:80]!r} is not there, and its schema names it")
        seen.add(file)
        if kind == "numpy":
            add_npy(places, source, member, name)
        elif kind == "scipy" and not member.is_deflated:
            sources.append(PartSource(source, member.start, member.n_bytes, source.name))
            listing = list_npz(sources[-1], list_members(sources[-1]))
            assert isinstance(listing.places, Places)
            places.join(listing.places, len(sources) - 1, below=f"{name}.")
        else:
            places.leave_out(name, "a compressed sparse matrix" if kind == "scipy" else "bytes")
    for name in sorted(by_name.keys() - seen):
        places.leave_out(places.unused(name), "no array")
    return Listing(format="skops", sources=sources, places=places, left_out=places.left_out)


def _nodes(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Find everything that has a file, or is an array, with the way to it, in the order of the schema."""
    left: list[tuple[str, Any]] = [("", root)]
    n_nodes = 0
    while left:
        path, value = left.pop()
        n_nodes += 1
        if n_nodes > _MAX_NODES or len(path) > _MAX_PATH:
            raise FormatError("its schema is too long to be looked through")
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
