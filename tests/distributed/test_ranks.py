"""Checkpoints of several gloo ranks: ordinary checkpoints, loaded by any number of ranks."""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from mlflow.exceptions import MlflowException

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow._live_states import plain_state
from tensorcas_mlflow.adapter import adapter_named
from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter
from tensorcas_mlflow.errors import AdapterError, CheckpointExistsError
from tensorcas_mlflow.layout import list_dir
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tests.distributed.ranks import run_ranks
from tests.distributed.states import assert_equal, empty_like, train, training, whole_state

STATES = "tests.distributed.states"


def store_of(run_id: str) -> Store:
    return Store.open(mlflow.get_run(run_id).info.artifact_uri.partition("/artifacts")[0] + "/artifacts")


@pytest.mark.long
def test_steps_of_four_ranks_are_ordinary_checkpoints_for_any_number_of_ranks(tracking: str, run_id: str) -> None:
    assert run_ranks(4, f"{STATES}:save", tracking, run_id, [1, 2]) == [0, 0, 0, 0]
    tensorcas.log_checkpoint(whole_state(2), step=3, run_id=run_id)

    assert_equal(tensorcas.load_checkpoint(run_id, step=2), whole_state(2))
    assert not tensorcas.diff((run_id, 2), (run_id, 3)).changed
    assert tensorcas.diff((run_id, 1), (run_id, 2)).changed == (
        "model.rows",
        "model.columns",
        "model.grid",
        "optimizer.state.rows.step",
    )
    with tensorcas.open_checkpoint(run_id, step=2) as reader:
        assert (reader.rows("model.rows", slice(700, 702)) == whole_state(2)["model"]["rows"][700:702].numpy()).all()
    assert run_ranks(3, f"{STATES}:load", tracking, run_id, [(1, 1), (3, 2)]) == [0, 0, 0]
    loaded = empty_like(whole_state(2))
    dcp.load(loaded, storage_reader=TensorCasStorageReader(step=2, run_id=run_id))
    assert_equal(loaded, whole_state(2))


@pytest.mark.long
def test_a_later_step_stores_only_the_changes(tracking: str, run_id: str) -> None:
    run_ranks(2, f"{STATES}:save", tracking, run_id, [1, 3])
    store = store_of(run_id)
    before = tensorcas.log_checkpoint(whole_state(3), step=4, run_id=run_id)

    # One process shares all chunks with two ranks but those at the borders of shards, and those of columns and boxes.
    assert before.new_bytes is not None
    assert before.new_bytes < before.total_bytes / 4
    assert verify(store, full=True).problems == ()
    plan_gc(store, grace_s=0).execute()
    assert_equal(tensorcas.load_checkpoint(run_id, step=3), whole_state(3))


def test_figures_of_a_step_count_the_shards(tracking: str, run_id: str) -> None:
    writer = TensorCasStorageWriter(step=1, run_id=run_id)
    dcp.save(whole_state(1), storage_writer=writer)
    tensorcas.wait()

    assert writer.info is not None
    assert writer.info.new_bytes is not None
    assert writer.info.new_bytes > 0.9 * writer.info.total_bytes
    metrics = mlflow.get_run(run_id).data.metrics
    assert metrics["tensorcas/new_bytes"] == writer.info.new_bytes
    assert metrics["tensorcas/stored_bytes"] == writer.info.stored_bytes
    assert writer.info.stored_bytes is not None
    assert writer.info.stored_bytes > writer.info.total_bytes / 2


@pytest.mark.long
def test_a_rank_that_dies_leaves_no_step_and_the_next_try_heals(tracking: str, run_id: str) -> None:
    assert 9 in run_ranks(2, f"{STATES}:save_and_die", tracking, run_id, 1, 1)
    assert tensorcas.list_checkpoints(run_id) == []

    assert run_ranks(2, f"{STATES}:save", tracking, run_id, [1]) == [0, 0]
    assert_equal(tensorcas.load_checkpoint(run_id, step=1), whole_state(1))
    store = store_of(run_id)
    plan_gc(store, grace_s=0).execute()
    assert not list_dir(store.backend, "intents")[0]
    assert verify(store, full=True).problems == ()


@pytest.mark.long
def test_a_thread_saves_the_state_as_it_was(tracking: str, run_id: str) -> None:
    assert run_ranks(2, f"{STATES}:save_in_background", tracking, run_id, 1) == [0, 0]
    assert_equal(tensorcas.load_checkpoint(run_id, step=1), whole_state(1))


@pytest.mark.long
def test_an_existing_step_is_refused_and_untouched(tracking: str, run_id: str) -> None:
    dcp.save(whole_state(1), storage_writer=TensorCasStorageWriter(step=1, run_id=run_id))
    with pytest.raises(BaseException, match="there is already a checkpoint") as caught:
        dcp.save(whole_state(2), storage_writer=TensorCasStorageWriter(step=1, run_id=run_id))
    dcp.save(whole_state(3), storage_writer=TensorCasStorageWriter(step=1, run_id=run_id, overwrite=True))

    assert isinstance(caught.value, CheckpointExistsError | MlflowException | dcp.api.CheckpointException)
    assert_equal(tensorcas.load_checkpoint(run_id, step=1), whole_state(3))


def test_a_module_of_one_process_is_a_state_and_a_single_value_is_none(tracking: str, run_id: str) -> None:
    module = torch.nn.Linear(2, 3)
    tensorcas.log_checkpoint(module, step=1, run_id=run_id)
    tensorcas.log_checkpoint([torch.ones(3)], step=2, run_id=run_id)

    weights = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    dcp.load(weights, storage_reader=TensorCasStorageReader(step=1, run_id=run_id))
    assert_equal(weights, dict(module.state_dict()))
    with pytest.raises(BaseException, match="loads states"):
        dcp.load(weights, storage_reader=TensorCasStorageReader(step=2, run_id=run_id))


@pytest.mark.long
def test_log_checkpoint_in_all_ranks_saves_a_live_training_that_other_ranks_continue(
    tracking: str, run_id: str
) -> None:
    assert run_ranks(2, f"{STATES}:log_training", tracking, run_id, 3) == [0, 0]
    assert [record.step for record in tensorcas.list_checkpoints(run_id)] == [2, 3]
    assert run_ranks(4, f"{STATES}:continue_training", tracking, run_id, 4) == [0, 0, 0, 0]
    assert run_ranks(2, f"{STATES}:continue_in_another_order", tracking, run_id, 4) == [0, 0]

    loaded = tensorcas.load_checkpoint(run_id)
    assert loaded["epoch"] == 3
    model = training(5)["model"]
    with tensorcas.open_checkpoint(run_id) as reader:
        reader.load_into(model, prefix="model.")
    assert_equal(model.state_dict(), loaded["model"])


@pytest.mark.long
def test_ranks_continue_a_training_of_one_process(tracking: str, run_id: str) -> None:
    state = training(0)
    for epoch in (1, 2):
        train(state, epoch)
    tensorcas.log_checkpoint(state, step=2, run_id=run_id)

    assert run_ranks(2, f"{STATES}:continue_training", tracking, run_id, 3) == [0, 0]


def test_names_of_ranks_and_dtypes_of_entries_are_kept_in_one_process() -> None:
    def training_of(dtype: torch.dtype, order: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 3).to(dtype)
        return model, torch.optim.NAdam([*model.parameters()][::order])

    model, optimizer = training_of(torch.bfloat16, 1)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for entries in optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].float() + 1e-6
    numbered = optimizer.state_dict()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    named = {
        "state": {names[number]: entries for number, entries in numbered["state"].items()},
        "param_groups": [dict(numbered["param_groups"][0], params=[*names.values()])],
    }
    adapter = adapter_named("pytorch")
    rows = {row: np.array(array) for row, array in adapter.extract({"m": model.state_dict(), "o": named}).items()}
    other, filled = training_of(torch.bfloat16, -1)

    adapter.reconstruct(rows, {"m": other, "o": filled})

    for one, its in zip(model.parameters(), other.parameters(), strict=True):
        for key, entry in optimizer.state[one].items():
            assert filled.state[its][key].dtype == entry.dtype
            assert torch.equal(filled.state[its][key], entry)


def test_optimizer_with_a_format_of_its_own_is_refused_by_ranks() -> None:
    class Wrapper(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {"base": super().state_dict()}

    model = torch.nn.Linear(2, 2)

    with pytest.raises(AdapterError, match=r"Wrapper has a state_dict\(\) of its own.*log the optimizer that it wraps"):
        plain_state({"m": model, "o": Wrapper(model.parameters(), lr=0.1)}, [model])
