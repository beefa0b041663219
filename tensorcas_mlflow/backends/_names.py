"""Paths of artifacts and roots as paths of objects, which hold no control characters."""

from __future__ import annotations

import re
from urllib.parse import unquote

_QUOTED = re.compile(r"[%\x00-\x1f\x7f]")


def object_path(path: str) -> str:
    """Write an artifact path as an object's: the same, except that ``%`` and control characters are percent-encoded."""
    return _QUOTED.sub(lambda match: f"%{ord(match[0]):02X}", path)


def artifact_path(path: str) -> str:
    """Read back what `object_path` wrote."""
    return unquote(path, errors="surrogateescape")


def is_readable_name(name: str) -> bool:
    """Tell whether an object's name is one that `object_path` gives to some artifact path that leads nowhere else.

    Others may have put anything into a bucket, such as what would read back as a path out of it.
    """
    path = artifact_path(name)
    return object_path(path) == name and not any(part in ("", ".", "..") or "\0" in part for part in path.split("/"))
