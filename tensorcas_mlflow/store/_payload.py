"""Self-contained checkpoints: a manifest and its tensors in one folder, readable without a store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.base.digest import digest_all
from tensorcas_mlflow.base.tensors import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.chunk_io import LastRow, TensorsFile
from tensorcas_mlflow.errors import ConflictError, CorruptError
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.layout.manifests import MAX_BYTES, Fill, Manifest, TensorsFileLayout, file_pieces
from tensorcas_mlflow.store._sources import TensorSource
from tensorcas_mlflow.store._store import Store

MANIFEST_FILE = "checkpoint.arrow"
"""Name of a checkpoint's manifest inside a model's data folder."""
PAYLOAD_FILE = "checkpoint.tensors"
"""Name of a self-contained model's tensors, beside its manifest."""


def write_payload(
    folder: Path,
    tensors: Mapping[str, Array],
    *,
    flavor: str | None = None,
    cuts: Mapping[str, Sequence[int]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Manifest:
    """Write a self-contained checkpoint.

    Args:
        folder: Folder for `MANIFEST_FILE` and `PAYLOAD_FILE`; it must hold neither.
        tensors: See `Store.write_checkpoint`, also for the others.

    Raises:
        ValueError: A name, dtype or cut cannot be stored.
        BlobExistsError: The folder holds a payload already.
        ConflictError: An array changed during the write.
    """
    source = TensorSource(tensors, cuts or {}, DEFAULT_CHUNK_BYTES)
    manifest = Manifest(
        kind="checkpoint",
        chunk_bytes=DEFAULT_CHUNK_BYTES,
        store_id=None,
        flavor=flavor,
        metadata=metadata or {},
        left_out=left_out or {},
        rows=source.rows,
    )
    _write(folder, manifest, _from_arrays(source, manifest))
    return manifest


def read_payload(folder: Path, *, names: Iterable[str] | None = None, verify: bool = True) -> dict[str, Array]:
    """Read a self-contained checkpoint.

    Args:
        folder: A folder written by `write_payload`, wherever it is now.
        names: The tensors; all by default.
        verify: Whether to check every chunk's bytes against its digest.

    Raises:
        FormatError: Its manifest or payload is damaged, or they do not belong together.
        TensorNotFoundError: A name has no tensor.
        BlobNotFoundError: The folder holds no payload.
    """
    return _payload_in(folder).read(names, verify=verify)


def copy_payload(folder: Path, source: Store | Path, manifest: Manifest) -> Manifest:
    """Write a self-contained checkpoint from stored tensors.

    Args:
        folder: See `write_payload`.
        source: The store of the tensors, or a folder with a payload.
        manifest: Manifest of the tensors.

    Returns:
        The written manifest, without a store's id.

    Raises:
        FormatError: The stored data is damaged.
        BlobExistsError: The folder holds a payload already.
    """
    bare = manifest.in_full(store_id=None)
    _write(folder, bare, _payload_in(source).fill if isinstance(source, Path) else _from_store(source, manifest))
    return bare


def payload_bytes(store: Store, ref: Ref) -> int:
    """Return the size of a checkpoint's self-contained file.

    Raises:
        FormatError: Its manifest is damaged.
        BlobNotFoundError: Its manifest is gone.
    """
    blob = store.backend.get(f"manifests/{ref.manifest}", max_bytes=MAX_BYTES)
    return TensorsFileLayout.of(_in_full(Manifest.from_blob(blob, ref.manifest))).n_bytes


def payload_pieces(store: Store, manifest: Manifest) -> Iterator[bytes | bytearray]:
    """Yield the self-contained file of a checkpoint from its store, every chunk verified, about 16 MiB at a time.

    Raises:
        ChunkNotFoundError: A chunk is not in the store.
        CorruptChunkError: A chunk is damaged.
    """
    return file_pieces(_in_full(manifest), _from_store(store, manifest))


def _in_full(manifest: Manifest) -> Manifest:
    return manifest.in_full(store_id=manifest.store_id)


def _write(folder: Path, manifest: Manifest, fill: Fill) -> None:
    backend = LocalBackend(folder)
    backend.put_new(PAYLOAD_FILE, file_pieces(manifest, fill))
    backend.put_new(MANIFEST_FILE, [manifest.to_bytes()])


def _payload_in(folder: Path) -> TensorsFile:
    stream = LocalBackend(folder).get(MANIFEST_FILE, max_bytes=MAX_BYTES)
    file = folder / PAYLOAD_FILE
    payload = TensorsFile(file)
    if payload.manifest.stream != stream:
        raise CorruptError(os.fspath(file), f"its manifest is not the one in {MANIFEST_FILE!r} beside it")
    return payload


def _from_store(store: Store, manifest: Manifest) -> Fill:
    last = LastRow()

    def fill(first: int, outs: list[memoryview]) -> None:
        store.chunks.read_chunks(manifest, np.arange(first, first + len(outs)), outs, verify=True, last=last)

    return fill


def _from_arrays(source: TensorSource, manifest: Manifest) -> Fill:
    chunks = (piece for group in source.pieces(np.arange(len(manifest.digests))) for piece in group.data)

    def fill(first: int, outs: list[memoryview]) -> None:
        # In this order: no chunk is drawn without a buffer for it.
        for out, chunk in zip(outs, chunks, strict=False):
            out[:] = chunk
        # The arrays may be a live model's.
        if (digest_all(outs) != manifest.digests[first : first + len(outs)]).any():
            raise ConflictError("the tensors were changed while they were saved: save them again")

    return fill
