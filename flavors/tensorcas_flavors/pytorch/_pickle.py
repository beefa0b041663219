"""Pickle of a model without its tensors, which are rows.

The pickle is as in `tensorcas_flavors._pickling`, but a tensor is a call of `restore`, so that no Python of ours runs
for the hundreds of small objects in a module. Pickles name `restore`, `restore_made`, `restore_subclass`,
`restore_array`, `restore_generator`, `of_class` of `_kinds`, `set_attributes`, `bare`, `parametrized`,
`optimizer_state` and `the_same`: these are never renamed.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import sys
import types
from collections import OrderedDict
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from tensorcas_flavors._pickling import MAGIC, load_skeleton, reduce_array
from tensorcas_flavors.pytorch._kinds import as_made, of_class, put_together, reduction, taken_apart, why_refused
from tensorcas_flavors.pytorch._layout import ARRAY, ELSEWHERE, ModelRows, check_row
from tensorcas_flavors.pytorch._tensors import name_of, pytorch_error, refusal, row_dtype
from tensorcas_flavors.pytorch._tree import TreeWriter
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base import dtypes
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    import torch

_FORGOTTEN = ("_optimizer_", "_zero_grad_", "_warned_", "_patch_")
_loading: ContextVar[_StoredTensors] = ContextVar("_loading")


def dump(obj: object, rows: ModelRows, tree: TreeWriter) -> tuple[bytes, set[type]]:
    """Pickle an object without its tensors, and make rows for tensors that have none.

    Args:
        obj: What to pickle.
        rows: Rows of the object's state dicts.
        tree: Writer of the object's tree.

    Returns:
        The pickle, and the classes of the objects in it.

    Raises:
        AdapterError: Something in it cannot be pickled, or a tensor has no exact array.
    """
    buffer = io.BytesIO()
    buffer.write(MAGIC)
    try:
        pickler = _Pickler(buffer, rows, tree)
        pickler.dump(obj)
    except AdapterError:
        raise
    except Exception as error:  # pickling runs code of the model's classes, which may raise anything
        raise pytorch_error(
            f"a {type(obj).__name__} cannot be pickled: {error}. Store the state_dict() of an object that cannot be "
            "pickled in its place; a load with into= fills the object from that"
        ) from error
    return buffer.getvalue(), pickler.kinds | pickler.of_tensors | pickler.optimizers


def load(
    skeleton: Array, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor], *, is_converted: bool = False
) -> Any:
    """Unpickle an object. This runs code that the skeleton names.

    Args:
        skeleton: The skeleton.
        rows: The rows by name.
        tensors: The rows that are tensors, as tensors.
        is_converted: Whether these have been moved or converted.

    Raises:
        AdapterError: The skeleton is damaged, a class it names is not installed here, or rows are missing.
    """
    stored_parts = _StoredTensors(rows, tensors, is_converted)
    token = _loading.set(stored_parts)
    try:
        return load_skeleton("pytorch", skeleton, _refuse_reference)
    finally:
        _loading.reset(token)


def _refuse_reference(reference: Any) -> object:
    raise pytorch_error(f"the skeleton is damaged: its pickle refers to {reference!r}")


def _current() -> _StoredTensors:
    parts = _loading.get(None)
    if parts is None:
        raise pytorch_error("this pickle is part of a model: load it with its adapter")
    return parts


def restore(row: str, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a new tensor over a row of the model that is being loaded."""
    return _current().tensor(row, dtype, shape, requires_grad, is_parameter)


def restore_made(kind: str, parts: dict[str, Any], requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Return a tensor that is made of plain ones."""
    return as_made(put_together(kind, parts), requires_grad, is_parameter)


def restore_subclass(function: Any, arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return a tensor of a subclass, as its own pickle makes it."""
    _current().check_makes(function)
    return function(*arguments)  # type: ignore[no-any-return]


def restore_array(row: str, dtype: str, shape: tuple[int, ...], fortran: bool) -> Array:
    """Return the numpy array that is a row of the model that is being loaded."""
    array = _current().array(row, dtype, shape)
    return np.asfortranarray(array) if fortran else array


def restore_generator(device: str, row: str) -> torch.Generator:
    """Return a new generator with the state that is a row of the model that is being loaded."""
    import torch

    return torch.Generator(device).set_state(torch.from_numpy(np.array(_current().array(row, "uint8", None))))


def set_attributes(part: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Give a tensor the attributes it had."""
    vars(part).update(attributes)


def bare(kind: type) -> Any:
    """Return a new object without state."""
    return kind.__new__(kind)  # type: ignore[call-overload]


def parametrized(module: torch.nn.Module, state: Any) -> None:
    """Give a module of `torch.nn.utils.parametrize` its state, then the class that computes its tensors."""
    from torch.nn.utils import parametrize

    module.__setstate__(state)  # type: ignore[no-untyped-call]
    parametrize._inject_new_class(module)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)


def optimizer_state(optimizer: torch.optim.Optimizer, states: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give an optimizer its state, then the attributes that its own pickle omits (those of LBFGS)."""
    if states[0]:
        optimizer.__setstate__(states[0])
    vars(optimizer).update(states[1])


def the_same(module: Any) -> Any:
    """Return the module that a wrapper wrapped."""
    return module


_BY_NAME = frozenset(["builtins", "collections", "tensorcas_flavors", "torch"])
"""Packages whose classes and functions are pickled by name."""


def _is_by_name(part: Any) -> bool:
    """Tell whether a class or function is one of these packages, without the searches of cloudpickle."""
    module = part.__module__
    return (
        type(module) is str
        and module.partition(".")[0] in _BY_NAME
        and not cloudpickle.list_registry_pickle_by_value()
        and getattr(sys.modules.get(module), part.__qualname__, None) is part
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, rows: ModelRows, tree: TreeWriter) -> None:
        import torch

        # cloudpickle's own table is a ChainMap, whose misses cost more than the rest of a module's pickle.
        self.dispatch_table = {**copyreg.dispatch_table, **cloudpickle.CloudPickler._dispatch_table}
        super().__init__(file, protocol=5)
        self._torch = torch
        self._tensors = (torch.nn.Parameter, torch.Tensor)
        self._rows = rows
        self._tree = tree
        self.kinds: set[type] = set()
        """Classes whose objects pickle as they do by themselves."""
        self.of_tensors: set[type] = set()
        """Subclasses of tensors and of arrays."""
        self.optimizers: set[type] = set()
        self._unnamed = itertools.count()

    def reducer_override(self, part: Any) -> Any:
        kind = type(part)
        if kind in self._tensors:
            return self._tensor(part)
        if kind is OrderedDict:
            # The result of its own method, without a search for slots that it repeats each time; a module holds a
            # dozen of them.
            return OrderedDict, (), vars(part) or None, None, iter(part.items())
        if kind in self.kinds and id(part) not in self._tree.unwrapped:
            return NotImplemented
        if issubclass(kind, type | types.FunctionType):
            if _is_by_name(part):
                return NotImplemented
            reduced = super().reducer_override(part)
            if isinstance(part, type) and isinstance(reduced, tuple) and len(reduced) > 2:
                # Pickling an instance leaves this cache on its class. With it the second save of an unchanged model
                # would differ from the first.
                reduced[2][0].pop("__slotnames__", None)
            return reduced
        if id(part) in self._tree.unwrapped:
            return the_same, (self._tree.unwrapped[id(part)],)
        if id(part) in self._tree.generators:
            return restore_generator, (str(part.device), self._tree.generators[id(part)])
        if kind is np.ndarray:
            return self._array(part)
        return self._special(part, kind)

    def _special(self, part: Any, kind: type) -> Any:
        torch = self._torch
        if isinstance(part, torch.Tensor):
            reason = why_refused(part)
            if reason is not None:
                raise pytorch_error(f"a tensor {reason}")
            self.of_tensors.add(kind)
            function, arguments, *state = reduction(part)
            return restore_subclass, (function, arguments), *state
        if isinstance(part, np.ndarray):
            if kind is np.memmap:
                return self._array(self._tree.view_of(part))
            self.of_tensors.add(kind)
            return reduce_array(part, self._tree.view_of)
        if isinstance(part, torch.jit.ScriptModule):
            raise pytorch_error(f"a {kind.__name__} is TorchScript: store the module that was scripted or traced")
        if isinstance(part, torch.nn.Module) and torch.nn.utils.parametrize.is_parametrized(part):
            base: Any = kind.__bases__[0]
            return bare, (base,), base.__getstate__(part), None, None, parametrized
        if isinstance(part, torch.optim.Optimizer) and kind.__getstate__ is torch.optim.Optimizer.__getstate__:
            self.optimizers.add(kind)
            # A wrapper of another optimizer may leave out the constructor of torch, and then cannot use its methods:
            # __setstate__() would change the class, for all objects of it.
            own = part.__getstate__() if "_optimizer_step_pre_hooks" in vars(part) else {}
            rest = {name: value for name, value in vars(part).items() if name not in own}
            # Hooks are no state, and a scheduler wraps step() anew by itself.
            rest = {name: value for name, value in rest.items() if name != "step" and not name.startswith(_FORGOTTEN)}
            if rest:
                return bare, (kind,), (own, rest), None, None, optimizer_state
        self.kinds.add(kind)
        return NotImplemented

    def _array(self, part: Array) -> Any:
        row = self._tree.arrays.get(id(part))
        try:
            dtype = dtypes.dtype_name(part.dtype)
        except ValueError:
            return NotImplemented
        if row is None:
            row = self._rows.add_array(ELSEWHERE + str(next(self._unnamed)), part, ARRAY)
        fortran = bool(part.flags.f_contiguous and not part.flags.c_contiguous)
        return restore_array, (row, dtype, part.shape, fortran)

    def _tensor(self, part: torch.Tensor) -> Any:
        row = self._rows.find(part)
        if row is None:
            row = self._rows.add(ELSEWHERE + str(next(self._unnamed)), part)
        is_parameter = type(part) is self._torch.nn.Parameter
        function: Any = restore
        facts: tuple[Any, ...] = ()
        if row is not None:
            facts = (row, name_of(part.dtype), tuple(part.shape), part.requires_grad, is_parameter)
        else:
            apart = taken_apart(part)
            if apart is None:
                raise pytorch_error(f"a tensor {refusal(part)}")
            function, facts = restore_made, (*apart, part.requires_grad, is_parameter)
        attributes = vars(part)
        if not attributes:
            return function, facts
        return function, facts, dict(attributes), None, None, set_attributes


class _StoredTensors:
    """Maker of the tensors of one load."""

    def __init__(self, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor], is_converted: bool) -> None:
        self._is_converted = is_converted
        self._rows = rows
        self._tensors = tensors

    def tensor(
        self, row: str, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
    ) -> torch.Tensor:
        import torch

        itemsize = getattr(getattr(torch, dtype), "itemsize", 0)
        check_row(self._rows, row, row_dtype(dtype, itemsize) or dtype, shape)
        tensor = self._tensors[row].detach()
        return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)

    def check_makes(self, function: Any) -> None:
        """Refuse the parts of a tensor that were converted one by one: its class says what a conversion means."""
        if self._is_converted and function is not of_class:
            raise pytorch_error(
                "device and dtype would convert the parts of a tensor of a class of its own: leave them out, and call "
                "to() of the loaded model"
            )

    def array(self, row: str, dtype: str, shape: tuple[int, ...] | None) -> Array:
        array = self._rows.get(row)
        is_other = array is None or array.dtype != dtypes.parse_dtype(dtype)
        if array is None or is_other or (shape is not None and array.shape != tuple(shape)):
            raise pytorch_error(f"array {row!r}, stored as {dtype} {shape}, is missing or another: read all tensors")
        return array
