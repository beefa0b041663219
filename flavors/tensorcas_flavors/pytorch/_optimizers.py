"""Filling of optimizers: each parameter gets the entries of its own name, and every entry keeps its dtype.

``Optimizer.load_state_dict`` matches entries by position, and casts them to the dtype of their parameter.
`in_live_order` puts stored parameters into the order of the live ones, and `load_state` loads entries as they are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors.pytorch._kinds import shape_of
from tensorcas_flavors.pytorch._objects import bare_name, is_live, is_tensor, parameters_of
from tensorcas_flavors.pytorch._tensors import Copy, as_array, dtype_name, pytorch_error, refusal
from tensorcas_flavors.pytorch._tree import ParameterKey

if TYPE_CHECKING:
    import torch

_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))
"""Entries of torch's optimizers that are one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What was stored of one parameter of an optimizer."""

    name: str | None
    """Its path in the state; None if no module of the state has it."""
    shape: tuple[int, ...] | None
    """None if it was not stored."""


def is_of_torch(kind: type) -> bool:
    """Tell whether a class is an optimizer or scheduler of torch itself."""
    return f"{kind.__module__}.".startswith("torch.optim.")


def has_own_code(kind: Any) -> bool:
    """Tell whether a class writes or reads state dicts otherwise than ``Optimizer`` does."""
    from torch.optim import Optimizer

    return any(getattr(kind, name, None) is not getattr(Optimizer, name) for name in ("state_dict", "load_state_dict"))


def has_own_format(optimizer: Any) -> bool:
    """Tell whether a state dict of an optimizer may have another format than one of torch."""
    hooks = ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks")
    return has_own_code(type(optimizer)) or any(getattr(optimizer, name, None) for name in hooks)


def check_groups(optimizer: Any, state: Any, where: str) -> None:
    """Check that a state dict has the format and the sizes that ``Optimizer.load_state_dict`` wants.

    Raises:
        AdapterError: It has not.
    """
    try:
        stored = [len(group["params"]) for group in state["param_groups"]]
        if not isinstance(state["state"], Mapping):
            raise TypeError("no mapping")
    except (KeyError, TypeError, IndexError) as error:
        raise pytorch_error(f"{where} is an optimizer, and no state of an optimizer was stored there") from error
    own = [len(group["params"]) for group in optimizer.param_groups]
    if len(own) != len(stored):
        raise pytorch_error(
            f"{where}: loaded state dict has a different number of parameter groups: stored are {len(stored)}, and it "
            f"has {len(own)}"
        )
    if own != stored:
        raise pytorch_error(
            f"{where}: loaded state dict contains a parameter group that doesn't match the size of optimizer's "
            f"group: stored are {stored} parameters, and it has {own}"
        )


def stored_names(groups: Sequence[Mapping[str, Any]], optimizer: Any, named: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the names that a state dict itself has, and the live tensors that have such names.

    Args:
        groups: The stored groups.
        optimizer: The live optimizer.
        named: The live tensors by their path in the state to fill.
    """
    # A state that many ranks have saved has names in place of numbers.
    names = [
        name if isinstance(name, str) else None
        for group in groups
        for name in group.get("param_names") or group["params"]
    ]
    own = [name for group in optimizer.param_groups for name in group.get("param_names") or ()]
    parameters = parameters_of(optimizer) or []
    if len(own) == len(parameters):
        return names, dict(zip(own, parameters, strict=True))
    # A model's own names lack the path of the model in the state.
    mine = set(map(id, parameters))
    starts = {path.removesuffix(name) for name in names if name for path in named if path.endswith(name)}
    for start in sorted(starts, key=len):
        live = {path.removeprefix(start): tensor for path, tensor in named.items() if path.startswith(start)}
        if mine <= set(map(id, live.values())):
            return names, live
    return names, {}


def in_live_order(
    optimizer: Any,
    groups: Sequence[Mapping[str, Any]],
    stored: Sequence[Stored],
    named: Mapping[str, Any],
    where: str,
    *,
    entries: Mapping[Any, Any] | None = None,
) -> list[Any]:
    """Return stored groups of parameters with the parameters of each in the order of the live optimizer.

    Args:
        optimizer: The live optimizer.
        groups: The stored groups, as many as it has and each as large.
        stored: The stored parameters, in the order of the stored groups.
        named: The live tensors by their names, which are of the kind of the stored ones.
        where: Name of the optimizer in errors.
        entries: The stored entries by id. Parameters without one may have another shape; None means that all have one.

    Raises:
        AdapterError: The groups have other parameters, or parameters of other shapes.
    """
    place_of, live = _places(stored, named), set(map(id, named.values()))
    ordered, start = [], 0
    for number, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        ids = list(group["params"])
        here = range(start, start + len(ids))
        known = [place_of.get(id(parameter)) for parameter in own["params"]]
        others = [place for place in known if place is not None and place not in here]
        if others:
            raise pytorch_error(
                f"{where}: group {number} has the parameter {stored[others[0]].name!r}, which was stored in another "
                "group: give the optimizer the groups that it was stored with"
            )
        taken = set(known)
        left = iter([place for place in here if place not in taken])
        order = [(next(left) if place is None else place) - start for place in known]
        for parameter, place, at in zip(own["params"], known, order, strict=True):
            name = stored[start + at].name
            if place is None and name is not None and id(parameter) in live:
                raise pytorch_error(
                    f"{where}: group {number} was stored with the parameter {name!r}, and has another one in its "
                    "place: give the optimizer the parameters that it was stored with"
                )
        for at, (parameter, place) in enumerate(zip(own["params"], order, strict=True)):
            if entries is None or entries.get(ids[place]):
                _check_fits(parameter, stored[start + place], f"{where}: parameter {at} of group {number}")
        if order != sorted(order):
            if _has_one_state(optimizer) or has_own_format(optimizer):
                raise pytorch_error(
                    f"{where}: its parameters were stored in another order, {_some(stored, here)}, and the state of a "
                    f"{type(optimizer).__name__} is not divided by parameters: give it the parameters in that order"
                )
            group = dict(group, params=[ids[at] for at in order])
            names = group.get("param_names")
            if isinstance(names, list) and len(names) == len(order):
                group["param_names"] = [names[at] for at in order]
        ordered.append(group)
        start += len(ids)
    return ordered


def _has_one_state(optimizer: Any) -> bool:
    """Tell whether an optimizer keeps one state for all of its parameters."""
    from torch.optim import LBFGS

    return isinstance(optimizer, LBFGS)


def _places(stored: Sequence[Stored], named: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of the stored parameter of each live tensor with a stored name, by identity."""
    names = [each.name for each in stored]
    if not all(name is None or name in named for name in names):
        # A wrapper adds a part to all names.
        bare = {bare_name(name): tensor for name, tensor in named.items()}
        if len({*map(bare_name, filter(None, names))}) == len({*filter(None, names)}):
            return {
                id(named.get(name, bare[bare_name(name)])): place
                for place, name in enumerate(names)
                if name is not None and bare_name(name) in bare
            }
    return {id(named[name]): place for place, name in enumerate(names) if name is not None and name in named}


def _check_fits(parameter: Any, stored: Stored, where: str) -> None:
    if stored.shape is not None and (parameter.is_nested or tuple(parameter.shape) != stored.shape):
        name = "" if stored.name is None else f" as {stored.name!r}"
        raise pytorch_error(
            f"{where} was stored{name} with the shape {stored.shape}, and has {tuple(shape_of(parameter))}: give the "
            "optimizer the parameters in the order that it was stored with"
        )


def _some(stored: Sequence[Stored], places: Iterable[int]) -> str:
    names = [repr(stored[place].name) for place in places]
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")


def check_shapes(optimizer: Any, state: Mapping[str, Any], where: str) -> None:
    """Check the shapes of the entries of an optimizer of torch.

    Raises:
        AdapterError: An entry has not the shape of its parameter, so it is one of another parameter.
    """
    if not is_of_torch(type(optimizer)) or _has_one_state(optimizer):
        return
    has_factors = type(optimizer).__name__ == "Adafactor"
    for parameter, number, entries in _entries(optimizer, state):
        for key, entry in entries.items():
            if not is_tensor(entry) or entry.is_nested or parameter.is_nested or (key in _SCALARS and not entry.ndim):
                continue
            sides = zip(entry.shape, parameter.shape, strict=False)
            if entry.ndim != parameter.ndim or not all(n == m or (has_factors and n == 1) for n, m in sides):
                raise pytorch_error(
                    f"{where}: {key!r} of parameter {number!r} was stored with the shape {tuple(entry.shape)}, and the "
                    f"parameter has {tuple(parameter.shape)}: give the optimizer the parameters in the order that it "
                    "was stored with"
                )


def _entries(optimizer: Any, state: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Mapping[Any, Any]]]:
    """Yield the live parameters, with their stored ids and entries."""
    entries = state["state"]
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, number in zip(own["params"], group["params"], strict=True):
            its = entries.get(number)
            if isinstance(its, Mapping):
                yield parameter, number, its


def replaced_by(optimizer: torch.optim.Optimizer, state: Any, where: str) -> Iterator[Copy]:
    """Yield the tensors of an optimizer that a load replaces with stored ones as they are."""
    if not is_of_torch(type(optimizer)) or optimizer._optimizer_load_state_dict_post_hooks or has_own_format(optimizer):
        return
    for parameter, number, entries in _entries(optimizer, state):
        old: Any = optimizer.state.get(parameter)
        for key, entry in entries.items() if isinstance(old, Mapping) else ():
            live = old.get(key)
            # On another device, the load makes a new tensor.
            if is_tensor(live) and is_tensor(entry) and live.device == parameter.device:
                yield Copy(where=f"{where}: state {number}, {key!r}", target=live, source=entry)


def load_state(target: Any, state: Any, where: str) -> None:
    """Call ``load_state_dict`` of an object, so that its optimizers keep the dtypes of stored entries.

    Args:
        target: An optimizer, or another object that may hold some.
        state: The state dict.
        where: Name of the object in errors.

    Raises:
        AdapterError: The object refuses, or its own code has taken tensors otherwise than they were stored.
    """
    from torch.optim import Optimizer

    with ExitStack() as hooks:
        for optimizer in _optimizers_in(target):
            hooks.callback(optimizer.register_load_state_dict_pre_hook(_as_stored).remove)
        try:
            target.load_state_dict(state)
        except Exception as error:  # load_state_dict() is code of the object's class, which may raise anything
            raise pytorch_error(f"{where}: {type(error).__name__}: {error}") from error
    is_plain = isinstance(target, Optimizer) and not has_own_code(type(target))
    if not is_plain and _holds_numbers(state):
        odd = _not_taken(target.state_dict(), state, "", set())
        if odd:
            raise pytorch_error(
                f"{where}: load_state_dict() of a {type(target).__name__} did not take {odd}: load the state without "
                "into= (or original=), and give it to the object by its own means"
            )


def load_named(optimizer: Any, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Load a state dict that has names in place of numbers, each entry into the parameter of its name.

    Raises:
        AdapterError: The groups have other parameters, or the optimizer refuses.
    """
    where = f"the {type(optimizer).__name__}"
    check_groups(optimizer, state, where)
    groups = state["param_groups"]
    stored = [Stored(name=name, shape=None) for group in groups for name in group["params"]]
    live = dict(zip(names, parameters_of(optimizer) or [], strict=True))
    load_state(optimizer, dict(state, param_groups=in_live_order(optimizer, groups, stored, live, where)), where)


def _optimizers_in(target: Any) -> list[Any]:
    """Return the optimizers that an object is or holds, as far as they can have hooks."""
    from torch.nn import Module
    from torch.optim import Optimizer

    found: dict[int, Any] = {}
    seen: set[int] = set()
    stack = [target]
    while stack:
        part = stack.pop()
        if id(part) in seen or isinstance(part, Module):
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple | deque):
            stack += part
        elif type(part) is dict:
            stack += part.values()
        elif is_live(part):
            if isinstance(part, Optimizer) and hasattr(part, "_optimizer_load_state_dict_pre_hooks"):
                found[id(part)] = part
            own = vars(part) if hasattr(part, "__dict__") else {}
            stack += [value for name, value in own.items() if name not in ("state", "param_groups", "defaults")]
    return list(found.values())


def _as_stored(optimizer: Any, state: dict[str, Any]) -> dict[str, Any] | None:
    """Name entries by the live parameters themselves: ``load_state_dict`` casts and copies none of those."""
    try:
        ids = list(chain.from_iterable(group["params"] for group in state["param_groups"]))
        entries = state["state"].items()
    except (KeyError, TypeError, AttributeError):
        return None  # load_state_dict() says what is wrong
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    if len(ids) != len(parameters):
        return None
    of_id = dict(zip(ids, parameters, strict=True))
    moves_step = {
        number: bool(group.get("capturable") or group.get("fused"))
        for group in state["param_groups"]
        for number in group["params"]
    }
    loaded = {}
    for number, entry in entries:
        parameter = of_id.get(number)
        if parameter is None:
            loaded[number] = entry
        else:
            loaded[parameter] = _moved(entry, parameter.device, moves_step[number])
    return dict(state, state=loaded)


def _moved(value: Any, device: torch.device, moves_step: bool, key: Any = None) -> Any:
    """Return an entry on a device, in containers of its own. A step count stays where it is, as torch has it."""
    if is_tensor(value):
        return value if key == "step" and not moves_step else value.to(device=device)
    if isinstance(value, Mapping):
        moved = {key: _moved(each, device, moves_step, key) for key, each in value.items()}
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, moved)
        return OrderedDict(moved) if type(value) is OrderedDict else moved
    if type(value) in (list, tuple, set, deque):
        parts = [_moved(each, device, moves_step) for each in value]
        return deque(parts, value.maxlen) if isinstance(value, deque) else type(value)(parts)
    return value


def _holds_numbers(state: Any) -> bool:
    """Tell whether a state has a tensor of floating point or complex numbers, at any depth."""
    stack, seen = [state], set()
    while stack:
        part = stack.pop()
        if is_tensor(part):
            if part.is_floating_point() or part.is_complex():
                return True
        elif isinstance(part, Mapping | list | tuple | deque) and id(part) not in seen:
            seen.add(id(part))
            stack += part.values() if isinstance(part, Mapping) else part
    return False


def _not_taken(now: Any, state: Any, path: str, met: set[tuple[int, int]]) -> str | None:
    """Name a tensor of a state that an object does not have as it was stored; None if there is none."""
    if (id(now), id(state)) in met:
        return None
    met.add((id(now), id(state)))
    if is_tensor(state):
        if not is_tensor(now):
            return f"{path[1:]!r}"
        if now.dtype != state.dtype or shape_of(now) != shape_of(state):
            was, becomes = (f"{dtype_name(each)} {tuple(shape_of(each))}" for each in (state, now))
            return f"{path[1:]!r} as stored: it was {was}, and is {becomes}"
        if refusal(now) or refusal(state):
            return None  # nobody can compare their elements
        one, other = (as_array(each.detach().cpu()) for each in (now, state))
        return None if np.array_equal(_bytes(one), _bytes(other)) else f"the values of {path[1:]!r}"
    if isinstance(state, Mapping):
        found = (
            _not_taken(now.get(key) if isinstance(now, Mapping) else None, value, f"{path}.{_text(key)}", met)
            for key, value in state.items()
        )
    elif isinstance(state, list | tuple | deque):
        its = list(now) if isinstance(now, list | tuple | deque) else []
        found = (
            _not_taken(its[at] if at < len(its) else None, value, f"{path}.{at}", met) for at, value in enumerate(state)
        )
    else:
        return None
    return next(filter(None, found), None)


def _bytes(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _text(key: Any) -> str:
    return "parameter" if is_tensor(key) else str(key)


def with_live_keys(state: Any, named: Callable[[], Mapping[str, Any]], where: str, met: set[int] | None = None) -> Any:
    """Put the live parameters in place of the keys of a stored state that were parameters; return the state.

    Raises:
        AdapterError: No live module has such a parameter.
    """
    met = set() if met is None else met
    if isinstance(state, Mapping | list | tuple) and id(state) not in met:
        met.add(id(state))
        for part in list(state.values() if isinstance(state, Mapping) else state):
            with_live_keys(part, named, where, met)
        if isinstance(state, dict) and ParameterKey in set(map(type, state)):
            live = named()
            bare = {bare_name(name): tensor for name, tensor in live.items()}
            entries = list(state.items())
            state.clear()
            for key, value in entries:
                its = live.get(key.name, bare.get(bare_name(key.name))) if type(key) is ParameterKey else key
                if its is None:
                    raise pytorch_error(
                        f"{where} was stored with an entry of the parameter {key.name!r}, and no module to fill has "
                        "such a parameter: give the module that the object was stored with"
                    )
                state[its] = value
    return state
