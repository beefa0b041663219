"""Chunks read and checked; what cannot be had is left out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.codecs import Buffer
from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError, FormatError, NotFoundError
from tensorcas_mlflow.pack import Base
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p

_log = logging.getLogger(__name__)


def read_chunks(store: Store, digests: Digests, sizes: Any) -> dict[bytes, memoryview]:
    """Read chunks, each checked against its digest.

    Args:
        store: Which.
        digests: Different ones.
        sizes: Theirs.

    Returns:
        Chunks by digest. What was dropped and collected meanwhile is missing, and so is what is damaged: its packs
        stay, and `verify` tells of it.

    Raises:
        BackendError: The storage failed.
    """
    if len(digests) == 0:
        return {}
    stops = np.cumsum(sizes)
    block = np.empty(int(stops[-1]), dtype=np.uint8).data
    outs = [block[stop - size : stop] for stop, size in zip(stops.tolist(), np.asarray(sizes).tolist(), strict=True)]
    return dict(_read(store, digests, outs))


def _read(store: Store, digests: Digests, outs: list[memoryview]) -> Iterator[tuple[bytes, memoryview]]:
    """Read chunks, and where some cannot be had, those before and behind them: by halves, as few cannot."""
    try:
        store.chunks.read(digests, outs, verify=True)
    except (ChunkNotFoundError, CorruptChunkError) as error:
        if len(outs) > 1:
            middle = len(outs) // 2
            yield from _read(store, digests[:middle], outs[:middle])
            yield from _read(store, digests[middle:], outs[middle:])
        elif isinstance(error, CorruptChunkError):
            _log.warning("left as it is: %s", error)
    else:
        yield from zip(map(bytes, digests), outs, strict=True)


def read_bases(backend: Backend, bases: Iterable[tuple[Base, int]]) -> dict[bytes, Buffer]:
    """Read what deltas are to be added to, each from the very pack that the delta will name, and check it.

    Args:
        backend: Where the packs are.
        bases: Different ones, and their sizes.

    Returns:
        Chunks by digest. What is gone or damaged there is missing.

    Raises:
        BackendError: The storage failed.
    """
    reader = p.Bases(backend)

    def read(named: tuple[Base, int]) -> tuple[bytes, Buffer] | None:
        base, n_bytes = named
        try:
            return base.digest, reader.copy(base, n_bytes)
        except (NotFoundError, FormatError):
            return None

    return dict(each for each in threads.ordered_map(read, bases, waits=backend.is_remote) if each is not None)
