"""What histories of growing models take, every byte of the store counted, against the files they would have been.

Run it with ``make bench-histories``, or ``python -m benchmarks.histories``. Every step is loaded back and compared.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xgboost
from sklearn.datasets import make_regression
from sklearn.ensemble import GradientBoostingRegressor

from tensorcas_mlflow import TensorCasStore

N_STEPS = 20
FEATURES, TARGET = make_regression(2000, 12, random_state=0)


def gradient_boosting() -> Iterator[GradientBoostingRegressor]:
    """Five trees a step, one hundred at the end."""
    model = GradientBoostingRegressor(n_estimators=5, max_depth=3, warm_start=True, random_state=0)
    for step in range(1, N_STEPS + 1):
        model.n_estimators = 5 * step
        yield model.fit(FEATURES, TARGET)


def boosters() -> Iterator[xgboost.Booster]:
    """Five rounds a step, one hundred at the end."""
    data = xgboost.DMatrix(FEATURES, TARGET)
    booster = None
    for _ in range(N_STEPS):
        booster = xgboost.train({"max_depth": 4}, data, 5, xgb_model=booster)
        yield booster


def frozen_backbone() -> Iterator[torch.nn.Module]:
    """A convolutional net of which only the head and the statistics of the batches change."""
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 128, 3),
        torch.nn.BatchNorm2d(128),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
    ).requires_grad_(False)
    model = torch.nn.Sequential(backbone, torch.nn.Linear(2048, 100))
    optimizer = torch.optim.Adam(model[1].parameters())
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 16, 16)).square().mean().backward()
        optimizer.step()
        yield model


def bytes_below(folder: Path) -> int:
    """Add up all files of a store."""
    return sum(path.stat().st_size for path in (folder / ".tensorcas").rglob("*") if path.is_file())


def changed_bytes(before: dict[str, bytes], after: dict[str, bytes]) -> int:
    """Add up the tensors that differ."""
    return sum(len(data) for name, data in after.items() if before.get(name) != data)


def tensors_of(model: torch.nn.Module) -> dict[str, bytes]:
    """Copy a module's tensors."""
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def run(models: Iterator[Any], as_file: Callable[[Any], Any], sizes: Callable[[list[Any]], int]) -> tuple[int, int]:
    """Save a history, load every step back, and count.

    Returns:
        What is counted of the models themselves, and the size of the store.
    """
    files: list[Any] = []
    with tempfile.TemporaryDirectory() as scratch:
        store = TensorCasStore(scratch, "run")
        for step, model in enumerate(models):
            store.save(model, step)
            files.append(as_file(model))
        for step, file in enumerate(files):
            assert as_file(store.load(step)) == file, f"step {step} came back otherwise"
        return sizes(files), bytes_below(Path(scratch))


def main() -> None:
    """Print a line for each history."""
    total: Callable[[list[bytes]], int] = lambda files: sum(map(len, files))  # noqa: E731
    changed: Callable[[list[dict[str, bytes]]], int] = lambda files: sum(  # noqa: E731
        changed_bytes(before, after) for before, after in itertools.pairwise([{}, *files])
    )
    cases: list[tuple[str, Iterator[Any], Callable[[Any], Any], Callable[[list[Any]], int]]] = [
        ("GradientBoostingRegressor, of its pickles", gradient_boosting(), pickle.dumps, total),
        ("XGBoost, of its UBJSON", boosters(), lambda booster: bytes(booster.save_raw("ubj")), total),
        ("frozen backbone, of the bytes that changed", frozen_backbone(), tensors_of, changed),
    ]
    for name, models, as_file, sizes in cases:
        plain, stored = run(models, as_file, sizes)
        print(f"{name:44} {plain:12,} B {stored:12,} B {100 * stored / plain:7.2f} %")


if __name__ == "__main__":
    main()
