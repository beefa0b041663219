"""Our store, used without MLflow: through the calls for users, and through those below them."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.contenders._contender import Contender
from benchmarks.data import Case
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader import CheckpointReader
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore

Write = Callable[[Case, int], None]
"""Saves a model as a step of one run, into an open store."""

_NOTHING: Mapping[str, Any] = {}
_POLICY = "TENSORCAS_POLICY"
_RUN = "benchmark"


class Ours(Contender):
    """One checkpoint in a store of its own. A save is durable when it returns."""

    loads_specially: bool = False
    """True if it differs from another contender of ours only in its way of loading."""

    def prepare(self, folder: Path) -> None:
        Store.init(folder)

    def save(self, case: Case, folder: Path) -> None:
        self.writer(folder)(case, 0)

    @abstractmethod
    def writer(self, folder: Path, run: str = _RUN) -> Write:
        """Open the store in a folder."""


class RunStore(Ours):
    """A state dict saved by `TensorCasStore.save`; loaded by `TensorCasStore.load`, into a live one with `original`.

    Args:
        name: Name in tables.
        policy: As for TENSORCAS_POLICY; by default the default one.
    """

    def __init__(self, name: str, *, policy: str | None = None) -> None:
        self.name = name
        self.is_baseline = name == "tensorcas"
        self._policy = policy

    def writer(self, folder: Path, run: str = _RUN) -> Write:
        store = TensorCasStore(folder, run)

        def write(case: Case, step: int) -> None:
            with self._chosen_policy():
                store.save(case.tensors, step)

        return write

    def load(self, folder: Path) -> Mapping[str, Any]:
        loaded: Mapping[str, Any] = TensorCasStore(folder, _RUN).load()
        return loaded

    def load_into(self, folder: Path, out: Case) -> None:
        TensorCasStore(folder, _RUN).load(original=out.tensors)

    def read_one(self, folder: Path, name: str) -> Any:
        return self.opened(folder).tensor(name, copy=True)

    def find(self, folder: Path, name: str) -> tuple[int, ...]:
        return self.opened(folder).spec(name).shape

    def opened(self, folder: Path) -> CheckpointReader:
        """Open a saved model to read parts of it."""
        return TensorCasStore(folder, _RUN).open()

    @contextlib.contextmanager
    def _chosen_policy(self) -> Iterator[None]:
        if self._policy is None:
            yield
            return
        before = os.environ.get(_POLICY)
        os.environ[_POLICY] = self._policy
        try:
            yield
        finally:
            if before is None:
                del os.environ[_POLICY]
            else:
                os.environ[_POLICY] = before


class RunReader(RunStore):
    """The same, loaded by `CheckpointReader.load_into`, or as a whole by `full`.

    Args:
        name: Name in tables.
        policy: See `RunStore`.
        verify: The ``verify`` of `TensorCasStore.open`.
        precheck: The ``precheck`` of `CheckpointReader.load_into`.
    """

    loads_specially = True

    def __init__(self, name: str, *, policy: str | None = None, verify: bool = True, precheck: bool = True) -> None:
        super().__init__(name, policy=policy)
        self._verify = verify
        self._precheck = precheck

    def load(self, folder: Path) -> Mapping[str, Any]:
        return self.opened(folder).full()

    def load_into(self, folder: Path, out: Case) -> None:
        self.opened(folder).load_into(out.module, precheck=self._precheck)

    def opened(self, folder: Path) -> CheckpointReader:
        return TensorCasStore(folder, _RUN).open(verify=self._verify)


class StoreCalls(Ours):
    """Arrays saved and read by `Store.write_checkpoint` and `Store.read_tensors`, the basis of the calls for users.

    Args:
        name: Name in tables.
        save: Arguments of `Store.write_checkpoint` besides the tensors.
        load: Arguments of `Store.read_tensors` besides the manifest.
    """

    def __init__(self, name: str, *, save: Mapping[str, Any] = _NOTHING, load: Mapping[str, Any] = _NOTHING) -> None:
        self.name = name
        self.loads_specially = bool(load)
        self._save = dict(save)
        self._load = dict(load)

    def writer(self, folder: Path, run: str = _RUN) -> Write:
        store, _ = Store.find(folder)

        def write(case: Case, step: int) -> None:
            with store.write_checkpoint(case.arrays, **self._save) as pending:
                pending.commit(RefTarget(run_id=run, step=step))

        return write

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
        """Find the store and read the manifest of a saved model."""
        store, _ = Store.find(folder)
        ref = store.ref(RefTarget(run_id=_RUN, step=0).key)
        assert ref is not None
        return store, store.manifest(ref)


OURS: tuple[Ours, ...] = (
    RunStore("tensorcas"),
    RunReader("tensorcas, load_into"),
    RunReader("tensorcas, load_into, no precheck", precheck=False),
    RunStore("tensorcas fast", policy="fast"),
    RunReader("tensorcas fast, load_into", policy="fast"),
    RunReader("tensorcas fast, load_into, no precheck", policy="fast", precheck=False),
    RunReader("tensorcas fast, load_into, verify off", policy="fast", verify=False),
    RunStore("tensorcas small", policy="small"),
    StoreCalls("tensorcas Store"),
    StoreCalls("tensorcas Store, verify off", load={"verify": False}),
    StoreCalls("tensorcas Store fast", save={"policy": "fast"}),
    StoreCalls("tensorcas Store fast, verify off", save={"policy": "fast"}, load={"verify": False}),
    StoreCalls(
        "tensorcas Store fast, mapped, verify off", save={"policy": "fast"}, load={"verify": False, "copy": False}
    ),
)
"""Combinations of a policy and a way to load. Those named ``tensorcas Store`` use calls not meant for users."""


def policies_of_ours() -> list[Ours]:
    """Return those of `OURS` with different ways to save."""
    return [ours for ours in OURS if not ours.loads_specially]


def is_ours(name: str) -> bool:
    """Tell by a name in tables whether a contender is ours."""
    return name.startswith("tensorcas")


def fastest_peer(taken: Mapping[str, Any]) -> str:
    """Return the name of the fastest contender other than ours.

    Args:
        taken: A `Series` by name.
    """
    return min((name for name in taken if not is_ours(name)), key=lambda name: taken[name].median)
