"""How a server of ours says that it keeps its artifacts in a store of its own."""

from __future__ import annotations

import posixpath

from mlflow.entities import FileInfo

from tensorcas_mlflow.backends import STORE_FOLDER

SERVED_BY = "served-by-tensorcas"
"""Name of the one file, of no bytes, that a server's listing of any folder ``.tensorcas`` shows. It is never there."""


def announcement(folder: str) -> FileInfo | None:
    """Give the entry that says so, for the listing of a folder that is a ``.tensorcas``; None for any other."""
    if posixpath.basename(folder) != STORE_FOLDER:
        return None
    return FileInfo(posixpath.join(folder, SERVED_BY), False, 0)
