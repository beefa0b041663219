"""Checkpoints logged by the training loops of others: `autolog`, and one module a framework with a callback to add.

`lightning`, `pytorch_lightning`, `transformers`, `xgboost` and `sklearn` import the framework they are named after, so
import the one you use. This package itself imports none.
"""

from tensorcas_mlflow.callbacks._autolog import autolog

__all__ = ["autolog"]
