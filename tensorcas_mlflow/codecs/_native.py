"""The compiled loops, where the package was built with a compiler."""

from __future__ import annotations

from types import ModuleType

KERNELS: ModuleType | None
"""`_kernels`, or None: then numpy does the same, more slowly."""

try:
    from tensorcas_mlflow.codecs import _kernels

    KERNELS = _kernels
except ImportError:
    KERNELS = None
