"""PyTorch: modules, state dicts and whole training states as rows, one per tensor, each readable by its dotted name.

The skeleton is a layout (see `tensorcas_flavors._torch_layout`), which is JSON; if there are live objects, their pickle
without tensors comes before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tensorcas_flavors._pickling import is_pickle, named_modules, pinned_packages, try_back
from tensorcas_flavors.pytorch._fill import fill
from tensorcas_flavors.pytorch._layout import (
    ARRAY,
    ELSEWHERE,
    Layout,
    Rows,
    as_tensors,
    read_layout,
    skeleton_cuts,
    torch_types,
)
from tensorcas_flavors.pytorch._modules import fill_weights
from tensorcas_flavors.pytorch._objects import own_tensors
from tensorcas_flavors.pytorch._pickle import dump, load
from tensorcas_flavors.pytorch._tensors import as_array, convert, pytorch_error
from tensorcas_flavors.pytorch._tree import TreeWriter, find_opaque, read_stored
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array, NotFilled, ReadTensors, StoredTensor

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
"""Classes of live objects that were seen to come back from their pickle in this process: others are tried."""


class PyTorchAdapter(Adapter):
    """Stores modules, optimizers, state dicts, and nests of them such as a whole training state.

    * A nest of ``dict``, ``OrderedDict``, ``defaultdict``, ``list``, ``deque``, ``tuple`` and ``set`` of tensors, numpy
      arrays, random generators, dates, paths, plain values and state dicts comes back the same and needs no pickle.
      What holds live objects (a module, an optimizer, …) is pickled without its tensors as one, so that an optimizer
      steps the module it stepped before; beside it lies each object's state dict, so that live objects can be filled
      without reading the pickle.
    * A module comes back as pickle would bring it back, with tied weights tied, views viewing and strides as they
      were. Tensors of one storage that do not overlap get storages of their own. Gradients and autograd graphs are no
      part of a model and are not stored. Tensors come back on the CPU.
    * ``torch.compile``'d, ``DataParallel`` and ``DistributedDataParallel`` models are stored as the module they wrap,
      which predicts the same; ``original`` may be wrapped again.

    Options:
        strict: With ``original`` only; True by default. In a module as in ``load_state_dict``, and its submodules must
            be of the stored classes; all entries of a mapping must be stored, and stored ones that it does not name are
            left out. With False, what only a pickle says stays as it is in ``original``. Shapes must fit in any case.
        device: Where the tensors of a new model, or the weights, go.
        dtype: A floating point or complex dtype or its name: such tensors of a new model, or such weights, are
            converted to it as by ``Module.to``; an optimizer's step counts are not. ``device`` and ``dtype`` are
            refused with ``original``, whose tensors keep their own; stored ones are converted, as torch does it.
    """

    name: ClassVar[str] = "pytorch"
    options: ClassVar[frozenset[str]] = frozenset({"strict", "device", "dtype"})

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Take modules, optimizers and the like, and dicts, lists and tuples with one or with a tensor at any depth."""
        if "torch" not in sys.modules:
            return False
        if not issubclass(type(model), Mapping | list | tuple):
            return _is_live(model)
        stack: list[Any] = [model]
        seen = {id(model)}
        while stack and len(seen) < _MAX_CONTAINERS:
            part = stack.pop()
            for value in part.values() if issubclass(type(part), Mapping) else part:
                if type(value) in _ATOMS:
                    continue
                if issubclass(type(value), Mapping | list | tuple):
                    if id(value) not in seen:
                        seen.add(id(value))
                        stack.append(value)
                elif _is_live(value) or _descends(value, {("torch", "Tensor")}):
                    return True
        return False

    def extract(self, model: Any) -> dict[str, Array]:
        """Take a model or training state apart, as views of its tensors where they are on the CPU.

        Returns:
            The tensors and arrays by their dotted path (``model.0.weight``, ``optimizer.state.0.exp_avg``); those of a
            module are the tensors of ``state_dict()`` in its order, then other buffers. Then tensors found elsewhere in
            pickled objects, as `ELSEWHERE` and their path or a number, then the skeleton. Two names for one tensor are
            two entries with one array.

        Raises:
            AdapterError: A tensor is of a kind that has no exact array (sparse, quantized, meta, a subclass, …), or
                something else cannot be pickled; the message names it.
        """
        rows = Rows()
        tree = TreeWriter(rows)
        try:
            node = tree.node(model, "")
            beyond = tree.beyond()
            pickled, kinds = b"", set[type]()
            if tree.needs_pickle:
                pickled, kinds = dump(tree.unwrapped.get(id(model), model), rows, tree)
            text = Layout(
                storages=rows.storages(), kinds=rows.kinds, tree=node, values=tree.values, beyond=beyond
            ).encode()
        except RecursionError as error:
            raise pytorch_error(f"the {type(model).__name__} is nested too deep") from error
        tail = len(text).to_bytes(8, "little") if pickled else b""
        arrays = rows.arrays | {SKELETON: np.frombuffer(pickled + text + tail, dtype=np.uint8)}
        if not kinds <= _COME_BACK:
            try_back(self.name, model, arrays, self.reconstruct)
            _COME_BACK.update(kinds)
        return arrays

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Put a model or training state together again, using the memory of the arrays.

        Args:
            tensors: What `extract` returned; the skeleton may be missing if ``original`` is given.
            original: What to fill, or a mapping or list of such at any depth: an object with ``load_state_dict`` is
                filled by it, whether it was stored live or as a state dict, and a module's non-persistent buffers too;
                a tensor is copied into; a plain value is replaced by the stored one. So are the attributes of modules,
                tensors and other objects. What else only a pickle says must be equal. Of a module stay as they are: the
                mode (``training``), ``requires_grad``, hooks, and attributes that name a device or a dtype; also what
                an object with ``state_dict`` keeps beside it. Names may have the prefix of ``DataParallel`` or
                ``torch.compile`` on either side. Where torch converts a dtype, one warning says what may have been
                rounded. What can be checked is checked before anything is changed; if torch refuses later, a part is
                filled.
            options: See the class.

        Raises:
            AdapterError: Names, shapes or classes do not fit, what cannot be filled differs, parts of ``original``
                share memory and different values are stored for them, the skeleton is damaged or missing, or the code
                of the model is not importable.
        """
        chosen = _Options.of(options)
        layout = read_layout(tensors)
        if original is not None:
            if chosen.device is not None or chosen.dtype is not None:
                raise pytorch_error(
                    "device and dtype are for a new model: the one that is filled keeps its own, so move it before"
                )
            parts = as_tensors(tensors, layout)
            stored = read_stored(layout, tensors, parts, skip_missing=True)
            return fill(original, stored, strict=chosen.strict is not False)
        if chosen.strict is not None:
            raise pytorch_error("strict says how to fill a model: give one, or leave it out")
        if SKELETON not in tensors:
            raise pytorch_error("there is no skeleton among the arrays: give a model to fill, or load the weights only")
        parts = chosen.apply(as_tensors(tensors, layout))
        if is_pickle(tensors[SKELETON]):
            return load(tensors[SKELETON], tensors, parts)
        stored = read_stored(layout, tensors, parts)
        if find_opaque(stored, described_too=True) is not None:
            raise pytorch_error("the skeleton is that of a live object but holds no pickle")
        return stored

    def weights(self, tensors: Mapping[str, Array], **options: Any) -> dict[str, Any]:
        """Return the rows of tensors as such, sharing memory as stored, and numpy arrays; no pickle is read.

        Besides the names of ``Module.state_dict()`` these are non-persistent buffers and tensors elsewhere: load them
        with ``strict=False``, or give `reconstruct` the module, which knows what goes where.

        Args:
            tensors: What `extract` returned, or some of it; without the skeleton, arrays of any checkpoint. Their
                memory is used where torch can: not where they are in the other byte order, not aligned, or have
                negative strides. Of a read-only array comes a tensor that nobody may write to, and torch's warning of
                it is not shown.
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
        wanted: Callable[[str], bool] | None = None,
        strict: bool = True,
        device: Any = None,
    ) -> NotFilled:
        """Fill a module, or a part of it; tensors on the meta device are made on ``device``, or else on the CPU.

        How, see `tensorcas_flavors._torch_weights`.
        """
        place = _Options.of({"device": "cpu" if device is None else device}).device
        assert place is not None
        return fill_weights(model, stored, read, wanted=wanted, strict=strict, device=place)

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """True for a module or other live object, false for state dicts and nests of plain values."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Cut a long skeleton where what changes at every step begins."""
        cuts = skeleton_cuts(tensors[SKELETON]) if SKELETON in tensors else []
        return {SKELETON: cuts} if cuts else {}

    def left_out(self, tensors: Mapping[str, Array]) -> Mapping[str, str]:
        """Name the tensors of dtypes that only torch has: ``complex32``, the short integers, bits."""
        return torch_types(tensors[SKELETON]) if SKELETON in tensors else {}

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
        """Name torch and cloudpickle, as MLflow does, and the packages with other parts of the model."""
        modules = named_modules(tensors[SKELETON]) - {"numpy"}
        return pinned_packages({"torch"}) + pinned_packages({"cloudpickle"} | modules, but={"torch"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of one call, checked."""

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

    def apply(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Move and convert tensors; those that are the same stay the same."""
        return tensors if self.device is None and self.dtype is None else convert(tensors, self.device, self.dtype)


def _is_live(value: object) -> bool:
    return _descends(value, _LIVE)


def _descends(value: object, classes: set[tuple[str, str]]) -> bool:
    """Tell whether one of these classes is among a value's classes, importing nothing."""
    return any((cls.__module__, cls.__name__) in classes for cls in type(value).__mro__)
