"""Cost of a checkpoint of an unchanged state, against hashing its bytes and one small durable write.

Run it with ``make bench-checkpoint``, or ``python -m benchmarks.checkpoint_time``, on an otherwise idle machine.
Everything is measured in one process and in turns, so a disturbance slows all alike; the medians are printed.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3
import mlflow
import torch

N_ROUNDS = 200
SHAPES = {"330 KB MLP": (256, 256, 64), "12 MB MLP": (1024, 1024, 1024, 1024)}


def make_mlp(sizes: tuple[int, ...]) -> torch.nn.Module:
    """Make a chain of linear layers."""
    return torch.nn.Sequential(*[torch.nn.Linear(n, m) for n, m in itertools.pairwise(sizes)])


def write_durably(folder: Path, step: int) -> None:
    """Write a small file as durably as a commit."""
    descriptor = os.open(folder / "staging", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"x" * 400)
    os.fsync(descriptor)
    os.close(descriptor)
    os.rename(folder / "staging", folder / str(step))
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def timed(call: Callable[[], Any]) -> float:
    """Measure one call in milliseconds."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1000


def measure(state: Any, model: torch.nn.Module, folder: Path) -> tuple[float, float, float]:
    """Log one state repeatedly; report the first time apart.

    Returns:
        Return medians in milliseconds: hashing every tensor, the durable write, `log_checkpoint`.
    """
    arrays = [tensor.detach().numpy().reshape(-1).view("u1").data for tensor in model.state_dict().values()]
    folder.mkdir()
    samples: list[tuple[float, float, float]] = []
    mlflow.tensorcas.log_checkpoint(state, step=0, log_metrics=False)
    for step in range(1, N_ROUNDS):
        samples.append(
            (
                timed(lambda: [blake3.blake3(array).digest() for array in arrays]),
                timed(lambda step=step: write_durably(folder, step)),
                timed(lambda step=step: mlflow.tensorcas.log_checkpoint(state, step=step, log_metrics=False)),
            )
        )
    hashing, writing, logging = (statistics.median(column) for column in zip(*samples, strict=True))
    return hashing, writing, logging


def main() -> None:
    """Print a table of all cases."""
    with tempfile.TemporaryDirectory() as scratch:
        mlflow.set_tracking_uri(f"sqlite:///{scratch}/mlflow.db")
        print(f"{'':34} {'hash':>7} {'write':>7} {'log':>7} {'log - floor':>12} {'log / floor':>12}   (ms, medians)")
        for location in (f"{scratch}/plain", f"tensorcas://{scratch}/ours"):
            experiment_id = mlflow.create_experiment(location, artifact_location=location)
            for name, sizes in SHAPES.items():
                model = make_mlp(sizes)
                for kind, state in (("module", model), ("state dict", model.state_dict())):
                    with mlflow.start_run(experiment_id=experiment_id) as run:
                        hashing, writing, logging = measure(state, model, Path(scratch, run.info.run_id))
                    floor = hashing + writing
                    place = "tensorcas:" if location.startswith("tensorcas:") else "plain"
                    print(
                        f"{place:10} {name:10} {kind:12} {hashing:7.2f} {writing:7.2f} {logging:7.2f} "
                        f"{logging - floor:12.2f} {logging / floor:12.2f}"
                    )


if __name__ == "__main__":
    main()
