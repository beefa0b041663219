"""Tensors as arrays and back, bit for bit, and which tensors have no exact array."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
    """Return the error of the pytorch adapter with this reason."""
    return AdapterError("pytorch", reason)


def some(texts: Sequence[str], n_shown: int = 20) -> Sequence[str]:
    """Shorten a list for an error that names all of it."""
    return [*texts[:n_shown], f"and {len(texts) - n_shown} more"] if len(texts) > n_shown else texts


class Geometry(NamedTuple):
    """Which elements of which memory a tensor is; equal for two tensors only if they are the same, while they live."""

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
    """Return where a tensor that is not refused lies."""
    return Geometry(
        tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype
    )


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a dtype's short name, which torch, numpy and ml_dtypes share."""
    return _name_of(tensor.dtype)


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def row_dtype(dtype: str, itemsize: int) -> str | None:
    """Name the dtype of the array that holds such tensors: the same one, or words of the same size, or None."""
    return dtype if dtype in ROW_DTYPES else _WORDS.get(itemsize)


def refusal(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no exact array and what to do about it, or None if it has one; its data are not read."""
    import torch

    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        if torch.nn.parameter.is_lazy(tensor):
            return "is not initialized yet: run the model on one batch first"
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        return f"is a {kind}, which no array holds: make it a plain tensor first (a DTensor with full_tensor())"
    if tensor.is_nested:
        return "is a nested tensor: store its unbind() parts, or to_padded_tensor()"
    if tensor.is_quantized:
        return f"is quantized ({dtype_name(tensor)}): store dequantize(), or int_repr() and its scales"
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
    """Say why the memory or the dtype of a tensor that `refusal` lets pass cannot be read, or None if it can."""
    stop = place.start + tensor.nbytes if tensor.is_contiguous() else place.stop
    if stop > tensor.untyped_storage().nbytes():
        return "has no memory behind it (its storage was resized): gather the weights before storing the model"
    if row_dtype(dtype_name(tensor), tensor.itemsize) is None:
        return f"has the dtype {dtype_name(tensor)}, which no array holds: convert it, or view it as uint8"
    return None


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor that is not refused as an array of the same values and shape, a view if it is on the CPU.

    Dtypes that arrays do not have come as unsigned integers of the same size, or as ml_dtypes has them.
    """
    import torch

    plain = tensor.detach()
    if not plain.is_cpu:
        plain = plain.cpu()
    name = dtype_name(tensor)
    if name in _NATIVE:
        return plain.numpy()
    array = plain.view(getattr(torch, _WORDS[plain.itemsize])).numpy()
    if name not in _EXTENSIONS:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, name))


def as_tensor(row: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return a row as a tensor of a dtype of the same size, in the row's own memory where `lent` need not copy it."""
    import torch

    if row.size == 0:
        return torch.empty(row.shape, dtype=dtype, device="cpu")  # numpy's strides of nothing are not torch's
    tensor = torch.from_numpy(lent(row))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def lent(row: Array) -> Array:
    """View a row as torch takes arrays over: of a dtype that torch and numpy share, aligned, and called writable.

    It is a copy where the elements are in the other byte order, not aligned, or at strides that torch does not have.

    Args:
        row: Not empty. If it is read-only, nobody may write to what torch makes of it: writing to a file that is mapped
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
    # Torch has no read-only tensors and warns of every such array once, of a model's as of the user's own.
    return row if row.flags.writeable else np.asarray(_Writable(row))


class _Writable:
    """A read-only array that numpy is told it may write to."""

    __slots__ = ("__array_interface__", "_row")

    def __init__(self, row: Array) -> None:
        self._row = row  # keeps the memory
        self.__array_interface__ = row.__array_interface__
        self.__array_interface__["data"] = (self.__array_interface__["data"][0], False)


@lru_cache(maxsize=128)
def _words_for(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the unsigned integers that elements of a dtype are seen as where numpy itself has no such dtype."""
    return None if dtype.name in _NATIVE else np.dtype(_WORDS[dtype.itemsize])


@lru_cache(maxsize=128)
def torch_dtype(row: np.dtype[Any], name: str | None = None) -> torch.dtype:
    """Find the dtype of a row's tensor.

    Args:
        row: The dtype of the row, in either byte order.
        name: The tensor's dtype if it is not the row's.

    Raises:
        ValueError: There is no such dtype, or it does not fit the row.
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
    """Return how many bytes lie between a strided tensor's first byte and its last."""
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
    """Return the dtype under which a row's elements are copied as they are, NaN payloads and all."""
    return np.dtype((np.void, row.itemsize))


def convert(
    tensors: Mapping[str, torch.Tensor], device: torch.device | None, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Move tensors and convert floating point and complex ones; tensors that are the same one stay so.

    An optimizer's step counts keep their dtype, as they do in ``Optimizer.load_state_dict``: rounded they would not
    count.

    Raises:
        AdapterError: The device is not there, or torch cannot convert a tensor.
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
