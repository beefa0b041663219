"""The function that logs a checkpoint: take the state apart, store its new chunks, commit one ref."""

from __future__ import annotations

import dataclasses
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlflow
from mlflow.entities import Run

from tensorcas_mlflow import config
from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow._steps import DEFAULT_NAME, as_step
from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.adapters import adapter_for, take_apart
from tensorcas_mlflow.checkpoints._background import saves
from tensorcas_mlflow.checkpoints._find import series_of
from tensorcas_mlflow.checkpoints._keep import Keep, prune
from tensorcas_mlflow.checkpoints._runs import run_to_write
from tensorcas_mlflow.checkpoints._series import Saving, Series
from tensorcas_mlflow.checkpoints._show import log_figures
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.store import Policy

_NO_METRIC = re.compile(r"[^A-Za-z0-9_. -]")
"""What MLflow does not take in a metric's name, and what would part it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The result of `log_checkpoint` or `import_checkpoint`."""

    uri: str
    """``runs:/<run>/checkpoints/<name>/step-…``; `load_checkpoint` takes it."""
    run_id: str
    name: str
    step: int
    n_tensors: int
    total_bytes: int
    """Bytes of the whole state."""
    new_bytes: int | None
    """Bytes of the chunks that the store did not hold. None where a server has the store: it gets the whole state, and
    does not tell."""
    stored_bytes: int | None
    """Bytes that the store grew by: encoded chunks, manifest and ref. None until a save in the background is finished,
    and where a server has the store."""
    blocked_s: float
    """Seconds that the call blocked its caller."""
    _saved: Future[CheckpointInfo] | None = field(default=None, repr=False, compare=False)

    def wait(self) -> CheckpointInfo:
        """Wait until the checkpoint is saved, and return the final figures.

        Raises:
            TensorCasError: It could not be saved. The error is also an `mlflow.exceptions.MlflowException`.
        """
        return self if self._saved is None else saves.result(self._saved)


@translate_errors()
def log_checkpoint(
    state: Any,
    *,
    step: int,
    name: str = DEFAULT_NAME,
    run_id: str | Run | None = None,
    blocking: bool = True,
    overwrite: bool = False,
    keep: Keep | None = None,
    log_metrics: bool | None = None,
    policy: str | None = None,
) -> CheckpointInfo:
    """Log a state as a step of a run, and store only the chunks that the store does not hold.

    It is light enough for every step: it records no environment, and makes no model in MLflow's database. Errors are
    also `mlflow.exceptions.MlflowException`.

    Args:
        state: A module, an estimator, a booster, a state dict, a training state such as ``{"model": model, "optimizer":
            optimizer, "epoch": 3}``, or any other object that can be pickled, but no lone number or text. It is not
            changed.
        step: Any whole number of 64 bits.
        name: The series of checkpoints in the run.
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else a new one,
            as with `mlflow.log_metric`.
        blocking: Return only when the checkpoint is durable. With False the call copies the new chunks and a thread
            saves them. The next call, `CheckpointInfo.wait`, `wait` and the end of the interpreter wait for the thread;
            the first three raise its error.
        overwrite: Replace a checkpoint of this step, atomically.
        keep: A rule for which earlier checkpoints of the series stay; the next collection frees the others' bytes.
        log_metrics: Whether to log ``tensorcas/total_bytes``, ``tensorcas/new_bytes`` and ``tensorcas/saved_ratio`` as
            metrics of the step, in the background; for another series as ``tensorcas/<name>/…``. Where a server has the
            store, none is logged. None takes TENSORCAS_LOG_METRICS, by default True.
        policy: ``fast`` stores tensors as they are, ``balanced`` compresses at the speed of a disk, ``small`` spends
            more time on fewer bytes. It does not change what is loaded. None takes TENSORCAS_POLICY, by default
            ``balanced``.

    Returns:
        The checkpoint's URI and figures.

    Raises:
        CheckpointExistsError: The step is there and ``overwrite`` is False; it is untouched.
        AdapterError: The state cannot be taken apart exactly.
        NotFoundError: There is no such run.
        BackendError: The storage failed.
        ValueError: An argument is wrong, or there is no place for a store.
        TensorCasError: An earlier save in the background failed, and no call has raised its error yet.
    """
    began = time.perf_counter()
    saves.wait()
    step = as_step(step)
    chosen = Policy.of(policy)
    if keep is not None and not isinstance(keep, Keep):
        raise ValueError(f"keep is a Keep, such as Keep(last=3), and not {keep!r}")
    series = series_of(run_to_write(run_id), name, create=True)
    # It is looked at again by the commit; here it spares taking apart what is refused.
    if not overwrite and series.has(step):
        raise CheckpointExistsError(f"{name!r} of run {series.run.run_id} at step {step}")
    if log_metrics is None:
        log_metrics = config.logs_metrics()
    tracking_uri = mlflow.get_tracking_uri()
    adapter = adapter_for(state)
    tensors = take_apart(adapter, state)
    saving = series.begin(
        step,
        tensors,
        flavor=adapter.name,
        cuts=adapter.cuts(tensors),
        left_out=adapter.left_out(tensors),
        overwrite=overwrite,
        policy=chosen,
    )
    try:
        finish = _Finish(
            series=series,
            saving=saving,
            keep=keep,
            log_metrics=log_metrics,
            tracking_uri=tracking_uri,
            info=_begun(series, saving, step=step, n_tensors=len(tensors) - (SKELETON in tensors)),
        )
        if blocking:
            info = finish()
            return dataclasses.replace(info, blocked_s=time.perf_counter() - began)
        saving.detach()
    except BaseException:
        saving.abandon()
        raise
    finish.info = dataclasses.replace(finish.info, blocked_s=time.perf_counter() - began)
    return dataclasses.replace(finish.info, _saved=saves.submit(finish))


def finish_now(
    series: Series, saving: Saving, *, step: int, n_tensors: int, log_metrics: bool, tracking_uri: str, began: float
) -> CheckpointInfo:
    """Finish a save that has begun, and log its figures.

    Args:
        series: What it is a step of.
        saving: What has begun; given up if it cannot be finished.
        step: Which step.
        n_tensors: How many tensors it has.
        log_metrics: Whether to log figures.
        tracking_uri: Where to.
        began: When the caller was called, by `time.perf_counter`.
    """
    info = _begun(series, saving, step=step, n_tensors=n_tensors)
    finish = _Finish(
        series=series, saving=saving, keep=None, log_metrics=log_metrics, tracking_uri=tracking_uri, info=info
    )
    return dataclasses.replace(finish(), blocked_s=time.perf_counter() - began)


def _begun(series: Series, saving: Saving, *, step: int, n_tensors: int) -> CheckpointInfo:
    return CheckpointInfo(
        uri=series.uri(step),
        run_id=series.run.run_id,
        name=series.name,
        step=step,
        n_tensors=n_tensors,
        total_bytes=saving.manifest.n_bytes,
        new_bytes=saving.n_new_bytes,
        stored_bytes=None,
        blocked_s=0.0,
    )


@dataclass(slots=True, kw_only=True)
class _Finish:
    """The part of a save that may be done in the background."""

    series: Series
    saving: Saving
    keep: Keep | None
    log_metrics: bool
    tracking_uri: str
    info: CheckpointInfo

    @translate_errors()
    def __call__(self) -> CheckpointInfo:
        info = self.info
        try:
            n_stored_bytes = self.saving.finish()
        finally:
            self.saving.abandon()
        if self.log_metrics and info.new_bytes is not None:
            prefix = "tensorcas" if info.name == DEFAULT_NAME else f"tensorcas/{_NO_METRIC.sub('_', info.name)}"
            log_figures(info.run_id, info.step, _figures(info.total_bytes, info.new_bytes, prefix), self.tracking_uri)
        if self.keep is not None:
            prune(self.series, self.keep, newest=info.step, tracking_uri=self.tracking_uri)
        return dataclasses.replace(info, stored_bytes=n_stored_bytes)


def _figures(n_total: int, n_new: int, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/total_bytes": float(n_total),
        f"{prefix}/new_bytes": float(n_new),
        f"{prefix}/saved_ratio": 1 - n_new / n_total if n_total else 1.0,
    }
