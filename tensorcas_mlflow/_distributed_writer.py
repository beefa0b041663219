"""The writer of checkpoints that many ranks save together: boxes of tensors go into a store, and one rank commits."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import mlflow
import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorcas_mlflow._live_states import FLAVOR
from tensorcas_mlflow._torch_arrays import address_of, array_of, placeholder
from tensorcas_mlflow.adapter import SKELETON, adapter_named, take_apart
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.integration.checkpoints import (
    CheckpointInfo,
    SaveOptions,
    ShardedStep,
    ShardPlace,
    StoredPart,
    check_options,
)
from tensorcas_mlflow.store import (
    Box,
    Shard,
    Store,
    join_shards,
    store_shards,
    withdraw_shards,
)

_GROUP_BYTES = 512 << 20
"""Bytes of tensors of other devices that are copied to this machine's memory at a time."""


class _Written(NamedTuple):
    """Result of one item."""

    shard: Shard | None
    """The stored box; None for other values."""
    value: bytes | None
    """A value that is no tensor, as the planner gave it."""
    part: StoredPart
    """Figures of all items of the rank: one object, which a pickle holds once."""


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
        part = StoredPart()
        self._open = place.store(), part.intents
        results: list[WriteResult] = []
        for items in _groups(plan.items, planner):
            boxes = [box for _, box, _ in items if box is not None]
            shards = iter(place.store_boxes(boxes, part, rank=self._rank) if boxes else ())
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
        own = StoredPart()
        every = [own, *parts.values()]
        store = self._step.store
        try:
            self.info = _commit(self._step, metadata, written, own, every)
        finally:
            withdraw_shards(store, [intent for part in every for intent in part.intents])
            self._open = None


def _commit(
    step: ShardedStep, metadata: Metadata, written: Sequence[WriteResult], part: StoredPart, every: Sequence[StoredPart]
) -> CheckpointInfo:
    """Commit a step; store what no rank has stored as the given one of all parts."""
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
            values[name] = placeholder(known.properties.dtype, known.size)
            if values[name].numel():
                names[values[name].data_ptr()] = name
        elif name in plain:
            # These bytes are of this job's own ranks, which exchange pickles already.
            values[name] = torch.load(io.BytesIO(plain[name]), weights_only=False)
        else:
            raise ValueError(f"no rank has written {name!r}")
    paths = metadata.planner_data
    state = unflatten_state_dict(values, dict(paths)) if isinstance(paths, Mapping) else values
    adapter = adapter_named(FLAVOR)
    tensors = take_apart(adapter, state)
    left_out = adapter.left_out(tensors)
    sources = {row: names.pop(address_of(array), None) if array.size else None for row, array in tensors.items()}
    if names:
        raise ValueError(f"the adapter has no row for the tensor {next(iter(names.values()))!r}")
    own = [
        Box(name=row, data=array, offsets=(0,) * array.ndim, shape=array.shape)
        for row, array in tensors.items()
        if sources[row] is None
    ]
    shards_of_own = part.add(store_shards(step.store, own, series=f"{step.folder}#", policy=step.policy))
    mine = {box.name: shard for box, shard in zip(own, shards_of_own, strict=True)}
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
        flavor=FLAVOR,
        left_out=left_out,
        n_tensors=len(tensors) - (SKELETON in tensors),
        parts=every,
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
        data=array_of(item.index.fqn, tensor),
        offsets=tuple(facts.chunk.offsets),
        shape=tuple(facts.size),
    )
