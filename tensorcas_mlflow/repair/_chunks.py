"""Chunks as they lie in packs, read and judged one by one: the only evidence is the hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES
from tensorcas_mlflow.codecs import CODECS
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptError,
    FormatError,
    NotFoundError,
    StarvedError,
)
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.pack import ENTRY, STORED_DIGEST_BYTES, Entries, decode_chunk
from tensorcas_mlflow.readplan import plan_reads
from tensorcas_mlflow.store import protocol as p

MAX_STORED_BYTES = 2 * MAX_CHUNK_BYTES
"""No codec makes more of a chunk; a longer one is not read, so that what a table says costs no memory."""
_WINDOW = 8
"""Reads under way at once, of some 8 MiB each."""
NO_DIGESTS: Digests = np.empty((0, DIGEST_BYTES), np.uint8)
NO_ENTRIES: Entries = np.empty(0, ENTRY)


class Verdict(Enum):
    """What became of a look at one chunk."""

    GOOD = "good"
    """Its bytes decode to what its digest says."""
    BAD = "bad"
    """They were read, and do not."""
    FAILED = "failed"
    """The storage did not give them, or this release cannot decode them: which says nothing of what they are."""
    BASELESS = "baseless"
    """They are a delta as it was written, and the base it takes is gone, damaged, or encoded as this release does not
    know: then it is no copy, and no damage. A collection leaves such deltas where the chunk has another copy."""
    GONE = "gone"
    """The pack is not there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One chunk that was looked at."""

    row: int
    """Which of the chunks that were asked for."""
    verdict: Verdict
    reason: str = ""
    stored: Any = b""
    """What lies there, where it was read."""
    key: str | None = None
    """Of the blob that the storage did not give, where that is the pack of the base."""


def look_at(backend: Backend, names: Sequence[str], pack: Any, entries: Entries) -> Iterator[Look]:
    """Read chunks and compare each with its digest.

    Args:
        backend: Where the packs are.
        names: Of packs.
        pack: For each chunk a position in ``names``.
        entries: For each chunk what is said of it; nothing of it is believed.

    Yields:
        One look a chunk, by pack and in the order in which they lie there.
    """
    fits = (entries["raw_bytes"] <= MAX_CHUNK_BYTES) & (entries["stored_bytes"] <= MAX_STORED_BYTES)
    for row in np.flatnonzero(~fits).tolist():
        said = f"its entry says {entries['raw_bytes'][row]} bytes in {entries['stored_bytes'][row]}"
        yield Look(row=row, verdict=Verdict.BAD, reason=said)
    known = np.isin(entries["codec"], list(CODECS))
    for row in np.flatnonzero(fits & ~known).tolist():
        # The table says so that hashes to its digest: most likely a later release wrote it, to which it is sound.
        said = f"no codec has the number {entries['codec'][row]}: a later release of tensorcas-mlflow may read it"
        yield Look(row=row, verdict=Verdict.FAILED, reason=said)
    rows = np.flatnonzero(fits & known)
    bases = p.Bases(backend)

    def read(place: tuple[int, int, int, Any]) -> list[Look]:
        number, start, stop, members = place
        block = np.empty(stop - start, dtype=np.uint8).data
        try:
            backend.read_into(pack_key(names[number]), start, block)
        except BlobNotFoundError:
            return [Look(row=row, verdict=Verdict.GONE, reason="its pack is gone") for row in members.tolist()]
        except StarvedError:
            raise
        except (CorruptError, BackendError) as error:
            if len(members) > 1:
                # One bad sector of a disk is no reason to call all that lies near it damaged.
                alone = ((number, *_span(entries[row]), np.array([row])) for row in members.tolist())
                return [look for each in alone for look in read(each)]
            verdict = Verdict.BAD if isinstance(error, CorruptError) else Verdict.FAILED
            return [Look(row=int(members[0]), verdict=verdict, reason=f"it cannot be read: {error.reason}")]
        return [_judged(row, entries[row], block, start, bases) for row in members.tolist()]

    plan = plan_reads(pack[rows], entries["offset"][rows], entries["stored_bytes"][rows])
    places = ((extent.pack, extent.start, extent.stop, rows[extent.members]) for extent in plan)
    for looks in threads.ordered_map(read, places, window=_WINDOW, waits=backend.is_remote):
        yield from looks


def as_keys(digests: Digests) -> Any:
    """Each digest as one value."""
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()


def _span(entry: Any) -> tuple[int, int]:
    start = int(entry["offset"])
    return start, start + int(entry["stored_bytes"])


def _judged(row: int, entry: Any, block: memoryview, start: int, bases: p.Bases) -> Look:
    begin, end = _span(entry)
    stored = block[begin - start : end - start]
    try:
        base = bases.of(entry)
    except StarvedError:
        raise
    except BackendError as error:
        return Look(row=row, verdict=Verdict.FAILED, reason=f"its base cannot be read: {error.reason}", key=error.key)
    except (NotFoundError, FormatError) as error:
        is_as_written = digest(stored)[:STORED_DIGEST_BYTES] == entry["stored_digest"].tobytes()
        reason = f"it is a delta, and its base is lost: {error}"
        return Look(row=row, verdict=Verdict.BASELESS if is_as_written else Verdict.BAD, reason=reason, stored=stored)
    try:
        decode_chunk(entry, stored, base)
    except FormatError as error:
        return Look(row=row, verdict=Verdict.BAD, reason=str(error), stored=stored)
    return Look(row=row, verdict=Verdict.GOOD, stored=stored)
