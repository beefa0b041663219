"""Tensors that share memory: which of them lie in one storage, and how they are laid there again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from tensorcas_flavors._torch_tensors import Geometry, extent_bytes, lent, raw_view, row_major
from tensorcas_mlflow.adapter import Array

if TYPE_CHECKING:
    import torch


_Name = TypeVar("_Name", str, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor lies in a storage that it shares, or in which it leaves gaps or is out of order."""

    name: str
    """Name of the tensor's row, which says dtype and shape."""
    offset: int
    """Byte at which its first element starts; a multiple of the element size."""
    stride: tuple[int, ...]
    """Elements from one index to the next, per axis; 0 repeats."""

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.stride)
        if type(self.name) is not str or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise ValueError(f"not a place in a storage: {self.name!r}, offset={self.offset}, stride={self.stride}")


class Stretch(Protocol):
    """Some memory."""

    @property
    def start(self) -> int:
        """First byte."""

    @property
    def stop(self) -> int:
        """One past the last byte."""


def shared_storages(places: Mapping[str, Geometry]) -> tuple[tuple[Place, ...], ...]:
    """Group tensors whose memory overlaps; one that overlaps no other and is in row-major order is left out."""
    in_storage: dict[int, list[str]] = {}
    for name, place in places.items():
        in_storage.setdefault(place.storage, []).append(name)
    groups: list[list[str]] = []
    for names in in_storage.values():
        if len(names) == 1:
            place = places[names[0]]
            if place.stride != row_major(place.shape):
                groups.append(names)
            continue
        groups += overlapping(names, places)
    # In the order of the tensors, not of their addresses, so that equal models have equal layouts.
    number = {name: n for n, name in enumerate(places)} if groups else {}
    groups = [sorted(group, key=number.__getitem__) for group in groups]
    return tuple(
        _in_one_storage(group, places)
        for group in sorted(groups, key=lambda group: number[group[0]])
        if len(group) > 1 or places[group[0]].stride != row_major(places[group[0]].shape)
    )


def share(
    rows: Mapping[str, Array], places: Sequence[Place], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Lay rows into one storage: the memory of a row that spans all of it, or else new memory.

    Args:
        rows: The rows by name.
        places: Where each of them lies.
        dtypes: The dtypes of their tensors.

    Raises:
        ValueError: The places do not fit the rows. Also TypeError, OverflowError, MemoryError and RuntimeError, as
            numpy and torch raise them.
    """
    import torch

    n_bytes = 0
    for place in places:
        row = rows[place.name]
        if len(place.stride) != row.ndim or place.offset % row.itemsize:
            raise ValueError(f"{place.name!r} has shape {row.shape}, offset {place.offset}, strides {place.stride}")
        if not row.dtype.isnative:
            raise ValueError(f"{place.name!r} has the dtype {row.dtype}, which no tensor has")
        n_bytes = max(n_bytes, place.offset + extent_bytes(row.shape, place.stride, row.itemsize))
    spanning = [p for p in places if rows[p.name].nbytes == n_bytes and _in_order(rows[p.name].shape, p.stride)]
    whole = rows[spanning[0].name].reshape(-1).view(np.uint8) if spanning else np.zeros(n_bytes, dtype=np.uint8)
    memory = lent(whole)
    storage = torch.from_numpy(memory).untyped_storage()
    tensors = {}
    for place in places:
        row = rows[place.name]
        words = raw_view(row)
        strides = [step * row.itemsize for step in place.stride]
        view: Array = np.ndarray(row.shape, words, memory, place.offset, strides)  # refuses to leave the memory
        if not spanning:
            view[...] = row.view(words)
        empty = torch.empty(0, dtype=dtypes[place.name], device="cpu")
        tensors[place.name] = empty.set_(storage, place.offset // row.itemsize, row.shape, place.stride)
    return tensors


def overlapping(names: Sequence[_Name], places: Mapping[_Name, Stretch]) -> list[list[_Name]]:
    """Group what overlaps, each group in the order of where they start; what overlaps nothing is a group of its own."""
    groups: list[list[_Name]] = []
    end = -1
    for start, stop, name in sorted((places[name].start, places[name].stop, name) for name in names):
        if start >= end:
            groups.append([])
        groups[-1].append(name)
        end = max(end, stop)
    return groups


def _in_one_storage(group: Sequence[str], places: Mapping[str, Geometry]) -> tuple[Place, ...]:
    # Every start is a multiple of its own element size; so is its distance to a multiple of the largest.
    largest = max(places[name].dtype.itemsize for name in group)
    first = min(places[name].start for name in group)
    base = first - first % largest
    return tuple(
        Place(name=name, offset=places[name].start - base, stride=tuple(places[name].stride)) for name in group
    )


def _in_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return all(n == 1 or step == wanted for n, step, wanted in zip(shape, stride, row_major(shape), strict=True))
