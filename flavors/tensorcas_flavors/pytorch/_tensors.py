"""Tensors and their memory: exact arrays and back, shared storages, memory that can be filled.

`as_array` and `as_tensor` convert bit for bit; `refusal` says which tensors have no exact array. `shared_storages`
finds the tensors that share memory, and `share` lays them into one storage again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tensorcas_flavors._facts import REMEDY
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    import torch

_EXTENSIONS = frozenset(
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
_INTEGERS = frozenset(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
_NATIVE = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64", "complex128"}
ROW_DTYPES = _NATIVE | _EXTENSIONS
"""Dtypes that torch and the arrays of a store share, by their common names."""
_STEP_COUNT = re.compile(r"(?:^|\.)state\.[^.]+\.step$")
_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def pytorch_error(reason: str) -> AdapterError:
    """Return an error of the pytorch adapter."""
    return AdapterError("pytorch", reason)


def some(texts: Sequence[str], n_shown: int = 20) -> Sequence[str]:
    """Shorten a list for an error message."""
    return [*texts[:n_shown], f"and {len(texts) - n_shown} more"] if len(texts) > n_shown else texts


class Geometry(NamedTuple):
    """Memory of a tensor's elements. While two tensors live, theirs are equal only if the elements are the same."""

    storage: int
    """Identity of the storage."""
    offset: int
    """First element, counted in elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements from one index to the next, per axis."""
    dtype: torch.dtype

    @property
    def start(self) -> int:
        """Byte of the storage at which the first element starts."""
        return self.offset * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """One past the last byte of the storage that belongs to an element."""
        return self.start + extent_bytes(self.shape, self.stride, self.dtype.itemsize)


def geometry(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a tensor that `refusal` accepts."""
    return Geometry(
        tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
    )


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a dtype's short name, which torch, numpy and ml_dtypes share."""
    return name_of(tensor.dtype)


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's short name; a lookup without a Python call after the first."""
    return str(dtype)[6:]


def row_dtype(dtype: str, itemsize: int) -> str | None:
    """Return the dtype of the array that holds such tensors: the same one, words of the same size, or None."""
    return dtype if dtype in ROW_DTYPES else _WORDS.get(itemsize)


def refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no array of its own and what to do about it, None if it has one. No data is read.

    `_kinds` stores some of these tensors in parts.
    """
    import torch

    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        if torch.nn.parameter.is_lazy(tensor):
            return "is not initialized yet: run the model on one batch first"
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a {kind}, which takes no plain values: load the whole model with into="
    if tensor.is_nested or tensor.is_quantized:
        return "is nested or quantized, and takes no plain values: load the whole model with into="
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: make it dense with to_dense()"
    if tensor.is_meta:
        return "is on the meta device and has no values: load the weights before storing the model"
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "belongs to a transformation of torch.func that is under way: store it when that is over"
    if tensor._is_zerotensor():
        return "is a ZeroTensor, which has no memory: store torch.zeros_like() of it"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative: use resolve_conj() or resolve_neg() first"
    return None


def memory_refusal(tensor: torch.Tensor, place: Geometry) -> str | None:
    """Return why the memory or dtype of a tensor that `refusal` accepts cannot be read, None if it can."""
    stop = place.offset * tensor.itemsize + tensor.nbytes if tensor.is_contiguous() else place.stop
    if stop > tensor.untyped_storage().nbytes():
        return "has no memory behind it (its storage was resized): gather the weights before storing the model"
    name = name_of(tensor.dtype)
    if name not in ROW_DTYPES and row_dtype(name, tensor.itemsize) is None:
        return f"has the dtype {name}, which no array holds: convert it, or view it as uint8"
    return None


def as_array(tensor: torch.Tensor) -> Array:
    """Return an accepted tensor as an array of the same values and shape; a view if the tensor is on the CPU.

    Dtypes that numpy lacks become those of ml_dtypes, or unsigned integers of the same size.
    """
    import torch

    plain = tensor.detach()
    if not plain.is_cpu:
        plain = plain.cpu()
    name = name_of(tensor.dtype)
    if name in _NATIVE:
        return plain.numpy()
    array = plain.view(getattr(torch, _WORDS[plain.itemsize])).numpy()
    if name not in _EXTENSIONS:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, name))


def as_tensor(row: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a row as a tensor of a dtype of the same size, in the row's own memory unless `lent` must copy it."""
    import torch

    if row.size == 0:
        return torch.empty(row.shape, dtype=dtype, device="cpu")  # numpy and torch give empty arrays different strides
    tensor = torch.from_numpy(lent(row))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def all_as_tensors(rows: Sequence[Array], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Return many rows as tensors of dtypes of the same size; see `as_tensor`. Plain rows take no Python call each."""
    import torch

    plain = {dtype: torch_dtype(dtype) for dtype in {row.dtype for row in rows} if dtype.name in _NATIVE}
    plain = {dtype: found for dtype, found in plain.items() if dtype.isnative}
    return [
        torch.from_numpy(row)
        if plain.get(row.dtype) is dtype and row.size and row.flags.carray
        else as_tensor(row, dtype)
        for row, dtype in zip(rows, dtypes, strict=True)
    ]


def lent(row: Array) -> Array:
    """View a row as torch accepts arrays: in a dtype that torch and numpy share, aligned, and marked writable.

    The result is a copy if the elements are in the other byte order, not aligned, or at strides that torch lacks.

    Args:
        row: Not empty. If it is read-only, nobody may write to a tensor made of it: a write to a file that is mapped
            for reading kills the process.
    """
    if not row.dtype.isnative:
        row = row.astype(row.dtype.newbyteorder("="))
    words = _words_for(row.dtype)
    if words is not None:
        row = row.view(words)
    if row.flags.carray:
        return row
    if not row.flags.aligned or any(step < 0 or step % row.itemsize for step in row.strides):
        return np.array(row, order="C")
    # Torch has no read-only tensors, and warns once of any read-only array, the user's own included.
    return row if row.flags.writeable else np.asarray(_Writable(row))


class _Writable:
    """Read-only array that is presented to numpy as writable."""

    __slots__ = ("__array_interface__", "_row")

    def __init__(self, row: Array) -> None:
        self._row = row  # keeps the memory
        self.__array_interface__ = row.__array_interface__
        self.__array_interface__["data"] = (self.__array_interface__["data"][0], False)


@lru_cache(maxsize=128)
def _words_for(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the unsigned integers for elements of a dtype that numpy itself lacks; None for others."""
    return None if dtype.name in _NATIVE else np.dtype(_WORDS[dtype.itemsize])


@lru_cache(maxsize=128)
def torch_dtype(row: np.dtype[Any], name: str | None = None) -> torch.dtype:
    """Return the dtype of a row's tensor.

    Args:
        row: The dtype of the row, in either byte order.
        name: The tensor's dtype if it is not the row's.

    Raises:
        ValueError: This torch has no such dtype, or it does not fit the row.
    """
    import torch

    if row.name not in ROW_DTYPES:
        raise ValueError(f"has the dtype {row}, which is not one of torch")
    dtype = getattr(torch, name or row.name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"holds a tensor of dtype {name or row.name!r}, which this torch does not know")
    if name is not None and row.name != row_dtype(name, dtype.itemsize):
        raise ValueError(f"has the dtype {row}, and tensors of dtype {name} are not stored so")
    return dtype


def extent_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return the number of bytes from a strided tensor's first byte to its last."""
    if 0 in shape:
        return 0
    return itemsize * (1 + sum([(n - 1) * step for n, step in zip(shape, stride, strict=True)]))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a new tensor of this shape."""
    if len(shape) == 1:
        return (1,)
    if len(shape) == 2:
        return (shape[1] or 1, 1)
    return tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))


def raw_view(row: Array) -> np.dtype[Any]:
    """Return a dtype under which elements are copied bit for bit, NaN payloads included."""
    return np.dtype((np.void, row.itemsize))


def convert(
    tensors: Mapping[str, torch.Tensor], device: torch.device | None, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Move tensors and convert floating point and complex ones; names of one tensor stay names of one.

    An optimizer's step counts keep their dtype, as in ``Optimizer.load_state_dict``: rounded ones would not count.

    Raises:
        AdapterError: The device is missing, or torch cannot convert a tensor.
    """
    done: dict[Geometry, torch.Tensor] = {}
    converted = {}
    for name, tensor in tensors.items():
        numeric = (tensor.is_floating_point() or tensor.is_complex()) and not _STEP_COUNT.search(name)
        place = geometry(tensor)
        try:
            if place not in done:
                done[place] = tensor.to(device=device, dtype=dtype if numeric else None)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch without CUDA
            raise pytorch_error(f"tensor {name!r} cannot be moved or converted: {error}") from error
        converted[name] = done[place]
    return converted


_Key = TypeVar("_Key", str, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageView:
    """Position of one tensor in a storage that it shares, or in which it has gaps or another order."""

    name: str
    """Name of the tensor's row, which has the dtype and shape."""
    offset: int
    """Byte at which its first element starts; a multiple of the element size."""
    stride: tuple[int, ...]
    """Elements from one index to the next, per axis; 0 repeats."""

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.stride)
        if type(self.name) is not str or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise ValueError(f"not a view in a storage: {self.name!r}, offset={self.offset}, stride={self.stride}")


class Stretch(Protocol):
    """Stretch of memory."""

    @property
    def start(self) -> int:
        """First byte."""

    @property
    def stop(self) -> int:
        """One past the last byte."""


def shared_storages(tensors: Mapping[str, Geometry]) -> tuple[tuple[StorageView, ...], ...]:
    """Group tensors whose memory overlaps; leave out tensors in row-major order that overlap no other."""
    in_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        in_storage.setdefault(tensor.storage, []).append(name)
    groups: list[list[str]] = []
    for names in in_storage.values():
        if len(names) == 1:
            tensor = tensors[names[0]]
            if tensor.stride != row_major(tensor.shape):
                groups.append(names)
            continue
        groups += overlapping(names, tensors)
    # The order is that of the tensors, not of their addresses, so that equal models have equal layouts.
    number = {name: n for n, name in enumerate(tensors)} if groups else {}
    groups = [sorted(group, key=number.__getitem__) for group in groups]
    return tuple(
        _in_one_storage(group, tensors)
        for group in sorted(groups, key=lambda group: number[group[0]])
        if len(group) > 1 or tensors[group[0]].stride != row_major(tensors[group[0]].shape)
    )


def share(
    rows: Mapping[str, Array], views: Sequence[StorageView], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Lay rows into one storage: the memory of a row that spans all of it, or else new memory.

    Args:
        rows: The rows by name.
        views: The position of each.
        dtypes: The dtypes of their tensors.

    Raises:
        ValueError: The views do not fit the rows. Also TypeError, OverflowError, MemoryError and RuntimeError, as
            numpy and torch raise them.
    """
    import torch

    n_bytes = 0
    for view in views:
        row = rows[view.name]
        if len(view.stride) != row.ndim or view.offset % row.itemsize:
            raise ValueError(f"{view.name!r} has shape {row.shape}, offset {view.offset}, strides {view.stride}")
        if not row.dtype.isnative:
            raise ValueError(f"{view.name!r} has the dtype {row.dtype}, which no tensor has")
        n_bytes = max(n_bytes, view.offset + extent_bytes(row.shape, view.stride, row.itemsize))
    spanning = [p for p in views if rows[p.name].nbytes == n_bytes and _in_order(rows[p.name].shape, p.stride)]
    whole = rows[spanning[0].name].reshape(-1).view(np.uint8) if spanning else np.zeros(n_bytes, dtype=np.uint8)
    memory = lent(whole)
    storage = torch.from_numpy(memory).untyped_storage()
    tensors = {}
    for view in views:
        row = rows[view.name]
        words = raw_view(row)
        strides = [step * row.itemsize for step in view.stride]
        stretch: Array = np.ndarray(row.shape, words, memory, view.offset, strides)  # refuses to leave the memory
        if not spanning:
            stretch[...] = row.view(words)
        empty = torch.empty(0, dtype=dtypes[view.name], device="cpu")
        tensors[view.name] = empty.set_(storage, view.offset // row.itemsize, row.shape, view.stride)
    return tensors


def overlapping(names: Sequence[_Key], stretches: Mapping[_Key, Stretch]) -> list[list[_Key]]:
    """Group stretches of memory that overlap; each group is in order of start, and a lone stretch is a group."""
    groups: list[list[_Key]] = []
    end = -1
    for start, stop, name in sorted((stretches[name].start, stretches[name].stop, name) for name in names):
        if start >= end:
            groups.append([])
        groups[-1].append(name)
        end = max(end, stop)
    return groups


def _in_one_storage(group: Sequence[str], tensors: Mapping[str, Geometry]) -> tuple[StorageView, ...]:
    # Every start is a multiple of its own element size; so is its distance to a multiple of the largest.
    largest = max(tensors[name].dtype.itemsize for name in group)
    first = min(tensors[name].start for name in group)
    base = first - first % largest
    return tuple(
        StorageView(name=name, offset=tensors[name].start - base, stride=tuple(tensors[name].stride)) for name in group
    )


def _in_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return all(n == 1 or step == wanted for n, step, wanted in zip(shape, stride, row_major(shape), strict=True))


_ALIGNMENT = 64


NO_MEMORY = "has no memory behind it (its storage was resized): gather the weights before filling them"


def without_memory(tensor: torch.Tensor) -> str | None:
    """Return why nothing can be copied into a tensor of a state to fill; None if it has memory."""
    if tensor.is_meta:
        return (
            "is on the meta device and has no memory: call to_empty(device=...) first, or fill the module with "
            "load_into() of an open checkpoint, which allocates the memory"
        )
    if refusal(tensor) is not None:
        return None
    return NO_MEMORY if tensor.is_contiguous() and tensor.untyped_storage().nbytes() < tensor.nbytes else None


def filling_refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor of a module cannot be filled, None if it can."""
    import torch

    kind = type(tensor)
    if kind is not torch.nn.Parameter and kind is not torch.Tensor:
        is_plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if torch.nn.parameter.is_lazy(tensor) or not is_plain:
            return refusal(tensor)
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        return "is nested, quantized or sparse, and takes no plain values: load the whole model with into="
    if tensor.is_meta:
        return None
    n_bytes = tensor.nbytes if tensor.is_contiguous() else extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
    if n_bytes > tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize:
        return NO_MEMORY
    return None


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> bool:
    """Copy many tensors in one call; return False if torch has no such call, or refuses. Some may be copied then.

    Args:
        targets: Tensors without autograd history.
        sources: A tensor of the same shape for each.
    """
    import torch

    copy = getattr(torch, "_foreach_copy_", None)  # private, and the only call of torch that copies many tensors
    if copy is None:
        return False
    try:
        with torch.no_grad():
            copy(targets, sources)
    except RuntimeError:
        return False
    return True


def made_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate a tensor on a device like another one, with its strides unless they leave gaps or repeat elements."""
    import torch

    # empty_like() keeps such strides too, but for a meta tensor it first imports some 500 modules of torch.
    strides, step = tuple(tensor.stride()), 1
    for stride, side in sorted(zip(strides, tensor.shape, strict=True)):
        if side != 1 and stride != step:
            strides = row_major(tensor.shape)
            break
        step *= side
    if device.type != "cpu" or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    return torch.from_numpy(_aligned_bytes(tensor.nbytes)).view(tensor.dtype).as_strided(tensor.shape, strides)


def _aligned_bytes(n_bytes: int) -> Array:
    """Allocate bytes at a multiple of 64, as torch does, and with huge pages, as numpy does.

    Torch asks for no huge pages, so the first touch of its new memory takes several times as long as filling it.
    """
    block = np.empty(n_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + n_bytes]


def instead_of(old: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the class and with the attributes of another one."""
    import torch

    if isinstance(old, torch.nn.Parameter):
        new: torch.Tensor = torch.Tensor._make_subclass(type(old), made, old.requires_grad)
    else:
        new = made.detach().as_subclass(type(old)).requires_grad_(old.requires_grad)
    vars(new).update(vars(old))
    return new


def check_device(device: torch.device) -> None:
    """Check that tensors can be put on a device and keep their values there.

    Raises:
        AdapterError: The device is missing, or is the meta device.
    """
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch without CUDA
        raise pytorch_error(f"nothing can be put on the device {str(device)!r}: {error}") from error
    if device.type == "meta":
        raise pytorch_error("the meta device holds no values: give another one")


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of elements into live memory."""

    where: str
    """Name of the target, for errors."""
    target: Any
    """A tensor or an array."""
    source: Any
    """A tensor or array of the same shape."""
    may_alias: bool = True
    """True if the source may be the target itself. A module with code of its own for ``load_state_dict`` may give the
    source to another tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extent:
    """Memory of the elements of a target."""

    start: int
    stop: int
    first: int
    """Address of the first element."""
    stride: tuple[int, ...]
    """Bytes from one index to the next, per axis."""


def check_memory(copies: Sequence[Copy]) -> None:
    """Check that no two copies give different values to the same memory.

    Raises:
        AdapterError: Two copies do.
    """
    if not _may_overlap(copies):
        return
    by_device: dict[str, dict[int, _Extent]] = {}
    for n, each in enumerate(copies):
        extent = extent_of(each.target)
        if extent is not None and extent.stop > extent.start:
            device = "cpu" if isinstance(each.target, np.ndarray) else str(each.target.device)
            by_device.setdefault(device, {})[n] = extent
    for extents in by_device.values():
        for group in overlapping(list(extents), extents):
            if len(group) > 1:
                _check_group([copies[n] for n in group], [extents[n] for n in group])


def _may_overlap(copies: Sequence[Copy]) -> bool:
    """Return False if no two copies go to the same memory."""
    starts, stops = [], []
    for target in [each.target for each in copies]:
        if isinstance(target, np.ndarray) or not target.is_contiguous():
            extent = extent_of(target)
            if extent is not None:
                starts.append(extent.start)
                stops.append(extent.stop)
            continue
        try:
            starts.append(target.data_ptr())
        except RuntimeError:  # the tensor has no memory
            continue
        stops.append(starts[-1] + target.nbytes)
    begins, ends = np.array([starts, stops], dtype=np.uint64)
    begins, ends = begins[ends > begins], ends[ends > begins]
    order = np.argsort(begins, kind="stable")
    return bool((begins[order[1:]] < np.maximum.accumulate(ends[order])[:-1]).any())


def _check_group(group: Sequence[Copy], extents: Sequence[_Extent]) -> None:
    if len({(extent_of(each.source), each.source.dtype, each.target.dtype) for each in group} | {*extents}) == 2:
        return  # all copies are of one tensor
    base = min(extent.start for extent in extents)
    memory = np.zeros(max(extent.stop for extent in extents) - base, dtype=np.uint8)
    words = []
    for each, extent in zip(group, extents, strict=True):
        values = _as_copied(each)
        kind = raw_view(values)
        view: Array = np.ndarray(values.shape, kind, memory, extent.first - base, extent.stride)
        words.append((view, np.ascontiguousarray(values).view(kind).reshape(values.shape)))
        view[...] = words[-1][1]
    for each, (view, wanted) in zip(group, words, strict=True):
        if view.tobytes() != wanted.tobytes():
            others = ", ".join(repr(other.where) for other in group if other is not each)
            raise pytorch_error(
                f"{each.where!r} shares memory with {others}, and different values are stored for them: {REMEDY}"
            )


def _as_copied(each: Copy) -> Array:
    if isinstance(each.target, np.ndarray):
        return each.source  # type: ignore[no-any-return]
    return as_array(each.source.detach().to("cpu", each.target.dtype))


def extent_of(target: torch.Tensor | Array) -> _Extent | None:
    """Return the memory of a target's elements; None if it has none."""
    if isinstance(target, np.ndarray):
        start, stop = np.lib.array_utils.byte_bounds(target)
        return _Extent(start=start, stop=stop, first=target.ctypes.data, stride=target.strides)
    try:
        start = target.data_ptr()
        stop = start + extent_bytes(target.shape, target.stride(), target.itemsize)
    except RuntimeError:  # the tensor has no memory
        return None
    stride = tuple(step * target.itemsize for step in target.stride())
    return _Extent(start=start, stop=stop, first=start, stride=stride) if start else None
