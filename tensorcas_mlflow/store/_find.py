"""Lookup of the store around a place: the nearest at it or above; found stores stay open."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import STORE_FOLDER, Root, open_bucket
from tensorcas_mlflow.errors import ConflictError, ForbiddenError, StoreNotFoundError
from tensorcas_mlflow.store._format import FORMAT, Stamp, stamp_of
from tensorcas_mlflow.threads import Lock

if TYPE_CHECKING:
    from tensorcas_mlflow.store._store import Store

_LOOK_AGAIN_S = 60.0
"""After this long a remote store is checked again: somebody may have replaced it."""
_MOST_LISTED = 20_000
"""Maximum number of objects searched for stores below a remote place; a bucket may hold any number."""


class OpenStores:
    """The stores found by this process."""

    def __init__(self, open_at: Callable[[Root], Store]) -> None:
        self._open_at = open_at
        self._local: dict[str, tuple[Stamp, Store]] = {}
        self._remote: dict[Root, tuple[float, Store]] = {}
        self._lock = Lock()

    def find(self, place: Root) -> tuple[Store, str]:
        """Find the nearest store at a place or above; see `Store.find`."""
        return self._find_local(place) if place.is_local else self._find_remote(place)

    def _find_local(self, place: Root) -> tuple[Store, str]:
        root = path = place.path
        # Text and one `stat` a folder: every artifact path and every checkpoint needs this walk.
        while (stamp := stamp_of(root)) is None:
            root, below = os.path.dirname(root), root
            if root == below:
                raise StoreNotFoundError(place.uri)
        with self._lock:
            known, store = self._local.get(root, (None, None))
            if store is None or known != stamp:
                store = self._open_at(Root.parse(Path(root)))
                self._local[root] = stamp, store
        return store, path[len(root) :].lstrip(os.sep).replace(os.sep, "/")

    def _find_remote(self, place: Root) -> tuple[Store, str]:
        candidates = [place, *place.parents()]
        since = time.monotonic() - _LOOK_AGAIN_S
        with self._lock:
            # Stores are never nested, so a known one is the nearest.
            for root in candidates:
                seen_s, store = self._remote.get(root, (since, None))
                if store is not None and seen_s > since:
                    return store, root.path_of(place) or ""
        found: dict[Root, Store] = {}
        refused: list[ForbiddenError] = []

        def look(root: Root) -> None:
            try:
                found[root] = self._open_at(root)
            except StoreNotFoundError:
                pass
            except ForbiddenError as error:
                # A user with access to a part of a bucket may not read above it.
                if root == place:
                    refused.append(error)

        threads.run_all(look, candidates, waits=True)
        for root in candidates:
            if root in found:
                return self._keep(root, found[root]), root.path_of(place) or ""
        if refused:
            raise refused[0]
        raise StoreNotFoundError(place.uri)

    def _keep(self, root: Root, store: Store) -> Store:
        """Keep a store open; prefer one that is open already and has its index in memory."""
        with self._lock:
            _, known = self._remote.get(root, (0.0, None))
            if known is not None and known.id == store.id:
                store = known
            self._remote[root] = time.monotonic(), store
        return store


def check_free(place: Root) -> None:
    """Check that no store lies above or below a place.

    Raises:
        ConflictError: One does.
    """
    for above in _stores_above(place):
        raise ConflictError(f"{place.uri!r} lies inside the store at {above.uri!r}: use that one")
    for below in islice(stores_below(place), 1):
        raise ConflictError(f"{place.uri!r} lies above the store at {below.uri!r}: use that one, or another root")


def _stores_above(place: Root) -> list[Root]:
    if place.is_local:
        return [root for root in place.parents() if (root.folder / STORE_FOLDER / FORMAT).is_file()]
    found: list[Root] = []

    def look(root: Root) -> None:
        try:
            if open_bucket(root, STORE_FOLDER).head(FORMAT) is not None:
                found.append(root)
        except ForbiddenError:
            pass

    threads.run_all(look, list(place.parents()), waits=True)
    return found


def stores_below(place: Root, *, most_folders: int | None = None) -> Iterator[Root]:
    """Find the stores below a place.

    Args:
        place: A local folder, or a prefix in a bucket; of a bucket only a bounded number of objects is searched.
        most_folders: Maximum number of local folders to search; all by default.
    """
    if place.is_local:
        for folder, folders, _ in islice(os.walk(place.folder), most_folders):
            folders.sort()
            if STORE_FOLDER in folders and Path(folder) != place.folder:
                yield Root.parse(Path(folder))
                folders.clear()  # stores are never nested
            elif STORE_FOLDER in folders:
                folders.remove(STORE_FOLDER)
        return
    ending = f"/{STORE_FOLDER}/{FORMAT}"
    for info in islice(open_bucket(place, "").walk(""), _MOST_LISTED):
        if info.path.endswith(ending):
            yield place.joined(info.path.removesuffix(ending))
