"""Reader of self-contained files: only the wanted rows, straight into their arrays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import ReadCounter
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Offsets, empty_array, pieces_of
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.chunk_io._ways import Extent, plan_reads
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptChunkError,
    CorruptError,
    FormatError,
    NewerFormatError,
)
from tensorcas_mlflow.layout.manifests import HEADER_BYTES, Header, Manifest, TensorsFileLayout

_IOV_MAX = 1024
"""Maximum number of buffers one read fills, on Linux and macOS alike."""
_MAX_READ_BYTES = 1 << 30


class TensorsFile:
    """A self-contained file with a verified manifest.

    The file is opened anew for each read, so it may be moved away in between, and nothing has to be closed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a file's manifest.

        Raises:
            CorruptError: It is no such file, is damaged before its first tensor, or is truncated.
            NewerFormatError: A later release wrote it.
            BlobNotFoundError: There is no such file.
            BackendError: It cannot be read.
        """
        self.path = os.fspath(path)
        self.tally: ReadCounter | None = None
        """Counter of the reads, if a caller wants one."""
        with self._opened() as descriptor:
            size = os.fstat(descriptor).st_size
            try:
                self.manifest = self._read_manifest(descriptor, size)
            except NewerFormatError:
                raise
            except FormatError as error:
                raise CorruptError(self.path, getattr(error, "reason", str(error))) from error
        self._layout = TensorsFileLayout.of(self.manifest)
        self.manifest.check_names()
        if size != self._layout.n_bytes:
            raise CorruptError(self.path, f"it has {size} bytes, and its manifest implies {self._layout.n_bytes}")

    def read(
        self, names: Iterable[str] | None = None, *, verify: bool = True, out: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Read tensors.

        Args:
            names: The tensors, in any order; all by default.
            verify: Whether to check every chunk's bytes against its digest.
            out: Arrays to fill, for some of them: of the tensor's dtype and shape, writable and in C order.

        Returns:
            Arrays by name: those of ``out``, and new ones, like those of `Store.read_tensors`.

        Raises:
            TensorNotFoundError: A name has no tensor.
            CorruptChunkError: A tensor is damaged.
            CorruptError: The file was truncated after it was opened.
        """
        wanted = self.manifest.names() if names is None else list(names)
        given = out or {}
        arrays = {name: given[name] if name in given else empty_array(self.manifest.row(name).spec) for name in wanted}
        outs: list[memoryview] = []
        numbers = [np.empty(0, np.int64)]
        for name, array in arrays.items():
            if array.size:
                ends = self.manifest.row(name).ends(self.manifest.chunk_bytes)
                outs.extend(pieces_of(array.reshape(-1).view(np.uint8).data, ends))
                numbers.append(self._chunks_of(self.manifest.by_name.number(name)))
        self._read(np.concatenate(numbers), outs, verify=verify)
        return arrays

    def read_chunks(self, row: int, chunks: Any, outs: Sequence[memoryview], *, verify: bool = True) -> None:
        """Read some chunks of one row, by their numbers in it, into buffers of their sizes; raise like `read`."""
        self._read(self._chunks_of(row)[chunks], outs, verify=verify)

    def fill(self, first: int, outs: list[memoryview]) -> None:
        """Read consecutive chunks and verify them: a `Fill`; raise like `read`."""
        self._read(np.arange(first, first + len(outs)), outs, verify=True)

    def _chunks_of(self, row: int) -> Offsets:
        """Return the numbers of the chunks of a row, counted over all rows."""
        first, end = self.manifest.columns.chunk_at[row : row + 2].tolist()
        return np.arange(first, end)

    @Lazy
    def _offsets(self) -> Offsets:
        """The start of each chunk, counted from the start of the file."""
        begins: Offsets = self._layout.chunks()[0]
        return begins

    def _read(self, chunks: Offsets, outs: Sequence[memoryview], *, verify: bool) -> None:
        begins = self._offsets[chunks]
        with self._opened() as descriptor:

            def read(extent: Extent) -> None:
                self._fill(descriptor, extent.start, _in_order(extent, begins, outs))
                for at in extent.members.tolist() if verify else ():
                    self._check(int(chunks[at]), outs[at])

            threads.run_all(read, plan_reads(np.zeros(len(outs), np.int64), begins, self.manifest.chunk_sizes[chunks]))

    def _check(self, chunk: int, data: memoryview) -> None:
        expected, actual = self.manifest.digests[chunk].tobytes(), digest(data)
        if actual != expected:
            name = self.manifest.columns.name(int(self.manifest.columns.rows_of(np.array([chunk]))[0]))
            raise CorruptChunkError(expected.hex(), self.path, f"of tensor {name!r}, its bytes hash to {actual.hex()}")

    def _read_manifest(self, descriptor: int, size: int) -> Manifest:
        head = bytearray(min(size, HEADER_BYTES))
        self._fill(descriptor, 0, [memoryview(head)])
        header = Header.parse(head)
        stream = bytearray(min(header.manifest_bytes, size - HEADER_BYTES))
        self._fill(descriptor, HEADER_BYTES, [memoryview(stream)])
        return header.manifest(bytes(stream))

    def _fill(self, descriptor: int, start: int, buffers: list[memoryview]) -> None:
        """Read consecutive bytes of the file into buffers, one after the other."""
        first = 0
        while first < len(buffers):
            n_read = os.preadv(descriptor, _a_read_of(buffers, first), start)
            if self.tally is not None:
                self.tally.add(n_read)
            if n_read == 0 and len(buffers[first]):
                raise CorruptError(self.path, f"it ends at byte {start}, within its tensors")
            start += n_read
            while first < len(buffers) and n_read >= len(buffers[first]):
                n_read -= len(buffers[first])
                first += 1
            if n_read:
                buffers[first] = buffers[first][n_read:]

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise BlobNotFoundError(self.path) from None
        except OSError as error:
            raise BackendError("open", self.path, f"{type(error).__name__}: {error}") from error
        try:
            yield descriptor
        except OSError as error:
            raise BackendError("read", self.path, f"{type(error).__name__}: {error}") from error
        finally:
            os.close(descriptor)


def _in_order(extent: Extent, begins: Offsets, outs: Sequence[memoryview]) -> list[memoryview]:
    """Lay out the buffers of an extent's chunks, with spare memory for the gaps between them."""
    buffers: list[memoryview] = []
    end = extent.start
    for at, begin in zip(extent.members.tolist(), begins[extent.members].tolist(), strict=True):
        if begin > end:
            buffers.append(memoryview(bytearray(begin - end)))
        buffers.append(outs[at])
        end = begin + len(outs[at])
    return buffers


def _a_read_of(buffers: list[memoryview], first: int) -> list[memoryview]:
    """Return as many buffers as one call fills."""
    taken = [buffers[first][:_MAX_READ_BYTES]]
    n_bytes = len(taken[0])
    if n_bytes < _MAX_READ_BYTES:
        for buffer in buffers[first + 1 : first + _IOV_MAX]:
            n_bytes += len(buffer)
            if n_bytes > _MAX_READ_BYTES:
                break
            taken.append(buffer)
    return taken
