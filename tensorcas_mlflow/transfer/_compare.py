"""Which refs of one store another one lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tensorcas_mlflow import threads
from tensorcas_mlflow.backends import Backend
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import BackendError, CorruptError, FormatError
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import Ref, Store
from tensorcas_mlflow.store.protocol import STAND_INS
from tensorcas_mlflow.transfer._report import Failure

_N_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A ref that is to be copied."""

    ref: Ref
    """The source's, changed to what the destination is to say."""
    manifest: Manifest
    """The destination's."""
    replaces: bool
    """Whether it may take the place of another one."""
    source: Ref
    """The source's, as it was read."""


State = Literal["there", "kept", "dropped"]
"""What became of a ref that is not to be copied: see `CopyReport`."""


def read_source(store: Store) -> tuple[list[Ref], list[Failure]]:
    """Read every ref of a store but stand-ins, in the order of their creation.

    Returns:
        The refs, and those that cannot be read.

    Raises:
        BackendError: The storage does not answer.
    """
    keys = [info.key for info in list_blobs(store.backend, "refs") if not info.key.startswith(f"{STAND_INS}/")]

    def read(key: str) -> Ref | Failure | None:
        try:
            return store.ref(key)
        except (FormatError, BackendError) as error:
            return _failure(store.backend, key, key, error)

    refs: list[Ref] = []
    failed: list[Failure] = []
    for found in threads.ordered_map(read, keys, waits=store.backend.is_remote):
        if isinstance(found, Ref):
            refs.append(found)
        elif found is not None:
            failed.append(found)
    return sorted(refs, key=lambda ref: (ref.created, ref.key)), failed


def compare(
    source: Store, destination: Store, refs: Sequence[Ref], *, replace: bool
) -> Iterator[tuple[Ref, Wanted | State | Failure]]:
    """Say of each ref what is to become of it.

    A ref that comes of the same commit is there already, without a look at anything else, and so is one of an equal
    manifest. Any other at its key is another one.

    Raises:
        BackendError: One of the storages does not answer.
    """
    keys = {info.key for info in list_blobs(destination.backend, "refs")}
    is_remote = source.backend.is_remote or destination.backend.is_remote

    def look(ref: Ref) -> Wanted | State | Failure:
        there: Ref | None = None
        is_taken = ref.key in keys
        if is_taken:
            try:
                there = destination.ref(ref.key)
                is_taken = there is not None
            except FormatError:
                pass  # damaged: another one
        if there is not None and there.write == ref.write != "":
            return "there"
        try:
            found = source.manifest(ref)
        except (FormatError, BackendError) as error:
            if not stands(source, ref):
                return "dropped"
            return _failure(source.backend, ref.label, f"manifests/{ref.manifest}", error)
        if found.store_id != source.id:
            return Failure(what=ref.label, reason=f"its manifest is of store {found.store_id}")
        manifest = of_store(found, destination.id)
        if there is not None and there.manifest[:64] == manifest.digest:
            return "there"
        if is_taken and not replace:
            return "kept"
        target = ref if source.id == destination.id else _for_another(ref)
        return Wanted(ref=target, manifest=manifest, replaces=is_taken, source=ref)

    for begin in range(0, len(refs), _N_TOGETHER):
        some = refs[begin : begin + _N_TOGETHER]
        yield from zip(some, threads.ordered_map(look, some, waits=is_remote), strict=True)


def of_store(manifest: Manifest, store_id: str) -> Manifest:
    """Give a manifest as a store of some id has it: byte for byte the same if it is of that id."""
    return manifest if manifest.store_id == store_id else dataclasses.replace(manifest, store_id=store_id)


def stands(store: Store, ref: Ref) -> bool:
    """Tell whether a ref is still there and says the same."""
    try:
        now = store.ref(ref.key)
    except FormatError:
        return True
    return now is not None and now.write == ref.write and now.manifest == ref.manifest


def _for_another(ref: Ref) -> Ref:
    """Say of a ref what holds in a store of another id.

    Where only a URI says where MLflow keeps a copy of the manifest, that copy goes on belonging to the source, and what
    becomes of it must not decide about this ref.
    """
    is_elsewhere = ref.path is None and ref.copy_path is None
    return dataclasses.replace(ref, uri=None) if is_elsewhere else ref


def _failure(backend: Backend, what: str, key: str, error: FormatError | BackendError) -> Failure:
    """Describe what cannot be read, if the storage answers at all; else it is not this blob's fault, and raises."""
    if isinstance(error, BackendError):
        backend.stat(key)
    return Failure(what=what, reason=error.reason if isinstance(error, CorruptError) else str(error))
