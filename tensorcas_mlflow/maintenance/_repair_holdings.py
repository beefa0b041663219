"""What the packs of a store hold, every chunk of it read and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, StarvedError
from tensorcas_mlflow.index import Table, base_rows, make_table, pack_key, with_bases
from tensorcas_mlflow.maintenance._chunks import NO_ENTRIES, Verdict, as_keys, look_at
from tensorcas_mlflow.maintenance._quarantine import Piece, stretches
from tensorcas_mlflow.maintenance._salvage import Clues
from tensorcas_mlflow.pack import MAGIC, MAX_DEPTH, RAW_ALIGNMENT, Entries, read_table
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One pack, as a look at all of it has found it."""

    size: int
    entries: Entries
    """Of its chunks that are good."""
    damage: tuple[Piece, ...] = ()
    """Stretches that hold no good chunk and should."""
    failure: str | None = None
    """Why it could not be read whole: then nothing is known of what was not, and it is left as it is."""
    unread: tuple[Piece, ...] = ()
    """Chunks that its table names and that could not be read; with a failure."""
    baseless: tuple[Piece, ...] = ()
    """Deltas whose bases are lost: neither good nor damage."""
    has_table: bool = True
    """Whether its own table can be read."""


class Holdings:
    """All packs of a store. Packs never change, so each is read once."""

    def __init__(
        self, backend: Backend, clues: Callable[[Set[str]], Clues], *, given_up: frozenset[str] = frozenset()
    ) -> None:
        """Look at nothing yet.

        Args:
            backend: Where they are.
            clues: Called with the names of packs whose table is damaged.
            given_up: Keys of packs of which what cannot be read is to count as damaged.
        """
        self.packs: dict[str, Pack] = {}
        self._backend = backend
        self._clues = clues
        self._given_up = given_up
        self._replaced: set[str] = set()

    def look(self) -> None:
        """Read the packs that have come to be there, and forget those that are gone."""
        sizes = dict(p.list_packs(self._backend))
        self.packs = {name: pack for name, pack in self.packs.items() if name in sizes}
        new = {name: size for name, size in sizes.items() if name not in self.packs}
        tables: dict[str, Entries] = {}
        without: dict[str, str] = {}
        for name, size in new.items():
            try:
                tables[name] = self._read_table(name, size)
            except BlobNotFoundError:
                continue
            except CorruptError as error:
                without[name] = error.reason
            except StarvedError:
                raise
            except BackendError as error:
                if pack_key(name) in self._given_up:
                    without[name] = error.reason
                else:
                    self.packs[name] = Pack(size=size, entries=NO_ENTRIES, failure=error.reason)
        self._judge(tables, new)
        if without:
            clues = self._clues(without.keys())
            guesses = {name: clues.of(name, new[name]) for name in without}
            self._judge(guesses, new, without=without)

    def table(self, names: frozenset[str] | None = None) -> Table:
        """All good chunks of some packs, or of all; a delta only if its base is among them."""
        chosen = {name: pack.entries for name, pack in self.packs.items() if names is None or name in names}
        return with_bases(make_table(chosen))

    def dependents(self, names: Set[str]) -> Digests:
        """The chunks that some pack holds as deltas which it takes one of some packs to decode."""
        table = self.table()
        base = base_rows(table)
        needs = np.array([name in names for name in table.packs], dtype=bool)[table.pack]
        deltas = np.flatnonzero(base >= 0)
        for _ in range(MAX_DEPTH if len(deltas) else 0):
            needs[deltas] |= needs[base[deltas]]
        chosen = deltas[needs[base[deltas]]]
        return np.ascontiguousarray(table.entries["digest"][chosen])

    def good(self, names: frozenset[str] | None = None) -> Any:
        """The digests of all good chunks of some packs, or of all, each as one value."""
        return as_keys(self.table(names).entries["digest"])

    def damaged(self) -> frozenset[str]:
        """Names of packs that should go: those with damage, whose bytes were all read."""
        return frozenset(name for name, pack in self.packs.items() if pack.damage and pack.failure is None)

    def is_given_up(self, name: str) -> bool:
        """Whether what cannot be read of a pack counts as damaged."""
        return pack_key(name) in self._given_up or name in self._replaced

    def unread(self) -> Digests:
        """Chunks that could not be read, in any pack of which the table could."""
        return _digests_of(piece for pack in self.packs.values() for piece in pack.unread)

    def baseless(self) -> Digests:
        """Chunks that some pack holds as deltas whose bases are lost; other packs may have them."""
        return _digests_of(piece for pack in self.packs.values() for piece in pack.baseless)

    def give_up_replaced(self) -> frozenset[str]:
        """Count as damaged what cannot be read of packs, where each such chunk is good in another one.

        A collection weighs packs by their tables: it would keep the pack that cannot be read, and delete the others.

        Returns:
            Names of those packs.
        """
        good = self.good()
        for name, pack in self.packs.items():
            if pack.unread and np.isin(as_keys(_digests_of(pack.unread)), good).all():
                self.packs[name] = replace(pack, damage=(*pack.damage, *pack.unread), unread=(), failure=None)
                self._replaced.add(name)
        return frozenset(self._replaced)

    def _read_table(self, name: str, size: int) -> Entries:
        try:
            return p.read_pack_table(self._backend, name, size=size)
        except BackendError:
            # It reads more than the table, to save reads; a bad sector before it is no reason to lose it.
            def read(start: int, stop: int) -> bytes:
                block = bytearray(stop - start)
                self._backend.read_into(pack_key(name), start, memoryview(block))
                return bytes(block)

            return read_table(pack_key(name), size, read)

    def _judge(
        self, tables: dict[str, Entries], sizes: dict[str, int], *, without: dict[str, str] | None = None
    ) -> None:
        names = list(tables)
        entries: Entries = np.concatenate([NO_ENTRIES, *tables.values()])
        pack = np.repeat(np.arange(len(names)), [len(table) for table in tables.values()])
        good = np.zeros(len(entries), dtype=bool)
        damage: dict[str, list[Piece]] = {name: [] for name in names}
        failures: dict[str, str] = {}
        unread: dict[str, list[Piece]] = {name: [] for name in names}
        baseless: dict[str, list[Piece]] = {name: [] for name in names}
        gone: set[str] = set()
        for look in look_at(self._backend, names, pack, entries):
            name, entry = names[int(pack[look.row])], entries[look.row]
            if look.verdict is Verdict.GOOD:
                good[look.row] = True
            elif look.verdict is Verdict.GONE:
                gone.add(name)
            elif look.verdict is Verdict.BASELESS or (look.verdict is Verdict.FAILED and look.key in self._given_up):
                baseless[name].append(_piece(name, entry, look.reason, sizes[name]))
            elif look.verdict is Verdict.FAILED and pack_key(name) not in self._given_up:
                failures.setdefault(name, look.reason)
                unread[name].append(_piece(name, entry, look.reason, sizes[name]))
            elif without is None:
                # A guess that is wrong says nothing of the pack.
                damage[name].append(_piece(name, entry, look.reason, sizes[name]))
        for number, name in enumerate(names):
            mine = entries[good & (pack == number)] if len(entries) else NO_ENTRIES
            if without is not None:
                damage[name] = self._rest_of(name, mine, sizes[name], without[name])
            if name not in gone:
                self.packs[name] = Pack(
                    size=sizes[name],
                    entries=mine,
                    damage=tuple(damage[name]),
                    failure=failures.get(name),
                    unread=tuple(unread[name]) if without is None else (),
                    baseless=tuple(baseless[name]) if without is None else (),
                    has_table=without is None,
                )

    def _rest_of(self, name: str, good: Entries, size: int, reason: str) -> list[Piece]:
        """Say what of a pack without a table is none of its good chunks, nor the zeros between them."""
        key = pack_key(name)
        spans = [(int(entry["offset"]), int(entry["offset"]) + int(entry["stored_bytes"])) for entry in good]
        pieces = [
            Piece(key=key, start=start, n_bytes=stop - start, reason=reason)
            for start, stop in stretches(size, [(0, min(size, len(MAGIC))), *spans])
            if stop - start >= RAW_ALIGNMENT or not self._is_zero(key, start, stop)
        ]
        # Of an empty one there is nothing to keep, and it has to go all the same.
        return pieces or [Piece(key=key, start=0, n_bytes=size, reason=reason)]

    def _is_zero(self, key: str, start: int, stop: int) -> bool:
        block = bytearray(stop - start)
        try:
            self._backend.read_into(key, start, memoryview(block))
        except (BlobNotFoundError, CorruptError, BackendError):
            return False
        return not any(block)


def _digests_of(pieces: Iterable[Piece]) -> Digests:
    digests = [piece.entry["digest"] for piece in pieces]
    return np.array(digests, np.uint8).reshape(-1, DIGEST_BYTES)


def _piece(name: str, entry: Any, reason: str, size: int) -> Piece:
    start = min(int(entry["offset"]), size)
    n_bytes = min(int(entry["stored_bytes"]), size - start)
    return Piece(key=pack_key(name), start=start, n_bytes=n_bytes, reason=reason, entry=entry.copy())
