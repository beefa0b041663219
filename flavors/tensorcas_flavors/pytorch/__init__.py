"""Adapter for PyTorch: modules, state dicts and whole training states, with one row per tensor under its dotted name.

In: a module, another object with a state dict, or a nest of such. Out: rows, and a skeleton with a layout (`_layout`),
which is JSON. If there are live objects, their pickle without tensors (`_pickle`) comes before the layout. Filling a
live object (`_fill`) reads the layout alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tensorcas_flavors._pickle_tree import named_modules
from tensorcas_flavors._pickling import is_pickle, pinned_packages, try_back
from tensorcas_flavors.pytorch._fill import fill
from tensorcas_flavors.pytorch._in_place import fill_in_place
from tensorcas_flavors.pytorch._kept import PlainModule
from tensorcas_flavors.pytorch._layout import (
    ARRAY,
    CUT_BYTES,
    ELSEWHERE,
    ModelLayout,
    ModelRows,
    as_tensors,
    read_layout,
    skeleton_cuts,
    torch_types,
)
from tensorcas_flavors.pytorch._modules import fill_weights
from tensorcas_flavors.pytorch._objects import is_live, is_tensor, own_tensors
from tensorcas_flavors.pytorch._optimizers import load_named
from tensorcas_flavors.pytorch._pickle import dump, load
from tensorcas_flavors.pytorch._tensors import as_array, convert, pytorch_error
from tensorcas_flavors.pytorch._tree import TreeWriter, find_opaque, read_stored
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array, CheckTensors, NotFilled, ReadTensors, StoredTensor
from tensorcas_mlflow.base import config

if TYPE_CHECKING:
    import torch

__all__ = ["ELSEWHERE", "PyTorchAdapter"]
_LIVE = {
    ("torch.nn.modules.module", "Module"),
    ("torch.optim.optimizer", "Optimizer"),
    ("torch.optim.lr_scheduler", "LRScheduler"),
    ("torch.amp.grad_scaler", "GradScaler"),
}
_ATOMS = frozenset([str, int, float, bytes, bool, type(None)])
_MAX_CONTAINERS = 100_000
_COME_BACK: set[type] = set()
"""Classes that came back from a pickle in this process; a save of an object with others loads it once."""


class PyTorchAdapter(Adapter):
    """Adapter for modules, optimizers, state dicts, and nests of them such as a whole training state.

    * A nest of ``dict``, ``OrderedDict``, ``defaultdict``, ``list``, ``deque``, ``tuple`` and ``set`` of tensors, numpy
      arrays, random generators, dates, paths, plain values and state dicts comes back the same and needs no pickle. A
      nest with live objects (a module, an optimizer, …) is pickled as one, without its tensors, so that an optimizer
      still steps the module that it stepped. Each object's state dict is stored beside the pickle, so that live
      objects can be filled without reading the pickle.
    * A module comes back as from a pickle: with tied weights, with views of the same memory and with its strides.
      Tensors of one storage that do not overlap get storages of their own. Gradients and autograd graphs are not
      stored. Tensors come back on the CPU.
    * Sparse, nested and quantized tensors, and lazy conjugates and negatives, are rows for each tensor that they
      consist of, and need no pickle. A tensor of a subclass is a row for each tensor that its class pickles, or for its
      own memory, and needs a pickle for its class. Such a tensor in an optimizer's state is made without the pickle for
      a live optimizer, if its class has ``__tensor_unflatten__`` and was imported.
    * Models of ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel`` are stored as the wrapped module,
      which predicts the same; ``original`` may be wrapped again.

    Options:
        strict: With ``original`` only; True by default. For a module as in ``load_state_dict``, and its submodules must
            be of the stored classes. All entries of a mapping must be stored; stored entries that it does not name are
            left out, and no tensor may lose digits in the dtype of ``original``. With False, torch rounds such
            tensors, and values that only a pickle can restore stay as they are in ``original``. Shapes must fit in any
            case.
        device: Device for the tensors of a new model, or for the weights.
        dtype: A floating point or complex dtype, or its name. Such tensors of a new model, or such weights, are
            converted to it as by ``Module.to``; an optimizer's step counts are not. ``device`` and ``dtype`` are
            refused with ``original``, whose tensors keep their own; torch converts the stored ones.
    """

    name: ClassVar[str] = "pytorch"
    options: ClassVar[frozenset[str]] = frozenset({"strict", "device", "dtype"})

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Take tensors, modules, and objects that have a state dict; and nests of dicts, lists and tuples with such."""
        stack: list[Any] = [model]
        seen: set[int] = set()
        while stack and len(seen) < _MAX_CONTAINERS:
            part = stack.pop()
            kind = type(part)
            if kind in _ATOMS:
                continue
            if is_live(part) or _descends(part, _LIVE):
                return "torch" in sys.modules or find_spec("torch") is not None
            if issubclass(kind, Mapping | list | tuple):
                if id(part) not in seen:
                    seen.add(id(part))
                    stack += part.values() if issubclass(kind, Mapping) else part
            elif is_tensor(part):
                return True
        return False

    def module_for_ranks(self, model: Any) -> str | None:
        """Name the module for states with a `DTensor`, a `ShardedTensor` or an FSDP module; None for any other."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return "tensorcas_mlflow.distributed" if _is_spread(model) else None

    def extract(self, model: Any) -> dict[str, Array]:
        """Take a model or training state apart, as views of its tensors where they are on the CPU.

        Returns:
            The tensors and arrays by their dotted path (``model.0.weight``, ``optimizer.state.0.exp_avg``); those of a
            module are the tensors of ``state_dict()`` in its order, then other buffers. Tensors elsewhere in pickled
            objects follow, under `ELSEWHERE` and their path or a number; then the skeleton. Two names for one tensor
            are two entries with one array.

        Raises:
            AdapterError: A tensor has no values (meta, lazy, fake, freed memory), or an object cannot be pickled; the
                message names it.
        """
        plain = PlainModule.of(model)
        kept = None if plain is None else plain.kept()
        if kept is not None:
            return kept
        rows = ModelRows()
        fills = config.tries_fill()
        tree = TreeWriter(rows, model, fills=fills)
        try:
            node = tree.node(model, "")
            beyond = tree.beyond()
            pickled, kinds = b"", set[type]()
            if tree.needs_pickle:
                pickled, kinds = dump(tree.unwrapped.get(id(model), model), rows, tree)
            text = ModelLayout(
                storages=rows.storages(), kinds=rows.kinds, tree=node, values=tree.values, beyond=beyond
            ).encode()
        except RecursionError as error:
            raise pytorch_error(f"the {type(model).__name__} is nested too deep") from error
        tail = len(text).to_bytes(8, "little") if pickled else b""
        arrays = rows.arrays | {SKELETON: np.frombuffer(pickled + text + tail, dtype=np.uint8)}
        if not kinds <= _COME_BACK:
            fill = partial(self.reconstruct, strict=False)
            try_back(self.name, model, arrays, self.reconstruct, fill if fills else None)
            _COME_BACK.update(kinds)
        if plain is not None:
            plain.keep(model, rows, arrays[SKELETON])
        return arrays

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Rebuild a model or training state in the memory of the arrays, or fill a live one.

        Args:
            tensors: Result of `extract`; the skeleton may be missing if ``original`` is given.
            original: An object to fill, or a mapping or list of such at any depth. ``load_state_dict`` fills an object
                that has it, whether it was stored live or as a state dict; a module's non-persistent buffers are
                filled too. Tensors are copied into. Stored plain values replace plain values and the attributes of
                modules, tensors and other objects. All else that only a pickle can restore must be equal. A module
                keeps its mode (``training``), ``requires_grad``, hooks, and attributes that name a device or a dtype;
                an object with ``state_dict`` keeps everything outside of it. Names may have the prefix of
                ``DataParallel`` or ``torch.compile`` on either side. An optimizer's entries keep their dtypes, and go
                to the parameters of their names where the modules are filled too. With ``strict=False`` one warning
                names all tensors that a conversion may have rounded. Everything that can be checked is checked before
                anything changes; if torch refuses later, the object is filled in part.
            options: See the class.

        Raises:
            AdapterError: Names, shapes or classes do not fit, a part that cannot be filled differs, parts of
                ``original`` share memory and different values are stored for them, the skeleton is damaged or missing,
                or the code of the model is not importable.
        """
        chosen = _Options.of(options)
        layout = read_layout(tensors)
        if original is not None:
            chosen.check_filling()
            parts = as_tensors(tensors, layout)
            stored = read_stored(layout, tensors, parts, skip_missing=True)
            return fill(original, stored, strict=chosen.strict is not False)
        if chosen.strict is not None:
            raise pytorch_error("strict says how to fill a model: give one, or leave it out")
        if SKELETON not in tensors:
            raise pytorch_error("there is no skeleton among the arrays: give a model to fill, or load the weights only")
        read = as_tensors(tensors, layout)
        parts = chosen.apply(read)
        if is_pickle(tensors[SKELETON]):
            is_converted = any(part is not read[name] for name, part in parts.items())
            return load(tensors[SKELETON], tensors, parts, is_converted=is_converted)
        stored = read_stored(layout, tensors, parts)
        if find_opaque(stored, objects_too=True) is not None:
            raise pytorch_error("the skeleton is that of a live object but holds no pickle")
        return stored

    def fill(
        self,
        original: Any,
        stored: Mapping[str, StoredTensor],
        read: ReadTensors,
        *,
        check: CheckTensors | None,
        **options: Any,
    ) -> Any:
        """Fill a live model or training state like `reconstruct`, most tensors straight into its memory.

        An optimizer takes over new tensors, as its ``load_state_dict`` does.
        See `tensorcas_flavors.pytorch._in_place.fill_in_place`.
        """
        chosen = _Options.of(options)
        chosen.check_filling()
        return fill_in_place(original, stored, read, check, strict=chosen.strict is not False)

    def weights(self, tensors: Mapping[str, Array], **options: Any) -> dict[str, Any]:
        """Return the rows as tensors that share memory as stored, and as numpy arrays. No pickle is read.

        Beside the names of ``Module.state_dict()`` there are non-persistent buffers and tensors elsewhere: load them
        with ``strict=False``, or give `reconstruct` the module, which fills all of them.

        Args:
            tensors: Result of `extract`, or some of it; without the skeleton, arrays of any checkpoint. Tensors use
                their memory unless they are in the other byte order, not aligned, or have negative strides. Nobody may
                write to the tensor of a read-only array; torch's warning of that is not shown.
            options: ``device`` and ``dtype``.

        Raises:
            AdapterError: The skeleton is damaged, or arrays have no tensor type (texts, records, dtypes that this
                torch does not know).
        """
        chosen = _Options.of(options)
        layout = read_layout(tensors)
        parts: dict[str, Any] = chosen.apply(as_tensors(tensors, layout))
        if not layout.kinds:
            return parts
        arrays = {name for name, kind in layout.kinds.items() if kind == ARRAY}
        found = {name: row if name in arrays else parts.get(name) for name, row in tensors.items()}
        return {name: part for name, part in found.items() if part is not None}

    def fill_weights(
        self,
        model: Any,
        stored: Mapping[str, StoredTensor],
        read: ReadTensors,
        *,
        check: CheckTensors | None = None,
        wanted: Callable[[str], bool] | None = None,
        strict: bool = True,
        device: Any = None,
    ) -> NotFilled:
        """Fill a module, or a part of it; tensors on the meta device are made on ``device``, or else on the CPU.

        See `tensorcas_flavors.pytorch._modules.fill_weights`.
        """
        place = _Options.of({"device": "cpu" if device is None else device}).device
        assert place is not None
        return fill_weights(model, stored, read, check=check, wanted=wanted, strict=strict, device=place)

    def load_optimizer(self, optimizer: Any, state: Mapping[str, Any], names: Sequence[str]) -> None:
        """Load a state dict that has names in place of numbers; see `tensorcas_flavors.pytorch._optimizers.load_named`.

        Args:
            optimizer: A live optimizer of a class without a format of its own.
            state: The state dict.
            names: The names of the optimizer's parameters, in order.
        """
        load_named(optimizer, state, names)

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Return True for a module or other live object, False for state dicts and nests of plain values."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Cut a long skeleton before the bytes that change at every step."""
        skeleton = tensors.get(SKELETON)
        cuts = [] if skeleton is None or skeleton.size < CUT_BYTES else skeleton_cuts(skeleton)
        return {SKELETON: cuts} if cuts else {}

    def left_out(self, tensors: Mapping[str, Array]) -> Mapping[str, str]:
        """Return the tensors of dtypes that only torch has: ``complex32``, the short integers, bits."""
        return dict(torch_types(tensors[SKELETON].tobytes())) if SKELETON in tensors else {}

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Predict as MLflow's own PyTorch flavor does; the model is put into evaluation mode and stays in it.

        Args:
            model: A module that takes one tensor and returns one.
            data: A DataFrame, which the model gets as float32, or an array, which it gets unchanged.
            params: ``device`` first moves the model there; the rest are keyword arguments of the model.

        Returns:
            A DataFrame with the index of ``data`` for a DataFrame, an array for an array.

        Raises:
            AdapterError: The model is no module: a state dict or training state does not say how to compute.
            TypeError: Data or predictions are of another type.
        """
        import pandas as pd
        import torch

        if not isinstance(model, torch.nn.Module):
            raise pytorch_error(
                "a state dict cannot predict: load it into a module first, with load_state_dict"
                if isinstance(model, Mapping)
                else f"a {type(model).__name__} cannot predict: only a module can"
            )
        if not isinstance(data, pd.DataFrame | np.ndarray):
            raise TypeError(f"a PyTorch model takes a DataFrame or an array, not a {type(data).__name__}")
        arguments = dict(params or {})
        if "device" in arguments:
            model = model.to(arguments.pop("device"))
        device = next((tensor.device for _, tensor in own_tensors(model)), None)
        array = data.to_numpy(dtype=np.float32) if isinstance(data, pd.DataFrame) else data
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy(order="K")
        with torch.no_grad():
            answer = model.eval()(torch.from_numpy(array).to(device), **arguments)
        if not isinstance(answer, torch.Tensor):
            raise TypeError(f"a PyTorch model must predict one tensor, not a {type(answer).__name__}")
        predicted = as_array(answer.resolve_conj().resolve_neg())
        return pd.DataFrame(predicted, index=data.index) if isinstance(data, pd.DataFrame) else predicted

    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """List torch and cloudpickle, as MLflow does, and the packages with other parts of the model."""
        modules = named_modules(tensors[SKELETON]) - {"numpy"}
        return pinned_packages({"torch"}) + pinned_packages({"cloudpickle"} | modules, but={"torch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """Checked options of one call."""

    strict: bool | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> _Options:
        import torch

        unknown = options.keys() - PyTorchAdapter.options
        if unknown:
            raise pytorch_error(f"there is no option {min(unknown)!r}; there are {sorted(PyTorchAdapter.options)}")
        device, dtype = options.get("device"), options.get("dtype")
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)):
            raise pytorch_error(f"dtype must be a floating point or complex dtype of torch, not {dtype!r}")
        try:
            device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise pytorch_error(f"{device!r} is no device: {error}") from error
        return cls(strict=options.get("strict"), device=device, dtype=dtype)

    def check_filling(self) -> None:
        """Refuse options that a model to fill does not take."""
        if self.device is not None or self.dtype is not None:
            raise pytorch_error(
                "device and dtype are for a new model: the one that is filled keeps its own, so move it before"
            )

    def apply(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move and convert tensors; names of one tensor stay names of one."""
        return tensors if self.device is None and self.dtype is None else convert(tensors, self.device, self.dtype)


_SPREAD = {
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
}
"""Classes of parts of tensors, and of modules that hold them."""


def _is_spread(model: Any) -> bool:
    """Tell whether some tensor of a state is a part of one that other processes share."""
    stack: list[Any] = [model]
    seen: set[int] = set()
    while stack:
        part = stack.pop()
        if type(part) in _ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        if issubclass(type(part), Mapping):
            stack += part.values()
        elif issubclass(type(part), list | tuple):
            stack += part
        elif _descends(part, _SPREAD):
            return True
        elif _descends(part, {("torch.nn.modules.module", "Module")}):
            if any(_descends(module, _SPREAD) for module in part.modules()):
                return True
            stack += part.parameters()
            stack += part.buffers()
        elif _descends(part, {("torch.optim.optimizer", "Optimizer")}):
            stack += (parameter for group in part.param_groups for parameter in group["params"])
    return False


def _descends(value: object, classes: set[tuple[str, str]]) -> bool:
    """Tell whether one of these classes is among a value's classes, importing nothing."""
    return any((cls.__module__, cls.__name__) in classes for cls in type(value).__mro__)
