"""Checkpoints that several processes of JAX save and load together.

A state comes in from each process: the same tree everywhere, with arrays over the devices of all processes. Each
process stores its shards, and the first one commits one ordinary checkpoint; each process reads the shards that it
needs. The processes talk through JAX's collectives. The module imports JAX and the integration.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import jax
import numpy as np
from jax.experimental import multihost_utils

from tensorcas_mlflow.adapter import SKELETON, Array, adapter_named
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.tensors import Spec, bytes_of
from tensorcas_mlflow.errors import AdapterError
from tensorcas_mlflow.integration.checkpoints import (
    CheckpointInfo,
    SaveOptions,
    ShardedStep,
    ShardPlace,
    StoredPart,
    find_whole_step,
    open_whole_step,
)
from tensorcas_mlflow.store import Box, Shard, join_shards, withdraw_shards

if TYPE_CHECKING:
    from mlflow.entities import Run

T = TypeVar("T")

_ADAPTER = "jax"
_GROUP_BYTES = 512 << 20
"""Bytes of shards that are copied to this machine's memory at a time."""


@dataclass(slots=True)
class _Stored(StoredPart):
    """What one process has stored."""

    shards: dict[str, list[Shard]] = field(default_factory=dict)
    facts: dict[str, bytes | None] = field(default_factory=dict)
    """Digests of the leaves that only this process has, by the names of all leaves."""


def log_state(state: Any, *, step: int, **options: Unpack[SaveOptions]) -> CheckpointInfo:
    """Save a state from all processes: the part of `log_checkpoint` for arrays over several processes.

    Args:
        state: This process's part of the state; see `log_checkpoint` for the others. All processes pass equal
            arguments; only the first one looks for the run. Plain values, and arrays that are in one process alone,
            must be equal in all of them.

    Returns:
        The result, equal in all processes.

    Raises:
        AdapterError: A leaf differs between the processes, or the state cannot be taken apart exactly.
        CheckpointExistsError: The step is there and ``overwrite`` is False.
        Exception: A process failed; nothing was saved. All processes raise the error of the first that failed.
    """
    is_first = jax.process_index() == 0
    begun: list[ShardedStep] = []
    mine, rows = _Stored(), dict[str, Array]()

    def begin() -> ShardPlace | None:
        if not is_first:
            return None
        begun.append(ShardedStep(step=step, **options))
        return begun[0].place()

    place = _agree(begin)[0]
    assert place is not None
    try:
        every = _agree(lambda: _store_part(place, state, mine, rows))
        info = _agree(lambda: _commit(begun[0], every, rows) if is_first else None)[0]
    finally:
        if mine.intents:
            withdraw_shards(place.store(), mine.intents)
    assert info is not None
    return info


def fill_state(state: Any, source: str | Run | None, *, step: int | None, name: str, strict: bool) -> Any:
    """Fill a state in all processes: the part of `load_checkpoint` for arrays over several processes.

    Args:
        state: This process's part of the state. Each process reads its shards of such arrays, and all other leaves.
        source: See `load_checkpoint`; only the first process uses it.
        step: See `load_checkpoint`.
        name: See `load_checkpoint`.
        strict: See `load_checkpoint`.

    Returns:
        The filled state.

    Raises:
        NotFoundError: There is no such step.
        AdapterError: The state does not fit.
        Exception: A process failed, as for `log_state`. Objects of nnx may be filled in the others.
    """
    is_first = jax.process_index() == 0
    found = _agree(lambda: find_whole_step(source, step=step, name=name) if is_first else None)[0]
    assert found is not None
    filled: list[Any] = []
    _agree(lambda: filled.append(_fill_part(state, *found, strict=strict)))
    return filled[0]


def _fill_part(state: Any, run_id: str, name: str, step: int, *, strict: bool) -> Any:
    def take(manifest: Any, read: Any) -> Any:
        stored = {facts.name: facts for facts in manifest.columns.facts()}
        skeleton = stored.pop(SKELETON, None)
        if skeleton is None or manifest.flavor != _ADAPTER:
            return stored, {}  # tensors that another adapter has stored are filled by their names
        return {SKELETON: skeleton, **stored}, read([SKELETON])

    (stored, skeleton), reader = open_whole_step(run_id, step=step, name=name, take=take, framework="np")
    with reader:

        def read(names: Any, **_: Any) -> Mapping[str, Array]:
            rest = [each for each in names if each not in skeleton]
            return {**{each: skeleton[each] for each in names if each in skeleton}, **reader.tensors(rest)}

        def read_slice(row: str, index: Any) -> Array:
            return np.ascontiguousarray(reader.get_slice(row)[index]).reshape(
                [len(range(*side.indices(length))) for side, length in zip(index, stored[row].shape, strict=True)]
            )

        return adapter_named(_ADAPTER).fill(state, stored, read, check=None, strict=strict, read_slice=read_slice)


def _store_part(place: ShardPlace, state: Any, mine: _Stored, rows: dict[str, Array]) -> _Stored:
    """Store this process's shards; the first process also stores all else.

    Args:
        mine: Receives what is stored, as it is stored.
        rows: Receives all rows of the state, in order.
    """
    adapter: Any = adapter_named(_ADAPTER)
    part = adapter.extract_part(state)
    rows.update(part.rows)
    for name, fact in part.facts.items():
        mine.facts[name] = None if fact is None else digest(_bytes_of_fact(fact))
    rank = jax.process_index()
    for boxes in _groups(part, is_first=rank == 0):
        for box, shard in zip(boxes, place.store_boxes(boxes, mine, rank=rank), strict=True):
            mine.shards.setdefault(box.name, []).append(shard)
    return mine


def _bytes_of_fact(fact: Any) -> Any:
    return bytes_of(np.ascontiguousarray(fact)) if isinstance(fact, np.ndarray) else repr(fact).encode()


def _groups(part: Any, *, is_first: bool) -> Iterator[list[Box]]:
    """Yield the boxes of this process, some at a time: copies from other devices take memory."""
    group: list[Box] = []
    n_bytes = 0
    for name, row in part.rows.items():
        own = [((0,) * row.ndim, row)] if is_first else []
        for offsets, piece in part.shards.get(name, own):
            group.append(Box(name=name, data=np.asarray(piece), offsets=offsets, shape=row.shape))
            n_bytes += group[-1].data.nbytes
            if n_bytes >= _GROUP_BYTES:
                yield group
                group, n_bytes = [], 0
    if group:
        yield group


def _commit(step: ShardedStep, every: list[_Stored], rows: Mapping[str, Array]) -> CheckpointInfo:
    for rank, other in enumerate(every):
        names = {*every[0].facts, *other.facts}
        differing = sorted(name for name in names if every[0].facts.get(name, b"") != other.facts.get(name, b""))
        if differing:
            raise AdapterError(
                _ADAPTER,
                f"{differing[0]!r} differs between the processes 0 and {rank}, and a checkpoint holds one value: make "
                "it one array over all processes, or log it under a name of its own in each",
            )
    shards: dict[str, list[Shard]] = {}
    for part in every:
        for name, found in part.shards.items():
            shards.setdefault(name, []).extend(found)
    joined = join_shards(step.store, [(_spec_of(name, row), shards.get(name, [])) for name, row in rows.items()])
    return step.commit(
        joined,
        flavor=_ADAPTER,
        left_out={},
        n_tensors=len(rows) - (SKELETON in rows),
        parts=every,
    )


def _spec_of(name: str, row: Array) -> Spec:
    # The chunks of a box are those of an array of bytes, also where the tensor is plain bytes.
    return Spec(name=name, dtype="uint8", shape=row.shape) if name == SKELETON else Spec.of(name, row)


def _agree(give: Callable[[], T]) -> list[T]:
    """Return the results of a call in each process, by process, or raise the error of the first one that failed.

    Raises:
        Exception: The call failed in a process.
    """
    value: Any = None
    error: Exception | None = None
    try:
        value = give()
    except Exception as caught:  # noqa: BLE001 - every process raises it
        error = caught
    results = [pickle.loads(data) for data in _gather(_pickled(value, error))]
    for rank, (_, failure) in enumerate(results):
        if failure is not None:
            own: Exception = error if error is not None and rank == jax.process_index() else failure
            own.add_note(f"This happened in process {rank}.")
            raise own
    return [value for value, _ in results]


def _pickled(value: Any, error: Exception | None) -> bytes:
    try:
        data = pickle.dumps((value, error))
        pickle.loads(data)
    except Exception:  # some errors of libraries cannot be pickled
        if error is None:
            raise
        data = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return data


def _gather(data: bytes) -> list[bytes]:
    """Return the bytes of all processes, in all of them."""
    mine = np.frombuffer(len(data).to_bytes(8, "little"), dtype=np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, 8)
    lengths = [int.from_bytes(size.tobytes(), "little") for size in sizes]
    padded = np.zeros(max(lengths), dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    found = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [row[:length].tobytes() for row, length in zip(found, lengths, strict=True)]
