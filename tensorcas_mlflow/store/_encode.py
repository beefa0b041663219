"""From the chunks of a save to payloads of packs, encoded on all threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorcas_mlflow import threads
from tensorcas_mlflow.codecs import encode_best, load_codecs
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.pack import Payload
from tensorcas_mlflow.store._sources import Source


def encode_chunks(source: Source, chunks: Any) -> Iterator[Payload]:
    """Encode some chunks of a source.

    Args:
        source: Where the bytes are.
        chunks: Which: ascending numbers, counted over all rows.

    Yields:
        Payloads in that order, a bounded number of them ahead of the caller.

    Raises:
        ConflictError: The bytes are no longer those that were hashed.
    """
    load_codecs()
    itemsizes = [_itemsize(row.spec.dtype, row.spec.numpy_dtype.itemsize) for row in source.rows]

    def jobs() -> Iterator[tuple[int, int, bool, Any]]:
        for row, wanted in source.by_row(chunks):
            numbers = wanted.tolist()
            for nth, (number, piece) in enumerate(zip(numbers, source.chunks(row, numbers), strict=True)):
                yield row, number, nth == 0, piece

    def encode(job: tuple[int, int, bool, Any]) -> Payload:
        row, number, begins_row, piece = job
        wanted = source.rows[row].digests[number].tobytes()
        # The array may be a live model's. Bytes stored under another's digest would spoil every checkpoint that shares
        # the chunk, so what is checked and stored is a copy.
        raw = bytes(piece)
        if digest(raw) != wanted:
            raise ConflictError(f"{source.describe(row)} was changed while it was saved: save it again")
        codec, typesize, data = encode_best(raw, itemsizes[row])
        return Payload(
            digest=wanted,
            raw_bytes=len(raw),
            codec=codec,
            typesize=typesize,
            data=data,
            begins_row=begins_row,
        )

    return threads.ordered_map(encode, jobs())


def _itemsize(dtype: str | None, itemsize: int) -> int:
    return 1 if dtype is None or dtype[0] in "SU" else itemsize
