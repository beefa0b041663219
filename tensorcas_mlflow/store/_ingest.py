"""Files and streams on their way into a store: taken apart, hashed and stored in one pass, with bounded memory.

What a stream holds is known only at its end, but its chunks have to be written before. So each batch of them is
written under an intent of its own, which keeps the batch from being collected and never becomes a ref. At the end, when
the manifest is known, an ordinary save declares all of it and looks at everything again; the intents of the batches go
when its own is there. If a collector has taken a batch meanwhile, that save finds it missing and fails: the stream
cannot be read again, and nothing is committed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import guess_itemsize
from tensorcas_mlflow.containers import More, Part, Skeleton, Tape, Tensor, split
from tensorcas_mlflow.content_cuts import ContentCutter
from tensorcas_mlflow.digest import Digests, digest_all, unique_rows
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import BackendError, FencedError, FormatError
from tensorcas_mlflow.manifest import Row
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._claim import Intent, declare, probe, write_packs
from tensorcas_mlflow.store._condemned import read_condemned
from tensorcas_mlflow.store._encode import encode_pieces, groups_of
from tensorcas_mlflow.store._policy import Policy
from tensorcas_mlflow.store._sources import Pieces, Reader, Source
from tensorcas_mlflow.tensor import Spec

_log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Bytes that are held before they are stored; a shorter file is saved as a checkpoint is, with one intent."""

_TAKE_BYTES = 4 << 20
_LOOK_BYTES = 64 << 10
"""Bytes of a skeleton that come in many small parts are put together before they are cut."""
_FREE_ROWS = 16_384
_BYTES_A_ROW = 1024
"""A file may have one row more for so many of its bytes: a row takes about as many in memory, and some 300 in a
manifest. Tensors that come thicker are skeleton."""
_FREE_NAME_BYTES = 4 << 20
_BYTES_A_NAME_BYTE = 16
"""And one byte more of names for so many; tensors have no names after that."""
_MAX_BATCH_PIECES = 1 << 16


@dataclass(slots=True)
class _OpenRow:
    """A row that bytes are being added to."""

    part: Part
    first: int
    """Number of its first chunk, counted over all rows."""
    cutter: ContentCutter | None = None
    waiting: list[memoryview] = field(default_factory=list)
    """Bytes that are to be put together."""
    n_waiting_bytes: int = 0
    given_cuts: Any = None
    n_bytes: int = 0
    piece_start: int = 0
    """The last cut, or the row's start."""
    open: list[memoryview] = field(default_factory=list)
    """The bytes of the chunk that is not ended yet."""
    cuts: list[int] = field(default_factory=list)
    itemsize: int = 0
    """0 until the first bytes are there to guess it from."""


@dataclass(slots=True)
class _Batch:
    """Chunks that are complete and not yet stored."""

    pieces: list[memoryview] = field(default_factory=list)
    itemsizes: list[int] = field(default_factory=list)
    begins_row: list[bool] = field(default_factory=list)
    n_bytes: int = 0


class Ingest:
    """One file or stream being stored. A context manager: at its end the intents of its batches go."""

    def __init__(self, backend: Backend, catalog: Catalog, chunk_bytes: int) -> None:
        self.n_new_bytes = 0
        """Size of the chunks stored so far that the store did not hold."""
        self.n_stored_bytes = 0
        """Bytes added to the store so far."""
        self._backend = backend
        self._catalog = catalog
        self._chunk_bytes = chunk_bytes
        self._intents: list[Intent] = []
        self._digests: list[Digests] = []
        self._sizes: list[int] = []
        self._rows: list[_OpenRow] = []
        self._ends: list[int] = []
        self._batch = _Batch()
        self._n_bytes = 0

    def __enter__(self) -> Ingest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key, _ in self._intents:
            try:
                self._backend.delete(key)
            except BackendError as failure:
                # All is stored, or something else is told already. What stays is removed by a collection.
                _log.warning("the intent of a batch stays: %s", failure)

    def take(self, tape: Tape) -> StreamSource:
        """Take a file apart and store all of it but the last batch.

        Returns:
            Its rows, and the bytes of that batch.

        Raises:
            BackendError: The storage failed; what was written is garbage and nothing is lost.
            Exception: Whatever the tape's source raises; the same.
        """
        for part in split(tape):
            row = self._row_for(part)
            left = part.n_bytes
            while left > 0:
                block = tape.take(min(left, _TAKE_BYTES))
                if not block:
                    break
                left -= len(block)
                self._add(row, block)
                if self._batch.n_bytes >= BATCH_BYTES or len(self._batch.pieces) >= _MAX_BATCH_PIECES:
                    self._store_batch()
        self._close_row()
        self._digests.append(digest_all(self._batch.pieces))
        return StreamSource(
            rows=self._finished_rows(),
            sizes=np.array(self._sizes, dtype=np.int64),
            itemsizes=[row.itemsize for row in self._rows],
            held=self._batch.pieces,
        )

    # --- rows

    def _row_for(self, part: Part) -> _OpenRow:
        """Find the row that a part's bytes go to, or begin one."""
        last = self._rows[-1] if self._rows else None
        goes_on = last is not None and (
            isinstance(part, More) or (type(part) is type(last.part) and not isinstance(part, Tensor))
        )
        if last is not None and goes_on:
            return last
        if isinstance(part, Tensor) and len(self._rows) >= _FREE_ROWS + self._n_bytes // _BYTES_A_ROW:
            return self._row_for(Skeleton(n_bytes=part.n_bytes))
        self._close_row()
        row = _OpenRow(part, len(self._sizes))
        if isinstance(part, Skeleton):
            row.cutter, row.itemsize = ContentCutter(), 1
        elif isinstance(part, Tensor):
            if part.cuts is not None:
                row.given_cuts = np.asarray(part.cuts, dtype=np.int64)
            row.itemsize = _itemsize(part.dtype)
        self._rows.append(row)
        return row

    def _close_row(self) -> None:
        """End the last chunk of the last row."""
        if not self._rows or len(self._ends) == len(self._rows):
            return
        row = self._rows[-1]
        if row.waiting:
            self._cut(row, _waited(row))
        if row.open:
            self._end_chunk(row, b"")
        if row.cuts and row.cuts[-1] < row.n_bytes:
            row.cuts.append(row.n_bytes)
        row.cutter = row.given_cuts = None
        self._ends.append(len(self._sizes))

    def _add(self, row: _OpenRow, block: memoryview) -> None:
        """Add bytes to a row."""
        self._n_bytes += len(block)
        if row.cutter is not None and (row.waiting or len(block) < _LOOK_BYTES):
            row.waiting.append(block)
            row.n_waiting_bytes += len(block)
            if row.n_waiting_bytes < _LOOK_BYTES:
                return
            block = _waited(row)
        self._cut(row, block)

    def _cut(self, row: _OpenRow, block: memoryview) -> None:
        """Cut bytes into chunks."""
        if row.itemsize == 0:
            row.itemsize = guess_itemsize(block)
        start, at = row.n_bytes, 0
        row.n_bytes += len(block)
        for end in self._chunk_ends(row, block, start):
            self._end_chunk(row, block[at : end - start])
            at = end - start
        if at < len(block):
            row.open.append(block[at:])

    def _chunk_ends(self, row: _OpenRow, block: memoryview, start: int) -> list[int]:
        """Say where chunks end in a block: at cuts, and at fixed distances from the cut before."""
        stop = start + len(block)
        ends: list[int] = []
        for cut in [*_cuts(row, block, start), None]:
            n_ended = max(0, start - row.piece_start) // self._chunk_bytes
            first = row.piece_start + (n_ended + 1) * self._chunk_bytes
            if cut is None:
                ends += range(first, stop + 1, self._chunk_bytes)
            else:
                ends += [*range(first, cut, self._chunk_bytes), cut]
                row.cuts.append(cut)
                row.piece_start = cut
        return ends

    def _end_chunk(self, row: _OpenRow, rest: memoryview | bytes) -> None:
        """Put a chunk into the batch: what is open of it, and the rest."""
        piece = memoryview(b"".join([*row.open, rest])) if row.open else memoryview(rest)
        row.open.clear()
        batch = self._batch
        batch.pieces.append(piece)
        batch.itemsizes.append(row.itemsize)
        batch.begins_row.append(len(self._sizes) == row.first)
        batch.n_bytes += len(piece)
        self._sizes.append(len(piece))

    def _finished_rows(self) -> list[Row]:
        digests = np.concatenate(self._digests)
        names: set[str] = {""}
        rows: list[Row] = []
        n_name_bytes = _FREE_NAME_BYTES + self._n_bytes // _BYTES_A_NAME_BYTE
        for row, end in zip(self._rows, self._ends, strict=True):
            spec = _spec_of(row, names, max_name_bytes=n_name_bytes)
            n_name_bytes -= len(spec.name.encode())
            names.add(spec.name)
            cuts = np.array(row.cuts, dtype=np.int64) if len(row.cuts) > 1 else None
            rows.append(Row(spec=spec, cuts=cuts, digests=digests[row.first : end]))
        return rows

    # --- batches

    def _store_batch(self) -> None:
        """Store what is new of a batch, under an intent that keeps all of it."""
        batch, self._batch = self._batch, _Batch()
        digests = digest_all(batch.pieces)
        self._digests.append(digests)
        unique, first, _ = unique_rows(digests)
        # No manifest of this name will ever be: the intent is there for its digests.
        never = f"{uuid.uuid4().hex}{uuid.uuid4().hex}"
        self._intents.append(declare(self._backend, never, unique))
        condemned = read_condemned(self._backend)
        new = np.sort(first[probe(self._backend, self._catalog, unique, condemned)])
        if not len(new):
            return
        sizes = np.fromiter(map(len, batch.pieces), dtype=np.int64, count=len(batch.pieces))[new]
        self.n_new_bytes += int(sizes.sum())
        itemsizes, begins_row = np.array(batch.itemsizes), np.array(batch.begins_row)
        groups = (
            Pieces(
                chunks=numbers,
                rows=None,
                data=[batch.pieces[at] for at in numbers.tolist()],
                digests=digests[numbers],
                itemsizes=itemsizes[numbers],
                begins_row=begins_row[numbers],
            )
            for numbers in (new[part] for part in groups_of(sizes))
        )
        payloads = encode_pieces(groups, Policy.of(None))
        self.n_stored_bytes += write_packs(self._backend, self._catalog, payloads, condemned)


class StreamSource(Source):
    """The rows of a stream that has passed by, and the bytes of its last batch; the others are in the store."""

    def __init__(
        self, *, rows: Sequence[Row], sizes: Any, itemsizes: Sequence[int], held: Sequence[memoryview]
    ) -> None:
        self.rows = rows
        self.sizes = sizes
        self._itemsizes = np.array(itemsizes, dtype=np.int64)
        self._held = held
        self._first_held = len(sizes) - len(held)

    @property
    def itemsizes(self) -> Any:
        return self._itemsizes

    def _reader(self) -> Reader:
        def data_of(chunks: Any, _rows: Any) -> list[Any]:
            if chunks[0] < self._first_held:
                # It was stored with its batch: a collector took the batch's intent for dead, and the chunk with it.
                raise FencedError(1)
            return [self._held[at] for at in (chunks - self._first_held).tolist()]

        return data_of


def _waited(row: _OpenRow) -> memoryview:
    """Put together what was waiting."""
    block = row.waiting[0] if len(row.waiting) == 1 else memoryview(b"".join(row.waiting))
    row.waiting.clear()
    row.n_waiting_bytes = 0
    return block


def _cuts(row: _OpenRow, block: memoryview, start: int) -> list[int]:
    """Say where pieces end in a block that begins at some offset of its row."""
    if row.cutter is not None:
        return row.cutter.feed(np.frombuffer(block, np.uint8))
    if row.given_cuts is not None:
        begin, end = np.searchsorted(row.given_cuts, [start, start + len(block)], side="right")
        cuts: list[int] = row.given_cuts[begin:end].tolist()
        return cuts
    return []


def _itemsize(dtype: str | None) -> int:
    if dtype is None:
        return 0
    try:
        return 1 if dtype[0] in "SU" else parse_dtype(dtype).itemsize
    except FormatError:
        return 0


def _spec_of(row: _OpenRow, names: set[str], *, max_name_bytes: int) -> Spec:
    """Describe a row by what its file says of it, or as plain bytes if that is not what has come."""
    part = row.part
    plain = Spec(name="", dtype=None, shape=(row.n_bytes,))
    if not isinstance(part, Tensor):
        return plain
    name = "" if part.name in names or len(part.name.encode()) > max_name_bytes else part.name
    try:
        if part.dtype is not None and part.name != SKELETON:
            shape = part.shape
            if shape is None:
                shape = (row.n_bytes // parse_dtype(part.dtype).itemsize,)
            spec = Spec(name=name, dtype=part.dtype, shape=shape)
            if spec.n_bytes == row.n_bytes:
                return spec
        return Spec(name=name, dtype=None, shape=(row.n_bytes,))
    except FormatError:
        return plain
