"""Logging a checkpoint: take the state apart, store new chunks, commit one ref, apply keep rules."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypedDict

import mlflow
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.adapter import SKELETON, adapter_for, take_apart
from tensorcas_mlflow.base import config
from tensorcas_mlflow.base.text import count_text
from tensorcas_mlflow.errors import CheckpointExistsError, StoreNotFoundError, TensorCasError, without_secrets
from tensorcas_mlflow.integration._background import saves
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._figures import log_figures
from tensorcas_mlflow.integration.checkpoints._find import series_of
from tensorcas_mlflow.integration.checkpoints._pace import pace_of
from tensorcas_mlflow.integration.checkpoints._pages import note_rule
from tensorcas_mlflow.integration.checkpoints._series import Saving, Series, run_to_write
from tensorcas_mlflow.layout import DEFAULT_NAME, as_step
from tensorcas_mlflow.store import Policy

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A rule for the checkpoints of a series to keep: those selected by any field, and the one just logged.

    ```python
    Keep(last=3)  # the three highest steps
    Keep(last=1, every=1000)  # the highest, and steps 0, 1000, 2000, …
    Keep(best="val_loss", mode="min")  # the highest, and the best by a metric logged at the same step
    ```

    The rule goes by steps, not by the order of logging. If a training continues from an earlier step than the highest,
    first delete the steps above it, or log under another name.
    """

    last: int | None = None
    """The number of highest steps to keep."""
    every: int | None = None
    """Keep steps divisible by this number."""
    best: str | None = None
    """The name of a metric of the run; the steps with its best values are kept.

    The last value logged at a step counts, even if logged late. A step without a value is never among the best. While
    the run has no value of the metric, every step is kept."""
    mode: Literal["min", "max"] = "min"
    """The better direction of the metric: small or large values. NaN is never best."""
    n_best: int = 1
    """The number of best steps to keep; ties go to the lowest steps."""

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("n_best", self.n_best)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} of a keep rule is a whole number above 0, not {value!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode of a keep rule is 'min' or 'max', not {self.mode!r}")
        if self.last is None and self.every is None and self.best is None:
            raise ValueError("a keep rule needs at least one of last, every and best")
        if self.best is None and (self.n_best != 1 or self.mode != "min"):
            raise ValueError("n_best and mode of a keep rule need a metric: give its name as best")

    def __str__(self) -> str:
        """Return the rule in words."""
        parts = []
        if self.last is not None:
            parts.append(f"the last {count_text(self.last, 'step')}")
        if self.every is not None:
            parts.append(f"every step divisible by {self.every}")
        if self.best is not None:
            direction = "smallest" if self.mode == "min" else "largest"
            parts.append(f"{count_text(self.n_best, 'step')} with the {direction} {self.best}")
        return "keep " + ", ".join(parts)

    def choose(self, steps: Collection[int], metric: Mapping[int, float]) -> set[int]:
        """Return the steps to keep.

        Args:
            steps: All steps of the series.
            metric: Values of the metric `best` by step.
        """
        ordered = sorted(steps)
        kept = set(ordered[-(self.last or 1) :])
        if self.every is not None:
            kept |= {step for step in ordered if step % self.every == 0}
        if self.best is not None:
            sign = 1 if self.mode == "min" else -1
            rated = [(sign * metric[step], step) for step in ordered if not math.isnan(metric.get(step, math.nan))]
            kept |= {step for _, step in sorted(rated)[: self.n_best]}
        return kept


def prune(series: Series, keep: Keep, *, newest: int, tracking_uri: str) -> None:
    """Delete the checkpoints of a series outside a keep rule; a failure only causes a warning.

    Args:
        series: The series to prune.
        keep: The rule.
        newest: The step just saved. It stays even if a resumed run has higher steps.
        tracking_uri: The tracking store with the run's metrics.
    """
    try:
        dropped = _to_drop(series, keep, newest, tracking_uri)
    except Exception as error:  # noqa: BLE001 -- the tracking store may fail in its own ways
        _warn(series, str(error))
        return
    for step in dropped:
        try:
            checkpoint = series.find(step)
            if checkpoint is not None:
                checkpoint.drop()
        except TensorCasError as error:
            _warn(series, str(error))


def _to_drop(series: Series, keep: Keep, newest: int, tracking_uri: str) -> list[int]:
    steps = series.steps()
    # Without the metric's values, every step is a candidate for deletion.
    spare = set(steps) - keep.choose(steps, {}) - {newest}
    if keep.best is None or not spare:
        return sorted(spare)
    key = (tracking_uri, series.run.run_id, keep.best)
    if len(spare) - keep.n_best < _n_values.get(key, 0) // _VALUES_PER_DROP:
        return []
    history = MlflowClient(tracking_uri).get_metric_history(series.run.run_id, keep.best)
    if not history:
        if key not in _n_values:
            _warn(series, f"the run has no metric {keep.best!r} for the keep rule; log it, or correct its name")
        _n_values[key] = 0
        return []
    if len(_n_values) >= _MAX_KNOWN:
        _n_values.clear()
    _n_values[key] = len(history)
    values = {each.step: each.value for each in sorted(history, key=lambda each: each.timestamp)}
    return sorted(spare - keep.choose(steps, values))


def _warn(series: Series, reason: str) -> None:
    _logger.warning(
        "older checkpoints %r of run %s stay for now: %s", series.name, series.run.run_id, without_secrets(reason)
    )


_VALUES_PER_DROP = 1000
"""Metric values read per dropped checkpoint.

A value may be logged late or corrected, and MLflow reports only the newest one without its whole history. So the whole
history is read before anything is dropped. Reading a long history at every step would take time quadratic in the length
of the training. So with a history of 10,000 values, up to 10 checkpoints beyond the rule wait for the next look."""
_MAX_KNOWN = 256
_n_values: dict[tuple[str, str, str], int] = {}
"""Numbers of values found at the last look, by tracking store, run and metric."""


_MAX_AHEAD_BYTES = 64 << 20
"""Bound of a state copied before the save in the background is finished: until then there are two copies."""

_MOST_HERE_BYTES = 16 << 20
"""Bound of a state saved in the caller although the save may run in the background."""


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
    """Bytes of the chunks new to the store. None until a save in the background is finished, and if a server has the
    store: the server gets the whole state and does not report the figure."""
    stored_bytes: int | None
    """Encoded bytes that the save adds to the store: chunks, manifest and ref; a database takes fewer. None until a
    save in the background is finished, and if a server has the store."""
    blocked_s: float
    """Seconds for which the call blocked its caller."""
    _saved: Future[CheckpointInfo] | None = field(default=None, repr=False, compare=False)

    def _repr_html_(self) -> str:
        from tensorcas_mlflow.base.notebook import html_table
        from tensorcas_mlflow.base.text import size_text

        sizes = ("total_bytes", "new_bytes", "stored_bytes")
        rows = [(each.split("_")[0], getattr(self, each)) for each in sizes]
        texts = [(name, "not known" if n_bytes is None else size_text(n_bytes)) for name, n_bytes in rows]
        headings = [("run", self.run_id), ("series", self.name), ("step", self.step), ("tensors", self.n_tensors)]
        return html_table((), [*headings, *texts, ("blocked for", f"{self.blocked_s:.3f} s"), ("uri", self.uri)])

    def wait(self) -> CheckpointInfo:
        """Wait until the checkpoint is saved, and return the final figures.

        Raises:
            TensorCasError: It could not be saved. The error is also an `mlflow.exceptions.MlflowException`.
        """
        if self._saved is None:
            return self
        return dataclasses.replace(saves.result(self._saved), blocked_s=self.blocked_s)


class SaveOptions(TypedDict, total=False):
    """Options that everything that saves checkpoints takes, as `log_checkpoint` has them."""

    name: str
    run_id: str | Run | None
    overwrite: bool
    keep: Keep | None
    log_metrics: bool | None
    policy: str | None


def check_options(options: SaveOptions) -> None:
    """Check options before a save.

    Raises:
        TypeError: There is no option of a name.
        ValueError: There is no such policy.
    """
    unknown = options.keys() - SaveOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    Policy.of(options.get("policy"))


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
    """Log a state as a step of a run, and store only its new chunks.

    The call is light enough for every step: it records no environment, and creates no model in MLflow's database.
    Errors are also `mlflow.exceptions.MlflowException`.

    If tensors of the state are spread over the ranks of a process group of PyTorch (FSDP2, tensor parallelism), or over
    the processes of JAX, all of them must make the call, and each stores its own part (``docs/training-loops.md``, Many
    ranks). Rank 0 looks for the run. Such a call always blocks.

    Args:
        state: A module, an estimator, a booster, a state dict, a training state such as ``{"model": model, "optimizer":
            optimizer, "epoch": 3}``, a pytree of JAX, or any other picklable object, but no lone number or text. It is
            not changed.
        step: Any whole number of 64 bits.
        name: The series of checkpoints in the run.
        run_id: The run: its id, ``runs:/<id>`` or a `mlflow.entities.Run`. By default the active run, else a new one,
            as with `mlflow.log_metric`.
        blocking: Return only when the checkpoint is durable. With False the call copies the changed chunks, and a
            thread saves them. The next call, `CheckpointInfo.wait`, `wait` and the end of the interpreter wait for the
            thread; the first three raise its error.
        overwrite: Replace a checkpoint of this step, atomically.
        keep: A rule for the earlier checkpoints of the series to keep; the next collection frees the others' bytes.
        log_metrics: Whether to log ``tensorcas/total_bytes``, ``tensorcas/new_bytes``, ``tensorcas/stored_bytes`` and
            ``tensorcas/saved_ratio`` as metrics of the step, in the background; for another series as
            ``tensorcas/<name>/…``. If a server has the store, none is logged. None takes TENSORCAS_LOG_METRICS, by
            default True.
        policy: ``fast`` stores tensors as they are, ``balanced`` compresses at the speed of a disk, ``small`` spends
            more time on fewer bytes. The loaded values are the same. None takes TENSORCAS_POLICY, by default
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
    if blocking:
        saves.wait()
    step = as_step(step)
    chosen = Policy.of(policy)
    if keep is not None and not isinstance(keep, Keep):
        raise ValueError(f"keep is a Keep, such as Keep(last=3), and not {keep!r}")
    adapter = adapter_for(state)
    for_ranks = adapter.module_for_ranks(state)
    if for_ranks is not None:
        info: CheckpointInfo = import_module(for_ranks).log_state(
            state,
            step=step,
            name=name,
            run_id=run_id,
            overwrite=overwrite,
            keep=keep,
            log_metrics=log_metrics,
            policy=policy,
        )
        return dataclasses.replace(info, blocked_s=time.perf_counter() - began)
    series = series_of(run_to_write(run_id), name, create=True)

    def refuse_existing() -> None:
        if not overwrite and series.has(step):
            raise CheckpointExistsError(f"{name!r} of run {series.run.run_id} at step {step}")

    # The commit checks again; this early check avoids taking apart a state only to refuse it. A background save checks
    # once, after the end of the save before it, which may be of the same step.
    if blocking:
        refuse_existing()
    if log_metrics is None:
        log_metrics = config.logs_metrics()
    tracking_uri = mlflow.get_tracking_uri()
    tensors = take_apart(adapter, state)
    if not blocking and sum(array.nbytes for array in tensors.values()) > _MAX_AHEAD_BYTES:
        saves.wait()
    saving = series.begin(
        step,
        tensors,
        flavor=adapter.name,
        cuts=adapter.cuts(tensors),
        left_out=adapter.left_out(tensors),
        overwrite=overwrite,
        policy=chosen,
        later=not blocking,
    )
    try:
        if not blocking:
            # A small state is copied while the save before it goes on.
            saves.wait()
            refuse_existing()
        finish = Finish(
            series=series,
            saving=saving,
            step=step,
            n_tensors=len(tensors) - (SKELETON in tensors),
            keep=keep,
            log_metrics=log_metrics,
            tracking_uri=tracking_uri,
            began=began,
        )
        if blocking:
            return finish()
    except BaseException:
        saving.abandon()
        raise
    pace = pace_of((series.run.run_id, series.name))
    runs_here = saving.n_bytes <= _MOST_HERE_BYTES and pace.next(time.perf_counter())
    info = finish.info()
    # A call that frees its views of the state beside the running save takes 3 to 8 ms more (measured).
    del tensors
    saved = saves.submit(finish, runs_here=runs_here)
    return dataclasses.replace(info, blocked_s=time.perf_counter() - began, _saved=saved)


@translate_errors()
def would_be_refused(run_id: str | Run | None, *, step: int, name: str) -> bool:
    """Tell whether `log_checkpoint` would refuse a step because it exists, after all saves in the background."""
    saves.wait()
    try:
        return series_of(run_to_write(run_id), name).has(as_step(step))
    except StoreNotFoundError:  # logging will create it
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Second half of a save, to run in the background if asked."""

    series: Series
    saving: Saving
    """The pending save; abandoned if it cannot be finished."""
    step: int
    n_tensors: int
    keep: Keep | None
    log_metrics: bool
    tracking_uri: str
    """The tracking store for the figures."""
    began: float
    """Start of the caller's call, by `time.perf_counter`."""

    def info(self, *, stored_bytes: int | None = None) -> CheckpointInfo:
        """Return the result of the call, as far as it is known."""
        return CheckpointInfo(
            uri=self.series.uri(self.step),
            run_id=self.series.run.run_id,
            name=self.series.name,
            step=self.step,
            n_tensors=self.n_tensors,
            total_bytes=self.saving.n_bytes,
            new_bytes=self.saving.n_new_bytes,
            stored_bytes=stored_bytes,
            blocked_s=time.perf_counter() - self.began,
        )

    @translate_errors()
    def __call__(self) -> CheckpointInfo:
        try:
            n_stored_bytes = self.saving.finish()
        finally:
            self.saving.abandon()
        n_new_bytes = self.saving.n_new_bytes
        if self.log_metrics and n_new_bytes is not None and n_stored_bytes is not None:
            log_figures(
                self.series.run.run_id,
                self.step,
                series=self.series.name,
                total_bytes=self.saving.n_bytes,
                new_bytes=n_new_bytes,
                stored_bytes=n_stored_bytes,
                tracking_uri=self.tracking_uri,
            )
        if self.keep is not None:
            note_rule(self.series, str(self.keep), self.keep.best)
            prune(self.series, self.keep, newest=self.step, tracking_uri=self.tracking_uri)
        return self.info(stored_bytes=n_stored_bytes)
