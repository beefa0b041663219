"""The ``format`` blob: a store's id and settings (``docs/format.md``, ``format``)."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import uuid
from typing import Any

from tensorcas_mlflow.backends import STORE_FOLDER
from tensorcas_mlflow.chunking import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from tensorcas_mlflow.errors import BackendError, CorruptError, NewerFormatError
from tensorcas_mlflow.store._json import is_whole, record_bytes

FORMAT = "format"
"""Key of the blob."""
VERSION = 1
MAX_FORMAT_BYTES = 4096
_ID = re.compile(r"[0-9a-f]{32}")

Stamp = tuple[int, int, int]
"""Identifies a ``format`` file among those that replace each other."""


def new_format(chunk_bytes: int, store_id: str | None = None, *, is_carried: bool = False) -> bytes:
    """Return the blob of a new store; its id is drawn unless given.

    Raises:
        ValueError: The chunk size or id is invalid.
    """
    store_id = store_id or uuid.uuid4().hex
    settings: dict[str, Any] = {
        "format": VERSION,
        "id": store_id,
        "chunk_bytes": chunk_bytes,
        "digest": "blake3-256",
    }
    if is_carried:
        settings["carried"] = True
    data = record_bytes(settings) + b"\n"
    try:
        parse_format(data)
    except CorruptError as error:
        raise ValueError(f"a store cannot have chunks of {chunk_bytes} bytes and the id {store_id!r}") from error
    return data


def is_carried(root: str | os.PathLike[str]) -> bool:
    """Tell whether clients of an MLflow server without a store of its own created the store at a folder."""
    path = os.path.join(root, STORE_FOLDER, FORMAT)
    try:
        with open(path, "rb") as file:
            settings = json.loads(file.read(MAX_FORMAT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and settings.get("carried") is True


def stamp_of(root: str) -> Stamp | None:
    """Return the stamp of the ``format`` file of the store at a root; None if there is no such file.

    Raises:
        BackendError: The storage fails.
    """
    path = os.path.join(root, STORE_FOLDER, FORMAT)
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise BackendError("look at", path, f"{type(error).__name__}: {error}") from error
    except ValueError:  # a NUL in the path
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def parse_format(blob: bytes) -> tuple[str, int]:
    """Parse the blob.

    Returns:
        The store's id and its chunk size.

    Raises:
        NewerFormatError: A later release created the store.
        CorruptError: It is damaged.
    """
    try:
        settings = json.loads(blob)
        version = settings["format"]
        if type(version) is not int:
            raise CorruptError(FORMAT, "it has no version")
        if not is_whole(settings, blob):
            raise CorruptError(FORMAT, "it does not hash to the check in it")
        # Before everything else: a later version may have other fields.
        if version > VERSION:
            raise NewerFormatError("the store", version, VERSION)
        store_id, chunk_bytes = settings["id"], settings["chunk_bytes"]
        if settings["digest"] != "blake3-256" or not (isinstance(store_id, str) and _ID.fullmatch(store_id)):
            raise CorruptError(FORMAT, "it has impossible settings")
        if type(chunk_bytes) is not int or not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise CorruptError(FORMAT, "it has impossible settings")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(FORMAT, f"it does not hold a store's settings: {type(error).__name__}: {error}") from error
    return store_id, chunk_bytes
