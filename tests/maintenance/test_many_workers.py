"""Copies, collections and optimizations by several workers: what one process makes, they make."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.base import files
from tensorcas_mlflow.base.engines import Engine, LocalProcesses
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.codecs import CODECS
from tensorcas_mlflow.maintenance import (
    _copy_chunks,
    _gc_survey,
    _optimize_encode,
    copy_refs,
    plan_gc,
    plan_optimize,
    read_source,
)
from tensorcas_mlflow.maintenance._census import census_bytes
from tensorcas_mlflow.store import Store
from tests.engines import cluster_of_two
from tests.maintenance.made_store import CHUNK_BYTES, N_STEPS, make_store

OTHER_THREADS = ("tensorcas-save", "tensorcas-report", "tensorcas-page", "tensorcas-cache", "tensorcas-maintenance")

ENGINES = [
    "local",
    "dying",
    pytest.param("ray", marks=pytest.mark.long),
]


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copy_chunks, "_PART_BYTES", 3 * CHUNK_BYTES)
    monkeypatch.setattr(_optimize_encode, "_LEAST_PART_BYTES", 3 * CHUNK_BYTES)
    monkeypatch.setattr(_gc_survey, "_MANIFESTS_EACH", 1)
    monkeypatch.setattr(_gc_survey, "_PACKS_EACH", 2)


@pytest.fixture
def same_names(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let new names of the package be the same ones each time, from each call on."""
    numbers: Iterator[int] = itertools.count()

    def draw(n_bytes: int) -> bytes:
        # Workers open the store as well, and so do threads that an earlier test has left: each backend draws a name for
        # its unfinished files.
        is_of_backend = sys._getframe(2).f_globals["__name__"].startswith("tensorcas_mlflow.backends")
        is_ours = not is_of_backend and threading.current_thread().name not in OTHER_THREADS
        return (next(numbers) << 64).to_bytes(n_bytes, "big") if is_ours else os.urandom(n_bytes)

    def again() -> None:
        nonlocal numbers
        numbers = itertools.count(1)

    monkeypatch.setattr(files, "_draw", draw)
    return again


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of deltas and full chunks in several packs."""
    folder = tmp_path / "source"
    make_store(folder, database=False)
    path = max(folder.glob(".tensorcas/packs/**/*.pack"), key=lambda each: each.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damage")
    return folder


def blobs_of(folder: Path, *prefixes: str) -> dict[str, bytes]:
    """All blobs of a store below some prefixes."""
    backend = Store.open(folder).backend
    return {info.key: backend.get(info.key) for prefix in prefixes for info in backend.list(prefix)}


def copied(folder: Path, target: Path, engine: Engine | None) -> tuple[Any, dict[str, bytes]]:
    source = Store.open(folder)
    destination = Store.init(target, chunk_bytes=CHUNK_BYTES, store_id=source.id, database=False)
    report = copy_refs(source, destination, read_source(source)[0], engine=engine)
    return report, blobs_of(target, "refs", "manifests", "packs")


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_copy_by_workers_writes_the_bytes_of_one_process(
    folder: Path, tmp_path: Path, name: str, same_names: Callable[[], None]
) -> None:
    same_names()
    expected = copied(folder, tmp_path / "one", None)
    with cluster_of_two(name) as engine:
        same_names()
        found = copied(folder, tmp_path / "many", engine)

    assert found == expected
    assert found[0].n_copied == N_STEPS - len(found[0].failed) > 0
    assert found[0].failed
    assert any(key.startswith("packs/") for key in found[1])


def planned(folder: Path, engine: Engine | None) -> list[Any]:
    """Plan a collection, with everything that the plan and its census say."""
    plan = plan_gc(Store.open(folder), grace_s=0, engine=engine)
    said = [str(plan), plan.packs, plan.rewrites, plan.manifests, plan.reasons, plan.n_refs, plan.n_live_chunks]
    return [*said, census_bytes(plan.census.inventory)]


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_collection_by_workers_is_that_of_one_process(folder: Path, name: str) -> None:
    store = Store.open(folder)
    for ref in read_source(store)[0][::2]:
        store.drop(ref)
    expected = planned(folder, None)
    with cluster_of_two(name) as engine:
        found = planned(folder, engine)

    assert found == expected
    assert found[3]


def test_workers_of_a_collection_tell_the_progress(folder: Path) -> None:
    told: list[Progress] = []
    plan_gc(Store.open(folder), engine=LocalProcesses(1), watch=told.append)

    assert len(told) > N_STEPS
    assert told[-1].n_done == told[-1].n > 0
    assert [each.done_bytes for each in told] == sorted(each.done_bytes for each in told)
    assert told[0].done_bytes > 0


def optimized(folder: Path, target: Path, engine: Engine | None) -> tuple[Any, dict[str, bytes]]:
    shutil.copytree(folder, target)
    plan = plan_optimize(Store.open(target), engine=engine)
    report = plan.execute(engine=engine)
    return (plan.n_chunks, report), blobs_of(target, "refs", "manifests", "packs")


@pytest.mark.long
@pytest.mark.parametrize("name", ENGINES)
def test_optimization_by_workers_writes_the_bytes_of_one_process(
    folder: Path, tmp_path: Path, name: str, same_names: Callable[[], None]
) -> None:
    same_names()
    expected = optimized(folder, tmp_path / "one", None)
    with cluster_of_two(name) as engine:
        same_names()
        found = optimized(folder, tmp_path / "many", engine)

    assert found == expected
    assert found[0][0] > 0
    assert found[0][1].written_bytes > 0


def test_codecs_of_another_process_are_the_codecs_of_this_one() -> None:
    import pickle

    assert all(pickle.loads(pickle.dumps(codec)) is codec for codec in CODECS.values())
