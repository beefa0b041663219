"""New packs with what is encoded anew, and the collection that removes what they take the place of.

Nothing is deleted here but by a collection, which counts copies in the new packs first. So all that can go wrong before
is that work is lost. What stands in a new pack is a delta against a chunk of the same pack, and the two come and go
together; or against one of an earlier pack. For those an intent names the packs, as a save's does
(``docs/design/protocol.md``, Deltas).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.gc import DEFAULT_MAX_WASTE, GcReport, plan_gc
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.optimize._blocks import Block
from tensorcas_mlflow.optimize._encode import Spent, payloads_of, work_of
from tensorcas_mlflow.optimize._holdings import Holdings
from tensorcas_mlflow.pack import TARGET_BYTES, PackWriter, Payload
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)

_NEVER = "0" * 64
"""The digest of no manifest: what is declared is never committed."""
MID_WASTE = 0.5
"""On the way, a pack is rewritten only if no more of it is needed than is not: so no more is copied than is freed, and
what waits to be freed is never more than what is needed."""


def write_unit(
    store: Store, holdings: Holdings, blocks: Sequence[Block], spent: Spent, on_done: Callable[[int], None]
) -> int:
    """Encode some blocks into new packs, which are durable and in the index when this returns.

    Args:
        store: Which.
        holdings: What is done; comes to know what is written.
        blocks: What to encode.
        spent: On each chunk.
        on_done: Told the bytes of chunks that have been seen to.

    Returns:
        Bytes of the new packs.

    Raises:
        BackendError: The storage failed; what was written is found by the next run.
    """
    digests = unique_rows(np.concatenate([block.flat for block in blocks]))[0]
    is_done = holdings.are_done(digests)
    packs, _ = holdings.find(digests[is_done])
    bases = holdings.with_bases(name for name in packs if name is not None)
    intent = p.declare(store.backend, f"{_NEVER}.{uuid.uuid4().hex[:8]}", digests[~is_done], bases)
    try:
        relied = frozenset(holdings.there(bases))
        written_bytes = 0
        waiting = iter(blocks)
        while (block := next(waiting, None)) is not None:
            name, writer = p.new_pack_name(store.backend), PackWriter()
            some = chain([block], waiting)
            payloads = _until_full(store, holdings, some, relied, name, spent, on_done)
            first = next(payloads, None)
            if first is None:
                break
            store.backend.put_new(pack_key(name), writer.pieces(chain([first], payloads)))
            store.catalog.publish(name, writer.entries())
            holdings.add(name, writer.entries())
            written_bytes += writer.n_bytes
        store.catalog.fold()
        return written_bytes
    finally:
        try:
            store.backend.withdraw(*intent)
        except BackendError as error:
            # All is written, or something else is told already. A collection removes it when this process is gone.
            _log.warning("an intent stays: %s", error)


def _until_full(
    store: Store,
    holdings: Holdings,
    blocks: Iterator[Block],
    relied: frozenset[str],
    pack: str,
    spent: Spent,
    on_done: Callable[[int], None],
) -> Iterator[Payload]:
    """Give what goes into one pack: whole blocks, so that no delta has its base in the next one."""
    n_bytes = 0
    taken: set[bytes] = set()
    for block in blocks:
        work = work_of(block, holdings, relied, taken)
        for payload in payloads_of(store, work, pack, spent):
            n_bytes += memoryview(payload.data).nbytes
            yield payload
        if work.jobs:
            on_done(work.n_bytes)
        if n_bytes >= TARGET_BYTES:
            return


def collect(store: Store, holdings: Holdings, *, max_waste: float = DEFAULT_MAX_WASTE) -> GcReport:
    """Delete what nothing needs any more, by the rules of every collection: old copies of what is done, above all."""
    holdings.refresh()
    report = plan_gc(store, max_waste=max_waste, prefer=holdings.optimized_packs(), avoid=holdings.wasteful).execute()
    holdings.refresh()
    return report
