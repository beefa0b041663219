"""Checks of chunks as they lie in packs. The only evidence is the hash.

A shard is some rows of the tables of packs. `check_chunks` maps a shard to a result, and `merge_checks` joins results.
Shards and results are picklable values. Any division of a store into shards, checked in any processes and merged in any
order, gives the same result. `read_chunks` is the loop below, for callers that also want the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.chunk_io import BlockScreen, Places, find_sound, plan_reads
from tensorcas_mlflow.codecs import CODECS, RAW
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptError,
    FormatError,
    NotFoundError,
    StarvedError,
)
from tensorcas_mlflow.layout.packs import (
    EMPTY,
    STORED_DIGEST_BYTES,
    Entries,
    Mask,
    Payload,
    Positions,
    Table,
    decode_chunk,
    is_possible,
    pack_key,
    pack_name,
    sizes_text,
)
from tensorcas_mlflow.store import protocol as p

SHARD_BYTES = 4 << 30
"""Stored bytes of one shard; see `divide`."""
_SHARD_ROWS = 1 << 18
"""Rows of one shard: a check takes some 700 bytes for each, besides the reads under way."""
NO_ROWS = np.empty(0, np.int64)
_WINDOW = 8
"""Reads under way at once, of some 8 MiB each."""


class Verdict(IntEnum):
    """Outcome of a check that did not find a chunk good. The larger one wins where two checks disagree."""

    GONE = 1
    """Its pack does not exist any more."""
    BASELESS = 2
    """It is a delta as it was written, and its base is gone, damaged, or encoded as this release does not know. It is
    no copy, and no damage. A collection leaves such deltas where the chunk has another copy."""
    FAILED = 3
    """The storage did not give its bytes, or this release cannot decode them. So nobody knows if they are good."""
    BAD = 4
    """Its bytes were read, and do not decode to its digest."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ChunkFault:
    """Reason why a chunk was not found good."""

    verdict: Verdict
    reason: str
    key: str = ""
    """Key of the blob that the storage did not give; empty where it gave all."""
    is_of_base: bool = False
    """True if that is the blob of the chunk's base."""
    gone: str = ""
    """Name of the pack that does not exist any more: the chunk's own, or that of its base; empty where both do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One chunk that was read, or was not."""

    row: int
    """Number of the chunk; see `Shard.row`."""
    fault: ChunkFault | None = None
    """None for a chunk that is good."""
    stored: Any = b""
    """Bytes that lie there, if they were read."""
    payload: Payload | None = None
    """The chunk as another pack takes it, if the caller asked for it and it is good."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """Rows of the tables of some packs."""

    packs: tuple[str, ...]
    """Names of packs."""
    pack: Any
    """For each row a position in ``packs``."""
    entries: Entries
    """For each row its entry in that pack. A check believes nothing that it says."""
    row: Positions
    """For each row its number. Numbers are unique over all shards of one store."""

    def __len__(self) -> int:
        return len(self.row)

    def take(self, rows: Any) -> Shard:
        """Return the shard of some rows, by a mask or by positions."""
        used, pack = np.unique(self.pack[rows], return_inverse=True)
        names = tuple(self.packs[number] for number in used.tolist())
        return Shard(packs=names, pack=pack, entries=self.entries[rows], row=self.row[rows])

    @property
    def places(self) -> Places:
        """Places of its chunks."""
        found = np.ones(len(self), dtype=bool)
        return Places(found=found, pack=self.pack, packs=list(self.packs), entries=self.entries)

    @property
    def stored_bytes(self) -> int:
        """Bytes that a check reads."""
        return int(self.entries["stored_bytes"].astype(np.int64).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checked:
    """Result of the check of some shards."""

    row: Positions = field(default_factory=lambda: NO_ROWS)
    """Numbers of the rows that were checked, ascending."""
    faults: Mapping[int, ChunkFault] = field(default_factory=dict)
    """Faults by row, ascending; the other rows are good."""

    @property
    def gone(self) -> frozenset[str]:
        """Names of packs that were found gone."""
        return frozenset(fault.gone for fault in self.faults.values() if fault.gone)


def shard_of(table: Table, rows: Any = None) -> Shard:
    """Return the shard of some rows of a table, numbered as they are there; of all rows by default."""
    whole = Shard(packs=table.packs, pack=table.pack, entries=table.entries, row=np.arange(len(table)))
    return whole if rows is None else whole.take(rows)


def divide(shard: Shard, n_bytes: int = SHARD_BYTES, n_rows: int = _SHARD_ROWS) -> Iterator[Shard]:
    """Divide a shard by packs into shards of about some stored bytes, and at most about some rows.

    One pack is never divided.
    """
    n_packs = len(shard.packs)
    stored = np.bincount(shard.pack, weights=shard.entries["stored_bytes"], minlength=n_packs)
    size = np.maximum(stored / max(1, n_bytes), np.bincount(shard.pack, minlength=n_packs) / max(1, n_rows))
    number = (np.cumsum(size) - size).astype(np.int64)[shard.pack]
    order = np.argsort(number, kind="stable")
    begins = np.flatnonzero(np.diff(number[order], prepend=-1))
    for begin, end in pairwise([*begins.tolist(), len(order)]):
        yield shard.take(order[begin:end])


def part_of(prefix: Any, k: int, n: int) -> Mask:
    """Choose the k-th of n parts of all digests, from their first eight bytes. A digest is always in the same part."""
    chosen: Mask = prefix % np.uint64(n) == np.uint64(k - 1)
    return chosen


def check_chunks(
    backend: Backend, shard: Shard, *, decode: bool, on_read: Callable[[int], None] | None = None
) -> Checked:
    """Read the chunks of a shard and compare each with its digest.

    Args:
        backend: Backend of the store.
        shard: Chunks to check.
        decode: Whether to decode each chunk and compare it with its digest. Else its stored bytes are compared with the
            digest that the pack's table has of them.
        on_read: Told the size of every read, in the thread of the caller.

    Raises:
        StarvedError: This process has no memory or no files left.
    """
    entries = shard.entries
    told = on_read or (lambda n_bytes: None)
    is_sound = find_sound(backend, shard.places, p.Bases(backend).table_for(entries) if decode else None, told)
    rows = shard.row[is_sound].tolist()
    faults: dict[int, ChunkFault] = {}
    for n_read, looks in read_chunks(backend, shard.take(~is_sound), decode=decode, keep_bytes=False):
        for look in looks:
            rows.append(look.row)
            if look.fault is not None:
                faults[look.row] = look.fault
        told(n_read)
    return Checked(row=np.sort(np.array(rows, dtype=np.int64)), faults=dict(sorted(faults.items())))


def merge_checks(*checks: Checked) -> Checked:
    """Join the results of checks. Associative and commutative; of several faults of one row the largest stays."""
    faults: dict[int, ChunkFault] = {}
    for check in checks:
        for row, fault in check.faults.items():
            faults[row] = max(fault, faults.get(row, fault))
    rows = np.unique(np.concatenate([NO_ROWS, *(check.row for check in checks)]))
    return Checked(row=rows, faults=dict(sorted(faults.items())))


Give = Callable[[int, Any, memoryview], Payload]
"""Function that makes a payload of the number, the entry and the bytes of a good chunk, in the reading thread."""


def read_chunks(
    backend: Backend,
    shard: Shard,
    *,
    decode: bool = True,
    window: int = _WINDOW,
    bases: p.Bases | None = None,
    give: Give | None = None,
    probe: Callable[[str], Any] = lambda key: None,
    is_strict: bool = False,
    keep_bytes: bool = True,
) -> Iterator[tuple[int, list[Look]]]:
    """Read chunks, some MiB at a time, and compare each with its digest.

    Args:
        backend: Backend of the store.
        shard: Chunks to read.
        decode: See `check_chunks`.
        window: Reads under way at once.
        bases: Bases that were read before.
        give: Makes a payload of each good chunk.
        probe: Called with the key of a pack when one chunk of it cannot be read. It raises if the storage does not
            answer at all, so that nothing is said of the chunk.
        is_strict: Whether to raise if the storage fails, and not to judge the other chunks.
        keep_bytes: Whether a `Look` holds the stored bytes. Without them the memory of a read is reused at once.

    Yields:
        For each read its bytes and its chunks, by pack and in the order in which they lie there. Before these, the
        chunks that are not read.

    Raises:
        StarvedError: This process has no memory or no files left.
        BackendError: The storage failed, and ``is_strict`` is set.
    """
    entries = shard.entries
    unread = list(_not_read(shard, decode=decode))
    if unread:
        yield 0, unread
    is_read = np.ones(len(shard), dtype=bool)
    is_read[np.isin(shard.row, [look.row for look in unread])] = False
    rows = np.flatnonzero(is_read)
    bases = p.Bases(backend) if bases is None else bases

    def look_at(at: int, stored: memoryview, key: str, is_sound: bool) -> Look:
        row, fault = int(shard.row[at]), None
        if not is_sound:
            fault = _fault_in(entries[at], stored, bases if decode else None)
        if fault is None and give is not None:
            try:
                return Look(row=row, stored=stored, payload=give(row, entries[at], stored))
            except BlobNotFoundError as error:
                fault = _baseless(entries[at], stored, error)
            except BackendError as error:
                fault = _unread_base(error)
        if fault is not None and fault.verdict is Verdict.FAILED:
            probe(key)
        return Look(row=row, fault=fault, stored=stored if keep_bytes else b"")

    def read_extent(place: tuple[int, int, int, Any]) -> tuple[int, list[Look]]:
        number, start, stop, members = place
        key, block = pack_key(shard.packs[number]), np.empty(stop - start, dtype=np.uint8).data
        try:
            backend.read_into(key, start, block)
        except BlobNotFoundError:
            gone = ChunkFault(verdict=Verdict.GONE, reason="its pack is gone", gone=shard.packs[number])
            return 0, [Look(row=int(shard.row[at]), fault=gone) for at in members.tolist()]
        except (CorruptError, BackendError) as error:
            if isinstance(error, StarvedError) or (is_strict and isinstance(error, BackendError)):
                raise
            if len(members) > 1:
                # One bad sector of a disk is no reason to call all that lies near it damaged.
                parts = [read_extent((number, *_span(entries[at]), np.array([at]))) for at in members.tolist()]
                return sum(n for n, _ in parts), [look for _, looks in parts for look in looks]
            probe(key)
            verdict = Verdict.BAD if isinstance(error, CorruptError) else Verdict.FAILED
            fault = ChunkFault(verdict=verdict, reason=f"it cannot be read: {error.reason}", key=key)
            return 0, [Look(row=int(shard.row[at]), fault=fault) for at in members.tolist()]
        looks = []
        begins = entries["offset"][members].astype(np.int64) - start
        is_sound = (
            screen.find_sound(shard.take(members).places, block, begins) if decode else np.zeros(len(members), bool)
        )
        for at, sound in zip(members.tolist(), is_sound.tolist(), strict=True):
            begin, end = _span(entries[at])
            looks.append(look_at(at, block[begin - start : end - start], key, sound))
        return len(block), looks

    plan = plan_reads(shard.pack[rows], entries["offset"][rows], entries["stored_bytes"][rows])
    places = ((extent.pack, extent.start, extent.stop, rows[extent.members]) for extent in plan)
    table = bases.table_for(entries[rows]) if decode and not backend.is_remote else EMPTY
    with BlockScreen(backend, table) as screen:
        yield from threads.ordered_map(read_extent, places, window=window, waits=backend.is_remote)


def _not_read(shard: Shard, *, decode: bool) -> Iterator[Look]:
    """Judge the chunks that cannot be what their entries say."""
    entries = shard.entries
    fits = is_possible(entries)
    for at in np.flatnonzero(~fits).tolist():
        fault = ChunkFault(verdict=Verdict.BAD, reason=sizes_text(entries[at]))
        yield Look(row=int(shard.row[at]), fault=fault)
    if not decode:
        return
    for at in np.flatnonzero(fits & ~np.isin(entries["codec"], list(CODECS))).tolist():
        # The table says so, and hashes to its digest: most likely a later release wrote the chunk, and can read it.
        said = f"no codec has the number {entries['codec'][at]}: a later release of tensorcas-mlflow may read it"
        yield Look(row=int(shard.row[at]), fault=ChunkFault(verdict=Verdict.FAILED, reason=said))


def _fault_in(entry: Any, stored: memoryview, bases: p.Bases | None) -> ChunkFault | None:
    """Compare a chunk with its digest, or without ``bases`` its stored bytes with theirs."""
    if bases is None:
        return _changed(entry, stored)
    try:
        base = bases.of(entry)
    except StarvedError:
        raise
    except BackendError as error:
        return _unread_base(error)
    except (NotFoundError, FormatError) as error:
        return _baseless(entry, stored, error)
    try:
        decode_chunk(entry, stored, base)
    except FormatError as error:
        return ChunkFault(verdict=Verdict.BAD, reason=str(error))
    # Changed bytes may decode all the same, and another release of Zstandard may refuse them. The bytes of a raw chunk
    # are its digest's own; an entry made of a hint names no digest of them.
    is_told = int(entry["codec"]) != RAW.number and bool(entry["stored_digest"].any())
    return _changed(entry, stored) if is_told else None


def _changed(entry: Any, stored: memoryview) -> ChunkFault | None:
    """Compare the stored bytes of a chunk with the digest that the table of its pack has of them."""
    actual, wanted = digest(stored)[:STORED_DIGEST_BYTES], entry["stored_digest"].tobytes()
    if actual == wanted:
        return None
    said = f"its stored bytes hash to {actual.hex()}, and the table says {wanted.hex()}"
    return ChunkFault(verdict=Verdict.BAD, reason=said)


def _unread_base(error: BackendError) -> ChunkFault:
    reason = f"its base cannot be read: {error.reason}"
    return ChunkFault(verdict=Verdict.FAILED, reason=reason, key=error.key, is_of_base=True)


def _baseless(entry: Any, stored: memoryview, error: NotFoundError | FormatError) -> ChunkFault:
    is_as_written = digest(stored)[:STORED_DIGEST_BYTES] == entry["stored_digest"].tobytes()
    return ChunkFault(
        verdict=Verdict.BASELESS if is_as_written else Verdict.BAD,
        reason=f"it is a delta, and its base is lost: {error}",
        gone=pack_name(error.key) if isinstance(error, BlobNotFoundError) else "",
    )


def _span(entry: Any) -> tuple[int, int]:
    start = int(entry["offset"])
    return start, start + int(entry["stored_bytes"])
