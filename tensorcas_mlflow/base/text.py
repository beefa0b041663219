"""Text: sizes and counts in words, URIs in place of paths, and what UTF-8 can encode."""

from __future__ import annotations

import re

from tensorcas_mlflow.errors import without_secrets

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_path(path: str) -> None:
    """Refuse a URI in place of a path of this machine: the file system would create a folder of that name.

    Raises:
        ValueError: It is a URI.
    """
    if _URI.match(path):
        raise ValueError(f"{without_secrets(path)!r} is a URI, and what is written goes to a path of this machine")


def is_unicode(text: str, errors: str = "strict") -> bool:
    """Tell whether a text has an encoding in UTF-8.

    Python reads a file name that is not UTF-8 as a text with surrogates, which has none.

    Args:
        text: The text.
        errors: Way to encode surrogates, as in `str.encode`; by default they have no encoding.
    """
    try:
        text.encode("utf-8", errors)
    except UnicodeEncodeError:
        return False
    return True


def size_text(n_bytes: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(n_bytes) < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def count_text(n: int, thing: str, things: str = "") -> str:
    """Format a number of things; the plural has an s at its end, or is given."""
    return f"{n} {thing}" if n == 1 else f"{n} {things or thing + 's'}"


def content_text(n: int) -> str:
    """Format a number of checkpoints and files."""
    return count_text(n, "checkpoint or file", "checkpoints and files")


def size_in(text: str) -> int:
    """Parse a number of bytes such as ``5GB`` or ``512MiB``; 0 if the text is no size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:([kKMGT])(i?)B?|B)?", text)
    if not match:
        return 0
    unit = " kMGT".index(match[2].lower() if match[2] in ("k", "K") else match[2]) if match[2] else 0
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * (1024 if match[3] else 1000) ** unit)


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_in(text: str) -> float | None:
    """Parse a duration such as ``90s``, ``30m``, ``24h`` or ``30d``, or ``0``; None if the text is no duration."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        return 0.0 if text == "0" else None
    return float(found[1]) * _SECONDS[found[2]]


def freed_text(bytes_before: int, bytes_after: int) -> str:
    """Say how many bytes of a store's files have been freed."""
    sizes = f"{size_text(bytes_before)} on disk before, {size_text(bytes_after)} now"
    if bytes_after > bytes_before:
        return f"freed nothing: the store grew by {size_text(bytes_after - bytes_before)} ({sizes})"
    return f"freed {size_text(bytes_before - bytes_after)} ({sizes})"
