"""Deltas whose bases are lost, or that could not be read: what they need is kept, and brought back where it can be."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.digest import Digests, unique_rows
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.pack import MAX_DEPTH, Payload, is_delta
from tensorcas_mlflow.repair._chunks import NO_DIGESTS, as_keys
from tensorcas_mlflow.repair._holdings import Holdings
from tensorcas_mlflow.repair._quarantine import Piece
from tensorcas_mlflow.repair._sources import Sources
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)


def anchored(backend: Backend, holdings: Holdings) -> frozenset[str]:
    """Name the packs of the bases of deltas that could not be read: those are as they were once they can be read again.

    Where the table of a pack could not be read that may hold deltas, nobody knows which these are: then all are held.
    """
    packs = holdings.packs.values()
    if any(pack.failure is not None and not pack.unread for pack in packs) and _has_deltas(holdings):
        return frozenset(holdings.packs)
    bases = p.Bases(backend)
    found: set[str] = set()
    for pack in packs:
        for piece in pack.unread if pack.failure is not None else ():
            try:
                for name in bases.chain(piece.entry):
                    found.add(name)
            except (NotFoundError, FormatError, BackendError):
                continue  # as far as it can be followed
    return frozenset(found)


def _has_deltas(holdings: Holdings) -> bool:
    tables = [pack.entries for pack in holdings.packs.values()]
    return any(is_delta(table).any() for table in tables) or any(pack.baseless for pack in holdings.packs.values())


def bases_wanted(holdings: Holdings, lost: Digests) -> Digests:
    """Give the chunks with which lost ones could be decoded that are there as deltas without their bases."""
    bases = {piece.entry["digest"].tobytes(): piece.entry["base_digest"] for piece in _baseless(holdings)}
    found: list[Any] = []
    waiting = [digest.tobytes() for digest in lost]
    while waiting:
        base = bases.pop(waiting.pop(), None)
        if base is not None:
            found.append(base)
            waiting.append(base.tobytes())
    return np.array(found, np.uint8).reshape(-1, lost.shape[1]) if found else NO_DIGESTS


def would_be_good(holdings: Holdings, good: Any) -> Any:
    """Add to the digests of good chunks, each as one value, those that could be decoded with them."""
    known = {bytes(key) for key in good.tolist()}
    pieces = _baseless(holdings)
    for _ in range(MAX_DEPTH):
        more = {piece.entry["digest"].tobytes() for piece in pieces if piece.entry["base_digest"].tobytes() in known}
        if more <= known:
            break
        known |= more
    return np.array(sorted(known), dtype=good.dtype)


def revive(store: Store, holdings: Holdings, sources: Sources, needed: Digests) -> int:
    """Write in full what is lost but for a delta, where another copy of its base is there or to be had.

    A base is named by its digest too, so a copy that hashes right is as good as the one that is lost.

    Args:
        store: Whose.
        holdings: As they are; looked at again if anything was written.
        sources: Where bases may be had.
        needed: Chunks that refs need.

    Returns:
        How many chunks were written.
    """
    lost = needed[_lacks(holdings, needed)]
    wanted = bases_wanted(holdings, lost)
    if len(wanted) == 0:
        return 0
    useful = {digest.tobytes() for digest in (*lost, *wanted)}
    n_written = _write(store, holdings, sources.payloads(unique_rows(wanted[_lacks(holdings, wanted)])[0]))
    for _ in range(MAX_DEPTH):
        n_more = _write(store, holdings, _decoded(store.backend, holdings, useful))
        n_written += n_more
        if n_more == 0:
            break
    return n_written


def _lacks(holdings: Holdings, digests: Digests) -> Any:
    return ~np.isin(as_keys(digests), holdings.good())


def _write(store: Store, holdings: Holdings, payloads: Iterator[Payload]) -> int:
    """Write chunks, look again if there were any, and return how many."""
    n = 0

    def counted() -> Iterator[Payload]:
        nonlocal n
        for payload in payloads:
            n += 1
            yield payload

    p.write_packs(store.backend, store.catalog, counted())
    if n:
        holdings.look()
    return n


def _decoded(backend: Backend, holdings: Holdings, useful: Set[bytes]) -> Iterator[Payload]:
    """Decode deltas without bases, each chunk once, where a good chunk is another copy of the base.

    Args:
        backend: Of the store.
        holdings: Of the store.
        useful: Digests of the chunks that are wanted.
    """
    table = holdings.table()
    bases = p.Bases(backend)
    left = set(useful) - {digest.tobytes() for digest in table.entries["digest"]}
    for piece in _baseless(holdings):
        entry = piece.entry
        [row] = table.find(entry["base_digest"].reshape(1, -1)).tolist()
        if row < 0 or entry["digest"].tobytes() not in left:
            continue
        try:
            base = table.entries[row]
            raw = bases.decoded(base, _stored(backend, table.key_of(row), base))
            payload = bases.in_full(entry, _stored(backend, piece.key, entry), begins_row=False, base=raw)
        except (NotFoundError, FormatError, BackendError) as error:
            _log.warning("a delta in %s cannot be decoded with another copy of its base: %s", piece.key, error)
            continue
        left.remove(payload.digest)
        yield payload


def _stored(backend: Backend, key: str, entry: Any) -> memoryview:
    block = memoryview(bytearray(int(entry["stored_bytes"])))
    backend.read_into(key, int(entry["offset"]), block)
    return block


def _baseless(holdings: Holdings) -> list[Piece]:
    return [piece for pack in holdings.packs.values() for piece in pack.baseless]
