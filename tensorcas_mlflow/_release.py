"""Which release of this package is running."""

from __future__ import annotations


def release() -> str:
    """Give the version of the package as it is installed; ``0+unknown`` for a checkout that was not."""
    # The import takes time that `import mlflow` must not take.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensorcas-mlflow")
    except PackageNotFoundError:
        return "0+unknown"
