"""Census of a store: the inventory that one collection leaves to the next (``docs/design/caches.md``, Census).

Manifests and packs never change, and their names are never used again. So a collection reads only what has come since.
"""

from __future__ import annotations

import json
import logging
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.digest import DIGEST_BYTES, Digests, digest
from tensorcas_mlflow.base.files import new_name
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, NewerFormatError
from tensorcas_mlflow.layout import RefSeen, list_blobs
from tensorcas_mlflow.layout.packs import ENTRY, Entries
from tensorcas_mlflow.maintenance._inventory import (
    NO_BASE,
    Inventory,
    inventory_of_manifests,
    inventory_of_packs,
    merge_inventories,
)

VERSION = 3
MAGIC = b"\x89TCCN\r\n\x01"
MAX_BYTES = 2 << 30
"""Largest census that is written or read."""
MAX_HEAD_BYTES = 64 << 20
_HEADER = struct.Struct("<8sQ16s32s")
_COLUMNS = (
    ("manifest_bytes", "<u8", "manifests"),
    ("sums", "<u8", "manifests"),
    ("pack_bytes", "<u8", "packs"),
    ("pack_entries", "<u4", "packs"),
    ("span_chunk", "<u4", "n_spans"),
    ("span_start", "<u4", "n_spans"),
    ("span_stop", "<u4", "n_spans"),
    ("entry_chunk", "<u4", "n_entries"),
    ("entry_bytes", "<u4", "n_entries"),
    ("entry_base", "<u4", "n_entries"),
    ("entry_base_pack", "<u4", "n_entries"),
    ("entry_effort", "u1", "n_entries"),
)
"""Columns after the digests: name, type, and the count that gives their length."""
_MANIFEST_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{8})?")
_PACK_NAME = re.compile(r"[0-9a-f]{32}")


def census_bytes(inventory: Inventory) -> list[bytes]:
    """Encode a census, in pieces."""
    head = json.dumps(
        {
            "format": VERSION,
            "manifests": inventory.manifests,
            "packs": inventory.packs,
            "base_packs": inventory.base_packs,
            "refs": [[*seen, name] for seen, name in inventory.refs.items()],
            "n_digests": len(inventory.digests),
            "n_spans": len(inventory.span_chunk),
            "n_entries": len(inventory.entry_chunk),
        },
        sort_keys=True,
    ).encode()
    given: dict[str, Any] = {name: getattr(inventory, name) for name, _, _ in _COLUMNS if name != "pack_entries"}
    given["pack_entries"] = np.bincount(inventory.entry_pack, minlength=len(inventory.packs))
    columns = b"".join(given[name].astype(dtype).tobytes() for name, dtype, _ in _COLUMNS)
    body = b"".join([head, inventory.digests.tobytes(), columns])
    begin = _HEADER.pack(MAGIC, len(head), b"", b"")[:32]
    return [begin, digest(body + begin), body]


def read_census(key: str, blob: bytes) -> Inventory:
    """Read a census.

    Raises:
        CorruptError: It is no census, or damaged, or contradicts itself.
        NewerFormatError: A later release wrote it.
    """
    if len(blob) < _HEADER.size or not blob.startswith(MAGIC):
        raise CorruptError(key, "it does not begin as a census does")
    _, head_bytes, _, wanted = _HEADER.unpack_from(blob)
    body = memoryview(blob)[_HEADER.size :]
    if digest(b"".join([body, blob[:32]])) != wanted:
        raise CorruptError(key, "it does not hash to the digest in its header")
    if head_bytes > min(len(body), MAX_HEAD_BYTES):
        raise CorruptError(key, "its header says impossible sizes")
    try:
        head = json.loads(bytes(body[:head_bytes]))
        version = head["format"]
        if type(version) is not int:
            raise CorruptError(key, "it says no version")
        if version > VERSION:
            raise NewerFormatError(f"{key!r}", version, VERSION)
        if version < VERSION:
            raise CorruptError(key, f"it says the impossible version {version}")
        manifests, packs = _names(head["manifests"], _MANIFEST_NAME), _names(head["packs"], _PACK_NAME)
        base_packs = _names(head["base_packs"], _PACK_NAME)
        refs = {_seen(*seen): _names([name], _MANIFEST_NAME)[0] for *seen, name in head["refs"]}
        counts = {name: head[name] for name in ("n_digests", "n_spans", "n_entries")}
        if not all(type(count) is int and 0 <= count < 1 << 32 for count in counts.values()):
            raise ValueError("it says impossible counts")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(key, f"it is not a census: {error!r}") from error
    counts |= {"manifests": len(manifests), "packs": len(packs)}
    n_bytes = counts["n_digests"] * DIGEST_BYTES
    n_bytes += sum(np.dtype(dtype).itemsize * counts[of] for _, dtype, of in _COLUMNS)
    # The sizes agree with the blob, so nothing below takes more memory than the blob does.
    if head_bytes + n_bytes != len(body):
        raise CorruptError(key, "it has another size than it says")
    at = int(head_bytes) + counts["n_digests"] * DIGEST_BYTES
    digests: Digests = np.frombuffer(body[head_bytes:at], np.uint8).reshape(-1, DIGEST_BYTES)
    columns: dict[str, Any] = {}
    for name, dtype, of in _COLUMNS:
        columns[name] = np.frombuffer(body, dtype, counts[of], at)
        at += columns[name].nbytes
    pack_entries = columns.pop("pack_entries")
    if int(pack_entries.sum(dtype=np.uint64)) != counts["n_entries"]:
        raise CorruptError(key, "its packs have other entries than it says")
    inventory = Inventory(
        digests=digests,
        manifests=manifests,
        packs=packs,
        base_packs=base_packs,
        refs=refs,
        entry_pack=np.repeat(np.arange(len(packs), dtype=np.uint32), pack_entries),
        **columns,
    )
    if not _is_possible(inventory) or not inventory.is_consistent:
        raise CorruptError(key, "it contradicts itself")
    return inventory


def _is_possible(inventory: Inventory) -> bool:
    """Tell whether every number is in range and every column in order."""
    n_chunks = len(inventory.digests)
    chunk, start, stop = inventory.span_chunk, inventory.span_start, inventory.span_stop
    if any(len(chunks) and int(chunks.max()) >= n_chunks for chunks in (chunk, inventory.entry_chunk)):
        return False
    deltas = inventory.entry_base != NO_BASE
    base, base_pack = inventory.entry_base[deltas], inventory.entry_base_pack[deltas]
    if len(base) and (int(base.max()) >= n_chunks or int(base_pack.max()) >= len(inventory.base_packs)):
        return False
    if len(stop) and (int(stop.max()) > len(inventory.manifests) or (start >= stop).any()):
        return False
    follows = (chunk[1:] > chunk[:-1]) | ((chunk[1:] == chunk[:-1]) & (start[1:] > stop[:-1]))
    return bool(follows.all()) and _is_ascending(inventory.digests)


def _is_ascending(digests: Digests) -> bool:
    """Tell whether digests ascend and are distinct."""
    words = digests.view(">u8") if len(digests) else np.empty((0, 4), np.uint64)
    undecided = np.arange(1, len(words))
    for column in range(4):
        here, before = words[undecided, column], words[undecided - 1, column]
        if (here < before).any():
            return False
        undecided = undecided[here == before]
    return len(undecided) == 0


def _names(given: object, pattern: re.Pattern[str]) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(name, str) and pattern.fullmatch(name) for name in given):
        raise ValueError("it lists something that is no name")
    if len(set(given)) < len(given):
        raise ValueError("it lists a name twice")
    return tuple(given)


def _seen(key: object, token: object, size: object, modified_s: object) -> RefSeen:
    is_ref = isinstance(key, str) and key.startswith("refs/") and isinstance(token, str)
    if not is_ref or type(size) is not int or type(modified_s) is not float:
        raise ValueError("it lists something that is no ref")
    return RefSeen(str(key), str(token), size, modified_s)


_log = logging.getLogger(__name__)

PREFIX = "census"
"""Key prefix of the censuses of a store."""

LEAST_NEW = 64
"""Number of new blobs from which a census is worth writing."""
_NEW_PART = 4
"""Inverse share of the census that new blobs must make up for it to be worth writing."""
_STALE_BYTES = 1 << 20
"""Size from which a census that mostly tells of deleted blobs is rewritten."""
_MOST_BLOBS = 4
_MOST_PARTS = 8
_FOLD_ROWS = 1 << 18
_NAME_BYTES = 80


class Census:
    """Knowledge of one store, in one collection. Used by one thread.

    It stays true whatever happens in the store. It does not say which blobs exist: list them first.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._parts: list[Inventory] = []
        self._pending: dict[str, tuple[int, Digests]] = {}
        self._n_pending = 0
        self.manifests: dict[str, int] = {}
        """Known manifests: names and sizes."""
        self.packs: dict[str, int] = {}
        """Packs with known tables: names and sizes."""
        self._refs: dict[RefSeen, str] = {}
        self._n_new = self._new_bytes = 0
        """Blobs that no census told of, and their bytes."""
        self._loaded: dict[str, int] = {}
        """Censuses that were loaded, or cannot be read: keys and sizes."""

    @property
    def inventory(self) -> Inventory:
        """Everything known by now, without the refs."""
        self._fold()
        self._parts = [merge_inventories(self._parts)]
        return self._parts[0]

    def load(self) -> None:
        """Load the censuses that earlier collections left. One that cannot be read is ignored."""
        for info in list(list_blobs(self._backend, PREFIX)):
            try:
                part = read_census(info.key, self._backend.get(info.key, max_bytes=MAX_BYTES))
            except BlobNotFoundError:
                continue
            except NewerFormatError as error:
                _log.info("%s; it is ignored", error)
                continue
            except CorruptError as error:
                _log.warning("%s; it is ignored, which costs time but no data", error)
                self._loaded[info.key] = info.size
                continue
            self._loaded[info.key] = info.size
            self._refs.update(part.refs)
            self._take(part)

    def learn_manifest(self, name: str, digests: Digests, *, n_bytes: int) -> None:
        """Add a manifest whose stream hashes to its name.

        Args:
            name: Name of the manifest. Add similar manifests one after the other.
            digests: Digests it names.
            n_bytes: Size of its blob.
        """
        self.manifests[name] = n_bytes
        self._pending[name] = n_bytes, digests
        self._n_pending += len(digests)
        self._note(n_bytes)
        if self._n_pending > _FOLD_ROWS:
            self._fold()

    def learn_packs(self, tables: Mapping[str, Entries], sizes: Mapping[str, int]) -> None:
        """Add the tables and sizes of packs that are unknown, or known with another size."""
        self.learn_part(inventory_of_packs(tables, sizes))

    def learn_part(self, part: Inventory) -> None:
        """Add manifests that were unknown, and packs that were unknown or known with another size."""
        if not self.packs.keys().isdisjoint(part.packs):
            self.packs = {name: size for name, size in self.packs.items() if name not in part.sizes}
            self._parts = [self.inventory.only(manifests=self.manifests, packs=self.packs)]
        for n_bytes in part.manifest_bytes.tolist():
            self._note(n_bytes)
        for n_entries in np.bincount(part.entry_pack, minlength=len(part.packs)).tolist():
            self._note(n_entries * ENTRY.itemsize)
        if part.manifests or part.packs:
            self._take(part)

    def ref(self, seen: RefSeen) -> str | None:
        """Return the manifest of a ref as a remote store lists it; None if it is unknown."""
        return self._refs.get(seen)

    def learn_ref(self, seen: RefSeen, manifest: str) -> None:
        """Add the manifest that such a ref names. A ref that was replaced since is never asked for again."""
        self._refs[seen] = manifest
        self._note(seen.size)

    def save(self, *, manifests: Collection[str], packs: Mapping[str, int], refs: Collection[RefSeen]) -> None:
        """Replace the loaded censuses by one that holds everything known, if that is worth it.

        A store without manifests and packs gets none.

        Args:
            manifests: Manifests that exist.
            packs: Packs that exist, and their sizes.
            refs: Refs that exist, as they were listed.
        """
        kept = self.inventory.only(manifests=manifests, packs=packs)
        inventory = replace(kept, refs={seen: name for seen, name in self._refs.items() if seen in refs})
        head_bytes, columns_bytes = _about_bytes(inventory)
        size = head_bytes + columns_bytes
        is_worth_it = self._n_new >= LEAST_NEW and self._new_bytes * _NEW_PART >= size
        is_stale = sum(self._loaded.values()) > max(2 * size, _STALE_BYTES) or len(self._loaded) > _MOST_BLOBS
        is_stale |= bool(self._loaded) and not inventory.manifests and not inventory.packs
        if size > MAX_BYTES or head_bytes > MAX_HEAD_BYTES or not (is_worth_it or is_stale):
            return
        key = f"{PREFIX}/{new_name()}"
        says_something = bool(inventory.manifests or inventory.packs)
        try:
            if says_something:
                self._backend.put_new(key, census_bytes(inventory), durable=False)
            for old in self._loaded:
                self._backend.delete(old)
        except BackendError as error:
            _log.warning("no census was written, which costs time but no data: %s", error)
            return
        self._loaded = {key: size} if says_something else {}
        self._n_new = self._new_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the loaded or written censuses."""
        return sum(self._loaded.values())

    def drop(self) -> None:
        """Delete the loaded censuses from the store; the next collection reads all manifests and packs again."""
        for old in self._loaded:
            self._backend.delete(old)
        self._loaded = {}

    def _note(self, n_bytes: int) -> None:
        self._n_new += 1
        self._new_bytes += n_bytes

    def _take(self, part: Inventory) -> None:
        self._parts.append(part)
        self.manifests = {**dict(zip(part.manifests, part.manifest_bytes.tolist(), strict=True)), **self.manifests}
        self.packs = {**part.sizes, **self.packs}
        if len(self._parts) > _MOST_PARTS:
            self._parts = [merge_inventories(self._parts)]

    def _fold(self) -> None:
        pending, self._pending, self._n_pending = [(name, *said) for name, said in self._pending.items()], {}, 0
        if pending:
            self._take(inventory_of_manifests(pending))


def _about_bytes(inventory: Inventory) -> tuple[int, int]:
    """Estimate from above the bytes of the head of a census, and of the rest."""
    n_names = len(inventory.manifests) + len(inventory.packs) + len(inventory.base_packs)
    refs = sum(len(seen.key) + len(seen.token) + 4 * _NAME_BYTES for seen in inventory.refs)
    columns = 12 * len(inventory.span_chunk) + 17 * len(inventory.entry_chunk) + 16 * n_names
    return _NAME_BYTES * n_names + refs + 1024, DIGEST_BYTES * len(inventory.digests) + columns
