"""Files of `torch.save`: zip archives, and the legacy format from before torch 1.6. Nothing in them is run.

- *Archives* (https://docs.pytorch.org/docs/stable/notes/serialization.html, ``torch/serialization.py``,
  ``caffe2/serialize/inline_container.h``): ``data.pkl``, ``byteorder``, a member for each storage, ``version``. A
  written archive holds the pickle of an ``OrderedDict``. A tensor in it is a call of
  ``torch._utils._rebuild_tensor_v2`` on a typed storage, or of ``_rebuild_tensor_v3`` on bytes for dtypes without a
  class of storage. `torch.load` reads it with ``weights_only`` and with ``mmap``, from release 2.4 on.
- *Legacy* (``_legacy_save`` in ``torch/serialization.py``; ``_use_new_zipfile_serialization=False``): five pickles (a
  magic number, a version, the machine, the object, the keys of its storages), then for each storage its number of
  elements in 8 bytes and the elements. A tensor that is pickled without `torch.save` is such a file, too, of one
  storage, as bytes within the pickle.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._layout import FileLayout, check_dtypes, strides_of
from tensorcas_mlflow.file_formats._listing import Listing
from tensorcas_mlflow.file_formats._pickle_machine import LIST, Pause, PickledObject, PickleMachine, Symbol
from tensorcas_mlflow.file_formats._pickle_walk import PickleWalker, WalkEnd
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange, SourceStream
from tensorcas_mlflow.file_formats._tape import MIN_TENSOR_BYTES, FilePart, Tape, Tensor
from tensorcas_mlflow.file_formats._torch_pickle import (
    STORAGE_DTYPES,
    TORCH_LIMITS,
    PickleTable,
    TensorView,
    storages_in,
    views_of,
    walk_torch_pickle,
)
from tensorcas_mlflow.file_formats._zip import NewMember, ZipLayout, read_member

UNNAMED_TENSOR = "tensor"
"""Name of a tensor that is saved by itself."""

_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MAX_MAGIC_AT = 16
_N_PICKLES = 5
_MACHINE, _OBJECT, _KEYS = 2, 3, 4
_COUNT_BYTES = 8


def is_torch_legacy(head: bytes | memoryview) -> bool:
    """Recognise a legacy torch file by a pickle of the magic number."""
    return len(head) > 2 and head[0] == 0x80 and _MAGIC in bytes(head[: _MAX_MAGIC_AT + len(_MAGIC)])


def split_torch_legacy(tape: Tape) -> Iterator[FilePart]:
    """Announce the parts of a legacy torch file."""
    is_sound = yield from _split_legacy(tape, None, "")
    if not is_sound:
        raise FormatError("a torch file that is damaged")


def split_storage(tape: Tape, n_bytes: int, *, name: str) -> Iterator[FilePart]:
    """Announce the parts of a legacy torch file of ``n_bytes`` within another file.

    The caller announces the rest if the file is not understood.
    """
    if is_torch_legacy(tape.peek(_MAX_MAGIC_AT + len(_MAGIC))):
        yield from _split_legacy(tape, tape.position + n_bytes, name)


class LegacyTorchFile:
    """The pickles of a legacy torch file; the tape stands before the first storage then.

    Each storage is its number of elements, in 8 bytes, and its elements.
    """

    def __init__(self, tape: Tape) -> None:
        """Read from a file's first byte to its first storage.

        Raises:
            FormatError: The pickles are damaged.
        """
        walker = PickleWalker(tape, TORCH_LIMITS, positions=True)
        pickles = _legacy_pickles(walker, None)
        while True:
            try:
                tape.take(next(pickles).n_bytes)
            except StopIteration as over:
                machines = over.value
                break
        keys = _storage_keys(machines[_KEYS]) if machines is not None else None
        if machines is None or keys is None or not all(type(key) is str for key in keys):
            raise FormatError("its pickles are damaged")
        self.object: PickleMachine = machines[_OBJECT]
        """The machine that has walked the saved object."""
        self.keys: list[str] = keys
        """Keys of the storages, in the order of their positions."""
        self.storages = storages_in(self.object)
        """Storages by key."""
        tape.take(walker.at - tape.position)


def _split_legacy(tape: Tape, end: int | None, name: str) -> Generator[FilePart, None, bool]:
    """Announce the parts before ``end``; return whether all was understood."""
    walker = PickleWalker(tape, TORCH_LIMITS)
    machines = yield from _legacy_pickles(walker, end)
    if machines is None:
        return False
    yield from walker.walked()
    return (yield from _legacy_storages(walker, machines, end, name))


def _legacy_pickles(walker: PickleWalker, end: int | None) -> Generator[FilePart, None, list[PickleMachine] | None]:
    """Walk the pickles and announce them; return None if they are malformed or exceed ``end``."""
    machines: list[PickleMachine] = []
    while len(machines) < _N_PICKLES:
        reason = walker.go_on()
        if end is not None and walker.at > end:
            return None
        if reason is Pause.PAYLOAD:
            walker.pass_payload()
        elif reason is Pause.STOP:
            machines.append(walker.machine)
            walker.begin()
        elif reason is not WalkEnd.WINDOW:
            return None
        if end is None:
            yield from walker.walked()
    return machines


def _legacy_storages(
    walker: PickleWalker, machines: list[PickleMachine], end: int | None, name: str
) -> Generator[FilePart, None, bool]:
    """Announce the storages, one after the other."""
    storages = storages_in(machines[_OBJECT])
    is_little = _is_little_endian(machines[_MACHINE])
    for key in _storage_keys(machines[_KEYS]) or ():
        storage = storages.get(key) if type(key) is str else None
        head = walker.peek(_COUNT_BYTES)
        if storage is None or len(head) < _COUNT_BYTES or int.from_bytes(head, "little") != storage.n_elements:
            return False
        walker.skip(_COUNT_BYTES)
        if end is not None and walker.at + storage.n_bytes > end:
            return False
        yield from walker.walked()
        if storage.n_bytes >= MIN_TENSOR_BYTES:
            dtype = storage.dtype if is_little else None
            shape = storage.shape if dtype else None
            yield Tensor(n_bytes=storage.n_bytes, name=storage.name or name, dtype=dtype, shape=shape)
        walker.skip(storage.n_bytes)
    yield from walker.walked()
    return True


def _storage_keys(machine: PickleMachine) -> list[Symbol] | None:
    """Read the fifth pickle, a list of storages' keys; None for any other object."""
    keys = machine.stack[-1] if machine.stack else None
    if type(keys) is not PickledObject or not keys.is_made_by(LIST.name) or len(keys.elements) != keys.n_elements:
        return None
    return keys.elements


def _is_little_endian(machine: PickleMachine) -> bool:
    """Read the third pickle, which describes the machine that wrote the file."""
    said = machine.stack[-1] if machine.stack else None
    return type(said) is PickledObject and said.get("little_endian") is True


_PICKLE_SUFFIX = "/data.pkl"
MAX_PICKLE_BYTES = 64 << 20
_MAX_WORD_BYTES = 16
_BLOCK_BYTES = 64 << 10


def is_torch_archive(members: Sequence[FileRange]) -> bool:
    """Recognise a torch archive by its members."""
    return any(member.name.endswith(_PICKLE_SUFFIX) and member.name.count("/") == 1 for member in members)


def below_name(name: str, inner: str) -> str:
    """Return the name of a tensor in a file of `torch.save` that holds one object of this name."""
    return name if inner == UNNAMED_TENSOR else f"{name}.{inner}"


def list_torch(source: ByteSource, members: Sequence[FileRange]) -> Listing:
    """List an archive of `torch.save`, with one member for each storage.

    A tensor's name is the keys of its path in the saved object, with dots between; of two equal names, the second gets
    a number. Tied tensors are several ranges of one storage. A storage saved by itself is a tensor of its elements.
    Arrays of numpy, whose bytes are in the pickle, are listed, too.

    Left out are quantized, sparse, nested and lazily conjugated tensors, tensors of subclasses that rebuild themselves,
    and dtypes without a numpy dtype; and the arrays that `list_pickles` leaves out. Refused are tensors that exceed
    their storage, and storages that are missing or of another size than the pickle says.

    A member's CRC-32 is not checked: torch can be told to write another one
    (`torch.serialization.set_crc32_options`), and reads without it.

    Raises:
        FormatError: The file is malformed. The others of `UNREADABLE` and `zlib.error` say the same.
    """
    by_name = {member.name: member for member in members}
    pickles = [member for member in members if member.name.endswith(_PICKLE_SUFFIX) and member.name.count("/") == 1]
    if len(pickles) > 1:
        raise FormatError("it has two members data.pkl")
    folder = pickles[0].name.removesuffix("data.pkl")
    order = b"little"
    if folder + "byteorder" in by_name:
        order = read_member(source, by_name[folder + "byteorder"], _MAX_WORD_BYTES)
        if order not in (b"little", b"big"):
            raise FormatError(f"there is no byte order {order!r}")
    data = read_member(source, pickles[0], MAX_PICKLE_BYTES)
    machine = walk_torch_pickle(data, positions=True)

    def storage_at(view: TensorView) -> FileRange:
        member = by_name.get(f"{folder}data/{view.key}")
        if member is None or member.raw_bytes != view.storage_bytes:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is missing, or of another size")
        return member

    found = PickleTable(
        source,
        inflated=data if pickles[0].is_deflated else None,
        base=pickles[0].start,
        is_swapped=order.decode() != sys.byteorder,
    )
    found.add(views_of(machine), storage_at, only=UNNAMED_TENSOR)
    return found.table.listing("torch")


def list_torch_legacy(source: ByteSource) -> Listing:
    """List a legacy torch file; see `list_torch`. Bytes behind the last storage are refused, too.

    Every machine wrote its storages in little-endian order, whatever the third pickle says
    (``torch/csrc/serialization.cpp``).

    Raises:
        FormatError: The file is malformed. The others of `UNREADABLE` say the same.
    """
    tape = Tape(SourceStream(source), block_bytes=_BLOCK_BYTES)
    file = LegacyTorchFile(tape)
    at = tape.position
    found: dict[str, FileRange] = {}
    for key in file.keys:
        storage = file.storages.get(key)
        if storage is None or key in found or at + _COUNT_BYTES + storage.n_bytes > source.size:
            raise FormatError(f"storage {key[:80]!r} is missing, repeated, or of no tensor")
        if int.from_bytes(source.read(at, _COUNT_BYTES), "little") != storage.n_elements:
            raise FormatError(f"storage {key[:80]!r} has another size than its tensors say")
        found[key] = FileRange(key, at + _COUNT_BYTES, storage.n_bytes, storage.n_bytes)
        at += _COUNT_BYTES + storage.n_bytes
    if at != source.size:
        raise FormatError(f"{source.size - at} bytes follow the last storage")

    def storage_at(view: TensorView) -> FileRange:
        if view.key not in found:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is missing")
        return found[view.key]

    pickled = PickleTable(source, is_swapped=sys.byteorder != "little")
    pickled.add(views_of(file.object), storage_at, only=UNNAMED_TENSOR)
    return pickled.table.listing("torch")


_FOLDER = "archive/"
_VERSION = b"3\n"
TORCH_DTYPES: Mapping[str, str | None] = {
    **{dtype: kind for kind, dtype in STORAGE_DTYPES.items() if not kind.startswith("Q")},
    **dict.fromkeys(("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu")),
}
"""The dtypes of torch, and the class of each one's storages; None for a dtype without one."""


def lay_out_torch(specs: Sequence[Spec], metadata: Mapping[str, Any]) -> list[FileLayout]:
    """Lay out one archive; the format stores no metadata.

    Each tensor gets a storage of its own: a `Tensors` does not tell which tensors share one.

    Raises:
        ValueError: The format has no such dtype.
    """
    check_dtypes(specs, TORCH_DTYPES, "torch")
    # The tensors have the machine's byte order: dtypes of the other one have other names, and are refused.
    order = sys.byteorder.encode()
    members = [
        NewMember(name=f"{_FOLDER}data.pkl", head=_write_pickle(specs)),
        NewMember(name=f"{_FOLDER}byteorder", head=order),
    ]
    members += [NewMember(name=f"{_FOLDER}data/{at}", head=b"", spec=spec) for at, spec in enumerate(specs)]
    return [ZipLayout([*members, NewMember(name=f"{_FOLDER}version", head=_VERSION)])]


def _write_pickle(specs: Sequence[Spec]) -> bytes:
    """Write the pickle of a state dict, in protocol 2 and with the operations that ``weights_only`` allows."""
    written = _PickleWriter()
    written.take("collections", "OrderedDict")
    written.data += pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.MARK
    for at, spec in enumerate(specs):
        written.text(spec.name)
        _write_tensor(written, at, spec)
    written.data += pickle.SETITEMS + pickle.STOP
    return bytes(written.data)


def _write_tensor(written: _PickleWriter, number: int, spec: Spec) -> None:
    storage = TORCH_DTYPES[spec.dtype or ""]
    written.take("torch._utils", "_rebuild_tensor_v3" if storage is None else "_rebuild_tensor_v2")
    written.data += pickle.MARK
    # The storage: its class, its member, its device, and its size, in elements or else in bytes.
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
    written.number(0)  # its offset in the storage
    written.numbers(spec.shape)
    written.numbers(strides_of(spec.shape))
    written.data += pickle.NEWFALSE  # requires_grad
    written.take("collections", "OrderedDict")  # its hooks
    written.data += pickle.EMPTY_TUPLE + pickle.REDUCE
    if storage is None:
        written.take("torch", spec.dtype or "")
    written.data += pickle.TUPLE + pickle.REDUCE


class _PickleWriter:
    """Writer of a pickle by its opcodes: the functions that the pickle names are not imported."""

    def __init__(self) -> None:
        self.data = bytearray(pickle.PROTO + b"\x02")
        self._memo: dict[tuple[str, str], int] = {}

    def take(self, module: str, name: str) -> None:
        """Push a name of a module; from the second time on by its number in the memo."""
        number = self._memo.get((module, name))
        if number is not None:
            self.data += pickle.BINGET + bytes([number])
            return
        number = self._memo[module, name] = len(self._memo)
        self.data += pickle.GLOBAL + f"{module}\n{name}\n".encode() + pickle.BINPUT + bytes([number])

    def text(self, text: str) -> None:
        """Push a text."""
        data = text.encode()
        self.data += pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def number(self, number: int) -> None:
        """Push a whole number from 0 on."""
        self.data += pickle.dumps(number, 2)[2:-1]  # without the first and the last opcode

    def numbers(self, numbers: Sequence[int]) -> None:
        """Push a tuple of whole numbers from 0 on."""
        self.data += pickle.MARK
        for number in numbers:
            self.number(number)
        self.data += pickle.TUPLE
