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
