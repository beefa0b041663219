"""The places a copy goes between: a store that is made if need be, and the plain files beside one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tensorcas_mlflow.backends import STORE_FOLDER, LocalBackend, MemoryBackend, ObjectBackend, Root, open_bucket
from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.transfer._local_plain import LocalPlainFiles
from tensorcas_mlflow.transfer._object_plain import ObjectPlainFiles
from tensorcas_mlflow.transfer._plain import PlainFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One end of a copy."""

    store: Store
    plain: PlainFiles | None
    """What lies beside it; None where nobody can tell."""
    uri: str
    is_new: bool = False
    """Whether the store was made for the copy, or, where nothing is written, would be."""


def place_of(store: Store) -> Place:
    """Give the place of a store that is there."""
    return Place(store=store, plain=_plain_files_of(store), uri=store.uri)


def open_destination(
    root: str | os.PathLike[str], source: Store, *, new_id: bool = False, dry_run: bool = False
) -> Place:
    """Open the store at exactly this root, or make one with the source's chunk size.

    Args:
        root: Where.
        source: The store that is to be copied.
        new_id: Whether one that is made gets an id of its own. With the source's id, which it gets otherwise, every
            manifest stays byte for byte what it is, and so the copies of manifests that MLflow keeps belong to both.
        dry_run: Whether to make none: an empty one in memory stands for it.

    Raises:
        ConflictError: None can be made because there is one above or below.
        ValueError: The root is of a kind no store can be kept at.
    """
    try:
        return place_of(Store.open(root))
    except StoreNotFoundError:
        pass
    store_id = None if new_id else source.id
    if dry_run:
        stand_in = Store.init_backend(MemoryBackend(), chunk_bytes=source.chunk_bytes, store_id=store_id)
        place = Root.parse(root)
        return Place(store=stand_in, plain=_plain_files_at(place), uri=place.uri, is_new=True)
    try:
        made = Store.init(root, chunk_bytes=source.chunk_bytes, store_id=store_id)
    except ConflictError:
        try:
            return place_of(Store.open(root))  # somebody has made it just now
        except StoreNotFoundError:
            pass
        raise
    return Place(store=made, plain=_plain_files_of(made), uri=made.uri, is_new=True)


def _plain_files_of(store: Store) -> PlainFiles | None:
    backend = store.backend
    try:
        root = Root.parse(store.uri)
    except ValueError:
        return None
    is_beside = isinstance(backend, ObjectBackend) or (
        root.is_local and isinstance(backend, LocalBackend) and backend.root == root.folder / STORE_FOLDER
    )
    return _plain_files_at(root) if is_beside else None


def _plain_files_at(root: Root) -> PlainFiles:
    return LocalPlainFiles(root.folder) if root.is_local else ObjectPlainFiles(open_bucket(root, ""), root.uri)
