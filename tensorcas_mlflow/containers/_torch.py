"""What torch's archives say of their storages.

An archive of `torch.save` is a zip file of stored entries: ``<name>/data.pkl`` first, then among others
``<name>/byteorder``, then one entry ``<name>/data/<key>`` a storage. See
https://docs.pytorch.org/docs/stable/notes/serialization.html, and ``caffe2/serialize/inline_container.h`` in PyTorch.

Archives of `torch.jit` and `torch.export` have their storages before what tells of them. Such a storage is announced by
the name of its entry, and what the archive says of it is `Learned` later.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from tensorcas_mlflow.containers._parts import Tensor
from tensorcas_mlflow.containers._pickle_ops import MALFORMED
from tensorcas_mlflow.containers._pt2 import PT2_DEFAULT_MODEL, PT2_TABLE, pt2_payloads
from tensorcas_mlflow.containers._tensor_fact import item_bytes
from tensorcas_mlflow.containers._torch_pickle import StorageFact, dense_shape, storages_of
from tensorcas_mlflow.tensor import MAX_TENSOR_BYTES

_MAX_PICKLE_BYTES = 32 << 20
_MAX_WORD_BYTES = 64
_MAX_PASSED = 1 << 17
"""Storages of which it is remembered that they have passed; those after them keep their entries' names."""

_STORAGE = re.compile(r"[^/]+/(?:(?:data|constants)/\d+|data/(?:weights/weight|constants/tensor)_\d+)")
_JIT_TABLE = re.compile(r"(data|constants)\.pkl")


class TorchArchive:
    """What one zip file has said so far, if it is a torch archive; knows nothing if it is none."""

    def __init__(self, name: str = "") -> None:
        """Begin before the first entry.

        Args:
            name: Of a tensor that is all of the archive and has no name in it.
        """
        self._name = name
        self._storages: Mapping[str, StorageFact] = {}
        self._folder: str | None = None
        self._root = ""
        self._is_little = True
        self._passed: dict[str, int] = {}
        """Sizes of the storages that came before what tells of them, by their entries' names."""

    def wants(self, entry: str) -> int:
        """Get how many bytes of an entry to `read` at most; asked of every entry, in the file's order.

        Returns:
            0 for an entry that says nothing of storages.
        """
        if self._folder is None:
            is_pickle = entry.endswith("/data.pkl")
            self._folder = entry.removesuffix("data.pkl") if is_pickle else ""
            self._root = entry[: entry.find("/") + 1]
            return _MAX_PICKLE_BYTES if is_pickle else 0
        if self._is_late_table(entry):
            return _MAX_PICKLE_BYTES
        return _MAX_WORD_BYTES if self._folder and entry == self._folder + "byteorder" else 0

    def read(self, entry: str, data: bytes) -> dict[str, Tensor]:
        """Learn from an entry that is wanted; from nonsense nothing.

        Returns:
            What it says of storages that have passed, for `Learned`. No storage is given twice.
        """
        if self._is_late_table(entry):
            return self._learn(entry, data)
        if entry.endswith("/byteorder"):
            self._is_little = data == b"little"
            return {}
        try:
            self._storages = storages_of(data)
        except MALFORMED:
            self._storages = {}
        return {}

    def storage(self, entry: str) -> StorageFact | None:
        """Get what is known of the storage in an entry; None if there is none, or nothing."""
        if not self._storages or not self._folder or not entry.startswith(self._folder + "data/"):
            return None
        fact = self._storages.get(entry[len(self._folder) + len("data/") :])
        if fact is None or not 0 <= fact.n_bytes <= MAX_TENSOR_BYTES:
            return None
        if not fact.name and len(self._storages) == 1:
            fact = dataclasses.replace(fact, name=self._name)
        # The bytes of another byte order are kept as they are, and nobody says that they are what they are not.
        return fact if self._is_little else dataclasses.replace(fact, dtype=None, shape=None)

    # --- storages that come before what tells of them

    def is_storage(self, entry: str) -> bool:
        """Tell whether an entry has the name of a storage of which nothing may be known yet."""
        return bool(_STORAGE.fullmatch(entry))

    def passed(self, entry: str, n_bytes: int) -> None:
        """Take note of the size of an entry that has passed."""
        if self.is_storage(entry) and len(self._passed) < _MAX_PASSED:
            self._passed[entry] = n_bytes

    def _learn(self, entry: str, data: bytes) -> dict[str, Tensor]:
        """Read what a table says of storages that have passed; see `read`."""
        learned: dict[str, Tensor] = {}
        pickled = _JIT_TABLE.fullmatch(entry, len(self._root))
        try:
            tensors = self._of_pickle(pickled[1], data) if pickled else self._of_table(entry, data)
            for path, tensor in tensors:
                # A storage of which many see a part has the name of one that sees all of it, if there is any.
                if path not in learned or learned[path].shape is None:
                    learned[path] = tensor
        except MALFORMED:
            return {}
        finally:
            for path in learned:
                del self._passed[path]
        return learned

    def _is_late_table(self, entry: str) -> bool:
        if not self._passed or not self._root or not entry.startswith(self._root):
            return False
        at = len(self._root)
        return bool(_JIT_TABLE.fullmatch(entry, at) or PT2_TABLE.fullmatch(entry, at))

    def _of_pickle(self, folder: str, data: bytes) -> Iterator[tuple[str, Tensor]]:
        for key, fact in storages_of(data).items():
            path = f"{self._root}{folder}/{key}"
            if self._passed.get(path) == fact.n_bytes:
                # TorchScript calls its constants so.
                name = f"{folder}.{fact.name}" if folder == "constants" and fact.name else fact.name or path
                yield path, Tensor(n_bytes=fact.n_bytes, name=name, dtype=fact.dtype, shape=fact.shape)

    def _of_table(self, entry: str, data: bytes) -> Iterator[tuple[str, Tensor]]:
        table = PT2_TABLE.fullmatch(entry, len(self._root))
        model = "" if table is None else table["weights"] or table["constants"]
        prefix = "" if model == PT2_DEFAULT_MODEL else f"{model}/"
        folder = entry[: entry.rfind("/") + 1]
        for view, _ in pt2_payloads(data):
            path = folder + view.key
            n_bytes = self._passed.get(path)
            if n_bytes is None:
                continue
            shape = dense_shape(view.size, view.stride)
            if view.dtype and (shape is None or math.prod(shape) * item_bytes(view.dtype) != n_bytes):
                yield path, Tensor(n_bytes=n_bytes, name=path, dtype=view.dtype)
            else:
                name = prefix + view.name
                yield path, Tensor(n_bytes=n_bytes, name=name, dtype=view.dtype, shape=shape if view.dtype else None)
