"""States of many ranks for the tests, and the functions that the ranks run."""

from __future__ import annotations

import copy
import os
from typing import Any

import mlflow
import pytest
import torch
import torch.distributed.checkpoint as dcp
from mlflow.exceptions import MlflowException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter


def whole_state(step: int) -> dict[str, Any]:
    """Return a state without shards: each step changes a few of its tensors a little."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    state: dict[str, Any] = {
        "model": {
            "frozen": draw(1024, 512),
            "rows": draw(1000, 301),
            "columns": draw(256, 1024).to(torch.bfloat16),
            "grid": draw(130, 258),
            "few": draw(3, 5),
            "scalar": torch.tensor(2.5),
        },
        "optimizer": {"state": {"rows": {"exp_avg": draw(1000, 301), "step": torch.tensor(float(step))}}},
        "epoch": step,
        "name": "four ranks",
    }
    for name in ("rows", "columns", "grid"):
        state["model"][name] = state["model"][name] * (1 + 2e-2 * (step - 1))
    return state


def sharded(state: dict[str, Any]) -> dict[str, Any]:
    """Distribute a state over all ranks: along rows, columns and both, unevenly, and replicated."""
    n = torch.distributed.get_world_size()
    line = init_device_mesh("cpu", (n,))
    grid = init_device_mesh("cpu", (2, n // 2)) if n % 2 == 0 else None
    model = dict(state["model"])
    model["frozen"] = distribute_tensor(model["frozen"], line, [Shard(0)])
    model["rows"] = distribute_tensor(model["rows"], line, [Shard(0)])
    model["columns"] = distribute_tensor(model["columns"], line, [Shard(1)])
    both = (grid, [Shard(0), Shard(1)]) if grid is not None else (line, [Shard(1)])
    model["grid"] = distribute_tensor(model["grid"], *both)
    model["few"] = distribute_tensor(model["few"], line, [Shard(0)])
    model["scalar"] = distribute_tensor(model["scalar"], line, [Replicate()])
    moments = dict(state["optimizer"]["state"]["rows"])
    moments["exp_avg"] = distribute_tensor(moments["exp_avg"], line, [Shard(0)])
    return {**state, "model": model, "optimizer": {"state": {"rows": moments}}}


def save(rank: int, tracking: str, run_id: str, steps: list[int]) -> None:
    """Save steps of a run."""
    mlflow.set_tracking_uri(tracking)
    for step in steps:
        dcp.save(sharded(whole_state(step)), storage_writer=TensorCasStorageWriter(step=step, run_id=run_id))


def save_in_background(rank: int, tracking: str, run_id: str, step: int) -> None:
    """Save a step by a thread, and change the state meanwhile."""
    mlflow.set_tracking_uri(tracking)
    state = sharded(whole_state(step))
    saving = dcp.async_save(state, storage_writer=TensorCasStorageWriter(step=step, run_id=run_id))
    for tensor in state["model"].values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.zero_()
    saving.result()


def save_and_die(rank: int, tracking: str, run_id: str, step: int, dying: int) -> None:
    """Save a step; one rank dies when its shards are stored."""

    class Dying(TensorCasStorageWriter):
        def write_data(self, *given: Any) -> Any:
            written = super().write_data(*given)
            if rank == dying:
                os._exit(9)
            return written

    mlflow.set_tracking_uri(tracking)
    dcp.save(sharded(whole_state(step)), storage_writer=Dying(step=step, run_id=run_id))


def load(rank: int, tracking: str, run_id: str, steps: list[tuple[int, int]]) -> None:
    """Load steps into zeros, and compare all values; each step comes with the number of its state."""
    mlflow.set_tracking_uri(tracking)
    for step, number in steps:
        wanted = whole_state(number)
        state = sharded(empty_like(wanted))
        dcp.load(state, storage_reader=TensorCasStorageReader(step=step, run_id=run_id))
        assert_equal(state, wanted)


def empty_like(value: Any) -> Any:
    """Return a state of zeros."""
    if isinstance(value, dict):
        return {key: empty_like(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def assert_equal(value: Any, wanted: Any) -> None:
    """Compare two states, gathering tensors."""
    if isinstance(wanted, dict):
        assert value.keys() == wanted.keys()
        for key in wanted:
            assert_equal(value[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, wanted)
    else:
        assert value == wanted, f"{value} is not {wanted}"


def training(seed: int, *, width: int = 64, order: int = 1) -> dict[str, Any]:
    """Return a live training, spread over all ranks as FSDP2 does it; in one process it is a plain one."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    first, others = [*model[0].parameters()], [*model[1].parameters(), *model[2].parameters()]
    optimizer = torch.optim.NAdam([{"params": first[::order], "lr": 1e-2}, {"params": others[::order]}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0, "seen": [0, (1, 2)]}


def train(state: dict[str, Any], epoch: int) -> None:
    """Train for an epoch, the same in any number of ranks."""
    torch.manual_seed(epoch)
    for _ in range(2):
        inputs = torch.randn(16, 30)
        state["optimizer"].zero_grad()
        state["model"](inputs).square().mean().backward()
        state["optimizer"].step()
    state["schedule"].step()
    state["epoch"] = epoch
    state["seen"][0] = epoch


def values_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return all values of a training, gathered."""
    optimizer = state["optimizer"].state_dict()
    parts = {**state, "model": state["model"].state_dict(), "schedule": state["schedule"].state_dict()}
    return gathered({**parts, "optimizer": {"state": optimizer["state"], "groups": {0: optimizer["param_groups"]}}})


def gathered(value: Any) -> Any:
    """Return a state of plain tensors."""
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    return value.full_tensor().clone() if isinstance(value, DTensor) else copy.deepcopy(value)


def log_training(rank: int, tracking: str, run_id: str, epochs: int) -> None:
    """Train, and log a step after each epoch; keep the last two."""
    mlflow.set_tracking_uri(tracking)
    state = training(0)
    for epoch in range(1, epochs + 1):
        train(state, epoch)
        info = tensorcas.log_checkpoint(
            state, step=epoch, run_id=run_id if rank == 0 else None, keep=tensorcas.Keep(last=2)
        )
        assert (info.step, info.run_id, info.new_bytes is not None) == (epoch, run_id, True)
    with pytest.raises(MlflowException, match="there is already a checkpoint"):
        tensorcas.log_checkpoint(state, step=epochs, run_id=run_id if rank == 0 else None)
    assert all(type(part) is type(fresh) for part, fresh in zip(state.values(), training(0).values(), strict=True))


def continue_training(rank: int, tracking: str, run_id: str, epochs: int) -> None:
    """Continue from the last step in other ranks; the result is that of a training without a break."""
    mlflow.set_tracking_uri(tracking)
    state = training(5)
    tensorcas.load_checkpoint(run_id if rank == 0 else None, into=state)
    whole = training(0)
    for epoch in range(1, state["epoch"] + 1):
        train(whole, epoch)
    assert_equal(values_of(state), values_of(whole))
    train(state, epochs)
    train(whole, epochs)
    assert_equal(values_of(state), values_of(whole))
    load_what_does_not_fit(run_id)


def continue_in_another_order(rank: int, tracking: str, run_id: str, epochs: int) -> None:
    """Continue with an optimizer whose parameters are in another order: each gets its own entries, in their dtypes."""
    mlflow.set_tracking_uri(tracking)
    state, whole = training(5, order=-1), training(0)
    tensorcas.load_checkpoint(run_id if rank == 0 else None, into=state)
    for epoch in range(1, state["epoch"] + 1):
        train(whole, epoch)
    for one, its in zip(state["model"].parameters(), whole["model"].parameters(), strict=True):
        assert_equal(gathered(dict(state["optimizer"].state[one])), gathered(dict(whole["optimizer"].state[its])))
    for each in (state, whole):
        train(each, epochs)
    assert_equal(gathered(state["model"].state_dict()), gathered(whole["model"].state_dict()))


def load_what_does_not_fit(run_id: str) -> None:
    """Load into states that do not fit: each is refused on all ranks, and unchanged."""
    for state, words in (
        (training(5, width=65), "model.0.weight has the shape"),
        ({**training(5), "more": torch.zeros(3)}, "more is not in the checkpoint"),
        ({key: part for key, part in training(5).items() if key != "epoch"}, "epoch is only in the checkpoint"),
    ):
        before = values_of(state)
        with pytest.raises(MlflowException, match=words):
            tensorcas.load_checkpoint(run_id, into=state)
        assert_equal(values_of(state), before)
    state = {"model": training(5)["model"]}
    tensorcas.load_checkpoint(run_id, into=state, strict=False)
    with pytest.raises(MlflowException, match="there is no checkpoint"):
        tensorcas.load_checkpoint(run_id, step=77, into=state)
    with pytest.raises(MlflowException, match="leave out device"):
        tensorcas.load_checkpoint(run_id, into=state, device="cpu")
