"""Tensors in the pickle of a torch file: its storages, and the views of them; arrays beside them.

``torch/_tensor.py`` (``_reduce_ex_internal``) pickles a tensor as a call of a function of ``torch/_utils.py`` with a
storage, offset, size and stride. ``torch/serialization.py`` pickles a storage as a persistent id ``("storage", class,
key, location, number of elements)``. A pickle that is not a torch file holds each storage as bytes: a whole legacy
torch file of one storage.

`storages_of` serves files that pass by: it names each storage after a tensor that fills it. `views_of` serves files
with random access: it finds every tensor and array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import dtype_by_word
from tensorcas_mlflow.file_formats._listing import LocationTable
from tensorcas_mlflow.file_formats._pickle_arrays import (
    ArrayView,
    array_in,
    is_dtype,
    is_shape,
    number_in,
    short_bytes,
)
from tensorcas_mlflow.file_formats._pickle_machine import (
    LARGE_BYTES,
    LIST,
    GlobalName,
    Pause,
    Persistent,
    PickledObject,
    PickleLimits,
    PickleMachine,
    RawBytes,
    Symbol,
    global_name,
    run_opcodes,
)
from tensorcas_mlflow.file_formats._pickle_walk import HIDDEN
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, Latin1Source, MemorySource

STORAGE_FROM_BYTES = "torch.storage._load_from_bytes"
"""Function that a pickle of another kind calls for a storage, with bytes as its argument."""
TORCH_LIMITS = PickleLimits(max_ops=4_000_000, max_items=1 << 20, max_memo=1 << 22)
"""A state dict has 32 opcodes a tensor."""
_OPS_AT_ONCE = 1 << 16

_MAX_DEPTH = 200
_MAX_SYMBOLS = TORCH_LIMITS.max_ops // 4
"""Largest number of symbols searched for tensors. A pickle of `torch.save` has fewer: each takes several opcodes."""
_MAX_NAME_PARTS = 64
_MAX_NAME = 512

STORAGE_DTYPES = {
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
_ITEM_BYTES = {name: parse_dtype(name).itemsize for name in STORAGE_DTYPES.values()}
_UNTYPED = frozenset({"UntypedStorage", "QUInt4x2Storage", "QUInt2x4Storage"})
"""Storages counted in bytes; their tensors have the dtype."""

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


_SEQUENCE_NAMES = ("list", "tuple", "set", "frozenset")
_MAKERS = {
    f"{module}.{name}": first
    for module in ("copyreg", "copy_reg")
    for name, first in (("__newobj__", 1), ("_reconstructor", 2))
}
"""Functions that make an object of a class, and the first argument that is a part of it."""
_SEQUENCES = frozenset(
    {"collections.deque", *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _SEQUENCE_NAMES)}
)
"""Classes in which a list of pairs is a list of pairs."""
_MAX_KEY, _MAX_KEY_PARTS, _MAX_KEY_DEPTH = 200, 8, 3
"""Limits on a key that is no text or number."""

_HOLDERS = frozenset({PickledObject, tuple})
"""Symbols that may hold a tensor."""

_Storage = tuple[int, int, str | None]
"""A storage's size in bytes and in elements, and its dtype."""
SymbolPath = tuple[Any, Symbol] | None
"""Path to a symbol, the last key first. It becomes a name for tensors only: it may be long, and paths share parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageInfo:
    """Facts about one storage, from a pickle."""

    n_bytes: int
    n_elements: int
    """Number of elements in the pickle's own count."""
    dtype: str | None
    """A name of `tensorcas_mlflow.base.dtypes`; None if it is unknown or has no name."""
    name: str
    """Name, in a state dict, of the tensor that fills the storage; "" if there is none."""
    shape: tuple[int, ...] | None
    """Shape of that tensor."""


def storages_of(data: bytes) -> Mapping[str, StorageInfo]:
    """Read the storages of a pickle of `torch.save`.

    Returns:
        The storages in the pickle's order, by key: the member's name in the archive's folder ``data``.

    Raises:
        FormatError: The pickle is malformed. The others of `MALFORMED_PICKLE` say the same.
    """
    return storages_in(walk_torch_pickle(data))


def walk_torch_pickle(data: bytes, *, positions: bool = False) -> PickleMachine:
    """Walk a pickle; raises as `storages_of`.

    Args:
        data: The whole pickle.
        positions: Whether symbols record the positions of bytes.
    """
    machine = PickleMachine(TORCH_LIMITS)
    machine.base = 0 if positions else None
    at, n_ops_left, pause = 0, TORCH_LIMITS.max_ops, None
    while pause is not Pause.STOP:
        at, n_ops, pause = run_opcodes(machine, data, at, stop=len(data), max_ops=min(n_ops_left, _OPS_AT_ONCE))
        n_ops_left -= n_ops
        if pause is Pause.PAYLOAD:
            at += machine.payload.n_bytes
            machine.stack.append(machine.payload)
        if pause is None and (at >= len(data) or n_ops_left == 0 or machine.is_piled_up):
            raise FormatError("a torch file whose pickle does not end, or is too long")
    return machine


def storages_in(machine: PickleMachine) -> dict[str, StorageInfo]:
    """Return the storages of a walked pickle, by key, in order."""
    storages: dict[str, _Storage] = {}
    for pid in machine.persistent:
        storage = storage_of(pid)
        if storage is not None:
            storages.setdefault(pid[2], storage)
    tensors: dict[str, tuple[str, tuple[int, ...], SymbolPath]] = {}
    for path, made in _tensors(machine.stack[-1] if machine.stack else None):
        pid = made.args[0].id
        key = pid[2] if type(pid) is tuple and len(pid) > 2 and type(pid[2]) is str else ""
        storage = storages.get(key)
        tensor = _whole_tensor(storage, made) if storage is not None and key not in tensors else None
        if tensor is not None:
            tensors[key] = *tensor, path
    return {key: _storage_info(storage, tensors.get(key)) for key, storage in storages.items()}


def storage_of(pid: Symbol) -> _Storage | None:
    """Read the persistent id of a storage; None for another id."""
    if type(pid) is not tuple or len(pid) < 5 or type(pid[0]) is not str or pid[0] != "storage":
        return None
    key, n_elements = pid[2], pid[4]
    module, _, kind = global_name(pid[1]).rpartition(".")
    if type(key) is not str or type(n_elements) is not int or module.partition(".")[0] != "torch":
        return None
    dtype = STORAGE_DTYPES.get(kind)
    if dtype is None and kind not in _UNTYPED:
        return None
    n_bytes = n_elements * (_ITEM_BYTES[dtype] if dtype else 1)
    return (n_bytes, n_elements, dtype) if 0 <= n_bytes <= MAX_TENSOR_BYTES else None


def _whole_tensor(storage: _Storage, made: PickledObject) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and shape of a tensor that fills its storage; None for another one."""
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


def _storage_info(storage: _Storage, tensor: tuple[str, tuple[int, ...], SymbolPath] | None) -> StorageInfo:
    n_bytes, n_elements, dtype = storage
    if tensor is None:
        return StorageInfo(n_bytes=n_bytes, n_elements=n_elements, dtype=dtype, name="", shape=None)
    dtype, shape, path = tensor
    return StorageInfo(n_bytes=n_bytes, n_elements=n_elements, dtype=dtype, name=path_name(path) or "", shape=shape)


def torch_dtype(symbol: Symbol) -> str | None:
    """Read a dtype of torch; None for one without a numpy dtype, and for any other symbol."""
    module, _, name = global_name(symbol).rpartition(".")
    return name if module == "torch" and dtype_by_word(name) == name else None


def size_of(symbol: Symbol) -> tuple[int, ...] | None:
    """Read a size or stride, perhaps a ``torch.Size``; None for any other symbol."""
    if type(symbol) is PickledObject and symbol.is_made_by("torch.Size") and type(symbol.args) is tuple and symbol.args:
        symbol = symbol.args[0]
    return symbol if is_shape(symbol) else None


def dense_shape(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that makes the elements C order; None if there are gaps or shared elements.

    It is the tensor's own shape, unless the tensor is transposed or in another memory format.
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


def _tensors(root: Symbol) -> Iterator[tuple[SymbolPath, PickledObject]]:
    """Find the tensors of a pickle in order, each once, with its path; of too many symbols, the first."""
    ways = [_holders([(None, root)], None)]
    seen: set[int] = set()
    while ways and len(seen) < _MAX_SYMBOLS:
        for symbol, path in ways[-1]:
            if id(symbol) in seen:
                continue
            seen.add(id(symbol))
            tensor = _tensor(symbol) if type(symbol) is PickledObject else None
            if tensor is not None:
                yield path, tensor
            elif len(ways) <= _MAX_DEPTH:
                ways.append(_children(symbol, path))
                break
        else:
            ways.pop()


def _tensor(made: PickledObject) -> PickledObject | None:
    """Return the call that makes a tensor, or the base of a subclass's tensor; None for any other object."""
    args = made.args
    if type(args) is not tuple:
        return None
    function = global_name(made.function)
    if function in SUBCLASSES and len(args) > 2:
        return _tensor(PickledObject(args[0], args[2])) if global_name(args[0]) in TENSORS else None
    return made if function in TENSORS and len(args) >= 4 and type(args[0]) is Persistent else None


def _children(symbol: Symbol, path: SymbolPath) -> Iterator[tuple[Symbol, SymbolPath]]:
    """Yield the items of a symbol."""
    return _holders(enumerate(symbol) if type(symbol) is tuple else items_of(symbol), path)


def _holders(items: Iterable[tuple[Symbol, Symbol]], path: SymbolPath) -> Iterator[tuple[Symbol, SymbolPath]]:
    """Yield the items that may hold a tensor, each with its path."""
    return ((item, path if key is None else (path, key)) for key, item in items if type(item) in _HOLDERS)


def items_of(made: PickledObject) -> Iterator[tuple[Symbol, Symbol]]:
    """Yield the parts of an object, each with its key; None for a part that has the object's own name."""
    args = made.args if type(made.args) is tuple else ()
    function = global_name(made.function)
    if function in _MAKERS:
        args = args[_MAKERS[function] :]
    pairs = _pairs_in(args[0]) if len(args) == 1 and function not in _SEQUENCES else None
    if pairs is not None:
        yield from pairs
    elif len(args) == 1 or function in PARAMETERS:
        yield from ((None, item) for item in args)
    else:
        yield from enumerate(args)
    # The state is a dict of attributes, or two dicts for a class with slots.
    states = made.state if type(made.state) is tuple else (made.state,)
    yield from ((None, state) for state in states)
    yield from _worded(made.items())
    yield from enumerate(made.elements)


def _pairs_in(symbol: Symbol) -> list[tuple[str | int, Symbol]] | None:
    """Read a list of pairs, as an ``OrderedDict`` of Python 2 reduces itself to; None for any other symbol."""
    if type(symbol) is not PickledObject or not symbol.elements or not symbol.is_made_by(LIST.name):
        return None
    pairs: list[tuple[Symbol, Symbol]] = []
    for item in symbol.elements:
        pair = item.elements if type(item) is PickledObject and item.is_made_by(LIST.name) else item
        if type(pair) not in (list, tuple) or len(pair) != 2:
            return None
        pairs.append((pair[0], pair[1]))
    worded = list(_worded(pairs))
    return worded if len({key for key, _ in worded}) == len(worded) else None


def _worded(items: Iterable[tuple[Symbol, Symbol]]) -> Iterator[tuple[str | int, Symbol]]:
    """Write each key of a dict as a text or a number."""
    return (
        (key if type(key) is str or type(key) is int else _word_of(key, nth), item)
        for nth, (key, item) in enumerate(items)
    )


def _word_of(key: Symbol, nth: int, depth: int = 0) -> str:
    """Write a key; one that has no short text by its number among the keys."""
    data, kind = short_bytes(key), type(key)
    if data is not None:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data.decode("latin-1")
    if key is None or kind in (str, int, bool, float):
        return str(key)
    if kind is PickledObject and (number := number_in(key)) is not None:
        return str(number)
    if kind is GlobalName:
        return str(key.name)
    if kind in (tuple, PickledObject) and depth < _MAX_KEY_DEPTH:
        args = key if kind is tuple else key.args
        if type(args) is tuple and len(args) <= _MAX_KEY_PARTS:
            called = "" if kind is tuple else global_name(key.function).rpartition(".")[2]
            text = f"{called}({', '.join(_word_of(part, nth, depth + 1) for part in args)})"
            if len(text) <= _MAX_KEY:
                return text
    return f"#{nth}"


def path_name(path: SymbolPath) -> str | None:
    """Write a path as a state dict does; None if it is too long."""
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


_MAX_VIEW_DEPTH = 200
_MAX_WAYS = 8
_MORE_WAYS = 1 << 14
"""Limits on paths: for each object, and in addition. One object may lie in many others, and each path to it is a name;
objects that hold each other twice have two to the power of their depth."""

_QUANTIZED = f"{UTILS}_rebuild_qtensor"
_NESTED = "torch.nested._internal.nested_tensor._rebuild_njt"
_FAKE = "torch._export.serde.serialize._reconstruct_fake_tensor"
_METADATA_AT = {TENSOR_WITH_DTYPE: 7, f"{UTILS}_rebuild_tensor_v2": 6}
_VIEW_HOLDERS = frozenset({PickledObject, tuple, Persistent, RawBytes})

StorageIn = Callable[[RawBytes], Persistent]
"""Reads the torch file of one storage that lies in a pickle as bytes; see `views_of`."""


class TensorView(NamedTuple):
    """One tensor; its dtype is None unless it is a plain view of a storage with a numpy dtype."""

    name: str
    """Keys of its path with dots between; perhaps not unique. "" for a tensor that is a whole file."""
    kind: str
    """torch's name of its dtype or kind."""
    dtype: str | None
    key: str = ""
    """Key of its storage."""
    storage_bytes: int = 0
    """Size of the storage."""
    offset: int = 0
    """First element in the storage."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """Step of each dimension in elements, never negative."""


def views_of(machine: PickleMachine, storage_in: StorageIn | None = None) -> Iterator[TensorView | ArrayView]:
    """Find the tensors and arrays of a walked pickle, in order, one for every path.

    Arrays are found only if the machine recorded the positions of bytes.

    Args:
        machine: The machine that has walked the pickle.
        storage_in: Returns the persistent id for a storage that is a torch file within the pickle. Without it, tensors
            with such storages are left out.

    Raises:
        FormatError: A tensor has a form that torch does not write, or objects nest too deep or too often, or there are
            too many of them.
    """
    if machine.is_cut:
        raise FormatError("its pickle has too many objects to be searched for tensors")
    max_symbols = _MAX_WAYS * machine.n_made + _MORE_WAYS
    for path, found in _objects(machine.stack[-1] if machine.stack else None, max_symbols):
        name = path_name(path)
        if name is None:
            raise FormatError("a tensor lies too deep in its file to be named")
        if isinstance(found, ArrayView):
            yield found._replace(name=name)
        elif isinstance(found, RawBytes):
            yield ArrayView(name, f"{found.n_bytes} bytes that are no array", None)
        elif isinstance(found, Persistent):
            yield _storage_view(name, found.id)
        else:
            yield _tensor_view(name, found, storage_in)


_Found = PickledObject | ArrayView | RawBytes | Persistent


def _objects(root: Symbol, max_symbols: int) -> Iterator[tuple[SymbolPath, _Found]]:
    """Find tensors, arrays, and storages and large bytes by themselves, on every path without a cycle."""
    ways = [_view_holders([(None, root)], None)]
    inside: list[int] = []
    n_symbols = 0
    while ways:
        for symbol, path in ways[-1]:
            n_symbols += 1
            if n_symbols > max_symbols or len(ways) > _MAX_VIEW_DEPTH:
                raise FormatError("its objects nest too deep or too often to be searched for tensors")
            if type(symbol) is RawBytes:
                if symbol.n_bytes >= LARGE_BYTES and not symbol.is_text:
                    yield path, symbol
                continue
            if id(symbol) in inside:
                continue
            children: Iterator[tuple[Symbol, SymbolPath]] | None
            if type(symbol) is Persistent:
                if type(symbol.id) is tuple and symbol.id[:1] == ("storage",):
                    yield path, symbol
                    continue
                children = _in_persistent(symbol, path)
            elif type(symbol) is PickledObject and _is_tensor(symbol):
                yield path, symbol
                children = _attributes(symbol, path)
            else:
                array = array_in(symbol)
                if array is not None:
                    yield path, array
                children = _view_children(symbol, path) if array is None or array.is_open else None
            if children is not None:
                inside.append(id(symbol))
                ways.append(children)
                break
        else:
            ways.pop()
            if inside:
                inside.pop()


def _is_tensor(made: PickledObject) -> bool:
    function = global_name(made.function)
    if function in PARAMETERS:
        return False
    return function in SUBCLASSES or function in (_NESTED, _FAKE) or function.startswith(f"{UTILS}_rebuild_")


def _attributes(made: PickledObject, path: SymbolPath) -> Iterator[tuple[Symbol, SymbolPath]] | None:
    """Yield the attributes that a user has set on a tensor."""
    args = made.args
    is_with_state = global_name(made.function) in SUBCLASSES and type(args) is tuple and len(args) > 3
    return _view_holders([(None, args[3])], path) if is_with_state else None


def _in_persistent(symbol: Persistent, path: SymbolPath) -> Iterator[tuple[Symbol, SymbolPath]]:
    # Until torch 1.6 the id of a module held the module and its source text.
    pid = symbol.id
    is_module = type(pid) is tuple and len(pid) > 1 and type(pid[0]) is str and pid[0] == "module"
    return _view_holders([(None, pid[1])] if is_module else [], path)


def _view_children(symbol: Symbol, path: SymbolPath) -> Iterator[tuple[Symbol, SymbolPath]]:
    if type(symbol) is tuple:
        return _view_holders(enumerate(symbol), path)
    return _view_holders(_view_items(symbol), path)


def _view_items(made: PickledObject) -> Iterator[tuple[Symbol, Symbol]]:
    yield from items_of(made)
    yield from ((f"keys.{nth}", key) for nth, (key, _) in enumerate(made.items()) if type(key) in _VIEW_HOLDERS)


def _view_holders(items: Iterable[tuple[Symbol, Symbol]], path: SymbolPath) -> Iterator[tuple[Symbol, SymbolPath]]:
    return (
        (item, path if key is None else (path, key))
        for key, item in items
        if type(item) in _VIEW_HOLDERS and not is_dtype(item)
    )


def _storage_view(name: str, pid: Symbol) -> TensorView:
    """Describe a storage saved by itself as a tensor of all its elements."""
    storage = storage_of(pid)
    if storage is None:
        return TensorView(name, global_name(pid[1] if len(pid) > 1 else None) or "an unknown storage", None)
    n_bytes, n_elements, dtype = storage
    return TensorView(name, global_name(pid[1]), dtype or "uint8", pid[2], n_bytes, 0, (n_elements,), (1,))


def _tensor_view(name: str, made: PickledObject, storage_in: StorageIn | None) -> TensorView:
    """Describe the tensor that a call makes."""
    function, args = global_name(made.function), made.args
    if function in SUBCLASSES and type(args) is tuple and len(args) > 2 and global_name(args[0]) in TENSORS:
        function, args = global_name(args[0]), args[2]
    if function == _FAKE:
        return TensorView(name, "fake tensor", None)
    if function == _QUANTIZED:
        return TensorView(name, "quantized", None)
    if function in SUBCLASSES:
        kind = global_name(args[1]) if type(args) is tuple and len(args) > 1 else ""
        return TensorView(name, kind or "a tensor's subclass", None)
    if function not in TENSORS:
        word = function.rpartition(".")[2].removeprefix("_rebuild_").removesuffix("_tensor")
        return TensorView(name, word.replace("_", " "), None)
    blob = _torch_file_in(args[0]) if type(args) is tuple and args else None
    if blob is not None and (storage_in is None or blob.is_text or blob.at < 0):
        return TensorView(name, "a tensor whose storage is written as text", None)
    if blob is not None and storage_in is not None:
        args = (storage_in(blob), *args[1:])
    if type(args) is not tuple or len(args) < 4 or type(args[0]) is not Persistent:
        raise FormatError(f"tensor {name[:80]!r} has a form that torch does not write")
    return _plain_view(name, function, args)


def _torch_file_in(symbol: Symbol) -> RawBytes | None:
    """Return the bytes of a storage in a pickle that is not a torch file; None for any other symbol."""
    if (
        type(symbol) is not PickledObject
        or global_name(symbol.function) != STORAGE_FROM_BYTES
        or type(symbol.args) is not tuple
    ):
        return None
    data = symbol.args[0] if symbol.args else None
    return data if type(data) is RawBytes else RawBytes(0)


def _plain_view(name: str, function: str, args: tuple[Symbol, ...]) -> TensorView:
    pid, offset, size, stride = args[0].id, args[1], size_of(args[2]), size_of(args[3])
    storage = storage_of(pid)
    if size is None or stride is None or len(size) != len(stride) or type(offset) is not int or offset < 0:
        raise FormatError(f"tensor {name[:80]!r} has an impossible place or shape")
    if storage is None:
        # A class of a later torch, or no storage.
        return TensorView(name, global_name(pid[1]) if type(pid) is tuple and len(pid) > 1 else "no storage", None)
    kind, dtype = global_name(pid[1]), storage[2]
    if function == TENSOR_WITH_DTYPE:
        kind = global_name(args[6]) if len(args) > 6 else ""
        dtype = torch_dtype(args[6]) if len(args) > 6 else None
    metadata_at = _METADATA_AT.get(function, 0)
    if metadata_at and len(args) > metadata_at and not _is_empty(args[metadata_at]):
        return TensorView(name, f"{kind}, conjugated or negated when it is read", None)
    if len(pid) > 5 and pid[5] is not None:
        return TensorView(name, f"{kind}, in a storage that is part of another", None)
    return TensorView(name, kind, dtype, pid[2], storage[0], offset, size, stride)


def _is_empty(metadata: Symbol) -> bool:
    return metadata is None or (type(metadata) is PickledObject and not metadata.pairs and not metadata.args)


class PickleTable:
    """Locations of the tensors and arrays of one file's pickles."""

    def __init__(
        self, source: ByteSource, *, inflated: bytes | None = None, base: int = 0, is_swapped: bool = False
    ) -> None:
        """Begin without any.

        Args:
            source: The file.
            inflated: The pickle, if it is deflated in the file.
            base: Position of the pickle in the file; symbols count from it.
            is_swapped: Whether the numbers of storages have the other byte order than this machine.
        """
        self.table = LocationTable(source)
        self._base = base
        self._is_swapped = is_swapped
        self._nth = 0
        if inflated is not None:
            self._nth, self._base = 1, 0
            self.table.sources.append(MemorySource(source.name, inflated))
        self._held: int | None = None
        """Index of the source that holds arrays written as short texts."""

    def add(
        self, views: Iterable[TensorView | ArrayView], storage_at: Callable[[TensorView], FileRange], *, only: str
    ) -> None:
        """Add tensors and arrays.

        Args:
            views: The tensors and arrays of a pickle.
            storage_at: Returns a tensor's storage.
            only: Name for a tensor without one.

        Raises:
            FormatError: A location is invalid.
        """
        for view in views:
            name = self.table.unused(view.name or only)
            if view.dtype is None:
                self.table.leave_out(name, view.kind)
            elif isinstance(view, TensorView):
                storage, swapped = storage_at(view), self._is_swapped
                size, stride, offset = view.size, view.stride, view.offset
                self.table.add_view(name, view.dtype, size, stride, offset=offset, storage=storage, swapped=swapped)
            else:
                self._add_array(name, view, view.dtype)

    def _add_array(self, name: str, view: ArrayView, dtype: str) -> None:
        data, nth, start, n_bytes = view.data, self._nth, 0, view.n_bytes
        sources = self.table.sources
        if not n_bytes:
            nth = 0
        elif isinstance(data, str):
            raw = data.encode("latin-1", "replace")
            if len(raw) != n_bytes or raw.decode("latin-1") != data:
                raise FormatError(f"array {name[:80]!r} has {n_bytes} bytes, and its text encodes others")
            nth, start = self._hold(raw)
        elif data is None:
            raise FormatError(f"array {name[:80]!r} has no bytes")
        elif data.is_text:
            begin = self._base + data.at
            if begin + data.n_bytes > sources[nth].size or not n_bytes <= data.n_bytes <= 2 * n_bytes:
                raise FormatError(f"array {name[:80]!r} has {n_bytes} bytes, and its text encodes others")
            sources.append(Latin1Source(sources[nth], begin, data.n_bytes, n_bytes, sources[0].name))
            nth = len(sources) - 1
        else:
            start = self._base + data.at
        self.table.add_array(name, dtype, view.shape, start=start, source=nth, strides=view.strides, fields=view.fields)

    def _hold(self, data: bytes) -> tuple[int, int]:
        sources = self.table.sources
        if self._held is None:
            self._held = len(sources)
            sources.append(MemorySource(sources[0].name))
        held = sources[self._held]
        assert isinstance(held, MemorySource)
        return self._held, held.add(data)
