"""Checkpoints of a ``pytorch_lightning`` Trainer in the store.

trainer = Trainer(callbacks=[TensorCasCheckpoint(every_n_epochs=1)])
trainer.fit(module)
trainer.fit(module, ckpt_path=write_trainer_checkpoint(run_id, "last.ckpt"))  # later, in another process
"""

from __future__ import annotations

from pytorch_lightning.callbacks import Checkpoint

from tensorcas_mlflow.callbacks._lightning import CheckpointHooks, write_trainer_checkpoint

__all__ = ["TensorCasCheckpoint", "write_trainer_checkpoint"]


class TensorCasCheckpoint(CheckpointHooks, Checkpoint):  # noqa: D101 - it is taken over
    __doc__ = CheckpointHooks.__doc__
