"""Loading a checkpoint of a run."""

from __future__ import annotations

from typing import Any

from mlflow.entities import Run

from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._rebuild import check_call, given, rebuild
from tensorcas_mlflow._steps import DEFAULT_NAME
from tensorcas_mlflow.adapters import adapter_named
from tensorcas_mlflow.checkpoints._background import saves
from tensorcas_mlflow.checkpoints._find import series_of
from tensorcas_mlflow.checkpoints._runs import run_to_read
from tensorcas_mlflow.checkpoints._series import parse_checkpoint_uri
from tensorcas_mlflow.errors import CorruptError


@translate_errors()
def load_checkpoint(
    run_id: str | Run | None = None,
    *,
    step: int | None = None,
    name: str = DEFAULT_NAME,
    into: Any = None,
    weights_only: bool = False,
    verify: bool = True,
    strict: bool | None = None,
    device: Any = None,
    dtype: Any = None,
) -> Any:
    """Load what `log_checkpoint` stored, bit for bit.

    Args:
        run_id: The run (its id, ``runs:/<id>`` or a `mlflow.entities.Run`), or the URI of one checkpoint; the active
            run unless given, or else the last one that was active in this process.
        step: The latest step unless given.
        name: Of the series.
        into: A live state of the same structure to fill in place; nothing is unpickled. In ``{"model": model,
            "optimizer": optimizer, "epoch": 0}`` the model and the optimizer are filled and the epoch is replaced.
            All tensors are read and checked before anything is changed, into new memory of their size; to read into a
            module's own memory, use ``open_checkpoint(…).load_into(module)``.
        weights_only: Return the tensors by name; nothing is unpickled.
        verify: Check each chunk against its digest.
        strict: For PyTorch with ``into``, as in ``load_state_dict``; True unless given. False also leaves what only a
            pickle says as it is in ``into``, where it would be refused.
        device: For PyTorch, the device of new tensors; the CPU unless given.
        dtype: For PyTorch, what floating point tensors are converted to.

    Returns:
        The state; ``into``, filled; or the tensors.

    Raises:
        mlflow.exceptions.MlflowException: There is no such checkpoint, bytes are damaged, ``into`` does not fit, a save
            in the background has failed, or the state needs pickle where MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids
            it.
    """
    check_call(into=into, weights_only=weights_only)
    saves.wait()
    one = parse_checkpoint_uri(run_id, step=step, name=name) if isinstance(run_id, str) else None
    if one is not None:
        run_id, name, step = one
    checkpoint = series_of(run_to_read(run_id), name).get(step)
    with checkpoint.opened() as (manifest, read):
        if manifest.flavor is None:
            raise CorruptError(f"step {checkpoint.step} of {name!r}", "it does not say which adapter it is of")
        return rebuild(
            adapter_named(manifest.flavor),
            manifest,
            read,
            into=into,
            weights_only=weights_only,
            verify=verify,
            options=given(strict=strict, device=device, dtype=dtype),
        )
