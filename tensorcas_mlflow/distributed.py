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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tensorcas_mlflow._distributed_reader import TensorCasStorageReader
from tensorcas_mlflow._distributed_writer import TensorCasStorageWriter
from tensorcas_mlflow._live_states import Filling, modules_of, plain_state
from tensorcas_mlflow.integration.checkpoints import (
    CheckpointInfo,
    SaveOptions,
    find_whole_step,
)

if TYPE_CHECKING:
    from mlflow.entities import Run


__all__ = ["TensorCasStorageReader", "TensorCasStorageWriter"]

T = TypeVar("T")


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
        save(plain_state(state, modules_of(state)), storage_writer=writer)
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
    filling = Filling(modules_of(state), strict=strict)
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
