"""Keep rules: the checkpoints of a series that stay when a new one is logged."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from mlflow.tracking import MlflowClient

from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.checkpoints._series import Series
from tensorcas_mlflow.errors import TensorCasError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A rule for which checkpoints of a series stay: those that any field asks for, and the one just logged.

    ```python
    Keep(last=3)  # the three highest steps
    Keep(last=1, every=1000)  # the highest, and steps 0, 1000, 2000, …
    Keep(best="val_loss", mode="min")  # the highest, and the best by a metric logged at the same step
    ```

    The rule goes by steps, not by the order of logging. Where a training continues from an earlier step than the
    highest, delete the steps above it first, or log under another name.
    """

    last: int | None = None
    """The number of highest steps that stay."""
    every: int | None = None
    """Steps that are multiples of this number stay."""
    best: str | None = None
    """The name of a metric of the run; the steps with its best values stay.

    The last value that was logged at a step counts, even if it was logged late. A step without a value is not among the
    best. While the run has no value of the metric, every step stays.
    """
    mode: Literal["min", "max"] = "min"
    """Whether small or large values of the metric are good. NaN never is."""
    n_best: int = 1
    """The number of best steps that stay; of equal values the lowest steps."""

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("n_best", self.n_best)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} of a keep rule is a whole number above 0, not {value!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode of a keep rule is 'min' or 'max', not {self.mode!r}")
        if self.last is None and self.every is None and self.best is None:
            raise ValueError("a keep rule that keeps nothing needs no rule: give last, every or best")
        if self.best is None and (self.n_best != 1 or self.mode != "min"):
            raise ValueError("n_best and mode of a keep rule say how to choose by a metric: give its name as best, too")

    def choose(self, steps: Collection[int], metric: Mapping[int, float]) -> set[int]:
        """Return the steps that stay.

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
    """Drop what a rule does not keep of a series. A failure is worth a warning, not a training run.

    Args:
        series: The series to prune.
        keep: The rule.
        newest: The step just saved, which stays though a run that was resumed may have higher ones.
        tracking_uri: Where the metrics of the run are.
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
    # Without the values of the metric: all that may go.
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
"""Values of a metric that are read for each checkpoint that is dropped.

A value may be logged late or corrected, and MLflow tells only the newest one without its whole history. So the whole
history is read before anything is dropped. To read a long one at every step would take time in proportion to the square
of the training; so of a history of 10,000 values up to 10 checkpoints more than the rule says wait for the next look.
"""
_MAX_KNOWN = 256
_n_values: dict[tuple[str, str, str], int] = {}
"""Numbers of values found at the last look, by tracking store, run and metric."""
