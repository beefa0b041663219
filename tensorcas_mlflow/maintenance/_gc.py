"""Garbage collection: a plan of what nothing needs, and its execution.

Any number of collectors and writers may run at once. Clocks decide when somebody is taken for dead, never whether
something may be deleted; ``docs/design/protocol.md`` argues for every step.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from tensorcas_mlflow.backends import Backend, map_requests
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.base.notebook import PrintedPlan
from tensorcas_mlflow.base.progress import Watcher, ignore
from tensorcas_mlflow.base.text import content_text, count_text, freed_text, size_text
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    ConflictError,
    CorruptError,
    DirectAccessError,
    FormatError,
    NotFoundError,
    PendingSavesError,
)
from tensorcas_mlflow.layout import find_strangers, form_key, list_blobs, strangers_text, tidy_ref_tables
from tensorcas_mlflow.layout.manifests import Manifest, has_content_of
from tensorcas_mlflow.layout.packs import pack_key, segment_name
from tensorcas_mlflow.maintenance._census import Census
from tensorcas_mlflow.maintenance._defaults import DEFAULT_GRACE_S, DEFAULT_MAX_WASTE, DEFAULT_QUARANTINE_S
from tensorcas_mlflow.maintenance._gc_copy import copy_out
from tensorcas_mlflow.maintenance._gc_survey import Survey, is_damaged, learn, read_manifest, survey
from tensorcas_mlflow.maintenance._inventory import disk_bytes
from tensorcas_mlflow.maintenance._workers import Readers
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)


def choose(
    state: Survey, max_waste: float, *, prefer: Set[str] = frozenset(), avoid: Set[str] = frozenset()
) -> tuple[list[str], dict[str, int], int]:
    """Choose the packs that can go.

    Of a chunk with several copies one counts: one that needs no pack to be avoided, in a preferred pack, with the most
    effort, in the pack of which most is needed; the first of equals. So the other packs become empty, and optimized
    copies stay. Copies in condemned packs do not count. The base of a delta that is needed is needed where it lies. So
    a pack that holds one is not rewritten: its deltas would have to be written in full. The bases of a pack are needed
    too while a save under way may store deltas against that pack.

    Args:
        state: Survey of the store.
        max_waste: Share of a pack's payload that may be unneeded.
        prefer: Packs whose copies count first.
        avoid: Packs whose copies count last, and deltas against them.

    Returns:
        Packs nothing needs; packs that waste too much, with the payload bytes that are needed; and the unneeded bytes
        of packs that would be rewritten if they held no base of another delta.
    """
    condemned = state.condemned_packs()
    rows = state.rows
    n_packs = len(rows.packs)
    stored = rows.stored_bytes
    needed_rows = state.live_rows()
    wanted = needed_rows & state.copies(but=condemned)
    weight = np.bincount(rows.pack[wanted], weights=stored[wanted], minlength=n_packs)
    is_other = np.array([name not in prefer for name in rows.packs], dtype=bool)
    best = np.flatnonzero(wanted)
    pack, effort = rows.pack[best], rows.effort[best].astype(np.int64)
    is_avoided = rows.links.with_dependents(state.rows_in(frozenset(avoid)))[best]
    best = best[np.lexsort((pack, -weight[pack], -effort, is_other[pack], is_avoided))]
    kept = np.zeros(len(wanted), dtype=bool)
    kept[best[np.unique(rows.chunk[best], return_index=True)[1]]] = True
    # What nobody can decode stays: the pack of its base may be lost, and come back from a backup; or it is condemned,
    # and whoever finishes that list writes the chunk in full.
    kept |= needed_rows & ~state.has_row(wanted)[rows.chunk]
    bases = state.bases_of(kept | state.rows_in(state.pinned))
    holds_base = np.bincount(rows.pack[bases], minlength=n_packs) > 0
    kept |= bases
    n_kept = np.bincount(rows.pack[kept], minlength=n_packs)
    needed = np.bincount(rows.pack[kept], weights=stored[kept], minlength=n_packs)
    total = np.bincount(rows.pack, weights=stored, minlength=n_packs)
    doomed = [name for name in state.unreadable if name not in condemned]
    rewrites: dict[str, int] = {}
    n_bound = 0
    for number, name in enumerate(rows.packs):
        if name in condemned or name in state.pinned:
            continue
        if n_kept[number] == 0:
            doomed.append(name)
        elif total[number] - needed[number] > max_waste * total[number]:
            if holds_base[number]:
                n_bound += int(total[number] - needed[number])
            else:
                rewrites[name] = int(needed[number])
    return doomed, rewrites, n_bound


def still_needed(state: Survey, ours: frozenset[str], *, known: frozenset[str]) -> frozenset[str]:
    """Return the packs we have condemned that hold the only copy of a needed chunk, or the base of that copy.

    A copy in a pack that anybody has condemned does not count: two collectors may each have chosen the other's. A pack
    that a save under way may store deltas against is needed too, with the bases of all it holds. A delta in a pack that
    appeared after our list does not count either: another collector may be about to delete its base, and not have seen
    the delta.

    Args:
        state: Survey of the store that sees our list.
        ours: The packs on our list.
        known: Packs that we had seen, or written, before we made it.
    """
    live = state.live_rows()
    safe = state.has_row(live & state.copies(but=state.condemned_packs() | ours, deltas_in=known))
    at_risk = live & ~safe[state.rows.chunk]
    at_risk |= state.bases_of(at_risk | state.rows_in(state.pinned))
    holders = np.unique(state.rows.pack[at_risk])
    return (frozenset(state.rows.packs[number] for number in holders) | state.pinned) & ours


def wrong_forms(store: Store, state: Survey) -> frozenset[str]:
    """Return the manifests of the forms that do not make what packs still hold, or cannot be evaluated now.

    A form may be forged, or of a release that computes its functions in another way. So before packs may go that hold
    what it derives, it is evaluated.

    Args:
        store: Store that is collected.
        state: Survey of the store.
    """
    wrong: set[str] = set()
    has_copy = state.has_row(np.ones(len(state.rows.chunk), dtype=bool)) if state.forms else np.zeros(0, dtype=bool)
    for of, name in sorted(state.forms.items()):
        left_out = state.inventory.chunks_of({of}) & ~state.inventory.chunks_of({name})
        if (left_out & has_copy).any() and (reason := _fault_of_form(store, of, name)) is not None:
            _log.warning("%s does not make what it says, so packs keep that: %s", form_key(of), reason)
            wrong.add(name)
    return frozenset(wrong)


def _fault_of_form(store: Store, of: str, name: str) -> str | None:
    """Evaluate a form; return the reason why it cannot stand for its manifest."""
    try:
        _, manifest, _ = read_manifest(store.backend, of, lambda: "a ref")
        _, form, _ = read_manifest(store.backend, name, lambda: form_key(of))
        if not has_content_of(form, manifest):
            return f"manifests/{name} has other content"
        # A form may also store what the manifest derives, of inputs that go.
        rows = {each.row for each in (*form.derived, *manifest.derived)}
        store.chunks.check(form, np.array(sorted(rows), dtype=np.int64), by_form=False)
    except (FormatError, NotFoundError, BackendError) as error:
        return str(getattr(error, "reason", error))
    return None


Reason = Literal["deleted", "died", "uncommitted", "copied", "cut"]

IN_WORDS: dict[Reason, str] = {
    "deleted": "of deleted checkpoints",
    "died": "of dead saves",
    "uncommitted": "of saves never committed",
    "copied": "held elsewhere too",
    "cut": "cut short",
}
"""Words for each reason; they follow a number of bytes.

deleted: the ref that named the manifest is gone, or names another one. died: an intent that is given up relies on it.
uncommitted: a save ended before it committed, and left no trace of whose it was. copied: other packs hold all of it
that is needed. cut: it cannot be read.
"""


def find_reasons(
    backend: Backend, census: Census, state: Survey, packs: Collection[str], manifests: Sequence[str]
) -> dict[str, Reason]:
    """Find the reason why nothing needs each of some packs and manifests.

    Args:
        backend: Backend of the store.
        census: Census that learns what the manifests name.
        state: Survey by which they were chosen.
        packs: Names.
        manifests: Names.
    """
    died = state.manifests_given_up
    reasons: dict[str, Reason] = {name: "died" if name in died else "deleted" for name in manifests}
    if not packs:
        return reasons
    unknown = [name for name in manifests if name not in census.manifests]
    learn(census, map_requests(backend, partial(_unneeded_manifest, backend), unknown))
    inventory = census.inventory
    of_deleted = inventory.chunks_of([name for name in manifests if name not in died])
    of_died = inventory.chunks_of(died) | inventory.marked(inventory.find(state.given_up))
    live = inventory.marked(inventory.find(state.inventory.digests[state.live]))
    number = {name: at for at, name in enumerate(inventory.packs)}
    has = [
        _packs_with(mask, inventory.entry_chunk, inventory.entry_pack, len(number))
        for mask in (live, of_died, of_deleted)
    ]
    for name in packs:
        if name in state.unreadable:
            reasons[name] = "cut"
            continue
        kinds: tuple[Reason, ...] = ("copied", "died", "deleted")
        found = [kind for kind, mask in zip(kinds, has, strict=True) if mask[number[name]]]
        reasons[name] = found[0] if found else "uncommitted"
    return reasons


def _packs_with(chosen: np.ndarray, chunk: np.ndarray, pack: np.ndarray, n_packs: int) -> np.ndarray:
    """Return for each pack whether it holds one of some chunks."""
    return np.bincount(pack[chosen[chunk]], minlength=n_packs) > 0


def _unneeded_manifest(backend: Backend, name: str) -> tuple[str, Manifest, int] | None:
    """Read a manifest that nobody needs; return None if it cannot be read."""
    try:
        return read_manifest(backend, name, lambda: "nobody")
    except (BlobNotFoundError, CorruptError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan(PrintedPlan):
    """Plan of a collection, as things stand. Printing it says so in words."""

    store: Store = field(repr=False)
    census: Census = field(repr=False, compare=False)
    """Census of manifests and packs, so that the execution does not read them again."""
    grace_s: float
    stale_intents: tuple[str, ...]
    """Keys of intents of saves that are dead, silent for longer than the grace, or abandoned."""
    damaged_refs: frozenset[str]
    """Keys of refs that cannot be read and that the caller abandons."""
    unread_refs: Mapping[str, str]
    """Keys of other refs that cannot be read, and why. A collection keeps every manifest that one of them may name."""
    packs: Mapping[str, int]
    """Packs that nothing needs: name and size in bytes."""
    rewrites: Mapping[str, tuple[int, int]]
    """Packs that are needed in part: name, payload bytes needed, size in bytes."""
    manifests: tuple[str, ...]
    """Manifests that no ref names."""
    reasons: Mapping[str, Reason]
    """Reason why nothing needs it, for each of ``packs`` and ``manifests``."""
    dead_lists: tuple[str, ...]
    """Keys of condemned lists of collectors that died before they were done."""
    quarantine: Mapping[str, int]
    """Damaged bytes that repairs put aside long enough ago: keys and sizes."""
    forms: frozenset[str]
    """Manifests of the forms that count: each makes what it derives, or packs hold nothing of that anyway."""
    unneeded_forms: frozenset[str]
    """Keys of the forms of manifests that nothing needs."""
    n_refs: int
    n_live_chunks: int
    disk_bytes: int = 0
    """Bytes of all files of the store."""
    freed_bytes: int = 0
    """Estimate of the bytes that the execution frees of these."""
    bound_bytes: int = 0
    """Unneeded bytes of packs that waste too much and stay, because deltas need other chunks of them. An optimization
    encodes these deltas anew, after which the packs go."""
    strangers: tuple[str, ...] = ()
    """Foreign files between the blobs. A collection leaves them alone."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        damage = self.damaged_refs, self.quarantine
        forms = self.unneeded_forms
        work = self.packs, self.rewrites, self.manifests, forms, self.stale_intents, self.dead_lists, *damage
        return not any(work)

    def __str__(self) -> str:
        lines = [
            f"{count_text(self.n_live_chunks, 'chunk')} kept by {content_text(self.n_refs)}",
            f"{count_text(len(self.packs), 'pack')} to delete ({self._packs_text()})",
        ]
        if self.rewrites:
            live = sum(needed for needed, _ in self.rewrites.values())
            whole = sum(size for _, size in self.rewrites.values())
            lines.append(
                f"{count_text(len(self.rewrites), 'pack')} to rewrite ({size_text(live)} of {size_text(whole)} needed)"
            )
        lines.append(f"{count_text(len(self.manifests), 'manifest')} to delete")
        if self.bound_bytes:
            held = f"{size_text(self.bound_bytes)} stay in packs that deltas of other checkpoints need"
            lines.append(f"{held} (`tensorcas optimize` frees most of them)")
        if self.stale_intents:
            lines.append(f"{count_text(len(self.stale_intents), 'dead save')} to withdraw")
        if self.damaged_refs:
            lines.append(f"{count_text(len(self.damaged_refs), 'damaged ref')} to abandon")
        for key, reason in self.unread_refs.items():
            remedy = f"`tensorcas repair --from` restores it, `tensorcas gc --abandon {key}` gives it up"
            lines.append(f"{key} cannot be read ({reason}), so every manifest that it may name is kept: {remedy}")
        if self.dead_lists:
            lines.append(f"{count_text(len(self.dead_lists), 'dead collection')} to finish")
        if self.quarantine:
            size = size_text(sum(self.quarantine.values()))
            lines.append(f"{count_text(len(self.quarantine), 'damaged piece')} in quarantine to delete ({size})")
        if self.strangers:
            lines.append(f"{strangers_text(self.strangers)} left alone")
        lines.append(f"frees about {size_text(self.freed_bytes)} of {size_text(self.disk_bytes)} on disk")
        return ", ".join(lines)

    def bytes_by_reason(self) -> dict[Reason, int]:
        """Return the bytes of ``packs`` by reason, most first."""
        sums: dict[Reason, int] = {}
        for name, size in self.packs.items():
            sums[self.reasons[name]] = sums.get(self.reasons[name], 0) + size
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def _packs_text(self) -> str:
        parts = [f"{size_text(size)} {IN_WORDS[reason]}" for reason, size in self.bytes_by_reason().items()]
        if len(parts) == 1:
            return parts[0]
        return ": ".join(filter(None, [size_text(sum(self.packs.values())), ", ".join(parts)]))

    def execute(self, *, watch: Watcher = ignore) -> GcReport:
        """Execute the plan.

        The collection spares what has come to be needed since the plan was made, and deletes nothing outside of it.

        Args:
            watch: Told the bytes that have been copied out of packs to rewrite.

        Raises:
            CorruptError: A blob cannot be read that says what is needed; nothing was deleted. Nothing is deleted either
                if the store is gone, another one, or a later release's by now; see `plan_gc`.
            BackendError: The storage failed; a later collection finishes this one.
        """
        return _execute(self, watch)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """Report of a collection. Printing it says so in words."""

    n_packs: int
    """Packs deleted, including those that were rewritten."""
    n_manifests: int
    n_withdrawn: int
    """Dead saves withdrawn."""
    n_spared: int
    """Packs of the plan that had come to be needed."""
    bytes_before: int
    """Bytes of all files of the store when the collection began."""
    bytes_after: int
    """Those when it ended, with what others have saved meanwhile."""

    @property
    def freed_bytes(self) -> int:
        """Bytes by which the files of the store have shrunk; negative if they have grown."""
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        spared = f", {count_text(self.n_spared, 'pack')} spared" if self.n_spared else ""
        return (
            f"deleted {count_text(self.n_packs, 'pack')} and {count_text(self.n_manifests, 'manifest')}, "
            f"withdrew {count_text(self.n_withdrawn, 'save')}{spared}, "
            f"{freed_text(self.bytes_before, self.bytes_after)}"
        )


def plan_gc(
    store: Store,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    max_waste: float = DEFAULT_MAX_WASTE,
    abandon: Collection[str] = (),
    prefer: Set[str] = frozenset(),
    without: Collection[str] = (),
    quarantine_s: float = DEFAULT_QUARANTINE_S,
    avoid: Set[str] = frozenset(),
    engine: Engine | None = None,
    watch: Watcher = ignore,
) -> GcPlan:
    """Plan a collection of what nothing needs any more. Changes nothing.

    Args:
        store: Store to collect.
        grace_s: Age in seconds at which the intent of a save, or the list of a collection, counts as left by a dead
            process. A save whose process is known to have ended is dead at once. A save that is given up by mistake is
            not lost: it notices, and starts again.
        max_waste: Share of a pack that may be unneeded before the rest is copied out of it: 0 to 1.
        abandon: Ids of saves to give up whatever their age. A save through an MLflow server is given up in no other
            way, and must be dead: it may otherwise commit what is being deleted (``docs/design/protocol.md``,
            Carriers). Also keys of refs that cannot be read: what they kept is lost.
        prefer: Packs whose copies to keep where a chunk has several.
        without: Keys of refs that are about to be deleted: the plan is of the store without them. Executed while they
            are there, it spares what they need.
        quarantine_s: Seconds after which damaged bytes in quarantine are deleted.
        avoid: Packs whose copies, and deltas against them, go where a chunk has several.
        engine: Workers that read manifests and the tables of packs; by default this process does, on all cores. The
            plan is the same. This process alone carries it out.
        watch: Told the manifests that workers have read, and then the tables.

    Raises:
        PendingSavesError: Saves through an MLflow server are under way, which ``abandon`` does not name.
        DirectAccessError: The store is reached through an MLflow server itself.
        CorruptError: A ref, manifest, intent, pack or the store's ``format`` cannot be read, so nobody knows what is
            needed: verify the store, or drop the ref that the error names.
        NewerFormatError: A later release wrote a blob of the store.
        StoreNotFoundError: The store is gone.
        ConflictError: Another store is in its place.
    """
    if not quarantine_s >= 0:  # NaN is not
        raise ValueError(f"quarantine_s must not be negative: {quarantine_s}")
    if not grace_s >= 0 or not 0 <= max_waste <= 1:
        raise ValueError(f"grace_s must not be negative and max_waste must be from 0 to 1: {grace_s}, {max_waste}")
    if store.backend.is_carrier:
        raise DirectAccessError("collection", store.uri)
    _check_understood(store)
    p.check_index(store.backend)
    census = Census(store.backend)
    census.load()
    with nullcontext() if engine is None else engine.kept():
        look = partial(
            survey,
            store.backend,
            grace_s,
            count_stale=False,
            abandon=abandon,
            without=without,
            census=census,
            readers=None if engine is None else Readers(store, engine, watch),
        )
        state = look()
        if wrong := wrong_forms(store, state):
            state = look(trusts=lambda form: form not in wrong)
    if state.unfenced:
        raise PendingSavesError(store.uri, tuple((intent.id, _who(intent)) for intent in state.unfenced))
    unknown = sorted(set(abandon) - {key.rpartition("/")[2] for key in state.stale} - state.damaged_refs)
    if unknown:
        raise ValueError(
            f"no save {unknown[0]!r} is under way in {store.uri!r}, nor a damaged ref of that key, so it cannot be "
            "abandoned"
        )
    doomed, rewrites, bound_bytes = choose(state, max_waste, prefer=prefer, avoid=avoid)
    manifests = tuple(sorted(state.manifests.keys() - state.live_manifests))
    quarantine = _old_quarantine(store.backend, quarantine_s)
    dead_lists = tuple(condemned.key for condemned in state.dead_lists)
    others = [*state.stale, *state.damaged_refs, *without, *dead_lists]
    deleted = {info.key: info.size for info in map_requests(store.backend, store.backend.stat, others) if info}
    deleted |= quarantine | {f"manifests/{name}": state.manifests[name] for name in manifests}
    deleted |= {pack_key(name): state.sizes[name] for name in doomed}
    gone = deleted | {pack_key(name): state.sizes[name] for name in rewrites}
    kept = state.sizes.keys() - {*doomed, *rewrites}
    markers = list_blobs(store.backend, "index") if store.backend.has_database else ()  # elsewhere they have no bytes
    gone |= {info.key: 0 for info in markers if info.key.endswith(".loose") and segment_name(info.key) not in kept}
    freed_bytes = store.backend.freed_by(gone, older_than_s=max(grace_s, DEFAULT_GRACE_S)) - sum(rewrites.values())
    return GcPlan(
        store=store,
        census=census,
        grace_s=grace_s,
        damaged_refs=state.damaged_refs,
        unread_refs=state.unread_refs,
        stale_intents=tuple(state.stale),
        packs={name: state.sizes[name] for name in doomed},
        rewrites={name: (needed, state.sizes[name]) for name, needed in rewrites.items()},
        manifests=manifests,
        reasons=find_reasons(store.backend, census, state, doomed, manifests),
        dead_lists=dead_lists,
        quarantine=quarantine,
        forms=frozenset(state.forms.values()),
        unneeded_forms=state.unneeded_forms,
        n_refs=state.n_refs,
        n_live_chunks=state.n_live,
        disk_bytes=disk_bytes(store.backend),
        freed_bytes=max(0, freed_bytes),
        bound_bytes=bound_bytes,
        strangers=find_strangers(store.backend),
    )


def _check_understood(store: Store) -> None:
    """Check that the place still holds the store that was opened, and that this release understands it."""
    now = Store.open_backend(store.backend)
    if now.id != store.id:
        raise ConflictError(f"{store.uri!r} is store {now.id} by now, and no longer {store.id}: nothing was deleted")


def _who(intent: p.Intent) -> str:
    gone = ", by a process that is gone" if intent.writer_is_dead else ""
    return f"begun {intent.created} on {intent.host}{gone}"


def _execute(plan: GcPlan, watch: Watcher) -> GcReport:
    backend = plan.store.backend
    _check_understood(plan.store)
    bytes_before = disk_bytes(backend)
    n_withdrawn = sum(_abort(backend, key) for key in plan.stale_intents)
    for key in plan.damaged_refs:
        _drop_damaged_ref(backend, key)
    look = partial(survey, backend, plan.grace_s, count_stale=True, census=plan.census, trusts=plan.forms.__contains__)
    state = look(going=plan.manifests)
    # Finish a dead collector's list, never just drop it: its owner may only be slow. Our own list repeats what is on
    # it, since the owner may yet remove it.
    finishing = [condemned for condemned in state.dead_lists if condemned.key in plan.dead_lists]
    inherited = frozenset[str]().union(*(condemned.packs for condemned in finishing)) & state.sizes.keys()
    own = (frozenset((*plan.packs, *plan.rewrites)) & state.sizes.keys()) - state.condemned_packs()
    doomed = own | inherited
    manifests = (
        frozenset(plan.manifests).union(*(condemned.manifests for condemned in finishing)) & state.manifests.keys()
    )
    manifests -= state.live_manifests
    sources = (own & plan.rewrites.keys()) | inherited
    copied = copy_out(plan.store, state, doomed=doomed, sources=sources, watch=watch)
    known = frozenset(state.sizes) | copied.packs
    spared = dead_packs = frozenset[str]()
    if doomed or manifests or finishing or state.unneeded_forms:
        key = _condemn(backend, plan.census, p.condemned_bytes(doomed, manifests))
        # From here on no save comes to rely on what is listed. This survey sees the saves that did before.
        try:
            state = look(going=manifests)
        except FormatError:
            backend.delete(key)
            raise
        spared = still_needed(state, doomed, known=known)
        dead_packs = doomed - spared
        manifests -= state.live_manifests
        p.begin_generation(backend)
        # A ref that the survey saw gone, or replaced, must not come back in a crash without what it needs. And the
        # copies that count may be of writers that were killed before these were durable.
        for prefix in ("intents", "refs", "packs"):
            backend.settle(prefix)
        for form in state.unneeded_forms:
            if (info := backend.stat(form)) is not None:
                backend.withdraw(form, info.token)
        keys = [f"manifests/{name}" for name in sorted(manifests)]
        for some in (keys, [pack_key(name) for name in sorted(dead_packs)]):
            list(map_requests(backend, backend.delete, some))
        plan.store.catalog.forget(dead_packs)
        backend.delete(key)
        for condemned in finishing:
            # The list's owner may still delete what is spared, so the list has to stay.
            if not condemned.packs & spared and not condemned.manifests & (state.manifests.keys() - manifests):
                backend.delete(condemned.key)
    # A stand-in may hold what stands, damaged, at the key of another ref.
    if all(key.startswith(f"{p.STAND_INS}/") for key in state.unread_refs):
        _drop_stand_ins(backend, plan.grace_s)
    p.tidy_index(backend, state.sizes.keys() - dead_packs - set(state.unreadable))
    left = {name: size for name, size in state.sizes.items() if name not in dead_packs}
    plan.census.save(manifests=state.manifests.keys() - manifests, packs=left, refs=state.refs)
    tidy_ref_tables(backend, state.refs)
    for key in plan.quarantine:
        if backend.stat(key) is not None:
            backend.delete(key)
    # A save that is given up by mistake starts again. A write whose temporary file is swept fails.
    backend.sweep(max(plan.grace_s, DEFAULT_GRACE_S))
    return GcReport(
        n_packs=len(dead_packs),
        n_manifests=len(manifests),
        n_withdrawn=n_withdrawn,
        n_spared=len(spared),
        bytes_before=bytes_before,
        bytes_after=disk_bytes(backend),
    )


def _drop_damaged_ref(backend: Backend, key: str) -> None:
    # Its state first: somebody may save the step again, and only the ref that was looked at is to go.
    info = backend.stat(key)
    if not is_damaged(backend, key):
        return
    if info is None:
        backend.delete(key)  # a link or a folder in its place
    else:
        backend.withdraw(key, info.token)


def _condemn(backend: Backend, census: Census, condemned: bytes) -> str:
    """Create a condemned list, on a full disk in place of the censuses; return its key."""
    try:
        return _put_list(backend, condemned)
    except BackendError as error:
        if not _is_full(error):
            raise
    with suppress(BackendError):  # a database takes room for each deletion
        census.drop()
    try:
        return _put_list(backend, condemned)
    except BackendError as error:
        if not _is_full(error):
            raise
        size = size_text(len(condemned))
        reason = f"the disk is full, and a collection deletes nothing before it has written this list of {size}"
        raise BackendError(
            "write", "condemned", f"{reason}; free some room outside of the store, then collect again"
        ) from error


def _put_list(backend: Backend, condemned: bytes) -> str:
    key = f"condemned/{new_name()}"
    backend.put_new(key, [condemned])
    return key


def _is_full(error: BackendError) -> bool:
    """Tell whether the storage has no room left, for this user."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _old_quarantine(backend: Backend, age_s: float) -> dict[str, int]:
    """Return the pieces in quarantine of some age, and their sizes, without the notes of repairs under way."""
    before = time.time() - age_s
    infos = list_blobs(backend, "quarantine")
    old = (info for info in infos if info.modified_s <= before and not info.key.startswith("quarantine/@"))
    return {info.key: info.size for info in old}


def _drop_stand_ins(backend: Backend, grace_s: float) -> None:
    """Drop the refs of savers through a carrier that died while these were to replace others.

    This collection has counted them, so the next one deletes what they alone keep.
    """
    before = time.time() - grace_s
    for info in list(list_blobs(backend, p.STAND_INS)):
        if info.modified_s <= before:
            backend.delete(info.key)


def _abort(backend: Backend, key: str) -> bool:
    info = backend.stat(key)
    return info is not None and backend.withdraw(key, info.token)
