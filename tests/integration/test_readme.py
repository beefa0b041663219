"""The README's code runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch

PAGE = Path(__file__).parents[2] / "README.md"


def test_examples_of_the_readme_run(plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    names = {
        "mlflow": mlflow,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "train": lambda model: [parameter.data.add_(1) for parameter in model.parameters()],
        "X": np.ones((3, 4), dtype=np.float32),
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in blocks:
        exec(block.replace("/absolute/path/to/artifacts", f"{tmp_path}/more"), names)

    assert len(blocks) == 4
    assert mlflow.get_experiment_by_name("digits").artifact_location == f"tensorcas://{tmp_path}/more"
    assert names["store"].list_checkpoints() == [1]  # type: ignore[attr-defined]
