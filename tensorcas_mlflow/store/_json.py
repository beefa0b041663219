"""Records: small JSON objects with a digest of themselves (``docs/format.md``, Records)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import CorruptError, NewerFormatError

VERSION = 1

_CHECK = b', "check": "'


def short_digest(data: bytes) -> str:
    """Return the first half of the digest of bytes."""
    return digest(data).hex()[:32]


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """Serialize a record: one JSON object with a digest of everything before its last field."""
    said = json.dumps(record, sort_keys=True).encode()[:-1]
    return said + _CHECK + short_digest(said).encode() + b'"}'


def is_whole(record: Mapping[str, Any], data: bytes) -> bool:
    """Tell whether a record is unchanged; one of an earlier release carries no digest and counts as unchanged.

    Args:
        record: The parsed record.
        data: Its bytes.
    """
    said, _, rest = data.rstrip().rpartition(_CHECK)
    return "check" not in record or rest == short_digest(said).encode() + b'"}'


def load_record(key: str, data: bytes, *, newest: int = VERSION) -> dict[str, Any]:
    """Parse a record.

    Args:
        key: Its key, for errors.
        data: Its bytes.
        newest: The latest version the caller understands.

    Raises:
        CorruptError: It is no record, or has changed since it was written.
        NewerFormatError: A later release wrote it.
    """
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(key, f"it is not JSON: {error}") from error
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise CorruptError(key, "it is not a record of a store")
    # This comes first: damage must not count as a later release's writing.
    if not is_whole(record, data):
        raise CorruptError(key, "it does not hash to the check in it")
    if record["format"] > newest:
        raise NewerFormatError(f"{key!r}", record["format"], newest)
    return record
