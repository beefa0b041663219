"""The running release of this package."""

from __future__ import annotations


def release() -> str:
    """Return the installed version of the package; ``0+unknown`` for a checkout that was never installed."""
    # The import is slow, and `import mlflow` must not pay for it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensorcas-mlflow")
    except PackageNotFoundError:
        return "0+unknown"
