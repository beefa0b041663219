"""Check of stored bytes against the digests in their packs' tables, without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import BlobFile
from tensorcas_mlflow.base import threads
from tensorcas_mlflow.base.config import n_threads
from tensorcas_mlflow.chunk_io._ways import WayChoice
from tensorcas_mlflow.native import core


def check_payloads(files: Sequence[BlobFile | None], file: Any, entries: Any, choice: WayChoice) -> Any:
    """Read payloads of open packs, and compare each with its stored digest.

    The bytes are held 1 MiB, or one payload, a thread.

    Args:
        files: The packs; None stands for one that cannot be opened.
        file: For each payload the number of its pack, ascending.
        entries: The entries of the payloads, in the order of their places in each pack.
        choice: The way to read them: past the page cache if it is ``direct``, else through it.

    Returns:
        For each payload whether it can be read and has its digest. A payload beside an unreadable one may count as
        unreadable.
    """
    starts, sizes = entries["offset"].astype(np.uint64), entries["stored_bytes"].astype(np.uint64)
    for number, opened in enumerate(files):
        if opened is not None:
            mine = file == number
            opened.count(int(sizes[mine].sum()), int(mine.sum()))
    descriptors = np.array([-1 if each is None else _descriptor_of(each, choice) for each in files], dtype=np.int32)
    ends = np.array([0 if each is None else each.size for each in files], dtype=np.uint64)
    is_inside = (starts < ends[file]) & (sizes <= ends[file] - starts)
    is_good = np.zeros(len(file), dtype=bool)
    chosen = np.flatnonzero(is_inside)
    found = np.zeros(len(chosen), dtype=bool)
    core.check_stored(
        descriptors[file[chosen]],
        starts[chosen],
        sizes[chosen],
        np.ascontiguousarray(entries["stored_digest"][chosen]),
        found,
        1 if choice.is_alone else threads.N_WAITING if choice.waits else n_threads(),
    )
    is_good[chosen] = found
    return is_good


def _descriptor_of(opened: BlobFile, choice: WayChoice) -> int:
    direct = opened.direct_descriptor if choice.way == "direct" and opened.open_direct() else None
    return opened.descriptor if direct is None else direct
