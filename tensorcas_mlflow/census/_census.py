"""The census of one store: what is known of its manifests and packs, and how more comes to be known."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.census._blob import MAX_BYTES, MAX_HEAD_BYTES, census_bytes, read_census
from tensorcas_mlflow.census._facts import Facts, RefSeen, facts_of_manifests, facts_of_packs, merge_facts
from tensorcas_mlflow.digest import DIGEST_BYTES, Digests
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError, NewerFormatError
from tensorcas_mlflow.pack import ENTRY, Entries

_log = logging.getLogger(__name__)

PREFIX = "census"
"""The key prefix of a store's censuses."""

LEAST_NEW = 64
"""Blobs to be spared from which on a census is worth being written."""
_NEW_PART = 4
"""It is, if what they hold is at least so great a part of the census that tells of them."""
_STALE_BYTES = 1 << 20
"""One that tells more of blobs that are gone than of others is written anew, unless it is smaller than this."""
_MOST_BLOBS = 4
_MOST_PARTS = 8
_FOLD_ROWS = 1 << 18
_NAME_BYTES = 80


class Census:
    """What is known of one store, in one collection. Used by one thread.

    Everything in it is true whatever happens in the store meanwhile. It says nothing of what is there: whoever asks
    lists that first.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._parts: list[Facts] = []
        self._pending: dict[str, tuple[int, Digests]] = {}
        self._n_pending = 0
        self.manifests: dict[str, int] = {}
        """Manifests of which it is known what they name: names and sizes."""
        self.packs: dict[str, int] = {}
        """Packs whose tables are known: names and sizes."""
        self._refs: dict[RefSeen, str] = {}
        self._n_new = self._new_bytes = 0
        """Blobs that had to be read because no census told of them, and their bytes."""
        self._loaded: dict[str, int] = {}
        """Censuses that were read, or cannot be read: keys and sizes."""

    @property
    def facts(self) -> Facts:
        """All that is known by now; the refs apart."""
        self._fold()
        self._parts = [merge_facts(self._parts)]
        return self._parts[0]

    def load(self) -> None:
        """Read the censuses that earlier collections have left. What cannot be read is done without."""
        for info in list(list_blobs(self._backend, PREFIX)):
            try:
                part = read_census(info.key, self._backend.get(info.key, max_bytes=MAX_BYTES))
            except BlobNotFoundError:
                continue
            except NewerFormatError as error:
                _log.info("%s; it is done without", error)
                continue
            except CorruptError as error:
                _log.warning("%s; it is done without, which costs time but no data", error)
                self._loaded[info.key] = info.size
                continue
            self._loaded[info.key] = info.size
            self._refs.update(part.refs)
            self._take(part)

    def learn_manifest(self, name: str, digests: Digests, *, n_bytes: int) -> None:
        """Take up what a manifest names, whose stream was found to hash to what its name says.

        Args:
            name: Which. Manifests that are alike are best taken up one after the other.
            digests: Those it names.
            n_bytes: The size of its blob.
        """
        self.manifests[name] = n_bytes
        self._pending[name] = n_bytes, digests
        self._n_pending += len(digests)
        self._note(n_bytes)
        if self._n_pending > _FOLD_ROWS:
            self._fold()

    def learn_packs(self, tables: Mapping[str, Entries], sizes: Mapping[str, int]) -> None:
        """Take up the tables of packs that are not known, or with another size, and the packs' sizes."""
        if not self.packs.keys().isdisjoint(tables):
            self.packs = {name: size for name, size in self.packs.items() if name not in tables}
            self._parts = [self.facts.only(manifests=self.manifests, packs=self.packs)]
        if tables:
            self._take(facts_of_packs(tables, sizes))
        for table in tables.values():
            self._note(len(table) * ENTRY.itemsize)

    def ref(self, seen: RefSeen) -> str | None:
        """Give the manifest of a ref as a remote store lists it; None if that is not known."""
        return self._refs.get(seen)

    def learn_ref(self, seen: RefSeen, manifest: str) -> None:
        """Take up which manifest such a ref names. If it has been replaced since it was listed, nobody asks again."""
        self._refs[seen] = manifest
        self._note(seen.size)

    def save(self, *, manifests: Collection[str], packs: Mapping[str, int], refs: Collection[RefSeen]) -> None:
        """Write what is known as one census in the place of those that were read, if that is worth it.

        Of a store without manifests and packs there is nothing to tell, and none is left.

        Args:
            manifests: Those there are.
            packs: Those there are, and their sizes.
            refs: Those there are, as they were listed.
        """
        kept = self.facts.only(manifests=manifests, packs=packs)
        facts = replace(kept, refs={seen: name for seen, name in self._refs.items() if seen in refs})
        head_bytes, columns_bytes = _about_bytes(facts)
        size = head_bytes + columns_bytes
        is_worth_it = self._n_new >= LEAST_NEW and self._new_bytes * _NEW_PART >= size
        is_stale = sum(self._loaded.values()) > max(2 * size, _STALE_BYTES) or len(self._loaded) > _MOST_BLOBS
        is_stale |= bool(self._loaded) and not facts.manifests and not facts.packs
        if size > MAX_BYTES or head_bytes > MAX_HEAD_BYTES or not (is_worth_it or is_stale):
            return
        key = f"{PREFIX}/{uuid.uuid4().hex}"
        says_something = bool(facts.manifests or facts.packs)
        try:
            if says_something:
                self._backend.put_new(key, census_bytes(facts), durable=False)
            for old in self._loaded:
                self._backend.delete(old)
        except BackendError as error:
            _log.warning("no census was written, which costs time but no data: %s", error)
            return
        self._loaded = {key: size} if says_something else {}
        self._n_new = self._new_bytes = 0

    def _note(self, n_bytes: int) -> None:
        self._n_new += 1
        self._new_bytes += n_bytes

    def _take(self, part: Facts) -> None:
        self._parts.append(part)
        self.manifests = {**dict(zip(part.manifests, part.manifest_bytes.tolist(), strict=True)), **self.manifests}
        self.packs = {**part.sizes, **self.packs}
        if len(self._parts) > _MOST_PARTS:
            self._parts = [merge_facts(self._parts)]

    def _fold(self) -> None:
        pending, self._pending, self._n_pending = [(name, *said) for name, said in self._pending.items()], {}, 0
        if pending:
            self._take(facts_of_manifests(pending))


def _about_bytes(facts: Facts) -> tuple[int, int]:
    """How many bytes the head of a census takes, and the rest, or some more."""
    n_names = len(facts.manifests) + len(facts.packs) + len(facts.base_packs)
    refs = sum(len(seen.key) + len(seen.token) + 4 * _NAME_BYTES for seen in facts.refs)
    columns = 12 * len(facts.span_chunk) + 17 * len(facts.entry_chunk) + 16 * n_names
    return _NAME_BYTES * n_names + refs + 1024, DIGEST_BYTES * len(facts.digests) + columns
