"""Casts in which chunks are stored as deltas, and writers that write such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.base.digest import Digests, digest, unique_rows
from tensorcas_mlflow.codecs import DELTA, RAW
from tensorcas_mlflow.errors import BlobNotFoundError, FencedError
from tensorcas_mlflow.layout import RefTarget, new_ref, ref_bytes
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import Base, Payload, pack_key
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import _save as claim
from tensorcas_mlflow.store.protocol import FORMAT, Condemnation, new_format, read_condemned, read_pack_table
from tests.protocol.casts import CHUNK_BYTES, RUN_ID, STORE_ID, Cast, chunk, key_of, open_store, save, tensors_of
from tests.protocol.interleave import Blobs, blobs_of, memory_of

_MAX_ATTEMPTS = 4
_MANIFESTS: dict[str, tuple[Manifest, bytes]] = {}


def stored(steps: Mapping[int, str], *packs: str, drop: Sequence[int] = ()) -> Cast:
    """A store made pack by pack.

    Args:
        steps: The chunks of each step.
        packs: What each holds: ``a`` is a chunk in full, ``b<a`` one as a delta against the copy of another in the
            pack before that has it. Several are parted by spaces.
        drop: Steps whose refs are dropped at the start.
    """
    memory = MemoryBackend()
    memory.put_new(FORMAT, [new_format(CHUNK_BYTES, STORE_ID)])
    store = open_store(memory)
    names: list[str] = []
    for number, held in enumerate(packs):
        payloads = [_payload(store, each, names) for each in held.split()]
        # Names in the order in which the packs are given, so that each run of a test is the same.
        names.append(f"{number + 1:032x}")
        memory.put_new(pack_key(names[-1]), claim.PackWriter().pieces(payloads))
        memory.put_new(f"index/{names[-1]}.loose", [])
    for step, letters in steps.items():
        save(store, letters, step)
    cast = Cast(before=steps, may_hold={step: {letters} for step, letters in steps.items()}, start=blobs_of(memory))
    return cast.drop(*drop) if drop else cast


def delta_writer(cast: Cast, name: str, letters: str, step: int, *, against: Mapping[str, str]) -> Cast:
    """Add a writer that stores what is new as a delta where it can.

    Args:
        against: For a letter the one whose chunk is to be its base, if the store has that.
    """

    def program(backend: Backend) -> None:
        DeltaSave(open_store(backend), letters, against).commit(step)

    cast.actors[name] = program
    cast.may_hold.setdefault(step, set()).add(letters)
    cast.saved_by[name] = step
    return cast


class DeltaSave:
    """The steps of a save that writes deltas, by the rules of ``docs/design/protocol.md``."""

    def __init__(self, store: Store, letters: str, against: Mapping[str, str]) -> None:
        self.backend, self.catalog = store.backend, store.catalog
        self.letters, self.against = letters, against
        self.manifest, self.blob = manifest_of(letters)
        self.digests = unique_rows(self.manifest.digests)[0]

    def commit(self, step: int) -> None:
        target = RefTarget(run_id=RUN_ID, step=step)
        for _ in range(_MAX_ATTEMPTS):
            bases = self.possible_bases()
            name = f"{self.manifest.digest}.{claim.new_name()[:8]}"
            source, token = claim.declare(self.backend, name, self.digests, self.declared(bases))
            condemned = self.condemned()
            missing = claim.probe(self.backend, self.catalog, self.digests, condemned)
            usable = {each: base for each, base in bases.items() if self.is_usable(base, condemned)}
            lacking = {row.tobytes() for row in self.digests[missing]}
            new = [letter for letter in self.letters if digest(chunk(letter)) in lacking]
            claim.write_packs(self.backend, self.catalog, iter([_delta(each, usable) for each in new]), condemned)
            self.backend.put_new(f"manifests/{name}", [self.blob])
            ref = new_ref(target, key=key_of(step), kind="checkpoint", manifest=name, n_bytes=1, flavor=None)
            try:
                self.backend.promote(source, ref.key, ref_bytes(ref), token=token, replace=True)
            except BlobNotFoundError:
                continue
            return
        raise FencedError(_MAX_ATTEMPTS)

    def possible_bases(self) -> dict[str, tuple[Base, frozenset[str], str]]:
        """For each letter its base, as the index has it, the packs that this takes, and the base's letter."""
        self.catalog.refresh()
        found = {}
        for letter, other in self.against.items():
            places = self.catalog.find(digests_of(other))
            if letter in self.letters and places.found.all():
                base = Base(
                    pack=places.packs[int(places.pack[0])],
                    digest=digest(chunk(other)),
                    depth=int(places.entries["depth"][0]),
                )
                found[letter] = (base, frozenset({base.pack} | self.catalog.find_chains(places)[1]), other)
        return found

    def declared(self, bases: Mapping[str, tuple[Base, frozenset[str], str]]) -> frozenset[str]:
        """Return the packs named by the intent: those with the bases."""
        return frozenset(base.pack for base, _, _ in bases.values())

    def condemned(self) -> Condemnation:
        return read_condemned(self.backend)

    def is_usable(self, base: tuple[Base, frozenset[str], str], condemned: Condemnation) -> bool:
        """Return True if the packs of the base all exist and none is condemned."""
        _, packs, _ = base
        return not packs & condemned.packs and not self.backend.missing(map(pack_key, sorted(packs)))


def manifest_of(letters: str) -> tuple[Manifest, bytes]:
    """The manifest of some chunks, and its blob."""
    if letters not in _MANIFESTS:
        apart = open_store(memory_of(Cast().blobs()))
        with apart.begin_checkpoint(tensors_of(letters)) as pending:
            _MANIFESTS[letters] = (pending.manifest, pending.manifest.to_blob())
    return _MANIFESTS[letters]


def digests_of(letters: str) -> Digests:
    return np.frombuffer(b"".join(digest(chunk(letter)) for letter in letters), np.uint8).reshape(-1, 32)


def _payload(store: Store, said: str, names: Sequence[str]) -> Payload:
    letter, _, other = said.partition("<")
    for name in reversed(names) if other else ():
        table = read_pack_table(store.backend, name)
        rows = np.flatnonzero((table["digest"] == digests_of(other)[0]).all(axis=1))
        if len(rows):
            base = Base(pack=name, digest=digest(chunk(other)), depth=int(table["depth"][rows[0]]))
            return _delta(letter, {letter: (base, frozenset(), other)})
    assert not other, f"no pack holds {other}"
    return _delta(letter, {})


def _delta(letter: str, usable: Mapping[str, tuple[Base, Any, str]]) -> Payload:
    raw = chunk(letter).tobytes()
    base, _, other = usable.get(letter, (None, None, ""))
    return Payload(
        digest=digest(raw),
        raw_bytes=len(raw),
        codec=RAW if base is None else DELTA,
        typesize=1,
        data=raw if base is None else DELTA.encode(raw, 1, chunk(other).tobytes()),
        begins_row=False,
        base=base,
    )


__all__ = ["Blobs", "DeltaSave", "delta_writer", "digests_of", "manifest_of", "stored"]
