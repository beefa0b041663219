"""Files of `torch.save`, read without torch; nothing in them is run.

Sources: https://docs.pytorch.org/docs/stable/notes/serialization.html, ``torch/serialization.py`` and
``caffe2/serialize/inline_container.h``. The pickle is walked by `tensorcas_mlflow.containers`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tensorcas_mlflow.containers import LegacyTorchFile, Tape, TensorView, views_of, walk_torch_pickle
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._listing import Listing
from tensorcas_mlflow.formats._pickle_places import PicklePlaces
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
    the second is given a number. Tied tensors are several places in one storage. A storage that was saved by itself is
    a tensor of its elements. Numpy's arrays, whose bytes are in the pickle, are listed, too. Left out is what is no
    plain view of a storage: quantized, sparse, nested and lazily conjugated tensors, subclasses that make themselves,
    and dtypes that numpy has not; of arrays what `list_pickles` leaves out. Refused are tensors that reach beyond their
    storage, and storages that are not there, or not as long as the pickle says.

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
    data = read_member(source, pickles[0], MAX_PICKLE_BYTES)
    machine = walk_torch_pickle(data, places=True)

    def storage_at(view: TensorView) -> Member:
        member = by_name.get(f"{folder}data/{view.key}")
        if member is None or member.raw_bytes != view.storage_bytes:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is not there, or not of its size")
        return member

    found = PicklePlaces(
        source,
        inflated=data if pickles[0].is_deflated else None,
        base=pickles[0].start,
        is_swapped=order.decode() != sys.byteorder,
    )
    found.add(views_of(machine), storage_at, only=ONLY)
    return _listing(found)


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

    pickled = PicklePlaces(source, is_swapped=sys.byteorder != "little")
    pickled.add(views_of(file.object), storage_at, only=ONLY)
    return _listing(pickled)


def _listing(found: PicklePlaces) -> Listing:
    return Listing(format="torch", sources=found.sources, places=found.places, left_out=found.places.left_out)
