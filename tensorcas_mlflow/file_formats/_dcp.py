"""Folders of ``torch.distributed.checkpoint``: ``.metadata``, and the files of shards that it names.

Sources: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``. ``.metadata`` is a pickle, which is walked
and not run. It holds the shape, the dtype and the shards of every tensor; and, for every shard and every other saved
object, a range of a ``.distcp`` file, which is a file of `torch.save`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.base.tensors import Spec, bytes_of
from tensorcas_mlflow.errors import CorruptError, FormatError
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._pickle_machine import PickledObject, PickleMachine, Symbol, global_name
from tensorcas_mlflow.file_formats._source import ByteSource, OpenSibling, SliceSource, blaming
from tensorcas_mlflow.file_formats._torch import (
    UNNAMED_TENSOR,
    below_name,
    is_torch_archive,
    is_torch_legacy,
    list_torch,
    list_torch_legacy,
)
from tensorcas_mlflow.file_formats._torch_pickle import size_of, torch_dtype
from tensorcas_mlflow.file_formats._zip import LOCAL, list_members

DCP_METADATA = ".metadata"
DCP_SUFFIX = ".distcp"

_HEAD_BYTES = 64
_MODULE = "torch.distributed.checkpoint.metadata."
_MAX_SHARDS = 4096
"""Largest number of shards of one tensor."""


class _SavedRange(NamedTuple):
    """The range of one saved object."""

    file: str
    start: int
    n_bytes: int
    is_plain: bool
    """Neither compressed nor transformed otherwise."""


class _Shard(NamedTuple):
    """A box of a tensor; its listing holds the box alone."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    listing: Listing


def is_dcp(machines: Sequence[PickleMachine]) -> bool:
    """Recognise ``.metadata`` by its walked pickle."""
    root = machines[0].stack[-1] if len(machines) == 1 and machines[0].stack else None
    return type(root) is PickledObject and root.is_made_by(f"{_MODULE}Metadata")


def list_dcp(source: ByteSource, machine: PickleMachine, beside: OpenSibling | None) -> Listing:
    """List a checkpoint, with the tensors' shards put together.

    Other saved objects may hold tensors and arrays, too; their names are the object's name and the path in it.
    Compressed shards are left out.

    Args:
        source: ``.metadata``.
        machine: The machine that has walked it.
        beside: Opens the files beside it.

    Raises:
        FormatError: The metadata is malformed, a shard differs from it, or shards do not make a whole tensor.
        BackendError: A file is missing.
    """
    if machine.is_cut:
        raise FormatError("its metadata has too many objects to be read")
    root: PickledObject = machine.stack[-1]
    return _Folder(source, beside).listing(_state(root))


class _Folder:
    """Reader of one folder."""

    def __init__(self, source: ByteSource, beside: OpenSibling | None) -> None:
        self._beside = beside
        self._files: dict[str, ByteSource] = {}
        self._table = LocationTable(source)
        self._ranges: dict[tuple[str, tuple[int, ...] | None], _SavedRange] = {}

    def listing(self, metadata: PickledObject) -> Listing:
        things, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if type(things) is not PickledObject or type(stored) is not PickledObject:
            raise FormatError("its metadata lacks the tables of tensors and of ranges")
        for index, info in stored.items():
            self._note(_state(index), _state(info))
        for name, thing in things.items():
            if type(name) is not str or type(thing) is not PickledObject:
                raise FormatError("its metadata holds other objects than named tensors")
            kind = global_name(thing.function).removeprefix(_MODULE)
            if kind == "TensorStorageMetadata":
                self._tensor(name, _state(thing))
            elif kind == "BytesStorageMetadata":
                self._thing(name)
            else:
                raise FormatError(f"{name[:80]!r} is neither a tensor nor bytes")
        return self._table.listing("dcp")

    def _note(self, index: PickledObject, info: PickledObject) -> None:
        name, offset = index.get("fqn"), index.get("offset")
        file, start, n_bytes = (info.get(key) for key in ("relative_path", "offset", "length"))
        offset = None if offset is None else size_of(offset)
        if type(name) is not str or type(file) is not str or type(start) is not int or type(n_bytes) is not int:
            raise FormatError("its metadata has an object without a range")
        transforms = info.get("transform_descriptors")
        is_plain = not (type(transforms) is PickledObject and transforms.n_elements)
        self._ranges[name, offset] = _SavedRange(file, start, n_bytes, is_plain)

    def _tensor(self, name: str, said: PickledObject) -> None:
        shape, chunks = size_of(said.get("size")), said.get("chunks")
        properties = said.get("properties")
        dtype_said = (
            properties.state[0] if type(properties) is PickledObject and type(properties.state) is tuple else None
        )
        if shape is None or type(chunks) is not PickledObject or not chunks.elements:
            raise FormatError(f"its metadata lacks the shape or the shards of tensor {name[:80]!r}")
        dtype = torch_dtype(dtype_said)
        if dtype is None:
            self._table.leave_out(name, global_name(dtype_said) or "a tensor of an unknown dtype")
            return
        if len(chunks.elements) > _MAX_SHARDS:
            raise FormatError(f"tensor {name[:80]!r} has {len(chunks.elements)} shards")
        shards: list[_Shard] = []
        for chunk in map(_state, chunks.elements):
            offsets, sizes = size_of(chunk.get("offsets")), size_of(chunk.get("sizes"))
            if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
                raise FormatError(f"a shard of tensor {name[:80]!r} has no position in it")
            listing = self._listed(name, offsets)
            if listing is None or listing.left_out:
                kinds = "compressed" if listing is None else ", ".join(listing.left_out.values())
                self._table.leave_out(name, kinds)
                return
            spec = listing.locations[UNNAMED_TENSOR].spec if [*listing.locations] == [UNNAMED_TENSOR] else None
            if spec is None or (spec.dtype, spec.shape) != (dtype, sizes):
                raise FormatError(f"a shard of tensor {name[:80]!r} differs from the metadata")
            shards.append(_Shard(offsets, sizes, listing))
        if len(shards) == 1 and shards[0].sizes == shape:
            self._add(name, shards[0].listing)
            return
        _check_whole(name, shape, shards)
        whole = _JoinedSource(Spec(name=name, dtype=dtype, shape=shape), shards)
        self._table.sources.append(whole)
        self._table.add(name, dtype, shape, start=0, n_bytes=whole.size, source=len(self._table.sources) - 1)

    def _thing(self, name: str) -> None:
        """Add the tensors in another object."""
        listing = self._listed(name, None)
        if listing is None:
            self._table.leave_out(name, "compressed")
        else:
            self._add(name, listing)

    def _add(self, name: str, listing: Listing) -> None:
        """Add all tensors of a file of `torch.save`, which holds one object."""
        self._table.join(listing, partial(below_name, name), numbered=True)

    def _listed(self, name: str, offset: tuple[int, ...] | None) -> Listing | None:
        """List the file of a saved object; None if it is compressed."""
        found = self._range(name, offset)
        if not found.is_plain:
            return None
        if found.file not in self._files:
            if self._beside is None:
                raise FormatError(f"its tensors are in {found.file[:80]!r}: open it with that file beside it")
            self._files[found.file] = self._beside(found.file)
        file = self._files[found.file]
        source = SliceSource(file, found.start, found.n_bytes, f"{file.name}, {name[:80]!r}")
        with blaming(source.name, "torch"):
            head = source.read(0, min(_HEAD_BYTES, source.size))
            if is_torch_legacy(head):
                return list_torch_legacy(source)
            members = list_members(source) if bytes(head[:4]) == LOCAL else []
            if is_torch_archive(members):
                return list_torch(source, members)
        raise FormatError(f"{name[:80]!r} is not stored as a file of torch.save")

    def _range(self, name: str, offset: tuple[int, ...] | None) -> _SavedRange:
        found = self._ranges.get((name, offset))
        if found is None:
            raise FormatError(f"its metadata has no range for {name[:80]!r}")
        return found


def _state(symbol: Symbol) -> PickledObject:
    """Return the attributes of an object."""
    state = symbol.state if type(symbol) is PickledObject else None
    if type(state) is not PickledObject:
        raise FormatError("its metadata holds other values than objects with attributes")
    return state


def _check_whole(name: str, shape: tuple[int, ...], shards: Sequence[_Shard]) -> None:
    """Check that every element is in one shard.

    Raises:
        FormatError: An element is in two shards, or in none.
    """
    filled = [shard for shard in shards if 0 not in shard.sizes]
    n_elements = sum(math.prod(shard.sizes) for shard in filled)
    begins = np.array([shard.offsets for shard in filled], np.int64).reshape(len(filled), len(shape))
    ends = begins + np.array([shard.sizes for shard in filled], np.int64).reshape(begins.shape)
    is_apart = n_elements == math.prod(shape) and bool((ends <= np.array(shape, np.int64)).all())
    for nth in range(len(filled) - 1):
        if not is_apart:
            break
        shares = (begins[nth] < ends[nth + 1 :]) & (begins[nth + 1 :] < ends[nth])
        is_apart = not shares.all(axis=1).any()
    if not is_apart:
        raise FormatError(f"the shards of tensor {name[:80]!r} do not make it whole")


class _JoinedSource(ByteSource):
    """The bytes of a tensor, put together from its shards."""

    def __init__(self, spec: Spec, shards: Sequence[_Shard]) -> None:
        self.name = spec.name
        self.size = spec.n_bytes
        self._spec = spec
        self._shards = [shard for shard in shards if 0 not in shard.sizes]

    def read_into(self, start: int, out: memoryview) -> None:
        stop = start + len(out)
        if stop > self.size:
            raise CorruptError(self.name, f"it ends before byte {stop}")
        row_bytes = self.size // self._spec.shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        block = np.empty((last - first, *self._spec.shape[1:]), self._spec.numpy_dtype)
        for shard in self._shards:
            begin, end = shard.offsets[0], shard.offsets[0] + shard.sizes[0]
            low, high = max(first, begin), min(last, end)
            if low < high:
                box = tuple(
                    slice(offset, offset + side) for offset, side in zip(shard.offsets, shard.sizes, strict=True)
                )
                block[slice(low - first, high - first), *box[1:]] = shard.listing.array(UNNAMED_TENSOR)[
                    low - begin : high - begin
                ]
        out[:] = bytes_of(block)[start - first * row_bytes : stop - first * row_bytes]
