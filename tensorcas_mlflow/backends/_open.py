"""Opening of the backend at a root."""

from __future__ import annotations

from tensorcas_mlflow.backends._contract import Backend
from tensorcas_mlflow.backends._credentials import open_bucket
from tensorcas_mlflow.backends._local import LocalBackend
from tensorcas_mlflow.backends._objects import ObjectBackend
from tensorcas_mlflow.backends._root import Root

STORE_FOLDER = ".tensorcas"


def open_backend(root: Root) -> Backend:
    """Open the storage of the store at an artifact root; touch nothing.

    Raises:
        ValueError: A setting of an object store is wrong.
        RefusedError: obstore, needed for object stores, is not installed.
    """
    if root.is_local:
        return LocalBackend(root.folder / STORE_FOLDER, uri=root.uri)
    return ObjectBackend(open_bucket(root, STORE_FOLDER), uri=root.uri)
