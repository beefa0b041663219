"""Check of derived rows: each is evaluated, and inputs that several of them have in common are read once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.tensors import bytes_of, empty_array, pieces_of
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Derivation, Manifest, Row
from tensorcas_mlflow.store import Store

MOST_HELD_BYTES = 256 << 20
"""Bound of the inputs held in memory at once, unless one row has more."""
_MOST_MANIFEST_BYTES = 64 << 20
"""Size of the manifests whose rows are evaluated together."""


class Underivable(NamedTuple):
    """A derived row whose function does not give its bytes."""

    refs: Sequence[Ref]
    manifest: Manifest
    derivation: Derivation
    error: FormatError | NotFoundError | BackendError


class _Wanted(NamedTuple):
    """A derived row to evaluate."""

    refs: Sequence[Ref]
    manifest: Manifest
    derivation: Derivation
    inputs: tuple[str, ...]
    """The identities of its inputs."""


class DerivedChecks:
    """Check of the derived rows of many manifests, those with the same inputs together.

    An input is read once, unless the rows that need it, with all their inputs, exceed the bounds of memory.
    """

    def __init__(self, store: Store) -> None:
        """Begin without manifests.

        Args:
            store: Their store.
        """
        self._store = store
        self._waiting: list[_Wanted] = []
        self._manifest_bytes = 0

    def add(self, refs: Sequence[Ref], manifest: Manifest) -> Iterator[Underivable]:
        """Add a manifest; yield the faults of the rows so far if there are many.

        Args:
            refs: All refs of the manifest.
            manifest: The manifest, without damage to its chunks.
        """
        for each in manifest.derived:
            inputs = tuple(manifest.table.row(number).identity for number in each.inputs)
            self._waiting.append(_Wanted(refs, manifest, each, inputs))
        self._manifest_bytes += len(manifest.stream) if manifest.derived else 0
        if self._manifest_bytes >= _MOST_MANIFEST_BYTES:
            yield from self.finish()

    def finish(self) -> Iterator[Underivable]:
        """Evaluate the rows that are left, and yield the faults."""
        waiting, self._waiting, self._manifest_bytes = self._waiting, [], 0
        for wanted, rows in _batches(waiting):
            known = self._read(rows)
            for each in wanted:
                inputs = zip(each.derivation.inputs, each.inputs, strict=True)
                there = {number: known[identity] for number, identity in inputs if identity in known}
                try:
                    self._store.chunks.check_derived(each.manifest, each.derivation, there)
                except (FormatError, NotFoundError, BackendError) as error:
                    yield Underivable(each.refs, each.manifest, each.derivation, error)

    def _read(self, rows: Mapping[str, tuple[Row, int]]) -> dict[str, Any]:
        """Read rows, each different chunk once; return none of them if one cannot be read.

        Args:
            rows: The rows and the chunk sizes of their manifests, by identity.
        """
        arrays: dict[str, Any] = {}
        outs: dict[bytes, memoryview] = {}
        again: list[tuple[memoryview, memoryview]] = []
        for identity, (row, chunk_bytes) in rows.items():
            arrays[identity] = array = empty_array(row.spec)
            if not row.spec.n_bytes:
                continue
            for digest, piece in zip(row.digests, pieces_of(bytes_of(array), row.ends(chunk_bytes)), strict=True):
                first = outs.setdefault(digest.tobytes(), piece)
                if first is not piece:
                    again.append((piece, first))
        digests: Digests = np.frombuffer(b"".join(outs), np.uint8).reshape(-1, 32)
        # Each evaluation then reads its inputs alone, and names the damaged one.
        with suppress(FormatError, NotFoundError, BackendError):
            self._store.chunks.read(digests, list(outs.values()), verify=True)
            for piece, first in again:
                piece[:] = first
            return arrays
        return {}


def _batches(waiting: Iterable[_Wanted]) -> Iterator[tuple[list[_Wanted], dict[str, tuple[Row, int]]]]:
    """Yield some derived rows at a time, with all their inputs; rows with inputs in common follow each other."""
    batch: list[_Wanted] = []
    rows: dict[str, tuple[Row, int]] = {}
    held_bytes = 0
    for each in _sorted(list(waiting)):
        new = {
            identity: (each.manifest.table.row(number), each.manifest.chunk_bytes)
            for number, identity in zip(each.derivation.inputs, each.inputs, strict=True)
            if identity not in rows
        }
        n_bytes = sum(row.spec.n_bytes for row, _ in new.values())
        if batch and n_bytes and held_bytes + n_bytes > MOST_HELD_BYTES:
            yield batch, rows
            batch, rows, held_bytes = [], {}, 0
            new = {
                identity: (each.manifest.table.row(number), each.manifest.chunk_bytes)
                for number, identity in zip(each.derivation.inputs, each.inputs, strict=True)
            }
            n_bytes = sum(row.spec.n_bytes for row, _ in new.values())
        batch.append(each)
        rows |= new
        held_bytes += n_bytes
    if batch:
        yield batch, rows


def _sorted(waiting: Sequence[_Wanted]) -> list[_Wanted]:
    """Sort derived rows so that those with inputs in common, directly or by others, follow each other."""
    leader: dict[str, str] = {}

    def find(identity: str) -> str:
        while (above := leader.setdefault(identity, identity)) != identity:
            leader[identity] = identity = leader.setdefault(above, above)
        return identity

    for each in waiting:
        for identity in each.inputs[1:]:
            leader[find(identity)] = find(each.inputs[0])
    return sorted(waiting, key=lambda each: (find(each.inputs[0]) if each.inputs else "", each.inputs))
