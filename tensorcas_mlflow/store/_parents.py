"""Earlier checkpoints, of which one that is saved may be a later state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorcas_mlflow.errors import BackendError, FormatError, NotFoundError
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store._base_plan import BasePlan, plan_bases
from tensorcas_mlflow.store._bases import RecentManifests
from tensorcas_mlflow.store._keys import STAND_INS
from tensorcas_mlflow.store._sources import Source

if TYPE_CHECKING:
    from tensorcas_mlflow.store._store import Store

RECENT = RecentManifests()
"""Of all stores of this process."""
_N_LATEST = 3
_N_LOOKED_AT = 12

Earlier = Callable[[], Manifest | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parents:
    """Where to look for the state that a checkpoint has come from; looked at only if there is something to store."""

    store: Store
    series: str | None = None
    """Names the series it belongs to, the same for each of its steps; None if it is in none."""
    earlier: Earlier | None = None
    """Reads the last checkpoint of that series, where this process has not written it."""

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
        return plan_bases(store.catalog, store.chunks, source, store.chunk_bytes, new, self._candidates())

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
        return RECENT.of(self.store.id) or self._latest()

    def _latest(self) -> list[Manifest]:
        """Read the latest checkpoints and files of the store that hold different things."""
        found: dict[str, Manifest] = {}
        with suppress(NotFoundError, FormatError, BackendError):
            refs = [info for info in self.store.backend.list("refs") if not info.key.startswith(f"{STAND_INS}/")]
            refs.sort(key=lambda info: -info.modified_s)
            for info in refs[:_N_LOOKED_AT]:
                ref = self.store.ref(info.key)
                if ref is not None and ref.manifest not in found and len(found) < _N_LATEST:
                    found[ref.manifest] = self.store.manifest(ref)
        return list(found.values())
