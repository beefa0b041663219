"""Live objects of a training: which ones have a state dict, the states of generators, and facts of all others.

`facts_and_parts` returns the facts of an object that only a pickle can restore (`tensorcas_flavors._facts`), so that a
live one is filled without reading the pickle. Tensors, arrays, random generators and objects with a state dict are its
*parts*: the tree of a model (`_tree`) describes these itself.

Functions and classes that travel by value stay those of the live process. The facts of a class are its name; those of a
function are its code without line numbers, its defaults, and its closure. Devices and dtypes stay those of the live
model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from tensorcas_flavors._facts import Facts, facts_of, is_taken, take_value
from tensorcas_flavors._pickling import ViewOf
from tensorcas_flavors.pytorch._kinds import is_subclass, reduction, taken_apart
from tensorcas_flavors.pytorch._tensors import geometry, pytorch_error, refusal
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base import dtypes

if TYPE_CHECKING:
    import torch

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def is_part(value: Any) -> bool:
    """Tell whether the tree of a model describes a value so that a live one can be filled."""
    return is_tensor(value) or is_array(value) or is_live(unwrap(value)) or generator_state(value) is not None


def is_named_tuple(kind: type) -> bool:
    """Tell whether `collections.namedtuple` or `typing.NamedTuple` made a class."""
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple)


def is_live(value: object) -> bool:
    """Tell whether an object has ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def is_tensor(value: object) -> bool:
    """Tell whether a value is a tensor of any kind, without importing torch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # absent while another thread imports torch
    return kind is not None and issubclass(type(value), kind)


def unwrap(model: Any) -> Any:
    """Return the module that ``torch.compile`` or a parallel wrapper wraps, or the object itself."""
    while type(model).__name__ in _WRAPPERS and type(model).__module__.startswith("torch."):
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


def own_tensors(module: torch.nn.Module, prefix: str = "") -> Iterable[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module and its submodules under each of their names."""
    return tensors_of(module.named_modules(prefix=prefix, remove_duplicate=False))


def tensors_of(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of named modules, without those of submodules."""
    for name, part in modules:
        start = name + "." if name else ""
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    yield start + key, tensor


def modules_in(state: Any, path: str = "", met: set[int] | None = None) -> Iterable[tuple[str, torch.nn.Module]]:
    """Yield the modules of a nest of mappings, lists and tuples, without wrappers, each with its path."""
    met = set() if met is None else met
    if id(state) in met:
        return
    met.add(id(state))
    if isinstance(state, Mapping):
        parts: Any = state.items()
    elif isinstance(state, list | tuple):
        parts = enumerate(state)
    else:
        module, kind = unwrap(state), getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", ())
        if isinstance(module, kind):
            yield path, module
        return
    for key, part in parts:
        if type(part) not in _PLAIN or isinstance(part, list | tuple | dict):
            yield from modules_in(part, f"{path}.{key}" if path else str(key), met)


def named_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the modules of a state, by all of their paths in it."""
    return {name: tensor for path, module in modules_in(state) for name, tensor in own_tensors(module, path)}


def parameters_of(optimizer: Any) -> list[Any] | None:
    """Return the parameters of an optimizer, or of an object that has such groups, in order; None if it has none."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        return None
    return [parameter for group in groups for parameter in group.get("params", ()) if is_tensor(parameter)]


def bare_name(name: str) -> str:
    """Return a name without the parts that wrappers of modules add."""
    return ".".join(part for part in name.split(".") if part not in _ADDED)


_ADDED = frozenset(("module", "_orig_mod"))
PYTHON, NUMPY, LEGACY, TORCH = "random", "numpy", "numpy legacy", "torch"
_BITS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorState:
    """State of a random generator."""

    kind: str
    """Kind of generator: one of the words above."""
    engine: str | None
    """Name of the bit generator of numpy, or the device of torch."""
    state: Any
    """Plain values and arrays."""
    seeds: dict[str, Any] | None
    """Seeds of the bit generator of numpy, from which it spawns others."""


def generator_state(generator: Any) -> GeneratorState | None:
    """Return the state of a generator, None if it is none or one that cannot be made anew from its state."""
    kind = type(generator)
    if kind is random.Random:
        return GeneratorState(kind=PYTHON, engine=None, state=generator.getstate(), seeds=None)
    if kind is np.random.Generator or kind is np.random.RandomState:
        bits = generator.bit_generator if kind is np.random.Generator else generator._bit_generator
        seeds = bits.seed_seq
        if type(bits) not in _engines().values() or type(seeds) not in (np.random.SeedSequence, type(None)):
            return None
        state = bits.state if kind is np.random.Generator else generator.get_state(legacy=False)
        return GeneratorState(
            kind=NUMPY if kind is np.random.Generator else LEGACY,
            engine=type(bits).__name__,
            state=state,
            seeds=None if seeds is None else seeds.state,
        )
    torch = sys.modules.get("torch")
    if torch is not None and kind is torch.Generator:
        return GeneratorState(kind=TORCH, engine=str(generator.device), state=generator.get_state().numpy(), seeds=None)
    return None


def make_generator(state: GeneratorState) -> Any:
    """Make a generator.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: No generator has such a state, or the device is missing here.
    """
    if state.kind == PYTHON:
        generator: Any = random.Random()
    elif state.kind == TORCH:
        import torch

        generator = torch.Generator(state.engine)
    else:
        bits: Any = _engines()[state.engine]()
        generator = {NUMPY: np.random.Generator, LEGACY: np.random.RandomState}[state.kind](bits)
    set_state(generator, state)
    return generator


def can_take_state(generator: Any, state: GeneratorState) -> bool:
    """Tell whether a live object is a generator that can take a state."""
    own = generator_state(generator)
    return own is not None and (own.kind, own.engine) == (state.kind, state.engine)


def set_state(generator: Any, state: GeneratorState) -> None:
    """Give a generator a state."""
    if state.kind == PYTHON:
        generator.setstate(state.state)
    elif state.kind == TORCH:
        import torch

        generator.set_state(torch.from_numpy(np.array(state.state)))
    else:
        bits = generator.bit_generator if state.kind == NUMPY else generator._bit_generator
        own = state.state if state.kind == NUMPY else {name: state.state[name] for name in ("bit_generator", "state")}
        bits.__setstate__((own, None if state.seeds is None else np.random.SeedSequence(**state.seeds)))
        if state.kind == LEGACY:
            generator.set_state(state.state)


def _engines() -> dict[str | None, Any]:
    return {name: getattr(np.random, name) for name in _BITS}


_PLAIN = frozenset((type(None), bool, int, float, str, bytes, tuple, list, dict))
_PART = "part"


def plain_view(array: Array) -> Array:
    """Return a plain array with the memory of one of a subclass."""
    return np.ndarray.view(array, np.ndarray)


def facts_and_parts(
    value: object, is_part: Callable[[Any], bool], view_of: ViewOf = plain_view
) -> tuple[Facts, list[Any]]:
    """Return the facts of an object and its parts.

    Args:
        value: Anything that can be pickled.
        is_part: Tells of each object in it whether it is a part.
        view_of: As `tensorcas_flavors._pickling.dump_skeleton` has it.

    Returns:
        The facts, and the parts in the order of their numbers. ``fixed`` has the numbers of parts that cannot be filled
        in place.

    Raises:
        AdapterError: The object cannot be pickled.
    """
    if is_tensor(value):
        value = reduction(value)  # type: ignore[arg-type]
    taker = _Taker(value, is_part)
    return facts_of("pytorch", value, taker.take_out, view_of=view_of), taker.parts


def live_facts_and_parts(value: object, is_part: Callable[[Any], bool]) -> tuple[Facts, list[Any]]:
    """Return `facts_and_parts` of an object to fill.

    A tensor of a subclass may pickle copies of what it holds. Nothing that a second pickling makes anew is filled.
    """
    facts, parts = facts_and_parts(value, is_part)
    if not is_tensor(value):
        return facts, parts
    again, parts_again = facts_and_parts(value, is_part)
    slots = [
        slot._replace(
            value=slot.value if slot.value is other.value else None,
            place=slot.place if slot.place and other.place and slot.place.root is other.place.root else None,
        )
        for slot, other in zip(facts.slots, again.slots, strict=True)
    ]
    copied = {n for n, pair in enumerate(zip(parts, parts_again, strict=True)) if not is_in_place_of(*pair)}
    return facts._replace(slots=slots, fixed=facts.fixed | copied), parts


def is_in_place_of(one: Any, other: Any) -> bool:
    """Tell whether two parts are one object, or tensors with the same elements in the same memory."""
    return bool(_place(one) == _place(other))


def _place(part: Any) -> Any:
    if not is_tensor(part) or is_subclass(part):
        return id(part)
    apart = None if refusal(part) is None else taken_apart(part)
    return geometry(part) if apart is None else [_place(each) for each in apart[1].values() if is_tensor(each)]


class _Taker:
    """Parts that one pickling takes out."""

    def __init__(self, root: object, is_part: Callable[[Any], bool]) -> None:
        import torch

        self.parts: list[Any] = []
        self._places = (torch.dtype, torch.device)
        self._root = root
        self._is_part = is_part
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # alive, so that no later object gets their ids

    def take_out(self, part: Any) -> tuple[Any, ...] | None:
        """Claim a part; see `dump_skeleton`."""
        kind = type(part)
        if kind in _PLAIN:
            return None
        if kind in self._places:
            return kind.__name__, "", 0
        if kind is FunctionType:
            return None if is_importable(part) else self._function(part)
        if kind is partial:
            return self._keep("partial", "", [part.func, part.args, part.keywords, dict(vars(part))])
        if issubclass(kind, type):
            return None if is_importable(part) else ("class", part.__qualname__, 0)
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
    """Tell whether a value is a numpy array, or one that maps a file, that can be a row."""
    if type(part) is not np.ndarray and type(part) is not np.memmap:
        return False
    try:
        dtypes.dtype_name(part.dtype)
    except ValueError:
        return False
    return True


def attributes_of(module: torch.nn.Module) -> tuple[dict[str, Any], bool]:
    """Return a module's own pickled attributes, and whether they are pickled unchanged.

    Hooks and their handles are code, the mode belongs to the caller, and parameters, buffers and submodules are in the
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
    of_torch = torch_attributes()
    kept = {name: value for name, value in own.items() if name not in of_torch and not _is_of_hooks(value)}
    return kept, is_itself


def _is_of_hooks(value: Any) -> bool:
    from torch.utils.hooks import RemovableHandle

    if type(value) is list:
        return set(map(type, value)) == {RemovableHandle}
    return type(value) is RemovableHandle


@lru_cache(maxsize=1)
def torch_attributes() -> frozenset[str]:
    """Return the names of the attributes that every module has."""
    import torch

    return frozenset(vars(torch.nn.Module())) | {"_compiled_call_impl"}


def is_importable(named: Any) -> bool:
    """Tell whether a class or function is pickled by its name."""
    module = sys.modules.get(named.__module__)
    is_there = type(module) is ModuleType and vars(module).get(named.__qualname__) is named
    if is_there and named.__module__ != "__main__" and not cloudpickle.cloudpickle.list_registry_pickle_by_value():
        return True  # as cloudpickle finds out with eight calls
    return bool(cloudpickle.cloudpickle._should_pickle_by_reference(named))


def _code_digest(code: CodeType) -> str:
    return blake2b(repr(_code_facts(code)).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _code_facts(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        sizes = constant.co_argcount, constant.co_posonlyargcount, constant.co_kwonlyargcount, constant.co_flags
        names = constant.co_names, constant.co_varnames, constant.co_freevars, constant.co_cellvars
        return sizes, names, constant.co_code, [_code_facts(each) for each in constant.co_consts]
    if isinstance(constant, frozenset):
        return sorted(repr(_code_facts(each)) for each in constant)
    return [_code_facts(each) for each in constant] if isinstance(constant, tuple) else constant
