"""The reader of checkpoints that many ranks load together: rows of a checkpoint fill tensors of any mesh."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
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
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorcas_mlflow._live_states import FLAVOR, modules_of, plain_state
from tensorcas_mlflow._torch_arrays import address_of, array_of, array_placeholder
from tensorcas_mlflow.adapter import SKELETON, Array, adapter_named
from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.base.tensors import group_by_bytes
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.integration.checkpoints import (
    open_whole_step,
    pickle_forbidden_by,
)
from tensorcas_mlflow.layout import DEFAULT_NAME
from tensorcas_mlflow.reader import refuse_pickle

if TYPE_CHECKING:
    from mlflow.entities import Run

    from tensorcas_mlflow.layout.manifests import Manifest
    from tensorcas_mlflow.reader import CheckpointReader, ReadArrays


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
            array = array_of(row, target)
            if address_of(array) == target.data_ptr():
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


def _flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Return the values of a nested state by the names that PyTorch's planners give them, and their paths."""
    values, paths = flatten_state_dict(dict(state))
    return values, paths


def _structure(manifest: Manifest, read: ReadArrays) -> tuple[Mapping[str, Any], dict[int, str]]:
    """Return a state with placeholders for its tensors, and the row of each tensor by the tensor's identity."""
    specs = {row.spec.name: row.spec for row in manifest.rows}
    if SKELETON not in specs or manifest.flavor is None:
        # Imported tensors: a flat state.
        weights = adapter_named(FLAVOR).weights(
            {name: array_placeholder(parse_dtype(spec.dtype), spec.shape) for name, spec in specs.items() if spec.dtype}
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
                arrays[name] = array_placeholder(parse_dtype(spec.dtype), spec.shape)
        live = adapter.reconstruct({name: arrays[name] for name in specs})
        state = plain_state(live, modules_of(live))
        if not isinstance(state, Mapping):
            raise AdapterError(
                manifest.flavor,
                f"the checkpoint holds a {type(state).__qualname__}, and torch.distributed.checkpoint loads states, "
                "such as {'model': model.state_dict()}: load it with load_checkpoint",
            )
        by_address = {address_of(array): name for name, array in arrays.items() if array.size}
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
