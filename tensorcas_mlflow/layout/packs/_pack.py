"""Packs: immutable blobs of many encoded chunks, with a table of them (``docs/format.md``, Packs)."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Buffer, digest
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.tensors import MAX_CHUNK_BYTES
from tensorcas_mlflow.codecs import MOST_OVERHEAD_BYTES, RAW
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CorruptError,
    FormatError,
    NewerFormatError,
)
from tensorcas_mlflow.layout._keys import list_blobs

if TYPE_CHECKING:
    from tensorcas_mlflow.codecs import Codec

PACK_MAGIC = b"\x89TCPK\r\n\x01"
TABLE_MAGIC = b"TCPTBL\r\x01"
TABLE_MAGIC_2 = b"TCPTBL\r\x02"
_VERSION = TABLE_MAGIC_2[-1]
RAW_ALIGNMENT = 64
STORED_DIGEST_BYTES = 16
PACK_NAME_BYTES = 16
MAX_ENTRIES = 1 << 24
TARGET_BYTES = 256 << 20
"""A writer ends a pack when its payloads reach this size, and begins the next."""

TABLE_ENTRY = np.dtype(
    [
        ("digest", "u1", (DIGEST_BYTES,)),
        ("stored_digest", "u1", (STORED_DIGEST_BYTES,)),
        ("offset", "<u8"),
        ("stored_bytes", "<u4"),
        ("raw_bytes", "<u4"),
        ("codec", "u1"),
        ("typesize", "u1"),
        ("depth", "u1"),
        ("effort", "u1"),
    ]
)
"""An entry in its form in a table."""
_BASE_FIELDS = [("base_pack", "u1", (PACK_NAME_BYTES,)), ("base_digest", "u1", (DIGEST_BYTES,))]
ENTRY = np.dtype([*TABLE_ENTRY.descr, *_BASE_FIELDS])
"""An entry, and for a delta its base; zeros for other chunks."""
Entries = np.ndarray[Any, np.dtype[np.void]]
"""Entries of a pack's table, of dtype `ENTRY`. `take` selects some 20 times as fast as brackets, which go by field."""

_BASE = np.dtype([("row", "<u4"), *_BASE_FIELDS])
"""The base of one entry, in a table of version 2."""
TABLE_BASE_BYTES = _BASE.itemsize
DELTA = 3
"""The number of the codec `delta`: the only one with another chunk needed for decoding."""
MAX_DEPTH = 64
"""Decoding a chunk needs at most so many others."""

_FOOTER = struct.Struct("<8sIIQII32s")
FOOTER_BYTES = _FOOTER.size


class Base(NamedTuple):
    """Base of a delta: the copy of a chunk in one pack."""

    pack: str
    digest: bytes
    depth: int = 0
    """Number of other chunks needed to decode that copy; 0 if it is stored in full."""


class Payload(NamedTuple):
    """One encoded chunk on its way into a pack."""

    digest: bytes
    raw_bytes: int
    codec: Codec
    typesize: int
    data: Buffer
    begins_row: bool
    """True if this is the first chunk written of its tensor: a raw one is then aligned, so it can be memory-mapped."""
    base: Base | None = None
    """Base of a delta; None for other chunks."""
    effort: int = 0
    """Encoding effort: 0 for a save, more for `tensorcas optimize`, which leaves chunks of its own effort alone."""


class PayloadGroup(NamedTuple):
    """Encoded chunks on their way into a pack, laid out by their encoder: a writer need not look at each."""

    entries: Entries
    """One a chunk, in the order of the bytes; offsets count from the beginning of the group."""
    parts: Sequence[Buffer]
    """The bytes, one part after the other."""
    n_bytes: int
    """Size of all parts."""
    is_aligned: bool
    """True if the group has to begin at a multiple of `RAW_ALIGNMENT`, because a raw tensor begins in it."""


Packed = Payload | PayloadGroup
"""Input of a pack writer."""


class PackWriter:
    """Writer of one pack: yields its bytes in order, and has its table after the last one."""

    def __init__(self) -> None:
        self._tables: list[Entries] = []
        self._rows: list[tuple[bytes, bytes, int, int, int, int, int, int, int]] = []
        """Rows not yet in a table."""
        self._bases: dict[int, Base] = {}
        """Bases of the rows that are deltas, by row number."""
        self.n_bytes = 0

    def pieces(self, payloads: Iterable[Packed]) -> Iterator[Buffer]:
        """Yield a pack's bytes, holding one payload or group at a time."""
        yield PACK_MAGIC
        at = len(PACK_MAGIC)
        for payload in payloads:
            gap = -at % RAW_ALIGNMENT if _is_aligned(payload) else 0
            if gap:
                yield bytes(gap)
                at += gap
            if isinstance(payload, PayloadGroup):
                self._add_group(payload, at)
                yield from payload.parts
                at += payload.n_bytes
            else:
                self._add(payload, at)
                yield payload.data
                at += memoryview(payload.data).nbytes
        entries = self.entries()
        n_bases = int(is_delta(entries).sum())
        magic = TABLE_MAGIC_2 if n_bases else TABLE_MAGIC
        table = _table_bytes(entries)
        head = _FOOTER.pack(magic, TABLE_ENTRY.itemsize, len(entries), at, n_bases, 0, b"")[:32]
        yield table
        yield head + digest(table + head)
        self.n_bytes = at + len(table) + FOOTER_BYTES

    def entries(self) -> Entries:
        """Return the table so far."""
        self._end_table()
        if len(self._tables) != 1:
            self._tables = [np.concatenate([np.zeros(0, dtype=ENTRY), *self._tables])]
        return self._tables[0]

    def _add_group(self, group: PayloadGroup, at: int) -> None:
        self._end_table()
        entries = group.entries.copy()
        entries["offset"] += at
        self._tables.append(entries)

    def _add(self, payload: Payload, at: int) -> None:
        stored = payload.digest if payload.codec is RAW else digest(payload.data)
        if payload.base is not None:
            self._bases[len(self._rows)] = payload.base
        self._rows.append(
            (
                payload.digest,
                stored[:STORED_DIGEST_BYTES],
                at,
                memoryview(payload.data).nbytes,
                payload.raw_bytes,
                payload.codec.number,
                payload.typesize,
                0 if payload.base is None else payload.base.depth + 1,
                payload.effort,
            )
        )

    def _end_table(self) -> None:
        """Move the open rows into a table."""
        if not self._rows:
            return
        columns = list(zip(*self._rows, strict=True))
        out = np.zeros(len(self._rows), dtype=ENTRY)
        out["digest"] = np.frombuffer(b"".join(columns[0]), np.uint8).reshape(-1, 32)
        out["stored_digest"] = np.frombuffer(b"".join(columns[1]), np.uint8).reshape(-1, STORED_DIGEST_BYTES)
        for field, column in zip(_NUMBERS, columns[2:], strict=True):
            out[field] = column
        for row, base in self._bases.items():
            out["base_pack"][row] = np.frombuffer(bytes.fromhex(base.pack), np.uint8)
            out["base_digest"][row] = np.frombuffer(base.digest, np.uint8)
        self._rows.clear()
        self._bases.clear()
        self._tables.append(out)


_NUMBERS = ("offset", "stored_bytes", "raw_bytes", "codec", "typesize", "depth", "effort")


def _is_aligned(payload: Packed) -> bool:
    if isinstance(payload, PayloadGroup):
        return payload.is_aligned
    return payload.codec is RAW and payload.begins_row


def _table_bytes(entries: Entries) -> bytes:
    """Write a table: every entry without its base, and then the bases of the deltas."""
    rows = entries.view(np.uint8).reshape(-1, ENTRY.itemsize)[:, : TABLE_ENTRY.itemsize]
    deltas = is_delta(entries).nonzero()[0]
    bases = np.zeros(len(deltas), dtype=_BASE)
    bases["row"] = deltas
    for field in ("base_pack", "base_digest"):
        bases[field] = entries[field][deltas]
    return rows.tobytes() + bases.tobytes()


def as_rows(entries: Entries) -> Any:
    """View entries as plain values: assigning such values moves whole entries."""
    return entries.view(f"V{ENTRY.itemsize}")


def is_delta(entries: Entries) -> Any:
    """Return for each entry whether it is a delta, and so readable only with its base."""
    return entries["codec"] == DELTA


def has_depth(deltas: Entries) -> Any:
    """Return for each of these deltas whether its depth is possible."""
    return (deltas["depth"] > 0) & (deltas["depth"] <= MAX_DEPTH)


def is_possible(entries: Entries) -> Any:
    """Return for each foreign entry whether a chunk and its payload can have the stated sizes.

    Every reader asks this before an entry costs memory, and before the compiled core gets it. A chunk and its payload
    have at least one byte.
    """
    raw, stored = entries["raw_bytes"].astype(np.int64), entries["stored_bytes"].astype(np.int64)
    most = np.where(entries["codec"] == RAW.number, raw, 2 * raw + MOST_OVERHEAD_BYTES)
    least = np.where(entries["codec"] == RAW.number, raw, 1)
    return (raw > 0) & (raw <= MAX_CHUNK_BYTES) & (least <= stored) & (stored <= most)


def sizes_text(entry: Any) -> str:
    """Return the sizes that an entry states, in words."""
    return f"its entry states {entry['raw_bytes']} bytes in {entry['stored_bytes']}"


def bases_of(deltas: Entries) -> list[Base]:
    """Return the bases of these deltas."""
    packs = deltas["base_pack"].tobytes().hex()
    digests = np.ascontiguousarray(deltas["base_digest"])
    step = 2 * PACK_NAME_BYTES
    return [
        Base(pack=packs[at * step : (at + 1) * step], digest=digests[at].tobytes(), depth=depth - 1)
        for at, depth in enumerate(deltas["depth"].tolist())
    ]


def is_base_of(delta: Any, base: Any) -> bool:
    """Tell whether an entry can be a delta's base: depths descend, so no chain is long and none is a ring."""
    return int(base["depth"]) < int(delta["depth"]) <= MAX_DEPTH


def read_table(key: str, size: int, read: Callable[[int, int], Buffer]) -> Entries:
    """Read a pack's table.

    Args:
        key: The pack's key, for errors.
        size: The pack's size in bytes.
        read: Called with a start and a stop; returns those bytes of the pack.

    Raises:
        CorruptError: The pack is truncated or damaged.
        NewerFormatError: A later release wrote it.
    """
    if size < len(PACK_MAGIC) + FOOTER_BYTES:
        raise CorruptError(key, f"a pack cannot have only {size} bytes")
    footer = bytes(read(size - FOOTER_BYTES, size))
    magic, entry_bytes, n_entries, offset, n_bases, _, wanted = _FOOTER.unpack(footer)
    if magic not in (TABLE_MAGIC, TABLE_MAGIC_2):
        if magic[:-1] == TABLE_MAGIC[:-1] and magic[-1] > _VERSION and not _would_be_ours(footer, size, read):
            raise NewerFormatError(f"the pack {key!r}", magic[-1], _VERSION)
        raise CorruptError(key, "it does not end with a pack's footer")
    if magic == TABLE_MAGIC:
        n_bases = 0
    if entry_bytes < TABLE_ENTRY.itemsize or n_entries > MAX_ENTRIES or n_bases > n_entries:
        raise CorruptError(key, "its footer states impossible sizes")
    table_bytes = entry_bytes * n_entries
    if offset + table_bytes + _BASE.itemsize * n_bases != size - FOOTER_BYTES:
        raise CorruptError(key, "its table does not end where its footer begins")
    table = bytes(read(offset, size - FOOTER_BYTES))
    if digest(table + footer[:32]) != wanted:
        raise CorruptError(key, "its table does not hash to the digest in its footer")
    rows = np.zeros((n_entries, ENTRY.itemsize), np.uint8)
    said = np.frombuffer(table, dtype=np.uint8, count=table_bytes).reshape(n_entries, entry_bytes)
    rows[:, : TABLE_ENTRY.itemsize] = said[:, : TABLE_ENTRY.itemsize]
    entries: Entries = rows.view(ENTRY).ravel()
    _put_bases(key, entries, np.frombuffer(table, dtype=_BASE, offset=table_bytes))
    ends = entries["offset"] + entries["stored_bytes"]
    if n_entries and (
        entries["offset"].min() < len(PACK_MAGIC) or ends.max() > offset or (ends < entries["offset"]).any()
    ):
        raise CorruptError(key, "its table points outside of it")
    return entries


def _put_bases(key: str, entries: Entries, bases: Any) -> None:
    """Put bases into the entries of a table; exactly the deltas must have one."""
    deltas = np.flatnonzero(is_delta(entries))
    if len(deltas) != len(bases) or (deltas != bases["row"]).any() or not has_depth(entries[deltas]).all():
        raise CorruptError(key, "its table does not name the bases of its deltas")
    for field in ("base_pack", "base_digest"):
        entries[field][deltas] = bases[field]


def _would_be_ours(footer: bytes, size: int, read: Callable[[int, int], Buffer]) -> bool:
    """Tell whether a pack is intact except for the version in its footer: the version is then damaged, not later."""
    _, entry_bytes, n_entries, offset, n_bases, _, wanted = _FOOTER.unpack(footer)
    end = size - FOOTER_BYTES
    table_bytes = entry_bytes * n_entries
    if n_entries > MAX_ENTRIES or offset > end or end - offset - table_bytes not in (0, _BASE.itemsize * n_bases):
        return False
    table, rest = bytes(read(offset, end)), footer[len(TABLE_MAGIC) : 32]
    return any(digest(table + magic + rest) == bytes(wanted) for magic in (TABLE_MAGIC, TABLE_MAGIC_2))


def decode_chunk(entry: Any, stored: Buffer, base: Buffer | None = None) -> Buffer:
    """Decode a stored chunk; a raw one is not copied.

    Args:
        entry: Entry of a pack's table; nothing in it is trusted.
        stored: The bytes at the entry's place.
        base: For a delta, its decoded base.

    Raises:
        FormatError: The bytes do not decode to the entry's chunk.
    """
    n_raw = int(entry["raw_bytes"])
    if not is_possible(entry) or len(stored) != entry["stored_bytes"]:
        raise FormatError(sizes_text(entry))
    raw = stored
    if int(entry["codec"]) != RAW.number:
        from tensorcas_mlflow.codecs import codec_numbered  # the compiled core decodes without these modules

        raw = memoryview(bytearray(n_raw))
        codec_numbered(int(entry["codec"])).decode_into(stored, raw, base)
    actual = digest(raw)
    if actual != entry["digest"].tobytes():
        raise FormatError(f"its bytes hash to {actual.hex()}")
    return raw


def payload_of(entry: Any, stored: Any, *, begins_row: bool) -> Payload:
    """Return a verified chunk in the form another pack takes."""
    from tensorcas_mlflow.codecs import codec_numbered

    [base] = bases_of(entry.reshape(1)) if is_delta(entry) else [None]
    return Payload(
        digest=entry["digest"].tobytes(),
        raw_bytes=int(entry["raw_bytes"]),
        codec=codec_numbered(int(entry["codec"])),
        typesize=int(entry["typesize"]),
        data=stored,
        begins_row=begins_row,
        base=base,
        effort=int(entry["effort"]),
    )


def pack_key(name: str) -> str:
    """Return the key of a pack."""
    return f"packs/{name}.pack"


def pack_name(key: str) -> str:
    """Return the name of the pack at a key; see `pack_key`."""
    return key.removeprefix("packs/").removesuffix(".pack")


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
    try:
        if backend.has_database:
            backend.put_all([(key, [])])  # in the transaction of the pack
        else:
            backend.put_new(key, [], durable=False)
    except BlobExistsError:
        return
