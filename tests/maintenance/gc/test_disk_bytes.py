"""Bytes that plans, reports and figures name, compared with the sizes of the files of a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import find_shares, plan_gc, plan_optimize
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas, tensorcas
from tests.stored_bytes import bytes_below

__all__ = ["tensorcas"]

_TABLE_BYTES = {False: 1500, True: 4096}
"""Bound of what a plan leaves out: the table of a new pack; in a database also what its pages leave empty."""


def grow(root: Path, *, database: bool, n_steps: int = 30, n_values: int = 300) -> list[Ref]:
    """Log steps of a model that grows, like trees: each repeats what the one before held."""
    store = Store.init(root, chunk_bytes=4096, database=database)
    draw = np.random.default_rng(0)
    parts = [draw.normal(size=n_values) for _ in range(n_steps)]
    refs = []
    for step in range(n_steps):
        state = {"first": parts[0] + step, "all": np.concatenate(parts[: step + 1])}
        with store.write_checkpoint(state, series="run") as pending:
            refs.append(pending.commit(RefTarget(run_id="run", step=step)))
    return refs


@pytest.mark.long
@pytest.mark.parametrize("database", [False, True], ids=["files", "database"])
@pytest.mark.parametrize("n_dropped", [0, 3, 15, 26, 30])
@pytest.mark.parametrize("max_waste", [0.3, 0.0])
def test_a_collection_promises_and_reports_the_bytes_that_the_files_lose(
    tmp_path: Path, database: bool, n_dropped: int, max_waste: float
) -> None:
    refs = grow(tmp_path, database=database)
    store = Store.open(tmp_path)
    for ref in refs[:n_dropped]:
        store.drop(ref)
    plan = plan_gc(store, grace_s=0, max_waste=max_waste)
    before = bytes_below(tmp_path)
    report = plan.execute()
    after = bytes_below(tmp_path)
    again = plan_gc(store, grace_s=0, max_waste=max_waste)

    assert plan.disk_bytes == report.bytes_before == before
    assert report.bytes_after == again.disk_bytes == after
    assert report.freed_bytes == before - after
    bound = _TABLE_BYTES[database]
    assert abs(plan.freed_bytes - max(0, report.freed_bytes)) <= bound
    assert after <= before + bound
    assert again.freed_bytes <= bound


def test_space_is_given_back_while_another_process_has_the_store_open(tmp_path: Path) -> None:
    refs = grow(tmp_path, database=True)
    code = f"""
import sys, numpy as np
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
store = Store.open({str(tmp_path)!r})
with store.write_checkpoint({{"w": np.arange(9.0)}}) as pending:
    pending.commit(RefTarget(run_id="run", step=99))
print("saved", flush=True)
sys.stdin.readline()
[ref] = store.checkpoints()
assert store.read_tensors(store.manifest(ref))["w"].tolist() == list(range(9))
print("read", flush=True)
sys.stdin.read()
"""
    database = tmp_path / ".tensorcas/blobs.db"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"saved\n"
        store = Store.open(tmp_path)
        for ref in refs:
            store.drop(ref)
        before = database.stat().st_size
        report = plan_gc(store, grace_s=0).execute()
        after = database.stat().st_size
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"read\n"
        process.communicate()

    assert after < 0.3 * before
    assert abs(report.freed_bytes - (before - after)) < 0.2 * before
    assert process.returncode == 0


def test_what_earlier_deletions_left_in_a_database_is_part_of_the_plan(tmp_path: Path) -> None:
    refs = grow(tmp_path, database=True)
    store = Store.open(tmp_path)
    for ref in refs:
        store.drop(ref)
        store.backend.delete(f"manifests/{ref.manifest}")
    for info in list(store.backend.list("packs")):
        store.backend.delete(info.key)
    plan = plan_gc(store)
    before = bytes_below(tmp_path)

    assert (len(plan.packs), len(plan.manifests)) == (0, 0)
    assert plan.freed_bytes > 0.85 * before  # the table of commits stays
    assert plan.execute().freed_bytes == before - bytes_below(tmp_path)
    assert abs(plan.freed_bytes - (before - bytes_below(tmp_path))) <= 1024  # a page


@pytest.mark.parametrize("database", [False, True], ids=["files", "database"])
@pytest.mark.parametrize("n_dropped", [0, 15])
def test_shares_never_exceed_the_files(tmp_path: Path, database: bool, n_dropped: int) -> None:
    refs = grow(tmp_path, database=database, n_values=30)
    store = Store.open(tmp_path)
    for ref in refs[:n_dropped]:
        store.drop(ref)
    for by in ("run", "step"):
        found = find_shares(store, by)

        assert found.disk_bytes == bytes_below(tmp_path)
        assert 0 < found.needed_bytes <= found.disk_bytes


@pytest.mark.long
@pytest.mark.parametrize("database", [False, True], ids=["files", "database"])
def test_commands_report_the_bytes_of_files_with_their_own_records(
    tmp_path: Path, tensorcas: Tensorcas, database: bool
) -> None:
    for ref in grow(tmp_path, database=database)[:26]:
        Store.open(tmp_path).drop(ref)
    for command in (["gc", "--yes", "--json"], ["optimize", "--yes", "--json"], ["gc", "--yes", "--json"]):
        before = bytes_below(tmp_path)
        report = tensorcas(*command, "--root", tmp_path).json["report"]

        assert (report["bytes_before"], report["bytes_after"]) == (before, bytes_below(tmp_path))
    told = tensorcas("stats", "--json", "--root", tmp_path).json

    assert told["disk_bytes"] == told["disk"]["total"] == bytes_below(tmp_path)
    assert tensorcas("du", "--json", "--root", tmp_path).json["disk_bytes"] == bytes_below(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("database", [False, True], ids=["files", "database"])
def test_an_optimization_reports_the_bytes_of_files(tmp_path: Path, database: bool) -> None:
    grow(tmp_path, database=database)
    before = bytes_below(tmp_path)
    report = plan_optimize(Store.open(tmp_path)).execute()

    assert (report.bytes_before, report.bytes_after) == (before, bytes_below(tmp_path))
