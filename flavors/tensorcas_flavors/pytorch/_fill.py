"""Filling of live objects: first a plan, which finds everything that does not fit, then the filling.

All stored parts come back, or nothing changes. A part that only a pickle can restore, and that cannot be filled, must
be equal in the live object (see `facts_and_parts`).
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, MutableMapping, Set
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_flavors._facts import REMEDY, plan_values
from tensorcas_flavors.pytorch._kinds import is_subclass, misfit, reduction, shape_of, taken_apart
from tensorcas_flavors.pytorch._modules import ROOT, ModuleFilling, copy_into, is_expanded, loses, warn_of_rounding
from tensorcas_flavors.pytorch._objects import (
    attributes_of,
    bare_name,
    can_take_state,
    generator_state,
    is_live,
    is_part,
    is_tensor,
    live_facts_and_parts,
    named_tensors,
    own_tensors,
    parameters_of,
    set_state,
    tensors_of,
    unwrap,
)
from tensorcas_flavors.pytorch._optimizers import (
    Stored,
    check_groups,
    check_shapes,
    has_own_format,
    in_live_order,
    is_of_torch,
    load_state,
    replaced_by,
    stored_names,
    with_live_keys,
)
from tensorcas_flavors.pytorch._tensors import (
    Copy,
    as_array,
    check_memory,
    dtype_name,
    pytorch_error,
    refusal,
    some,
    without_memory,
)
from tensorcas_flavors.pytorch._tree import (
    ModuleFacts,
    NamedItems,
    PickleOnly,
    StoredObject,
    find_opaque,
    with_flat_tensors,
)
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    import torch


def is_same(one: Any, other: Any, _met: set[tuple[int, int]] | None = None) -> bool:
    """Tell whether two live or stored nests of values and tensors are equal, types and bits included."""
    met = set() if _met is None else _met
    if one is other or (id(one), id(other)) in met:
        return True
    if is_tensor(one) and is_tensor(other):
        return _is_same_tensor(one, other, met)
    if type(one) is not type(other):
        return False
    met.add((id(one), id(other)))
    if isinstance(one, np.ndarray | np.generic):
        return _has_same_bits(np.asarray(one), np.asarray(other))
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(
            is_same(key, other_key, met) and is_same(part, other_part, met)
            for (key, part), (other_key, other_part) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(is_same(part, again, met) for part, again in zip(one, other, strict=True))
    if is_dataclass(one):
        return all(is_same(getattr(one, each.name), getattr(other, each.name), met) for each in fields(one))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    state = generator_state(one)
    return bool(one == other) if state is None else is_same(state, generator_state(other), met)


def _is_same_tensor(one: Any, other: Any, met: set[tuple[int, int]]) -> bool:
    if one.dtype != other.dtype:
        return False
    if refusal(one) is None and refusal(other) is None:
        return _has_same_bits(as_array(one.cpu()), as_array(other.cpu()))
    if type(one) is not type(other):
        return False
    if is_subclass(one):
        return is_same(reduction(one), reduction(other), met)
    return is_same(taken_apart(one), taken_apart(other), met)


def _has_same_bits(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


_KEPT = (list, dict, OrderedDict, defaultdict, Counter, set, deque)
_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))
_MUTABLE = (Mapping, list, set, deque, bytearray, np.ndarray)
_DEVICE = re.compile(r"(?:cpu|cuda|mps|xpu|meta)(?::\d+)?")
_BATCH_NORMS = frozenset(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"))
_OF_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))
"""Keys that a scheduler adds to the groups of an optimizer."""
_NOT_THERE = object()


def fill(original: Any, stored: Any, *, strict: bool) -> Any:
    """Fill a live object in place.

    Args:
        original: A module, another object with ``load_state_dict``, or a nest of mappings and lists of such objects,
            tensors and plain values.
        stored: Result of `read_stored`; this function takes it over.
        strict: Whether all entries of ``original`` must be stored; for a module, as in ``load_state_dict``. Stored
            entries of a mapping that ``original`` does not name are left out in any case.

    Returns:
        ``original``, or a new tuple if it is a tuple with plain values.

    Raises:
        AdapterError: They do not fit. Everything that can be checked is checked before anything is filled.
    """
    plan, filled = plan_filling(original, stored, strict=strict)
    plan.execute()
    return filled


def plan_filling(original: Any, stored: Any, *, strict: bool, has_values: bool = True) -> tuple[FillPlan, Any]:
    """Plan the filling of a live object; see `fill`.

    Args:
        original: See there.
        stored: See there.
        strict: See there.
        has_values: False if the stored tensors have no values yet; then no values are compared.

    Returns:
        The plan, and the result of `fill` after its execution.

    Raises:
        AdapterError: See there.
    """
    if not is_live(unwrap(original)) and not isinstance(original, Mapping | list | tuple) and not is_tensor(original):
        raise pytorch_error(
            f"a {type(original).__name__} cannot be filled: give a module, another object with load_state_dict(), "
            "or a mapping or list of such"
        )
    plan = FillPlan(original, strict=strict)
    try:
        filled = plan.part(original, stored, "")
    except RecursionError as error:
        raise pytorch_error("the object to fill is nested too deep") from error
    if plan.rounded and strict:
        raise pytorch_error(
            f"stored tensors would lose digits in the live object: {', '.join(some(plan.rounded))}. Give it tensors of "
            "the stored dtypes, as by model.float(), or strict=False to let torch round them; "
            "or load a new one, without into="
        )
    if has_values:
        check_memory(plan.copies)
    return plan, filled


@dataclass(slots=True)
class _Given:
    """A live part and the stored value that it gets."""

    target: Any
    stored: Any
    result: Any
    """The value in the target's place afterwards."""


class FillPlan:
    """Plan for filling one object."""

    def __init__(self, original: Any, *, strict: bool) -> None:
        self._original = original
        self._named: Mapping[str, Any] | None = None
        self._strict = strict
        self._steps: list[Callable[[], object]] = []
        self.rounded: list[str] = []
        """Tensors that lose digits, with both dtypes."""
        self._given: dict[int, _Given] = {}
        """Stored value of each mutable part, by identity; a part gets one value only."""
        self._filling: dict[int, _Given] = {}
        """First part that gets a stored value, by identity of the value."""
        self._storages: Callable[[], tuple[set[int | None], set[int | None]]] = lambda: (set(), set())
        """Storages of the tensors of the module that is being filled: the live ones, and the stored ones."""
        self.copies: list[Copy] = []
        """The copies into live memory, as far as they are known before."""
        self.replaced: list[Copy] = []
        """Live tensors that stored ones take the place of, each with its stored one. A live one may be given as the
        stored one, and then keeps its place."""
        self._alive: dict[int, bool] = {}
        self._plainness: dict[int, bool] = {}

    def part(self, target: Any, stored: Any, path: str) -> Any:
        """Plan the filling of one part; return the value in its place afterwards.

        A mapping or list with a tensor or live object in it keeps its entries, which are filled; any other value
        becomes the stored one.
        """
        is_named = not path or self._holds_life(target)
        if not is_named or isinstance(stored, PickleOnly) or not isinstance(target, Mapping | list | tuple):
            return self._value(target, stored, path)
        return self._once(target, stored, path, self._mapping if isinstance(target, Mapping) else self._list)

    def execute(self) -> None:
        """Fill all parts.

        Raises:
            AdapterError: The own code of a part refuses; a note says that the object may be filled in part.
        """
        try:
            for step in self._steps:
                step()
        except AdapterError as error:
            error.add_note("the code of the live object refused, so the object may be filled in part: load a new one")
            raise
        warn_of_rounding(self.rounded)

    def _once(self, target: Any, stored: Any, path: str, plan: Callable[[Any, Any, str], Any]) -> Any:
        """Plan for a mutable part, unless that is done; return the value in its place afterwards."""
        given = self._given.get(id(target))
        if given is None:
            given = self._given[id(target)] = _Given(target, stored, target)
            given.result = plan(target, stored, path)
            self._filling.setdefault(id(stored), given)
        elif given.stored is not stored and not is_same(given.stored, stored):
            raise pytorch_error(
                f"{_where(path)} is the same object as another part, and different values are stored for them: {REMEDY}"
            )
        return given.result

    def _value(self, target: Any, stored: Any, path: str) -> Any:
        """Plan that a value becomes the stored one; return the value in its place afterwards."""
        if target is _NOT_THERE and id(stored) in self._filling:
            return self._filling[id(stored)].result
        live = unwrap(target)
        if is_live(live):
            self._once(live, stored, path, self._live)
            return target
        if is_tensor(target) and is_tensor(stored) and self._is_view(target, stored):
            return stored.to(target.device)
        if is_tensor(target) and not isinstance(stored, PickleOnly):
            return self._once(target, stored, path, self._tensor)
        if type(stored) in _ATOMS:
            return stored
        has_facts = isinstance(stored, PickleOnly) and type(target) not in _ATOMS and target is not _NOT_THERE
        if has_facts or isinstance(target, _MUTABLE) or generator_state(target) is not None:
            return self._once(target, stored, path, self._content)
        return self._content(target, stored, path)

    def _content(self, target: Any, stored: Any, path: str) -> Any:
        if isinstance(stored, PickleOnly):
            made = with_flat_tensors(stored) if target is _NOT_THERE else stored
            if made is not stored:
                return made
            self._opaque(target, stored, path)
            return target
        if isinstance(stored, NamedItems):
            return self._named_items(target, stored, path)
        if isinstance(stored, StoredObject):
            raise self._misfit(path, target, stored)
        if isinstance(target, np.ndarray) and isinstance(stored, np.ndarray):
            return self._array(target, stored, path)
        state = generator_state(stored)
        if state is not None:
            if not can_take_state(target, state):
                return stored
            self._steps.append(lambda: set_state(target, state))
            return target
        if not isinstance(stored, Mapping | list | tuple | set | deque | bytearray):
            return stored
        opaque = find_opaque(stored, objects_too=True)
        if not isinstance(target, Mapping | list | tuple | deque) and opaque is not None:
            raise self._misfit(path, target, opaque)
        is_filled = isinstance(target, Mapping | list | tuple | deque) and not self._is_plain(stored)
        new = self._with_parts(target, stored, path) if is_filled else stored
        if type(target) is type(stored) and type(target) in _KEPT and target is not stored:
            if isinstance(target, deque) and target.maxlen != stored.maxlen:  # type: ignore[union-attr]
                return new
            self._steps.append(lambda: _replace_content(target, new, stored))
            return target
        return new

    def _with_parts(self, target: Any, stored: Any, path: str) -> Any:
        """Return the stored content of a container, with live parts in place of those that can be filled."""
        start = f"{path}." if path else ""
        if isinstance(stored, Mapping):
            own: Any = target if isinstance(target, Mapping) else {}
            pairs = [
                (key, self._value(own.get(key, _NOT_THERE), entry, f"{start}{key}")) for key, entry in stored.items()
            ]
            new: Any = type(stored)() if not isinstance(stored, defaultdict) else defaultdict(stored.default_factory)
            new.update(pairs)
            vars(new).update(vars(stored)) if hasattr(new, "__dict__") else None
            return new
        own = list(target) if isinstance(target, list | tuple | deque) else []
        own += [_NOT_THERE] * (len(stored) - len(own))
        values = [self._value(own[n], entry, f"{start}{n}") for n, entry in enumerate(stored)]
        return deque(values, stored.maxlen) if isinstance(stored, deque) else type(stored)(values)

    def _array(self, target: Any, stored: Any, path: str) -> Any:
        is_file = type(target) is np.memmap
        if is_file and not target.flags.writeable and not _has_same_bits(target, stored):
            raise pytorch_error(
                f"{_where(path)} maps the file {target.filename} for reading alone, and other values are stored: map "
                f"it with mode='r+' or 'c', or {REMEDY}"
            )
        if target.dtype != stored.dtype or target.shape != stored.shape or not target.flags.writeable:
            return target if is_file and not target.flags.writeable else stored
        self.copies.append(Copy(where=_name(path), target=target, source=stored))
        self._steps.append(lambda: np.copyto(target, stored))
        return target

    def _named_items(self, target: Any, stored: NamedItems, path: str) -> Any:
        kind = type(target)
        if getattr(kind, "_fields", None) != tuple(stored.fields) or kind.__name__ != _kind(stored):
            raise self._misfit(path, target, stored)
        items = [
            self._value(own, item, f"{_name(path)}.{name}")
            for name, own, item in zip(stored.fields, target, stored.items, strict=True)
        ]
        if all(new is own for new, own in zip(items, target, strict=True)):
            return target
        return kind._make(items)

    def _opaque(self, target: Any, stored: PickleOnly, path: str) -> None:
        """Plan for a value that only a pickle can restore: fill its parts and plain values, if the rest is equal."""
        if not self._strict:
            return
        facts = stored.facts.entry
        is_plain = is_tensor(target) and not is_subclass(target)
        if facts is None or target is _NOT_THERE or target is None or is_plain:
            raise self._misfit(path, target, stored)
        where = _where(path)
        try:
            own, parts = live_facts_and_parts(target, is_part)
            change = plan_values("pytorch", own, facts.facts)
        except AdapterError as error:
            raise pytorch_error(
                f"{where} is a {_kind(stored)}, which only a pickle can restore: {error.reason}, or give strict=False "
                "to leave it as it is"
            ) from error
        if len(parts) != len(facts.taken):
            raise self._misfit(path, target, stored)
        for n, (part, entry) in enumerate(zip(parts, facts.taken, strict=True)):
            if not is_live(unwrap(part)) and n in own.fixed:
                fits = is_same(part, entry)
            else:
                fits = self._value(part, entry, f"{_name(path)}.{n}") is part
            if not fits:
                raise pytorch_error(f"{where} holds a {type(part).__name__} that cannot be filled in place: {REMEDY}")
        self._steps.append(change)

    def _misfit(self, path: str, target: Any, stored: Any) -> AdapterError:
        there = "nothing is" if target is _NOT_THERE else f"a {type(target).__name__} is"
        return pytorch_error(
            f"{_where(path)} was stored as a {_kind(stored)}, which only a pickle can restore, and {there} there: "
            f"give one to fill, or {REMEDY}"
        )

    def _is_plain(self, stored: Any) -> bool:
        """Tell whether a container holds no part that is filled in place, at any depth."""
        known = self._plainness.get(id(stored))
        if known is None:
            self._plainness[id(stored)] = True
            parts = stored.values() if isinstance(stored, Mapping) else stored
            known = self._plainness[id(stored)] = all(
                self._is_plain(part)
                if isinstance(part, Mapping | list | tuple | deque)
                else type(part) in _ATOMS
                or not (
                    is_tensor(part)
                    or isinstance(part, np.ndarray | PickleOnly | NamedItems | StoredObject)
                    or generator_state(part) is not None
                )
                for part in parts
            )
        return known

    def _modules(self, live: Mapping[str, torch.nn.Module], stored: list[ModuleFacts], path: str) -> None:
        """Plan for the attributes of a module and its submodules, given under each of their names."""
        bare: dict[str, list[torch.nn.Module]] = {}
        for facts in stored:
            found = live.get(facts.path)
            if found is not None and type(found).__name__ == facts.kind:
                self._attributes(found, facts, path)
                continue
            if not bare:
                for name, part in live.items():
                    bare.setdefault(bare_name(name), []).append(part)
            candidates = [found, *bare.get(bare_name(facts.path), [])]
            found = next((part for part in candidates if part is not None and _is_of(part, facts.kind)), None)
            if found is not None:
                self._attributes(found, facts, path)
            elif self._strict:
                there = " or ".join(sorted({type(part).__name__ for part in candidates if part is not None}))
                raise pytorch_error(
                    f"{_where(_join(path, facts.path))} was stored as a {facts.kind}, and "
                    f"{f'is a {there}' if there else 'the model to fill has no such part'}: give a model of the same "
                    f"classes, or strict=False to fill what fits, or {REMEDY}"
                )
        paths = [facts.path for facts in stored]
        others = live.keys() - set(paths) if self._strict else set()
        met = set(map(bare_name, paths)) if others else set()
        more = [name for name in live if name in others and bare_name(name) not in met]
        if more:
            raise pytorch_error(
                f"{_where(path)} has parts that were not stored: {_some(more)}. Give a model without them, or "
                f"strict=False to fill what fits, or {REMEDY}"
            )

    def _attributes(self, module: torch.nn.Module, facts: ModuleFacts, path: str) -> None:
        given = self._given.setdefault(id(vars(module)), _Given(vars(module), facts, None))
        if given.stored is not facts:
            if not is_same([given.stored.attributes, given.stored.of_tensors], [facts.attributes, facts.of_tensors]):
                raise pytorch_error(
                    f"{_where(_join(path, facts.path))} is the same module as another part, and different attributes "
                    f"are stored for them: {REMEDY}"
                )
            return
        real = vars(module)
        attributes: Mapping[str, Any] = facts.attributes
        if type(module).__getstate__ in _plain_getstates():
            attributes = {
                name: entry
                for name, entry in attributes.items()
                if type(entry) not in _ATOMS
                or type(real.get(name)) is not type(entry)
                or real.get(name, _NOT_THERE) != entry
                or (not entry and type(entry) in (float, complex))  # 0.0 == -0.0
            }
        if not attributes and not facts.of_tensors:
            return
        start = _join(path, facts.path)
        own, _ = attributes_of(module)
        for name, entry in attributes.items():
            old = own.get(name, _NOT_THERE)
            where = _join(start, name)
            if old is not _NOT_THERE and old is not real.get(name, _NOT_THERE):
                # The class pickles something else in place of this attribute, and restores it by itself.
                if self._strict and not is_same(old, entry):
                    raise pytorch_error(
                        f"{where!r} differs, and its class pickles something else in its place: {REMEDY}"
                    )
                continue
            self._attribute(real, name, entry, where)
        for name, attributes in facts.of_tensors.items():
            tensor = module._parameters.get(name, module._buffers.get(name))
            for key, entry in attributes.items() if tensor is not None else ():
                self._attribute(vars(tensor), key, entry, f"{_join(start, name)}.{key}")

    def _attribute(self, holder: dict[str, Any], name: str, entry: Any, where: str) -> None:
        old = holder.get(name, _NOT_THERE)
        if _is_place(old) and _is_place(entry):
            return  # the live model keeps its own device and dtype
        if is_tensor(old) and is_tensor(entry) and not _can_take(old, entry):
            new: Any = entry.to("cpu" if old.is_meta else old.device)
        elif is_tensor(old) and not is_tensor(entry) and not isinstance(entry, PickleOnly):
            new = entry
        else:
            new = self._value(old, entry, where)
        if new is not old and new is not _NOT_THERE:
            self._steps.append(lambda: holder.__setitem__(name, new))

    def _is_view(self, target: torch.Tensor, stored: torch.Tensor) -> bool:
        """Tell whether an attribute is a view of a parameter where the stored one has memory of its own.

        A module that never ran may have such a view in the place of values that it will compute.
        """
        of_live, of_stored = self._storages()
        return bool(of_live) and _storage(target) in of_live and _storage(stored) not in of_stored

    def _live(self, target: Any, stored: Any, path: str) -> None:
        import torch

        state = stored.state if isinstance(stored, StoredObject) else stored
        where = _where(path)
        if isinstance(state, PickleOnly) or (isinstance(target, torch.nn.Module) and not isinstance(state, Mapping)):
            raise pytorch_error(f"{where} is a {type(target).__name__}, and a {_kind(stored)} was stored there")
        if isinstance(target, torch.nn.Module):
            beside: Mapping[str, Any] = stored.beside if isinstance(stored, StoredObject) else {}
            state, beside = self._tensors_of_classes(target, state, beside, path)
            filling = ModuleFilling(target, state, beside, where=where, strict=self._strict)
            self.rounded += [f"{path}.{text}" if path else text for text in filling.rounded]
            self.copies += filling.filled(f"{path}." if path else "")
            self._steps.append(filling.execute)
            if isinstance(stored, StoredObject) and stored.modules.entry is not None:
                before, self._storages = self._storages, cache(partial(_storages_of, filling.modules, state, beside))
                self._modules(filling.modules, stored.modules.entry, path)
                self._storages = before
            return
        if isinstance(target, torch.optim.lr_scheduler.LRScheduler) and isinstance(state, dict):
            # Its load_state_dict() updates the given attributes and keeps the rest.
            its = target.state_dict()
            for key, value in state.items():
                if isinstance(value, PickleOnly):
                    self._opaque(its.get(key, _NOT_THERE), value, _join(path, key))
            state = {key: value for key, value in state.items() if not isinstance(value, PickleOnly)}
            self._check_class(target, stored, its.keys(), state.keys(), where)
        state = with_flat_tensors(state)
        opaque = find_opaque(state, objects_too=True)
        if opaque is not None:
            raise pytorch_error(
                f"the state of {where} holds a {opaque.kind}, which only a pickle can restore: {REMEDY}"
            )
        if isinstance(target, torch.amp.GradScaler) and state and not target.is_enabled():
            raise pytorch_error(f"{where} is a GradScaler that is not enabled, and takes no state: enable it first")
        state = self._in_order(target, stored, with_live_keys(state, self._live_tensors, where), where)
        self._steps.append(lambda: load_state(target, state, where))

    def _in_order(self, target: Any, stored: Any, state: Any, where: str) -> Any:
        """Check the state of an optimizer; return it with its parameters in the order of the live one's."""
        import torch

        own = parameters_of(target)
        if own is None:
            return state
        parameters = [Stored(name=name, shape=shape) for name, shape in getattr(stored, "parameters", ())]
        if not isinstance(target, torch.optim.Optimizer) or has_own_format(target):
            if len(parameters) == len(own):
                # Nobody knows the format, so only the same order is certain to fit.
                groups = [{"params": list(group["params"])} for group in target.param_groups]
                in_live_order(target, groups, parameters, self._live_tensors(), where)
            return state
        check_groups(target, state, where)
        groups = state["param_groups"]
        keys, stored_keys = (
            {key for group in some for key in group if key not in _OF_SCHEDULERS}
            for some in (target.param_groups, groups)
        )
        self._check_class(target, stored, keys, stored_keys, where)
        named = self._live_tensors()
        if not any(each.name for each in parameters) or not {*map(id, own)} & {*map(id, named.values())}:
            names, named = stored_names(groups, target, named)
            shapes = [each.shape for each in parameters] or [None] * len(names)
            parameters = [Stored(name=name, shape=shape) for name, shape in zip(names, shapes, strict=True)]
        groups = in_live_order(target, groups, parameters, named, where, entries=state["state"])
        state = dict(state, param_groups=groups)
        check_shapes(target, state, where)
        self.replaced += replaced_by(target, state, where)
        return state

    def _live_tensors(self) -> Mapping[str, Any]:
        """Return the parameters and buffers of the modules to fill, by their paths."""
        if self._named is None:
            self._named = named_tensors(self._original)
        return self._named

    def _tensors_of_classes(
        self, module: torch.nn.Module, state: Mapping[str, Any], beside: Mapping[str, Any], path: str
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Plan for the tensors of subclasses of a module; return what is stored, with the live ones in their place."""
        odd = [name for stored in (state, beside) for name, entry in stored.items() if isinstance(entry, PickleOnly)]
        if not odd:
            return state, beside
        own = dict(own_tensors(module))
        expected = module.state_dict()
        for name in odd:
            live = expected.get(name, own.get(name))
            stored: Any = state if name in state else beside
            if is_tensor(live) and name in own:
                # The state dict has the tensors as they are stored, without a gradient.
                self._opaque(live, stored[name], _join(path, name))
                changed: Any = type(stored)(stored)
                changed[name] = own[name]
                vars(changed).update(vars(stored)) if hasattr(stored, "__dict__") else None
                state, beside = (changed, beside) if stored is state else (state, changed)
        return state, beside

    def _check_class(self, target: Any, stored: Any, own: Set[Any], keys: Set[Any], where: str) -> None:
        """Check that the state is one of an optimizer or scheduler of the same class, as far as the state tells."""
        only = [{key for key in some if not str(key).startswith("_")} for some in (own - keys, keys - own)]
        is_other = all(only) and "verbose" not in only[0] | only[1]
        kind = type(target)
        stored_kind = stored.kind if isinstance(stored, StoredObject) else ""
        if is_of_torch(kind) and stored_kind.startswith("torch.optim."):
            is_other = kind.__name__ != _kind(stored)
        if is_other and self._strict:
            raise pytorch_error(
                f"{where} is a {kind.__name__}, and the stored state is that of "
                f"{f'a {_kind(stored)}' if stored_kind else f'one with {_some(sorted(map(str, only[1])))}'}: "
                f"give one of the same class, or {REMEDY}"
            )

    def _tensor(self, target: torch.Tensor, stored: Any, path: str) -> torch.Tensor:
        where = _where(path)
        if not is_tensor(stored):
            raise pytorch_error(f"{where} is a tensor, and a {_kind(stored)} was stored there")
        if shape_of(target) != shape_of(stored):
            raise pytorch_error(
                f"{where} was stored as {dtype_name(stored)} {tuple(shape_of(stored))} and does not fit a tensor of "
                f"{dtype_name(target)} {tuple(shape_of(target))}"
            )
        reason = misfit(target, stored)
        if reason is not None:
            raise pytorch_error(f"{where} {reason}: {REMEDY}")
        if is_expanded(target):
            raise pytorch_error(f"{where} cannot be filled: it is expanded, and its elements share memory. Clone it")
        reason = without_memory(target)
        if reason is not None:
            raise pytorch_error(f"{where} {reason}")
        if loses(stored.dtype, target.dtype):
            self.rounded.append(f"{path} ({dtype_name(stored)} to {dtype_name(target)})")
        if refusal(target) is None and refusal(stored) is None:
            self.copies.append(Copy(where=_name(path), target=target, source=stored))
        self._steps.append(lambda: copy_into(target, stored, where))
        for name, entry in vars(stored).items():
            self._attribute(vars(target), name, entry, f"{_name(path)}.{name}")
        return target

    def _mapping(self, target: Mapping[Any, Any], stored: Any, path: str) -> Any:
        where = _where(path)
        beside: Mapping[Any, Any] = {}
        if isinstance(stored, StoredObject):
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
                    f"the stored mapping does not have all entries of {where}: it lacks {_some(missing)} and has "
                    f"{_some(list(stored))}. Leave those out, or give strict=False to fill the entries on both sides"
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
        if isinstance(stored, NamedItems):
            return self._named_items(target, stored, path)
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


def _storages_of(
    modules: Mapping[str, Any], state: Mapping[str, Any], beside: Mapping[str, Any]
) -> tuple[set[int | None], set[int | None]]:
    live = {_storage(tensor) for _, tensor in tensors_of(modules.items())}
    return live, {_storage(each) for each in (*state.values(), *beside.values()) if is_tensor(each)}


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's memory; None if it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, ValueError, NotImplementedError):  # ValueError: it is not initialized yet
        return None


def _replace_content(target: Any, content: Any, stored: Any) -> None:
    if isinstance(target, list):
        target[:] = content
        return
    content = [*content.items()] if isinstance(content, dict) else [*content]
    target.clear()
    if isinstance(target, deque):
        target.extend(content)
    elif type(target) is Counter:
        dict.update(target, content)
    else:
        target.update(content)
    if isinstance(target, defaultdict):
        target.default_factory = stored.default_factory
    if hasattr(target, "__dict__"):
        vars(target).clear()
        vars(target).update(vars(stored))


def _can_take(old: torch.Tensor, entry: torch.Tensor) -> bool:
    """Tell whether a tensor can be given the elements of another one."""
    fits = old.dtype == entry.dtype and shape_of(old) == shape_of(entry) and misfit(old, entry) is None
    return fits and not is_expanded(old) and not old.is_meta


@cache
def _plain_getstates() -> frozenset[Any]:
    """Return the ``__getstate__`` that leave a module's attributes as they are."""
    import torch

    return frozenset([object.__getstate__, torch.nn.Module.__getstate__])


def _is_of(module: Any, kind: str) -> bool:
    """Tell whether a module has a class of some name, or gets it when it is filled."""
    becomes = getattr(module, "cls_to_become", None)
    names = {type(module).__name__} | ({becomes.__name__} if isinstance(becomes, type) else set())
    return kind in names or (kind in _BATCH_NORMS and not names.isdisjoint(_BATCH_NORMS))


def _is_place(value: Any) -> bool:
    import torch

    return isinstance(value, torch.dtype | torch.device) or (
        type(value) is str and _DEVICE.fullmatch(value) is not None
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _name(path: str) -> str:
    return path or "it"


def _where(path: str) -> str:
    return repr(path) if path else ROOT


def _kind(stored: Any) -> str:
    return (
        stored.kind.rpartition(".")[2]
        if isinstance(stored, StoredObject | PickleOnly | NamedItems)
        else type(stored).__name__
    )


def _some(keys: list[Any]) -> str:
    names = ", ".join(repr(key) for key in keys[:10])
    return f"{names} and {len(keys) - 10} more" if len(keys) > 10 else names
