"""Checkpoints of a scikit-learn estimator in the store, fitted stage by stage.

forest = RandomForestClassifier(random_state=0)
fit_with_checkpoints(forest, X, y, steps=range(10, 101, 10))  # after 10, 20, … trees

network = MLPClassifier(random_state=0)
fit_with_checkpoints(network, X, y, steps=20, parameter=None, batch_size=256)  # after each of 20 epochs
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from inspect import signature
from itertools import pairwise
from operator import index
from typing import Any, SupportsIndex, Unpack

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils import gen_batches

from tensorcas_mlflow.callbacks._common import CallbackOptions, Recorder, positive

__all__ = ["fit_with_checkpoints"]

Stages = Generator[int, None, None]


def fit_with_checkpoints(
    estimator: Any,
    X: Any,
    y: Any = None,
    *,
    steps: SupportsIndex | Iterable[SupportsIndex],
    parameter: str | None = "n_estimators",
    batch_size: int | None = None,
    fit_params: Mapping[str, Any] | None = None,
    **options: Unpack[CallbackOptions],
) -> Any:
    """Fit an estimator in stages and log it after each.

    With a ``parameter`` each stage is a ``fit`` with warm start, at a larger value of that parameter. The value is the
    step. Logged estimators have ``warm_start`` on, so they can be fitted further; the original setting is restored at
    the end.

    With ``parameter=None`` each stage is one pass of ``partial_fit`` over the data in its given order; shuffle it
    before if the order matters. Steps count the passes.

    The run is ``run_id``, else the active one, else a new one, which ends with the last stage. If a fit fails or is
    interrupted, the stages before it stay logged.

    Args:
        estimator: An estimator with ``warm_start``, or one with ``partial_fit``; or a pipeline with the former at its
            end, with a ``parameter`` such as ``"model__n_estimators"``. It is fitted in place.
        X: The first argument of ``fit``.
        y: The second argument of ``fit``.
        steps: Values of the parameter in ascending order, or the numbers of passes to log after; a number n means the
            steps 1 to n.
        parameter: The growing parameter of the estimator; None for ``partial_fit``.
        batch_size: Rows of one call of ``partial_fit``; None passes them all at once.
        fit_params: Further arguments of every ``fit`` or ``partial_fit``. Nothing in them is cut into batches.
        options: ``name``, ``run_id``, ``keep``, ``blocking``, ``overwrite``, ``log_metrics`` and ``policy``; see
            `CallbackOptions`.

    Returns:
        The estimator.

    Raises:
        ValueError: The steps are not ascending whole numbers from 1 on, the estimator does not support such stages, or
            there is no such policy.
    """
    stages = _stages(steps)
    recorder = Recorder(**options)
    if parameter is None:
        positive(batch_size, "batch_size")
        fits = _passes(estimator, X, y, stages, batch_size, fit_params or {})
    elif batch_size is not None:
        raise ValueError("batch_size is for partial_fit: pass parameter=None too, or leave it out")
    else:
        fits = _warm_starts(estimator, X, y, stages, parameter, fit_params or {})
    recorder.begin()
    try:
        for step in fits:
            recorder.save(estimator, step, {})
    except BaseException:
        recorder.end_own_run("FAILED")
        raise
    finally:
        fits.close()
    recorder.finish()
    return estimator


def _stages(steps: SupportsIndex | Iterable[SupportsIndex]) -> list[int]:
    try:
        # An array has __index__ too, and is a list of steps even with only one element.
        stages = list(map(index, steps)) if isinstance(steps, Iterable) else list(range(1, index(steps) + 1))
    except TypeError as error:
        raise ValueError(f"steps must be a whole number or several ascending ones, not {steps!r}") from error
    if not stages or stages[0] < 1 or any(after <= before for before, after in pairwise(stages)):
        raise ValueError(f"steps must be ascending numbers from 1, not {stages}")
    return stages


def _warm_starts(
    estimator: Any, X: Any, y: Any, stages: list[int], parameter: str, fit_params: Mapping[str, Any]
) -> Stages:
    owner, separator, _ = parameter.rpartition("__")
    warm_start = f"{owner}{separator}warm_start"
    parameters = estimator.get_params()
    missing = [name for name in (parameter, warm_start) if name not in parameters]
    if missing:
        raise ValueError(
            f"{type(estimator).__name__} has no parameter {missing[0]!r}, so it cannot be fitted in stages of "
            f"{parameter!r}: name a growing one in `parameter`, or pass parameter=None to use partial_fit"
        )
    return _fit_warm(estimator, X, y, stages, parameter, warm_start, fit_params)


def _fit_warm(
    estimator: Any,
    X: Any,
    y: Any,
    stages: list[int],
    parameter: str,
    warm_start: str,
    fit_params: Mapping[str, Any],
) -> Stages:
    before = estimator.get_params()[warm_start]
    try:
        for step in stages:
            estimator.set_params(**{warm_start: True, parameter: step})
            estimator.fit(X, y, **fit_params)
            yield step
    finally:
        estimator.set_params(**{warm_start: before})


def _passes(
    estimator: Any, X: Any, y: Any, stages: list[int], batch_size: int | None, fit_params: Mapping[str, Any]
) -> Stages:
    if not hasattr(estimator, "partial_fit"):
        raise ValueError(
            f"{type(estimator).__name__} has no partial_fit: name a growing parameter in `parameter`, if it has "
            "warm_start"
        )
    arguments = dict(fit_params)
    # A batch may miss some classes, and the first call has to name them all.
    if is_classifier(estimator) and "classes" in signature(estimator.partial_fit).parameters:
        arguments.setdefault("classes", np.unique(y))
    return _fit_passes(estimator, X, y, stages, batch_size, arguments)


def _fit_passes(
    estimator: Any, X: Any, y: Any, stages: list[int], batch_size: int | None, arguments: Mapping[str, Any]
) -> Stages:
    n_rows = X.shape[0] if hasattr(X, "shape") else len(X)
    for step in range(1, stages[-1] + 1):
        for rows in gen_batches(n_rows, batch_size or n_rows):
            estimator.partial_fit(_rows(X, rows), None if y is None else _rows(y, rows), **arguments)
        if step in stages:
            yield step


def _rows(data: Any, rows: slice) -> Any:
    return data.iloc[rows] if hasattr(data, "iloc") else data[rows]
