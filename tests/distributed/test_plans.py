"""Checkpoints of gloo ranks with all planners, meshes and checkpointers of PyTorch, and with deaths of ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter
from tensorcas_mlflow.maintenance import verify
from tests.distributed.plans import tensor_parallel
from tests.distributed.ranks import run_ranks
from tests.distributed.states import assert_equal, whole_state
from tests.distributed.test_ranks import store_of

PLANS = "tests.distributed.plans"


def test_shards_of_two_kinds_of_parallelism_are_rows_of_the_whole_module(tracking: str, run_id: str) -> None:
    assert run_ranks(4, f"{PLANS}:strided_shards", tracking, run_id) == [0, 0, 0, 0]

    assert_equal(tensorcas.load_checkpoint(run_id)["model"], dict(tensor_parallel(0).state_dict()))


def test_replicated_shards_are_stored_once(tracking: str, run_id: str) -> None:
    assert run_ranks(4, f"{PLANS}:replicated_groups", tracking, run_id) == [0, 0, 0, 0]


@pytest.mark.parametrize("way", ["caching_planner", "one_rank_alone", "other_values", "active_run"])
def test_ranks_save_and_load_with(way: str, tracking: str, run_id: str) -> None:
    assert run_ranks(2, f"{PLANS}:{way}", tracking, run_id) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("way", ["saving_process", "staged_in_shared_memory"])
def test_a_save_in_the_background_keeps_the_state_as_it_was_with(way: str, tracking: str, run_id: str) -> None:
    assert run_ranks(2, f"{PLANS}:{way}", tracking, run_id) == [0, 0]
    assert_equal(tensorcas.load_checkpoint(run_id, step=2), whole_state(2))


@pytest.mark.parametrize("steps", [[1, 2], [1, 1]], ids=["two steps", "one step"])
def test_two_coordinators_do_not_mix(tracking: str, run_id: str, steps: list[int]) -> None:
    assert run_ranks(4, f"{PLANS}:two_coordinators", tracking, run_id, steps) == [0, 0, 0, 0]

    assert [record.step for record in tensorcas.list_checkpoints(run_id)] == sorted(set(steps))
    for step in set(steps):
        state = tensorcas.load_checkpoint(run_id, step=step)
        assert torch.equal(state["x"], torch.arange(7000.0)[:, None].expand(7000, 4) + state["group"])
    assert verify(store_of(run_id), full=True).problems == ()


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
