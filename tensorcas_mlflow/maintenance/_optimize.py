"""Optimization: encode a store again in less room, by a plan and its execution.

With all checkpoints at hand, one in the middle of a training can be the base of those before and after it; a save
knows only earlier ones. Any number of writers, readers and collectors may be at work meanwhile.

Only a collection deletes anything here, and it counts copies in the new packs first. So a failure before it costs work
and nothing else. A delta in a new pack is against a chunk of the same pack, and the two come and go together; or
against one of an earlier pack, which an intent names, as a save's does (``docs/design/protocol.md``, Deltas).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, distinct_digests
from tensorcas_mlflow.base.engines import Engine
from tensorcas_mlflow.base.notebook import PrintedPlan
from tensorcas_mlflow.base.progress import Progress, Watcher, ignore
from tensorcas_mlflow.base.text import content_text, count_text, freed_text, size_text
from tensorcas_mlflow.codecs import Effort
from tensorcas_mlflow.errors import CheckpointNotFoundError, DirectAccessError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import TARGET_BYTES, Base, Mask, PackWriter, Payload, pack_key
from tensorcas_mlflow.maintenance._defaults import DEFAULT_GRACE_S, DEFAULT_MAX_WASTE
from tensorcas_mlflow.maintenance._gc import GcPlan, plan_gc
from tensorcas_mlflow.maintenance._inventory import Inventory, disk_bytes, manifest_of
from tensorcas_mlflow.maintenance._optimize_done import DoneChunks
from tensorcas_mlflow.maintenance._optimize_encode import (
    Encoders,
    Place,
    SavedCopy,
    clusters_of,
    in_batches,
    payloads_of,
    saved_copies,
)
from tensorcas_mlflow.maintenance._optimize_forms import StoredRefs, forms_to_replace, write_forms, write_in_full
from tensorcas_mlflow.maintenance._optimize_relatives import Relation, Relatives, series_of
from tensorcas_mlflow.maintenance._optimize_tracks import places_of
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

MID_WASTE = 0.5
"""Waste from which a collection on the way rewrites a pack: so it copies no more than it frees, and the waste never
exceeds what is needed."""


def write_unit(
    store: Store,
    done_chunks: DoneChunks,
    blocks: Sequence[Sequence[Place]],
    effort: Effort,
    on_done: Callable[[int], None],
    encoders: Encoders | None = None,
) -> int:
    """Encode some blocks into new packs, which are durable and in the index when this returns.

    Args:
        store: Store to optimize.
        done_chunks: Chunks that are done; it learns what is written.
        blocks: Blocks to encode.
        effort: Effort for each chunk.
        on_done: Told the bytes of chunks as they are done.
        encoders: Workers that read and encode; by default this process does.

    Returns:
        Bytes of the new packs.

    Raises:
        BackendError: The storage failed; the next run finds what was written.
    """
    members = {digest for block in blocks for place in block for digest in place.digests}
    digests = np.frombuffer(b"".join(sorted(members)), np.uint8).reshape(-1, DIGEST_BYTES)
    saved = saved_copies(store, digests[~done_chunks.are_done(digests)])
    bases_saved = [copy.base for copy in saved.values() if copy.base is not None]
    saved_rows = np.frombuffer(b"".join(bases_saved), np.uint8).reshape(-1, DIGEST_BYTES)
    written_bytes = 0
    waiting = iter(blocks)
    while (block := next(waiting, None)) is not None:
        # An intent for each pack: a delta may have its base in the pack before.
        is_done = done_chunks.are_done(digests)
        packs, _ = done_chunks.find(np.concatenate([digests[is_done], saved_rows]))
        bases = done_chunks.with_bases(name for name in packs if name is not None)
        with p.protected(store.backend, digests[~is_done], bases):
            relied = frozenset(done_chunks.there(bases))
            name, writer = p.new_pack_name(store.backend), PackWriter()
            some = chain([block], waiting)
            payloads = _until_full(store, done_chunks, some, relied, saved, name, effort, on_done, encoders)
            first = next(payloads, None)
            if first is None:
                break
            store.backend.put_new(pack_key(name), writer.pieces(chain([first], payloads)))
            store.catalog.publish(name, writer.entries())
            done_chunks.add(name, writer.entries())
            written_bytes += writer.n_bytes
    store.catalog.fold()
    return written_bytes


def _until_full(
    store: Store,
    done_chunks: DoneChunks,
    blocks: Iterator[Sequence[Place]],
    relied: frozenset[str],
    saved: Mapping[bytes, SavedCopy],
    pack: str,
    effort: Effort,
    on_done: Callable[[int], None],
    encoders: Encoders | None,
) -> Iterator[Payload]:
    """Yield the payloads of one pack: whole blocks, so that no delta has its base in the next pack."""
    n_bytes = 0
    taken: dict[bytes, tuple[Base, int] | None] = {}
    for block in blocks:
        clusters = clusters_of(block, done_chunks, relied, taken, saved)
        for payload in payloads_of(store, clusters, pack, effort, encoders):
            n_bytes += memoryview(payload.data).nbytes
            depth = 0 if payload.base is None else payload.base.depth + 1
            taken[payload.digest] = Base(pack=pack, digest=payload.digest, depth=depth), payload.raw_bytes
            yield payload
        if clusters:
            on_done(sum(cluster.n_bytes for cluster in clusters))
        if n_bytes >= TARGET_BYTES:
            return


def collect(
    store: Store, done_chunks: DoneChunks, *, max_waste: float = DEFAULT_MAX_WASTE, least_bytes: int = 0
) -> GcPlan:
    """Collect garbage by the rules of every collection: above all, old copies of optimized chunks.

    If old copies lie in packs that stay for others, the new ones may take more room than this frees. Then the others
    move, too, now or in another round. If not even that frees enough, the new copies go.

    Args:
        store: Store to collect.
        done_chunks: Chunks that are done; it forgets the new packs.
        max_waste: See `plan_gc`.
        least_bytes: Bytes that the collection must free for the new packs to stay.

    Returns:
        The last collection.
    """
    done_chunks.refresh()
    plan = _plan_collection(store, done_chunks, max_waste)
    # More rounds free more if packs are to be replaced. A collection keeps packs with damaged chunks anyway.
    is_judged = done_chunks.new_packs and not done_chunks.gives_room_later and not done_chunks.n_left
    if is_judged and plan.freed_bytes < least_bytes:
        done_chunks.max_waste = 0.0
        done_chunks.refresh()
        plan = _plan_collection(store, done_chunks, 0.0)
        if plan.freed_bytes < least_bytes and not done_chunks.gives_room_later:
            undo = plan_gc(store, max_waste=max_waste, avoid=done_chunks.new_packs)
            plan = max(plan, undo, key=lambda each: each.freed_bytes)
            done_chunks.is_undone = plan is undo
    plan.execute()
    done_chunks.new_packs.clear()
    done_chunks.refresh()
    return plan


def _plan_collection(store: Store, done_chunks: DoneChunks, max_waste: float) -> GcPlan:
    return plan_gc(
        store,
        max_waste=max_waste,
        prefer=done_chunks.optimized_packs(),
        avoid=done_chunks.wasteful,
    )


WINDOW = 32
"""Checkpoints whose tensors are compared at once; fewer where chunks are so long that they would not fit memory."""
_N_BEFORE = 8
"""Checkpoints before a window whose stored tensors may be bases."""
BLOCK_BYTES = 48 << 20
"""Decoded bytes of a block of places. So many are held at once, besides their encoded bytes."""
UNIT_BYTES = 1 << 30
"""Bytes of chunks that are encoded under one intent."""
_MOST_ROUNDS = 4
"""Most rounds of a run; one usually suffices, sometimes two."""
COLLECT_BYTES = 2 << 30
"""Bytes of new packs after which old packs are collected, so that the disk need not hold both stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeReport:
    """Report of an optimization. Printing it says so in words."""

    bytes_before: int
    """Bytes of all files of the store when the optimization began."""
    bytes_after: int
    """Those when it ended, with what others have saved meanwhile."""
    written_bytes: int
    """Bytes of new packs, including packs that are gone again."""
    n_forms: int = 0
    """Checkpoints and files of which more rows are derived now; equal ones count once."""
    n_left: int
    """Chunks of the plan that stayed as they were: they cannot be read, or a collector is about to move them."""
    is_undone: bool = False
    """Whether the new packs are gone again, because they would have taken more room than they save."""

    def __str__(self) -> str:
        forms = f", derived tensors of {content_text(self.n_forms)} from others" if self.n_forms else ""
        written = f"wrote {size_text(self.written_bytes)} of new packs{forms}"
        done = f"{written}; {freed_text(self.bytes_before, self.bytes_after)}"
        if self.is_undone:
            return f"{done}; they would have taken more room than they save, so they are gone again"
        chunks = count_text(self.n_left, "chunk")
        left = f"; {chunks} left as before: `tensorcas verify --full` reports damaged ones"
        return done + left if self.n_left else done


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizePlan(PrintedPlan):
    """Plan of an optimization, as things stand. Printing it says so in words."""

    store: Store = field(repr=False)
    done_chunks: DoneChunks = field(repr=False, compare=False)
    gc: GcPlan
    """Garbage that can be collected first, including what an interrupted run left."""
    effort: Effort
    n_refs: int
    """Checkpoints and files of the store."""
    labels: Sequence[str]
    """Checkpoints and files with a chunk that is not optimized yet, in words."""
    n_chunks: int
    """Chunks that are not optimized yet."""
    n_bytes: int
    """Their decoded bytes."""
    n_stored_bytes: int
    """Their stored bytes."""
    shallow_labels: Sequence[str] = ()
    """Checkpoints and files that are to be restored with one base a chunk at most, in words."""
    in_full: frozenset[str] = frozenset()
    """Manifests whose forms are to be replaced: their content is to be in packs again."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return self.n_chunks == 0 and self.gc.is_empty

    def __str__(self) -> str:
        if not self.labels:
            return f"nothing to optimize in {content_text(self.n_refs)}"
        chunks = count_text(self.n_chunks, "chunk")
        what = f"{chunks} of {size_text(self.n_bytes)}, encoded in {size_text(self.n_stored_bytes)}"
        meanwhile = size_text(min(self.n_stored_bytes, COLLECT_BYTES + UNIT_BYTES))
        return (
            f"to optimize: {what}, in {len(self.labels)} of {content_text(self.n_refs)}; "
            f"takes up to {meanwhile} more meanwhile"
        )

    def execute(self, *, engine: Engine | None = None, watch: Watcher = ignore) -> OptimizeReport:
        """Execute the plan, then collect the copies that it replaced.

        Others may save, load, drop and collect meanwhile. The next run optimizes what they commit.

        Args:
            engine: Workers that read and encode chunks; by default this process does, on all cores. This process alone
                writes, and the packs are the same.
            watch: Told the bytes of chunks that are done.

        Raises:
            BackendError: The storage failed; nothing is lost, and the next run goes on from there.
            FormatError: The collection refuses to work; see `plan_gc`.
        """
        with nullcontext() if engine is None else engine.kept():
            return _execute(self, None if engine is None else Encoders(self.store, engine), watch)


def plan_optimize(
    store: Store,
    *,
    effort: Effort = Effort.SMALL,
    for_restore: bool = False,
    pins: Collection[str] = (),
    engine: Engine | None = None,
    watch: Watcher = ignore,
) -> OptimizePlan:
    """Plan an optimization. Changes nothing.

    With `for_restore`, each chunk of the latest step of a series, and of each pinned checkpoint or file, is stored in
    full or as a delta against a chunk in full. Other steps may be deltas against these. Such a chunk is done only if no
    pack holds a deeper copy of it; else all chunks of that pack are encoded again. Later optimizations without
    `for_restore` leave these chunks alone. Nothing else differs: every load returns the same bits.

    Args:
        store: Store to optimize.
        effort: Effort for each chunk. A chunk that was optimized with no less is done.
        for_restore: Whether the latest and the pinned steps are to be restored fast, for some more bytes.
        pins: The pinned ones, with `for_restore`: each by its key, its artifact path, or the id of its model.
        engine: Workers that read manifests and the tables of packs; see `plan_gc`.
        watch: Told what they have read.

    Raises:
        CheckpointNotFoundError: The store has no checkpoint or file of a pin.
        ValueError: There are pins without `for_restore`.
        DirectAccessError: The store is reached through an MLflow server itself.
        PendingSavesError: Saves through an MLflow server are under way.
        FormatError: The collection refuses to work; see `plan_gc`.
    """
    if store.backend.is_carrier:
        raise DirectAccessError("optimizing", store.uri)
    if pins and not for_restore:
        raise ValueError("pins serve an optimization for restore: pass for_restore=True")
    done_chunks = DoneChunks(store.backend, int(effort))
    gc = plan_gc(store, prefer=done_chunks.optimized_packs(), engine=engine, watch=watch)
    found = StoredRefs.read(store)
    inventory = gc.census.inventory
    shallow = restored_fast(in_order(found.refs), pins) if for_restore else []
    in_full = forms_to_replace(store, done_chunks, inventory, found, shallow)
    refs = in_order(found.as_stored(without=in_full))
    fast = {ref.key for ref in shallow}
    needed = inventory.chunks_of({ref.manifest for ref in refs})
    done_chunks.need(
        inventory.digests[needed],
        shallow=inventory.digests[needed & inventory.chunks_of({ref.manifest for ref in refs if ref.key in fast})],
    )
    if shallow and done_chunks.wasteful:  # a copy there is worth less than one elsewhere
        gc = plan_gc(
            store,
            prefer=done_chunks.optimized_packs(),
            avoid=done_chunks.wasteful,
            engine=engine,
            watch=watch,
        )
    todo = needed & ~done_chunks.are_done(inventory.digests)
    unfinished = _manifests_with(inventory, todo)
    n_bytes, n_stored_bytes = done_chunks.sizes_of(inventory.digests[todo])
    return OptimizePlan(
        store=store,
        done_chunks=done_chunks,
        gc=gc,
        effort=effort,
        n_refs=len(refs),
        labels=tuple(ref.label for ref in refs if ref.manifest in unfinished),
        n_chunks=int(todo.sum()),
        n_bytes=n_bytes,
        n_stored_bytes=n_stored_bytes,
        shallow_labels=tuple(ref.label for ref in shallow),
        in_full=in_full,
    )


def restored_fast(refs: Sequence[Ref], pins: Collection[str]) -> list[Ref]:
    """Return the latest step of each series, the latest model of each run, and the pinned checkpoints and files.

    Args:
        refs: Refs of the store, in the order of `in_order`.
        pins: See `plan_optimize`.

    Raises:
        CheckpointNotFoundError: No ref is the one of a pin.
    """
    names = {ref.key: {ref.key, ref.path, ref.copy_path, ref.model_id} for ref in refs}
    for pin in pins:
        if not any(pin in each for each in names.values()):
            raise CheckpointNotFoundError(f"with the key, artifact path or model id {pin!r}")
    latest: dict[tuple[object, ...], Ref] = {}
    for ref in refs:
        if ref.kind != "checkpoint" or (ref.run_id is None and ref.model_id is None):
            continue
        series = (ref.run_id, ref.name, ref.model_id is not None) if ref.run_id is not None else (None, ref.model_id)
        before = latest.get(series)
        if before is None or _step_of(ref) >= _step_of(before):
            latest[series] = ref
    keys = {ref.key for ref in latest.values()}
    return [ref for ref in refs if ref.key in keys or not names[ref.key].isdisjoint(pins)]


def _step_of(ref: Ref) -> int:
    return -1 if ref.step is None else ref.step


def _manifests_with(inventory: Inventory, chunks: Mask) -> frozenset[str]:
    """Return the manifests that need one of some chunks."""
    spans = chunks[inventory.span_chunk]
    n = len(inventory.manifests) + 1
    begins, ends = (
        np.bincount(inventory.span_start[spans], minlength=n),
        np.bincount(inventory.span_stop[spans], minlength=n),
    )
    return frozenset(inventory.manifests[at] for at in np.flatnonzero(np.cumsum(begins - ends)[:-1]))


def in_order(refs: Sequence[Ref]) -> list[Ref]:
    """Sort refs so that similar ones follow each other.

    Runs stand in the order in which they began, as a fine-tune follows its parent; the refs of a run by their time.
    """
    began: dict[str | None, str] = {}
    for ref in refs:
        began[ref.run_id] = min(began.get(ref.run_id, ref.created), ref.created)
    return sorted(refs, key=lambda ref: (began[ref.run_id], ref.run_id or "", ref.created, ref.key))


def _execute(plan: OptimizePlan, encoders: Encoders | None, watch: Watcher) -> OptimizeReport:
    store, done_chunks, effort = plan.store, plan.done_chunks, plan.effort
    bytes_before = disk_bytes(store.backend)
    done_bytes = written_bytes = waiting_bytes = 0
    collected: GcPlan | None = None

    def note(n_bytes: int) -> None:
        nonlocal done_bytes
        # The work may have changed since the plan was made.
        done_bytes = min(done_bytes + n_bytes, plan.n_bytes)
        watch(Progress(done_bytes=done_bytes, n_bytes=plan.n_bytes))

    n_forms = 0
    if plan.n_chunks:
        found = StoredRefs.read(store)
        write_in_full(store, found, plan.in_full)
        found = StoredRefs.read(store)
        n_forms = write_forms(store, done_chunks, found, _different(found.as_stored()))
        if n_forms or plan.in_full:
            done_chunks.need(_needed_by(store, StoredRefs.read(store).as_stored()))
    for turn in range(_MOST_ROUNDS):
        written_before = written_bytes
        for window in _windows(store, done_chunks, StoredRefs.read(store).as_stored()):
            blocks = in_batches(window, BLOCK_BYTES, lambda place: place.total_bytes)
            for unit in in_batches(blocks, UNIT_BYTES, lambda block: sum(place.total_bytes for place in block)):
                n_bytes = write_unit(store, done_chunks, unit, effort, note, encoders)
                written_bytes += n_bytes
                waiting_bytes += n_bytes
                if waiting_bytes >= COLLECT_BYTES:
                    collected = collect(store, done_chunks, max_waste=MID_WASTE)
                    waiting_bytes = 0
        if written_bytes > written_before or (turn == 0 and (n_forms or not plan.gc.is_empty)):
            grown_bytes = disk_bytes(store.backend) - bytes_before
            least_bytes = 0 if collected is not None else plan.gc.freed_bytes + grown_bytes
            collected = collect(store, done_chunks, least_bytes=least_bytes)
        # New deltas may have bases in a pack of which little else is needed. A collection can then neither delete nor
        # rewrite it, so the next round optimizes those bases too.
        if written_bytes == written_before or not done_chunks.wasteful or not done_chunks.n_left:
            break
    # A census saves the next collection some time. It is not to cost more room than this run has gained.
    if collected is not None and disk_bytes(store.backend) > bytes_before:
        collected.census.drop()
        store.backend.sweep(DEFAULT_GRACE_S)
    return OptimizeReport(
        bytes_before=bytes_before,
        bytes_after=disk_bytes(store.backend),
        written_bytes=written_bytes,
        n_forms=n_forms,
        n_left=done_chunks.n_left,
        is_undone=done_chunks.is_undone,
    )


def _needed_by(store: Store, refs: Sequence[Ref]) -> Digests:
    """Return the distinct chunks that packs have to hold for some refs, ascending."""
    manifests = threads.ordered_map(
        lambda ref: manifest_of(store, [ref]), _different(refs), waits=store.backend.is_remote
    )
    return distinct_digests([manifest.stored_digests for manifest in manifests if manifest is not None])


def _different(refs: Sequence[Ref]) -> list[Ref]:
    """Return the first ref of each content, in the order of `in_order`."""
    first = {ref.manifest.partition(".")[0]: ref for ref in reversed(in_order(refs))}
    return list(reversed(first.values()))


def _windows(store: Store, done_chunks: DoneChunks, refs: Sequence[Ref]) -> Iterator[Iterator[Place]]:
    """Yield the places of some refs' checkpoints at a time, each content once.

    Beside the latest checkpoints before these come the nearest ones by sketches, however far back.
    """
    chosen = _different(refs)
    series = {ref.manifest.partition(".")[0]: series_of(ref) for ref in chosen}
    relatives = Relatives(store)
    before: list[Manifest] = []
    n = max(2, min(WINDOW, 4 * BLOCK_BYTES // store.chunk_bytes))
    n_before = min(_N_BEFORE, n)
    for begin in range(0, len(chosen), n):
        there: dict[str, Manifest] = {}
        relations: dict[str, Relation] = {}
        begun = {series[manifest.digest] for manifest in before}
        for ref in chosen[begin : begin + n]:
            manifest = manifest_of(store, [ref])
            if manifest is None:
                continue
            if series_of(ref) not in begun and not done_chunks.are_done(manifest.stored_digests).all():
                at_hand = {each.digest: each for each in [*before, *there.values()]}
                relation = relatives.nearest(manifest, at_hand)
                if relation is not None:
                    relations[manifest.digest] = relation
            begun.add(series_of(ref))
            there[manifest.digest] = manifest
            relatives.note(ref, manifest)
        near = {*there, *(manifest.digest for manifest in before)}
        far = {each.other.digest: each.other for each in relations.values() if each.other.digest not in near}
        yield places_of(list(there.values()), [*before, *list(far.values())[:n_before]], done_chunks, relations)
        before = [*before, *there.values()][-n_before:]
