"""What a `torch.save` archive says of its storages before they come.

Such an archive is a zip file of stored entries: ``<name>/data.pkl`` first, then among others ``<name>/byteorder``, then
one entry ``<name>/data/<key>`` a storage. See https://docs.pytorch.org/docs/stable/notes/serialization.html, and
``caffe2/serialize/inline_container.h`` in PyTorch. Archives of `torch.jit` and `torch.export` have their storages
before what tells of them; those are found without this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tensorcas_mlflow.containers._pickle_ops import MALFORMED
from tensorcas_mlflow.containers._torch_pickle import StorageFact, storages_of
from tensorcas_mlflow.tensor import MAX_TENSOR_BYTES

_MAX_PICKLE_BYTES = 32 << 20
_MAX_WORD_BYTES = 64


class TorchArchive:
    """What one zip file has said so far, if it is a torch archive; knows nothing if it is none."""

    def __init__(self) -> None:
        self._storages: Mapping[str, StorageFact] = {}
        self._folder: str | None = None
        self._is_little = True

    def wants(self, entry: str) -> int:
        """Get how many bytes of an entry to `read` at most; asked of every entry, in the file's order.

        Returns:
            0 for an entry that says nothing of storages to come.
        """
        if self._folder is None:
            is_pickle = entry.endswith("/data.pkl")
            self._folder = entry.removesuffix("data.pkl") if is_pickle else ""
            return _MAX_PICKLE_BYTES if is_pickle else 0
        return _MAX_WORD_BYTES if self._folder and entry == self._folder + "byteorder" else 0

    def read(self, entry: str, data: bytes) -> None:
        """Learn from an entry that is wanted; from nonsense nothing."""
        if entry.endswith("/byteorder"):
            self._is_little = data == b"little"
            return
        try:
            self._storages = storages_of(data)
        except MALFORMED:
            self._storages = {}

    def storage(self, entry: str) -> StorageFact | None:
        """Get what is known of the storage in an entry; None if there is none, or nothing."""
        if not self._storages or not self._folder or not entry.startswith(self._folder + "data/"):
            return None
        fact = self._storages.get(entry[len(self._folder) + len("data/") :])
        if fact is None or not 0 <= fact.n_bytes <= MAX_TENSOR_BYTES:
            return None
        # The bytes of another byte order are kept as they are, and nobody says that they are what they are not.
        return fact if self._is_little else dataclasses.replace(fact, dtype=None, shape=None)
