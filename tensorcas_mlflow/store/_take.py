"""From stored bytes to chunks in place, decoded and compared with their digests."""

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
"""What a read brought, strip by strip; None for a strip that is in place already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Chunks to read, and where each is to go."""

    digests: Digests
    target: Target
    verify: bool

    def some(self, chunks: Any) -> Wanted:
        """Some of them, by number."""
        return Wanted(digests=self.digests[chunks], target=self.target.some(chunks), verify=self.verify)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A copy of a chunk that cannot be read or is not what it should be."""

    chunk: int
    """Its number among those that are wanted."""
    key: str
    """Of the pack."""
    reason: str
    error: BackendError | None = None
    """What the storage said, if it is that which failed."""
    base: bytes | None = None
    """The digest of the base it takes, where that is what is damaged, in the pack of ``key``."""


def check_sizes(places: Places, wanted: Wanted) -> list[Damage]:
    """Give the chunks whose entries cannot be right, so that what they say costs no memory."""
    sizes = wanted.target.n_bytes
    raw_bytes, stored_bytes = places.entries["raw_bytes"], places.entries["stored_bytes"].astype(np.int64)
    is_raw = places.entries["codec"] == RAW.number
    wrong = (raw_bytes != sizes) | (is_raw & (stored_bytes != sizes)) | (stored_bytes > 2 * sizes + MOST_OVERHEAD_BYTES)
    return [
        Damage(
            chunk=at,
            key=pack_key(places.packs[int(places.pack[at])]),
            reason=f"its entry says {raw_bytes[at]} bytes in {stored_bytes[at]}, the manifest {sizes[at]}",
        )
        for at in np.flatnonzero(wrong).tolist()
    ]


def take(task: Task, stored: Stored, places: Places, wanted: Wanted) -> list[Damage]:
    """Decode what was read into place, and check it; returns what is damaged. No chunk may be a delta.

    Args:
        task: What was read.
        stored: Its stored bytes.
        places: Of all wanted chunks.
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
    """Compare the chunks of a read with their digests; returns those that differ, but for those that are known to."""
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
