"""Indexes of the chunks of an HDF5 data set: trees, fixed arrays and extensible arrays."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._hdf5_file import (
    MAX_ADDRESS,
    MAX_CHUNKS,
    NOWHERE,
    Hdf5File,
    UnknownTypeError,
    check_address,
    u64,
)
from tensorcas_mlflow.file_formats._hdf5_headers import Chunks, DataSet
from tensorcas_mlflow.file_formats._hdf5_trees import leaves, read_records


class ChunkPlaces(NamedTuple):
    """Places of a data set's chunks in its file: arrays with a side for each dimension of the data set."""

    addresses: Any
    """-1 where there is no chunk."""
    sizes: Any
    """Sizes as they are stored."""
    masks: Any
    """Bits of the filters that a chunk has not passed."""

    @property
    def is_whole(self) -> bool:
        """True if every chunk exists."""
        return bool((self.addresses >= 0).all())


_N_COLUMNS = 3
_MASK_BYTES = 4
_ADDRESS_BYTES = 8


def find_chunks(file: Hdf5File, data_set: DataSet, *, is_partial: bool = False) -> ChunkPlaces:
    """Find the chunks of a data set.

    Args:
        data_set: The data set.
        is_partial: Whether blocks of an index that cannot be read are passed over.

    Returns:
        The places, without those of blocks passed over.

    Raises:
        FormatError: The index is malformed, or the data set has too many chunks.
        UnknownTypeError: The index is of an unknown kind.
    """
    chunks, shape = data_set.chunks, data_set.shape
    assert chunks is not None
    assert shape is not None
    grid = tuple(-(-side // step) for side, step in zip(shape, chunks.sides, strict=False))
    n_chunks = math.prod(grid)
    if n_chunks > MAX_CHUNKS:
        raise FormatError(f"a data set has {n_chunks} chunks")
    file.spend(n_chunks)
    places = np.empty((*grid, _N_COLUMNS), np.int64)
    places[...] = -1, chunks.chunk_bytes, 0
    if n_chunks and chunks.address != NOWHERE:
        _find(file, chunks, places, is_partial=is_partial)
    found = ChunkPlaces(*np.moveaxis(places, -1, 0))
    is_there = found.addresses >= 0
    if not chunks.is_filtered and (found.masks[is_there].any() or (found.sizes[is_there] != chunks.chunk_bytes).any()):
        raise FormatError("a chunk has another size than its data set says")
    return found


def _find(file: Hdf5File, chunks: Chunks, places: Any, *, is_partial: bool) -> None:
    """Write the places of chunks into an array with a side for each dimension, and one for the columns."""
    grid = places.shape[:-1]
    entry_bytes = _ADDRESS_BYTES if not chunks.is_filtered else None
    if chunks.index == 0:
        _tree_chunks(file, chunks, places, is_partial=is_partial)
    elif chunks.index in (1, 2):
        if chunks.index == 1 and math.prod(grid) != 1:
            raise FormatError("a data set of a single chunk has several")
        if chunks.is_filtered and chunks.single is None:
            raise FormatError("a filtered chunk has no size")
        numbers = _numbers_in(chunks, grid)
        check_address(chunks.address + (int(numbers.max()) + 1) * chunks.chunk_bytes)
        places[..., 0] = chunks.address + chunks.chunk_bytes * numbers
        if chunks.single is not None:
            places[..., 1:] = check_address(chunks.single[0]), chunks.single[1]
    elif chunks.index in (3, 4):
        numbers = _numbers_in(chunks, grid)
        read = _fixed_array if chunks.index == 3 else _extensible_array
        places[...] = read(file, chunks, entry_bytes, int(numbers.max()) + 1, is_partial=is_partial)[numbers]
    elif chunks.index == 5:
        n_sides = len(grid)
        for record in read_records(file, chunks.address, 11 if chunks.is_filtered else 10, is_partial=is_partial):
            head_bytes = len(record) - 8 * n_sides
            if head_bytes < _ADDRESS_BYTES or (entry_bytes is not None and head_bytes != entry_bytes):
                raise FormatError("a chunk has no place in its data set")
            place = np.frombuffer(record[head_bytes:], "<u8")
            if (place < np.array(grid, np.uint64)).all():
                [places[tuple(place.tolist())]] = _entries(record[:head_bytes], head_bytes, chunks)
    else:
        raise UnknownTypeError(f"chunks with an index of the kind {chunks.index}")


def _tree_chunks(file: Hdf5File, chunks: Chunks, places: Any, *, is_partial: bool) -> None:
    n_sides = len(chunks.sides)
    grid = places.shape[:-1]
    for node in leaves(file, chunks.address, 1, 16 + 8 * n_sides, is_partial=is_partial):
        for key, address in zip(node.keys, node.children, strict=True):
            n_bytes, mask, *place = struct.unpack_from(f"<II{n_sides}Q", key)
            at = tuple(first // side for first, side in zip(place, chunks.sides, strict=True))
            if any(first % side for first, side in zip(place, chunks.sides, strict=True)):
                raise FormatError("a chunk has no place in its data set")
            if all(nth < side for nth, side in zip(at, grid, strict=True)):
                places[at] = check_address(address), n_bytes, mask


def _check_entry_bytes(entry_bytes: int, wanted: int | None) -> None:
    """Check the size of an entry of an array: an address, and with filters a size and a mask."""
    least, most = _ADDRESS_BYTES + 1 + _MASK_BYTES, _ADDRESS_BYTES + 8 + _MASK_BYTES
    if entry_bytes != wanted and (wanted is not None or not least <= entry_bytes <= most):
        raise FormatError(f"an array has entries of {entry_bytes} bytes")


def _no_chunks(n: int, chunks: Chunks) -> Any:
    """Return the places of chunks that do not exist."""
    places = np.empty((n, _N_COLUMNS), np.int64)
    places[...] = -1, chunks.chunk_bytes, 0
    return places


def _fixed_array(file: Hdf5File, chunks: Chunks, wanted: int | None, n_wanted: int, *, is_partial: bool) -> Any:
    """Read places from a fixed array (section VII.C)."""
    head = file.read(chunks.address, 24)
    if bytes(head[:4]) != b"FAHD" or head[5] != (wanted is None):
        raise FormatError(f"there is no array of addresses at the address {chunks.address}")
    entry, page_bits, n_entries, block = head[6], head[7], u64(head, 8), u64(head, 16)
    _check_entry_bytes(entry, wanted)
    if not n_wanted <= n_entries <= MAX_CHUNKS or page_bits > 32:
        raise FormatError(f"an array has {n_entries} addresses")
    file.spend(n_entries)
    places = _no_chunks(n_entries, chunks)
    if block == NOWHERE:
        return places
    if bytes(file.read(block, 4)) != b"FADB":
        raise FormatError(f"there is no array of addresses at the address {block}")
    page = 1 << page_bits
    if n_entries <= page:
        return _entries(file.read(block + 14, entry * n_entries), entry, chunks)
    n_pages = -(-n_entries // page)
    bitmap_bytes = -(-n_pages // 8)
    bitmap = file.read(block + 14, bitmap_bytes)
    at = block + 14 + bitmap_bytes + 4
    for nth in range(n_pages):
        count = min(page, n_entries - nth * page)
        if bitmap[nth // 8] & (128 >> nth % 8):
            try:
                places[nth * page : nth * page + count] = _entries(file.read(at, entry * count), entry, chunks)
            except FormatError:
                if not is_partial:
                    raise
        at += entry * page + 4
    return places


def _extensible_array(file: Hdf5File, chunks: Chunks, wanted: int | None, n_wanted: int, *, is_partial: bool) -> Any:
    """Read places from an extensible array (section VII.D)."""
    head = file.read(chunks.address, 68)
    if bytes(head[:4]) != b"EAHD" or head[5] != (wanted is None):
        raise FormatError(f"there is no array of addresses at the address {chunks.address}")
    entry = head[6]
    _check_entry_bytes(entry, wanted)
    bits, n_own, least, n_pointers, page_bits = head[7:12]
    index = u64(head, 60)
    powers = (least, n_pointers)
    if bits > 64 or page_bits > 32 or not all(power and not power & (power - 1) for power in powers):
        raise FormatError("an array of addresses has impossible sizes")
    file.spend(n_wanted)
    found = _no_chunks(n_wanted, chunks)
    if index == NOWHERE:
        return found
    if bytes(file.read(index, 4)) != b"EAIB":
        raise FormatError(f"there is no array of addresses at the address {index}")
    n_first = min(n_own, n_wanted)
    found[:n_first] = _entries(file.read(index + 14, entry * n_first), entry, chunks)
    offset_bytes, page = -(-bits // 8), 1 << page_bits
    blocks_at, n_blocks = index + 14 + entry * n_own, 2 * (n_pointers - 1)
    n_direct = 2 * (n_pointers.bit_length() - 1)
    at, nth = n_own, 0
    while at < n_wanted:
        n_in, size = 1 << nth // 2, least << (nth + 1) // 2
        n_pages = size // page if size > page else 0
        bitmap_bytes = -(-n_pages // 8)
        bitmaps = memoryview(b"")
        if nth < n_direct:
            table = file.read(blocks_at, 8 * n_in)
            blocks_at += 8 * n_in
        else:
            place = index + 14 + entry * n_own + 8 * (n_blocks + nth - n_direct)
            above = u64(file.read(place, 8), 0)
            if above == NOWHERE:
                at, nth = at + n_in * size, nth + 1
                continue
            try:
                kind = bytes(file.read(above, 4))
            except FormatError:
                if is_partial:
                    break
                raise
            if kind != b"EASB":
                raise FormatError(f"there is no array of addresses at the address {above}")
            above += 14 + offset_bytes
            bitmaps = file.read(above, n_in * bitmap_bytes)
            table = file.read(above + len(bitmaps), 8 * n_in)
        for number in range(n_in):
            if at >= n_wanted:
                break
            block = u64(table, 8 * number)
            if block != NOWHERE:
                own, first_page = found[at : at + size], number * n_pages
                try:
                    paged = _Pages(page if n_pages else 0, bitmaps, first_page)
                    _data_block(file, chunks, block + 14 + offset_bytes, block, entry, own, paged)
                except FormatError:
                    if not is_partial:
                        raise
            at += size
        nth += 1
    return found


class _Pages(NamedTuple):
    """Pages of a block of an extensible array."""

    size: int
    """Entries of a page; 0 for a block without pages."""
    bitmaps: memoryview
    """Bits of the pages that exist, of all blocks."""
    first: int
    """The block's first bit."""


def _data_block(file: Hdf5File, chunks: Chunks, at: int, address: int, entry: int, out: Any, pages: _Pages) -> None:
    """Read the entries of one block of an extensible array, perhaps in pages.

    The bits of the pages of all blocks follow each other; a block's do not begin in a byte of their own.
    """
    if bytes(file.read(address, 4)) != b"EADB":
        raise FormatError(f"there is no array of addresses at the address {address}")
    page = pages.size
    if not page:
        out[:] = _entries(file.read(at, entry * len(out)), entry, chunks)
        return
    at += 4
    for nth in range(-(-len(out) // page)):
        own = out[nth * page : (nth + 1) * page]
        byte, bit = divmod(pages.first + nth, 8)
        if len(pages.bitmaps) <= byte or pages.bitmaps[byte] & (128 >> bit):
            own[:] = _entries(file.read(at, entry * len(own)), entry, chunks)
        at += entry * page + 4


def _numbers_in(chunks: Chunks, grid: tuple[int, ...]) -> Any:
    """Return the number of each chunk of a grid, as counted in the data set's largest shape.

    A side without a limit is counted last; only an extensible array has one.
    """
    most = [-(-side // step) for side, step in zip(chunks.max_shape, chunks.sides, strict=True)]
    unlimited = [nth for nth, side in enumerate(chunks.max_shape) if side == NOWHERE]
    if len(unlimited) > 1 or any(side > most[nth] for nth, side in enumerate(grid)):
        raise FormatError("a data set is larger than it can be")
    order = [*unlimited, *(nth for nth in range(len(most)) if nth not in unlimited)]
    strides, step = [0] * len(most), 1
    for nth in reversed(order):
        strides[nth], step = step, step * most[nth]
    numbers = np.zeros(grid, np.int64)
    last = sum((side - 1) * stride for side, stride in zip(grid, strides, strict=True))
    if last >= MAX_CHUNKS:
        raise FormatError("a data set has too many chunks")
    for nth, (side, stride) in enumerate(zip(grid, strides, strict=True)):
        numbers += (stride * np.arange(side)).reshape(-1, *[1] * (len(grid) - nth - 1))
    return numbers


def _entries(data: memoryview, entry_bytes: int, chunks: Chunks) -> Any:
    """Read entries of an array: addresses, and with filters sizes and masks."""
    raw = np.frombuffer(data, np.uint8).reshape(-1, entry_bytes)
    found = np.ascontiguousarray(raw[:, :_ADDRESS_BYTES]).view("<u8")[:, 0]
    is_there = found != NOWHERE
    if (found[is_there] > MAX_ADDRESS).any():
        raise FormatError("an address is outside of the file")
    places = _no_chunks(len(found), chunks)
    places[is_there, 0] = found[is_there]
    if entry_bytes > _ADDRESS_BYTES:
        sizes = np.zeros((len(raw), 8), np.uint8)
        sizes[:, : entry_bytes - _ADDRESS_BYTES - _MASK_BYTES] = raw[:, _ADDRESS_BYTES:-_MASK_BYTES]
        places[:, 1] = np.minimum(sizes.view("<u8")[:, 0], MAX_ADDRESS)
        places[:, 2] = np.ascontiguousarray(raw[:, -_MASK_BYTES:]).view("<u4")[:, 0]
    return places
