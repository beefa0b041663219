"""Self-contained checkpoints: a manifest and one pack in a folder, readable without any store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import BlobInfo, LocalBackend
from tensorcas_mlflow.chunking import DEFAULT_CHUNK_BYTES
from tensorcas_mlflow.digest import unique_rows
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.manifest import MAX_BYTES, Manifest
from tensorcas_mlflow.pack import PackWriter
from tensorcas_mlflow.store._catalog import Catalog, read_pack_table
from tensorcas_mlflow.store._encode import encode_chunks
from tensorcas_mlflow.store._read import read_rows
from tensorcas_mlflow.store._sources import TensorSource

MANIFEST_FILE = "checkpoint.arrow"
"""Name of a checkpoint's manifest inside a model's data folder."""
PAYLOAD_FILE = "chunks.pack"
"""Name of a self-contained model's chunks, beside its manifest."""

_PACK_NAME = "0" * 32


class _PayloadFolder(LocalBackend):
    """A folder whose one pack goes by `PAYLOAD_FILE`."""

    def _path(self, key: str) -> str:
        return os.fspath(self.root / PAYLOAD_FILE) if key == pack_key(_PACK_NAME) else super()._path(key)

    def list_dir(self, prefix: str) -> tuple[list[BlobInfo], list[str]]:
        pack = self.stat(pack_key(_PACK_NAME)) if prefix == "packs" else None
        return [pack] if pack is not None else [], []


def write_payload(
    folder: Path,
    tensors: Mapping[str, Array],
    *,
    flavor: str | None = None,
    cuts: Mapping[str, Sequence[int]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write a checkpoint that needs no store: equal chunks once, encoded as in a store.

    Args:
        folder: Where `MANIFEST_FILE` and `PAYLOAD_FILE` are written; it must hold neither.
        tensors: See `Store.write_checkpoint`, as the others.

    Raises:
        ValueError: A name, dtype or cut cannot be stored.
        BlobExistsError: The folder holds a payload already.
    """
    source = TensorSource(tensors, cuts or {}, DEFAULT_CHUNK_BYTES)
    manifest = Manifest(
        kind="checkpoint",
        chunk_bytes=DEFAULT_CHUNK_BYTES,
        store_id=None,
        flavor=flavor,
        metadata=metadata or {},
        rows=source.rows,
    )
    _, first, _ = unique_rows(manifest.digests)
    backend = _PayloadFolder(folder)
    backend.put_new(pack_key(_PACK_NAME), PackWriter().pieces(encode_chunks(source, np.sort(first))))
    backend.put_new(MANIFEST_FILE, [manifest.to_bytes()])
    return manifest


def read_payload(folder: Path, *, names: Iterable[str] | None = None, verify: bool = True) -> dict[str, Array]:
    """Read a self-contained checkpoint.

    Args:
        folder: What `write_payload` wrote, wherever it is now.
        names: Which tensors; all if not given.
        verify: Whether to check every chunk's bytes against its digest.

    Raises:
        FormatError: Its manifest or pack is damaged.
        TensorNotFoundError: There is none of some name.
        BlobNotFoundError: The folder holds no payload.
    """
    backend = _PayloadFolder(folder)
    manifest = Manifest.from_bytes(backend.get(MANIFEST_FILE, max_bytes=MAX_BYTES))
    catalog = Catalog(backend)
    catalog.add(_PACK_NAME, read_pack_table(backend, _PACK_NAME))
    wanted = manifest.names() if names is None else list(names)
    rows = [manifest.row(name) for name in wanted]
    arrays = read_rows(backend, catalog, rows, manifest.chunk_bytes, verify=verify)
    return dict(zip(wanted, arrays, strict=True))
