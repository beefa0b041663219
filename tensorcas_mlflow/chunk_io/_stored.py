"""Stored chunks that another call of the compiled core reads and decodes: the encoder, for the bases of deltas."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.backends import Backend, BlobFile
from tensorcas_mlflow.base.digest import Digests
from tensorcas_mlflow.chunk_io._decode import FILE, Batch, ChainLinks, Wanted, tables_of
from tensorcas_mlflow.chunk_io._fetch import check_links
from tensorcas_mlflow.chunk_io._plan import Target
from tensorcas_mlflow.chunk_io._ways import LOCAL_GAP_BYTES
from tensorcas_mlflow.errors import BackendError, CorruptError, NotFoundError
from tensorcas_mlflow.layout.packs import pack_key

_MOST_PACKS = 64
"""Bound of the packs kept open for the chunks of one save."""


class StoredChunks(NamedTuple):
    """Tables of stored chunks and their bases, as the core reads them; valid while their packs are open.

    Each chunk is a part of its own, with the chunk's number.
    """

    tables: tuple[Any, Any, Any, Any]
    """The reads, links, chunks and parts (``native/src/decode.h``)."""


class OpenPacks:
    """Local packs kept open for reads by the core, a bounded number of them. For one thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._files: dict[str, BlobFile] = {}

    def close(self) -> None:
        """Close the packs.

        The core may still be reading one for a save that was given up. It compares what it reads with digests, so
        another file with the same descriptor does no harm.
        """
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def chunks(self, links: ChainLinks, digests: Digests) -> StoredChunks | None:
        """Describe stored chunks for the core.

        Args:
            links: The links of the chunks.
            digests: The chunks.

        Returns:
            None if the core cannot read them: an entry is impossible, or a pack is no local file or cannot be opened.
        """
        firsts = links.begins[:-1]
        sizes = links.places.entries["raw_bytes"][firsts].astype(np.int64)
        if check_links(links, sizes):
            return None
        numbers = np.arange(len(digests))
        batch = Batch.of(links, numbers, numbers, LOCAL_GAP_BYTES)
        packs, pack = np.unique(batch.read_pack, return_inverse=True)
        files = [self._open(links.places.packs[number]) for number in packs.tolist()]
        source = np.empty(len(pack), np.int64)
        n_read = batch.read_stop - batch.read_start
        for number, file in enumerate(files):
            mine = pack == number
            if file is None or (batch.read_stop[mine] > file.size).any():
                return None
            file.count(int(n_read[mine].sum()), int(mine.sum()))
            source[mine] = file.descriptor
        none = np.zeros_like(sizes)  # the encoder puts them nowhere
        target = Target(blocks=(), block=none, start=none, n_bytes=sizes)
        wanted = Wanted(digests=digests, target=target, verify=True)
        return StoredChunks(tables=tables_of(links, wanted, batch, source=source, kind=FILE))

    def _open(self, pack: str) -> BlobFile | None:
        file = self._files.get(pack)
        if file is None and len(self._files) < _MOST_PACKS:
            with contextlib.suppress(NotFoundError, BackendError, CorruptError):
                file = self._backend.open_file(pack_key(pack))
            if file is not None:
                self._files[pack] = file
        return file
