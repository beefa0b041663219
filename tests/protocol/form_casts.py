"""Casts with forms, and optimizations that write such: a capital's tensor is the other letter's, transposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.maintenance._optimize_forms import StoredRefs, write_in_full
from tests.forms.forming import derive
from tests.protocol.casts import Cast, chunk, collect, key_of, open_store, save
from tests.protocol.interleave import blobs_of, memory_of


def with_forms(cast: Cast, forms: Mapping[int, str], drop: Sequence[int] = ()) -> Cast:
    """Derive tensors of some steps at the start, given by their letters, and drop steps."""
    memory = memory_of(cast.blobs())
    store = open_store(memory)
    for step, letters in forms.items():
        ref = store.ref(key_of(step))
        assert ref is not None
        assert derive(store, ref, letters, chunk)
    cast.start = blobs_of(memory)
    return cast.drop(*drop) if drop else cast


def deriver(cast: Cast, name: str, step: int, letters: str) -> Cast:
    """Add an optimization that has found the functions of some tensors of a step."""

    def program(backend: Backend) -> None:
        store = open_store(backend)
        ref = store.ref(key_of(step))
        if ref is not None:
            derive(store, ref, letters, chunk)

    cast.actors[name] = program
    return cast


def restorer(cast: Cast, name: str, step: int) -> Cast:
    """Add an optimization that stores a step in full again, in the place of its form."""

    def program(backend: Backend) -> None:
        store = open_store(backend)
        found = StoredRefs.read(store)
        write_in_full(store, found, {ref.manifest for ref in found.refs if ref.step == step})

    cast.actors[name] = program
    return cast


def saver_of_known(cast: Cast, name: str, letters: str, step: int, again: int) -> Cast:
    """Add somebody who deletes a step, and saves the same as another one, relying on the manifest that it knows."""

    def program(backend: Backend) -> None:
        store = open_store(backend)
        ref = store.ref(key_of(step))
        assert ref is not None
        store.catalog.know_manifest(store.manifest(ref).digest, ref.manifest)
        backend.delete(key_of(step))
        save(store, letters, again)

    cast.actors[name] = program
    cast.dropped.add(step)
    cast.may_hold.setdefault(again, set()).add(letters)
    cast.saved_by[name] = again
    return cast


def collected(cast: Cast) -> Cast:
    """Collect before the start."""
    memory = memory_of(cast.blobs())
    for _ in range(2):
        collect(open_store(memory), max_waste=0)
    cast.start = blobs_of(memory)
    return cast
