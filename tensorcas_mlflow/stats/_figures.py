"""What a store keeps, in figures: chunks and bytes as they were logged, and every byte on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests, unique_rows
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import Ref, Store

_FOLD_ROWS = 1 << 20


class Figures(Mapping[str, Any]):
    """A record that is also read as a mapping from its fields' names."""

    def _names(self) -> list[str]:
        return [field.name for field in fields(self)]  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())


@dataclass(frozen=True, kw_only=True, eq=False)
class DiskUsage(Figures):
    """Bytes of all blobs of a store, by kind. Temporary files of writers that died are not among them."""

    total: int
    packs: int
    index: int
    manifests: int
    refs: int
    intents: int
    condemned: int
    census: int
    quarantine: int
    format: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StoreStats(Figures):
    """What all runs of a store keep. Its fields can also be read as items of a mapping."""

    runs: int
    checkpoints: int
    """Checkpoints and models."""
    files: int
    total_chunks: int
    """Chunks of all checkpoints and files, one counted wherever it is needed."""
    unique_chunks: int
    """Chunks of different bytes."""
    dedup_ratio: float
    """Unique by total chunks, to four decimals; 1.0 where there are none."""
    total_bytes: int
    """Bytes of all tensors and files as they were logged."""
    disk_bytes: int
    """Bytes of the whole store on disk."""
    disk: DiskUsage
    """The same by kind."""
    damaged_refs: tuple[str, ...] = ()
    """Keys of refs that cannot be read, which nothing here counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunStats(Figures):
    """What one run keeps. Its fields can also be read as items of a mapping; see `StoreStats`."""

    run_id: str
    checkpoints: int
    steps: tuple[int, ...]
    """Steps of its checkpoints and models, ascending, each once."""
    files: int
    total_chunks: int
    unique_chunks: int
    dedup_ratio: float
    total_bytes: int
    disk_bytes: int
    """Bytes of the whole store on disk: chunks are shared, so no run has a part of its own."""
    disk: DiskUsage


def run_stats(store: Store, run_id: str) -> RunStats:
    """Count what a run keeps; a run that keeps nothing has zeros.

    Raises:
        CorruptError: A ref or manifest cannot be read.
    """
    refs = [ref for ref in store.checkpoints() if ref.run_id == run_id]
    steps = sorted({ref.step for ref in refs if ref.kind == "checkpoint" and ref.step is not None})
    return RunStats(run_id=run_id, steps=tuple(steps), **_figures_of(store, refs))


def store_stats(store: Store) -> StoreStats:
    """Count what a store keeps; raises as `run_stats` does."""
    refs, damaged = store.readable_checkpoints()
    runs = {ref.run_id for ref in refs if ref.run_id is not None}
    return StoreStats(runs=len(runs), damaged_refs=tuple(sorted(damaged)), **_figures_of(store, refs))


def disk_usage(backend: Backend) -> DiskUsage:
    """Add up the sizes of all blobs of a store."""
    prefixes = ("packs", "index", "manifests", "refs", "intents", "condemned", "census", "quarantine")
    sizes = {prefix: sum(info.size for info in list_blobs(backend, prefix)) for prefix in prefixes}
    settings = backend.stat("format")
    sizes["format"] = 0 if settings is None else settings.size
    return DiskUsage(total=sum(sizes.values()), **sizes)


def _figures_of(store: Store, refs: Iterable[Ref]) -> dict[str, Any]:
    by_manifest: dict[str, list[Ref]] = {}
    for ref in refs:
        by_manifest.setdefault(ref.manifest, []).append(ref)
    n_checkpoints = n_files = n_chunks = n_bytes = 0
    distinct = _Distinct()
    for holders in by_manifest.values():
        manifest = manifest_of(store, holders)
        if manifest is None:
            continue
        n_files += sum(ref.kind == "file" for ref in holders)
        n_checkpoints += sum(ref.kind == "checkpoint" for ref in holders)
        n_chunks += len(manifest.digests) * len(holders)
        n_bytes += manifest.n_bytes * len(holders)
        distinct.add(manifest.digests)
    n_unique = distinct.count()
    disk = disk_usage(store.backend)
    return {
        "checkpoints": n_checkpoints,
        "files": n_files,
        "total_chunks": n_chunks,
        "unique_chunks": n_unique,
        "dedup_ratio": round(n_unique / n_chunks, 4) if n_chunks else 1.0,
        "total_bytes": n_bytes,
        "disk_bytes": disk.total,
        "disk": disk,
    }


def manifest_of(store: Store, refs: list[Ref]) -> Manifest | None:
    """Read the manifest of some refs; None if none of them stands any more."""
    try:
        return store.manifest(refs[0])
    except CorruptError:
        for ref in refs:
            now = store.ref(ref.key)
            if now is not None and now.manifest == ref.manifest:
                raise
        return None


class _Distinct:
    """Counts different digests, holding each once and a bounded number of repeated ones."""

    def __init__(self) -> None:
        self._parts: list[Digests] = [np.empty((0, DIGEST_BYTES), np.uint8)]
        self._n_new = 0

    def add(self, digests: Digests) -> None:
        self._parts.append(digests)
        self._n_new += len(digests)
        if self._n_new > _FOLD_ROWS:
            self.count()

    def count(self) -> int:
        unique, _, _ = unique_rows(np.concatenate(self._parts))
        self._parts, self._n_new = [unique], 0
        return len(unique)
