"""One model in the usual forms: as arrays of numpy, and as tensors of torch on the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]
Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype's name and shape of each tensor, by name."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Case:
    """A named model."""

    name: str
    arrays: dict[str, Array]
    """C-contiguous and writable."""
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Objects made from the arrays: users have tensors and modules, and do not make them for a save."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The same memory, as tensors of torch; made once."""
        if "tensors" not in self._made:
            self._made["tensors"] = {name: _as_torch(array) for name, array in self.arrays.items()}
        tensors: dict[str, torch.Tensor] = self._made["tensors"]
        return tensors

    @property
    def module(self) -> torch.nn.Module:
        """Return the same memory as a module, with the tensors' names in its state dict; made once."""
        if "module" not in self._made:
            self._made["module"] = _as_module(self.tensors)
        module: torch.nn.Module = self._made["module"]
        return module

    def ready(self) -> Case:
        """Make the tensors and the module now, outside of any timing; return the model itself."""
        self.module  # noqa: B018 - made once
        return self

    def like(self) -> Case:
        """Make a model of the same names, dtypes and shapes, in memory already touched, to load into."""
        return Case.of_specs(self.name, self.specs).ready()

    def only(self, names: Iterable[str]) -> Case:
        """The model with some of its tensors, on the same memory."""
        return Case(self.name, {name: self.arrays[name] for name in names})

    @property
    def specs(self) -> Specs:
        """Return the arguments for `of_specs` to make a similar one: small, and picklable."""
        return {name: (array.dtype.name, array.shape) for name, array in self.arrays.items()}

    @classmethod
    def of_specs(cls, name: str, specs: Specs) -> Case:
        """Make a model of given names, dtypes and shapes, full of sevens: memory never touched fills slowly."""
        arrays: dict[str, Array] = {}
        for tensor, (dtype, shape) in specs.items():
            arrays[tensor] = np.empty(shape, _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
            bytes_of(arrays[tensor]).fill(7)
        return cls(name, arrays)

    @classmethod
    def of_tensors(cls, name: str, tensors: Mapping[str, torch.Tensor]) -> Case:
        """Copy tensors of torch, possibly views of a mapped file."""
        dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in tensors.items()}
        copies = cls.of_specs(name, {key: (dtypes[key], tuple(tensor.shape)) for key, tensor in tensors.items()})
        for key, array in copies.arrays.items():
            np.copyto(bytes_of(array), bytes_of(tensors[key]))
        return copies

    def changed(self, percent: float, seed: int) -> Case:
        """Train the last tensors a little further, as in a fine-tune of the last layers; the others are the same.

        Each of their weights moves by about a hundredth of its own size.

        Args:
            percent: Of all bytes, at least; whole tensors change.
            seed: Another seed gives other bytes.
        """
        draw = np.random.default_rng(seed)
        arrays = dict(self.arrays)
        n_left = self.n_bytes * percent / 100
        for name, array in reversed(self.arrays.items()):
            if n_left <= 0:
                break
            arrays[name] = np.asarray(array * (1 + 0.01 * draw.standard_normal(array.shape, np.float32)), array.dtype)
            n_left -= array.nbytes
        return Case(f"{self.name}, {percent:g} % changed", arrays)


def bytes_of(value: Any) -> Array:
    """View an array or tensor as bytes, 1-d; copy it if not contiguous."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def same_bytes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two models hold the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(bytes_of(value), bytes_of(other[name])) for name, value in one.items()
    )


def _as_torch(array: Array) -> torch.Tensor:
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_module(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        inner = module
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        if tensor.is_floating_point():
            inner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
        else:
            inner.register_buffer(last, tensor)
    return module
