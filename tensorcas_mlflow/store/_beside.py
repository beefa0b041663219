"""Folder of artifacts in which one stored file may describe another, which is still arriving."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from typing import Protocol

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.errors import FormatError, NotFoundError
from tensorcas_mlflow.file_formats import Description, Folder, MemorySource
from tensorcas_mlflow.layout import Ref, artifact_prefix, list_dir, unquote_segment

_MAX_BYTES = 64 << 20
"""Largest description that is read: it is held in memory while it is parsed."""


class ArtifactStore(Protocol):
    """The parts of an open store needed to read its artifacts."""

    backend: Backend
    id: str

    def artifact(self, path: str) -> Ref | None:
        """Read the ref of an artifact; see `Store.artifact`."""

    def iter_file(self, ref: Ref) -> Iterable[Buffer]:
        """Read a file; see `Store.iter_file`."""


class StoredFolder(Folder):
    """A folder of a store's artifacts."""

    def __init__(self, store: ArtifactStore, path: str) -> None:
        """Name a folder; nothing is read yet.

        Args:
            store: The store.
            path: The folder's path, relative to the store's root.
        """
        self._store = store
        self._path = path

    def names(self, suffix: str) -> list[str]:
        # Names too long for a key are not recognised, and then their files describe nothing.
        blobs, _ = list_dir(self._store.backend, artifact_prefix(self._path))
        segments = (info.key.rpartition("/")[2] for info in blobs)
        found = (unquote_segment(segment[1:]) for segment in segments if segment.startswith("@"))
        return sorted(name for name in found if name.endswith(suffix))

    def find(self, name: str) -> Description:
        path = posixpath.join(self._path, name)
        ref = self._store.artifact(path)
        if ref is None:
            raise NotFoundError(f"there is no artifact {path!r}")
        if ref.n_bytes > _MAX_BYTES:
            raise FormatError(f"{path!r} is too large to be read as a description")
        return Description(name, (self._store.id, ref.manifest), lambda: self._read(ref, name))

    def _read(self, ref: Ref, name: str) -> MemorySource:
        return MemorySource(name, b"".join(self._store.iter_file(ref)))
