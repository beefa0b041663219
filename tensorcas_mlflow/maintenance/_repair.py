"""Repair of a damaged store: a plan of what is damaged and what can be restored, and its execution.

It may run while others save, load and collect; ``docs/design/protocol.md`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import BlobInfo, Damage, damages_of, rebuild
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import Digests, as_keys
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.notebook import PrintedPlan
from tensorcas_mlflow.base.progress import Watcher, ignore
from tensorcas_mlflow.base.text import count_text
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    CorruptError,
    DirectAccessError,
    FormatError,
    NewerFormatError,
    PendingSavesError,
    StarvedError,
)
from tensorcas_mlflow.layout import Ref, formed_by, list_blobs
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Manifest
from tensorcas_mlflow.layout.packs import pack_key
from tensorcas_mlflow.maintenance._checked_packs import CheckedPacks
from tensorcas_mlflow.maintenance._inventory import DigestSet, as_stored, formed_manifests, read_holders, stands
from tensorcas_mlflow.maintenance._quarantine import keep_bytes, noted_refs
from tensorcas_mlflow.maintenance._repair_packs import MAY_BE_BASE, heal, mend_packs
from tensorcas_mlflow.maintenance._repair_records import (
    FormatFix,
    IndexFaults,
    Lists,
    abandon_lists,
    find_index_faults,
    finished_lists,
    may_be_carried,
    read_lists,
    rebuild_index,
    restore_manifest,
    restore_ref,
    write_format,
)
from tensorcas_mlflow.maintenance._salvage import Clues
from tensorcas_mlflow.maintenance._sources import FoundManifest, FoundRef, Sources
from tensorcas_mlflow.maintenance._verify import Problem
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFault:
    """Reason why a ref or a manifest cannot be used."""

    reason: str
    is_failure: bool = False
    """True if the storage did not give it, so that it may be sound."""


class Needs:
    """Refs of a store and the chunks they need. Manifests are read one at a time, as they may be large."""

    def __init__(self, store: Store) -> None:
        """Read every ref and manifest.

        Raises:
            NewerFormatError: A later release wrote one of them.
            BackendError: The storage failed to list its blobs.
        """
        self._store = store
        self.bad_refs: dict[str, RecordFault] = {}
        """Faults of refs, by key."""
        self.bad_manifests: dict[str, RecordFault] = {}
        """Faults of manifests that a ref needs, by name."""
        self.holders, faults = read_holders(store)
        """Refs by the name of their manifest."""
        for key, error in faults.items():
            self.bad_refs[key] = fault_in(error)
        for key in noted_refs(store.backend).keys() - self.bad_refs.keys():
            if store.backend.stat(key) is None:
                self.bad_refs[key] = RecordFault(reason="a repair was about to replace it")
        self._formed = formed_manifests(self.holders)
        digests = DigestSet()
        for name, found in self._read_all():
            if isinstance(found, Manifest):
                digests.add(found.stored_digests)
            elif found is not None:
                self.bad_manifests[name] = found
        self.digests = digests.digests()
        """All chunks that refs need, as far as manifests can be read; each once, ascending."""

    def manifests(self) -> Iterator[tuple[str, Manifest]]:
        """Yield the manifests that can be read, with their names."""
        for name, found in self._read_all():
            if isinstance(found, Manifest):
                yield name, found

    def losses(self, good: Any) -> list[Problem]:
        """Find the refs that lack something if packs hold only some chunks, given by their digests as single values."""
        found = [
            Problem(key=key, reason=f"all of it: its ref is damaged: {fault.reason}")
            for key, fault in self.bad_refs.items()
        ]
        for name, fault in self.bad_manifests.items():
            reason = f"all of it: manifests/{name}: {fault.reason}"
            found += [Problem(key=ref.key, reason=reason, checkpoint=ref.label) for ref in self.holders[name]]
        if not np.isin(as_keys(self.digests), good).all():
            for name, manifest in self.manifests():
                lost = ~np.isin(as_keys(manifest.stored_digests), good)
                if lost.any() and name in self._formed and self.is_in_packs(name, good):
                    continue
                refs = [ref for ref in self.holders[name] if ref.of is None]  # a form has no tensors of its own
                if lost.any():
                    found += _losses_of(manifest, refs, lost)
        return sorted(found, key=lambda loss: (loss.checkpoint or "", loss.key or ""))

    def is_in_packs(self, name: str, good: Any) -> bool:
        """Tell whether packs hold all chunks of a manifest, whatever its form says."""
        manifest = _read_manifest(self._store, name, self.holders[name])
        return isinstance(manifest, Manifest) and bool(np.isin(as_keys(manifest.stored_digests), good).all())

    def besides_broken_forms(self, good: Any) -> Digests:
        """Return the chunks that packs would hold of the manifests whose forms lack chunks."""
        digests = DigestSet()
        if self._formed and not np.isin(as_keys(self.digests), good).all():
            for name, stored in self.manifests():
                if name in self._formed and not np.isin(as_keys(stored.stored_digests), good).all():
                    manifest = _read_manifest(self._store, name, self.holders[name])
                    if isinstance(manifest, Manifest):
                        digests.add(manifest.stored_digests)
        return digests.digests()

    def _read_all(self) -> Iterator[tuple[str, Manifest | RecordFault | None]]:
        def read(item: tuple[str, list[Ref]]) -> Manifest | RecordFault | None:
            found = _read_manifest(self._store, *item)
            return as_stored(self._store, item[0], found, self._formed) if isinstance(found, Manifest) else found

        found = threads.ordered_map(read, self.holders.items(), waits=self._store.backend.is_remote)
        yield from zip(self.holders, found, strict=True)


def fault_in(error: FormatError | BackendError) -> RecordFault:
    """Describe a blob that cannot be read.

    Raises:
        NewerFormatError: The error is one: only a later release can tell what is wrong.
        StarvedError: The error is one, which says nothing of any blob.
    """
    if isinstance(error, StarvedError | NewerFormatError):
        raise error
    reason = error.reason if isinstance(error, CorruptError | BackendError) else str(error)
    return RecordFault(reason=reason, is_failure=isinstance(error, BackendError))


def _read_manifest(store: Store, name: str, refs: Sequence[Ref]) -> Manifest | RecordFault | None:
    """Read a manifest; return None if the refs that name it were dropped meanwhile."""
    try:
        manifest = store.manifest(refs[0])
        manifest.check_names()
    except NewerFormatError:
        raise
    except (FormatError, BackendError) as error:
        return fault_in(error) if any(stands(store, ref) for ref in refs) else None
    if manifest.store_id != store.id:
        return RecordFault(reason=f"it is of store {manifest.store_id}, and this is {store.id}", is_failure=True)
    return manifest


def _losses_of(manifest: Manifest, refs: Sequence[Ref], lost: Any) -> list[Problem]:
    rows = manifest.rows_needing(np.flatnonzero(lost))
    names = tuple(manifest.columns.name(row) for row in rows)
    n_bytes = int(manifest.columns.n_bytes[list(rows)].sum())
    chunks = f"{int(lost.sum())} of {count_text(len(lost), 'chunk')} damaged or missing"
    reason = f"{chunks} ({count_text(len(rows), 'tensor')} of {n_bytes:,} bytes)"
    return [Problem(key=ref.key, reason=reason, checkpoint=ref.label, tensors=names) for ref in refs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Blob that is not as it should be. Printing it says so in words."""

    key: str
    reason: str
    remedy: str
    """The action of a repair against it, or another remedy."""
    is_mended: bool = True
    """True if a repair mends it, or does so if other stores have what it needs."""
    is_harmless: bool = False
    """True if it goes away without a repair."""

    def __str__(self) -> str:
        return f"{self.key}: {self.reason} ({self.remedy})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """Report of a repair. Printing it says so in words."""

    restored: tuple[str, ...]
    """Keys of manifests, refs and ``format`` that the repair restored."""
    abandoned: tuple[str, ...]
    """Keys of damaged condemned lists that the repair removed, and of damaged forms of manifests that packs hold whole.
    The bytes of the forms are in quarantine."""
    packs_gone: tuple[str, ...]
    """Keys of damaged packs that the repair deleted, after it copied their good chunks."""
    n_quarantined: int
    """Damaged packs that the repair put into quarantine."""
    n_healed: int
    """Chunks that the repair took from other stores, decoded with another copy of their base, or encoded anew."""
    n_fenced: int
    """Saves under way that relied on a lost chunk; they begin again."""
    left: Mapping[str, str]
    """Keys of damaged blobs that the repair left alone, and why."""
    losses: tuple[Problem, ...]
    """Checkpoints and files that do not load, or not whole, after the repair, by the keys of their refs."""
    n_kept: int | None = None
    """Whole blobs of a damaged database, which the repair has moved to a new one; None if it was not damaged."""

    @property
    def is_whole(self) -> bool:
        """True if nothing is lost or damaged now."""
        return not self.losses and not self.left

    def __str__(self) -> str:
        lines = []
        if self.n_kept is not None:
            kept = count_text(self.n_kept, "whole blob")
            lines.append(f"rebuilt the database with {kept}; the old one is in quarantine")
        lines += [f"restored {key}" for key in self.restored]
        lines += [f"removed {key}" for key in self.abandoned]
        lines += [f"left {key}: {reason}" for key, reason in self.left.items()]
        lines += listed("is lost", self.losses)
        fenced = f", made {count_text(self.n_fenced, 'save')} start again" if self.n_fenced else ""
        lines.append(
            f"replaced {count_text(len(self.packs_gone), 'damaged pack')}, put "
            f"{self.n_quarantined} into quarantine, healed {count_text(self.n_healed, 'chunk')}{fenced}"
        )
        return "\n".join(lines)


def listed(heading: str, losses: Sequence[Problem]) -> list[str]:
    """Describe losses, a line each."""
    return [f"{heading}: {loss}" for loss in losses]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Everything that a plan was made from."""

    packs: CheckedPacks
    needs: Needs
    digests: Digests
    """Chunks that refs need, including those of restored manifests."""
    index: IndexFaults
    lists: Lists
    manifests: Mapping[str, FoundManifest]
    refs: Mapping[str, FoundRef]
    format_fix: FormatFix | None
    abandon: frozenset[str]
    sources: Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan(PrintedPlan):
    """Plan of a repair, as things stand. Printing it says so in words."""

    store: Store = field(repr=False)
    findings: tuple[Finding, ...]
    """Blobs that are not as they should be."""
    losses: tuple[Problem, ...]
    """Checkpoints and files that do not load now, by the keys of their refs."""
    seen: Any = field(repr=False)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not self.losses and not any(finding.is_mended for finding in self.findings)

    @property
    def is_whole(self) -> bool:
        """True if nothing is lost or damaged."""
        return not self.losses and all(finding.is_harmless for finding in self.findings)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += listed("does not load now", self.losses)
        return "\n".join(lines or ["nothing is damaged"])

    def execute(self) -> RepairReport:
        """Execute the plan.

        The repair leaves alone whatever appears while it runs, and deletes no readable chunk before it has copied it.
        After an interruption, a new plan goes on from there.

        Raises:
            BackendError: The storage failed.
            ConflictError: Another store was made in this place.
            PendingSavesError: Saves through an MLflow server have begun since; nothing was changed.
        """
        return _execute(self)


def plan_repair(
    store: Store,
    *,
    sources: Sequence[Store] = (),
    abandon: Collection[str] = (),
    format_fix: FormatFix | None = None,
    engine: Engine | None = None,
    watch: Watcher = ignore,
) -> RepairPlan:
    """Read everything, find the damage, and find sources for what is lost. Changes nothing.

    Args:
        store: Store to repair; see `open_damaged`.
        sources: Other stores to take lost blobs from, in the order in which to ask them.
        abandon: Keys of damaged condemned lists whose collectors are dead, and of packs whose unreadable parts to give
            up.
        format_fix: Result of `open_damaged`.
        engine: Workers that read the chunks; by default this process does, on all cores. The plan is the same.
        watch: Told the bytes of chunks that have been read.

    Raises:
        PendingSavesError: Saves through an MLflow server are under way, whose packs may be half written.
        DirectAccessError: The store is reached through an MLflow server itself.
        NewerFormatError: A later release wrote a blob.
        ValueError: ``abandon`` names another kind of blob.
        BackendError: The storage failed to list its blobs.
    """
    if store.backend.is_carrier:
        raise DirectAccessError("repair", store.uri)
    damages = damages_of(store.backend)
    if damages:
        again = partial(
            plan_repair, store, sources=sources, abandon=abandon, format_fix=format_fix, engine=engine, watch=watch
        )
        return _plan_rebuild(store, damages, again)
    backend = store.backend
    bad_intents = _look_at_intents(store)
    lists = read_lists(backend)
    found = Sources(store, sources)
    needs = Needs(store)
    given_up = frozenset(key for key in abandon if key.startswith("packs/"))
    packs = CheckedPacks(
        store,
        lambda names: Clues(backend, (each for _, each in needs.manifests()), of=names),
        given_up=given_up,
        engine=engine,
    )
    packs.look(watch)
    unknown = sorted(set(abandon) - lists.damaged.keys() - {pack_key(name) for name in packs.packs})
    if unknown:
        raise ValueError(f"there is no damaged condemned list and no pack at {unknown[0]!r}, so it cannot be abandoned")
    manifests = {
        name: manifest
        for name, fault in needs.bad_manifests.items()
        if not fault.is_failure and (manifest := found.manifest(name, needs.holders[name])) is not None
    }
    refs = {
        key: ref
        for key, fault in needs.bad_refs.items()
        if not fault.is_failure and (ref := found.ref(key)) is not None
    }
    restored = [each.manifest.stored_digests for each in manifests.values()]
    seen = _Seen(
        packs=packs,
        needs=needs,
        digests=np.concatenate([needs.digests, *restored]),
        index=find_index_faults(backend, packs),
        lists=lists,
        manifests=manifests,
        refs=refs,
        format_fix=format_fix,
        abandon=frozenset(abandon),
        sources=found,
    )
    return RepairPlan(
        store=store,
        findings=(*_findings(store, seen), *bad_intents),
        losses=tuple(needs.losses(packs.good())),
        seen=seen,
    )


def _plan_rebuild(store: Store, damages: Sequence[Damage], again: Callable[[], RepairPlan]) -> RepairPlan:
    """Plan a new database with all that is whole of a damaged one. What else is damaged shows in that one alone.

    Args:
        store: Store to repair.
        damages: Damage of its database.
        again: Plans the repair of the rest.
    """
    rebuilt = rebuild(store.backend, only_plans=True)
    remedy = f"{count_text(rebuilt.n_blobs, 'whole blob')} to a new database, the old one to quarantine"
    losses = tuple(_loss_of(damage) for damage in rebuilt.lost if damage.key.partition("/")[0] not in _REBUILT)
    findings = tuple(Finding(key=key, reason=reason, remedy=remedy) for key, reason in damages)
    return RepairPlan(store=store, findings=findings, losses=losses, seen=again)


def _execute(plan: RepairPlan) -> RepairReport:
    if isinstance(plan.seen, _Seen):
        return _execute_rest(plan.store, plan.seen)
    rebuilt = rebuild(plan.store.backend)
    rest: RepairPlan = plan.seen()
    if not isinstance(rest.seen, _Seen):
        raise CorruptError(rest.findings[0].key, f"it is damaged anew: {rest.findings[0].reason}")
    report = rest.execute()
    # A lost ref has left a damaged one in its place, and of other blobs the rest knows whether anything needs them.
    of_all = tuple(_loss_of(damage) for damage in rebuilt.lost if "/" not in damage.key)
    return replace(report, n_kept=rebuilt.n_blobs, losses=(*of_all, *report.losses))


_REBUILT = frozenset({"index", "census", "ref-tables", "intents"})
"""First segments of the keys of blobs that others stand in for, or that end by themselves."""


def _loss_of(damage: Damage) -> Problem:
    return Problem(key=damage.key, checkpoint=p.label_of(damage.key), reason=damage.reason)


def _execute_rest(store: Store, seen: _Seen) -> RepairReport:
    backend = store.backend
    # Again, now that packs were listed: a pack that is cut may be one that a save began to send since the first look.
    may_be_written = bool(_look_at_intents(store)) and may_be_carried(backend)
    if seen.format_fix is not None:
        write_format(store, seen.format_fix)
    abandoned = abandon_lists(backend, seen.abandon & seen.lists.damaged.keys())
    fixes = {
        f"manifests/{name}": restore_manifest(store, name, found.manifest, seen.needs.holders[name])
        for name, found in seen.manifests.items()
    }
    mended = mend_packs(store, seen.packs, seen.digests, seen.sources, may_be_written=may_be_written)
    # Other stores may lack the inputs of a form, and have what it derives.
    mended.n_healed += heal(store, seen.packs, seen.sources, seen.needs.besides_broken_forms(seen.packs.good()))
    fixes |= {key: restore_ref(store, key, found) for key, found in seen.refs.items()}
    for key, note in noted_refs(backend).items():
        if backend.stat(key) is not None:
            backend.delete(note)
    lists = read_lists(backend)
    for key in finished_lists(backend, lists):
        backend.delete(key)
    left = {key: reason for key, reason in fixes.items() if reason is not None} | mended.left
    left |= {key: _ABANDON.format(key=key) for key in lists.damaged}
    # Forms first: as long as a form is damaged, no collection frees what it derives.
    forms = _damaged_forms(store, seen)
    seen.packs.look()
    abandoned += _put_forms_aside(store, seen, forms)
    index = find_index_faults(backend, seen.packs)
    if index.bad or index.missing or mended.gone:
        rebuild_index(backend, seen.packs, index)
    restored = [key for key, reason in fixes.items() if reason is None]
    return RepairReport(
        restored=(*([p.FORMAT] if seen.format_fix is not None else []), *restored),
        abandoned=tuple(abandoned),
        packs_gone=tuple(sorted(mended.gone)),
        n_quarantined=mended.n_quarantined,
        n_healed=mended.n_healed,
        n_fenced=mended.n_fenced,
        left=left,
        losses=tuple(Needs(store).losses(seen.packs.good())),
    )


def _damaged_forms(store: Store, seen: _Seen) -> dict[BlobInfo, str]:
    """Return the damaged forms that nothing restores, each with the reason."""
    needs, backend = seen.needs, store.backend
    faults = {key: fault for key, fault in needs.bad_refs.items() if key not in seen.refs and formed_by(key)}
    for name, fault in needs.bad_manifests.items():
        if name not in seen.manifests:
            faults |= {ref.key: fault for ref in needs.holders[name] if ref.of is not None}
    found: dict[BlobInfo, str] = {}
    for key, fault in faults.items():
        # Its state first: an optimization may have replaced the form since the plan was made.
        info = backend.stat(key)
        try:
            ref = store.ref(key)
        except CorruptError:
            ref = None
        is_same = ref is None or ref.manifest in needs.bad_manifests
        if info is not None and is_same and not fault.is_failure:
            found[info] = fault.reason
    return found


def _put_forms_aside(store: Store, seen: _Seen, forms: Mapping[BlobInfo, str]) -> list[str]:
    """Put damaged forms into quarantine if packs hold all chunks of their manifests; return their keys.

    Args:
        store: Store that is repaired.
        seen: What the plan was made from, with the packs as they were after the forms were found.
        forms: Result of `_damaged_forms`.
    """
    needs, good, backend = seen.needs, seen.packs.good(), store.backend
    gone: list[str] = []
    for info, reason in forms.items():
        of = formed_by(info.key)
        if of in needs.holders and needs.is_in_packs(of, good):
            with suppress(BlobNotFoundError):
                keep_bytes(backend, info.key, backend.get(info.key), reason)
            if backend.withdraw(info.key, info.token):
                gone.append(info.key)
    return gone


_ABANDON = (
    "saves and collections refuse to work until it is gone, and its collector may be alive: once no collection runs, "
    "`tensorcas repair --abandon {key}` removes it"
)


def _findings(store: Store, seen: _Seen) -> list[Finding]:
    """Describe what is wrong with each blob, and what the repair does about it."""
    found: list[Finding] = []
    if seen.format_fix is not None:
        remedy = f"the store's manifests say it is store {store.id}, of chunks of {store.chunk_bytes} bytes"
        found.append(Finding(key=p.FORMAT, reason=seen.format_fix.reason, remedy=remedy))
    for key, reason in seen.lists.damaged.items():
        is_given_up = key in seen.abandon
        remedy = "it is removed" if is_given_up else _ABANDON.format(key=key)
        found.append(Finding(key=key, reason=reason, remedy=remedy, is_mended=is_given_up))
    for name, fault in seen.needs.bad_manifests.items():
        other = seen.manifests.get(name)
        remedy = "no other copy was found" if other is None else f"restored from {other.where}"
        found.append(Finding(key=f"manifests/{name}", reason=fault.reason, remedy=remedy, is_mended=other is not None))
    for key, fault in seen.needs.bad_refs.items():
        ref = seen.refs.get(key)
        remedy = f"no other store has one: `tensorcas gc --abandon {key}` gives it up, with what it kept"
        if ref is not None:
            remedy = f"replaced by that of {ref.source.uri}: {ref.ref.label}, saved {ref.ref.created}"
        found.append(Finding(key=key, reason=fault.reason, remedy=remedy, is_mended=ref is not None))
    found += _findings_of_packs(seen.packs, seen.sources)
    for key, reason in seen.index.bad.items():
        found.append(Finding(key=key, reason=reason, remedy="rebuilt from packs; nothing is lost"))
    if seen.index.missing:
        reason = f"it does not name {count_text(len(seen.index.missing), 'pack')}"
        found.append(Finding(key="index", reason=reason, remedy="rebuilt from packs; nothing is lost"))
    return found


def _findings_of_packs(packs: CheckedPacks, sources: Sources) -> Iterator[Finding]:
    failing = {name for name, pack in packs.packs.items() if pack.failure is not None}
    replaceable = packs.replaceable()
    may_go = replaceable if sources.is_empty else {name for name in failing if len(packs.packs[name].unread)}
    stay = failing - may_go
    is_held = bool(stay) and packs.has_deltas()
    for name in sorted(failing | {name for name, pack in packs.packs.items() if pack.damage}):
        pack = packs.packs[name]
        if name in stay:
            remedy = f"left alone; `--abandon {pack_key(name)}` gives up its unreadable parts"
        elif is_held:
            remedy = f"left alone: {MAY_BE_BASE}"
        elif name in failing - replaceable:
            remedy = "replaced if the other stores have all of its unreadable chunks; else left alone"
        else:
            remedy = f"{count_text(len(pack.entries), 'good chunk')} to a new pack, this one to quarantine"
        what = count_text(len(pack.bad), "damaged chunk") if pack.has_table else "damaged table"
        reason = pack.failure or f"{what}: {pack.damage}"
        is_mended = not (is_held or name in stay)
        yield Finding(key=pack_key(name), reason=reason, remedy=remedy, is_mended=is_mended)


def _look_at_intents(store: Store) -> list[Finding]:
    """Find the intents that cannot be read.

    Raises:
        PendingSavesError: Saves through an MLflow server are under way.
    """
    found: list[Finding] = []
    unfenced: list[tuple[str, str]] = []
    for info in list_blobs(store.backend, "intents"):
        try:
            intent = p.parse_intent(info, store.backend.get(info.key, max_bytes=MAX_BYTES))
        except BlobNotFoundError:
            continue
        except FormatError as error:
            reason = str(getattr(error, "reason", error))
            remedy = "left alone: gc removes it once its grace is over"
            found.append(Finding(key=info.key, reason=reason, remedy=remedy, is_mended=False, is_harmless=True))
            continue
        if intent.through_carrier:
            unfenced.append((intent.id, f"begun {intent.created} on {intent.host}"))
    if unfenced:
        raise PendingSavesError(store.uri, tuple(unfenced))
    return found
