"""Chunks on their way out of a store: read in long reads, decoded to check them, and handed on as they are stored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES
from tensorcas_mlflow.codecs import load_codecs_to_decode
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.index import pack_key, pack_name
from tensorcas_mlflow.pack import Payload
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
    payloads: list[Payload] = field(default_factory=list)
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

    def payloads(self, digests: Digests) -> Iterator[Payload]:
        """Yield chunks as they are stored, each decoded and checked against its digest before.

        Args:
            digests: Different ones.

        Yields:
            Payloads in the order in which they lie in the source. What cannot be had is left out, and is in `faults`.

        Raises:
            BackendError: The storage does not answer.
        """
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
        load_codecs_to_decode(entries["codec"])
        plan = plan_reads(packs, entries["offset"], entries["stored_bytes"])
        begins = _begins_row(packs, entries)
        read = partial(self._read, [pack_key(name) for name in places.packs], entries, begins)
        found = _Outcome()
        is_remote = self._store.backend.is_remote
        window = _REMOTE_WINDOW if is_remote else _WINDOW
        for outcome in threads.ordered_map(read, plan, window=window, waits=is_remote):
            self._on_read(outcome.n_bytes)
            for payload in outcome.payloads:
                self.faults.pop(payload.digest, None)  # damaged in one pack, and sound in another
                yield payload
            outcome.payloads.clear()
            found.add(outcome)
        if found.moved:
            self._store.catalog.forget(found.gone)
            self._store.catalog.refresh()
            waiting.append(self._again(group, group.digests[there[found.moved]], found.gone))
        names = [places.packs[number] for number in packs.tolist()]
        waiting.extend(self._elsewhere(group, found, there, names))

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
                    # The destination may not have the base, and must not come to depend on this store.
                    payload = self._bases.payload(entries[number], stored, begins_row=bool(begins[number]))
                    outcome.payloads.append(payload)
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
