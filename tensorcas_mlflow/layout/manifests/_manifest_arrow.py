"""Arrow streams of manifests through pyarrow: every write, and the reads that `_manifest_stream` leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tensorcas_mlflow.base.arrow import (
    array_of_bools,
    array_of_numbers,
    array_of_texts,
    array_over,
    read_batch,
    read_schema,
    text_buffers,
    validity_of,
    values_of,
    values_or_any,
)
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.base.tensors import Offsets, RowCuts
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.layout.manifests._manifest_stream import SCHEMA_KEY, repeats
from tensorcas_mlflow.layout.manifests._rows import Columns, step_range

MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("name", pa.utf8()),
        pa.field("dtype", pa.utf8()),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("chunks", pa.list_(pa.binary(DIGEST_BYTES))),
        pa.field("cuts", pa.list_(pa.int64())),
    ]
)


def stream_of(said: str, columns: Columns, *, max_bytes: int) -> bytes:
    """Write a stream.

    Args:
        said: The head, as JSON.
        columns: The rows.
        max_bytes: Bound of the stream.

    Raises:
        ValueError: It is too long to be read again.
    """
    n_chunks = len(columns.digests)
    if n_chunks >= 1 << 31:
        raise ValueError(f"a checkpoint of {n_chunks} chunks is too large: create a store with larger chunks")
    digests = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(DIGEST_BYTES), n_chunks, [None, pa.py_buffer(np.ascontiguousarray(columns.digests).data)]
    )
    batch = pa.record_batch(
        [
            array_over(columns.names),
            array_of_texts(columns.dtypes, columns.dtype),
            _lists(columns.shape_at, array_of_numbers(columns.sides, pa.int64())),
            _lists(columns.chunk_at, digests),
            _cut_lists(columns),
        ],
        schema=MANIFEST_SCHEMA.with_metadata({SCHEMA_KEY: said}),
    )
    counter = pa.MockOutputStream()
    _write(counter, batch)
    if counter.size() > max_bytes:
        raise ValueError(f"a manifest of {counter.size()} bytes is too long to be read again")
    block = pa.allocate_buffer(counter.size())
    _write(pa.FixedSizeBufferWriter(block), batch)
    return block.to_pybytes()


def _write(sink: Any, batch: Any) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _lists(at: Offsets, values: Any, mask: Any = None) -> Any:
    return pa.ListArray.from_arrays(array_of_numbers(at, pa.int32()), values, mask=mask)


def _cut_lists(columns: Columns) -> Any:
    cuts = columns.cuts
    if cuts is None:
        return pa.nulls(len(columns), pa.list_(pa.int64()))
    mask = None if cuts.given.all() else array_of_bools(~cuts.given)
    return _lists(cuts.at, array_of_numbers(cuts.values, pa.int64()), mask)


def said_in(data: bytes) -> bytes:
    """Return the head in a stream, as JSON; raise one of `UNREADABLE` if there is none."""
    said: bytes = (read_schema(data).metadata or {})[SCHEMA_KEY]
    return said


def columns_in(data: bytes, max_rows: int | None) -> Columns:
    """Return the rows in a stream; raise one of `UNREADABLE` or `FormatError` if they are unsound."""
    return _columns_of(read_batch(data, MANIFEST_SCHEMA, what="a manifest", max_rows=max_rows))


def _columns_of(batch: Any) -> Columns:
    names, dtypes, shapes, chunks, cuts = (batch.column(name) for name in MANIFEST_SCHEMA.names)
    if any(column.null_count for column in (names, shapes, chunks)) or any(
        column.values.null_count for column in (shapes, chunks, cuts)
    ):
        raise FormatError("a manifest leaves out a required value")
    shape_at, first_side = _offsets(shapes)
    chunk_at, first_chunk = _offsets(chunks)
    different, dtype = _dtypes(dtypes)
    return Columns(
        names=Texts(*text_buffers(names)),
        dtypes=different,
        dtype=dtype,
        shape_offsets=shape_at,
        sides=values_of(shapes.values)[first_side : first_side + int(shape_at[-1])],
        chunk_offsets=chunk_at,
        digests=_digests_of(chunks.values)[first_chunk : first_chunk + int(chunk_at[-1])],
        cuts=_cuts_of(cuts),
    )


def _offsets(lists: Any) -> tuple[Any, int]:
    """Return the starts of lists among the values inside any list, and the position of the first such value."""
    if len(lists) == 0:
        return np.zeros(1, dtype=np.int64), 0
    at = values_of(lists.offsets)
    first = int(at[0])
    return at - first if first else at, first


def _dtypes(column: Any) -> tuple[tuple[str | None, ...], Any]:
    """Return the distinct dtypes, and for each row the position of its dtype."""
    if column.null_count == 0 and len(column):
        at, data = text_buffers(column)
        n_bytes = int(at[1])
        # Most checkpoints have one dtype, and one comparison costs less than a lookup of each.
        if step_range(at) == (n_bytes, n_bytes) and repeats(data, n_bytes):
            return (column[0].as_py(),), np.broadcast_to(np.intp(0), len(column))
    encoded = column.dictionary_encode()
    different = encoded.dictionary.to_pylist()
    codes = np.where(validity_of(column), values_or_any(encoded.indices), len(different)).astype(np.intp)
    return (tuple(different) if column.null_count == 0 else (*different, None)), codes


def _cuts_of(lists: Any) -> RowCuts | None:
    if lists.null_count == len(lists):
        return None
    at, first = _offsets(lists)
    given = validity_of(lists)
    if np.diff(at)[~given].any():
        raise FormatError("a manifest has cuts of a row that has none")
    return RowCuts(given=given, at=at.astype(np.int64), values=values_of(lists.values)[first : first + int(at[-1])])


def _digests_of(values: Any) -> Digests:
    if len(values) == 0:
        return np.empty((0, DIGEST_BYTES), np.uint8)
    begin = values.offset * DIGEST_BYTES
    flat: Digests = np.frombuffer(values.buffers()[1], np.uint8)[begin : begin + len(values) * DIGEST_BYTES]
    return flat.reshape(-1, DIGEST_BYTES)
