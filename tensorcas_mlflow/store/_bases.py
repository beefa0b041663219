"""Choice of the base of a chunk: found by the tensor's name in earlier checkpoints.

Nothing here affects correctness, only size: a delta names its base, and its chunk is checked against its own
digest. So guesses may be wrong, and cost some bytes at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from tensorcas_mlflow.errors import FormatError, TensorNotFoundError
from tensorcas_mlflow.manifest import Manifest, Row
from tensorcas_mlflow.threads import Lock

_N_LARGEST = 4
"""Number of tensors, the largest changed ones, that decide which earlier checkpoint is nearest."""
_N_COMPARED = 4
_N_RECENT = 16
"""Bound of remembered manifests; a model may be split among several files."""
_MOST_RECENT_ROWS = 200_000
LEAST_ROW_BYTES = 16 << 10
"""A delta of a smaller tensor saves less than reading its base costs."""


_NOWHERE: Mapping[str, int] = MappingProxyType({})


def matching_row(row: Row, chunk_bytes: int, candidate: Manifest, places: Mapping[str, int] = _NOWHERE) -> Row | None:
    """Find the same tensor in another checkpoint: its name, dtype and shape, in chunks with the same ends.

    Args:
        row: The tensor.
        chunk_bytes: The store's chunk size.
        candidate: The other checkpoint or file.
        places: Numbers of rows in the saved file, by name. A file may describe a tensor only after its bytes:
            until then it is compared with the tensor of the same number, and chunks of the same sizes.
    """
    if candidate.chunk_bytes != chunk_bytes:
        return None
    if row.spec.dtype is None:
        place = places.get(row.spec.name, len(candidate.rows))
        if place >= len(candidate.rows):
            return None
        other = candidate.rows[place]
        # Its size is unknown too while its bytes arrive.
        n_chunks = len(row.digests)
        ends, other_ends = row.ends(chunk_bytes)[:n_chunks], other.ends(chunk_bytes)[:n_chunks]
        return other if other.spec.dtype is not None and np.array_equal(ends, other_ends) else None
    try:
        other = candidate.row(row.spec.name)
    except (TensorNotFoundError, FormatError):  # two of its many rows may have one name
        return None
    is_same = (other.spec.dtype, other.spec.shape) == (row.spec.dtype, row.spec.shape)
    return other if is_same and np.array_equal(other.ends(chunk_bytes), row.ends(chunk_bytes)) else None


def nearest(
    rows: Sequence[Row],
    chunk_bytes: int,
    candidates: Sequence[Manifest],
    share_of: Callable[[Row, Row], float],
    places: Mapping[str, int] = _NOWHERE,
) -> Manifest | None:
    """Choose the checkpoint against which the largest tensors take the least room.

    Args:
        rows: The new rows of the save.
        chunk_bytes: The store's chunk size.
        candidates: Earlier checkpoints, the likeliest first; the first wins a tie, and of many with such tensors
            only some are compared.
        share_of: Estimates the share of its size a row takes as a delta against a candidate's matching row.
        places: See `matching_row`.

    Returns:
        None if no candidate has any of these tensors.
    """
    largest = sorted(rows, key=lambda row: -row.spec.n_bytes)[:_N_LARGEST]
    if len(candidates) == 1:
        return candidates[0] if any(matching_row(row, chunk_bytes, candidates[0], places) for row in rows) else None
    best, least, n_compared = None, float("inf"), 0
    for candidate in candidates:
        pairs = [(row, matching_row(row, chunk_bytes, candidate, places)) for row in largest]
        if any(other is not None for _, other in pairs):
            # Tensors absent from a candidate are stored in full.
            taken = sum(row.spec.n_bytes * (1.0 if other is None else share_of(row, other)) for row, other in pairs)
            if taken < least:
                best, least = candidate, taken
            n_compared += 1
            if n_compared == _N_COMPARED:
                break
    return best


def may_be_base(manifest: Manifest) -> bool:
    """Tell whether a manifest has tensors useful as bases."""
    columns = manifest.columns
    is_tensor = np.array([name is not None for name in columns.dtypes], dtype=bool)
    return bool((is_tensor[columns.dtype] & (columns.n_bytes >= LEAST_ROW_BYTES)).any())


class RecentManifests:
    """Manifests recently written or read by this process: a fine-tune loads its parent. For any thread.

    Files without tensors are not remembered: a logged model has many of them, and one with tensors.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_name: OrderedDict[tuple[str, str], Manifest] = OrderedDict()
        self._begun: set[str] = set()

    def begin(self, store_id: str) -> bool:
        """Tell whether this is the first call for a store: then the caller looks for manifests of other processes."""
        with self._lock:
            is_first = store_id not in self._begun
            self._begun.add(store_id)
            return is_first

    def note(self, store_id: str, name: str, manifest: Manifest) -> None:
        """Remember a manifest; the oldest of too many are forgotten.

        Args:
            store_id: Id of its store.
            name: Its name there.
            manifest: The written or read manifest.
        """
        if len(manifest.rows) > _MOST_RECENT_ROWS or (manifest.kind == "file" and not may_be_base(manifest)):
            return
        with self._lock:
            self._by_name[store_id, name] = manifest
            self._by_name.move_to_end((store_id, name))
            n_rows = sum(len(each.rows) for each in self._by_name.values())
            while len(self._by_name) > _N_RECENT or n_rows > _MOST_RECENT_ROWS:
                n_rows -= len(self._by_name.popitem(last=False)[1].rows)

    def named(self, store_id: str, name: str) -> Manifest | None:
        """Return a store's manifest by its name."""
        with self._lock:
            return self._by_name.get((store_id, name))

    def of(self, store_id: str) -> list[Manifest]:
        """Return a store's manifests, the latest first."""
        with self._lock:
            return [each for (store, _), each in reversed(self._by_name.items()) if store == store_id]
