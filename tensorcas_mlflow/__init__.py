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

import os as _os
import sys as _sys
from _thread import allocate_lock as _allocate_lock
from _thread import get_ident as _get_ident
from time import monotonic as _monotonic
from time import sleep as _sleep

# Type checkers know this name. Both `from typing import TYPE_CHECKING` and `from __future__ import annotations` would
# import a module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

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


_MOST_HELD_S = 30.0
_LOOKS_S = 0.001
_register = getattr(_os, "register_at_fork", None)
_turn = _allocate_lock()


def _imports_for_us(frame: "FrameType | None") -> bool:
    """Tell whether a thread is importing a module of ours, or any module for us, by its innermost frame."""
    is_importing = False
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__") or ""
        if name.startswith("tensorcas_") and (is_importing or code.co_name == "<module>"):
            return True
        if name == "importlib._bootstrap":
            is_importing = True
            if code.co_name == "_find_and_load" and str(frame.f_locals.get("name")).startswith("tensorcas_"):
                return True
        frame = frame.f_back
    return False


def _is_importing(me: int) -> bool:
    return any(_imports_for_us(frame) for thread, frame in _sys._current_frames().items() if thread != me)


def _hold_fork() -> None:
    """Hold a fork off while another thread imports for us: its locks of imports would stay locked in the child."""
    me = _get_ident()
    if not _is_importing(me):
        return
    # Hooks of modules imported later than this one have run. That of logging holds a lock that most modules ask for.
    lock = getattr(_sys.modules.get("logging"), "_lock", None)
    held = lock if lock is not None and lock._is_owned() else None
    if held is not None:
        held.release()
    late: list[Callable[[], object] | None] = []

    def register(*, before: "Callable[[], object] | None" = None, **others: "Callable[[], object]") -> None:
        assert _register is not None
        _register(before=before or (lambda: None), **others)
        late.append(before)

    assert _register is not None
    with _turn:
        # A module imported meanwhile registers hooks: those after this fork will run, so those before it must.
        _os.register_at_fork = register  # type: ignore[assignment]
        try:
            end_s = _monotonic() + _MOST_HELD_S
            while _is_importing(me) and _monotonic() < end_s:
                _sleep(_LOOKS_S)
        finally:
            _os.register_at_fork = _register
            for before in filter(None, late):
                before()
            if held is not None:
                held.acquire()


def _free_imports() -> None:
    """Let a child import what another thread began to import for us between `_hold_fork` and the fork."""
    global _turn
    assert _register is not None
    _turn, _os.register_at_fork = _allocate_lock(), _register  # another thread may have held a fork off
    locks = getattr(_sys.modules.get("_frozen_importlib"), "_module_locks", {})
    owners = {name: getattr(lock(), "owner", None) for name, lock in list(locks.items())}
    gone = {owner for name, owner in owners.items() if name.startswith("tensorcas_")} - {None, _get_ident()}
    for name, owner in owners.items():
        if owner in gone:
            locks.pop(name, None)
            if getattr(getattr(_sys.modules.get(name), "__spec__", None), "_initializing", False):
                del _sys.modules[name]


if _register is not None:
    _register(before=_hold_fork, after_in_child=_free_imports)
