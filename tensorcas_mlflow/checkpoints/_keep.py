"""Which checkpoints of a series stay."""

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
    """A rule for what to keep of a series of checkpoints. The one just logged always stays, and what any part wants.

    ```python
    Keep(last=3)  # the three highest steps
    Keep(last=1, every=1000)  # the highest, and steps 0, 1000, 2000, …
    Keep(best="val_loss", mode="min")  # the highest, and the best by a metric logged at the same step
    ```

    Steps are what counts, not the order of logging. Where a training goes on from an earlier step than the highest,
    delete those above it first, or log under another name.
    """

    last: int | None = None
    """How many of the highest steps stay."""
    every: int | None = None
    """Steps that this number divides stay."""
    best: str | None = None
    """Name of a metric of the run; the steps with its best values stay. A step it was not logged at is none of them."""
    mode: Literal["min", "max"] = "min"
    """Which values of the metric are good. NaN never is."""
    n_best: int = 1
    """How many of the best stay; of equal ones the first."""

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every), ("n_best", self.n_best)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} of a keep rule is a whole number above 0, not {value!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode of a keep rule is 'min' or 'max', not {self.mode!r}")
        if self.last is None and self.every is None and self.best is None:
            raise ValueError("a keep rule that keeps nothing needs no rule: give last, every or best")

    def choose(self, steps: Collection[int], metric: Mapping[int, float]) -> set[int]:
        """Say which steps stay.

        Args:
            steps: Those there are.
            metric: Value of `best` by step.
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
    """Drop what a rule does not keep of a series. That it cannot be done is worth a warning, not a training run.

    Args:
        series: Which.
        keep: The rule.
        newest: The step just saved, which stays though a run that was resumed may have higher ones.
        tracking_uri: Where the metrics of the run are.
    """
    try:
        steps = series.steps()
        values = {} if keep.best is None else _values_of(series.run.run_id, keep.best, steps, newest, tracking_uri)
        kept = keep.choose(steps, values) | {newest}
    except Exception as error:  # noqa: BLE001 -- the tracking store may fail in its own ways
        _warn(series, error)
        return
    for step in steps:
        if step not in kept:
            try:
                checkpoint = series.find(step)
                if checkpoint is not None:
                    checkpoint.drop()
            except TensorCasError as error:
                _warn(series, error)


def _warn(series: Series, error: Exception) -> None:
    _logger.warning(
        "older checkpoints %r of run %s stay for now: %s", series.name, series.run.run_id, without_secrets(str(error))
    )


_MAX_KNOWN = 256
_known: dict[tuple[str, str, str], dict[int, float]] = {}
"""Values of metrics by step, by tracking store, run and metric; NaN where there is known to be none."""


def _values_of(run_id: str, metric: str, steps: Collection[int], newest: int, tracking_uri: str) -> dict[int, float]:
    """Give the values of a metric at some steps.

    The newest value costs one small request; the whole history, which grows with the run, is asked for only if a step's
    value may have come and been followed by another since the last look.
    """
    key = (tracking_uri, run_id, metric)
    if key not in _known and len(_known) >= _MAX_KNOWN:
        _known.clear()
    known = _known.setdefault(key, {})
    client = MlflowClient(tracking_uri)
    latest = next((each for each in client.get_run(run_id).data._metric_objs if each.key == metric), None)
    if latest is None:
        return {}
    known[latest.step] = latest.value
    if any(step not in known and step < latest.step for step in steps if step != newest):
        known.update((step, math.nan) for step in steps if step not in known and step < latest.step)
        history = client.get_metric_history(run_id, metric)
        known.update((each.step, each.value) for each in sorted(history, key=lambda each: each.timestamp))
    for step in known.keys() - set(steps):
        del known[step]
    return known
