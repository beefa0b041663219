"""Checkpoints of gloo ranks with all planners, meshes and checkpointers of PyTorch, and with deaths of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter
from tensorcas_mlflow.layout import list_dir
from tensorcas_mlflow.maintenance import plan_gc, verify
from tests.distributed.plans import mixed_training, mixed_values, tensor_parallel
from tests.distributed.ranks import run_groups, run_ranks
from tests.distributed.states import assert_equal, whole_state
from tests.distributed.test_ranks import store_of

PLANS = "tests.distributed.plans"


@pytest.mark.long
def test_shards_of_two_kinds_of_parallelism_are_rows_of_the_whole_module(tracking: str, run_id: str) -> None:
    assert run_ranks(4, f"{PLANS}:strided_shards", tracking, run_id) == [0, 0, 0, 0]

    assert_equal(tensorcas.load_checkpoint(run_id)["model"], dict(tensor_parallel(0).state_dict()))


@pytest.mark.long
def test_replicated_shards_are_stored_once(tracking: str, run_id: str) -> None:
    assert run_ranks(4, f"{PLANS}:replicated_groups", tracking, run_id) == [0, 0, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("way", ["caching_planner", "one_rank_alone", "other_values", "active_run"])
def test_ranks_save_and_load_with(way: str, tracking: str, run_id: str) -> None:
    assert run_ranks(2, f"{PLANS}:{way}", tracking, run_id) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("way", ["saving_process", "staged_in_shared_memory"])
def test_a_save_in_the_background_keeps_the_state_as_it_was_with(way: str, tracking: str, run_id: str) -> None:
    assert run_ranks(2, f"{PLANS}:{way}", tracking, run_id) == [0, 0]
    assert_equal(tensorcas.load_checkpoint(run_id, step=2), whole_state(2))


@pytest.mark.long
@pytest.mark.parametrize("steps", [[1, 2], [1, 1]], ids=["two steps", "one step"])
def test_two_coordinators_do_not_mix(tracking: str, run_id: str, steps: list[int]) -> None:
    assert run_ranks(4, f"{PLANS}:two_coordinators", tracking, run_id, steps) == [0, 0, 0, 0]

    assert [record.step for record in tensorcas.list_checkpoints(run_id)] == sorted(set(steps))
    for step in set(steps):
        state = tensorcas.load_checkpoint(run_id, step=step)
        assert torch.equal(state["x"], torch.arange(7000.0)[:, None].expand(7000, 4) + state["group"])
    assert verify(store_of(run_id), full=True).problems == ()


@pytest.mark.long
def test_ranks_that_die_at_random_leave_whole_steps_only_and_others_continue_from_them(
    tracking: str,
    run_id: str,
    tmp_path: Path,
) -> None:
    rng = random.Random(5)

    def group(n_ranks: int, begin: int | None, step: int, deadly_s: float | None = None) -> tuple[Any, ...]:
        return n_ranks, f"{PLANS}:continue_mixed", tracking, run_id, str(tmp_path), begin, step, deadly_s

    deaths = [group(4, 10, step, rng.uniform(0, 0.6)) for step in range(11, 19)]
    statuses = run_groups(group(4, None, 10), *deaths, group(2, 10, 20), group(3, 20, 30), group(4, 30, 40))

    assert all(-9 in each for each in statuses[1:-3])
    assert [each for each in (statuses[0], *statuses[-3:]) if any(each)] == []
    steps = [record.step for record in tensorcas.list_checkpoints(run_id)]
    assert {10, 20, 30, 40} <= set(steps)
    store = store_of(run_id)
    plan_gc(store, grace_s=0).execute()
    assert not list_dir(store.backend, "intents")[0]
    assert verify(store, full=True).problems == ()
    for step in steps:
        alone = mixed_training(0)
        tensorcas.load_checkpoint(run_id, step=step, into=alone)
        saved = torch.load(tmp_path / f"{step}.pt", weights_only=False)
        assert_equal(mixed_values(alone)["model"], saved["model"])
        assert alone["epoch"] == step
    mlflow.end_run()


def test_tensors_that_share_memory_are_filled_one_after_the_other(tracking: str, run_id: str) -> None:
    one = torch.arange(5000.0)
    dcp.save({"a": one, "b": one}, storage_writer=TensorCasStorageWriter(step=1, run_id=run_id))

    shared = torch.zeros(5000)
    dcp.load({"a": shared, "b": shared}, storage_reader=TensorCasStorageReader(step=1, run_id=run_id))
    assert torch.equal(shared, one)


def test_gradients_of_values_before_a_load_are_refused(tracking: str, run_id: str) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=TensorCasStorageWriter(step=1, run_id=run_id))
    weight = torch.zeros(3, requires_grad=True)
    loss = (weight * weight).sum()
    dcp.load({"w": weight}, storage_reader=TensorCasStorageReader(step=1, run_id=run_id))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
