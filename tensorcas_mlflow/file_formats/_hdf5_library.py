"""Program that reads the structure of HDF5 files with h5py: where data sets lie, never what they hold.

The HDF5 library has crashed on crafted files, again and again. So it runs in processes of its own, one for each file.
This program gets a socket as its standard input. For each connection that comes over the socket, it forks: the new
process reads one file over the connection, answers, and ends. `_hdf5_file` is the other side.

It imports nothing of this package, since it runs as a script.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import socket
import struct
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5g, h5l, h5o, h5s, h5t

_BLOCK_BYTES = 64 << 10
_MOST_BLOCKS = 512
"""Blocks of the file that are kept in memory."""
_MOST_BYTES = 2 << 30
"""Memory that a process takes to read a file."""
_MOST_CPU_S = 60
_MOST_LINKS = 1 << 20
_MOST_DEPTH = 256
"""Groups within each other."""
_MOST_CHUNKS = 1 << 21
_MOST_COMPACT_BYTES = 64 << 10
_MOST_FIELDS = 1000
_COMPLEX = 11
"""Class of HDF5 2.0's own complex numbers."""
_BFLOAT16 = (2, (15, 7, 8, 0, 7), 127)
_KERAS_TYPES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Types that Keras writes as opaque bytes with their name beside them, and their sizes (``saving_lib.py``)."""
_KINDS = {h5t.TIME: "time", h5t.BITFIELD: "bits", h5t.REFERENCE: "references"}
ANSWER = (1 << 64) - 1
"""Position in a request that begins an answer."""


class UnknownTypeError(Exception):
    """A data type without a numpy dtype; its argument is the type's name."""


class _File(io.RawIOBase):
    """A file that is read over a connection, block by block."""

    def __init__(self, link: io.BufferedRWPair) -> None:
        [self._size] = struct.unpack("<Q", link.read(8))
        self._link = link
        self._at = 0
        self._block = lru_cache(_MOST_BLOCKS)(self._fetch)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, out: Any, /) -> int:
        room = memoryview(out).cast("B")
        n_read = 0
        while n_read < len(room) and self._at < self._size:
            nth, begin = divmod(self._at, _BLOCK_BYTES)
            piece = self._block(nth)[begin : begin + len(room) - n_read]
            room[n_read : n_read + len(piece)] = piece
            n_read += len(piece)
            self._at += len(piece)
        return n_read

    def _fetch(self, nth: int) -> bytes:
        at = nth * _BLOCK_BYTES
        n_bytes = min(_BLOCK_BYTES, self._size - at)
        self._link.write(struct.pack("<QQ", at, n_bytes))
        self._link.flush()
        block = self._link.read(n_bytes)
        if len(block) < n_bytes:
            raise SystemExit("nobody waits for an answer")
        return block


def describe(file: h5py.File) -> tuple[dict[str, Any], array[int]]:
    """Describe the data sets of a file.

    A data set is found by each of its paths. A group is entered once, by the first of its paths.

    Returns:
        The data sets, and the links to other files with their kind; and of each chunk its position in the file, its
        size, its filter mask and its place among the elements, those of one data set after those of the one before.
    """
    found: dict[int, dict[str, Any]] = {}
    elsewhere: dict[str, str] = {}
    chunks: array[int] = array("q")
    root = h5g.open(file.id, b"/")
    entered = {h5o.get_info(root).addr}
    waiting = [("", root)]
    n_links = 0
    while waiting:
        path, group = waiting.pop()
        links: list[tuple[bytes, int, Any]] = []
        group.links.iterate(lambda name, info, links=links: links.append((name, info.type, info.u)), info=True)
        n_links += len(links)
        if n_links > _MOST_LINKS or path.count("/") > _MOST_DEPTH:
            raise ValueError("it has too many links, or its groups nest too deep")
        for raw, kind, address in links:
            name = path + raw.decode()
            if kind == h5l.TYPE_SOFT:
                continue  # another path to what has one already, or to nothing
            if kind != h5l.TYPE_HARD:
                elsewhere[name] = "a link to another file"
            elif address in found:
                found[address]["names"].append(name)
            elif (of := h5o.get_info(group, raw).type) == h5o.TYPE_DATASET:
                found[address] = {"names": [name], **_data_set(h5d.open(group, raw), chunks)}
            elif of == h5o.TYPE_GROUP and address not in entered:
                entered.add(address)
                waiting.append((f"{name}/", h5g.open(group, raw)))
    return {"data_sets": [*found.values()], "elsewhere": elsewhere}, chunks


def _data_set(data_set: Any, chunks: array[int]) -> dict[str, Any]:
    """Describe a data set, and add its chunks to those of others."""
    settings = data_set.get_create_plist()
    layout = settings.get_layout()
    # Asking these for their shape or elements would open other files.
    if layout == h5d.VIRTUAL:
        return {"kind": "virtual"}
    if settings.get_external_count():
        return {"kind": "in another file"}
    space, type_ = data_set.get_space(), data_set.get_type()
    if space.get_simple_extent_type() == h5s.NULL:
        return {"kind": "no elements"}
    made = {"shape": space.get_simple_extent_dims(), "item_bytes": type_.get_size()}
    try:
        made["dtype"], made["inner"] = _dtype(data_set, type_)
    except UnknownTypeError as error:
        made["kind"] = str(error)
    if layout == h5d.COMPACT:
        n_bytes = space.get_simple_extent_npoints() * type_.get_size()
        if "dtype" in made and n_bytes <= _MOST_COMPACT_BYTES:
            elements = np.zeros(n_bytes, np.uint8)
            data_set.read(h5s.ALL, h5s.ALL, elements, type_)
            made["compact"] = elements.tobytes().hex()
    elif layout == h5d.CONTIGUOUS:
        made["start"], made["n_bytes"] = data_set.get_offset(), data_set.get_storage_size()
    else:
        made["sides"] = settings.get_chunk()
        made["most"] = [0 if side == h5s.UNLIMITED else side for side in space.get_simple_extent_dims(True)]
        made["filters"] = [settings.get_filter(nth)[:3:2] for nth in range(settings.get_nfilters())]
        n_before = len(chunks)
        data_set.chunk_iter(
            lambda each: chunks.extend((each.byte_offset, each.size, each.filter_mask, *each.chunk_offset))
        )
        made["n_chunks"] = (len(chunks) - n_before) // (3 + len(made["sides"]))
        if len(chunks) > _MOST_CHUNKS * 5:
            raise ValueError("it has too many chunks")
    return made


def _dtype(data_set: Any, type_: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a data type as `numpy.lib.format` describes it, or its name; and the sides of arrays that elements are.

    Raises:
        UnknownTypeError: Its elements are not those of a numpy dtype, bit for bit.
    """
    kind, size = type_.get_class(), type_.get_size()
    try:
        if kind == h5t.OPAQUE:
            said = h5py.Dataset(data_set).attrs.get("dtype")
            if not isinstance(said, str) or _KERAS_TYPES.get(said) != size:
                raise UnknownTypeError("opaque")
            return said, ()
        if kind == h5t.STRING and not type_.is_variable_str():
            if type_.get_strpad() != h5t.STR_NULLPAD:
                raise UnknownTypeError("text")
            return f"|S{size}", ()
        if kind == h5t.FLOAT and (size, type_.get_fields(), type_.get_ebias()) == _BFLOAT16:
            if type_.get_order() != h5t.ORDER_LE:
                raise UnknownTypeError("bfloat16 of the other byte order")
            return "bfloat16", ()
        if kind in _KINDS:
            raise UnknownTypeError(_KINDS[kind])
        dtype = type_.dtype
        if dtype.hasobject or len(dtype.base.names or ()) > _MOST_FIELDS:
            raise UnknownTypeError("records" if dtype.base.names else "of variable length")
        # Where numpy lacks a type, h5py takes a larger one, and converts what it reads.
        if kind != _COMPLEX and not type_.equal(h5t.py_create(dtype, logical=True)):
            raise UnknownTypeError(f"unlike {dtype}")
        return np.lib.format.dtype_to_descr(dtype.base), dtype.shape
    except (TypeError, ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
        raise UnknownTypeError(f"of the class {kind}") from error


def _answer(link: io.BufferedRWPair) -> None:
    """Read a file over a connection, and send its description, or why there is none."""
    chunks: array[int] = array("q")
    try:
        with h5py.File(_File(link), "r") as file:
            said, chunks = describe(file)
    except Exception as error:  # noqa: BLE001 - the other side raises it
        said = {"error": f"{type(error).__name__}: {error}"}
    for part in (json.dumps(said).encode(), chunks.tobytes()):
        link.write(struct.pack("<QQ", ANSWER, len(part)) + part)
    link.flush()


def _limit() -> None:
    """Bound what this process may take."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # only Linux has the file, and the limit
        n_pages = int(Path("/proc/self/statm").read_text().split()[0])
        most_bytes = n_pages * resource.getpagesize() + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def main() -> None:
    """Answer over each connection that comes, until nobody can send one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    while (received := socket.recv_fds(control, 1, 1))[1]:
        [connection] = received[1]
        if os.fork():
            os.close(connection)
            continue
        control.close()
        _limit()
        with socket.socket(fileno=connection).makefile("rwb") as link:
            _answer(link)
        os._exit(0)


if __name__ == "__main__":
    main()
