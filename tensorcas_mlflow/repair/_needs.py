"""What the refs of a store need, and what of it is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.digest import Digests, unique_rows
from tensorcas_mlflow.errors import BackendError, CorruptError, FormatError, NewerFormatError, StarvedError
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.repair._chunks import NO_DIGESTS, as_keys
from tensorcas_mlflow.store import Ref, Store

_N_NAMES = 3
_FOLD_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A checkpoint or file that does not load, or not whole. Printing it says so in words."""

    key: str
    """Of its ref."""
    checkpoint: str | None
    """It, in words; None where its ref cannot be read, so that only the key says what it was."""
    tensors: tuple[str, ...]
    """Those that are lost; empty where its ref or its manifest is, and with it all of them."""
    n_bytes: int | None
    """Size of the lost tensors; None where nothing says it."""
    reason: str

    def __str__(self) -> str:
        what = self.checkpoint or self.key
        if not self.tensors:
            return f"{what}: all of it: {self.reason}"
        names = ", ".join(repr(name) for name in self.tensors[:_N_NAMES])
        more = f" and {len(self.tensors) - _N_NAMES} more" if len(self.tensors) > _N_NAMES else ""
        kind = "tensor" if len(self.tensors) == 1 else "tensors"
        return f"{what}: {kind} {names}{more} ({self.n_bytes:,} bytes): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A ref or a manifest that cannot be used."""

    reason: str
    is_failure: bool = False
    """Whether the storage did not give it, which says nothing of what it is."""


class Needs:
    """The refs of a store and what they need. Manifests are read one at a time, as they may be large."""

    def __init__(self, store: Store) -> None:
        """Read every ref and the manifests they name.

        Raises:
            NewerFormatError: A later release wrote one of them.
            BackendError: The storage failed to list what it holds.
        """
        self._store = store
        self.holders: dict[str, list[Ref]] = {}
        """Refs by the name of their manifest."""
        self.bad_refs: dict[str, Fault] = {}
        """By key."""
        self.bad_manifests: dict[str, Fault] = {}
        """By name: those that some ref needs and that are damaged or gone."""
        for info in list(list_blobs(store.backend, "refs")):
            try:
                ref = store.ref(info.key)
            except NewerFormatError:
                raise
            except (FormatError, BackendError) as error:
                self.bad_refs[info.key] = fault_in(error)
                continue
            if ref is not None:
                self.holders.setdefault(ref.manifest, []).append(ref)
        digests = NO_DIGESTS
        parts: list[Digests] = []
        for name, found in self._read_all():
            if isinstance(found, Manifest):
                parts.append(found.digests)
                if sum(map(len, parts)) > _FOLD_ROWS:
                    digests, parts = unique_rows(np.concatenate([digests, *parts]))[0], []
            elif found is not None:
                self.bad_manifests[name] = found
        self.digests: Digests = unique_rows(np.concatenate([digests, *parts]))[0]
        """All chunks that are needed, as far as manifests can be read; each once, ascending."""

    def manifests(self) -> Iterator[tuple[str, Manifest]]:
        """Read the manifests that can be read, by name."""
        for name, found in self._read_all():
            if isinstance(found, Manifest):
                yield name, found

    def losses(self, good: Any) -> list[Loss]:
        """Say what is lost if only some chunks are there, given by their digests, each as one value."""
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
                lost = ~np.isin(as_keys(manifest.digests), good)
                if lost.any():
                    found += _losses_of(manifest, self.holders[name], lost)
        return sorted(found, key=lambda loss: (loss.checkpoint or "", loss.key))

    def _read_all(self) -> Iterator[tuple[str, Manifest | Fault | None]]:
        def read(item: tuple[str, list[Ref]]) -> Manifest | Fault | None:
            return _read(self._store, *item)

        found = threads.ordered_map(read, self.holders.items(), waits=self._store.backend.is_remote)
        yield from zip(self.holders, found, strict=True)


def fault_in(error: FormatError | BackendError) -> Fault:
    """Say what is wrong with a blob that cannot be read.

    Raises:
        StarvedError: The error is one, which says nothing of any blob.
    """
    if isinstance(error, StarvedError):
        raise error
    reason = error.reason if isinstance(error, CorruptError | BackendError) else str(error)
    return Fault(reason=reason, is_failure=isinstance(error, BackendError))


def _read(store: Store, name: str, refs: Sequence[Ref]) -> Manifest | Fault | None:
    """Read a manifest; None if the refs that name it were dropped meanwhile."""
    try:
        manifest = store.manifest(refs[0])
        manifest.check_names()
    except NewerFormatError:
        raise
    except (FormatError, BackendError) as error:
        return fault_in(error) if any(_stands(store, ref) for ref in refs) else None
    if manifest.store_id != store.id:
        return Fault(reason=f"it is of store {manifest.store_id}, and this is {store.id}", is_failure=True)
    return manifest


def _stands(store: Store, ref: Ref) -> bool:
    try:
        now = store.ref(ref.key)
    except (FormatError, BackendError):
        return True
    return now is not None and now.manifest == ref.manifest


def _losses_of(manifest: Manifest, refs: Sequence[Ref], lost: Any) -> list[Loss]:
    columns = manifest.columns
    rows = np.unique(columns.rows_of(np.flatnonzero(lost)))
    names = tuple(columns.name(row) for row in rows.tolist())
    n_bytes = int(columns.n_bytes[rows].sum())
    reason = f"{int(lost.sum())} of its {len(lost)} chunks are damaged or missing"
    return [_loss(ref, names, n_bytes, reason) for ref in refs]


def _loss(ref: Ref, tensors: tuple[str, ...], n_bytes: int | None, reason: str) -> Loss:
    return Loss(key=ref.key, checkpoint=ref.label, tensors=tensors, n_bytes=n_bytes, reason=reason)
