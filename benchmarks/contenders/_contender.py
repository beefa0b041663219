"""Interface common to all contenders."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.data import Case, bytes_of
from benchmarks.harness import Options, Section, sync

MANY_BYTES = 1 << 20
"""Smallest size to copy with torch's threads; for less, waking them takes longer than copying."""

C = TypeVar("C", bound="Contender")


class Contender(ABC):
    """One way to keep a model in a folder. Without state, and picklable, so a fresh process can get it."""

    name: str
    """Name in tables."""
    is_baseline: bool = False
    """True if others are compared with it, so it cannot be omitted."""

    @property
    def missing(self) -> str | None:
        """Return the reason it cannot take part here; None if it can."""
        return None

    def prepare(self, folder: Path) -> None:  # noqa: B027  # most need nothing
        """Prepare a place once, before the first model is saved to it."""

    @abstractmethod
    def save(self, case: Case, folder: Path) -> None:
        """Save a model into a folder of its own."""

    @abstractmethod
    def load(self, folder: Path) -> Mapping[str, Any]:
        """Load all tensors in this contender's best way: read-only views of a mapped file are welcome."""

    def load_into(self, folder: Path, out: Case) -> None:
        """Load into the memory of an existing model, as `load_state_dict` does: load, then copy."""
        loaded, arrays, tensors = self.load(folder), out.arrays, out.tensors
        for name, value in loaded.items():
            if isinstance(value, torch.Tensor) and value.nbytes > MANY_BYTES:
                tensors[name].copy_(value)
            else:
                np.copyto(bytes_of(arrays[name]), bytes_of(value))

    def read_one(self, folder: Path, name: str) -> Any:
        """Read one tensor into memory of its own."""
        return np.array(bytes_of(self.load(folder)[name]))

    def find(self, folder: Path, name: str) -> tuple[int, ...]:
        """Open a saved model and return the shape of one tensor, reading as little as the format allows."""
        return tuple(self.load(folder)[name].shape)


class Durable(Contender):
    """Another contender, with its files and folder synced to disk when a save returns, as ours always are."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self.name = f"{contender.name} + fsync"
        self.is_baseline = contender.is_baseline

    @property
    def missing(self) -> str | None:
        return self._contender.missing

    def prepare(self, folder: Path) -> None:
        self._contender.prepare(folder)

    def save(self, case: Case, folder: Path) -> None:
        self._contender.save(case, folder)
        for path in (*(path for path in folder.rglob("*") if path.is_file()), folder):
            sync(path)

    def load(self, folder: Path) -> Mapping[str, Any]:
        return self._contender.load(folder)

    def load_into(self, folder: Path, out: Case) -> None:
        self._contender.load_into(folder, out)

    def read_one(self, folder: Path, name: str) -> Any:
        return self._contender.read_one(folder, name)

    def find(self, folder: Path, name: str) -> tuple[int, ...]:
        return self._contender.find(folder, name)


def module_missing(module: str) -> str | None:
    """Return a reason if a module is not installed; None if it is."""
    return None if importlib.util.find_spec(module) else f"`{module}` is not installed (the extra `bench` has it)"


def chosen(contenders: Iterable[C], options: Options, section: Section) -> list[C]:
    """Return the available contenders selected on the command line, and the baselines.

    For each unavailable one a note gives the reason.
    """
    present = []
    for contender in contenders:
        if not (contender.is_baseline or options.wants(contender.name)):
            continue
        if contender.missing is None:
            present.append(contender)
        else:
            section.note(f"left out: {contender.name}, {contender.missing}")
    return present


def save_all(case: Case, contenders: Iterable[Contender], scratch: Path) -> dict[str, Path]:
    """Save a model by each contender into a folder of its own, and return these by the contenders' names."""
    places = {}
    for number, contender in enumerate(contenders):
        place = places[contender.name] = scratch / str(number)
        place.mkdir()
        contender.prepare(place)
        contender.save(case, place)
    return places
