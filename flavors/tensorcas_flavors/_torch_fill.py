"""Fills live objects with what was stored: first a plan, which finds what does not fit, then the filling."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors._generic_facts import plan_values
from tensorcas_flavors._torch_fill_module import ROOT, ModuleFilling, copy_into, is_expanded, loses, warn_of_rounding
from tensorcas_flavors._torch_pickle import attributes
from tensorcas_flavors._torch_read import Described, Opaque, find_opaque
from tensorcas_flavors._torch_tensors import dtype_name, pytorch_error
from tensorcas_flavors._torch_tree import facts_of_opaque, is_live, is_tensor, unwrap
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    import torch

_KEPT = (list, dict, OrderedDict, defaultdict, Counter, set)
_NOT_THERE = object()


def fill(original: Any, stored: Any, *, strict: bool, elsewhere: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Fill a live object in place.

    Args:
        original: A module, another object with ``load_state_dict``, or a nest of mappings and lists of such objects,
            tensors and plain values.
        stored: What `read_stored` returned; it is used up.
        strict: Whether all entries of ``original`` must be there; for a module, as in ``load_state_dict``. Entries of a
            stored mapping that ``original`` does not name are left out either way.
        elsewhere: Stored tensors that are attributes of modules and in no state dict, by their path.

    Returns:
        ``original``; if it is a tuple with plain values, a new one.

    Raises:
        AdapterError: They do not fit. What can be seen beforehand is seen before anything is filled.
    """
    if not is_live(unwrap(original)) and not isinstance(original, Mapping | list | tuple) and not is_tensor(original):
        raise pytorch_error(
            f"a {type(original).__name__} cannot be filled: give a module, another object with load_state_dict(), "
            "or a mapping or list of such"
        )
    plan = _Plan(strict=strict, elsewhere=elsewhere or {})
    try:
        filled = plan.part(original, stored, "")
    except RecursionError as error:
        raise pytorch_error("what is to be filled is nested too deep") from error
    plan.execute()
    return filled


class _Plan:
    """What is to be done to fill one object."""

    def __init__(self, *, strict: bool, elsewhere: Mapping[str, torch.Tensor]) -> None:
        self._strict = strict
        self._elsewhere = elsewhere
        self._steps: list[Callable[[], object]] = []
        self._rounded: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        self._alive: dict[int, bool] = {}

    def part(self, target: Any, stored: Any, path: str) -> Any:
        """Plan the filling of one part; return what stands in its place afterwards."""
        if (id(target), id(stored)) in self._seen:
            return target
        live = unwrap(target)
        if is_live(live):
            self._seen.add((id(target), id(stored)))
            self._live(live, stored, path)
            return target
        if is_tensor(target):
            self._tensor(target, stored, path)
            return target
        # What the caller gave is gone through entry by entry; a plain value inside is taken as a whole.
        if self._holds_life(target) or (not path and isinstance(target, Mapping | list | tuple)):
            self._seen.add((id(target), id(stored)))
            return (
                self._mapping(target, stored, path) if isinstance(target, Mapping) else self._list(target, stored, path)
            )
        return self._plain(target, stored, path)

    def execute(self) -> None:
        """Fill everything."""
        for step in self._steps:
            step()
        warn_of_rounding(self._rounded)

    def _live(self, target: Any, stored: Any, path: str) -> None:
        import torch

        state = stored.state if isinstance(stored, Described) else stored
        where = _where(path)
        if isinstance(state, Opaque) or (isinstance(target, torch.nn.Module) and not isinstance(state, Mapping)):
            raise pytorch_error(f"{where} is a {type(target).__name__}, and a {_kind(stored)} was stored there")
        if isinstance(target, torch.nn.Module):
            beside = stored.beside if isinstance(stored, Described) else {}
            filling = ModuleFilling(target, state, beside, where=where, strict=self._strict)
            self._rounded += [f"{path}.{text}" if path else text for text in filling.rounded]
            self._steps.append(filling.execute)
            for name, tensor in attributes(target, path) if self._elsewhere else ():
                if name in self._elsewhere:
                    self._tensor(tensor, self._elsewhere[name], name)
            return
        if isinstance(target, torch.optim.lr_scheduler.LRScheduler) and isinstance(state, dict):
            # It takes what it is given and keeps the rest.
            state = {key: value for key, value in state.items() if not isinstance(value, Opaque)}
        opaque = find_opaque(state)
        if isinstance(opaque, Opaque):
            raise pytorch_error(f"the state of {where} holds a {opaque.kind}, which only a pickle says: load a new one")
        if isinstance(target, torch.optim.Optimizer):
            self._check_groups(target, state, where)
        self._steps.append(lambda: _load_state(target, state, where))

    def _check_groups(self, optimizer: torch.optim.Optimizer, state: Any, where: str) -> None:
        try:
            stored = [len(group["params"]) for group in state["param_groups"]]
        except (KeyError, TypeError, IndexError) as error:
            raise pytorch_error(f"{where} is an optimizer, and no state of an optimizer was stored there") from error
        own = [len(group["params"]) for group in optimizer.param_groups]
        if len(own) != len(stored):
            raise pytorch_error(f"{where}: loaded state dict has a different number of parameter groups")
        if own != stored:
            raise pytorch_error(
                f"{where}: loaded state dict contains a parameter group that doesn't match the size of optimizer's "
                f"group: stored are {stored} parameters, and it has {own}"
            )

    def _tensor(self, target: torch.Tensor, stored: Any, path: str) -> None:
        where = _where(path)
        if not is_tensor(stored):
            raise pytorch_error(f"{where} is a tensor, and a {_kind(stored)} was stored there")
        if target.shape != stored.shape:
            raise pytorch_error(
                f"{where} was stored as {dtype_name(stored)} {tuple(stored.shape)} and does not fit a tensor of "
                f"{dtype_name(target)} {tuple(target.shape)}"
            )
        if is_expanded(target):
            raise pytorch_error(f"{where} cannot be filled: it is expanded, and its elements share memory. Clone it")
        if loses(stored.dtype, target.dtype):
            self._rounded.append(f"{path} ({dtype_name(stored)} to {dtype_name(target)})")
        self._steps.append(lambda: copy_into(target, stored, where))

    def _mapping(self, target: Mapping[Any, Any], stored: Any, path: str) -> Any:
        where = _where(path)
        beside: Mapping[Any, Any] = {}
        if isinstance(stored, Described):
            beside = stored.beside
            kind, stored = _kind(stored), stored.state
            if isinstance(stored, Mapping) and target and not any(key in stored or key in beside for key in target):
                raise pytorch_error(f"{where} is a mapping, and one {kind} was stored there: give the object itself")
        if not isinstance(stored, Mapping):
            raise pytorch_error(f"{where} is a mapping, and a {_kind(stored)} was stored there")
        if self._strict:
            missing = [key for key in target if key not in stored and key not in beside]
            if missing:
                raise pytorch_error(
                    f"what was stored does not have all entries of {where}: it lacks {_some(missing)} and has "
                    f"{_some(list(stored))}. Leave those out, or give strict=False to fill what is on both sides"
                )
        for key, value in target.items():
            entry = stored[key] if key in stored else beside.get(key, _NOT_THERE)
            if entry is _NOT_THERE:
                continue
            new = self.part(value, entry, f"{path}.{key}" if path else str(key))
            if new is not value:
                if not isinstance(target, MutableMapping):
                    raise pytorch_error(f"{where} is a {type(target).__name__}, which takes no new values")
                self._steps.append(lambda key=key, new=new: target.__setitem__(key, new))  # type: ignore[misc]
        return target

    def _list(self, target: Any, stored: Any, path: str) -> Any:
        where = _where(path)
        if not isinstance(stored, list | tuple):
            raise pytorch_error(f"{where} is a {type(target).__name__}, and a {_kind(stored)} was stored there")
        if self._strict and len(target) != len(stored):
            raise pytorch_error(f"{where} has {len(target)} entries, and {len(stored)} were stored")
        new = [
            self.part(value, entry, f"{path}.{n}" if path else str(n))
            for n, (value, entry) in enumerate(zip(target, stored, strict=False))
        ]
        changed = [n for n, value in enumerate(new) if value is not target[n]]
        if isinstance(target, list):
            self._steps += [lambda n=n: target.__setitem__(n, new[n]) for n in changed]  # type: ignore[misc]
            return target
        if not changed:
            return target
        make = getattr(type(target), "_make", type(target))  # a named tuple's
        return make([*new, *target[len(new) :]])

    def _plain(self, target: Any, stored: Any, path: str) -> Any:
        if isinstance(stored, Described):
            stored = stored.state
        if isinstance(stored, Opaque):
            self._opaque(target, stored, path)
            return target
        if find_opaque(stored) is not None:
            return self._with_opaque(target, stored, path)
        if isinstance(target, np.ndarray) and isinstance(stored, np.ndarray):
            if target.dtype == stored.dtype and target.shape == stored.shape and target.flags.writeable:
                self._steps.append(lambda: np.copyto(target, stored))
                return target
            return stored
        if type(target) is type(stored) and type(target) in _KEPT and target is not stored:
            self._steps.append(lambda: _replace_content(target, stored))
            return target
        return stored

    def _opaque(self, target: Any, stored: Opaque, path: str) -> None:
        """Fill in plain values of an object that only a pickle says, or see that it is equal."""
        facts = facts_of_opaque(target)
        reason = "only a pickle says it"
        if facts is not None and stored.facts is not None:
            try:
                self._steps.append(plan_values("pytorch", facts, stored.facts))
                return
            except AdapterError as error:
                reason = error.reason
        raise pytorch_error(
            f"{_where(path)} was stored as a {_kind(stored)} and cannot be filled ({reason}). Leave it out of what is "
            "to be filled, or load a new one, without into= (or original=)"
        )

    def _with_opaque(self, target: Any, stored: Any, path: str) -> Any:
        """Go through a container in which there is something that only a pickle says."""
        is_mapping = isinstance(target, MutableMapping) and isinstance(stored, Mapping)
        is_list = isinstance(target, list) and isinstance(stored, list) and len(target) == len(stored)
        if not is_mapping and not is_list:
            self._opaque(target, Opaque(kind=type(stored).__name__), path)
        for key, entry in stored.items() if is_mapping else enumerate(stored):
            old = target.get(key, _NOT_THERE) if is_mapping else target[key]
            new = self._plain(old, entry, f"{path}.{key}")
            if new is not old:
                self._steps.append(lambda key=key, new=new: target.__setitem__(key, new))  # type: ignore[misc]
        return target

    def _holds_life(self, target: Any) -> bool:
        """Tell whether a container holds a tensor or an object with a state dict, at any depth."""
        if not isinstance(target, Mapping | list | tuple):
            return False
        known = self._alive.get(id(target))
        if known is None:
            self._alive[id(target)] = False
            parts = target.values() if isinstance(target, Mapping) else target
            known = any(is_tensor(part) or is_live(unwrap(part)) or self._holds_life(part) for part in parts)
            self._alive[id(target)] = known
        return known


def _load_state(target: Any, state: Any, where: str) -> None:
    try:
        target.load_state_dict(state)
    except Exception as error:  # load_state_dict() is code of the object's class, which may raise anything
        raise pytorch_error(f"{where}: {type(error).__name__}: {error}") from error


def _replace_content(target: Any, stored: Any) -> None:
    if isinstance(target, list):
        target[:] = stored
    else:
        target.clear()
        target.update(stored)


def _where(path: str) -> str:
    return repr(path) if path else ROOT


def _kind(stored: Any) -> str:
    return stored.kind.rpartition(".")[2] if isinstance(stored, Described | Opaque) else type(stored).__name__


def _some(keys: list[Any]) -> str:
    names = ", ".join(repr(key) for key in keys[:10])
    return f"{names} and {len(keys) - 10} more" if len(keys) > 10 else names
