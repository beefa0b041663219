"""Functions that ranks run to save and load with the planners, meshes and checkpointers of PyTorch."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import mlflow
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter
from tests.distributed.states import assert_equal, empty_like, gathered, sharded, whole_state


def save_whole(state: Any, step: int, run_id: str, **options: Any) -> None:
    """Save a step with the store's writer."""
    dcp.save(state, storage_writer=TensorCasStorageWriter(step=step, run_id=run_id), **options)


def check_loads(step: int, run_id: str, number: int) -> None:
    """Load a step into zeros, and compare it with the state of a number."""
    state = sharded(empty_like(whole_state(number)))
    dcp.load(state, storage_reader=TensorCasStorageReader(step=step, run_id=run_id))
    assert_equal(state, whole_state(number))


def caching_planner(rank: int, tracking: str, run_id: str) -> None:
    """Save steps with one planner, which sends its plans once."""
    mlflow.set_tracking_uri(tracking)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for step in (1, 2, 3):
        save_whole(sharded(whole_state(step)), step, run_id, planner=planner)
    for step in (1, 2, 3):
        check_loads(step, run_id, step)


def one_rank_alone(rank: int, tracking: str, run_id: str) -> None:
    """Save and load in one rank without the others."""
    mlflow.set_tracking_uri(tracking)
    if rank == 1:
        save_whole(whole_state(1), 1, run_id, no_dist=True)
        state = empty_like(whole_state(1))
        dcp.load(state, storage_reader=TensorCasStorageReader(step=1, run_id=run_id), no_dist=True)
        assert_equal(state, whole_state(1))


def other_values(rank: int, tracking: str, run_id: str) -> None:
    """Save values that are no tensors, tensors of rare dtypes, and empty ones."""
    mlflow.set_tracking_uri(tracking)
    state = {
        "bytes": b"abc",
        "object": {"set": {1, 2}},
        "list": [1, torch.ones(3)],
        "none": None,
        "tuple": (1, 2),
        "random": torch.random.get_rng_state(),
        "complex": torch.ones(3, dtype=torch.complex64),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(12).reshape(3, 4).t(),
        "flags": torch.tensor([True, False]),
    }
    save_whole(state, 1, run_id)
    loaded: dict[str, Any] = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else "other" for key, value in state.items()
    }
    loaded |= {"object": {"set": set()}, "list": [0, torch.zeros(3)]}
    dcp.load(loaded, storage_reader=TensorCasStorageReader(step=1, run_id=run_id))
    one, two = state.pop("list"), loaded.pop("list")
    assert_equal(loaded, state)
    assert (one[0], one[1].tolist()) == (two[0], two[1].tolist())


def tensor_parallel(seed: int) -> torch.nn.Module:
    """Return a module whose rows are split by tensor parallelism, and then split again over the replicas."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 66), torch.nn.ReLU(), torch.nn.Linear(66, 7))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    return model


def strided_shards(rank: int, tracking: str, run_id: str) -> None:
    """Save a module of both kinds of parallelism, and load it into another."""
    mlflow.set_tracking_uri(tracking)
    state = {"model": tensor_parallel(0).state_dict()}
    assert any(isinstance(each, _StridedShard) for each in state["model"]["0.weight"].placements)
    save_whole(state, 1, run_id)
    other = {"model": tensor_parallel(1).state_dict()}
    dcp.load(other, storage_reader=TensorCasStorageReader(step=1, run_id=run_id))
    assert_equal(gathered(other), gathered(state))


def replicated_groups(rank: int, tracking: str, run_id: str) -> None:
    """Save a module of HSDP: sharded in two groups that have the same shards."""
    mlflow.set_tracking_uri(tracking)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 700)
    fully_shard(model, mesh=mesh)
    info = tensorcas.log_checkpoint({"model": model}, step=1, run_id=run_id)
    assert info.new_bytes is not None
    assert info.new_bytes < 1.1 * 301 * 700 * 4


def saving_process(rank: int, tracking: str, run_id: str) -> None:
    """Save steps by a process in the background, the second without a change of the first one's state."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # a machine need not know its own name
    mlflow.set_tracking_uri(tracking)
    for step in (1, 2):
        state = sharded(whole_state(step))
        writer = TensorCasStorageWriter(step=step, run_id=run_id)
        saving = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        _spoil(state)
        _done(saving)
        check_loads(step, run_id, step)


def staged_in_shared_memory(rank: int, tracking: str, run_id: str) -> None:
    """Save by a thread from shared memory, where the stager has copied the state in the background."""
    mlflow.set_tracking_uri(tracking)
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    for step in (1, 2):
        state = sharded(whole_state(step))
        writer = TensorCasStorageWriter(step=step, run_id=run_id)
        saving = dcp.async_save(state, storage_writer=writer, async_stager=stager)
        saving.staging_completion.result()
        _spoil(state)
        _done(saving)
        check_loads(step, run_id, step)
    stager.close()


def active_run(rank: int, tracking: str, run_id: str) -> None:
    """Save by a thread into the run that was active when the writer was made."""
    mlflow.set_tracking_uri(tracking)
    if rank == 0:
        mlflow.start_run(run_id)
    _done(dcp.async_save(sharded(whole_state(1)), storage_writer=TensorCasStorageWriter(step=1)))
    if rank == 0:
        mlflow.end_run()
    dist.barrier()
    check_loads(1, run_id, 1)


def _spoil(state: dict[str, Any]) -> None:
    for tensor in state["model"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


def _done(saving: Any) -> None:
    getattr(saving, "upload_completion", saving).result()


def two_coordinators(rank: int, tracking: str, run_id: str, steps: list[int]) -> None:
    """Save in two groups at once; each saves its own number in its own step, which may be the same one."""
    mlflow.set_tracking_uri(tracking)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    mesh = DeviceMesh.from_group(groups[mine], "cpu", mesh=[[0, 1], [2, 3]][mine])
    part = torch.full((3500, 4), float(mine)) + torch.arange(3500)[:, None] + 3500 * (rank % 2)
    state = {"x": DTensor.from_local(part, mesh, [Shard(0)]), "group": mine}
    try:
        save_whole(state, steps[mine], run_id, process_group=groups[mine])
    except dcp.api.CheckpointException as error:
        assert "there is already a checkpoint" in str(error)  # noqa: PT017 - either group may be the later one


class _Mixed(torch.nn.Module):
    """A frozen bfloat16 part, a trained bfloat16 part and a float32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(96, 301, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
        self.low = torch.nn.Linear(301, 203, dtype=torch.bfloat16)
        self.high = torch.nn.Linear(203, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.high(self.low(self.frozen(inputs)).float())
        return result


def mixed_training(seed: int) -> dict[str, Any]:
    """Return a live training with a frozen bfloat16 part, a trained bfloat16 part and a float32 one."""
    torch.manual_seed(seed)
    model = _Mixed()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.frozen, model.low, model.high):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": torch.optim.Adam(trained, lr=1e-2), "epoch": 0}


def train_mixed(state: dict[str, Any], epoch: int) -> None:
    """Take a step of Adam."""
    torch.manual_seed(epoch)
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 96, dtype=torch.bfloat16)).square().mean().backward()
    state["optimizer"].step()
    state["epoch"] = epoch


def mixed_values(state: dict[str, Any]) -> dict[str, Any]:
    """Return all values of a training, gathered."""
    optimizer = state["optimizer"].state_dict()["state"]
    return gathered({"model": state["model"].state_dict(), "optimizer": optimizer, "epoch": state["epoch"]})


def continue_mixed(
    rank: int, tracking: str, run_id: str, folder: str, begin: int | None, step: int, deadly_s: float | None
) -> None:
    """Continue a training from a step, and save the next one; some rank may be killed after some seconds.

    Args:
        rank: This rank.
        tracking: The tracking URI.
        run_id: The run.
        folder: Folder with the values of each step, as a file each.
        begin: The step to continue; None for the beginning.
        step: The step to save.
        deadly_s: Seconds from the beginning of the save to a rank's death; None lets all live.
    """
    mlflow.set_tracking_uri(tracking)
    state = mixed_training(step + 100)
    if begin is not None:
        tensorcas.load_checkpoint(run_id, step=begin, into=state)
        assert_equal(mixed_values(state), torch.load(Path(folder, f"{begin}.pt"), weights_only=False))
    train_mixed(state, step)
    values = mixed_values(state)
    if rank == 0:
        torch.save(values, Path(folder, f"{step}.pt"))
    dist.barrier()
    death = threading.Timer(deadly_s or 0, os.kill, (os.getpid(), signal.SIGKILL))
    is_dying = deadly_s is not None and rank == random.Random(step).randrange(dist.get_world_size())
    if is_dying:
        death.start()
    tensorcas.log_checkpoint(state, step=step, run_id=run_id)
    if is_dying:
        death.join()  # the save was quicker
