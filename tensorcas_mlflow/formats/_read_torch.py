"""Files of `torch.save`, read without torch; nothing in them is run.

Sources: https://docs.pytorch.org/docs/stable/notes/serialization.html, ``torch/serialization.py`` and
``caffe2/serialize/inline_container.h``. The pickle is walked by `tensorcas_mlflow.containers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from tensorcas_mlflow.containers import LegacyTorchFile, Tape, TensorView, item_bytes, views_of, walk_torch_pickle
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._arrays import is_c_order, span_of
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, SourceStream
from tensorcas_mlflow.formats._zip_directory import Member, read_member

ONLY = "tensor"
"""What a tensor is called that is saved by itself."""

_PICKLE = "/data.pkl"
MAX_PICKLE_BYTES = 64 << 20
_MAX_WORD_BYTES = 16
_COUNT_BYTES = 8
_BLOCK_BYTES = 64 << 10


def is_torch_archive(members: Sequence[Member]) -> bool:
    """Tell the members of a torch file from those of other archives."""
    return any(member.name.endswith(_PICKLE) and member.name.count("/") == 1 for member in members)


def list_torch(source: ByteSource, members: Sequence[Member]) -> Listing:
    """List a torch file as it is written since torch 1.6, a zip archive with one member a storage.

    A tensor's name is the keys that lead to it in what was saved, with dots between; where two ways are written alike,
    the second is given a number. Tied tensors are several places in one storage. Left out is what is no plain view of a
    storage: quantized, sparse, nested and lazily conjugated tensors, subclasses that make themselves, and dtypes that
    numpy has not. Refused are tensors that reach beyond their storage, and storages that are not there, or not as long
    as the pickle says.

    Members' CRC-32 are not looked at: torch writes others if told so (`torch.serialization.set_crc32_options`), and
    reads without them.

    Raises:
        FormatError: It is not sound. So do the others of `tensorcas_mlflow.containers.UNREADABLE` and `zlib.error` say.
    """
    by_name = {member.name: member for member in members}
    pickles = [member for member in members if member.name.endswith(_PICKLE) and member.name.count("/") == 1]
    if len(pickles) > 1:
        raise FormatError("there are two data.pkl in it")
    folder = pickles[0].name.removesuffix("data.pkl")
    order = b"little"
    if folder + "byteorder" in by_name:
        order = read_member(source, by_name[folder + "byteorder"], _MAX_WORD_BYTES)
        if order not in (b"little", b"big"):
            raise FormatError(f"no machine has the byte order {order!r}")
    machine = walk_torch_pickle(read_member(source, pickles[0], MAX_PICKLE_BYTES))

    def storage_at(view: TensorView) -> Member:
        member = by_name.get(f"{folder}data/{view.key}")
        if member is None or member.raw_bytes != view.storage_bytes:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is not there, or not of its size")
        return member

    return _listing(source, views_of(machine), storage_at, is_swapped=order.decode() != sys.byteorder)


def list_torch_legacy(source: ByteSource) -> Listing:
    """List a torch file from before torch 1.6; see `list_torch`. Refused is anything behind the last storage, too.

    Every machine wrote its storages in little-endian order, whatever the third pickle says of the machine
    (``torch/csrc/serialization.cpp``).

    Raises:
        FormatError: It is not sound. So do the others of `tensorcas_mlflow.containers.UNREADABLE` say.
    """
    tape = Tape(SourceStream(source), block_bytes=_BLOCK_BYTES)
    file = LegacyTorchFile(tape)
    at = tape.position
    found: dict[str, Member] = {}
    for key in file.keys:
        fact = file.storages.get(key)
        if fact is None or key in found or at + _COUNT_BYTES + fact.n_bytes > source.size:
            raise FormatError(f"storage {key[:80]!r} is not there, or twice, or of no tensor")
        if int.from_bytes(source.read(at, _COUNT_BYTES), "little") != fact.n_elements:
            raise FormatError(f"storage {key[:80]!r} does not have the size that its tensors say")
        found[key] = Member(key, at + _COUNT_BYTES, fact.n_bytes, fact.n_bytes, False, 0)
        at += _COUNT_BYTES + fact.n_bytes
    if at != source.size:
        raise FormatError(f"{source.size - at} bytes follow the last storage")

    def storage_at(view: TensorView) -> Member:
        if view.key not in found:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is not there")
        return found[view.key]

    return _listing(source, views_of(file.object), storage_at, is_swapped=sys.byteorder != "little")


def _listing(
    source: ByteSource, views: Iterable[TensorView], storage_at: Callable[[TensorView], Member], *, is_swapped: bool
) -> Listing:
    places = Places()
    for view in views:
        name = places.unused(view.name or ONLY)
        if view.dtype is None:
            places.leave_out(name, view.kind)
            continue
        member, n_item_bytes = storage_at(view), item_bytes(view.dtype)
        begin = view.offset * n_item_bytes
        n_bytes = span_of(view.size, view.stride) * n_item_bytes
        if n_bytes and begin + n_bytes > member.raw_bytes:
            raise FormatError(f"tensor {name[:80]!r} reaches beyond its storage")
        if not n_bytes:
            begin = 0
        places.add(
            name,
            view.dtype,
            view.size,
            start=member.start if member.is_deflated else member.start + begin,
            n_bytes=member.n_bytes if member.is_deflated else n_bytes,
            file_bytes=source.size,
            strides=None if is_c_order(view.size, view.stride) else view.stride,
            deflated=begin if member.is_deflated else None,
            swapped=is_swapped and n_item_bytes > 1,
        )
    return Listing(format="torch", sources=[source], places=places, left_out=places.left_out)
