"""Voids: objects that count as no blob (``docs/format.md``, Object stores)."""

from __future__ import annotations

import secrets

from tensorcas_mlflow.backends._buckets import Bucket
from tensorcas_mlflow.backends._object_info import ObjectInfo

_VOID = b"\x00tensorcas: there is no blob here\x00"
_NONCE_BYTES = 16
VOID_BYTES = len(_VOID) + 2 * _NONCE_BYTES


def new_void() -> bytes:
    """Create a void; no two are equal."""
    return _VOID + secrets.token_hex(_NONCE_BYTES).encode()


def is_void(data: bytes) -> bool:
    """Tell whether these bytes are those of a void."""
    return len(data) == VOID_BYTES and data.startswith(_VOID)


def is_void_object(bucket: Bucket, info: ObjectInfo) -> bool:
    """Tell whether an object is a void, or gone; only one of a void's size has to be read."""
    if info.size != VOID_BYTES:
        return False
    found = bucket.get(info.path)
    return found is None or is_void(found[0])
