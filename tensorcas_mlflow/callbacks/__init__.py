"""Checkpoints of the training loops of frameworks: `autolog`, and a module with a callback for each framework.

`lightning`, `pytorch_lightning`, `transformers`, `xgboost` and `sklearn` import the framework of their name; this
package itself imports none.
"""

from tensorcas_mlflow.callbacks._autolog import autolog

__all__ = ["autolog"]
