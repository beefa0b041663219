"""The compiled core: hot loops over many chunks in one call, without the interpreter's lock.

| In | Out |
|---|---|
| buffers, and columns of numbers as arrays | buffers that the caller made, filled |

The extension module is built from ``src/``, and no other module imports it. It holds libzstd where the header of
libzstd was there; else `_frames` does what libzstd would, with the package `zstandard`.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["core"]

core: ModuleType
"""The extension module."""

try:
    from tensorcas_mlflow.native import _core

    core = _core
except ImportError as error:
    raise ImportError(
        f"tensorcas-mlflow has no compiled core for this Python ({error}): install a wheel for this machine, or a C "
        "compiler (Debian: gcc, libzstd-dev and python3-dev), and then the package once more"
    ) from error
