"""Our own self-contained files (``docs/format.md``), taken apart into the rows that any client would have stored."""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._source import ByteSource
from tensorcas_mlflow.file_formats._tape import MIN_TENSOR_BYTES, FilePart, Skeleton, Tape, Tensor
from tensorcas_mlflow.layout.manifests import HEADER_BYTES, TENSORS_FILE_MAGIC, Header, TensorsFileLayout

_MAX_ROWS = 1 << 17
"""A file with more rows is plain bytes: all rows are in memory before the first tensor."""


def is_self_contained(head: memoryview) -> bool:
    """Recognise a self-contained file of any version by its magic number."""
    return head[: len(TENSORS_FILE_MAGIC) - 1] == TENSORS_FILE_MAGIC[:-1]


def split_self_contained(tape: Tape) -> Iterator[FilePart]:
    """Announce the parts of a self-contained file; raises `FormatError` unless its manifest is whole."""
    begin = tape.position
    header = Header.parse(tape.peek(HEADER_BYTES))
    stream = bytes(tape.peek(HEADER_BYTES + header.manifest_bytes)[HEADER_BYTES:])
    manifest = header.manifest(stream, max_rows=_MAX_ROWS)
    layout = TensorsFileLayout.of(manifest)
    for row, start in zip(manifest.rows, (begin + layout.starts).tolist(), strict=True):
        if row.spec.n_bytes < MIN_TENSOR_BYTES:
            continue
        if start > tape.position:
            yield Skeleton(n_bytes=start - tape.position)
        if tape.is_at_end():
            return
        yield Tensor(
            n_bytes=row.spec.n_bytes, name=row.spec.name, dtype=row.spec.dtype, shape=row.spec.shape, cuts=row.cuts
        )
    rest = begin + layout.n_bytes - tape.position
    if rest and not tape.is_at_end():
        yield Skeleton(n_bytes=rest)


def list_self_contained(source: ByteSource) -> Listing:
    """List the tensors of a self-contained file, without the model's skeleton.

    Raises:
        FormatError: The header or the manifest is damaged, or the file has another size than they say.
    """
    header = Header.parse(source.read(0, min(HEADER_BYTES, source.size)))
    if HEADER_BYTES + header.manifest_bytes > source.size:
        raise FormatError("it ends in its manifest")
    manifest = header.manifest(bytes(source.read(HEADER_BYTES, header.manifest_bytes)))
    layout = TensorsFileLayout.of(manifest)
    if layout.n_bytes != source.size:
        raise FormatError(f"it has {source.size} bytes, and its manifest says {layout.n_bytes}")
    table = LocationTable(source)
    for row, start in zip(manifest.rows, layout.starts.tolist(), strict=True):
        spec = row.spec
        if spec.dtype is None or spec.name == SKELETON:
            continue
        table.add(spec.name, spec.dtype, spec.shape, start=start, n_bytes=spec.n_bytes)
    return table.listing("self-contained", manifest.metadata)
