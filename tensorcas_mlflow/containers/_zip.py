"""Zip archives, read forward by their local headers: torch files, `.npz`, skops, `torch.export`.

The format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, sections 4.3 and 4.5.3.

The size of an entry stands in its local header, or else, if the archive was written to a stream, in the *descriptor*
that follows the entry. Such an end is known beforehand if the content tells its own size (`_torch`, `_npy`), and else
it is where something lies that can be nothing but this entry's descriptor.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from tensorcas_mlflow.containers._npy import NpyHeader, is_npy, npy_parts, read_npy_header
from tensorcas_mlflow.containers._parts import MIN_TENSOR_BYTES, Learned, More, Part, Plain, Skeleton, Tensor
from tensorcas_mlflow.containers._tape import Tape
from tensorcas_mlflow.containers._torch import TorchArchive
from tensorcas_mlflow.containers._zip_ends import CENTRAL, DESCRIPTOR, LOCAL, Ends, descriptor_bytes
from tensorcas_mlflow.errors import FormatError

_LOCAL_HEADER = struct.Struct("<6xHH8xIIHH")
_AFTER_STREAM = 1 << 3
_ENCRYPTED = 1 << 0
_IN_EXTRA = 0xFFFFFFFF

_CENTRAL_HEADER = struct.Struct("<28xHHH12x")
_END_64 = b"PK\x06\x06"
_LOCATOR_64 = b"PK\x06\x07"
_LOCATOR_64_BYTES = 20
_END = b"PK\x05\x06"
_END_HEADER = struct.Struct("<20xH")
_MAX_END_64_BYTES = 64 << 10
_DIRECTORY_LOOK_BYTES = 256 << 10

_SNIFF_BYTES = 512
_MAX_DEPTH = 2

# From protocol 4 on a frame comes first; before, an opcode that begins a container, a class, a text or a number.
_PICKLE = re.compile(rb"\x80(?:[\x04\x05]\x95|[\x02\x03][c(})\]XKMGN])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")

_OF_SKOPS = re.compile(r"\d{9,}\.np[yz]|schema\.json")
"""Skops calls its arrays by where they lay in memory, and its schema is full of such addresses: they are others at each
save, all over the file. Cut by content or with a row for each array, a file of skops takes three times as much as in
long plain pieces, in which zstd finds what repeats (``docs/design/sizes.md``). So its arrays are called by number."""
_MIN_SKOPS_BYTES = 4096
"""A larger array of skops has a row of its own: it may be in the store."""

_MIN_UNKNOWN_BYTES = 512
"""Less than this of an unknown kind is not worth a row."""
_MIN_COMPRESSED_BYTES = 64 << 10
"""Nor is less than this of a compressed kind, in which fixed distances find no more than cuts by content."""


def is_zip(head: memoryview) -> bool:
    """Tell a zip archive with an entry by its first bytes."""
    return head[:4] == LOCAL


def split_zip(tape: Tape) -> Iterator[Part | Learned]:
    """Announce the parts of a zip archive, and of those that follow it, as shards of a checkpoint do in one file."""
    nth = 0
    while is_zip(tape.peek(4)):
        for part in _archive(tape):
            yield _of_archive(nth, part) if nth else part
        nth += 1


def _of_archive(nth: int, part: Part | Learned) -> Part | Learned:
    """Put the number of an archive that follows others before the names of its tensors; it is the same at each save."""
    if isinstance(part, Tensor):
        return replace(part, name=f"{nth}.{part.name}")
    if isinstance(part, Learned):
        renamed = {
            f"{nth}.{name}": replace(tensor, name=f"{nth}.{tensor.name}") for name, tensor in part.tensors.items()
        }
        return Learned(tensors=renamed)
    return part


def _archive(tape: Tape, depth: int = 0, name: str = "") -> Iterator[Part | Learned]:
    """Announce the parts of a zip archive, to its end and no further.

    Args:
        tape: Where it lies.
        depth: In how many archives it lies.
        name: Of the entry that it is; also of its one tensor, if that has no name.
    """
    ends = Ends(tape)
    archive = TorchArchive(name)
    between: type[Skeleton | Plain] = Skeleton
    n_arrays = 0
    while bytes(tape.peek(4)) == LOCAL:
        entry = _read_entry(tape)
        if _OF_SKOPS.fullmatch(entry.name):
            between = Plain
        yield between(n_bytes=entry.header_bytes)
        start = tape.position
        if entry.is_stored and between is Plain:
            yield from _stored_by_skops(tape, entry, ends, name=f"{n_arrays}")
            n_arrays += 1
        elif entry.is_stored:
            yield from _stored(tape, entry, archive, ends, depth)
        else:
            n_bytes = ends.look_ahead() if entry.n_bytes is None else entry.n_bytes
            kind = Skeleton if n_bytes is not None and n_bytes < _MIN_COMPRESSED_BYTES else Plain
            yield from ends.stretch(n_bytes, kind, kind)
        archive.passed(entry.name, tape.position - start)
        # Where a header knew the size, some writers leave the descriptor out.
        if entry.n_bytes is None or (entry.is_streamed and bytes(tape.peek(4)) == DESCRIPTOR):
            yield Skeleton(n_bytes=descriptor_bytes(tape, tape.position - start))
    yield from _directory(tape, between)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What a local header says."""

    name: str
    header_bytes: int
    n_bytes: int | None
    """None: a descriptor after the bytes says it."""
    is_stored: bool
    """Neither compressed nor encrypted."""
    is_streamed: bool
    """There is a descriptor."""


def _read_entry(tape: Tape) -> _Entry:
    flags, method, n_bytes, raw_bytes, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(
        tape.peek(_LOCAL_HEADER.size)
    )
    header_bytes = _LOCAL_HEADER.size + name_bytes + extra_bytes
    header = bytes(tape.peek(header_bytes))
    if len(header) < header_bytes:
        raise FormatError("a zip archive that ends in a local header")
    if n_bytes == _IN_EXTRA:
        n_bytes = _size_in_extra(header[header_bytes - extra_bytes :], after_raw=raw_bytes == _IN_EXTRA)
    is_streamed = bool(flags & _AFTER_STREAM)
    return _Entry(
        name=header[_LOCAL_HEADER.size : _LOCAL_HEADER.size + name_bytes].decode("utf-8", "replace"),
        header_bytes=header_bytes,
        n_bytes=None if is_streamed and n_bytes == 0 else n_bytes,
        is_stored=method == 0 and not flags & _ENCRYPTED,
        is_streamed=is_streamed,
    )


def _size_in_extra(extra: bytes, *, after_raw: bool) -> int:
    """Find the size of the stored or compressed bytes in a zip64 field, behind that of the raw ones if it is there."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return int(struct.unpack_from("<Q", extra, at + (12 if after_raw else 4))[0])
        at += 4 + size
    raise FormatError("a zip entry of 4 GiB or more without its size")


def _stored(tape: Tape, entry: _Entry, archive: TorchArchive, ends: Ends, depth: int) -> Iterator[Part | Learned]:
    """Announce the parts of an entry that is not compressed."""
    wanted_bytes = archive.wants(entry.name)
    if wanted_bytes:
        n_bytes = ends.look_ahead(wanted_bytes) if entry.n_bytes is None else entry.n_bytes
        if n_bytes is not None and n_bytes <= wanted_bytes:
            learned = archive.read(entry.name, bytes(tape.peek(n_bytes)))
            if learned:
                yield Learned(tensors=learned)
    fact = archive.storage(entry.name)
    if fact is not None and entry.n_bytes in (None, fact.n_bytes):
        if fact.n_bytes >= MIN_TENSOR_BYTES:
            name = fact.name or entry.name
            yield Tensor(n_bytes=fact.n_bytes, name=name, dtype=fact.dtype, shape=fact.shape)
        elif fact.n_bytes:
            yield Skeleton(n_bytes=fact.n_bytes)
        return
    n_bytes = ends.look_ahead() if entry.n_bytes is None else entry.n_bytes
    head = tape.peek(_SNIFF_BYTES if n_bytes is None else min(n_bytes, _SNIFF_BYTES))
    if archive.is_storage(entry.name) and not is_zip(head):
        is_large = n_bytes is None or n_bytes >= MIN_TENSOR_BYTES
        yield from ends.stretch(n_bytes, partial(Tensor, name=entry.name) if is_large else Skeleton, More)
        return
    npy = _npy_header(tape, n_bytes) if is_npy(head) else None
    if npy is not None:
        yield from npy_parts(npy, entry.name.removesuffix(".npy"))
    elif is_zip(head) and depth < _MAX_DEPTH:
        yield from _nested(tape, n_bytes, depth + 1, entry.name)
    elif (n_bytes is not None and n_bytes < _MIN_UNKNOWN_BYTES) or is_npy(head) or _is_skeleton(head):
        yield from ends.stretch(n_bytes, Skeleton, Skeleton)
    else:
        yield from ends.stretch(n_bytes, partial(Tensor, name=entry.name), More)


def _stored_by_skops(tape: Tape, entry: _Entry, ends: Ends, *, name: str) -> Iterator[Part]:
    """Announce the parts of an entry of skops' that is not compressed: an array of some size, or plain bytes."""
    n_bytes = ends.look_ahead() if entry.n_bytes is None else entry.n_bytes
    npy = _npy_header(tape, n_bytes) if is_npy(tape.peek(_SNIFF_BYTES)) else None
    array_bytes = 0 if npy is None else npy.array_bytes or 0
    if npy is None or array_bytes < _MIN_SKOPS_BYTES:
        yield from ends.stretch(n_bytes, Plain, Plain)
        return
    header, *array = npy_parts(npy, name)
    yield Plain(n_bytes=header.n_bytes)
    yield from array


def _npy_header(tape: Tape, n_bytes: int | None) -> NpyHeader | None:
    """Read the header of an array that is all of an entry; None if it is not, or is one of objects."""
    try:
        header = read_npy_header(tape)
    except FormatError:
        return None
    array_bytes = header.array_bytes
    if array_bytes is None or n_bytes not in (None, header.n_bytes + array_bytes):
        return None
    return header


def _nested(tape: Tape, n_bytes: int | None, depth: int, name: str) -> Iterator[Part | Learned]:
    """Take apart an archive that is an entry of one."""
    start = tape.position
    try:
        yield from _archive(tape, depth, name)
    except (FormatError, struct.error):
        if n_bytes is None:
            raise
    if n_bytes is None:
        return
    left_bytes = n_bytes - (tape.position - start)
    if left_bytes < 0:
        raise FormatError("a zip archive that is longer than the entry it lies in")
    if left_bytes:
        yield Plain(n_bytes=left_bytes)


def _is_skeleton(head: memoryview) -> bool:
    """Tell text and pickles by their first bytes from what may be a tensor."""
    data = bytes(head)
    if _PICKLE.match(data):
        return True
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 3:
            return False
    return not _CONTROL.search(data)


def _directory(tape: Tape, kind: type[Skeleton | Plain]) -> Iterator[Part]:
    """Announce the central directory and what ends the archive."""
    while True:
        window = tape.peek(_DIRECTORY_LOOK_BYTES)
        n_bytes = _records(window)
        signature = window[n_bytes : n_bytes + 4]
        if n_bytes:
            yield kind(n_bytes=n_bytes)
        elif signature == _END_64:
            n_bytes = 12 + struct.unpack_from("<4xQ", window)[0]
            if n_bytes > _MAX_END_64_BYTES:
                raise FormatError(f"the end of a zip archive has {n_bytes} bytes")
            yield kind(n_bytes=n_bytes)
        elif signature == _LOCATOR_64:
            yield kind(n_bytes=_LOCATOR_64_BYTES)
        elif signature == _END:
            yield kind(n_bytes=_END_HEADER.size + _END_HEADER.unpack_from(window)[0])
            return
        else:
            raise FormatError("a zip archive without an end")


def _records(window: memoryview) -> int:
    """Count the bytes of the directory's whole records at the beginning of a window."""
    at = 0
    while window[at : at + 4] == CENTRAL and at + _CENTRAL_HEADER.size <= len(window):
        after = at + _CENTRAL_HEADER.size + sum(_CENTRAL_HEADER.unpack_from(window, at))
        if after > len(window):
            break
        at = after
    return at
