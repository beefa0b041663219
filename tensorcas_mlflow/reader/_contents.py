"""Where the tensors of a checkpoint are read from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Tally
from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES, Offsets
from tensorcas_mlflow.digest import digest, digest_all
from tensorcas_mlflow.manifest import Specs
from tensorcas_mlflow.reader._slices import Selection
from tensorcas_mlflow.tensor import Spec, bytes_of

BATCH_BYTES = 16 << 20
"""What is read ahead of whoever takes tensors one after the other."""


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
    """Tensors that numpy has no dtype for, by name, with what their file calls their type; none of ``specs``."""

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
            Numbers of tensors and stretches of their bytes, in the order of ``rows``.
        """
        sizes = self.specs.n_bytes[rows]
        ends = sizes.cumsum()
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            if last == first + 1 and sizes[first] > BATCH_BYTES:
                row = int(rows[first])
                for start in range(0, int(sizes[first]), BATCH_BYTES):
                    yield [(row, self._stretch(row, start, min(start + BATCH_BYTES, int(sizes[first]))))]
            else:
                arrays = self.arrays(rows[first:last])
                yield [(int(row), bytes_of(array)) for row, array in zip(rows[first:last], arrays, strict=True)]
            first = last

    def _stretch(self, row: int, start: int, stop: int) -> memoryview:
        block = np.empty(stop - start, dtype=np.uint8).data
        self.fill(row, np.array([start]), np.array([stop]), block)
        return block

    def identity_bytes(self, row: int) -> bytes:
        """Give what says of a tensor's bytes which they are: the digests of its pieces of 256 KiB, one after the other.

        Where the chunks of a store are these pieces nothing is read; else all of the tensor is.
        """
        known = self.chunk_digests(row)
        if known is not None:
            return known
        parts: list[bytes] = []
        for batch in self.batches(np.array([row])):
            for _, data in batch:
                parts.append(digest_all(_pieces(data)).tobytes())
        return b"".join(parts)

    def identity(self, row: int) -> bytes:
        """Give a tensor's identity: the digest of its dtype, its shape, and `identity_bytes`."""
        return identity_of(self.specs.spec(row), self.identity_bytes(row))

    def known_identities(self) -> Iterator[bytes | None]:
        """Give the identity of each tensor; None where telling it would take reading."""
        for row in range(len(self.specs)):
            known = self.chunk_digests(row)
            yield None if known is None else identity_of(self.specs.spec(row), known)

    def select(self, row: int, selection: Selection) -> Array:
        """Read some elements of one tensor."""
        dtype = self.specs.spec(row).numpy_dtype
        # Memory that nobody touches is none: the system gives no page for what is not chosen.
        window = np.empty(selection.window, dtype=dtype)
        if len(selection.starts):
            starts, stops = selection.starts * dtype.itemsize, selection.stops * dtype.itemsize
            first = int(starts[0]) - selection.origin * dtype.itemsize
            block = bytes_of(window)[first : first + int(stops[-1] - starts[0])]
            self.fill(row, starts, stops, block)
        chosen = window[selection.index]
        is_all = chosen.size == window.size and chosen.flags.c_contiguous
        return chosen if is_all else np.array(chosen, order="C")


def identity_of(spec: Spec, digests: bytes) -> bytes:
    """Give the identity of a tensor (``docs/format.md``, Manifests).

    Args:
        spec: What it is.
        digests: Of its pieces of the default chunk size, one after the other.
    """
    shape = np.array(spec.shape, dtype="<i8").tobytes()
    return digest((spec.dtype or "").encode() + b"\0" + shape + digests)


def _pieces(data: memoryview) -> Sequence[memoryview]:
    return [data[at : at + DEFAULT_CHUNK_BYTES] for at in range(0, len(data), DEFAULT_CHUNK_BYTES)]
