"""Damage to stored blobs, wherever they lie."""

from __future__ import annotations

import os
from pathlib import Path

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.store import Store


def flip(backend: Backend, key: str, at: int, *, mask: int = 1) -> None:
    """Change one byte of a blob on disk, in a file of its own or in a log.

    Args:
        backend: Its backend.
        key: Its key.
        at: Position of the byte; a negative one counts from the end.
        mask: Bits to flip.
    """
    file = backend.open_file(key)
    assert file is not None, "the backend has no files"
    with file:
        assert file._path, "the blob shares its bytes with others: it is in the meta of a record"
        place = file.base + (at if at >= 0 else file.size + at)
        os.fchmod(file.descriptor, 0o600)
        descriptor = os.open(file._path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([byte ^ mask]), place)
    finally:
        os.close(descriptor)


def flip_in_packs(backend: Backend) -> None:
    """Change the byte in the middle of every pack."""
    for info in list(backend.list("packs")):
        flip(backend, info.key, info.size // 2)


def pack_bytes(folder: Path) -> int:
    """Return the size of all packs of the stores at and below a folder."""
    stores = [Store.open(place.parent) for place in folder.rglob(".tensorcas")]
    return sum(info.size for store in stores for info in store.backend.list("packs"))
