"""Artifact paths: valid names, hidden names, and symbolic links."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlflow.utils.validation import bad_path_message, path_not_unique

from tensorcas_mlflow.backends import STORE_FOLDER, UPLOADING, is_visible, is_visible_path
from tensorcas_mlflow.base import config


def path_to_read(path: str | None) -> str:
    """Normalize a path for reading or deleting.

    Args:
        path: As passed by MLflow: None for the root, perhaps with slashes at the end or ``.`` in between.

    Returns:
        The path relative to the root in normal form; "" for the root.

    Raises:
        ValueError: The path leads out of the root, or holds a NUL.
    """
    if not path:
        return ""
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise ValueError(f"Invalid path: {path!r}")
    normal = posixpath.normpath(path)
    return "" if normal == "." else normal


def path_to_write(name: str, folder: str | None) -> str:
    """Return the path for a new artifact.

    Args:
        name: File name, or "" for the folder itself.
        folder: Artifact path of its folder, in the normal form MLflow demands; None or "" for the root.

    Raises:
        ValueError: The folder is not in normal form, or no artifact can have this path.
    """
    if folder and path_not_unique(folder):
        why = bad_path_message(folder)
        raise ValueError(f"Invalid path: {folder!r}. {why}")
    path = posixpath.join(folder or "", name) if name else folder or ""
    if path_to_read(path) != path:
        raise ValueError(f"Invalid path: {path!r}")
    check_upload(path)
    if not is_visible_path(path):
        raise ValueError(
            f"Invalid path: {path!r}. Artifact names starting with {UPLOADING!r} and folders called "
            f"{STORE_FOLDER!r} are reserved, and a name must be valid Unicode."
        )
    return path


def check_upload(path: str) -> None:
    """Refuse a name that an MLflow server has decoded with replacement: two names of a client would be one.

    Raises:
        ValueError: This is a server, and the name holds U+FFFD.
    """
    if "\ufffd" in path and config.in_mlflow_server():
        raise ValueError(f"Invalid path: {path!r}. The request names bytes that are not UTF-8: use another name.")


NOT_FOLLOWED = "leads out of the artifact root, to the folder of a store, or back to a folder around it"
"""The reason for not following a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The place of an artifact path once its links are followed."""

    path: str
    """The artifact path of that place, free of links; for a refused link, the path itself."""
    crossed: tuple[str, ...] = ()
    """The links on the way, each by its own link-free path."""
    refused: str | None = None
    """The link not followed, if any; see `NOT_FOLLOWED`."""


class FolderLinks:
    """The links below one local root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def follow(self, path: str) -> Followed:
        """Follow all links on the way to an artifact path and at its end. The path need not exist."""
        if not path or not is_visible_path(path) or not self._has_any(path):
            return Followed(path=path)
        place = ""
        crossed: tuple[str, ...] = ()
        for name in path.split("/"):
            step = posixpath.join(place, name)
            if not os.path.islink(self._root / step):
                place = step
                continue
            target = self._target(step, crossed)
            if target is None:
                return Followed(path=path, refused=step)
            place, crossed = target, (*crossed, step)
        return Followed(path=place, crossed=crossed)

    def in_folder(self, folder: Followed) -> Iterator[tuple[str, Followed]]:
        """List the followed links directly in a folder, by their own paths, with their targets."""
        try:
            with os.scandir(self._root / folder.path) as entries:
                names = [entry.name for entry in entries if entry.is_symlink() and is_visible(entry.name)]
        except OSError:  # missing folder, or deleted since
            return
        for name in names:
            link = posixpath.join(folder.path, name)
            target = self._target(link, folder.crossed)
            if target is not None:
                yield link, Followed(path=target, crossed=(*folder.crossed, link))

    def _has_any(self, path: str) -> bool:
        return os.path.realpath(self._root / path) != os.path.join(os.path.realpath(self._root), path)

    def _target(self, link: str, crossed: tuple[str, ...]) -> str | None:
        try:
            target = Path(os.path.realpath(self._root / link)).relative_to(os.path.realpath(self._root)).as_posix()
        except ValueError:
            return None
        target = "" if target == "." else target
        # A folder with a link already crossed would be listed within itself, forever.
        is_round = any(each == target or not target or each.startswith(f"{target}/") for each in (*crossed, link))
        return None if is_round or not is_visible_path(target) else target


def moved(path: str, old: str, new: str) -> str:
    """Move a path from below one folder to below another."""
    return posixpath.join(new, path.removeprefix(old).removeprefix("/")) if path != old else new
