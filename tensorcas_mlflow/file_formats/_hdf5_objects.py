"""The structures of an HDF5 file: superblock, object headers, groups, data types, layouts and indexes of chunks.

The format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html (version 3.0; the sections' numbers are
in the comments below). All offsets and lengths have 8 bytes here, which is what every library writes unless it is told
otherwise. Checksums are not compared.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensorcas_mlflow.base.dtypes import DType, parse_dtype
from tensorcas_mlflow.base.tensors import MAX_DIMENSIONS, MAX_TENSOR_BYTES
from tensorcas_mlflow.errors import FormatError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
NOWHERE = (1 << 64) - 1
"""Address of something that is not in the file."""

_FREE_READ_BYTES = 4 << 20
_MAX_OVERREAD = 4
"""Times that the structures of a file may be read; a sound file needs two."""
_MAX_ADDRESS = 1 << 62
"""Addresses are added to sizes in numbers of 63 bits."""
_USER_BLOCKS = (0, 512, 1024, 2048)
_MAX_HEADER_BYTES = 8 << 20
_MAX_MESSAGES = 1 << 16
_MAX_BLOCKS = 4096
"""Blocks of one object header."""
_MAX_LINKS = 1 << 20
_MAX_DEPTH = 64
"""Levels of a tree; a tree of so many has more leaves than any file."""
_MAX_GROUP_DEPTH = 256
_MAX_MEMBERS = 1000
_MAX_TEXT_BYTES = 4096
MAX_CHUNKS = 1 << 20

# Section IV.A.2: the kinds of messages.
_SPACE, _LINK_INFO, _TYPE, _LINK, _EXTERNAL, _LAYOUT = 0x1, 0x2, 0x3, 0x6, 0x7, 0x8
_FILTERS, _ATTRIBUTE, _CONTINUED, _SYMBOLS = 0xB, 0xC, 0x10, 0x11
_IS_SHARED = 2

ReadBytes = Callable[[int, int], memoryview]
"""Reads bytes at a position of the file; raises `FormatError` where there are not as many."""


class Message(NamedTuple):
    """A message of an object header."""

    kind: int
    flags: int
    at: int
    """Address of its data."""
    data: memoryview


class UnknownTypeError(FormatError):
    """A data type without a numpy dtype; its argument is the type's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunked layout of a data set."""

    sides: tuple[int, ...]
    """Sides of a chunk."""
    chunk_bytes: int
    index: int
    """0 for a B-tree of version 1, else the number of the index in the specification."""
    address: int
    """Address of the index, or of the chunks themselves."""
    max_shape: tuple[int, ...]
    """Largest shape of the data set; `NOWHERE` for a side without a limit."""
    is_filtered: bool


@dataclass(slots=True, kw_only=True)
class DataSet:
    """The header of a data set."""

    address: int
    dtype: DType | None = None
    kind: str = ""
    """Reason for which the data set cannot be listed; "" if there is none."""
    shape: tuple[int, ...] | None = None
    start: int | None = None
    """Address of contiguous elements."""
    n_bytes: int = 0
    """Size of contiguous elements."""
    is_compact: bool = False
    """Whether the elements lie in the header."""
    chunks: Chunks | None = None

    @property
    def wanted_bytes(self) -> int | None:
        """Size of the elements; None if the header does not say it."""
        if self.dtype is None or self.shape is None:
            return None
        return math.prod(self.shape) * self.dtype.itemsize


class Link(NamedTuple):
    """A hard link in a group."""

    name: str
    address: int


@dataclass(slots=True)
class Found:
    """A data set with its paths."""

    data_set: DataSet
    names: list[str] = field(default_factory=list)


def user_block(head: memoryview) -> int | None:
    """Return the position of the superblock; None if the file is not HDF5."""
    return next((at for at in _USER_BLOCKS if head[at : at + 8] == SIGNATURE), None)


class Hdf5:
    """Reader of one file's structures."""

    def __init__(self, read: ReadBytes, head: memoryview, known_bytes: Callable[[], int]) -> None:
        """Read the superblock (section II).

        Args:
            read: Reads at a position of the file.
            head: The file's first bytes.
            known_bytes: Returns the number of bytes that the file is known to have. All reads together are bounded by
                it.

        Raises:
            FormatError: It is malformed, or of an unknown version.
        """
        base = user_block(head)
        if base is None:
            raise FormatError("it has no superblock")
        self.base = base
        """Position of the address 0."""
        self._read = read
        self._known_bytes = known_bytes
        self._n_read_bytes = 0
        head = head[base:]
        version = head[8]
        if version in (0, 1):
            widths, at = head[13:15], 24 if version == 0 else 28
            addresses, self.root = at, _u64(head, at + 40)
        elif version in (2, 3):
            widths, addresses = head[9:11], 12
            self.root = _u64(head, addresses + 24)
        else:
            raise FormatError(f"its superblock has the version {version}")
        if bytes(widths) != b"\x08\x08":
            raise FormatError(f"its offsets and lengths have {widths[0]} and {widths[1]} bytes")
        if _u64(head, addresses) not in (0, base):
            raise FormatError("its superblock stands elsewhere than it says")
        self.end = _u64(head, addresses + 16)
        """Position behind the last byte."""

    def read(self, address: int, n_bytes: int) -> memoryview:
        """Read bytes at an address; raises `FormatError`."""
        if address + n_bytes > _MAX_ADDRESS:
            raise FormatError("an address is outside of the file")
        self._spend(n_bytes)
        return self._read(self.base + address, n_bytes)

    def _spend(self, n_bytes: int) -> None:
        """Count work that a hostile file may ask for many times, such as the reads of one header from many places."""
        self._n_read_bytes += n_bytes
        if self._n_read_bytes > _FREE_READ_BYTES + _MAX_OVERREAD * self._known_bytes():
            raise FormatError("its structures share bytes")

    # --- object headers (section IV.A.1)

    def messages(self, address: int, *, is_partial: bool = False) -> list[Message]:
        """Read the messages of an object header.

        Args:
            address: The header's.
            is_partial: Whether blocks that cannot be read are passed over.
        """
        prefix = self.read(address, 6)
        found: list[Message] = []
        n_bytes = 0
        if bytes(prefix[:4]) == b"OHDR":
            at = 6 + (16 if prefix[5] & 32 else 0) + (4 if prefix[5] & 16 else 0)
            width = 1 << (prefix[5] & 3)
            block = (address + at + width, int.from_bytes(self.read(address + at, width), "little"))
            long_bytes = 6 if prefix[5] & 4 else 4
        elif bytes(prefix[:2]) == b"\x01\x00":
            block = (address + 16, _u32(self.read(address, 16), 8))
            long_bytes = 0
        else:
            raise FormatError(f"there is no object at the address {address}")
        blocks = [block]
        for start, size in blocks:
            n_bytes += size
            if n_bytes > _MAX_HEADER_BYTES or len(blocks) > _MAX_BLOCKS:
                raise FormatError(f"the object at the address {address} has a header of too many bytes")
            try:
                data = self.read(start, size)
            except FormatError:
                if is_partial and found:
                    continue
                raise
            if long_bytes and found and bytes(data[:4]) == b"OCHK":
                start, data = start + 4, data[4:-4]
            new = [*(_messages_2(data, start, long_bytes) if long_bytes else _messages_1(data, start))]
            found += new
            if len(found) > _MAX_MESSAGES:
                raise FormatError(f"the object at the address {address} has too many messages")
            blocks += [(_u64(each.data, 0), _u64(each.data, 8)) for each in new if each.kind == _CONTINUED]
        return found

    def data_set(self, address: int, messages: Sequence[Message], *, is_partial: bool = False) -> DataSet | None:
        """Read the header of a data set; None if the object is none.

        Args:
            address: The header's.
            messages: Its messages.
            is_partial: Whether some of them may be missing.

        Raises:
            FormatError: The header is malformed.
        """
        by_kind = {each.kind: each for each in reversed(messages)}
        layout = by_kind.get(_LAYOUT)
        if layout is None or (not is_partial and not {_SPACE, _TYPE} <= by_kind.keys()):
            return None
        made = DataSet(address=address)
        filters = by_kind.get(_FILTERS)
        is_filtered = filters is not None and filters.data[1] > 0
        max_shape: tuple[int, ...] = ()
        if _SPACE in by_kind:
            shape = _shape_of(by_kind[_SPACE].data)
            if shape is None:
                made.kind = "no elements"
            else:
                made.shape, max_shape = shape
        if _TYPE in by_kind:
            try:
                dtype = self._dtype(by_kind[_TYPE], messages)
                made.dtype = dtype.base
                if made.shape is not None:
                    made.shape += dtype.shape
            except UnknownTypeError as error:
                made.kind = made.kind or str(error)
        if made.shape is not None and (
            len(made.shape) > MAX_DIMENSIONS
            or (made.dtype is not None and math.prod(filter(None, made.shape)) * made.dtype.itemsize > MAX_TENSOR_BYTES)
        ):
            raise FormatError(f"the data set at the address {address} has an impossible shape")
        if _EXTERNAL in by_kind:
            made.kind = made.kind or "in another file"
        else:
            _lay_out(made, layout, max_shape, is_filtered=is_filtered)
        return made

    def _dtype(self, message: Message, messages: Sequence[Message]) -> DType:
        data = message.data
        if message.flags & _IS_SHARED:
            # Section IV.A.2, "Shared Message": a type that has a name is an object of its own.
            if data[0] not in (1, 2, 3) or (data[0] == 3 and data[1] != 2):
                raise UnknownTypeError("a shared type")
            address = _u64(data, 8 if data[0] == 1 else 2)
            types = [each for each in self.messages(address) if each.kind == _TYPE and not each.flags & _IS_SHARED]
            if not types:
                raise FormatError(f"there is no type at the address {address}")
            data = types[0].data
        if data[0] & 15 == 5:
            dtype = _opaque_dtype(_u32(data, 4), self._text_attribute(messages, "dtype"))
        else:
            dtype = read_type(data)[0]
        if not dtype.itemsize:
            raise UnknownTypeError("elements without bytes")
        return dtype

    def _text_attribute(self, messages: Sequence[Message], name: str) -> str:
        """Read a short text of a header's attributes; "" if there is none (section IV.A.2.m)."""
        for each in messages:
            data = each.data
            if each.kind != _ATTRIBUTE or len(data) < 9 or data[0] not in (1, 2, 3):
                continue
            name_bytes, type_bytes, space_bytes = struct.unpack_from("<HHH", data, 2)
            at, sizes = 9 if data[0] == 3 else 8, [name_bytes, type_bytes, space_bytes]
            if data[0] == 1:
                sizes = [-(-size // 8) * 8 for size in sizes]
            own = bytes(data[at : at + name_bytes]).split(b"\0")[0]
            kind, value = data[at + sizes[0] :], data[at + sum(sizes) :]
            if own != name.encode() or len(kind) < 8:
                continue
            if kind[0] & 15 == 3:
                return bytes(value[: min(_u32(kind, 4), _MAX_TEXT_BYTES)]).split(b"\0")[0].decode("ascii", "replace")
            if kind[0] & 15 == 9 and len(value) >= 16:
                return self._heap_text(_u64(value, 4), _u32(value, 12))
        return ""

    def _heap_text(self, address: int, number: int) -> str:
        """Read a text of a global heap (section III.E)."""
        head = self.read(address, 16)
        size = _u64(head, 8)
        if bytes(head[:4]) != b"GCOL" or size > _MAX_HEADER_BYTES:
            return ""
        heap = self.read(address, size)
        at = 16
        while at + 16 <= len(heap):
            nth, n_bytes = struct.unpack_from("<H6xQ", heap, at)
            if not nth:
                break
            if nth == number:
                return bytes(heap[at + 16 : at + 16 + min(n_bytes, _MAX_TEXT_BYTES)]).decode("ascii", "replace")
            at += 16 + -(-n_bytes // 8) * 8
        return ""

    # --- groups

    def walk(self, *, is_partial: bool = False) -> tuple[dict[int, Found], dict[str, str]]:
        """Walk all groups from the root on.

        A data set is found by each of its paths. A group is entered once, by the first of its paths.

        Args:
            is_partial: Whether objects that cannot be read are passed over.

        Returns:
            The data sets by their addresses; and the names of links to other files, with their kind.

        Raises:
            FormatError: An object is malformed.
        """
        found: dict[int, Found] = {}
        elsewhere: dict[str, str] = {}
        entered = {self.root}
        waiting = [("", self.root, 0)]
        n_links = 0
        while waiting:
            path, group, depth = waiting.pop()
            if depth > _MAX_GROUP_DEPTH:
                raise FormatError("its groups nest too deep")
            try:
                links = [*self._links(group, self.messages(group), elsewhere, path)]
            except (FormatError, IndexError, struct.error):
                if is_partial:
                    continue
                raise
            n_links += len(links)
            if n_links > _MAX_LINKS:
                raise FormatError(f"it has more than {_MAX_LINKS} links")
            for link in links:
                name = f"{path}{link.name}"
                if link.address in found:
                    found[link.address].names.append(name)
                    continue
                try:
                    messages = self.messages(link.address)
                    data_set = self.data_set(link.address, messages)
                except (FormatError, IndexError, struct.error):
                    if is_partial:
                        continue
                    raise
                if data_set is not None:
                    found[link.address] = Found(data_set, [name])
                elif link.address not in entered:
                    entered.add(link.address)
                    waiting.append((f"{name}/", link.address, depth + 1))
        return found, elsewhere

    def _links(self, group: int, messages: Sequence[Message], elsewhere: dict[str, str], path: str) -> Iterator[Link]:
        """Find the hard links of a group; note those that lead out of the file."""
        raw: list[memoryview] = []
        for each in messages:
            if each.kind == _SYMBOLS:
                yield from self._symbols(_u64(each.data, 0), _u64(each.data, 8))
            elif each.kind == _LINK:
                raw.append(each.data)
            elif each.kind == _LINK_INFO:
                at = 10 if each.data[1] & 1 else 2
                heap, names = _u64(each.data, at), _u64(each.data, at + 8)
                if heap != NOWHERE and names != NOWHERE:
                    raw += self._dense_links(heap, names)
        for data in raw:
            name, kind, rest = _read_link(data)
            if kind == 0:
                yield Link(name, _u64(rest, 0))
            elif kind != 1:
                elsewhere[f"{path}{name}"] = "a link to another file"

    def _symbols(self, tree: int, heap: int) -> Iterator[Link]:
        """Find the links of a group of the old kind (sections III.A.1, III.B, III.D)."""
        head = self.read(heap, 32)
        if bytes(head[:4]) != b"HEAP":
            raise FormatError("a group has no heap of names")
        size, names_at = _u64(head, 8), _u64(head, 24)
        if size > _MAX_HEADER_BYTES << 3:
            raise FormatError(f"the names of a group have {size} bytes")
        names = self.read(names_at, size)
        for node in self._leaves(tree, 0, 8):
            for symbols in node.children:
                head = self.read(symbols, 8)
                if bytes(head[:5]) != b"SNOD\x01":
                    raise FormatError(f"there are no symbols at the address {symbols}")
                n_symbols = int.from_bytes(head[6:8], "little")
                table = self.read(symbols + 8, 40 * n_symbols)
                for at in range(0, 40 * n_symbols, 40):
                    name_at, address, cached = struct.unpack_from("<QQI", table, at)
                    if cached == 2:
                        continue  # a soft link: another path to what has one already, or to nothing
                    yield Link(_text(names[name_at : name_at + _MAX_TEXT_BYTES]), address)

    def _dense_links(self, heap: int, names: int) -> list[memoryview]:
        fractal = _FractalHeap(self, heap)
        return [fractal.read(record[4:]) for record in self.records(names, 5)]

    # --- trees

    def _leaves(self, address: int, kind: int, key_bytes: int) -> Iterator[Node]:
        """Find the lowest nodes of a B-tree of version 1, from left to right (section III.A.1)."""
        if address == NOWHERE:
            return
        seen: set[int] = set()
        waiting = [(address, -1)]
        while waiting:
            at, level = waiting.pop()
            if at in seen or len(seen) > MAX_CHUNKS:
                raise FormatError("the nodes of a tree go round in a circle")
            seen.add(at)
            node = self.node(at, kind, key_bytes)
            if level not in (-1, node.level):
                raise FormatError("the nodes of a tree are on other levels than they say")
            if node.level:
                waiting += [(child, node.level - 1) for child in reversed(node.children)]
            else:
                yield node

    def node(self, address: int, kind: int, key_bytes: int) -> Node:
        """Read a node of a B-tree of version 1."""
        head = self.read(address, 24)
        if bytes(head[:4]) != b"TREE" or head[4] != kind:
            raise FormatError(f"there is no node of a tree at the address {address}")
        n_children = int.from_bytes(head[6:8], "little")
        data = self.read(address + 24, n_children * (key_bytes + 8) + key_bytes)
        keys = [data[at : at + key_bytes] for at in range(0, n_children * (key_bytes + 8), key_bytes + 8)]
        children = [_u64(data, at + key_bytes) for at in range(0, n_children * (key_bytes + 8), key_bytes + 8)]
        return Node(level=head[5], right=_u64(head, 16), keys=keys, children=children)

    def records(self, address: int, kind: int) -> Iterator[memoryview]:
        """Read the records of a B-tree of version 2 (section III.A.2)."""
        head = self.read(address, 38)
        if bytes(head[:4]) != b"BTHD" or head[5] != kind:
            raise FormatError(f"there is no tree at the address {address}")
        node_bytes, record_bytes, depth = struct.unpack_from("<IHH", head, 6)
        root, n_root = struct.unpack_from("<QH", head, 16)
        if root == NOWHERE or not record_bytes:
            return
        if depth > _MAX_DEPTH or node_bytes > _MAX_HEADER_BYTES or node_bytes < 16 + record_bytes:
            raise FormatError("a tree has impossible sizes")
        most = (node_bytes - 10) // record_bytes
        n_width, all_width, total = _width(most), 0, most
        pointers = []
        for _ in range(depth):
            pointer = 8 + n_width + all_width
            pointers.append((pointer, all_width))
            most = (node_bytes - 10 - pointer) // (record_bytes + pointer)
            total = (most + 1) * total + most
            all_width = _width(total)
        waiting = [(root, n_root, depth)]
        n_nodes = 0
        while waiting:
            at, n_records, level = waiting.pop()
            n_nodes += 1
            if n_nodes > MAX_CHUNKS:
                raise FormatError("the nodes of a tree go round in a circle")
            data = self.read(at, node_bytes)
            if bytes(data[:4]) != (b"BTIN" if level else b"BTLF") or 6 + n_records * record_bytes > node_bytes:
                raise FormatError(f"there is no node of a tree at the address {at}")
            for begin in range(6, 6 + n_records * record_bytes, record_bytes):
                yield data[begin : begin + record_bytes]
            if level:
                pointer, _ = pointers[level - 1]
                begin = 6 + n_records * record_bytes
                for _ in range(n_records + 1):
                    child = _u64(data, begin)
                    n_own = int.from_bytes(data[begin + 8 : begin + 8 + n_width], "little")
                    waiting.append((child, n_own, level - 1))
                    begin += pointer

    # --- indexes of chunks

    def chunk_addresses(self, data_set: DataSet, *, is_partial: bool = False) -> Any:
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
        self._spend(n_chunks)
        addresses = np.full(grid, -1, np.int64)
        if not n_chunks or chunks.address == NOWHERE:
            return addresses
        if chunks.index == 0:
            self._tree_chunks(chunks, addresses)
        elif chunks.index in (1, 2):
            if chunks.index == 1 and n_chunks != 1:
                raise FormatError("a data set of a single chunk has several")
            numbers = _numbers_in(chunks, grid)
            _check_address(chunks.address + (int(numbers.max()) + 1) * chunks.chunk_bytes)
            addresses[...] = chunks.address + chunks.chunk_bytes * numbers
        elif chunks.index == 3:
            numbers = _numbers_in(chunks, grid)
            addresses[...] = self._fixed_array(chunks.address, int(numbers.max()) + 1)[numbers]
        elif chunks.index == 4:
            numbers = _numbers_in(chunks, grid)
            addresses[...] = self._extensible_array(chunks.address, int(numbers.max()) + 1, is_partial=is_partial)[
                numbers
            ]
        elif chunks.index == 5:
            for record in self.records(chunks.address, 10):
                place = np.frombuffer(record[8:], "<u8")
                if len(place) != len(grid):
                    raise FormatError("a chunk has no place in its data set")
                if (place < np.array(grid, np.uint64)).all():
                    addresses[tuple(place.tolist())] = _check_address(_u64(record, 0))
        else:
            raise UnknownTypeError(f"chunks with an index of the kind {chunks.index}")
        return addresses

    def _tree_chunks(self, chunks: Chunks, addresses: Any) -> None:
        n_sides = len(chunks.sides)
        grid = addresses.shape
        for node in self._leaves(chunks.address, 1, 16 + 8 * n_sides):
            for key, address in zip(node.keys, node.children, strict=True):
                n_bytes, mask, *place = struct.unpack_from(f"<II{n_sides}Q", key)
                if n_bytes != chunks.chunk_bytes or mask:
                    raise FormatError("a chunk has another size than its data set says")
                at = tuple(first // side for first, side in zip(place, chunks.sides, strict=True))
                if any(first % side for first, side in zip(place, chunks.sides, strict=True)):
                    raise FormatError("a chunk has no place in its data set")
                if all(nth < side for nth, side in zip(at, grid, strict=True)):
                    addresses[at] = _check_address(address)

    def _fixed_array(self, address: int, n_wanted: int) -> Any:
        """Read addresses from a fixed array (section VII.C)."""
        head = self.read(address, 24)
        if bytes(head[:4]) != b"FAHD" or head[5] != 0 or head[6] != 8:
            raise FormatError(f"there is no array of addresses at the address {address}")
        page_bits, n_entries, block = head[7], _u64(head, 8), _u64(head, 16)
        if not n_wanted <= n_entries <= MAX_CHUNKS or page_bits > 32:
            raise FormatError(f"an array has {n_entries} addresses")
        self._spend(n_entries)
        none = np.full(n_entries, -1, np.int64)
        if block == NOWHERE:
            return none
        if bytes(self.read(block, 4)) != b"FADB":
            raise FormatError(f"there is no array of addresses at the address {block}")
        page = 1 << page_bits
        if n_entries <= page:
            return _addresses(self.read(block + 14, 8 * n_entries))
        n_pages = -(-n_entries // page)
        bitmap_bytes = -(-n_pages // 8)
        bitmap = self.read(block + 14, bitmap_bytes)
        at = block + 14 + bitmap_bytes + 4
        for nth in range(n_pages):
            count = min(page, n_entries - nth * page)
            if bitmap[nth // 8] & (128 >> nth % 8):
                none[nth * page : nth * page + count] = _addresses(self.read(at, 8 * count))
            at += 8 * page + 4
        return none

    def _extensible_array(self, address: int, n_wanted: int, *, is_partial: bool) -> Any:
        """Read addresses from an extensible array (section VII.D)."""
        head = self.read(address, 68)
        if bytes(head[:4]) != b"EAHD" or head[5] != 0 or head[6] != 8:
            raise FormatError(f"there is no array of addresses at the address {address}")
        bits, n_own, least, n_pointers, page_bits = head[7:12]
        index = _u64(head, 60)
        powers = (least, n_pointers)
        if bits > 64 or page_bits > 32 or not all(power and not power & (power - 1) for power in powers):
            raise FormatError("an array of addresses has impossible sizes")
        self._spend(n_wanted)
        found = np.full(n_wanted, -1, np.int64)
        if index == NOWHERE:
            return found
        if bytes(self.read(index, 4)) != b"EAIB":
            raise FormatError(f"there is no array of addresses at the address {index}")
        n_first = min(n_own, n_wanted)
        found[:n_first] = _addresses(self.read(index + 14, 8 * n_first))
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
                table = self.read(blocks_at, 8 * n_in)
                blocks_at += 8 * n_in
            else:
                place = index + 14 + 8 * (n_own + n_blocks + nth - n_direct)
                above = _u64(self.read(place, 8), 0)
                if above == NOWHERE:
                    at, nth = at + n_in * size, nth + 1
                    continue
                try:
                    kind = bytes(self.read(above, 4))
                except FormatError:
                    if is_partial:
                        break
                    raise
                if kind != b"EASB":
                    raise FormatError(f"there is no array of addresses at the address {above}")
                above += 14 + offset_bytes
                bitmaps = self.read(above, n_in * bitmap_bytes)
                table = self.read(above + len(bitmaps), 8 * n_in)
            for number in range(n_in):
                if at >= n_wanted:
                    break
                block = _u64(table, 8 * number)
                if block != NOWHERE:
                    own, first_page = found[at : at + size], number * n_pages
                    try:
                        self._data_block(block, 14 + offset_bytes, own, page if n_pages else 0, bitmaps, first_page)
                    except FormatError:
                        if not is_partial:
                            raise
                at += size
            nth += 1
        return found

    def _data_block(
        self, address: int, head_bytes: int, out: Any, page: int, bitmaps: memoryview, first_page: int
    ) -> None:
        """Read the addresses of one block of an extensible array, perhaps in pages.

        The bits of the pages of all blocks follow each other; a block's do not begin in a byte of their own.
        """
        if bytes(self.read(address, 4)) != b"EADB":
            raise FormatError(f"there is no array of addresses at the address {address}")
        if not page:
            out[:] = _addresses(self.read(address + head_bytes, 8 * len(out)))
            return
        at = address + head_bytes + 4
        for nth in range(-(-len(out) // page)):
            own = out[nth * page : (nth + 1) * page]
            byte, bit = divmod(first_page + nth, 8)
            if len(bitmaps) <= byte or bitmaps[byte] & (128 >> bit):
                own[:] = _addresses(self.read(at, 8 * len(own)))
            at += 8 * page + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of a B-tree of version 1."""

    level: int
    right: int
    keys: list[memoryview]
    children: list[int]


class _FractalHeap:
    """Reader of the objects of one fractal heap (section III.G)."""

    def __init__(self, file: Hdf5, address: int) -> None:
        self._file = file
        head = file.read(address, 142)
        if bytes(head[:4]) != b"FRHP":
            raise FormatError(f"there is no heap at the address {address}")
        filter_bytes = int.from_bytes(head[7:9], "little")
        max_managed = _u32(head, 10)
        self._width, self._first, self._max_direct, bits, _, self._root, self._n_rows = struct.unpack_from(
            "<HQQHHQH", head, 110
        )
        powers = (self._first, self._max_direct, self._width)
        if filter_bytes or bits > 64 or not all(power and not power & (power - 1) for power in powers):
            raise FormatError("a heap has impossible sizes")
        if self._max_direct > _MAX_HEADER_BYTES or self._width > 1024 or self._first > self._max_direct:
            raise FormatError("a heap has impossible sizes")
        self._offset_width = -(-bits // 8)
        self._length_width = min(-(-(self._max_direct.bit_length() - 1) // 8), _width(max_managed))
        self._n_direct = self._max_direct.bit_length() - self._first.bit_length() + 2

    def read(self, heap_id: memoryview) -> memoryview:
        """Return an object by its number in the heap."""
        if heap_id[0] & 0x30:
            raise FormatError("a name is too long")
        at = 1 + self._offset_width
        offset = int.from_bytes(heap_id[1:at], "little")
        length = int.from_bytes(heap_id[at : at + self._length_width], "little")
        block, begin = self._block(offset)
        return self._file.read(block + offset - begin, length)

    def _block(self, offset: int) -> tuple[int, int]:
        """Return the address of the direct block that holds an offset, and the offset of its first byte."""
        if not self._n_rows:
            return self._root, 0
        table, begin, n_rows = self._root, 0, self._n_rows
        for _ in range(_MAX_DEPTH):
            if bytes(self._file.read(table, 4)) != b"FHIB":
                break
            row, row_at, size = 0, begin, self._first
            while row < n_rows and offset >= row_at + size * self._width:
                row_at += size * self._width
                row += 1
                size = self._first << max(0, row - 1)
            if row >= n_rows:
                break
            column = (offset - row_at) // size
            entry = table + 13 + self._offset_width + 8 * (row * self._width + column)
            child, begin = _u64(self._file.read(entry, 8), 0), row_at + column * size
            if row < self._n_direct:
                return child, begin
            table, n_rows = child, (size // (self._first * self._width)).bit_length()
        raise FormatError("a heap lacks a name")


# --- messages


def _messages_1(data: memoryview, start: int) -> Iterator[Message]:
    at = 0
    while at + 8 <= len(data):
        kind, size, flags = struct.unpack_from("<HHB", data, at)
        if at + 8 + size > len(data):
            raise FormatError("a message exceeds its header")
        yield Message(kind, flags, start + at + 8, data[at + 8 : at + 8 + size])
        at += 8 + size


def _messages_2(data: memoryview, start: int, head_bytes: int) -> Iterator[Message]:
    at = 0
    while at + head_bytes < len(data):
        kind, size, flags = struct.unpack_from("<BHB", data, at)
        if at + head_bytes + size > len(data):
            raise FormatError("a message exceeds its header")
        yield Message(kind, flags, start + at + head_bytes, data[at + head_bytes : at + head_bytes + size])
        at += head_bytes + size


def _shape_of(data: memoryview) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Read a data space: its shape and largest shape; None for a space without elements (section IV.A.2.b)."""
    version, rank, flags = data[0], data[1], data[2]
    if version not in (1, 2) or rank > 32:
        raise FormatError("a data set has an unknown shape")
    if version == 2 and data[3] == 2:
        return None
    at = 8 if version == 1 else 4
    shape = struct.unpack_from(f"<{rank}Q", data, at)
    return shape, struct.unpack_from(f"<{rank}Q", data, at + 8 * rank) if flags & 1 else shape


def _lay_out(made: DataSet, message: Message, max_shape: tuple[int, ...], *, is_filtered: bool) -> None:
    """Read the layout of a data set (section IV.A.2.i)."""
    data = message.data
    version, layout = data[0], data[1]
    if version not in (3, 4, 5):
        made.kind = made.kind or f"a layout of version {version}"
    elif layout == 0:
        made.n_bytes = int.from_bytes(data[2:4], "little")
        made.start, made.is_compact = message.at + 4, True
        if made.n_bytes > len(data) - 4:
            raise FormatError("the elements of a data set exceed its header")
    elif layout == 1:
        start, made.n_bytes = _u64(data, 2), _u64(data, 10)
        if start != NOWHERE:
            made.start = _check_address(start)
            _check_address(start + made.n_bytes)
    elif layout == 2:
        made.chunks = _chunks_of(data, version, max_shape, is_filtered=is_filtered)
        if is_filtered:
            made.kind = made.kind or "compressed"
    else:
        made.kind = made.kind or "virtual"


def _chunks_of(data: memoryview, version: int, max_shape: tuple[int, ...], *, is_filtered: bool) -> Chunks:
    if version == 3:
        rank = data[2]
        address, sides, index = _u64(data, 3), struct.unpack_from(f"<{rank}I", data, 11), 0
    else:
        flags, rank, width = data[2], data[3], data[4]
        if not 1 <= width <= 8:
            raise FormatError("a chunk has impossible sides")
        sides = tuple(int.from_bytes(data[at : at + width], "little") for at in range(5, 5 + rank * width, width))
        at = 5 + rank * width
        index = data[at]
        more = {1: 12 if flags & 2 else 0, 2: 0, 3: 1, 4: 5, 5: 6}.get(index)
        if more is None:
            raise FormatError(f"chunks have an index of the kind {index}")
        address = _u64(data, at + 1 + more)
    if rank < 2 or 0 in sides or len(sides) != rank or (max_shape and len(max_shape) != rank - 1):
        raise FormatError("a chunk has impossible sides")
    return Chunks(
        sides=sides[:-1],
        chunk_bytes=math.prod(sides),
        index=index,
        address=address,
        max_shape=max_shape,
        is_filtered=is_filtered,
    )


def _read_link(data: memoryview) -> tuple[str, int, memoryview]:
    """Read a link: its name, its kind, and what it leads to (section IV.A.2.g)."""
    flags, at, kind = data[1], 2, 0
    if flags & 8:
        kind = data[at]
        at += 1
    at += 8 if flags & 4 else 0
    at += 1 if flags & 16 else 0
    width = 1 << (flags & 3)
    n_bytes = int.from_bytes(data[at : at + width], "little")
    at += width
    if data[0] != 1 or n_bytes > _MAX_TEXT_BYTES or at + n_bytes > len(data):
        raise FormatError("a link has no name")
    return bytes(data[at : at + n_bytes]).decode("utf-8"), kind, data[at + n_bytes :]


# --- data types (section IV.A.2.d)

_FLOATS = {
    (2, 10, 5, 0, 10, 15): "float16",
    (2, 7, 8, 0, 7, 127): "bfloat16",
    (4, 23, 8, 0, 23, 127): "float32",
    (8, 52, 11, 0, 52, 1023): "float64",
}
_KINDS = {2: "time", 4: "bits", 5: "opaque", 7: "references", 9: "of variable length"}


def read_type(data: memoryview, depth: int = 0) -> tuple[DType, int]:
    """Read a data type.

    Returns:
        Its dtype, and the size of its description.

    Raises:
        UnknownTypeError: It has no dtype.
        FormatError: It is malformed.
    """
    kind, version, bits, size = data[0] & 15, data[0] >> 4, int.from_bytes(data[1:4], "little"), _u32(data, 4)
    if depth > 4 or not 1 <= version <= 5:
        raise UnknownTypeError("an unknown type")
    if kind == 0:
        offset, precision = struct.unpack_from("<HH", data, 8)
        if offset or precision != 8 * size or size not in (1, 2, 4, 8) or bits & 6:
            raise UnknownTypeError(f"whole numbers of {precision} bits")
        order = ">" if bits & 1 and size > 1 else "<"
        return np.dtype(f"{order}{'i' if bits & 8 else 'u'}{size}"), 12
    if kind == 1:
        return _float_type(data, bits, size), 20
    if kind == 3:
        if bits & 15 != 1 or not size:
            raise UnknownTypeError("text")
        return np.dtype(f"S{size}"), 8
    if kind == 6:
        return _record_type(data, version, bits & 0xFFFF, size, depth)
    if kind == 8:
        return _enum_type(data, version, bits & 0xFFFF, depth)
    if kind == 10 and version in (2, 3, 4, 5):
        rank = data[8]
        at = 12 if version == 2 else 9
        sides = struct.unpack_from(f"<{rank}I", data, at)
        at += 4 * rank * (2 if version == 2 else 1)
        inner, n_bytes = read_type(data[at:], depth + 1)
        if inner.subdtype or rank > 32 or math.prod(sides) * inner.itemsize != size:
            raise UnknownTypeError("arrays of arrays")
        return np.dtype((inner, sides)), at + n_bytes
    if kind == 11:
        inner, n_bytes = read_type(data[8:], depth + 1)
        if inner.kind == "f" and inner.itemsize in (4, 8) and size == 2 * inner.itemsize:
            return np.dtype(f"{inner.byteorder}c{size}"), 8 + n_bytes
        raise UnknownTypeError("complex numbers")
    raise UnknownTypeError(_KINDS.get(kind, f"of the class {kind}"))


def _float_type(data: memoryview, bits: int, size: int) -> DType:
    offset, precision, *places, bias = struct.unpack_from("<HHBBBBI", data, 8)
    name = _FLOATS.get((size, *places, bias))
    if name is None or offset or precision != 8 * size or bits & 0x40 or bits >> 8 & 0xFF != precision - 1:
        raise UnknownTypeError(f"floating-point numbers of {precision} bits")
    if bits >> 4 & 3 != 2:
        raise UnknownTypeError("floating-point numbers that are not normalized")
    if name == "bfloat16":
        if bits & 1:
            raise UnknownTypeError("bfloat16 of the other byte order")
        return parse_dtype(name)
    return np.dtype(name).newbyteorder(">" if bits & 1 else "<")


def _opaque_dtype(size: int, said: str) -> DType:
    """Return the dtype of bytes of no type that an attribute names, as Keras does (``saving_lib.py``)."""
    if said == "bfloat16" and size == 2:
        return parse_dtype(said)
    if said in ("float8_e4m3fn", "float8_e5m2") and size == 1:
        return parse_dtype(said)
    raise UnknownTypeError("opaque")


def _record_type(data: memoryview, version: int, n_members: int, size: int, depth: int) -> tuple[DType, int]:
    if not 1 <= n_members <= _MAX_MEMBERS:
        raise UnknownTypeError("records")
    names: list[str] = []
    formats: list[DType] = []
    offsets: list[int] = []
    at = 8
    width = _width(size)
    for _ in range(n_members):
        name, n_bytes = _name_in(data[at:], is_padded=version < 3)
        at += n_bytes
        offset_bytes = width if version >= 3 else 4
        offset = int.from_bytes(data[at : at + offset_bytes], "little")
        at += offset_bytes
        if version == 1:
            if data[at]:
                raise UnknownTypeError("records of arrays")
            at += 28
        inner, n_bytes = read_type(data[at:], depth + 1)
        at += n_bytes
        names.append(name)
        formats.append(inner)
        offsets.append(offset)
    first = formats[0]
    is_pair = names == ["r", "i"] and offsets == [0, first.itemsize] and size == 2 * first.itemsize
    if is_pair and formats[1] == first and first.kind == "f" and first.itemsize in (4, 8):
        return np.dtype(f"{first.byteorder}c{size}"), at
    if size > 1 << 20:
        raise UnknownTypeError("records")
    ends = sorted(zip(offsets, formats, strict=True), key=lambda each: each[0])
    for (begin, inner), (after, _) in zip(ends, [*ends[1:], (size, None)], strict=True):
        if begin + inner.itemsize > after:
            raise FormatError("the fields of a record share bytes")
    try:
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size}), at
    except (ValueError, TypeError) as error:
        raise UnknownTypeError("records") from error


def _enum_type(data: memoryview, version: int, n_members: int, depth: int) -> tuple[DType, int]:
    inner, n_bytes = read_type(data[8:], depth + 1)
    at = 8 + n_bytes
    names: list[str] = []
    for _ in range(n_members):
        name, n_bytes = _name_in(data[at:], is_padded=version < 3)
        names.append(name)
        at += n_bytes
    values = bytes(data[at : at + n_members * inner.itemsize])
    at += n_members * inner.itemsize
    if inner.kind not in "iu":
        raise UnknownTypeError("names of numbers")
    if inner.itemsize == 1 and names == ["FALSE", "TRUE"] and values == b"\0\1":
        return np.dtype(np.bool_), at
    return inner, at


def _name_in(data: memoryview, *, is_padded: bool) -> tuple[str, int]:
    """Read a text that ends with NUL, and return it with its size, perhaps padded to a multiple of 8."""
    raw = bytes(data[:_MAX_TEXT_BYTES])
    end = raw.find(b"\0")
    if end < 0:
        raise FormatError("a name does not end")
    return raw[:end].decode("utf-8"), -(-(end + 1) // 8) * 8 if is_padded else end + 1


# --- numbers


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
    if (found[found != NOWHERE] > _MAX_ADDRESS).any():
        raise FormatError("an address is outside of the file")
    return np.where(found == NOWHERE, -1, found.astype(np.int64))


def _check_address(address: int) -> int:
    if address > _MAX_ADDRESS:
        raise FormatError("an address is outside of the file")
    return address


def _width(number: int) -> int:
    """Return the number of bytes that a number takes."""
    return max(1, -(-number.bit_length() // 8))


def _text(data: memoryview) -> str:
    raw = bytes(data)
    end = raw.find(b"\0")
    if end < 1:
        raise FormatError("a link has no name")
    return raw[:end].decode("utf-8")


def _u32(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _u64(data: memoryview, at: int) -> int:
    return int(struct.unpack_from("<Q", data, at)[0])
