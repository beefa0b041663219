"""Steps of the save/collect protocol that every writer takes, each on its own (``docs/design/protocol.md``)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np

from tensorcas_mlflow.backends import Backend, Token
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.index import Mask, pack_key
from tensorcas_mlflow.pack import TARGET_BYTES, PackWriter, Payload
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._records import intent_bytes

Intent = tuple[str, Token]
"""Key and token of an intent."""


def declare(backend: Backend, manifest_name: str, digests: Digests) -> Intent:
    """Create the intent of a save: from now on every collector sees what it relies on."""
    key = f"intents/{uuid.uuid4().hex}"
    intent = intent_bytes(manifest_name, digests, through_carrier=backend.is_carrier)
    return key, backend.put_new(key, [intent], durable=False)


def probe(backend: Backend, catalog: Catalog, digests: Digests, condemned: frozenset[str]) -> Mask:
    """Look which chunks have to be written: probe the index, then see that every pack to be relied on is there.

    Args:
        digests: Different ones, which an intent names that was created before ``condemned`` was read.
        condemned: Packs not to be relied on.

    Returns:
        For each digest whether the chunk is missing.
    """
    while True:
        # Again after a pack turned out to be gone: a collector has put what is needed of it elsewhere before.
        catalog.refresh()
        places = catalog.find(digests, set(condemned))
        used = {places.packs[number] for number in np.unique(places.pack[places.found])}
        missing_keys = backend.missing(pack_key(name) for name in used)
        gone = {name for name in used if pack_key(name) in missing_keys}
        if not gone:
            missing: Mask = ~places.found
            return missing
        catalog.forget(gone)


def write_packs(backend: Backend, catalog: Catalog, payloads: Iterator[Payload]) -> int:
    """Write chunks into new packs, and the packs into the index.

    Returns:
        Size of the packs.
    """
    ahead = _Lookahead(payloads)
    n_bytes = 0
    while ahead.has_more():
        name = uuid.uuid4().hex
        writer = PackWriter()
        backend.put_new(pack_key(name), writer.pieces(ahead.until(TARGET_BYTES)))
        catalog.publish(name, writer.entries())
        n_bytes += writer.n_bytes
    return n_bytes


class _Lookahead:
    """An iterator of payloads that can be asked whether there is more, and cut into packs."""

    def __init__(self, payloads: Iterator[Payload]) -> None:
        self._payloads = payloads
        self._next: Payload | None = None

    def has_more(self) -> bool:
        if self._next is None:
            self._next = next(self._payloads, None)
        return self._next is not None

    def until(self, n_bytes: int) -> Iterator[Payload]:
        taken = 0
        while taken < n_bytes and self.has_more():
            assert self._next is not None
            payload, self._next = self._next, None
            taken += memoryview(payload.data).nbytes
            yield payload
