"""Our store, as a program without MLflow uses it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders._contender import Contender
from benchmarks.data import Case
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import RefTarget, Store

_NOTHING: Mapping[str, Any] = {}
_RUN = "benchmark"


class Ours(Contender):
    """One checkpoint in a store of its own. A save is durable when it returns.

    Args:
        name: In tables.
        save: What `Store.write_checkpoint` is given besides the tensors.
        load: What `Store.read_tensors` is given besides the manifest.
    """

    def __init__(self, name: str, *, save: Mapping[str, Any] = _NOTHING, load: Mapping[str, Any] = _NOTHING) -> None:
        self.name = name
        self.is_baseline = not save and not load
        self._save = dict(save)
        self._load = dict(load)

    @property
    def loads_specially(self) -> bool:
        """Whether it differs from another one of ours in how it loads."""
        return bool(self._load)

    def prepare(self, folder: Path) -> None:
        Store.init(folder)

    def save(self, case: Case, folder: Path) -> None:
        store, _ = Store.find(folder)
        self.write(store, case, 0)

    def write(self, store: Store, case: Case, step: int, *, run: str = _RUN) -> None:
        """Save a model as a step of a run into a store that is open."""
        with store.write_checkpoint(case.arrays, **self._save) as pending:
            pending.commit(RefTarget(run_id=run, step=step))

    def load(self, folder: Path) -> Mapping[str, Any]:
        store, manifest = self.opened(folder)
        return store.read_tensors(manifest, **self._load)

    def load_into(self, folder: Path, out: Case) -> None:
        store, manifest = self.opened(folder)
        store.read_tensors(manifest, **{**self._load, "copy": None, "out": out.arrays})

    def read_one(self, folder: Path, name: str) -> Any:
        store, manifest = self.opened(folder)
        return store.read_tensors(manifest, [name], **{**self._load, "copy": None})[name]

    def find(self, folder: Path, name: str) -> tuple[int, ...]:
        _, manifest = self.opened(folder)
        return tuple(manifest.row(name).spec.shape)

    def opened(self, folder: Path) -> tuple[Store, Manifest]:
        """Find the store and read the manifest of what was saved."""
        store, _ = Store.find(folder)
        ref = store.ref(RefTarget(run_id=_RUN, step=0).key)
        assert ref is not None
        return store, store.manifest(ref)


OURS = (
    Ours("tensorcas"),
    Ours("tensorcas, verify off", load={"verify": False}),
    Ours("tensorcas fast", save={"policy": "fast"}),
    Ours("tensorcas fast, verify off", save={"policy": "fast"}, load={"verify": False}),
    Ours("tensorcas fast, mapped, verify off", save={"policy": "fast"}, load={"verify": False, "copy": False}),
    Ours("tensorcas small", save={"policy": "small"}),
)
"""A policy and a way to load each."""


def policies_of_ours() -> list[Ours]:
    """Those of `OURS` that differ in how they save."""
    return [ours for ours in OURS if not ours.loads_specially]
