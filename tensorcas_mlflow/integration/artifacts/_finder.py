"""Search for the stores at, above and below an artifact root, and for a free place of a new artifact."""

from __future__ import annotations

import itertools
import posixpath
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from tensorcas_mlflow.backends import Children, PlainFiles, Root, is_visible_path, open_backend
from tensorcas_mlflow.base import config
from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError, without_secrets
from tensorcas_mlflow.integration._artifact_uri import root_of, store_root_for
from tensorcas_mlflow.layout import artifact_key, artifact_prefix
from tensorcas_mlflow.store import Store

_MOST_FOLDERS = 1 << 14
"""Bound of each set of folders that this process remembers of a store."""
_MOST_LISTED = 1000
"""Number of objects and folders that one request lists."""
_LISTING_S = 1.0
"""Time for which an upload relies on a listing."""
_NOTHING = Children({}, frozenset(), list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A folder with virtual files kept by one store."""

    store: Store
    in_store: str
    """The folder, relative to the store's root."""
    path: str
    """The folder, relative to the repository's root."""

    def child(self, path: str) -> str:
        """Convert a path below the folder from relative to the store's root to relative to the repository's."""
        return posixpath.join(self.path, path.removeprefix(self.in_store).removeprefix("/"))


class Checked:
    """Folders that one upload has looked at.

    They stay folders: this upload makes or fills them, and other uploads refuse to write a file there.
    """

    def __init__(self) -> None:
        self.folders: set[tuple[Store, str]] = set()
        """Stores and folders in them with no file at the folder or above it."""
        self._listings: dict[tuple[Store, str], tuple[float, Children]] = {}
        """Refs and folders directly in a folder of a store in a bucket, and the time of the listing."""

    def note(self, store: Store, folder: str, listing: Children, listed_s: float) -> None:
        """Take the listing of a folder as of a time. It serves a second: others may write there meanwhile."""
        self._listings[store, folder] = listed_s, listing

    def listed(self, store: Store, folder: str) -> tuple[float, Children] | None:
        """Return the listing of a folder and its time, if there is one that is not too old."""
        found = self._listings.get((store, folder))
        return found if found is not None and time.monotonic() - found[0] < _LISTING_S else None

    def listing(self, store: Store, folder: str) -> Children | None:
        """Return the listing of a folder, if there is one that is not too old."""
        found = self.listed(store, folder)
        return None if found is None else found[1]

    def forget_listings(self) -> None:
        """Forget all listings, so that the next call lists again."""
        self._listings.clear()

    def shows_ref(self, store: Store, in_store: str) -> bool | None:
        """Tell whether a path had a ref when its folder was listed; None if that is unknown."""
        listing = self.listing(store, posixpath.dirname(in_store))
        return None if listing is None else listing.blobs.get(_last(artifact_key(in_store)), False)

    def may_be_folder(self, store: Store, in_store: str) -> bool:
        """Tell whether a path may have had refs below it when its folder was listed."""
        listing = self.listing(store, posixpath.dirname(in_store))
        return listing is None or _last(artifact_prefix(in_store)) in listing.segments


class StoreFinder:
    """Finds the stores at, above and below one artifact root."""

    def __init__(self, artifact_uri: str, root: Root, plain: PlainFiles) -> None:
        self._artifact_uri = artifact_uri
        self._root = root
        self._plain = plain

    def find(self, path: str, *, is_file: bool = False) -> tuple[Store | None, str]:
        """Find the store for a path, and the path relative to its root; None if there is no store.

        Args:
            path: The path.
            is_file: Whether the path is no root of a store.

        Raises:
            MlflowException: A client sent this server to a folder outside its artifact root, and something lies there.
        """
        folder = posixpath.dirname(path) if is_file else path
        if self._root.is_local:
            # The search starts at the innermost existing folder, because a link may lead into another store.
            folder = next((part for part in (path, *parents(path)) if self._plain.has_folder(part)), "")
        try:
            store, in_store = Store.find(self._root.joined(folder))
            return store, "/".join(filter(None, (in_store, path[len(folder) :].lstrip("/"))))
        except StoreNotFoundError:
            # A client may name any folder of the server's machine as an experiment's artifact location.
            if config.in_mlflow_server() and self.servers_folder() is None and not self._plain.is_empty():
                raise self._refusal() from None
            return None, ""

    def find_to_write(self, path: str, checked: Checked, *, as_folder: bool = False) -> tuple[Store, str]:
        """Find the store for a new file or folder; create it if there is none.

        Args:
            path: The file or folder.
            checked: What this upload has seen; receives what this call sees.
            as_folder: Whether the path is to be a folder.

        Raises:
            ValueError: The other kind occupies the path, or one of its folders is a file.
        """
        store, in_store = self.find(path, is_file=not as_folder)
        if store is None:
            self._make()
            store, in_store = self.find(path, is_file=not as_folder)
            assert store is not None
        folder, in_folder = (path, in_store) if as_folder else (posixpath.dirname(path), posixpath.dirname(in_store))
        places = [(store, part) for part in (in_folder, *parents(in_folder))]
        # MLflow made the root a folder of artifacts. So in a bucket, where each look is a request, one look is enough.
        root = in_store[: len(in_store) - len(path)].rstrip("/")
        roots = {root, *parents(root)} if self._plain.calls_are_requests else set()
        doubtful = [
            part
            for _, part in itertools.takewhile(
                lambda place: place not in checked.folders and place[1] not in store.root_folders, places
            )
        ]
        if self._plain.calls_are_requests:
            doubtful = _list_around(store, in_folder, doubtful, checked)
        blocker = self._plain.blocker(folder) or next((part for part in doubtful if has_ref(store, part)), None)
        if blocker is not None:
            raise ValueError(f"{path!r} cannot be written: {blocker!r} is not a folder")
        checked.folders.update(places)
        if len(store.root_folders) > _MOST_FOLDERS:
            store.root_folders.clear()
        store.root_folders |= roots
        if not as_folder and (self._plain.is_folder(path) or self.is_folder(store, in_store, checked)):
            raise ValueError(f"{path!r} cannot be written as a file: it is a folder")
        return store, in_store

    def is_folder(self, store: Store, in_store: str, checked: Checked) -> bool:
        """Tell whether a store has refs below a path."""
        return checked.may_be_folder(store, in_store) and any(store.artifacts(in_store))

    def holding(self, path: str) -> list[Held]:
        """Find the store for a path, or else the stores below it."""
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
        """The artifact root of the server in this process, if this root lies there."""
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
            # In a bucket a found store is cached, so no later store can enclose it.
            Store.open(place, create=True)
            return
        # These roots may enclose stores in experiments' folders; the nearest store counts.
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


def _list_around(store: Store, folder: str, doubtful: list[str], checked: Checked) -> list[str]:
    """List a folder of a store in a bucket; mostly one request shows that it is no file, and what is in it.

    Args:
        store: The store.
        folder: The folder, relative to the store's root.
        doubtful: The folder and those above it, the innermost first, as far as they may be files.
        checked: Receives the listing of the folder.

    Returns:
        Those that may still be files.
    """
    if checked.listing(store, folder) is not None:
        return doubtful
    is_new = False
    seen: list[str] = []
    listed_s = time.monotonic()
    if doubtful and folder and folder not in store.filled_folders:
        # The folder is mostly new. One listing of the folder above shows both kinds, and often saves the other listing.
        parent = posixpath.dirname(folder)
        listed_s, beside = checked.listed(store, parent) or (listed_s, _listed(store, artifact_prefix(parent)))
        if beside is not None:
            seen = [folder] if _last(artifact_key(folder)) in beside.blobs else []
            doubtful = [*seen, *doubtful[1:]]
            is_new = _last(artifact_prefix(folder)) not in beside.segments
    prefix = artifact_prefix(folder)
    if is_new:
        checked.note(store, folder, _NOTHING, listed_s)
    elif prefix not in store.wide_folders:
        listed_s = time.monotonic()
        listing = store.backend.list_dir(prefix, most=_MOST_LISTED)
        if not listing.is_whole:
            store.wide_folders.add(prefix)
        else:
            checked.note(store, folder, listing, listed_s)
            if any(listing.blobs.values()):
                # Nobody writes a ref below a file, so all folders with this ref in them are folders.
                doubtful = seen
    if len(store.filled_folders) > _MOST_FOLDERS:
        store.filled_folders.clear()
    store.filled_folders.add(folder)
    return doubtful


def _listed(store: Store, prefix: str) -> Children | None:
    """List what may lie directly below a prefix of refs; None if that is known to take many requests."""
    if prefix in store.wide_folders:
        return None
    listing = store.backend.list_dir(prefix)
    if len(listing.blobs) + len(listing.segments) > _MOST_LISTED:
        store.wide_folders.add(prefix)
    return listing


def _last(key: str) -> str:
    return key.rpartition("/")[2]


def has_ref(store: Store | None, in_store: str) -> bool:
    """Tell whether a store, if there is one, has a ref for a path."""
    return store is not None and in_store != "" and store.artifact(in_store) is not None


def parents(path: str) -> Iterator[str]:
    """The folders a path lies in, the innermost first; not the root."""
    while path := posixpath.dirname(path):
        yield path
