"""Live states, with modules and optimizers, as the plain ones that PyTorch's planners take, and filled from them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from tensorcas_mlflow.adapter import adapter_named
from tensorcas_mlflow.errors import AdapterError

FLAVOR = "pytorch"
"""Name of the adapter of saved states."""


def modules_of(state: Any) -> list[torch.nn.Module]:
    """Return the modules of a nested state."""
    if isinstance(state, torch.nn.Module):
        return [state]
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return [module for part in parts for module in modules_of(part)]


def plain_state(value: Any, modules: Sequence[torch.nn.Module]) -> Any:
    """Return a state with state dicts for its modules, optimizers, schedulers and the like."""
    if isinstance(value, torch.nn.Module):
        return get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer):
        return _named_optimizer(value, _parameter_names(value, modules))
    if isinstance(value, Mapping):
        return {key: plain_state(each, modules) for key, each in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and _is_live(value)):
        return [plain_state(each, modules) for each in value]
    return value.state_dict() if isinstance(value, Stateful) else value


def _is_live(value: Any) -> bool:
    """Tell whether a value holds tensors: PyTorch's planners look for them in dicts and lists, and not in tuples."""
    if isinstance(value, Mapping):
        return any(_is_live(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_is_live(each) for each in value)
    return isinstance(value, torch.Tensor | Stateful)


def _parameter_names(optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of an optimizer's parameters in their module, in the order of the optimizer's numbers.

    Raises:
        AdapterError: It has a format of its own, or no module of the state has its parameters.
    """
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise AdapterError(
            FLAVOR,
            f"a {type(optimizer).__qualname__} has a state_dict() of its own, and many ranks save the entries of an "
            "optimizer by the names of its parameters: log the optimizer that it wraps, and its own values beside it",
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for module in modules:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        names = {id(parameter): plain_name(name) for name, parameter in inner.named_parameters()}
        if all(id(parameter) in names for parameter in parameters):
            return [names[id(parameter)] for parameter in parameters]
    raise AdapterError(
        FLAVOR,
        f"the parameters of a {type(optimizer).__qualname__} are not those of one module of the state, so its entries "
        "have no names: log the module beside it, as in {'model': model, 'optimizer': optimizer}; for a module of "
        "FullyShardedDataParallel, log the results of torch.distributed.checkpoint.state_dict.get_state_dict",
    )


def plain_name(name: str) -> str:
    """Return the name of a parameter without the names of wrappers of PyTorch."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def _named_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state dict with names in place of its numbers."""
    numbered = optimizer.state_dict()
    return {
        "state": {names[number]: entry for number, entry in numbered["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
        ],
    }


class Filling:
    """One load into a live state: the plain state to fill, and afterwards its way into the live one."""

    def __init__(self, modules: Sequence[torch.nn.Module], *, strict: bool) -> None:
        self._modules = modules
        self._strict = strict
        self._wrong: list[str] = []

    def target(self, live: Any, stored: Any, path: str) -> Any:
        """Return what `dcp.load` is to fill for a live value.

        Args:
            live: The live value.
            stored: The facts of the stored values: nested as they are, with metadata for each.
            path: The value's path, for messages.
        """
        if isinstance(live, torch.nn.Module):
            return self._matched(get_model_state_dict(live), stored, path)
        if isinstance(live, torch.optim.Optimizer):
            return self._optimizer_target(live, stored, path)
        if isinstance(live, Mapping):
            return self._matched(live, stored, path)
        if isinstance(live, list | tuple):
            if not isinstance(stored, list) or len(stored) != len(live):
                return self._leaf(live, stored, path)
            return [
                self.target(each, known, f"{path}.{at}")
                for at, (each, known) in enumerate(zip(live, stored, strict=True))
            ]
        if isinstance(live, Stateful):
            return self._anew(stored)
        return self._leaf(live, stored, path)

    def _matched(self, live: Mapping[Any, Any], stored: Any, path: str) -> dict[str, Any]:
        known = stored if isinstance(stored, Mapping) else {}
        if stored is not None and not isinstance(stored, Mapping):
            self._wrong.append(f"{path or 'the state'} is a single value in the checkpoint")
        by_text = {str(key): value for key, value in live.items()}
        missing = [key for key, value in by_text.items() if key not in known and not _is_empty(value)]
        if self._strict:
            self._wrong += [f"{_joined(path, key)} is not in the checkpoint" for key in missing]
            self._wrong += [f"{_joined(path, key)} is only in the checkpoint" for key in known if key not in by_text]
        return {
            key: self.target(value, known[key], _joined(path, key)) for key, value in by_text.items() if key in known
        }

    def _leaf(self, live: Any, stored: Any, path: str) -> Any:
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if isinstance(live, torch.Tensor) != is_tensor or isinstance(stored, Mapping | list):
            self._wrong.append(f"{path} is {_kind(stored)} in the checkpoint, and a {type(live).__qualname__} here")
        elif isinstance(stored, TensorStorageMetadata) and (stored.size, stored.properties.dtype) != (
            live.shape,
            live.dtype,
        ):
            self._wrong.append(
                f"{path} has the shape {list(stored.size)} and the dtype {stored.properties.dtype} in the checkpoint, "
                f"and {list(live.shape)} and {live.dtype} here"
            )
        return live

    def _anew(self, stored: Any, like: torch.Tensor | None = None) -> Any:
        """Return new memory for stored values; tensors of the shape of a parameter are spread as it is."""
        if isinstance(stored, Mapping):
            return {key: self._anew(each, like) for key, each in stored.items()}
        if isinstance(stored, list):
            return [self._anew(each, like) for each in stored]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if like is not None and stored.size == like.shape:
            return torch.zeros_like(like, dtype=stored.properties.dtype, requires_grad=False)
        return torch.zeros(stored.size, dtype=stored.properties.dtype)

    def _optimizer_target(self, live: torch.optim.Optimizer, stored: Any, path: str) -> dict[str, Any]:
        parameters = [parameter for group in live.param_groups for parameter in group["params"]]
        by_name = dict(zip(_parameter_names(live, self._modules), parameters, strict=True))
        entries = stored.get("state", {}) if isinstance(stored, Mapping) else {}
        unknown = [name for name in entries if name not in by_name]
        if not isinstance(stored, Mapping) or "param_groups" not in stored:
            self._wrong.append(f"{path} is no optimizer in the checkpoint")
        if unknown:
            self._wrong.append(f"{path}.state.{unknown[0]} belongs to no parameter of the optimizer")
        if self._wrong:
            return {}
        state = {name: self._anew(entry, by_name[name].detach()) for name, entry in entries.items()}
        return {"state": state, "param_groups": self._anew(stored["param_groups"])}

    def check(self) -> None:
        """Refuse a state that does not fit.

        Raises:
            AdapterError: It does not.
        """
        if self._wrong:
            more = f"; and {len(self._wrong) - 10} more" if len(self._wrong) > 10 else ""
            raise AdapterError(FLAVOR, "the checkpoint does not fit: " + "; ".join(self._wrong[:10]) + more)

    def finish(self, live: Any, filled: Any) -> Any:
        """Return a live value after `dcp.load`: itself, filled, or what replaces it."""
        if isinstance(live, torch.nn.Module):
            set_model_state_dict(live, filled, options=StateDictOptions(strict=self._strict))
            return live
        if isinstance(live, torch.optim.Optimizer):
            adapter: Any = adapter_named(FLAVOR)
            adapter.load_optimizer(live, filled, _parameter_names(live, self._modules))
            return live
        if isinstance(live, MutableMapping):
            for key, value in live.items():
                if str(key) in filled:
                    live[key] = self.finish(value, filled[str(key)])
            return live
        if isinstance(live, list | tuple) and isinstance(filled, list) and len(filled) == len(live):
            done = [self.finish(value, new) for value, new in zip(live, filled, strict=True)]
            if isinstance(live, list):
                live[:] = done
                return live
            return type(live)(done) if type(live) is tuple else type(live)(*done)
        if isinstance(live, Stateful):
            live.load_state_dict(filled)
            return live
        return filled


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_empty(value: Any) -> bool:
    """Tell whether a value has no entry in a checkpoint: PyTorch's planners leave out empty dicts."""
    return isinstance(value, Mapping) and all(_is_empty(each) for each in value.values())


def _kind(stored: Any) -> str:
    if isinstance(stored, TensorStorageMetadata):
        return "a tensor"
    return "a dict" if isinstance(stored, Mapping) else "a list" if isinstance(stored, list) else "another value"
