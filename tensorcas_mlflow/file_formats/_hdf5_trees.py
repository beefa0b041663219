"""B-trees of HDF5, in which groups keep names and data sets keep the places of chunks."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._hdf5_file import MAX_BLOCK_BYTES, MAX_CHUNKS, NOWHERE, Hdf5File, u64, width

_MAX_DEPTH = 64
"""Levels of a tree; a tree of so many has more leaves than any file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a B-tree of version 1."""

    level: int
    right: int
    keys: list[memoryview]
    children: list[int]


def read_node(file: Hdf5File, address: int, kind: int, key_bytes: int) -> Node:
    """Read a node of a B-tree of version 1."""
    head = file.read(address, 24)
    if bytes(head[:4]) != b"TREE" or head[4] != kind:
        raise FormatError(f"there is no node of a tree at the address {address}")
    n_children = int.from_bytes(head[6:8], "little")
    data = file.read(address + 24, n_children * (key_bytes + 8) + key_bytes)
    keys = [data[at : at + key_bytes] for at in range(0, n_children * (key_bytes + 8), key_bytes + 8)]
    children = [u64(data, at + key_bytes) for at in range(0, n_children * (key_bytes + 8), key_bytes + 8)]
    return Node(level=head[5], right=u64(head, 16), keys=keys, children=children)


def leaves(file: Hdf5File, address: int, kind: int, key_bytes: int, *, is_partial: bool = False) -> Iterator[Node]:
    """Find the lowest nodes of a B-tree of version 1, from left to right (section III.A.1).

    With ``is_partial``, nodes that cannot be read are passed over.
    """
    if address == NOWHERE:
        return
    seen: set[int] = set()
    waiting = [(address, -1)]
    while waiting:
        at, level = waiting.pop()
        if at in seen or len(seen) > MAX_CHUNKS:
            raise FormatError("the nodes of a tree go round in a circle")
        seen.add(at)
        try:
            node = read_node(file, at, kind, key_bytes)
        except FormatError:
            if is_partial:
                continue
            raise
        if level not in (-1, node.level):
            raise FormatError("the nodes of a tree are on other levels than they say")
        if node.level:
            waiting += [(child, node.level - 1) for child in reversed(node.children)]
        else:
            yield node


def read_records(file: Hdf5File, address: int, kind: int, *, is_partial: bool = False) -> Iterator[memoryview]:
    """Read the records of a B-tree of version 2 (section III.A.2).

    With ``is_partial``, nodes that cannot be read are passed over.
    """
    head = file.read(address, 38)
    if bytes(head[:4]) != b"BTHD" or head[5] != kind:
        raise FormatError(f"there is no tree at the address {address}")
    node_bytes, record_bytes, depth = struct.unpack_from("<IHH", head, 6)
    root, n_root = struct.unpack_from("<QH", head, 16)
    if root == NOWHERE or not record_bytes:
        return
    if depth > _MAX_DEPTH or node_bytes > MAX_BLOCK_BYTES or node_bytes < 16 + record_bytes:
        raise FormatError("a tree has impossible sizes")
    most = (node_bytes - 10) // record_bytes
    n_width, all_width, total = width(most), 0, most
    pointers = []
    for _ in range(depth):
        pointer = 8 + n_width + all_width
        pointers.append((pointer, all_width))
        most = (node_bytes - 10 - pointer) // (record_bytes + pointer)
        total = (most + 1) * total + most
        all_width = width(total)
    waiting = [(root, n_root, depth)]
    n_nodes = 0
    while waiting:
        at, n_records, level = waiting.pop()
        n_nodes += 1
        if n_nodes > MAX_CHUNKS:
            raise FormatError("the nodes of a tree go round in a circle")
        try:
            data = file.read(at, node_bytes)
        except FormatError:
            if is_partial:
                continue
            raise
        if bytes(data[:4]) != (b"BTIN" if level else b"BTLF") or 6 + n_records * record_bytes > node_bytes:
            raise FormatError(f"there is no node of a tree at the address {at}")
        for begin in range(6, 6 + n_records * record_bytes, record_bytes):
            yield data[begin : begin + record_bytes]
        if level:
            pointer, _ = pointers[level - 1]
            begin = 6 + n_records * record_bytes
            for _ in range(n_records + 1):
                child = u64(data, begin)
                n_own = int.from_bytes(data[begin + 8 : begin + 8 + n_width], "little")
                waiting.append((child, n_own, level - 1))
                begin += pointer
