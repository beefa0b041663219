"""Checkpoints of the training loops of frameworks: `autolog`, and a module with a callback for each framework.

Events of a training come in; calls of `tensorcas_mlflow.log_checkpoint` go out. `lightning`, `pytorch_lightning`,
`transformers`, `xgboost` and `sklearn` import the framework of their name; this package itself imports none. The room
imports the integration, and knows nothing of packs or manifests.
"""

from tensorcas_mlflow.callbacks._autolog import autolog

__all__ = ["autolog"]
