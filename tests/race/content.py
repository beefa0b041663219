"""Data of racers: arrays and files whose content alone shows whether they are whole."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

N_TENSORS = 24
TENSOR_BYTES = 6_000
SKELETON = "__skeleton__"

Array = np.ndarray[Any, np.dtype[Any]]


@cache
def tensor(number: int) -> Array:
    """The array of a number: two chunks of a store with small chunks."""
    return np.random.default_rng(number).integers(0, 256, TENSOR_BYTES, dtype=np.uint8)


def model(numbers: Iterable[int]) -> dict[str, Array]:
    return {f"t{number}": tensor(number) for number in numbers}


@cache
def _by_bytes() -> dict[bytes, int]:
    return {tensor(number).tobytes(): number for number in range(N_TENSORS)}


def numbers_in(tensors: Mapping[str, Array]) -> list[int]:
    """Say which arrays a checkpoint holds, whatever took it apart.

    Raises:
        KeyError: One is none of them.
    """
    return sorted(_by_bytes()[array.tobytes()] for name, array in tensors.items() if name != SKELETON)


def make_files(folder: Path, *, with_torch: bool) -> None:
    """Write the files that racers upload, which share their tensors with checkpoints and each other."""
    folder.mkdir()
    for number in range(0, N_TENSORS, 3):
        arrays = {"a": tensor(number), "b": tensor((number + 1) % N_TENSORS)}
        held = io.BytesIO()
        np.savez(held, **arrays)
        (folder / f"{number}.npz").write_bytes(held.getvalue())
        (folder / f"{number}.bin").write_bytes(arrays["a"].tobytes() * 3)
        (folder / f"{number}.txt").write_text(f"text {number}\n" * 20)
        if with_torch:
            import safetensors.numpy
            import torch

            (folder / f"{number}.safetensors").write_bytes(safetensors.numpy.save(arrays))
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / f"{number}.pt")
