"""A manager that calls what torchtitan's ``CheckpointManager`` calls, as a function for `tests.distributed.ranks`."""

from __future__ import annotations

import enum
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.callbacks.torchtitan import TensorCasCheckpoints
from tests.distributed.states import assert_equal, empty_like, sharded, whole_state


class AsyncMode(enum.StrEnum):
    """As torchtitan's."""

    DISABLED = "disabled"
    ASYNC = "async"
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"


class Manager:
    """The calls of torchtitan around ``dcp_save`` and ``dcp_load``: folders of steps, found by a file in them."""

    def __init__(self, folder: str, mode: AsyncMode) -> None:
        self.folder = folder
        self.mode = mode
        self.pg = dist.new_group(backend="gloo")
        self.stager = None
        if mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.stager = DefaultStager(StagingOptions(False, True, True, False))

    def dcp_save(self, state_dict: Any, checkpoint_id: str, async_mode: AsyncMode, *_: Any, **__: Any) -> Any:
        assert async_mode is AsyncMode.DISABLED
        dcp.save(state_dict, checkpoint_id=checkpoint_id)

    def dcp_load(self, state_dict: Any, checkpoint_id: str, from_hf: bool = False) -> None:
        dcp.load(state_dict, checkpoint_id=checkpoint_id)

    def save(self, state: Any, step: int) -> None:
        """Save a step, and wait for it."""
        saving = self.dcp_save(
            state, checkpoint_id=f"{self.folder}/step-{step}", async_mode=self.mode, enable_garbage_collection=True
        )
        if saving is not None:
            getattr(saving, "upload_completion", saving).result()

    def load(self, state: Any, step: int = -1) -> bool:
        """Load a step, by default the last."""
        steps = [
            int(found[1])
            for name in os.listdir(self.folder)
            if (found := re.search(r"step-(\d+)", name)) and os.path.isfile(f"{self.folder}/{name}/.metadata")
        ]
        step = max(steps, default=-1) if step == -1 else step
        if step == -1 or not os.path.isdir(f"{self.folder}/step-{step}"):
            return False
        self.dcp_load(state, f"{self.folder}/step-{step}", from_hf=False)
        return True


def train(rank: int, tracking: str, run_id: str, folder: str, mode: str) -> None:
    """Save and load steps through the manager; those saved before the store came load, too."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    mlflow.set_tracking_uri(tracking)

    class Ours(TensorCasCheckpoints, Manager):
        tensorcas: Mapping[str, Any] = {"run_id": run_id, "keep": tensorcas.Keep(last=2)}

    os.makedirs(folder, exist_ok=True)
    Manager(folder, AsyncMode.DISABLED).save(sharded(whole_state(1)), 1)
    manager = Ours(folder, AsyncMode(mode))
    for step in (2, 3, 4):
        manager.save(sharded(whole_state(step)), step)
    for step, number in ((-1, 4), (3, 3), (1, 1)):
        state = sharded(empty_like(whole_state(1)))
        assert manager.load(state, step)
        assert_equal(state, whole_state(number))
    dist.barrier()
    if rank == 0:
        assert [record.step for record in tensorcas.list_checkpoints(run_id)] == [3, 4]
        assert sum(path.stat().st_size for path in Path(folder, "step-4").iterdir()) < 1000
        shutil.rmtree(Path(folder, "step-4"))
    dist.barrier()
    assert manager.load(sharded(empty_like(whole_state(1))))
