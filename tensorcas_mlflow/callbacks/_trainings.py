"""Functions that put a callback into a training for `autolog`, one for each framework.

A framework is imported by its own training function being called, so nothing here imports one before.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from tensorcas_mlflow.callbacks._common import QuietRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a training function, with our callback in it."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    is_main: bool
    """Whether this process is the one that logs."""
    has_run: bool
    """Whether the framework's own logger brings a run."""
    trained: Callable[[Any], Any] | None
    """Gives the trained model for what the function returned; None if it is not to be logged."""
    undo: Callable[[], None]
    """Takes the callback out again."""


Prepare = Callable[..., Call | None]
"""``prepare(recorder, every_n_steps, original, args, kwargs)`` puts a callback that logs with ``recorder`` into a call
of ``original``; None if there is one of ours already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The training functions of one module."""

    flavor: str
    """What MLflow's own autologging calls the framework."""
    functions: Callable[[Any], list[tuple[Any, str, Prepare]]]
    """Gives, for the module, what holds each function, its name there, and how a call of it is prepared."""


def _prepare_lightning(
    package: str,
    recorder: QuietRecorder,
    every_n_steps: int | None,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call | None:
    from tensorcas_mlflow.callbacks._lightning import CheckpointHooks, logger_run

    trainer = args[0]
    if any(isinstance(known, CheckpointHooks) for known in trainer.callbacks):
        return None
    framework = importlib.import_module(f"tensorcas_mlflow.callbacks.{package}")
    callback = framework.TensorCasCheckpoint(every_n_train_steps=every_n_steps)
    callback.recorder = recorder
    is_main = trainer.is_global_zero
    has_run = is_main and logger_run(trainer) is not None
    trainer.callbacks.append(callback)
    return Call(
        args=args,
        kwargs=kwargs,
        is_main=is_main,
        has_run=has_run,
        trained=lambda _: trainer.lightning_module,
        undo=lambda: _remove(trainer.callbacks, callback),
    )


def _prepare_transformers(
    recorder: QuietRecorder,
    every_n_steps: int | None,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call | None:
    from transformers.integrations.integration_utils import MLflowCallback

    from tensorcas_mlflow.callbacks.transformers import TensorCasCallback

    trainer = args[0]
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(known, TensorCasCallback) for known in callbacks):
        return None
    callback = TensorCasCallback(every_n_steps=every_n_steps)
    callback.recorder = recorder
    has_run = any(isinstance(known, MLflowCallback) for known in callbacks)
    callbacks.append(callback)
    return Call(
        args=args,
        kwargs=kwargs,
        is_main=trainer.is_world_process_zero(),
        has_run=has_run,
        trained=lambda _: trainer.model,
        undo=lambda: _remove(trainer.callback_handler.callbacks, callback),
    )


_recorder_of_fit: ContextVar[QuietRecorder | None] = ContextVar("_recorder_of_fit", default=None)


def _prepare_xgboost_fit(
    recorder: QuietRecorder,
    every_n_steps: int | None,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call | None:
    import xgboost

    from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback

    # The second is a `fit` that calls the one of its base class.
    if not args or _recorder_of_fit.get() is not None or _is_part_of_something_larger(args[0]):
        return None
    if any(isinstance(known, TensorCasCallback) for known in getattr(args[0], "callbacks", None) or ()):
        return None
    # The callback goes into the call of `train` that `fit` makes, not into the estimator's parameters.
    token = _recorder_of_fit.set(recorder)
    return Call(
        args=args,
        kwargs=kwargs,
        is_main=xgboost.collective.get_rank() == 0,
        has_run=False,
        trained=lambda fitted: fitted,
        undo=lambda: _recorder_of_fit.reset(token),
    )


def _is_part_of_something_larger(estimator: Any) -> bool:
    """Tell whether a fit that begins here is called by the fit of another estimator, or run by joblib.

    The models of pipelines, searches, ensembles and cross-validations are parts, or are thrown away. Some are fitted in
    threads of joblib, where the fit they belong to is not on the stack.
    """
    from sklearn.base import BaseEstimator

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] == "joblib":
            return True
        code = frame.f_code
        if code.co_name.startswith("fit") and code.co_argcount > 0:
            caller = frame.f_locals.get(code.co_varnames[0])
            if isinstance(caller, BaseEstimator) and caller is not estimator:
                return True
        frame = frame.f_back
    return False


def _fits_of_xgboost(module: Any) -> list[tuple[Any, str, Prepare]]:
    return [
        (each, "fit", _prepare_xgboost_fit)
        for each in vars(module.sklearn).values()
        if inspect.isclass(each) and issubclass(each, module.sklearn.XGBModel) and "fit" in vars(each)
    ]


def _prepare_xgboost_train(
    recorder: QuietRecorder,
    every_n_steps: int | None,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_of_fit: bool,
) -> Call | None:
    import xgboost

    from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback

    # XGBoost may be given its callbacks by position. A wrong call is left as it is, for XGBoost to refuse.
    named = dict(zip(inspect.signature(original).parameters, args, strict=False))
    if len(named) < len(args) or named.keys() & kwargs.keys():
        return None
    named.update(kwargs)
    callbacks = list(named.get("callbacks") or ())
    if any(isinstance(known, TensorCasCallback) for known in callbacks):
        return None
    callback = TensorCasCallback(every_n_rounds=every_n_steps or 10)
    recorder_of_fit = _recorder_of_fit.get() if is_of_fit else None
    callback.recorder = recorder_of_fit or recorder
    return Call(
        args=(),
        kwargs={**named, "callbacks": [*callbacks, callback]},
        is_main=xgboost.collective.get_rank() == 0,
        has_run=recorder_of_fit is not None,
        trained=None if is_of_fit else lambda booster: booster,
        undo=lambda: None,
    )


def _remove(callbacks: list[Any], callback: Any) -> None:
    if callback in callbacks:
        callbacks.remove(callback)


WRAPPED: Mapping[str, Wrapped] = {
    "lightning.pytorch": Wrapped(
        flavor="pytorch",
        functions=lambda module: [(module.Trainer, "fit", partial(_prepare_lightning, "lightning"))],
    ),
    "pytorch_lightning": Wrapped(
        flavor="pytorch",
        functions=lambda module: [(module.Trainer, "fit", partial(_prepare_lightning, "pytorch_lightning"))],
    ),
    # Not "transformers": to ask that for its Trainer would import torch for those who only want a tokenizer.
    "transformers.trainer": Wrapped(
        flavor="transformers",
        functions=lambda module: [(module.Trainer, "train", _prepare_transformers)],
    ),
    "xgboost": Wrapped(
        flavor="xgboost",
        functions=lambda module: [
            (module, "train", partial(_prepare_xgboost_train, is_of_fit=False)),
            (module.sklearn, "train", partial(_prepare_xgboost_train, is_of_fit=True)),
            *_fits_of_xgboost(module),
        ],
    ),
}
"""By the module whose import brings the functions."""
