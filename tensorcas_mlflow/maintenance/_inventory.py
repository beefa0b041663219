"""What many manifests and packs say, as arrays: which chunks each of them names or holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, prefixes, unique_rows
from tensorcas_mlflow.index import Mask, as_names
from tensorcas_mlflow.pack import ENTRY, Entries, is_delta

Numbers = Any
"""A one-dimensional array of integers."""
NO_BASE = np.uint32(0xFFFFFFFF)
"""Stands for the base of what is stored in full."""


class RefSeen(NamedTuple):
    """A ref as a remote backend lists it; one that says something else is listed with another token."""

    key: str
    token: str
    size: int
    modified_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """Facts about blobs that never change. A *chunk* is here a position in ``digests``.

    Manifests stand in an order in which neighbours are alike, and a *span* says that one chunk is named by all
    manifests from one position up to another. A history of steps that differ little has as many spans as chunks.
    """

    digests: Digests
    """Different ones, ascending."""
    manifests: tuple[str, ...]
    """Names, none twice."""
    manifest_bytes: Numbers
    """For each manifest the size of its blob."""
    sums: Numbers
    """For each manifest the sum of its different digests' first eight bytes, by which the spans can be checked."""
    span_chunk: Numbers
    """Spans are sorted by chunk, then by position; those of one chunk neither overlap nor touch."""
    span_start: Numbers
    span_stop: Numbers
    packs: tuple[str, ...]
    """Names, none twice."""
    pack_bytes: Numbers
    """For each pack its size."""
    entry_pack: Numbers
    """For each entry of a pack's table a position in ``packs``, ascending."""
    entry_chunk: Numbers
    entry_bytes: Numbers
    """For each entry the bytes of the encoded chunk."""
    entry_base: Numbers
    """For each entry that is a delta the chunk it is to be added to; `NO_BASE` for the others."""
    entry_base_pack: Numbers
    """For each entry that is a delta the pack in which its base lies: a position in ``base_packs``; else `NO_BASE`."""
    entry_effort: Numbers
    """For each entry what was spent on it; see `Payload.effort`."""
    base_packs: tuple[str, ...]
    """Names, none twice; of packs that may be gone."""
    refs: Mapping[RefSeen, str] = field(default_factory=dict)
    """Which manifest a ref of a remote store names."""

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of each manifest."""
        return {name: at for at, name in enumerate(self.manifests)}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each pack."""
        return dict(zip(self.packs, self.pack_bytes.tolist(), strict=True))

    @property
    def is_consistent(self) -> bool:
        """Whether the spans say of each manifest what it said when it was read."""
        prefix = prefixes(self.digests)[self.span_chunk]
        change = np.zeros(len(self.manifests) + 1, dtype=np.uint64)
        np.add.at(change, self.span_start, prefix)
        np.subtract.at(change, self.span_stop, prefix)
        return bool((np.cumsum(change, dtype=np.uint64)[:-1] == self.sums).all())

    def chunks_of(self, manifests: Collection[str]) -> Mask:
        """For each chunk whether one of some manifests names it; those that are not known are passed over."""
        chosen = np.zeros(len(self.manifests) + 1, dtype=np.int64)
        chosen[[self.position[name] + 1 for name in manifests if name in self.position]] = 1
        before = np.cumsum(chosen)
        named = np.zeros(len(self.digests), dtype=bool)
        named[self.span_chunk[before[self.span_stop] > before[self.span_start]]] = True
        return named

    def find(self, digests: Digests) -> Numbers:
        """Look up many digests: for each its chunk, or -1."""
        wanted = prefixes(digests)
        at = np.searchsorted(self._prefix, wanted)
        found = np.full(len(digests), -1, dtype=np.int64)
        open_ = np.arange(len(digests))
        # Digests that begin alike and differ are met once in a lifetime, or made on purpose.
        while len(open_):
            open_ = open_[at[open_] < len(self.digests)]
            open_ = open_[self._prefix[at[open_]] == wanted[open_]]
            is_hit = (self.digests[at[open_]] == digests[open_]).all(axis=1)
            found[open_[is_hit]] = at[open_[is_hit]]
            open_ = open_[~is_hit]
            at[open_] += 1
        return found

    @cached_property
    def _prefix(self) -> Any:
        return prefixes(self.digests)

    def only(self, *, manifests: Collection[str], packs: Mapping[str, int]) -> Facts:
        """Leave out all but some manifests and packs (names and sizes), chunks that are then nowhere, and refs."""
        is_kept = np.array([name in manifests for name in self.manifests], dtype=bool)
        before = np.concatenate([[0], np.cumsum(is_kept)])
        start, stop = before[self.span_start], before[self.span_stop]
        has_any = start < stop
        spans = _normal(self.span_chunk[has_any], start[has_any], stop[has_any])
        is_there = np.array([packs.get(name) == size for name, size in self.sizes.items()], dtype=bool)
        rows = is_there[self.entry_pack]
        is_used = np.zeros(len(self.digests), dtype=bool)
        is_used[spans[0]] = True
        is_used[self.entry_chunk[rows]] = True
        base, base_pack = self.entry_base[rows], self.entry_base_pack[rows]
        deltas = base != NO_BASE
        is_used[base[deltas]] = True
        number = np.cumsum(is_used) - 1
        base[deltas] = number[base[deltas]]
        base_packs, base_pack[deltas] = _only_used(self.base_packs, base_pack[deltas])
        return Facts(
            digests=self.digests[is_used],
            manifests=tuple(name for name, keep in zip(self.manifests, is_kept, strict=True) if keep),
            manifest_bytes=self.manifest_bytes[is_kept],
            sums=self.sums[is_kept],
            span_chunk=number[spans[0]].astype(np.uint32),
            span_start=spans[1],
            span_stop=spans[2],
            packs=tuple(name for name, keep in zip(self.packs, is_there, strict=True) if keep),
            pack_bytes=self.pack_bytes[is_there],
            entry_pack=(np.cumsum(is_there) - 1)[self.entry_pack[rows]].astype(np.uint32),
            entry_chunk=number[self.entry_chunk[rows]].astype(np.uint32),
            entry_bytes=self.entry_bytes[rows],
            entry_base=base,
            entry_base_pack=base_pack,
            entry_effort=self.entry_effort[rows],
            base_packs=base_packs,
        )


def facts_of_manifests(named: Sequence[tuple[str, int, Digests]]) -> Facts:
    """Note what some manifests name.

    Args:
        named: Of each manifest its name, the size of its blob, and its digests, of which some may be equal. Neighbours
            should be alike.
    """
    digests, _, chunk = unique_rows(np.concatenate([_NO_DIGESTS, *(each for _, _, each in named)]))
    at = np.repeat(np.arange(len(named), dtype=np.uint64), [len(each) for _, _, each in named])
    pairs = np.unique((chunk.astype(np.uint64) << np.uint64(32)) | at)
    chunk, at = (pairs >> np.uint64(32)).astype(np.uint32), (pairs & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    sums = np.zeros(len(named), dtype=np.uint64)
    np.add.at(sums, at, prefixes(digests)[chunk])
    spans = _normal(chunk, at, at + np.uint32(1))
    return _facts(
        digests=digests,
        manifests=tuple(name for name, _, _ in named),
        manifest_bytes=np.array([n_bytes for _, n_bytes, _ in named], dtype=np.uint64),
        sums=sums,
        spans=spans,
    )


def facts_of_packs(tables: Mapping[str, Entries], sizes: Mapping[str, int]) -> Facts:
    """Note what some packs hold: their tables, and the size of each."""
    lengths = [len(table) for table in tables.values()]
    entries = np.concatenate([np.empty(0, ENTRY), *tables.values()])
    deltas = is_delta(entries)
    digests, _, chunk = unique_rows(np.concatenate([entries["digest"], entries["base_digest"][deltas]]))
    base, base_pack = np.full(len(entries), NO_BASE), np.full(len(entries), NO_BASE)
    base[deltas] = chunk[len(entries) :]
    names, base_pack[deltas] = np.unique(as_names(entries["base_pack"][deltas]), return_inverse=True)
    return _facts(
        digests=digests,
        packs=tuple(tables),
        pack_bytes=np.array([sizes[name] for name in tables], dtype=np.uint64),
        entry_pack=np.repeat(np.arange(len(tables), dtype=np.uint32), lengths),
        entry_chunk=chunk[: len(entries)].astype(np.uint32),
        entry_bytes=np.ascontiguousarray(entries["stored_bytes"]),
        entry_base=base,
        entry_base_pack=base_pack,
        entry_effort=np.ascontiguousarray(entries["effort"]),
        base_packs=tuple(name.tobytes().hex() for name in names),
    )


def merge_facts(parts: Sequence[Facts]) -> Facts:
    """Put facts together, but for refs. Of what several say the first is taken."""
    apart: list[Facts] = []
    manifests: set[str] = set()
    packs: set[str] = set()
    for part in parts:
        if not manifests.isdisjoint(part.manifests) or not packs.isdisjoint(part.packs):
            others = {name: size for name, size in part.sizes.items() if name not in packs}
            part = part.only(manifests=set(part.manifests) - manifests, packs=others)
        apart.append(part)
        manifests.update(part.manifests)
        packs.update(part.packs)
    if len(apart) == 1:
        return apart[0]
    digests, _, chunk = unique_rows(np.concatenate([_NO_DIGESTS, *(part.digests for part in apart)]))
    begin = np.cumsum([0, *(len(part.digests) for part in apart)])
    first = np.cumsum([0, *(len(part.manifests) for part in apart)])
    pack = np.cumsum([0, *(len(part.packs) for part in apart)])
    numbered = list(enumerate(apart))
    base_packs = list(dict.fromkeys(name for part in apart for name in part.base_packs))
    base_number = {name: np.uint32(at) for at, name in enumerate(base_packs)}
    bases = [
        _moved(part.entry_base, part.entry_base_pack, chunk[begin[n] : begin[n + 1]], part.base_packs, base_number)
        for n, part in numbered
    ]
    spans = _normal(
        _join([chunk[part.span_chunk + begin[n]] for n, part in numbered]),
        _join([part.span_start + first[n] for n, part in numbered]),
        _join([part.span_stop + first[n] for n, part in numbered]),
    )
    return _facts(
        digests=digests,
        manifests=tuple(name for part in apart for name in part.manifests),
        manifest_bytes=np.concatenate([_NO_SIZES, *(part.manifest_bytes for part in apart)]),
        sums=np.concatenate([_NO_SIZES, *(part.sums for part in apart)]),
        spans=spans,
        packs=tuple(name for part in apart for name in part.packs),
        pack_bytes=np.concatenate([_NO_SIZES, *(part.pack_bytes for part in apart)]),
        entry_pack=_join([part.entry_pack + pack[n] for n, part in numbered]),
        entry_chunk=_join([chunk[part.entry_chunk + begin[n]] for n, part in numbered]),
        entry_bytes=_join([part.entry_bytes for part in apart]),
        entry_base=_join([base for base, _ in bases]),
        entry_base_pack=_join([base_pack for _, base_pack in bases]),
        entry_effort=np.concatenate([_NO_EFFORTS, *(part.entry_effort for part in apart)]),
        base_packs=tuple(base_packs),
    )


def _moved(
    base: Numbers, base_pack: Numbers, chunk: Numbers, names: Sequence[str], number: Mapping[str, np.uint32]
) -> tuple[Numbers, Numbers]:
    """Number the bases of entries anew.

    Args:
        base: As `Facts.entry_base`.
        base_pack: As `Facts.entry_base_pack`.
        chunk: For each chunk its new number.
        names: As `Facts.base_packs`.
        number: The new position of each of those.
    """
    base, base_pack = base.copy(), base_pack.copy()
    deltas = base != NO_BASE
    base[deltas] = chunk[base[deltas]]
    if deltas.any():
        base_pack[deltas] = np.array([number[name] for name in names], np.uint32)[base_pack[deltas]]
    return base, base_pack


def _only_used(names: tuple[str, ...], number: Numbers) -> tuple[tuple[str, ...], Numbers]:
    """Leave out of a list what no number points to, and number the rest anew."""
    used, again = np.unique(number, return_inverse=True)
    return tuple(names[at] for at in used.tolist()), again.astype(np.uint32)


_NONE = np.empty(0, np.uint32)
_NO_SIZES = np.empty(0, np.uint64)
_NO_EFFORTS = np.empty(0, np.uint8)
_NO_DIGESTS = np.empty((0, DIGEST_BYTES), np.uint8)


def _facts(*, spans: tuple[Numbers, Numbers, Numbers] = (_NONE, _NONE, _NONE), **given: Any) -> Facts:
    """Make facts; what is not given is empty."""
    nothing = {"manifests": (), "manifest_bytes": _NO_SIZES, "sums": _NO_SIZES, "packs": (), "pack_bytes": _NO_SIZES}
    entries = dict.fromkeys(("entry_pack", "entry_chunk", "entry_bytes", "entry_base", "entry_base_pack"), _NONE)
    chunk, start, stop = spans
    return Facts(
        **{
            **nothing,
            **entries,
            "entry_effort": _NO_EFFORTS,
            "base_packs": (),
            "span_chunk": chunk,
            "span_start": start,
            "span_stop": stop,
            **given,
        }
    )


def _join(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate([_NONE, *parts]).astype(np.uint32)


def _normal(chunk: Numbers, start: Numbers, stop: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Sort spans, of which those of one chunk do not overlap, and join those that touch."""
    order = np.argsort((chunk.astype(np.uint64) << np.uint64(32)) | start.astype(np.uint64), kind="stable")
    chunk, start, stop = chunk[order], start[order], stop[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (chunk[1:] != chunk[:-1]) | (start[1:] != stop[:-1])
    ends = np.append(begins[1:], True) if len(order) else begins
    return chunk[begins].astype(np.uint32), start[begins].astype(np.uint32), stop[ends].astype(np.uint32)
