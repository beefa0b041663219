"""Sources of a checkpoint's tensors: rows of a manifest, self-contained files, and parts of either."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.backends import ReadCounter
from tensorcas_mlflow.base.digest import DIGEST_BYTES, digest, digest_all, digest_of
from tensorcas_mlflow.base.files import sparse_memory
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES, Offsets, aligned_bytes, bytes_of
from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.layout.manifests import KEPT_HEADER, Manifest, Specs

if TYPE_CHECKING:
    from tensorcas_mlflow.chunk_io import LastRow, TensorsFile
    from tensorcas_mlflow.file_formats import FileHeader
    from tensorcas_mlflow.reader._boxes import Box
    from tensorcas_mlflow.reader._slices import ChunksToFill, Selection
    from tensorcas_mlflow.store import Store

BATCH_BYTES = 16 << 20
"""Bytes read ahead while a caller takes tensors one after another."""
SPARSE_BYTES = 64 << 20
"""Bound on the bytes held besides the requested ones, for a selection scattered over a tensor."""


class Fill(NamedTuple):
    """Arguments of `Contents.fill`."""

    row: int
    starts: Offsets
    stops: Offsets
    block: memoryview


class Contents(ABC):
    """Tensors of one checkpoint or file, by number; the skeleton is not among them."""

    label: str
    """A name of the source, for messages."""
    metadata: Mapping[str, Any]
    """Plain JSON values saved beside them."""
    specs: Specs
    """Names, dtypes and shapes."""
    tally: ReadCounter
    """Count of the reads."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Unsupported tensors by name, with their types in the file or framework; none is in ``specs``."""

    def file_header(self) -> FileHeader | None:
        """Return the header of the file that the tensors come from; None without one, and for some of the tensors."""
        return None

    @abstractmethod
    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None, *, copy: bool = False) -> list[Array]:
        """Read whole tensors.

        Args:
            rows: Numbers of the tensors.
            outs: Arrays to read into, by position among ``rows``: of the tensor's dtype and shape, writable, in C
                order.
            copy: Return no view of a memory-mapped store.

        Returns:
            One array per row: the one in ``outs``, or a new writable one. Writing to it reaches no store.
        """

    @abstractmethod
    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        """Read some bytes of one tensor, and no more than checking them requires.

        Args:
            row: Number of the tensor.
            starts: The starts of runs of bytes, counted from the tensor's first byte, ascending.
            stops: Their ends, exclusive; runs do not overlap.
            block: Memory from the start of the first run to the end of the last; bytes between runs become undefined.
        """

    @property
    def can_check(self) -> bool:
        """True if the tensors have digests and are on this machine, so that `check` costs a second read of a disk."""
        return False

    def check(self, rows: Offsets) -> None:
        """Check that tensors are intact, holding some 16 MiB at a time; raises as `arrays`."""
        for _ in self.batches(rows):
            pass

    @abstractmethod
    def other_content(self) -> dict[str, bytes]:
        """Return the content beside the tensors, by kind.

        Returns:
            A digest by kind (``docs/reading-parts.md``): ``adapter``, ``bytes``, ``left_out``,
            ``metadata``, ``skeleton``.
        """

    def chunk_digests(self, row: int) -> bytes | None:
        """Return the digests of a tensor's chunks in order, if known.

        Returns:
            None unless the chunks equal those of a store with the default chunk size.
        """
        return None

    def close(self) -> None:
        """Close open files; arrays already read stay valid."""
        return

    def batches(self, rows: Offsets) -> Iterator[list[tuple[int, memoryview]]]:
        """Read tensors one after the other, some 16 MiB at a time.

        Yields:
            Numbers of tensors and stretches of their bytes, in the order of ``rows``. The size of a tensor alone
            determines its division.
        """
        sizes = self.specs.n_bytes[rows]
        ends = sizes.cumsum()
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            if last == first + 1 and sizes[first] > BATCH_BYTES:
                row = int(rows[first])
                yield from ([(row, piece)] for piece in self.pieces(row, BATCH_BYTES))
            else:
                arrays = self.arrays(rows[first:last])
                yield [(int(row), bytes_of(array)) for row, array in zip(rows[first:last], arrays, strict=True)]
            first = last

    def pieces(self, row: int, piece_bytes: int) -> Iterator[memoryview]:
        """Read a large tensor in pieces of this many bytes, with the rest as the last one."""
        n_bytes = int(self.specs.n_bytes[row])
        for start in range(0, n_bytes, piece_bytes):
            stop = min(start + piece_bytes, n_bytes)
            block = np.empty(stop - start, dtype=np.uint8).data
            self.fill(row, np.array([start]), np.array([stop]), block)
            yield block

    def identity_bytes(self, rows: Offsets) -> list[bytes]:
        """Return bytes that identify each tensor's content: digests of its pieces of 256 KiB, in order.

        If the chunks of a store are these pieces, nothing is read; otherwise the whole tensor is.

        Args:
            rows: Numbers of the tensors, each once.
        """
        known = {row: self.chunk_digests(row) for row in rows.tolist()}
        parts: dict[int, list[bytes]] = {row: [] for row, digests in known.items() if digests is None}
        for batch in self.batches(np.array(list(parts), dtype=np.int64)):
            pieces = [pieces_of_chunk_size(data) for _, data in batch]
            digests = digest_all([piece for each in pieces for piece in each])
            ends = np.cumsum([len(each) for each in pieces]).tolist()
            for (row, _), each, end in zip(batch, pieces, ends, strict=True):
                parts[row].append(digests[end - len(each) : end].tobytes())
        return [b"".join(parts[row]) if digests is None else digests for row, digests in known.items()]

    def identities(self, rows: Offsets) -> list[bytes]:
        """Return the identities of tensors: the digest of the dtype, the shape, and `identity_bytes` of each."""
        described = zip(rows.tolist(), self.identity_bytes(rows), strict=True)
        return [self._identity(row, digests) for row, digests in described]

    def known_identities(self) -> Iterator[bytes | None]:
        """Yield the identity of each tensor; None if it takes reading."""
        for row in range(len(self.specs)):
            known = self.chunk_digests(row)
            yield None if known is None else self._identity(row, known)

    def _identity(self, row: int, digests: bytes) -> bytes:
        return identity_of(self.specs.dtypes[self.specs.dtype[row]], self.specs.shape(row), digests)

    def select(self, row: int, selection: Selection) -> Array:
        """Read some elements of one tensor, in little more memory than they take."""
        if not len(selection.starts):
            nothing = np.empty((), self.specs.spec(row).numpy_dtype)
            return np.array(np.broadcast_to(nothing, selection.window)[selection.index])
        if selection.is_one_run or self._is_small(row, selection):
            return own_array(self.window(row, selection), selection.index)
        from tensorcas_mlflow.reader._slices import divided

        spec = self.specs.spec(row)
        found = np.empty(tuple(map(len, selection.places)), dtype=spec.numpy_dtype)
        for box, part in divided(spec.shape, selection, lambda part: self._is_small(row, part)):
            found[box] = self.window(row, part)[part.index]
        return own_array(found, selection.index_of_places)

    def select_each(self, wanted: Sequence[tuple[int, Selection]]) -> list[Array]:
        """Read some elements of some tensors, together if that is faster; see `select`."""
        return [self.select(row, selection) for row, selection in wanted]

    def window(self, row: int, selection: Selection) -> Array:
        """Read the selected elements into an array of the selection's window; other elements are undefined."""
        window, fill = self._window_to_fill(row, selection)
        self.fill(*fill)
        return window

    def _window_to_fill(self, row: int, selection: Selection) -> tuple[Array, Fill]:
        """Return an array of a selection's window, and how to fill it."""
        dtype = self.specs.spec(row).numpy_dtype
        n_bytes = math.prod(selection.window) * dtype.itemsize
        is_sparse = n_bytes > SPARSE_BYTES and n_bytes > 2 * selection.n_read * dtype.itemsize
        memory = np.frombuffer(sparse_memory(n_bytes), np.uint8) if is_sparse else aligned_bytes(n_bytes)
        starts, stops = selection.starts * dtype.itemsize, selection.stops * dtype.itemsize
        first = int(starts[0]) - selection.origin * dtype.itemsize
        block = memory.data[first : first + int(stops[-1] - starts[0])]
        return memory.view(dtype).reshape(selection.window), Fill(row, starts, stops, block)

    def _is_small(self, row: int, selection: Selection) -> bool:
        """Tell whether the chunks of a selection are few."""
        itemsize = self.specs.spec(row).numpy_dtype.itemsize
        touched = selection.n_read * itemsize + len(selection.starts) * DEFAULT_CHUNK_BYTES
        return min(touched, math.prod(selection.window) * itemsize) <= SPARSE_BYTES


def own_array(window: Array, index: Any) -> Array:
    """Select elements of an array; they do not keep the rest of it alive."""
    chosen = window[index]
    is_all = chosen.size == window.size and chosen.flags.c_contiguous
    return chosen if is_all else np.array(chosen, order="C")


def identity_of(dtype: str | None, shape: Sequence[int], digests: bytes) -> bytes:
    """Return the identity of a tensor (``docs/format.md``, Manifests).

    Args:
        dtype: Its name in manifests.
        shape: Its sides.
        digests: Digests of its pieces of the default chunk size, in order.
    """
    return digest((dtype or "").encode() + b"\0" + struct.pack(f"<{len(shape)}q", *shape) + digests)


def digest_of_metadata(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the entry of metadata for `Contents.other_content`; empty if there is no metadata."""
    text = json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))
    return {"metadata": digest(text.encode())} if metadata else {}


def pieces_of_chunk_size(data: memoryview) -> list[memoryview]:
    """Cut bytes into pieces of the default chunk size, with the rest as the last one."""
    return [data[at : at + DEFAULT_CHUNK_BYTES] for at in range(0, len(data), DEFAULT_CHUNK_BYTES)]


class PartContents(Contents):
    """Some tensors of other contents."""

    def __init__(self, whole: Contents, rows: Offsets, names: list[str], *, label: str) -> None:
        """Choose tensors.

        Args:
            whole: The contents to take them from.
            rows: Numbers of the tensors in ``whole``.
            names: Their names here.
            label: A name of this part, for messages.
        """
        self.whole = whole
        self.row_of = rows
        self.label = label
        self.metadata = whole.metadata
        self.tally = whole.tally
        self.specs = dataclasses.replace(whole.specs.some(rows), names=Texts.of(names))

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None, *, copy: bool = False) -> list[Array]:
        return self.whole.arrays(self.row_of[rows], outs, copy=copy)

    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        self.whole.fill(int(self.row_of[row]), starts, stops, block)

    def pieces(self, row: int, piece_bytes: int) -> Iterator[memoryview]:
        return self.whole.pieces(int(self.row_of[row]), piece_bytes)

    def select(self, row: int, selection: Selection) -> Array:
        return self.whole.select(int(self.row_of[row]), selection)

    def select_each(self, wanted: Sequence[tuple[int, Selection]]) -> list[Array]:
        return self.whole.select_each([(int(self.row_of[row]), selection) for row, selection in wanted])

    @property
    def can_check(self) -> bool:
        return self.whole.can_check

    def check(self, rows: Offsets) -> None:
        self.whole.check(self.row_of[rows])

    def other_content(self) -> dict[str, bytes]:
        # No part of a skeleton can be attributed to these tensors, so a part has all of it.
        return self.whole.other_content()

    def chunk_digests(self, row: int) -> bytes | None:
        return self.whole.chunk_digests(int(self.row_of[row]))


class RowContents(Contents):
    """Tensor rows of a manifest."""

    def __init__(self, manifest: Manifest, *, label: str, tally: ReadCounter) -> None:
        """Take the tensors of a checkpoint's manifest."""
        self.manifest = manifest
        self.label = label
        self.metadata = manifest.own_metadata
        self.left_out = manifest.left_out
        self.tally = tally
        self.row_of = _tensor_rows(manifest)
        """The number of each tensor among the rows of the manifest."""
        columns = manifest.columns
        self.specs: Specs = columns if len(self.row_of) == len(columns) else columns.some(self.row_of)

    def file_header(self) -> FileHeader | None:
        kept = self.manifest.metadata.get(KEPT_HEADER)
        if kept is None:
            return None
        from tensorcas_mlflow.file_formats import FileHeader

        return FileHeader(format="safetensors", content=kept)

    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        self._read_and_fill([(row, self._chunks_to_fill(row, starts, stops, block))])

    def _chunks_to_fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> ChunksToFill:
        from tensorcas_mlflow.reader._slices import ChunksToFill  # a summary fills nothing

        ends = self.manifest.rows[int(self.row_of[row])].ends(self.manifest.chunk_bytes)
        return ChunksToFill.of(ends, starts, stops, block)

    def _read_and_fill(self, fills: Sequence[tuple[int, ChunksToFill]]) -> None:
        self.read_chunks([(row, each.chunks, each.outs) for row, each in fills])
        for _, each in fills:
            each.finish()

    def select_each(self, wanted: Sequence[tuple[int, Selection]]) -> list[Array]:
        found: dict[int, Array] = {}
        windows: dict[int, Array] = {}
        fills: list[tuple[int, ChunksToFill]] = []

        def read() -> None:
            if fills:
                self._read_and_fill(fills)
            found.update((at, own_array(window, wanted[at][1].index)) for at, window in windows.items())
            windows.clear()
            fills.clear()

        n_bytes = 0
        for at, (row, selection) in enumerate(wanted):
            if not len(selection.starts) or not (selection.is_one_run or self._is_small(row, selection)):
                found[at] = self.select(row, selection)
                continue
            windows[at], fill = self._window_to_fill(row, selection)
            fills.append((row, self._chunks_to_fill(*fill)))
            # Both may be far larger than what is selected.
            n_bytes += windows[at].nbytes + fills[-1][1].n_bytes_aside
            if n_bytes >= SPARSE_BYTES:
                read()
                n_bytes = 0
        read()
        return [found[at] for at in range(len(wanted))]

    @abstractmethod
    def read_chunks(self, parts: Sequence[tuple[int, Offsets, Sequence[memoryview]]]) -> None:
        """Read chunks of some tensors.

        Args:
            parts: Numbers of tensors, and for each of them the numbers of its chunks, ascending, and buffers of their
                sizes. A tensor may come several times.
        """

    def other_content(self) -> dict[str, bytes]:
        found = digest_of_metadata(self.metadata)
        if self.manifest.flavor is not None:
            found["adapter"] = digest(self.manifest.flavor.encode())
        is_other = np.ones(len(self.manifest.columns), dtype=bool)
        is_other[self.row_of] = False
        others = copy.copy(self)
        others.row_of = np.flatnonzero(is_other)
        others.specs = self.manifest.columns.some(others.row_of)
        identities = others.identities(np.arange(len(others.specs)))
        names = others.specs.names.to_list()
        if self.left_out:
            known = dict(zip(names, identities, strict=True))
            parts = [
                f"{name}\0{kind}\0".encode() + known.get(name, b"") for name, kind in sorted(self.left_out.items())
            ]
            found["left_out"] = digest_of(parts)
            identities = [known for name, known in zip(names, identities, strict=True) if name not in self.left_out]
            names = [name for name in names if name not in self.left_out]
        if SKELETON in names:
            found["skeleton"] = identities.pop(names.index(SKELETON))
        if identities:
            found["bytes"] = digest(digest_of(identities))
        return found

    def chunk_digests(self, row: int) -> bytes | None:
        known = self._known
        if known is None:
            return None
        begins, digests, has_cuts = known
        stored = int(self.row_of[row])
        if has_cuts is not None and has_cuts[stored]:
            return None
        return digests[begins[stored] * DIGEST_BYTES : begins[stored + 1] * DIGEST_BYTES]

    def known_identities(self) -> Iterator[bytes | None]:
        known = self._known
        if known is None:
            yield from [None] * len(self.specs)
            return
        has_cuts, wanted = known[2], set(self.row_of.tolist())
        for stored, (dtype, shape, digests) in enumerate(self.manifest.columns.contents()):
            if stored in wanted:
                is_known = has_cuts is None or not has_cuts[stored]
                yield identity_of(dtype, shape, digests) if is_known else None

    @Lazy
    def _known(self) -> tuple[list[int], bytes, Any] | None:
        columns = self.manifest.columns
        if self.manifest.chunk_bytes != DEFAULT_CHUNK_BYTES:
            return None
        has_cuts = None if columns.cuts is None else columns.cuts.given
        return columns.chunk_at.tolist(), columns.digests.tobytes(), has_cuts


class StoredContents(RowContents):
    """Tensors of a checkpoint in a store."""

    def __init__(
        self, store: Store, manifest: Manifest, *, label: str, tally: ReadCounter, verify: bool = True
    ) -> None:
        """Read from a store.

        Args:
            store: A store counting its reads in ``tally``.
            manifest: A manifest of that store.
            label: A name of the checkpoint, for messages.
            tally: Counts the reads.
            verify: Whether to check each chunk against its digest.
        """
        super().__init__(manifest, label=label, tally=tally)
        self._store = store
        self._verify = verify

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None, *, copy: bool = False) -> list[Array]:
        may_map = None if copy else False
        return self._store.chunks.rows(
            self.manifest, self.row_of[rows], verify=self._verify, outs=outs, copy=may_map, is_private=True
        )

    @property
    def can_check(self) -> bool:
        return self._verify and self._store.chunks.can_check

    def check(self, rows: Offsets) -> None:
        # It reads the stored bytes, and decodes none of them.
        self._store.chunks.check(self.manifest, self.row_of[rows])

    def select(self, row: int, selection: Selection) -> Array:
        boxed = self._boxed if len(selection.starts) else None
        boxes = None if boxed is None else boxed[1].get(int(self.row_of[row]))
        if boxed is None or boxes is None:
            return super().select(row, selection)
        from tensorcas_mlflow.reader._boxes import select_from_boxes

        found = select_from_boxes(boxes, selection, self.specs.spec(row).numpy_dtype, boxed[0].select)
        return own_array(found, selection.index_of_places)

    def select_each(self, wanted: Sequence[tuple[int, Selection]]) -> list[Array]:
        boxed = self._boxed
        if boxed is None:
            return super().select_each(wanted)
        from tensorcas_mlflow.reader._boxes import in_one_box

        in_boxes: dict[int, tuple[int, Selection]] = {}
        found: dict[int, Array] = {}
        left: list[int] = []
        for at, (row, selection) in enumerate(wanted):
            boxes = boxed[1].get(int(self.row_of[row]))
            part = None if boxes is None or not len(selection.starts) else in_one_box(boxes, selection)
            if part is not None:
                in_boxes[at] = part
            elif boxes is not None:
                found[at] = self.select(row, selection)
            else:
                left.append(at)
        found |= zip(left, super().select_each([wanted[at] for at in left]), strict=True)
        for at, array in zip(in_boxes, boxed[0].select_each(list(in_boxes.values())), strict=True):
            found[at] = own_array(array, wanted[at][1].index_of_places)
        return [found[at] for at in range(len(wanted))]

    @Lazy
    def _boxed(self) -> tuple[StoredContents, Mapping[int, tuple[Box, ...]]] | None:
        """The boxes of tensors that are kept as such, and their places."""
        if not self.manifest.derived:
            return None
        from tensorcas_mlflow.reader._boxes import boxed_tensors  # few checkpoints have boxes

        found = boxed_tensors(self.manifest)
        if found is None:
            return None
        parts = StoredContents(self._store, found.manifest, label=self.label, tally=self.tally, verify=self._verify)
        return parts, found.boxes

    def read_chunks(self, parts: Sequence[tuple[int, Offsets, Sequence[memoryview]]]) -> None:
        begins = self.manifest.columns.chunk_at[self.row_of[[row for row, _, _ in parts]]]
        numbers = np.concatenate([begin + chunks for begin, (_, chunks, _) in zip(begins, parts, strict=True)])
        outs = [out for _, _, buffers in parts for out in buffers]
        if len(parts) > 1:
            order = np.argsort(numbers, kind="stable")
            numbers, outs = numbers[order], [outs[at] for at in order.tolist()]
        self._store.chunks.read_chunks(self.manifest, numbers, outs, verify=self._verify, last=self._last)

    @Lazy
    def _last(self) -> LastRow:
        from tensorcas_mlflow.chunk_io import LastRow  # a summary needs no reader of chunks

        return LastRow()


class FileContents(RowContents):
    """The tensors of a self-contained file."""

    def __init__(self, file: TensorsFile, *, label: str, verify: bool = True, end: Callable[[], None] | None = None):
        """Read from a file.

        Args:
            file: The file to read; it must stay.
            label: A name of the file, for messages.
            verify: Whether to check each chunk against its digest.
            end: Called at the close.
        """
        super().__init__(file.manifest, label=label, tally=ReadCounter())
        file.tally = self.tally
        self._file = file
        self._verify = verify
        self._end = end

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None, *, copy: bool = False) -> list[Array]:
        names = [self.specs.name(int(row)) for row in rows]
        found = self._file.read(names, verify=self._verify, out={names[at]: out for at, out in (outs or {}).items()})
        return [found[name] for name in names]

    @property
    def can_check(self) -> bool:
        return self._verify

    def read_chunks(self, parts: Sequence[tuple[int, Offsets, Sequence[memoryview]]]) -> None:
        for row, chunks, outs in parts:
            self._file.read_chunks(int(self.row_of[row]), chunks, outs, verify=self._verify)

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _tensor_rows(manifest: Manifest) -> Offsets:
    """Find the tensor rows: those with a name and a dtype, without the skeleton, whatever its recorded dtype."""
    columns = manifest.columns
    is_tensor = np.ones(len(columns), dtype=bool)
    if None in columns.dtypes:
        is_tensor = columns.dtype != columns.dtypes.index(None)
    is_tensor[columns.names.find(SKELETON)] = False
    if manifest.left_out:
        is_tensor[manifest.numbers(name for name in manifest.left_out if name in manifest.by_name)] = False
    rows: Offsets = np.flatnonzero(is_tensor)
    return rows
