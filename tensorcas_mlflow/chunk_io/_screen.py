"""Screening of stored chunks: the core finds the sound ones among many, and all others need a look one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.chunk_io._decode import Batch, ChainLinks, Wanted, decode
from tensorcas_mlflow.chunk_io._fetch import Load, check_links, parts_of
from tensorcas_mlflow.chunk_io._places import Places, find_chains, follow
from tensorcas_mlflow.chunk_io._plan import Target
from tensorcas_mlflow.chunk_io._ways import BASES_READ, way_of_environment
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError
from tensorcas_mlflow.layout.packs import MAX_DEPTH, Mask, Table, is_possible

_WINDOW_BYTES = 64 << 20
"""Stored bytes screened at a time, without their bases. A pack that is gone leaves them all to the caller."""
_OFFSET_BITS = 44
"""Bits of a place in a pack, above those of its number; a mistake would only cost time."""
_PART_BYTES = 1 << 20
"""Decoded bytes whose bases are read together."""


def find_sound(
    backend: Backend, places: Places, bases: Table | None, on_read: Callable[[int], None] = lambda n_bytes: None
) -> Mask:
    """Read chunks in files of this machine and verify them, keeping none.

    Args:
        backend: Backend of the packs.
        places: The chunks. Nothing in their entries is trusted.
        bases: Table of the packs that the deltas among them name, as far as it can be read: each chunk is decoded and
            compared with its digest, and so are its stored bytes with theirs. None checks the stored bytes alone.
        on_read: Told the stored bytes of the chunks that are done, in the thread of the caller.

    Returns:
        Mask of the sound chunks. The others may be damaged, or the core cannot read them; nothing is known of them.
    """
    is_sound = np.zeros(len(places.found), dtype=bool)
    if backend.is_remote:
        return is_sound
    chosen = _possible(places, bases)
    if bases is None:
        links = ChainLinks(places=places.some(chosen), begins=np.arange(len(chosen) + 1))
        wanted = None
    else:
        links, wanted, which = _links_of(places.some(chosen), bases)
        chosen = chosen[which]
    order, root = _by_chain(links)
    stored_bytes = places.entries["stored_bytes"][chosen].astype(np.int64)
    for part in parts_of(order, stored_bytes[order], _WINDOW_BYTES):
        try:
            with Load(backend, None, "", way_of_environment()) as load:
                if wanted is None:
                    failed = load.suspects(links.some(part))
                else:
                    failed = load.undecodable(links.some(part), wanted.some(part), root[part])
        except BlobNotFoundError:
            continue
        done = np.delete(part, failed)
        is_sound[chosen[done]] = True
        on_read(int(stored_bytes[done].sum()))
    return is_sound


class BlockScreen:
    """Screening of chunks whose stored bytes are in memory; a context manager, for many threads at once."""

    def __init__(self, backend: Backend, bases: Table) -> None:
        """Open nothing yet.

        Args:
            backend: Backend of the packs that hold the bases of deltas.
            bases: See `find_sound`.
        """
        self._bases = bases
        self._can_screen = not backend.is_remote
        self._load = Load(backend, None, "", "pread")

    def __enter__(self) -> BlockScreen:
        self._load.__enter__()
        return self

    def __exit__(self, *of_error: Any) -> None:
        self._load.__exit__(*of_error)

    def find_sound(self, places: Places, block: memoryview, begin: Any) -> Mask:
        """Decode chunks, and compare each with its digest and its stored bytes with theirs.

        Args:
            places: The chunks. Nothing in their entries is trusted.
            block: Their stored bytes.
            begin: For each chunk the start of its stored bytes in the block, which holds them all.

        Returns:
            See `find_sound`.
        """
        is_sound = np.zeros(len(places.found), dtype=bool)
        if not self._can_screen:
            return is_sound
        chosen = _possible(places, self._bases)
        sizes = places.entries["raw_bytes"].astype(np.int64)
        for part in parts_of(chosen, sizes[chosen], _PART_BYTES):
            links, wanted, which = _links_of(places.some(part), self._bases)
            numbers, counts = links.of_chunks(np.arange(len(which)))
            is_own = np.zeros(len(numbers), dtype=bool)
            is_own[links.begins[:-1]] = True
            buffer, begins = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
            begins[is_own] = begin[part[which]]
            others = np.flatnonzero(~is_own)
            try:
                stored = self._load.fetch(links.places.some(others), BASES_READ, from_storage=True)
            except (BlobNotFoundError, BackendError):
                continue
            buffer[others], begins[others] = stored.buffer + 1, stored.begin
            is_there = np.ones(len(numbers), dtype=bool)
            is_there[others] = stored.buffer >= 0
            able = np.flatnonzero(np.logical_and.reduceat(is_there, links.begins[:-1])) if len(which) else which
            taken, _ = links.of_chunks(able)
            buffers = [block, *stored.buffers]
            batch = Batch.of_buffers(able, counts[able], taken, buffer[taken], begins[taken], buffers)
            failed = decode(links, wanted, batch, source=np.arange(len(buffers)), buffers=buffers)
            self._load.give_back(stored)
            is_sound[part[which[np.setdiff1d(able, failed)]]] = True
        return is_sound


def _possible(places: Places, bases: Table | None) -> Any:
    """Return the numbers of the chunks with possible sizes and with all their bases."""
    possible = is_possible(places.entries)
    if bases is not None:
        possible &= find_chains([bases], places)[0]
    return np.flatnonzero(possible)


def _links_of(places: Places, bases: Table) -> tuple[ChainLinks, Wanted, Any]:
    """Return the links of the chunks with possible chains, these chunks, and their numbers; all have their bases."""
    sizes = places.entries["raw_bytes"].astype(np.int64)
    links = ChainLinks.of([places, *follow([bases], places)])
    counts = np.diff(links.begins)
    possible = counts <= MAX_DEPTH + 1
    wrong = list(check_links(links, sizes))
    possible[np.searchsorted(links.begins, wrong, side="right") - 1] = False
    chosen = np.flatnonzero(possible)
    digests = np.ascontiguousarray(places.entries["digest"][chosen])
    wanted = Wanted(digests=digests, target=Target.of_sizes(sizes[chosen]), verify=True, checks_stored=True)
    return links.some(chosen), wanted, chosen


def _by_chain(links: ChainLinks) -> tuple[Any, Any]:
    """Sort chunks so that each follows its base, and that chunks with one root are neighbours.

    Returns:
        The order, and for each chunk a number of its root: by the place of the end of its chain.
    """
    counts = np.diff(links.begins)
    place = links.places.pack.astype(np.int64) << _OFFSET_BITS | links.places.entries["offset"].astype(np.int64)
    levels = [
        np.where(level < counts, place[np.maximum(links.begins[1:] - 1 - level, 0)], -1)
        for level in range(int(counts.max(initial=1)))
    ]
    return np.lexsort(levels[::-1]), levels[0]
