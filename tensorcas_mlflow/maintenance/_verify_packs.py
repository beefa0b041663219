"""The packs of a store and their tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES
from tensorcas_mlflow.codecs import CODECS, MOST_OVERHEAD_BYTES, RAW
from tensorcas_mlflow.digest import hex_of, unique_rows
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, FormatError
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Mask, Table, make_table, pack_key, read_segment, with_bases
from tensorcas_mlflow.maintenance._verify_report import Problem, reason_of
from tensorcas_mlflow.pack import MAGIC, Entries
from tensorcas_mlflow.store import protocol as p


class Packs:
    """The tables of all packs that can be read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tables: dict[str, Entries] = {}
        self.problems: list[Problem] = []
        self.table: Table = make_table({})
        self._lost: list[str] | None = None
        self._unreadable: set[str] = set()
        self.refresh()

    def refresh(self) -> None:
        """Read the tables of packs that have come to be there, and forget those of packs that are gone."""
        there = [name for name, _ in p.list_packs(self._backend)]
        unreadable = set(self._unreadable)
        new = [name for name in there if name not in self._tables and pack_key(name) not in unreadable]
        for name, found in zip(new, threads.ordered_map(self._read, new), strict=True):
            if isinstance(found, Problem):
                self.problems.append(found)
                self._unreadable.add(pack_key(name))
            elif found is not None:
                self._tables[name] = found
        self._tables = {name: self._tables[name] for name in there if name in self._tables}
        self.table = with_bases(make_table(self._tables))

    def check_heads(self) -> None:
        """Look whether packs begin as packs do, which nobody needs to read them."""
        for found in threads.ordered_map(self._head_problem, list(self._tables), waits=self._backend.is_remote):
            if found is not None:
                self.problems.append(found)

    def _head_problem(self, name: str) -> Problem | None:
        key, head = pack_key(name), bytearray(len(MAGIC))
        try:
            self._backend.read_into(key, 0, memoryview(head))
        except BlobNotFoundError:
            return None
        except (FormatError, BackendError) as error:
            return Problem(key=key, reason=reason_of(error))
        return None if head == MAGIC else Problem(key=key, reason="it does not begin as a pack (nothing is lost)")

    def entries_of(self, name: str) -> Entries | None:
        """Give the table of a pack; None if it is gone or cannot be read."""
        return self._tables.get(name)

    def lost(self) -> list[str]:
        """Name the packs that cannot be read, and those that the index names and that are not there."""
        if self._lost is None:
            self._lost = self._find_lost()
        return self._lost

    def _find_lost(self) -> list[str]:
        named: set[str] = set()
        for info in list_blobs(self._backend, "index"):
            name, _, ending = info.key.removeprefix("index/").partition(".")
            if ending == "loose":
                named.add(name)
            elif ending == "arrow":
                try:
                    named.update(read_segment(info.key, self._backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES)).packs)
                except (BlobNotFoundError, FormatError):
                    continue
        there = {name for name, _ in p.list_packs(self._backend)}
        return sorted({*(pack_key(name) for name in named - there), *self._unreadable})

    def _read(self, name: str) -> Entries | Problem | None:
        key = pack_key(name)
        try:
            entries = p.read_pack_table(self._backend, name)
            self.problems += [Problem(key=key, reason=reason) for reason in _faults_of(entries)]
            return entries
        except BlobNotFoundError:
            return None
        except (FormatError, BackendError) as error:
            return Problem(key=pack_key(name), reason=reason_of(error))


def is_possible(entries: Any) -> Mask:
    """Tell for each entry whether there can be such a chunk, so that what a table says costs no memory."""
    raw, stored = entries["raw_bytes"].astype(np.int64), entries["stored_bytes"].astype(np.int64)
    possible: Mask = (raw <= MAX_CHUNK_BYTES) & (stored <= 2 * raw + MOST_OVERHEAD_BYTES)
    return possible


def _faults_of(entries: Entries) -> Iterator[str]:
    """Say what a table says that no writer has written; it hashes to its digest."""

    def first(wrong: Any) -> str:
        more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
        return f"chunk {hex_of(entries['digest'][int(np.flatnonzero(wrong)[0])])}{more}"

    is_raw = entries["codec"] == RAW.number
    impossible = ~is_possible(entries) | (is_raw & (entries["raw_bytes"] != entries["stored_bytes"]))
    if impossible.any():
        yield f"its table gives impossible sizes of {first(impossible)}"
    unknown = ~np.isin(entries["codec"], list(CODECS))
    if unknown.any():
        yield f"its table gives a codec that this release does not know for {first(unknown)}"
    order = np.argsort(entries["offset"], kind="stable")
    starts = entries["offset"][order].astype(np.int64)
    stops = starts + entries["stored_bytes"][order]
    overlaps = np.zeros(len(order), dtype=bool)
    overlaps[order[1:]] = starts[1:] < stops[:-1]
    if overlaps.any():
        yield f"its table lets {first(overlaps)} overlap with another chunk"
    _, at, _ = unique_rows(np.ascontiguousarray(entries["digest"]))
    again = np.ones(len(entries), dtype=bool)
    again[at] = False
    if again.any():
        yield f"its table names {first(again)} twice"
