"""Repair of a damaged store: a plan of what is damaged and what can be restored, and its execution.

It may run while others save, load and collect; ``docs/design/protocol.md`` says why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import LogDamage
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
from tensorcas_mlflow.layout import MAX_BYTES, Manifest, Ref, list_blobs, pack_key, strangers_text
from tensorcas_mlflow.maintenance._checked_packs import CheckedPacks
from tensorcas_mlflow.maintenance._inventory import DigestSet, read_holders, stands
from tensorcas_mlflow.maintenance._quarantine import Piece, Quarantine
from tensorcas_mlflow.maintenance._repair_packs import bases_wanted, mend_packs, would_be_good
from tensorcas_mlflow.maintenance._repair_records import (
    FormatFix,
    IndexFaults,
    Lists,
    abandon_lists,
    find_index_faults,
    finished_lists,
    may_be_carried,
    notes,
    read_lists,
    rebuild_index,
    restore_manifest,
    restore_ref,
    write_format,
)
from tensorcas_mlflow.maintenance._salvage import Clues
from tensorcas_mlflow.maintenance._sources import FoundManifest, FoundRef, Sources
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_N_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Checkpoint or file that does not load, or not whole. Printing it says so in words."""

    key: str
    """Key of its ref, or path of the log that had it."""
    checkpoint: str | None
    """The checkpoint in words; None if its ref cannot be read, so that only the key tells what it was."""
    tensors: tuple[str, ...]
    """Lost tensors; empty if the ref or the manifest is lost, and all tensors with it."""
    n_bytes: int | None
    """Size of the lost tensors; None if it is unknown."""
    reason: str
    is_in_log: bool = False
    """True if records of a log are lost, so that nobody knows which checkpoints they held."""

    def __str__(self) -> str:
        what = self.checkpoint or self.key
        if not self.tensors:
            return f"{what}: {self.reason}" if self.is_in_log else f"{what}: all of it: {self.reason}"
        names = ", ".join(repr(name) for name in self.tensors[:_N_NAMES])
        more = f" and {len(self.tensors) - _N_NAMES} more" if len(self.tensors) > _N_NAMES else ""
        kind = "tensor" if len(self.tensors) == 1 else "tensors"
        return f"{what}: {kind} {names}{more} ({self.n_bytes:,} bytes): {self.reason}"


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

    def losses(self, good: Any) -> list[Loss]:
        """Find the losses if packs hold only some chunks, given by their digests, each as one value."""
        found = [
            Loss(key=key, checkpoint=None, tensors=(), n_bytes=None, reason=f"its ref is damaged: {fault.reason}")
            for key, fault in self.bad_refs.items()
        ]
        for name, fault in self.bad_manifests.items():
            reason = f"manifests/{name}: {fault.reason}"
            for ref in self.holders[name]:
                found.append(_loss(ref, (), ref.n_bytes if ref.kind == "file" else None, reason))
        if not np.isin(as_keys(self.digests), good).all():
            for name, manifest in self.manifests():
                lost = ~np.isin(as_keys(manifest.stored_digests), good)
                if lost.any():
                    found += _losses_of(manifest, self.holders[name], lost)
        return sorted(found, key=lambda loss: (loss.checkpoint or "", loss.key))

    def _read_all(self) -> Iterator[tuple[str, Manifest | RecordFault | None]]:
        def read(item: tuple[str, list[Ref]]) -> Manifest | RecordFault | None:
            return _read_manifest(self._store, *item)

        found = self._store.backend.ordered_map(read, self.holders.items())
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


def _losses_of(manifest: Manifest, refs: Sequence[Ref], lost: Any) -> list[Loss]:
    rows = manifest.rows_needing(np.flatnonzero(lost))
    names = tuple(manifest.columns.name(row) for row in rows)
    n_bytes = int(manifest.columns.n_bytes[list(rows)].sum())
    reason = f"{int(lost.sum())} of {count_text(len(lost), 'chunk')} damaged or missing"
    return [_loss(ref, names, n_bytes, reason) for ref in refs]


def _loss(ref: Ref, tensors: tuple[str, ...], n_bytes: int | None, reason: str) -> Loss:
    return Loss(key=ref.key, checkpoint=ref.label, tensors=tensors, n_bytes=n_bytes, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Blob that is not as it should be. Printing it says so in words."""

    key: str
    reason: str
    remedy: str
    """The action of a repair against it, or another remedy."""
    is_mended: bool = True
    """True if a repair mends it."""
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
    """Keys of damaged condemned lists that the repair removed."""
    packs_gone: tuple[str, ...]
    """Keys of damaged packs that the repair deleted, after it copied their good chunks."""
    n_quarantined: int
    """Stretches of damaged packs and logs that the repair put into quarantine."""
    n_healed: int
    """Chunks that the repair took from other stores or out of quarantine."""
    n_fenced: int
    """Saves under way that relied on a lost chunk; they begin again."""
    left: Mapping[str, str]
    """Keys of damaged blobs and logs that the repair left alone, and why."""
    losses: tuple[Loss, ...]
    """Checkpoints and files that do not load, or not whole, after the repair."""
    mended_logs: tuple[str, ...] = ()
    """Damaged logs whose whole records the repair has copied. What the others committed is lost."""

    @property
    def is_whole(self) -> bool:
        """True if nothing is lost or damaged now."""
        return not self.losses and not self.left

    def __str__(self) -> str:
        lines = [f"rewrote {key} without its damaged records" for key in self.mended_logs]
        lines += [f"restored {key}" for key in self.restored]
        lines += [f"removed {key}" for key in self.abandoned]
        lines += [f"left {key}: {reason}" for key, reason in self.left.items()]
        lines += listed("is lost", self.losses)
        fenced = f", made {count_text(self.n_fenced, 'save')} start again" if self.n_fenced else ""
        lines.append(
            f"replaced {count_text(len(self.packs_gone), 'damaged pack')}, put "
            f"{count_text(self.n_quarantined, 'damaged stretch', 'damaged stretches')} into quarantine, healed "
            f"{count_text(self.n_healed, 'chunk')}{fenced}"
        )
        return "\n".join(lines)


def listed(heading: str, losses: Sequence[Loss]) -> list[str]:
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
    notes: Mapping[str, str]
    manifests: Mapping[str, FoundManifest]
    refs: Mapping[str, FoundRef]
    format_fix: FormatFix | None
    abandon: frozenset[str]
    sources: Sources
    quarantine: Quarantine
    logs: Sequence[LogDamage]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan(PrintedPlan):
    """Plan of a repair, as things stand. Printing it says so in words."""

    store: Store = field(repr=False)
    findings: tuple[Finding, ...]
    """Blobs that are not as they should be."""
    losses: tuple[Loss, ...]
    """Checkpoints and files that do not load now."""
    remaining: tuple[Loss, ...]
    """Checkpoints and files that would not load after the repair, going by the indexes of other stores."""
    seen: Any = field(repr=False)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return not any(finding.is_mended for finding in self.findings) and len(self.remaining) == len(self.losses)

    @property
    def is_whole(self) -> bool:
        """True if nothing stays lost or damaged."""
        return not self.remaining and all(finding.is_mended or finding.is_harmless for finding in self.findings)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += listed("does not load now", self.losses)
        lines += listed("would stay lost", self.remaining)
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
    store = store.past_damage()
    backend = store.backend
    logs = backend.damages()
    bad_intents = _look_at_intents(store)
    lists = read_lists(backend)
    quarantine = Quarantine(backend)
    found = Sources(store, sources, quarantine)
    needs = Needs(store)
    noted = notes(backend)
    for key in noted:
        if key not in needs.bad_refs and backend.stat(key) is None:
            needs.bad_refs[key] = RecordFault(reason="an earlier repair was about to replace it")
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
        notes=noted,
        manifests=manifests,
        refs=refs,
        format_fix=format_fix,
        abandon=frozenset(abandon),
        sources=found,
        quarantine=quarantine,
        logs=logs,
    )
    good = packs.good()
    return RepairPlan(
        store=store,
        findings=(*map(_finding_of_log, logs), *_findings(store, seen), *bad_intents),
        losses=(*_losses_of_logs(logs), *needs.losses(good)),
        remaining=(*_losses_of_logs(logs), *_remaining(seen, good)),
        seen=seen,
    )


def _execute(plan: RepairPlan) -> RepairReport:
    store, seen = plan.store, plan.seen
    backend = store.backend
    # Again, now that packs were listed: a pack that is cut may be one that a save began to send since the first look.
    may_be_written = bool(_look_at_intents(store)) and may_be_carried(backend)
    restored: list[str] = []
    left: dict[str, str] = {}
    n_of_logs = 0
    if seen.logs:
        # First: everything below looks for blobs, and saves may not look past the damage.
        for damage in seen.logs:
            if damage.n_bytes:
                piece = Piece(key=damage.key, start=damage.start, n_bytes=damage.n_bytes, reason=damage.reason)
                n_of_logs += seen.quarantine.keep(piece)
        left |= backend.mend()
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
    mended = mend_packs(store, seen.packs, seen.digests, seen.sources, seen.quarantine, may_be_written=may_be_written)
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
    seen.packs.look()
    rebuild = find_index_faults(backend, seen.packs)
    if seen.index.bad or seen.index.missing or mended.gone or rebuild.bad:
        rebuild_index(backend, seen.packs, rebuild)
    needs = Needs(store)
    for key in notes(backend):
        if key not in needs.bad_refs and backend.stat(key) is None:
            needs.bad_refs[key] = RecordFault(reason="a repair was about to replace it")
    return RepairReport(
        restored=tuple(restored),
        abandoned=tuple(abandoned),
        packs_gone=tuple(sorted(mended.gone)),
        mended_logs=tuple(sorted({damage.key for damage in seen.logs} - left.keys())),
        n_quarantined=mended.n_quarantined + n_of_logs,
        n_healed=mended.n_healed,
        n_fenced=mended.n_fenced,
        left={**left, **mended.left},
        losses=(*_losses_of_logs(seen.logs), *needs.losses(seen.packs.good())),
    )


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
    for name in sorted(seen.packs.packs):
        pack = seen.packs.packs[name]
        if pack.failure is not None:
            remedy = f"left alone; `--abandon {pack_key(name)}` gives up its unreadable parts"
            found.append(Finding(key=pack_key(name), reason=pack.failure, remedy=remedy, is_mended=False))
        elif pack.damage:
            what = count_text(len(pack.damage), "damaged chunk") if pack.has_table else "damaged table"
            remedy = f"{count_text(len(pack.entries), 'good chunk')} to a new pack, the rest to quarantine"
            found.append(Finding(key=pack_key(name), reason=f"{what}: {pack.damage[0].reason}", remedy=remedy))
    for key, reason in seen.index.bad.items():
        found.append(Finding(key=key, reason=reason, remedy="rebuilt from packs; nothing is lost"))
    if seen.index.missing:
        reason = f"it does not name {count_text(len(seen.index.missing), 'pack')}"
        found.append(Finding(key="index", reason=reason, remedy="rebuilt from packs; nothing is lost"))
    return found


def _losses_of_logs(damages: Sequence[LogDamage]) -> list[Loss]:
    reason = "{}; what they committed is lost, and what that replaced is back"
    return [
        Loss(
            key=damage.key,
            checkpoint=None,
            tensors=(),
            n_bytes=None,
            reason=reason.format(damage.reason),
            is_in_log=True,
        )
        for damage in damages
        if damage.loses_records
    ]


def _finding_of_log(damage: LogDamage) -> Finding:
    remedy = "whole records go to a new log, damaged bytes to quarantine; what the damaged records committed is lost"
    return Finding(key=damage.key, reason=damage.reason, remedy=remedy)


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


def _remaining(seen: _Seen, good: Any) -> list[Loss]:
    """Find the losses that would remain after the repair."""
    lost = seen.digests[~np.isin(as_keys(seen.digests), good)]
    if len(lost):
        lost = np.concatenate([lost, bases_wanted(seen.packs, lost)])
        held = np.concatenate([good, as_keys(lost[seen.sources.holds(lost)])])
        good = would_be_good(seen.packs, held)
    whole = {
        ref.key
        for name, found in seen.manifests.items()
        for ref in seen.needs.holders[name]
        if np.isin(as_keys(found.manifest.stored_digests), good).all()
    }
    return [loss for loss in seen.needs.losses(good) if loss.key not in whole and loss.key not in seen.refs]
