"""The tensors of a checkpoint that a store or a self-contained file holds."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow._lazy import Lazy
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.backends import Tally
from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES, Offsets
from tensorcas_mlflow.digest import DIGEST_BYTES, digest, digest_of
from tensorcas_mlflow.manifest import Manifest, Specs
from tensorcas_mlflow.reader._contents import Contents, digest_of_metadata, identity_of
from tensorcas_mlflow.store import Owner, Store, TensorsFile


class RowContents(Contents):
    """Rows of a manifest that are tensors."""

    def __init__(self, manifest: Manifest, *, label: str, tally: Tally) -> None:
        """Take the tensors of a checkpoint's manifest."""
        self.manifest = manifest
        self.label = label
        self.metadata = manifest.metadata
        self.left_out = manifest.left_out
        self.tally = tally
        self.row_of = _tensor_rows(manifest)
        """The number of each tensor among the rows of the manifest."""
        columns = manifest.columns
        self.specs: Specs = columns if len(self.row_of) == len(columns) else columns.some(self.row_of)

    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        stored = self.manifest.rows[int(self.row_of[row])]
        ends = stored.ends(self.manifest.chunk_bytes)
        fill_from_chunks(ends, starts, stops, block, lambda chunks, outs: self.read_chunks(row, chunks, outs))

    @abstractmethod
    def read_chunks(self, row: int, chunks: Offsets, outs: Sequence[memoryview]) -> None:
        """Read some chunks of a tensor, by their numbers in it, into buffers of their sizes."""

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
        names = others.specs.names.to_pylist()
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
    """The tensors of a checkpoint that a store holds."""

    def __init__(self, store: Store, manifest: Manifest, *, label: str, tally: Tally, verify: bool = True) -> None:
        """Read from a store.

        Args:
            store: Counts in ``tally``.
            manifest: Of that store.
            label: Whose it is.
            tally: What is counted in.
            verify: Whether to check each chunk against its digest.
        """
        super().__init__(manifest, label=label, tally=tally)
        self._store = store
        self._verify = verify

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None) -> list[Array]:
        return self._store.chunks.rows(
            self.manifest, self.row_of[rows], verify=self._verify, outs=outs, copy=False, is_private=True
        )

    def read_chunks(self, row: int, chunks: Offsets, outs: Sequence[memoryview]) -> None:
        stored = self.manifest.rows[int(self.row_of[row])]
        owner = Owner(label=self.manifest.label, rows=[stored])
        self._store.chunks.read(stored.digests[chunks], list(outs), verify=self._verify, owner=owner)


class FileContents(RowContents):
    """The tensors of a self-contained file."""

    def __init__(self, file: TensorsFile, *, label: str, verify: bool = True, end: Callable[[], None] | None = None):
        """Read from a file.

        Args:
            file: What is read; it must stay.
            label: Whose it is.
            verify: Whether to check each chunk against its digest.
            end: Called when nothing is read any more.
        """
        super().__init__(file.manifest, label=label, tally=Tally())
        file.tally = self.tally
        self._file = file
        self._verify = verify
        self._end = end

    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None) -> list[Array]:
        names = [self.specs.name(int(row)) for row in rows]
        found = self._file.read(names, verify=self._verify, out={names[at]: out for at, out in (outs or {}).items()})
        return [found[name] for name in names]

    def read_chunks(self, row: int, chunks: Offsets, outs: Sequence[memoryview]) -> None:
        self._file.read_chunks(int(self.row_of[row]), chunks, outs, verify=self._verify)

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _tensor_rows(manifest: Manifest) -> Offsets:
    """Find the rows that are tensors: those with a name and a dtype, and no skeleton, whatever is said of it."""
    columns = manifest.columns
    is_tensor = np.ones(len(columns), dtype=bool)
    if None in columns.dtypes:
        is_tensor = columns.dtype != columns.dtypes.index(None)
    is_tensor[columns.find(SKELETON)] = False
    if manifest.left_out:
        is_tensor[manifest.numbers(name for name in manifest.left_out if name in manifest.by_name)] = False
    rows: Offsets = np.flatnonzero(is_tensor)
    return rows


def fill_from_chunks(
    ends: Offsets, starts: Offsets, stops: Offsets, block: memoryview, read: Callable[[Offsets, list[memoryview]], None]
) -> None:
    """Fill memory with runs of bytes, reading the chunks that they touch, each once and whole.

    Args:
        ends: Where chunks end, ascending.
        starts: See `Contents.fill`.
        stops: See `Contents.fill`.
        block: See `Contents.fill`.
        read: Reads chunks, by their numbers, into buffers of their sizes.
    """
    first, last = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, stops - 1, side="right")
    # Counted from the first chunk of all: a file may have very many before it.
    lowest = int(first[0])
    steps = np.zeros(int(last[-1]) - lowest + 2, dtype=np.int64)
    np.add.at(steps, first - lowest, 1)
    np.add.at(steps, last - lowest + 1, -1)
    chunks = lowest + np.flatnonzero(steps.cumsum()[:-1])
    base, size = int(starts[0]), len(block)
    begins = np.where(chunks > 0, ends[chunks - 1], 0) - base
    outs: list[memoryview] = []
    aside: list[tuple[memoryview, int, int]] = []
    for begin, end in zip(begins.tolist(), (ends[chunks] - base).tolist(), strict=True):
        if begin >= 0 and end <= size:
            outs.append(block[begin:end])
        else:
            outs.append(np.empty(end - begin, dtype=np.uint8).data)
            aside.append((outs[-1], begin, end))
    read(chunks, outs)
    for data, begin, end in aside:
        low, high = max(begin, 0), min(end, size)
        block[low:high] = data[low - begin : high - begin]
