"""Writing what `torch.save` writes for a state dict, without torch.

A zip archive (https://docs.pytorch.org/docs/stable/notes/serialization.html) with the pickle of an ``OrderedDict`` in
``data.pkl``, then ``byteorder``, one record a tensor, and ``version``. In the pickle a tensor is a call of
``torch._utils._rebuild_tensor_v2`` on a typed storage; of dtypes that have no class of storage, ``_rebuild_tensor_v3``
on bytes. torch.load reads it with ``weights_only`` and with ``mmap``, from release 2.4 on.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tensorcas_mlflow.formats._write_layout import FileLayout, check_dtypes, strides_of
from tensorcas_mlflow.formats._write_zip import Member, ZipLayout
from tensorcas_mlflow.tensor import Spec

_FOLDER = "archive/"
_VERSION = b"3\n"
DTYPES: Mapping[str, str | None] = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
    "uint16": None,
    "uint32": None,
    "uint64": None,
    "float8_e4m3fn": None,
    "float8_e4m3fnuz": None,
    "float8_e5m2": None,
    "float8_e5m2fnuz": None,
    "float8_e8m0fnu": None,
}
"""The dtypes of torch, by names that are its own too, and the classes of their storages, where there are such."""


def lay_out(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay one archive out; the format has no place for metadata.

    Each tensor has a storage of its own: who shares one is no part of what a `Tensors` says.

    Raises:
        ValueError: A tensor's dtype cannot be written.
    """
    check_dtypes(specs, DTYPES, "torch")
    # Those of the tensors are the machine's order: dtypes of another one have other names, and are refused.
    order = sys.byteorder.encode()
    members = [Member(name=f"{_FOLDER}data.pkl", head=_pickle(specs)), Member(name=f"{_FOLDER}byteorder", head=order)]
    members += [Member(name=f"{_FOLDER}data/{at}", head=b"", spec=spec) for at, spec in enumerate(specs)]
    return [ZipLayout([*members, Member(name=f"{_FOLDER}version", head=_VERSION)])]


def _pickle(specs: Sequence[Spec]) -> bytes:
    """Write the pickle of a state dict, in protocol 2 and in the operations that ``weights_only`` allows."""
    written = _Written()
    written.take("collections", "OrderedDict")
    written.data += pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.MARK
    for at, spec in enumerate(specs):
        written.text(spec.name)
        _tensor(written, at, spec)
    written.data += pickle.SETITEMS + pickle.STOP
    return bytes(written.data)


def _tensor(written: _Written, number: int, spec: Spec) -> None:
    storage = DTYPES[spec.dtype or ""]
    written.take("torch._utils", "_rebuild_tensor_v3" if storage is None else "_rebuild_tensor_v2")
    written.data += pickle.MARK
    # The storage: its class, its record, where it was, and how long it is, in elements or else in bytes.
    written.data += pickle.MARK
    written.text("storage")
    if storage is None:
        written.take("torch.storage", "UntypedStorage")
    else:
        written.take("torch", storage)
    written.text(str(number))
    written.text("cpu")
    written.number(spec.n_bytes if storage is None else spec.n_bytes // spec.numpy_dtype.itemsize)
    written.data += pickle.TUPLE + pickle.BINPERSID
    written.number(0)  # where in the storage it begins
    written.numbers(spec.shape)
    written.numbers(strides_of(spec.shape))
    written.data += pickle.NEWFALSE  # requires_grad
    written.take("collections", "OrderedDict")  # its hooks
    written.data += pickle.EMPTY_TUPLE + pickle.REDUCE
    if storage is None:
        written.take("torch", spec.dtype or "")
    written.data += pickle.TUPLE + pickle.REDUCE


class _Written:
    """A pickle being written, by operations: what it names is not there to be pickled."""

    def __init__(self) -> None:
        self.data = bytearray(pickle.PROTO + b"\x02")
        self._memo: dict[tuple[str, str], int] = {}

    def take(self, module: str, name: str) -> None:
        """Name something of a module; from the second time on by its number, of which there are few."""
        number = self._memo.get((module, name))
        if number is not None:
            self.data += pickle.BINGET + bytes([number])
            return
        number = self._memo[module, name] = len(self._memo)
        self.data += pickle.GLOBAL + f"{module}\n{name}\n".encode() + pickle.BINPUT + bytes([number])

    def text(self, text: str) -> None:
        """Write a text."""
        data = text.encode()
        self.data += pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def number(self, number: int) -> None:
        """Write a whole number from 0 on."""
        self.data += pickle.dumps(number, 2)[2:-1]  # without what begins and ends a pickle

    def numbers(self, numbers: Sequence[int]) -> None:
        """Write a tuple of such."""
        self.data += pickle.MARK
        for number in numbers:
            self.number(number)
        self.data += pickle.TUPLE
