"""Possible bases for the chunks of one save: found by name in an earlier checkpoint, protected by an intent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import Buffer
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.index import Mask, pack_key, pack_name
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.pack import Base
from tensorcas_mlflow.store._ancestry import Ancestry
from tensorcas_mlflow.store._bases import LEAST_ROW_BYTES, matching_row, nearest
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._choose import sample_number, share_against
from tensorcas_mlflow.store._read import ChunkReader
from tensorcas_mlflow.store._recent_chunks import MOST_SAVED_BYTES
from tensorcas_mlflow.store._sources import Source

MAX_DEPTH = 2
"""Maximum number of other chunks needed to decode one: two reach nearly as far as many (``docs/design/codecs.md``)."""
_MOST_ROWS = 20_000
_MOST_HELD = 4096
"""Bound of the candidates with remembered places; more would take megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The bases of some chunks."""

    named: Sequence[Base | None]
    """For each chunk its base, or None."""
    data: Sequence[Buffer | None]
    """The same bases, decoded."""


class BasePlan:
    """Stored chunks at the same places as the chunks of a save. Guesses: a wrong one costs some bytes and no more.

    The chunks may be deleted until an intent names `packs`. After creating it, the save calls `leave_out` with the
    condemned packs, like for every chunk it relies on (``docs/design/protocol.md``, Deltas).
    """

    def __init__(self, catalog: Catalog, reader: ChunkReader, chunks: Any, candidates: Digests) -> None:
        """Look candidates up.

        Args:
            catalog: The store's.
            reader: The store's.
            chunks: Numbers of chunks of the save, ascending.
            candidates: For each the stored chunk at its place.
        """
        self._catalog = catalog
        self._reader = reader
        self._chunks = chunks
        self._candidates = candidates
        self._excluded: frozenset[str] = frozenset()
        found = Ancestry.of(catalog, candidates)
        if not found.levels[0].found.all():
            catalog.refresh()
            found = Ancestry.of(catalog, candidates)
        self.packs = found.packs
        """All packs the save may come to rely on."""
        self._found = found if len(candidates) <= _MOST_HELD else None
        """Places of all candidates; None if they are looked up on demand."""

    def __bool__(self) -> bool:
        return bool(self.packs)

    def leave_out(self, backend: Backend, condemned: Collection[str]) -> None:
        """Rely on no condemned or deleted pack."""
        there = self.packs - set(condemned)
        gone = {pack_name(key) for key in backend.missing(map(pack_key, there))}
        self._catalog.forget(gone)
        self._excluded = frozenset(condemned) | gone
        if self.packs & self._excluded:
            self.packs -= self._excluded
            self._found = None

    def has(self, chunks: Any) -> Mask:
        """Return for each of some chunks whether it has a candidate."""
        at = np.minimum(np.searchsorted(self._chunks, chunks), max(0, len(self._chunks) - 1))
        return self._chunks[at] == chunks if len(self._chunks) else np.zeros(len(chunks), dtype=bool)

    def behind(self, chunk: int, depth: int | None) -> list[tuple[int, Buffer]]:
        """Return the possible bases of a chunk, decoded, each with its depth: its candidate and the bases behind it.

        Args:
            chunk: A chunk with a candidate.
            depth: Return only the nearest within this depth; None for all up to one stored in full.
        """
        chain = self._ancestry(np.searchsorted(self._chunks, [chunk])).chain(0)
        if not chain or chain[0][0] > MAX_DEPTH:
            return []
        if depth is not None:
            chain = [each for each in chain if each[0] <= depth][:1]
        wanted = np.frombuffer(b"".join(each for _, each in chain), np.uint8).reshape(-1, DIGEST_BYTES)
        data = self._catalog.recent.find(wanted) or self._read(wanted)
        return [(depth, raw) for (depth, _), raw in zip(chain, data, strict=True) if raw is not None]

    def bases(self, chunks: Any, digests: Digests, depth: int) -> Found:
        """Find the bases of some chunks with candidates.

        Args:
            chunks: Their numbers.
            digests: Digests of the chunks themselves; no chunk is its own base.
            depth: Maximum depth of a base: a deeper candidate is replaced by the nearest behind it within this depth.
        """
        rows = np.searchsorted(self._chunks, chunks)
        found = self._ancestry(rows).up_to(depth)
        is_usable = self._is_held(found) & _differ(self._candidates[rows], digests) & _differ(_digests(found), digests)
        usable = np.flatnonzero(is_usable)
        data = self._remembered(found.some(usable))
        if data is None:
            wanted = _digests(found)[usable]
            data = self._read(wanted)
            # Looked up again: a copy just found unreadable is no base, even if another copy was readable.
            found = self._look_up(rows).up_to(depth)
            is_same = self._is_held(found)[usable] & ~_differ(_digests(found)[usable], wanted)
            data = [raw if same else None for raw, same in zip(data, is_same.tolist(), strict=True)]
        named: list[Base | None] = [None] * len(chunks)
        decoded: list[Buffer | None] = [None] * len(chunks)
        nearest = found.levels[0]
        for at, raw in zip(usable.tolist(), data, strict=True):
            if raw is not None:
                entry = nearest.entries[at]
                named[at] = Base(
                    pack=nearest.packs[int(nearest.pack[at])],
                    digest=entry["digest"].tobytes(),
                    depth=int(entry["depth"]),
                )
                decoded[at] = raw
        return Found(named=named, data=decoded)

    def _ancestry(self, rows: Any) -> Ancestry:
        return self._look_up(rows) if self._found is None else self._found.some(rows)

    def _look_up(self, rows: Any) -> Ancestry:
        return Ancestry.of(self._catalog, np.ascontiguousarray(self._candidates[rows]), self._excluded)

    def _is_held(self, found: Ancestry) -> Mask:
        """Return for each chunk whether it was found, and needs only `packs`, named by the intent."""
        return found.lies_in(self.packs)

    def _remembered(self, found: Ancestry) -> Sequence[Buffer | None] | None:
        """Return chunks this process has just stored; None if it has not, or if its stored copies are unreadable."""
        chunks = self._catalog.recent.find(_digests(found))
        if chunks is None or not all(self._catalog.recent.are_whole(level) for level in found.levels):
            return None
        return chunks

    def _read(self, digests: Digests) -> Sequence[Buffer | None]:
        """Read chunks, each verified; return none of them if any is unreadable: then nothing uses them as bases."""
        sizes = self._catalog.find_sound(digests, self._excluded).entries["raw_bytes"].tolist()
        outs = [memoryview(bytearray(size)) for size in sizes]
        try:
            self._reader.read(digests, outs, verify=True)
        except (NotFoundError, FormatError, BackendError):
            return [None] * len(outs)
        if sum(sizes) <= MOST_SAVED_BYTES:
            self._catalog.recent.note(digests, outs)
        return list(outs)


def _digests(found: Ancestry) -> Digests:
    return np.ascontiguousarray(found.levels[0].entries["digest"])


def _differ(one: Digests, other: Digests) -> Mask:
    differ: Mask = (one != other).any(axis=1)
    return differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Tensors whose new chunks need bases."""

    source: Source
    new: Any
    """Numbers of its new chunks with bytes at hand, ascending."""
    rows: Mapping[int, Row]
    """The tensors, by their numbers in the source; no two of one name."""

    @classmethod
    def of(cls, source: Source, new: Any) -> Wanted:
        """Find the tensors large enough for deltas.

        Args:
            source: The rows of a save, and their bytes.
            new: See the attribute.
        """
        columns = source.columns
        numbers = np.unique(columns.rows_of(new))
        numbers = numbers[columns.n_bytes[numbers] >= LEAST_ROW_BYTES]
        is_tensor = np.array([name is not None for name in columns.dtypes], dtype=bool)[columns.dtype[numbers]]
        if source.first_row is not None:
            is_tensor |= np.array([columns.name(number) != "" for number in numbers.tolist()], dtype=bool)
        numbers = numbers[is_tensor][:_MOST_ROWS]
        # A file may have many tensors without a name; the last one represents them, here and in other files.
        by_name = {columns.name(number): number for number in numbers.tolist()}
        return cls(source=source, new=new, rows={number: source.rows[number] for number in sorted(by_name.values())})

    @property
    def places(self) -> Mapping[str, int]:
        """Numbers of the tensors in their file, by name; empty if names alone identify them."""
        first = self.source.first_row
        return {} if first is None else {row.spec.name: first + number for number, row in self.rows.items()}

    def chunks_of(self, number: int) -> tuple[Any, Any]:
        """Return the new chunks of a tensor: their numbers, and those counted from its own first chunk."""
        begin, end = (int(at) for at in self.source.columns.chunk_at[number : number + 2])
        mine = self.new[np.searchsorted(self.new, begin) : np.searchsorted(self.new, end)]
        return mine, mine - begin


def nearest_parent(
    catalog: Catalog, reader: ChunkReader, wanted: Wanted, chunk_bytes: int, candidates: Sequence[Manifest]
) -> Manifest | None:
    """Choose the earlier checkpoint with the bases of tensors.

    Args:
        catalog: The store's.
        reader: The store's.
        wanted: The tensors, at least one.
        chunk_bytes: The store's chunk size.
        candidates: Earlier checkpoints and files, the likeliest first.

    Returns:
        None if none has any of the tensors.
    """
    numbers = {row.spec.name: number for number, row in wanted.rows.items()}

    def share(row: Row, other: Row) -> float:
        """Estimate the share of its size a tensor takes as a delta against another one; see `nearest`."""
        number = numbers[row.spec.name]
        chunks, places = wanted.chunks_of(number)
        sample = sample_number(len(chunks))
        plan = BasePlan(catalog, reader, chunks[[sample]], other.digests[places[[sample]]])
        behind = plan.behind(int(chunks[sample]), MAX_DEPTH) if plan else []
        if not behind:
            return 1.0
        [raw] = next(wanted.source.pieces(chunks[[sample]])).data
        itemsize = int(wanted.source.itemsizes[number])
        return share_against(raw, behind[0][1], itemsize)

    return nearest(list(wanted.rows.values()), chunk_bytes, candidates, share, wanted.places)


def plan_bases(
    catalog: Catalog, reader: ChunkReader, wanted: Wanted, chunk_bytes: int, parent: Manifest
) -> BasePlan | None:
    """Find possible bases of new chunks: the chunks at their places in an earlier checkpoint or file.

    Returns:
        None if there are none.
    """
    chunks: list[Any] = []
    found: list[Digests] = []
    rows_at = wanted.places
    for number, row in wanted.rows.items():
        other = matching_row(row, chunk_bytes, parent, rows_at)
        if other is not None:
            mine, places = wanted.chunks_of(number)
            chunks.append(mine)
            found.append(other.digests[places])
    if not chunks:
        return None
    plan = BasePlan(catalog, reader, np.concatenate(chunks), np.ascontiguousarray(np.concatenate(found)))
    return plan or None
