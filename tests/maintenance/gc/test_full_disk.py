"""Collections on a disk without a free byte."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.backends._database import Database
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _census, plan_gc
from tensorcas_mlflow.store import Store


def target(step: int) -> RefTarget:
    return RefTarget(run_id="run", step=step)


@pytest.fixture(params=["files", "database"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Make a store with a census and the garbage of two steps."""
    monkeypatch.setattr(_census, "LEAST_NEW", 1)
    store = Store.init(tmp_path, database=request.param == "database")
    for step in range(3):
        with store.write_checkpoint({"w": np.random.default_rng(step).random(100)}) as pending:
            pending.commit(target(step))
    plan_gc(store, grace_s=0).execute()
    for step in range(2):
        ref = store.ref(target(step).key)
        assert ref is not None
        store.drop(ref)
    return store


def censuses(store: Store) -> list[str]:
    return [info.key for info in store.backend.list("census")]


def fill_disk(store: Store, monkeypatch: pytest.MonkeyPatch, *, room_of_censuses: bool) -> None:
    """Refuse every write, perhaps until the censuses are deleted."""
    write = os.write
    assert isinstance(store.backend, LocalBackend)
    folder = store.backend.root / "census"

    def refuse(descriptor: int, data: bytes) -> int:
        if not room_of_censuses or any(folder.iterdir()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    # A transaction needs room, also one that deletes.
    def refuse_rows(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(Database, "write", refuse_rows)


@pytest.mark.parametrize("store", ["files"], indirect=True)
def test_collection_on_a_full_disk_frees_garbage_in_the_room_of_the_censuses(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_packs = sum(1 for _ in store.backend.list("packs"))
    assert censuses(store)
    plan = plan_gc(store, grace_s=0)
    fill_disk(store, monkeypatch, room_of_censuses=True)
    plan.execute()

    assert sum(1 for _ in store.backend.list("packs")) < n_packs
    ref = store.ref(target(2).key)
    assert ref is not None
    assert store.read_tensors(store.manifest(ref))["w"].tolist() == np.random.default_rng(2).random(100).tolist()


def test_collection_on_a_full_disk_without_room_deletes_nothing_and_names_the_remedy(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {info.key for prefix in ("packs", "manifests", "refs") for info in store.backend.list(prefix)}
    plan = plan_gc(store, grace_s=0)
    fill_disk(store, monkeypatch, room_of_censuses=False)

    with pytest.raises(BackendError, match="free some room outside of the store, then collect again"):
        plan.execute()
    assert {info.key for prefix in ("packs", "manifests", "refs") for info in store.backend.list(prefix)} == before
