"""Decoding of many chunks in one call: the plan of a batch in columns, and the call of the compiled core.

A *part* is the work of one thread at a time: some stretches of packs to read, and the chunks to decode from them. The
core takes a whole batch of parts. Where a chunk fails, `decode_chain` decodes it link by link and names the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import Buffer, Digests, digest
from tensorcas_mlflow.base.tensors import offsets_of, ranges
from tensorcas_mlflow.chunk_io._places import Places
from tensorcas_mlflow.chunk_io._plan import Target
from tensorcas_mlflow.codecs import RAW
from tensorcas_mlflow.errors import BlobNotFoundError, FormatError
from tensorcas_mlflow.layout.packs import bases_of, is_delta, pack_key
from tensorcas_mlflow.native import core

READ = np.dtype([("start", "<u8"), ("n_bytes", "<u8"), ("source", "<i4"), ("kind", "<u4")])
LINK = np.dtype(
    [
        ("begin", "<u8"),
        ("n_stored", "<u4"),
        ("read", "<u4"),
        ("n_bytes", "<u4"),
        ("codec", "<u2"),
        ("checks", "<u2"),
        ("stored_digest", "u1", (16,)),
    ]
)
CHUNK = np.dtype(
    [
        ("start", "<u8"),
        ("block", "<u4"),
        ("n_bytes", "<u4"),
        ("first_link", "<u4"),
        ("n_links", "<u4"),
        ("digest", "u1", (32,)),
    ]
)
PART = np.dtype([("first_read", "<u4"), ("last_read", "<u4"), ("first_chunk", "<u4"), ("last_chunk", "<u4")])
MEMORY, FILE, DIRECT = range(3)
"""Kinds of reads: bytes in memory, and reads of a descriptor, the last of one opened with O_DIRECT."""
NOWHERE = 0xFFFFFFFF
"""The block of a chunk that is verified and not kept."""


class Wanted(NamedTuple):
    """Chunks to read, and the place of each."""

    digests: Digests
    target: Target
    verify: bool
    checks_stored: bool = False
    """True if the core also compares the stored bytes of each with their own digest. Damaged bytes may decode to the
    chunk all the same, and another release of Zstandard may refuse them."""

    def some(self, chunks: Any) -> Wanted:
        """Return some of them, by number."""
        return self._replace(digests=self.digests[chunks], target=self.target.some(chunks))


class ChainLinks(NamedTuple):
    """The links of the chains of some chunks: every stored chunk needed to decode them."""

    places: Places
    """Places of all links: those of one chunk after the other, each beginning with the chunk itself, then its base,
    then the base of that."""
    begins: Any
    """For each chunk the number of its first link; and at the end the number of all."""

    @classmethod
    def of(cls, levels: Sequence[Places]) -> ChainLinks:
        """Put the links of each chunk together.

        Args:
            levels: First the chunks, each of which is found; then their bases, and so on, as `follow` returns them.

        Raises:
            BlobNotFoundError: A pack lacks the base a delta names, as far as is known.
        """
        for level, bases in pairwise(levels):
            lost = level.found & is_delta(level.entries) & ~bases.found
            if lost.any():
                raise BlobNotFoundError(pack_key(bases_of(level.entries[lost])[0].pack))
        if len(levels) == 1:
            return cls(places=levels[0], begins=np.arange(len(levels[0].found) + 1))
        rows = [np.flatnonzero(level.found) for level in levels]
        chain = np.concatenate(rows)
        parts = [
            level.some(mine) if len(mine) < len(level.found) else level
            for level, mine in zip(levels, rows, strict=True)
        ]
        places = Places.joined(parts).some(np.argsort(chain, kind="stable"))
        return cls(places=places, begins=offsets_of(np.bincount(chain, minlength=len(levels[0].found))))

    def some(self, chunks: Any) -> ChainLinks:
        """Return the links of some chunks, by number."""
        numbers, counts = self.of_chunks(chunks)
        return ChainLinks(places=self.places.some(numbers), begins=offsets_of(counts))

    def of_chunks(self, chunks: Any) -> tuple[Any, Any]:
        """Return the numbers of the links of some chunks, and how many each chunk has."""
        counts = self.begins[chunks + 1] - self.begins[chunks]
        return ranges(self.begins[chunks], counts), counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Batch:
    """Parts to read and decode, in columns; those of one part are neighbours."""

    chunks: Any
    """Numbers of the wanted chunks."""
    n_links: Any
    """Links of each chunk."""
    links: Any
    """Numbers of the links, chunk by chunk."""
    link_read: Any
    """For each link the number of its read."""
    link_begin: Any
    """For each link its start in the read."""
    read_pack: Any
    """For each read the number of its pack."""
    read_start: Any
    read_stop: Any
    """For each read its range of the pack."""
    part_chunk: Any
    """For each part the position of its first chunk; and at the end the number of chunks."""
    part_read: Any
    """For each part the number of its first read; and at the end the number of reads."""

    @classmethod
    def of(cls, links: ChainLinks, chunks: Any, part: Any, gap_bytes: int) -> Batch:
        """Plan the reads of some parts.

        Args:
            links: The links of all wanted chunks.
            chunks: Numbers of the chunks, those of one part together.
            part: For each chunk the number of its part, ascending.
            gap_bytes: Links of one part nearer to each other than this are read together.
        """
        numbers, counts = links.of_chunks(chunks)
        of_part = np.repeat(part, counts)
        entries, pack = links.places.entries, links.places.pack[numbers]
        start = entries["offset"][numbers].astype(np.int64)
        stop = start + entries["stored_bytes"][numbers]
        order = np.lexsort((start, pack, of_part))
        part_of, pack_of, starts, stops = of_part[order], pack[order], start[order], stop[order]
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = (part_of[1:] != part_of[:-1]) | (pack_of[1:] != pack_of[:-1])
        is_first[1:] |= starts[1:] > stops[:-1] + gap_bytes
        firsts = np.flatnonzero(is_first)
        link_read = np.empty(len(order), dtype=np.int64)
        link_read[order] = np.cumsum(is_first) - 1
        read_start = starts[firsts]
        n_parts = int(part[-1]) + 1 if len(part) else 0
        return cls(
            chunks=chunks,
            n_links=counts,
            links=numbers,
            link_read=link_read,
            link_begin=start - read_start[link_read],
            read_pack=pack_of[firsts],
            read_start=read_start,
            read_stop=np.maximum.reduceat(stops, firsts) if len(firsts) else stops,
            part_chunk=np.searchsorted(part, np.arange(n_parts + 1)),
            part_read=np.searchsorted(part_of[firsts], np.arange(n_parts + 1)),
        )

    @classmethod
    def of_buffers(
        cls, chunks: Any, n_links: Any, links: Any, buffer: Any, begin: Any, buffers: Sequence[Buffer]
    ) -> Batch:
        """Make one part of chunks whose stored bytes are in memory.

        Args:
            chunks: Numbers of the chunks.
            n_links: Links of each.
            links: Numbers of the links, chunk by chunk.
            buffer: For each link the number of its buffer.
            begin: For each link its start in the buffer.
            buffers: The stored bytes.
        """
        none = np.zeros(len(buffers), np.int64)
        return cls(
            chunks=chunks,
            n_links=n_links,
            links=links,
            link_read=buffer,
            link_begin=begin,
            read_pack=none,
            read_start=none,
            read_stop=np.array([len(each) for each in buffers], dtype=np.int64),
            part_chunk=np.array([0, len(chunks)]),
            part_read=np.array([0, len(buffers)]),
        )

    def __len__(self) -> int:
        return len(self.part_chunk) - 1

    def some(self, first: int, stop: int) -> Batch:
        """Return consecutive parts."""
        chunk, last_chunk = int(self.part_chunk[first]), int(self.part_chunk[stop])
        read, last_read = int(self.part_read[first]), int(self.part_read[stop])
        link, last_link = int(self.n_links[:chunk].sum()), int(self.n_links[:last_chunk].sum())
        return Batch(
            chunks=self.chunks[chunk:last_chunk],
            n_links=self.n_links[chunk:last_chunk],
            links=self.links[link:last_link],
            link_read=self.link_read[link:last_link] - read,
            link_begin=self.link_begin[link:last_link],
            read_pack=self.read_pack[read:last_read],
            read_start=self.read_start[read:last_read],
            read_stop=self.read_stop[read:last_read],
            part_chunk=self.part_chunk[first : stop + 1] - chunk,
            part_read=self.part_read[first : stop + 1] - read,
        )


def decode(
    links: ChainLinks,
    wanted: Wanted,
    batch: Batch,
    *,
    source: Any,
    kind: Any = MEMORY,
    buffers: Sequence[Buffer] = (),
    n_threads: int = 1,
) -> Any:
    """Read, decode and verify a batch with the compiled core.

    Args:
        links: The links of all wanted chunks.
        wanted: All wanted chunks. A chunk that fails leaves its memory untouched. A target without memory keeps none.
        batch: The parts.
        source: For each read its descriptor, -1 for a file that could not be opened, or the number of its buffer.
        kind: `MEMORY`, `FILE` or `DIRECT`, for each read or for all.
        buffers: The bytes of the reads of kind `MEMORY`, each from the start of its read on.
        n_threads: Threads to use, the caller included.

    Returns:
        Numbers of the chunks that failed. The core names no reason.
    """
    tables = tables_of(links, wanted, batch, source=source, kind=kind)
    statuses = core.decode(*tables, buffers, wanted.target.blocks, wanted.verify, n_threads)
    return batch.chunks[np.flatnonzero(np.frombuffer(statuses, np.uint8))]


def tables_of(
    links: ChainLinks, wanted: Wanted, batch: Batch, *, source: Any, kind: Any = MEMORY
) -> tuple[Any, Any, Any, Any]:
    """Return the reads, links, chunks and parts of a batch, as the core reads them; see `decode`."""
    reads = np.empty(len(batch.read_pack), dtype=READ)
    reads["start"] = np.where(np.equal(kind, MEMORY), 0, batch.read_start)
    reads["n_bytes"] = batch.read_stop - batch.read_start
    reads["source"], reads["kind"] = source, kind
    entries = links.places.entries
    table = np.zeros(len(batch.links), dtype=LINK)
    table["begin"], table["read"] = batch.link_begin, batch.link_read
    table["n_stored"], table["codec"] = entries["stored_bytes"][batch.links], entries["codec"][batch.links]
    table["n_bytes"] = entries["raw_bytes"][batch.links]
    chunks = np.empty(len(batch.chunks), dtype=CHUNK)
    target = wanted.target
    chunks["start"] = target.start[batch.chunks]
    chunks["block"] = target.block[batch.chunks] if target.blocks else NOWHERE
    chunks["n_bytes"], chunks["n_links"] = target.n_bytes[batch.chunks], batch.n_links
    chunks["first_link"] = batch.n_links.cumsum() - batch.n_links
    table["n_bytes"][chunks["first_link"]] = chunks["n_bytes"]
    chunks["digest"] = wanted.digests[batch.chunks]
    if wanted.checks_stored:
        firsts = chunks["first_link"]
        table["checks"][firsts] = table["codec"][firsts] != RAW.number  # the chunk's own digest is of these bytes
        table["stored_digest"] = entries["stored_digest"][batch.links]
    parts = np.empty(len(batch), dtype=PART)
    parts["first_read"], parts["last_read"] = batch.part_read[:-1], batch.part_read[1:]
    parts["first_chunk"], parts["last_chunk"] = batch.part_chunk[:-1], batch.part_chunk[1:]
    return reads, table, chunks, parts


class Fault(NamedTuple):
    """The faulty link of a chain."""

    number: int
    """Its position: 0 for the chunk itself, 1 for its base."""
    reason: str


def decode_chain(entries: Any, stored: Sequence[Buffer], expected: bytes | None, n_bytes: int) -> Buffer | Fault:
    """Decode one chunk, link by link, in memory of its own.

    Args:
        entries: The entries of its links, its own first.
        stored: The stored bytes of each.
        expected: The digest of the chunk; None skips verification.
        n_bytes: The size of the chunk.
    """
    if n_bytes == 0:
        return Fault(number=0, reason="a chunk has at least one byte")
    made = _decode_links(entries, stored, n_bytes, None)
    if isinstance(made, Fault) or (expected is not None and digest(made) != expected):
        # Now each link is compared with its digest, since a wrong base shows only in the result.
        expected_of = [expected or entries["digest"][0].tobytes(), *map(bytes, entries["digest"][1:])]
        again = _decode_links(entries, stored, n_bytes, expected_of)
        assert isinstance(again, Fault), "what fails once fails again"
        return again
    return made


def _decode_links(entries: Any, stored: Sequence[Buffer], n_bytes: int, digests: list[bytes] | None) -> Buffer | Fault:
    made: Buffer | None = None
    for number in range(len(stored) - 1, -1, -1):
        try:
            size = int(entries["raw_bytes"][number]) if number else n_bytes
            made = _decode_link(int(entries["codec"][number]), stored[number], size, made)
        except FormatError as error:
            return Fault(number=number, reason=str(error))
        if digests is not None and (actual := digest(made)) != digests[number]:
            return Fault(number=number, reason=f"its bytes hash to {actual.hex()}")
    assert made is not None
    return made


def _decode_link(number: int, stored: Buffer, n_bytes: int, base: Buffer | None) -> Buffer:
    from tensorcas_mlflow.codecs import codec_numbered  # the compiled core decodes without these modules

    codec = codec_numbered(number)
    if codec is RAW and len(stored) == n_bytes:
        return stored
    out = memoryview(bytearray(n_bytes))
    codec.decode_into(stored, out, base)
    return out
