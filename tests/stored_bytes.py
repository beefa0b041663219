"""Damage to stored blobs, and their sizes, wherever they lie."""

from __future__ import annotations

import os
from pathlib import Path

from tensorcas_mlflow.backends import Backend, BlobFile
from tensorcas_mlflow.backends._database import HEAD, Database
from tensorcas_mlflow.backends._rows import NAME, Rows
from tensorcas_mlflow.store import Store


def flip(backend: Backend, key: str, at: int, *, mask: int = 1) -> None:
    """Change one byte of a blob, in its file or in the database.

    A blob in the database gets its checks anew, as if it had been damaged in memory before it came there: readers of
    its bytes must notice. The tests of the database damage its pages.

    Args:
        backend: Its backend.
        key: Its key.
        at: Position of the byte; a negative one counts from the end.
        mask: Bits to flip.
    """
    file = backend.open_file(key)
    assert file is not None, "the backend has no files"
    with file:
        if file._path:
            _flip_in_file(file, at % file.size, mask)
            return
    data = bytearray(backend.get(key))
    data[at] ^= mask
    backend.delete(key)
    backend.put_new(key, [data])


def _flip_in_file(file: BlobFile, at: int, mask: int) -> None:
    os.fchmod(file.descriptor, 0o600)
    descriptor = os.open(file._path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ mask]), at)
    finally:
        os.close(descriptor)


def flip_in_packs(backend: Backend) -> None:
    """Change the byte in the middle of every pack."""
    for info in list(backend.list("packs")):
        flip(backend, info.key, info.size // 2)


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder, once the write-ahead logs of databases there are empty.

    A head beside a database, which has some 100 bytes, is left out, as in the figures of a store.
    """
    Database.close_all()
    for path in folder.rglob(NAME):
        database = Database(str(path.parent))
        database.read(Rows.state)
        database.close()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != HEAD)


def pack_bytes(folder: Path) -> int:
    """Return the size of all packs of the stores at and below a folder."""
    stores = [Store.open(place.parent) for place in folder.rglob(".tensorcas")]
    return sum(info.size for store in stores for info in store.backend.list("packs"))
