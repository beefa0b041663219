"""Skeletons of modules that are saved again: between the steps of a training, only the values of tensors change.

A skeleton is kept by everything it depends on, so it is reused only if all of that is the same. Only plain modules have
a key: no hooks, no attributes but numbers and texts, no memory shared between tensors, no code of their own for
pickling. All others are extracted in full.
"""

from __future__ import annotations

import copyreg
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from tensorcas_flavors.pytorch._objects import is_importable, unwrap
from tensorcas_flavors.pytorch._tensors import Geometry, as_array, geometry, refusal
from tensorcas_mlflow.adapter import SKELETON, Array

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from tensorcas_flavors.pytorch._layout import ModelRows

_OF_MODULE = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_modules",
    "__getattr__",
    "__getattribute__",
    "__getstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__reduce__",
    "__reduce_ex__",
)
"""Methods that decide what is stored; a class with its own is extracted in full."""
_ATOMS = frozenset([int, bool, str, type(None)])
_TEXT = frozenset([str])
_INT = frozenset([int])
_MOST_KEPT = 16
_kept: dict[Hashable, tuple[tuple[tuple[str, int], ...], Array]] = {}
"""Rows of a module, each with the number of its tensor, and the skeleton; by the module's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModule:
    """A module whose skeleton depends on nothing but its key."""

    key: Hashable
    tensors: list[torch.Tensor]
    """Its parameters and buffers, in the order of the key."""

    @classmethod
    def of(cls, model: Any) -> PlainModule | None:  # noqa: C901, PLR0912  # each warm step pays for its calls
        """Describe a module; return None for any other object, and for a module that is not plain."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(model, torch.nn.Module) or unwrap(model) is not model:
            return None
        # A library may change these methods for all modules.
        facts: list[Any] = [tuple([getattr(torch.nn.Module, name, None) for name in _OF_MODULE])]
        tensors: list[Any] = []
        kinds: set[type] = set()
        met: set[int] = set()
        mutable: list[int] = []
        left: list[Any] = [model]
        while left:
            module = left.pop()
            own = type(module)
            if id(module) in met or type(own) is not type or not issubclass(own, torch.nn.Module):
                return None
            version = module._version
            if type(version) is not int:
                return None
            met.add(id(module))
            kinds.add(own)
            fact: list[Any] = [(own, own.__module__, own.__name__, own.__qualname__, version)]
            # Loops run over copies: another thread may change the module meanwhile.
            for name, value in vars(module).copy().items():
                kind = type(value)
                fact += name, kind
                if kind in _ATOMS:
                    fact.append(value)
                elif kind is float and value == value:
                    fact.append(value.hex())
                elif kind is tuple and _INT.issuperset(map(type, value)):
                    fact.append(value)
                elif kind in (dict, set, OrderedDict) and _TEXT.issuperset(map(type, value)):
                    mutable.append(id(value))
                    if kind is dict:
                        value = value.copy()
                    fact.append(tuple(value))
                    if kind is dict and name == "_modules":
                        fact.append(tuple([part is None for part in value.values()]))
                        left += [part for part in reversed(value.values()) if part is not None]
                    elif kind is dict and name in ("_parameters", "_buffers"):
                        for tensor in value.values():
                            found = None if tensor is None else _facts(tensor, torch)
                            if tensor is not None and found is None:
                                return None
                            fact.append(found)
                            if tensor is not None:
                                tensors.append(tensor)
                    elif kind is not set and (value or getattr(value, "__dict__", None)):
                        return None
                else:
                    return None
            facts.append(tuple(fact))
        places = mutable + [tensor.untyped_storage()._cdata for tensor in tensors]
        if len(set(places)) < len(places):
            return None
        for own in kinds:
            if not _is_plain(own, torch.nn.Module):
                return None
        return cls(key=tuple(facts), tensors=tensors)

    def kept(self) -> dict[str, Array] | None:
        """Return the rows of the module with the kept skeleton; None if none is kept."""
        known = _kept.get(self.key)
        if known is None:
            return None
        rows, skeleton = known
        arrays = {name: as_array(self.tensors[number]) for name, number in rows}
        arrays[SKELETON] = skeleton
        return arrays

    def keep(self, model: Any, rows: ModelRows, skeleton: Array) -> None:
        """Keep the skeleton of the module, unless a row of it is no tensor of the module.

        Args:
            model: The module.
            rows: Its rows.
            skeleton: Its skeleton.
        """
        numbers: dict[Geometry | None, int] = {geometry(tensor): number for number, tensor in enumerate(self.tensors)}
        found = [(name, numbers.get(rows.place_of(name))) for name in rows.arrays]
        named = tuple([(name, number) for name, number in found if number is not None])
        if len(named) < len(found) or len(found) != len(self.tensors):
            return
        # Another thread may have changed the module meanwhile.
        again = PlainModule.of(model)
        if again is not None and again.key == self.key:
            if len(_kept) >= _MOST_KEPT:
                _kept.clear()
            _kept[self.key] = named, skeleton


def _facts(tensor: torch.Tensor, torch: Any) -> Any:
    """Return everything but values that matters of a tensor; None if it is not plain."""
    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter) or vars(tensor) or refusal(tensor) is not None:
        return None
    return kind, geometry(tensor)[1:], tensor.untyped_storage().nbytes(), tensor.requires_grad


def _is_plain(kind: Any, module: Any) -> bool:
    for name in _OF_MODULE:
        if getattr(kind, name, None) is not getattr(module, name, None):
            return False
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            return False
    has_reducer = kind in copyreg.dispatch_table or kind in cloudpickle.CloudPickler._dispatch_table
    return not has_reducer and is_importable(kind)
