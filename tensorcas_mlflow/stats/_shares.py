"""Where the bytes are: what each experiment, run or step needs alone, what it shares, and what it added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.census import Census, Facts
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError
from tensorcas_mlflow.pack import Entries
from tensorcas_mlflow.stats._figures import Figures, manifest_of
from tensorcas_mlflow.stats._owners import By, owners_of
from tensorcas_mlflow.store import Ref, Store
from tensorcas_mlflow.store import protocol as p

_MAX_PAIRS = 1 << 21
"""Pairs of a chunk and who needs it that are held at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Share(Figures):
    """What one owner needs of a store, in bytes as they are stored: each chunk and each manifest once."""

    experiment: str | None
    run_id: str | None
    step: int | None
    refs: int
    """Checkpoints, models and files."""
    exclusive_bytes: int
    """Of what nobody else needs: what deleting all of it would free, once packs are rewritten."""
    shared_bytes: int
    """Of what others need too."""
    marginal_bytes: int
    """Of what nobody needed before, in the order in which refs were made that are there now."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares(Figures):
    """What all owners need. ``needed_bytes`` is the sum of the next two, and of all marginal bytes."""

    by: By
    needed_bytes: int
    """Of all that somebody needs."""
    exclusive_bytes: int
    """Of what one owner needs, whoever it is."""
    shared_bytes: int
    """Of what several need, counted once."""
    shares: tuple[Share, ...]
    """Most exclusive bytes first."""


def find_shares(store: Store, by: By, *, run_id: str | None = None) -> Shares:
    """Find out whose the bytes are. No tensor is read, and nothing that a census of the store tells.

    Args:
        store: Which.
        by: What is told apart: experiments, runs, or the steps of each run.
        run_id: Tell only of what this run owns; what is shared is still counted with all others.

    Raises:
        CorruptError: A ref or manifest cannot be read.
    """
    refs = sorted(store.checkpoints(), key=lambda ref: (ref.created, ref.key))
    facts = _facts_of(store, refs)
    refs = [ref for ref in refs if ref.manifest in facts.position]
    owners = owners_of(refs, by, store_uri=store.uri)
    number = {owner: at for at, owner in enumerate(dict.fromkeys(owners))}
    owner_of_ref = np.array([number[owner] for owner in owners], dtype=np.int64)
    rank = np.full(len(facts.manifests), len(refs), dtype=np.int64)
    at_manifest = np.array([facts.position[ref.manifest] for ref in refs], dtype=np.int64)
    np.minimum.at(rank, at_manifest, np.arange(len(refs)))
    pairs = np.unique(at_manifest << 32 | owner_of_ref)
    holding = _Holding(manifest=pairs >> 32, owner=pairs & 0xFFFFFFFF, n_manifests=len(facts.manifests))

    chunk_bytes = _stored_bytes(facts)
    sums = _Sums(len(number))
    for chunk, owner in holding.pairs(facts):
        sums.add(chunk, owner, chunk_bytes)
    sums.add(holding.manifest, holding.owner, facts.manifest_bytes.astype(np.int64))
    first = np.append(owner_of_ref, 0)
    chunk, earliest = _earliest(facts, rank)
    is_needed = earliest < len(refs)
    added = _sums_by(first[earliest[is_needed]], chunk_bytes[chunk[is_needed]], len(number))
    has_ref = rank < len(refs)
    added += _sums_by(first[rank[has_ref]], facts.manifest_bytes[has_ref], len(number))

    wanted = {o for ref, o in zip(refs, owners, strict=True) if run_id in (None, ref.run_id, o.run_id)}
    n_refs = np.bincount(owner_of_ref, minlength=len(number))
    shares = [
        Share(
            **owner._asdict(),
            refs=int(n_refs[at]),
            exclusive_bytes=int(sums.exclusive[at]),
            shared_bytes=int(sums.needed[at] - sums.exclusive[at]),
            marginal_bytes=int(added[at]),
        )
        for owner, at in number.items()
        if owner in wanted
    ]
    return Shares(
        by=by,
        needed_bytes=int(sums.exclusive.sum()) + sums.shared_once,
        exclusive_bytes=int(sums.exclusive.sum()),
        shared_bytes=sums.shared_once,
        shares=tuple(sorted(shares, key=lambda share: -share.exclusive_bytes)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """Which owners have a ref of which manifest; sorted by manifest, then by owner."""

    manifest: Any
    owner: Any
    n_manifests: int

    def pairs(self, facts: Facts) -> Any:
        """Yield each chunk with each of its owners once, sorted by chunk; a chunk's all together."""
        # Neighbours with the same single owner are one block; any other manifest is a block of its own.
        n_owners = np.bincount(self.manifest, minlength=self.n_manifests)
        begin = np.concatenate([[0], np.cumsum(n_owners)])
        single = np.full(self.n_manifests, -1, dtype=np.int64)
        single[n_owners == 1] = self.owner[begin[:-1][n_owners == 1]]
        is_new = np.ones(self.n_manifests, dtype=bool)
        is_new[1:] = (single[1:] != single[:-1]) | (single[1:] < 0)
        block = np.cumsum(is_new) - 1
        opens = np.flatnonzero(is_new)
        of_block, from_ = n_owners[opens], begin[:-1][opens]
        upto = np.concatenate([[0], np.cumsum(of_block)])
        first, last = block[facts.span_start], block[facts.span_stop - 1]
        weight = np.cumsum(upto[last + 1] - upto[first])
        starts = np.concatenate([[0], np.flatnonzero(np.diff(facts.span_chunk)) + 1, [len(weight)]])
        at = 0
        while at < len(weight):
            enough = np.searchsorted(weight, (weight[at - 1] if at else 0) + _MAX_PAIRS)
            to = int(starts[max(np.searchsorted(starts, enough, side="right") - 1, np.searchsorted(starts, at) + 1)])
            rows, blocks = _counted_up(first[at:to], last[at:to] - first[at:to] + 1)
            again, owners = _counted_up(from_[blocks], of_block[blocks])
            pairs = facts.span_chunk[at:to][rows[again]].astype(np.int64) << 32 | self.owner[owners]
            pairs.sort(kind="stable")  # which is fast where most of it is in order
            pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])] if len(pairs) else pairs
            yield pairs >> 32, pairs & 0xFFFFFFFF
            at = to


def _counted_up(start: Any, n: Any) -> tuple[Any, Any]:
    """Write out ranges one after the other: for each number the range it is of, and the number."""
    of = np.repeat(np.arange(len(n)), n)
    return of, np.arange(len(of)) + np.repeat(start - (np.cumsum(n) - n), n)


class _Sums:
    """Adds up bytes by owner."""

    def __init__(self, n_owners: int) -> None:
        self.needed = np.zeros(n_owners, dtype=np.int64)
        self.exclusive = np.zeros(n_owners, dtype=np.int64)
        self.shared_once = 0

    def add(self, item: Any, owner: Any, item_bytes: Any) -> None:
        """Count items of different owners; pairs, none twice, with an item's all together."""
        if len(item) == 0:
            return
        begins = np.concatenate([[True], item[1:] != item[:-1]])
        is_alone = begins & np.append(begins[1:], True)
        self.needed += _sums_by(owner, item_bytes[item], len(self.needed))
        self.exclusive += _sums_by(owner[is_alone], item_bytes[item[is_alone]], len(self.exclusive))
        self.shared_once += int(item_bytes[item[begins]].sum()) - int(item_bytes[item[is_alone]].sum())


def _sums_by(owner: Any, n_bytes: Any, n_owners: int) -> Any:
    """Add up bytes by owner; as floats, which are exact up to eight petabytes."""
    return np.bincount(owner, weights=n_bytes, minlength=n_owners).astype(np.int64)


def _earliest(facts: Facts, rank: Any) -> tuple[Any, Any]:
    """For each chunk that a manifest names the least rank of one that does."""
    if len(facts.span_chunk) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    least = np.full(len(facts.digests), np.iinfo(np.int64).max)
    borders = np.stack([facts.span_start, facts.span_stop], axis=1).ravel()
    of_span = np.minimum.reduceat(np.append(rank, np.iinfo(np.int64).max), borders.astype(np.int64))[::2]
    np.minimum.at(least, facts.span_chunk, of_span)
    chunk = np.unique(facts.span_chunk)
    return chunk, least[chunk]


def _stored_bytes(facts: Facts) -> Any:
    """For each chunk the bytes of its smallest copy; 0 where there is none."""
    least = np.full(len(facts.digests), np.iinfo(np.int64).max)
    np.minimum.at(least, facts.entry_chunk, facts.entry_bytes.astype(np.int64))
    return np.where(least == np.iinfo(np.int64).max, 0, least)


def _facts_of(store: Store, refs: Sequence[Ref]) -> Facts:
    """What the manifests of refs name, and what is in packs: from a census, and read where none tells it."""
    backend = store.backend
    census = Census(backend)
    census.load()
    by_manifest: dict[str, list[Ref]] = {}
    for ref in sorted(refs, key=lambda ref: (ref.run_id or "", ref.name or "", ref.step or 0)):
        by_manifest.setdefault(ref.manifest, []).append(ref)
    manifests = {info.key.removeprefix("manifests/"): info.size for info in list_blobs(backend, "manifests")}
    unknown = [held for name, held in by_manifest.items() if census.manifests.get(name) != manifests.get(name)]
    for held, manifest in zip(unknown, _map(store, lambda held: manifest_of(store, held), unknown), strict=True):
        if manifest is not None:
            name = held[0].manifest
            census.learn_manifest(name, manifest.digests, n_bytes=manifests.get(name, 0))
    sizes = dict(p.list_packs(backend))
    new = [(name, size) for name, size in sizes.items() if census.packs.get(name) != size]
    tables: dict[str, Entries] = {}
    for (name, _), table in zip(new, _map(store, lambda pack: _table_of(store, *pack), new), strict=True):
        if table is not None:
            tables[name] = table
    census.learn_packs(tables, sizes)
    return census.facts.only(manifests=by_manifest, packs=sizes)


def _table_of(store: Store, name: str, size: int) -> Entries | None:
    try:
        return p.read_pack_table(store.backend, name, size=size)
    except (BlobNotFoundError, CorruptError):
        return None


def _map(store: Store, function: Any, items: Sequence[Any]) -> Any:
    return threads.ordered_map(function, items, waits=True) if store.backend.is_remote else map(function, items)
