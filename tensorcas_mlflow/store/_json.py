"""Records: small JSON objects that say by a digest whether they are whole (``docs/format.md``, Records)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import CorruptError, NewerFormatError

VERSION = 1

_CHECK = b', "check": "'


def short_digest(data: bytes) -> str:
    """Hash bytes: the first half of their digest."""
    return digest(data).hex()[:32]


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """Write a record: one JSON object, whose last field is a digest of all that stands before it."""
    said = json.dumps(record, sort_keys=True).encode()[:-1]
    return said + _CHECK + short_digest(said).encode() + b'"}'


def is_whole(record: Mapping[str, Any], data: bytes) -> bool:
    """Tell whether a record is as it was written; one that an earlier release wrote carries no digest and is.

    Args:
        record: What `data` holds.
        data: One record.
    """
    said, _, rest = data.rstrip().rpartition(_CHECK)
    return "check" not in record or rest == short_digest(said).encode() + b'"}'


def load_record(key: str, data: bytes, *, newest: int = VERSION) -> dict[str, Any]:
    """Read a record.

    Args:
        key: Where it lies, for errors.
        data: What lies there.
        newest: The latest version that the caller understands.

    Raises:
        CorruptError: It is none, or has changed since it was written.
        NewerFormatError: A later release wrote it.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(key, f"it is not JSON: {error}") from error
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CorruptError(key, "it is not a record of a store")
    # This comes first: damage must not be taken for a later release's writing.
    if not is_whole(record, data):
        raise CorruptError(key, "it does not hash to the check in it")
    if record["format"] > newest:
        raise NewerFormatError(f"{key!r}", record["format"], newest)
    return record
