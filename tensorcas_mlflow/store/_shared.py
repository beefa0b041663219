"""Search for the refs of a store that share most bytes with a checkpoint."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from tensorcas_mlflow.base.digest import as_keys, unique_rows
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store._sketches import SketchedStore, listed_refs, read_manifest

_MOST_REFS = 16
"""Number of refs to compare: the latest ones."""
_MOST_DIGESTS = 2_000_000
"""Number of chunks to compare."""


def find_shared(store: SketchedStore, manifest: Manifest) -> list[tuple[Ref, int]]:
    """Compare a checkpoint with the latest refs of its store by their chunks.

    A delta or derived tensor is not shared: only equal chunks count.

    Args:
        store: The store.
        manifest: The manifest of the checkpoint.

    Returns:
        The refs that have some of its chunks, and the size of these chunks, counted wherever the checkpoint has them;
        the most bytes first. Nothing for a store behind a network, where each ref would be a request.
    """
    if store.backend.is_remote or store.backend.is_carrier or not len(manifest.stored_digests):
        return []
    unique, _, inverse = unique_rows(manifest.stored_digests)
    keys = as_keys(unique)
    sizes = np.bincount(inverse.ravel(), weights=manifest.stored_sizes, minlength=len(unique))
    n_left = _MOST_DIGESTS
    shared: dict[str, int] = {}
    found: list[tuple[Ref, int]] = []
    for info in listed_refs(store.backend)[:_MOST_REFS]:
        with suppress(NotFoundError, FormatError, BackendError):
            ref = store.ref(info.key)
            if ref is None:
                continue
            if ref.manifest not in shared:
                digests = read_manifest(store, ref.manifest).stored_digests
                n_left -= len(digests)
                if n_left < 0:
                    break
                shared[ref.manifest] = int(sizes[np.isin(keys, as_keys(digests))].sum())
            if shared[ref.manifest]:
                found.append((ref, shared[ref.manifest]))
    return sorted(found, key=lambda pair: -pair[1])
