"""Model code on Python's search path. The package imports this module before anything else."""

from __future__ import annotations

import logging
import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

_logger = logging.getLogger(__name__)

_MLMODEL = "MLmodel"
_MOST_LISTED = 5


@contextmanager
def without_code_of_models() -> Iterator[None]:
    """Remove the code of models from Python's search path for the duration of a block.

    ``mlflow.pyfunc`` puts the code of a model before everything else, and then imports us.
    """
    kept = [entry for entry in sys.path if not _is_in_a_model(entry)]
    before = sys.path[:]
    sys.path[:] = kept
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in kept]
        sys.path[:] = before + added


def take_code(model: Path) -> list[str]:
    """Remove the code of one model from Python's search path, and return the removed entries."""
    found = [entry for entry in sys.path if Path(os.path.abspath(entry)).is_relative_to(model)]
    for entry in found:
        sys.path.remove(entry)
    return found


def add_code(folder: str) -> None:
    """Add the code of a model to Python's search path, for modules imported later.

    MLflow puts it first, so the logged version precedes the one in the working directory. Here it goes last if one of
    its modules has the name of an installed one; otherwise the next import by any code would find the model's.
    """
    if folder in sys.path or not os.path.isdir(folder):
        return
    installed = [entry for entry in sys.path if _is_installed(entry)]
    names = {entry.name.removesuffix(_suffix(entry.name)) for entry in os.scandir(folder)}
    taken = sorted(name for name in names if name.isidentifier() and _is_taken(name, installed))
    if taken:
        more = f" and {len(taken) - _MOST_LISTED} more" if len(taken) > _MOST_LISTED else ""
        _logger.warning(
            "the code logged with the model, in %r, has modules with the names of installed ones; Python imports the "
            "installed ones: %s%s. If the model needs its own, log it with modules of other names",
            folder,
            ", ".join(taken[:_MOST_LISTED]),
            more,
        )
    sys.path.insert(len(sys.path) if taken else 0, folder)


def _is_in_a_model(entry: str) -> bool:
    return any(os.path.isfile(os.path.join(above, _MLMODEL)) for above in Path(os.path.abspath(entry)).parents)


def _is_installed(entry: str) -> bool:
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(entry).parts):
        return True
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, site.getusersitepackages()}
    return any(Path(entry).is_relative_to(prefix) for prefix in prefixes)


def _is_taken(name: str, installed: list[str]) -> bool:
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    return PathFinder.find_spec(name, installed) is not None


def _suffix(name: str) -> str:
    return next((suffix for suffix in all_suffixes() if name.endswith(suffix)), "")
