"""A content-addressed checkpoint store for MLflow: it stores each distinct tensor once.

```python
import tensorcas_mlflow as tensorcas

tensorcas.log_checkpoint({"model": model, "optimizer": optimizer}, step=step)
tensorcas.load_checkpoint(into={"model": model, "optimizer": optimizer})
```

``docs/api.md`` lists the names and the rules of the API. ``mlflow.tensorcas`` has the same objects. `TensorCasStore` is
the store without MLflow. Importing this package imports nothing else, since ``import mlflow`` imports it for every user
of a Python that has it installed; each name imports its module on first use.
"""

# Type checkers know this name. Both `from typing import TYPE_CHECKING` and `from __future__ import annotations` would
# import a module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from tensorcas_mlflow import errors
    from tensorcas_mlflow.callbacks import autolog
    from tensorcas_mlflow.integration.checkpoints import (
        CheckpointInfo,
        CheckpointRecord,
        Keep,
        delete_checkpoint,
        diff,
        export_checkpoint,
        import_checkpoint,
        lineage,
        list_checkpoints,
        load_checkpoint,
        log_checkpoint,
        log_table,
        open_checkpoint,
        plot_diff,
        plot_history,
        safe_open,
        wait,
    )
    from tensorcas_mlflow.integration.models import export_model, load_model, log_model, save_model
    from tensorcas_mlflow.reader import CheckpointReader, Naming
    from tensorcas_mlflow.tensorcas_store import TensorCasStore

    __version__: str

__all__ = [
    "CheckpointInfo",
    "CheckpointReader",
    "CheckpointRecord",
    "Keep",
    "Naming",
    "TensorCasStore",
    "__version__",
    "autolog",
    "delete_checkpoint",
    "diff",
    "errors",
    "export_checkpoint",
    "export_model",
    "import_checkpoint",
    "lineage",
    "list_checkpoints",
    "load_checkpoint",
    "load_model",
    "log_checkpoint",
    "log_model",
    "log_table",
    "open_checkpoint",
    "plot_diff",
    "plot_history",
    "safe_open",
    "save_model",
    "wait",
]


def _load(name: str) -> object:
    """Import the module of a public name and return the object.

    Raises:
        AttributeError: There is no such name.
    """
    module: object
    if name == "__version__":
        from tensorcas_mlflow.errors import release

        return release()
    if name == "errors":
        import tensorcas_mlflow.errors

        return tensorcas_mlflow.errors
    if name == "TensorCasStore":
        import tensorcas_mlflow.tensorcas_store as module
    elif name == "autolog":
        import tensorcas_mlflow.callbacks as module
    elif name in ("CheckpointReader", "Naming"):
        import tensorcas_mlflow.reader as module
    elif name in ("export_model", "load_model", "log_model", "save_model"):
        import tensorcas_mlflow.integration.models as module
    elif name in __all__:
        import tensorcas_mlflow.integration.checkpoints as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)


# A checker that saw this function would take any name for a public one.
if not TYPE_CHECKING:

    def __getattr__(name):
        value = _load(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
