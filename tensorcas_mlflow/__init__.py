"""A content-addressed checkpoint store for MLflow: a tensor that was stored before is not stored again.

Models are logged and loaded by ``mlflow.tensorcas``; `tensorcas_mlflow.store` is the store without MLflow. Importing
this package imports nothing else: ``import mlflow`` does it for every user of a Python that has it installed.
"""

from __future__ import annotations

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensorcas-mlflow")
    except PackageNotFoundError:
        return "0+unknown"  # a checkout that was not installed


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
