"""Files of `torch.save` and `torch.jit.save`, read without torch; nothing in them is run.

Sources: https://docs.pytorch.org/docs/stable/notes/serialization.html, ``torch/serialization.py`` and
``caffe2/serialize/inline_container.h``. The pickle is walked by `tensorcas_mlflow.containers`.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Sequence

from tensorcas_mlflow.containers import (
    LegacyTorchFile,
    Machine,
    Tape,
    TensorView,
    item_bytes,
    views_of,
    walk_torch_pickle,
)
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.formats._arrays import is_c_order, span_of
from tensorcas_mlflow.formats._listing import EXAMPLE_INPUT, Listing
from tensorcas_mlflow.formats._places import Places
from tensorcas_mlflow.formats._source import ByteSource, SourceStream
from tensorcas_mlflow.formats._zip_directory import Member

ONLY = "tensor"
"""What a tensor is called that is saved by itself."""

_PICKLE = "/data.pkl"
_CONSTANTS = "constants.pkl"
_TRACED_INPUTS = "traced_inputs.pkl"
_SCRIPT_MEMBER = re.compile(
    r"(?:data|constants|traced_inputs)(?:\.pkl|/[^/]*)|code/.*|extra/.*|version|byteorder|\.data/.*"
    r"|\.format_version|\.storage_alignment",
    re.DOTALL,
)
"""Members of a TorchScript archive that are read, and texts."""
_MAX_PICKLE_BYTES = 64 << 20
_MAX_WORD_BYTES = 16
_COUNT_BYTES = 8
_BLOCK_BYTES = 64 << 10
_RAW_DEFLATE = -15


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

    The constants of a TorchScript archive are called ``constants.<n>``. Left out are the inputs it was traced with (see
    `EXAMPLE_INPUT`), and members that are not known to hold no tensors.

    Members' CRC-32 are not looked at: torch writes others if told so (`torch.serialization.set_crc32_options`), and
    reads without them.

    Raises:
        FormatError: It is not sound. So do the others of `tensorcas_mlflow.containers.UNREADABLE` and `zlib.error` say.
    """
    places = Places()
    archive = TorchArchive(source, members)
    archive.add(places)
    if archive.is_script:
        archive.add_script(places)
    return Listing(format="torch", sources=[source], places=places, left_out=places.left_out)


class TorchArchive:
    """An archive of `torch.save` or `torch.jit.save`, which may lie in another."""

    def __init__(self, source: ByteSource, members: Sequence[Member]) -> None:
        """Find the pickle; raises as `list_torch`.

        Args:
            source: The file that it lies in.
            members: Its members, as they lie in that file.
        """
        self._source = source
        self._by_name = {member.name: member for member in members}
        pickles = [member for member in members if member.name.endswith(_PICKLE) and member.name.count("/") == 1]
        if len(pickles) != 1:
            raise FormatError(f"there are {len(pickles) or 'no'} data.pkl in it")
        self._folder = pickles[0].name.removesuffix("data.pkl")
        order = b"little"
        if self._folder + "byteorder" in self._by_name:
            order = read_whole(source, self._by_name[self._folder + "byteorder"], _MAX_WORD_BYTES)
            if order not in (b"little", b"big"):
                raise FormatError(f"no machine has the byte order {order!r}")
        self._is_swapped = order.decode() != sys.byteorder

    @property
    def is_script(self) -> bool:
        """Whether it is one of TorchScript."""
        return self._folder + _CONSTANTS in self._by_name

    def add(self, places: Places, *, prefix: str = "", only: str = ONLY) -> None:
        """Add what was saved.

        Args:
            places: Where to.
            prefix: What their names begin with.
            only: What a tensor is called that is all of it.
        """
        self._add("data.pkl", places, prefix=prefix, only=only)

    def add_script(self, places: Places) -> None:
        """Add the constants of TorchScript, and say what is left out."""
        self._add(_CONSTANTS, places, prefix="constants.", only="constants")
        if self._folder + _TRACED_INPUTS in self._by_name:
            for name in self.names(_TRACED_INPUTS):
                places.leave_out(unused_name(f"traced_inputs/{name}", places), EXAMPLE_INPUT)
        for name, member in self._by_name.items():
            path = name.removeprefix(self._folder)
            if member.raw_bytes and not (name.startswith(self._folder) and _SCRIPT_MEMBER.fullmatch(path)):
                places.leave_out(unused_name(path, places), "a file that is not known")

    def names(self, pickle: str = "data.pkl") -> list[str]:
        """Get the names of the tensors that a pickle makes."""
        return [view.name or ONLY for view in views_of(self._walk(pickle))]

    def only_storage(self) -> tuple[Member, str | None]:
        """Find the storage and the dtype of the one tensor that was saved; the dtype is None where numpy has none."""
        views = list(views_of(self._walk("data.pkl")))
        if len(views) != 1:
            raise FormatError(f"a file of {len(views)} tensors lies where one is wanted")
        view = views[0]
        if self._is_swapped:
            raise FormatError("its storages are not in this machine's order")
        return self._storage_of("data.pkl", view) if view.dtype else Member("", 0, 0, 0, False, 0), view.dtype

    def _add(self, pickle: str, places: Places, *, prefix: str = "", only: str = ONLY) -> None:
        for view in views_of(self._walk(pickle)):
            name = unused_name(prefix + view.name if view.name else only, places)
            member = self._storage_of(pickle, view) if view.dtype is not None else None
            add_view(places, self._source, member, view, name, is_swapped=self._is_swapped)

    def _walk(self, pickle: str) -> Machine:
        return walk_torch_pickle(read_whole(self._source, self._by_name[self._folder + pickle], _MAX_PICKLE_BYTES))

    def _storage_of(self, pickle: str, view: TensorView) -> Member:
        member = self._by_name.get(f"{self._folder}{pickle.removesuffix('.pkl')}/{view.key}")
        if member is None or member.raw_bytes != view.storage_bytes:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is not there, or not of its size")
        return member


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

    places = Places()
    for view in views_of(file.object):
        if view.dtype is not None and view.key not in found:
            raise FormatError(f"the storage of tensor {view.name[:80]!r} is not there")
        name = unused_name(view.name or ONLY, places)
        add_view(places, source, found.get(view.key), view, name, is_swapped=sys.byteorder != "little")
    return Listing(format="torch", sources=[source], places=places, left_out=places.left_out)


def add_view(
    places: Places, source: ByteSource, storage: Member | None, view: TensorView, name: str, *, is_swapped: bool = False
) -> None:
    """Add a tensor, or leave it out where it has no dtype.

    Args:
        places: Where to.
        source: The file.
        storage: What the tensor views; only a tensor without a dtype may have none.
        view: The tensor.
        name: What it is called.
        is_swapped: Whether the bytes of each number lie in the other order than this machine's.

    Raises:
        FormatError: It reaches beyond its storage.
    """
    if view.dtype is None or storage is None:
        places.leave_out(name, view.kind)
        return
    n_item_bytes = item_bytes(view.dtype)
    begin = view.offset * n_item_bytes
    n_bytes = span_of(view.size, view.stride) * n_item_bytes
    if n_bytes and begin + n_bytes > storage.raw_bytes:
        raise FormatError(f"tensor {name[:80]!r} reaches beyond its storage")
    if not n_bytes:
        begin = 0
    places.add(
        name,
        view.dtype,
        view.size,
        start=storage.start if storage.is_deflated else storage.start + begin,
        n_bytes=storage.n_bytes if storage.is_deflated else n_bytes,
        file_bytes=source.size,
        strides=None if is_c_order(view.size, view.stride) else view.stride,
        deflated=begin if storage.is_deflated else None,
        swapped=is_swapped and n_item_bytes > 1,
    )


def unused_name(name: str, places: Places) -> str:
    """Number a name that is taken."""
    number, unused = 1, name
    while unused in places or unused in places.left_out:
        number += 1
        unused = f"{name} ({number})"
    return unused


def read_whole(source: ByteSource, member: Member, max_bytes: int) -> bytes:
    """Read a member that is not long."""
    if member.raw_bytes > max_bytes or member.n_bytes > max_bytes:
        raise FormatError(f"{member.name[:80]!r} has {member.raw_bytes} bytes")
    data = bytes(source.read(member.start, member.n_bytes))
    if member.is_deflated:
        data = zlib.decompressobj(_RAW_DEFLATE).decompress(data, max_bytes)
    if len(data) != member.raw_bytes:
        raise FormatError(f"{member.name[:80]!r} does not have the size that the directory says")
    return data
