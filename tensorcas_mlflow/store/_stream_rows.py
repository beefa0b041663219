"""The rows of a stream, under construction: cut into chunks, and described by their file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.codecs import guess_itemsize
from tensorcas_mlflow.content_cuts import ContentCutter
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import FencedError, FormatError
from tensorcas_mlflow.file_formats import FilePart, Skeleton, Tensor
from tensorcas_mlflow.index import Mask
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.store._bases import matching_row
from tensorcas_mlflow.store._sources import Reader, Source
from tensorcas_mlflow.tensor import Spec

_LOOK_BYTES = 64 << 10
"""Size to which many small parts of a skeleton are joined before they are cut."""


class OpenRow:
    """A row still receiving bytes."""

    def __init__(self, part: FilePart, *, first: int, chunk_bytes: int) -> None:
        """Begin a row.

        Args:
            part: The file's description of it.
            first: Number of its first chunk, counted over all rows.
            chunk_bytes: The store's chunk size.
        """
        self.part = part
        self.first = first
        self.n_bytes = 0
        """Number of bytes received and cut."""
        self.itemsize = 0
        """0 until the first bytes arrive; they give a guess."""
        self.is_open = True
        self._chunk_bytes = chunk_bytes
        self._cutter: ContentCutter | None = None
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
            return self._cutter.feed(np.frombuffer(block, np.uint8))
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
        self, *, rows: Sequence[Row], first_row: int, sizes: Any, itemsizes: Any, held: Sequence[memoryview]
    ) -> None:
        """Combine rows with the bytes of their last chunks.

        Args:
            rows: Consecutive rows; the last one may have fewer chunks than it will.
            first_row: Number of the first of them.
            sizes: Sizes of their chunks.
            itemsizes: Size of an element of each row.
            held: The last chunks.
        """
        self.rows = rows
        self.first_row = first_row
        self.sizes = sizes
        self._itemsizes = np.array(itemsizes, dtype=np.int64)
        self._held = held
        self._first_held = len(sizes) - len(held)

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
        return StreamSource(rows=rows, first_row=self.first_row, sizes=self.sizes, itemsizes=itemsizes, held=self._held)

    @property
    def itemsizes(self) -> Any:
        return self._itemsizes

    def holds(self, chunks: Any) -> Mask:
        is_held: Mask = chunks >= self._first_held
        return is_held

    def _reader(self) -> Reader:
        def data_of(chunks: Any, _rows: Any) -> list[Any]:
            if chunks[0] < self._first_held:
                # It was stored with its batch: a collector treated the batch's intent as dead, and deleted the chunk.
                raise FencedError(1)
            return [self._held[at] for at in (chunks - self._first_held).tolist()]

        return data_of


def _itemsize(dtype: str | None) -> int:
    if dtype is None:
        return 0
    try:
        return 1 if dtype[0] in "SU" else parse_dtype(dtype).itemsize
    except FormatError:
        return 0
