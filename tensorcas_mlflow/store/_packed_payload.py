"""Self-contained models of releases before `PAYLOAD_FILE`: one pack beside the manifest. Read only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import BlobInfo, LocalBackend
from tensorcas_mlflow.index import pack_key
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store._catalog import Catalog
from tensorcas_mlflow.store._owner import Owner
from tensorcas_mlflow.store._packs import read_pack_table
from tensorcas_mlflow.store._read import ChunkReader

PACKED_FILE = "chunks.pack"
"""Name of the pack."""

_PACK_NAME = "0" * 32


class _PackFolder(LocalBackend):
    """A folder whose one pack is named `PACKED_FILE`."""

    def _path(self, key: str) -> str:
        return os.fspath(self.root / PACKED_FILE) if key == pack_key(_PACK_NAME) else super()._path(key)

    def list_dir(self, prefix: str) -> tuple[list[BlobInfo], list[str]]:
        pack = self.stat(pack_key(_PACK_NAME)) if prefix == "packs" else None
        return [pack] if pack is not None else [], []


class PackedPayload:
    """The tensors of such a folder."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Read the pack's table.

        Raises:
            CorruptError: The pack is damaged.
            BlobNotFoundError: There is none.
        """
        self.manifest = manifest
        self._backend = _PackFolder(folder)
        catalog = Catalog(self._backend, manifest.store_id or "")
        catalog.add(_PACK_NAME, read_pack_table(self._backend, _PACK_NAME))
        self._chunks = ChunkReader(self._backend, catalog)

    def read(self, names: Iterable[str] | None = None, *, verify: bool = True) -> dict[str, Array]:
        """Read tensors; see `Store.read_tensors`."""
        return self._chunks.tensors(self.manifest, names, verify=verify)

    def fill(self, first: int, outs: list[memoryview]) -> None:
        """Read consecutive chunks and verify them: a `tensors_file.Fill`."""
        digests = self.manifest.digests[first : first + len(outs)]
        owner = Owner(label=self.manifest.label, rows=self.manifest.rows, first=first)
        self._chunks.read(digests, outs, verify=True, owner=owner)
