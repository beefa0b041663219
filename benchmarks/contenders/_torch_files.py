"""`torch.save`, and common ways to make its files smaller."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import zstandard

from benchmarks.contenders._contender import Contender
from benchmarks.data import Case

_FILE = "model.pt"


class TorchFile(Contender):
    """`torch.save` of a state dict; loaded with `weights_only`, mapped or not."""

    def __init__(self, *, is_mapped: bool = False) -> None:
        self._is_mapped = is_mapped
        self.name = "torch.load mmap" if is_mapped else "torch.save"

    def save(self, case: Case, folder: Path) -> None:
        torch.save(case.tensors, folder / _FILE)

    def load(self, folder: Path) -> Mapping[str, Any]:
        loaded: Mapping[str, Any] = torch.load(folder / _FILE, weights_only=True, mmap=self._is_mapped)
        return loaded


class ZstdTorchFile(Contender):
    """`torch.save`, the file then compressed by zstd at level 3."""

    name = "torch.save + zstd-3"

    def save(self, case: Case, folder: Path) -> None:
        plain = folder / _FILE
        torch.save(case.tensors, plain)
        with open(plain, "rb") as source, open(folder / f"{_FILE}.zst", "wb") as out:
            zstandard.ZstdCompressor(level=3).copy_stream(source, out, size=plain.stat().st_size)
        plain.unlink()

    def load(self, folder: Path) -> Mapping[str, Any]:
        with open(folder / f"{_FILE}.zst", "rb") as source:
            plain = io.BytesIO()
            zstandard.ZstdDecompressor().copy_stream(source, plain)
        plain.seek(0)
        loaded: Mapping[str, Any] = torch.load(plain, weights_only=True)
        return loaded
