"""The rows of one extract: names for tensors and arrays, each the same however often its tensor is met."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tensorcas_flavors._torch_storages import Place, shared_storages
from tensorcas_flavors._torch_tensors import (
    ROW_DTYPES,
    Geometry,
    as_array,
    dtype_name,
    geometry,
    memory_refusal,
    pytorch_error,
    refusal,
)
from tensorcas_mlflow.adapter import SKELETON, Array

if TYPE_CHECKING:
    import torch

ELSEWHERE = "__tensor__/"
"""Starts the row names of tensors that are in an object graph but in no state dict, and of others with a taken name."""

ARRAY = "array"
"""Kind of a row that is a numpy array."""
NUMBERS = "numbers"
"""Kind of a row that is a long list of numbers."""

_MAX_NAME_CHARS = 1000  # 4,000 bytes of UTF-8, and a store takes 4,096
_NOT_IN_NAMES = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


class Rows:
    """The rows of one extract and the tensors they are of."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.kinds: dict[str, str] = {}
        """What a row is if not a tensor of the row's own dtype: another dtype, `ARRAY` or `NUMBERS`."""
        self._places: dict[str, Geometry] = {}
        self._names: dict[Geometry, str] = {}
        self._tensors: list[torch.Tensor] = []  # keeps their memory, so that no address is met twice

    def find(self, tensor: torch.Tensor) -> str | None:
        """Return the first name of a tensor with the same elements in the same memory, if it is one that has rows."""
        return None if refusal(tensor) else self._names.get(geometry(tensor))

    def add(self, path: str, tensor: torch.Tensor) -> str:
        """Make a row for a tensor, unless it has one of that name, and return its name.

        Raises:
            AdapterError: The tensor has no exact array.
        """
        reason = refusal(tensor)
        if reason is None:
            place = geometry(tensor)
            first = self._names.get(place)
            if first is None:
                reason = memory_refusal(tensor, place)
        if reason is not None:
            raise pytorch_error(f"tensor {path!r} {reason}")
        name = path if path.isprintable() and 0 < len(path) <= _MAX_NAME_CHARS else _clean(path)
        while name in self.arrays or name == SKELETON:
            if self._places.get(name) == place:
                return name
            name = ELSEWHERE + name
        if first is None:
            self._names[place] = name
            self.arrays[name] = as_array(tensor)
            self._tensors.append(tensor)
        else:
            self.arrays[name] = self.arrays[first]
        self._places[name] = place
        dtype = dtype_name(tensor)
        if dtype not in ROW_DTYPES:
            self.kinds[name] = dtype
        return name

    def add_array(self, path: str, array: Array, kind: str) -> str:
        """Make a row of an array and return its name."""
        name = _clean(path)
        while name in self.arrays or name == SKELETON:
            name = ELSEWHERE + name
        self.arrays[name] = array
        self.kinds[name] = kind
        return name

    def storages(self) -> tuple[tuple[Place, ...], ...]:
        """Say which rows share memory, or lie in it in another than row-major order."""
        return shared_storages(self._places)


def _clean(path: str) -> str:
    """Return the path as a row can be called: printable, neither empty nor long."""
    name = _NOT_IN_NAMES.sub(lambda match: f"%{ord(match[0]):02X}", path)
    return name[:_MAX_NAME_CHARS] or "%"
