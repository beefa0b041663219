"""Damaged manifests and refs, restored from where others have them."""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, Root, open_backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import digest, unique_rows
from tensorcas_mlflow.errors import (
    BackendError,
    BlobExistsError,
    BlobNotFoundError,
    CheckpointExistsError,
    ConflictError,
    CorruptError,
    FormatError,
    NewerFormatError,
    RefusedError,
    StarvedError,
    StoreNotFoundError,
)
from tensorcas_mlflow.index import MAX_SEGMENT_BYTES, Table, make_table, read_segment, segment_bytes
from tensorcas_mlflow.maintenance._checked_packs import CheckedPacks
from tensorcas_mlflow.maintenance._copy_chunks import ChunkReader
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, list_manifests
from tensorcas_mlflow.maintenance._quarantine import PREFIX, Quarantine, keep_blob
from tensorcas_mlflow.maintenance._sources import FoundRef
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import ENTRY, Entries
from tensorcas_mlflow.store import PendingBatch, Ref, Store
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """All condemned lists of a store."""

    sound: Sequence[p.Condemned]
    damaged: Mapping[str, str]
    """Keys of those that cannot be read, and why."""

    @property
    def packs(self) -> frozenset[str]:
        """Names of packs on sound lists."""
        return frozenset[str]().union(*(each.packs for each in self.sound))


def read_lists(backend: Backend) -> Lists:
    """Read every condemned list there is.

    Raises:
        NewerFormatError: A later release wrote one.
        BackendError: The storage failed.
    """
    sound: list[p.Condemned] = []
    damaged: dict[str, str] = {}
    for info in list(list_blobs(backend, "condemned")):
        if info.key == p.GENERATION:
            continue
        try:
            sound.append(p.read_list(backend, info.key))
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            damaged[info.key] = error.reason
    return Lists(sound=sound, damaged=damaged)


def abandon_lists(backend: Backend, keys: Collection[str], quarantine: Quarantine) -> list[str]:
    """Remove damaged lists whose collectors are dead, and keep their bytes.

    Returns:
        Keys of those that were still there and damaged.
    """
    gone: list[str] = []
    for key in keys:
        info = backend.stat(key)
        try:
            p.read_list(backend, key)
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            keep_blob(quarantine, backend, key, error.reason)
            if info is not None and backend.withdraw(key, info.token):
                gone.append(key)
    return gone


def finished_lists(backend: Backend, lists: Lists) -> list[str]:
    """Give the lists of which nothing is left: names are never used again, so they say nothing any more.

    Args:
        backend: Whose.
        lists: Read before this was called, and so before it is looked what is left.
    """
    if not lists.sound:
        return []
    packs = {name for name, _ in p.list_packs(backend)}
    manifests = list_manifests(backend).keys()
    return [each.key for each in lists.sound if not each.packs & packs and not each.manifests & manifests]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFaults:
    """What is wrong with an index."""

    bad: Mapping[str, str]
    """Keys of segments that cannot be read or say other than the packs, and why."""
    missing: frozenset[str]
    """Packs that it does not name and should."""


def check_index(backend: Backend, packs: CheckedPacks) -> IndexFaults:
    """Compare the index of a store with its packs."""
    bad: dict[str, str] = {}
    named: set[str] = set()
    of_bad: set[str] = set()
    for info in list(list_blobs(backend, "index")):
        name, _, ending = info.key.removeprefix("index/").partition(".")
        if ending == "loose":
            named.add(name)
        elif ending == "arrow":
            try:
                table = read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
            except BlobNotFoundError:
                continue
            except StarvedError:
                raise
            except (CorruptError, BackendError) as error:
                bad[info.key] = error.reason
                continue
            if _is_true(table, packs):
                named.update(table.packs)
            else:
                bad[info.key] = "it says other than the packs' own tables"
                of_bad.update(table.packs)
    whole = {name for name, pack in packs.packs.items() if not pack.damage and pack.failure is None}
    if backend.is_remote and not bad:
        return IndexFaults(bad={}, missing=frozenset())  # packs are listed there, and need no entry of their own
    return IndexFaults(bad=bad, missing=frozenset(whole - named))


def rebuild_index(backend: Backend, packs: CheckedPacks, faults: IndexFaults) -> None:
    """Put in what an index lacks, and then take out what is wrong."""
    tables = {name: packs.packs[name].entries for name in sorted(faults.missing & packs.packs.keys())}
    if tables:
        backend.put_new(f"index/{uuid.uuid4().hex}.arrow", [segment_bytes(make_table(tables))])
    for key in faults.bad:
        backend.delete(key)
    p.tidy_index(backend, packs.packs.keys())


def _is_true(table: Table, packs: CheckedPacks) -> bool:
    for number, name in enumerate(table.packs):
        pack = packs.packs.get(name)
        if pack is None or pack.damage or pack.failure is not None:
            continue  # it is gone, or will be
        if not np.array_equal(_rows(table.entries[table.pack == number]), _rows(pack.entries)):
            return False
    return True


def _rows(entries: Entries) -> Any:
    rows = entries.copy()
    rows["effort"] = 0  # an index does not say it
    return np.sort(rows.view(f"V{ENTRY.itemsize}").ravel())


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
