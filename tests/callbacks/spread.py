"""Trainings of the real frameworks that are spread over gloo ranks, as functions for `tests.distributed.ranks`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch
import mlflow
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.callbacks.lightning import TensorCasCheckpoint, write_trainer_checkpoint
from tensorcas_mlflow.callbacks.transformers import TensorCasCallback
from tests.callbacks.loops import FEATURES, TARGETS, same
from tests.callbacks.tokens import Tokens, make_model
from tests.distributed.states import gathered


def _launched(rank: int) -> None:
    """Set the environment of a program that ``torchrun`` has started."""
    n_ranks = str(dist.get_world_size())
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": n_ranks,
        "LOCAL_WORLD_SIZE": n_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "tests",
    }


class Module(lightning.pytorch.LightningModule):
    """A module that its strategy spreads by FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
        self.save_hyperparameters({"kind": "spread", "nothing": {}})

    def configure_model(self) -> None:
        if not any(isinstance(each, DTensor) for each in self.parameters()):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features, targets = batch
        return torch.nn.functional.mse_loss(self.net(features)[:, 0], targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    def train_dataloader(self) -> Any:
        dataset = torch.utils.data.TensorDataset(torch.from_numpy(FEATURES), torch.from_numpy(TARGETS))
        return torch.utils.data.DataLoader(dataset, batch_size=16)


def _fit(folder: Path, epochs: int, *callbacks: Any, ckpt_path: str | None = None) -> Any:
    torch.manual_seed(0)
    trainer = lightning.pytorch.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1),
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), ckpt_path=ckpt_path)
    return trainer


def _reached(trainer: Any) -> Any:
    optimizer = trainer.optimizers[0].state_dict()
    return gathered({"net": dict(trainer.lightning_module.state_dict()), "optimizer": optimizer["state"]})


def fit_lightning(rank: int, tracking: str, run_id: str, folder: str) -> None:
    """Train, and continue from the second of four epochs; both trainings reach the same."""
    _launched(rank)
    mlflow.set_tracking_uri(tracking)
    whole = _fit(Path(folder), 4)
    wanted = _reached(whole)
    half = _fit(Path(folder), 2, TensorCasCheckpoint(run_id=run_id))
    file = str(Path(folder, "resume.ckpt"))
    if rank == 0:
        assert tensorcas.list_checkpoints(run_id)[-1].step == half.global_step
        loaded = tensorcas.load_checkpoint(run_id)
        assert loaded["hyper_parameters"] == {"kind": "spread", "nothing": {}}
        write_trainer_checkpoint(run_id, file)
    reached = _reached(half)
    if rank == 0:
        assert same(loaded["state_dict"], reached["net"])
    dist.barrier()
    resumed = _fit(Path(folder), 4, ckpt_path=file)
    assert resumed.global_step == whole.global_step
    assert same(_reached(resumed), wanted)


def train_transformers(rank: int, tracking: str, run_id: str, folder: str) -> None:
    """Train a model that Transformers has spread, with a callback."""
    _launched(rank)
    mlflow.set_tracking_uri(tracking)
    if rank == 0:
        make_model().save_pretrained(Path(folder, "model"))
    dist.barrier()
    model = transformers.GPT2LMHeadModel.from_pretrained(
        Path(folder, "model"),
        distributed_config=DistributedConfig(
            fsdp_size=dist.get_world_size(), fsdp_plan={"transformer.h.*": "free_full_weight"}
        ),
    )
    assert any(isinstance(each, DTensor) for each in model.parameters())
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(Path(folder, "out")),
            max_steps=4,
            per_device_train_batch_size=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Tokens(),
        callbacks=[TensorCasCallback(every_n_steps=2, run_id=run_id)],
    )
    trainer.train()
    reached = gathered(dict(trainer.model.state_dict()))
    if rank == 0:
        assert [record.step for record in tensorcas.list_checkpoints(run_id)] == [2, 4]
        loaded = tensorcas.load_checkpoint(run_id)
        assert same(dict(loaded["model"]), reached)
        assert len(loaded["rng_of_ranks"]) == dist.get_world_size()
        torch.save(reached, Path(folder, "reached.pt"))


def resume_accelerate(rank: int, tracking: str, folder: str, resume: str) -> None:
    """Load a folder with Accelerate's own loaders of ``SHARDED_STATE_DICT``."""
    _launched(rank)
    model = make_model()
    for parameter in model.parameters():
        parameter.data.zero_()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    load_fsdp_model(plugin, accelerator, model, resume)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, resume)
    wanted = torch.load(Path(folder, "reached.pt"), weights_only=False)
    found, moments = get_state_dict(model, optimizer)
    assert same(gathered(dict(found)), wanted)
    assert float(moments["state"]["transformer.wte.weight"]["step"]) == 4
