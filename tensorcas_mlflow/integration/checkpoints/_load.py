"""Loading, listing and deleting the checkpoints of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlflow.entities import Run

from tensorcas_mlflow.adapter import adapter_for, adapter_named
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.notebook import MOST_ROWS, Tabular, html_table, table_of_records
from tensorcas_mlflow.errors import CorruptError, StoreLostError, StoreNotFoundError
from tensorcas_mlflow.integration._background import saves
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._policy import pickle_forbidden_by
from tensorcas_mlflow.integration.checkpoints._find import all_series_of, check_not_lost, series_of
from tensorcas_mlflow.integration.checkpoints._series import run_to_read
from tensorcas_mlflow.integration.checkpoints._uris import parse_checkpoint_uri
from tensorcas_mlflow.layout import DEFAULT_NAME, as_step
from tensorcas_mlflow.reader import check_call, given, rebuild

if TYPE_CHECKING:
    import pyarrow as pa


@translate_errors()
def load_checkpoint(
    source: str | os.PathLike[str] | Run | None = None,
    *,
    step: int | None = None,
    name: str = DEFAULT_NAME,
    into: Any = None,
    weights_only: bool = False,
    verify: bool = True,
    precheck: bool = True,
    strict: bool | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Any:
    """Load a checkpoint stored by `log_checkpoint`, bit for bit.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        source: The run (its id, ``runs:/<id>`` or a `mlflow.entities.Run`), or one checkpoint: its URI
            (``runs:/<id>/checkpoints/…``), or the URI or path of its artifact. By default the active run, else the last
            active run of this process.
        step: A step of the run; by default the highest.
        name: The series of checkpoints.
        into: A live state of the same structure to fill in place, without unpickling. In ``{"model": model,
            "optimizer": optimizer, "epoch": 0}`` the call fills the model and the optimizer and replaces the epoch.
            Everything is checked before anything changes: names, dtypes, shapes, and the stored bytes of all tensors.
            A load of at most 32 MiB reads the tensors into new memory first. A larger one reads most tensors of a
            PyTorch model straight into its memory; if the disk fails after the check, the state is filled in part, and
            a note of the error says so. A module on the meta device is refused. If tensors of the state are spread over
            ranks, all ranks make the call; names, dtypes and shapes are then checked first, and bytes as they are read.
            Arrays of JAX cannot change, so a state of JAX is filled by new arrays with the shardings of the old ones:
            go on with what the call returns.
        weights_only: Return the tensors by name, without unpickling.
        verify: Check each chunk against its digest.
        precheck: With ``into``, check the stored bytes of all tensors before anything changes. False reads them once,
            and checks each chunk as it is read: damage then leaves a state of more than 32 MiB filled in part, and a
            note of the error says so.
        strict: For PyTorch and JAX with ``into``, as in ``load_state_dict``; by default True. False also keeps values
            of ``into`` replaceable only by a pickle; True refuses them. For JAX it keeps static fields, too.
        device: For PyTorch, the device of new tensors; by default the CPU.
        dtype: For PyTorch, the new dtype of floating point tensors.

    Returns:
        The state; ``into``, filled; or the tensors by name.

    Raises:
        NotFoundError: There is no such run, checkpoint or store.
        FormatError: The checkpoint is damaged.
        AdapterError: ``into`` does not fit, or the state needs a pickle and MLFLOW_ALLOW_MODEL_CODE_EXECUTION or
            MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids it.
        BackendError: The storage failed.
        ValueError: The call asks for two things at once.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    check_call(into=into, weights_only=weights_only)
    for_ranks = None if into is None else adapter_for(into).module_for_ranks(into)
    if for_ranks is not None:
        refused = given(device=device, dtype=dtype)
        if refused:
            raise ValueError(f"a state that is spread over ranks is filled as it is: leave out {', '.join(refused)}")
        return import_module(for_ranks).fill_state(into, source, step=step, name=name, strict=strict is not False)
    saves.wait()
    source = os.fspath(source) if isinstance(source, os.PathLike) else source
    one = parse_checkpoint_uri(source, step=step, name=name) if isinstance(source, str) else None
    if one is not None:
        source, name, step = one
    checkpoint = series_of(run_to_read(source), name).get(step)
    with checkpoint.opened() as (manifest, read):
        if manifest.flavor is None:
            raise CorruptError(f"step {checkpoint.step} of {name!r}", "it names no adapter")
        return rebuild(
            adapter_named(manifest.flavor),
            manifest,
            read,
            into=into,
            weights_only=weights_only,
            verify=verify,
            precheck=precheck,
            options=given(strict=strict, device=device, dtype=dtype),
            forbidden_by=pickle_forbidden_by,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """An entry of `list_checkpoints`: one checkpoint, without its content."""

    run_id: str
    name: str
    step: int
    uri: str
    """``runs:/<run>/checkpoints/<name>/step-…``; `load_checkpoint` takes it."""
    created: str | None
    """ISO 8601, UTC. None if a server keeps it as a file."""
    flavor: str | None
    """The adapter used for the save. None if a server keeps it as a file."""


class CheckpointList(list[CheckpointRecord], Tabular):
    """The result of `list_checkpoints`: a list that a notebook shows as a table."""

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table with a row for each checkpoint, and a column for each field of `CheckpointRecord`."""
        return table_of_records(self, _COLUMNS)

    def _repr_html_(self) -> str:
        rows = [(each.name, each.step, each.created or "", each.flavor or "", each.uri) for each in self[:MOST_ROWS]]
        return html_table(("series", "step", "created", "adapter", "uri"), rows, n_more=len(self) - len(rows))


_COLUMNS = ("run_id", "name", "step", "uri", "created", "flavor")


@translate_errors()
def list_checkpoints(run_id: str | Run | None = None, *, name: str | None = None) -> CheckpointList:
    """List the checkpoints of a run, by name and step, without reading them.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else the last
            active run of this process.
        name: The series of checkpoints; by default all series.

    Returns:
        The checkpoints, ascending by name, then by step: a list with the methods ``to_pandas`` and ``to_arrow``.

    Raises:
        NotFoundError: There is no such run, or TENSORCAS_STORE names a place without a store.
        StoreLostError: The run has logged checkpoints or models, and its store is gone.
        BackendError: The storage failed.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    saves.wait()
    try:
        return CheckpointList(_records(run_id, name))
    except StoreLostError:
        raise
    except StoreNotFoundError:
        if config.store_uri() is not None:
            raise  # the checkpoints may be in the store named by the setting
        return CheckpointList()


@translate_errors()
def list_before_logging(run_id: str | Run | None) -> list[CheckpointRecord]:
    """List checkpoints as `list_checkpoints` does, but return none if logging will first create the store."""
    saves.wait()
    try:
        return _records(run_id, None)
    except StoreLostError:
        raise
    except StoreNotFoundError:
        return []


def _records(run_id: str | Run | None, name: str | None) -> list[CheckpointRecord]:
    run = run_to_read(run_id)
    every_series = all_series_of(run) if name is None else [series_of(run, name)]
    found = [
        CheckpointRecord(
            run_id=run.run_id,
            name=series.name,
            step=checkpoint.step,
            uri=series.uri(checkpoint.step),
            created=checkpoint.created,
            flavor=checkpoint.flavor,
        )
        for series in every_series
        for checkpoint in series.checkpoints()
    ]
    if not found:
        check_not_lost(run)
    return found


@translate_errors()
def delete_checkpoint(run_id: str | Run | None = None, *, step: int, name: str = DEFAULT_NAME) -> bool:
    """Delete a checkpoint of a run. ``tensorcas gc`` frees the bytes used by it alone, unless others are deltas of it.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else the last
            active run of this process.
        step: The step of the checkpoint.
        name: The series of checkpoints.

    Returns:
        True if there was such a checkpoint.

    Raises:
        NotFoundError: There is no such run or store.
        BackendError: The storage failed.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    saves.wait()
    checkpoint = series_of(run_to_read(run_id), name).find(as_step(step))
    if checkpoint is None:
        return False
    checkpoint.drop()
    return True
