"""Damaged manifests and refs, restored from where others have them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import digest, unique_rows
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CheckpointExistsError,
    CorruptError,
    FormatError,
)
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.repair._lists import read_lists
from tensorcas_mlflow.repair._quarantine import PREFIX, Quarantine, keep_blob
from tensorcas_mlflow.repair._sources import FoundRef
from tensorcas_mlflow.store import PendingBatch, Ref, Store
from tensorcas_mlflow.store import protocol as p
from tensorcas_mlflow.transfer import ChunkReader

_MAX_ATTEMPTS = 4
_MAX_NOTE_BYTES = 4096
_NO_BLOB = "a link or a folder stands in its place, which nothing of a store is: remove it, then repair again"


def restore_manifest(
    store: Store, name: str, manifest: Manifest, refs: Sequence[Ref], quarantine: Quarantine
) -> str | None:
    """Write a manifest again that is damaged or gone, under the name by which refs know it.

    Nobody is about to delete a manifest by which a ref stands (``docs/design/protocol.md``, A repair). The intent and
    the look at the lists are to make sure that this stays so.

    Returns:
        None, or why it was left as it is.
    """
    backend, key = store.backend, f"manifests/{name}"
    intent = p.declare(backend, name, unique_rows(manifest.digests)[0])
    try:
        lists = read_lists(backend)
        if lists.damaged:
            return f"{next(iter(lists.damaged))} is damaged, and may name it"
        if any(name in each.manifests for each in lists.sound):
            return "a collector is about to delete it"
        if not any(_names(store, ref, name) for ref in refs):
            return "nothing needs it any more"
        # Its state first: it is removed only if it is still the one that was read.
        info = backend.stat(key)
        if info is not None:
            fault = _fault_of(backend, key, name)
            if fault is None:
                return None  # another repair has restored it
            keep_blob(quarantine, backend, key, fault)
            backend.withdraw(key, info.token)
        with suppress(BlobExistsError):
            backend.put_new(key, [manifest.to_blob()])
        if backend.stat(key) is None:
            return _NO_BLOB
    finally:
        backend.withdraw(*intent)
    return None


def restore_ref(store: Store, key: str, found: FoundRef, quarantine: Quarantine) -> str | None:
    """Commit what another store has at the key of a damaged ref.

    Returns:
        None, or why it was left as it is.
    """
    is_known_by_uri = found.ref.path is None and found.ref.copy_path is None
    ref = found.ref
    if found.source.id != store.id and is_known_by_uri:
        ref = dataclasses.replace(ref, uri=None)  # as a copy has it
    for _ in range(_MAX_ATTEMPTS):
        with PendingBatch(store.backend, store.catalog, [found.manifest]) as pending:
            reader = ChunkReader(found.source)
            pending.write(reader.payloads(pending.missing))
            if reader.faults:
                lacking, reason = next(iter(reader.faults.items()))
                return f"{found.source.uri} lacks chunk {lacking.hex()}: {reason}"
            # All is here but the ref, so that between what is removed and what takes its place nothing can be in want.
            if not _remove(store, key, quarantine):
                return None
            try:
                if not pending.commit(0, ref, replace=False):
                    continue
            except CheckpointExistsError:
                if store.backend.stat(key) is None:
                    return _NO_BLOB
                # Somebody has saved it anew.
        store.backend.delete(_note_key(key))
        return None
    return "collectors have given this repair up again and again"


def notes(backend: Backend) -> dict[str, str]:
    """Give the keys of refs that repairs have begun to replace, each with the key of its note."""
    found: dict[str, str] = {}
    for info in list(list_blobs(backend, PREFIX)):
        if info.key.startswith(f"{PREFIX}/@"):
            with suppress(BlobNotFoundError, CorruptError, ValueError, KeyError, TypeError, RecursionError):
                key = str(json.loads(backend.get(info.key, max_bytes=_MAX_NOTE_BYTES))["key"])
                if key.startswith("refs/") and _note_key(key) == info.key:
                    found[key] = info.key
    return found


def _remove(store: Store, key: str, quarantine: Quarantine) -> bool:
    """Remove a damaged ref; returns False if a sound one has taken its place."""
    backend = store.backend
    info = backend.stat(key)
    if info is None:
        return True
    try:
        if p.read_ref(backend, key) is not None:
            return False
    except CorruptError as error:
        keep_blob(quarantine, backend, key, error.reason)
    # If this ends here, the next repair knows by the note that there was one.
    with suppress(BlobExistsError):
        backend.put_new(_note_key(key), [json.dumps({"format": 1, "key": key}).encode()])
    return backend.withdraw(key, info.token) or backend.stat(key) is None


def _note_key(key: str) -> str:
    return f"{PREFIX}/@{digest(key.encode()).hex()[:32]}"


def _names(store: Store, ref: Ref, name: str) -> bool:
    try:
        now = store.ref(ref.key)
    except (FormatError, BackendError):
        return False
    return now is not None and now.manifest == name


def _fault_of(backend: Backend, key: str, name: str) -> str | None:
    try:
        Manifest.from_blob(backend.get(key, max_bytes=MAX_BYTES), name)
    except BlobNotFoundError:
        return "it is gone"
    except FormatError as error:
        return str(error)
    return None
