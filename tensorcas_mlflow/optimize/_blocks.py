"""Work in portions: chunks that are read, encoded and written together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.digest import DIGEST_BYTES
from tensorcas_mlflow.optimize._tracks import Group, Plain
from tensorcas_mlflow.optimize._tree import IN_FULL, Stored
from tensorcas_mlflow.optimize._trials import Tree

BLOCK_BYTES = 48 << 20
"""Bytes of the chunks of a block, decoded: so many are held at once, and what they become besides."""

_ALONE = Tree(stored=(Stored(IN_FULL),), transforms=(), depths=(0,), shares=(1.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some chunks of one place in each of some versions, and how these are stored."""

    digests: Any
    """Shape ``(n_versions, n_places, 32)``."""
    sizes: Any
    """Of the chunks at each place."""
    itemsizes: Any
    is_text: Any
    tree: Tree

    @property
    def n_bytes(self) -> int:
        """Of all its chunks, equal ones counted each time."""
        return int(self.sizes.sum()) * len(self.digests)

    @property
    def flat(self) -> Any:
        """The digests of all chunks, one after the other."""
        return np.ascontiguousarray(self.digests).reshape(-1, DIGEST_BYTES)


def blocks_of_group(group: Group, tree: Tree) -> Iterator[Block]:
    """Part a group into blocks, each with all versions of some chunks."""
    n_tensors, n_versions, n_chunks, _ = group.digests.shape
    digests = group.digests.transpose(1, 0, 2, 3).reshape(n_versions, n_tensors * n_chunks, DIGEST_BYTES)
    sizes = np.tile(group.sizes, n_tensors)
    for part in _parts(sizes, BLOCK_BYTES // n_versions):
        n = part.stop - part.start
        yield Block(
            digests=digests[:, part],
            sizes=sizes[part],
            itemsizes=np.full(n, group.itemsize),
            is_text=np.zeros(n, dtype=bool),
            tree=tree,
        )


def blocks_of_plain(plain: Plain) -> Iterator[Block]:
    """Part chunks that have no versions into blocks."""
    for part in _parts(plain.sizes, BLOCK_BYTES):
        yield Block(
            digests=plain.digests[None, part],
            sizes=plain.sizes[part],
            itemsizes=plain.itemsizes[part],
            is_text=plain.is_text[part],
            tree=_ALONE,
        )


def units_of(blocks: Iterator[Block], n_bytes: int) -> Iterator[Sequence[Block]]:
    """Gather blocks until they have so many bytes."""
    unit: list[Block] = []
    unit_bytes = 0
    for block in blocks:
        unit.append(block)
        unit_bytes += block.n_bytes
        if unit_bytes >= n_bytes:
            yield unit
            unit, unit_bytes = [], 0
    if unit:
        yield unit


def _parts(sizes: Any, most_bytes: int) -> Iterator[slice]:
    ends = np.cumsum(sizes)
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + most_bytes, side="right")))
        yield slice(begin, end)
        begin = end
