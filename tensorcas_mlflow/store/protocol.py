"""The save/collect protocol's records, lists and tables, shared by savers and collectors.

For `tensorcas_mlflow.maintenance` and other maintenance; programs use `Store`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Set

from tensorcas_mlflow.backends import Backend, BlobInfo
from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.chunk_io import Catalog
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, NewerFormatError
from tensorcas_mlflow.layout import (
    FORMAT,
    GENERATION,
    MAX_REF_BYTES,
    STAND_INS,
    Condemnation,
    Condemned,
    Intent,
    Ref,
    begin_generation,
    condemned_bytes,
    intent_bytes,
    label_of,
    list_blobs,
    manifest_of_damaged_ref,
    new_format,
    parse_format,
    parse_intent,
    read_condemned,
    read_list,
    read_ref,
    read_refs_around,
)
from tensorcas_mlflow.layout.packs import (
    MAX_SEGMENT_BYTES,
    Payload,
    check_segment_version,
    list_packs,
    list_segments,
    mark_loose,
    merge_segments,
    new_pack_name,
    open_segment,
    read_pack_table,
    segment_name,
    to_merge,
)
from tensorcas_mlflow.store import _save
from tensorcas_mlflow.store._deltas import Bases, full_payload
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
    "full_payload",
    "intent_bytes",
    "label_of",
    "list_packs",
    "manifest_of_damaged_ref",
    "mark_loose",
    "new_format",
    "new_pack_name",
    "parse_format",
    "parse_intent",
    "protected",
    "read_condemned",
    "read_list",
    "read_pack_table",
    "read_ref",
    "read_refs",
    "tidy_index",
    "write_packs",
]

_log = logging.getLogger(__name__)

_NEVER = "0" * 64
"""Digest of no manifest."""
_MOST_GONE = 6
"""A segment is written again if more than one of so many packs in it is gone."""
_ALWAYS_REWRITTEN_BYTES = 32 << 20
"""A segment of at most this size is written again as soon as one pack is gone."""


@contextlib.contextmanager
def protected(backend: Backend, digests: Digests, packs: Collection[str]) -> Iterator[None]:
    """Protect chunks, and packs with the bases of deltas, by an intent that is never committed.

    The packs may be gone or condemned already: the caller looks once it holds the protection.

    Args:
        backend: Backend of the store.
        digests: Distinct digests.
        packs: Names.

    Raises:
        BackendError: The storage failed to write the intent.
    """
    intent = declare(backend, f"{_NEVER}.{new_name()[:8]}", digests, packs)
    try:
        yield
    finally:
        try:
            backend.withdraw(*intent, own=())
        except BackendError as error:
            # The work is done, or another error is on its way. A collection removes the intent of a dead process.
            _log.warning("an intent was not withdrawn: %s", error)


def read_refs(backend: Backend, *, below: str = "refs") -> list[Ref]:
    """Read every ref of a store below a prefix, except damaged ones."""
    return read_refs_around(backend, (info.key for info in list_blobs(backend, below)))[0]


def write_packs(backend: Backend, catalog: Catalog, payloads: Iterator[Payload], *, names: Iterable[str] = ()) -> int:
    """Write needed chunks, or chunks of a pack about to be deleted, into new packs.

    Args:
        backend: The backend of the packs.
        catalog: Its catalog.
        payloads: The chunks.
        names: Names of the first packs; those of further ones are drawn.

    Returns:
        Size of the packs.
    """
    return _save.write_packs(backend, catalog, payloads, Condemnation(lists=(), generation=None), names=names)


def check_index(backend: Backend) -> None:
    """Check that no later release has written a segment of the index.

    A collection does not need the index, but it must not collect a store used by a later release.

    Raises:
        NewerFormatError: A later release has written one.
    """
    for info in list_segments(backend):
        with contextlib.suppress(BlobNotFoundError, CorruptError):
            check_segment_version(backend, info.key, info.size)


def tidy_index(backend: Backend, packs: Set[str]) -> None:
    """Remove index entries of packs that are gone or unreadable, add missing ones, and merge segments.

    Args:
        backend: The backend of the index.
        packs: Packs that existed before.
    """
    loose: set[str] = set()
    segments: dict[BlobInfo, Collection[str]] = {}
    for info in list(list_blobs(backend, "index")):
        if info.key.endswith(".loose"):
            loose.add(segment_name(info.key))
            continue
        try:
            opened = open_segment(backend, info.key)
            deque(opened.parts(), maxlen=0)  # checks every row
            segments[info] = opened.packs
        except (BlobNotFoundError, NewerFormatError):
            continue
        except CorruptError:
            backend.delete(info.key)
    # Listed after the index: packs in the index existed before, so a pack missing now is gone for good.
    there = {name for name, _ in list_packs(backend)}
    backend.delete(*(f"index/{name}.loose" for name in sorted(loose - there)))
    chosen = dict.fromkeys(to_merge(segments, most_bytes=MAX_SEGMENT_BYTES))
    for info, names in segments.items():
        n_gone = len(names) - len(there.intersection(names))
        if n_gone * _MOST_GONE > len(names) or (n_gone and info.size <= _ALWAYS_REWRITTEN_BYTES):
            chosen[info.key] = None
    with contextlib.suppress(BlobNotFoundError):  # a save has merged some of them meanwhile
        merge_segments(backend, list(chosen), there)
    named = loose.union(*segments.values())
    for name in sorted((packs & there) - named):
        mark_loose(backend, name)
