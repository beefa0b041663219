"""The keys of refs (``docs/format.md``, Refs and intents)."""

from __future__ import annotations

import re
from urllib.parse import unquote

from tensorcas_mlflow.digest import digest

_PLAIN = re.compile(r"[A-Za-z0-9._=~-]*")
_MAX_SEGMENT = 180

ARTIFACTS = "refs/artifacts/"
"""Prefix of the keys of refs by artifact path."""

RUNS = "refs/runs/"
"""Prefix of the keys of refs of runs' steps."""

COPIES = "refs/copies/"
"""Prefix of the keys of refs of models with a copy of the manifest in MLflow."""

STAND_INS = "refs/replacing"
"""Key prefix of stand-ins: refs holding a save while it replaces another through a carrier."""


def quote_segment(text: str) -> str:
    """Encode any text as a segment of a key, reversibly unless it is long."""
    quoted = text
    if not _PLAIN.fullmatch(text):
        encoded = text.encode("utf-8", "surrogateescape")
        quoted = "".join(chr(c) if _PLAIN.fullmatch(chr(c)) else f"%{c:02X}" for c in encoded)
    if len(quoted) <= _MAX_SEGMENT and quoted not in ("", ".", "..") and not quoted.startswith("~"):
        return quoted
    return _hashed_segment(text)


def _hashed_segment(text: str) -> str:
    return "~" + digest(text.encode("utf-8", "surrogateescape")).hex()[:32]


def is_run_key(key: str, run_id: str, name: str | None, step: int | None) -> bool:
    """Tell whether a key is that of a run's step; a carrier writes quoted segments like long ones."""
    *folders, leaf = key.removeprefix(RUNS).split("/")
    texts = [run_id, *([] if name is None else [name])]
    return (
        leaf == f"@{step}"
        and len(folders) == len(texts)
        and all(
            segment in (quote_segment(text), _hashed_segment(text))
            for segment, text in zip(folders, texts, strict=True)
        )
    )


def run_prefix(run_id: str, name: str | None = None) -> str:
    """Return the key prefix of the refs of a run's steps, or of those of one name."""
    return "/".join([RUNS.rstrip("/"), quote_segment(run_id), *([] if name is None else [quote_segment(name)])])


def copies_prefix(place: str) -> str:
    """Return the key prefix of the refs of models with a copy of the manifest at a place in MLflow."""
    return COPIES + digest(place.encode()).hex()


def label_of(key: str) -> str | None:
    """Describe the ref at a key in words, like `Ref.label`, as far as the key shows it."""
    folders, _, leaf = key.rpartition("/@")
    texts = [unquote(segment, errors="replace") for segment in folders.split("/")[2:]]
    if key.startswith(RUNS) and 1 <= len(texts) <= 2:
        return f"run {' '.join(texts)} step {unquote(leaf, errors='replace')}"
    if key.startswith(ARTIFACTS):
        return "/".join([*texts, unquote(leaf, errors="replace")])
    return None


def artifact_prefix(directory: str) -> str:
    """Return the key prefix of the refs below an artifact directory."""
    return "/".join([ARTIFACTS.rstrip("/"), *map(quote_segment, path_segments(directory))])


def artifact_key(path: str) -> str:
    """Return the key of the ref of an artifact path."""
    *folders, leaf = path_segments(path)
    return ARTIFACTS + "/".join([*map(quote_segment, folders), "@" + quote_segment(leaf)])


def path_segments(path: str) -> list[str]:
    """Split an artifact path.

    Raises:
        ValueError: It is no artifact path.
    """
    if path == "":
        return []
    segments = path.split("/")
    if any(segment in ("", ".", "..") or "\0" in segment for segment in segments):
        raise ValueError(f"not an artifact path: {path[:200]!r}")
    return segments
