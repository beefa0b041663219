"""Chunks that a copy moves: read in long reads, checked, and handed on as they are stored."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.base.engines import Engine, map_in_order
from tensorcas_mlflow.chunk_io import plan_reads
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, FormatError, NotFoundError
from tensorcas_mlflow.layout.manifests import each_form
from tensorcas_mlflow.layout.packs import Base, Payload, is_delta, pack_key, pack_name, payload_of
from tensorcas_mlflow.maintenance._chunks import ChunkFault, Look, Shard, Verdict, read_chunks
from tensorcas_mlflow.maintenance._inventory import is_among
from tensorcas_mlflow.maintenance._made_chunks import made_payloads
from tensorcas_mlflow.maintenance._workers import StoreAt
from tensorcas_mlflow.store import PendingBatch, Store
from tensorcas_mlflow.store.protocol import Bases

_USUAL_DEPTH = 3
"""Depth of a delta that a copy does not exceed, unless the delta was deeper in the source: each base takes time to
decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPlan:
    """Deltas of the source that may stay deltas at the destination."""

    bases: frozenset[bytes]
    """Chunks that may be bases: the destination holds them, or the copy brings them."""
    there: Digests
    """Bases that the destination holds, as far as its index is known."""
    extra: Digests
    """Bases that no manifest of the batch needs, and that the copy brings all the same."""
    n_bytes: int
    """Bytes that new packs take at most."""


def plan_deltas(source: Store, destination: Store, wanted: Digests, needed: Callable[[], Digests]) -> DeltaPlan | None:
    """Plan the bases that the deltas of a batch need.

    A base that nothing else needs goes along if several deltas take it. For a single delta it would take as much room
    as the chunk does in full.

    Args:
        source: Store to read.
        destination: Store to write.
        wanted: Distinct chunks that the batch needs.
        needed: Returns the chunks that the whole copy needs; called only if a base is not among ``wanted``.

    Returns:
        None if nothing is stored as a delta.
    """
    missing = wanted[~destination.catalog.find_sound(wanted, ()).found]
    entries = _entries_of(source, missing)
    n_bytes = int(entries["raw_bytes"].sum(dtype=np.int64))
    dependents: Counter[bytes] = Counter()
    bases: set[bytes] = set()
    there: list[Digests] = []
    extra: list[Digests] = []
    frontier = _bases_of(entries, dependents)
    if len(frontier) == 0:
        return None
    while len(frontier):
        comes = is_among(frontier, missing)
        is_there = ~comes & destination.catalog.find_sound(frontier, ()).found
        there.append(frontier[is_there])
        bases.update(map(bytes, frontier[comes | is_there]))
        rest = frontier[~comes & ~is_there]
        often = np.array([dependents[bytes(each)] > 1 for each in rest], dtype=bool)
        if not often.all():
            often |= is_among(rest, needed())
        found = _entries_of(source, rest[often])
        n_bytes += int(found["raw_bytes"].sum(dtype=np.int64))
        extra.append(np.ascontiguousarray(found["digest"]))
        bases.update(map(bytes, extra[-1]))
        frontier = _bases_of(found, dependents)
        frontier = frontier[np.array([bytes(each) not in bases for each in frontier], dtype=bool)]
    return DeltaPlan(bases=frozenset(bases), there=_joined(there), extra=_joined(extra), n_bytes=n_bytes)


class Rebaser:
    """Finder of the base that a delta of the source gets at the destination."""

    def __init__(self, pending: PendingBatch, destination: Store) -> None:
        self._pending = pending
        self._is_remote = destination.backend.is_remote
        self._reader = Bases(destination.backend)
        self._sound: dict[Base, bool] = {}

    def base_of(self, delta: Payload) -> Base | None:
        """Return the base; None to store the chunk in full."""
        assert delta.base is not None
        base = self._pending.base_of(delta.base.digest)
        if base is None or base.depth > max(delta.base.depth, _USUAL_DEPTH - 1):
            return None
        return base if self._is_sound(base, delta.raw_bytes) else None

    def _is_sound(self, base: Base, n_bytes: int) -> bool:
        """Tell whether the copy that a delta would name can be read and hashes to its digest.

        A remote storage checks what it keeps, and fetching each base would take as long as sending the chunk.
        """
        if self._is_remote or self._pending.has_written(base):
            return True
        if base not in self._sound:
            try:
                self._reader.copy(base, n_bytes)
                self._sound[base] = True
            except (NotFoundError, FormatError, BackendError):
                self._sound[base] = False
        return self._sound[base]


def _entries_of(store: Store, digests: Digests) -> Any:
    places = store.catalog.find(digests)
    return places.entries[places.found]


def _bases_of(entries: Any, dependents: Counter[bytes]) -> Digests:
    """Return the distinct bases of the deltas among some entries, and count the deltas of each."""
    deltas = np.ascontiguousarray(entries["base_digest"][is_delta(entries)])
    unique, _, number = unique_rows(deltas)
    for base, n in zip(unique, np.bincount(number, minlength=len(unique)).tolist(), strict=True):
        dependents[bytes(base)] += n
    return unique


def _joined(parts: list[Digests]) -> Digests:
    return unique_rows(np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *parts]))[0]


_WINDOW, _REMOTE_WINDOW = 4, 8
"""Reads under way at once. A read is some 8 MiB, so a copy holds about 48 MiB with what it writes, or 80."""
_PART_BYTES = 32 << 20
"""Stored bytes of the chunks that a worker reads at once, and hands back."""
_MAX_MOVES = 100
"""Times that collectors may move a chunk before it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Chunks to look for, and packs that hold a damaged copy of them."""

    digests: Digests
    without: frozenset[str] = frozenset()
    n_moves: int = 0


@dataclass(slots=True)
class _Missed:
    """Chunks of a search that were not had, by their numbers."""

    moved: list[int] = field(default_factory=list)
    """Chunks whose pack is gone, or that of their base."""
    gone: set[str] = field(default_factory=set)
    """Names of those packs."""
    damaged: list[tuple[int, str]] = field(default_factory=list)
    """Chunks that are not what they should be, and why."""
    is_index_suspect: bool = False
    """True if the index may be wrong. It is not if the storage itself has failed."""

    def add(self, number: int, fault: ChunkFault) -> None:
        if fault.gone:
            self.moved.append(number)
            self.gone.add(fault.gone)
            return
        self.damaged.append((number, fault.reason))
        self.is_index_suspect |= fault.verdict is not Verdict.FAILED or not fault.key or fault.is_of_base


class CopyReader:
    """Reader of the chunks of one store for another."""

    def __init__(
        self, store: Store, *, on_read: Callable[[int], None] | None = None, engine: Engine | None = None
    ) -> None:
        """Read nothing yet; see `payloads`.

        Args:
            store: It is not changed.
            on_read: Told the size of every read, in the caller's thread.
            engine: Workers that read, decode and compare; by default this process does.
        """
        self.faults: dict[bytes, str] = {}
        """Reasons why no sound copy of a chunk was found, by its digest."""
        self._store = store
        self._on_read = on_read or (lambda n_bytes: None)
        self._engine = engine
        self._place = None if engine is None else StoreAt.of(store)
        self._bases = Bases(store.backend)
        self._trusts_index = True
        self._wanted_bases: Set[bytes] = frozenset()
        self._base_of: Callable[[Payload], Base | None] = lambda delta: None

    def payloads(
        self,
        digests: Digests,
        *,
        bases: Set[bytes] = frozenset(),
        base_of: Callable[[Payload], Base | None] = lambda delta: None,
    ) -> Iterator[Payload]:
        """Yield chunks as they are stored, each decoded and checked against its digest before.

        Args:
            digests: Distinct digests.
            bases: Chunks that may be bases at the destination. A delta against another chunk is encoded in full.
            base_of: Returns the base that a delta gets there; None if it has none after all. Called when the caller has
                taken all payloads before.

        Yields:
            Payloads in the order in which they lie in the source, deltas after all possible bases, and at last those
            that forms make. A chunk without a sound copy is left out, and is in `faults`.

        Raises:
            BackendError: The storage does not answer.
        """
        self._wanted_bases, self._base_of = bases, base_of
        waiting = deque([_Search(digests=digests)])
        while waiting:
            yield from self._pass(waiting.popleft(), waiting)
        if self.faults:
            left = digests[[digest.tobytes() in self.faults for digest in digests]]
            yield from made_payloads(self._store, left, self.faults, each_form(self._store.backend))

    def _pass(self, search: _Search, waiting: deque[_Search]) -> Iterator[Payload]:
        """Read the chunks of one search, and queue a search for those to look for again."""
        places = self._locate(search)
        for number in np.flatnonzero(~places.found).tolist():
            self.faults.setdefault(search.digests[number].tobytes(), "no pack holds it")
        there = np.flatnonzero(places.found)
        entries, packs = places.entries[there], places.pack[there]
        shard = Shard(packs=tuple(places.packs), pack=packs, entries=entries, row=np.arange(len(there)))
        missed = _Missed()
        for rows in self._levels(entries):
            begins = np.ones(len(entries), dtype=bool)
            begins[rows] = _begins_row(packs[rows], entries[rows])
            for n_bytes, looks in self._read(shard.take(rows), begins):
                self._on_read(n_bytes)
                for look in looks:
                    if look.payload is None:
                        assert look.fault is not None
                        missed.add(look.row, look.fault)
                        continue
                    given = self._as_given(look.payload, entries[look.row], look.row, missed)
                    if given is not None:
                        self.faults.pop(given.digest, None)  # damaged in one pack, and sound in another
                        yield given
                looks.clear()  # their bytes are not kept while others are read
        if missed.moved:
            self._store.catalog.forget(missed.gone)
            self._store.catalog.refresh()
            waiting.append(self._again(search, search.digests[there[missed.moved]], missed.gone))
        names = [places.packs[number] for number in packs.tolist()]
        waiting.extend(self._elsewhere(search, missed, there, names))

    def _read(self, shard: Shard, begins: Any) -> Iterator[tuple[int, list[Look]]]:
        """Read chunks, here or in workers; see `read_chunks`.

        Args:
            shard: The chunks.
            begins: For each chunk of the search whether there is a gap before it.
        """
        wanted = self._wanted_bases
        if self._engine is None or self._place is None:
            yield from _read_here(self._store.backend, shard, begins[shard.row], wanted, self._bases)
            return
        parts = ((part, begins[part.row], wanted) for part in _parts_of(shard))
        for reads in map_in_order(self._engine, partial(_read_part, self._place), parts):
            yield from reads

    def _levels(self, entries: Any) -> list[Any]:
        """Divide chunks by depth, if some may stay deltas: so all bases come before their deltas."""
        if not self._wanted_bases:
            return [np.arange(len(entries))]
        return [np.flatnonzero(entries["depth"] == depth) for depth in np.unique(entries["depth"])]

    def _as_given(self, payload: Payload, entry: Any, number: int, missed: _Missed) -> Payload | None:
        """Return a payload as the destination takes it; None if it has to be looked for again."""
        if payload.base is None:
            return payload
        base = self._base_of(payload)
        if base is not None:
            return payload._replace(base=base)
        try:
            return self._bases.payload(entry, payload.data, begins_row=payload.begins_row)
        except BlobNotFoundError as error:
            missed.moved.append(number)
            missed.gone.add(pack_name(error.key))
        except (FormatError, NotFoundError) as error:
            missed.damaged.append((number, str(error)))
        return None

    def _locate(self, search: _Search) -> Any:
        catalog = self._store.catalog
        places = catalog.find(search.digests, search.without)
        # Packs twice, as for any reader: a chunk that moves meanwhile may be in a pack that is not listed yet.
        looks = (catalog.refresh, catalog.refresh_from_packs, catalog.refresh_from_packs)
        for refresh in () if search.without else looks:
            if places.found.all():
                break
            refresh()
            places = catalog.find(search.digests)
        return places

    def _again(self, search: _Search, digests: Digests, gone: set[str]) -> _Search:
        if search.n_moves >= _MAX_MOVES:
            raise BlobNotFoundError(pack_key(min(gone)))
        return _Search(digests=digests, without=search.without, n_moves=search.n_moves + 1)

    def _elsewhere(self, search: _Search, missed: _Missed, there: Any, packs: list[str]) -> Iterator[_Search]:
        """Yield searches for other copies of damaged chunks, and note the first reason."""
        by_pack: dict[str, list[int]] = {}
        for number, reason in missed.damaged:
            by_pack.setdefault(packs[number], []).append(int(there[number]))
            wanted = search.digests[there[number]].tobytes()
            self.faults.setdefault(wanted, f"damaged in {pack_key(packs[number])!r}: {reason}")
        if missed.is_index_suspect and self._trusts_index:
            # Perhaps the index is damaged: it carries no digest, a pack's table does.
            self._trusts_index = False
            self._store.catalog.refresh_from_packs()
            yield _Search(digests=search.digests[[number for numbers in by_pack.values() for number in numbers]])
            return
        for pack, numbers in by_pack.items():
            yield _Search(digests=search.digests[numbers], without=search.without | {pack})


def _read_here(
    backend: Backend, shard: Shard, begins: Any, wanted_bases: Set[bytes], bases: Bases
) -> Iterator[tuple[int, list[Look]]]:
    """Read the chunks of a shard as another store takes them.

    Args:
        backend: Backend of the store.
        shard: The chunks.
        begins: For each of them whether there is a gap before it.
        wanted_bases: Chunks that may be bases at the destination, which must not come to depend on this store.
        bases: Bases that were read before.
    """
    has_gap = dict(zip(shard.row.tolist(), begins.tolist(), strict=True))

    def give(number: int, entry: Any, stored: Any) -> Payload:
        is_kept = is_delta(entry) and entry["base_digest"].tobytes() in wanted_bases
        make = payload_of if is_kept else bases.payload
        return make(entry, stored, begins_row=has_gap[number])

    window = _REMOTE_WINDOW if backend.is_remote else _WINDOW
    return read_chunks(backend, shard, window=window, bases=bases, give=give, probe=backend.stat)


def _parts_of(shard: Shard) -> Iterator[Shard]:
    """Divide a shard between reads into parts of about some bytes: so the reads are those of the whole shard."""
    members: list[Any] = []
    n_bytes = 0
    entries = shard.entries
    for extent in plan_reads(shard.pack, entries["offset"], entries["stored_bytes"]):
        members.append(extent.members)
        n_bytes += extent.stop - extent.start
        if n_bytes >= _PART_BYTES:
            yield shard.take(np.concatenate(members))
            members, n_bytes = [], 0
    if members:
        yield shard.take(np.concatenate(members))


def _read_part(place: StoreAt, part: tuple[Shard, Any, Set[bytes]]) -> list[tuple[int, list[Look]]]:
    """Read a part in a worker."""
    shard, begins, wanted_bases = part
    backend = place.open()
    return [
        (n_bytes, [_sendable(look) for look in looks])
        for n_bytes, looks in _read_here(backend, shard, begins, wanted_bases, Bases(backend))
    ]


def _sendable(look: Look) -> Look:
    """Return a chunk that was read without views of memory."""
    payload = look.payload
    if payload is None:
        return replace(look, stored=b"")
    return replace(look, stored=b"", payload=payload._replace(data=bytes(payload.data)))


def _begins_row(packs: Any, entries: Any) -> Any:
    """Return for each chunk whether there is a gap before it. Chunks without a gap stay together.

    The chunks of one raw tensor can then still be mapped as one.
    """
    order = np.lexsort((entries["offset"], packs))
    starts = entries["offset"][order].astype(np.int64)
    stops = starts + entries["stored_bytes"][order]
    follows = np.zeros(len(order), dtype=bool)
    follows[1:] = (packs[order][1:] == packs[order][:-1]) & (starts[1:] == stops[:-1])
    begins = np.ones(len(order), dtype=bool)
    begins[order] = ~follows
    return begins
