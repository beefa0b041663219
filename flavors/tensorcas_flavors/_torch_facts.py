"""What is said of an object that only a pickle says, so that a live one can be filled without reading the pickle.

The object is pickled apart, and `_generic_facts` says what the pickle describes. What the tree of a model can say by
itself is taken out of it: tensors, arrays, random generators, and objects with a state dict are its *parts*.

Functions and classes that travel by value are the live process's own: of a class its name is said, of a function its
code without the lines it stands in, its defaults, and what it encloses. Devices and dtypes are the live model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import blake2b
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from tensorcas_flavors._generic_facts import Facts, facts_of
from tensorcas_flavors._pickling import dump_skeleton
from tensorcas_flavors._plain_values import is_taken, take_value
from tensorcas_flavors._torch_tensors import pytorch_error

if TYPE_CHECKING:
    import torch

_ATOMS = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict))
_PART = "part"


def take_apart(value: object, is_part: Callable[[Any], bool]) -> tuple[Facts, list[Any]]:
    """Say what an object holds.

    Args:
        value: Anything that can be pickled.
        is_part: Tells what to take out.

    Returns:
        What is said of it, and its parts in the order of their numbers; the numbers of parts that cannot be filled in
        place are in ``fixed``.

    Raises:
        AdapterError: It cannot be pickled.
    """
    taker = _Taker(value, is_part)
    memo: dict[int, object] = {}
    skeleton = dump_skeleton("pytorch", value, taker.take_out, memo=memo)
    return facts_of(skeleton, memo), taker.parts


class _Taker:
    def __init__(self, root: object, is_part: Callable[[Any], bool]) -> None:
        import torch

        self.parts: list[Any] = []
        self._places = (torch.dtype, torch.device)
        self._root = root
        self._is_part = is_part
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # so that no identity is met twice

    def take_out(self, part: Any) -> tuple[Any, ...] | None:
        """Claim a part; see `dump_skeleton`."""
        kind = type(part)
        if kind in _ATOMS:
            return None
        if kind in self._places:
            return kind.__name__, "", 0
        if kind is FunctionType:
            return None if _is_imported(part) else self._function(part)
        if kind is partial:
            return self._keep("partial", "", [part.func, part.args, part.keywords, dict(vars(part))])
        if issubclass(kind, type):
            return None if _is_imported(part) else ("class", part.__qualname__, 0)
        if part is not self._root and self._is_part(part):
            number = self._numbers.setdefault(id(part), len(self.parts))
            if number == len(self.parts):
                self.parts.append(part)
            return _PART, number, 0
        return take_value(part) if is_taken(kind) else None

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        name = function.__qualname__
        if id(function) in self._numbers:
            return "function", name, 0
        self._numbers[id(function)] = -1
        self._kept.append(function)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # it is empty
                cells.append(None)
        held = [function.__defaults__, function.__kwdefaults__, cells, dict(vars(function))]
        return self._keep("function", name, [_code_digest(function.__code__), *held])

    def _keep(self, word: str, name: str, held: list[Any]) -> tuple[Any, ...]:
        self._kept.append(held)
        return word, name, 0, None, None, held


def is_array(part: Any) -> bool:
    """Tell whether a part is a numpy array that a row can be."""
    from tensorcas_mlflow import dtypes

    if type(part) is not np.ndarray:
        return False
    try:
        dtypes.dtype_name(part.dtype)
    except ValueError:
        return False
    return True


def attributes_of(module: torch.nn.Module) -> tuple[dict[str, Any], bool]:
    """Return the attributes of a module that are pickled and are its own, and whether they are pickled as they are.

    Hooks and the handles of hooks are code, the mode is the caller's, and parameters, buffers and submodules are in the
    state dict.
    """
    kind = type(module)
    own: Any = vars(module)
    is_itself = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if kind.__getstate__ is not object.__getstate__ and "parametrizations" not in module._modules:
        try:
            state = module.__getstate__()  # type: ignore[no-untyped-call]
        except Exception as error:  # it is code of the module's class, which may raise anything
            raise pytorch_error(f"a {kind.__name__} cannot be pickled: {error}") from error
        own = state if type(state) is dict else own
    kept = {name: value for name, value in own.items() if name not in names_of_torch() and not _is_of_hooks(value)}
    return kept, is_itself


def _is_of_hooks(value: Any) -> bool:
    from torch.utils.hooks import RemovableHandle

    handles = value if type(value) is list and value else [value]
    return all(type(handle) is RemovableHandle for handle in handles)


@lru_cache(maxsize=1)
def names_of_torch() -> frozenset[str]:
    """Name the attributes that every module has."""
    import torch

    return frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}


def _is_imported(named: Any) -> bool:
    return bool(cloudpickle.cloudpickle._should_pickle_by_reference(named))


def _code_digest(code: CodeType) -> str:
    return blake2b(repr(_said(code)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _said(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        sizes = constant.co_argcount, constant.co_posonlyargcount, constant.co_kwonlyargcount, constant.co_flags
        names = constant.co_names, constant.co_varnames, constant.co_freevars, constant.co_cellvars
        return sizes, names, constant.co_code, [_said(each) for each in constant.co_consts]
    if isinstance(constant, frozenset):
        return sorted(repr(_said(each)) for each in constant)
    return [_said(each) for each in constant] if isinstance(constant, tuple) else constant
