"""Stores whose ``format`` blob is damaged or gone: what it said is said by every manifest too."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tensorcas_mlflow.backends import Backend, Root, open_backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ConflictError,
    CorruptError,
    FormatError,
    NewerFormatError,
    RefusedError,
    StoreNotFoundError,
)
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.repair._chunks import NO_DIGESTS
from tensorcas_mlflow.repair._quarantine import Quarantine, keep_blob
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFix:
    """What the ``format`` blob of a store is to be."""

    blob: bytes
    reason: str
    """What is wrong with the one that is there."""


def open_damaged(root: str | os.PathLike[str], others: Sequence[Store] = ()) -> tuple[Store, FormatFix | None]:
    """Open the store at a place or the nearest above, also if its ``format`` blob is damaged or gone.

    Args:
        root: The place.
        others: Other stores; one of the same id says its chunk size too.

    Raises:
        StoreNotFoundError: There is none.
        CorruptError: There is one without a ``format`` that can be read, and its manifests do not say what it was.
        NewerFormatError: A later release made it.
    """
    place = Root.parse(root)
    for candidate in [place, *place.parents()]:
        try:
            return open_damaged_backend(open_backend(candidate), others)
        except StoreNotFoundError:
            if not candidate.is_local:
                raise  # above it may be another's
    raise StoreNotFoundError(place.uri)


def open_damaged_backend(backend: Backend, others: Sequence[Store] = ()) -> tuple[Store, FormatFix | None]:
    """Open the store in a backend; see `open_damaged`."""
    reason, blob = "it is gone", b""
    try:
        return Store.open_backend(backend), None
    except NewerFormatError:
        raise
    except StoreNotFoundError:
        if next(iter(list_blobs(backend, "manifests")), None) is None:
            raise
    except CorruptError as error:
        reason = error.reason
        with suppress(BlobNotFoundError, CorruptError):
            blob = backend.get(p.FORMAT, max_bytes=p.MAX_REF_BYTES)
    store_id, chunk_bytes = _said_by_manifests(backend, others, reason)
    fixed = p.new_format(chunk_bytes, store_id, is_carried=b'"carried"' in blob)
    p.parse_format(fixed)
    return Store(backend, store_id=store_id, chunk_bytes=chunk_bytes), FormatFix(blob=fixed, reason=reason)


def write_format(store: Store, fix: FormatFix, quarantine: Quarantine) -> None:
    """Put the right ``format`` in the place of the damaged one, in one step.

    Raises:
        ConflictError: Somebody has made another store there meanwhile.
        RefusedError: What stands there is no file.
    """
    backend = store.backend
    if backend.stat(p.FORMAT) is None:
        with suppress(BlobExistsError):
            backend.put_new(p.FORMAT, [fix.blob])
    elif _id_at(backend) is None:
        keep_blob(quarantine, backend, p.FORMAT, fix.reason)
        # Replaced and not removed first: where it is not there, a program that makes its store would draw another id.
        source = f"intents/{uuid.uuid4().hex}"
        token = backend.put_new(source, [p.intent_bytes("0" * 64, NO_DIGESTS)])
        backend.promote(source, p.FORMAT, fix.blob, token=token, replace=True)
    if backend.stat(p.FORMAT) is None:
        raise RefusedError("write", p.FORMAT, "a link or a folder stands in its place: remove it, then repair again")
    if _id_at(backend) != store.id:
        raise ConflictError(f"there is another store at {backend.uri!r} now")


def is_carried(backend: Backend) -> bool:
    """Tell whether clients of an MLflow server that keeps no store itself write to a store."""
    with suppress(BlobNotFoundError, CorruptError):
        return b'"carried"' in backend.get(p.FORMAT, max_bytes=p.MAX_REF_BYTES)
    return False


def _id_at(backend: Backend) -> str | None:
    try:
        return p.parse_format(backend.get(p.FORMAT, max_bytes=p.MAX_REF_BYTES))[0]
    except (BlobNotFoundError, CorruptError):
        return None


def _said_by_manifests(backend: Backend, others: Sequence[Store], reason: str) -> tuple[str, int]:
    ids: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    for info in list(list_blobs(backend, "manifests")):
        try:
            blob = backend.get(info.key, max_bytes=MAX_BYTES)
            manifest = Manifest.from_blob(blob, info.key.removeprefix("manifests/"))
        except (BlobNotFoundError, FormatError):
            continue
        if manifest.store_id is not None:
            ids[manifest.store_id] += 1
            sizes[manifest.chunk_bytes] += 1
    if len(ids) != 1:
        what = "no manifest" if not ids else f"manifests of {len(ids)} stores"
        raise CorruptError(p.FORMAT, f"{reason}, and there is {what} to tell what it was")
    [store_id] = ids
    said = [other.chunk_bytes for other in others if other.id == store_id]
    # Manifests that were copied from a store with other chunks have theirs; most are of this one's own.
    return store_id, said[0] if said else sizes.most_common(1)[0][0]
