"""Index: a map from digests to the places of chunks, made from pack tables (``docs/format.md``, The index)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, prefixes, sorted_rows
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
)
from tensorcas_mlflow.layout._keys import list_blobs
from tensorcas_mlflow.layout._pack import (
    ENTRY,
    MAX_DEPTH,
    PACK_NAME_BYTES,
    Entries,
    as_rows,
    is_delta,
    read_table,
)

_PACK_NAME = re.compile(r"[0-9a-f]{32}")

_KEY = np.dtype(f"V{DIGEST_BYTES}")
"""A digest as one value, the beginning of an entry: a comparison handles it at once, not byte by byte."""

Positions = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class Found(NamedTuple):
    """Result of a search for many digests."""

    at: Positions
    """Numbers of the digests that were found, in any order."""
    entries: Entries
    """The entry of one copy of each of these."""
    pack: Any
    """For each the position of its pack in ``packs``."""
    packs: Sequence[str]


class PackNames:
    """Names of packs by position."""

    packs: tuple[str, ...]

    @Lazy
    def numbers(self) -> Mapping[str, int]:
        """Positions in ``packs``, by name; cached, since callers query a table of many packs again and again."""
        return {name: at for at, name in enumerate(self.packs)}

    def without(self, packs: Collection[str]) -> Mask | None:
        """Return for each pack whether it is outside of ``packs``; None if all are."""
        left_out = [self.numbers[name] for name in packs if name in self.numbers]
        if not left_out:
            return None
        usable = np.ones(len(self.packs), dtype=bool)
        usable[left_out] = False
        return usable


@dataclass(frozen=True, kw_only=True, eq=False)
class Table(PackNames):
    """Places of many chunks: one row a copy of a chunk, sorted by digest. Two rows may have one digest."""

    packs: tuple[str, ...]
    """Names of packs, each once, even if the constructor is given one twice."""
    pack: Any
    """For each row the position of its pack in ``packs``."""
    entries: Entries
    """For each row its entry in that pack."""
    prefix: Any
    """For each row the first eight bytes of its digest as a big-endian number, ascending."""

    def __post_init__(self) -> None:
        names = tuple(dict.fromkeys(self.packs))
        if len(names) == len(self.packs):
            return
        # `without` excludes a pack by its position. With a second position, copies in a condemned pack would count.
        number = {name: at for at, name in enumerate(names)}
        object.__setattr__(self, "pack", np.array([number[name] for name in self.packs], np.uint32)[self.pack])
        object.__setattr__(self, "packs", names)

    def __len__(self) -> int:
        return len(self.entries)

    def key_of(self, row: int) -> str:
        """Name the pack blob of a row."""
        return pack_key(self.packs[int(self.pack[row])])

    def find(self, digests: Digests, usable: Mask | None = None, packs: Any = None) -> Positions:
        """Look up many digests at once.

        Args:
            digests: The digests to find, shape ``(n, 32)``.
            usable: For each pack whether its copies count; None if all do.
            packs: For each digest the one pack to find it in, as a position in ``packs``; None if any pack
                will do.

        Returns:
            For each digest the row of one copy, or -1.
        """
        found = np.empty(len(digests), dtype=np.int64)
        found.fill(-1)
        if len(self.entries) == 0 or len(digests) == 0:
            return found
        wanted = prefixes(digests)
        row = self.prefix.searchsorted(wanted)
        open_ = (self.prefix.take(row, mode="clip") == wanted).nonzero()[0]
        if len(open_) == 0:
            return found
        stored, sought = self.entries.getfield(_KEY), np.ascontiguousarray(digests).view(_KEY).ravel()
        # Equal prefixes are nearly always equal digests; the loop repeats only for further copies or a collision.
        while len(open_):
            at = row[open_]
            inside = at < len(self.prefix)
            open_, at = open_[inside], at[inside]
            same = self.prefix[at] == wanted[open_]
            open_, at = open_[same], at[same]
            hit = stored[at] == sought[open_]
            if usable is not None:
                hit &= usable[self.pack[at]]
            if packs is not None:
                hit &= self.pack[at] == packs[open_]
            found[open_[hit]] = at[hit]
            open_ = open_[~hit]
            row[open_] += 1
        return found

    def look_up(self, digests: Digests, usable: Mask | None = None, packs: Any = None) -> Found:
        """Find many digests at once, and return the places of those that are there; see `find`."""
        rows = self.find(digests, usable, packs)
        at = (rows >= 0).nonzero()[0]
        rows = rows[at]
        return Found(at, self.entries.take(rows), self.pack[rows], self.packs)

    def between(self, low: int, high: int) -> tuple[Entries, Any]:
        """Return the rows whose digests begin with a number in a range: entries, and the positions of their packs."""
        rows = slice(self.prefix.searchsorted(np.uint64(low)), self.prefix.searchsorted(np.uint64(high), "right"))
        return self.entries[rows], self.pack[rows]

    def parts(self) -> Iterator[tuple[Entries, Any]]:
        """Yield all rows, in order and some at a time: entries, and the positions of their packs."""
        yield self.entries, self.pack

    @property
    def has_deltas(self) -> bool:
        """True if there are deltas among the chunks."""
        return bool(is_delta(self.entries).any())


EMPTY = Table(
    packs=(),
    pack=np.empty(0, np.uint32),
    entries=np.empty(0, ENTRY),
    prefix=np.empty(0, np.dtype(">u8").newbyteorder("=")),
)


def pack_key(name: str) -> str:
    """Return the key of a pack."""
    return f"packs/{name}.pack"


def pack_name(key: str) -> str:
    """Return the name of the pack at a key; see `pack_key`."""
    return key.removeprefix("packs/").removesuffix(".pack")


def as_names(rows: Any) -> Any:
    """View pack names, in the form of bases in entries, as one value each."""
    return np.ascontiguousarray(rows).view(f"V{PACK_NAME_BYTES}").ravel()


def is_pack_name(name: object) -> bool:
    """Tell whether an object is the name of a pack."""
    return isinstance(name, str) and _PACK_NAME.fullmatch(name) is not None


def make_table(parts: Mapping[str, Entries]) -> Table:
    """Merge the tables of some packs into one sorted table."""
    if not parts:
        return EMPTY
    pack = np.arange(len(parts), dtype=np.uint32).repeat([len(part) for part in parts.values()])
    digests = np.concatenate([part["digest"] for part in parts.values()])
    order, _ = sorted_rows(digests)
    # Each part goes to its places at once: concatenated first, all entries would lie in memory twice.
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    entries, begin = np.empty(len(order), ENTRY), 0
    for part in parts.values():
        as_rows(entries)[place[begin : begin + len(part)]] = as_rows(part)
        begin += len(part)
    return Table(packs=tuple(parts), pack=pack[order], entries=entries, prefix=prefixes(digests[order]))


def merge_tables(tables: Sequence[Table]) -> Table:
    """Merge some tables into one sorted table."""
    packs: list[str] = []
    columns = []
    for table in tables:
        columns.append(table.pack + np.uint32(len(packs)))
        packs.extend(table.packs)
    if not columns:
        return EMPTY
    return _sorted(tuple(packs), np.concatenate(columns), np.concatenate([table.entries for table in tables]))


def only_packs(table: Table, packs: Set[str]) -> Table:
    """Keep only some packs of a table."""
    keep = np.array([name in packs for name in table.packs], dtype=bool)
    if keep.all():
        return table
    names = tuple(name for name in table.packs if name in packs)
    number = np.cumsum(keep) - 1
    rows = keep[table.pack]
    return Table(
        packs=names,
        pack=number[table.pack[rows]].astype(np.uint32),
        entries=table.entries[rows],
        prefix=table.prefix[rows],
    )


def with_bases(table: Table) -> Table:
    """Remove from a table the deltas without all their bases in it: a reader of this table alone cannot decode them."""
    keep = base_rows(table) != NOWHERE
    if keep.all():
        return table
    return replace(table, pack=table.pack[keep], entries=table.entries[keep], prefix=table.prefix[keep])


IN_FULL = -1
NOWHERE = -2


def base_rows(table: Table) -> Positions:
    """Find the bases of deltas: for each row of a table the row of its base.

    Returns:
        `IN_FULL` for a chunk in full; `NOWHERE` for a delta without its base, or without the base of that, and so on.
    """
    base = np.full(len(table), IN_FULL, dtype=np.int64)
    deltas = np.flatnonzero(is_delta(table.entries))
    if len(deltas) == 0:
        return base
    entries = table.entries[deltas]
    base[deltas] = table.find(
        np.ascontiguousarray(entries["base_digest"]), packs=positions(table, entries["base_pack"])
    )
    base[deltas[base[deltas] < 0]] = NOWHERE
    for _ in range(MAX_DEPTH):
        held = deltas[base[deltas] >= 0]
        lost = (base[base[held]] == NOWHERE) | (table.entries["depth"][base[held]] >= table.entries["depth"][held])
        if not lost.any():
            break
        base[held[lost]] = NOWHERE
    return base


def positions(table: Table, names: Any) -> Positions:
    """Find packs in a table by their names in the form of bases in entries; -1 for unknown names."""
    unique, inverse = np.unique(as_names(names), return_inverse=True)
    return np.array([table.numbers.get(name.tobytes().hex(), -1) for name in unique], dtype=np.int64)[inverse]


def _sorted(packs: tuple[str, ...], pack: Any, entries: Entries) -> Table:
    order, _ = sorted_rows(entries["digest"])
    entries = entries.take(order)
    return Table(packs=packs, pack=pack[order], entries=entries, prefix=prefixes(entries["digest"]))


_TAIL_BYTES = 64 * 1024
"""Size of the first read at a pack's end, before the size of its table is known: enough for most tables, if a read is a
request."""
_LOCAL_TAIL_BYTES = 4 * 1024
"""The same in a file of this machine: a second read covers larger tables."""
_TIME_DIGITS = 12


def list_packs(backend: Backend, *, since_s: float = 0.0) -> Iterator[tuple[str, int]]:
    """List the packs of a store, in the order of drawing: name and size.

    Args:
        backend: The backend of the store.
        since_s: For a remote store, leave out names drawn before this time, in seconds of Unix time.
    """
    after = f"packs/{_time_text(since_s)}" if backend.is_remote and since_s > 0 else None
    for info in list_blobs(backend, "packs", after=after):
        name, _, ending = info.key.removeprefix("packs/").partition(".")
        if ending == "pack":
            yield name, info.size


def new_pack_name(backend: Backend) -> str:
    """Draw a name no pack ever had. In a remote store, names sort by the time they were drawn."""
    name = new_name()
    return _time_text(time.time()) + name[_TIME_DIGITS:] if backend.is_remote else name


def _time_text(time_s: float) -> str:
    return f"{max(0, int(time_s * 1000)):0{_TIME_DIGITS}x}"[:_TIME_DIGITS]


def drawn_s(name: str) -> float:
    """Return the time a pack's name was drawn in a remote store, in seconds of Unix time; 0 for no name."""
    return int(name[:_TIME_DIGITS] or "0", 16) / 1000


def read_pack_table(backend: Backend, name: str, *, size: int | None = None) -> Entries:
    """Read the table of a pack, in one read if it is short.

    Args:
        backend: The backend of the pack.
        name: Its name.
        size: Its size, if known.

    Raises:
        BlobNotFoundError: The pack is gone.
        CorruptError: It is damaged.
        BackendError: The storage fails to deliver its table.
    """
    key = pack_key(name)
    if size is None:
        info = backend.stat(key)
        if info is None:
            raise BlobNotFoundError(key)
        size = info.size
    is_far = backend.is_remote or backend.is_carrier
    tail = bytearray(min(size, _TAIL_BYTES if is_far else _LOCAL_TAIL_BYTES))
    begin = size - len(tail)
    try:
        backend.read_into(key, begin, memoryview(tail))
    except BackendError:
        if backend.is_remote:
            raise
        begin = size  # a bad sector before the table must not hide it: read only the needed bytes

    def read(start: int, stop: int) -> bytes | bytearray:
        if start >= begin:
            return tail[start - begin : stop - begin]
        longer = bytearray(stop - start)
        backend.read_into(key, start, memoryview(longer))
        return longer

    return read_table(key, size, read)


def mark_loose(backend: Backend, name: str) -> None:
    """Add a new pack to the index; in a remote store it needs no marker."""
    if backend.is_remote:
        return
    key = f"index/{name}.loose"
    with contextlib.suppress(BlobExistsError):
        if backend.has_database:
            backend.put_all([(key, [])])  # in the transaction of the pack
        else:
            backend.put_new(key, [], durable=False)
