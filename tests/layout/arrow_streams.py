"""Arrow streams of manifests as pyarrow writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("name", pa.utf8()),
        pa.field("dtype", pa.utf8()),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("chunks", pa.list_(pa.binary(32))),
        pa.field("cuts", pa.list_(pa.int64())),
    ]
)


def arrow_stream(columns: Mapping[str, Any], said: bytes | str | None) -> bytes:
    """Write a stream with a head, from lists or pyarrow's arrays."""
    batch = pa.record_batch(
        [pa.array(columns[field.name], field.type) for field in MANIFEST_SCHEMA],
        schema=MANIFEST_SCHEMA.with_metadata({b"tensorcas": said}),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
