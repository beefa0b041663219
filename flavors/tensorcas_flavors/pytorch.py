"""PyTorch: modules and state dicts as rows, one per tensor, each readable by the name it has in ``state_dict()``.

A state dict's skeleton is a layout (see `tensorcas_flavors._torch_tensors`), which is JSON. A module's is its pickle
without tensors, then a layout, then the layout's length as 8 bytes, little-endian.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tensorcas_flavors._pickling import dump_skeleton, is_pickle, load_skeleton
from tensorcas_flavors._torch_tensors import (
    Layout,
    as_array,
    as_tensors,
    check_row,
    dtype_name,
    geometry,
    is_json,
    pytorch_error,
    refusal,
    shared_storages,
)
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array

if TYPE_CHECKING:
    import torch

ELSEWHERE = "__tensor__/"
"""Starts the row names of tensors that are in a module's object graph but neither parameters nor buffers."""

_WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


class PyTorchAdapter(Adapter):
    """Stores `torch.nn.Module` instances and state dicts; tensors are put on the CPU.

    * A module comes back as pickle would bring it back, with tied weights tied, views viewing and strides as they
      were. Tensors of one storage that do not overlap get storages of their own. Gradients and autograd graphs are no
      part of a model and are not stored.
    * ``torch.compile``'d, ``DataParallel`` and ``DistributedDataParallel`` models are stored as the module they wrap,
      which predicts the same; ``original`` may be wrapped again.
    * A state dict is a ``dict`` or ``OrderedDict`` of tensors by name, and of values JSON can say exactly. It comes
      back as the same type with its ``_metadata``, its tensors without ``requires_grad``; entries that overlapped
      share memory again.
    """

    name: ClassVar[str] = "pytorch"

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Take modules, and mappings of names to values of which at least one is a tensor."""
        if isinstance(model, Mapping):
            return all(type(key) is str for key in model) and any(_is_tensor(part) for part in model.values())
        return _descends(model, "torch.nn.modules.module", "Module")

    def extract(self, model: Any) -> dict[str, Array]:
        """Take a module or state dict apart, as views of its tensors where they are on the CPU.

        Returns:
            The tensors of ``state_dict()`` in its order, then other buffers by their dotted path, then tensors found
            elsewhere, as `ELSEWHERE` and their path or a number, then the skeleton. Two names for one tensor are two
            entries with one array.

        Raises:
            AdapterError: A tensor is of a kind that has no exact array (sparse, quantized, meta, a subclass, …), or
                something else cannot be pickled; the message names it.
        """
        if isinstance(model, Mapping):
            return _extract_state(model)
        module = _unwrap(model)
        rows = _Rows()
        state = module.state_dict()
        for name, tensor in itertools.chain(state.items(), _own_tensors(module)):
            if _is_tensor(tensor):
                rows.add(name, tensor)
        pickled = dump_skeleton(self.name, module, _TakeOut(rows, module))
        plain = {name: value for name, value in state.items() if not _is_tensor(value) and is_json(value)}
        layout = Layout(storages=shared_storages(rows.tensors), plain=plain, metadata=_metadata(state)).encode()
        tail = np.frombuffer(layout + len(layout).to_bytes(8, "little"), dtype=np.uint8)
        return rows.arrays | {SKELETON: np.concatenate([pickled, tail])}

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None) -> Any:
        """Put a module or state dict together again, using the memory of the arrays.

        Args:
            tensors: What `extract` returned; the skeleton may be missing if ``original`` is given.
            original: A module is filled as by ``load_state_dict(strict=True)``, and its non-persistent buffers too;
                tensors elsewhere in it are left alone. It must have the stored dtypes, as torch would round without a
                word. It may be partly filled when an error is raised. A mapping of tensors is filled key by key, in
                place, all or nothing; stored tensors it does not name are left out.

        Raises:
            AdapterError: Names, shapes or dtypes do not fit, the skeleton is damaged or missing, or the code of the
                model is not importable.
        """
        layout = _read_layout(tensors)
        if original is None and SKELETON not in tensors:
            raise pytorch_error("there is no skeleton among the arrays: give a model to fill, or load the weights only")
        if original is None and not is_pickle(tensors[SKELETON]):
            return _rebuild_state(tensors, layout)
        parts = as_tensors(tensors, layout)
        if original is None:
            return load_skeleton(self.name, tensors[SKELETON], _PutBack(tensors, parts))
        if isinstance(original, Mapping):
            _fill_state(original, tensors, parts)
        else:
            _fill_module(_unwrap(original), parts, layout)
        return original

    def weights(self, tensors: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return every row but the skeleton as a tensor, sharing memory as stored; no pickle is read.

        Besides the names of ``Module.state_dict()`` these are non-persistent buffers and tensors elsewhere: load them
        with ``strict=False``, or give `reconstruct` the module, which knows what goes where.

        Args:
            tensors: What `extract` returned, or some of it.

        Raises:
            AdapterError: The skeleton is damaged, or an array has no tensor type.
        """
        return as_tensors(tensors, _read_layout(tensors))

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """True for a module, false for a state dict."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Answer as MLflow's own PyTorch flavor does; the model is put into evaluation mode and stays in it.

        Args:
            model: A module that takes one tensor and returns one.
            data: A DataFrame, given to the model as float32, or an array, given as it is.
            params: ``device`` moves the model there first (it stays where it is otherwise); the rest are keyword
                arguments of the model.

        Returns:
            A DataFrame with the index of ``data`` for a DataFrame, an array for an array.

        Raises:
            AdapterError: The model is a state dict, which does not say how to compute.
            TypeError: Data or predictions are of another type.
        """
        import pandas as pd
        import torch

        if not isinstance(model, torch.nn.Module):
            raise pytorch_error("a state dict cannot predict: load it into a module first, with load_state_dict")
        if not isinstance(data, pd.DataFrame | np.ndarray):
            raise TypeError(f"a PyTorch model takes a DataFrame or an array, not a {type(data).__name__}")
        arguments = dict(params or {})
        if "device" in arguments:
            model = model.to(arguments.pop("device"))
        device = next((tensor.device for _, tensor in _own_tensors(model)), None)
        array = data.to_numpy(dtype=np.float32) if isinstance(data, pd.DataFrame) else data
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy(order="K")
        with torch.no_grad():
            answer = model.eval()(torch.from_numpy(array).to(device), **arguments)
        if not isinstance(answer, torch.Tensor):
            raise TypeError(f"a PyTorch model must predict one tensor, not a {type(answer).__name__}")
        predicted = as_array(answer.resolve_conj().resolve_neg())
        return pd.DataFrame(predicted, index=data.index) if isinstance(data, pd.DataFrame) else predicted

    def requirements(self) -> list[str]:
        """Name torch and cloudpickle as MLflow does: without a local label such as ``+cpu``, which no index has."""
        return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in ("torch", "cloudpickle")]


class _Rows:
    """The rows of one extract and the tensors they are of."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, torch.Tensor] = {}  # keeps their memory, so that no address is met twice
        self._names: dict[tuple[object, ...], str] = {}

    def find(self, tensor: torch.Tensor) -> str | None:
        """Return the first name of a tensor with the same elements in the same memory, if it is one that has rows."""
        return None if refusal(tensor) else self._names.get(geometry(tensor))

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Make a row and return its name, which is a longer one if another tensor has the name."""
        reason = refusal(tensor)
        if reason is not None:
            raise pytorch_error(f"tensor {name!r} {reason}")
        key = geometry(tensor)
        while name in self.arrays:
            if geometry(self.tensors[name]) == key:
                return name
            name = ELSEWHERE + name
        if not name or name == SKELETON or "\0" in name or "\n" in name:
            raise pytorch_error(f"a tensor cannot be stored under the name {name!r}: rename it")
        first = self._names.setdefault(key, name)
        self.arrays[name] = self.arrays[first] if first != name else as_array(tensor)
        self.tensors[name] = tensor
        return name


class _TakeOut:
    """Claims the tensors of a module while it is pickled, for `dump_skeleton`."""

    def __init__(self, rows: _Rows, module: torch.nn.Module) -> None:
        import torch

        self._rows = rows
        self._module = module
        self._numbers: dict[int, tuple[int, torch.Tensor]] = {}
        self._unnamed = itertools.count()
        self._others: set[type] = set()
        self._torch = torch

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(tensor): path for path, tensor in _attributes(self._module)}

    def __call__(self, part: Any) -> object | None:
        if type(part) in self._others:
            return None
        if isinstance(part, self._torch.jit.ScriptModule):
            raise pytorch_error(f"a {type(part).__name__} is TorchScript: store the module that was scripted or traced")
        if not isinstance(part, self._torch.Tensor):
            self._others.add(type(part))
            return None
        row = self._rows.find(part)
        if row is None:
            row = self._rows.add(ELSEWHERE + (self._paths.get(id(part)) or str(next(self._unnamed))), part)
        if type(part) is self._torch.nn.Parameter:
            # It pickles itself around its .data, a plain tensor that comes by here next.
            return None
        # The part is kept with its number: it stays alive, and no id is met twice.
        number, _ = self._numbers.setdefault(id(part), (len(self._numbers), part))
        return (row, number, dtype_name(part), tuple(part.shape), part.requires_grad, dict(vars(part)))


class _PutBack:
    """Returns the tensors that the references of `_TakeOut` stand for, one object per number, for `load_skeleton`."""

    def __init__(self, rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor]) -> None:
        self._rows = rows
        self._tensors = tensors
        self._objects: dict[int, torch.Tensor] = {}

    def __call__(self, reference: Any) -> torch.Tensor:
        name, number, dtype, shape, requires_grad, attributes = reference
        if number not in self._objects:
            check_row(self._rows, name, dtype, shape)
            tensor = self._tensors[name].detach().requires_grad_(requires_grad)
            vars(tensor).update(attributes)
            self._objects[number] = tensor
        return self._objects[number]


def _extract_state(state: Mapping[str, Any]) -> dict[str, Array]:
    if type(state) not in (dict, OrderedDict):
        raise pytorch_error(f"a state dict is a dict or an OrderedDict: give dict(state), not a {type(state).__name__}")
    rows = _Rows()
    plain: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    for name, value in state.items():
        if _is_tensor(value):
            rows.add(name, value)
            entries[name] = [dtype_name(value), list(value.shape)]
        elif is_json(value):
            plain[name] = value
            entries[name] = None
        else:
            raise pytorch_error(
                f"entry {name!r} is a {type(value).__name__}, neither a tensor nor plain JSON: "
                "take it out of the state dict, or make it a uint8 tensor"
            )
    metadata = _metadata(state)
    if metadata is None and hasattr(state, "_metadata"):
        raise pytorch_error("the state dict's _metadata is not plain JSON: delete it, or make it so")
    facts: dict[str, Any] = {"plain": plain, "entries": entries, "ordered": type(state) is OrderedDict}
    layout = Layout(storages=shared_storages(rows.tensors), metadata=metadata, **facts)
    return rows.arrays | {SKELETON: np.frombuffer(layout.encode(), dtype=np.uint8)}


def _rebuild_state(rows: Mapping[str, Array], layout: Layout) -> dict[str, Any]:
    if layout.entries is None:
        raise pytorch_error("the skeleton is that of a module but holds no pickle")
    tensors = as_tensors(rows, layout)
    state: dict[str, Any] = OrderedDict() if layout.ordered else {}
    for name, facts in layout.entries.items():
        if facts is None and name in layout.plain:
            state[name] = layout.plain[name]
        elif isinstance(facts, list) and len(facts) == 2 and isinstance(facts[1], list):
            check_row(rows, name, *facts)
            state[name] = tensors[name]
        else:
            raise pytorch_error(f"the skeleton does not say what entry {name!r} is")
    if layout.ordered and layout.metadata is not None:
        setattr(state, "_metadata", OrderedDict(layout.metadata))  # noqa: B010 -- no attribute a type checker knows
    return state


def _fill_state(original: Mapping[str, Any], rows: Mapping[str, Array], tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    wanted = {name: value for name, value in original.items() if isinstance(value, torch.Tensor)}
    for name, value in wanted.items():
        check_row(rows, name, dtype_name(value), value.shape)
    _copy(wanted, tensors)


def _fill_module(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    import torch

    expected = module.state_dict()
    own = dict(_own_tensors(module))
    beside = {name: own[name] for name in tensors if name in own and name not in expected}
    state: OrderedDict[str, Any] = OrderedDict(layout.plain)
    state.update((name, t) for name, t in tensors.items() if name not in beside and not name.startswith(ELSEWHERE))
    for name, tensor in tensors.items():
        target = expected.get(name, beside.get(name))
        if target is None or not isinstance(target, torch.Tensor) or torch.nn.parameter.is_lazy(target):
            continue
        if any(stride == 0 and side > 1 for stride, side in zip(target.stride(), target.shape, strict=True)):
            raise pytorch_error(
                f"tensor {name!r} of the model to fill is expanded: its elements share memory, so it cannot be filled. "
                "Clone it there, or load a new model"
            )
        if target.dtype != tensor.dtype or (name in beside and target.shape != tensor.shape):
            raise pytorch_error(
                f"tensor {name!r} was stored as {dtype_name(tensor)} {tuple(tensor.shape)} and does not fit one of "
                f"{dtype_name(target)} {tuple(target.shape)}: give a model built as the stored one was"
            )
    # Without the version numbers, load_state_dict takes the state dict for one of an old torch and overlooks gaps.
    metadata = _metadata(expected) if layout.metadata is None else layout.metadata
    setattr(state, "_metadata", OrderedDict(metadata or {}))  # noqa: B010 -- no attribute a type checker knows
    try:
        module.load_state_dict(state, strict=True)
    except Exception as error:
        raise pytorch_error(str(error)) from error
    _copy(beside, tensors)


def _copy(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    with torch.no_grad():
        for name, target in targets.items():
            try:
                target.copy_(tensors[name])
            except RuntimeError as error:
                raise pytorch_error(f"tensor {name!r} cannot be filled: {error}") from error


def _read_layout(rows: Mapping[str, Array]) -> Layout:
    """Read the layout of a skeleton without its pickle; the empty one if there is no skeleton."""
    if SKELETON not in rows:
        return Layout()
    text = rows[SKELETON].tobytes()
    n_bytes = int.from_bytes(text[-8:], "little")
    return Layout.decode(text[-8 - n_bytes : -8] if is_pickle(rows[SKELETON]) else text)


def _metadata(state: Mapping[str, Any]) -> dict[str, Any] | None:
    metadata = getattr(state, "_metadata", None)
    return dict(metadata) if isinstance(metadata, dict) and is_json(dict(metadata)) else None


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that are attributes of a module or submodule, or one level down in a container there."""
    for prefix, part in module.named_modules():
        for attribute, value in vars(part).items():
            path = f"{prefix}.{attribute}" if prefix else attribute
            if _is_tensor(value):
                yield path, value
            elif isinstance(value, dict | list | tuple):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{path}.{key}", inner) for key, inner in items if _is_tensor(inner))


def _unwrap(model: Any) -> Any:
    while type(model).__module__.startswith("torch.") and type(model).__name__ in _WRAPPERS:
        model = getattr(model, _WRAPPERS[type(model).__name__])
    return model


def _is_tensor(value: object) -> bool:
    return _descends(value, "torch", "Tensor")


def _descends(value: object, module: str, name: str) -> bool:
    """Tell whether a class of this name is among a value's classes, importing nothing."""
    return any(cls.__module__ == module and cls.__name__ == name for cls in type(value).__mro__)
