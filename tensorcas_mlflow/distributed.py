"""Checkpoints that many ranks save and load together, through `torch.distributed.checkpoint`.

```python
from tensorcas_mlflow.distributed import TensorCasStorageReader, TensorCasStorageWriter

dcp.save(state, storage_writer=TensorCasStorageWriter(step=100, run_id=run_id))
dcp.load(state, storage_reader=TensorCasStorageReader(step=100, run_id=run_id))
```

Plans of PyTorch's planners come in, and boxes of tensors go into a store; rows of an ordinary checkpoint come in, and
tensors of any mesh are filled. The module imports torch, the integration and the rooms below it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, cast

import mlflow
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tensorcas_mlflow.adapter import SKELETON, Array, adapter_named, take_apart
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import Spec, group_by_bytes
from tensorcas_mlflow.errors import AdapterError, FormatError
from tensorcas_mlflow.integration.checkpoints import (
    CheckpointInfo,
    SaveOptions,
    ShardedStep,
    ShardPlace,
    check_options,
    find_whole_step,
    open_whole_step,
    pickle_forbidden_by,
)
from tensorcas_mlflow.layout import DEFAULT_NAME
from tensorcas_mlflow.reader import refuse_pickle
from tensorcas_mlflow.store import (
    Box,
    Policy,
    Shard,
    Store,
    StoredShards,
    join_shards,
    store_shards,
    withdraw_shards,
)

if TYPE_CHECKING:
    from mlflow.entities import Run

    from tensorcas_mlflow.layout import Manifest
    from tensorcas_mlflow.reader import CheckpointReader, ReadArrays

__all__ = ["TensorCasStorageReader", "TensorCasStorageWriter"]

T = TypeVar("T")

_GROUP_BYTES = 512 << 20
"""Bytes of tensors of other devices that are copied to this machine's memory at a time."""


class _Written(NamedTuple):
    """Result of one item."""

    shard: Shard | None
    """The stored box; None for other values."""
    value: bytes | None
    """A value that is no tensor, as the planner gave it."""
    part: _Part
    """Figures of all items of the rank: one object, which a pickle holds once."""


@dataclasses.dataclass(slots=True)
class _Part:
    intents: tuple[str, ...] = ()
    n_new_bytes: int = 0
    n_stored_bytes: int = 0


class TensorCasStorageWriter(StorageWriter):
    """Writer for `torch.distributed.checkpoint.save`: the state becomes a step of a run, an ordinary checkpoint.

    ```python
    dcp.save(state, storage_writer=TensorCasStorageWriter(step=100, run_id=run_id))
    ```

    Each rank stores the chunks that the store lacks. The coordinator commits the step at the end, in one atomic step: a
    save that fails on any rank leaves no step, and the next collection removes its chunks. The run's store must be in a
    folder or a bucket that all ranks reach. `mlflow.tensorcas.load_checkpoint`, `open_checkpoint`, `diff` and the UI
    read the step like any other.

    One writer saves one step; it may be used again for the same step. All ranks pass equal arguments.
    """

    def __init__(self, *, step: int, **options: Unpack[SaveOptions]) -> None:
        """Describe the step; nothing is written or looked up yet.

        Args:
            step: Any whole number of 64 bits.
            options: ``name``, ``run_id``, ``overwrite``, ``keep``, ``log_metrics`` and ``policy``, as for
                `log_checkpoint`. Only the coordinator, rank 0 by default, looks for the run. By default it is the run
                that is active now, else a new one.

        Raises:
            TypeError: There is no option of a name.
            ValueError: There is no such policy.
        """
        check_options(options)
        active = mlflow.active_run()
        if options.get("run_id") is None and active is not None:
            # A thread or a process that saves in the background does not see the active run.
            options["run_id"] = active.info.run_id
        self.info: CheckpointInfo | None = None
        """On the coordinator, the result of the last save."""
        self._wanted_step = step
        self._options = options
        self._step: ShardedStep | None = None
        self._rank = 0
        self._open: tuple[Store, list[str]] | None = None
        """The store, and the intents of this rank in it that nobody may have withdrawn."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None, "_open": None, "info": None}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether an id names a place for a checkpoint: none does, the writer itself names the step."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save: withdraw what a failed one has left.

        Raises:
            ValueError: There is an id: the writer has a step already.
        """
        if checkpoint_id is not None:
            raise ValueError(f"the writer names the run and the step: leave checkpoint_id out ({checkpoint_id!r:.200})")
        self._withdraw()
        self._step = None
        self.info = None

    def _withdraw(self) -> None:
        if self._open is not None:
            withdraw_shards(*self._open)
        self._open = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Find the step, on the coordinator."""
        self._rank = int(kwargs.get("rank", 0))
        if is_coordinator:
            self._step = ShardedStep(step=self._wanted_step, **self._options)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell every rank the place of its shards."""
        assert self._step is not None
        place = self._step.place()
        return [dataclasses.replace(plan, storage_data=place) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store the items of this rank; they are durable, and not yet part of a checkpoint.

        Raises:
            WrongStoreError: This rank finds another store at the place.
            ValueError: The store has no dtype for a tensor.
            BackendError: The storage failed.
        """
        place: ShardPlace = plan.storage_data
        store = place.store()
        self._open = store, []
        part = _Part()
        results: list[WriteResult] = []
        for number, items in enumerate(_groups(plan.items, planner)):
            boxes = [box for _, box, _ in items if box is not None]
            stored: StoredShards | None = None
            if boxes:
                stored = store_shards(
                    store,
                    boxes,
                    series=f"{place.folder}#{self._rank}.{number}",
                    policy=Policy.of(place.policy),
                    earlier=None if place.before is None else partial(store.manifest, place.before),
                )
                self._open[1].append(stored.intent)
                part.intents += (stored.intent,)
                part.n_new_bytes += stored.n_new_bytes
                part.n_stored_bytes += stored.n_stored_bytes
            shards = iter(stored.shards if stored is not None else ())
            for item, box, value in items:
                shard = None if box is None else next(shards)
                n_bytes = len(value or b"") if box is None else box.data.nbytes
                data = _Written(shard, value, part)
                results.append(WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=data))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Join the shards of all ranks, and commit the step.

        Raises:
            CheckpointExistsError: The step is there and ``overwrite`` is False.
            ValueError: The shards of a tensor are not the whole tensor.
            AdapterError: The state cannot be taken apart exactly.
            BackendError: The storage failed.
        """
        assert self._step is not None
        written = [result for rank in results for result in rank]
        parts = {id(result.storage_data.part): result.storage_data.part for result in written}
        intents = [intent for part in parts.values() for intent in part.intents]
        store = self._step.store
        try:
            self.info = _commit(self._step, metadata, written, intents, list(parts.values()))
        finally:
            withdraw_shards(store, intents)
            self._open = None


def _commit(
    step: ShardedStep, metadata: Metadata, written: Sequence[WriteResult], intents: list[str], parts: Sequence[_Part]
) -> CheckpointInfo:
    shards: dict[str, list[Shard]] = {}
    plain: dict[str, bytes] = {}
    for result in written:
        data: _Written = result.storage_data
        if data.shard is not None:
            shards.setdefault(result.index.fqn, []).append(data.shard)
        else:
            plain[result.index.fqn] = data.value or b""
    values: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, known in metadata.state_dict_metadata.items():
        if isinstance(known, TensorStorageMetadata):
            values[name] = _placeholder(known.properties.dtype, known.size)
            if values[name].numel():
                names[values[name].data_ptr()] = name
        elif name in plain:
            # These bytes are of this job's own ranks, which exchange pickles already.
            values[name] = torch.load(io.BytesIO(plain[name]), weights_only=False)
        else:
            raise ValueError(f"no rank has written {name!r}")
    paths = metadata.planner_data
    state = unflatten_state_dict(values, dict(paths)) if isinstance(paths, Mapping) else values
    adapter = adapter_named(_FLAVOR)
    tensors = take_apart(adapter, state)
    left_out = adapter.left_out(tensors)
    sources = {row: names.pop(_address_of(array), None) if array.size else None for row, array in tensors.items()}
    if names:
        raise ValueError(f"the adapter has no row for the tensor {next(iter(names.values()))!r}")
    own = [
        Box(name=row, data=array, offsets=(0,) * array.ndim, shape=array.shape)
        for row, array in tensors.items()
        if sources[row] is None
    ]
    stored = store_shards(step.store, own, series=f"{step.folder}#", policy=step.policy)
    intents.append(stored.intent)
    mine = {box.name: shard for box, shard in zip(own, stored.shards, strict=True)}
    rows: list[tuple[Spec, Sequence[Shard]]] = []
    for row, array in tensors.items():
        source = sources[row]
        spec = mine[row].row.spec if source is None else Spec.of(row, array)
        if source is None:
            spec = dataclasses.replace(spec, name=row, shape=array.shape)
        rows.append((spec, [mine[row]] if source is None else shards.get(source, [])))
    joined = join_shards(step.store, rows)
    return step.commit(
        joined,
        flavor=_FLAVOR,
        left_out=left_out,
        n_tensors=len(tensors) - (SKELETON in tensors),
        n_new_bytes=stored.n_new_bytes + sum(part.n_new_bytes for part in parts),
        n_stored_bytes=stored.n_stored_bytes + sum(part.n_stored_bytes for part in parts),
    )


def _groups(
    items: Sequence[WriteItem], planner: SavePlanner
) -> Iterator[list[tuple[WriteItem, Box | None, bytes | None]]]:
    """Yield the items of a rank with their data, some at a time: copies from other devices take memory."""
    group: list[tuple[WriteItem, Box | None, bytes | None]] = []
    n_copied = 0
    for item in items:
        data = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            group.append((item, None, data.getvalue()))
            continue
        assert isinstance(data, torch.Tensor)
        if data.device.type != "cpu":
            n_copied += data.nbytes
        group.append((item, _box_of(item, data), None))
        if n_copied >= _GROUP_BYTES:
            yield group
            group, n_copied = [], 0
    if group:
        yield group


def _box_of(item: WriteItem, tensor: torch.Tensor) -> Box:
    facts = item.tensor_data
    assert facts is not None
    if tuple(tensor.shape) != tuple(facts.chunk.sizes):
        raise ValueError(
            f"the planner gave a shard of {item.index.fqn!r} of shape {list(tensor.shape)}, "
            f"and planned {list(facts.chunk.sizes)}"
        )
    return Box(
        name=item.index.fqn,
        data=_array_of(item.index.fqn, tensor),
        offsets=tuple(facts.chunk.offsets),
        shape=tuple(facts.size),
    )


def _array_of(name: str, tensor: torch.Tensor) -> Array:
    """Return the elements of a tensor as an array; it shares the memory of a contiguous tensor of this machine."""
    kind = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = parse_dtype(kind)
    except FormatError:
        dtype = None
    if dtype is None or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"the tensor {name!r} has the dtype {kind} and the layout {tensor.layout}, and a store keeps dense tensors "
            "of numpy's and ml_dtypes' dtypes: leave it out of the state, or save it as another dtype"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Array = np.frombuffer(memoryview(b""), dtype=dtype) if plain.numel() == 0 else None  # type: ignore[assignment]
    if array is None:
        array = plain.reshape(-1).view(torch.uint8).numpy().view(dtype)
    return array.reshape(tuple(tensor.shape))


_READ_GROUP_BYTES = 256 << 20
"""Bytes of whole tensors read at a time."""
_READ_BYTES = 1 << 16
"""A row of at most this size is read with the structure: it may be no tensor of the state."""


class TensorCasStorageReader(StorageReader):
    """Reader for `torch.distributed.checkpoint.load`: fills the tensors of any mesh from a step of a run.

    ```python
    dcp.load(state, storage_reader=TensorCasStorageReader(step=100, run_id=run_id))
    ```

    The step may come from any number of ranks, or from `log_checkpoint` in one process: a state of nested dicts and
    lists, or imported tensors. Each rank reads the chunks of its own parts and checks each chunk's digest. If a tensor
    was saved in shards along a later axis than the first, a rank assembles it in memory, whole.
    """

    def __init__(self, *, step: int | None = None, name: str = DEFAULT_NAME, run_id: str | Run | None = None) -> None:
        """Describe the step; nothing is read yet.

        Args:
            step: A step of the run; by default the highest.
            name: The series of checkpoints in the run.
            run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run of each rank.
        """
        self._open = partial(open_whole_step, run_id, step=step, name=name)
        self._reader: CheckpointReader | None = None
        self._rows: dict[str, str] = {}
        """Row of each tensor, by the tensor's name in plans."""
        self._values: dict[str, Any] = {}
        """Values that are no tensors, by their names in plans."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether an id names a checkpoint: none does, the reader itself names the step."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load.

        Raises:
            ValueError: There is an id: the reader has a step already.
        """
        if checkpoint_id is not None:
            raise ValueError(f"the reader names the run and the step: leave checkpoint_id out ({checkpoint_id!r:.200})")
        self._reader = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read names, dtypes and shapes, and all values that are no tensors.

        Raises:
            NotFoundError: There is no such step.
            AdapterError: The step holds a whole model, and no state.
            CorruptChunkError: A chunk is damaged.
        """
        metadata, self._reader = self._open(take=self._take)
        assert isinstance(metadata, Metadata)
        return metadata

    def _take(self, manifest: Manifest, read: ReadArrays) -> Metadata:
        state, rows = _structure(manifest, read)
        values, paths = _flat(state)
        self._rows, self._values = {}, {}
        known: dict[str, STORAGE_TYPES] = {}
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                self._values[name] = value
                known[name] = BytesStorageMetadata()
                continue
            self._rows[name] = rows[id(value)]
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * value.ndim), sizes=value.shape)
            known[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [chunk])
        return Metadata(state_dict_metadata=known, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata, which this reader has read itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of this rank's plan, and pass on its other values.

        Raises:
            CorruptChunkError: A chunk is damaged; some tensors are filled already, in whole or in part.
            BackendError: The storage failed; some tensors are filled already, in whole or in part.
        """
        assert self._reader is not None
        whole: dict[str, list[ReadItem]] = {}
        parts: list[tuple[ReadItem, str, tuple[slice, ...]]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self._values[name], data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            row = self._rows[name]
            shape = self._reader.spec(row).shape
            if tuple(item.lengths) == tuple(shape):
                whole.setdefault(row, []).append(item)
                continue
            box = tuple(slice(at, at + side) for at, side in zip(item.storage_offsets, item.lengths, strict=True))
            parts.append((item, row, box))
        for group in group_by_bytes(
            parts, lambda part: math.prod(part[0].lengths) * self._itemsize(part[1]), _READ_GROUP_BYTES
        ):
            found = self._reader.slices([(row, box) for _, row, box in group])
            for (item, _, _), tensor in zip(group, found, strict=True):
                _fill(planner, item, tensor)
            del found, tensor  # before the next group is read
        self._fill_whole(planner, whole)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fill_whole(self, planner: LoadPlanner, items: dict[str, list[ReadItem]]) -> None:
        """Fill whole tensors, by the rows that they are read from: where possible, straight into their memory."""
        reader = self._reader
        assert reader is not None
        outs: dict[str, Array] = {}
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        storages: set[int] = set()
        for row, wanted in items.items():
            target = planner.resolve_tensor(wanted[0]).detach()
            spec = reader.spec(row)
            is_like_it = str(target.dtype) == f"torch.{spec.dtype}" and tuple(target.shape) == spec.shape
            is_here = target.device.type == "cpu" and target.is_contiguous() and target.numel() > 0
            storage = target.untyped_storage().data_ptr()
            # Tensors that share memory are filled one after the other.
            if len(wanted) > 1 or not is_like_it or not is_here or storage in storages:
                continue
            array = _array_of(row, target)
            if _address_of(array) == target.data_ptr():
                storages.add(storage)
                outs[row] = array
                filled.append((wanted[0], target))
        if outs:
            reader.read_into(outs)
        for item, target in filled:
            torch.autograd.graph.increment_version(target)
            planner.commit_tensor(item, target)
        others = (row for row in items if row not in outs)
        for rows in group_by_bytes(others, lambda row: reader.spec(row).n_bytes, _READ_GROUP_BYTES):
            for row, tensor in reader.tensors(rows).items():
                for item in items[row]:
                    _fill(planner, item, tensor)

    def _itemsize(self, row: str) -> int:
        assert self._reader is not None
        return int(self._reader.spec(row).numpy_dtype.itemsize)


def _fill(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        raise ValueError(
            f"{item.storage_index.fqn!r} has the shape {list(tensor.shape)} in the checkpoint, "
            f"and {list(target.shape)} in the state"
        )
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _structure(manifest: Manifest, read: ReadArrays) -> tuple[Mapping[str, Any], dict[int, str]]:
    """Return a state with placeholders for its tensors, and the row of each tensor by the tensor's identity."""
    specs = {row.spec.name: row.spec for row in manifest.rows}
    if SKELETON not in specs or manifest.flavor is None:
        # Imported tensors: a flat state.
        weights = adapter_named(_FLAVOR).weights(
            {
                name: _array_placeholder(parse_dtype(spec.dtype), spec.shape)
                for name, spec in specs.items()
                if spec.dtype
            }
        )
        return weights, {id(tensor): name for name, tensor in weights.items()}
    adapter = adapter_named(manifest.flavor)
    refuse_pickle(adapter, manifest, read, forbidden_by=pickle_forbidden_by)
    kept = {name for name, spec in specs.items() if spec.dtype is None or spec.n_bytes <= _READ_BYTES}
    while True:
        arrays: dict[str, Array] = dict(read(sorted(kept)))
        for name, spec in specs.items():
            if name not in kept:
                assert spec.dtype is not None
                arrays[name] = _array_placeholder(parse_dtype(spec.dtype), spec.shape)
        live = adapter.reconstruct({name: arrays[name] for name in specs})
        state = _plain(live, _modules_of(live))
        if not isinstance(state, Mapping):
            raise AdapterError(
                manifest.flavor,
                f"the checkpoint holds a {type(state).__qualname__}, and torch.distributed.checkpoint loads states, "
                "such as {'model': model.state_dict()}: load it with load_checkpoint",
            )
        by_address = {_address_of(array): name for name, array in arrays.items() if array.size}
        rows: dict[int, str] = {}
        found: set[str] = set()
        values, _ = _flat(state)
        for path, value in values.items():
            if isinstance(value, torch.Tensor):
                row = by_address.get(value.data_ptr()) if value.numel() else path
                if row is None or (specs[row].shape if row in specs else None) != tuple(value.shape):
                    raise AdapterError(manifest.flavor, f"the tensor {path!r} of the state has no row of its own")
                rows[id(value)] = row
                found.add(row)
        # A placeholder that is no tensor of the state was taken for something else: it must be read.
        unread = {name for name in specs if name not in kept and name not in found}
        if not unread:
            return state, rows
        kept |= unread


_FLAVOR = "pytorch"
"""Name of the adapter of saved states."""
_SMALL_BYTES = 1 << 16


def _placeholder(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor whose elements nobody may read: a large one takes addresses and no memory."""
    sides = tuple(shape)
    n_bytes = math.prod(sides) * dtype.itemsize
    if n_bytes <= _SMALL_BYTES:
        return torch.zeros(sides, dtype=dtype)
    return torch.frombuffer(_addresses(n_bytes), dtype=torch.uint8).view(dtype).view(sides)


def _array_placeholder(dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return an array like `_placeholder`."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(_addresses(math.prod(shape) * np.dtype(dtype).itemsize), dtype=dtype).reshape(shape)


def _addresses(n_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, n_bytes, flags=flags)


def _address_of(array: Array) -> int:
    """Return the address of an array's first byte."""
    address: int = array.__array_interface__["data"][0]
    return address


def _flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Return the values of a nested state by the names that PyTorch's planners give them, and their paths."""
    values, paths = flatten_state_dict(dict(state))
    return values, paths


class AsOne:
    """A value in a state of ranks that is saved as it is, by the coordinator alone.

    PyTorch's planners take dicts and lists apart: they leave out empty ones, and turn the keys of dicts into texts. The
    loaded state has the value itself.
    """

    def __init__(self, value: Any) -> None:
        """Keep a value without shards."""
        self._value = value

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._value,)


def _itself(value: Any) -> Any:
    return value


def log_state(state: Any, *, step: int, **options: Unpack[SaveOptions]) -> CheckpointInfo:
    """Save a live state from all ranks of the default process group: the part of `log_checkpoint` for spread states.

    Modules and optimizers become their state dicts. The entries of an optimizer are named by the parameters of the
    module beside it, as `torch.distributed.checkpoint.state_dict` names them.

    Args:
        state: This rank's parts of the state; see `log_checkpoint` for the others. All ranks pass equal arguments.

    Returns:
        The result, equal on all ranks.

    Raises:
        AdapterError: The parameters of an optimizer are not those of one module of the state.
        CheckpointExistsError: The step is there and ``overwrite`` is False.
        Exception: A rank failed; nothing was saved. All ranks raise the error of the first of those that failed.
    """
    writer = TensorCasStorageWriter(step=step, **options)
    with _own_errors():
        save(_plain(state, _modules_of(state)), storage_writer=writer)
    info = _from_first(lambda: writer.info)
    assert isinstance(info, CheckpointInfo)
    return info


def fill_state(state: Any, source: str | Run | None, *, step: int | None, name: str, strict: bool) -> Any:
    """Fill a live state on all ranks of the default process group: the part of `load_checkpoint` for spread states.

    Args:
        state: This rank's parts of the state: tensors, modules and optimizers are filled, other values replaced.
        source: See `load_checkpoint`; only rank 0 uses it.
        step: See `load_checkpoint`.
        name: See `load_checkpoint`.
        strict: Whether the checkpoint and the state must have the same values. With False, those that only one of the
            two has stay as they are.

    Returns:
        The state.

    Raises:
        NotFoundError: There is no such step.
        AdapterError: The state does not fit; nothing has changed.
        CorruptChunkError: A chunk is damaged; some tensors are filled already.
        Exception: Another failure of a rank, as for `log_state`; some tensors may be filled already.
    """
    run_id, name, step = _from_first(lambda: find_whole_step(source, step=step, name=name))
    reader = TensorCasStorageReader(step=step, name=name, run_id=run_id)
    metadata = reader.read_metadata()
    paths = metadata.planner_data
    stored = unflatten_state_dict(metadata.state_dict_metadata, paths)
    filling = _Filling(_modules_of(state), strict=strict)
    plain = filling.target(state, stored, "")
    filling.check()
    with _own_errors():
        load(plain, storage_reader=reader)
    return filling.finish(state, plain)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the error of a rank in place of PyTorch's, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        rank, (own, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if not isinstance(own, Exception):
            raise
        own.add_note(f"This happened in rank {rank}.")
        raise own from error


def _from_first(give: Callable[[], T]) -> T:
    """Return the result of a call in rank 0, on all ranks, or raise its error there."""
    given: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            given[0] = give()
        except Exception as error:  # noqa: BLE001 - every rank raises it
            given[1] = error
    dist.broadcast_object_list(given)
    if given[1] is not None:
        raise given[1]
    return cast("T", given[0])


def _modules_of(state: Any) -> list[torch.nn.Module]:
    """Return the modules of a nested state."""
    if isinstance(state, torch.nn.Module):
        return [state]
    parts = state.values() if isinstance(state, Mapping) else state if isinstance(state, list | tuple) else ()
    return [module for part in parts for module in _modules_of(part)]


def _plain(value: Any, modules: Sequence[torch.nn.Module]) -> Any:
    """Return a state with state dicts for its modules, optimizers, schedulers and the like."""
    if isinstance(value, torch.nn.Module):
        return get_model_state_dict(value)
    if isinstance(value, torch.optim.Optimizer):
        return _named_optimizer(value, _parameter_names(value, modules))
    if isinstance(value, Mapping):
        return {key: _plain(each, modules) for key, each in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and _is_live(value)):
        return [_plain(each, modules) for each in value]
    return value.state_dict() if isinstance(value, Stateful) else value


def _is_live(value: Any) -> bool:
    """Tell whether a value holds tensors: PyTorch's planners look for them in dicts and lists, and not in tuples."""
    if isinstance(value, Mapping):
        return any(_is_live(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_is_live(each) for each in value)
    return isinstance(value, torch.Tensor | Stateful)


def _parameter_names(optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of an optimizer's parameters in their module, in the order of the optimizer's numbers.

    Raises:
        AdapterError: It has a format of its own, or no module of the state has its parameters.
    """
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise AdapterError(
            _FLAVOR,
            f"a {type(optimizer).__qualname__} has a state_dict() of its own, and many ranks save the entries of an "
            "optimizer by the names of its parameters: log the optimizer that it wraps, and its own values beside it",
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for module in modules:
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        names = {id(parameter): plain_name(name) for name, parameter in inner.named_parameters()}
        if all(id(parameter) in names for parameter in parameters):
            return [names[id(parameter)] for parameter in parameters]
    raise AdapterError(
        _FLAVOR,
        f"the parameters of a {type(optimizer).__qualname__} are not those of one module of the state, so its entries "
        "have no names: log the module beside it, as in {'model': model, 'optimizer': optimizer}; for a module of "
        "FullyShardedDataParallel, log the results of torch.distributed.checkpoint.state_dict.get_state_dict",
    )


def plain_name(name: str) -> str:
    """Return the name of a parameter without the names of wrappers of PyTorch."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def _named_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """Return an optimizer's state dict with names in place of its numbers."""
    numbered = optimizer.state_dict()
    return {
        "state": {names[number]: entry for number, entry in numbered["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
        ],
    }


class _Filling:
    """One load into a live state: the plain state to fill, and afterwards its way into the live one."""

    def __init__(self, modules: Sequence[torch.nn.Module], *, strict: bool) -> None:
        self._modules = modules
        self._strict = strict
        self._wrong: list[str] = []

    def target(self, live: Any, stored: Any, path: str) -> Any:
        """Return what `dcp.load` is to fill for a live value.

        Args:
            live: The live value.
            stored: The facts of the stored values: nested as they are, with metadata for each.
            path: The value's path, for messages.
        """
        if isinstance(live, torch.nn.Module):
            return self._matched(get_model_state_dict(live), stored, path)
        if isinstance(live, torch.optim.Optimizer):
            return self._optimizer_target(live, stored, path)
        if isinstance(live, Mapping):
            return self._matched(live, stored, path)
        if isinstance(live, list | tuple):
            if not isinstance(stored, list) or len(stored) != len(live):
                return self._leaf(live, stored, path)
            return [
                self.target(each, known, f"{path}.{at}")
                for at, (each, known) in enumerate(zip(live, stored, strict=True))
            ]
        if isinstance(live, Stateful):
            return self._anew(stored)
        return self._leaf(live, stored, path)

    def _matched(self, live: Mapping[Any, Any], stored: Any, path: str) -> dict[str, Any]:
        known = stored if isinstance(stored, Mapping) else {}
        if stored is not None and not isinstance(stored, Mapping):
            self._wrong.append(f"{path or 'the state'} is a single value in the checkpoint")
        by_text = {str(key): value for key, value in live.items()}
        missing = [key for key, value in by_text.items() if key not in known and not _is_empty(value)]
        if self._strict:
            self._wrong += [f"{_joined(path, key)} is not in the checkpoint" for key in missing]
            self._wrong += [f"{_joined(path, key)} is only in the checkpoint" for key in known if key not in by_text]
        return {
            key: self.target(value, known[key], _joined(path, key)) for key, value in by_text.items() if key in known
        }

    def _leaf(self, live: Any, stored: Any, path: str) -> Any:
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if isinstance(live, torch.Tensor) != is_tensor or isinstance(stored, Mapping | list):
            self._wrong.append(f"{path} is {_kind(stored)} in the checkpoint, and a {type(live).__qualname__} here")
        elif isinstance(stored, TensorStorageMetadata) and (stored.size, stored.properties.dtype) != (
            live.shape,
            live.dtype,
        ):
            self._wrong.append(
                f"{path} has the shape {list(stored.size)} and the dtype {stored.properties.dtype} in the checkpoint, "
                f"and {list(live.shape)} and {live.dtype} here"
            )
        return live

    def _anew(self, stored: Any, like: torch.Tensor | None = None) -> Any:
        """Return new memory for stored values; tensors of the shape of a parameter are spread as it is."""
        if isinstance(stored, Mapping):
            return {key: self._anew(each, like) for key, each in stored.items()}
        if isinstance(stored, list):
            return [self._anew(each, like) for each in stored]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        if like is not None and stored.size == like.shape:
            return torch.zeros_like(like, dtype=stored.properties.dtype, requires_grad=False)
        return torch.zeros(stored.size, dtype=stored.properties.dtype)

    def _optimizer_target(self, live: torch.optim.Optimizer, stored: Any, path: str) -> dict[str, Any]:
        parameters = [parameter for group in live.param_groups for parameter in group["params"]]
        by_name = dict(zip(_parameter_names(live, self._modules), parameters, strict=True))
        entries = stored.get("state", {}) if isinstance(stored, Mapping) else {}
        unknown = [name for name in entries if name not in by_name]
        if not isinstance(stored, Mapping) or "param_groups" not in stored:
            self._wrong.append(f"{path} is no optimizer in the checkpoint")
        if unknown:
            self._wrong.append(f"{path}.state.{unknown[0]} belongs to no parameter of the optimizer")
        if self._wrong:
            return {}
        state = {name: self._anew(entry, by_name[name].detach()) for name, entry in entries.items()}
        return {"state": state, "param_groups": self._anew(stored["param_groups"])}

    def check(self) -> None:
        """Refuse a state that does not fit.

        Raises:
            AdapterError: It does not.
        """
        if self._wrong:
            more = f"; and {len(self._wrong) - 10} more" if len(self._wrong) > 10 else ""
            raise AdapterError(_FLAVOR, "the checkpoint does not fit: " + "; ".join(self._wrong[:10]) + more)

    def finish(self, live: Any, filled: Any) -> Any:
        """Return a live value after `dcp.load`: itself, filled, or what replaces it."""
        if isinstance(live, torch.nn.Module):
            set_model_state_dict(live, filled, options=StateDictOptions(strict=self._strict))
            return live
        if isinstance(live, torch.optim.Optimizer):
            adapter: Any = adapter_named(_FLAVOR)
            adapter.load_optimizer(live, filled, _parameter_names(live, self._modules))
            return live
        if isinstance(live, MutableMapping):
            for key, value in live.items():
                if str(key) in filled:
                    live[key] = self.finish(value, filled[str(key)])
            return live
        if isinstance(live, list | tuple) and isinstance(filled, list) and len(filled) == len(live):
            done = [self.finish(value, new) for value, new in zip(live, filled, strict=True)]
            if isinstance(live, list):
                live[:] = done
                return live
            return type(live)(done) if type(live) is tuple else type(live)(*done)
        if isinstance(live, Stateful):
            live.load_state_dict(filled)
            return live
        return filled


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _is_empty(value: Any) -> bool:
    """Tell whether a value has no entry in a checkpoint: PyTorch's planners leave out empty dicts."""
    return isinstance(value, Mapping) and all(_is_empty(each) for each in value.values())


def _kind(stored: Any) -> str:
    if isinstance(stored, TensorStorageMetadata):
        return "a tensor"
    return "a dict" if isinstance(stored, Mapping) else "a list" if isinstance(stored, list) else "another value"
