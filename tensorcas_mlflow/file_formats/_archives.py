"""Zip archives that hold tensors, told apart by their members: torch files, ``.pt2``, ``.npz``, skops.

One pass over an archive takes all kinds apart. An entry is an array, a storage, a nested archive, text, or unknown;
its name and its first bytes tell.

An archive of `torch.save` holds ``<name>/data.pkl`` first, then ``<name>/byteorder`` among others, then one entry
``<name>/data/<key>`` for each storage (https://docs.pytorch.org/docs/stable/notes/serialization.html, and
``caffe2/serialize/inline_container.h`` in PyTorch). Archives of `torch.jit` and `torch.export` have their storages
first: a storage is announced by its entry's name, and the table behind it becomes a `Learned`.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from tensorcas_mlflow.base.tensors import MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._deflated import find_deflated
from tensorcas_mlflow.file_formats._headers import item_bytes, tensor_or_skeleton
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._members import ListMember, add_member
from tensorcas_mlflow.file_formats._numpy import NpyHeader, is_npy, is_npz, list_npz, npy_parts, read_npy_header
from tensorcas_mlflow.file_formats._pickle_machine import MALFORMED_PICKLE
from tensorcas_mlflow.file_formats._pt2 import PT2_DEFAULT_MODEL, PT2_TABLE, is_pt2, list_pt2, pt2_payloads
from tensorcas_mlflow.file_formats._skops import is_skops, list_skops
from tensorcas_mlflow.file_formats._source import ByteSource, FileRange
from tensorcas_mlflow.file_formats._tape import (
    MIN_TENSOR_BYTES,
    FilePart,
    Learned,
    More,
    PlainBytes,
    Skeleton,
    SplitMember,
    Tape,
    Tensor,
    below,
)
from tensorcas_mlflow.file_formats._torch import is_torch_archive, list_torch
from tensorcas_mlflow.file_formats._torch_pickle import StorageInfo, dense_shape, storages_of
from tensorcas_mlflow.file_formats._torchscript import is_torchscript, list_torchscript
from tensorcas_mlflow.file_formats._zip import (
    DESCRIPTOR,
    END,
    LOCAL,
    RAW_DEFLATE,
    EntryEnds,
    LocalEntry,
    descriptor_bytes,
    directory_parts,
    list_members,
    read_entry,
)

_SNIFF_BYTES = 512
_MAX_NESTING = 2

# From protocol 4 on a frame comes first; before, an opcode that begins a container, a class, a text or a number.
_PICKLE_START = re.compile(rb"\x80(?:[\x04\x05]\x95|[\x02\x03][c(})\]XKMGN])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")

_OF_SKOPS = re.compile(r"\d{9,}\.np[yz]|schema\.json")
"""Members of skops. Skops names its arrays by their memory addresses, and its schema repeats them: they change with
each save, all over the file. Cut by content or with a row for each array, such a file takes three times as much room as
in long plain pieces, in which zstd finds the repetitions (``docs/design/sizes.md``). So its arrays are numbered."""
_MIN_SKOPS_BYTES = 4096
"""A larger array of skops gets a row of its own: the store may have it."""

_MIN_UNKNOWN_BYTES = 512
"""A smaller entry of an unknown kind is not worth a row."""
_MIN_MEMBER_BYTES = 1024
"""A smaller member is not taken apart."""
_MIN_COMPRESSED_BYTES = 64 << 10
"""A smaller compressed entry is one piece among others of the skeleton."""

_MAX_PICKLE_BYTES = 32 << 20
_MAX_WORD_BYTES = 64
_MAX_PASSED = 1 << 17
"""Storages that are remembered once they have passed; later ones keep their entries' names."""

_STORAGE = re.compile(r"[^/]+/(?:(?:data|constants)/\d+|data/(?:weights/weight|constants/tensor)_\d+)")
_JIT_TABLE = re.compile(r"(data|constants)\.pkl")


def is_archive(head: memoryview) -> bool:
    """Recognise a zip archive by its first signature; an empty archive has only an end."""
    return bytes(head[:4]) in (LOCAL, END)


def split_archive(tape: Tape, members: SplitMember | None = None) -> Iterator[FilePart | Learned]:
    """Announce the parts of a zip archive, and of archives that follow it: a checkpoint's shards in one file.

    Args:
        tape: The file.
        members: Takes members of other formats apart.
    """
    nth = 0
    while _has_entry(tape.peek(4)):
        for part in _archive(tape, members):
            # The number of an archive is the same at each save.
            yield below(part, f"{nth}.") if nth else part
        nth += 1


def list_archive(source: ByteSource, members: ListMember | None = None) -> Listing | None:
    """List a zip archive of any kind; None for an archive without arrays, and without members that may hold any.

    An archive of no kind of its own has the tensors of its members, as ``<member>/<name>``: Keras's and TorchServe's.

    Args:
        source: The archive.
        members: Lists members of other formats.

    Raises:
        FormatError: The archive is malformed. The others of `UNREADABLE` and `zlib.error` say the same.
    """
    found = list_members(source)
    for recognizes, lists in _KINDS:
        if recognizes(found):
            return lists(source, found)
    if members is None:
        return None
    table = LocationTable(source)
    for member in found:
        if member.is_deflated:
            head = zlib.decompressobj(RAW_DEFLATE).decompress(
                source.read(member.start, min(member.n_bytes, _SNIFF_BYTES)), _SNIFF_BYTES
            )
            if not _is_text(head):
                table.leave_out(member.name, "deflated")
        else:
            add_member(table, member, members, has_checksum=True)
    return table.listing("zip") if table or table.left_out else None


def _is_text(head: bytes) -> bool:
    """Tell whether bytes are text, perhaps cut off."""
    return not _CONTROL.search(head) and _is_skeleton(memoryview(head))


_KINDS: tuple[tuple[Callable[[Sequence[FileRange]], bool], Callable[..., Listing]], ...] = (
    (is_pt2, list_pt2),
    (is_torchscript, list_torchscript),  # an archive of torch.save with more in it
    (is_skops, list_skops),
    (is_torch_archive, list_torch),
    (is_npz, list_npz),
)
"""Test of an archive's members, and the function that lists it; the first test that passes wins."""


def _has_entry(head: memoryview) -> bool:
    return head[:4] == LOCAL


def _archive(
    tape: Tape, members: SplitMember | None = None, depth: int = 0, name: str = ""
) -> Iterator[FilePart | Learned]:
    """Announce the parts of a zip archive, to its end and no further.

    Args:
        tape: The file, at the archive's first byte.
        members: Takes members of other formats apart.
        depth: Number of archives around this one.
        name: Name of this archive's entry; also of its only tensor, if that has no name.
    """
    ends = EntryEnds(tape)
    archive = StorageTables(name)
    between: type[Skeleton | PlainBytes] = Skeleton
    n_arrays = 0
    while bytes(tape.peek(4)) == LOCAL:
        entry = read_entry(tape)
        if _OF_SKOPS.fullmatch(entry.name):
            between = PlainBytes
        yield between(n_bytes=entry.header_bytes)
        start = tape.position
        if entry.is_stored and between is PlainBytes:
            yield from _stored_by_skops(tape, entry, ends, name=f"{n_arrays}")
            n_arrays += 1
        elif entry.is_stored:
            yield from _stored(tape, entry, archive, ends, members, depth)
        else:
            content = partial(_inflated, entry, members, depth)
            stream = find_deflated(tape, entry.n_bytes, content) if entry.is_deflated else None
            if stream is not None:
                yield stream
            else:
                n_bytes = ends.look_ahead() if entry.n_bytes is None else entry.n_bytes
                kind = Skeleton if n_bytes is not None and n_bytes < _MIN_COMPRESSED_BYTES else PlainBytes
                yield from ends.stretch(n_bytes, kind, kind)
        archive.passed(entry.name, tape.position - start)
        # Some writers that know the size leave the descriptor out.
        if entry.n_bytes is None or (entry.is_streamed and bytes(tape.peek(4)) == DESCRIPTOR):
            yield Skeleton(n_bytes=descriptor_bytes(tape, tape.position - start))
    yield from directory_parts(tape, between)


def _stored(
    tape: Tape,
    entry: LocalEntry,
    archive: StorageTables,
    ends: EntryEnds,
    members: SplitMember | None,
    depth: int,
) -> Iterator[FilePart | Learned]:
    """Announce the parts of an entry that is not compressed."""
    wanted_bytes = archive.wants(entry.name)
    if wanted_bytes:
        n_bytes = ends.look_ahead(wanted_bytes) if entry.n_bytes is None else entry.n_bytes
        if n_bytes is not None and n_bytes <= wanted_bytes:
            learned = archive.read(entry.name, bytes(tape.peek(n_bytes)))
            if learned:
                yield Learned(tensors=learned)
    storage = archive.storage(entry.name)
    if storage is not None and entry.n_bytes in (None, storage.n_bytes):
        yield from tensor_or_skeleton(storage.n_bytes, storage.name or entry.name, storage.dtype, storage.shape)
        return
    n_bytes = ends.look_ahead() if entry.n_bytes is None else entry.n_bytes
    head = tape.peek(_SNIFF_BYTES if n_bytes is None else min(n_bytes, _SNIFF_BYTES))
    if archive.is_storage(entry.name) and not _has_entry(head):
        is_large = n_bytes is None or n_bytes >= MIN_TENSOR_BYTES
        yield from ends.stretch(n_bytes, partial(Tensor, name=entry.name) if is_large else Skeleton, More)
        return
    npy = _npy_header(tape, n_bytes) if is_npy(head) else None
    if npy is not None:
        yield from npy_parts(npy, entry.name.removesuffix(".npy"))
    elif _has_entry(head) and depth < _MAX_NESTING:
        yield from _nested(tape, n_bytes, members, depth + 1, entry.name)
    elif members is not None and (parts := _of_member(tape, entry, archive, members)) is not None:
        yield from parts
    elif (n_bytes is not None and n_bytes < _MIN_UNKNOWN_BYTES) or is_npy(head) or _is_skeleton(head):
        yield from ends.stretch(n_bytes, Skeleton, Skeleton)
    else:
        yield from ends.stretch(n_bytes, partial(Tensor, name=entry.name), More)


def _inflated(
    entry: LocalEntry, members: SplitMember | None, depth: int, content: Tape, n_bytes: int
) -> Iterator[FilePart | Learned]:
    """Announce the parts of an entry that has been inflated."""
    whole = replace(entry, n_bytes=n_bytes, is_stored=True, is_deflated=False, is_streamed=False)
    return _stored(content, whole, StorageTables(), EntryEnds(content), members, depth)


def _stored_by_skops(tape: Tape, entry: LocalEntry, ends: EntryEnds, *, name: str) -> Iterator[FilePart]:
    """Announce the parts of an uncompressed entry of skops: a large array, or plain bytes."""
    n_bytes = ends.look_ahead() if entry.n_bytes is None else entry.n_bytes
    npy = _npy_header(tape, n_bytes) if is_npy(tape.peek(_SNIFF_BYTES)) else None
    array_bytes = 0 if npy is None else npy.array_bytes or 0
    if npy is None or array_bytes < _MIN_SKOPS_BYTES:
        yield from ends.stretch(n_bytes, PlainBytes, PlainBytes)
        return
    header, *array = npy_parts(npy, name)
    yield PlainBytes(n_bytes=header.n_bytes)
    yield from array


def _npy_header(tape: Tape, n_bytes: int | None) -> NpyHeader | None:
    """Read the header of an array that fills an entry; None for an array of objects, and for any other content."""
    try:
        header = read_npy_header(tape)
    except FormatError:
        return None
    array_bytes = header.array_bytes
    if array_bytes is None or n_bytes not in (None, header.n_bytes + array_bytes):
        return None
    return header


def _of_member(
    tape: Tape, entry: LocalEntry, archive: StorageTables, members: SplitMember
) -> Iterator[FilePart | Learned] | None:
    """Take a member of another format apart; None for one of none, and for the pickles of torch."""
    if entry.n_bytes is None or entry.n_bytes < _MIN_MEMBER_BYTES or archive.is_of_torch:
        return None
    parts = members(tape, entry.n_bytes)
    return None if parts is None else (below(part, f"{entry.name}/") for part in parts)


def _nested(
    tape: Tape, n_bytes: int | None, members: SplitMember | None, depth: int, name: str
) -> Iterator[FilePart | Learned]:
    """Announce the parts of an archive that is an entry of another one."""
    start = tape.position
    try:
        yield from _archive(tape, members, depth, name)
    except (FormatError, struct.error):
        if n_bytes is None:
            raise
    if n_bytes is None:
        return
    left_bytes = n_bytes - (tape.position - start)
    if left_bytes < 0:
        raise FormatError("a zip archive that is longer than the entry it lies in")
    if left_bytes:
        yield PlainBytes(n_bytes=left_bytes)


def _is_skeleton(head: memoryview) -> bool:
    """Tell text and pickles from possible tensors by their first bytes."""
    data = bytes(head)
    if _PICKLE_START.match(data):
        return True
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 3:
            return False
    return not _CONTROL.search(data)


class StorageTables:
    """Facts about the storages of one torch archive, read from its entries so far; empty for other archives."""

    def __init__(self, name: str = "") -> None:
        """Begin before the first entry.

        Args:
            name: Name of a tensor that is the whole archive and has no name in it.
        """
        self._name = name
        self._storages: Mapping[str, StorageInfo] = {}
        self._folder: str | None = None
        self._root = ""
        self._is_little = True
        self._passed: dict[str, int] = {}
        """Sizes of the storages that came before their table, by their entries' names."""

    @property
    def is_of_torch(self) -> bool:
        """True if the archive begins as those of `torch.save` do."""
        return bool(self._folder)

    def wants(self, entry: str) -> int:
        """Return the largest size of an entry to `read`; called for every entry, in the file's order.

        Returns:
            0 for an entry that holds no table.
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
        """Read a table; a malformed one is ignored.

        Returns:
            Facts about storages that have passed, for `Learned`. No storage is returned twice.
        """
        if self._is_late_table(entry):
            return self._learn(entry, data)
        if entry.endswith("/byteorder"):
            self._is_little = data == b"little"
            return {}
        try:
            self._storages = storages_of(data)
        except MALFORMED_PICKLE:
            self._storages = {}
        return {}

    def storage(self, entry: str) -> StorageInfo | None:
        """Return the facts about the storage in an entry; None if there are none."""
        if not self._storages or not self._folder or not entry.startswith(self._folder + "data/"):
            return None
        storage = self._storages.get(entry[len(self._folder) + len("data/") :])
        if storage is None or not 0 <= storage.n_bytes <= MAX_TENSOR_BYTES:
            return None
        if not storage.name and len(self._storages) == 1:
            storage = replace(storage, name=self._name)
        # Bytes of the other byte order are stored as they are, without a dtype that they do not have.
        return storage if self._is_little else replace(storage, dtype=None, shape=None)

    # --- storages that come before their table

    def is_storage(self, entry: str) -> bool:
        """Tell whether an entry has the name of a storage."""
        return bool(_STORAGE.fullmatch(entry))

    def passed(self, entry: str, n_bytes: int) -> None:
        """Remember the size of an entry that has passed."""
        if self.is_storage(entry) and len(self._passed) < _MAX_PASSED:
            self._passed[entry] = n_bytes

    def _learn(self, entry: str, data: bytes) -> dict[str, Tensor]:
        """Read a table behind its storages; see `read`."""
        learned: dict[str, Tensor] = {}
        pickled = _JIT_TABLE.fullmatch(entry, len(self._root))
        try:
            tensors = self._of_pickle(pickled[1], data) if pickled else self._of_table(entry, data)
            for path, tensor in tensors:
                # A storage with several views has the name of a view of all of it, if there is one.
                if path not in learned or learned[path].shape is None:
                    learned[path] = tensor
        except MALFORMED_PICKLE:
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
        for key, storage in storages_of(data).items():
            path = f"{self._root}{folder}/{key}"
            if self._passed.get(path) == storage.n_bytes:
                # TorchScript calls its constants so.
                name = f"{folder}.{storage.name}" if folder == "constants" and storage.name else storage.name or path
                yield path, Tensor(n_bytes=storage.n_bytes, name=name, dtype=storage.dtype, shape=storage.shape)

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
