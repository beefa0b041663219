"""How the flavor names and opens stores."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri

from tensorcas_mlflow._store_root import SCHEME
from tensorcas_mlflow.errors import StoreNotFoundError
from tensorcas_mlflow.store import Store


def as_lookup(uri: str) -> str | None:
    """Give a local path or ``tensorcas:`` URI in the form in which a store is looked up; None for other URIs."""
    if is_ours(uri):
        return uri
    if is_local_uri(uri, is_tracking_or_registry_uri=False):
        return str(Path(local_file_uri_to_path(uri)).absolute())
    return None


def is_ours(uri: str) -> bool:
    """Tell whether our artifact repository serves a URI."""
    return urlsplit(uri).scheme == SCHEME


def open_root(uri: str, *, create: bool = False) -> Store:
    """Open the store at exactly this root, or the one this process has open.

    Raises:
        StoreNotFoundError: There is none, and ``create`` is False.
    """
    try:
        store, below = Store.find(uri)
        if below == "":
            return store
    except StoreNotFoundError:
        pass
    # A store that stays open has its index at hand, so the one just made is found again.
    return Store.find(Store.open(uri, create=create).uri)[0]
