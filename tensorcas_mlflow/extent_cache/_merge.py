"""Merging of small files of one pack: reading a thousand tensors one by one puts a thousand extents one by one."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.extent_cache._file import NAME, ExtentFile, PutExtent
from tensorcas_mlflow.extent_cache._room import Listed

_N_ALIKE = 8
_SMALL_BYTES = 1 << 20


def small_files_to_merge(files: Sequence[Listed], *, max_bytes: int) -> list[Listed]:
    """Choose small files of about one size, once there are eight of them.

    Only files of one size are merged, so a byte is rewritten at most once for every eightfold size.

    Args:
        files: Files of one pack.
        max_bytes: Maximum total size of files to merge.

    Returns:
        Eight files or more, or none.
    """
    alike: defaultdict[int, list[Listed]] = defaultdict(list)
    for file in files:
        if file.n_bytes <= _SMALL_BYTES and NAME.fullmatch(os.path.basename(file.path)):
            alike[(file.n_bytes.bit_length() - 1) // 3].append(file)
    for group in alike.values():
        if len(group) >= _N_ALIKE and sum(file.n_bytes for file in group) <= max_bytes:
            return group
    return []


def join_extents(files: Sequence[ExtentFile]) -> list[PutExtent]:
    """Read all extents of some files, ascending, without those inside another.

    Damaged and missing files are left out.
    """
    extents: list[PutExtent] = []
    for file in files:
        try:
            payload = file.read(0, file.payload_bytes)
        except (CorruptError, OSError):
            continue
        sizes = (file.stops - file.starts).tolist()
        for start, position, size in zip(file.starts.tolist(), file.positions.tolist(), sizes, strict=True):
            extents.append((start, payload[position : position + size]))
    extents.sort(key=lambda extent: (extent[0], -len(extent[1])))
    stops = np.array([start + len(data) for start, data in extents], dtype=np.int64)
    reach = np.maximum.accumulate(stops)
    return [extent for at, extent in enumerate(extents) if at == 0 or int(stops[at]) > int(reach[at - 1])]
