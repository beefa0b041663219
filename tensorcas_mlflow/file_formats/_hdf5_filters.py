"""Filters of HDF5's chunks, undone: shuffle, deflate, Fletcher-32 (section IV.A.2.l).

`tensorcas_mlflow.codecs.Hdf5Chunks` applies them.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import fletcher32
from tensorcas_mlflow.errors import CorruptError, FormatError
from tensorcas_mlflow.file_formats._hdf5_headers import Filters
from tensorcas_mlflow.file_formats._source import ByteSource

_CHECKSUM_BYTES = 4
_MOST_INFLATION = 1032
"""Bytes that DEFLATE makes of one byte at most."""
_MOST_KEPT_BYTES = 32 << 20
"""Bytes of chunks that a reader keeps: the chunks of one row are read for each of its rows."""


def most_filtered_bytes(chunk_bytes: int) -> int:
    """Return the most bytes that a stored chunk of a size may have; DEFLATE hardly adds any."""
    return chunk_bytes + (chunk_bytes >> 8) + 1024


def unfiltered(stored: memoryview, filters: Filters, chunk_bytes: int) -> Any:
    """Undo the filters of a chunk.

    Args:
        stored: The chunk as the file has it.
        filters: Its filters.
        chunk_bytes: Its size without them; no more memory is taken.

    Returns:
        The chunk's bytes.

    Raises:
        FormatError: They do not match their checksum, or have another size.
        zlib.error: The stream is damaged.
    """
    if filters.fletcher32:
        data, checksum = stored[:-_CHECKSUM_BYTES], stored[-_CHECKSUM_BYTES:]
        if fletcher32(data) != int.from_bytes(checksum, "little"):
            raise FormatError("a chunk does not match its checksum")
        stored = data
    raw: bytes | memoryview = stored
    if filters.level is not None:
        engine = zlib.decompressobj()
        raw = engine.decompress(stored, chunk_bytes)
        more = b"" if engine.eof else engine.decompress(engine.unconsumed_tail, 1)
        if more or not engine.eof or engine.unused_data:
            raise FormatError("a compressed chunk has another size than its data set says")
    if len(raw) != chunk_bytes:
        raise FormatError("a chunk has another size than its data set says")
    chunk = np.frombuffer(raw, np.uint8)
    if filters.shuffle > 1:
        if chunk_bytes % filters.shuffle:
            raise FormatError("the filter shuffle has elements of another size")
        chunk = np.ascontiguousarray(chunk.reshape(filters.shuffle, -1).T).reshape(-1)
    return chunk


class UnfilteredSource(ByteSource):
    """The chunks of a data set one after the other, without their filters."""

    def __init__(self, source: ByteSource, filters: Filters, chunk_bytes: int, starts: Any, sizes: Any) -> None:
        """Stand for chunks.

        Args:
            source: The file.
            filters: Their filters.
            chunk_bytes: Size of each without them.
            starts: Positions in the file.
            sizes: Sizes in the file.

        Raises:
            FormatError: No chunk of such a size becomes as many bytes.
        """
        most = _MOST_INFLATION if filters.level is not None else 1
        added = _CHECKSUM_BYTES if filters.fletcher32 else 0
        if (sizes > most_filtered_bytes(chunk_bytes)).any() or int((sizes - added).min()) * most < chunk_bytes:
            raise FormatError("a filtered chunk has an impossible size")
        self.name = source.name
        self.size = starts.size * chunk_bytes
        self.places = chunk_bytes * np.arange(starts.size).reshape(starts.shape)
        """First byte of each chunk in this source."""
        self._source = source
        self._filters = filters
        self._chunk_bytes = chunk_bytes
        self._starts = starts.reshape(-1)
        self._sizes = sizes.reshape(-1)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._lock = Lock()

    def read_into(self, start: int, out: memoryview) -> None:
        while len(out):
            number, begin = divmod(start, self._chunk_bytes)
            piece = self._chunk(number)[begin : begin + len(out)]
            out[: len(piece)] = piece.data
            start, out = start + len(piece), out[len(piece) :]

    def _chunk(self, number: int) -> Any:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        stored = self._source.read(int(self._starts[number]), int(self._sizes[number]))
        try:
            chunk = unfiltered(stored, self._filters, self._chunk_bytes)
        except (FormatError, zlib.error) as error:
            raise CorruptError(self.name, f"at byte {self._starts[number]}, {error}") from error
        with self._lock:
            self._kept[number] = chunk
            while len(self._kept) > 1 and len(self._kept) * self._chunk_bytes > _MOST_KEPT_BYTES:
                self._kept.popitem(last=False)
        return chunk
