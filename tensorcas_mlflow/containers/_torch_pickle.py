"""What the pickle of a torch file says of the storages whose bytes lie beside it.

Tensors are pickled as ``torch/_tensor.py`` (``_reduce_ex_internal``) has it: a call of one of ``torch/_utils.py``'s
functions, with a storage, offset, size and stride; and storages by a persistent id ``("storage", class, key, location,
number of elements)``, ``torch/serialization.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tensorcas_mlflow.containers._dtype_words import dtype_called
from tensorcas_mlflow.containers._pickle_arrays import is_shape
from tensorcas_mlflow.containers._pickle_machine import Limits, Machine, Pause
from tensorcas_mlflow.containers._pickle_names import HIDDEN
from tensorcas_mlflow.containers._pickle_ops import walk
from tensorcas_mlflow.containers._pickle_symbols import Made, Persistent, Symbol, name_of
from tensorcas_mlflow.dtypes import parse_dtype
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_TENSOR_BYTES

LIMITS = Limits(max_ops=4_000_000, max_items=1 << 20, max_memo=1 << 22)
"""A state dict has 32 opcodes a tensor."""
_OPS_AT_ONCE = 1 << 16

_MAX_DEPTH = 200
_MAX_SYMBOLS = LIMITS.max_ops // 4
"""As many are looked at for tensors. What `torch.save` pickles has fewer, as each takes several opcodes."""
_MAX_NAME_PARTS = 64
_MAX_NAME = 512

_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "int8",
    "QInt32Storage": "int32",
    "QUInt8Storage": "uint8",
}
_ITEM_BYTES = {name: parse_dtype(name).itemsize for name in _DTYPES.values()}
_BYTES = frozenset({"UntypedStorage", "QUInt4x2Storage", "QUInt2x4Storage"})
"""Counted in bytes; what they mean is the tensors' affair."""

UTILS = "torch._utils."
TENSORS = frozenset(
    {
        f"{UTILS}_rebuild_tensor",
        f"{UTILS}_rebuild_tensor_v2",
        f"{UTILS}_rebuild_tensor_v3",
        f"{UTILS}_rebuild_qtensor",
    }
)
TENSOR_WITH_DTYPE = f"{UTILS}_rebuild_tensor_v3"
PARAMETERS = frozenset({f"{UTILS}_rebuild_parameter", f"{UTILS}_rebuild_parameter_with_state"})
SUBCLASSES = frozenset({"torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2"})


_HOLDERS = frozenset({Made, tuple})
"""What may hold a tensor."""

_Storage = tuple[int, int, str | None]
"""A storage's bytes, its elements as they are counted, and its dtype."""
Path = tuple[Any, Symbol] | None
"""The way to a symbol, the last key first. Put together for tensors only: it may be long, and ways share beginnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFact:
    """What a pickle says of one storage."""

    n_bytes: int
    n_elements: int
    """As the pickle counts them."""
    dtype: str | None
    """A name of `tensorcas_mlflow.dtypes`; None if nothing says it, or there is no name for it."""
    name: str
    """Of the tensor that is all of the storage, as a state dict calls it; "" if there is none."""
    shape: tuple[int, ...] | None
    """Of that tensor."""


def storages_of(data: bytes) -> Mapping[str, StorageFact]:
    """Read from a pickle as `torch.save` makes it which storages there are.

    Returns:
        By a storage's key (the file's name in the archive's folder ``data``), in the pickle's order.

    Raises:
        FormatError: It is not such a pickle. So do the others of `MALFORMED` in `_pickle_ops` say.
    """
    return facts_of(walk_torch_pickle(data))


def walk_torch_pickle(data: bytes, *, places: bool = False) -> Machine:
    """Walk a pickle; raises as `storages_of` does.

    Args:
        data: All of it.
        places: Whether to say where in it bytes lie.
    """
    machine = Machine(LIMITS)
    machine.base = 0 if places else None
    at, n_ops_left, pause = 0, LIMITS.max_ops, None
    while pause is not Pause.STOP:
        at, n_ops, pause = walk(machine, data, at, stop=len(data), max_ops=min(n_ops_left, _OPS_AT_ONCE))
        n_ops_left -= n_ops
        if pause is Pause.PAYLOAD:
            at += machine.payload.n_bytes
            machine.stack.append(machine.payload)
        if pause is None and (at >= len(data) or n_ops_left == 0 or machine.is_piled_up):
            raise FormatError("a torch file whose pickle does not end, or is too long")
    return machine


def facts_of(machine: Machine) -> dict[str, StorageFact]:
    """Say what a pickle that was walked says of its storages, by key, in order."""
    storages: dict[str, _Storage] = {}
    for pid in machine.persistent:
        storage = storage_of(pid)
        if storage is not None:
            storages.setdefault(pid[2], storage)
    tensors: dict[str, tuple[str, tuple[int, ...], Path]] = {}
    for path, made in _tensors(machine.stack[-1] if machine.stack else None):
        pid = made.args[0].id
        key = pid[2] if type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str else ""
        storage = storages.get(key)
        tensor = _whole_tensor(storage, made) if storage is not None and key not in tensors else None
        if tensor is not None:
            tensors[key] = *tensor, path
    return {key: _fact(storage, tensors.get(key)) for key, storage in storages.items()}


def storage_of(pid: Symbol) -> _Storage | None:
    """Read a persistent id; None if it is not that of a storage."""
    if type(pid) is not tuple or len(pid) < 5 or type(pid[0]) is not str or pid[0] != "storage":
        return None
    key, n_elements = pid[2], pid[4]
    module, _, kind = name_of(pid[1]).rpartition(".")
    if type(key) is not str or type(n_elements) is not int or module.partition(".")[0] != "torch":
        return None
    dtype = _DTYPES.get(kind)
    if dtype is None and kind not in _BYTES:
        return None
    n_bytes = n_elements * (_ITEM_BYTES[dtype] if dtype else 1)
    return (n_bytes, n_elements, dtype) if 0 <= n_bytes <= MAX_TENSOR_BYTES else None


def _whole_tensor(storage: _Storage, made: Made) -> tuple[str, tuple[int, ...]] | None:
    """Say the dtype and shape of a tensor if it is all of its storage."""
    args = made.args
    n_bytes, _, dtype = storage
    if made.is_made_by(TENSOR_WITH_DTYPE):
        dtype = torch_dtype(args[6] if len(args) > 6 else None)
    size, stride = size_of(args[2]), size_of(args[3])
    if dtype is None or size is None or stride is None or type(args[1]) is not int or args[1] != 0:
        return None
    shape = dense_shape(size, stride)
    n_item_bytes = _ITEM_BYTES.get(dtype) or parse_dtype(dtype).itemsize
    return (dtype, shape) if shape is not None and math.prod(shape) * n_item_bytes == n_bytes else None


def _fact(storage: _Storage, tensor: tuple[str, tuple[int, ...], Path] | None) -> StorageFact:
    n_bytes, n_elements, dtype = storage
    if tensor is None:
        return StorageFact(n_bytes=n_bytes, n_elements=n_elements, dtype=dtype, name="", shape=None)
    dtype, shape, path = tensor
    return StorageFact(n_bytes=n_bytes, n_elements=n_elements, dtype=dtype, name=path_name(path) or "", shape=shape)


def torch_dtype(symbol: Symbol) -> str | None:
    """Read what torch calls a dtype; None for one that numpy has not, and for anything else."""
    module, _, name = name_of(symbol).rpartition(".")
    return name if module == "torch" and dtype_called(name) == name else None


def size_of(symbol: Symbol) -> tuple[int, ...] | None:
    """Read a size or stride, which may be a ``torch.Size``."""
    if type(symbol) is Made and symbol.is_made_by("torch.Size") and type(symbol.args) is tuple and symbol.args:
        symbol = symbol.args[0]
    return symbol if is_shape(symbol) else None


def dense_shape(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Say in which shape elements without gaps are in C order; None if there are gaps, or some elements are shared.

    That is the tensor's own but where it was transposed or is in another memory format.
    """
    if len(size) != len(stride):
        return None
    if _is_c_order(size, stride):
        return size
    order = sorted(range(len(size)), key=lambda side: -stride[side])
    sorted_size = tuple(size[side] for side in order)
    return sorted_size if _is_c_order(sorted_size, tuple(stride[side] for side in order)) else None


def _is_c_order(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    n_elements = 1
    for side, step in zip(reversed(size), reversed(stride), strict=True):
        if side != 1 and step != n_elements:
            return False
        n_elements *= side
    return True


# --- from a pickle's symbols to names


def _tensors(root: Symbol) -> Iterator[tuple[Path, Made]]:
    """Find the tensors in what a pickle makes, in order, each once, and what leads to it; of too much the first."""
    ways = [_holders([(None, root)], None)]
    seen: set[int] = set()
    while ways and len(seen) < _MAX_SYMBOLS:
        for symbol, path in ways[-1]:
            if id(symbol) in seen:
                continue
            seen.add(id(symbol))
            tensor = _tensor(symbol) if type(symbol) is Made else None
            if tensor is not None:
                yield path, tensor
            elif len(ways) <= _MAX_DEPTH:
                ways.append(_children(symbol, path))
                break
        else:
            ways.pop()


def _tensor(made: Made) -> Made | None:
    """Give the call that makes a tensor, or from which a tensor of a subclass is made; None if there is none."""
    args = made.args
    if type(args) is not tuple:
        return None
    function = name_of(made.function)
    if function in SUBCLASSES and len(args) > 2:
        return _tensor(Made(args[0], args[2])) if name_of(args[0]) in TENSORS else None
    return made if function in TENSORS and len(args) >= 4 and type(args[0]) is Persistent else None


def _children(symbol: Symbol, path: Path) -> Iterator[tuple[Symbol, Path]]:
    """Say what is in something."""
    return _holders(enumerate(symbol) if type(symbol) is tuple else items_of(symbol), path)


def _holders(items: Iterable[tuple[Symbol, Symbol]], path: Path) -> Iterator[tuple[Symbol, Path]]:
    """Choose what may hold a tensor, and say what leads there."""
    return ((item, path if key is None else (path, key)) for key, item in items if type(item) in _HOLDERS)


def items_of(made: Made) -> Iterator[tuple[Symbol, Symbol]]:
    """Say what belongs to what was made, each with its key; None for what goes by the whole's name."""
    args = made.args if type(made.args) is tuple else ()
    if len(args) == 1 or name_of(made.function) in PARAMETERS:
        yield from ((None, item) for item in args)
    else:
        yield from enumerate(args)
    # The state is a dict of attributes, or two of them where a class has slots.
    states = made.state if type(made.state) is tuple else (made.state,)
    yield from ((None, state) for state in states)
    yield from made.items()
    yield from enumerate(made.elements)


def path_name(path: Path) -> str | None:
    """Write a way as a state dict does; None if it is too long."""
    parts: list[str] = []
    n_characters = 0
    while path is not None:
        path, key = path
        if type(key) is int or (type(key) is str and key not in HIDDEN):
            parts.append(str(key))
            n_characters += len(parts[-1]) + 1
        if len(parts) > _MAX_NAME_PARTS or n_characters > _MAX_NAME:
            return None
    return ".".join(reversed(parts))
