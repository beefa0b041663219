"""Reading of deltas, part by part, each together with every chunk needed to decode it.

A delta is added to a base, and the base may be a delta too: a chain, ended by a chunk without a base. A thread
reads the chunks needed by one part, and decodes chain after chain: it reuses the memory, and threads wait for each
other once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensorcas_mlflow import threads
from tensorcas_mlflow.codecs import RAW, codec_numbered
from tensorcas_mlflow.config import n_threads
from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import BlobNotFoundError, FormatError
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.pack import bases_of, is_delta
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._load import Load, StoredBytes, digests_of
from tensorcas_mlflow.store._lookup import Places
from tensorcas_mlflow.store._take import Damage, Wanted, check_sizes
from tensorcas_mlflow.store._target import Target

_PART_BYTES = 1 << 20
"""Size of the chunks read and decoded together. More are read no faster from memory, and each thread takes several
times as much memory."""
_LEAST_PART_BYTES = 512 << 10
_PARTS_PER_THREAD = 3
"""Small reads are divided into smaller parts, so no thread waits long for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of the chains of some deltas: every chunk needed to decode them."""

    places: Places
    """Places of all links: those of one delta after the other, each beginning with the delta itself, then its base,
    then the base of that."""
    begins: Any
    """For each delta the number of its first link; and at the end the number of all."""

    @classmethod
    def of(cls, catalog: Catalog, deltas: Places) -> Links:
        """Follow deltas to the ends of their chains.

        Raises:
            BlobNotFoundError: A pack lacks the base a delta names, as far as is known.
        """
        levels, chains = [deltas], [np.arange(len(deltas.found))]
        while (at := np.flatnonzero(is_delta(levels[-1].entries))).size:
            entries = levels[-1].entries[at]
            bases = catalog.find_bases(entries)
            if not bases.found.all():
                raise BlobNotFoundError(pack_key(bases_of(entries[~bases.found])[0].pack))
            levels.append(bases)
            chains.append(chains[-1][at])
        chain = np.concatenate(chains)
        lengths = np.bincount(chain, minlength=len(deltas.found))
        places = Places.joined(levels).some(np.argsort(chain, kind="stable"))
        return cls(places=places, begins=np.append(0, lengths.cumsum()))


class DeltaReading:
    """Reading of deltas from given places."""

    def __init__(self, load: Load, links: Links, wanted: Wanted) -> None:
        """Prepare the read.

        Args:
            load: The load it belongs to.
            links: The chunks the deltas need.
            wanted: The deltas, and no other chunks.
        """
        self._load = load
        self._links = links
        self._wanted = wanted

    def run(self) -> list[Damage]:
        """Read and decode; return the damage, by number of the delta.

        Raises:
            BlobNotFoundError: A pack is gone.
            BackendError: Another machine does not answer.
        """
        damaged = self._impossible()
        sizes = self._wanted.target.n_bytes
        left = np.setdiff1d(np.arange(len(sizes)), [damage.chunk for damage in damaged])

        def run(part: Any) -> None:
            damaged.extend(self._read(part))

        threads.run_all(run, _parts(left, sizes[left]), waits=self._load.waits)
        return damaged

    def _impossible(self) -> list[Damage]:
        """Return the deltas with impossible entries among their links, before an entry costs memory."""
        begins, places = self._links.begins, self._links.places
        sizes = np.repeat(self._wanted.target.n_bytes, np.diff(begins))
        claimed = Wanted(digests=digests_of(places), target=Target.of_sizes(sizes), verify=False)
        found: dict[int, Damage] = {}
        for damage in check_sizes(places, claimed):
            delta = int(np.searchsorted(begins, damage.chunk, side="right")) - 1
            found[delta] = self._damage(delta, damage.chunk - int(begins[delta]), damage.reason)
        return list(found.values())

    def _read(self, part: Any, *, from_storage: bool = False) -> list[Damage]:
        """Read and decode some deltas, by number."""
        begins = self._links.begins
        counts = begins[part + 1] - begins[part]
        ends = counts.cumsum()
        numbers = np.repeat(begins[part] - ends + counts, counts) + np.arange(ends[-1])
        with self._load.stored(self._links.places.some(numbers), from_storage=from_storage) as stored:
            damaged = self._decode(part, ends - counts, stored)
            if not damaged:
                self._load.accept(stored)
            if not damaged or not self._load.refuse(stored):
                return damaged
        return self._read(np.array(sorted(damage.chunk for damage in damaged)), from_storage=True)

    def _decode(self, part: Any, firsts: Any, stored: StoredBytes) -> list[Damage]:
        """Decode the bytes read.

        Args:
            part: Numbers of the deltas.
            firsts: For each the number of its first link among the bytes read.
            stored: The bytes read.
        """
        damaged: list[Damage] = []
        unread = {damage.chunk: damage for damage in stored.damaged}
        most = int(self._wanted.target.n_bytes[part].max())
        areas = [self._load.scratch.take(most) for _ in range(2)]
        memory = [area.data for area in areas]
        for delta, first in zip(part.tolist(), firsts.tolist(), strict=True):
            n_links = int(self._links.begins[delta + 1] - self._links.begins[delta])
            lost = [unread[link] for link in range(first, first + n_links) if link in unread]
            if lost:
                number = lost[0].chunk - first
                damaged.append(replace(self._damage(delta, number, lost[0].reason), error=lost[0].error))
                continue
            links = [stored.target.view(link) for link in range(first, first + n_links)]
            if self._decode_chain(delta, links, memory) is not None:
                fault = self._decode_chain(delta, links, memory, checks_all=True)
                assert fault is not None, "what fails once fails again"
                damaged.append(self._damage(delta, *fault))
        for area in areas:
            self._load.scratch.give_back(area)
        return damaged

    def _decode_chain(
        self, delta: int, links: list[memoryview], areas: list[memoryview], *, checks_all: bool = False
    ) -> tuple[int, str] | None:
        """Decode a delta into place; return the first faulty link and its fault.

        Args:
            delta: Its number.
            links: The stored bytes of its links, its own first.
            areas: Two pieces of memory for bases, each as long as the chunk at least.
            checks_all: Whether to compare each link with its digest; otherwise a wrong base shows only in the
                result.
        """
        out = self._wanted.target.view(delta)
        begin = int(self._links.begins[delta])
        entries = self._links.places.entries[begin : begin + len(links)]
        codecs = entries["codec"].tolist()
        base: memoryview | None = None
        for number in range(len(links) - 1, -1, -1):
            chunk = areas[number & 1][: len(out)] if number else out
            try:
                if number and codecs[number] == RAW.number:
                    chunk = links[number]
                else:
                    codec_numbered(codecs[number]).decode_into(links[number], chunk, base)
            except FormatError as error:
                return number, str(error)
            if checks_all or (not number and self._wanted.verify):
                expected = entries["digest"][number] if number else self._wanted.digests[delta]
                if (actual := digest(chunk)) != expected.tobytes():
                    return number, f"its bytes hash to {actual.hex()}"
            base = chunk
        return None

    def _damage(self, delta: int, number: int, reason: str) -> Damage:
        """Describe damage in a link: the delta itself is the first, number 0."""
        link = int(self._links.begins[delta]) + number
        places = self._links.places
        return Damage(
            chunk=delta,
            key=pack_key(places.packs[int(places.pack[link])]),
            reason=reason,
            base=places.entries["digest"][link].tobytes() if number else None,
        )


def _parts(deltas: Any, sizes: Any) -> list[Any]:
    """Split deltas, in their order, into parts of about equal size."""
    if len(deltas) == 0:
        return []
    begins = sizes.cumsum() - sizes
    total = int(sizes.sum())
    each = min(_PART_BYTES, max(_LEAST_PART_BYTES, total // (_PARTS_PER_THREAD * n_threads())))
    return np.split(deltas, np.flatnonzero(np.diff(begins // each)) + 1)
