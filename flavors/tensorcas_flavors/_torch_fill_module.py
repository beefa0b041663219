"""Fills one module, with ``load_state_dict``'s own meaning and error texts."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorcas_flavors._torch_equal import Filled
from tensorcas_flavors._torch_memory import filling_refusal
from tensorcas_flavors._torch_read import Described, NamedItems, Opaque
from tensorcas_flavors._torch_tensors import dtype_name, pytorch_error
from tensorcas_flavors._torch_tree import is_tensor, own_tensors

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

EXPANDED = (
    "is expanded, so that its elements share memory, and the stored ones differ. Clone it there, or load a new model"
)
"""What is wrong with a tensor that `without_repeats` is None for."""
ROOT = "the object to fill"
"""What errors call what a caller gives to be filled; its parts are called by their path."""
_PREFIXES = ("module.", "_orig_mod.")
"""What torch's wrappers put before the names of the module they wrap."""


class ModuleFilling:
    """The checked filling of one module."""

    def __init__(
        self,
        module: torch.nn.Module,
        stored: Mapping[str, Any],
        beside: Mapping[str, torch.Tensor],
        *,
        where: str,
        strict: bool,
    ) -> None:
        """Check what can be checked without changing the module.

        Args:
            module: The module, not wrapped.
            stored: The state dict.
            beside: Tensors that the stored module had and its state dict left out.
            where: What to call the module in errors.
            strict: As ``load_state_dict`` takes it.

        Raises:
            AdapterError: It does not fit.
        """
        _check_is_state_dict(stored, where)
        self.rounded: list[str] = []
        """Tensors that lose digits, and how."""
        self._module = module
        self._strict = strict
        self._where = where
        self._views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        expected = module.state_dict()
        own = dict(own_tensors(module))
        # What only a pickle says is missing, as torch will say.
        state = {name: value for name, value in stored.items() if not isinstance(value, Opaque | NamedItems)}
        state, metadata = with_prefix_of(expected, state, getattr(stored, "_metadata", None))
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
        # Without the version numbers, load_state_dict takes the state dict for one of an old torch and overlooks gaps.
        if metadata is None:
            metadata = getattr(expected, "_metadata", None) or {}
        vars(self._state)["_metadata"] = OrderedDict(metadata)
        self._own = own
        self._check(expected)

    def execute(self) -> None:
        """Fill the module.

        Raises:
            AdapterError: The module's own code refuses after all; the module may be filled in part.
        """
        self._load()
        for name, tensor in self._beside.items():
            copy_into(self._own[name], tensor, repr(name))
        for name, (target, source) in self._views.items():
            copy_into(target, source, repr(name))
        for buffers, name, tensor in self._made:
            buffers[name] = tensor

    def filled(self) -> Iterator[Filled]:
        """Name the memory that is filled, and what is put there, as far as the module's own code does nothing else."""
        for name, tensor in [*self._state.items(), *self._beside.items()]:
            own = self._own.get(name)
            if own is None or not is_tensor(tensor) or own is tensor or filling_refusal(own) is not None:
                continue
            if own.shape == tensor.shape and not own.is_meta:
                yield Filled(where=name, target=own, source=tensor)
        for name, (target, source) in self._views.items():
            yield Filled(where=name, target=target, source=source)

    def _check(self, expected: Mapping[str, Any]) -> None:
        import torch

        doubtful = expected.keys() != self._state.keys()
        for name, tensor in [*self._state.items(), *self._beside.items()]:
            target: Any = self._own[name] if name in self._beside else expected.get(name)
            if not is_tensor(target) or not is_tensor(tensor) or torch.nn.parameter.is_lazy(target):
                continue
            if target.shape != tensor.shape:
                if name in self._beside:
                    raise pytorch_error(
                        f"{self._where}: tensor {name!r} was stored as {dtype_name(tensor)} {tuple(tensor.shape)} and "
                        f"does not fit one of {dtype_name(target)} {tuple(target.shape)}"
                    )
                doubtful = True
                continue
            if loses(tensor.dtype, target.dtype):
                self.rounded.append(f"{name} ({dtype_name(tensor)} to {dtype_name(target)})")
            if is_expanded(target):
                self._fill_once(name, target, tensor)
        if doubtful:
            # Hooks may make such a state dict fit: torch says, and copies nothing when asked.
            with _copying_nothing():
                self._load()

    def _fill_once(self, name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Fill a tensor whose elements are repeated, if the stored one repeats them too."""
        pair = without_repeats(self._own[name], tensor) if name in self._own else None
        if pair is None:
            raise pytorch_error(f"{self._where}: tensor {name!r} of the model to fill {EXPANDED}")
        self._views[name] = pair
        if name in self._beside:
            del self._beside[name]
        else:
            # load_state_dict is given the very tensor, and copies nothing.
            self._state[name] = self._own[name]

    def _load(self) -> None:
        try:
            self._module.load_state_dict(self._state, strict=self._strict)
        except Exception as error:
            raise pytorch_error(f"{self._where}: {error}" if self._where != ROOT else str(error)) from error


def _without_tensors(module: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where the non-persistent buffers are that a module has no tensors for yet, by their names."""
    return {
        f"{path}.{name}" if path else name: (part._buffers, name)
        for path, part in module.named_modules(remove_duplicate=False)
        for name, tensor in part._buffers.items()
        if tensor is None and name in part._non_persistent_buffers_set
    }


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor are repeated, so that torch copies nothing into it."""
    return any(step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True))


def without_repeats(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return of an expanded tensor, and of what is to be copied into it, each element once; None if that one differs.

    Args:
        target: An expanded tensor.
        source: One of the same shape.
    """
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())
    return (target[once], source[once]) if _same_bits(source[once].expand(source.shape), source) else None


def warn_of_rounding(rounded: Sequence[str]) -> None:
    """Say which tensors may have lost digits, if any."""
    if rounded:
        _logger.warning(
            "stored tensors were converted to the dtypes of the model, which may round them: %s", ", ".join(rounded)
        )


def copy_into(target: torch.Tensor, source: torch.Tensor, where: str) -> None:
    """Copy a tensor's elements into another.

    Raises:
        AdapterError: Torch cannot.
    """
    import torch

    try:
        with torch.no_grad():
            target.copy_(source)
    except RuntimeError as error:
        raise pytorch_error(f"tensor {where} cannot be filled: {error}") from error


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
    parts = [name for name, value in stored.items() if isinstance(value, Described) or _holds_tensors(name, value)]
    if parts:
        names = ", ".join(repr(name) for name in stored)
        raise pytorch_error(
            f"{where} is a module, and a whole training state was stored, with the entries {names}: give a mapping, "
            f"such as {{{parts[0]!r}: module}}"
        )
    if odd:
        raise pytorch_error(f"{where} is a module, and what was stored is no state dict: it has the entry {odd[0]!r}")


def _holds_tensors(name: Any, value: Any) -> bool:
    if not isinstance(value, Mapping) or str(name).endswith("_extra_state"):
        return False
    return any(map(is_tensor, value.values())) or "param_groups" in value


def with_prefix_of(
    expected: Mapping[str, Any], state: dict[str, Any], metadata: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Take a wrapper's prefix off all names, or put it before them, where that is what the module expects."""
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
    return all([name.startswith(prefix) for name in names] or [False])


def _any_starts(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    words = [tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor for tensor in (one, other)]
    return torch.equal(*words)


def _copying_nothing() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    class CopyingNothing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                return args[0]
            return func(*args, **(kwargs or {}))

    return CopyingNothing()
