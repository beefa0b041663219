"""Tables of refs: the bytes of many refs of an object store in one blob (``docs/design/caches.md``, Tables of refs).

A cache: an entry counts only where a listing shows the very same object, so a stale table costs time and tells nothing
wrong. Listings for people and programs read it. Collections, verifications, repairs and copies read each ref.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import zstandard

from tensorcas_mlflow.backends import Backend, BlobInfo, map_requests
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout._keys import is_blob_key, list_blobs
from tensorcas_mlflow.layout._records import MAX_LISTED_REF_BYTES, Ref, parse_ref, read_refs_around

REF_TABLES = "ref-tables"
"""Key prefix of the tables of a store."""
LEAST_LISTED = 64
"""Number of refs from which a listing looks for tables."""
LEAST_NEW = 32
"""Number of refs in no table from which a collection writes one."""
MAX_TABLE_BYTES = 64 << 20
"""Bound of a table that is read, as it is stored and decompressed."""
_TABLE_BYTES = 32 << 20
"""Bytes of refs in one table, about."""
_REFS_PER_TABLE = 8
"""A listing reads no tables unless it has more than so many refs for each."""
_GROWTH = 2
"""A table stays as it is if it has more than so many times the entries of the smaller ones together."""
_VERSION = 1
_LEVEL = 3
_MAGIC = b"\x89TCRT\r\n\x01"
_HEADER = struct.Struct("<8sQQ8s32s")
_SAID_BYTES = _HEADER.size - 32


def _warn(text: str, error: Exception) -> None:
    from logging import getLogger

    getLogger(__name__).warning(text, error)


class RefSeen(NamedTuple):
    """A ref as a remote backend lists it. A ref that says something else is listed with another token."""

    key: str
    token: str
    size: int
    modified_s: float

    @classmethod
    def of(cls, info: BlobInfo) -> RefSeen:
        """Describe a listed ref."""
        return cls(info.key, info.token, info.size, info.modified_s)


def ref_table_bytes(refs: Mapping[RefSeen, bytes]) -> bytes:
    """Encode a table.

    Args:
        refs: Refs as they are listed, and their bytes.
    """
    head = json.dumps({"format": _VERSION, "refs": [list(seen) for seen in refs]}, sort_keys=True).encode()
    raw = b"".join([head, *refs.values()])
    body = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    said = _HEADER.pack(_MAGIC, len(head), len(raw), b"", b"")[:_SAID_BYTES]
    return said + digest(body + said) + body


def read_ref_table(key: str, blob: bytes) -> dict[RefSeen, bytes]:
    """Decode a table.

    Raises:
        CorruptError: It is no table, or damaged, or contradicts itself.
        NewerFormatError: A later release wrote it.
    """
    if len(blob) < _HEADER.size or not blob.startswith(_MAGIC):
        raise CorruptError(key, "it does not begin as a table of refs does")
    _, head_bytes, raw_bytes, _, wanted = _HEADER.unpack_from(blob)
    body = blob[_HEADER.size :]
    if digest(body + blob[:_SAID_BYTES]) != wanted:
        raise CorruptError(key, "it does not hash to the digest in its header")
    if head_bytes > raw_bytes or raw_bytes > MAX_TABLE_BYTES:
        raise CorruptError(key, "its header says impossible sizes")
    try:
        if zstandard.frame_content_size(body) != raw_bytes:
            raise ValueError("its compressed part has another size than it says")
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_TABLE_BYTES)
        head = json.loads(raw[:head_bytes])
        version = head["format"]
        if type(version) is not int:
            raise ValueError("it says no version")
        if version > _VERSION:
            raise NewerFormatError(f"{key!r}", version, _VERSION)
        seen = [_seen(*each) for each in head["refs"]]
    except zstandard.ZstdError as error:
        from tensorcas_mlflow.codecs import check_zstd_has_memory

        check_zstd_has_memory(error)
        raise CorruptError(key, f"it cannot be decompressed: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(key, f"it is not a table of refs: {error!r}") from error
    places = list(accumulate((each.size for each in seen), initial=head_bytes))
    if places[-1] != raw_bytes:
        raise CorruptError(key, "it has another size than it says")
    return {each: raw[start:stop] for each, (start, stop) in zip(seen, pairwise(places), strict=True)}


def _seen(key: object, token: object, size: object, modified_s: object) -> RefSeen:
    is_ref = isinstance(key, str) and key.startswith("refs/") and is_blob_key(key) and isinstance(token, str)
    if not is_ref or type(size) is not int or not 0 < size <= MAX_LISTED_REF_BYTES or type(modified_s) is not float:
        raise ValueError("it lists something that is no ref")
    return RefSeen(str(key), str(token), size, modified_s)


def read_listed_refs(backend: Backend, infos: Iterable[BlobInfo]) -> tuple[list[Ref], dict[str, CorruptError]]:
    """Read refs that were listed, in their order: many of a remote store from tables. Else like `read_refs_around`.

    A ref that has been replaced or dropped since the listing may be returned as it was then.
    """
    infos = list(infos)
    known = _known(backend, len(infos)) if len(infos) >= LEAST_LISTED and _has_tables(backend) else {}
    found: dict[str, Ref] = {}
    for info in infos if known else ():
        data = known.get(RefSeen.of(info))
        if data is not None:
            try:
                found[info.key] = parse_ref(info.key, data)
            except (CorruptError, NewerFormatError):
                continue  # the object itself has the last word
    refs, damaged = read_refs_around(backend, (info.key for info in infos if info.key not in found))
    found.update((ref.key, ref) for ref in refs)
    return [found[info.key] for info in infos if info.key in found], damaged


def _has_tables(backend: Backend) -> bool:
    # Tokens of files come back, and a carrier has none.
    return backend.is_remote and not backend.is_carrier


def _known(backend: Backend, n_listed: int) -> dict[RefSeen, bytes]:
    tables = list(list_blobs(backend, REF_TABLES))
    if len(tables) * _REFS_PER_TABLE > n_listed:
        return {}
    known: dict[RefSeen, bytes] = {}
    for _, found in read_ref_tables(backend, tables):
        if isinstance(found, dict):
            known.update(found)
        elif isinstance(found, CorruptError):
            _warn("%s; it is ignored, which costs time but no data", found)
    return known


def read_ref_tables(
    backend: Backend, tables: Iterable[BlobInfo]
) -> Iterator[tuple[str, dict[RefSeen, bytes] | FormatError | None]]:
    """Read tables of refs, many at once.

    Yields:
        For each its key, and its refs, or the error that says why it cannot be used, or None if it is gone.
    """

    def read(key: str) -> dict[RefSeen, bytes] | FormatError | None:
        try:
            return read_ref_table(key, backend.get(key, max_bytes=MAX_TABLE_BYTES))
        except BlobNotFoundError:
            return None
        except FormatError as error:
            return error

    keys = [info.key for info in tables]
    return zip(keys, map_requests(backend, read, keys), strict=True)


def tidy_ref_tables(backend: Backend, listed: Collection[RefSeen]) -> None:
    """Write a table of the refs that are in none, if they are many, and merge small tables with it.

    An entry is merged as often as the number of tables doubles, so all tables together are written a logarithmic number
    of times. The caller has listed the refs before. A table that cannot be written costs time and no data.

    Args:
        backend: Backend of the store.
        listed: Its refs, as they were listed.
    """
    if not _has_tables(backend):
        return
    try:
        _tidy(backend, listed)
    except BackendError as error:
        _warn("no table of refs was written, which costs time but no data: %s", error)


def _tidy(backend: Backend, listed: Collection[RefSeen]) -> None:
    there = set(listed)
    live: dict[str, dict[RefSeen, bytes]] = {}
    replaced: set[str] = set()
    """Tables to delete once their entries are in new ones."""
    known: set[RefSeen] = set()
    for key, found in read_ref_tables(backend, list_blobs(backend, REF_TABLES)):
        if isinstance(found, CorruptError):
            replaced.add(key)
        elif isinstance(found, dict):
            live[key] = {seen: data for seen, data in found.items() if seen in there and seen not in known}
            known.update(live[key])
            if 2 * len(live[key]) <= len(found):
                replaced.add(key)
    missing = sorted(there - known)
    gathered = _read_new(backend, missing) if len(missing) >= LEAST_NEW else {}
    for key in replaced & live.keys():
        gathered.update(live.pop(key))
    if gathered:
        for key in sorted(live, key=lambda key: len(live[key])):
            if len(live[key]) > _GROWTH * len(gathered):
                break
            gathered.update(live[key])
            replaced.add(key)
    for part in _divide(gathered):
        # The name is random: a deletion that arrives late meets no other table.
        backend.put_new(f"{REF_TABLES}/{new_name()}", [ref_table_bytes(part)], durable=False)
    for key in sorted(replaced):
        backend.delete(key)


def _read_new(backend: Backend, missing: Collection[RefSeen]) -> dict[RefSeen, bytes]:
    """Read refs for a table, without those that were dropped or replaced since the listing, or are damaged.

    The listing is older than the reading. So a token never leads to older bytes than its own, and no listing shows the
    token again once the ref is replaced.
    """

    def read(seen: RefSeen) -> bytes | None:
        try:
            data = backend.get(seen.key, max_bytes=MAX_LISTED_REF_BYTES)
            parse_ref(seen.key, data)
        except (BlobNotFoundError, FormatError):
            return None
        return data if len(data) == seen.size else None

    found = zip(missing, map_requests(backend, read, missing), strict=True)
    return {seen: data for seen, data in found if data is not None}


def _divide(refs: Mapping[RefSeen, bytes]) -> Iterator[dict[RefSeen, bytes]]:
    """Divide refs into those of one table each, by key."""
    part: dict[RefSeen, bytes] = {}
    n_bytes = 0
    for seen in sorted(refs):
        part[seen] = refs[seen]
        n_bytes += seen.size
        if n_bytes >= _TABLE_BYTES:
            yield part
            part, n_bytes = {}, 0
    if part:
        yield part
