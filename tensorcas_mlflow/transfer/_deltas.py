"""Which deltas of a source may stay deltas in a destination, and which chunks have to go along for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.pack import Base, Payload, is_delta
from tensorcas_mlflow.store import PendingBatch, Store
from tensorcas_mlflow.store.protocol import Bases

_USUAL_DEPTH = 3
"""A copy makes no delta deeper than this, or than it was in the source: each base takes time to decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPlan:
    """What is stored as a delta in the source, and may be in the destination."""

    bases: frozenset[bytes]
    """Chunks that may be bases: the destination holds them, or is brought them."""
    there: Digests
    """Those of them that the destination holds, as far as its index is known."""
    extra: Digests
    """Those of them that no manifest of the batch needs, and that have to be brought all the same."""
    n_bytes: int
    """Most that new packs may take."""


def plan_deltas(source: Store, destination: Store, wanted: Digests, needed: Callable[[], Digests]) -> DeltaPlan | None:
    """Find out what the deltas of a batch need.

    A base that nothing else needs goes along if several deltas take it. For a single one it would take as much room as
    the chunk does in full.

    Args:
        source: Whose chunks are copied.
        destination: Where to.
        wanted: Different chunks, which the batch needs.
        needed: Gives the chunks that this whole copy needs; asked only if a base is not among those above.

    Returns:
        None where nothing is stored as a delta.
    """
    missing = wanted[~destination.catalog.find_sound(wanted, ()).found]
    entries = _entries(source, missing)
    n_bytes = int(entries["raw_bytes"].sum(dtype=np.int64))
    dependents: Counter[bytes] = Counter()
    bases: set[bytes] = set()
    there: list[Digests] = []
    extra: list[Digests] = []
    frontier = _bases_of(entries, dependents)
    if len(frontier) == 0:
        return None
    while len(frontier):
        comes = is_among(frontier, missing)
        is_there = ~comes & destination.catalog.find_sound(frontier, ()).found
        there.append(frontier[is_there])
        bases.update(map(bytes, frontier[comes | is_there]))
        rest = frontier[~comes & ~is_there]
        often = np.array([dependents[bytes(each)] > 1 for each in rest], dtype=bool)
        if not often.all():
            often |= is_among(rest, needed())
        found = _entries(source, rest[often])
        n_bytes += int(found["raw_bytes"].sum(dtype=np.int64))
        extra.append(np.ascontiguousarray(found["digest"]))
        bases.update(map(bytes, extra[-1]))
        frontier = _bases_of(found, dependents)
        frontier = frontier[np.array([bytes(each) not in bases for each in frontier], dtype=bool)]
    return DeltaPlan(bases=frozenset(bases), there=_joined(there), extra=_joined(extra), n_bytes=n_bytes)


class Rebaser:
    """Finds for a delta of the source the base that it has in the destination."""

    def __init__(self, pending: PendingBatch, destination: Store) -> None:
        self._pending = pending
        self._is_remote = destination.backend.is_remote
        self._reader = Bases(destination.backend)
        self._sound: dict[Base, bool] = {}

    def base_of(self, delta: Payload) -> Base | None:
        """Name the base, or return None if the chunk is to be stored in full."""
        assert delta.base is not None
        base = self._pending.base_of(delta.base.digest)
        if base is None or base.depth > max(delta.base.depth, _USUAL_DEPTH - 1):
            return None
        return base if self._is_sound(base, delta.raw_bytes) else None

    def _is_sound(self, base: Base, n_bytes: int) -> bool:
        """Tell whether the copy that a delta would name can be read, and is what it says it is.

        A store far away checks what it keeps, and to fetch each base would take as long as to send the chunk.
        """
        if self._is_remote or self._pending.has_written(base):
            return True
        if base not in self._sound:
            try:
                self._reader.copy(base, n_bytes)
                self._sound[base] = True
            except (NotFoundError, FormatError, BackendError):
                self._sound[base] = False
        return self._sound[base]


def is_among(digests: Digests, others: Digests) -> Any:
    """For each of some digests whether it is one of others."""
    return np.isin(_as_keys(digests), _as_keys(others))


def _entries(store: Store, digests: Digests) -> Any:
    places = store.catalog.find(digests)
    return places.entries[places.found]


def _bases_of(entries: Any, dependents: Counter[bytes]) -> Digests:
    """Give the different bases of those entries that are deltas, and count for how many each is one."""
    deltas = np.ascontiguousarray(entries["base_digest"][is_delta(entries)])
    unique, _, number = unique_rows(deltas)
    for base, n in zip(unique, np.bincount(number, minlength=len(unique)).tolist(), strict=True):
        dependents[bytes(base)] += n
    return unique


def _joined(parts: list[Digests]) -> Digests:
    return unique_rows(np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *parts]))[0]


def _as_keys(digests: Digests) -> Any:
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").ravel()
