"""The packs of a store: their tables, and every chunk in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES
from tensorcas_mlflow.codecs import RAW, codec_numbered
from tensorcas_mlflow.digest import digest, hex_of
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Table, make_table, pack_key, read_segment
from tensorcas_mlflow.pack import Entries
from tensorcas_mlflow.readplan import plan_reads
from tensorcas_mlflow.store import protocol as p
from tensorcas_mlflow.verify._report import Problem, reason_of

_MAX_STORED_BYTES = 2 * MAX_CHUNK_BYTES
"""No codec makes more of a chunk; a longer one is not read, so that what a table says costs no memory."""

Damage = Mapping[bytes, tuple[str, str]]
"""Chunks that cannot be decoded, by their digests: the pack, and the reason."""


class Packs:
    """The tables of all packs that can be read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tables: dict[str, Entries] = {}
        self.problems: list[Problem] = []
        self.table: Table = make_table({})
        self._lost: list[str] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the tables of packs that have come to be there, and forget those of packs that are gone."""
        there = [name for name, _ in p.list_packs(self._backend)]
        unreadable = {problem.key for problem in self.problems}
        new = [name for name in there if name not in self._tables and pack_key(name) not in unreadable]
        for name, found in zip(new, threads.ordered_map(self._read, new), strict=True):
            if isinstance(found, Problem):
                self.problems.append(found)
            elif found is not None:
                self._tables[name] = found
        self._tables = {name: self._tables[name] for name in there if name in self._tables}
        self.table = make_table(self._tables)

    def lost(self) -> list[str]:
        """Name the packs that cannot be read, and those that the index names and that are not there."""
        if self._lost is None:
            self._lost = self._find_lost()
        return self._lost

    def _find_lost(self) -> list[str]:
        named: set[str] = set()
        for info in self._backend.list("index"):
            name, _, ending = info.key.removeprefix("index/").partition(".")
            if ending == "loose":
                named.add(name)
            elif ending == "arrow":
                try:
                    named.update(read_segment(info.key, self._backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES)).packs)
                except (BlobNotFoundError, FormatError):
                    continue
        there = {name for name, _ in p.list_packs(self._backend)}
        unreadable = [problem.key for problem in self.problems if problem.key]
        return sorted({*(pack_key(name) for name in named - there), *unreadable})

    def _read(self, name: str) -> Entries | Problem | None:
        try:
            return p.read_pack_table(self._backend, name)
        except BlobNotFoundError:
            return None
        except (FormatError, BackendError) as error:
            return Problem(key=pack_key(name), reason=reason_of(error))


def read_all(backend: Backend, packs: Packs) -> Damage:
    """Read and decode every chunk of every pack, a few MiB at a time."""
    table = packs.table
    bad: dict[int, str] = {}
    gone: set[str] = set()
    entries = table.entries
    fits = (entries["raw_bytes"] <= MAX_CHUNK_BYTES) & (entries["stored_bytes"] <= _MAX_STORED_BYTES)
    for row in np.flatnonzero(~fits).tolist():
        bad[row] = f"its entry says {entries['raw_bytes'][row]} bytes in {entries['stored_bytes'][row]}"
    rows = np.flatnonzero(fits)

    def check(place: tuple[int, int, int, Any]) -> list[tuple[int, str]]:
        pack, start, stop, members = place
        block = bytearray(stop - start)
        try:
            backend.read_into(pack_key(table.packs[pack]), start, memoryview(block))
        except BlobNotFoundError:
            # A collector has removed it. What is needed of it is in another pack, or is missed later.
            gone.add(table.packs[pack])
            return []
        except (CorruptError, BackendError) as error:
            if len(members) == 1:
                return [(int(members[0]), f"it cannot be read: {reason_of(error)}")]
            # One bad sector of a disk is no reason to call all that lies near it damaged.
            return [found for row in members.tolist() for found in check(_place(table, row))]
        found: list[tuple[int, str]] = []
        for row in members.tolist():
            begin = int(entries["offset"][row]) - start
            reason = _fault(entries[row], memoryview(block)[begin : begin + int(entries["stored_bytes"][row])])
            if reason is not None:
                found.append((row, reason))
        return found

    plan = plan_reads(table.pack[rows], entries["offset"][rows], entries["stored_bytes"][rows])
    places = ((extent.pack, extent.start, extent.stop, rows[extent.members]) for extent in plan)
    for found in threads.ordered_map(check, places):
        bad.update(found)
    if gone:
        packs.refresh()
    return {
        entries["digest"][row].tobytes(): (
            table.key_of(row),
            f"chunk {hex_of(entries['digest'][row])} is damaged: {reason}",
        )
        for row, reason in bad.items()
    }


def _place(table: Table, row: int) -> tuple[int, int, int, Any]:
    start = int(table.entries["offset"][row])
    return int(table.pack[row]), start, start + int(table.entries["stored_bytes"][row]), np.array([row])


def _fault(entry: Any, stored: memoryview) -> str | None:
    """Say what is wrong with a chunk, if anything is."""
    n_raw = int(entry["raw_bytes"])
    raw: Any = stored
    if int(entry["codec"]) != RAW.number or len(stored) != n_raw:
        raw = memoryview(bytearray(n_raw))
        try:
            codec_numbered(int(entry["codec"])).decode_into(stored, raw)
        except FormatError as error:
            return str(error)
    actual = digest(raw)
    return None if actual == entry["digest"].tobytes() else f"its bytes hash to {actual.hex()}"
