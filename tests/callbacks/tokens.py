"""A Trainer of the real library, with a tiny model that nobody downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """16 rows of 8 tokens, to be predicted from those before."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def make_model() -> Any:
    """GPT-2 with dropout, so that every step draws random numbers, and with tied embeddings."""
    transformers.set_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=32)
    )


def make_trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A Trainer for two epochs of four steps, unless told otherwise."""
    defaults = {
        "output_dir": str(folder / "out"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.Trainer(
        model=make_model(),
        args=transformers.TrainingArguments(**{**defaults, **options}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=list(callbacks),
    )
