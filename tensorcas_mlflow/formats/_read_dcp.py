"""Folders of ``torch.distributed.checkpoint``: ``.metadata``, and the files of shards that it names.

Sources: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``. ``.metadata`` is a pickle, which is walked
and not run. It says of every tensor its shape, its dtype and its shards; and of every shard, and every other thing that
was saved, a stretch of a ``.distcp`` file, which is a file of `torch.save`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tensorcas_mlflow.containers import Machine, Made, Symbol, name_of, size_of, torch_dtype
from tensorcas_mlflow.errors import CorruptError, FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._read_torch import ONLY
from tensorcas_mlflow.formats._source import Beside, ByteSource, PartSource
from tensorcas_mlflow.tensor import Spec, bytes_of

METADATA = ".metadata"
SUFFIX = ".distcp"

_MODULE = "torch.distributed.checkpoint.metadata."
_MAX_SHARDS = 4096
"""Of one tensor."""

ListFile = Callable[[ByteSource], Listing | None]


class _Stretch(NamedTuple):
    """Where one thing is."""

    file: str
    start: int
    n_bytes: int
    is_plain: bool
    """Not compressed, or otherwise transformed."""


class _Shard(NamedTuple):
    """A box of a tensor, which is all that its listing has."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    listing: Listing


def is_dcp(machines: Sequence[Machine]) -> bool:
    """Tell ``.metadata`` from other pickles, once it was walked."""
    root = machines[0].stack[-1] if len(machines) == 1 and machines[0].stack else None
    return type(root) is Made and root.is_made_by(f"{_MODULE}Metadata")


def list_dcp(source: ByteSource, machine: Machine, beside: Beside | None, list_file: ListFile) -> Listing:
    """List what ``.metadata`` says, with the tensors' shards put together.

    What was saved besides tensors may have tensors and arrays in it, too; they are called as it is, and as what leads
    to them in it. Shards that were compressed are left out.

    Args:
        source: ``.metadata``.
        machine: What has walked it.
        beside: Opens the files beside it.
        list_file: Lists a file of `torch.save`.

    Raises:
        FormatError: It is not sound, a shard is not what it says, or shards do not make a whole tensor.
        BackendError: A file is not there.
    """
    if machine.is_cut:
        raise FormatError("its metadata has too many things in it to be looked through")
    root: Made = machine.stack[-1]
    return _Folder(source, beside, list_file).listing(_state(root))


class _Folder:
    """One folder under way."""

    def __init__(self, source: ByteSource, beside: Beside | None, list_file: ListFile) -> None:
        self._beside = beside
        self._list_file = list_file
        self._sources: list[ByteSource] = [source]
        self._files: dict[str, ByteSource] = {}
        self._places = Places()
        self._stretches: dict[tuple[str, tuple[int, ...] | None], _Stretch] = {}

    def listing(self, metadata: Made) -> Listing:
        things, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
        if type(things) is not Made or type(stored) is not Made:
            raise FormatError("its metadata does not say what is stored where")
        for index, info in stored.items():
            self._note(_state(index), _state(info))
        for name, thing in things.items():
            if type(name) is not str or type(thing) is not Made:
                raise FormatError("its metadata has something else than names and tensors")
            kind = name_of(thing.function).removeprefix(_MODULE)
            if kind == "TensorStorageMetadata":
                self._tensor(name, _state(thing))
            elif kind == "BytesStorageMetadata":
                self._thing(name)
            else:
                raise FormatError(f"{name[:80]!r} is neither a tensor nor bytes")
        return Listing(format="dcp", sources=self._sources, places=self._places, left_out=self._places.left_out)

    def _note(self, index: Made, info: Made) -> None:
        name, offset = index.get("fqn"), index.get("offset")
        file, start, n_bytes = (info.get(key) for key in ("relative_path", "offset", "length"))
        offset = None if offset is None else size_of(offset)
        if type(name) is not str or type(file) is not str or type(start) is not int or type(n_bytes) is not int:
            raise FormatError("its metadata does not say where something is stored")
        transforms = info.get("transform_descriptors")
        is_plain = not (type(transforms) is Made and transforms.n_elements)
        self._stretches[name, offset] = _Stretch(file, start, n_bytes, is_plain)

    def _tensor(self, name: str, said: Made) -> None:
        shape, chunks = size_of(said.get("size")), said.get("chunks")
        properties = said.get("properties")
        dtype_said = properties.state[0] if type(properties) is Made and type(properties.state) is tuple else None
        if shape is None or type(chunks) is not Made or not chunks.elements:
            raise FormatError(f"its metadata does not say what tensor {name[:80]!r} is")
        dtype = torch_dtype(dtype_said)
        if dtype is None:
            self._places.leave_out(name, name_of(dtype_said) or "a tensor of an unknown dtype")
            return
        if len(chunks.elements) > _MAX_SHARDS:
            raise FormatError(f"tensor {name[:80]!r} has {len(chunks.elements)} shards")
        shards: list[_Shard] = []
        for chunk in map(_state, chunks.elements):
            offsets, sizes = size_of(chunk.get("offsets")), size_of(chunk.get("sizes"))
            if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
                raise FormatError(f"a shard of tensor {name[:80]!r} has no place in it")
            listing = self._listed(name, offsets)
            if listing is None or listing.left_out:
                kinds = "compressed" if listing is None else ", ".join(listing.left_out.values())
                self._places.leave_out(name, kinds)
                return
            spec = listing.places[ONLY].spec if [*listing.places] == [ONLY] else None
            if spec is None or (spec.dtype, spec.shape) != (dtype, sizes):
                raise FormatError(f"a shard of tensor {name[:80]!r} is another than the metadata says")
            shards.append(_Shard(offsets, sizes, listing))
        if len(shards) == 1 and shards[0].sizes == shape:
            self._add(name, shards[0].listing)
            return
        _check_whole(name, shape, shards)
        whole = _Joined(Spec(name=name, dtype=dtype, shape=shape), shards)
        self._places.add(
            name,
            dtype,
            shape,
            start=0,
            n_bytes=whole.size,
            file_bytes=whole.size,
            source=len(self._sources),
        )
        self._sources.append(whole)

    def _thing(self, name: str) -> None:
        """Look for tensors in what is no tensor."""
        listing = self._listed(name, None)
        if listing is None:
            self._places.leave_out(name, "compressed")
        else:
            self._add(name, listing)

    def _add(self, name: str, listing: Listing) -> None:
        """Add all that a file of `torch.save` has, which is one thing."""
        for inner, place in listing.places.items():
            self._places.put(self._places.unused(_below(name, inner)), place, len(self._sources))
        for inner, kind in listing.left_out.items():
            self._places.leave_out(self._places.unused(_below(name, inner)), kind)
        self._sources += listing.sources

    def _listed(self, name: str, offset: tuple[int, ...] | None) -> Listing | None:
        """List what is stored of something; None if it is compressed."""
        stretch = self._stretch(name, offset)
        if not stretch.is_plain:
            return None
        if stretch.file not in self._files:
            if self._beside is None:
                raise FormatError(f"its tensors are in {stretch.file[:80]!r}: open it with that file beside it")
            self._files[stretch.file] = self._beside(stretch.file)
        file = self._files[stretch.file]
        listing = self._list_file(PartSource(file, stretch.start, stretch.n_bytes, f"{file.name}, {name[:80]!r}"))
        if listing is None or listing.format != "torch":
            raise FormatError(f"{name[:80]!r} is stored as something else than torch.save writes")
        return listing

    def _stretch(self, name: str, offset: tuple[int, ...] | None) -> _Stretch:
        stretch = self._stretches.get((name, offset))
        if stretch is None:
            raise FormatError(f"its metadata does not say where {name[:80]!r} is stored")
        return stretch


def _state(symbol: Symbol) -> Made:
    """Give the attributes of an object."""
    state = symbol.state if type(symbol) is Made else None
    if type(state) is not Made:
        raise FormatError("its metadata has something else than objects with attributes")
    return state


def _below(name: str, inner: str) -> str:
    return name if inner == ONLY else f"{name}.{inner}"


def _check_whole(name: str, shape: tuple[int, ...], shards: Sequence[_Shard]) -> None:
    """See that every element is in one shard.

    Raises:
        FormatError: One is in two, or in none.
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


class _Joined(ByteSource):
    """A tensor whose shards lie in several places, as if it lay in one."""

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
                block[slice(low - first, high - first), *box[1:]] = shard.listing.array(ONLY)[
                    low - begin : high - begin
                ]
        out[:] = bytes_of(block)[start - first * row_bytes : stop - first * row_bytes]
