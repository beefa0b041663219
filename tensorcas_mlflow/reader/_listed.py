"""Tensors of foreign files, on this machine or stored as artifacts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import ReadCounter
from tensorcas_mlflow.base.digest import digest_all, digest_of
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES, Offsets, bytes_of
from tensorcas_mlflow.base.threads import Lazy, Lock
from tensorcas_mlflow.chunk_io import LastRow
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.file_formats import ByteSource, FlatTable, Listing, TensorLocation
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader._contents import (
    BATCH_BYTES,
    Contents,
    digest_of_metadata,
    identity_of,
    own_array,
    pieces_of_chunk_size,
)
from tensorcas_mlflow.reader._slices import ChunksToFill, Selection
from tensorcas_mlflow.store import Store

if TYPE_CHECKING:
    from tensorcas_mlflow.file_formats import FileHeader


def stretches_between(places: Iterable[TensorLocation], size: int) -> Iterator[tuple[int, int]]:
    """Find the stretches of a file outside of tensors: headers, checksums, and unreadable content.

    Args:
        places: The tensors of the file, in any order.
        size: Size of the file.

    Yields:
        The start and end of each stretch, ascending; no two of them touch.
    """
    end = 0
    for start, stop in sorted((place.start, place.start + place.n_bytes) for place in places if _has_each_byte(place)):
        if start > end:
            yield end, start
        end = max(end, stop)
    if end < size:
        yield end, size


def _has_each_byte(place: TensorLocation) -> bool:
    """Tell whether each byte of the stretch of a tensor belongs to one of its elements."""
    if place.strides is None:
        return place.n_bytes > 0
    n_elements = 1
    for stride, side in sorted(zip(place.strides, place.spec.shape, strict=True)):
        if side > 1 and stride:
            if stride != n_elements:
                return False
            n_elements *= side
    return 0 < place.n_bytes == n_elements * place.spec.numpy_dtype.itemsize


_MANY_RUNS = 64
"""Beyond this number, pieces of a tensor are taken from the mapped file, and not read one by one."""
_KEPT_BYTES = 8 << 20
"""Bound on cached chunks of headers and small tensors, read again and again."""


class TensorLocations(Sequence[TensorLocation]):
    """The locations of a listing's tensors by number, each built on access."""

    def __init__(self, locations: Mapping[str, TensorLocation]) -> None:
        self._locations = locations

    @Lazy
    def _names(self) -> list[str]:
        return list(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    @overload
    def __getitem__(self, row: int) -> TensorLocation: ...
    @overload
    def __getitem__(self, row: slice) -> list[TensorLocation]: ...

    def __getitem__(self, row: int | slice) -> TensorLocation | list[TensorLocation]:
        if isinstance(row, slice):
            return [self[number] for number in range(len(self))[row]]
        if isinstance(self._locations, FlatTable):
            return self._locations.at(row)
        return self._locations[self._names[row]]


class CountedSource(ByteSource):
    """Another source, with its reads counted."""

    def __init__(self, inner: ByteSource, tally: ReadCounter) -> None:
        """Count reads.

        Args:
            inner: The source to read.
            tally: Counts the reads.
        """
        self.name = inner.name
        self.size = inner.size
        self._inner = inner
        self._tally = tally

    def read_into(self, start: int, out: memoryview) -> None:
        self._inner.read_into(start, out)
        self._tally.add(len(out))

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        view = self._inner.view(start, n_bytes)
        if view is not None:
            self._tally.add_mapped(n_bytes)
        return view


class StoredSource(ByteSource):
    """A split file in a store, readable at any place; a read fetches only the chunks it touches."""

    def __init__(self, store: Store, manifest: Manifest, *, name: str, verify: bool = True) -> None:
        """Read from a store.

        Args:
            store: The store of the file.
            manifest: The manifest of the file.
            name: The name of the file.
            verify: Whether to check each chunk against its digest.
        """
        self.name = name
        self.size = manifest.n_bytes
        self._store = store
        self._manifest = manifest
        self._ends: Offsets = manifest.chunk_sizes.cumsum()
        self._verify = verify
        self._lock = Lock()
        self._last = LastRow()
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._n_kept_bytes = 0

    def read_into(self, start: int, out: memoryview) -> None:
        if start + len(out) > self.size:
            raise CorruptError(self.name, f"it ends before byte {start + len(out)}")
        if len(out):
            self.fill(np.array([start]), np.array([start + len(out)]), out)

    def fill(self, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        """Read runs of bytes of the file; see `Contents.fill`."""
        wanted = ChunksToFill.of(self._ends, starts, stops, block)
        self._read(wanted.chunks, wanted.outs)
        wanted.finish()

    def _read(self, chunks: Offsets, outs: list[memoryview]) -> None:
        left: list[int] = []
        with self._lock:
            for at, chunk in enumerate(chunks.tolist()):
                kept = self._kept.get(chunk)
                if kept is None:
                    left.append(at)
                else:
                    self._kept.move_to_end(chunk)
                    outs[at][:] = kept
        if not left:
            return
        wanted = [outs[at] for at in left]
        self._store.chunks.read_chunks(self._manifest, chunks[left], wanted, verify=self._verify, last=self._last)
        for at in {left[0], left[-1]}:
            self._keep(int(chunks[at]), bytes(outs[at]))

    def _keep(self, chunk: int, data: bytes) -> None:
        with self._lock:
            if self._kept.setdefault(chunk, data) is data:
                self._n_kept_bytes += len(data)
            while self._n_kept_bytes > _KEPT_BYTES:
                self._n_kept_bytes -= len(self._kept.popitem(last=False)[1])


class ListedContents(Contents):
    """Tensors of a foreign file, or of several that belong together."""

    def __init__(
        self, listing: Listing, *, label: str, tally: ReadCounter, end: Callable[[], None] | None = None
    ) -> None:
        """Prepare to read listed tensors.

        Args:
            listing: The tensors; its sources count in ``tally``.
            label: A name of the source, for messages.
            tally: Counts the reads.
            end: Called at the close.
        """
        self.listing = listing
        self.label = label
        self.metadata = listing.metadata
        self.left_out = listing.left_out
        self.tally = tally
        self.places = TensorLocations(listing.locations)
        self.specs = listing.columns()
        self._end = end

    def file_header(self) -> FileHeader | None:
        from tensorcas_mlflow.file_formats import FileHeader  # only an export writes

        return FileHeader.of(self.listing)

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None, *, copy: bool = False) -> list[Array]:
        outs = outs or {}
        return [self._array(self.places[row], outs.get(at)) for at, row in enumerate(rows.tolist())]

    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        place, base = self.places[row], int(starts[0])
        source = self.listing.sources[place.source]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            source.read_into(place.start + start, block[start - base : stop - base])

    def pieces(self, row: int, piece_bytes: int) -> Iterator[memoryview]:
        place = self.places[row]
        if place.is_plain and not place.checksum:
            return super().pieces(row, piece_bytes)
        # From first byte to last: inflating and summing cannot start in the middle.
        return _cut_anew((piece for _, piece in self.listing.stream([place.spec.name])), piece_bytes)

    def other_content(self) -> dict[str, bytes]:
        by_source: list[list[TensorLocation]] = [[] for _ in self.listing.sources]
        for place in self.places:
            by_source[place.source].append(place)
        files = [
            digest_of(
                identity_of(None, (stop - start,), self.digests_of_stretch(source, start, stop))
                for start, stop in stretches_between(places, source.size)
            )
            for source, places in zip(self.listing.sources, by_source, strict=True)
        ]
        return digest_of_metadata(self.metadata) | {"bytes": digest_of(files)}

    def digests_of_stretch(self, source: ByteSource, start: int, stop: int) -> bytes:
        """Return the digests of the pieces of 256 KiB of some bytes of a file."""
        blocks = (source.read(at, min(BATCH_BYTES, stop - at)) for at in range(start, stop, BATCH_BYTES))
        return b"".join(digest_all(pieces_of_chunk_size(block)).tobytes() for block in blocks)

    def select(self, row: int, selection: Selection) -> Array:
        place, n_elements = self.places[row], math.prod(selection.window)
        if not len(selection.starts):
            return super().select(row, selection)
        if not place.is_plain:
            whole = self._array(place, None).reshape(-1)
            window = whole[selection.origin : selection.origin + n_elements].reshape(selection.window)
            return own_array(window, selection.index)
        dtype = place.spec.numpy_dtype
        if len(selection.starts) > _MANY_RUNS:
            start = place.start + selection.origin * dtype.itemsize
            view = self.listing.sources[place.source].view(start, n_elements * dtype.itemsize)
            if view is not None:
                return own_array(np.frombuffer(view, dtype).reshape(selection.window), selection.index)
        return super().select(row, selection)

    def close(self) -> None:
        if self._end is not None:
            self._end()

    def _array(self, place: TensorLocation, out: Array | None) -> Array:
        if out is None:
            return self.listing.array(place.spec.name)
        if place.is_plain and place.n_bytes and place.checksum is None:
            self.listing.sources[place.source].read_into(place.start, bytes_of(out))
        else:
            out[...] = self.listing.array(place.spec.name)
        return out


class StoredFileContents(ListedContents):
    """Tensors of a split file in a store. Tensors with a manifest row of their own are read as such."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        source: StoredSource,
        listing: Listing,
        *,
        label: str,
        tally: ReadCounter,
        verify: bool = True,
    ) -> None:
        """Read from a store.

        Args:
            store: A store counting its reads in ``tally``.
            manifest: The manifest of the file.
            source: The file.
            listing: The tensors of the file.
            label: A name of the file, for messages.
            tally: Counts the reads.
            verify: Whether to check each chunk against its digest.
        """
        super().__init__(listing, label=label, tally=tally)
        self._store = store
        self._manifest = manifest
        self._source = source
        self._verify = verify

    @Lazy
    def _row_of(self) -> Offsets:
        """For each tensor the manifest row with its bytes; -1 if there is none."""
        begins = np.array([place.start for place in self.places], dtype=np.int64)
        sizes_or_none = (place.n_bytes if place.is_plain and not place.source else -1 for place in self.places)
        wanted = np.fromiter(sizes_or_none, dtype=np.int64, count=len(self.places))
        return self._rows_at(begins, wanted)

    @Lazy
    def _starts(self) -> Offsets:
        sizes = self._manifest.columns.n_bytes
        starts: Offsets = sizes.cumsum() - sizes
        return starts

    def _rows_at(self, begins: Offsets, wanted: Offsets) -> Offsets:
        """Find the manifest rows of stretches of the file, by their starts and sizes."""
        sizes, starts = self._manifest.columns.n_bytes, self._starts
        # An empty row starts at the same place as the next one, so the last row with that start is the right one.
        rows = np.searchsorted(starts, begins, side="right") - 1
        is_row = (starts[rows] == begins) & (sizes[rows] == wanted) & (wanted > 0) if len(starts) else wanted > 0
        return np.where(is_row, rows, -1)

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None, *, copy: bool = False) -> list[Array]:
        outs = outs or {}
        stored = self._row_of[rows]
        whole = np.flatnonzero((stored >= 0) & ~np.isin(np.arange(len(rows)), list(outs)))
        found: dict[int, Array] = {}
        if len(whole):
            read = self._store.chunks.rows(
                self._manifest, stored[whole], verify=self._verify, copy=None if copy else False, is_private=True
            )
            for at, array in zip(whole.tolist(), read, strict=True):
                place = self.places[int(rows[at])]
                self.listing.check(place, bytes_of(array))
                spec = place.spec
                found[at] = array.reshape(-1).view(np.uint8).view(spec.numpy_dtype).reshape(spec.shape)
        for at, row in enumerate(rows.tolist()):
            if at not in found:
                found[at] = self._array(self.places[row], outs.get(at))
        return [found[at] for at in range(len(rows))]

    @property
    def can_check(self) -> bool:
        return self._verify and self._store.chunks.can_check

    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        place = self.places[row]
        if place.source:
            super().fill(row, starts, stops, block)
            return
        self._source.fill(place.start + starts, place.start + stops, block)

    def digests_of_stretch(self, source: ByteSource, start: int, stop: int) -> bytes:
        # The manifest does not describe other files named by this one.
        stored = self._rows_at(np.array([start]), np.array([stop - start])) if source is self._source else [-1]
        known = self._digests_of_row(int(stored[0]))
        return super().digests_of_stretch(source, start, stop) if known is None else known

    def chunk_digests(self, row: int) -> bytes | None:
        return self._digests_of_row(int(self._row_of[row]))

    def _digests_of_row(self, stored: int) -> bytes | None:
        if stored < 0 or self._manifest.chunk_bytes != DEFAULT_CHUNK_BYTES:
            return None
        columns = self._manifest.columns
        if columns.cuts is not None and columns.cuts.given[stored]:
            return None
        return columns.digests[columns.chunk_at[stored] : columns.chunk_at[stored + 1]].tobytes()


def _cut_anew(pieces: Iterable[memoryview], piece_bytes: int) -> Iterator[memoryview]:
    """Join pieces, and cut the result into pieces of this many bytes, with the rest as the last one."""
    held: list[memoryview] = []
    n_held = 0
    for piece in pieces:
        left = piece
        while len(left):
            held.append(left[: piece_bytes - n_held])
            n_held += len(held[-1])
            left = left[len(held[-1]) :]
            if n_held == piece_bytes:
                yield memoryview(b"".join(held)) if len(held) > 1 else held[0]
                held, n_held = [], 0
    if held:
        yield memoryview(b"".join(held))
