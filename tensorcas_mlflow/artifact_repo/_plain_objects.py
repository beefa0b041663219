"""The plain artifacts below a repository's root in an object store: each an object under its own name."""

from __future__ import annotations

import mimetypes
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow.entities.file_info import FileInfo

from tensorcas_mlflow.artifact_repo._links import Links
from tensorcas_mlflow.artifact_repo._names import is_store, is_visible_path
from tensorcas_mlflow.artifact_repo._plain import Remove
from tensorcas_mlflow.backends import (
    STORE_FOLDER,
    ObjectInfo,
    Root,
    artifact_path,
    is_readable_name,
    is_void,
    is_void_object,
    new_void,
    object_path,
    open_bucket,
)

_FORMAT = f"{STORE_FOLDER}/format"


class ObjectTree:
    """Plain artifacts by their path below one root.

    There are no folders but those that hold something, and a name can be both a file and a folder, as everywhere in
    object stores. Names are kept as they are, except that ``%`` and control characters are percent-encoded; objects of
    names that no artifact path has are as if they were not there.

    Nobody can delete just the object that was looked at, and nothing written there since; but it can be replaced. So a
    plain file that a file in the store takes the place of becomes a void.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._bucket = open_bucket(root, "")
        self.links: Links | None = None

    def find(self, path: str) -> Path | None:
        """No artifact here is a local file."""
        return None

    def fetch(self, path: str, out: Path) -> bool:
        """Write a plain file to a local one; False if there is none."""
        found = self._bucket.stream(object_path(path)) if path and is_visible_path(path) else None
        if found is None or is_void_object(self._bucket, found[1]):
            return False
        with out.open("wb") as file:
            for piece in found[0]:
                file.write(piece)
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
            if not is_store(name) and is_readable_name(name):
                yield FileInfo(_joined(path, artifact_path(name)), True, None)
        for info in objects:
            if is_readable_name(info.path) and not is_void_object(self._bucket, info):
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
        # All that is plain is text, whatever else its name may mean.
        guessed, encoding = mimetypes.guess_type(posixpath.basename(path))
        content_type = guessed if guessed is not None and encoding is None else "text/plain"
        self._bucket.put(object_path(path), data, content_type=content_type)

    def has_file(self, path: str) -> bool:
        """Tell whether there is a plain file at a path."""
        info = self._bucket.head(object_path(path))
        return info is not None and not is_void_object(self._bucket, info)

    @contextmanager
    def replacing(self, path: str) -> Iterator[Remove]:
        """Look at the plain file at a path, and give what removes just that one; see `PlainTree.replacing`."""
        before = self._bucket.head(object_path(path))

        def remove(is_hidden: Callable[[], bool]) -> None:
            found = None if before is None else self._bucket.get(object_path(path))
            if before is None or found is None or found[1].token != before.token or is_void(found[0]):
                return
            if not is_hidden():
                return
            token = self._bucket.swap(object_path(path), new_void(), before.token)
            # Somebody may just have written the same text once more, which has the same token, and dropped the ref.
            if token is not None and not is_hidden():
                self._bucket.swap(object_path(path), found[0], token)

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
        for info in self._bucket.walk(object_path(path)):
            if _is_plain(info):
                self._bucket.delete(info.path)

    def _below(self, path: str) -> Iterator[ObjectInfo]:
        for info in self._bucket.walk(object_path(path)):
            if _is_plain(info) and is_readable_name(info.path) and not is_void_object(self._bucket, info):
                yield info


def _is_plain(info: ObjectInfo) -> bool:
    return not any(map(is_store, info.path.split("/")))


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _file_info(info: ObjectInfo) -> FileInfo:
    return FileInfo(artifact_path(info.path), False, info.size)
