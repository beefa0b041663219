"""From a path or URI to a backend, and what lies above a root."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tensorcas_mlflow.backends._contract import Backend
from tensorcas_mlflow.backends._local import LocalBackend

SCHEME = "tensorcas"
STORE_FOLDER = ".tensorcas"


def local_path(root: str | os.PathLike[str]) -> Path:
    """Read a root as an absolute path: a plain path, or a ``file:`` or ``tensorcas:`` URI.

    Raises:
        ValueError: It is a URI of another kind, names a host, or has a query or fragment.
    """
    if not isinstance(root, str):
        return Path(os.path.abspath(root))
    parts = urlsplit(root)
    if parts.scheme in ("", "file") or len(parts.scheme) == 1:
        if parts.scheme != "file":
            return Path(os.path.abspath(root))
    elif parts.scheme != SCHEME:
        raise ValueError(f"no store can be kept at {root!r}: use a path or {SCHEME}:///absolute/path")
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ValueError(f"{root!r} must be {SCHEME}:///absolute/path, with no host, '?' or '#'")
    path = unquote(parts.path)
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"{root!r} must name an absolute path")
    # POSIX keeps two leading slashes apart from one, which would give one place two names.
    return Path(os.path.abspath("/" + path.lstrip("/")))


def root_uri(root: str | os.PathLike[str]) -> str:
    """Write a root as the one URI it is known by, ``tensorcas:///absolute/path``."""
    return f"{SCHEME}://{quote(local_path(root).as_posix())}"


def open_backend(root: str | os.PathLike[str]) -> Backend:
    """Open the storage of the store at an artifact root; touches nothing."""
    return LocalBackend(local_path(root) / STORE_FOLDER, uri=root_uri(root))
