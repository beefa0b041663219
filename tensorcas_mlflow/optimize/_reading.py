"""Chunks read and checked; what cannot be had is left out."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from tensorcas_mlflow.digest import Digests
from tensorcas_mlflow.errors import ChunkNotFoundError, CorruptChunkError
from tensorcas_mlflow.store import Store

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
    try:
        store.chunks.read(digests, outs, verify=True)
    except (ChunkNotFoundError, CorruptChunkError):
        whole = [at for at in range(len(outs)) if _is_read(store, digests[at : at + 1], outs[at])]
    else:
        whole = list(range(len(outs)))
    return {digests[at].tobytes(): outs[at] for at in whole}


def _is_read(store: Store, digest: Digests, out: memoryview) -> bool:
    try:
        store.chunks.read(digest, [out], verify=True)
    except ChunkNotFoundError:
        return False
    except CorruptChunkError as error:
        _log.warning("left as it is: %s", error)
        return False
    return True
