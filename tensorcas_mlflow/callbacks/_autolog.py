"""`autolog`: checkpoints of trainings without a change to their code."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import mlflow
from mlflow.utils import gorilla
from mlflow.utils.autologging_utils import (
    AUTOLOGGING_CONF_KEY_IS_GLOBALLY_CONFIGURED,
    AUTOLOGGING_INTEGRATIONS,
    get_autolog_function,
)
from mlflow.utils.autologging_utils.safety import revert_patches
from mlflow.utils.import_hooks import register_post_import_hook
from mlflow.utils.mlflow_tags import MLFLOW_AUTOLOGGING

from tensorcas_mlflow.callbacks._common import CallbackOptions, QuietRecorder, known_policy, logger, positive
from tensorcas_mlflow.integration.checkpoints import Keep
from tensorcas_mlflow.integration.models import log_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a training function."""

    recorder: QuietRecorder
    every_n_steps: int | None
    original: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    is_main: bool = False
    """True if this process logs the checkpoints."""
    has_run: bool = False
    """True if the framework's own logger brings a run."""
    trained: Callable[[Any], Any] | None = None
    """A function from the call's return value to the trained model; None if the model is not to be logged."""
    undo: Callable[[], None] = lambda: None
    """Removes the callback again."""


Prepare = Callable[[Call], Call | None]
"""Function that adds our callback, with the recorder, to a call; None if the call has one of ours already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The training functions of one module."""

    flavor: str
    """MLflow's autologging name of the framework."""
    functions: Callable[[Any], list[tuple[Any, str, Prepare]]]
    """Function from the module to its training functions: the owner of each, its name there, and its `Prepare`."""


def _prepare_lightning(package: str, call: Call) -> Call | None:
    from tensorcas_mlflow.callbacks._lightning import CheckpointHooks, logger_run

    trainer = call.args[0]
    if any(isinstance(known, CheckpointHooks) for known in trainer.callbacks):
        return None
    framework = importlib.import_module(f"tensorcas_mlflow.callbacks.{package}")
    callback = framework.TensorCasCheckpoint(every_n_train_steps=call.every_n_steps)
    callback.recorder = call.recorder
    is_main = trainer.is_global_zero
    has_run = is_main and logger_run(trainer) is not None
    trainer.callbacks.append(callback)
    return replace(
        call,
        is_main=is_main,
        has_run=has_run,
        trained=lambda _: trainer.lightning_module,
        undo=lambda: _remove(trainer.callbacks, callback),
    )


def _prepare_transformers(call: Call) -> Call | None:
    from transformers.integrations.integration_utils import MLflowCallback

    from tensorcas_mlflow.callbacks.transformers import TensorCasCallback

    trainer = call.args[0]
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(known, TensorCasCallback) for known in callbacks):
        return None
    callback = TensorCasCallback(every_n_steps=call.every_n_steps)
    callback.recorder = call.recorder
    has_run = any(isinstance(known, MLflowCallback) for known in callbacks)
    callbacks.append(callback)
    return replace(
        call,
        is_main=trainer.is_world_process_zero(),
        has_run=has_run,
        trained=lambda _: trainer.model,
        undo=lambda: _remove(trainer.callback_handler.callbacks, callback),
    )


_recorder_of_fit: ContextVar[QuietRecorder | None] = ContextVar("_recorder_of_fit", default=None)


def _prepare_xgboost_fit(call: Call) -> Call | None:
    import xgboost

    from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback

    # The second one's `fit` calls the `fit` of its base class.
    if not call.args or _recorder_of_fit.get() is not None or _is_part_of_something_larger(call.args[0]):
        return None
    if any(isinstance(known, TensorCasCallback) for known in getattr(call.args[0], "callbacks", None) or ()):
        return None
    # The callback goes into the call of `train` inside `fit`, not into the estimator's parameters.
    token = _recorder_of_fit.set(call.recorder)
    return replace(
        call,
        is_main=xgboost.collective.get_rank() == 0,
        trained=lambda fitted: fitted,
        undo=lambda: _recorder_of_fit.reset(token),
    )


def _is_part_of_something_larger(estimator: Any) -> bool:
    """Tell whether another estimator's fit calls this one, or joblib runs it.

    The models of pipelines, searches, ensembles and cross-validations are parts, or are discarded. Some are fitted in
    threads of joblib, and their outer fit is then not on the stack.
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


def _prepare_xgboost_train(call: Call, *, is_of_fit: bool) -> Call | None:
    import xgboost

    from tensorcas_mlflow.callbacks.xgboost import TensorCasCallback

    # XGBoost may be given its callbacks by position. A wrong call is left as it is, for XGBoost to refuse.
    named = dict(zip(inspect.signature(call.original).parameters, call.args, strict=False))
    if len(named) < len(call.args) or named.keys() & call.kwargs.keys():
        return None
    named.update(call.kwargs)
    callbacks = list(named.get("callbacks") or ())
    if any(isinstance(known, TensorCasCallback) for known in callbacks):
        return None
    callback = TensorCasCallback(every_n_rounds=call.every_n_steps or 10)
    recorder_of_fit = _recorder_of_fit.get() if is_of_fit else None
    callback.recorder = recorder_of_fit or call.recorder
    return replace(
        call,
        args=(),
        kwargs={**named, "callbacks": [*callbacks, callback]},
        is_main=xgboost.collective.get_rank() == 0,
        has_run=recorder_of_fit is not None,
        trained=None if is_of_fit else lambda booster: booster,
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
    # Not "transformers": looking up its Trainer would import torch even for users of a tokenizer alone.
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
"""Training functions to wrap, by the module whose import brings them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    every_n_steps: int | None
    log_models: bool
    exclusive: bool
    silent: bool
    options: CallbackOptions


_settings: _Settings | None = None  # None is off; replaced as a whole


def autolog(
    *,
    every_n_steps: int | None = None,
    name: str = "checkpoint",
    keep: Keep | None = None,
    blocking: bool = False,
    log_models: bool = True,
    log_metrics: bool | None = None,
    policy: str | None = None,
    disable: bool = False,
    exclusive: bool = False,
    silent: bool = False,
) -> None:
    """Log checkpoints of every training from now on, without another change to the program.

    * ``Trainer.fit`` of ``lightning`` and ``pytorch_lightning``: the content of ``Trainer.save_checkpoint``, at the end
      of every epoch and of the training.
    * ``train`` of a ``transformers.Trainer``: the state dicts of model, optimizer and scheduler, the states of the
      random number generators and the Trainer's own state, whenever the Trainer saves, and when training ends.
    * ``xgboost.train``, and ``fit`` of XGBoost's scikit-learn classes: the booster, every 10 rounds, and when training
      ends. Not those for Dask and Spark.

    Frameworks are wrapped on import, and `autolog` imports none. If ``from xgboost import train`` ran before this call,
    its function stays unwrapped. A training with a callback of this package is left alone.

    Checkpoints go to the run of the framework's own MLflow logger, else to the active run, else to a new run for the
    duration of the training. A second training in a run logs under ``<name>-2``, unless it continues the first one: its
    count of steps begins at the last checkpoint of the first one, and of no other. MLflow's own autologging may be on
    too, in any order.

    No error here stops a training: it is logged as a warning. After three consecutive errors the training is no longer
    logged.

    Args:
        every_n_steps: Log when the number of steps (rounds) is a multiple of this, instead of as above.
        name: Name of the checkpoints.
        keep: A rule for the steps to keep; the others are deleted during the training. None keeps all.
        blocking: Wait for each checkpoint to be durable. With False new chunks are copied, and written while training
            goes on; all checkpoints are durable when the training returns.
        log_models: When a training ends well, log the model too, under the name ``model``, for
            ``mlflow.tensorcas.load_model``. For XGBoost's scikit-learn classes the model is the fitted estimator. None
            is logged for a fit within the fit of another estimator (a pipeline, a search, an ensemble) or run by joblib
            (``cross_val_score``). If MLflow's own autologging logs models as well, there are two of them.
        log_metrics: Log storage figures as metrics of the run; None for the default of `log_checkpoint`.
        policy: As for `log_checkpoint`.
        disable: Turn all of this off. A training under way is logged to its end.
        exclusive: Leave a training alone if the program itself started its run.
        silent: No warnings and no other messages.

    Raises:
        ValueError: ``every_n_steps`` is less than 1, or there is no such policy.
    """
    global _settings
    positive(every_n_steps, "every_n_steps")
    known_policy(policy)
    if disable:
        _settings = None
        return
    _settings = _Settings(
        every_n_steps=every_n_steps,
        log_models=log_models,
        exclusive=exclusive,
        silent=silent,
        options={"name": name, "keep": keep, "blocking": blocking, "log_metrics": log_metrics, "policy": policy},
    )
    for module_name in WRAPPED:
        register_post_import_hook(_wrap_tensorcas_autolog, module_name)


_wrapped: set[str] = set()


def _wrap_tensorcas_autolog(module: Any) -> None:
    if module.__name__ in _wrapped:
        return
    _wrapped.add(module.__name__)
    wrapped = WRAPPED[module.__name__]
    try:
        functions = wrapped.functions(module)
        is_patched = any(gorilla.get_original_attribute(at, name) is not getattr(at, name) for at, name, _ in functions)
        with _without_mlflow_patches(wrapped.flavor) if is_patched else nullcontext():
            for owner, attribute, prepare in functions:
                _wrap(wrapped.flavor, owner, attribute, prepare)
    except Exception as error:  # noqa: BLE001 - what escapes from here fails the user's import
        if _settings is not None and not _settings.silent:
            logger.warning("Trainings of %s will not be autologged: %s", module.__name__, error)


def _wrap(flavor: str, owner: Any, attribute: str, prepare: Prepare) -> None:
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        settings = _settings
        if settings is None or (settings.exclusive and _is_in_run_of_program()):
            return original(*args, **kwargs)
        recorder = QuietRecorder(framework=flavor, silent=settings.silent, **settings.options)
        call: Call | None = None
        with recorder.guard():
            call = prepare(
                Call(
                    recorder=recorder,
                    every_n_steps=settings.every_n_steps,
                    original=original,
                    args=args,
                    kwargs=kwargs,
                )
            )
        return original(*args, **kwargs) if call is None else _train(settings, call)

    setattr(owner, attribute, wrapper)


@contextmanager
def _without_mlflow_patches(flavor: str) -> Iterator[None]:
    """Turn off MLflow's autologging of a framework in a block; restore it afterwards, over patches made in between."""
    config = dict(AUTOLOGGING_INTEGRATIONS[flavor])
    is_global = config.pop(AUTOLOGGING_CONF_KEY_IS_GLOBALLY_CONFIGURED, None)
    revert_patches(flavor)
    try:
        yield
    finally:
        switch_on = get_autolog_function(flavor)
        if switch_on is not None:
            switch_on(**config)
        if is_global is not None:
            AUTOLOGGING_INTEGRATIONS[flavor][AUTOLOGGING_CONF_KEY_IS_GLOBALLY_CONFIGURED] = is_global


def _is_in_run_of_program() -> bool:
    active = mlflow.active_run()
    return active is not None and MLFLOW_AUTOLOGGING not in active.data.tags


def _train(settings: _Settings, call: Call) -> Any:
    recorder, own_run, status = call.recorder, None, "FAILED"
    try:
        if call.is_main and not call.has_run and mlflow.active_run() is None:
            own_run = _start_run(settings, recorder)
        result = call.original(*call.args, **call.kwargs)
        with recorder.guard():
            if settings.log_models and call.is_main and call.trained is not None:
                _log_model(call.trained(result), recorder)
        status = "FINISHED"
        return result
    finally:
        call.undo()
        # Pending writes belong to the run, so the run ends after them.
        with recorder.guard():
            recorder.finish()
        with recorder.guard():
            active = mlflow.active_run()
            if own_run is not None and active is not None and active.info.run_id == own_run:
                mlflow.end_run(status)


def _start_run(settings: _Settings, recorder: QuietRecorder) -> str | None:
    with recorder.guard():
        run_id = str(mlflow.start_run(tags={MLFLOW_AUTOLOGGING: "tensorcas"}).info.run_id)
        if not settings.silent:
            logger.info("Checkpoints of this training go to the new run %s", run_id)
        return run_id
    recorder.give_up()
    return None


def _log_model(model: Any, recorder: QuietRecorder) -> None:
    active, run_id = mlflow.active_run(), recorder.run_id
    if run_id is None:
        return
    if active is not None and active.info.run_id == run_id:
        log_model(model, name="model", step=recorder.last_step)
    else:
        # The framework's logger has ended its run by now, or keeps it from being the active one.
        with mlflow.start_run(run_id, nested=active is not None):
            log_model(model, name="model", step=recorder.last_step)
