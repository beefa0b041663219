"""The compiled core: hot loops over many chunks in one call, without the interpreter's lock.

| In | Out |
|---|---|
| buffers, and columns of numbers as arrays | buffers that the caller made, filled |

The extension module is built from ``src/``. A package that was installed without a compiler has none; then the Python
code of the rooms above does the same, more slowly. Only DEFLATE streams need the core. `core` says which is the case,
and no other module imports the extension.
"""

from __future__ import annotations

import os
from types import ModuleType

__all__ = ["core", "has_zstd"]

core: ModuleType | None
"""The extension module; None if it was not built, or if TENSORCAS_NATIVE is ``0``."""

try:
    # `base.config`, which reads all other variables, lies above this room.
    if os.environ.get("TENSORCAS_NATIVE") == "0":
        raise ImportError("TENSORCAS_NATIVE is 0")
    from tensorcas_mlflow.native import _core

    core = _core
except ImportError:
    core = None

has_zstd = core is not None and bool(core.ZSTD_VERSION)
"""True if the core was built with libzstd, so that it encodes and decodes chunks."""
