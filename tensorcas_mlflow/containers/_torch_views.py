"""Every tensor and array that a pickle makes: views of storages, and of bytes in the pickle.

`_torch_pickle` says which storages there are, for files that pass by; this is for files in which one can go to a
storage once its pickle is read. Tensors and storages are pickled as that module's sources have it; a pickle that is no
torch file has whole legacy torch files as bytes in it, one a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tensorcas_mlflow.containers._array_views import ArrayView, array_in
from tensorcas_mlflow.containers._pickle_arrays import is_dtype
from tensorcas_mlflow.containers._pickle_machine import LARGE_BYTES, Machine
from tensorcas_mlflow.containers._pickle_symbols import Blob, Made, Persistent, Symbol, name_of
from tensorcas_mlflow.containers._torch_legacy import STORAGE_FROM_BYTES
from tensorcas_mlflow.containers._torch_pickle import (
    PARAMETERS,
    SUBCLASSES,
    TENSOR_WITH_DTYPE,
    TENSORS,
    UTILS,
    Path,
    items_of,
    path_name,
    size_of,
    storage_of,
    torch_dtype,
)
from tensorcas_mlflow.errors import FormatError

_MAX_DEPTH = 200
_MAX_WAYS = 8
_MORE_WAYS = 1 << 14
"""One thing may be in many others, and each way to it is a name; so many ways are gone, for each thing that there is
and besides. Things that hold each other twice have as many as two to the power of their depth."""

_QUANTIZED = f"{UTILS}_rebuild_qtensor"
_NESTED = "torch.nested._internal.nested_tensor._rebuild_njt"
_FAKE = "torch._export.serde.serialize._reconstruct_fake_tensor"
_METADATA_AT = {TENSOR_WITH_DTYPE: 7, f"{UTILS}_rebuild_tensor_v2": 6}
_HOLDERS = frozenset({Made, tuple, Persistent, Blob})

StorageIn = Callable[[Blob], Persistent]
"""Reads the torch file that is some bytes of a pickle, which is one storage; see `views_of`."""


class TensorView(NamedTuple):
    """One tensor; its dtype is None where it is not a plain view of a storage that numpy has a dtype for."""

    name: str
    """The keys that lead to it with dots between; not unique where keys have dots. "" for what is all of a file."""
    kind: str
    """What torch calls its dtype or its kind."""
    dtype: str | None
    key: str = ""
    """Of its storage."""
    storage_bytes: int = 0
    """How many the storage has."""
    offset: int = 0
    """First element, counted from the start of the storage."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """Elements, none of them negative."""


def views_of(machine: Machine, storage_in: StorageIn | None = None) -> Iterator[TensorView | ArrayView]:
    """Find the tensors and arrays in what a pickle that was walked makes, in order: one for every way there.

    Arrays are found only if the machine was told to say where bytes lie.

    Args:
        machine: What has walked the pickle.
        storage_in: Gives what stands for a storage that is a torch file within the pickle: what a persistent id of it
            would be. Unless given, tensors with such storages are left out.

    Raises:
        FormatError: A tensor is not what torch makes, or things are in each other too deep or too often, or there are
            too many of them to be kept.
    """
    if machine.is_cut:
        raise FormatError("its pickle has too many things in it to be looked at for tensors")
    max_symbols = _MAX_WAYS * machine.n_made + _MORE_WAYS
    for path, found in _things(machine.stack[-1] if machine.stack else None, max_symbols):
        name = path_name(path)
        if name is None:
            raise FormatError("a tensor lies too deep in its file to be named")
        if isinstance(found, ArrayView):
            yield found._replace(name=name)
        elif isinstance(found, Blob):
            yield ArrayView(name, f"{found.n_bytes} bytes that are no array", None)
        elif isinstance(found, Persistent):
            yield _storage_view(name, found.id)
        else:
            yield _view(name, found, storage_in)


_Thing = Made | ArrayView | Blob | Persistent


def _things(root: Symbol, max_symbols: int) -> Iterator[tuple[Path, _Thing]]:
    """Find tensors, arrays, and storages and large bytes by themselves, on each way that does not go in circles."""
    ways = [_holders([(None, root)], None)]
    inside: list[int] = []
    n_symbols = 0
    while ways:
        for symbol, path in ways[-1]:
            n_symbols += 1
            if n_symbols > max_symbols or len(ways) > _MAX_DEPTH:
                raise FormatError("things are in each other too deep or too often to be looked at for tensors")
            if type(symbol) is Blob:
                if symbol.n_bytes >= LARGE_BYTES and not symbol.is_text:
                    yield path, symbol
                continue
            if id(symbol) in inside:
                continue
            children: Iterator[tuple[Symbol, Path]] | None
            if type(symbol) is Persistent:
                if storage_of(symbol.id) is not None:
                    yield path, symbol
                    continue
                children = _in_persistent(symbol, path)
            elif type(symbol) is Made and _is_tensor(symbol):
                yield path, symbol
                children = _attributes(symbol, path)
            else:
                array = array_in(symbol)
                if array is not None:
                    yield path, array
                children = _children(symbol, path) if array is None or array.is_open else None
            if children is not None:
                inside.append(id(symbol))
                ways.append(children)
                break
        else:
            ways.pop()
            if inside:
                inside.pop()


def _is_tensor(made: Made) -> bool:
    function = name_of(made.function)
    if function in PARAMETERS:
        return False
    return function in SUBCLASSES or function in (_NESTED, _FAKE) or function.startswith(f"{UTILS}_rebuild_")


def _attributes(made: Made, path: Path) -> Iterator[tuple[Symbol, Path]] | None:
    """Look at what somebody has set as attributes of a tensor."""
    args = made.args
    is_with_state = name_of(made.function) in SUBCLASSES and type(args) is tuple and len(args) > 3
    return _holders([(None, args[3])], path) if is_with_state else None


def _in_persistent(symbol: Persistent, path: Path) -> Iterator[tuple[Symbol, Path]]:
    # Until torch 1.6 a module was pickled by an id with it, and its source text, inside.
    pid = symbol.id
    is_module = type(pid) is tuple and len(pid) > 1 and type(pid[0]) is str and pid[0] == "module"
    return _holders([(None, pid[1])] if is_module else [], path)


def _children(symbol: Symbol, path: Path) -> Iterator[tuple[Symbol, Path]]:
    if type(symbol) is tuple:
        return _holders(enumerate(symbol), path)
    return _holders(_items(symbol), path)


def _items(made: Made) -> Iterator[tuple[Symbol, Symbol]]:
    yield from items_of(made)
    yield from ((f"keys.{nth}", key) for nth, (key, _) in enumerate(made.items()) if type(key) in _HOLDERS)


def _holders(items: Iterable[tuple[Symbol, Symbol]], path: Path) -> Iterator[tuple[Symbol, Path]]:
    return (
        (item, path if key is None else (path, key))
        for key, item in items
        if type(item) in _HOLDERS and not is_dtype(item)
    )


def _storage_view(name: str, pid: Symbol) -> TensorView:
    """Read a storage that was saved by itself, as a tensor of all its elements."""
    storage = storage_of(pid)
    assert storage is not None
    n_bytes, n_elements, dtype = storage
    return TensorView(name, name_of(pid[1]), dtype or "uint8", pid[2], n_bytes, 0, (n_elements,), (1,))


def _view(name: str, made: Made, storage_in: StorageIn | None) -> TensorView:
    """Read a call that makes a tensor."""
    function, args = name_of(made.function), made.args
    if function in SUBCLASSES and type(args) is tuple and len(args) > 2 and name_of(args[0]) in TENSORS:
        function, args = name_of(args[0]), args[2]
    if function == _FAKE:
        return TensorView(name, "fake tensor", None)
    if function == _QUANTIZED:
        return TensorView(name, "quantized", None)
    if function in SUBCLASSES:
        kind = name_of(args[1]) if type(args) is tuple and len(args) > 1 else ""
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
        raise FormatError(f"tensor {name[:80]!r} is not made as torch makes tensors")
    return _plain_view(name, function, args)


def _torch_file_in(symbol: Symbol) -> Blob | None:
    """Find the bytes that a storage is in a pickle that is no torch file."""
    if type(symbol) is not Made or name_of(symbol.function) != STORAGE_FROM_BYTES or type(symbol.args) is not tuple:
        return None
    data = symbol.args[0] if symbol.args else None
    return data if type(data) is Blob else Blob(0)


def _plain_view(name: str, function: str, args: tuple[Symbol, ...]) -> TensorView:
    pid, offset, size, stride = args[0].id, args[1], size_of(args[2]), size_of(args[3])
    storage = storage_of(pid)
    if size is None or stride is None or len(size) != len(stride) or type(offset) is not int or offset < 0:
        raise FormatError(f"tensor {name[:80]!r} has an impossible place or shape")
    if storage is None:
        # Of a class that torch has had since, or is none.
        return TensorView(name, name_of(pid[1]) if type(pid) is tuple and len(pid) > 1 else "no storage", None)
    kind, dtype = name_of(pid[1]), storage[2]
    if function == TENSOR_WITH_DTYPE:
        kind = name_of(args[6]) if len(args) > 6 else ""
        dtype = torch_dtype(args[6]) if len(args) > 6 else None
    metadata_at = _METADATA_AT.get(function, 0)
    if metadata_at and len(args) > metadata_at and not _is_empty(args[metadata_at]):
        return TensorView(name, f"{kind}, conjugated or negated when it is read", None)
    if len(pid) > 5 and pid[5] is not None:
        return TensorView(name, f"{kind}, in a storage that is part of another", None)
    return TensorView(name, kind, dtype, pid[2], storage[0], offset, size, stride)


def _is_empty(metadata: Symbol) -> bool:
    return metadata is None or (type(metadata) is Made and not metadata.pairs and not metadata.args)
