"""Self-contained files: a manifest and the raw bytes of its rows (``docs/format.md``, Self-contained files).

The manifest alone determines the layout. So a file's size is known before a byte of it is written, and a reader finds
any row without reading another.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import chunk_begins
from tensorcas_mlflow.errors import FormatError, NewerFormatError
from tensorcas_mlflow.layout.manifests._manifest import MAX_BYTES, Manifest

TENSORS_FILE_MAGIC = b"\x89TCTF\r\n\x01"
"""The first bytes of a file; the last byte is the version."""
ALIGNMENT = 64
HEADER_BYTES = 64

_HEADER = struct.Struct("<8sQ32s16x")
_VERSION = TENSORS_FILE_MAGIC[-1]
_BATCH_BYTES = 16 << 20

Fill = Callable[[int, list[memoryview]], None]
"""Fills buffers with consecutive chunks: called with the number of the first, counted over all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of a self-contained file."""

    manifest_bytes: int
    manifest_digest: bytes

    @classmethod
    def parse(cls, head: Any) -> Header:
        """Parse a file's first `HEADER_BYTES` bytes.

        Raises:
            FormatError: They are not the header of such a file.
            NewerFormatError: A later release wrote it.
        """
        if len(head) < HEADER_BYTES or head[: len(TENSORS_FILE_MAGIC) - 1] != TENSORS_FILE_MAGIC[:-1]:
            raise FormatError("it does not begin as a self-contained file")
        magic, manifest_bytes, manifest_digest = _HEADER.unpack_from(head)
        if magic[-1] > _VERSION:
            raise NewerFormatError("a self-contained file", magic[-1], _VERSION)
        if magic[-1] != _VERSION or manifest_bytes > MAX_BYTES:
            raise FormatError("its header states an impossible version or size")
        return cls(manifest_bytes=manifest_bytes, manifest_digest=manifest_digest)

    def manifest(self, stream: bytes, *, max_rows: int | None = None) -> Manifest:
        """Parse the manifest after the header.

        Args:
            stream: Its bytes.
            max_rows: Maximum number of rows; a manifest with more is refused.

        Raises:
            FormatError: It is not the manifest announced in the header, or no manifest at all.
        """
        if len(stream) != self.manifest_bytes:
            raise FormatError("it ends within its manifest")
        if digest(stream) != self.manifest_digest:
            raise FormatError("its manifest does not hash to the digest in its header")
        manifest = Manifest.from_bytes(stream, max_rows=max_rows)
        if manifest.kind != "checkpoint":
            raise FormatError("its manifest is not a checkpoint's")
        if manifest.derived:
            raise FormatError("its manifest has derived rows, and a self-contained file has none")
        manifest.check_names()
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsFileLayout:
    """Places of a manifest's rows in its self-contained file."""

    manifest: Manifest
    starts: Any
    """Start of each row, counted from the start of the file: an int64 array."""
    n_bytes: int
    """Size of the file."""

    @classmethod
    def of(cls, manifest: Manifest) -> TensorsFileLayout:
        """Lay out the file of a manifest."""
        sizes = manifest.columns.n_bytes
        padded = _padded(sizes)
        starts = _first_row(len(manifest.stream)) + padded.cumsum() - padded
        return cls(manifest=manifest, starts=starts, n_bytes=_end_of(len(manifest.stream), sizes))

    def head(self) -> bytes:
        """Return the bytes before the first row: header, manifest and padding."""
        stream = self.manifest.stream
        header = _HEADER.pack(TENSORS_FILE_MAGIC, len(stream), digest(stream))
        return (header + stream).ljust(_first_row(len(stream)), b"\0")

    def chunks(self) -> tuple[Any, Any]:
        """Return the starts and ends of the chunks of all rows in the file: two ascending int64 arrays."""
        sizes, at = self.manifest.chunk_sizes, self.manifest.columns.chunk_at
        begins = np.repeat(self.starts, np.diff(at)) + chunk_begins(sizes, at)
        return begins, begins + sizes


def _padded(n_bytes: Any) -> Any:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _first_row(manifest_bytes: int) -> int:
    return int(_padded(HEADER_BYTES + manifest_bytes))


def _end_of(manifest_bytes: int, sizes: Any) -> int:
    # The last row is not padded.
    return _first_row(manifest_bytes) + int(_padded(sizes[:-1]).sum() + sizes[-1:].sum())


def file_pieces(manifest: Manifest, fill: Fill) -> Iterator[bytes | bytearray]:
    """Yield a file from its first byte to its last, holding about 16 MiB at a time.

    Args:
        manifest: Manifest of the file.
        fill: Source of its chunks, called in order and once for each.
    """
    layout = TensorsFileLayout.of(manifest)
    head = layout.head()
    yield head
    at = len(head)
    begins, ends = layout.chunks()
    first = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, at + _BATCH_BYTES, side="right")))
        block = bytearray(int(ends[last - 1]) - at)
        whole = memoryview(block)
        spans = zip((begins[first:last] - at).tolist(), (ends[first:last] - at).tolist(), strict=True)
        fill(first, [whole[begin:end] for begin, end in spans])
        yield block
        at += len(block)
        first = last
    if at < layout.n_bytes:  # rows of zero bytes
        yield bytes(layout.n_bytes - at)
