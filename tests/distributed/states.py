"""States of many ranks for the tests, and the functions that the ranks run."""

from __future__ import annotations

import os
from typing import Any

import mlflow
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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
        assert value == wanted
