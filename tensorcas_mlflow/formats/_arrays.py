"""A tensor's bytes, from the file that they lie in: mapped, read, inflated, or put into C order."""

from __future__ import annotations

import math
import mmap
import tempfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import BackendError, CorruptError
from tensorcas_mlflow.formats._source import ByteSource
from tensorcas_mlflow.tensor import aligned_bytes, bytes_of, empty_array

if TYPE_CHECKING:
    from tensorcas_mlflow.formats._listing import Place

PIECE_BYTES = 16 << 20
_INFLATE_BYTES = 1 << 20
_RAW_DEFLATE = -15


def span_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Count the elements from a tensor's first to its last, both included, where strides are not negative."""
    if 0 in shape:
        return 0
    return 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))


def is_c_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether the elements lie one after the other, the last dimension's neighbours side by side."""
    n_elements = 1
    for side, stride in zip(reversed(shape), reversed(strides), strict=True):
        if side != 1 and stride != n_elements:
            return 0 in shape
        n_elements *= side
    return True


def read_array(source: ByteSource, place: Place) -> Array:
    """Give a tensor: a view of the mapped file where it lies there in C order, and else a new array.

    Raises:
        CorruptError: Its checksum or its compressed bytes show that it is damaged.
        BackendError: The storage does not give it.
    """
    spec = place.spec
    if not spec.n_bytes:
        return empty_array(spec)
    elements = _elements(source, place)
    if place.strides is None and not place.swapped:
        return elements.reshape(spec.shape)
    array = _in_shape(elements, place)
    out = empty_array(spec)
    np.copyto(out, array)
    return _in_native_order(out) if place.swapped else out


def read_pieces(source: ByteSource, place: Place) -> Iterator[memoryview]:
    """Read a tensor in C order, some `PIECE_BYTES` at a time; nothing of an empty one. Raises as `read_array`.

    A large one that lies in another order, and in a stretch that cannot be mapped, goes through a temporary file.
    """
    if not place.spec.n_bytes:
        return
    if place.strides is None and not place.swapped:
        yield from _plain_pieces(source, place) if place.deflated is None else _inflated(source, place)
        return
    for block in _blocks(_in_shape(_mapped_elements(source, place), place)):
        contiguous = np.ascontiguousarray(block)
        if place.swapped:
            contiguous = _in_native_order(contiguous.copy() if contiguous is block else contiguous)
        yield bytes_of(contiguous)


def _plain_pieces(source: ByteSource, place: Place) -> Iterator[memoryview]:
    stop = place.start + place.n_bytes
    crc = place.checksum[1] if place.checksum else 0
    for start in range(place.start, stop, PIECE_BYTES):
        piece = source.read(start, min(PIECE_BYTES, stop - start))
        if place.checksum:
            crc = zlib.crc32(piece, crc)
        yield piece
    _check(source, place, crc)


def _elements(source: ByteSource, place: Place) -> Array:
    """Give the elements as they lie, one after the other."""
    dtype = place.spec.numpy_dtype
    if place.deflated is not None:
        elements = aligned_bytes(_inflated_bytes(place))
        at = 0
        for piece in _inflated(source, place):
            elements[at : at + len(piece)] = piece
            at += len(piece)
        return elements.view(dtype)
    view = source.view(place.start, place.n_bytes)
    if view is None:
        read = aligned_bytes(place.n_bytes)
        source.read_into(place.start, read.data)
        view = read.data
    if place.checksum:
        _check(source, place, zlib.crc32(view, place.checksum[1]))
    return np.frombuffer(view, dtype)


def _mapped_elements(source: ByteSource, place: Place) -> Array:
    """Give the elements as they lie, those that are many and not mapped from a temporary file without a name."""
    n_bytes = _inflated_bytes(place)
    if n_bytes <= PIECE_BYTES or (place.deflated is None and source.view(place.start, place.n_bytes) is not None):
        return _elements(source, place)
    pieces = _plain_pieces(source, place) if place.deflated is None else _inflated(source, place)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            for piece in pieces:
                # Not through the map: where no room is left, writing to one kills the process.
                at = 0
                while at < len(piece):
                    at += file.write(piece[at:]) or 0
            mapped = mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BackendError("write", tempfile.gettempdir(), f"{type(error).__name__}: {error}") from error
    return np.frombuffer(mapped, place.spec.numpy_dtype)


def _inflated_bytes(place: Place) -> int:
    """Count the bytes that are wanted of a deflated stretch."""
    spec = place.spec
    if place.strides is None:
        return spec.n_bytes
    return span_of(spec.shape, place.strides) * spec.numpy_dtype.itemsize


def _inflated(source: ByteSource, place: Place) -> Iterator[memoryview]:
    """Inflate the elements of a deflated stretch, never more than the place says there are."""
    assert place.deflated is not None
    first, last = place.deflated, place.deflated + _inflated_bytes(place)
    at, stop = place.start, place.start + place.n_bytes
    engine = zlib.decompressobj(_RAW_DEFLATE)
    crc = n_done = 0
    tail: bytes | memoryview = b""
    try:
        while not engine.eof and (place.checksum or n_done < last):
            if not tail and at < stop:
                tail = source.read(at, min(_INFLATE_BYTES, stop - at))
                at += len(tail)
            piece = engine.decompress(tail, PIECE_BYTES)
            tail = engine.unconsumed_tail
            if not piece and not tail and at == stop and not engine.eof:
                raise CorruptError(source.name, f"the bytes of {place.spec.name!r} end too early")
            if place.checksum:
                crc = zlib.crc32(piece, crc)
            begin, n_done = n_done, n_done + len(piece)
            if n_done > last and place.checksum:
                break
            wanted = memoryview(piece)[max(0, first - begin) : max(0, last - begin)]
            if wanted:
                yield wanted
    except zlib.error as error:
        raise CorruptError(source.name, f"the bytes of {place.spec.name!r} cannot be inflated: {error}") from error
    is_over = engine.eof and not engine.unused_data and at == stop
    if n_done < last or (place.checksum and (n_done > last or not is_over)):
        raise CorruptError(source.name, f"the bytes of {place.spec.name!r} are not as many as its file says")
    _check(source, place, crc)


def check_bytes(source: ByteSource, place: Place, data: memoryview) -> None:
    """See that the bytes of a place that is plain have its checksum, if it has one.

    Raises:
        CorruptError: They have not.
    """
    if place.checksum:
        _check(source, place, zlib.crc32(data, place.checksum[1]))


def _check(source: ByteSource, place: Place, crc: int) -> None:
    if place.checksum and place.checksum[0] != crc:
        raise CorruptError(source.name, f"the bytes of {place.spec.name!r} do not have their CRC-32")


def _in_shape(elements: Array, place: Place) -> Array:
    """View elements as they lie in the tensor's shape; that the span of its strides is there has been checked."""
    spec, item_bytes = place.spec, elements.itemsize
    if place.strides is None:
        return elements.reshape(spec.shape)
    assert span_of(spec.shape, place.strides) <= elements.size
    strides = [stride * item_bytes for stride in place.strides]
    return np.lib.stride_tricks.as_strided(elements, spec.shape, strides, writeable=False)


def _in_native_order(array: Array) -> Array:
    """Turn the bytes of each element round, in place."""
    part_bytes = array.itemsize // (2 if array.dtype.kind == "c" else 1)
    if part_bytes > 1:
        # As plain numbers: the dtypes of ml_dtypes know one order only.
        array.reshape(-1).view(f"u{part_bytes}").byteswap(inplace=True)
    return array


def _blocks(array: Array) -> Iterator[Array]:
    """Cut an array along its first dimensions into pieces of at most `PIECE_BYTES`, in C order."""
    n_bytes = math.prod(array.shape) * array.itemsize
    if n_bytes <= PIECE_BYTES or not array.ndim:
        yield array
        return
    n_rows = PIECE_BYTES * len(array) // n_bytes
    if n_rows:
        yield from (array[start : start + n_rows] for start in range(0, len(array), n_rows))
    else:
        for row in array:
            yield from _blocks(row)
