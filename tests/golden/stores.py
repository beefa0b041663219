"""Copies of golden stores, for tests to open."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tensorcas_mlflow.store import Store
from tests.golden import bucket

HERE = Path(__file__).parent


def copied(folder: str, kind: str, to: Path) -> Store:
    """Copy one of the golden stores of a folder and open it.

    Args:
        folder: Folder beside this module.
        kind: Store in it; ``objects`` is opened as a bucket.
        to: Where to copy a store of files.
    """
    if kind == "objects":
        return Store.open_backend(bucket.opened(bucket.filled(HERE / folder / "objects")))
    shutil.copytree(HERE / folder / kind, to / kind)
    # As old as they would be if this release had come in the middle: a checkout may have any time.
    for path in (to / kind / ".tensorcas").rglob("*"):
        os.utime(path)
    return Store.open(to / kind)
