"""Variables of TensorFlow: an index (``variables.index``, ``ckpt-1.index``) and the files of raw tensors it describes.

Sources: ``tensorflow/core/util/tensor_bundle`` and ``tensorflow/core/protobuf/tensor_bundle.proto`` of TensorFlow, and
LevelDB's ``doc/table_format.md``. The index is a table of LevelDB. Its first key is empty and has a
``BundleHeaderProto``; every other key is a tensor's name and has a ``BundleEntryProto``: dtype, shape, and the file and
range of the elements. The files are called ``<prefix>.data-<nth>-of-<number>``. They have no header.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_NAME_BYTES
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._headers import check_shape, item_bytes
from tensorcas_mlflow.file_formats._listing import Listing, LocationTable
from tensorcas_mlflow.file_formats._protobuf import BYTES, FIXED32, VARINT, read_fields, read_varint
from tensorcas_mlflow.file_formats._source import ByteSource, OpenSibling

TENSORFLOW_INDEX = ".index"
"""Suffix of an index."""

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
"""A byte for the compression of a block, and its checksum."""
_MAX_BLOCK_BYTES = 16 << 20
_MAX_INDEX_BYTES = 256 << 20
_MAX_KEYS_BYTES = 64 << 20
"""Limit for all keys together: the table stores of each only the end that differs from the key before."""
_MAX_SHARDS = 100_000
_MAX_HEADER_BYTES = 64

_DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    26: "float8_e4m3fnuz",
    27: "float8_e4m3b11fnuz",
    28: "float8_e5m2fnuz",
}
"""``DataType`` of TensorFlow."""
_KINDS = {7: "strings", 20: "resource", 21: "variant"}
_BIG_ENDIAN = 1


@dataclass(slots=True)
class _Entry:
    """One ``BundleEntryProto``."""

    data_type: int = 0
    shape: list[int] = field(default_factory=list)
    shard: int = 0
    offset: int = 0
    n_bytes: int = 0
    is_sliced: bool = False


def is_tensorflow(head: memoryview) -> bool:
    """Recognise an index by its first entry: an empty key, and a header."""
    try:
        if len(head) < 3 or bytes(head[:2]) != b"\0\0":
            return False
        n_bytes, at = read_varint(head, 2)
        return 0 < n_bytes <= _MAX_HEADER_BYTES and _read_header(head[at : at + n_bytes]) > 0
    except (FormatError, IndexError):
        return False


def list_tensorflow(source: ByteSource, beside: OpenSibling | None = None) -> Listing:
    """List the variables of an index by their keys.

    Left out are strings, such as the graph of objects of a checkpoint (``_CHECKPOINTABLE_OBJECT_GRAPH``), quantized
    numbers, and variables in slices. Checksums are not compared.

    Args:
        source: The index.
        beside: Opens the files of tensors beside it.

    Raises:
        FormatError: The index is malformed, compressed or big-endian, or its files cannot be opened from here. An
            `IndexError` and a `UnicodeDecodeError` say the same.
        BackendError: A file is missing.
    """
    entries = _entries(source)
    key, value = next(entries, (None, memoryview(b"")))
    if key != b"":
        raise FormatError("its first key is not that of a header")
    n_shards = _read_header(value)
    prefix = posixpath.basename(source.name.replace("\\", "/")).removesuffix(TENSORFLOW_INDEX)
    table = LocationTable(source)
    numbers: dict[int, int] = {}
    for key, value in entries:
        if key[:1] == b"\0":
            continue  # a slice of a variable, which is left out under its name
        name, entry = key.decode(), _read_entry(value)
        dtype = _DTYPES.get(entry.data_type)
        if dtype is None or entry.is_sliced:
            kind = _KINDS.get(entry.data_type, f"data type {entry.data_type}")
            table.leave_out(name, "slices" if entry.is_sliced else kind)
            continue
        check_shape(name, entry.shape, item_bytes(dtype), entry.n_bytes)
        nth = 0
        if entry.n_bytes:
            if not 0 <= entry.shard < n_shards:
                raise FormatError(f"tensor {name[:80]!r} lies in file {entry.shard} of {n_shards}")
            if entry.shard not in numbers:
                file = f"{prefix}.data-{entry.shard:05d}-of-{n_shards:05d}"
                if beside is None:
                    raise FormatError(f"its tensors are in {file[:80]!r}: open it with that file beside it")
                numbers[entry.shard] = len(table.sources)
                table.sources.append(beside(file))
            nth = numbers[entry.shard]
        start = entry.offset if entry.n_bytes else 0
        table.add(name, dtype, tuple(entry.shape), start=start, n_bytes=entry.n_bytes, source=nth)
    return table.listing("tensorflow")


# --- the table


def _entries(source: ByteSource) -> Iterator[tuple[bytes, memoryview]]:
    """Read all keys and values, in the order of the keys."""
    if source.size < _FOOTER_BYTES or source.size > _MAX_INDEX_BYTES:
        raise FormatError(f"it has {source.size} bytes")
    footer = source.read(source.size - _FOOTER_BYTES, _FOOTER_BYTES)
    if bytes(footer[-len(_MAGIC) :]) != _MAGIC:
        raise FormatError("it does not end as a table of LevelDB does")
    _, at = _read_handle(footer, 0)
    index, _ = _read_handle(footer, at)
    last: bytes | None = None
    end = n_keys_bytes = 0
    for _, handle in _read_block(source, *index):
        (start, n_bytes), _ = _read_handle(handle, 0)
        # A block that is read twice, or many times, would make a small file large.
        if start < end:
            raise FormatError("its blocks do not follow each other")
        end = start + n_bytes + _TRAILER_BYTES
        for key, value in _read_block(source, start, n_bytes):
            if last is not None and key <= last:
                raise FormatError("its keys are not in order")
            last = key
            n_keys_bytes += len(key)
            if n_keys_bytes > _MAX_KEYS_BYTES:
                raise FormatError("its keys are too long")
            yield key, value


def _read_block(source: ByteSource, start: int, n_bytes: int) -> Iterator[tuple[bytes, memoryview]]:
    if n_bytes > _MAX_BLOCK_BYTES or start + n_bytes + _TRAILER_BYTES > source.size:
        raise FormatError(f"it has a block of {n_bytes} bytes at byte {start}, and {source.size} bytes")
    block = source.read(start, n_bytes + 1)
    if block[n_bytes]:
        raise FormatError("its table is compressed")
    n_restarts = int.from_bytes(block[max(n_bytes - 4, 0) : n_bytes], "little")
    stop = n_bytes - 4 - 4 * n_restarts
    if stop < 0:
        raise FormatError("a block of its table ends too early")
    entries = block[:stop]
    at, key = 0, b""
    while at < stop:
        shared, at = read_varint(entries, at)
        n_key_bytes, at = read_varint(entries, at)
        n_value_bytes, at = read_varint(entries, at)
        end = at + n_key_bytes + n_value_bytes
        if shared > len(key) or shared + n_key_bytes > MAX_NAME_BYTES or end > stop:
            raise FormatError("an entry of its table exceeds its block")
        key = key[:shared] + bytes(entries[at : at + n_key_bytes])
        yield key, entries[end - n_value_bytes : end]
        at = end


def _read_handle(view: memoryview, at: int) -> tuple[tuple[int, int], int]:
    """Read the position and the size of a block."""
    start, at = read_varint(view, at)
    n_bytes, at = read_varint(view, at)
    return (start, n_bytes), at


# --- the messages


def _read_header(message: memoryview) -> int:
    """Return the number of files that a header states."""
    n_shards = 0
    for number, wire_type, value, _ in read_fields(message):
        if (number, wire_type) not in ((1, VARINT), (2, VARINT), (3, BYTES)):
            raise FormatError("its header has an unknown field")
        if number == 1:
            n_shards = value
        elif number == 2 and value == _BIG_ENDIAN:
            raise FormatError("its tensors are in big-endian order")
    if not 0 < n_shards <= _MAX_SHARDS:
        raise FormatError(f"it has {n_shards} files")
    return n_shards


_WIRE_TYPES = {1: VARINT, 2: BYTES, 3: VARINT, 4: VARINT, 5: VARINT, 6: FIXED32, 7: BYTES}


def _read_entry(message: memoryview) -> _Entry:
    entry = _Entry()
    for number, wire_type, value, content in read_fields(message):
        if _WIRE_TYPES.get(number) != wire_type:
            raise FormatError("an entry has an unknown field")
        match number:
            case 1:
                entry.data_type = value
            case 2:
                entry.shape = _read_shape(content)
            case 3:
                entry.shard = value
            case 4:
                entry.offset = value
            case 5:
                entry.n_bytes = value
            case 7:
                entry.is_sliced = True
    return entry


def _read_shape(message: memoryview) -> list[int]:
    shape: list[int] = []
    for number, wire_type, value, content in read_fields(message):
        if number == 3 and value:
            raise FormatError("a tensor without a shape")
        if number == 2 and wire_type == BYTES:
            shape.append(next((side for nth, kind, side, _ in read_fields(content) if (nth, kind) == (1, VARINT)), 0))
        if len(shape) > MAX_DIMENSIONS:
            raise FormatError(f"a tensor of more than {MAX_DIMENSIONS} dimensions")
    return shape
