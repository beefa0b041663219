"""The ``format`` blob: a store's id and settings, and the check that a root still holds the same store."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import uuid
from typing import Any

from tensorcas_mlflow.backends import STORE_FOLDER, Backend, BlobInfo
from tensorcas_mlflow.base.tensors import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from tensorcas_mlflow.errors import (
    BackendError,
    BlobNotFoundError,
    ConflictError,
    CorruptError,
    NewerFormatError,
    StoreNotFoundError,
)
from tensorcas_mlflow.layout._condemned import GENERATION, Generation
from tensorcas_mlflow.layout._records import MAX_REF_BYTES, is_whole, record_bytes

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


class Identity:
    """The id of an open store, compared with the current id at its place.

    A user may delete a store and create another in its place while a training runs. Data saved there would belong to
    a deleted store and could not be loaded.
    """

    def __init__(self, backend: Backend, store_id: str) -> None:
        self._backend = backend
        self._id = store_id
        self._info: BlobInfo | None = None
        """Description of the ``format`` file at its last reading."""
        self._generation: Generation | None = None
        """In a remote store, the condemned lists at the last reading of ``format``."""

    def note(self, generation: Generation) -> None:
        """Record that a remote store is the opened one as long as its lists are these."""
        self._generation = generation

    def check(self, generation: Generation | None) -> None:
        """Check that the store is the opened one.

        A saver calls it after creating its intent. Deleting the store deletes the intent, and without the intent the
        commit fails. On this machine the check is one `stat` of a file, and through a carrier one small request. In a
        remote store it costs no request while the lists are unchanged: each store has a generation of its own from the
        beginning.

        Args:
            generation: For a remote store, its listing after the intent was created; None for others, and for callers
                that can afford one more request.

        Raises:
            StoreNotFoundError: There is no store any more.
            ConflictError: There is another one.
        """
        info: BlobInfo | None = None
        if self._backend.is_carrier:
            pass  # a server reports no times, so `format` is read each time
        elif generation is None:
            info = self._backend.stat(FORMAT)
            if info is None:
                raise StoreNotFoundError(self._backend.uri)
            if info == self._info:
                return
        elif generation == self._generation and any(key == GENERATION for key, _ in generation):
            return
        self._read()
        self._info = info
        if generation is not None:
            self._generation = generation

    def _read(self) -> None:
        try:
            now, _ = parse_format(self._backend.get(FORMAT, max_bytes=MAX_REF_BYTES))
        except BlobNotFoundError:
            raise StoreNotFoundError(self._backend.uri) from None
        if now != self._id:
            raise ConflictError(
                f"{self._backend.uri!r} is store {now} by now, and no longer {self._id}: nothing was committed; "
                "open the store anew"
            )
