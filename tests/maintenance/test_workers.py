"""Verification and repair by several workers: what one process finds, they find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.engines import Engine, LocalProcesses
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _workers, plan_repair, verify
from tensorcas_mlflow.store import Store
from tests.engines import cluster_of_two
from tests.maintenance.made_store import make_store
from tests.stored_bytes import flip


@pytest.fixture(autouse=True)
def many_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_workers, "_LEAST_BYTES", 1)


@pytest.fixture(scope="module", params=["files", "database"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of deltas and full chunks, some of them damaged."""
    folder = tmp_path_factory.mktemp("store")
    make_store(folder, database=request.param == "database")
    backend = Store.open(folder).backend
    for info in sorted(backend.list("packs"))[1:4]:
        flip(backend, info.key, info.size // 2)
    return folder


def find_all(folder: Path, engine: Engine | None) -> list[Any]:
    """Verify and plan a repair, with everything that either says."""
    store = Store.open(folder)
    report = verify(store, full=True, engine=engine)
    plan = plan_repair(store, engine=engine)
    return [report, str(report), plan.findings, plan.losses, str(plan)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    found = find_all(folder, None)
    assert found[0].problems
    assert found[2]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "n_workers", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_local_workers_find_what_one_process_finds(folder: Path, expected: list[Any], n_workers: int) -> None:
    assert find_all(folder, LocalProcesses(n_workers)) == expected


@pytest.mark.long
def test_cluster_of_two_workers_finds_what_one_process_finds(folder: Path, expected: list[Any]) -> None:
    with cluster_of_two("ray") as engine:
        assert find_all(folder, engine) == expected


@pytest.mark.long
def test_workers_tell_the_progress_of_each_part(folder: Path) -> None:
    told: list[Progress] = []
    verify(Store.open(folder), full=True, engine=LocalProcesses(1), watch=told.append)

    assert len(told) > 1
    assert told[-1].n_bytes is not None
    assert 0 < told[-1].done_bytes <= told[-1].n_bytes
    assert [each.done_bytes for each in told] == sorted(each.done_bytes for each in told)


def test_worker_refuses_another_store_at_the_place(tmp_path: Path) -> None:
    # A path of one machine may lead to another store, or nowhere, on the worker's.
    store = Store.init(tmp_path, database=False)
    with store.write_checkpoint({"a": np.arange(1000)}) as pending:
        pending.commit(RefTarget(run_id="run", step=0))
    format_blob = tmp_path / ".tensorcas" / "format"
    format_blob.write_bytes(format_blob.read_bytes().replace(store.id.encode(), b"7" * 32))
    with pytest.raises(BackendError, match=r"a worker on .* finds"):
        verify(store, full=True, engine=LocalProcesses(1))

    format_blob.unlink()
    with pytest.raises(BackendError, match="finds none"):
        verify(store, full=True, engine=LocalProcesses(1))


def test_store_in_memory_cannot_be_reached_by_workers() -> None:
    store = Store.init_backend(MemoryBackend())
    with store.write_checkpoint({"a": np.arange(1000)}) as pending:
        pending.commit(RefTarget(run_id="run", step=0))

    with pytest.raises((BackendError, ValueError)):
        verify(store, full=True, engine=LocalProcesses(1))
