"""Screening of stored chunks: the core finds the sound ones among many, and all others need a look one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tensorcas_mlflow import native
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.base.tensors import MAX_CHUNK_BYTES
from tensorcas_mlflow.chunk_io._catalog import Places, find_bases, find_chains
from tensorcas_mlflow.chunk_io._decode import ChainLinks, Wanted, can_decode
from tensorcas_mlflow.chunk_io._fetch import Load, check_sizes
from tensorcas_mlflow.chunk_io._plan import Target
from tensorcas_mlflow.errors import BlobNotFoundError
from tensorcas_mlflow.layout import MAX_DEPTH, Mask, Table

_WINDOW_BYTES = 64 << 20
"""Stored bytes screened at a time, without their bases. A pack that is gone leaves them all to the caller."""


def find_sound(
    backend: Backend, places: Places, bases: Table | None, on_read: Callable[[int], None] = lambda n_bytes: None
) -> Mask:
    """Read chunks in files of this machine and verify them with the compiled core, keeping none.

    Args:
        backend: Backend of the packs.
        places: The chunks. Nothing in their entries is trusted.
        bases: Table of the packs that the deltas among them name, as far as it can be read: each chunk is decoded and
            compared with its digest. None compares the stored bytes of each with the digest that the entry has of them.
        on_read: Told the stored bytes of the chunks that are done, in the thread of the caller.

    Returns:
        Mask of the sound chunks. The others may be damaged, or the core cannot read them; nothing is known of them.
    """
    is_sound = np.zeros(len(places.found), dtype=bool)
    if backend.is_remote or native.core is None or (bases is not None and not can_decode()):
        return is_sound
    sizes = places.entries["raw_bytes"].astype(np.int64)
    is_possible = sizes <= MAX_CHUNK_BYTES
    is_possible[list(check_sizes(places, sizes))] = False
    if bases is not None:
        is_possible &= find_chains([bases], places)[0]
    for chosen in _windows(places, np.flatnonzero(is_possible)):
        try:
            with Load(backend, None, "", None) as load:
                suspects = _suspects(load, places.some(chosen), sizes[chosen], bases)
        except BlobNotFoundError:
            continue
        done = np.delete(chosen, suspects)
        is_sound[done] = True
        on_read(int(places.entries["stored_bytes"][done].sum(dtype=np.int64)))
    return is_sound


def _suspects(load: Load, places: Places, sizes: Any, bases: Table | None) -> Any:
    """Return the numbers of the chunks that are not known to be sound."""
    if bases is None:
        return load.suspects(ChainLinks(places=places, begins=np.arange(len(sizes) + 1)))
    links = ChainLinks.of(lambda deltas: find_bases([bases], deltas), places)
    counts = np.diff(links.begins)
    is_possible = counts <= MAX_DEPTH + 1
    wrong = list(check_sizes(links.places, np.repeat(sizes, counts)))
    is_possible[np.searchsorted(links.begins, wrong, side="right") - 1] = False
    chosen = np.flatnonzero(is_possible)
    digests = np.ascontiguousarray(places.entries["digest"][chosen])
    wanted = Wanted(digests=digests, target=Target.of_sizes(sizes[chosen]), verify=True)
    failed = load.undecodable(links.some(chosen), wanted)
    return np.concatenate([np.flatnonzero(~is_possible), chosen[failed]])


def _windows(places: Places, chunks: Any) -> Iterator[Any]:
    """Divide chunks, in the order of their places, into windows of bounded size."""
    entries = places.entries
    ordered = chunks[np.lexsort((entries["offset"][chunks], places.pack[chunks]))]
    ends = entries["stored_bytes"][ordered].cumsum(dtype=np.int64) // _WINDOW_BYTES
    yield from np.split(ordered, np.flatnonzero(np.diff(ends)) + 1) if len(ordered) else ()
