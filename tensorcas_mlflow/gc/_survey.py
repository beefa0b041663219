"""What a store holds and what of it is needed, looked at in an order that makes the answer safe to act on."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.census import NO_BASE, Census, Facts, RefSeen
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.gc._needed import check_there, in_order, kept_by_damaged, learn_needed, read_intent, read_refs
from tensorcas_mlflow.index import IN_FULL, NOWHERE, Mask, pack_key
from tensorcas_mlflow.manifest import MAX_BYTES
from tensorcas_mlflow.pack import MAX_DEPTH, Entries
from tensorcas_mlflow.store import protocol as p

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
