"""Earlier checkpoints and files, of which one that is saved may be a later state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store._base_plan import BasePlan, Wanted, nearest_parent, plan_bases
from tensorcas_mlflow.store._bases import LEAST_ROW_BYTES, RecentManifests, may_be_base
from tensorcas_mlflow.store._keys import STAND_INS
from tensorcas_mlflow.store._sources import Source

if TYPE_CHECKING:
    from tensorcas_mlflow.store._store import Store

RECENT = RecentManifests()
"""Of all stores of this process."""
_N_LATEST = 3
_N_LOOKED_AT = 48
"""A model that is logged is some ten files, of which one holds its tensors."""

Earlier = Callable[[], Manifest | None]


@dataclass(slots=True, kw_only=True)
class Parents:
    """Where to look for the state that one checkpoint or file has come from, if there is something to store."""

    store: Store
    series: str | None = None
    """Names the series it belongs to, the same for each of its steps; None if it is in none."""
    earlier: Earlier | None = None
    """Reads the last checkpoint of that series, where this process has not written it."""
    nearest: Manifest | None = field(default=None, init=False)
    """What was found for the last save, or the last batch of a stream."""

    def plan(self, source: Source, new: Any) -> BasePlan | None:
        """Find what new chunks may be stored against.

        Args:
            source: The rows of the save, and their bytes.
            new: Numbers of its chunks that are not stored, ascending.

        Returns:
            None if nothing is found. In an object store nothing is: each base would have to be fetched.
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
        """Remember what was committed."""
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
        """Read the latest checkpoints and files that hold different tensors: by their digests, the latest first."""
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
