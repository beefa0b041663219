"""Checkpoints of a ``pytorch_lightning`` Trainer in the store.

trainer = Trainer(callbacks=[TensorCasCheckpoint(every_n_epochs=1)])
trainer.fit(module)
trainer.fit(module, ckpt_path=export_checkpoint("last.ckpt", run_id))  # later, in another process
"""

from __future__ import annotations

from pytorch_lightning.callbacks import Checkpoint

from tensorcas_mlflow.callbacks._lightning import CheckpointHooks, export_checkpoint

__all__ = ["TensorCasCheckpoint", "export_checkpoint"]


class TensorCasCheckpoint(CheckpointHooks, Checkpoint):  # noqa: D101 - it is taken over
    __doc__ = CheckpointHooks.__doc__
