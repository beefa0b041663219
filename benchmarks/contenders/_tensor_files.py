"""safetensors, and bintensors with the same interface."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.contenders._contender import Contender, module_missing
from benchmarks.data import Case


class SafetensorsFile(Contender):
    """One file of safetensors; loaded as views of the mapped file with torch, as arrays in memory with numpy."""

    package = "safetensors"
    suffix = "safetensors"

    def __init__(self, *, kind: Literal["torch", "numpy"] = "torch") -> None:
        self._kind = kind
        self.is_baseline = self.package == "safetensors" and kind == "torch"
        self.name = self.package if kind == "torch" else f"{self.package} ({kind})"

    @property
    def missing(self) -> str | None:
        return module_missing(self.package)

    def save(self, case: Case, folder: Path) -> None:
        self._functions.save_file(case.tensors if self._kind == "torch" else case.arrays, self._file(folder))

    def load(self, folder: Path) -> Mapping[str, Any]:
        loaded: Mapping[str, Any] = self._functions.load_file(self._file(folder))
        return loaded

    def read_one(self, folder: Path, name: str) -> Any:
        if self._kind == "numpy":
            with importlib.import_module(self.package).safe_open(self._file(folder), "np") as file:
                return file.get_tensor(name)  # an array of its own
        with importlib.import_module(self.package).safe_open(self._file(folder), "pt") as file:
            return file.get_tensor(name).clone()

    def find(self, folder: Path, name: str) -> tuple[int, ...]:
        with importlib.import_module(self.package).safe_open(self._file(folder), "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    @property
    def _functions(self) -> Any:
        return importlib.import_module(f"{self.package}.{self._kind}")

    def _file(self, folder: Path) -> str:
        return str(folder / f"model.{self.suffix}")


class BintensorsFile(SafetensorsFile):
    """One file of bintensors."""

    package = "bintensors"
    suffix = "bt"
