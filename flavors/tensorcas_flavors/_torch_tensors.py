"""Tensors as rows and back, without a pickle.

A row always holds its tensor's own values in its own shape. What a row cannot say is in the *layout*, a small JSON
text: which tensors lie in one storage, and at which offset and strides. So tied weights, views and strided tensors come
back sharing memory, and nothing but JSON is read to find that out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    import torch

_EXTENSIONS = frozenset(
    ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
_INTEGERS = frozenset(["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
_NATIVE = _INTEGERS | {"bool", "float16", "float32", "float64", "complex64", "complex128"}
_DTYPES = _NATIVE | _EXTENSIONS
_VERSION = 1


def pytorch_error(reason: str) -> AdapterError:
    """Return the error of the pytorch adapter with this reason."""
    return AdapterError("pytorch", reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor lies in a storage that it shares, or in which it leaves gaps or is out of order."""

    name: str
    """Name of the tensor's row, which says dtype and shape."""
    offset: int
    """Byte at which its first element starts; a multiple of the element size."""
    stride: tuple[int, ...]
    """Elements from one index to the next, per axis; 0 repeats."""

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.stride)
        if type(self.name) is not str or not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
            raise ValueError(f"not a place in a storage: {self.name!r}, offset={self.offset}, stride={self.stride}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the rows of a model do not say, as far as no pickle is needed to say it."""

    storages: tuple[tuple[Place, ...], ...] = ()
    """The storages that are not simply the bytes of one row."""
    plain: dict[str, Any] = field(default_factory=dict)
    """Values of the state dict that are not tensors (``get_extra_state``), as far as JSON says them exactly."""
    metadata: dict[str, Any] | None = None
    """The state dict's ``_metadata``: version numbers that ``load_state_dict`` goes by."""
    entries: dict[str, Any] | None = None
    """For a state dict, its keys in order: dtype and shape of a tensor, None for a plain value. None for a module."""
    ordered: bool = False
    """Whether the state dict is an ``OrderedDict``."""

    def encode(self) -> bytes:
        """Return the layout as JSON in ASCII."""
        storages = [[[place.name, place.offset, place.stride] for place in places] for places in self.storages]
        facts = {"layout": _VERSION, "storages": storages, "plain": self.plain, "metadata": self.metadata}
        facts |= {"entries": self.entries, "ordered": self.ordered}
        return json.dumps(facts, separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, text: bytes) -> Layout:
        """Read what `encode` wrote, or what somebody claims it wrote.

        Raises:
            AdapterError: The text is not a layout.
        """
        try:
            facts = json.loads(text)
            if facts["layout"] != _VERSION:
                raise ValueError(f"its version is {facts['layout']!r}, and this release reads {_VERSION}")
            for key, optional in (("plain", False), ("metadata", True), ("entries", True)):
                if not isinstance(facts[key], dict) and not (optional and facts[key] is None):
                    raise ValueError(f"{key!r} is no mapping")
            storages = tuple(
                tuple(Place(name=name, offset=offset, stride=tuple(stride)) for name, offset, stride in places)
                for places in facts["storages"]
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise pytorch_error(f"the layout in the skeleton cannot be read: {error!r}") from error
        fields = {key: facts[key] for key in ("plain", "metadata", "entries")}
        return cls(storages=storages, ordered=facts.get("ordered") is True, **fields)


def is_json(value: object) -> bool:
    """Tell whether JSON gives exactly this value back, types included."""
    if type(value) is dict:
        return all(type(key) is str and is_json(part) for key, part in value.items())
    if type(value) is list:
        return all(is_json(part) for part in value)
    return value is None or type(value) in (bool, int, float, str)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a dtype's short name, which torch, numpy and ml_dtypes share."""
    return str(tensor.dtype).removeprefix("torch.")


def refusal(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no exact array and what to do about it, or None if it has one; its data are not read."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialized yet: run the model on one batch first"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
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
    if dtype_name(tensor) not in _DTYPES:
        return f"has the dtype {dtype_name(tensor)}, which no array holds: convert it, or view it as uint8"
    if tensor.is_conj() or tensor.is_neg():
        return "is a lazy conjugate or negative: use resolve_conj() or resolve_neg() first"
    if (
        tensor.storage_offset() * tensor.itemsize + _extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
        > tensor.untyped_storage().nbytes()
    ):
        return "has no memory behind it (its storage was resized): gather the weights before storing the model"
    return None


def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that tensors share if they are the same elements of the same memory, while they live."""
    address = tensor.untyped_storage()._cdata
    return (address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor that is not refused as an array of the same values and shape, a view if it is on the CPU."""
    import torch

    plain = tensor.detach().cpu()
    if dtype_name(tensor) in _NATIVE:
        return plain.numpy()
    import ml_dtypes

    bits = plain.view(torch.uint8 if plain.itemsize == 1 else torch.int16)
    return bits.numpy().view(getattr(ml_dtypes, dtype_name(tensor)))


def shared_storages(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Place, ...], ...]:
    """Group tensors whose memory overlaps; one that overlaps no other and is in row-major order is left out."""
    spans: dict[int, list[tuple[int, int, int, str]]] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        start = int(tensor.storage_offset()) * tensor.itemsize
        stop = start + _extent_bytes(tensor.shape, tensor.stride(), tensor.itemsize)
        spans.setdefault(tensor.untyped_storage()._cdata, []).append((start, stop, number, name))
    groups: list[list[tuple[int, int, str]]] = []
    for members in spans.values():
        end = -1
        for start, stop, number, name in sorted(members):
            if start >= end:
                groups.append([])
            groups[-1].append((number, start, name))
            end = max(end, stop)
    # In the order of the tensors, not of their addresses, so that equal models have equal layouts.
    storages = [_places(group, tensors) for group in sorted(sorted(group) for group in groups)]
    return tuple(
        places
        for places in storages
        if len(places) > 1 or places[0].stride != _row_major(tuple(tensors[places[0].name].shape))
    )


def as_tensors(rows: Mapping[str, Array], layout: Layout) -> dict[str, torch.Tensor]:
    """Return every row but the skeleton as a tensor, using the rows' memory where the layout allows it.

    Args:
        rows: Rows of a model by name, or some of them; what is missing is left out of its storage.
        layout: Where they lie.

    Raises:
        AdapterError: An array has no tensor type, or the layout does not fit the rows.
    """
    for name, row in rows.items():
        if row.dtype.name not in _DTYPES or not row.dtype.isnative:
            raise pytorch_error(f"row {name!r} has the dtype {row.dtype}, which is not one of torch")
    shared: dict[str, torch.Tensor] = {}
    for places in layout.storages:
        present = [place for place in places if place.name in rows]
        try:
            shared |= _share(rows, present)
        except (ValueError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
            names = ", ".join(repr(place.name) for place in present)
            raise pytorch_error(f"the layout in the skeleton does not fit the rows {names}: {error}") from error
    return {name: shared[name] if name in shared else _plain(row) for name, row in rows.items() if name != SKELETON}


def check_row(rows: Mapping[str, Array], name: str, dtype: str, shape: Sequence[int]) -> None:
    """See that a row is there and is what was stored.

    Raises:
        AdapterError: It is not.
    """
    row = rows.get(name)
    if row is None:
        raise pytorch_error(f"tensor {name!r} is missing: read all tensors of the checkpoint")
    if row.dtype.name != dtype or row.shape != tuple(shape):
        raise pytorch_error(f"tensor {name!r} was stored as {dtype} {tuple(shape)}, not {row.dtype} {row.shape}")


def _plain(row: Array) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, row.dtype.name)
    if row.size == 0:
        return torch.empty(row.shape, dtype=dtype)  # numpy's strides of nothing are not torch's
    if row.dtype.name in _NATIVE:
        return torch.from_numpy(row)
    bits = row.view(np.uint8 if row.itemsize == 1 else np.int16)
    return torch.from_numpy(bits).view(dtype)


def _places(group: Sequence[tuple[int, int, str]], tensors: Mapping[str, torch.Tensor]) -> tuple[Place, ...]:
    # Every start is a multiple of its own element size; so is its distance to a multiple of the largest.
    largest = max(tensors[name].itemsize for _, _, name in group)
    first = min(start for _, start, _ in group)
    base = first - first % largest
    return tuple(Place(name=name, offset=start - base, stride=tensors[name].stride()) for _, start, name in group)


def _share(rows: Mapping[str, Array], places: Sequence[Place]) -> dict[str, torch.Tensor]:
    """Lay rows into one storage: the memory of a row that spans all of it, or else new memory."""
    import torch

    n_bytes = 0
    for place in places:
        row = rows[place.name]
        if len(place.stride) != row.ndim or place.offset % row.itemsize:
            raise ValueError(f"{place.name!r} has shape {row.shape}, offset {place.offset}, strides {place.stride}")
        n_bytes = max(n_bytes, place.offset + _extent_bytes(row.shape, place.stride, row.itemsize))
    spanning = [p for p in places if rows[p.name].nbytes == n_bytes and _in_order(rows[p.name].shape, p.stride)]
    memory = rows[spanning[0].name].reshape(-1).view(np.uint8) if spanning else np.zeros(n_bytes, dtype=np.uint8)
    storage = torch.from_numpy(memory).untyped_storage()
    tensors = {}
    for place in places:
        row = rows[place.name]
        words = np.dtype((np.void, row.itemsize))  # copied as they are, NaN payloads and all
        strides = [step * row.itemsize for step in place.stride]
        view: Array = np.ndarray(row.shape, words, memory, place.offset, strides)  # refuses to leave the memory
        if not spanning:
            view[...] = row.view(words)
        empty = torch.empty(0, dtype=getattr(torch, row.dtype.name))
        tensors[place.name] = empty.set_(storage, place.offset // row.itemsize, row.shape, place.stride)
    return tensors


def _extent_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[axis + 1 :]) for axis in range(len(shape)))


def _in_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return all(n == 1 or step == wanted for n, step, wanted in zip(shape, stride, _row_major(shape), strict=True))
