"""Survey of a store by a collector: what there is, and what of it is needed.

The order of the looks makes the answer safe to act on (``docs/design/protocol.md``, A collection).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobInfo, map_requests
from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout import Ref, RefSeen, form_key, formed_by, list_blobs
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest
from tensorcas_mlflow.layout.packs import ENTRY, IN_FULL, Entries, Mask, pack_key
from tensorcas_mlflow.maintenance._census import Census
from tensorcas_mlflow.maintenance._inventory import (
    NO_DIGESTS,
    Copies,
    DigestSet,
    Inventory,
    copies_in,
    inventory_of_packs,
    list_manifests,
    read_tables,
)
from tensorcas_mlflow.maintenance._workers import Readers
from tensorcas_mlflow.store import protocol as p

_MANIFESTS_EACH, _PACKS_EACH = 256, 256
"""Manifests and tables of packs that a worker reads at once. It holds their distinct chunks."""
_INTENT_READS = 3
_INTENT_PAUSE_S = 0.01
_STEP = re.compile(r"(.*/@)([0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A store as a collector sees it at one time. A *chunk* is a position in the digests of ``inventory``."""

    inventory: Inventory
    """All that was ever read of the store; it may tell of blobs that are gone."""
    live: Mask
    """For each chunk whether somebody needs it."""
    n_live: int
    """Chunks that somebody needs, also those that are in no pack and no manifest yet."""
    pinned: frozenset[str]
    """Packs that saves under way may store deltas against."""
    live_manifests: frozenset[str]
    forms: Mapping[str, str]
    """For each needed manifest with a form that counts, the manifest that says how its content is stored."""
    unneeded_forms: frozenset[str]
    """Keys of forms that may go: nothing needs their manifests, or comes to need them."""
    refs: frozenset[RefSeen]
    """Refs as a remote store lists them."""
    n_refs: int
    stale: Sequence[str]
    """Keys of intents that may be aborted."""
    given_up: Digests
    """Chunks of the intents that may be aborted and did not count."""
    manifests_given_up: frozenset[str]
    """Manifests of those intents."""
    damaged_refs: frozenset[str]
    """Keys of refs that cannot be read and that the caller abandons."""
    unread_refs: Mapping[str, str]
    """Keys of other refs that cannot be read, and why. Each manifest that one of them may name counts as needed."""
    unfenced: Sequence[p.Intent]
    """Intents of saves through an MLflow server that the caller does not abandon."""
    lists: Sequence[p.Condemned]
    """All condemned lists."""
    dead_lists: Sequence[p.Condemned]
    """Lists of collectors that are taken for dead, where there is something to finish. A list that names nothing but
    manifests that are needed stays until they are not: its owner, if only slow, may yet delete them."""
    manifests: Mapping[str, int]
    """All manifests there are, and their bytes."""
    sizes: Mapping[str, int]
    """All packs there are, and their bytes."""
    unreadable: Sequence[str]
    """Packs whose table cannot be read, while everything needed is elsewhere; most likely uploads that were cut."""
    rows: Copies
    """Copies in all other packs. A *row* is one of these."""

    def condemned_packs(self) -> frozenset[str]:
        """Return the packs that somebody is about to delete."""
        return frozenset[str]().union(*(condemned.packs for condemned in self.lists))

    def live_rows(self) -> Mask:
        """Return for each row whether its chunk is needed."""
        rows: Mask = self.live[self.rows.chunk]
        return rows

    def rows_in(self, packs: frozenset[str]) -> Mask:
        """Return for each row whether it lies in one of some packs."""
        chosen = np.array([name in packs for name in self.rows.packs], dtype=bool)
        return chosen[self.rows.pack] if len(self.rows.pack) else np.zeros(0, dtype=bool)

    def copies(self, *, but: frozenset[str] = frozenset(), deltas_in: frozenset[str] | None = None) -> Mask:
        """Return for each row whether its chunk can be read from it once some packs are gone.

        A delta whose base is gone is no copy, and neither is a delta against that delta.

        Args:
            but: The packs.
            deltas_in: Packs whose deltas count; by default all.
        """
        there = ~self.rows_in(but)
        if deltas_in is not None:
            there &= (self.rows.links.base == IN_FULL) | self.rows_in(deltas_in)
        return self.rows.links.decodable(there)

    def bases_of(self, rows: Mask) -> Mask:
        """Return for each row whether one of some rows takes it to decode."""
        return self.rows.links.bases_of(rows)

    def has_row(self, rows: Mask) -> Mask:
        """Return for each chunk whether one of some rows is a copy of it."""
        found = np.zeros(len(self.live), dtype=bool)
        found[self.rows.chunk[rows]] = True
        return found


def survey(
    backend: Backend,
    grace_s: float,
    *,
    count_stale: bool,
    abandon: Collection[str] = (),
    without: Collection[str] = (),
    census: Census | None = None,
    readers: Readers | None = None,
    trusts: Callable[[str], bool] = lambda form: True,
    going: Collection[str] | None = None,
) -> Survey:
    """Survey a store.

    Intents come before refs: a save that commits meanwhile is seen as the one or the other. Condemned lists come before
    packs: a pack that another collector deletes meanwhile is still on its list, or gone already.

    The content of a manifest or a pack never changes. So it does not matter when it was read, and a census that knows
    it saves reading it again. The listings are made anew each time.

    Args:
        backend: Backend of the store.
        grace_s: Age in seconds at which an intent or a condemned list counts as left by a dead process.
        count_stale: Whether intents that may be aborted keep their chunks alive. They must where something is deleted
            by this survey: only an intent that has been withdrawn cannot become a ref any more.
        abandon: Ids of intents that may be aborted whatever their age, and keys of damaged refs that count as gone.
        without: Keys of refs that count as gone, to see what would be needed without them.
        census: Census of the store; it learns what has to be read.
        readers: Workers that read the manifests and the tables of packs; by default this process does.
        trusts: Tells by the name of its manifest whether a form counts. What other forms derive is needed in packs.
        going: Manifests on the caller's condemned list: no save comes to rely on these. The form of another manifest
            stays, even if nothing needs that now. None for a plan, which puts all unneeded ones on its list.

    Raises:
        CorruptError: A blob cannot be read that says what is needed.
        NewerFormatError: A later release wrote a blob.
    """
    census = census or Census(backend)
    before = time.time() - grace_s
    saves = _read_intents(backend, before, count_stale=count_stale, abandon=abandon)
    damaged = frozenset(key for key in abandon if key.startswith("refs/") and is_damaged(backend, key))
    refs = _read_refs(backend, census, but={*damaged, *without})
    _learn_needed(backend, census, refs, saves.half_committed, readers)

    lists = p.read_condemned(backend).lists
    ages = {info.key: info.modified_s for info in list_blobs(backend, "condemned")}
    manifests = list_manifests(backend)
    _check_there(backend, census, refs, manifests)
    blind = _kept_by_damaged(backend, census, refs, manifests)
    needed = saves.manifests.union(refs.named, blind)
    may_go = refs.forms.keys() - needed
    if going is not None:
        may_go -= manifests.keys() - frozenset(going)
    held = {of: name for of, name in refs.forms.items() if of not in may_go}
    forms = {of: name for of, name in held.items() if of in needed and trusts(name)}
    live_manifests = needed.union(held.values())
    sizes, unreadable = _read_packs(backend, census, readers)
    inventory = census.inventory
    # An intent needs all of its digests. A manifest is needed if a ref names it, or an intent that lists no digests.
    as_stored = {forms.get(name, name) for name in refs.named} | set(held.values())
    named = inventory.chunks_of({*as_stored, *blind, *(intent.manifest for intent in saves.half_committed)})
    declared = saves.chunks.digests()
    chunks = inventory.find(declared)
    named |= inventory.marked(chunks)
    state = Survey(
        inventory=inventory,
        live=named,
        n_live=int(named.sum()) + int((chunks < 0).sum()),
        pinned=frozenset(saves.bases),
        live_manifests=frozenset(live_manifests),
        forms=forms,
        unneeded_forms=frozenset(map(form_key, may_go)),
        refs=refs.seen,
        n_refs=refs.n,
        stale=saves.stale,
        given_up=saves.given_up.digests(),
        manifests_given_up=frozenset(saves.manifests_given_up),
        damaged_refs=damaged,
        unread_refs={key: error.reason for key, error in refs.damaged.items()},
        unfenced=saves.unfenced,
        lists=lists,
        dead_lists=[
            condemned
            for condemned in lists
            if ages.get(condemned.key, before + 1) <= before
            and (condemned.packs & sizes.keys() or not condemned.manifests & manifests.keys() & live_manifests)
        ],
        manifests=manifests,
        sizes=sizes,
        unreadable=sorted(unreadable),
        rows=copies_in(inventory, sizes.keys() - unreadable.keys()),
    )
    if unreadable and ((chunks < 0).any() or (named & ~state.has_row(state.copies())).any()):
        name, cause = min(unreadable.items())
        raise CorruptError(pack_key(name), f"{cause.reason}, and no other pack has all that is needed") from cause
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saves:
    """What the intents of a store say of the saves under way."""

    chunks: DigestSet = field(default_factory=DigestSet)
    """Chunks that they need."""
    manifests: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)
    """Packs that hold their bases."""
    half_committed: list[p.Intent] = field(default_factory=list)
    """Those that list no chunks: their manifests say what they need."""
    unfenced: list[p.Intent] = field(default_factory=list)
    """Those through a carrier, which nothing proves dead."""
    stale: list[str] = field(default_factory=list)
    """Keys of intents of dead saves."""
    given_up: DigestSet = field(default_factory=DigestSet)
    """Chunks that only saves need which count for nothing."""
    manifests_given_up: set[str] = field(default_factory=set)

    def keep(self, intent: p.Intent) -> None:
        """Note what a save needs."""
        self.manifests.add(intent.manifest)
        self.bases.update(intent.bases)
        if intent.digests is not None:
            self.chunks.add(intent.digests)
        else:
            self.half_committed.append(intent)

    def give_up(self, intent: p.Intent) -> None:
        """Note what a save needed that counts for nothing."""
        self.manifests_given_up.add(intent.manifest)
        self.given_up.add(NO_DIGESTS if intent.digests is None else intent.digests)


def _read_intents(backend: Backend, before: float, *, count_stale: bool, abandon: Collection[str]) -> _Saves:
    """Read all intents; those last written before some time, and ``abandon``, count as dead. See `survey`."""
    saves = _Saves()
    for info in list(list_blobs(backend, "intents")):
        is_given_up = info.key.rpartition("/")[2] in abandon
        silent = is_given_up or info.modified_s <= before
        try:
            intent = _read_intent(backend, info)
        except NewerFormatError:
            raise  # only a later release knows what it keeps, and how to give it up
        except FormatError as error:
            # Its save is dead, or it would have turned it into a ref by now. Nobody can tell what it relies on, so it
            # must not become a ref any more before something is deleted.
            if not (silent or _is_blank(backend, info.key)):
                raise _perhaps_under_way(info.key, error) from error
            if not count_stale:
                saves.stale.append(info.key)
            elif not backend.withdraw(info.key, info.token) and backend.stat(info.key) is not None:
                raise
            continue
        if intent is None:
            continue
        if intent.through_carrier and not is_given_up:
            # Neither its age nor the death of its process proves it dead: the server may yet do what it was asked.
            saves.unfenced.append(intent)
        elif silent or intent.writer_is_dead:
            saves.stale.append(info.key)
            if not count_stale:
                saves.give_up(intent)
                continue
        saves.keep(intent)
    return saves


def _perhaps_under_way(key: str, error: FormatError) -> CorruptError:
    remedy = f"it is collected after the grace, or by `tensorcas gc --abandon {key.rpartition('/')[2]}`"
    return CorruptError(key, f"{getattr(error, 'reason', error)}; perhaps its save is under way: {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refs:
    """All refs of a store."""

    holders: dict[str, list[str]]
    """For each manifest that a ref names the keys of those refs; steps of one series in their order."""
    seen: frozenset[RefSeen]
    """Refs as a remote store lists them; empty for a local one."""
    damaged: Mapping[str, CorruptError]
    """Errors of refs that cannot be read, by key."""

    @property
    def forms(self) -> dict[str, str]:
        """For each manifest with a form the name of the form's manifest."""
        keys = ((name, key) for name, keys in self.holders.items() for key in keys)
        return {of: name for name, key in keys if (of := formed_by(key)) is not None}

    @property
    def named(self) -> set[str]:
        """The manifests that refs name which are no forms."""
        return {name for name, keys in self.holders.items() if any(formed_by(key) is None for key in keys)}

    @property
    def n(self) -> int:
        """Number of refs that can be read and are no forms."""
        return sum(formed_by(key) is None for keys in self.holders.values() for key in keys)


def _read_intent(backend: Backend, info: BlobInfo) -> p.Intent | None:
    """Read an intent; return None if it is committed or withdrawn meanwhile."""
    for attempt in range(_INTENT_READS):
        try:
            return p.parse_intent(info, backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            return None
        except CorruptError:
            # A commit writes the ref over its intent, and this read may have met it.
            if attempt == _INTENT_READS - 1:
                raise
            time.sleep(_INTENT_PAUSE_S)
    return None


def _is_blank(backend: Backend, key: str) -> bool:
    """Tell whether an intent is all zeros, as a power cut leaves one. No save under way has such an intent."""
    try:
        return not any(backend.get(key, max_bytes=MAX_BYTES))
    except (BlobNotFoundError, CorruptError):
        return False


def is_damaged(backend: Backend, key: str) -> bool:
    """Tell whether there is a ref at a key that cannot be read."""
    try:
        p.read_ref(backend, key)
    except CorruptError:
        return True
    return False


def _read_refs(backend: Backend, census: Census, *, but: Collection[str]) -> _Refs:
    """Read the manifest that each ref names.

    A local store is read in full each time: the token of a file is its inode number, which another file may get, and
    its times come from clocks. In a remote store no two blobs at one key ever have the same token.

    Args:
        backend: Backend of the store.
        census: Census that knows refs of remote stores, and learns more.
        but: Keys of refs to leave out.

    Raises:
        NewerFormatError: A later release wrote one.
    """
    infos = sorted((info for info in list_blobs(backend, "refs") if info.key not in but), key=_by_series)
    seen = [RefSeen.of(info) for info in infos] if backend.is_remote else []
    known = {each.key: name for each in seen if (name := census.ref(each)) is not None}
    unknown = [info.key for info in infos if info.key not in known]
    found: dict[str, Ref | None] = {}
    damaged: dict[str, CorruptError] = {}
    for key, read in zip(unknown, map_requests(backend, partial(_ref_or_fault, backend), unknown), strict=True):
        if isinstance(read, CorruptError):
            damaged[key] = read
        else:
            found[key] = read
    for each in seen:
        ref = found.get(each.key)
        if ref is not None:
            census.learn_ref(each, ref.manifest)
    holders: dict[str, list[str]] = {}
    for info in infos:
        ref = found.get(info.key)
        name = known.get(info.key) if ref is None else ref.manifest
        if name is not None:
            holders.setdefault(name, []).append(info.key)
    return _Refs(holders=holders, seen=frozenset(seen), damaged=damaged)


def _ref_or_fault(backend: Backend, key: str) -> Ref | CorruptError | None:
    try:
        return p.read_ref(backend, key)
    except CorruptError as error:
        return error


def _by_series(info: BlobInfo) -> tuple[str, int, str]:
    """Order refs so that steps of one series follow each other: their manifests differ little."""
    step = _STEP.fullmatch(info.key)
    return (info.key, 0, "") if step is None else (step[1], int(step[2]), info.key)


def _kept_by_damaged(backend: Backend, census: Census, refs: _Refs, manifests: Mapping[str, int]) -> frozenset[str]:
    """Return the manifests that damaged refs may keep, and read those the census does not know.

    A damaged ref may name any manifest there is, unless it still says which. So all of them are kept.

    Args:
        backend: Backend of the store.
        census: Census that learns what they name.
        refs: Refs that were read before ``manifests`` were listed.
        manifests: Manifests there are, and their sizes.

    Raises:
        CorruptError: One cannot be read, and a damaged ref may need it.
    """
    named = {key: p.manifest_of_damaged_ref(backend, key) for key in refs.damaged}
    kept = frozenset(manifests) if None in named.values() else frozenset(manifests) & {*named.values()}

    def read(name: str) -> tuple[str, Manifest, int] | None:
        who = next(key for key, each in named.items() if each in (name, None))
        try:
            return read_manifest(backend, name, lambda: f"{who} cannot be read, and perhaps")
        except BlobNotFoundError:
            return None  # another collector, which could read all refs, has deleted it

    unknown = [name for name in sorted(kept) if census.manifests.get(name) != manifests[name]]
    learn(census, map_requests(backend, read, unknown))
    return kept


def _learn_needed(
    backend: Backend, census: Census, refs: _Refs, half_committed: Sequence[p.Intent], readers: Readers | None
) -> None:
    """Read every manifest that a ref needs, or an intent that lists no digests, and that the census does not know.

    Raises:
        CorruptError: One cannot be read, and is still needed.
    """
    holders = [(name, keys) for name, keys in refs.holders.items() if name not in census.manifests]
    if readers is None:
        _learn_holders(backend, census, holders)
    else:
        for part in readers.each(_read_holders, holders, _MANIFESTS_EACH, _bytes_of):
            census.learn_part(part)
    intents = [intent for intent in half_committed if intent.manifest not in census.manifests]
    learn(census, map_requests(backend, partial(_of_intent, backend), intents))


def _learn_holders(backend: Backend, census: Census, holders: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Teach a census some manifests, given with the keys of their refs."""
    learn(census, map_requests(backend, lambda held: _of_refs(backend, *held), holders))


def _read_holders(backend: Backend, holders: Sequence[tuple[str, Sequence[str]]]) -> Inventory:
    """Read some manifests in a worker."""
    census = Census(backend)
    _learn_holders(backend, census, holders)
    return census.inventory


def _bytes_of(part: Inventory) -> int:
    """Return the bytes of the manifests and of the entries of packs that were read."""
    return int(part.manifest_bytes.sum()) + len(part.entry_pack) * ENTRY.itemsize


def learn(census: Census, manifests: Iterable[tuple[str, Manifest, int] | None]) -> None:
    """Teach a census manifests: names, manifests, and the sizes of their blobs."""
    for found in manifests:
        if found is not None:
            name, manifest, n_bytes = found
            census.learn_manifest(name, manifest.stored_digests, n_bytes=n_bytes)


def _check_there(backend: Backend, census: Census, refs: _Refs, manifests: Mapping[str, int]) -> None:
    """Check that every manifest that refs name exists, and has the size it had when it was read.

    Args:
        backend: Backend of the store.
        census: Census that knows what they name.
        refs: Refs that were read before ``manifests`` were listed.
        manifests: Manifests there are, and their sizes.

    Raises:
        CorruptError: One is gone or damaged, and a ref still names it.
    """
    for name, keys in refs.holders.items():
        if name not in manifests:
            _check_unneeded(backend, name, keys)
        elif census.manifests.get(name) != manifests[name]:
            _of_refs(backend, name, keys)


def read_manifest(backend: Backend, name: str, needed_by: Callable[[], str]) -> tuple[str, Manifest, int]:
    """Read a manifest: its name, itself, and the size of its blob.

    Args:
        backend: Backend of the store.
        name: Name of the manifest.
        needed_by: Returns who needs it, in words, for an error.

    Raises:
        BlobNotFoundError: There is none.
        CorruptError: It is damaged.
        NewerFormatError: A later release wrote it.
    """
    key = f"manifests/{name}"
    blob = backend.get(key, max_bytes=MAX_BYTES)
    try:
        return name, Manifest.from_blob(blob, name), len(blob)
    except CorruptError as error:
        raise CorruptError(key, f"{error.reason}; {needed_by()} needs it") from error
    except NewerFormatError as error:
        raise NewerFormatError(f"the manifest of {needed_by()}", error.version, error.supported) from error
    except FormatError as error:
        raise CorruptError(key, f"{error}; {needed_by()} needs it") from error


def _of_intent(backend: Backend, intent: p.Intent) -> tuple[str, Manifest, int] | None:
    """Read the manifest of an intent that its commit has half turned into a ref, so that only the manifest says it."""
    try:
        return read_manifest(backend, intent.manifest, lambda: intent.info.key)
    except BlobNotFoundError:
        if backend.stat(intent.info.key) is None:
            return None
        raise _gone(intent.manifest, intent.info.key) from None


def _of_refs(backend: Backend, name: str, keys: Sequence[str]) -> tuple[str, Manifest, int] | None:
    """Read the manifest of some refs; return None if they have been dropped since they were read."""
    try:
        return read_manifest(backend, name, lambda: _label(backend, keys[0]))
    except BlobNotFoundError:
        _check_unneeded(backend, name, keys)
        return None


def _check_unneeded(backend: Backend, name: str, keys: Sequence[str]) -> None:
    for key in keys:
        # A ref that has been replaced since needs no look: what it says now comes from an intent that was there when
        # intents were read, or that was made after and relies on nothing that is condemned.
        now = p.read_ref(backend, key)
        if now is not None and now.manifest == name:
            raise _gone(name, now.label) from None


def _label(backend: Backend, key: str) -> str:
    ref = p.read_ref(backend, key)
    return key if ref is None else ref.label


def _gone(name: str, needed_by: str) -> CorruptError:
    return CorruptError(f"manifests/{name}", f"it is gone, and {needed_by} needs it")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Tables of some packs."""

    known: Inventory
    gone: Sequence[str]
    """Packs that do not exist any more."""
    unreadable: Mapping[str, CorruptError]
    """Errors of those whose table is damaged, by name."""


def _read_tables(backend: Backend, packs: Sequence[tuple[str, int]]) -> _Tables:
    """Read the tables of packs, given by name and size."""
    tables: dict[str, Entries] = {}
    gone: list[str] = []
    unreadable: dict[str, CorruptError] = {}
    for name, found in read_tables(backend, dict(packs)):
        if found is None:
            gone.append(name)
        elif isinstance(found, CorruptError):
            unreadable[name] = found
        elif isinstance(found, FormatError | BackendError):
            raise found
        else:
            tables[name] = found
    return _Tables(known=inventory_of_packs(tables, dict(packs)), gone=gone, unreadable=unreadable)


def _read_packs(
    backend: Backend, census: Census, readers: Readers | None
) -> tuple[dict[str, int], dict[str, CorruptError]]:
    """List the packs, and teach the census the tables of those it does not know.

    Returns:
        Sizes of the packs, by name; and the errors of those whose table is damaged.
    """
    sizes = dict(p.list_packs(backend))
    unknown = [(name, size) for name, size in sizes.items() if census.packs.get(name) != size]
    unreadable: dict[str, CorruptError] = {}
    if readers is None:
        parts: Iterable[_Tables] = [_read_tables(backend, unknown)] if unknown else []
    else:
        parts = readers.each(_read_tables, unknown, _PACKS_EACH, lambda part: _bytes_of(part.known))
    for part in parts:
        for name in part.gone:
            del sizes[name]
        unreadable.update(part.unreadable)
        census.learn_part(part.known)
    return sizes, unreadable
