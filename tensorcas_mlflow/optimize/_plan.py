"""Plan, then execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from tensorcas_mlflow._texts import size_text
from tensorcas_mlflow.census import Facts
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import CorruptError, DirectAccessError
from tensorcas_mlflow.gc import GcPlan, plan_gc
from tensorcas_mlflow.index import Mask
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.optimize._blocks import BLOCK_BYTES, Block, blocks_of_group, blocks_of_plain, units_of
from tensorcas_mlflow.optimize._encode import Spent
from tensorcas_mlflow.optimize._holdings import Holdings
from tensorcas_mlflow.optimize._reading import read_chunks
from tensorcas_mlflow.optimize._tracks import Group, tracks_of
from tensorcas_mlflow.optimize._trials import SAMPLE_BYTES, plant
from tensorcas_mlflow.optimize._write import MID_WASTE, collect, write_unit
from tensorcas_mlflow.store import Ref, Store
from tensorcas_mlflow.store import protocol as p

WINDOW = 32
"""Checkpoints whose tensors are looked at together; fewer where chunks are so long that they would not fit memory."""
_N_BEFORE = 8
"""Checkpoints before a window whose tensors may be bases as they are stored."""
UNIT_BYTES = 1 << 30
"""Bytes of chunks that are encoded under one intent."""
_MOST_ROUNDS = 4
"""Mostly there is one, sometimes two."""
COLLECT_BYTES = 2 << 30
"""After so many bytes of new packs the old ones are collected, so that the disk need not hold both stores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the work has come, in bytes of chunks."""

    done_bytes: int
    n_bytes: int
    """What is to be done."""


Watcher = Callable[[Progress], None]
"""Told of progress, in the thread of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeReport:
    """What was done. Printing it says so in words."""

    n_bytes_before: int
    """Of all packs."""
    n_bytes_after: int
    written_bytes: int
    """Of new packs, those that have gone again included."""
    n_left: int
    """Chunks of the plan that are as they were, since they cannot be read or somebody else is about to move them."""

    def __str__(self) -> str:
        before, after = size_text(self.n_bytes_before), size_text(self.n_bytes_after)
        done = f"wrote {size_text(self.written_bytes)} of new packs; all packs together took {before} and take {after}"
        left = f"; {self.n_left} chunks are left as they were: `tensorcas verify --full` tells which are damaged"
        return done + left if self.n_left else done


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizePlan:
    """What there is to do, as things stand. Printing it says so in words."""

    store: Store = field(repr=False)
    holdings: Holdings = field(repr=False, compare=False)
    gc: GcPlan
    """What can be collected before anything is encoded: also what an earlier run did not live to remove."""
    spent: Spent
    n_refs: int
    """Checkpoints and files."""
    labels: Sequence[str]
    """Those of them of which something is not optimized yet, in words."""
    n_chunks: int
    """Chunks that are not optimized yet."""
    n_bytes: int
    """Their size."""
    n_stored_bytes: int
    """What they take now."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.n_chunks == 0 and self.gc.is_empty

    def __str__(self) -> str:
        if not self.labels:
            return f"all {self.n_refs} checkpoints and files are optimized"
        what = f"{self.n_chunks} chunks of {size_text(self.n_bytes)}, which take {size_text(self.n_stored_bytes)},"
        return f"{len(self.labels)} of {self.n_refs} checkpoints and files have {what} that are not optimized yet"

    def execute(self, *, watch: Watcher = lambda progress: None) -> OptimizeReport:
        """Carry the plan out, and then collect what it has made unneeded.

        Others may save, load, drop and collect meanwhile. What is committed meanwhile is for the next run.

        Args:
            watch: Told how far it has come.

        Raises:
            BackendError: The storage failed; nothing is lost, and the next run goes on from there.
            FormatError: As a collection; see `plan_gc`.
        """
        return _execute(self, watch)


def plan_optimize(store: Store, *, spent: Spent = Spent.SMALL) -> OptimizePlan:
    """Find out what of a store could be stored in less room.

    Args:
        store: Which.
        spent: What to spend on each chunk. What has been optimized with no less is done.

    Raises:
        DirectAccessError: The store is reached through an MLflow server itself.
        PendingSavesError: Saves through an MLflow server are under way.
        FormatError: As a collection; see `plan_gc`.
    """
    if store.backend.is_carrier:
        raise DirectAccessError("optimizing", store.uri)
    holdings = Holdings(store.backend, int(spent))
    gc = plan_gc(store, prefer=holdings.optimized_packs())
    refs = in_order(p.read_refs(store.backend))
    facts = gc.census.facts
    holdings.need(facts.digests[facts.chunks_of({ref.manifest for ref in refs})])
    todo = ~holdings.are_done(facts.digests)
    todo &= facts.chunks_of({ref.manifest for ref in refs})
    unfinished = _manifests_with(facts, todo)
    n_bytes, n_stored_bytes = holdings.sizes_of(facts.digests[todo])
    return OptimizePlan(
        store=store,
        holdings=holdings,
        gc=gc,
        spent=spent,
        n_refs=len(refs),
        labels=tuple(ref.label for ref in refs if ref.manifest in unfinished),
        n_chunks=int(todo.sum()),
        n_bytes=n_bytes,
        n_stored_bytes=n_stored_bytes,
    )


def _manifests_with(facts: Facts, chunks: Mask) -> frozenset[str]:
    """Name the manifests that need one of some chunks."""
    spans = chunks[facts.span_chunk]
    n = len(facts.manifests) + 1
    begins, ends = np.bincount(facts.span_start[spans], minlength=n), np.bincount(facts.span_stop[spans], minlength=n)
    return frozenset(facts.manifests[at] for at in np.flatnonzero(np.cumsum(begins - ends)[:-1]))


def in_order(refs: Sequence[Ref]) -> list[Ref]:
    """Put refs in an order in which those follow each other that are likely to be alike.

    Runs go in the order in which they began, as a fine-tune follows its parent; in each its refs by their time.
    """
    began: dict[str | None, str] = {}
    for ref in refs:
        began[ref.run_id] = min(began.get(ref.run_id, ref.created), ref.created)
    return sorted(refs, key=lambda ref: (began[ref.run_id], ref.run_id or "", ref.created, ref.key))


def _manifest(store: Store, ref: Ref) -> Manifest | None:
    """Read what a ref names; None if it was dropped or replaced, and collected, meanwhile."""
    try:
        return store.manifest(ref)
    except CorruptError:
        now = store.ref(ref.key)
        if now is None or now.manifest != ref.manifest:
            return None
        raise


def _execute(plan: OptimizePlan, watch: Watcher) -> OptimizeReport:
    store, holdings, spent = plan.store, plan.holdings, plan.spent
    before_bytes = holdings.n_bytes
    done_bytes = written_bytes = waiting_bytes = 0

    def note(n_bytes: int) -> None:
        nonlocal done_bytes
        # What is to be done may have changed since the plan was made.
        done_bytes = min(done_bytes + n_bytes, plan.n_bytes)
        watch(Progress(done_bytes=done_bytes, n_bytes=plan.n_bytes))

    for turn in range(_MOST_ROUNDS):
        written_before = written_bytes
        for manifests, before in _windows(store, p.read_refs(store.backend)):
            for unit in units_of(_blocks(store, holdings, manifests, before, spent), UNIT_BYTES):
                n_bytes = write_unit(store, holdings, unit, spent, note)
                written_bytes += n_bytes
                waiting_bytes += n_bytes
                if waiting_bytes >= COLLECT_BYTES:
                    collect(store, holdings, max_waste=MID_WASTE)
                    waiting_bytes = 0
        if written_bytes > written_before or (turn == 0 and not plan.gc.is_empty):
            collect(store, holdings)
        # What was written may be stored against the little that is needed of some pack, which then can neither go nor
        # be rewritten, and is to be optimized itself.
        if written_bytes == written_before or not holdings.wasteful or not holdings.n_left:
            break
    return OptimizeReport(
        n_bytes_before=before_bytes,
        n_bytes_after=holdings.n_bytes,
        written_bytes=written_bytes,
        n_left=holdings.n_left,
    )


def _windows(store: Store, refs: Sequence[Ref]) -> Iterator[tuple[list[Manifest], list[Manifest]]]:
    """Give the manifests of some refs at a time, and some of those before them; each content once."""
    different = {ref.manifest.partition(".")[0]: ref for ref in reversed(in_order(refs))}
    chosen = list(reversed(different.values()))
    before: list[Manifest] = []
    n = max(2, min(WINDOW, 4 * BLOCK_BYTES // store.chunk_bytes))
    for begin in range(0, len(chosen), n):
        manifests = [_manifest(store, ref) for ref in chosen[begin : begin + n]]
        there = [manifest for manifest in manifests if manifest is not None]
        if there:
            yield there, before
        before = [*before, *there][-min(_N_BEFORE, n) :]


def _blocks(
    store: Store, holdings: Holdings, manifests: Sequence[Manifest], before: Sequence[Manifest], spent: Spent
) -> Iterator[Block]:
    """Part what is not done of some checkpoints into blocks, as they are drawn."""
    groups, plain = tracks_of(manifests, before, holdings)
    blocks = chain.from_iterable(_blocks_of(store, group) for group in groups)
    return (block for block in chain(blocks, blocks_of_plain(plain)) if not holdings.are_done(block.flat).all())


def _blocks_of(store: Store, group: Group) -> Iterator[Block]:
    """Plant the tree of a group when the first of its blocks is asked for."""
    tree = plant(_samples(store, group), group.itemsize, is_float=group.is_float, fixed_depth=group.fixed_depth)
    yield from blocks_of_group(group, tree)


def _samples(store: Store, group: Group) -> list[list[memoryview | None]]:
    """Read what stands in the middle of a tensor or two, in each version."""
    n_tensors, _, n_chunks, _ = group.digests.shape
    chunk = (n_chunks - 1) // 2
    tensors = sorted({n_tensors // 2, n_tensors // 4})
    wanted: Digests = unique_rows(np.ascontiguousarray(group.digests[tensors, :, chunk]).reshape(-1, DIGEST_BYTES))[0]
    n_bytes = int(group.sizes[chunk])
    begin = max(0, n_bytes - SAMPLE_BYTES) // 2 // 8 * 8
    n_at_once = max(1, BLOCK_BYTES // n_bytes)
    cut: dict[bytes, memoryview] = {}
    for at in range(0, len(wanted), n_at_once):
        some = wanted[at : at + n_at_once]
        found = read_chunks(store, some, np.full(len(some), n_bytes))
        # Copies, so that what is read is not kept for the sake of some of it.
        cut |= {digest: memoryview(bytes(raw[begin : begin + SAMPLE_BYTES])) for digest, raw in found.items()}
    versions = range(group.digests.shape[1])
    return [[cut.get(group.digests[at, version, chunk].tobytes()) for at in tensors] for version in versions]
