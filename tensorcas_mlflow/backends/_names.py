"""Paths of artifacts and roots as paths of objects, without control characters."""

from __future__ import annotations

import re
from urllib.parse import unquote

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
