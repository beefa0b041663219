"""Filling of one module, with a whole state dict or with some tensors of a checkpoint.

`ModuleFilling` gives a state dict to ``load_state_dict``, and keeps its meaning and error texts. `fill_weights` reads
most tensors straight into the module's own memory, after a plan has found everything that does not fit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from tensorcas_flavors._facts import REMEDY
from tensorcas_flavors.pytorch._kinds import misfit, shape_of
from tensorcas_flavors.pytorch._layout import ELSEWHERE
from tensorcas_flavors.pytorch._objects import is_tensor, own_tensors, unwrap
from tensorcas_flavors.pytorch._tensors import (
    ROW_DTYPES,
    Copy,
    Geometry,
    all_as_tensors,
    as_array,
    as_tensor,
    check_device,
    copy_all,
    dtype_name,
    extent_bytes,
    filling_refusal,
    geometry,
    instead_of,
    made_like,
    memory_refusal,
    name_of,
    overlapping,
    pytorch_error,
    refusal,
    row_dtype,
    some,
    torch_dtype,
    without_memory,
)
from tensorcas_flavors.pytorch._tree import NamedItems, PickleOnly, StoredObject, find_opaque, with_flat_tensors
from tensorcas_mlflow.adapter import STAGED_BYTES, Array, CheckTensors, NotFilled, ReadTensors, StoredTensor
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import group_by_bytes
from tensorcas_mlflow.errors import TensorCasError

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)
EXPANDED = (
    "is expanded, so that its elements share memory, and the stored ones differ. Clone it there, or load a new model"
)
"""Fault of a tensor for which `without_repeats` returns None."""
PARTLY_FILLED = "the live model is filled in part: load it again, or load a new one"
"""Note of an error that comes after the model has begun to change."""
ROOT = "the object to fill"
"""Name of the object that a caller gives, for errors; its parts are named by their path."""
_EXTRA_STATE = "_extra_state"
"""Last part of the name of what ``get_extra_state`` returns."""
_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes of torch's wrappers before the names of the wrapped module."""


class ModuleFilling:
    """Checked filling of one module from a state dict."""

    def __init__(
        self,
        module: torch.nn.Module,
        stored: Mapping[str, Any],
        beside: Mapping[str, torch.Tensor],
        *,
        where: str,
        strict: bool,
    ) -> None:
        """Check whether the state dict fits. The module does not change.

        Args:
            module: The module, without wrappers.
            stored: The state dict.
            beside: Tensors of the stored module that its state dict left out.
            where: Name of the module in errors.
            strict: As in ``load_state_dict``.

        Raises:
            AdapterError: The state dict does not fit.
        """
        import torch

        _check_is_state_dict(stored, where)
        plain = (torch.Tensor, torch.nn.Parameter)
        self.rounded: list[str] = []
        """Tensors that may lose digits, with both dtypes."""
        self._module = module
        self._strict = strict
        self._where = where
        self._views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        expected = module.state_dict()
        self._kind = _ModuleKind.of(module)
        self.modules = self._kind.modules
        """The module and its submodules, under each of their names."""
        own = self._kind.own
        metadata = getattr(stored, "_metadata", None)
        # The class of a tensor in extra state, or of a buffer that is not there yet, makes it of its parts.
        made = {name: with_flat_tensors(value) for name, value in stored.items() if name.endswith(_EXTRA_STATE)}
        stored = {**stored, **made}
        made = {name: with_flat_tensors(value) for name, value in beside.items() if own.get(name) is None}
        beside = {**beside, **made}
        for name, value in [*stored.items(), *beside.items()]:
            if type(value) in plain:
                continue
            opaque = find_opaque(value, objects_too=True)
            if opaque is not None and (value is not opaque or (strict and name not in expected and name not in own)):
                raise pytorch_error(
                    f"{where}: {name!r} holds a {opaque.kind}, which only a pickle can restore: {REMEDY}"
                )
        beside = {name: value for name, value in beside.items() if not isinstance(value, PickleOnly)}
        # Values that only a pickle can restore are left out, and torch reports them as missing.
        state = {name: value for name, value in stored.items() if not isinstance(value, PickleOnly | NamedItems)}
        state, metadata = with_prefix_of(expected, state, metadata)
        self._state: OrderedDict[str, Any] = OrderedDict(state)
        self._beside: dict[str, torch.Tensor] = {}
        self._made: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        nothing = {} if all(name in own for name in beside) else _without_tensors(module)
        for name, tensor in [*state.items(), *beside.items()]:
            if name in own and name not in expected and is_tensor(tensor):
                self._beside[name] = tensor
                self._state.pop(name, None)
            elif name in nothing and name not in state:
                self._made.append((*nothing[name], tensor))
            elif name not in self._state:
                self._state[name] = tensor
        # Without version numbers, load_state_dict assumes a state dict of an old torch and ignores gaps.
        if metadata is None:
            metadata = getattr(expected, "_metadata", None) or {}
        vars(self._state)["_metadata"] = OrderedDict(metadata)
        self._own = own
        self._has_odd = False
        """True if a stored tensor is made of others, which torch cannot copy with many at once."""
        self._check(expected)

    def execute(self) -> None:
        """Fill the module.

        Raises:
            AdapterError: The module's own code refuses; the module may be filled in part.
        """
        if not self._copy():
            self._load()
        for name, tensor in self._beside.items():
            if tensor is not self._own[name]:
                copy_into(self._own[name], tensor, repr(name))
        for name, (target, source) in self._views.items():
            copy_into(target, source, repr(name))
        for buffers, name, tensor in self._made:
            buffers[name] = tensor

    def filled(self, path: str) -> list[Copy]:
        """Return the copies into the module's memory, as far as the module's own code makes no others.

        Args:
            path: Prefix of the names in errors.
        """
        import torch

        plain = {torch.Tensor, torch.nn.Parameter}
        copies = []
        for name, tensor in [*self._state.items(), *self._beside.items()]:
            own = self._own.get(name)
            if own is None or own is tensor or not (type(tensor) in plain or is_tensor(tensor)):
                continue
            if filling_refusal(own) is not None:
                continue
            if own.shape == tensor.shape and not own.is_meta:
                copies.append(Copy(path + name, own, tensor, self._kind.loads_plainly))
        return copies + [Copy(path + name, target, source) for name, (target, source) in self._views.items()]

    def _check(self, expected: Mapping[str, Any]) -> None:
        import torch

        doubtful = expected.keys() != self._state.keys()
        plain = {torch.Tensor, torch.nn.Parameter}
        for name, tensor in [*self._state.items(), *self._beside.items()]:
            target: Any = self._own[name] if name in self._beside else expected.get(name)
            if (type(tensor) not in plain and not is_tensor(tensor)) or name.endswith(_EXTRA_STATE):
                continue  # set_extra_state() gets its value as it is
            if type(target) not in plain and (not is_tensor(target) or torch.nn.parameter.is_lazy(target)):
                continue
            if target.is_nested and type(target) in plain and name not in self._beside:
                raise pytorch_error(
                    f"{self._where}: tensor {name!r} of the model is a nested tensor, for which torch's "
                    f"load_state_dict() fails: {REMEDY}"
                )
            is_odd = tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided
            is_plain = type(target) in plain and type(tensor) in plain and not is_odd
            is_plain = is_plain and target.layout is torch.strided and not (target.is_nested or target.is_quantized)
            if target.shape != tensor.shape if is_plain else shape_of(target) != shape_of(tensor):
                if name in self._beside:
                    raise pytorch_error(
                        f"{self._where}: tensor {name!r} was stored as {dtype_name(tensor)} {tuple(shape_of(tensor))} "
                        f"and does not fit one of {dtype_name(target)} {tuple(shape_of(target))}"
                    )
                doubtful = True
                continue
            if self._kind.loads_plainly and not is_plain and (reason := misfit(target, tensor)) is not None:
                raise pytorch_error(f"{self._where}: tensor {name!r} of the model {reason}: {REMEDY}")
            if loses(tensor.dtype, target.dtype):
                self.rounded.append(f"{name} ({dtype_name(tensor)} to {dtype_name(target)})")
            is_dense = type(target) in plain and target.layout is torch.strided and target.is_contiguous()
            self._has_odd |= is_odd
            if target.is_meta or (is_dense and not is_odd and target.untyped_storage().nbytes() < target.nbytes):
                if self._kind.loads_plainly:  # a module's own code may allocate the memory
                    raise pytorch_error(f"{self._where}: tensor {name!r} of the model {without_memory(target)}")
                continue
            if not is_dense and is_expanded(target):
                self._fill_once(name, target, tensor)
        if doubtful:
            # Hooks may make such a state dict fit, so torch decides, in a mode that copies nothing.
            with _copying_nothing():
                self._load()

    def _fill_once(self, name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Plan for a tensor with repeated elements, if the stored one repeats them too."""
        pair = without_repeats(self._own[name], tensor) if name in self._own else None
        if pair is None:
            raise pytorch_error(f"{self._where}: tensor {name!r} of the model to fill {EXPANDED}")
        self._views[name] = pair
        if name in self._beside:
            del self._beside[name]
        else:
            # load_state_dict gets the very tensor, and copies nothing.
            self._state[name] = self._own[name]

    def _copy(self) -> bool:
        """Copy all tensors at once, as ``load_state_dict`` does one after the other; return False if it does more."""
        import torch

        if not self._kind.only_copies or self._views or self._state.keys() != self._kind.own.keys() - self._kind.apart:
            return False
        if self._has_odd or torch.__future__.get_swap_module_params_on_conversion():
            return False
        targets = [self._own[name] for name in self._state]
        kinds = {torch.Tensor, torch.nn.Parameter}
        if not kinds.issuperset(map(type, [*targets, *self._state.values()])):
            return False
        if [target.shape for target in targets] != [source.shape for source in self._state.values()]:
            return False
        # After a refusal, load_state_dict() names the tensor.
        return copy_all([target.detach() for target in targets], list(self._state.values()))

    def _load(self) -> None:
        has_own = any(self._own.get(name) is value for name, value in self._state.items())
        try:
            # A class of tensors may refuse a copy to itself.
            with _copying_nothing(but_others=True) if has_own else nullcontext():
                self._module.load_state_dict(self._state, strict=self._strict)
        except Exception as error:
            raise pytorch_error(f"{self._where}: {error}" if self._where != ROOT else str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleKind:
    """Facts about a module that decide how it loads a state dict."""

    modules: dict[str, torch.nn.Module]
    """The module and its submodules, under each of their names."""
    own: dict[str, Any]
    """Its parameters and buffers, under each of their names."""
    apart: set[str]
    """The buffers outside of state dicts."""
    loads_plainly: bool
    """True if only code of torch handles the state dict."""
    only_copies: bool
    """True if, moreover, no hook runs and no extra state is set afterwards."""

    @classmethod
    def of(cls, module: torch.nn.Module) -> _ModuleKind:
        """Look at a module and its submodules."""
        import torch

        own: dict[str, Any] = {}
        apart: set[str] = set()
        loaders: set[Any] = set()
        kinds: set[Any] = set()
        has_pre_hooks = has_hooks = False
        modules = dict(module.named_modules(remove_duplicate=False))
        for path, part in modules.items():
            start = path + "." if path else ""
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        own[start + key] = tensor
            for key in part._non_persistent_buffers_set:
                apart.add(start + key)
            has_pre_hooks |= bool(part._load_state_dict_pre_hooks)
            has_hooks |= bool(getattr(part, "_load_state_dict_post_hooks", None))
            kinds.add(type(part))
            for name in _LOADERS:
                if name in vars(part):
                    loaders.add(getattr(part, name))
        loaders.update([getattr(kind, name) for kind in kinds for name in _LOADERS])
        loads_plainly = not has_pre_hooks and all(map(_is_of_torch, loaders))
        sets_extra = any(kind.set_extra_state is not torch.nn.Module.set_extra_state for kind in kinds)
        only_copies = loads_plainly and not has_hooks and not sets_extra
        return cls(modules=modules, own=own, apart=apart, loads_plainly=loads_plainly, only_copies=only_copies)


_LOADERS = ("load_state_dict", "_load_from_state_dict")


def _is_of_torch(loader: Any) -> bool:
    """Tell whether a loader of state dicts is code of torch, and not a function that only has its name."""
    scope = getattr(getattr(loader, "__func__", loader), "__globals__", {})
    return str(scope.get("__name__")).startswith("torch.nn.modules.")


def _without_tensors(module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return the registers and keys of non-persistent buffers that have no tensor yet, by name."""
    return {
        f"{path}.{name}" if path else name: (part._buffers, name)
        for path, part in module.named_modules(remove_duplicate=False)
        for name, tensor in part._buffers.items()
        if tensor is None and name in part._non_persistent_buffers_set
    }


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor repeats elements; torch refuses to copy into such a tensor."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous():
        return False
    return any(step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True))


def without_repeats(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return views of an expanded tensor and its source with each element once; None if the source repeats otherwise.

    Args:
        target: An expanded tensor.
        source: A tensor of the same shape.
    """
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    return (target[once], source[once]) if _same_bits(source[once].expand(source.shape), source) else None


def warn_of_rounding(rounded: Sequence[str]) -> None:
    """Warn of tensors that may have lost digits, if there are any."""
    if rounded:
        _logger.warning(
            "stored tensors were converted to the dtypes of the model, which may round them: %s", ", ".join(rounded)
        )


def copy_into(target: torch.Tensor, source: torch.Tensor, where: str) -> None:
    """Copy a tensor's elements into another.

    Raises:
        AdapterError: Torch cannot copy it.
    """
    import torch

    try:
        with torch.no_grad():
            target.copy_(source)
    except RuntimeError as error:
        raise pytorch_error(f"tensor {where} cannot be filled: {error}") from error


@cache
def loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether values may change when a tensor of one dtype is copied into one of another."""
    import torch

    if source == target or source == torch.bool:
        return False
    is_float, becomes_float = (dtype.is_floating_point or dtype.is_complex for dtype in (source, target))
    if is_float != becomes_float:
        return True
    try:
        return torch.promote_types(source, target) != target
    except (RuntimeError, TypeError):
        return True


def _check_is_state_dict(stored: Mapping[Any, Any], where: str) -> None:
    odd = [name for name in stored if type(name) is not str]
    parts = [
        name
        for name, value in stored.items()
        if not is_tensor(value) and (isinstance(value, StoredObject) or _holds_tensors(name, value))
    ]
    if parts:
        names = ", ".join(repr(name) for name in stored)
        raise pytorch_error(
            f"{where} is a module, and a whole training state was stored, with the entries {names}: give a mapping, "
            f"such as {{{parts[0]!r}: module}}"
        )
    if odd:
        raise pytorch_error(
            f"{where} is a module, and no state dict was stored: the stored one has the entry {odd[0]!r}"
        )


def _holds_tensors(name: Any, value: Any) -> bool:
    if not isinstance(value, Mapping) or str(name).endswith(_EXTRA_STATE):
        return False
    return any(map(is_tensor, value.values())) or "param_groups" in value


def with_prefix_of(
    expected: Mapping[str, Any], state: dict[str, Any], metadata: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Remove a wrapper's prefix from all names, or add it, if the module expects that."""
    for _ in range(4):  # a module may be wrapped more than once
        for prefix in _PREFIXES:
            if _all_start(state, prefix) and not _any_starts(expected, prefix):
                state = {name.removeprefix(prefix): value for name, value in state.items()}
                if metadata is not None:
                    bare = prefix[:-1]
                    metadata = {
                        name.removeprefix(prefix) if name != bare else "": value
                        for name, value in metadata.items()
                        if name == bare or name.startswith(prefix)
                    }
                break
            if _all_start(expected, prefix) and state and not _any_starts(state, prefix):
                state = {prefix + name: value for name, value in state.items()}
                if metadata is not None:
                    metadata = {(prefix + name).removesuffix("."): value for name, value in metadata.items()}
                break
        else:
            break
    return state, metadata


def _all_start(names: Iterable[str], prefix: str) -> bool:
    found = False
    for name in names:
        if not name.startswith(prefix):
            return False
        found = True
    return found


def _any_starts(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    words = [tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor for tensor in (one, other)]
    return torch.equal(*words)


def _copying_nothing(*, but_others: bool = False) -> Any:
    """Return a mode in which no tensor is copied; or only others than a tensor to itself."""
    import torch
    from torch.overrides import TorchFunctionMode

    class CopyingNothing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_ and not (but_others and args[0] is not args[1]):
                return args[0]
            return func(*args, **(kwargs or {}))

    return CopyingNothing()


BATCH_BYTES = 64 << 20
"""Bytes of a batch held besides the module; a larger tensor is a batch alone."""


def fill_weights(
    model: Any,
    stored: Mapping[str, StoredTensor],
    read: ReadTensors,
    *,
    check: CheckTensors | None,
    wanted: Callable[[str], bool] | None,
    strict: bool,
    device: torch.device,
) -> NotFilled:
    """Fill a module in place; see `Adapter.fill_weights`.

    This only copies: unlike ``load_state_dict`` it runs no hook, and extra state stays as it is.

    Args:
        model: A module; it may have a wrapper that `unwrap` knows, and names may have its prefix on either side.
        stored: By the module's names. Tensors that `extract` found outside of state dicts are passed over, and named
            in the result. One of several tied tensors is enough; of several stored ones the last in the module's order
            is taken, as ``load_state_dict`` does.
        read: Reads at most `STAGED_BYTES` in all at once into new memory, before anything changes. Of more, it gets an
            ``out`` for tensors that are on the CPU, contiguous and of the stored dtype; the others are read in batches
            of 64 MiB. Values are converted as by ``load_state_dict``.
        check: As there. It is not called if the read itself comes before the first change: for at most `STAGED_BYTES`,
            and for a module on the meta device.
        wanted: As there; it must choose one name at least.
        strict: As there. Shapes must fit in any case. Non-persistent buffers are filled if they were stored, and never
            count as missing.
        device: Device for tensors of the meta device. They are made with their own dtype, and put in place when all
            are read. Tied ones are tied again; other holders (an optimizer) keep the old ones.

    Raises:
        AdapterError: The tensors do not fit, or torch fails to copy one.
    """
    import torch

    module = unwrap(model)
    if not isinstance(module, torch.nn.Module):
        raise pytorch_error(
            f"only a module is filled with parts of a checkpoint, and this is a {type(module).__name__}"
        )
    check_device(device)
    plan = _WeightsPlan(module, stored, wanted)
    plan.check(strict=strict)
    warn_of_rounding(plan.rounded)
    if check is not None and plan.changes_while_reading:
        check(plan.sources)
    with torch.no_grad():
        plan.execute(read, device)
    return plan.not_filled


@dataclass(eq=False, slots=True)
class _Target:
    """One tensor of the module, or several with the same elements in the same memory."""

    tensor: torch.Tensor
    """One of the tensors."""
    refusal: str | None
    """Reason why it cannot be filled."""
    names: list[str] = field(default_factory=list)
    """In the module's order."""
    others: list[torch.Tensor] = field(default_factory=list)
    """The other tensor objects."""
    source: str = ""
    """Name of the stored tensor in the checkpoint."""
    n_bytes: int = 0
    """Bytes of the stored tensor."""
    row_dtype: str = ""
    """Dtype of the array that holds the stored tensor."""
    stored_as: Any = None
    """Dtype of the stored tensor in torch."""
    is_expanded: bool = False
    """True if it repeats elements."""
    made: torch.Tensor | None = None
    """Replacement of a tensor on the meta device."""

    @property
    def memory(self) -> torch.Tensor:
        """Memory to write to, without its autograd history."""
        return self.tensor.detach() if self.made is None else self.made


class _WeightsPlan:
    """Plan for filling tensors of a module from stored ones."""

    def __init__(
        self, module: torch.nn.Module, stored: Mapping[str, StoredTensor], chosen: Callable[[str], bool] | None
    ) -> None:
        self.rounded: list[str] = []
        self._module = module
        self._own = dict(own_tensors(module))
        try:
            state = module.state_dict(keep_vars=True)
        except Exception as error:  # state_dict() runs hooks of the module's class, which may raise anything
            raise pytorch_error(f"the {type(module).__name__} gives no state_dict(): {error}") from error
        known = set(map(id, self._own.values()))
        names = self._own | {name: value for name, value in state.items() if id(value) in known}
        outside = [name for name in stored if name.startswith(ELSEWHERE)]
        named = {name: source for name, source in stored.items() if not name.startswith(ELSEWHERE)}
        stored = with_prefix_of(names, named, None)[0]
        wanted = None if chosen is None else set(filter(chosen, {**names, **stored, **dict.fromkeys(outside)}))
        self._problems: list[str] = []
        self._has_changed = False
        self._has_memory = False
        """True if a filled tensor is not on the meta device."""
        self._is_odd = False
        """True if the filled tensors cannot be copied into all at once."""
        missing: list[str] = []
        without_memory: list[str] = []
        self._filled: list[_Target] = []
        for target in _targets(names):
            given = [name for name in target.names if name in stored and (wanted is None or name in wanted)]
            if given:
                self._choose(target, given, stored)
                continue
            left = [name for name in target.names if wanted is None or name in wanted]
            missing += [name for name in left if name in state]
            if target.tensor.is_meta:
                without_memory += left
        self.not_filled = NotFilled(
            missing=tuple(missing),
            unexpected=tuple(name for name in stored if name not in names and (wanted is None or name in wanted)),
            without_memory=tuple(without_memory),
            passed_over=tuple(name for name in outside if wanted is None or name in wanted),
        )
        if chosen is not None and not self._filled and self.not_filled == NotFilled() and not self._problems:
            self._problems.append("no tensor has a name that is asked for")

    def check(self, *, strict: bool) -> None:
        """Raise one AdapterError that names everything that does not fit."""
        problems = list(some(self._problems))
        if strict:
            for title, names in (("missing", self.not_filled.missing), ("unexpected", self.not_filled.unexpected)):
                if names:
                    problems.append(f"{title}: {', '.join(some([repr(name) for name in names]))}")
        if problems:
            raise pytorch_error(f"the {type(self._module).__name__} cannot be filled: {'; '.join(problems)}")

    @property
    def sources(self) -> list[str]:
        """The names of the stored tensors to fill with, each once."""
        return list(dict.fromkeys([target.source for target in self._filled]))

    @property
    def changes_while_reading(self) -> bool:
        """True if memory of the module changes before the last tensor is read."""
        return self._has_memory and not self._is_staged

    @property
    def _is_staged(self) -> bool:
        """True if all tensors are read into new memory before the first one changes."""
        return self._has_memory and sum([target.n_bytes for target in self._filled]) <= STAGED_BYTES

    def execute(self, read: ReadTensors, device: torch.device) -> None:
        """Read the tensors and fill the module."""
        try:
            if self._is_staged and not self._is_odd:
                self._copy_all(read)
            else:
                self._fill(_read_before(read, self.sources) if self._is_staged else read, device)
        except TensorCasError as error:
            if self._has_changed:
                error.add_note(PARTLY_FILLED)
            raise

    def _copy_all(self, read: ReadTensors) -> None:
        arrays = read(self.sources)
        values = all_as_tensors(
            [arrays[target.source] for target in self._filled], [target.stored_as for target in self._filled]
        )
        self._has_changed = bool(self._filled)
        if not copy_all([target.tensor.detach() for target in self._filled], values):
            for target, value in zip(self._filled, values, strict=True):
                copy_into(target.memory, value, repr(target.names[0]))

    def _fill(self, read: ReadTensors, device: torch.device) -> None:
        self._fill_expanded(read)
        for target in self._filled:
            if target.tensor.is_meta:
                target.made = made_like(target.tensor, device)
        out, converted = self._ways()
        self._has_changed |= self._has_memory
        if out:
            try:
                read(list(out), out=out)
            finally:
                self._mark_changed()  # a read that fails may have written some
        for batch in group_by_bytes(converted, lambda target: target.n_bytes, BATCH_BYTES):
            arrays = read(list(dict.fromkeys([target.source for target in batch])))
            for target in batch:
                copy_into(target.memory, as_tensor(arrays[target.source], target.stored_as), repr(target.names[0]))
            del arrays  # before the next batch is read
        self._put_in_place()

    def _choose(self, target: _Target, names: Sequence[str], stored: Mapping[str, StoredTensor]) -> None:
        """Choose a stored tensor for a target; note a misfit."""
        tensor = target.tensor
        if target.refusal is not None:
            self._problems.append(f"tensor {target.names[0]!r} {target.refusal}")
            return
        for name in names:
            source = stored[name]
            try:
                stored_as = _stored_dtype(source.dtype, tensor.dtype)
                if source.shape != tensor.shape:
                    raise ValueError(
                        f"was stored as {source.dtype} {source.shape} and does not fit one of {dtype_name(tensor)} "
                        f"{tuple(tensor.shape)}"
                    )
            except ValueError as error:
                self._problems.append(f"tensor {name!r} {error}")
                continue
            target.source, target.row_dtype, target.stored_as = source.name, source.dtype or "uint8", stored_as
        if target.stored_as is None:
            return
        self._filled.append(target)
        target.n_bytes = tensor.numel() * target.stored_as.itemsize
        target.is_expanded = not tensor.is_contiguous() and not tensor.is_meta and is_expanded(tensor)
        self._has_memory |= not tensor.is_meta
        self._is_odd |= target.is_expanded or tensor.is_meta or tensor.is_inference()
        if loses(target.stored_as, tensor.dtype):
            self.rounded.append(f"{target.names[0]} ({str(target.stored_as)[6:]} to {dtype_name(tensor)})")

    def _fill_expanded(self, read: ReadTensors) -> None:
        """Fill tensors with repeated elements, after a check that the stored ones repeat them too."""
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for target in self._filled:
            if not target.is_expanded:
                continue
            value = as_tensor(read([target.source])[target.source], target.stored_as)
            pair = without_repeats(target.memory, value)
            if pair is None:
                self._problems.append(f"tensor {target.names[0]!r} {EXPANDED}")
            else:
                pairs[target.names[0]] = (pair[0], pair[1].clone())
        self.check(strict=False)
        self._has_changed = bool(pairs)
        for first, (once, values) in pairs.items():
            copy_into(once, values, repr(first))
        self._filled = [target for target in self._filled if not target.is_expanded]

    def _ways(self) -> tuple[dict[str, Array], list[_Target]]:
        """Return the stored tensors to read straight into their targets, and the targets to copy into."""
        alone = _alone(self._filled)
        out: dict[str, Array] = {}
        converted = []
        for target in self._filled:
            if target.source not in out and target in alone and _is_as_stored(target):
                out[target.source] = as_array(target.memory)
            else:
                converted.append(target)
        return out, converted

    def _mark_changed(self) -> None:
        """Tell autograd of writes by numpy, which it does not see: a graph that needs the old values must fail."""
        import torch

        for target in self._filled:
            if not target.tensor.is_meta and not target.tensor.is_inference():
                torch.autograd.graph.increment_version(target.tensor)

    def _put_in_place(self) -> None:
        new = {
            id(old): instead_of(old, target.made)
            for target in self._filled
            if target.made is not None
            for old in (target.tensor, *target.others)
        }
        for name, tensor in self._own.items():
            if id(tensor) in new:
                path, _, key = name.rpartition(".")
                # An LSTM, for example, keeps a list of its parameters, and updates it when one is set.
                setattr(self._module.get_submodule(path), key, new[id(tensor)])


def _read_before(read: ReadTensors, names: Sequence[str]) -> ReadTensors:
    """Read tensors into new memory; return a reader that copies them from there."""
    arrays = read(names)

    def copy(names: Sequence[str], *, out: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        if out is None:
            return {name: arrays[name] for name in names}
        for name in names:
            out[name][...] = arrays[name]
        return out

    return copy


def _targets(names: Mapping[str, Any]) -> list[_Target]:
    """Group names by memory."""
    made: list[_Target] = []
    by_tensor: dict[int, _Target] = {}
    by_storage: dict[int, _Target] = {}
    by_place: dict[Geometry, _Target] = {}
    for name, tensor in names.items():
        target = by_tensor.get(id(tensor))
        if target is None:
            target = _Target(tensor, filling_refusal(tensor))
            if target.refusal is None:
                first = by_storage.setdefault(tensor.untyped_storage()._cdata, target)
                if first is not target:
                    by_place.setdefault(geometry(first.tensor), first)
                    target = by_place.setdefault(geometry(tensor), target)
            if target.tensor is tensor:
                made.append(target)
            else:
                target.others.append(tensor)
            by_tensor[id(tensor)] = target
        target.names.append(name)
    return made


@cache
def _stored_dtype(source: str | None, target: torch.dtype) -> torch.dtype:
    """Return the torch dtype of a stored tensor.

    Args:
        source: Name of its dtype; None for plain bytes.
        target: Dtype of the tensor to fill.

    Raises:
        ValueError: Torch has no such dtype, or does not convert it to the target's.
    """
    row = parse_dtype(source or "uint8")
    own = name_of(target)
    if own not in ROW_DTYPES and row.name == row_dtype(own, target.itemsize):
        return target  # arrays lack it, so it is stored as words
    dtype = torch_dtype(row)
    if not _converts(dtype, target):
        raise ValueError(f"was stored as {source}, which torch does not convert to {own}")
    return dtype


@cache
def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    import torch

    if source == target:
        return True
    try:
        torch.zeros(1, dtype=target, device="cpu").copy_(torch.zeros(1, dtype=source, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _is_as_stored(target: _Target) -> bool:
    """Tell whether a target's memory takes the stored bytes unchanged."""
    tensor = target.memory
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and target.row_dtype == row_dtype(name_of(tensor.dtype), tensor.itemsize)
        and refusal(tensor) is None
        and memory_refusal(tensor, geometry(tensor)) is None
    )


def _alone(targets: list[_Target]) -> set[_Target]:
    """Return the targets on the CPU that share memory with no other target."""
    stretches = {}
    for number, target in enumerate(targets):
        tensor = target.memory
        if tensor.is_cpu:
            start = tensor.data_ptr()
            stretches[number] = range(start, start + extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize))
    groups = overlapping(list(stretches), stretches)
    return {targets[group[0]] for group in groups if len(group) == 1}
