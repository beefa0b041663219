"""Manifests recently written or read by this process."""

from __future__ import annotations

from collections import OrderedDict

from tensorcas_mlflow.base.threads import Lock
from tensorcas_mlflow.layout.manifests import Manifest

_N_RECENT = 16
"""Bound of remembered manifests; a model may be split among several files."""
_MOST_RECENT_ROWS = 200_000
LEAST_ROW_BYTES = 16 << 10
"""A delta of a smaller tensor saves less than reading its base costs, unless deltas of the large tensors are sparse."""


def may_be_base(manifest: Manifest) -> bool:
    """Tell whether a manifest has tensors useful as bases."""
    columns = manifest.table
    return bool((columns.is_tensor & (columns.n_bytes >= LEAST_ROW_BYTES)).any())


class RecentManifests:
    """Manifests recently written or read by this process: a fine-tune loads its parent. For any thread.

    Files without tensors are not remembered: a logged model has many of them, and one with tensors.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_name: OrderedDict[tuple[str, str], Manifest] = OrderedDict()
        self._n_rows = 0
        self._searched: set[str] = set()

    def note_searched(self, store_id: str) -> None:
        """Note that nobody need look for manifests of other processes in a store any more."""
        with self._lock:
            self._searched.add(store_id)

    def is_searched(self, store_id: str) -> bool:
        """Tell whether somebody has looked for manifests of other processes in a store."""
        with self._lock:
            return store_id in self._searched

    def note(self, store_id: str, name: str, manifest: Manifest) -> None:
        """Remember a manifest; the oldest of too many are forgotten.

        Args:
            store_id: Id of its store.
            name: Its name there.
            manifest: The written or read manifest.
        """
        n_rows = len(manifest.rows)
        if n_rows > _MOST_RECENT_ROWS or (manifest.kind == "file" and not may_be_base(manifest)):
            return
        with self._lock:
            known = self._by_name.pop((store_id, name), None)
            self._by_name[store_id, name] = manifest
            self._n_rows += n_rows - (0 if known is None else len(known.rows))
            while len(self._by_name) > _N_RECENT or self._n_rows > _MOST_RECENT_ROWS:
                self._n_rows -= len(self._by_name.popitem(last=False)[1].rows)

    def named(self, store_id: str, name: str) -> Manifest | None:
        """Return a store's manifest by its name."""
        with self._lock:
            return self._by_name.get((store_id, name))

    def of(self, store_id: str) -> list[Manifest]:
        """Return a store's manifests, the latest first."""
        with self._lock:
            return [each for (store, _), each in reversed(self._by_name.items()) if store == store_id]


RECENT = RecentManifests()
"""Recent manifests of all stores of this process."""
