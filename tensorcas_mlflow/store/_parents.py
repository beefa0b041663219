"""Earlier checkpoints and files: candidates for the earlier state of a save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.layout import STAND_INS, Manifest, list_blobs
from tensorcas_mlflow.store._bases import (
    LEAST_ROW_BYTES,
    BasePlan,
    RecentManifests,
    Wanted,
    may_be_base,
    nearest_parent,
    plan_bases,
)
from tensorcas_mlflow.store._sources import Source

if TYPE_CHECKING:
    from tensorcas_mlflow.store._store import Store

RECENT = RecentManifests()
"""Recent manifests of all stores of this process."""
_N_LATEST = 3
_N_LOOKED_AT = 48
"""Number of refs to check; a logged model is some ten files, and one of them holds its tensors."""

Earlier = Callable[[], Manifest | None]


@dataclass(slots=True, kw_only=True)
class Parents:
    """Search for the earlier state of one checkpoint or file, if there is something to store."""

    store: Store
    series: str | None = None
    """Name of its series, the same for each of its steps; None if it is in none."""
    earlier: Earlier | None = None
    """Reads the last checkpoint of that series, if this process has not written it."""
    nearest: Manifest | None = field(default=None, init=False)
    """Result of the search for the last save, or the last batch of a stream."""

    def plan(self, source: Source, new: Any) -> BasePlan | None:
        """Find possible bases of new chunks.

        Args:
            source: The rows of the save, and their bytes.
            new: Numbers of its new chunks, ascending.

        Returns:
            None if there are none. In an object store there are none: each base would have to be fetched.
        """
        store = self.store
        if store.backend.is_remote or store.backend.is_carrier:
            return None
        wanted = Wanted.of(source, new[source.holds(new)])
        if not wanted.rows:
            return None
        plan = None
        if self.nearest is not None:
            plan = plan_bases(store.catalog, store.chunks, wanted, store.chunk_bytes, self.nearest)
        if plan is None:
            candidates = self._candidates()
            self.nearest = nearest_parent(store.catalog, store.chunks, wanted, store.chunk_bytes, candidates)
            if self.nearest is not None:
                plan = plan_bases(store.catalog, store.chunks, wanted, store.chunk_bytes, self.nearest)
        return plan

    def note(self, manifest: Manifest) -> None:
        """Remember a committed manifest."""
        RECENT.note(self.store.id, self.series or manifest.digest, manifest)

    def _candidates(self) -> list[Manifest]:
        if self.series is not None:
            last = RECENT.named(self.store.id, self.series)
            with suppress(NotFoundError, FormatError, BackendError):
                last = last or (self.earlier() if self.earlier else None)
            if last is not None:
                return [last]
        if RECENT.begin(self.store.id):
            for digest, manifest in reversed(self._latest().items()):
                RECENT.note(self.store.id, digest, manifest)
        return RECENT.of(self.store.id)

    def _latest(self) -> dict[str, Manifest]:
        """Read the latest checkpoints and files with different tensors: by their digests, the latest first."""
        found: dict[str, Manifest] = {}
        with suppress(NotFoundError, FormatError, BackendError):
            refs = [info for info in list_blobs(self.store.backend, "refs") if not info.key.startswith(f"{STAND_INS}/")]
            refs.sort(key=lambda info: -info.modified_s)
            for info in refs[:_N_LOOKED_AT]:
                ref = None if len(found) == _N_LATEST else self.store.ref(info.key)
                if ref is None or (ref.kind == "file" and ref.n_bytes < LEAST_ROW_BYTES):
                    continue
                digest = ref.manifest.partition(".")[0]
                if digest not in found and may_be_base(manifest := self.store.manifest(ref)):
                    found[digest] = manifest
        return found
