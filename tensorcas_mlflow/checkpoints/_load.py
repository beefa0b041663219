"""The function that loads a checkpoint of a run."""

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
    source: str | Run | None = None,
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
    """Load a checkpoint that `log_checkpoint` stored, bit for bit.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        source: The run (its id, ``runs:/<id>`` or a `mlflow.entities.Run`), or the URI of one checkpoint. By default
            the active run, else the last one that was active in this process.
        step: A step of the run; by default the highest.
        name: The series of checkpoints.
        into: A live state of the same structure to fill in place, without unpickling. In ``{"model": model,
            "optimizer": optimizer, "epoch": 0}`` the call fills the model and the optimizer and replaces the epoch.
            All tensors are read into new memory and checked before anything changes; to read into a module's own
            memory, use ``open_checkpoint(…).load_into(module)``.
        weights_only: Return the tensors by name, without unpickling.
        verify: Check each chunk against its digest.
        strict: For PyTorch with ``into``, as in ``load_state_dict``; by default True. False also keeps those values of
            ``into`` that only a pickle could replace; True refuses them.
        device: For PyTorch, the device of new tensors; by default the CPU.
        dtype: For PyTorch, the dtype that floating point tensors are converted to.

    Returns:
        The state; ``into``, filled; or the tensors by name.

    Raises:
        NotFoundError: There is no such run, checkpoint or store.
        FormatError: The checkpoint is damaged.
        AdapterError: ``into`` does not fit, or the state needs a pickle and MLFLOW_ALLOW_PICKLE_DESERIALIZATION forbids
            it.
        BackendError: The storage failed.
        ValueError: The call asks for two things at once.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    check_call(into=into, weights_only=weights_only)
    saves.wait()
    one = parse_checkpoint_uri(source, step=step, name=name) if isinstance(source, str) else None
    if one is not None:
        source, name, step = one
    checkpoint = series_of(run_to_read(source), name).get(step)
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
