"""Logging a checkpoint: take the state apart, store what is new, commit one ref."""

from __future__ import annotations

import dataclasses
import re
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlflow

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
    """What one call of `log_checkpoint` has done."""

    uri: str
    """``runs:/<run>/checkpoints/<name>/step-…``; `load_checkpoint` takes it."""
    run_id: str
    name: str
    step: int
    n_tensors: int
    bytes_total: int
    """Size of the whole state."""
    bytes_new: int | None
    """Size of those chunks of it that the store did not hold. None where it is all sent to a server, which has a store
    of its own and finds that out."""
    bytes_stored: int | None
    """What the store has grown by, encoded, with manifest and ref. None while a save is under way in the background,
    and where a server has the store."""
    seconds: float
    """How long the call has kept the caller."""
    _saved: Future[CheckpointInfo] | None = field(default=None, repr=False, compare=False)

    def wait(self) -> CheckpointInfo:
        """Wait until the checkpoint is saved, and return the finished account of it.

        Raises:
            mlflow.exceptions.MlflowException: It could not be saved.
        """
        return self if self._saved is None else saves.result(self._saved)


@translate_errors()
def log_checkpoint(
    state: Any,
    *,
    step: int,
    name: str = DEFAULT_NAME,
    run_id: str | None = None,
    blocking: bool = True,
    overwrite: bool = False,
    keep: Keep | None = None,
    log_metrics: bool | None = None,
    policy: str | None = None,
) -> CheckpointInfo:
    """Log a state as a step of a run, storing only what no earlier checkpoint or model of the store holds.

    It is light enough for every step: no environment is looked at, no model is made in MLflow's database.

    Args:
        state: A module, an estimator, a booster, a state dict, a training state such as ``{"model": model, "optimizer":
            optimizer, "epoch": 3}``, or any other object that can be pickled, but no lone number or text. It is not
            changed.
        step: Any whole number.
        name: What this series of checkpoints is called in the run.
        run_id: The run; the active one unless given, and if there is none a new one, as with `mlflow.log_metric`.
        blocking: Whether to return only when the checkpoint is on disk. Otherwise what has changed is copied, and a
            thread goes on; the next call, `CheckpointInfo.wait`, `wait` and the end of the interpreter wait for it, and
            the first three raise what went wrong.
        overwrite: Whether a checkpoint of this step may be replaced, in one step. Otherwise it is refused.
        keep: A rule for which earlier checkpoints of the series stay. What it drops is deleted by the next collection.
        log_metrics: Whether to log ``tensorcas/bytes_total``, ``tensorcas/bytes_new`` and ``tensorcas/saved_ratio`` as
            metrics of the step, in the background; those of a series of another name as ``tensorcas/<name>/…``. None is
            logged where a server has the store, which does not tell what is new. Unless given, as TENSORCAS_LOG_METRICS
            says, by default yes.
        policy: What to spend time on: ``fast`` stores tensors as they are, ``balanced`` compresses what shrinks at the
            speed of a disk, ``small`` takes longer for fewer bytes. It changes nothing about what is loaded. Unless
            given, as TENSORCAS_POLICY says, by default ``balanced``.

    Raises:
        mlflow.exceptions.MlflowException: The step is there already, an earlier save in the background has failed, the
            state cannot be taken apart exactly, the storage failed, or there is no place for a store.
    """
    began = time.perf_counter()
    saves.wait()
    step = as_step(step)
    chosen = Policy.of(policy)
    if keep is not None and not isinstance(keep, Keep):
        raise ValueError(f"keep is a mlflow.tensorcas.Keep, such as Keep(last=3), not {keep!r}")
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
            return dataclasses.replace(info, seconds=time.perf_counter() - began)
        saving.detach()
    except BaseException:
        saving.abandon()
        raise
    finish.info = dataclasses.replace(finish.info, seconds=time.perf_counter() - began)
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
    return dataclasses.replace(finish(), seconds=time.perf_counter() - began)


def _begun(series: Series, saving: Saving, *, step: int, n_tensors: int) -> CheckpointInfo:
    return CheckpointInfo(
        uri=series.uri(step),
        run_id=series.run.run_id,
        name=series.name,
        step=step,
        n_tensors=n_tensors,
        bytes_total=saving.manifest.n_bytes,
        bytes_new=saving.n_new_bytes,
        bytes_stored=None,
        seconds=0.0,
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
        if self.log_metrics and info.bytes_new is not None:
            prefix = "tensorcas" if info.name == DEFAULT_NAME else f"tensorcas/{_NO_METRIC.sub('_', info.name)}"
            log_figures(info.run_id, info.step, _figures(info.bytes_total, info.bytes_new, prefix), self.tracking_uri)
        if self.keep is not None:
            prune(self.series, self.keep, newest=info.step, tracking_uri=self.tracking_uri)
        return dataclasses.replace(info, bytes_stored=n_stored_bytes)


def _figures(n_total: int, n_new: int, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/bytes_total": float(n_total),
        f"{prefix}/bytes_new": float(n_new),
        f"{prefix}/saved_ratio": 1 - n_new / n_total if n_total else 1.0,
    }
