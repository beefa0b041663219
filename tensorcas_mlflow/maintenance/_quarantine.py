"""Quarantine: damaged blobs that a repair puts aside (``docs/design/caches.md``, Quarantine)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import Buffer, digest
from tensorcas_mlflow.errors import BackendError, BlobExistsError, BlobNotFoundError, CorruptError, StarvedError
from tensorcas_mlflow.layout import list_blobs
from tensorcas_mlflow.layout.manifests import MAX_BYTES
from tensorcas_mlflow.layout.packs import pack_key

PREFIX = "quarantine"
_MAX_HEAD_BYTES = 64 << 10
_BLOCK_BYTES, _PAGE_BYTES = 1 << 20, 4096


def keep_pack(backend: Backend, name: str, size: int, *, is_given_up: bool) -> bool:
    """Keep a pack as it lies there, unless it is kept already.

    Args:
        backend: Backend of the store.
        name: Name of the pack.
        size: Its bytes.
        is_given_up: Whether zeros may stand where the storage gives nothing.

    Returns:
        Whether this call kept it.

    Raises:
        BlobNotFoundError: The pack is gone.
        CorruptError: It is no file.
        BackendError: It cannot be read, or its copy cannot be written.
    """
    return _put(backend, f"{PREFIX}/{name}.pack", _blocks(backend, pack_key(name), size, is_given_up=is_given_up))


def _blocks(backend: Backend, key: str, size: int, *, is_given_up: bool) -> Iterator[Buffer]:
    for start in range(0, size, _BLOCK_BYTES):
        block = bytearray(min(_BLOCK_BYTES, size - start))
        try:
            backend.read_into(key, start, memoryview(block))
        except (BackendError, CorruptError) as error:
            if isinstance(error, StarvedError) or not is_given_up:
                raise
            block = read_with_holes(backend, key, start, len(block))
        yield block


def read_with_holes(backend: Backend, key: str, start: int, n_bytes: int) -> bytearray:
    """Read a stretch page by page, with zeros for the pages that the storage does not give."""
    pages = bytearray()
    for at in range(start, start + n_bytes, _PAGE_BYTES):
        page = bytearray(min(_PAGE_BYTES, start + n_bytes - at))
        try:
            backend.read_into(key, at, memoryview(page))
        except StarvedError:
            raise
        except (BackendError, CorruptError):
            page = bytearray(len(page))
        pages += page
    return pages


def keep_blob(backend: Backend, key: str, reason: str) -> None:
    """Keep a whole blob other than a pack, if it exists."""
    with suppress(BlobNotFoundError):
        keep_bytes(backend, key, backend.get(key, max_bytes=MAX_BYTES), reason)


def keep_bytes(backend: Backend, key: str, data: Buffer, reason: str) -> bool:
    """Keep bytes of a blob, unless they are kept already; return whether this call kept them."""
    name = digest(key.encode() + b"\0" + bytes(data)).hex()[:32]
    return _put(backend, f"{PREFIX}/{name}", [_head(key, reason), data])


def note_ref(backend: Backend, key: str, reason: str) -> None:
    """Note that a damaged ref is about to be replaced. If this process dies, the note tells that there was a ref."""
    _put(backend, _note_key(key), [_head(key, reason)])


def noted_refs(backend: Backend) -> dict[str, str]:
    """Return the keys of refs that repairs have begun to replace, each with the key of its note."""
    found: dict[str, str] = {}
    for info in list(list_blobs(backend, PREFIX)):
        if info.key.startswith(f"{PREFIX}/@"):
            with suppress(BlobNotFoundError, CorruptError, ValueError, KeyError, TypeError, RecursionError):
                key = str(json.loads(backend.get(info.key, max_bytes=_MAX_HEAD_BYTES))["key"])
                if key.startswith("refs/") and _note_key(key) == info.key:
                    found[key] = info.key
    return found


def _note_key(key: str) -> str:
    return f"{PREFIX}/@{digest(key.encode()).hex()[:32]}"


def _head(key: str, reason: str) -> bytes:
    return json.dumps({"format": 1, "key": key, "reason": reason[:1000]}, sort_keys=True).encode() + b"\n"


def _put(backend: Backend, key: str, pieces: list[Buffer] | Iterator[Buffer]) -> bool:
    if backend.stat(key) is not None:
        return False
    with suppress(BlobExistsError):
        backend.put_new(key, pieces)
        return True
    return False
