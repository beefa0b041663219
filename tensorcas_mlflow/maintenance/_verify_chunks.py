"""Chunks that are read: which of them, and what is wrong with any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow._progress import Progress, Watcher
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import DIGEST_BYTES, digest, hex_of
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError
from tensorcas_mlflow.index import Mask, Table, base_rows, pack_key, pack_name
from tensorcas_mlflow.maintenance._verify_packs import Packs, is_possible
from tensorcas_mlflow.maintenance._verify_report import reason_of
from tensorcas_mlflow.pack import MAX_DEPTH, STORED_DIGEST_BYTES
from tensorcas_mlflow.readplan import plan_reads
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which chunks are read. All copies of a chunk are chosen or none, and each part or sample by digests alone."""

    part: tuple[int, int] = (1, 1)
    """The k-th of n parts, which do not change as a store grows."""
    share: float = 1.0
    """Of the part, how much is read: from 0 to 1."""
    seed: int = 0
    """Draws the sample."""

    def of(self, table: Table) -> Mask:
        """Choose among the rows of a table."""
        k, n = self.part
        chosen: Mask = table.prefix % np.uint64(n) == np.uint64(k - 1)
        if self.share < 1.0:
            chosen &= _scatter(table.prefix, self.seed) < self.share
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Chunks that were found damaged."""

    lost: Mapping[bytes, tuple[str, str]]
    """Those without a sound copy, by their digests: the pack of one copy, and the reason."""
    copies: Mapping[str, list[str]]
    """Damaged copies of others, by pack: the reasons."""
    n_read: int = 0
    """Chunks that were read, copies counted."""


NO_DAMAGE = Damage(lost={}, copies={})


def read_chunks(backend: Backend, packs: Packs, choice: Choice, *, decode: bool, watch: Watcher) -> Damage:
    """Read chunks, a few MiB at a time.

    Args:
        backend: Of the store.
        packs: Its packs.
        choice: Which chunks.
        decode: Whether to decode each and compare it with its digest. Else its stored bytes are compared with the
            digest that the pack's table has of them.
        watch: Told how far it has come.
    """
    table = packs.table
    entries = table.entries
    chosen = choice.of(table)
    bad: dict[int, str] = {}
    gone: set[str] = set()
    fits = is_possible(entries)
    for row in np.flatnonzero(chosen & ~fits).tolist():
        bad[row] = f"its entry says {entries['raw_bytes'][row]} bytes in {entries['stored_bytes'][row]}"
    rows = np.flatnonzero(chosen & fits)
    fault = p.Bases(backend).fault_of if decode else _stored_fault

    def check(place: tuple[int, int, int, Any]) -> tuple[int, list[tuple[int, str]]]:
        pack, start, stop, members = place
        block = bytearray(stop - start)
        try:
            backend.read_into(pack_key(table.packs[pack]), start, memoryview(block))
        except BlobNotFoundError:
            # A collector has removed it. What is needed of it is in another pack, or is missed later.
            gone.add(table.packs[pack])
            return 0, []
        except (CorruptError, BackendError) as error:
            if len(members) == 1:
                return 0, [(int(members[0]), f"it cannot be read: {reason_of(error)}")]
            # One bad sector of a disk is no reason to call all that lies near it damaged.
            return 0, [found for row in members.tolist() for found in check(_place(table, row))[1]]
        found: list[tuple[int, str]] = []
        for row in members.tolist():
            begin = int(entries["offset"][row]) - start
            stored = memoryview(block)[begin : begin + int(entries["stored_bytes"][row])]
            try:
                reason = fault(entries[row], stored)
            except BlobNotFoundError as error:
                gone.add(pack_name(error.key))  # the pack of its base
                continue
            except BackendError as error:
                reason = f"its base cannot be read: {reason_of(error)}"
            if reason is not None:
                found.append((row, reason))
        return len(block), found

    plan = plan_reads(table.pack[rows], entries["offset"][rows], entries["stored_bytes"][rows])
    places = ((extent.pack, extent.start, extent.stop, rows[extent.members]) for extent in plan)
    n_bytes, read_bytes = int(entries["stored_bytes"][rows].astype(np.int64).sum()), 0
    for n_read, found in threads.ordered_map(check, places, waits=backend.is_remote):
        bad.update(found)
        read_bytes += n_read
        watch(Progress(done_bytes=min(read_bytes, n_bytes), n_bytes=n_bytes))
    if gone:
        packs.refresh()
    return _sorted_out(table, bad, gone, n_read=len(rows))


def _sorted_out(table: Table, bad: Mapping[int, str], gone: set[str], *, n_read: int) -> Damage:
    """Tell chunks of which no sound copy is left from those that have another."""
    if not bad:
        return Damage(lost={}, copies={}, n_read=n_read)
    is_sound = np.ones(len(table), dtype=bool)
    is_sound[list(bad)] = False
    is_sound &= np.array([name not in gone for name in table.packs], dtype=bool)[table.pack]
    bad = {**bad, **_dependents(table, bad, is_sound)}
    keys = np.ascontiguousarray(table.entries["digest"]).view(f"V{DIGEST_BYTES}").ravel()
    has_other = dict(zip(bad, np.isin(keys[list(bad)], keys[is_sound]).tolist(), strict=True))
    lost: dict[bytes, tuple[str, str]] = {}
    copies: dict[str, list[str]] = {}
    for row, reason in bad.items():
        said = f"chunk {hex_of(table.entries['digest'][row])} is damaged: {reason}"
        if has_other[row]:
            copies.setdefault(table.key_of(row), []).append(said)
        else:
            lost.setdefault(table.entries["digest"][row].tobytes(), (table.key_of(row), said))
    return Damage(lost=lost, copies=copies, n_read=n_read)


def _dependents(table: Table, bad: Mapping[int, str], is_sound: Mask) -> dict[int, str]:
    """Give the deltas that it takes a damaged chunk to decode, and why.

    Args:
        table: Of all packs.
        bad: Rows of damaged chunks, and why.
        is_sound: For each row whether it can be read; comes to be so for deltas too.
    """
    base = base_rows(table)
    deltas = np.flatnonzero(base >= 0)
    found: dict[int, str] = {}
    for _ in range(MAX_DEPTH if len(deltas) else 0):
        hit = deltas[is_sound[deltas] & ~is_sound[base[deltas]]]
        is_sound[hit] = False
        for row in hit.tolist():
            at = int(base[row])
            # A base whose pack has gone meanwhile is no damage: the chunk was moved, or is missed later.
            if (reason := found.get(at, bad.get(at))) is not None:
                lost = f"its base, chunk {hex_of(table.entries['digest'][at])} in {table.key_of(at)}, is damaged"
                found[row] = reason if at in found else f"{lost}: {reason}"
    return found


def _place(table: Table, row: int) -> tuple[int, int, int, Any]:
    start = int(table.entries["offset"][row])
    return int(table.pack[row]), start, start + int(table.entries["stored_bytes"][row]), np.array([row])


_Fault = Callable[[Any, memoryview], str | None]


def _stored_fault(entry: Any, stored: memoryview) -> str | None:
    """Say whether stored bytes are others than were written."""
    actual = digest(stored)[:STORED_DIGEST_BYTES]
    if actual == entry["stored_digest"].tobytes():
        return None
    return f"its stored bytes hash to {actual.hex()}, and the table says {entry['stored_digest'].tobytes().hex()}"


def _scatter(numbers: Any, seed: int) -> Any:
    """Turn numbers into others from 0 to 1, as if drawn, the same each time for one seed (splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(seed % (1 << 64)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return mixed.astype(np.float64) / float(1 << 64)
