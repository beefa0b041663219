"""Ingest of files and streams: split, hash and store in one pass, with bounded memory."""

from __future__ import annotations

import logging
import time
import uuid
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.content_cuts import ContentCutter, opaque_sizes
from tensorcas_mlflow.base.digest import Digests, digest_all, unique_rows
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import Spec, distinct
from tensorcas_mlflow.chunk_io import Catalog
from tensorcas_mlflow.codecs import guess_itemsize
from tensorcas_mlflow.errors import BackendError, FencedError, FormatError, NotFoundError
from tensorcas_mlflow.file_formats import (
    DerivedBytes,
    FilePart,
    FilePlace,
    Learned,
    More,
    PlainBytes,
    Skeleton,
    Tape,
    Tensor,
)
from tensorcas_mlflow.layout import Condemnation
from tensorcas_mlflow.layout.manifests import Manifest, Row, sketched_rows
from tensorcas_mlflow.layout.packs import Mask, new_pack_name
from tensorcas_mlflow.store._base_plans import Ancestry, BasePlan
from tensorcas_mlflow.store._bases import Parents, matching_row
from tensorcas_mlflow.store._choose import Policy
from tensorcas_mlflow.store._derivations import Derived
from tensorcas_mlflow.store._encode import encode_chunks, new_chooser
from tensorcas_mlflow.store._save import WrittenIntent, declare, look, probe, write_packs
from tensorcas_mlflow.store._sketching import sketch_rows
from tensorcas_mlflow.store._sources import ReadRows, Source, Words

_LOOK_BYTES = 64 << 10
"""Size to which many small parts of a skeleton are joined before they are cut."""


class OpenRow:
    """A row still receiving bytes."""

    def __init__(
        self, part: FilePart, *, first: int, chunk_bytes: int, is_stored: Callable[[memoryview], bool]
    ) -> None:
        """Begin a row.

        Args:
            part: The file's description of it.
            first: Number of its first chunk, counted over all rows.
            chunk_bytes: The store's chunk size.
            is_stored: Tells whether the store has a chunk of these bytes.
        """
        self.part = part
        self.first = first
        self.n_bytes = 0
        """Number of bytes received and cut."""
        self.itemsize = 0
        """0 until the first bytes arrive; they give a guess."""
        self.is_open = True
        self._chunk_bytes = chunk_bytes
        self._is_stored = is_stored
        self._cutter: ContentCutter | None = None
        self._cutter_start = 0
        """Offset in the row of the cutter's first byte."""
        self._given_cuts: Any = None
        self._cuts: list[int] = []
        self._waiting: list[memoryview] = []
        """Bytes waiting to be joined."""
        self._n_waiting_bytes = 0
        self._piece_start = 0
        """The last cut, or the row's start."""
        self._open: list[memoryview] = []
        """The bytes of the unfinished chunk."""
        if isinstance(part, Skeleton):
            self._cutter, self.itemsize = ContentCutter(), 1
        elif isinstance(part, PlainBytes):
            self._cutter = self._new_cutter()
        elif isinstance(part, Tensor):
            if part.cuts is not None:
                self._given_cuts = np.asarray(part.cuts, dtype=np.int64)
            self.itemsize = _itemsize(part.dtype)

    def learn(self, tensor: Tensor) -> None:
        """Describe the row by facts the file states after its bytes."""
        assert isinstance(self.part, Tensor)
        if tensor.dtype is None:
            self.part = replace(self.part, name=tensor.name)
        else:
            self.part, self.itemsize = tensor, _itemsize(tensor.dtype)

    def add(self, block: memoryview) -> list[memoryview]:
        """Add bytes, and return the chunks completed by them."""
        if self._cutter is not None and (self._waiting or len(block) < _LOOK_BYTES):
            self._waiting.append(block)
            self._n_waiting_bytes += len(block)
            if self._n_waiting_bytes < _LOOK_BYTES:
                return []
            block = self._waited()
        return self._cut(block)

    def end_piece(self) -> list[memoryview]:
        """Cut behind the bytes so far, look for cuts anew behind them, and return the chunks completed by that."""
        chunks = self._cut(self._waited()) if self._waiting else []
        if self._cutter is not None and self.n_bytes > self._piece_start:
            if self._open:
                chunks.append(self._end_chunk(b""))
            self._cuts.append(self.n_bytes)
            self._piece_start = self._cutter_start = self.n_bytes
            self._cutter = self._new_cutter()
        return chunks

    def close(self) -> list[memoryview]:
        """End the row, and return its last chunks."""
        chunks = self._cut(self._waited()) if self._waiting else []
        if self._open:
            chunks.append(self._end_chunk(b""))
        if self._cuts and self._cuts[-1] < self.n_bytes:
            self._cuts.append(self.n_bytes)
        self._cutter = self._given_cuts = None
        self.is_open = False
        return chunks

    def row(self, digests: Digests, spec: Spec | None = None) -> Row:
        """Return the row for the manifest or, if its bytes are still arriving, its likely form.

        Args:
            digests: Digests of its chunks so far.
            spec: Its description; by default the file's.
        """
        cuts = self._cuts
        if self.is_open and self._given_cuts is not None:
            cuts = self._given_cuts
        at = np.array(cuts, dtype=np.int64) if len(cuts) > 1 else None
        return Row(spec=spec or self.spec(), cuts=at, digests=digests)

    def spec(self) -> Spec:
        """Describe the row as its file does, or as plain bytes if its contents differ."""
        part = self.part
        plain = Spec(name="", dtype=None, shape=(self.n_bytes,))
        if not isinstance(part, Tensor):
            return plain
        try:
            if part.dtype is not None and part.name != SKELETON:
                shape = part.shape
                if shape is None:
                    n_bytes = max(part.n_bytes, self.n_bytes) if self.is_open else self.n_bytes
                    shape = (n_bytes // parse_dtype(part.dtype).itemsize,)
                spec = Spec(name=part.name, dtype=part.dtype, shape=shape)
                if spec.n_bytes == self.n_bytes or (self.is_open and spec.n_bytes > self.n_bytes):
                    return spec
            return replace(plain, name=part.name)
        except FormatError:
            return plain

    def _cut(self, block: memoryview) -> list[memoryview]:
        """Cut bytes into chunks."""
        if self.n_bytes == 0 and isinstance(self.part, PlainBytes) and self._is_on_the_grid(block):
            self._cutter = None
        if self.itemsize == 0:
            self.itemsize = guess_itemsize(block)
        start, at = self.n_bytes, 0
        self.n_bytes += len(block)
        chunks = []
        for end in self._chunk_ends(block, start):
            chunks.append(self._end_chunk(block[at : end - start]))
            at = end - start
        if at < len(block):
            self._open.append(block[at:])
        return chunks

    def _is_on_the_grid(self, block: memoryview) -> bool:
        """Tell whether unknown bytes begin as a stored tensor does, or as a file that an earlier release has cut.

        The test is the first chunk of the fixed grid that cuts by content do not give, too.
        """
        grid = self._chunk_bytes
        cuts = {0, *self._new_cutter().feed(np.frombuffer(block, np.uint8))}
        ends = (end for end in range(grid, len(block) + 1, grid) if not {end - grid, end} <= cuts)
        end = next(ends, None)
        return end is not None and self._is_stored(block[end - grid : end])

    def _new_cutter(self) -> ContentCutter:
        """Return a cutter for unknown bytes."""
        sizes = opaque_sizes(self._chunk_bytes)
        return ContentCutter(lambda _: sizes)

    def _chunk_ends(self, block: memoryview, start: int) -> list[int]:
        """Return the chunk ends in a block: cuts, and fixed distances from the previous cut."""
        stop = start + len(block)
        ends: list[int] = []
        for cut in [*self._cuts_in(block, start), None]:
            n_ended = max(0, start - self._piece_start) // self._chunk_bytes
            first = self._piece_start + (n_ended + 1) * self._chunk_bytes
            if cut is None:
                ends += range(first, stop + 1, self._chunk_bytes)
            else:
                ends += [*range(first, cut, self._chunk_bytes), cut]
                self._cuts.append(cut)
                self._piece_start = cut
        return ends

    def _cuts_in(self, block: memoryview, start: int) -> list[int]:
        """Return the ends of pieces in a block that begins at some offset of the row."""
        if self._cutter is not None:
            return [self._cutter_start + cut for cut in self._cutter.feed(np.frombuffer(block, np.uint8))]
        if self._given_cuts is not None:
            begin, end = np.searchsorted(self._given_cuts, [start, start + len(block)], side="right")
            cuts: list[int] = self._given_cuts[begin:end].tolist()
            return cuts
        return []

    def _end_chunk(self, rest: memoryview | bytes) -> memoryview:
        """Join the unfinished chunk and its last part."""
        piece = memoryview(b"".join([*self._open, rest])) if self._open else memoryview(rest)
        self._open.clear()
        return piece

    def _waited(self) -> memoryview:
        """Join the waiting bytes."""
        waiting = self._waiting
        block = waiting[0] if len(waiting) == 1 else memoryview(b"".join(waiting))
        waiting.clear()
        self._n_waiting_bytes = 0
        return block


class StreamSource(Source):
    """Rows of a stream with some bytes already stored, and its last bytes."""

    def __init__(
        self,
        *,
        rows: Sequence[Row],
        first_row: int,
        sizes: Any,
        itemsizes: Any,
        held: Sequence[memoryview],
        held_at: Any = None,
        inputs: frozenset[int] = frozenset(),
    ) -> None:
        """Combine rows with the bytes of some of their chunks.

        Args:
            rows: Consecutive rows; the last one may have fewer chunks than it will.
            first_row: Number of the first of them.
            sizes: Sizes of their chunks.
            itemsizes: Size of an element of each row.
            held: Some of the chunks.
            held_at: For each chunk its number among these, or -1; None if they are the last ones.
            inputs: See `Source.inputs`.
        """
        self.rows = rows
        self.first_row = first_row
        self.sizes = sizes
        self._itemsizes = np.array(itemsizes, dtype=np.int64)
        self._held = held
        self.inputs = inputs
        if held_at is None:
            held_at = np.maximum(np.arange(len(held) - len(sizes), len(held)), -1)
        self._held_at = held_at

    def like(self, parent: Manifest) -> StreamSource:
        """Describe unknown rows like the rows with the same numbers in another file.

        Only their encoding depends on it.
        """
        assert self.first_row is not None
        rows, itemsizes = list(self.rows), self._itemsizes.copy()
        for number, row in enumerate(rows):
            if row.spec.dtype is None and row.spec.name:
                place = {row.spec.name: self.first_row + number}
                other = matching_row(row, parent.chunk_bytes, parent, place)
                is_open = number == len(rows) - 1
                if other is not None and (is_open or other.spec.n_bytes == row.spec.n_bytes):
                    rows[number] = replace(row, spec=other.spec)
                    itemsizes[number] = _itemsize(other.spec.dtype)
        return StreamSource(
            rows=rows,
            first_row=self.first_row,
            sizes=self.sizes,
            itemsizes=itemsizes,
            held=self._held,
            held_at=self._held_at,
            inputs=self.inputs,
        )

    @property
    def itemsizes(self) -> Any:
        return self._itemsizes

    def holds(self, chunks: Any) -> Mask:
        is_held: Mask = self._held_at[chunks] >= 0
        return is_held

    def _reader(self) -> ReadRows:
        def data_of(chunks: Any, _rows: Any) -> list[Any]:
            places = self._held_at[chunks]
            if (places < 0).any():
                # It was stored with its batch: a collector treated the batch's intent as dead, and deleted the chunk.
                raise FencedError(1)
            return [self._held[at] for at in places.tolist()]

        return data_of


def _itemsize(dtype: str | None) -> int:
    if dtype is None:
        return 0
    try:
        return 1 if dtype[0] in "SU" else parse_dtype(dtype).itemsize
    except FormatError:
        return 0


_log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
"""Bytes held before they are stored; a shorter file is saved like a checkpoint, with one intent."""

_TAKE_BYTES = 4 << 20
_NAMES_AHEAD = 32
"""Number of packs that an intent of a stream names before they are written; a batch mostly writes one."""
_NAMES_LAST_S = 1200.0
"""A name is given to a pack within this time: in an object store it begins with the time, and a pack must arrive within
an hour of it for other processes to find it by a listing."""
_MOST_FORESEEN = 1 << 16
"""Bound of the chunks of an earlier state that are looked up for the packs later batches may rely on."""
_MOST_NAMED = 1024
"""Bound of the packs that an intent names for later batches."""
_FREE_ROWS = 16_384
_BYTES_A_ROW = 1024
"""A file may have one row for so many of its bytes: a row takes about as many in memory, and some 300 in a
manifest. Denser tensors stay in the skeleton."""
_FREE_NAME_BYTES = 4 << 20
_BYTES_A_NAME_BYTE = 16
"""A file may have one byte of names for this many of its bytes; beyond that, tensors have no names."""
_MAX_BATCH_PIECES = 1 << 16
_MOST_ROWS_OF_STREAM = 1000
"""Rows of the content of a compressed stream; a function has at most 1,024 inputs (``docs/format.md``)."""


@dataclass(slots=True)
class _Batch:
    """Complete chunks not yet stored."""

    pieces: list[memoryview] = field(default_factory=list)
    n_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Cover:
    """An intent of a stream that covers its later batches too: it names the packs these may rely on or write."""

    condemned: Condemnation
    """The condemned lists, read after the intent was created."""
    packs: frozenset[str]
    """All packs that the intent names."""
    names: deque[str]
    """Those of them that do not exist yet: the names of the next packs to be written."""
    until_s: float
    """Time, on the monotonic clock, at which the names are too old to be given to packs."""

    def covers(self, packs: Collection[str]) -> bool:
        """Tell whether a batch may rely on some packs, and write packs of its own."""
        return self.packs.issuperset(packs) and bool(self.names) and time.monotonic() < self.until_s

    def drawn(self) -> Iterator[str]:
        """Yield the names of the next packs."""
        while self.names:
            yield self.names.popleft()


class _Stream(NamedTuple):
    """Bytes of a file that a function makes of their content."""

    function: str
    params: Mapping[str, Any]
    inputs: range
    """Numbers of the rows of its content."""

    def derived(self, number: int, rows: Sequence[Row]) -> Derived:
        """Return its row as a function of the others.

        Args:
            number: Number of its row.
            rows: All rows.
        """
        inputs = [rows[at] for at in self.inputs]
        return Derived(function=self.function, params=self.params, inputs=inputs, row=rows[number], made=_not_kept)


def _not_kept() -> memoryview:
    # Its file describes no stream anew. So a save needs its bytes only if a collector gave the save up.
    raise FencedError(1)


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
        self.n_batches = 0
        """Number of batches stored so far."""
        self._cover: _Cover | None = None
        """The last intent that covers later batches."""
        self._backend = backend
        self._catalog = catalog
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._parents = parents if policy is not Policy.FAST else None
        self._chooser = new_chooser(policy)
        self._intents: list[WrittenIntent] = []
        self._digests: list[Digests] = []
        self._sizes: list[int] = []
        self._rows: list[OpenRow] = []
        self._ends: list[int] = []
        """For each closed row the number of the chunk after its last one."""
        self._announced: dict[str, int] = {}
        """Numbers of the rows by their announced names; of two with one name the last one's."""
        self._batch = _Batch()
        self._derived: dict[int, Derived] = {}
        """The derived rows in earlier batches, by number."""
        self._open_derived: tuple[int, Derived] | None = None
        """The last row and its function, if that gave all of its chunks in earlier batches, which are not stored."""
        self._inputs: set[int] = set()
        """Numbers of the rows that are no part of the file: the contents of compressed streams."""
        self._streams: dict[int, _Stream] = {}
        """The rows that are compressed streams, by number."""
        self._words: list[Words] = []
        """Sketches of the rows in each earlier batch."""
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

    def take(self, tape: Tape, place: FilePlace | None = None) -> StreamSource:
        """Take a file apart and store all of it except the last batch.

        Args:
            tape: The file.
            place: See `split`.

        Returns:
            Its rows, and the bytes of that batch.

        Raises:
            BackendError: The storage failed; the written blobs are garbage and nothing is lost.
            Exception: The tape's source raised it; the same holds.
        """
        # Only a stream needs the formats.
        from tensorcas_mlflow.file_formats import split

        for part in split(tape, place):
            self._take_part(part, tape)
        self._close_row()
        self._digests.append(digest_all(self._batch.pieces))
        self._go_on_deriving()
        rows = self._finished_rows()
        for number, derived in list(self._derived.items()):
            spec = rows[number].spec
            if (spec.dtype, spec.shape) != (derived.row.spec.dtype, derived.row.spec.shape):
                # The file has described the tensor anew since.
                self._store_made(number, self._derived.pop(number), len(rows[number].digests))
        return self._whole(rows)

    def _take_part(self, part: FilePart | Learned, tape: Tape) -> None:
        """Take the bytes of a part from a tape."""
        if isinstance(part, Learned):
            self._learn(part)
            return
        if isinstance(part, DerivedBytes):
            self._take_derived(part, tape)
            return
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

    def _take_derived(self, part: DerivedBytes, tape: Tape) -> None:
        """Take the content of derived bytes as rows of its own, and the bytes as a row derived of them."""
        if self._has_enough_rows():
            self._take_part(PlainBytes(n_bytes=part.n_bytes), tape)
            return
        self._close_row()
        first = len(self._rows)
        for inner in part.parts:
            if len(self._rows) >= first + _MOST_ROWS_OF_STREAM and not isinstance(inner, Learned):
                self._take_part(Skeleton(n_bytes=inner.n_bytes), part.content)
            else:
                self._take_part(inner, part.content)
        self._close_row()
        number = len(self._rows)
        self._inputs.update(range(first, number))
        self._streams[number] = _Stream(part.function, part.params, range(first, number))
        self._take_part(Tensor(n_bytes=part.n_bytes), tape)
        self._close_row()

    def _whole(self, rows: list[Row]) -> StreamSource:
        """Return all rows, those of the content first, with the bytes of the last batch."""
        if not self._streams:
            source = self._source(rows, 0)
            source.known_words, source.derived = self._words, self._derived
            return source
        is_input = np.isin(np.arange(len(rows)), list(self._inputs))
        order = np.argsort(is_input, kind="stable")
        rank = np.argsort(order)
        begins, ends = np.array([row.first for row in self._rows]), np.array(self._ends)
        chunks = np.concatenate([np.arange(begins[at], ends[at]) for at in order.tolist()])
        n_stored = len(self._sizes) - len(self._batch.pieces)
        source = StreamSource(
            rows=[rows[at] for at in order.tolist()],
            first_row=0,
            sizes=np.array(self._sizes, dtype=np.int64)[chunks],
            itemsizes=[self._rows[at].itemsize for at in order.tolist()],
            held=self._batch.pieces,
            held_at=np.maximum(chunks - n_stored, -1),
            inputs=frozenset(rank[is_input].tolist()),
        )
        derived = {number: stream.derived(number, rows) for number, stream in self._streams.items()}
        source.derived = {int(rank[number]): each for number, each in {**self._derived, **derived}.items()}
        source.known_words = [
            Words(rank[some.rows][at], some.words[at])
            for some in self._words
            for at in [np.argsort(rank[some.rows], kind="stable")]
        ]
        return source

    # --- rows

    def _row_for(self, part: FilePart) -> OpenRow:
        """Find the row that a part's bytes go to, or begin one."""
        last = self._rows[-1] if self._rows and self._rows[-1].is_open else None
        goes_on = last is not None and (
            isinstance(part, More) or (type(part) is type(last.part) and not isinstance(part, Tensor))
        )
        if last is not None and goes_on:
            if isinstance(part, PlainBytes) and part.starts_piece:
                self._put(last.end_piece())
            return last
        if isinstance(part, Tensor) and self._has_enough_rows():
            return self._row_for(Skeleton(n_bytes=part.n_bytes))
        self._close_row()
        row = OpenRow(part, first=len(self._sizes), chunk_bytes=self._chunk_bytes, is_stored=self._is_stored)
        if isinstance(part, Tensor) and part.name:
            self._announced[part.name] = len(self._rows)
        self._rows.append(row)
        return row

    def _has_enough_rows(self) -> bool:
        return len(self._rows) >= _FREE_ROWS + self._n_bytes // _BYTES_A_ROW

    def _is_stored(self, chunk: memoryview) -> bool:
        """Tell whether the store has a chunk of these bytes, as far as this process knows."""
        return bool(self._catalog.find_sound(digest_all([chunk]), ()).found.all())

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
        names_of_inputs: set[str] = {""}
        rows: list[Row] = []
        n_name_bytes = _FREE_NAME_BYTES + self._n_bytes // _BYTES_A_NAME_BYTE
        for number, (row, end) in enumerate(zip(self._rows, self._ends, strict=True)):
            spec, known = row.spec(), names_of_inputs if number in self._inputs else names
            if spec.name in known or len(spec.name.encode()) > n_name_bytes:
                spec = replace(spec, name="")
            n_name_bytes -= len(spec.name.encode())
            known.add(spec.name)
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
            inputs=frozenset(number - first_row for number in self._inputs if number >= first_row),
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
        if self._parents is not None:
            assert source.first_row is not None
            rows = sketched_rows(source.columns)
            self._words.append(Words(source.first_row + rows, sketch_rows(source, rows)))
        n_batch = len(self._digests[-1])
        first_chunk = len(source.sizes) - n_batch
        n_promised = self._go_on_deriving()
        chunks = self._without_streams(source, np.arange(first_chunk + n_promised, len(source.sizes)))
        new = self._likely_new(source, chunks)
        plan = self._parents.plan(source, new) if self._parents is not None and len(new) else None
        derived = self._derive(source, new, plan)
        inputs = [each.input_digests for each in derived.values()]
        if self._open_derived is not None:
            inputs.append(self._open_derived[1].input_digests)
        named, _, number = unique_rows(np.concatenate([self._digests[-1], *inputs]))
        bases: Collection[str] = plan.packs if plan is not None else ()
        cover, is_fresh = self._cover, True
        if cover is None or not cover.covers({*self._packs_of(named), *bases}):
            cover, is_fresh = self._declare(named, bases), self._backend.is_remote and self.n_batches > 0
        condemned = cover.condemned
        missing_ones = probe(
            self._backend,
            self._catalog,
            named,
            condemned,
            check_bases=tuple if plan is None else partial(plan.leave_out, self._backend, condemned),
            is_fresh=is_fresh,
        )
        if cover is self._cover:
            # It names no digest of this batch, so a copy in another pack may go. Packs that turned out to be gone were
            # searched for such copies.
            places = self._catalog.find_sound(named, condemned.packs)
            missing_ones |= ~places.found_in(cover.packs)
        self._cover = cover
        self.n_batches += 1
        is_missing = missing_ones[number]
        if is_missing[n_batch:].any():
            # A collector has deleted inputs.
            if self._open_derived is not None:
                raise FencedError(1)
            derived = {}
        self._note_derived(source, derived)
        if derived:
            is_stored = np.ones(len(source.sizes), dtype=bool)
            is_stored[source.columns.chunks_of(np.array(sorted(derived)))] = False
            chunks = chunks[is_stored[chunks]]
        missing = chunks[is_missing[chunks - first_chunk]]
        new = np.sort(missing[unique_rows(source.columns.digests[missing])[1]])
        self._write(source, new, plan, condemned, cover.drawn())

    def _declare(self, named: Digests, bases: Collection[str]) -> _Cover:
        """Create an intent for a batch that covers later ones too, and read the condemned lists.

        It names the digests of the batch, and packs: those of its chunks and of its possible bases, those of the
        earlier state of the stream, and the packs that the next batches will write.
        """
        names = deque(new_pack_name(self._backend) for _ in range(_NAMES_AHEAD))
        until_s = time.monotonic() + _NAMES_LAST_S
        packs = {*bases, *self._packs_of(named)}
        earlier = self._parents.nearest if self._parents is not None else None
        if earlier is not None and len(earlier.stored_digests) <= _MOST_FORESEEN:
            # Later batches mostly rely on it, as this one does.
            packs |= Ancestry.of(self._catalog, unique_rows(earlier.stored_digests)[0]).packs
        if len(packs) > _MOST_NAMED:
            packs = set(bases)
        packs.update(names)
        # No manifest will ever have this name.
        never = f"{uuid.uuid4().hex}{uuid.uuid4().hex}"
        self._intents.append(declare(self._backend, never, named, packs))
        condemned = look(self._backend, self._catalog)
        return _Cover(condemned=condemned, packs=frozenset(packs), names=names, until_s=until_s)

    def _packs_of(self, digests: Digests) -> set[str]:
        """Return the packs of some chunks, as far as this process knows."""
        places = self._catalog.find_sound(digests, ())
        return {places.packs[number] for number in distinct(places.pack[places.found]).tolist()}

    def _without_streams(self, source: StreamSource, chunks: Any) -> Any:
        """Leave out the chunks of compressed streams, which nothing stores."""
        if not self._streams:
            return chunks
        assert source.first_row is not None
        return chunks[~np.isin(source.columns.rows_of(chunks) + source.first_row, list(self._streams))]

    def _write(
        self,
        source: StreamSource,
        new: Any,
        plan: BasePlan | None,
        condemned: Condemnation,
        names: Iterable[str] = (),
    ) -> None:
        """Write new chunks of a batch into packs, the first of them under given names."""
        self.n_new_bytes += int(source.sizes[new].sum())
        if plan is not None and self._parents is not None and self._parents.nearest is not None:
            source = source.like(self._parents.nearest)
        payloads = encode_chunks(source, new, self._policy, plan, self._chooser)
        keep = self._parents.store.chunks.kept if self._parents is not None and self._backend.is_remote else None
        self.n_stored_bytes += write_packs(self._backend, self._catalog, payloads, condemned, names=names, keep=keep)

    def _likely_new(self, source: StreamSource, chunks: Any) -> Any:
        """Return those of some chunks that the store does not have, as far as this process knows."""
        unique, first, _ = unique_rows(source.columns.digests[chunks])
        missing = ~self._catalog.find_sound(unique, ()).found
        return chunks[np.sort(first[missing])]

    # --- derived rows

    def _derive(self, source: StreamSource, new: Any, plan: BasePlan | None) -> dict[int, Derived]:
        """Find derived rows of a batch, by their number in it; the last one may be open."""
        if self._parents is None or not len(new):
            return {}
        row: Row | None = None
        if self._rows[-1].is_open:
            row, part = source.rows[-1], self._rows[-1].part
            if row.spec.dtype is None:
                row = replace(row, spec=replace(row.spec, shape=(max(part.n_bytes, row.spec.n_bytes),)))
        return self._parents.derive(source, new, plan, row)

    def _note_derived(self, source: StreamSource, derived: Mapping[int, Derived]) -> None:
        assert source.first_row is not None
        for number, each in derived.items():
            row = source.first_row + number
            if self._rows[row].is_open:
                self._open_derived = row, each
            else:
                self._derived[row] = each

    def _go_on_deriving(self) -> int:
        """Compare a derived row's chunks in this batch with its function's; store the earlier ones if they differ.

        Returns:
            The number of the batch's first chunks that the function gives: nothing stores them.
        """
        if self._open_derived is None:
            return 0
        number, derived = self._open_derived
        row, digests = self._rows[number], self._digests[-1]
        end = len(self._sizes) if row.is_open else self._ends[number]
        n_before = len(self._sizes) - len(digests) - row.first
        n = end - row.first - n_before
        expected = derived.row.digests[n_before : n_before + n]
        is_derived = np.array_equal(digests[:n], expected) and (
            row.is_open or end - row.first == len(derived.row.digests)
        )
        if not row.is_open or not is_derived:
            self._open_derived = None
        if not is_derived:
            self._store_made(number, derived, n_before)
            return 0
        if not row.is_open:
            self._derived[number] = derived
        return n

    def _store_made(self, number: int, derived: Derived, n: int) -> None:
        """Store the first chunks of a row that earlier batches left out as derived.

        Raises:
            FencedError: A collector gave an earlier batch up, and deleted inputs.
        """
        try:
            raw = derived.made()
        except (NotFoundError, FormatError):
            raise FencedError(1) from None
        ends = derived.row.ends(self._chunk_bytes).tolist()[:n]
        held = [raw[begin:end] for begin, end in pairwise([0, *ends])]
        digests = derived.row.digests[:n]
        sizes = np.array([len(piece) for piece in held], dtype=np.int64)
        row, itemsizes = replace(derived.row, digests=digests), [self._rows[number].itemsize]
        source = StreamSource(rows=[row], first_row=number, sizes=sizes, itemsizes=itemsizes, held=held)
        unique, first, _ = unique_rows(digests)
        self._intents.append(declare(self._backend, f"{uuid.uuid4().hex}{uuid.uuid4().hex}", unique))
        condemned = look(self._backend, self._catalog)
        new = np.sort(first[probe(self._backend, self._catalog, unique, condemned)])
        self._write(source, new, None, condemned)


def _last(digests: list[Digests], n: int) -> Digests:
    """Return the last ones of all digests."""
    begin = len(digests)
    while n > 0:
        begin -= 1
        n -= len(digests[begin])
    return np.concatenate(digests[begin:])[-n:]
