"""What a store holds and what of it is needed, looked at in an order that makes the answer safe to act on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.index import Mask, Table, make_table, pack_key
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import Entries
from tensorcas_mlflow.store import Ref
from tensorcas_mlflow.store import protocol as p

T = TypeVar("T")
R = TypeVar("R")

_FOLD_ROWS = 1 << 20
_INTENT_READS = 3
_INTENT_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A store as a collector sees it at one time."""

    live: Digests
    """Chunks that somebody needs, each once."""
    live_manifests: frozenset[str]
    n_refs: int
    stale: Sequence[str]
    """Keys of intents that may be aborted."""
    damaged_refs: frozenset[str]
    """Keys of refs that cannot be read and have been given up."""
    unfenced: Sequence[p.Intent]
    """Intents of saves through an MLflow server that nobody has given up."""
    lists: Sequence[p.Condemned]
    """All condemned lists."""
    dead_lists: Sequence[p.Condemned]
    """Those of collectors that are taken for dead, where there is something to finish. One that names nothing any more
    but manifests that are needed has to stay until they are not: its owner, if only slow, may yet delete them."""
    manifests: frozenset[str]
    """All manifests there are."""
    sizes: Mapping[str, int]
    """All packs there are, and their bytes."""
    unreadable: Sequence[str]
    """Packs whose table cannot be read, all that is needed being elsewhere; most likely uploads that were cut short."""
    table: Table
    """All entries of all packs."""

    def condemned_packs(self) -> frozenset[str]:
        """Packs that somebody is about to delete."""
        return frozenset[str]().union(*(condemned.packs for condemned in self.lists))

    def live_rows(self) -> Mask:
        """For each row of the table whether its chunk is needed."""
        return np.isin(self.keys(), _as_keys(self.live))

    def rows_in(self, packs: frozenset[str]) -> Mask:
        """For each row of the table whether it lies in one of some packs."""
        chosen = np.array([name in packs for name in self.table.packs], dtype=bool)
        return chosen[self.table.pack] if len(self.table) else np.zeros(0, dtype=bool)

    def keys(self) -> Any:
        """The digests of the table's rows, each as one value."""
        return _as_keys(self.table.entries["digest"])


def survey(backend: Backend, grace_s: float, *, count_stale: bool, abandon: Collection[str] = ()) -> Survey:
    """Look at everything.

    Intents come before refs: a save that commits meanwhile is seen as the one or the other. Condemned lists come before
    packs: a pack that another collector deletes meanwhile is still on its list, or gone already.

    Args:
        backend: Which.
        grace_s: After how many seconds of silence somebody is taken for dead.
        count_stale: Whether intents that may be aborted keep their chunks alive. They must where something is deleted
            by this survey: only an intent that has been withdrawn cannot become a ref any more.
        abandon: Ids of intents that may be aborted whatever their age, and keys of damaged refs that count as gone.

    Raises:
        CorruptError: Something cannot be read that says what is needed.
        NewerFormatError: A later release has written something.
    """
    before = time.time() - grace_s
    stale: list[str] = []
    live = _DigestSet()
    live_manifests: set[str] = set()
    half_committed: list[p.Intent] = []
    unfenced: list[p.Intent] = []
    for info in list(backend.list("intents")):
        is_given_up = info.key.rpartition("/")[2] in abandon
        silent = is_given_up or info.modified_s <= before
        try:
            intent = _read_intent(backend, info)
        except NewerFormatError:
            raise  # what it keeps, and how it is given up, only a later release knows
        except FormatError:
            if count_stale or not (silent or _is_blank(backend, info.key)):
                raise
            stale.append(info.key)
            continue
        if intent is None:
            continue
        if intent.through_carrier and not is_given_up:
            # Not by its age, nor because its process is gone: what the server was last asked may be done yet.
            unfenced.append(intent)
        elif silent or intent.writer_is_dead:
            stale.append(info.key)
            if not count_stale:
                continue
        live_manifests.add(intent.manifest)
        if intent.digests is not None:
            live.add(intent.digests)
        else:
            half_committed.append(intent)
    damaged = frozenset(key for key in abandon if key.startswith("refs/") and is_damaged(backend, key))
    try:
        refs = p.read_refs(backend, but=damaged)
    except CorruptError as error:
        giving_up = f"`tensorcas gc --abandon {error.key}` gives it up, with what it kept"
        remedy = f"`tensorcas repair --from` restores it from another store, {giving_up}"
        raise CorruptError(error.key, f"{error.reason}; {remedy}") from error
    holders: dict[str, list[Ref]] = {}
    for ref in refs:
        holders.setdefault(ref.manifest, []).append(ref)
    live_manifests.update(holders)
    for intent in half_committed:
        if intent.manifest not in holders:
            live.add(_digests_of_intent(backend, intent))
    read = partial(_digests_of_refs, backend)
    for digests in _in_order(backend, lambda held: read(*held), holders.items()):
        live.add(digests)

    lists = p.read_condemned(backend).lists
    ages = {info.key: info.modified_s for info in backend.list("condemned")}
    manifests = frozenset(info.key.removeprefix("manifests/") for info in backend.list("manifests"))
    sizes = dict(p.list_packs(backend))
    tables: dict[str, Entries] = {}
    unreadable: dict[str, CorruptError] = {}
    look = partial(_table_of, backend)
    for name, found in zip(list(sizes), _in_order(backend, lambda pack: look(*pack), list(sizes.items())), strict=True):
        if found is None:
            del sizes[name]
        elif isinstance(found, CorruptError):
            unreadable[name] = found
        else:
            tables[name] = found
    table = make_table(tables)
    needed = live.digests()
    if unreadable and not np.isin(_as_keys(needed), _as_keys(table.entries["digest"])).all():
        name, cause = min(unreadable.items())
        raise CorruptError(pack_key(name), f"{cause.reason}, and no other pack has all that is needed") from cause
    return Survey(
        live=needed,
        live_manifests=frozenset(live_manifests),
        n_refs=len(refs),
        stale=stale,
        damaged_refs=damaged,
        unfenced=unfenced,
        lists=lists,
        dead_lists=[
            condemned
            for condemned in lists
            if ages.get(condemned.key, before + 1) <= before
            and (condemned.packs & sizes.keys() or not condemned.manifests & manifests & live_manifests)
        ],
        manifests=manifests,
        sizes=sizes,
        unreadable=sorted(unreadable),
        table=table,
    )


def _in_order(backend: Backend, read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function that reads to items: in a remote store to many at once."""
    return threads.ordered_map(read, items, waits=True) if backend.is_remote else map(read, items)


def _table_of(backend: Backend, name: str, size: int) -> Entries | CorruptError | None:
    """Read the table of a pack; None if the pack is gone by now."""
    try:
        return p.read_pack_table(backend, name, size=size)
    except BlobNotFoundError:
        return None
    except CorruptError as error:
        return error


class _DigestSet:
    """Gathers digests, keeping no more of the repeated ones than fit a bounded buffer."""

    def __init__(self) -> None:
        self._parts: list[Digests] = []
        self._n_new = 0

    def add(self, digests: Digests) -> None:
        self._parts.append(digests)
        self._n_new += len(digests)
        if self._n_new > _FOLD_ROWS:
            self._parts = [self.digests()]
            self._n_new = 0

    def digests(self) -> Digests:
        """Each once, ascending."""
        if not self._parts:
            return np.empty((0, DIGEST_BYTES), np.uint8)
        return unique_rows(np.concatenate(self._parts))[0]


def _read_intent(backend: Backend, info: BlobInfo) -> p.Intent | None:
    """Read an intent; None if it is committed or withdrawn meanwhile."""
    for attempt in range(_INTENT_READS):
        try:
            return p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            return None
        except CorruptError:
            # A commit writes the ref over its intent, and this may have been read just then.
            if attempt == _INTENT_READS - 1:
                raise
            time.sleep(_INTENT_PAUSE_S)
    return None


def _is_blank(backend: Backend, key: str) -> bool:
    """Tell whether an intent says nothing at all, which none does that somebody is still to commit.

    It was there, but not what it holds, when the machine went down.
    """
    try:
        return not any(backend.get(key, max_bytes=MAX_BYTES))
    except (BlobNotFoundError, CorruptError):
        return False


def _digests_of_intent(backend: Backend, intent: p.Intent) -> Digests:
    """What an intent relies on that its commit has half turned into a ref, so that only its manifest says it."""
    try:
        return _read_manifest(backend, intent.manifest, intent.info.key).digests
    except BlobNotFoundError:
        if backend.stat(intent.info.key) is None:
            return _none()
        raise _gone(intent.manifest, intent.info.key) from None


def _digests_of_refs(backend: Backend, name: str, refs: Sequence[Ref]) -> Digests:
    """What some refs of one manifest keep alive; nothing if they have been dropped since they were read."""
    try:
        return _read_manifest(backend, name, refs[0].label).digests
    except BlobNotFoundError:
        for ref in refs:
            # A ref that has been replaced since needs no look at what it says now: that comes from an intent which was
            # there when intents were read, or which was made after and relies on nothing that is condemned.
            now = p.read_ref(backend, ref.key)
            if now is not None and now.manifest == name:
                raise _gone(name, ref.label) from None
        return _none()


def _read_manifest(backend: Backend, name: str, needed_by: str) -> Manifest:
    key = f"manifests/{name}"
    blob = backend.get(key, max_bytes=MAX_BYTES)
    try:
        return Manifest.from_blob(blob, name)
    except CorruptError as error:
        raise CorruptError(key, f"{error.reason}; {needed_by} needs it") from error
    except NewerFormatError as error:
        raise NewerFormatError(f"the manifest of {needed_by}", error.version, error.supported) from error
    except FormatError as error:
        raise CorruptError(key, f"{error}; {needed_by} needs it") from error


def _gone(name: str, needed_by: str) -> CorruptError:
    return CorruptError(f"manifests/{name}", f"it is gone, and {needed_by} needs it")


def _as_keys(digests: Digests) -> Any:
    """Each digest as one value."""
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()


def is_damaged(backend: Backend, key: str) -> bool:
    """Tell whether there is a ref at a key that cannot be read."""
    try:
        p.read_ref(backend, key)
    except CorruptError:
        return True
    return False


def _none() -> Digests:
    return np.empty((0, DIGEST_BYTES), np.uint8)
