"""Plan, then execute."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorcas_mlflow.blob_names import list_blobs, strangers_text
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.errors import BlobNotFoundError, DirectAccessError, FormatError, PendingSavesError
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.manifest import MAX_BYTES
from tensorcas_mlflow.repair._bases import bases_wanted, would_be_good
from tensorcas_mlflow.repair._chunks import as_keys
from tensorcas_mlflow.repair._format import FormatFix, is_carried, write_format
from tensorcas_mlflow.repair._holdings import Holdings
from tensorcas_mlflow.repair._index import IndexFaults, check_index, rebuild_index
from tensorcas_mlflow.repair._lists import Lists, abandon_lists, finished_lists, read_lists
from tensorcas_mlflow.repair._mend_packs import mend_packs
from tensorcas_mlflow.repair._mend_records import notes, restore_manifest, restore_ref
from tensorcas_mlflow.repair._needs import Fault, Loss, Needs
from tensorcas_mlflow.repair._quarantine import Quarantine
from tensorcas_mlflow.repair._report import Finding, RepairReport, listed
from tensorcas_mlflow.repair._salvage import Clues
from tensorcas_mlflow.repair._sources import Found, FoundRef, Sources
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """All that a plan was made from."""

    holdings: Holdings
    needs: Needs
    digests: Digests
    """Chunks that refs need, also by manifests that are restored."""
    index: IndexFaults
    lists: Lists
    notes: Mapping[str, str]
    manifests: Mapping[str, Found]
    refs: Mapping[str, FoundRef]
    format_fix: FormatFix | None
    abandon: frozenset[str]
    sources: Sources
    quarantine: Quarantine


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What is damaged in a store, and what a repair would make of it. Printing it says so in words."""

    store: Store = field(repr=False)
    findings: tuple[Finding, ...]
    """Blobs that are not as they should be."""
    losses: tuple[Loss, ...]
    """What does not load as things stand."""
    remaining: tuple[Loss, ...]
    """What would not load after the repair, going by what the indexes of other stores say."""
    seen: Any = field(repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any(finding.is_mended for finding in self.findings) and len(self.remaining) == len(self.losses)

    @property
    def is_whole(self) -> bool:
        """Whether nothing stays lost or damaged."""
        return not self.remaining and all(finding.is_mended or finding.is_harmless for finding in self.findings)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += listed("does not load now", self.losses)
        lines += listed("would stay lost", self.remaining)
        return "\n".join(lines or ["nothing is damaged"])

    def execute(self) -> RepairReport:
        """Carry the plan out.

        Whatever comes to be while it runs is left alone, and no chunk that can be read is deleted before it was copied.
        Called again after any end, a new plan goes on where this one was.

        Raises:
            BackendError: The storage failed.
            ConflictError: Somebody has made another store in this place.
            PendingSavesError: Saves through an MLflow server have begun since; nothing was changed.
        """
        return _execute(self)


def plan_repair(
    store: Store,
    *,
    sources: Sequence[Store] = (),
    abandon: Collection[str] = (),
    format_fix: FormatFix | None = None,
) -> RepairPlan:
    """Read everything, and find out what is damaged and where else it is to be had. Changes nothing.

    Args:
        store: Which; see `open_damaged`.
        sources: Other stores to take from what is lost here, asked in this order.
        abandon: Keys of damaged condemned lists whose collectors are dead, and of packs of which parts cannot be read
            and are to be given up.
        format_fix: As `open_damaged` has given it.

    Raises:
        PendingSavesError: Saves through an MLflow server are under way, whose packs may be half written.
        DirectAccessError: The store is reached through an MLflow server itself.
        NewerFormatError: A later release wrote some of it.
        ValueError: ``abandon`` names what is no such thing.
        BackendError: The storage failed to list what it holds.
    """
    backend = store.backend
    if backend.is_carrier:
        raise DirectAccessError("repair", store.uri)
    bad_intents = _look_at_intents(store)
    lists = read_lists(backend)
    quarantine = Quarantine(backend)
    found = Sources(store, sources, quarantine)
    needs = Needs(store)
    noted = notes(backend)
    for key in noted:
        if key not in needs.bad_refs and backend.stat(key) is None:
            needs.bad_refs[key] = Fault(reason="an earlier repair was about to replace it")
    given_up = frozenset(key for key in abandon if key.startswith("packs/"))
    holdings = Holdings(
        backend, lambda names: Clues(backend, (each for _, each in needs.manifests()), of=names), given_up=given_up
    )
    holdings.look()
    unknown = sorted(set(abandon) - lists.damaged.keys() - {pack_key(name) for name in holdings.packs})
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
    restored = [each.manifest.digests for each in manifests.values()]
    seen = _Seen(
        holdings=holdings,
        needs=needs,
        digests=np.concatenate([needs.digests, *restored]),
        index=check_index(backend, holdings),
        lists=lists,
        notes=noted,
        manifests=manifests,
        refs=refs,
        format_fix=format_fix,
        abandon=frozenset(abandon),
        sources=found,
        quarantine=quarantine,
    )
    good = holdings.good()
    return RepairPlan(
        store=store,
        findings=(*_findings(store, seen), *bad_intents),
        losses=tuple(needs.losses(good)),
        remaining=tuple(_remaining(seen, good)),
        seen=seen,
    )


def _execute(plan: RepairPlan) -> RepairReport:
    store, seen = plan.store, plan.seen
    backend = store.backend
    # Again, now that packs were listed: what is cut may be a pack that a save began to send since the first look.
    may_be_written = bool(_look_at_intents(store)) and is_carried(backend)
    restored: list[str] = []
    left: dict[str, str] = {}
    if seen.format_fix is not None:
        write_format(store, seen.format_fix, seen.quarantine)
        restored.append(p.FORMAT)
    abandoned = abandon_lists(backend, seen.abandon & seen.lists.damaged.keys(), seen.quarantine)
    for name, found in seen.manifests.items():
        reason = restore_manifest(store, name, found.manifest, seen.needs.holders[name], seen.quarantine)
        if reason is None:
            restored.append(f"manifests/{name}")
        else:
            left[f"manifests/{name}"] = reason
    mended = mend_packs(
        store, seen.holdings, seen.digests, seen.sources, seen.quarantine, may_be_written=may_be_written
    )
    for key, found in seen.refs.items():
        reason = restore_ref(store, key, found, seen.quarantine)
        if reason is None:
            restored.append(key)
        else:
            left[key] = reason
    for key, note in seen.notes.items():
        if backend.stat(key) is not None:
            backend.delete(note)
    lists = read_lists(backend)
    for key in lists.damaged:
        left[key] = _ABANDON.format(key=key)
    for key in finished_lists(backend, lists):
        backend.delete(key)
    seen.holdings.look()
    rebuild = check_index(backend, seen.holdings)
    if seen.index.bad or seen.index.missing or mended.gone or rebuild.bad:
        rebuild_index(backend, seen.holdings, rebuild)
    needs = Needs(store)
    for key in notes(backend):
        if key not in needs.bad_refs and backend.stat(key) is None:
            needs.bad_refs[key] = Fault(reason="a repair was about to replace it")
    return RepairReport(
        restored=tuple(restored),
        abandoned=tuple(abandoned),
        packs_gone=tuple(sorted(mended.gone)),
        n_quarantined=mended.n_quarantined,
        n_healed=mended.n_healed,
        n_fenced=mended.n_fenced,
        left={**left, **mended.left},
        losses=tuple(needs.losses(seen.holdings.good())),
    )


_ABANDON = (
    "nobody can save or collect until it goes, and its collector may be alive: once no collection runs any more, "
    "`tensorcas repair --abandon {key}` takes it away"
)


def _findings(store: Store, seen: _Seen) -> list[Finding]:
    """Say of each blob what is wrong with it, and what is to become of it."""
    found: list[Finding] = []
    if seen.format_fix is not None:
        remedy = f"the store's manifests say it is store {store.id}, of chunks of {store.chunk_bytes} bytes"
        found.append(Finding(key=p.FORMAT, reason=seen.format_fix.reason, remedy=remedy))
    for key, reason in seen.lists.damaged.items():
        is_given_up = key in seen.abandon
        remedy = "it is taken away" if is_given_up else _ABANDON.format(key=key)
        found.append(Finding(key=key, reason=reason, remedy=remedy, is_mended=is_given_up))
    for each in seen.lists.sound:
        if each.strangers:
            reason = f"it names {strangers_text(sorted(each.strangers))}"
            remedy = "those names are ignored, and the list goes once its collection is over"
            found.append(Finding(key=each.key, reason=reason, remedy=remedy, is_mended=False, is_harmless=True))
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
    for name in sorted(seen.holdings.packs):
        pack = seen.holdings.packs[name]
        if pack.failure is not None:
            remedy = f"left alone; --abandon {pack_key(name)} gives up what of it cannot be read"
            found.append(Finding(key=pack_key(name), reason=pack.failure, remedy=remedy, is_mended=False))
        elif pack.damage:
            what = f"{len(pack.damage)} chunks are damaged" if pack.has_table else "its table is damaged"
            remedy = f"its {len(pack.entries)} good chunks go to a new pack, the rest to quarantine"
            found.append(Finding(key=pack_key(name), reason=f"{what}: {pack.damage[0].reason}", remedy=remedy))
    for key, reason in seen.index.bad.items():
        found.append(Finding(key=key, reason=reason, remedy="made anew from packs; nothing is lost"))
    if seen.index.missing:
        reason = f"it does not name {len(seen.index.missing)} packs"
        found.append(Finding(key="index", reason=reason, remedy="made anew from packs; nothing is lost"))
    return found


def _look_at_intents(store: Store) -> list[Finding]:
    """Give the intents that cannot be read.

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


def _remaining(seen: _Seen, good: Any) -> list[Loss]:
    """Say what would be lost after the repair."""
    lost = seen.digests[~np.isin(as_keys(seen.digests), good)]
    if len(lost):
        lost = np.concatenate([lost, bases_wanted(seen.holdings, lost)])
        held = np.concatenate([good, as_keys(lost[seen.sources.holds(lost)])])
        good = would_be_good(seen.holdings, held)
    whole = {
        ref.key
        for name, found in seen.manifests.items()
        for ref in seen.needs.holders[name]
        if np.isin(as_keys(found.manifest.digests), good).all()
    }
    return [loss for loss in seen.needs.losses(good) if loss.key not in whole and loss.key not in seen.refs]
