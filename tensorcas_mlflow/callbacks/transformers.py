"""Checkpoints of a Hugging Face Trainer in the store.

trainer = Trainer(model, args, callbacks=[TensorCasCallback(every_n_steps=100)], ...)
trainer.train()
trainer.train(resume_from_checkpoint=write_trainer_checkpoint(run_id, "resume"))  # later, in another process
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import transformers
from mlflow.entities import Run

from tensorcas_mlflow.callbacks._common import CallbackOptions, Recorder, is_spread, positive
from tensorcas_mlflow.integration.checkpoints import load_checkpoint

__all__ = ["TensorCasCallback", "write_trainer_checkpoint"]


class TensorCasCallback(transformers.TrainerCallback):
    """Logs the training state every few steps or epochs, or whenever the Trainer saves.

    A checkpoint holds the state dicts of the model (``model``), the optimizer (``optimizer``) and the scheduler
    (``scheduler``), the states of the random number generators (``rng``), and the Trainer's own state as JSON
    (``trainer_state``). The step is ``state.global_step``. The last step of a training is always logged, unless
    ``load_best_model_at_end`` has replaced its weights by then.

    With ``every_n_steps`` or ``every_n_epochs`` a step is logged after all its work, evaluation included: just before
    the next step begins, or when training ends. Without them, a step is logged after each of the Trainer's own saves;
    use this to have files as well. A resumed training continues exactly, either way.

    The run is ``run_id``, else the run active when training begins (``MLflowCallback`` starts one), else a new one,
    which ends with the training. In a distributed training the main process logs. If the model is spread over the
    ranks (FSDP, or a model loaded with a ``DistributedConfig``), each rank stores its part, and the call blocks;
    the checkpoint has the states of the random number generators of all ranks (``rng_of_ranks``). Errors are raised.

    The scaler of fp16 training and the states of other callbacks between the Trainer's own saves are not logged.

    Args:
        every_n_steps: Log when ``state.global_step`` is a multiple of this.
        every_n_epochs: Log at the end of every n-th epoch. With neither: when the Trainer saves.
        options: ``name``, ``run_id``, ``keep``, ``blocking``, ``overwrite``, ``log_metrics`` and ``policy``; see
            `CallbackOptions`. A metric of the rule ``keep`` may be any logged by the Trainer, such as ``eval_loss``; it
            is logged at the step.

    Raises:
        ValueError: An interval is less than 1, or there is no such policy.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        **options: Unpack[CallbackOptions],
    ) -> None:
        super().__init__()
        self.every_n_steps = positive(every_n_steps, "every_n_steps")
        self.every_n_epochs = positive(every_n_epochs, "every_n_epochs")
        self.recorder = Recorder(**options)
        self._last_step = 0  # no step was taken, nothing to log
        self._is_due = False
        self._is_spread = False
        self._is_refused = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._last_step = state.global_step
        self._is_due = False
        self._is_spread = parts.get("model") is not None and is_spread(parts["model"])
        is_lost = bool(args.deepspeed or args.fsdp) and not self._is_spread
        self._is_refused = is_lost or (self._is_spread and not self.recorder.may_wait_for_ranks)
        with self.recorder.guard():
            if self._is_refused:
                raise ValueError(
                    "the training lies in many processes, in a form that no callback logs (DeepSpeed, FSDP of XLA), or "
                    "that autologging does not log: pass a TensorCasCallback, or log checkpoints yourself"
                )
            if state.is_world_process_zero:
                self.recorder.begin()
                self.recorder.start_step = state.global_step
                if not self._has_interval and args.save_strategy == "no":
                    self.recorder.advise(
                        "the Trainer saves nothing (save_strategy='no'), so only the last step of the training is "
                        "logged: pass every_n_steps=… to log more steps (TensorCasCallback also takes every_n_epochs=…)"
                    )

    @property
    def _has_interval(self) -> bool:
        return self.every_n_steps is not None or self.every_n_epochs is not None

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        # In a second training of one Trainer, MLflowCallback has no run before it logs, and none at the training's end.
        if state.is_world_process_zero and not self._is_refused:
            with self.recorder.guard():
                self.recorder.join_active_run()

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if not self._has_interval:
            self._save(state, parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        is_last = self._has_interval and state.global_step >= state.max_steps
        if is_last or (self.every_n_steps is not None and state.global_step % self.every_n_steps == 0):
            self._is_due = True

    # An evaluation after the step advances the random number generators, and a resumed training does not repeat it. At
    # the start of the next step or epoch their state is the one the Trainer sets when it resumes.
    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._is_due:
            self._save(state, parts)

    on_epoch_begin = on_step_begin

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        n_epochs = round(state.epoch)
        is_whole = abs(state.epoch - n_epochs) < 1e-6  # a training may be stopped within an epoch
        if self.every_n_epochs is not None and is_whole and n_epochs % self.every_n_epochs == 0:
            self._is_due = True
        # There is no next step, and the best model's weights replace these before training ends. An evaluation of the
        # epoch is still to come; `on_train_end` logs its metrics.
        is_over = control.should_training_stop or state.global_step >= state.max_steps
        if self._is_due and is_over and args.load_best_model_at_end:
            self._save(state, parts)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if not args.load_best_model_at_end:
            self._save(state, parts)
        with self.recorder.guard():
            if self.recorder.last_step == state.global_step:
                self.recorder.rate(state.global_step, _known(state))
        with self.recorder.guard():
            self.recorder.finish()

    def _save(self, state: Any, parts: dict[str, Any]) -> None:
        self._is_due = False
        is_idle = not (state.is_world_process_zero or self._is_spread)
        if state.global_step == self._last_step or is_idle or self._is_refused:
            return
        self._last_step = state.global_step
        with self.recorder.guard():
            made = _spread_state(state, parts) if self._is_spread else _training_state(state, parts)
            if state.is_world_process_zero:
                self.recorder.save(made, state.global_step, _known(state))
            else:
                self.recorder.save_beside(made, state.global_step)


def write_trainer_checkpoint(
    source: str | Run | None, path: str | os.PathLike[str], *, step: int | None = None, name: str = "checkpoint"
) -> str:
    """Write a logged checkpoint as a folder for ``trainer.train(resume_from_checkpoint=…)``.

    Args:
        source: The ``source`` of `load_checkpoint`.
        path: The parent for the folder ``checkpoint-<step>``; existing files in that folder are replaced.
        step: A step of the run; by default the highest.
        name: The series of checkpoints.

    Returns:
        Path of the folder ``checkpoint-<step>``.

    Raises:
        TensorCasError: As `load_checkpoint`.
    """
    state = load_checkpoint(source, step=step, name=name)
    target = Path(path) / f"checkpoint-{json.loads(state['trainer_state'])['global_step']}"
    target.mkdir(parents=True, exist_ok=True)
    if "rng_of_ranks" in state:
        _write_for_ranks(state, target)
    else:
        # The Trainer would read a newer format first.
        (target / "model.safetensors").unlink(missing_ok=True)
        torch.save(state["model"], target / "pytorch_model.bin")
        torch.save(state["optimizer"], target / "optimizer.pt")
        torch.save(_as_trainer_has_it(state["rng"]), target / "rng_state.pth")
    torch.save(state["scheduler"], target / "scheduler.pt")
    (target / "trainer_state.json").write_text(state["trainer_state"], encoding="utf-8")
    return str(target)


def _write_for_ranks(state: dict[str, Any], target: Path) -> None:
    """Write the folders that Accelerate reads for ``SHARDED_STATE_DICT``, in any number of ranks."""
    from torch.distributed.checkpoint.state_dict_saver import save

    for kind, folder in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        save({kind: state[kind]}, checkpoint_id=target / folder, no_dist=True)
    for rank, rng in enumerate(state["rng_of_ranks"]):
        torch.save(_as_trainer_has_it(rng), target / f"rng_state_{rank}.pth")


def _known(state: Any) -> dict[str, Any]:
    """Return the Trainer's logged metrics of its current step."""
    return {name: value for log in state.log_history if log["step"] == state.global_step for name, value in log.items()}


def _training_state(state: Any, parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": parts["model"].state_dict(),
        "optimizer": parts["optimizer"].state_dict(),
        "scheduler": parts["lr_scheduler"].state_dict(),
        "rng": _rng_state(),
        "trainer_state": json.dumps(asdict(state), sort_keys=True),
    }


def _spread_state(state: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a training; all ranks make the call."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from tensorcas_mlflow.distributed import AsOne

    rng_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rng_of_ranks, _rng_state())
    model, optimizer = get_state_dict(parts["model"], getattr(parts["optimizer"], "optimizer", parts["optimizer"]))
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": AsOne(parts["lr_scheduler"].state_dict()),
        "rng_of_ranks": AsOne(rng_of_ranks),
        "trainer_state": json.dumps(asdict(state), sort_keys=True),
    }


def _rng_state() -> dict[str, Any]:
    version, words, gauss_next = random.getstate()
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the Trainer's own
    state = {
        # As tensors: they are stored once as long as these generators are unused.
        "python": {"version": version, "words": torch.tensor(words), "gauss_next": gauss_next},
        "numpy": {
            "algorithm": algorithm,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _as_trainer_has_it(rng: dict[str, Any]) -> dict[str, Any]:
    python, numpy = rng["python"], rng["numpy"]
    return {
        **rng,
        "python": (python["version"], tuple(python["words"].tolist()), python["gauss_next"]),
        "numpy": (
            numpy["algorithm"],
            numpy["keys"].numpy().astype(np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached"],
        ),
    }
