"""Interface to the tensors of a checkpoint, wherever they are stored."""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tensorcas_mlflow._mapping import sparse_memory
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Tally
from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES, Offsets
from tensorcas_mlflow.digest import digest, digest_all
from tensorcas_mlflow.manifest import Specs
from tensorcas_mlflow.reader._slices import Selection, divided
from tensorcas_mlflow.tensor import aligned_bytes, bytes_of

BATCH_BYTES = 16 << 20
"""What is read ahead of whoever takes tensors one after the other."""
SPARSE_BYTES = 64 << 20
"""What is held at most besides what was asked for, when that is scattered over a tensor."""


class Contents(ABC):
    """The tensors of one checkpoint or file, by number. What is left of a model without them is none of them."""

    label: str
    """Whose they are, in words."""
    metadata: Mapping[str, Any]
    """Plain JSON values that were saved beside them."""
    specs: Specs
    """What they are."""
    tally: Tally
    """What was read of them."""
    left_out: Mapping[str, str] = MappingProxyType({})
    """Tensors that no array holds, by name, with what their file or framework calls their type; none of ``specs``."""

    @abstractmethod
    def arrays(self, rows: Offsets, outs: Mapping[int, Array] | None = None) -> list[Array]:
        """Read whole tensors.

        Args:
            rows: Which, by number.
            outs: Arrays to read into, by position among ``rows``: of the tensor's dtype and shape, writable, in C
                order.

        Returns:
            An array a row: that of ``outs``, or another one, which is writable; what is written to it reaches no store.
        """

    @abstractmethod
    def fill(self, row: int, starts: Offsets, stops: Offsets, block: memoryview) -> None:
        """Read some bytes of one tensor, and no more than it takes to check them.

        Args:
            row: Which tensor.
            starts: Where runs of bytes begin, counted from its first, ascending.
            stops: One past their last; they do not overlap.
            block: Memory for the bytes from the first run's beginning to the last one's end; what lies between runs
                becomes anything.
        """

    @abstractmethod
    def other_content(self) -> dict[str, bytes]:
        """Say which content there is beside the tensors.

        Returns:
            A digest by kind (``docs/format.md``, Digests of checkpoints): ``adapter``, ``bytes``, ``left_out``,
            ``metadata``, ``skeleton``.
        """

    def chunk_digests(self, row: int) -> bytes | None:
        """Give the digests of a tensor's chunks, one after the other, where they are known.

        Returns:
            None unless the chunks are those that a store of the default chunk size makes of it.
        """
        return None

    def close(self) -> None:
        """Let go of what is open; arrays that were read stay."""
        return

    def batches(self, rows: Offsets) -> Iterator[list[tuple[int, memoryview]]]:
        """Read tensors one after the other, some 16 MiB at a time.

        Yields:
            Numbers of tensors and stretches of their bytes, in the order of ``rows``. How a tensor is divided follows
            from its size alone.
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
        """Read a large tensor in pieces of so many bytes, the last one of the rest."""
        n_bytes = int(self.specs.n_bytes[row])
        for start in range(0, n_bytes, piece_bytes):
            stop = min(start + piece_bytes, n_bytes)
            block = np.empty(stop - start, dtype=np.uint8).data
            self.fill(row, np.array([start]), np.array([stop]), block)
            yield block

    def identity_bytes(self, rows: Offsets) -> list[bytes]:
        """Give what says of tensors' bytes which they are: digests of pieces of 256 KiB, one after the other.

        Where the chunks of a store are these pieces nothing is read; else all of the tensor is.

        Args:
            rows: Which, each once.
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
        """Give the identities of tensors: the digest of the dtype, the shape, and `identity_bytes` of each."""
        described = zip(rows.tolist(), self.identity_bytes(rows), strict=True)
        return [self._identity(row, digests) for row, digests in described]

    def known_identities(self) -> Iterator[bytes | None]:
        """Give the identity of each tensor; None where telling it would take reading."""
        for row in range(len(self.specs)):
            known = self.chunk_digests(row)
            yield None if known is None else self._identity(row, known)

    def _identity(self, row: int, digests: bytes) -> bytes:
        return identity_of(self.specs.dtypes[self.specs.dtype[row]], self.specs.shape(row), digests)

    def select(self, row: int, selection: Selection) -> Array:
        """Read some elements of one tensor, holding hardly more than they take."""
        if not len(selection.starts):
            nothing = np.empty((), self.specs.spec(row).numpy_dtype)
            return np.array(np.broadcast_to(nothing, selection.window)[selection.index])
        if selection.is_one_run or self._is_small(row, selection):
            return own_array(self.window(row, selection), selection.index)
        spec = self.specs.spec(row)
        found = np.empty(tuple(map(len, selection.places)), dtype=spec.numpy_dtype)
        for box, part in divided(spec.shape, selection, lambda part: self._is_small(row, part)):
            found[box] = self.window(row, part)[part.index]
        return own_array(found, selection.index_of_places)

    def window(self, row: int, selection: Selection) -> Array:
        """Read what is chosen into an array of a selection's window; what else is in it may be anything."""
        dtype = self.specs.spec(row).numpy_dtype
        n_bytes = math.prod(selection.window) * dtype.itemsize
        is_sparse = n_bytes > SPARSE_BYTES and n_bytes > 2 * selection.n_read * dtype.itemsize
        memory = np.frombuffer(sparse_memory(n_bytes), np.uint8) if is_sparse else aligned_bytes(n_bytes)
        starts, stops = selection.starts * dtype.itemsize, selection.stops * dtype.itemsize
        first = int(starts[0]) - selection.origin * dtype.itemsize
        self.fill(row, starts, stops, memory.data[first : first + int(stops[-1] - starts[0])])
        return memory.view(dtype).reshape(selection.window)

    def _is_small(self, row: int, selection: Selection) -> bool:
        """Tell whether the chunks of a selection are few."""
        itemsize = self.specs.spec(row).numpy_dtype.itemsize
        touched = selection.n_read * itemsize + len(selection.starts) * DEFAULT_CHUNK_BYTES
        return min(touched, math.prod(selection.window) * itemsize) <= SPARSE_BYTES


def own_array(window: Array, index: Any) -> Array:
    """Choose elements of an array; they keep no more of it alive than themselves."""
    chosen = window[index]
    is_all = chosen.size == window.size and chosen.flags.c_contiguous
    return chosen if is_all else np.array(chosen, order="C")


def identity_of(dtype: str | None, shape: Sequence[int], digests: bytes) -> bytes:
    """Give the identity of a tensor (``docs/format.md``, Manifests).

    Args:
        dtype: As manifests name it.
        shape: Sides.
        digests: Of its pieces of the default chunk size, one after the other.
    """
    return digest((dtype or "").encode() + b"\0" + struct.pack(f"<{len(shape)}q", *shape) + digests)


def digest_of_metadata(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return what `Contents.other_content` says of metadata: nothing if there are none."""
    text = json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"))
    return {"metadata": digest(text.encode())} if metadata else {}


def pieces_of_chunk_size(data: memoryview) -> list[memoryview]:
    """Cut bytes into pieces of the default chunk size, the last one of the rest."""
    return [data[at : at + DEFAULT_CHUNK_BYTES] for at in range(0, len(data), DEFAULT_CHUNK_BYTES)]
