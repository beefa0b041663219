"""Files and streams on their way into a store: taken apart, hashed and stored in one pass, with bounded memory.

A stream shows its content only at its end, but its chunks have to be written before. So each batch of chunks is
written under an intent of its own. This intent protects the batch and never becomes a ref. At the end, when
the manifest is known, an ordinary save declares all chunks and checks everything again; then the stream withdraws the
intents of its batches. If a collector has removed a batch meanwhile, the save finds it missing and fails: the stream
cannot be read again, and nothing is committed.
"""

from __future__ import annotations

import logging
import uuid
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import Digests, digest_all, unique_rows
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.file_formats import FilePart, Learned, More, Skeleton, Tape, Tensor, split
from tensorcas_mlflow.manifest import Row
from tensorcas_mlflow.store._base_plan import BasePlan
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._claim import Intent, declare, look, probe, write_packs
from tensorcas_mlflow.store._encode import encode_chunks
from tensorcas_mlflow.store._parents import Parents
from tensorcas_mlflow.store._policy import Policy
from tensorcas_mlflow.store._recipes import new_chooser
from tensorcas_mlflow.store._stream_rows import OpenRow, StreamSource

_log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Bytes held before they are stored; a shorter file is saved like a checkpoint, with one intent."""

_TAKE_BYTES = 4 << 20
_FREE_ROWS = 16_384
_BYTES_A_ROW = 1024
"""A file may have one row for so many of its bytes: a row takes about as many in memory, and some 300 in a
manifest. Denser tensors stay in the skeleton."""
_FREE_NAME_BYTES = 4 << 20
_BYTES_A_NAME_BYTE = 16
"""A file may have one byte of names for so many of its bytes; after that tensors have no names."""
_MAX_BATCH_PIECES = 1 << 16


@dataclass(slots=True)
class _Batch:
    """Complete chunks not yet stored."""

    pieces: list[memoryview] = field(default_factory=list)
    n_bytes: int = 0


class Ingest:
    """One file or stream being stored. A context manager: it withdraws the intents of its batches at its end."""

    def __init__(
        self, backend: Backend, catalog: Catalog, chunk_bytes: int, *, policy: Policy, parents: Parents
    ) -> None:
        """Begin without a byte.

        Args:
            backend: The store's.
            catalog: The store's.
            chunk_bytes: The store's chunk size.
            policy: Encoding effort.
            parents: Search for the stream's earlier states.
        """
        self.n_new_bytes = 0
        """Size of the chunks stored so far that were missing from the store."""
        self.n_stored_bytes = 0
        """Bytes added to the store so far."""
        self._backend = backend
        self._catalog = catalog
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._parents = parents if policy is not Policy.FAST else None
        self._chooser = new_chooser(policy)
        self._intents: list[Intent] = []
        self._digests: list[Digests] = []
        self._sizes: list[int] = []
        self._rows: list[OpenRow] = []
        self._ends: list[int] = []
        """For each closed row the number of the chunk after its last one."""
        self._announced: dict[str, int] = {}
        """Numbers of the rows by their announced names; of two with one name the last one's."""
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
                # Everything is stored, or another error is on its way. A collection removes leftover intents.
                _log.warning("the intent of a batch stays: %s", failure)

    def take(self, tape: Tape) -> StreamSource:
        """Take a file apart and store all of it except the last batch.

        Returns:
            Its rows, and the bytes of that batch.

        Raises:
            BackendError: The storage failed; the written blobs are garbage and nothing is lost.
            Exception: The tape's source raised it; the same holds.
        """
        for part in split(tape):
            if isinstance(part, Learned):
                self._learn(part)
                continue
            row = self._row_for(part)
            left = part.n_bytes
            while left > 0:
                block = tape.take(min(left, _TAKE_BYTES))
                if not block:
                    break
                left -= len(block)
                self._n_bytes += len(block)
                self._put(row.add(block))
                if self._batch.n_bytes >= BATCH_BYTES or len(self._batch.pieces) >= _MAX_BATCH_PIECES:
                    self._store_batch()
        self._close_row()
        self._digests.append(digest_all(self._batch.pieces))
        return self._source(self._finished_rows(), 0)

    # --- rows

    def _row_for(self, part: FilePart) -> OpenRow:
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
        row = OpenRow(part, first=len(self._sizes), chunk_bytes=self._chunk_bytes)
        if isinstance(part, Tensor) and part.name:
            self._announced[part.name] = len(self._rows)
        self._rows.append(row)
        return row

    def _learn(self, learned: Learned) -> None:
        """Describe earlier rows by facts the file states only now."""
        for name, tensor in learned.tensors.items():
            number = self._announced.pop(name, None)
            if number is not None:
                self._rows[number].learn(tensor)

    def _close_row(self) -> None:
        """End the last row."""
        if self._rows and self._rows[-1].is_open:
            self._put(self._rows[-1].close())
            self._ends.append(len(self._sizes))

    def _put(self, pieces: Iterable[memoryview]) -> None:
        """Put chunks into the batch."""
        for piece in pieces:
            self._batch.pieces.append(piece)
            self._batch.n_bytes += len(piece)
            self._sizes.append(len(piece))

    def _finished_rows(self) -> list[Row]:
        digests = np.concatenate(self._digests)
        names: set[str] = {""}
        rows: list[Row] = []
        n_name_bytes = _FREE_NAME_BYTES + self._n_bytes // _BYTES_A_NAME_BYTE
        for row, end in zip(self._rows, self._ends, strict=True):
            spec = row.spec()
            if spec.name in names or len(spec.name.encode()) > n_name_bytes:
                spec = replace(spec, name="")
            n_name_bytes -= len(spec.name.encode())
            names.add(spec.name)
            rows.append(row.row(digests[row.first : end], spec))
        return rows

    # --- batches

    def _source(self, rows: list[Row], first_row: int) -> StreamSource:
        """Return the last rows, from a given one on, with the bytes of the batch."""
        return StreamSource(
            rows=rows,
            first_row=first_row,
            sizes=np.array(self._sizes[self._rows[first_row].first if rows else 0 :], dtype=np.int64),
            itemsizes=[row.itemsize for row in self._rows[first_row:]],
            held=self._batch.pieces,
        )

    def _batch_source(self) -> StreamSource:
        """Hash the batch, and return it with its rows, as far as they are known."""
        first_chunk = len(self._sizes) - len(self._batch.pieces)
        self._digests.append(digest_all(self._batch.pieces))
        first_row = bisect_right(self._ends, first_chunk)
        begin = self._rows[first_row].first
        digests = _last(self._digests, len(self._sizes) - begin)
        ends = [*self._ends[first_row:], len(self._sizes)]
        rows = [
            row.row(digests[row.first - begin : end - begin])
            for row, end in zip(self._rows[first_row:], ends, strict=True)
        ]
        return self._source(rows, first_row)

    def _store_batch(self) -> None:
        """Store the new chunks of a batch, under an intent that protects all of it."""
        source = self._batch_source()
        self._batch = _Batch()
        digests = self._digests[-1]
        unique, first, _ = unique_rows(digests)
        first += len(source.sizes) - len(digests)
        plan = self._plan(source, unique, first)
        # No manifest will ever have this name: the intent exists for its digests.
        never = f"{uuid.uuid4().hex}{uuid.uuid4().hex}"
        self._intents.append(declare(self._backend, never, unique, plan.packs if plan is not None else ()))
        condemned = look(self._backend, self._catalog)
        if plan is not None:
            plan.leave_out(self._backend, condemned.packs)
        new = np.sort(first[probe(self._backend, self._catalog, unique, condemned)])
        self.n_new_bytes += int(source.sizes[new].sum())
        if plan is not None and self._parents is not None and self._parents.nearest is not None:
            source = source.like(self._parents.nearest)
        payloads = encode_chunks(source, new, self._policy, plan, self._chooser)
        self.n_stored_bytes += write_packs(self._backend, self._catalog, payloads, condemned)

    def _plan(self, source: StreamSource, unique: Digests, first: np.ndarray) -> BasePlan | None:
        """Find possible bases for a batch, like a save does: the intent has to name them."""
        if self._parents is None:
            return None
        missing = ~self._catalog.find_sound(unique, ()).found
        return self._parents.plan(source, np.sort(first[missing])) if missing.any() else None


def _last(digests: list[Digests], n: int) -> Digests:
    """Return the last ones of all digests."""
    begin = len(digests)
    while n > 0:
        begin -= 1
        n -= len(digests[begin])
    return np.concatenate(digests[begin:])[-n:]
