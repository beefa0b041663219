"""Reader of self-contained files: only the wanted rows, straight into their arrays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import ReadCounter
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.base.tensors import empty_array, pieces_of
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
from tensorcas_mlflow.layout.manifests import HEADER_BYTES, Header, Manifest, Row, TensorsFileLayout

_IOV_MAX = 1024
"""Maximum number of buffers one read fills, on Linux and macOS alike."""
_MAX_READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Chunks of a file, as columns."""

    offset: Any
    """Start of each, counted from the start of the file."""
    size: Any
    row: Any
    """Number of the row of each."""
    digests: Digests

    @classmethod
    def of(cls, row: Row, start: int, ends: Any, number: int) -> _Spans:
        """Return the chunks of one row that begins at ``start``."""
        begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        return cls(
            offset=start + begins, size=ends - begins, row=np.full(len(ends), number, np.int64), digests=row.digests
        )

    @classmethod
    def joined(cls, parts: Sequence[_Spans]) -> _Spans:
        """Concatenate the chunks of several rows."""
        none = np.empty(0, np.int64)
        return cls(
            offset=np.concatenate([none, *(part.offset for part in parts)]),
            size=np.concatenate([none, *(part.size for part in parts)]),
            row=np.concatenate([none, *(part.row for part in parts)]),
            digests=np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *(part.digests for part in parts)]),
        )

    def some(self, which: Any) -> _Spans:
        """Return some of them: a range, or those of some numbers."""
        return _Spans(
            offset=self.offset[which], size=self.size[which], row=self.row[which], digests=self.digests[which]
        )


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
        self._number = {name: at for at, name in enumerate(self.manifest.names())}
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
        spans: list[_Spans] = []
        for name, array in arrays.items():
            if array.size:
                row, at = self.manifest.row(name), self._number[name]
                ends = row.ends(self.manifest.chunk_bytes)
                outs.extend(pieces_of(array.reshape(-1).view(np.uint8).data, ends))
                spans.append(_Spans.of(row, int(self._layout.starts[at]), ends, at))
        self._read(_Spans.joined(spans), outs, verify=verify)
        return arrays

    def read_chunks(self, row: int, chunks: Any, outs: Sequence[memoryview], *, verify: bool = True) -> None:
        """Read some chunks of one row, by their numbers in it, into buffers of their sizes; raise like `read`."""
        found = self.manifest.rows[row]
        spans = _Spans.of(found, int(self._layout.starts[row]), found.ends(self.manifest.chunk_bytes), row)
        self._read(spans.some(chunks), outs, verify=verify)

    def fill(self, first: int, outs: list[memoryview]) -> None:
        """Read consecutive chunks and verify them: a `Fill`; raise like `read`."""
        whole = self._all_spans
        self._read(whole.some(slice(first, first + len(outs))), outs, verify=True)

    @Lazy
    def _all_spans(self) -> _Spans:
        rows = enumerate(zip(self.manifest.rows, self._layout.starts.tolist(), strict=True))
        size = self.manifest.chunk_bytes
        return _Spans.joined([_Spans.of(row, start, row.ends(size), at) for at, (row, start) in rows])

    def _read(self, spans: _Spans, outs: Sequence[memoryview], *, verify: bool) -> None:
        with self._opened() as descriptor:

            def read(extent: Extent) -> None:
                self._fill(descriptor, extent.start, _in_order(extent, spans, outs))
                for at in extent.members.tolist() if verify else ():
                    self._check(spans, at, outs[at])

            threads.run_all(read, plan_reads(np.zeros(len(outs), np.int64), spans.offset, spans.size))

    def _check(self, spans: _Spans, at: int, data: memoryview) -> None:
        expected, actual = spans.digests[at].tobytes(), digest(data)
        if actual != expected:
            name = self.manifest.rows[int(spans.row[at])].spec.name
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


def _in_order(extent: Extent, spans: _Spans, outs: Sequence[memoryview]) -> list[memoryview]:
    """Lay out the buffers of an extent's chunks, with spare memory for the gaps between them."""
    begins = spans.offset[extent.members]
    ends = begins + spans.size[extent.members]
    gaps = (begins - np.concatenate(([extent.start], ends[:-1]))).tolist()
    scrap = memoryview(bytearray(max(gaps, default=0)))
    buffers: list[memoryview] = []
    for at, gap in zip(extent.members.tolist(), gaps, strict=True):
        if gap:
            buffers.append(scrap[:gap])
        buffers.append(outs[at])
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
