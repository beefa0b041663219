"""Roots: the locations of stores and artifacts, one value for paths and URIs."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from tensorcas_mlflow.base.text import is_unicode
from tensorcas_mlflow.errors import without_secrets

STORE_FOLDER = ".tensorcas"
"""Name of the folder of a store, below its root."""
UPLOADING = ".artifact.uploading."
"""Prefix of the names of partial files, of MLflow's as well as ours. No artifact has such a name."""

_QUOTED = re.compile(r"[%\x00-\x1f\x7f]")


def object_path(path: str) -> str:
    """Encode an artifact path as an object's: the same, with ``%`` and control characters percent-encoded."""
    return _QUOTED.sub(lambda match: f"%{ord(match[0]):02X}", path)


def artifact_path(path: str) -> str:
    """Decode a path encoded by `object_path`."""
    return unquote(path, errors="surrogateescape")


def is_readable_name(name: str) -> bool:
    """Tell whether an object's name is the encoding of an artifact path inside of the root.

    Other programs may put any name into a bucket, such as one that decodes to a path outside of it.
    """
    path = artifact_path(name)
    return object_path(path) == name and not any(part in ("", ".", "..") or "\0" in part for part in path.split("/"))


def is_store(name: str) -> bool:
    """Tell whether an entry of this name is, to some file system, a store's folder."""
    return name.casefold() == STORE_FOLDER


def is_visible(name: str) -> bool:
    """Tell whether an entry of this name can be an artifact, or a folder of artifacts."""
    # No client can ask for a name that is not UTF-8.
    return is_unicode(name) and not is_store(name) and not name.startswith(UPLOADING)


def is_visible_path(path: str) -> bool:
    """Tell whether an artifact path leads through visible names only; the root's, "", does."""
    return all(map(is_visible, path.split("/")))


SCHEME = "tensorcas"
"""The scheme of local folders."""
S3_SCHEME, GS_SCHEME, AZ_SCHEME = "tensorcas-s3", "tensorcas-gs", "tensorcas-az"
REMOTE_SCHEMES = (S3_SCHEME, GS_SCHEME, AZ_SCHEME)
"""The schemes of object stores."""
SCHEMES = (SCHEME, *REMOTE_SCHEMES)

_STARTS_OF_URIS = tuple(f"{scheme}:" for scheme in (*SCHEMES, "file"))
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


class Root(NamedTuple):
    """Location of a store, or of a place below one: a local folder, or a prefix in a bucket.

    Two roots of one place are equal, as far as names show: symbolic links are not followed.
    """

    scheme: str
    """One of `SCHEMES`."""
    container: str
    """The bucket or container; empty for a local folder."""
    path: str
    """Absolute, without a slash at its end, not quoted; ``/`` is the top of the file system or bucket."""

    @classmethod
    def parse(cls, root: str | os.PathLike[str] | Root) -> Root:
        """Parse a root: a plain path, a ``file:`` URI, or a URI of one of `SCHEMES`.

        Raises:
            ValueError: It is a URI of another kind, a local one with a host, a remote one without a bucket,
                one without an absolute path, or one with a query or fragment; or a name in it is not UTF-8.
        """
        if isinstance(root, Root):
            return root
        if not isinstance(root, str):
            return cls._local(root)
        # A relative path names another place after a change of the working directory. No URI does.
        is_fixed = os.path.isabs(root) or root.startswith(_STARTS_OF_URIS)
        return _parse_again(root) if is_fixed else cls._parse(root)

    @classmethod
    def _parse(cls, root: str) -> Root:
        try:
            parts = urlsplit(root)
        except ValueError as error:
            raise ValueError(f"{without_secrets(root)!r} is no URI: {error}") from error
        if parts.scheme == "" or len(parts.scheme) == 1:
            return cls._local(root)
        if parts.scheme in REMOTE_SCHEMES:
            return cls._remote(root)
        if parts.scheme not in (SCHEME, "file"):
            raise ValueError(
                f"no store can be kept at {without_secrets(root)!r}: "
                f"use a path, {SCHEME}:///absolute/path, {S3_SCHEME}://bucket/path, "
                f"{GS_SCHEME}://bucket/path or {AZ_SCHEME}://container/path"
            )
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError(f"{without_secrets(root)!r} must be {SCHEME}:///absolute/path, with no host, '?' or '#'")
        path = _unquoted(parts.path, root)
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"{without_secrets(root)!r} must name an absolute path: {SCHEME}:///absolute/path")
        # POSIX distinguishes two leading slashes from one, and this would give one place two names.
        return cls._local("/" + path.lstrip("/"))

    @classmethod
    def _local(cls, path: str | os.PathLike[str]) -> Root:
        path = Path(os.path.abspath(path)).as_posix()
        if not is_unicode(path):
            raise ValueError(f"the name of the folder {path!r} is not UTF-8, so no URI names it: rename it")
        return cls(SCHEME, "", path)

    @classmethod
    def _remote(cls, root: str) -> Root:
        parts = urlsplit(root)
        form = f"{parts.scheme}://{'container' if parts.scheme == AZ_SCHEME else 'bucket'}/path"
        if parts.query or parts.fragment:
            raise ValueError(f"{without_secrets(root)!r} must be {form}, with no '?' or '#'")
        if not _CONTAINER.fullmatch(parts.netloc):
            raise ValueError(f"{without_secrets(root)!r} must be {form}")
        path = _unquoted(parts.path, root).strip("/")
        segments = path.split("/") if path else []
        if any(segment in ("", ".", "..") or not segment.isprintable() for segment in segments):
            raise ValueError(
                f"{without_secrets(root)!r} must be {form}, with no empty, '.' or '..' part and no control character"
            )
        return cls(parts.scheme, parts.netloc, f"/{path}")

    def __str__(self) -> str:
        return self.uri

    @property
    def uri(self) -> str:
        """Its only URI."""
        return f"{self.scheme}://{self.container}{quote(self.path) if self.path != '/' or self.is_local else ''}"

    @property
    def is_local(self) -> bool:
        """True for a folder of this machine."""
        return self.scheme == SCHEME

    @property
    def folder(self) -> Path:
        """Return the local folder.

        Raises:
            ValueError: It is not local.
        """
        if not self.is_local:
            raise ValueError(f"{self.uri!r} is no local folder")
        return Path(self.path)

    @property
    def key(self) -> str:
        """Return the path in the form of objects' names, without a slash in front; empty for the top of a bucket."""
        return object_path(self.path.strip("/"))

    def parents(self) -> Iterator[Root]:
        """Yield its parents, the nearest first."""
        path = self.path
        while path != "/":
            path = posixpath.dirname(path)
            yield self._replace(path=path)

    def joined(self, path: str) -> Root:
        """Return the place at a relative path below this one."""
        return self._replace(path=posixpath.join(self.path, path)) if path else self

    def path_of(self, other: Root) -> str | None:
        """Return another place relative to this one, ``""`` for itself; None if it is not at or below it."""
        if (self.scheme, self.container) != (other.scheme, other.container):
            return None
        if other.path == self.path:
            return ""
        top = self.path if self.path == "/" else f"{self.path}/"
        return other.path.removeprefix(top) if other.path.startswith(top) else None


_NO_NAMES = frozenset(["", ".", ".."])


def _unquoted(path: str, uri: str) -> str:
    """Decode the path of a URI: two names that the file system would take for one folder are refused.

    Raises:
        ValueError: It encodes bytes that are not UTF-8, or a part that is no name.
    """
    try:
        decoded = unquote(path, errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{without_secrets(uri)!r} percent-encodes bytes that are not UTF-8 (%{error.object[error.start]:02X}): "
            "use a folder with another name"
        ) from error
    if any(part not in _NO_NAMES and _NO_NAMES.intersection(unquote(part).split("/")) for part in path.split("/")):
        raise ValueError(
            f"{without_secrets(uri)!r} percent-encodes a '.' or a '/' where a name must be: write the path plainly"
        )
    return decoded


# Every checkpoint of a series asks for the store around the same folder.
@lru_cache(maxsize=1024)
def _parse_again(root: str) -> Root:
    return Root._parse(root)


def is_ours(uri: str) -> bool:
    """Tell whether a URI has one of `SCHEMES`."""
    return urlsplit(uri).scheme in SCHEMES
