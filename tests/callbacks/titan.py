"""A training by torchtitan's own parts, as functions for `tests.distributed.ranks`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.callbacks.torchtitan import TensorCasCheckpoints
from tests.distributed.ranks import ROOT
from tests.distributed.states import assert_equal, gathered

TORCHTITAN = ROOT / ".venv/servers/torchtitan"
sys.path.append(str(TORCHTITAN))

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402


class SplitLinear(torch.nn.Linear):
    """A layer whose state dict has its weight in two tensors, as those of fused layers have; they are copies."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}upper"], state[f"{prefix}lower"] = (half.clone() for half in weight.chunk(2, dim=1))

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        halves = [state.pop(f"{prefix}{name}", None) for name in ("upper", "lower")]
        if None not in halves:
            state[f"{prefix}weight"] = torch.cat(halves, dim=1)


class Counter:
    """A value of the training loop."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Training:
    """A model, its optimizer and the manager, as the trainer of torchtitan makes them."""

    def __init__(self, make: Callable[..., CheckpointManager.Config], folder: str, mode: str) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), SplitLinear(33, 2))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)
        self.optimizers = default_adamw(lr=1e-2).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.counter = Counter()
        config = make(enable=True, interval=1, keep_latest_k=2, async_mode=mode, last_save_model_only=False)
        self.manager: Any = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            sd_adapter=None,
            base_folder=folder,
        )
        if mode == "async_with_pinned_mem":  # torchtitan's own stager needs a GPU
            self.manager.stager = DefaultStager(StagingOptions(False, True, True, False))

    def train(self, n_steps: int) -> None:
        """Train and save each step, as the trainer's loop does."""
        for _ in range(n_steps):
            self.counter.step += 1
            draw = torch.Generator().manual_seed(1000 * self.counter.step + dist.get_rank())
            self.optimizers.zero_grad()
            self.model(torch.randn(4, 8, generator=draw)).square().sum().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.counter.step)
        self.manager.maybe_wait_for_saving()

    def state(self) -> Any:
        """Return the state of the whole training."""
        optimizer = self.optimizers.state_dict()
        return gathered({"model": dict(self.model.state_dict()), "optimizer": optimizer, "step": self.counter.step})


def _ours(run_id: str) -> Callable[..., CheckpointManager.Config]:
    class Manager(TensorCasCheckpoints, CheckpointManager):
        tensorcas: Mapping[str, Any] = {"run_id": run_id, "keep": tensorcas.Keep(last=2)}

        @dataclass(kw_only=True, slots=True)
        class Config(CheckpointManager.Config):
            pass

    return Manager.Config


def train(rank: int, tracking: str, run_id: str, folder: str, mode: str) -> None:
    """Begin with the manager's files, go on in the store, and continue from steps of both."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    mlflow.set_tracking_uri(tracking)
    whole = Training(CheckpointManager.Config, f"{folder}/whole", "disabled")
    whole.train(5)

    in_files = Training(CheckpointManager.Config, f"{folder}/ours", "disabled")
    in_files.train(1)
    first = Training(_ours(run_id), f"{folder}/ours", mode)
    assert first.manager.load()
    assert first.counter.step == 1
    first.train(2)
    resumed = Training(_ours(run_id), f"{folder}/ours", mode)
    assert resumed.manager.load()
    assert resumed.counter.step == 3
    assert_equal(resumed.state(), first.state())
    resumed.train(2)
    for each in (whole, in_files, first, resumed):
        each.manager.close()
    assert_equal(resumed.state(), whole.state())
    dist.barrier()
    if rank == 0:
        assert [record.step for record in tensorcas.list_checkpoints(run_id)] == [4, 5]
        assert sum(path.stat().st_size for path in Path(folder, "ours/checkpoint/step-5").iterdir()) < 1000
    back = Training(_ours(run_id), f"{folder}/ours", mode)
    assert back.manager.load(4)
    assert back.counter.step == 4


def train_in_a_bucket(rank: int, tracking: str, run_id: str, folder: str) -> None:
    """Save and load with a folder that torchtitan reads by fsspec."""
    mlflow.set_tracking_uri(tracking)
    training = Training(_ours(run_id), f"file://{folder}", "disabled")
    training.train(2)
    again = Training(_ours(run_id), f"file://{folder}", "disabled")
    assert again.manager.load()
    assert_equal(again.state(), training.state())
    dist.barrier()
    assert Path(folder, "checkpoint/step-2/.metadata").stat().st_size < 1000
