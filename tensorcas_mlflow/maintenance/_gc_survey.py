"""What a store holds and what of it is needed, looked at in an order that makes the answer safe to act on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.index import IN_FULL, NOWHERE, Mask, pack_key
from tensorcas_mlflow.maintenance._census import Census
from tensorcas_mlflow.maintenance._inventory import NO_BASE, Facts, RefSeen
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import MAX_DEPTH, Entries
from tensorcas_mlflow.store import Ref
from tensorcas_mlflow.store import protocol as p

T = TypeVar("T")
R = TypeVar("R")

_INTENT_READS = 3
_INTENT_PAUSE_S = 0.01
_STEP = re.compile(r"(.*/@)([0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """All refs there are."""

    holders: dict[str, list[str]]
    """For each manifest that a ref names the keys of those refs; steps of one series in their order."""
    seen: frozenset[RefSeen]
    """How a remote store has listed them; empty for a local one."""
    damaged: Mapping[str, CorruptError]
    """Those that cannot be read, by key, and why."""

    @property
    def n(self) -> int:
        """How many there are that can be read."""
        return sum(map(len, self.holders.values()))


def in_order(backend: Backend, read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Apply a function that reads to items: in a remote store to many at once."""
    return threads.ordered_map(read, items, waits=True) if backend.is_remote else map(read, items)


def read_intent(backend: Backend, info: BlobInfo) -> p.Intent | None:
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


def read_refs(backend: Backend, census: Census, *, but: Collection[str]) -> Refs:
    """Find out which manifests refs name.

    In a local store every ref is read, each time: the token of a file is its number, which another file may get, and
    times of change are clocks' words. In a remote one no two blobs that stand at a key have one token.

    Args:
        backend: Which.
        census: Knows refs of remote stores, and comes to know more.
        but: Keys of refs to leave out.

    Raises:
        NewerFormatError: A later release wrote one.
    """
    infos = sorted((info for info in list_blobs(backend, "refs") if info.key not in but), key=_by_series)
    seen = [RefSeen(info.key, info.token, info.size, info.modified_s) for info in infos] if backend.is_remote else []
    known = {each.key: name for each in seen if (name := census.ref(each)) is not None}
    unknown = [info.key for info in infos if info.key not in known]
    found: dict[str, Ref | None] = {}
    damaged: dict[str, CorruptError] = {}
    for key, read in zip(unknown, in_order(backend, partial(_ref_or_fault, backend), unknown), strict=True):
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
    return Refs(holders=holders, seen=frozenset(seen), damaged=damaged)


def _ref_or_fault(backend: Backend, key: str) -> Ref | CorruptError | None:
    try:
        return p.read_ref(backend, key)
    except CorruptError as error:
        return error


def kept_by_damaged(backend: Backend, census: Census, refs: Refs, manifests: Mapping[str, int]) -> frozenset[str]:
    """Name the manifests that damaged refs may keep, and see that it is known what they name.

    A damaged ref may name any manifest there is, unless it still says which. So all of them are kept.

    Args:
        backend: Where.
        census: Comes to know what they name.
        refs: Which were there before ``manifests`` were listed.
        manifests: Those there are, and their sizes.

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
            return None  # another collector has deleted it, to whom all refs could be read

    unknown = [name for name in sorted(kept) if census.manifests.get(name) != manifests[name]]
    learn(census, in_order(backend, read, unknown))
    return kept


def learn_needed(backend: Backend, census: Census, refs: Refs, half_committed: Sequence[p.Intent]) -> None:
    """See that it is known what every manifest names that a ref, or an intent which says no digests, needs.

    Raises:
        CorruptError: One cannot be read, and is still needed.
    """
    holders = [(name, keys) for name, keys in refs.holders.items() if name not in census.manifests]
    learn(census, in_order(backend, lambda held: _of_refs(backend, *held), holders))
    intents = [intent for intent in half_committed if intent.manifest not in census.manifests]
    learn(census, in_order(backend, partial(_of_intent, backend), intents))


def learn(census: Census, manifests: Iterable[tuple[str, Manifest, int] | None]) -> None:
    """Take up what some manifests name: names, manifests, and the bytes of their blobs."""
    for found in manifests:
        if found is not None:
            name, manifest, n_bytes = found
            census.learn_manifest(name, manifest.digests, n_bytes=n_bytes)


def check_there(backend: Backend, census: Census, refs: Refs, manifests: Mapping[str, int]) -> None:
    """See that every manifest that refs name is there, as long as it was when it was read.

    Args:
        backend: Where.
        census: Knows what they name.
        refs: Which were there before ``manifests`` were listed.
        manifests: Those there are, and their sizes.

    Raises:
        CorruptError: One is gone or damaged, and a ref still names it.
    """
    for name, keys in refs.holders.items():
        if name not in manifests:
            _check_unneeded(backend, name, keys)
        elif census.manifests.get(name) != manifests[name]:
            _of_refs(backend, name, keys)


def read_manifest(backend: Backend, name: str, needed_by: Callable[[], str]) -> tuple[str, Manifest, int]:
    """Read a manifest: its name, itself, and the bytes of its blob.

    Args:
        backend: Where it is.
        name: Which.
        needed_by: Says in words, for an error, who needs it.

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
    """Read the manifest of some refs; None if they have been dropped since they were read."""
    try:
        return read_manifest(backend, name, lambda: _label(backend, keys[0]))
    except BlobNotFoundError:
        _check_unneeded(backend, name, keys)
        return None


def _check_unneeded(backend: Backend, name: str, keys: Sequence[str]) -> None:
    for key in keys:
        # A ref that has been replaced since needs no look at what it says now: that comes from an intent which was
        # there when intents were read, or which was made after and relies on nothing that is condemned.
        now = p.read_ref(backend, key)
        if now is not None and now.manifest == name:
            raise _gone(name, now.label) from None


def _label(backend: Backend, key: str) -> str:
    ref = p.read_ref(backend, key)
    return key if ref is None else ref.label


def _gone(name: str, needed_by: str) -> CorruptError:
    return CorruptError(f"manifests/{name}", f"it is gone, and {needed_by} needs it")


def _by_series(info: BlobInfo) -> tuple[str, int, str]:
    """Order refs so that steps of one series follow each other: their manifests differ little."""
    step = _STEP.fullmatch(info.key)
    return (info.key, 0, "") if step is None else (step[1], int(step[2]), info.key)


_FOLD_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A store as a collector sees it at one time.

    A *chunk* is a position in the digests of ``facts``, and a *row* one of ``pack``, ``chunk``, ``stored_bytes`` and
    ``base``.
    """

    facts: Facts
    """What is known of all that was ever read; it may tell of what is gone."""
    live: Mask
    """For each chunk whether somebody needs it."""
    n_live: int
    """Chunks that somebody needs, also those that are in no pack and no manifest yet."""
    pinned: frozenset[str]
    """Packs that saves under way may store deltas against."""
    live_manifests: frozenset[str]
    refs: frozenset[RefSeen]
    """Refs as a remote store has listed them."""
    n_refs: int
    stale: Sequence[str]
    """Keys of intents that may be aborted."""
    given_up: Digests
    """What intents rely on that may be aborted and did not count."""
    manifests_given_up: frozenset[str]
    """The manifests of those."""
    damaged_refs: frozenset[str]
    """Keys of refs that cannot be read and have been given up."""
    unread_refs: Mapping[str, str]
    """Keys of other refs that cannot be read, and why. Each manifest that one of them may name counts as needed."""
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
    packs: tuple[str, ...]
    """The others."""
    pack: Any
    """For each row, which is one entry of one of these, a position in ``packs``."""
    chunk: Any
    stored_bytes: Any
    effort: Any
    base: Any
    """For each row that is a delta the row of its base, or `NOWHERE`; `IN_FULL` for the others."""

    def condemned_packs(self) -> frozenset[str]:
        """Packs that somebody is about to delete."""
        return frozenset[str]().union(*(condemned.packs for condemned in self.lists))

    def live_rows(self) -> Mask:
        """For each row whether its chunk is needed."""
        rows: Mask = self.live[self.chunk]
        return rows

    def rows_in(self, packs: frozenset[str]) -> Mask:
        """For each row whether it lies in one of some packs."""
        chosen = np.array([name in packs for name in self.packs], dtype=bool)
        return chosen[self.pack] if len(self.pack) else np.zeros(0, dtype=bool)

    def copies(self, *, but: frozenset[str] = frozenset()) -> Mask:
        """For each row whether its chunk can be read from it if some packs are gone.

        A delta whose base is not there is no copy, and so on.
        """
        copies: Mask = ~self.rows_in(but) & (self.base != NOWHERE)
        deltas = np.flatnonzero(self.base >= 0)
        for _ in range(MAX_DEPTH if len(deltas) else 0):
            copies[deltas] &= copies[self.base[deltas]]
        return copies

    def bases_of(self, rows: Mask) -> Mask:
        """For each row whether one of some rows needs it to be decoded."""
        bases = np.zeros(len(self.base), dtype=bool)
        chosen = self.base[rows]
        while len(chosen := np.unique(chosen[chosen >= 0])) and not bases[chosen].all():
            bases[chosen] = True
            chosen = self.base[chosen]
        return bases

    def needing(self, rows: Mask) -> Mask:
        """For each row whether it is one of some rows, or needs one of them to be decoded."""
        needing = rows.copy()
        deltas = np.flatnonzero(self.base >= 0)
        for _ in range(MAX_DEPTH if rows.any() else 0):
            needing[deltas] |= needing[self.base[deltas]]
        return needing

    def has_row(self, rows: Mask) -> Mask:
        """For each chunk whether one of some rows is of it."""
        found = np.zeros(len(self.live), dtype=bool)
        found[self.chunk[rows]] = True
        return found


def survey(
    backend: Backend,
    grace_s: float,
    *,
    count_stale: bool,
    abandon: Collection[str] = (),
    without: Collection[str] = (),
    census: Census | None = None,
) -> Survey:
    """Look at everything.

    Intents come before refs: a save that commits meanwhile is seen as the one or the other. Condemned lists come before
    packs: a pack that another collector deletes meanwhile is still on its list, or gone already.

    What manifests and packs say never changes, so it does not matter when they were read, and a census that knows it
    saves reading them again. What there *is* is listed here, each time.

    Args:
        backend: Which.
        grace_s: After how many seconds of silence somebody is taken for dead.
        count_stale: Whether intents that may be aborted keep their chunks alive. They must where something is deleted
            by this survey: only an intent that has been withdrawn cannot become a ref any more.
        abandon: Ids of intents that may be aborted whatever their age, and keys of damaged refs that count as gone.
        without: Keys of refs that count as gone, to see what would be needed without them.
        census: What is known of the store; comes to know what has to be read.

    Raises:
        CorruptError: Something cannot be read that says what is needed.
        NewerFormatError: A later release has written something.
    """
    census = census or Census(backend)
    before = time.time() - grace_s
    stale: list[str] = []
    live, given_up = _DigestSet(), _DigestSet()
    live_manifests: set[str] = set()
    pinned: set[str] = set()
    manifests_given_up: set[str] = set()
    half_committed: list[p.Intent] = []
    unfenced: list[p.Intent] = []
    for info in list(list_blobs(backend, "intents")):
        is_given_up = info.key.rpartition("/")[2] in abandon
        silent = is_given_up or info.modified_s <= before
        try:
            intent = read_intent(backend, info)
        except NewerFormatError:
            raise  # what it keeps, and how it is given up, only a later release knows
        except FormatError as error:
            # Its save is dead, or it would have turned it into a ref by now. What it relies on cannot be told, so it
            # must not become a ref any more before something is deleted.
            if not (silent or _is_blank(backend, info.key)):
                remedy = (
                    f"it is collected after the grace, or by `tensorcas gc --abandon {info.key.rpartition('/')[2]}`"
                )
                reason = f"{getattr(error, 'reason', error)}; perhaps its save is under way: {remedy}"
                raise CorruptError(info.key, reason) from error
            if not count_stale:
                stale.append(info.key)
            elif not backend.withdraw(info.key, info.token) and backend.stat(info.key) is not None:
                raise
            continue
        if intent is None:
            continue
        if intent.through_carrier and not is_given_up:
            # Not by its age, nor because its process is gone: what the server was last asked may be done yet.
            unfenced.append(intent)
        elif silent or intent.writer_is_dead:
            stale.append(info.key)
            if not count_stale:
                manifests_given_up.add(intent.manifest)
                given_up.add(_NO_DIGESTS if intent.digests is None else intent.digests)
                continue
        live_manifests.add(intent.manifest)
        pinned |= intent.bases
        if intent.digests is not None:
            live.add(intent.digests)
        else:
            half_committed.append(intent)
    damaged = frozenset(key for key in abandon if key.startswith("refs/") and is_damaged(backend, key))
    refs = read_refs(backend, census, but={*damaged, *without})
    learn_needed(backend, census, refs, half_committed)
    live_manifests.update(refs.holders)

    lists = p.read_condemned(backend).lists
    ages = {info.key: info.modified_s for info in list_blobs(backend, "condemned")}
    manifests = {info.key.removeprefix("manifests/"): info.size for info in list_blobs(backend, "manifests")}
    check_there(backend, census, refs, manifests)
    blind = kept_by_damaged(backend, census, refs, manifests)
    live_manifests |= blind
    sizes, unreadable = _read_packs(backend, census)
    facts = census.facts
    is_there = np.array([name not in unreadable and name in sizes for name in facts.packs], dtype=bool)
    rows = is_there[facts.entry_pack] if len(facts.packs) else np.zeros(0, dtype=bool)
    # An intent's digests are all needed; a manifest's if a ref names it, or an intent that does not say them itself.
    named = facts.chunks_of({*refs.holders, *blind, *(intent.manifest for intent in half_committed)})
    declared = live.digests()
    chunks = facts.find(declared)
    named[chunks[chunks >= 0]] = True
    packs = tuple(name for name, there in zip(facts.packs, is_there, strict=True) if there)
    pack, chunk = (np.cumsum(is_there) - 1)[facts.entry_pack[rows]], facts.entry_chunk[rows]
    state = Survey(
        facts=facts,
        live=named,
        n_live=int(named.sum()) + int((chunks < 0).sum()),
        pinned=frozenset(pinned),
        live_manifests=frozenset(live_manifests),
        refs=refs.seen,
        n_refs=refs.n,
        stale=stale,
        given_up=given_up.digests(),
        manifests_given_up=frozenset(manifests_given_up),
        damaged_refs=damaged,
        unread_refs={key: error.reason for key, error in refs.damaged.items()},
        unfenced=unfenced,
        lists=lists,
        dead_lists=[
            condemned
            for condemned in lists
            if ages.get(condemned.key, before + 1) <= before
            and (condemned.packs & sizes.keys() or not condemned.manifests & manifests.keys() & live_manifests)
        ],
        manifests=frozenset(manifests),
        sizes=sizes,
        unreadable=sorted(unreadable),
        packs=packs,
        pack=pack,
        chunk=chunk,
        stored_bytes=facts.entry_bytes[rows].astype(np.int64),
        effort=facts.entry_effort[rows],
        base=_base_rows(facts, rows, packs, pack, chunk),
    )
    if unreadable and ((chunks < 0).any() or (named & ~state.has_row(state.copies())).any()):
        name, cause = min(unreadable.items())
        raise CorruptError(pack_key(name), f"{cause.reason}, and no other pack has all that is needed") from cause
    return state


def _base_rows(facts: Facts, entries: Mask, packs: Sequence[str], pack: Any, chunk: Any) -> Any:
    """Find the rows of the bases of deltas; see `Survey.base`.

    Args:
        facts: What is known.
        entries: For each entry of ``facts`` whether it is a row.
        packs: As `Survey.packs`.
        pack: As `Survey.pack`.
        chunk: As `Survey.chunk`.
    """
    base = np.full(len(pack), IN_FULL, dtype=np.int64)
    base_chunk, base_pack = facts.entry_base[entries], facts.entry_base_pack[entries]
    deltas = np.flatnonzero(base_chunk != NO_BASE)
    if len(deltas) == 0:
        return base
    position = {name: at for at, name in enumerate(packs)}
    place = np.array([position.get(name, -1) for name in facts.base_packs], dtype=np.int64)[base_pack[deltas]]
    keys = pack.astype(np.int64) << 32 | chunk
    order = np.argsort(keys, kind="stable")
    wanted = place << 32 | base_chunk[deltas]
    at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
    is_found = (keys[order][at] == wanted) & (place >= 0)
    base[deltas] = NOWHERE
    base[deltas[is_found]] = order[at[is_found]]
    return base


def _read_packs(backend: Backend, census: Census) -> tuple[dict[str, int], dict[str, CorruptError]]:
    """List the packs, and see that the tables are known of all but those that cannot be read."""
    sizes = dict(p.list_packs(backend))
    unknown = [(name, size) for name, size in sizes.items() if census.packs.get(name) != size]
    tables: dict[str, Entries] = {}
    unreadable: dict[str, CorruptError] = {}
    found = in_order(backend, lambda pack: _table_of(backend, *pack), unknown)
    for (name, _), table in zip(unknown, found, strict=True):
        if table is None:
            del sizes[name]
        elif isinstance(table, CorruptError):
            unreadable[name] = table
        else:
            tables[name] = table
    census.learn_packs(tables, sizes)
    return sizes, unreadable


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
        return unique_rows(np.concatenate([_NO_DIGESTS, *self._parts]))[0]


def _is_blank(backend: Backend, key: str) -> bool:
    """Tell whether an intent says nothing at all, which none does that somebody is still to commit.

    It was there, but not what it holds, when the machine went down.
    """
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


_NO_DIGESTS = np.empty((0, DIGEST_BYTES), np.uint8)
