"""Delta bases at known places: their chains, the cost of decoding them, and their bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, Digests
from tensorcas_mlflow.base.tensors import distinct
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.chunk_io import (
    MOST_SAVED_BYTES,
    Catalog,
    ChainLinks,
    ChunkReader,
    OpenPacks,
    Places,
    StoredChunks,
)
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Condemnation
from tensorcas_mlflow.layout.packs import PACK_NAME_BYTES, Mask, pack_key, pack_name
from tensorcas_mlflow.store._choose import (
    MAX_PASSES,
    MAX_SAVED_DEPTH,
    PossibleBase,
    gain_of,
    passes_of,
)
from tensorcas_mlflow.store._sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """Copies of some chunks, their bases, and so on, up to the chunks stored in full."""

    levels: Sequence[Places]
    """First the chunks themselves, then their bases: one row a chunk in each, not found after the end of its chain.
    Depths descend from level to level, and every chain is complete."""

    @classmethod
    def of(cls, catalog: Catalog, digests: Digests, excluded: Collection[str] = ()) -> Ancestry:
        """Look chunks up.

        Args:
            catalog: The store's.
            digests: The chunks, shape ``(n, 32)``.
            excluded: Packs to ignore.
        """
        places = catalog.find_sound(digests, excluded)
        return cls(levels=[places, *catalog.follow(places, excluded)])

    @property
    def packs(self) -> frozenset[str]:
        """Return all packs with any of these copies."""
        return frozenset(
            [level.packs[number] for level in self.levels for number in distinct(level.pack[level.found]).tolist()]
        )

    def some(self, rows: Any) -> Ancestry:
        """Return the ancestry of some of the chunks, by number."""
        return Ancestry(levels=[level.some(rows) for level in self.levels])

    def up_to(self, depth: int, passes: Any = 0.0) -> Ancestry:
        """Begin each chain with its nearest possible base; there is one, unless nothing is found.

        Args:
            depth: Maximum depth of a base.
            passes: Cost of decoding the deltas that get these bases, one or one for each chunk; each at most 1.
        """
        levels = list(self.levels)
        while True:
            depths = levels[0].entries["depth"]
            is_deep = depths > depth
            if depths.max(initial=0) > 1:  # two deltas are always within the bound
                is_deep |= _passes(levels) + passes > MAX_PASSES
            deep = (levels[0].found & is_deep).nonzero()[0]
            if len(deep) == 0:
                return Ancestry(levels=levels)
            if len(deep) == len(levels[0].found):  # as in a loop, where all tensors start anew together
                del levels[0]
                continue
            nothing = levels[-1].some(deep).nowhere()
            behind = [level.some(deep) for level in levels[1:]] + [nothing]
            levels = [level.replaced(deep, next_) for level, next_ in zip(levels, behind, strict=True)]

    def lies_in(self, packs: Collection[str]) -> Mask:
        """Return for each chunk whether it was found, with all of its chain in some packs."""
        lies: Mask = self.levels[0].found.copy()
        for level in self.levels:
            lies &= level.found_in(packs) | ~level.found
        return lies

    def links(self) -> ChainLinks:
        """Return the links of all chunks; each of them must be found.

        Raises:
            BlobNotFoundError: A base has become unknown since.
        """
        return ChainLinks.of(self.levels)

    def chain(self, row: int) -> list[tuple[int, bytes, float]]:
        """Describe a chunk, and then each base behind it; empty if it is not stored.

        Returns:
            The depth of each, its digest, and the cost of decoding the deltas from it to the end; see `MAX_PASSES`.
        """
        links: list[tuple[int, bytes, float]] = []
        cost = 0.0
        for level in reversed(self.levels):
            if level.found[row]:
                entry = level.entries[row]
                depth = int(entry["depth"])
                if depth:
                    cost += float(passes_of(int(entry["stored_bytes"]) / max(int(entry["raw_bytes"]), 1)))
                links.append((depth, entry["digest"].tobytes(), cost))
        links.reverse()
        return links


def _passes(levels: Sequence[Places]) -> Any:
    """Return the cost of decoding the deltas of each chain; see `MAX_PASSES`."""
    total = np.zeros(len(levels[0].found))
    for level in levels:
        is_one = level.found & (level.entries["depth"] > 0)
        if is_one.any():
            share = level.entries["stored_bytes"][is_one] / np.maximum(level.entries["raw_bytes"][is_one], 1)
            total[is_one] += passes_of(share)
    return total


_N_SAMPLES = 4
"""Number of chunks from which the gain of bases in an object store is estimated."""
_N_FIRST = 2
"""Chunks at the beginning of a chain that are possible bases of a series that restarts."""
_MOST_HELD = 4096
"""Bound of the candidates with remembered places; more would take megabytes."""


NAMED = np.dtype([("pack", "u1", (PACK_NAME_BYTES,)), ("digest", "u1", (DIGEST_BYTES,)), ("depth", "u1")])
"""Name of a base, as a pack's table has it, and the base's depth; zeros for none (``native/src/encode.h``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBases:
    """The bases of some chunks."""

    is_found: Mask
    """Flags of the chunks with a base."""
    named: Any
    """The bases, rows of `NAMED`."""
    data: Sequence[Buffer | None]
    """The same bases, decoded; None also for those that the encoder decodes."""
    stored: StoredChunks | None = None
    """The bases that the encoder decodes; None if there are none."""
    number: Any
    """For each chunk the number of its base among these; -1 if it is another one."""
    sizes: Any
    """Size of each base; 0 if there is none."""


class BasePlan:
    """Stored chunks at the same places as the chunks of a save. Guesses: a wrong one costs some bytes and no more.

    The chunks may be deleted until an intent names `packs`. After creating it, the save calls `leave_out` with the
    condemned packs, like for every chunk it relies on (``docs/design/protocol.md``, Deltas).
    """

    def __init__(
        self,
        catalog: Catalog,
        reader: ChunkReader,
        chunks: Any,
        candidates: Digests,
    ) -> None:
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
        self._known = catalog.knowledge()
        found = Ancestry.of(catalog, candidates)
        for refresh in (catalog.look_at_hinted, catalog.refresh):
            if found.levels[0].found.all():
                break
            refresh()
            self._known = catalog.knowledge()
            found = Ancestry.of(catalog, candidates)
        self.packs = found.packs
        """All packs the save may come to rely on."""
        self._found = found if len(candidates) <= _MOST_HELD else None
        """Places of all candidates; None if they are looked up on demand."""
        is_near = not reader.is_remote or catalog.recent.has(candidates)
        self.n_far_bytes = 0 if is_near else sum(map(reader.n_far_bytes, found.levels))
        """Stored bytes of the candidates, and of all bases behind them, that only an object store has."""
        self._checked: dict[bytes, Buffer] = {}
        """Chunks whose bytes hash to their digests, the keys."""

    def __bool__(self) -> bool:
        return bool(self.packs)

    def close(self) -> None:
        """Close the packs of bases that an encoder decodes; it may open them again."""
        if (packs := vars(self).get("_packs")) is not None:
            packs.close()

    @Lazy
    def _packs(self) -> OpenPacks | None:
        return self._reader.open_packs()

    def leave_out(self, backend: Backend, condemned: Condemnation) -> Collection[str]:
        """Rely on no condemned or deleted pack.

        Args:
            backend: The store's.
            condemned: The condemned lists, read after the intent was created.

        Returns:
            The packs to rely on.
        """
        seen = self._catalog.seen(condemned.generation)
        there = set(map(pack_key, self.packs - condemned.packs)) - seen
        missing = backend.missing(there)
        seen |= there - missing
        gone = set(map(pack_name, missing))
        self._catalog.forget(gone)
        self._excluded = condemned.packs | gone
        if self.packs & self._excluded:
            self.packs -= self._excluded
            self._found = None
        return self.packs

    def has(self, chunks: Any) -> Mask:
        """Return for each of some chunks whether it has a candidate."""
        at = np.minimum(self._chunks.searchsorted(chunks), max(0, len(self._chunks) - 1))
        return self._chunks[at] == chunks if len(self._chunks) else np.zeros(len(chunks), dtype=bool)

    def depths(self, chunk: int) -> list[int]:
        """Return the depth of a chunk's candidate, and of each base behind it."""
        row = int(self._chunks.searchsorted(chunk))
        return [depth for depth, _, _ in self._chain(row)]

    def _chain(self, row: int) -> list[tuple[int, bytes, float]]:
        return self._look_up([row]).chain(0) if self._found is None else self._found.chain(row)

    def behind(self, chunk: int, depth: int | None) -> list[PossibleBase]:
        """Return possible bases of a chunk, the nearest first.

        Args:
            chunk: A chunk with a candidate.
            depth: Return only the nearest within this depth. None for the candidate, even if it is no possible base,
                the nearest possible one, and the first of the chain: one stored in full, and the delta against that.
        """
        chain = self._chain(int(self._chunks.searchsorted(chunk)))
        if not chain:
            return []
        # The same bound as in `Ancestry.up_to`.
        most, nearest = MAX_SAVED_DEPTH - 1 if depth is None else depth, 0
        while chain[nearest][0] > most or (chain[nearest][0] > 1 and chain[nearest][2] > MAX_PASSES):
            nearest += 1
        numbers = [nearest]
        if depth is None:
            numbers = sorted({0, nearest, *range(max(0, len(chain) - _N_FIRST), len(chain))})
        wanted = np.frombuffer(b"".join(chain[number][1] for number in numbers), np.uint8).reshape(-1, DIGEST_BYTES)
        data: Sequence[Buffer | None] | None = self._recalled(wanted)
        if data is None:
            sizes = self._catalog.find_sound(wanted, self._excluded).entries["raw_bytes"].tolist()
            data = self._read(wanted, sizes)
        bases: list[PossibleBase] = []
        for number, raw in zip(numbers, data, strict=True):
            if raw is not None:
                bases.append(PossibleBase(chain[number][0], raw, chain[number][2]))
        return bases

    def gain_bytes(self, source: Source) -> float:
        """Estimate the bytes that deltas save; read the candidates of a few chunks, all at once.

        Args:
            source: The rows of the save, and their bytes.
        """
        ends = np.cumsum(source.sizes[self._chunks])
        rows = distinct(ends.searchsorted((np.arange(_N_SAMPLES) + 0.5) / _N_SAMPLES * ends[-1], side="right"))
        places = self._ancestry(rows).levels[0]
        at = np.flatnonzero(places.found)
        rows, places = rows[at], places.some(at)
        if not len(rows):
            return 0.0
        wanted = np.ascontiguousarray(places.entries["digest"])
        bases = self._recalled(wanted) or self._read(wanted, places.entries["raw_bytes"].tolist())
        samples = [raw for pieces in source.pieces(self._chunks[rows]) for raw in pieces.data]
        itemsizes = source.itemsizes[source.columns.rows_of(self._chunks[rows])].tolist()
        gains = [
            0.0 if base is None else gain_of(raw, base, itemsize)
            for raw, base, itemsize in zip(samples, bases, itemsizes, strict=True)
        ]
        return sum(gains) / len(gains) * int(source.sizes[self._chunks].sum())

    def remember(self, digests: Digests, sample: Buffer) -> None:
        """Keep a sample chunk for the next save, which compares its own sample with this one."""
        if memoryview(sample).nbytes <= MOST_SAVED_BYTES:
            # The owner may change the sample's bytes. The memory hashes each copy before it returns one.
            self._catalog.recent.note(digests, [bytes(sample)])

    def bases(
        self, chunks: Any, digests: Digests, depth: int, passes: Any = 0.0, *, is_decoded: bool = True
    ) -> FoundBases:
        """Find the bases of some chunks with candidates.

        Args:
            chunks: Their numbers.
            digests: Digests of the chunks themselves; no chunk is its own base.
            depth: Maximum depth of a base: a deeper candidate is replaced by the nearest behind it within this depth.
            passes: The cost of decoding each delta; a candidate that costs too much is replaced likewise.
            is_decoded: Whether to decode all bases here, and to look for another copy of one that is damaged. Otherwise
                those in local packs are left to the encoder.
        """
        rows = self._chunks.searchsorted(chunks)
        found = self._ancestry(rows).up_to(depth, passes)
        is_usable = self._is_held(found) & _differ(self._candidates[rows], digests) & _differ(_digests(found), digests)
        usable = is_usable.nonzero()[0]
        chains = found if len(usable) == len(rows) else found.some(usable)
        data = self._remembered(chains)
        stored = None if is_decoded or data is not None else self._stored(chains)
        if stored is not None:
            data = [None] * len(usable)
        if data is None:
            nearest = found.levels[0]
            wanted, sizes = _digests(found)[usable], nearest.entries["raw_bytes"][usable].tolist()
            data = self._read(wanted, sizes)
            if self._found is None or self._catalog.knowledge() != self._known:
                # A copy found unreadable since is no base, even if another copy was readable.
                found = self._look_up(rows).up_to(depth, passes)
                is_same = self._is_held(found)[usable] & ~_differ(_digests(found)[usable], wanted)
                data = [raw if same else None for raw, same in zip(data, is_same.tolist(), strict=True)]
        n_chunks = len(chunks)
        decoded: list[Buffer | None] = [None] * n_chunks
        number = np.full(n_chunks, -1, np.int32)
        if stored is not None:
            number[usable] = np.arange(len(usable))
        else:
            for at, raw in zip(usable.tolist(), data, strict=True):
                decoded[at] = raw
            usable = usable[[raw is not None for raw in data]]
        is_found, sizes = np.zeros(n_chunks, dtype=bool), np.zeros(n_chunks, dtype=np.int64)
        nearest = found.levels[0]
        entries = nearest.entries[usable]
        is_found[usable], sizes[usable] = True, entries["raw_bytes"]
        named = np.zeros(n_chunks, dtype=NAMED)
        pack = nearest.pack[usable]
        packs = distinct(pack)
        pack = packs.searchsorted(pack)
        names = bytes.fromhex("".join([nearest.packs[at] for at in packs.tolist()]))
        named["pack"][usable] = np.frombuffer(names, np.uint8).reshape(-1, PACK_NAME_BYTES)[pack]
        named["digest"][usable], named["depth"][usable] = entries["digest"], entries["depth"]
        return FoundBases(is_found=is_found, named=named, data=decoded, stored=stored, number=number, sizes=sizes)

    def _ancestry(self, rows: Any) -> Ancestry:
        if self._found is None:
            return self._look_up(rows)
        # The rows ascend, none twice.
        return self._found if len(rows) == len(self._candidates) else self._found.some(rows)

    def _look_up(self, rows: Any) -> Ancestry:
        return Ancestry.of(self._catalog, np.ascontiguousarray(self._candidates[rows]), self._excluded)

    def _is_held(self, found: Ancestry) -> Mask:
        """Return for each chunk whether it was found, and needs only `packs`, named by the intent."""
        return found.lies_in(self.packs)

    def _stored(self, found: Ancestry) -> StoredChunks | None:
        """Describe bases in local packs for the encoder; None if it cannot read them, or a copy became unreadable."""
        if self._packs is None or len(found.levels[0].found) == 0:
            return None
        if self._found is not None and self._catalog.knowledge() != self._known:
            return None
        try:
            links = found.links()
        except BlobNotFoundError:
            return None
        return self._packs.chunks(links, _digests(found))

    def _remembered(self, found: Ancestry) -> Sequence[Buffer | None] | None:
        """Return chunks this process has just stored; None if it has not, or if its stored copies are unreadable."""
        chunks = self._recalled(_digests(found))
        return None if chunks is None or not self._catalog.recent.are_whole(found.levels) else chunks

    def _recalled(self, digests: Digests) -> Sequence[Buffer | None] | None:
        """Return remembered chunks, each hashed once in this save; None unless all are remembered."""
        keys = [row.tobytes() for row in digests]
        new = [at for at, key in enumerate(keys) if key not in self._checked]
        if new:
            chunks = self._catalog.recent.find(digests[new])
            if chunks is None:
                return None
            self._checked.update(zip([keys[at] for at in new], chunks, strict=True))
        return [self._checked[key] for key in keys]

    def _read(self, digests: Digests, sizes: list[int]) -> Sequence[Buffer | None]:
        """Read chunks, each verified; return none of them if any is unreadable: then nothing uses them as bases."""
        block = np.empty(sum(sizes), np.uint8).data
        outs = [block[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
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
