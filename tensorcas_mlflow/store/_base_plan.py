"""What the chunks of one save may be stored against: found by name in an earlier checkpoint, and held by an intent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import Buffer
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.index import Mask, pack_key, pack_name
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.pack import Base
from tensorcas_mlflow.store._bases import Lineage, ancestry, bases_for, matching_row, nearest
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._choose import is_float, sample_number, share_against
from tensorcas_mlflow.store._read import ChunkReader
from tensorcas_mlflow.store._sources import Source

MAX_DEPTH = 2
"""Chunks that decoding one may take besides itself: two reach nearly what many do (``docs/design/codecs.md``)."""
_LEAST_ROW_BYTES = 16 << 10
"""Of smaller tensors a delta spares less than it costs to read what stood there before."""
_MOST_ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The bases of some chunks."""

    named: Sequence[Base | None]
    """For each chunk its base; None where it has none."""
    data: Sequence[Buffer | None]
    """Those, decoded."""


class BasePlan:
    """Stored chunks that stood in the places of those of a save. Guesses: a wrong one costs some bytes and no more.

    What it names may go until an intent names `packs`; so then `leave_out` is called with what is condemned, as a save
    does with all that it is to rely on (``docs/design/protocol.md``, Deltas).
    """

    def __init__(self, catalog: Catalog, reader: ChunkReader, chunks: Any, candidates: Digests) -> None:
        """Look candidates up.

        Args:
            catalog: Of the store.
            reader: Of the store.
            chunks: Numbers of chunks of the save, ascending.
            candidates: For each the chunk that stood in its place.
        """
        self._catalog = catalog
        self._reader = reader
        self._chunks = chunks
        self._candidates = candidates
        self._excluded: frozenset[str] = frozenset()
        self.packs = self._find_packs()
        """All packs that may come to be relied on."""

    def __bool__(self) -> bool:
        return bool(self.packs)

    def leave_out(self, backend: Backend, condemned: Collection[str]) -> None:
        """Rely on no pack that is condemned or gone."""
        there = self.packs - set(condemned)
        gone = {pack_name(key) for key in backend.missing(map(pack_key, there))}
        self._catalog.forget(gone)
        self._excluded = frozenset(condemned) | gone
        self.packs = self.packs - self._excluded

    def has(self, chunks: Any) -> Mask:
        """For each of some chunks whether it has a candidate."""
        at = np.minimum(np.searchsorted(self._chunks, chunks), max(0, len(self._chunks) - 1))
        return self._chunks[at] == chunks if len(self._chunks) else np.zeros(len(chunks), dtype=bool)

    def behind(self, chunk: int, depth: int | None) -> list[tuple[int, Buffer]]:
        """Give what a chunk may be stored against, decoded, each with its depth: its candidate and the bases behind it.

        Args:
            chunk: One that has a candidate.
            depth: Only the nearest of no more depth is wanted; None for all up to one that is stored in full.
        """
        digest = self._candidates[np.searchsorted(self._chunks, chunk)].tobytes()
        chain = ancestry(digest, self._lineage, MAX_DEPTH)
        if depth is not None:
            chain = [each for each in chain if each[0] <= depth][:1]
        wanted = np.frombuffer(b"".join(each for _, each in chain), np.uint8).reshape(-1, DIGEST_BYTES)
        data = self._read(wanted)
        return [(depth, raw) for (depth, _), raw in zip(chain, data, strict=True) if raw is not None]

    def bases(self, chunks: Any, digests: Digests, depth: int) -> Found:
        """Find the bases of some chunks that have candidates.

        Args:
            chunks: Their numbers.
            digests: Of the chunks themselves, which are nobody's own bases.
            depth: The most that a base may have.
        """
        candidates = self._candidates[np.searchsorted(self._chunks, chunks)]
        found = bases_for(digests, candidates, self._lineage, depth)
        places = self._catalog.find_sound(found.digests, self._excluded)
        is_usable = found.found & places.found & (places.entries["depth"] <= depth)
        named: list[Base | None] = [None] * len(chunks)
        data: list[Buffer | None] = [None] * len(chunks)
        usable = np.flatnonzero(is_usable)
        for at, raw in zip(usable.tolist(), self._read(found.digests[usable]), strict=True):
            pack = places.packs[int(places.pack[at])]
            if raw is not None and pack in self.packs:
                named[at] = Base(pack=pack, digest=found.digests[at].tobytes(), depth=int(places.entries["depth"][at]))
                data[at] = raw
        return Found(named=named, data=data)

    def _find_packs(self) -> frozenset[str]:
        candidates = unique_rows(self._candidates)[0]
        places = self._catalog.find_sound(candidates, ())
        if not places.found.all():
            self._catalog.refresh()
            places = self._catalog.find_sound(candidates, ())
        _, packs = self._catalog.find_chains(places)
        return frozenset({places.packs[number] for number in np.unique(places.pack[places.found])} | packs)

    def _lineage(self, digests: Digests) -> Lineage:
        places = self._catalog.find_sound(digests, self._excluded)
        depth = np.where(places.found, places.entries["depth"].astype(np.int64), -1)
        return Lineage(depth=depth, bases=np.ascontiguousarray(places.entries["base_digest"]))

    def _read(self, digests: Digests) -> list[Buffer | None]:
        """Read chunks, each checked; none of them if any cannot be read: then nothing is stored against them."""
        sizes = self._catalog.find_sound(digests, self._excluded).entries["raw_bytes"].tolist()
        outs = [memoryview(bytearray(size)) for size in sizes]
        try:
            self._reader.read(digests, outs, verify=True)
        except (NotFoundError, FormatError, BackendError):
            return [None] * len(outs)
        return list(outs)


def plan_bases(
    catalog: Catalog, reader: ChunkReader, source: Source, chunk_bytes: int, new: Any, candidates: Sequence[Manifest]
) -> BasePlan | None:
    """Find what new chunks may be stored against.

    Args:
        catalog: Of the store.
        reader: Of the store.
        source: The rows of the save, and their bytes.
        chunk_bytes: Of the store.
        new: Numbers of its chunks that are not stored, ascending.
        candidates: Earlier checkpoints, the likeliest first.

    Returns:
        None if nothing is found.
    """
    columns = source.columns
    rows = np.unique(columns.rows_of(new))
    is_tensor = np.array([name is not None for name in columns.dtypes], dtype=bool)[columns.dtype[rows]]
    rows = rows[is_tensor & (columns.n_bytes[rows] >= _LEAST_ROW_BYTES)][:_MOST_ROWS]
    if len(rows) == 0 or not candidates:
        return None
    by_number = {int(row): source.rows[int(row)] for row in rows}
    numbers = {row.spec.name: number for number, row in by_number.items()}
    sampler = _Sampler(catalog, reader, source, new, numbers)
    parent = nearest(list(by_number.values()), chunk_bytes, candidates, sampler.share)
    if parent is None:
        return None
    chunks: list[Any] = []
    found: list[Digests] = []
    for number, row in by_number.items():
        other = matching_row(row, chunk_bytes, parent)
        if other is not None:
            begin, end = int(columns.chunk_at[number]), int(columns.chunk_at[number + 1])
            mine = new[np.searchsorted(new, begin) : np.searchsorted(new, end)]
            chunks.append(mine)
            found.append(other.digests[mine - begin])
    if not chunks:
        return None
    plan = BasePlan(catalog, reader, np.concatenate(chunks), np.ascontiguousarray(np.concatenate(found)))
    return plan or None


class _Sampler:
    """Estimates what tensors would take as deltas against those of other checkpoints."""

    def __init__(
        self, catalog: Catalog, reader: ChunkReader, source: Source, new: Any, numbers: Mapping[str, int]
    ) -> None:
        self._catalog, self._reader, self._source, self._new, self._numbers = catalog, reader, source, new, numbers

    def share(self, row: Any, other: Any) -> float:
        """Estimate what share of its size a tensor takes; see `nearest`."""
        columns = self._source.columns
        number = self._numbers[row.spec.name]
        begin, end = int(columns.chunk_at[number]), int(columns.chunk_at[number + 1])
        mine = self._new[np.searchsorted(self._new, begin) : np.searchsorted(self._new, end)]
        chunk = int(mine[sample_number(len(mine))])
        [raw] = next(self._source.pieces(np.array([chunk]))).data
        plan = BasePlan(
            self._catalog, self._reader, np.array([chunk]), other.digests[chunk - begin : chunk - begin + 1]
        )
        behind = plan.behind(chunk, MAX_DEPTH) if plan else []
        if not behind:
            return 1.0
        itemsize = int(self._source.itemsizes[number])
        return share_against(raw, behind[0][1], itemsize, is_float=is_float(row.spec.dtype))
