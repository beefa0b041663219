"""The plain artifacts below a repository's root in an object store: each an object under its own name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow.entities.file_info import FileInfo

from tensorcas_mlflow.artifact_repo._names import is_store, is_visible_path
from tensorcas_mlflow.artifact_repo._plain import Remove
from tensorcas_mlflow.backends import STORE_FOLDER, ObjectInfo, Root, artifact_path, object_path, open_bucket

_FORMAT = f"{STORE_FOLDER}/format"


class ObjectTree:
    """Plain artifacts by their path below one root.

    There are no folders but those that hold something, and a name can be both a file and a folder, as everywhere in
    object stores. Names are kept as they are, except that ``%`` and control characters are percent-encoded.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._bucket = open_bucket(root, "")

    def find(self, path: str) -> Path | None:
        """No artifact here is a local file."""
        return None

    def fetch(self, path: str, out: Path) -> bool:
        """Write a plain file to a local one; False if there is none."""
        found = self._bucket.get(object_path(path)) if path and is_visible_path(path) else None
        if found is None:
            return False
        out.write_bytes(found[0])
        return True

    def is_file(self, path: str, file: Path) -> bool:
        """Tell whether an artifact path shows this very local file, which none does."""
        return False

    def has_folder(self, path: str) -> bool:
        """Tell whether anything lies below an artifact path."""
        return is_visible_path(path) and next(self._below(path), None) is not None

    def children(self, path: str) -> Iterator[FileInfo]:
        """List what a folder shows, in no order; nothing if there is no such folder."""
        if not is_visible_path(path):
            return
        objects, names = self._bucket.children(object_path(path))
        for name in names:
            if not is_store(name):
                yield FileInfo(_joined(path, artifact_path(name)), True, None)
        for info in objects:
            yield _file_info(info)

    def is_changing(self, path: str) -> bool:
        """Tell whether a file is being put in its place at this moment: here each is put there at once."""
        return False

    def walk(self, path: str) -> Iterator[FileInfo]:
        """List all files below a folder."""
        if is_visible_path(path):
            yield from map(_file_info, self._below(path))

    def is_empty(self) -> bool:
        """Tell whether nothing lies below the root, stores included."""
        return next(self._bucket.walk(""), None) is None

    def blocker(self, folder: str) -> str | None:
        """Name what keeps a folder from being written to: here nothing does."""
        return None

    def is_folder(self, path: str) -> bool:
        """Tell whether a folder keeps a file from being written at a path: here none does."""
        return False

    def make_folder(self, path: str) -> None:
        """Make a folder: here each comes and goes with what it holds."""

    def write(self, path: str, data: bytes, *, modified_ns: int | None = None) -> None:
        """Write a plain file whole, in place of the one there."""
        self._bucket.put(object_path(path), data)

    def has_file(self, path: str) -> bool:
        """Tell whether there is a plain file at a path."""
        return self._bucket.head(object_path(path)) is not None

    @contextmanager
    def replacing(self, path: str) -> Iterator[Remove]:
        """Look at the plain file at a path, and give what removes just that one; see `PlainTree.replacing`."""
        before = self._bucket.head(object_path(path))

        def remove(is_hidden: Callable[[], bool]) -> None:
            now = None if before is None else self._bucket.head(object_path(path))
            if before is not None and now is not None and now.token == before.token and is_hidden():
                self._bucket.delete(object_path(path))

        yield remove

    def stores_below(self, path: str) -> list[str]:
        """Find the folders at or below a path that are roots of stores, relative to this root."""
        found = (info.path for info in self._bucket.walk(object_path(path)))
        ending = re.compile(rf"(?:(.*)/)?{re.escape(_FORMAT)}")
        return [artifact_path(match[1] or "") for name in found if (match := ending.fullmatch(name))]

    def remove(self, path: str) -> None:
        """Remove what lies at a path, with all below it but stores; idempotent."""
        if not is_visible_path(path):
            return
        if path:
            self._bucket.delete(object_path(path))
        for info in self._below(path):
            self._bucket.delete(info.path)

    def _below(self, path: str) -> Iterator[ObjectInfo]:
        for info in self._bucket.walk(object_path(path)):
            if not any(map(is_store, info.path.split("/"))):
                yield info


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _file_info(info: ObjectInfo) -> FileInfo:
    return FileInfo(artifact_path(info.path), False, info.size)
