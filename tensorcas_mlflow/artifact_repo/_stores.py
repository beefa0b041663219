"""Which store keeps what lies below a repository's root, and where one is made."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from tensorcas_mlflow import config
from tensorcas_mlflow._store_root import root_of, store_root_for
from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.artifact_repo._names import is_visible_path
from tensorcas_mlflow.artifact_repo._plain import PlainTree
from tensorcas_mlflow.artifact_repo._plain_objects import ObjectTree
from tensorcas_mlflow.backends import Root, open_backend
from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError
from tensorcas_mlflow.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A folder whose virtual files one store keeps."""

    store: Store
    in_store: str
    """The folder, relative to the store's root."""
    path: str
    """The folder, relative to the repository's root."""

    def child(self, path: str) -> str:
        """Give a path below the folder, relative to the store's root, relative to the repository's."""
        return posixpath.join(self.path, path.removeprefix(self.in_store).removeprefix("/"))


class StoreFinder:
    """Finds the stores at, above and below one artifact root."""

    def __init__(self, artifact_uri: str, root: Root, plain: PlainTree | ObjectTree) -> None:
        self._artifact_uri = artifact_uri
        self._root = root
        self._plain = plain

    def find(self, path: str) -> tuple[Store | None, str]:
        """Find the store that holds a path, and the path relative to that store's root; None if there is none.

        Raises:
            MlflowException: A server was sent to a folder that is none of its own, and something lies there.
        """
        folder = path
        if self._root.is_local:
            # Asked from the innermost folder there is: a link may lead into another store.
            folder = next((part for part in (path, *parents(path)) if self._plain.has_folder(part)), "")
        try:
            store, in_store = Store.find(self._root.joined(folder))
            return store, "/".join(filter(None, (in_store, path[len(folder) :].lstrip("/"))))
        except StoreNotFoundError:
            # A client may name any folder of the server's machine as an experiment's artifact location.
            if config.in_mlflow_server() and self.servers_folder() is None and not self._plain.is_empty():
                raise self._refusal() from None
            return None, ""

    def find_to_write(self, path: str, *, as_folder: bool = False) -> tuple[Store, str]:
        """Find the store for a path that is to become a file, or a folder; it is made if there is none.

        Raises:
            ValueError: The path is taken by the other kind, or one of the folders it lies in is a file.
        """
        store, in_store = self.find(path)
        if store is None:
            self._make()
            store, in_store = self.find(path)
            assert store is not None
        folder, in_folder = (path, in_store) if as_folder else (posixpath.dirname(path), posixpath.dirname(in_store))
        blocker = self._plain.blocker(folder) or next(
            (part for part in (in_folder, *parents(in_folder)) if has_ref(store, part)), None
        )
        if blocker is not None:
            raise ValueError(f"{path!r} cannot be written: {blocker!r} is not a folder")
        if not as_folder and (self._plain.is_folder(path) or any(store.artifacts(in_store))):
            raise ValueError(f"{path!r} cannot be written as a file: it is a folder")
        return store, in_store

    def holding(self, path: str) -> list[Held]:
        """Find the store that holds a path, or else the stores that lie below it."""
        if not is_visible_path(path):
            return []
        store, in_store = self.find(path)
        if store is not None:
            return [Held(store=store, in_store=in_store, path=path)]
        return [
            Held(store=Store.open(self._root.joined(folder)), in_store="", path=folder)
            for folder in self._plain.stores_below(path)
        ]

    def servers_folder(self) -> Root | None:
        """The artifact root of the server this process serves, if this root lies there."""
        for root in config.server_roots():
            with suppress(ValueError):
                folder = root_of(root)
                if folder.path_of(self._root) is not None:
                    return folder
        return None

    def _make(self) -> None:
        if not config.in_mlflow_server():
            Store.open(root_of(store_root_for(self._artifact_uri)), create=True)
            return
        place = self.servers_folder()
        if place is None:
            raise self._refusal()
        if not place.is_local:
            # In a bucket stores that were found are not looked for again, so there is never one around another.
            Store.open(place, create=True)
            return
        # Around stores that may lie in experiments' folders already; what is nearest counts.
        with suppress(ConflictError):
            Store.init_backend(open_backend(place))

    def _refusal(self) -> MlflowException:
        return MlflowException(
            f"This server does not touch {without_secrets(self._artifact_uri)!r}: "
            "there is no store at or above it, and it is not the "
            "server's own artifact destination. Make a store there with `tensorcas init`, or log to it without the "
            "server.",
            error_code=PERMISSION_DENIED,
        )


def has_ref(store: Store | None, in_store: str) -> bool:
    """Tell whether a store, if there is one, has a ref for a path."""
    return store is not None and in_store != "" and store.artifact(in_store) is not None


def parents(path: str) -> Iterator[str]:
    """The folders a path lies in, the innermost first; not the root."""
    while path := posixpath.dirname(path):
        yield path
