"""Decoding of stored bytes into place, and verification of their digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.codecs import MOST_OVERHEAD_BYTES, RAW, codec_numbered
from tensorcas_mlflow.digest import Digests, digest
from tensorcas_mlflow.errors import BackendError, FormatError
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.store._lookup import Places
from tensorcas_mlflow.store._target import Target
from tensorcas_mlflow.store._tasks import Task

Stored = Sequence[memoryview | None]
"""Result of a read, strip by strip; None for a strip already in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Chunks to read, and the place of each."""

    digests: Digests
    target: Target
    verify: bool

    def some(self, chunks: Any) -> Wanted:
        """Return some of them, by number."""
        return Wanted(digests=self.digests[chunks], target=self.target.some(chunks), verify=self.verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An unreadable or damaged copy of a chunk."""

    chunk: int
    """Its number among the wanted chunks."""
    key: str
    """Key of the pack."""
    reason: str
    error: BackendError | None = None
    """The storage's error, if the storage failed."""
    base: bytes | None = None
    """Digest of the base, if the damage is in the base, in the pack of ``key``."""


def check_sizes(places: Places, wanted: Wanted) -> list[Damage]:
    """Return the chunks with impossible entries, before an entry costs memory."""
    sizes = wanted.target.n_bytes
    raw_bytes, stored_bytes = places.entries["raw_bytes"], places.entries["stored_bytes"].astype(np.int64)
    is_raw = places.entries["codec"] == RAW.number
    wrong = (raw_bytes != sizes) | (is_raw & (stored_bytes != sizes)) | (stored_bytes > 2 * sizes + MOST_OVERHEAD_BYTES)
    return [
        Damage(
            chunk=at,
            key=pack_key(places.packs[int(places.pack[at])]),
            reason=f"its entry states {raw_bytes[at]} bytes in {stored_bytes[at]}, the manifest {sizes[at]}",
        )
        for at in np.flatnonzero(wrong).tolist()
    ]


def take(task: Task, stored: Stored, places: Places, wanted: Wanted) -> list[Damage]:
    """Decode a read into place, and verify it; return the damage. No chunk may be a delta.

    Args:
        task: The task of the read.
        stored: Its stored bytes.
        places: Places of all wanted chunks.
        wanted: All wanted chunks.
    """
    damaged = _decode(task, stored, places, wanted.target)
    if not wanted.verify:
        return damaged
    return damaged + _check(task, wanted, {damage.chunk for damage in damaged})


def _decode(task: Task, stored: Stored, places: Places, target: Target) -> list[Damage]:
    damaged: list[Damage] = []
    for strip, data in zip(task.strips, stored, strict=True):
        if data is None:
            continue
        members = task.members[strip.first : strip.stop]
        if strip.is_plain:
            first = int(members[0])
            start = int(target.start[first])
            target.blocks[int(target.block[first])][start : start + strip.n_bytes] = data
            continue
        entries = places.entries[members]
        begins = (task.begins[strip.first : strip.stop] - strip.start).tolist()
        lengths, codecs = entries["stored_bytes"].tolist(), entries["codec"].tolist()
        for chunk, begin, length, codec in zip(members.tolist(), begins, lengths, codecs, strict=True):
            try:
                codec_numbered(codec).decode_into(data[begin : begin + length], target.view(chunk))
            except FormatError as error:
                damaged.append(Damage(chunk=chunk, key=task.key, reason=str(error)))
    return damaged


def _check(task: Task, wanted: Wanted, known: set[int]) -> list[Damage]:
    """Compare the chunks of a read with their digests; return the new mismatches."""
    target, members = wanted.target, task.members
    starts = target.start[members]
    stops = (starts + target.n_bytes[members]).tolist()
    blocks = target.blocks
    where = zip(target.block[members].tolist(), starts.tolist(), stops, strict=True)
    actual = [digest(blocks[block][start:stop]) for block, start, stop in where]
    expected = wanted.digests[members]
    if b"".join(actual) == expected.tobytes():
        return []
    return [
        Damage(chunk=chunk, key=task.key, reason=f"its bytes hash to {found.hex()}")
        for chunk, found, digest_of in zip(members.tolist(), actual, expected, strict=True)
        if found != digest_of.tobytes() and chunk not in known
    ]
