"""Data sets of an HDF5 file: what they are and where they lie, as h5py tells, and checked.

`_hdf5_library` asks h5py in a process of its own, which reads the file through this one. What it answers is not
trusted: an answer is checked like a header, and a process that dies or reads too much says that the file is malformed.
"""

from __future__ import annotations

import io
import json
import math
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.dtypes import DType, parse_dtype
from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._source import ByteSource, SliceSource

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_USER_BLOCKS = (0, 512, 1024, 2048)
HEAD_BYTES = 4096
_FREE_READ_BYTES = 4 << 20
_MAX_OVERREAD = 4
"""Times that the structures of a file may be read."""
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ANSWER = 16
"""Times that an answer may be as long as the file."""
_ANSWER = (1 << 64) - 1
"""Position in a request that begins an answer."""
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_ORDER = (_SHUFFLE, _DEFLATE, _FLETCHER32)
"""The filters in the order in which h5py applies them."""


class Filters(NamedTuple):
    """The filters of chunks, in the order in which a writer applies them."""

    shuffle: int
    """Size of an element for the filter shuffle; 1 without it."""
    level: int | None
    """Level of the filter deflate; None without it."""
    fletcher32: bool
    """Whether a checksum follows each chunk."""


NO_FILTERS = Filters(1, None, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of a data set, all of them, in arrays with a side for each dimension that is cut."""

    sides: tuple[int, ...]
    """Sides of a chunk."""
    n_bytes: int
    """Size of a chunk without its filters."""
    filters: Filters | None
    """None if one of them is unknown."""
    starts: Any
    """Positions in the file."""
    sizes: Any
    """Sizes as they are stored."""
    masks: Any
    """Bits of the filters that a chunk has not passed."""

    @property
    def is_filtered(self) -> bool:
        """True if the chunks have filters."""
        return self.filters != NO_FILTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A data set."""

    names: Sequence[str]
    """Its paths."""
    kind: str
    """Reason for which it cannot be listed; "" if there is none."""
    dtype: DType | None = None
    shape: tuple[int, ...] = ()
    start: int | None = None
    """Position of contiguous elements; None if there are none."""
    n_bytes: int = 0
    """Size of contiguous elements."""
    compact: bytes | None = None
    """Elements that lie in the header."""
    chunks: Chunks | None = None

    @property
    def wanted_bytes(self) -> int:
        """Size of the elements; 0 without a dtype."""
        return math.prod(self.shape) * self.dtype.itemsize if self.dtype is not None else 0

    def ranges(self) -> list[tuple[int, int]]:
        """Return the stretches of the file that hold elements, as their first byte and end.

        Raises:
            FormatError: Chunks share bytes.
        """
        if self.chunks is None:
            return [(self.start, self.start + self.n_bytes)] if self.start is not None and self.n_bytes else []
        order = np.argsort(self.chunks.starts, axis=None)
        starts = self.chunks.starts.reshape(-1)[order]
        ends = starts + self.chunks.sizes.reshape(-1)[order]
        gaps = starts[1:] - ends[:-1]
        if (gaps < 0).any():
            raise FormatError("the chunks of a data set share bytes")
        # Stretches, not chunks: there may be a million.
        breaks = np.flatnonzero(gaps)
        return [*zip(starts[[0, *(breaks + 1)]].tolist(), ends[[*breaks, -1]].tolist(), strict=True)]


def user_block(head: memoryview) -> int | None:
    """Return the position of the superblock; None if the file is not HDF5."""
    return next((at for at in _USER_BLOCKS if head[at : at + 8] == _SIGNATURE), None)


def check_library() -> None:
    """Raise `FormatError` if h5py is not installed."""
    if find_spec("h5py") is None:
        raise FormatError("h5py is not installed, which reads HDF5: pip install 'tensorcas-mlflow[keras]'")


def read_data_sets(source: ByteSource) -> tuple[list[DataSet], Mapping[str, str]]:
    """Find the data sets of a file, in the order of their elements.

    Returns:
        The data sets, whose elements lie in the file and share no bytes; and the links to other files, with their kind.

    Raises:
        FormatError: The file is malformed, or h5py is not installed. The others of `UNREADABLE` say the same.
        CorruptError: The file ends while it is read.
        BackendError: The storage does not give its bytes.
    """
    check_library()
    base = user_block(source.read(0, min(HEAD_BYTES, source.size)))
    if base is None:
        raise FormatError("it has no superblock")
    said, table = _ask(SliceSource(source, base, source.size - base, source.name))
    found: list[tuple[list[tuple[int, int]], DataSet]] = []
    at = 0
    for each in said["data_sets"]:
        n_numbers = each.get("n_chunks", 0) * (3 + len(each.get("sides", ())))
        data_set = _data_set(each, table[at : at + n_numbers], base, source.size)
        found.append((data_set.ranges(), data_set))
        at += n_numbers
    ranges = sorted(each for own, _ in found for each in own)
    if any(begin < end for (_, end), (begin, _) in pairwise(ranges)):
        raise FormatError("two of its data sets share bytes")
    if ranges and (ranges[0][0] < base or ranges[-1][1] > source.size):
        raise FormatError("a data set is outside of the file")
    found.sort(key=lambda each: each[0][:1])
    return [data_set for _, data_set in found], dict(said["elsewhere"])


# --- the process that asks h5py

_PROGRAM = Path(__file__).with_name("_hdf5_library.py")
_CODE = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the program that forks a process for each file."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, str(_PROGRAM), *sys.path],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process
        )
    return process, ours


def _connect() -> socket.socket:
    """Return a connection to a process that reads one file.

    Raises:
        FormatError: None can be started.
    """
    global _server
    failure: OSError | None = None
    for server in (_server, None):
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                process, control = server or _start()
                socket.send_fds(control, [b"\0"], [theirs.fileno()])
        except OSError as error:
            failure = error
        else:
            _server = process, control
            return ours
    raise FormatError(f"no process can be started to read it: {failure}") from failure


def _ask(source: ByteSource) -> tuple[dict[str, Any], Any]:
    """Let a process of its own read a file; return what it says, and the numbers of all chunks."""
    n_left = _FREE_READ_BYTES + _MAX_OVERREAD * source.size
    n_answer = min(_MAX_ANSWER_BYTES, _FREE_READ_BYTES + _MAX_ANSWER * source.size)
    with _connect() as connection, connection.makefile("rwb") as link:
        answer: list[bytes] = []
        request: bytes | memoryview = struct.pack("<Q", source.size)
        while len(answer) < 2:
            at, n_bytes = struct.unpack("<QQ", _exchange(link, request, 16))
            if at == _ANSWER and n_bytes <= n_answer:
                answer.append(_exchange(link, b"", n_bytes))
                request = b""
                continue
            n_left -= n_bytes
            if at + n_bytes > source.size or n_left < 0:
                raise FormatError("its structures are read too often, or outside of the file")
            request = source.read(at, n_bytes)
    said = json.loads(answer[0])
    if "error" in said:
        raise FormatError(said["error"])
    return said, np.frombuffer(answer[1], np.int64)


def _exchange(link: io.BufferedRWPair, said: bytes | memoryview, n_bytes: int) -> bytes:
    """Send bytes, and receive others."""
    try:
        link.write(said)
        link.flush()
        received = link.read(n_bytes)
    except ConnectionError as error:
        raise FormatError("the HDF5 library fails to read it") from error
    if len(received) < n_bytes:
        raise FormatError("the HDF5 library fails to read it")
    return received


# --- what it says


def _data_set(said: Mapping[str, Any], table: Any, base: int, file_bytes: int) -> DataSet:
    """Check the description of a data set."""
    names = [*map(str, said["names"])]
    if "shape" not in said:
        return DataSet(names=names, kind=str(said["kind"]))
    shape = (*said["shape"], *said.get("inner", ()))
    dtype = _dtype_of(said["dtype"]) if "dtype" in said else None
    if len(shape) > MAX_DIMENSIONS or math.prod(filter(None, shape)) * said["item_bytes"] > MAX_TENSOR_BYTES:
        raise FormatError("a data set has an impossible shape")
    if dtype is not None and math.prod(said["inner"]) * dtype.itemsize != said["item_bytes"]:
        raise FormatError("a data set has elements of another size")
    compact = bytes.fromhex(said["compact"]) if "compact" in said else None
    if compact is not None and dtype is not None and len(compact) != math.prod(shape) * dtype.itemsize:
        raise FormatError("a data set has elements of another size")
    kind, chunks = said.get("kind", ""), None
    if "sides" in said:
        chunks = _chunks(said, table, base, file_bytes)
        kind = kind or ("" if chunks is not None or 0 in shape else "not written in part")
    start = said.get("start")
    return DataSet(
        names=names,
        kind=str(kind),
        dtype=dtype,
        shape=shape,
        start=None if start is None else base + start,
        n_bytes=said.get("n_bytes", 0),
        compact=compact,
        chunks=chunks,
    )


def _dtype_of(said: Any) -> DType:
    """Return a dtype that has a name of ours, or that `numpy.lib.format` describes in JSON."""
    if isinstance(said, str) and said[0] not in "<>|":
        return parse_dtype(said)
    return np.lib.format.descr_to_dtype(_descr(said))


def _descr(said: Any) -> Any:
    if isinstance(said, str):
        return said
    return [(name, _descr(inner), *map(tuple, shape)) for name, inner, *shape in said]


def _chunks(said: Mapping[str, Any], table: Any, base: int, file_bytes: int) -> Chunks | None:
    """Put chunks at their places in the data set; None if it has none, or not all are written."""
    sides, shape = tuple(said["sides"]), said["shape"]
    if len(sides) != len(shape) or min(sides) < 1:
        raise FormatError("a chunk has impossible sides")
    grid = [-(-side // step) for side, step in zip(shape, sides, strict=True)]
    n_bytes, rows = math.prod(sides) * said["item_bytes"], table.reshape(-1, 3 + len(sides))
    if not len(rows) or len(rows) != math.prod(grid):
        return None
    if (rows[:, :2] < 0).any() or (rows[:, 0] > file_bytes - base - rows[:, 1]).any():
        raise FormatError("a chunk is outside of the file")
    place, rest = np.divmod(rows[:, 3:], sides)
    if (place >= grid).any():
        place = _places_of_numbers(place, [-(-side // step) for side, step in zip(said["most"], sides, strict=True)])
    if rest.any() or (place < 0).any() or (place >= grid).any():
        raise FormatError("a chunk has no place in its data set")
    places = np.full((*grid, 3), -1)
    places[tuple(place.T)] = rows[:, :3] + (base, 0, 0)
    starts, sizes, masks = np.moveaxis(places, -1, 0)
    filters = _filters_of(said["filters"])
    if (starts < 0).any() or (filters == NO_FILTERS and (masks.any() or (sizes != n_bytes).any())):
        raise FormatError("a chunk is missing, or has another size than its data set says")
    return Chunks(sides=sides, n_bytes=n_bytes, filters=filters, starts=starts, sizes=sizes, masks=masks)


def _places_of_numbers(place: Any, most: list[int]) -> Any:
    """Correct the places of the chunks of a data set that grows along another axis than the first one.

    The index of such chunks counts the growing axis first. The library (2.0.0, too) takes the number of a chunk in the
    index for one in C order. So it names places outside of a data set that is written as a whole.

    Args:
        place: The places as the library names them.
        most: Most chunks along each axis; 0 for the growing one.
    """
    if most.count(0) != 1:
        return place
    growing = most.index(0)
    others = most[:growing] + most[growing + 1 :]
    number = place[:, growing:] @ [math.prod(most[axis + 1 :]) for axis in range(growing, len(most))]
    nth, rest = np.divmod(number, math.prod(others))
    return np.insert(np.stack(np.unravel_index(rest, others), axis=-1), growing, nth, axis=1)


def _filters_of(said: Sequence[tuple[int, Sequence[int]]]) -> Filters | None:
    """Return filters by their numbers and values; None if one is unknown, or their order is."""
    found = {number: tuple(values) for number, values in said}
    if not found.keys() <= {*_ORDER} or len(found) < len(said) or [*found] != sorted(found, key=_ORDER.index):
        return None
    sizes, levels = found.get(_SHUFFLE, (1,)), found.get(_DEFLATE, (None,))
    if len(sizes) != 1 or len(levels) != 1 or not sizes[0]:
        return None
    return Filters(sizes[0], levels[0], _FLETCHER32 in found)
