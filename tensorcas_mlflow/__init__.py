"""A content-addressed checkpoint store for MLflow: a tensor that was stored before is not stored again.

Models are logged and loaded by ``mlflow.tensorcas``; `TensorCasStore` is the store without MLflow. Importing this
package imports nothing else: ``import mlflow`` does it for every user of a Python that has it installed.
"""

# Type checkers know this name. Both `from typing import TYPE_CHECKING` and `from __future__ import annotations` would
# import a module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tensorcas_mlflow.runs import TensorCasStore

__all__ = ["TensorCasStore", "__version__"]


def __getattr__(name: str) -> "Any":
    if name == "TensorCasStore":
        from tensorcas_mlflow.runs import TensorCasStore

        return TensorCasStore
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tensorcas_mlflow._release import release

    return release()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
