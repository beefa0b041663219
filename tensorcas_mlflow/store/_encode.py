"""From the chunks of a save to payloads of packs, encoded on all threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tensorcas_mlflow import threads
from tensorcas_mlflow.codecs import encode_best, load_codecs
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.pack import Payload
from tensorcas_mlflow.store._sources import Source

_GROUP_BYTES = 64 << 10
"""Pieces of so many bytes together are one thread's task: to hand one over takes as long as to encode a small one."""
_MAX_GROUP_PIECES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One chunk to be encoded."""

    digest: bytes
    data: Any
    itemsize: int
    """Size of an element; 1 for text."""
    begins_row: bool
    origin: str | None
    """Whose bytes these are, if somebody else may change them; None for bytes that nobody else has."""


def encode_pieces(pieces: Iterable[Piece]) -> Iterator[Payload]:
    """Encode chunks.

    Yields:
        Payloads in the order of the pieces, a bounded number of them and of bytes ahead of the caller.

    Raises:
        ConflictError: Bytes are no longer those that were hashed.
    """
    load_codecs()
    for payloads in threads.ordered_map(_encode_group, _groups(pieces)):
        yield from payloads


def encode_chunks(source: Source, chunks: Any) -> Iterator[Payload]:
    """Encode some chunks of a source.

    Args:
        source: Where the bytes are.
        chunks: Which: ascending numbers, counted over all rows.

    Raises:
        ConflictError: The bytes are no longer those that were hashed.
    """

    def pieces() -> Iterator[Piece]:
        for row, wanted in source.by_row(chunks):
            numbers = wanted.tolist()
            digests, itemsize, origin = source.rows[row].digests, source.itemsize(row), source.origin(row)
            for nth, (number, data) in enumerate(zip(numbers, source.chunks(row, numbers), strict=True)):
                yield Piece(
                    digest=digests[number].tobytes(), data=data, itemsize=itemsize, begins_row=nth == 0, origin=origin
                )

    # Where nothing is new no codec is imported either.
    return encode_pieces(pieces()) if len(chunks) else iter(())


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Put neighbouring pieces together, each large one by itself."""
    group: list[Piece] = []
    n_bytes = 0
    for piece in pieces:
        n_piece_bytes = memoryview(piece.data).nbytes
        if group and (n_bytes + n_piece_bytes > _GROUP_BYTES or len(group) == _MAX_GROUP_PIECES):
            yield group
            group, n_bytes = [], 0
        if piece.origin is not None and n_piece_bytes < _GROUP_BYTES:
            # A small piece may be a view of a large array that was copied for it, and many of them would be kept.
            piece = replace(piece, data=bytes(piece.data))
        group.append(piece)
        n_bytes += n_piece_bytes
    if group:
        yield group


def _encode_group(group: list[Piece]) -> list[Payload]:
    return [_encode(piece) for piece in group]


def _encode(piece: Piece) -> Payload:
    raw = piece.data
    if piece.origin is not None:
        # The array may be a live model's. Bytes stored under another's digest would spoil every checkpoint that shares
        # the chunk, so what is checked and stored is a copy.
        raw = bytes(raw)
        if digest(raw) != piece.digest:
            raise ConflictError(f"{piece.origin} was changed while it was saved: save it again")
    codec, typesize, data = encode_best(raw, piece.itemsize)
    return Payload(
        digest=piece.digest,
        raw_bytes=len(raw),
        codec=codec,
        typesize=typesize,
        data=data,
        begins_row=piece.begins_row,
    )
