"""The small blobs that savers and collectors leave for each other, and the index."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Table, read_segment
from tensorcas_mlflow.manifest import MAX_BYTES
from tensorcas_mlflow.pack import Entries
from tensorcas_mlflow.store import protocol as p
from tensorcas_mlflow.verify._packs import Packs
from tensorcas_mlflow.verify._report import Problem, reason_of

_SAID = ("digest", "stored_digest", "offset", "stored_bytes", "raw_bytes", "codec", "typesize")


def small_blob_problems(backend: Backend, packs: Packs) -> Iterator[Problem]:
    """Give the intents, condemned lists and segments that cannot be read, and the segments that are wrong."""
    for info in list(list_blobs(backend, "intents")):
        try:
            p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            # A commit may have been writing it just then, and has turned it into a ref since.
            if not isinstance(error, CorruptError) or _is_listed(backend, info.key):
                yield Problem(key=info.key, reason=_reason_and(error, "gc removes it once its grace is over"))
    try:
        p.read_condemned(backend)
    except FormatError as error:
        yield Problem(key=getattr(error, "key", None), reason=f"{reason_of(error)} (gc refuses to work until it goes)")
    for info in list(list_blobs(backend, "index")):
        if not info.key.endswith(".arrow"):
            continue
        try:
            table = read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
        except BlobNotFoundError:
            continue
        except (FormatError, BackendError) as error:
            yield Problem(key=info.key, reason=_reason_and(error, "nothing is lost, and gc removes it"))
            continue
        for name in _belied(table, packs) if table.is_checked else ():
            yield Problem(key=info.key, reason=f"it says other things of pack {name} than that itself: remove it")


def _reason_and(error: Exception, outcome: str) -> str:
    """Say what is wrong with a blob and what comes of it: what a later release wrote, gc does not touch."""
    return reason_of(error) if isinstance(error, NewerFormatError) else f"{reason_of(error)} ({outcome})"


def _is_listed(backend: Backend, key: str) -> bool:
    return any(info.key == key for info in list_blobs(backend, "intents"))


def _belied(table: Table, packs: Packs) -> Iterator[str]:
    """Name packs of which a segment does not say what their own tables say."""
    for number, name in enumerate(table.packs):
        entries = packs.entries_of(name)
        if entries is not None and _as_said(table.entries[table.pack == number]) != _as_said(entries):
            yield name


def _as_said(entries: Entries) -> bytes:
    """Write entries so that equal ones are equal bytes, in whatever order they stand."""
    columns = [np.ascontiguousarray(entries[name]).view(np.uint8).reshape(len(entries), -1) for name in _SAID]
    rows = np.concatenate(columns, axis=1) if len(entries) else np.empty((0, 1), np.uint8)
    return b"".join(sorted(row.tobytes() for row in rows))
