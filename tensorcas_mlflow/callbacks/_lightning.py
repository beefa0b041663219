"""The Lightning callback, common to both packages named Lightning.

This module imports neither package. To take a checkpoint, it replaces the strategy's checkpoint IO during
`Trainer.save_checkpoint`. So hooks, precision plugins and strategies act as for a file.
"""

from __future__ import annotations

import os
from typing import Any, Unpack

import mlflow
import torch
from mlflow.entities import Run

from tensorcas_mlflow.callbacks._common import CallbackOptions, Recorder, is_spread, positive
from tensorcas_mlflow.integration.checkpoints import load_checkpoint


class CheckpointHooks:
    """Logs the Trainer's checkpoint as training goes on; mixed into the framework's own ``Checkpoint`` class.

    A checkpoint has the content of ``Trainer.save_checkpoint``: weights, optimizers, schedulers, loops, callbacks and
    hyper-parameters, as plain values. The step is ``trainer.global_step``. The last step of a training is always
    logged. A Trainer with this callback writes no checkpoint files of its own, unless it has a ``ModelCheckpoint`` too.

    The run is ``run_id``, else the run of the Trainer's ``MLFlowLogger``, else the active one, else a new one,
    which ends with the training. Under a distributed strategy the process of rank 0 logs. If the strategy spreads
    its checkpoint over the ranks (``ModelParallelStrategy``, and ``FSDPStrategy`` with
    ``state_dict_type="sharded"``), each rank stores its part, and the call blocks. Errors are raised.

    Args:
        every_n_train_steps: Log when ``trainer.global_step`` is a multiple of this.
        every_n_epochs: Log at the end of every n-th epoch, after its validation. With neither: every epoch.
        save_weights_only: Leave out the content needed only to resume.
        options: ``name``, ``run_id``, ``keep``, ``blocking``, ``overwrite``, ``log_metrics`` and ``policy``; see
            `CallbackOptions`. A metric of the rule ``keep`` may be any that a ``ModelCheckpoint`` could monitor; it is
            logged at the step.

    Raises:
        ValueError: An interval is less than 1, or there is no such policy.
    """

    best_model_path = ""
    """Always empty: ``ckpt_path="best"`` needs a ``ModelCheckpoint``, and Lightning reports that if it finds this."""

    def __init__(
        self,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        save_weights_only: bool = False,
        **options: Unpack[CallbackOptions],
    ) -> None:
        super().__init__()
        if every_n_train_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        self.every_n_train_steps = positive(every_n_train_steps, "every_n_train_steps")
        self.every_n_epochs = positive(every_n_epochs, "every_n_epochs")
        self.save_weights_only = save_weights_only
        self.recorder = Recorder(**options)
        self._last_step = 0  # no step was taken, nothing to log

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        with self.recorder.guard():
            if trainer.is_global_zero:
                self.recorder.begin(logger_run(trainer))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Later than on_fit_start: only now is the step of a resumed Trainer known.
        self._last_step = self.recorder.start_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.every_n_train_steps is not None and trainer.global_step % self.every_n_train_steps == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(trainer)
        with self.recorder.guard():
            self.recorder.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.recorder.end_own_run("FAILED")

    def _save(self, trainer: Any) -> None:
        if trainer.global_step == self._last_step or trainer.fast_dev_run:
            return
        self._last_step = trainer.global_step
        with self.recorder.guard():
            # In every process, and always: a sharded strategy gathers here.
            state = _take(trainer, self.save_weights_only, may_be_spread=self.recorder.may_wait_for_ranks)
            if trainer.is_global_zero:
                self.recorder.save(state, trainer.global_step, trainer.callback_metrics)
            elif is_spread(state):
                self.recorder.save_beside(state, trainer.global_step)


def write_trainer_checkpoint(
    source: str | Run | None, path: str | os.PathLike[str], *, step: int | None = None, name: str = "checkpoint"
) -> str:
    """Write a logged checkpoint as a file of Lightning's Trainer.

    ``trainer.fit(module, ckpt_path=write_trainer_checkpoint(run_id, "last.ckpt"))`` resumes, and
    ``Module.load_from_checkpoint`` takes the file too.

    Args:
        source: The ``source`` of `load_checkpoint`.
        path: The file to write; an existing file is replaced.
        step: A step of the run; by default the highest.
        name: The series of checkpoints.

    Returns:
        ``path``.

    Raises:
        TensorCasError: As `load_checkpoint`.
    """
    torch.save(load_checkpoint(source, step=step, name=name), path)
    return os.fspath(path)


def logger_run(trainer: Any) -> str | None:
    """Return the id of the run of the Trainer's ``MLFlowLogger``, if it has one.

    Raises:
        ValueError: The logger has a tracking server of its own.
    """
    for logger in trainer.loggers:
        if any(cls.__name__ == "MLFlowLogger" for cls in type(logger).__mro__):
            theirs, ours = logger.experiment.tracking_uri, mlflow.get_tracking_uri()
            if theirs != ours:
                raise ValueError(
                    f"the Trainer's MLFlowLogger logs to {theirs!r}, and checkpoints would go to {ours!r}: "
                    "call mlflow.set_tracking_uri with the former, or name a run of the latter in run_id"
                )
            return str(logger.run_id)
    return None


def _take(trainer: Any, weights_only: bool, *, may_be_spread: bool) -> dict[str, Any]:
    strategy = trainer.strategy
    taken: dict[str, Any] = {}
    file_io, write = strategy.checkpoint_io, strategy.save_checkpoint

    def take(checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if is_spread(checkpoint):
            taken.update(checkpoint)
        else:
            write(checkpoint, path, storage_options)

    strategy.checkpoint_io = _TakenCheckpoint(taken)
    if may_be_spread:
        strategy.save_checkpoint = take
    try:
        trainer.save_checkpoint("checkpoint", weights_only)
    finally:
        strategy.checkpoint_io = file_io
        vars(strategy).pop("save_checkpoint", None)
    if not taken and trainer.is_global_zero:
        raise ValueError(
            f"{type(strategy).__name__} writes its checkpoints itself, so there is none to log: use a strategy with "
            "one full checkpoint, such as ddp, or one with checkpoints of torch.distributed.checkpoint"
        )
    if not is_spread(taken):
        return taken
    from tensorcas_mlflow.distributed import AsOne

    # Lightning reads its own parts only as they are, with their empty dicts.
    spread = {key for key, value in taken.items() if key in ("state_dict", "optimizer_states") or is_spread(value)}
    return {key: value if key in spread else AsOne(value) for key, value in taken.items()}


class _TakenCheckpoint:
    """Replacement for a ``CheckpointIO``; it keeps the checkpoint instead of writing a file."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self._state.update(checkpoint)
