"""Makes a Python process one in which this package was never installed.

Python imports a module of this name at its start, so every process with this folder on PYTHONPATH, and every child of
it, has neither our packages nor our entry points, however they are installed and wherever they lie.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from typing import Any

PACKAGES = ("tensorcas_mlflow", "tensorcas_flavors")
DISTRIBUTION = "tensorcas-mlflow"


class Hidden:
    """Stands before all other finders, and says of our packages that there are none."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


_discover = importlib.metadata.Distribution.discover


def discover(**kwargs: Any) -> Iterable[importlib.metadata.Distribution]:
    """Give all installed distributions but ours."""
    for distribution in _discover(**kwargs):
        if (distribution.metadata["Name"] or "").lower().replace("_", "-") != DISTRIBUTION:
            yield distribution


sys.meta_path.insert(0, Hidden)  # type: ignore[arg-type]
importlib.metadata.Distribution.discover = discover  # type: ignore[method-assign, assignment]
