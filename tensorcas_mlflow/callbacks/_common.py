"""Recorder shared by all callbacks: it logs the checkpoints of one training after another, under one name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import mlflow
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.adapter import adapter_named
from tensorcas_mlflow.integration.checkpoints import (
    CheckpointInfo,
    Keep,
    list_before_logging,
    log_checkpoint,
    would_be_refused,
)
from tensorcas_mlflow.store import Policy

logger = logging.getLogger("mlflow.tensorcas")  # shown the way MLflow's own messages are

MAX_FAILURES = 3


def positive(value: int | None, what: str) -> int | None:
    """Return an interval, checked.

    Raises:
        ValueError: It is less than 1.
    """
    if value is not None and value < 1:
        raise ValueError(f"{what} must be at least 1, not {value!r}")
    return value


def is_spread(state: Any) -> bool:
    """Tell whether the ranks of a process group of PyTorch have parts of a state, so that all must save it."""
    return adapter_named("pytorch").module_for_ranks(state) is not None


def known_policy(name: str | None) -> str | None:
    """Return the name of a policy, checked; None leaves the choice to each save.

    Raises:
        ValueError: There is none.
    """
    return None if name is None else Policy.of(name).value


class CallbackOptions(TypedDict, total=False):
    """Options of every callback."""

    name: str
    """Name of the checkpoints; by default ``checkpoint``."""
    run_id: str | None
    """Run to log to. By default it is the run active when a training begins, else the run active at the first
    checkpoint, else a new run, which ends with the training. The training keeps that run, even after other code has
    ended it."""
    keep: Keep | None
    """A rule for the steps to keep; the others are deleted during the training. None keeps all."""
    blocking: bool
    """With False, training continues during the write. An error of a save in the background is raised at the next
    save, or when training ends. True by default."""
    overwrite: bool
    """Replace a step logged before, as when training resumes from an earlier one. By default it is refused."""
    log_metrics: bool | None
    """Log storage figures as metrics of the run; None leaves the choice to `log_checkpoint`."""
    policy: str | None
    """As for `log_checkpoint`."""


class Recorder:
    """Logger for the checkpoints of a training, held by a callback. It can be copied and pickled between trainings.

    It takes `CallbackOptions`.

    Raises:
        ValueError: There is no such policy.
    """

    may_wait_for_ranks = True
    """Whether a save may be a call that all ranks of a training must make."""

    def __init__(
        self,
        *,
        name: str = "checkpoint",
        run_id: str | None = None,
        keep: Keep | None = None,
        blocking: bool = True,
        overwrite: bool = False,
        log_metrics: bool | None = None,
        policy: str | None = None,
    ) -> None:
        self.name = name
        self.run_id = run_id
        self.start_step = 0
        """Steps taken before this training began, by its own count; the callback sets it. 0 is from scratch."""
        self.last_step: int | None = None
        self._given_run_id = run_id
        self._keep = keep
        self._blocking = blocking
        self._overwrite = overwrite
        self._log_metrics = log_metrics
        self._policy = known_policy(policy)
        self._pending: CheckpointInfo | None = None
        self._rated_step: int | None = None
        self._own_run_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pending": None, "_own_run_id": None}

    def begin(self, run_id: str | None = None) -> None:
        """Forget the last training, and settle the run of this one.

        Args:
            run_id: The run of the framework's own logger, if any.
        """
        self.end_own_run("FAILED")  # the last training did not come to its end
        self.run_id = self._given_run_id or run_id
        self.join_active_run()
        self.start_step = 0
        self.last_step = None
        self._rated_step = None

    def join_active_run(self) -> None:
        """Log to the active run from here on, if there is one and the run of this training is still open."""
        active = mlflow.active_run() if self.run_id is None else None
        if active is not None:
            self.run_id = active.info.run_id

    def save(self, state: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Log a checkpoint; raises as `log_checkpoint`.

        If other ranks have parts of the state, they call `save_beside` meanwhile.

        Args:
            state: The state to log.
            step: Its step.
            metrics: The framework's metrics of the step, for `rate`.
        """
        self.join_active_run()
        if self.run_id is None:
            self.run_id = self._own_run_id = str(mlflow.start_run().info.run_id)
        try:
            # First, so the keep rule has the metric of this step too.
            if not self._is_refused(step):
                self.rate(step, metrics)
        finally:
            # A metric that cannot be logged stops the training; the state reached is saved first.
            info = log_checkpoint(
                state,
                step=step,
                name=self.name,
                run_id=self.run_id,
                blocking=self._blocking,
                overwrite=self._overwrite,
                keep=self._keep,
                log_metrics=self._log_metrics,
                policy=self._policy,
            )
            self.last_step = step
            self._pending = None if self._blocking else info

    def save_beside(self, state: Any, step: int) -> None:
        """Take part in the save of a state that is spread over ranks; rank 0 calls `save`. Raises the error of any."""
        log_checkpoint(state, step=step, name=self.name, overwrite=self._overwrite, policy=self._policy)

    def rate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metric of the keep rule at a step, once.

        Loggers do not: they count steps in their own ways, and there may be none.

        Args:
            step: The last saved step, if its metrics were unknown at the save.
            metrics: The framework's metrics of it, complete by now.
        """
        best = self._keep.best if self._keep is not None else None
        if best is None or best not in metrics or step == self._rated_step:
            return
        assert self.run_id is not None
        MlflowClient().log_metric(self.run_id, best, float(metrics[best]), step=step)
        self._rated_step = step

    def _is_refused(self, step: int) -> bool:
        # The metric of an existing step must not be replaced by that of a refused state.
        if self._overwrite or self._keep is None or self._keep.best is None:
            return False
        return would_be_refused(self.run_id, step=step, name=self.name)

    def finish(self) -> None:
        """Wait for the last save, and end the run if `save` started it.

        The error of a save in the background is raised here at the latest.
        """
        pending, self._pending = self._pending, None
        status = "FAILED"
        try:
            if pending is not None:
                pending.wait()
            status = "FINISHED"
        finally:
            self.end_own_run(status)

    def end_own_run(self, status: str) -> None:
        """End the run if `save` started it and it is still the active one."""
        active, own, self._own_run_id = mlflow.active_run(), self._own_run_id, None
        if own is not None and active is not None and active.info.run_id == own:
            mlflow.end_run(status)

    def advise(self, advice: str) -> None:
        """Warn of settings that log less than their user may expect."""
        logger.warning("%s", advice)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run a callback's own work within this block; its errors reach the training."""
        yield


class QuietRecorder(Recorder):
    """Recorder for a training without an explicit request to log it: it warns instead of raising.

    It never mixes trainings. A training continues an earlier one of the run only if it begins at that one's last
    checkpoint. Any other uses the first unused name of ``<name>``, ``<name>-2``, ``<name>-3`` and so on.
    """

    may_wait_for_ranks = False  # a rank that gives up would let the others wait

    def __init__(self, *, framework: str, silent: bool = False, **options: Unpack[CallbackOptions]) -> None:
        super().__init__(**options)
        self._framework = framework
        self._silent = silent
        self._base_name = self.name
        self._n_failures = 0

    def give_up(self) -> None:
        """Log no checkpoint from here on."""
        self._n_failures = MAX_FAILURES

    def advise(self, advice: str) -> None:
        if not self._silent:
            super().advise(advice)

    def save(self, state: Any, step: int, metrics: Mapping[str, Any]) -> None:
        # An unreachable tracking server costs minutes of retries at every step.
        if self._n_failures >= MAX_FAILURES:
            return
        if self.last_step is None and self.run_id is not None:
            self.name = _name_for(self.run_id, self._base_name, self.start_step, step)
        super().save(state, step, metrics)
        self._n_failures = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the user's training goes on, whatever it is
            self._n_failures += 1
            if not self._silent and self._n_failures <= MAX_FAILURES:
                more = "; it logs no more checkpoints" if self._n_failures == MAX_FAILURES else ""
                logger.warning("Autologging of a %s training failed: %s%s", self._framework, error, more)


def _name_for(run_id: str, base: str, start_step: int, step: int) -> str:
    highest: dict[str, int] = {}
    for record in list_before_logging(run_id):
        highest[record.name] = max(record.step, highest.get(record.name, record.step))
    name, n = base, 1
    ending_here: list[str] = []
    while name in highest:
        if 0 < start_step == highest[name] < step:
            ending_here.append(name)
        n += 1
        name = f"{base}-{n}"
    # The last step of a training is always logged, so a series with an earlier end belongs to another training, or to
    # an interrupted one. An extra series is better than a mixed one. The same applies if several series end here.
    return ending_here[0] if len(ending_here) == 1 else name
