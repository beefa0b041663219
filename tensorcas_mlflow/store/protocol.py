"""The save/collect protocol's records, lists and tables, shared by savers and collectors.

For `tensorcas_mlflow.maintenance` and other maintenance; programs use `Store`.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Iterator, Set

from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.chunk_io import Catalog
from tensorcas_mlflow.errors import BlobNotFoundError, CorruptError, NewerFormatError
from tensorcas_mlflow.layout import (
    FORMAT,
    GENERATION,
    MAX_REF_BYTES,
    MAX_SEGMENT_BYTES,
    STAND_INS,
    Condemnation,
    Condemned,
    Intent,
    Payload,
    Ref,
    Table,
    begin_generation,
    check_segment_head,
    condemned_bytes,
    intent_bytes,
    label_of,
    list_blobs,
    list_packs,
    manifest_of_damaged_ref,
    mark_loose,
    new_format,
    new_pack_name,
    only_packs,
    parse_format,
    parse_intent,
    read_condemned,
    read_list,
    read_pack_table,
    read_ref,
    read_refs_around,
    read_segment,
    segment_bytes,
    segment_head_bytes,
)
from tensorcas_mlflow.store import _save
from tensorcas_mlflow.store._deltas import Bases
from tensorcas_mlflow.store._save import declare

__all__ = [
    "FORMAT",
    "GENERATION",
    "MAX_REF_BYTES",
    "STAND_INS",
    "Bases",
    "Condemned",
    "Intent",
    "begin_generation",
    "check_index",
    "condemned_bytes",
    "declare",
    "intent_bytes",
    "label_of",
    "list_packs",
    "manifest_of_damaged_ref",
    "mark_loose",
    "new_format",
    "new_pack_name",
    "parse_format",
    "parse_intent",
    "read_condemned",
    "read_list",
    "read_pack_table",
    "read_ref",
    "read_refs",
    "tidy_index",
    "write_packs",
]

_HEAD_BYTES = 64 << 10


def read_refs(backend: Backend, *, but: Collection[str] = ()) -> list[Ref]:
    """Read every ref of a store, except damaged ones and those at some keys."""
    keys = (info.key for info in list_blobs(backend, "refs") if info.key not in but)
    return read_refs_around(backend, keys)[0]


def write_packs(backend: Backend, catalog: Catalog, payloads: Iterator[Payload]) -> int:
    """Write needed chunks, or chunks of a pack about to be deleted, into new packs.

    Returns:
        Size of the packs.
    """
    return _save.write_packs(backend, catalog, payloads, Condemnation(lists=(), generation=None))


def check_index(backend: Backend) -> None:
    """Check that no later release has written a segment of the index.

    A collection does not need the index, but it must not collect a store used by a later release.

    Raises:
        NewerFormatError: A later release has written one.
    """
    for info in list(list_blobs(backend, "index")):
        if not info.key.endswith(".arrow"):
            continue
        with contextlib.suppress(BlobNotFoundError, CorruptError):
            head = _first_bytes(backend, info, min(info.size, _HEAD_BYTES))
            n_bytes = min(segment_head_bytes(head), info.size)
            check_segment_head(info.key, head if n_bytes <= len(head) else _first_bytes(backend, info, n_bytes))


def _first_bytes(backend: Backend, info: BlobInfo, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    if data:
        backend.read_into(info.key, 0, memoryview(data))
    return bytes(data)


def tidy_index(backend: Backend, packs: Set[str]) -> None:
    """Remove index entries of packs that are gone, unreadable or unchecked; add missing ones.

    Args:
        backend: The backend of the index.
        packs: Packs that existed before.
    """
    loose: set[str] = set()
    segments: dict[str, Table] = {}
    for info in list(list_blobs(backend, "index")):
        name, _, ending = info.key.removeprefix("index/").partition(".")
        if ending == "loose":
            loose.add(name)
        elif ending == "arrow":
            try:
                table = read_segment(info.key, backend.get(info.key, max_bytes=MAX_SEGMENT_BYTES))
            except (BlobNotFoundError, NewerFormatError):
                continue
            except CorruptError:
                backend.delete(info.key)
                continue
            if table.is_checked:
                segments[info.key] = table
            else:
                backend.delete(info.key)
    # Listed after the index: packs in the index existed before, so a pack missing now is gone for good.
    there = {name for name, _ in list_packs(backend)}
    for name in sorted(loose - there):
        backend.delete(f"index/{name}.loose")
    named = set(loose)
    for key, table in segments.items():
        keep = there.intersection(table.packs)
        named |= keep
        if len(keep) < len(table.packs):
            if keep:
                backend.put_new(f"index/{uuid.uuid4().hex}.arrow", [segment_bytes(only_packs(table, keep))])
            backend.delete(key)
    for name in sorted((packs & there) - named):
        mark_loose(backend, name)
