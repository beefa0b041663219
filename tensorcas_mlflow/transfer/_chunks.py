"""Chunks on their way out of a store: read in long reads, decoded to check them, and handed on as they are stored."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NotFoundError
from tensorcas_mlflow.index import pack_key, pack_name
from tensorcas_mlflow.pack import Base, Payload, is_delta, payload_of
from tensorcas_mlflow.readplan import Extent, plan_reads
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import Bases

_WINDOW, _REMOTE_WINDOW = 4, 8
"""Reads under way at once. One is some 8 MiB, so with what is being written about 48 MiB are held, or 80."""
_MAX_STORED_BYTES = 2 * MAX_CHUNK_BYTES
"""No codec makes more of a chunk; a longer one is not read, so that what an index says costs no memory."""
_MAX_MOVES = 100
"""How often a chunk may be moved away by collectors before it is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Chunks to look for, and packs in which they have been found damaged."""

    digests: Digests
    without: frozenset[str] = frozenset()
    n_moves: int = 0


@dataclass(slots=True)
class _Outcome:
    """What one read has brought."""

    n_bytes: int = 0
    payloads: list[tuple[int, Payload]] = field(default_factory=list)
    """Each with its number in the group; of a delta the base is still the source's."""
    moved: list[int] = field(default_factory=list)
    """Chunks whose pack is gone, or that of their base, by their numbers in the group."""
    gone: set[str] = field(default_factory=set)
    """Those packs."""
    damaged: list[tuple[int, str]] = field(default_factory=list)
    """And those that are not what they should be, and why."""
    is_index_suspect: bool = False
    """Whether the index may be what is wrong: not where the storage itself has failed."""

    def add(self, other: _Outcome) -> None:
        self.n_bytes += other.n_bytes
        self.payloads += other.payloads
        self.moved += other.moved
        self.gone |= other.gone
        self.damaged += other.damaged
        self.is_index_suspect |= other.is_index_suspect


class ChunkReader:
    """Reads the chunks of one store for another."""

    def __init__(self, store: Store, *, on_read: Callable[[int], None] | None = None) -> None:
        """Say what to read.

        Args:
            store: It is not changed.
            on_read: Told the size of every read, in the caller's thread.
        """
        self.faults: dict[bytes, str] = {}
        """Chunks of which no sound copy was found, by their digests, and why."""
        self._store = store
        self._on_read = on_read or (lambda n_bytes: None)
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
            digests: Different ones.
            bases: What deltas may be added to where they go. A delta of something else is encoded in full.
            base_of: Gives the base that a delta has there; None if it has none after all. Asked when all payloads
                before have been taken.

        Yields:
            Payloads in the order in which they lie in the source, deltas behind all that they may be added to. What
            cannot be had is left out, and is in `faults`.

        Raises:
            BackendError: The storage does not answer.
        """
        self._wanted_bases, self._base_of = bases, base_of
        waiting = deque([_Group(digests=digests)])
        while waiting:
            yield from self._pass(waiting.popleft(), waiting)

    def _pass(self, group: _Group, waiting: deque[_Group]) -> Iterator[Payload]:
        """Read one group; what has to be looked for again is put among those that wait."""
        places = self._locate(group)
        for number in np.flatnonzero(~places.found).tolist():
            self.faults.setdefault(group.digests[number].tobytes(), "no pack holds it")
        there = np.flatnonzero(places.found)
        entries, packs = places.entries[there], places.pack[there]
        levels = self._levels(entries)
        plan = (extent for rows in levels for extent in _plan_of(rows, packs, entries))
        begins = np.zeros(len(entries), dtype=bool)
        for rows in levels:
            begins[rows] = _begins_row(packs[rows], entries[rows])
        read = partial(self._read, [pack_key(name) for name in places.packs], entries, begins)
        found = _Outcome()
        is_remote = self._store.backend.is_remote
        window = _REMOTE_WINDOW if is_remote else _WINDOW
        for outcome in threads.ordered_map(read, plan, window=window, waits=is_remote):
            self._on_read(outcome.n_bytes)
            for number, payload in outcome.payloads:
                given = self._as_given(payload, entries[number], number, outcome)
                if given is not None:
                    self.faults.pop(given.digest, None)  # damaged in one pack, and sound in another
                    yield given
            outcome.payloads.clear()
            found.add(outcome)
        if found.moved:
            self._store.catalog.forget(found.gone)
            self._store.catalog.refresh()
            waiting.append(self._again(group, group.digests[there[found.moved]], found.gone))
        names = [places.packs[number] for number in packs.tolist()]
        waiting.extend(self._elsewhere(group, found, there, names))

    def _levels(self, entries: Any) -> list[Any]:
        """Part chunks, if some may stay deltas, by depth: so all bases come before what is added to them."""
        if not self._wanted_bases:
            return [np.arange(len(entries))]
        return [np.flatnonzero(entries["depth"] == depth) for depth in np.unique(entries["depth"])]

    def _as_given(self, payload: Payload, entry: Any, number: int, outcome: _Outcome) -> Payload | None:
        """Give a payload as it goes into the destination; None if it has to be looked for again."""
        if payload.base is None:
            return payload
        base = self._base_of(payload)
        if base is not None:
            return dataclasses.replace(payload, base=base)
        try:
            return self._bases.payload(entry, payload.data, begins_row=payload.begins_row)
        except BlobNotFoundError as error:
            outcome.moved.append(number)
            outcome.gone.add(pack_name(error.key))
        except (FormatError, NotFoundError) as error:
            outcome.damaged.append((number, str(error)))
        return None

    def _locate(self, group: _Group) -> Any:
        catalog = self._store.catalog
        places = catalog.find(group.digests, group.without)
        # Packs twice, as for any reader: what is moved while they are listed may be in one that is not listed yet.
        looks = (catalog.refresh, catalog.refresh_from_packs, catalog.refresh_from_packs)
        for refresh in () if group.without else looks:
            if places.found.all():
                break
            refresh()
            places = catalog.find(group.digests)
        return places

    def _again(self, group: _Group, digests: Digests, gone: set[str]) -> _Group:
        if group.n_moves >= _MAX_MOVES:
            raise BlobNotFoundError(pack_key(min(gone)))
        return _Group(digests=digests, without=group.without, n_moves=group.n_moves + 1)

    def _elsewhere(self, group: _Group, found: _Outcome, there: Any, packs: list[str]) -> Iterator[_Group]:
        """Say where to look for other copies of damaged chunks; the reason of the first is the one to tell."""
        by_pack: dict[str, list[int]] = {}
        for number, reason in found.damaged:
            by_pack.setdefault(packs[number], []).append(int(there[number]))
            wanted = group.digests[there[number]].tobytes()
            self.faults.setdefault(wanted, f"damaged in {pack_key(packs[number])!r}: {reason}")
        if found.is_index_suspect and self._trusts_index:
            # Perhaps it is the index that is damaged: it carries no digest, a pack's table does.
            self._trusts_index = False
            self._store.catalog.refresh_from_packs()
            yield _Group(digests=group.digests[[number for numbers in by_pack.values() for number in numbers]])
            return
        for pack, numbers in by_pack.items():
            yield _Group(digests=group.digests[numbers], without=group.without | {pack})

    def _read(self, keys: list[str], entries: Any, begins: Any, extent: Extent) -> _Outcome:
        key = keys[extent.pack]
        members = extent.members.tolist()
        if extent.stop - extent.start > _MAX_STORED_BYTES:
            impossible = [(number, "its entry says an impossible size") for number in members]
            return _Outcome(damaged=impossible, is_index_suspect=True)
        block = np.empty(extent.stop - extent.start, dtype=np.uint8).data
        try:
            self._store.backend.read_into(key, extent.start, block)
        except BlobNotFoundError:
            return _Outcome(moved=members, gone={pack_name(key)})
        except (CorruptError, BackendError) as error:
            if len(members) > 1:
                # One bad sector of a disk is no reason to take all that lies near it for damaged.
                whole = _Outcome()
                for number in members:
                    whole.add(self._read(keys, entries, begins, _extent_of(extent.pack, number, entries)))
                return whole
            # A storage that does not answer at all raises here: then it is not these bytes.
            self._store.backend.stat(key)
            reason = f"it cannot be read: {error.reason}"
            return _Outcome(damaged=[(members[0], reason)], is_index_suspect=isinstance(error, CorruptError))
        outcome = _Outcome(n_bytes=len(block))
        for number in members:
            begin = int(entries["offset"][number]) - extent.start
            stored = block[begin : begin + int(entries["stored_bytes"][number])]
            try:
                fault = self._bases.fault_of(entries[number], stored)
                if fault is None:
                    outcome.payloads.append((number, self._payload(entries[number], stored, bool(begins[number]))))
            except BlobNotFoundError as error:
                outcome.moved.append(number)
                outcome.gone.add(pack_name(error.key))
                continue
            except BackendError as error:
                self._store.backend.stat(key)
                fault = f"its base cannot be read: {error.reason}"
            if fault is not None:
                outcome.damaged.append((number, fault))
                outcome.is_index_suspect = True
        return outcome

    def _payload(self, entry: Any, stored: Any, begins_row: bool) -> Payload:
        # The destination may not have the base, and must not come to depend on this store.
        is_kept = is_delta(entry) and entry["base_digest"].tobytes() in self._wanted_bases
        give = payload_of if is_kept else self._bases.payload
        return give(entry, stored, begins_row=begins_row)


def _plan_of(rows: Any, packs: Any, entries: Any) -> Iterator[Extent]:
    """Plan the reads of some chunks, with their numbers among all."""
    for extent in plan_reads(packs[rows], entries["offset"][rows], entries["stored_bytes"][rows]):
        yield dataclasses.replace(extent, members=rows[extent.members])


def _begins_row(packs: Any, entries: Any) -> Any:
    """For each chunk whether it does not follow another one without a gap: what did goes on doing so.

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


def _extent_of(pack: int, number: int, entries: Any) -> Extent:
    start = int(entries["offset"][number])
    return Extent(pack=pack, start=start, stop=start + int(entries["stored_bytes"][number]), members=np.array([number]))
