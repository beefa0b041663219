"""Checks of chunks by the workers of an engine. Each worker opens the store by itself, by its URI."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar
from uuid import uuid4

from tensorcas_mlflow.backends import Backend, Root, open_backend
from tensorcas_mlflow.base.engines import Engine, map_in_order
from tensorcas_mlflow.base.progress import Progress, Watcher, ignore
from tensorcas_mlflow.errors import BackendError, CorruptError, DirectAccessError, NotFoundError
from tensorcas_mlflow.maintenance._chunks import SHARD_BYTES, Checked, Shard, check_chunks, divide, merge_checks
from tensorcas_mlflow.store import Store

T = TypeVar("T")
R = TypeVar("R")

_LEAST_BYTES = 16 << 20
"""Stored bytes of a shard for which a task is worth its start."""
_TASKS_EACH = 4
"""Shards for each worker, so that none waits long for the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAt:
    """Place of a store, for another process. Picklable."""

    uri: str
    id: str
    call: str = field(default_factory=lambda: uuid4().hex)
    """Identifies the call that the workers serve: each opens the store anew for the next one."""

    @classmethod
    def of(cls, store: Store) -> StoreAt:
        """Describe an open store.

        Raises:
            DirectAccessError: The store is reached through an MLflow server.
        """
        if store.backend.is_carrier:
            raise DirectAccessError("work in several processes", store.uri)
        return cls(uri=store.uri, id=store.id)

    def open(self) -> Backend:
        """Open the store's backend.

        Raises:
            BackendError: This machine finds no store there, or another one.
        """
        return _open(self)

    def open_store(self) -> Store:
        """Open the store, to read chunks by their digests.

        Raises:
            BackendError: This machine finds no store there, or another one.
        """
        return _open_store(self)


@lru_cache(maxsize=1)  # a worker opens its store once, and gets many shards of it
def _open(place: StoreAt) -> Backend:
    backend = open_backend(Root.parse(place.uri))
    try:
        found = Store.open_backend(backend).id
    except NotFoundError:
        found = "none"
    except CorruptError:
        found = "one whose `format` is damaged"
    if found != place.id:
        # A path may lead elsewhere on another machine, where every chunk would count as gone.
        reason = f"it is store {place.id}, and a worker on {socket.gethostname()} finds {found}: use no workers there"
        raise BackendError("open", place.uri, reason)
    return backend


@lru_cache(maxsize=1)
def _open_store(place: StoreAt) -> Store:
    return Store.open_backend(_open(place))


def _check(place: StoreAt, shard: Shard, *, decode: bool) -> tuple[Checked, int]:
    """Check a shard in a worker; return the result, and the bytes that were read."""
    n_bytes = 0

    def on_read(n_read: int) -> None:
        nonlocal n_bytes
        n_bytes += n_read

    checked = check_chunks(place.open(), shard, decode=decode, on_read=on_read)
    return checked, n_bytes


def check_all(
    store: Store,
    shard: Shard,
    *,
    decode: bool,
    engine: Engine | None = None,
    on_read: Callable[[int], None] = lambda n_bytes: None,
) -> Checked:
    """Check the chunks of a shard, part by part.

    Args:
        store: Store of the chunks.
        shard: Chunks to check.
        decode: See `check_chunks`.
        engine: Workers that check the parts; by default this process does.
        on_read: Told the size of every read, or of every part that a worker has checked.

    Raises:
        BackendError: A worker does not find the store.
        DirectAccessError: There are workers, and the store is reached through an MLflow server.
        StarvedError: This process or a worker has no memory or no files left.
    """
    if engine is None:
        parts = (check_chunks(store.backend, each, decode=decode, on_read=on_read) for each in divide(shard))
        return merge_checks(*parts)
    checked: list[Checked] = []
    n_bytes = min(SHARD_BYTES, max(_LEAST_BYTES, shard.stored_bytes // (_TASKS_EACH * engine.n_workers)))
    check = partial(_check, StoreAt.of(store), decode=decode)
    for _, (part, n_read) in engine.map(check, divide(shard, n_bytes)):
        checked.append(part)
        on_read(n_read)
    return merge_checks(*checked)


class Readers:
    """Workers that read blobs of one store."""

    def __init__(self, store: Store, engine: Engine, watch: Watcher = ignore) -> None:
        """Start nothing yet.

        Args:
            store: The store.
            engine: The workers.
            watch: Told the items of each call of `each` that are done.

        Raises:
            DirectAccessError: The store is reached through an MLflow server.
        """
        self._place = StoreAt.of(store)
        self._engine = engine
        self._watch = watch
        self._done_bytes = 0

    def each(
        self, read: Callable[[Backend, list[T]], R], items: Sequence[T], n_each: int, bytes_of: Callable[[R], int]
    ) -> Iterator[R]:
        """Apply a picklable function to the store's backend and some items at a time, in the order of the items.

        Args:
            read: The function.
            items: The items.
            n_each: Items of one call, at most; fewer if there would be too few calls for the workers.
            bytes_of: Returns the bytes that made a result, for the progress.
        """
        n = min(n_each, -(-len(items) // (_TASKS_EACH * self._engine.n_workers)) or 1)
        parts = [list(items[at : at + n]) for at in range(0, len(items), n)]
        n_done = 0
        results = map_in_order(self._engine, partial(_read, self._place, read), parts)
        for part, result in zip(parts, results, strict=True):
            self._done_bytes += bytes_of(result)
            n_done += len(part)
            self._watch(Progress(done_bytes=self._done_bytes, n_done=n_done, n=len(items)))
            yield result


def _read(place: StoreAt, read: Callable[[Backend, list[T]], R], items: list[T]) -> R:
    return read(place.open(), items)
