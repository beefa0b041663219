"""Indexes of the chunks of an HDF5 data set: trees, fixed arrays and extensible arrays."""

from __future__ import annotations

import math
import struct
from typing import Any

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


def chunk_addresses(file: Hdf5File, data_set: DataSet, *, is_partial: bool = False) -> Any:
    """Find the chunks of a data set.

    Args:
        data_set: The data set.
        is_partial: Whether blocks of an array that cannot be read are passed over.

    Returns:
        An array of addresses with a side for each dimension; -1 where there is no chunk.

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
    addresses = np.full(grid, -1, np.int64)
    if not n_chunks or chunks.address == NOWHERE:
        return addresses
    if chunks.index == 0:
        _tree_chunks(file, chunks, addresses)
    elif chunks.index in (1, 2):
        if chunks.index == 1 and n_chunks != 1:
            raise FormatError("a data set of a single chunk has several")
        numbers = _numbers_in(chunks, grid)
        check_address(chunks.address + (int(numbers.max()) + 1) * chunks.chunk_bytes)
        addresses[...] = chunks.address + chunks.chunk_bytes * numbers
    elif chunks.index == 3:
        numbers = _numbers_in(chunks, grid)
        addresses[...] = _fixed_array(file, chunks.address, int(numbers.max()) + 1)[numbers]
    elif chunks.index == 4:
        numbers = _numbers_in(chunks, grid)
        addresses[...] = _extensible_array(file, chunks.address, int(numbers.max()) + 1, is_partial=is_partial)[numbers]
    elif chunks.index == 5:
        for record in read_records(file, chunks.address, 10):
            place = np.frombuffer(record[8:], "<u8")
            if len(place) != len(grid):
                raise FormatError("a chunk has no place in its data set")
            if (place < np.array(grid, np.uint64)).all():
                addresses[tuple(place.tolist())] = check_address(u64(record, 0))
    else:
        raise UnknownTypeError(f"chunks with an index of the kind {chunks.index}")
    return addresses


def _tree_chunks(file: Hdf5File, chunks: Chunks, addresses: Any) -> None:
    n_sides = len(chunks.sides)
    grid = addresses.shape
    for node in leaves(file, chunks.address, 1, 16 + 8 * n_sides):
        for key, address in zip(node.keys, node.children, strict=True):
            n_bytes, mask, *place = struct.unpack_from(f"<II{n_sides}Q", key)
            if n_bytes != chunks.chunk_bytes or mask:
                raise FormatError("a chunk has another size than its data set says")
            at = tuple(first // side for first, side in zip(place, chunks.sides, strict=True))
            if any(first % side for first, side in zip(place, chunks.sides, strict=True)):
                raise FormatError("a chunk has no place in its data set")
            if all(nth < side for nth, side in zip(at, grid, strict=True)):
                addresses[at] = check_address(address)


def _fixed_array(file: Hdf5File, address: int, n_wanted: int) -> Any:
    """Read addresses from a fixed array (section VII.C)."""
    head = file.read(address, 24)
    if bytes(head[:4]) != b"FAHD" or head[5] != 0 or head[6] != 8:
        raise FormatError(f"there is no array of addresses at the address {address}")
    page_bits, n_entries, block = head[7], u64(head, 8), u64(head, 16)
    if not n_wanted <= n_entries <= MAX_CHUNKS or page_bits > 32:
        raise FormatError(f"an array has {n_entries} addresses")
    file.spend(n_entries)
    none = np.full(n_entries, -1, np.int64)
    if block == NOWHERE:
        return none
    if bytes(file.read(block, 4)) != b"FADB":
        raise FormatError(f"there is no array of addresses at the address {block}")
    page = 1 << page_bits
    if n_entries <= page:
        return _addresses(file.read(block + 14, 8 * n_entries))
    n_pages = -(-n_entries // page)
    bitmap_bytes = -(-n_pages // 8)
    bitmap = file.read(block + 14, bitmap_bytes)
    at = block + 14 + bitmap_bytes + 4
    for nth in range(n_pages):
        count = min(page, n_entries - nth * page)
        if bitmap[nth // 8] & (128 >> nth % 8):
            none[nth * page : nth * page + count] = _addresses(file.read(at, 8 * count))
        at += 8 * page + 4
    return none


def _extensible_array(file: Hdf5File, address: int, n_wanted: int, *, is_partial: bool) -> Any:
    """Read addresses from an extensible array (section VII.D)."""
    head = file.read(address, 68)
    if bytes(head[:4]) != b"EAHD" or head[5] != 0 or head[6] != 8:
        raise FormatError(f"there is no array of addresses at the address {address}")
    bits, n_own, least, n_pointers, page_bits = head[7:12]
    index = u64(head, 60)
    powers = (least, n_pointers)
    if bits > 64 or page_bits > 32 or not all(power and not power & (power - 1) for power in powers):
        raise FormatError("an array of addresses has impossible sizes")
    file.spend(n_wanted)
    found = np.full(n_wanted, -1, np.int64)
    if index == NOWHERE:
        return found
    if bytes(file.read(index, 4)) != b"EAIB":
        raise FormatError(f"there is no array of addresses at the address {index}")
    n_first = min(n_own, n_wanted)
    found[:n_first] = _addresses(file.read(index + 14, 8 * n_first))
    offset_bytes, page = -(-bits // 8), 1 << page_bits
    blocks_at, n_blocks = index + 14 + 8 * n_own, 2 * (n_pointers - 1)
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
            place = index + 14 + 8 * (n_own + n_blocks + nth - n_direct)
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
                    _data_block(file, block, 14 + offset_bytes, own, page if n_pages else 0, bitmaps, first_page)
                except FormatError:
                    if not is_partial:
                        raise
            at += size
        nth += 1
    return found


def _data_block(
    file: Hdf5File, address: int, head_bytes: int, out: Any, page: int, bitmaps: memoryview, first_page: int
) -> None:
    """Read the addresses of one block of an extensible array, perhaps in pages.

    The bits of the pages of all blocks follow each other; a block's do not begin in a byte of their own.
    """
    if bytes(file.read(address, 4)) != b"EADB":
        raise FormatError(f"there is no array of addresses at the address {address}")
    if not page:
        out[:] = _addresses(file.read(address + head_bytes, 8 * len(out)))
        return
    at = address + head_bytes + 4
    for nth in range(-(-len(out) // page)):
        own = out[nth * page : (nth + 1) * page]
        byte, bit = divmod(first_page + nth, 8)
        if len(bitmaps) <= byte or bitmaps[byte] & (128 >> bit):
            own[:] = _addresses(file.read(at, 8 * len(own)))
        at += 8 * page + 4


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


def _addresses(data: memoryview) -> Any:
    found = np.frombuffer(data, "<u8")
    if (found[found != NOWHERE] > MAX_ADDRESS).any():
        raise FormatError("an address is outside of the file")
    return np.where(found == NOWHERE, -1, found.astype(np.int64))
