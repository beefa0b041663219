"""Which artifact paths there can be, and which of them are nobody's to see."""

from __future__ import annotations

import posixpath

from mlflow.utils.validation import bad_path_message, path_not_unique

from tensorcas_mlflow.backends import STORE_FOLDER

UPLOADING = ".artifact.uploading."
"""How the name begins under which a plain file is written at first; MLflow's LocalArtifactRepository does the same, and
takes no artifact of such a name."""


def is_store(name: str) -> bool:
    """Tell whether a folder's entry of this name is, to some file system, a store. No artifact lies in one."""
    return name.casefold() == STORE_FOLDER


def is_visible(name: str) -> bool:
    """Tell whether a folder's entry of this name can be an artifact."""
    try:
        name.encode()
    except UnicodeEncodeError:  # a name that is no text cannot be told to a client, nor asked for by one
        return False
    return not is_store(name) and not name.startswith(UPLOADING)


def is_visible_path(path: str) -> bool:
    """Tell whether an artifact path leads through visible names only; the root's, "", does."""
    return all(map(is_visible, path.split("/")))


def path_to_read(path: str | None) -> str:
    """Bring a path that is to be read or deleted into its one form.

    Args:
        path: As MLflow hands it on: None for the root, perhaps with slashes at the end or ``.`` in between.

    Returns:
        The path relative to the root, without such; "" for the root.

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
    """Make the path of an artifact that is to be written.

    Args:
        name: File name, or "" for the folder itself.
        folder: Artifact path of its folder in normal form, as MLflow demands; None or "" for the root.

    Raises:
        ValueError: The folder is not in normal form, or no artifact can have this path.
    """
    if folder and path_not_unique(folder):
        why = bad_path_message(folder)
        raise ValueError(f"Invalid path: {folder!r}. {why}")
    path = posixpath.join(folder or "", name) if name else folder or ""
    if path_to_read(path) != path:
        raise ValueError(f"Invalid path: {path!r}")
    if not is_visible_path(path):
        raise ValueError(
            f"Invalid path: {path!r}. Artifact names starting with {UPLOADING!r} and folders called "
            f"{STORE_FOLDER!r} are reserved, and a name must be valid Unicode."
        )
    return path
