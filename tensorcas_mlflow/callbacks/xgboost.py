"""Checkpoints of an XGBoost training in the store.

xgboost.train(params, data, 500, callbacks=[TensorCasCallback(every_n_rounds=10)])
booster = mlflow.tensorcas.load_checkpoint(run_id)
xgboost.train(params, data, 100, xgb_model=booster)  # goes on from there
"""

from __future__ import annotations

from typing import Any, Unpack

import xgboost

from tensorcas_mlflow.callbacks._common import CallbackOptions, Recorder, positive

__all__ = ["TensorCasCallback"]


class TensorCasCallback(xgboost.callback.TrainingCallback):
    """Logs the booster every few rounds, and when training ends.

    The step is the booster's number of rounds, so a training continued from a booster continues its count. A round is
    logged just before the next one begins, after the callbacks behind this one have seen it. The last checkpoint is the
    booster returned by ``xgboost.train``, unless its number of rounds was logged before.

    The run is ``run_id``, else the active one, else a new one, which ends with the training. In a distributed
    training rank 0 logs. Errors are raised.

    Args:
        every_n_rounds: Log when the number of rounds is a multiple of this; None for the end only.
        options: ``name``, ``run_id``, ``keep``, ``blocking``, ``overwrite``, ``log_metrics`` and ``policy``; see
            `CallbackOptions`. Write a metric of the rule ``keep`` in MLflow's form for evaluations, such as
            ``validation-rmse``; it is logged at the step.

    Raises:
        ValueError: An interval is less than 1, or there is no such policy.
    """

    def __init__(
        self,
        *,
        every_n_rounds: int | None = 10,
        **options: Unpack[CallbackOptions],
    ) -> None:
        super().__init__()
        self.every_n_rounds = positive(every_n_rounds, "every_n_rounds")
        self.recorder = Recorder(**options)
        self._logged: set[int] = set()
        self._has_begun = False
        self._n_rounds_before = 0
        self._evals_log: Any = {}

    def before_training(self, model: Any) -> Any:
        with self.recorder.guard():
            if not isinstance(model, xgboost.Booster):
                raise ValueError("xgboost.cv trains a booster for each fold: log checkpoints of xgboost.train")
            if _is_main_process():
                self.recorder.begin()
        self._logged = set()
        self._has_begun = False
        return model

    # Not after_iteration: early stopping, last in xgboost.train, then writes its state into the booster, and a stopping
    # callback prevents the calls of all later ones.
    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if self._has_begun and self.every_n_rounds and model.num_boosted_rounds() % self.every_n_rounds == 0:
            self._save(model, evals_log)
        if not self._has_begun:
            self._n_rounds_before = self.recorder.start_step = model.num_boosted_rounds()
        self._has_begun = True
        self._evals_log = evals_log  # the evaluation of the round about to begin is written into it
        return False

    def after_training(self, model: Any) -> Any:
        if self._has_begun:
            self._save(model, self._evals_log)
        self._evals_log = {}
        with self.recorder.guard():
            self.recorder.finish()
        return model

    def _save(self, model: Any, evals_log: Any) -> None:
        n_rounds = model.num_boosted_rounds()
        if n_rounds in self._logged or not _is_main_process():
            return
        self._logged.add(n_rounds)
        with self.recorder.guard():
            # Not the newest evaluation: early stopping may have cut off the rounds after the best one.
            self.recorder.save(model, n_rounds, _evaluation(evals_log, n_rounds - self._n_rounds_before - 1))


def _evaluation(evals_log: Any, position: int) -> dict[str, float]:
    # MLflow forbids "@" in a metric's name, and replaces it like this.
    return {
        f"{data}-{metric}".replace("@", "_at_"): history[position]
        for data, metrics in evals_log.items()
        for metric, history in metrics.items()
        if 0 <= position < len(history)
    }


def _is_main_process() -> bool:
    return bool(xgboost.collective.get_rank() == 0)
