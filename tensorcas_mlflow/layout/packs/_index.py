"""Index: a map from digests to the places of chunks, made from pack tables (``docs/format.md``, The index).

In memory it is a `Table`. In a store it is segments: the places of many chunks in one blob, sorted by digest. A small
segment is read whole, as a `Table`. A large one is a `Segment`: a search reads only the ranges that may hold the wanted
digests, so its cost does not grow with the store.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, Digests, digest_all, digest_of, prefixes, sorted_rows
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, NewerFormatError
from tensorcas_mlflow.layout._keys import list_blobs
from tensorcas_mlflow.layout.packs._pack import (
    ENTRY,
    MAX_DEPTH,
    PACK_NAME_BYTES,
    TABLE_ENTRY,
    Entries,
    has_depth,
    is_delta,
    pack_key,
)

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
        left_out = [self.numbers[name] for name in packs if name in self.numbers] if packs else []
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


def as_names(rows: Any) -> Any:
    """View pack names, in the form of bases in entries, as one value each."""
    return np.ascontiguousarray(rows).view(f"V{PACK_NAME_BYTES}").ravel()


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
        entries.put(place[begin : begin + len(part)], part)
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


SEGMENT_MAGIC = b"\x89TCIX\r\n\x01"
VERSION = 1
MAX_SEGMENT_BYTES = 256 << 30
MAX_OFFSET = 1 << 56
CHECK_BYTES = 8
MARK_BYTES = 2
BLOCK_ROWS = 128
"""Rows of a block: the fences name the first digest of each."""

_PLACE = [("pack", "<u4"), ("check", "u1", (CHECK_BYTES,))]
ROW = np.dtype([*TABLE_ENTRY.descr, *_PLACE])
"""A row of a segment without deltas."""
ROW_WITH_BASE = np.dtype([*ENTRY.descr, *_PLACE])
"""A row of a segment with deltas."""
_KINDS = {dtype.itemsize: dtype for dtype in (ROW, ROW_WITH_BASE)}

_FOOT = struct.Struct("<8sIIQII32s")
_AHEAD_BYTES = 64 << 10
"""Size of the first read at the end of a segment."""
_SMALL_BYTES = 2 << 20
"""A segment of at most this size is read whole."""
_SEARCHED_AT_ONCE = 8192
"""Digests searched at a time: their marks take some 2 MiB."""
_MOST_ROUNDS = 64
"""A digest whose copies begin in another block is looked for in so many blocks at most."""
_GAP_BYTES = 8 << 10
_FAR_GAP_BYTES = 256 << 10
"""Two ranges with a smaller gap between them are one read, or one request."""
_RUN_BYTES = 8 << 20
_PART_ROWS = 1 << 16
"""Rows checked, or merged, at a time."""

ReadRange = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes of a blob from a place on."""


class _Foot:
    """The end of a segment: its size, its packs, and its fences."""

    def __init__(self, key: str, size: int, read: ReadRange) -> None:
        """Read it.

        Raises:
            CorruptError: It is no segment.
            NewerFormatError: A later release wrote it.
        """
        tail = bytearray(min(size, _AHEAD_BYTES))
        read(size - len(tail), memoryview(tail))
        head, n_packs, self.n_rows, self.row_bytes, digest = _parse_foot(key, bytes(tail[-_FOOT.size :]))
        dtype = _KINDS.get(self.row_bytes)
        self.n_blocks = -(-self.n_rows // BLOCK_ROWS)
        self.marks_at = self.n_rows * self.row_bytes
        fences_at = self.marks_at + self.n_rows * MARK_BYTES
        names_at = fences_at + self.n_blocks * 8
        if dtype is None or names_at + n_packs * PACK_NAME_BYTES + _FOOT.size != size:
            raise CorruptError(key, "an index segment is not as long as its end says")
        self.dtype = dtype
        n_bytes = size - _FOOT.size - fences_at
        if n_bytes + _FOOT.size <= len(tail):
            known = bytes(tail[len(tail) - _FOOT.size - n_bytes : len(tail) - _FOOT.size])
        else:
            longer = bytearray(n_bytes)
            read(fences_at, memoryview(longer))
            known = bytes(longer)
        if digest_of([known, head]) != digest:
            raise CorruptError(key, "the end of an index segment does not hash to its digest")
        self.fences = np.frombuffer(known, ">u8", self.n_blocks).astype(np.uint64)
        """The first eight bytes of the first digest of each block, as a big-endian number."""
        names = known[self.n_blocks * 8 :].hex()
        self.packs = tuple(names[at : at + 2 * PACK_NAME_BYTES] for at in range(0, len(names), 2 * PACK_NAME_BYTES))


def _parse_foot(key: str, data: bytes) -> tuple[bytes, int, int, int, bytes]:
    if len(data) < _FOOT.size:
        raise CorruptError(key, "an index segment is cut off")
    magic, version, n_packs, n_rows, row_bytes, _, digest = _FOOT.unpack(data)
    if magic != SEGMENT_MAGIC:
        raise CorruptError(key, "not an index segment")
    if version > VERSION:
        raise NewerFormatError(f"the index segment {key!r}", version, VERSION)
    return data[: -len(digest)], n_packs, n_rows, row_bytes, digest


def segment_key(name: str) -> str:
    """Return the key of a segment."""
    return f"index/{name}.segment"


def segment_name(key: str) -> str:
    """Return the name of the segment at a key; see `segment_key`."""
    return key.removeprefix("index/").partition(".")[0]


def list_segments(backend: Backend) -> list[BlobInfo]:
    """List the segments of an index."""
    return [info for info in list_blobs(backend, "index") if info.key.endswith(".segment")]


def check_segment_version(backend: Backend, key: str, size: int) -> None:
    """Check from the end of a segment that this release can read it.

    Raises:
        CorruptError: It is no segment.
        NewerFormatError: A later release wrote it.
        BlobNotFoundError: It is gone.
    """
    data = bytearray(min(size, _FOOT.size))
    backend.read_into(key, size - len(data), memoryview(data))
    _parse_foot(key, bytes(data))


def segment_pieces(packs: Sequence[str], parts: Iterable[tuple[Entries, Any]], *, has_deltas: bool) -> Iterator[Buffer]:
    """Write sorted entries as a segment, a part at a time.

    Args:
        packs: Names of the packs.
        parts: Entries, sorted by digest within a part and from part to part; and for each the position of its pack.
        has_deltas: False if there are no deltas among them: the rows then have no room for bases.
    """
    dtype = ROW_WITH_BASE if has_deltas else ROW
    n_rows = 0
    marks: list[bytes] = []
    fences: list[bytes] = []
    for entries, pack in parts:
        rows = np.zeros(len(entries), dtype)
        _bytes_of(rows)[:, : _entry_bytes(dtype)] = _bytes_of(entries)[:, : _entry_bytes(dtype)]
        rows["pack"] = pack
        rows["check"] = _checks_of(rows)
        yield memoryview(_bytes_of(rows).reshape(-1))
        digests = rows["digest"]
        marks.append(np.ascontiguousarray(digests[:, 8 : 8 + MARK_BYTES]).tobytes())
        fences.append(np.ascontiguousarray(digests[-n_rows % BLOCK_ROWS :: BLOCK_ROWS, :8]).tobytes())
        n_rows += len(rows)
    yield from marks
    known = b"".join(fences) + bytes.fromhex("".join(packs))
    head = _FOOT.pack(SEGMENT_MAGIC, VERSION, len(packs), n_rows, dtype.itemsize, 0, b"")[:-DIGEST_BYTES]
    yield known
    yield head + digest_of([known, head])


def segment_bytes(table: Table) -> bytes:
    """Write a table as a segment."""
    return b"".join(segment_pieces(table.packs, [(table.entries, table.pack)], has_deltas=table.has_deltas))


def read_segment(key: str, data: bytes) -> Table:
    """Read a whole segment.

    Raises:
        CorruptError: It is no segment, or some bytes have changed.
        NewerFormatError: A later release wrote it.
    """
    view = memoryview(data)

    def read(start: int, out: memoryview) -> None:
        out[:] = view[start : start + len(out)]

    foot = _Foot(key, len(data), read)
    rows = np.frombuffer(data, foot.dtype, foot.n_rows)
    if not _are_sound(rows, len(foot.packs)).all():
        raise CorruptError(key, "a row of an index segment has changed")
    digests = np.ascontiguousarray(rows["digest"])
    order, _ = sorted_rows(digests)
    prefix = prefixes(digests)
    marks = np.frombuffer(data, np.uint8, foot.n_rows * MARK_BYTES, foot.marks_at).reshape(-1, MARK_BYTES)
    if (
        (order != np.arange(len(order))).any()
        or (prefix[::BLOCK_ROWS] != foot.fences).any()
        or (marks != digests[:, 8 : 8 + MARK_BYTES]).any()
    ):
        raise CorruptError(key, "an index segment is not in order")
    return Table(packs=foot.packs, pack=rows["pack"].astype(np.uint32), entries=_entries_of(rows), prefix=prefix)


def open_segment(backend: Backend, key: str, *, size: int | None = None) -> Table | Segment:
    """Open a segment for searches: a small one is read whole.

    Args:
        backend: The backend of the index.
        key: Its key.
        size: Its size, if known.

    Raises:
        BlobNotFoundError: It is gone.
        CorruptError: It is no segment; or it is small, and some bytes have changed.
        NewerFormatError: A later release wrote it.
    """
    if size is None:
        info = backend.stat(key)
        if info is None:
            raise BlobNotFoundError(key)
        size = info.size
    if size <= _SMALL_BYTES or backend.is_carrier:
        return read_segment(key, backend.get(key, max_bytes=MAX_SEGMENT_BYTES))
    return Segment(backend, key, size)


class Segment(PackNames):
    """A large segment, searched by ranges. For many threads at once.

    A row is checked when a search finds it; one whose bytes have changed is not found.
    """

    def __init__(self, backend: Backend, key: str, size: int) -> None:
        """Read the end of a segment, and keep its file open if it is one of this machine.

        Raises:
            BlobNotFoundError: It is gone.
            CorruptError: It is no segment.
            NewerFormatError: A later release wrote it.
        """
        self.key = key
        file = backend.open_file(key)
        if file is None:
            self._read: ReadRange = lambda start, out: backend.read_into(key, start, out)
        else:
            weakref.finalize(self, file.close)
            self._read = lambda start, out: file.read_into(start, [out])
        self._is_far = backend.is_remote
        self._foot = _Foot(key, size, self._read)
        self.packs = self._foot.packs
        self._marks: Any = None

    def __len__(self) -> int:
        return self._foot.n_rows

    def look_up(self, digests: Digests, usable: Mask | None = None, packs: Any = None) -> Found:
        """Look up many digests at once; see `Table.look_up`.

        Raises:
            BlobNotFoundError: Another process has merged the segment into another one and removed it.
        """
        wanted = prefixes(digests)
        order = wanted.argsort()
        at: list[Any] = [np.empty(0, np.int64)]
        rows: list[Any] = [np.empty(0, self._foot.dtype)]
        for begin in range(0, len(order), _SEARCHED_AT_ONCE):
            for some, hits in self._look_up(digests, wanted, order[begin : begin + _SEARCHED_AT_ONCE], usable, packs):
                at.append(some)
                rows.append(hits)
        found = np.concatenate(rows)
        used, pack = np.unique(found["pack"], return_inverse=True)
        return Found(np.concatenate(at), _entries_of(found), pack, [self.packs[number] for number in used.tolist()])

    def _look_up(
        self, digests: Digests, wanted: Any, order: Any, usable: Mask | None, packs: Any
    ) -> Iterator[tuple[Any, Any]]:
        """Look up some digests, by number, in the order of their prefixes: yield numbers, and the row of each."""
        fences = self._foot.fences
        first = np.maximum(fences.searchsorted(wanted[order], "left") - 1, 0)
        last = fences.searchsorted(wanted[order], "right") - 1
        sought = np.ascontiguousarray(digests[order, 8 : 8 + MARK_BYTES]).view(np.uint16).ravel()
        open_ = np.flatnonzero(first <= last)
        for number in range(_MOST_ROUNDS):
            open_ = open_[first[open_] + number <= last[open_]]
            if len(open_) == 0:
                break
            blocks, inverse = np.unique(first[open_] + number, return_inverse=True)
            marks = self._marks_of(blocks)[inverse]
            at, place = (marks == sought[open_][:, None]).nonzero()
            # The last block may be short.
            row = blocks[inverse][at] * BLOCK_ROWS + place
            at, row = at[row < len(self)], row[row < len(self)]
            if len(at) == 0:
                continue
            which, again = np.unique(row, return_inverse=True)
            rows = self._rows(which)[again]
            asked = order[open_[at]]
            hit = (rows["digest"] == digests[asked]).all(axis=1)
            hit[hit] = _are_sound(rows[hit], len(self.packs))
            if usable is not None:
                hit[hit] = usable[rows["pack"][hit]]
            if packs is not None:
                hit[hit] = rows["pack"][hit] == packs[asked[hit]]
            of_open, one = np.unique(at[hit], return_index=True)
            yield order[open_[of_open]], rows[hit][one]
            is_open = np.ones(len(open_), dtype=bool)
            is_open[of_open] = False
            open_ = open_[is_open]

    def _marks_of(self, blocks: Any) -> Any:
        """Read the marks of some blocks, ascending: shape ``(n, BLOCK_ROWS)``. Some after the last row mean nothing."""
        if self._is_far and self._marks is None:
            # Each search would take requests, and all marks take a hundredth of the segment.
            n_rows = self._foot.n_blocks * BLOCK_ROWS
            marks = np.zeros(n_rows, np.uint16)
            self._fill(
                np.zeros(1, np.int64),
                marks.view(np.uint8)[: len(self) * MARK_BYTES].reshape(1, -1),
                self._foot.marks_at,
            )
            self._marks = marks.reshape(-1, BLOCK_ROWS)
        if self._marks is not None:
            return self._marks[blocks]
        out = np.zeros((len(blocks), BLOCK_ROWS), np.uint16)
        if len(blocks) and blocks[-1] == self._foot.n_blocks - 1:
            n_rows = len(self) - int(blocks[-1]) * BLOCK_ROWS
            short = out[-1:, :n_rows].view(np.uint8)
            area = np.empty(short.shape, np.uint8)
            self._fill(blocks[-1:] * (BLOCK_ROWS * MARK_BYTES), area, self._foot.marks_at)
            short[:] = area
            blocks = blocks[:-1]
        self._fill(blocks * (BLOCK_ROWS * MARK_BYTES), out[: len(blocks)].view(np.uint8), self._foot.marks_at)
        return out

    def _rows(self, rows: Any) -> Any:
        """Read some rows, ascending."""
        out = np.empty(len(rows), self._foot.dtype)
        self._fill(rows * self._foot.row_bytes, _bytes_of(out), 0)
        return out

    def _fill(self, starts: Any, out: Any, base: int) -> None:
        """Read ranges of one length, in ascending order: one row of ``out`` each. Neighbours are one read."""
        n, length = out.shape
        if n == 0:
            return
        gap = _FAR_GAP_BYTES if self._is_far else _GAP_BYTES
        borders = [0, *(np.flatnonzero(np.diff(starts) > length + gap) + 1).tolist(), n]
        runs: list[tuple[int, int]] = []
        for begin, end in pairwise(borders):
            step = max(1, _RUN_BYTES // (int(starts[end - 1] - starts[begin]) // (end - begin) + length))
            runs += [(at, min(at + step, end)) for at in range(begin, end, step)]

        def read(run: tuple[int, int]) -> None:
            begin, end = run
            start, stop = int(starts[begin]), int(starts[end - 1]) + length
            if stop - start == (end - begin) * length:
                flat = memoryview(out[begin:end].reshape(-1))
                for at in range(0, len(flat), _RUN_BYTES):
                    self._read(base + start + at, flat[at : at + _RUN_BYTES])
                return
            area = np.empty(stop - start, np.uint8)
            self._read(base + start, area.data)
            out[begin:end] = area[(starts[begin:end] - start)[:, None] + np.arange(length)]

        if self._is_far and len(runs) > 1:
            threads.run_all(read, runs, waits=True)
        else:
            for run in runs:
                read(run)

    def between(self, low: int, high: int) -> tuple[Entries, Any]:
        """Return the rows whose digests begin with a number in a range: entries, and the positions of their packs.

        Raises:
            CorruptError: Some bytes have changed.
            BlobNotFoundError: The segment is gone.
        """
        fences = self._foot.fences
        begin = max(0, int(fences.searchsorted(np.uint64(low), "left")) - 1) * BLOCK_ROWS
        end = min(int(fences.searchsorted(np.uint64(high), "right")) * BLOCK_ROWS, len(self))
        rows = self._rows(np.arange(begin, max(begin, end)))
        if not _are_sound(rows, len(self.packs)).all():
            raise CorruptError(self.key, "a row of an index segment has changed")
        prefix = prefixes(rows["digest"])
        rows = rows[(prefix >= low) & (prefix <= high)]
        return _entries_of(rows), rows["pack"].astype(np.uint32)

    @property
    def has_deltas(self) -> bool:
        """True if there may be deltas among the chunks."""
        return self._foot.dtype == ROW_WITH_BASE

    def parts(self) -> Iterator[tuple[Entries, Any]]:
        """Yield all rows, in order and some at a time: entries, and the positions of their packs.

        Raises:
            CorruptError: Some bytes have changed.
            BlobNotFoundError: The segment is gone.
        """
        for low, high in _ranges(len(self)):
            yield self.between(low, high)


def merged_pieces(sources: Sequence[Table | Segment], there: Set[str]) -> Iterator[Buffer]:
    """Merge sources into one segment, with bounded memory.

    Args:
        sources: Tables and segments; several may have the same pack.
        there: The packs to keep.

    Raises:
        CorruptError: A source has changed.
        BlobNotFoundError: A source is gone.
    """
    packs: dict[str, int] = {}
    numbers = []
    for source in sources:
        own = [name for name in source.packs if name in there and name not in packs]
        packs.update(zip(own, range(len(packs), len(packs) + len(own)), strict=True))
        kept = set(own)
        numbers.append(np.array([packs[name] if name in kept else -1 for name in source.packs], np.int64))

    def parts() -> Iterator[tuple[Entries, Any]]:
        for low, high in _ranges(sum(map(len, sources))):
            entries, places = [np.empty(0, ENTRY)], [np.empty(0, np.int64)]
            for source, number in zip(sources, numbers, strict=True):
                some, pack = source.between(low, high)
                place = number[pack]
                entries.append(some[place >= 0])
                places.append(place[place >= 0])
            joined = np.concatenate(entries)
            order, _ = sorted_rows(joined["digest"])
            if len(order):
                yield joined.take(order), np.concatenate(places)[order]

    has_deltas = any(source.has_deltas for source in sources)
    yield from segment_pieces(tuple(packs), parts(), has_deltas=has_deltas)


def _ranges(n_rows: int) -> Iterator[tuple[int, int]]:
    """Divide the numbers that digests begin with into ranges with some rows each: the first and the last number."""
    n = n_rows // _PART_ROWS + 1
    for at in range(n):
        yield (at << 64) // n, ((at + 1 << 64) // n) - 1


def merge_segments(backend: Backend, keys: Sequence[str], there: Set[str] | None = None) -> None:
    """Replace segments by one with their rows.

    Args:
        backend: The backend of the index.
        keys: The segments.
        there: The packs that exist, listed after the segments: the rows of others are left out. None to keep all rows.

    Raises:
        BlobNotFoundError: Another process has replaced one of them.
        CorruptError: A large one is damaged.
        BackendError: The storage failed. Nothing is lost.
    """
    if not keys:
        return
    sources = [open_segment(backend, key) for key in keys]
    named = {name for source in sources for name in source.packs}
    # A name is never used again, so a pack that is missing now is gone for good.
    kept = named if there is None else named & there
    if kept:
        backend.put_new(segment_key(new_name()), merged_pieces(sources, kept))
    backend.delete(*keys)


def to_merge(segments: Iterable[BlobInfo], *, most_bytes: int) -> list[str]:
    """Choose segments to merge by their sizes: afterwards each is at least twice as large as all smaller ones.

    So there are few of them, and a row moves a few times at most.

    Args:
        segments: All segments of an index.
        most_bytes: Leave out segments above this size.

    Returns:
        Keys, smallest first; none if nothing is to be done.
    """
    chosen: list[str] = []
    n_bytes = 0
    for info in sorted(segments, key=lambda info: (info.size, info.key)):
        if info.size > most_bytes or (chosen and info.size > 2 * n_bytes):
            break
        chosen.append(info.key)
        n_bytes += info.size
    return chosen if len(chosen) > 1 else []


def _bytes_of(rows: Any) -> Any:
    """View rows as bytes: shape ``(n, size)``."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)


def _entry_bytes(dtype: Any) -> int:
    """Return the size of the entry at the beginning of a row."""
    size: int = dtype.fields["pack"][1]
    return size


def _entries_of(rows: Any) -> Entries:
    entries = np.zeros(len(rows), ENTRY)
    size = _entry_bytes(rows.dtype)
    _bytes_of(entries)[:, :size] = _bytes_of(np.ascontiguousarray(rows))[:, :size]
    return entries


def _checks_of(rows: Any) -> Any:
    """Return the check of each row: the beginning of the digest of the bytes before it."""
    size = rows.dtype.itemsize
    flat = memoryview(_bytes_of(rows).reshape(-1))
    return digest_all([flat[at : at + size - CHECK_BYTES] for at in range(0, len(flat), size)])[:, :CHECK_BYTES]


def _are_sound(rows: Any, n_packs: int) -> Mask:
    """Return for each row whether it is as it was written, and possible."""
    rows = np.ascontiguousarray(rows)
    sound: Mask = np.all(_checks_of(rows) == rows["check"], axis=1)
    sound &= (rows["pack"] < n_packs) & (rows["offset"] <= MAX_OFFSET)
    deltas = is_delta(rows)
    if rows.dtype == ROW:
        sound &= ~deltas
        return sound
    sound &= rows["base_pack"].any(axis=1) == deltas
    sound[deltas] &= has_depth(rows[deltas])
    return sound
