"""Groups of HDF5: the walk over all paths of a file, and the trees and heaps that hold the names."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._hdf5_file import (
    MAX_BLOCK_BYTES,
    MAX_TEXT_BYTES,
    NOWHERE,
    Hdf5File,
    text_at,
    u32,
    u64,
    width,
)
from tensorcas_mlflow.file_formats._hdf5_headers import (
    LINK,
    LINK_INFO,
    SYMBOLS,
    DataSet,
    Message,
    read_data_set,
    read_messages,
)
from tensorcas_mlflow.file_formats._hdf5_trees import leaves, read_records

_MAX_LINKS = 1 << 20
_MAX_GROUP_DEPTH = 256
_MAX_HEAP_DEPTH = 64


class Link(NamedTuple):
    """A hard link in a group."""

    name: str
    address: int


@dataclass(slots=True)
class Found:
    """A data set with its paths."""

    data_set: DataSet
    names: list[str] = field(default_factory=list)


def walk(file: Hdf5File, *, is_partial: bool = False) -> tuple[dict[int, Found], dict[str, str]]:
    """Walk all groups from the root on.

    A data set is found by each of its paths. A group is entered once, by the first of its paths.

    Args:
        is_partial: Whether objects that cannot be read are passed over.

    Returns:
        The data sets by their addresses; and the names of links to other files, with their kind.

    Raises:
        FormatError: An object is malformed.
    """
    found: dict[int, Found] = {}
    elsewhere: dict[str, str] = {}
    entered = {file.root}
    waiting = [("", file.root, 0)]
    n_links = 0
    while waiting:
        path, group, depth = waiting.pop()
        if depth > _MAX_GROUP_DEPTH:
            raise FormatError("its groups nest too deep")
        try:
            links = [*_links(file, group, read_messages(file, group), elsewhere, path)]
        except (FormatError, IndexError, struct.error):
            if is_partial:
                continue
            raise
        n_links += len(links)
        if n_links > _MAX_LINKS:
            raise FormatError(f"it has more than {_MAX_LINKS} links")
        for link in links:
            name = f"{path}{link.name}"
            if link.address in found:
                found[link.address].names.append(name)
                continue
            try:
                messages = read_messages(file, link.address)
                data_set = read_data_set(file, link.address, messages)
            except (FormatError, IndexError, struct.error):
                if is_partial:
                    continue
                raise
            if data_set is not None:
                found[link.address] = Found(data_set, [name])
            elif link.address not in entered:
                entered.add(link.address)
                waiting.append((f"{name}/", link.address, depth + 1))
    return found, elsewhere


def _links(
    file: Hdf5File, group: int, messages: Sequence[Message], elsewhere: dict[str, str], path: str
) -> Iterator[Link]:
    """Find the hard links of a group; note those that lead out of the file."""
    raw: list[memoryview] = []
    for each in messages:
        if each.kind == SYMBOLS:
            yield from _symbols(file, u64(each.data, 0), u64(each.data, 8))
        elif each.kind == LINK:
            raw.append(each.data)
        elif each.kind == LINK_INFO:
            at = 10 if each.data[1] & 1 else 2
            heap, names = u64(each.data, at), u64(each.data, at + 8)
            if heap != NOWHERE and names != NOWHERE:
                raw += _dense_links(file, heap, names)
    for data in raw:
        name, kind, rest = _read_link(data)
        if kind == 0:
            yield Link(name, u64(rest, 0))
        elif kind != 1:
            elsewhere[f"{path}{name}"] = "a link to another file"


def _symbols(file: Hdf5File, tree: int, heap: int) -> Iterator[Link]:
    """Find the links of a group of the old kind (sections III.A.1, III.B, III.D)."""
    head = file.read(heap, 32)
    if bytes(head[:4]) != b"HEAP":
        raise FormatError("a group has no heap of names")
    size, names_at = u64(head, 8), u64(head, 24)
    if size > MAX_BLOCK_BYTES << 3:
        raise FormatError(f"the names of a group have {size} bytes")
    names = file.read(names_at, size)
    for node in leaves(file, tree, 0, 8):
        for symbols in node.children:
            head = file.read(symbols, 8)
            if bytes(head[:5]) != b"SNOD\x01":
                raise FormatError(f"there are no symbols at the address {symbols}")
            n_symbols = int.from_bytes(head[6:8], "little")
            table = file.read(symbols + 8, 40 * n_symbols)
            for at in range(0, 40 * n_symbols, 40):
                name_at, address, cached = struct.unpack_from("<QQI", table, at)
                if cached == 2:
                    continue  # a soft link: another path to what has one already, or to nothing
                yield Link(text_at(names[name_at : name_at + MAX_TEXT_BYTES]), address)


def _dense_links(file: Hdf5File, heap: int, names: int) -> list[memoryview]:
    fractal = _FractalHeap(file, heap)
    return [fractal.read(record[4:]) for record in read_records(file, names, 5)]


def _read_link(data: memoryview) -> tuple[str, int, memoryview]:
    """Read a link: its name, its kind, and what it leads to (section IV.A.2.g)."""
    flags, at, kind = data[1], 2, 0
    if flags & 8:
        kind = data[at]
        at += 1
    at += 8 if flags & 4 else 0
    at += 1 if flags & 16 else 0
    width = 1 << (flags & 3)
    n_bytes = int.from_bytes(data[at : at + width], "little")
    at += width
    if data[0] != 1 or n_bytes > MAX_TEXT_BYTES or at + n_bytes > len(data):
        raise FormatError("a link has no name")
    return bytes(data[at : at + n_bytes]).decode("utf-8"), kind, data[at + n_bytes :]


class _FractalHeap:
    """Reader of the objects of one fractal heap (section III.G)."""

    def __init__(self, file: Hdf5File, address: int) -> None:
        self._file = file
        head = file.read(address, 142)
        if bytes(head[:4]) != b"FRHP":
            raise FormatError(f"there is no heap at the address {address}")
        filter_bytes = int.from_bytes(head[7:9], "little")
        max_managed = u32(head, 10)
        self._width, self._first, self._max_direct, bits, _, self._root, self._n_rows = struct.unpack_from(
            "<HQQHHQH", head, 110
        )
        powers = (self._first, self._max_direct, self._width)
        if filter_bytes or bits > 64 or not all(power and not power & (power - 1) for power in powers):
            raise FormatError("a heap has impossible sizes")
        if self._max_direct > MAX_BLOCK_BYTES or self._width > 1024 or self._first > self._max_direct:
            raise FormatError("a heap has impossible sizes")
        self._offset_width = -(-bits // 8)
        self._length_width = min(-(-(self._max_direct.bit_length() - 1) // 8), width(max_managed))
        self._n_direct = self._max_direct.bit_length() - self._first.bit_length() + 2

    def read(self, heap_id: memoryview) -> memoryview:
        """Return an object by its number in the heap."""
        if heap_id[0] & 0x30:
            raise FormatError("a name is too long")
        at = 1 + self._offset_width
        offset = int.from_bytes(heap_id[1:at], "little")
        length = int.from_bytes(heap_id[at : at + self._length_width], "little")
        block, begin = self._block(offset)
        return self._file.read(block + offset - begin, length)

    def _block(self, offset: int) -> tuple[int, int]:
        """Return the address of the direct block that holds an offset, and the offset of its first byte."""
        if not self._n_rows:
            return self._root, 0
        table, begin, n_rows = self._root, 0, self._n_rows
        for _ in range(_MAX_HEAP_DEPTH):
            if bytes(self._file.read(table, 4)) != b"FHIB":
                break
            row, row_at, size = 0, begin, self._first
            while row < n_rows and offset >= row_at + size * self._width:
                row_at += size * self._width
                row += 1
                size = self._first << max(0, row - 1)
            if row >= n_rows:
                break
            column = (offset - row_at) // size
            entry = table + 13 + self._offset_width + 8 * (row * self._width + column)
            child, begin = u64(self._file.read(entry, 8), 0), row_at + column * size
            if row < self._n_direct:
                return child, begin
            table, n_rows = child, (size // (self._first * self._width)).bit_length()
        raise FormatError("a heap lacks a name")
