"""Repair of the small blobs of a store: condemned lists, the index, ``format``, manifests and refs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from tensorcas_mlflow.backends import Backend, Root, open_backend
from tensorcas_mlflow.base.digest import unique_rows
from tensorcas_mlflow.base.files import new_name
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
from tensorcas_mlflow.layout import Ref, list_blobs
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest
from tensorcas_mlflow.layout.packs import Entries, make_table, open_segment, segment_bytes, segment_key, segment_name
from tensorcas_mlflow.maintenance._belied import belied_packs
from tensorcas_mlflow.maintenance._checked_packs import CheckedPacks
from tensorcas_mlflow.maintenance._copy_chunks import CopyReader
from tensorcas_mlflow.maintenance._copy_refs import ref_for
from tensorcas_mlflow.maintenance._inventory import NO_DIGESTS, list_manifests
from tensorcas_mlflow.maintenance._quarantine import keep_blob, note_ref
from tensorcas_mlflow.maintenance._sources import FoundRef
from tensorcas_mlflow.store import PendingBatch, Store
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """Condemned lists of a store."""

    sound: Sequence[p.Condemned]
    damaged: Mapping[str, str]
    """Keys of lists that cannot be read, and why."""

    @property
    def packs(self) -> frozenset[str]:
        """Packs on sound lists."""
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


def abandon_lists(backend: Backend, keys: Collection[str]) -> list[str]:
    """Remove damaged lists whose collectors are dead, and keep their bytes.

    Returns:
        Keys of the lists that were still there and damaged.
    """
    gone: list[str] = []
    for key in keys:
        info = backend.stat(key)
        try:
            p.read_list(backend, key)
        except BlobNotFoundError:
            continue
        except CorruptError as error:
            keep_blob(backend, key, error.reason)
            if info is not None and backend.withdraw(key, info.token):
                gone.append(key)
    return gone


def finished_lists(backend: Backend, lists: Lists) -> list[str]:
    """Return the lists whose packs and manifests are all gone. Names are never used again, so these lists are void.

    Args:
        backend: Backend of the store.
        lists: Lists that were read before this call lists packs.
    """
    if not lists.sound:
        return []
    packs = {name for name, _ in p.list_packs(backend)}
    manifests = list_manifests(backend).keys()
    return [each.key for each in lists.sound if not each.packs & packs and not each.manifests & manifests]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFaults:
    """Faults of an index."""

    bad: Mapping[str, str]
    """Keys of segments that cannot be read, or that contradict the packs, and why."""
    missing: frozenset[str]
    """Packs that it lacks."""


def find_index_faults(backend: Backend, packs: CheckedPacks) -> IndexFaults:
    """Compare the index of a store with its packs."""
    bad: dict[str, str] = {}
    named: set[str] = set()
    table = packs.table()
    for info in list(list_blobs(backend, "index")):
        if info.key.endswith(".loose"):
            named.add(segment_name(info.key))
        else:
            try:
                segment = open_segment(backend, info.key)
                belied = belied_packs(segment, table, partial(_sound_entries, packs))
            except BlobNotFoundError:
                continue
            except StarvedError:
                raise
            except (CorruptError, BackendError) as error:
                bad[info.key] = error.reason
                continue
            if not belied:
                named.update(segment.packs)
            else:
                bad[info.key] = "it contradicts the packs' own tables"
    whole = {name for name, pack in packs.packs.items() if not pack.damage and pack.failure is None}
    if backend.is_remote and not bad:
        return IndexFaults(bad={}, missing=frozenset())  # a remote store lists its packs, and needs no entry for each
    return IndexFaults(bad=bad, missing=frozenset(whole - named))


def rebuild_index(backend: Backend, packs: CheckedPacks, faults: IndexFaults) -> None:
    """Add the packs that an index lacks, then remove wrong segments."""
    tables = {name: packs.packs[name].entries for name in sorted(faults.missing & packs.packs.keys())}
    if tables:
        backend.put_new(segment_key(new_name()), [segment_bytes(make_table(tables))])
    for key in faults.bad:
        backend.delete(key)
    p.tidy_index(backend, packs.packs.keys())


def _sound_entries(packs: CheckedPacks, name: str) -> Entries | None:
    """Return the table of a pack; None if it is gone, or will be."""
    pack = packs.packs.get(name)
    return None if pack is None or pack.damage or pack.failure is not None else pack.entries


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFix:
    """Correct ``format`` blob of a store."""

    blob: bytes
    reason: str
    """Fault of the present blob."""


def open_damaged(root: str | os.PathLike[str], others: Sequence[Store] = ()) -> tuple[Store, FormatFix | None]:
    """Open the store at a root or the nearest above, also if its ``format`` blob is damaged or gone.

    Args:
        root: Path or URI.
        others: Other stores; one of the same id says the chunk size too.

    Raises:
        StoreNotFoundError: There is none.
        CorruptError: Its ``format`` cannot be read, and its manifests do not say what it was.
        NewerFormatError: A later release made it.
    """
    place = Root.parse(root)
    for candidate in [place, *place.parents()]:
        try:
            return open_damaged_backend(open_backend(candidate), others)
        except StoreNotFoundError:
            if not candidate.is_local:
                raise  # a prefix above may belong to somebody else
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
    fixed = p.new_format(chunk_bytes, store_id, is_carried=b'"carried"' in blob, has_database=backend.has_database)
    p.parse_format(fixed)
    return Store(backend, store_id=store_id, chunk_bytes=chunk_bytes), FormatFix(blob=fixed, reason=reason)


def write_format(store: Store, fix: FormatFix) -> None:
    """Replace the damaged ``format`` by the correct one, in one step.

    Raises:
        ConflictError: Another store was made there meanwhile.
        RefusedError: A link or a folder stands there.
    """
    backend = store.backend
    if backend.stat(p.FORMAT) is None:
        with suppress(BlobExistsError):
            backend.put_new(p.FORMAT, [fix.blob])
    elif _id_at(backend) is None:
        keep_blob(backend, p.FORMAT, fix.reason)
        # Replaced, not removed first: while it is missing, a program that makes its store would draw another id.
        source = f"intents/{new_name()}"
        token = backend.put_new(source, [p.intent_bytes("0" * 64, NO_DIGESTS)])
        backend.promote(source, p.FORMAT, fix.blob, token=token, replace=True)
    if backend.stat(p.FORMAT) is None:
        raise RefusedError("write", p.FORMAT, "a link or a folder stands in its place: remove it, then repair again")
    if _id_at(backend) != store.id:
        raise ConflictError(f"there is another store at {backend.uri!r} now")


def may_be_carried(backend: Backend) -> bool:
    """Tell whether clients write to a store through an MLflow server without this package."""
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
    # Manifests that were copied from a store with another chunk size keep that; most are this store's own.
    return store_id, said[0] if said else sizes.most_common(1)[0][0]


_MAX_ATTEMPTS = 4
_NO_BLOB = "a link or a folder stands in its place, which nothing of a store is: remove it, then repair again"


def restore_manifest(store: Store, name: str, manifest: Manifest, refs: Sequence[Ref]) -> str | None:
    """Rewrite a manifest that is damaged or gone, under the name that refs know.

    No collector is about to delete a manifest that a ref names (``docs/design/protocol.md``, A repair). The intent, and
    reading the lists, make sure that this stays so.

    Returns:
        None, or the reason why it was left alone.
    """
    backend, key = store.backend, f"manifests/{name}"
    intent = p.declare(backend, name, unique_rows(manifest.stored_digests)[0])
    try:
        lists = read_lists(backend)
        if lists.damaged:
            return f"{next(iter(lists.damaged))} is damaged, and may name it"
        if any(name in each.manifests for each in lists.sound):
            return "a collector is about to delete it"
        if not any(_names(store, ref, name) for ref in refs):
            return "nothing needs it any more"
        # Its state first: the repair removes it only if it is still the one that was read.
        info = backend.stat(key)
        if info is not None:
            fault = _fault_of(backend, key, name)
            if fault is None:
                return None  # another repair has restored it
            keep_blob(backend, key, fault)
            backend.withdraw(key, info.token)
        with suppress(BlobExistsError):
            backend.put_new(key, [manifest.to_blob()])
        if backend.stat(key) is None:
            return _NO_BLOB
    finally:
        backend.withdraw(*intent, own=())
    return None


def restore_ref(store: Store, key: str, found: FoundRef) -> str | None:
    """Replace a damaged ref by the one that another store has at its key.

    Returns:
        None, or the reason why it was left alone.
    """
    for _ in range(_MAX_ATTEMPTS):
        with PendingBatch(store.backend, store.catalog, [found.manifest]) as pending:
            reader = CopyReader(found.source)
            pending.write(reader.payloads(pending.missing))
            if reader.faults:
                lacking, reason = next(iter(reader.faults.items()))
                return f"{found.source.uri} lacks chunk {lacking.hex()}: {reason}"
            # All but the ref is here, so nothing is missing between the removal and the commit.
            if not _remove(store, key):
                return None
            try:
                if pending.commit(0, ref_for(found.source, store, found.ref), replace=False):
                    return None
            except CheckpointExistsError:
                # Somebody has saved it again.
                return _NO_BLOB if store.backend.stat(key) is None else None
    return "collectors have given this repair up again and again"


def _remove(store: Store, key: str) -> bool:
    """Remove a damaged ref; return False if a sound one has taken its place."""
    backend = store.backend
    info = backend.stat(key)
    if info is None:
        return True
    try:
        if p.read_ref(backend, key) is not None:
            return False
    except CorruptError as error:
        keep_blob(backend, key, error.reason)
        note_ref(backend, key, error.reason)
    return backend.withdraw(key, info.token) or backend.stat(key) is None


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
