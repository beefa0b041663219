"""Bytes of an HDF5 file at its addresses: superblock, numbers, and the bound of all reads together.

The format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html (version 3.0; the sections' numbers are
in the comments of this module and of the other ``_hdf5_`` modules). All offsets and lengths have 8 bytes here, which is
what every library writes unless it is told otherwise. Checksums are not compared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from tensorcas_mlflow.errors import FormatError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
NOWHERE = (1 << 64) - 1
"""Address of something that is not in the file."""

_FREE_READ_BYTES = 4 << 20
_MAX_OVERREAD = 4
"""Times that the structures of a file may be read; a sound file needs two."""
MAX_ADDRESS = 1 << 62
"""Addresses are added to sizes in numbers of 63 bits."""
_USER_BLOCKS = (0, 512, 1024, 2048)
MAX_BLOCK_BYTES = 8 << 20
"""Limit for an object header, a heap and a node of a tree."""
MAX_TEXT_BYTES = 4096
MAX_CHUNKS = 1 << 20

ReadBytes = Callable[[int, int], memoryview]
"""Reads bytes at a position of the file; raises `FormatError` where there are not as many."""


class UnknownTypeError(FormatError):
    """A data type without a numpy dtype; its argument is the type's name."""


def user_block(head: memoryview) -> int | None:
    """Return the position of the superblock; None if the file is not HDF5."""
    return next((at for at in _USER_BLOCKS if head[at : at + 8] == SIGNATURE), None)


class Hdf5File:
    """Bytes of one file at its addresses, and its superblock."""

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
            addresses, self.root = at, u64(head, at + 40)
        elif version in (2, 3):
            widths, addresses = head[9:11], 12
            self.root = u64(head, addresses + 24)
        else:
            raise FormatError(f"its superblock has the version {version}")
        if bytes(widths) != b"\x08\x08":
            raise FormatError(f"its offsets and lengths have {widths[0]} and {widths[1]} bytes")
        if u64(head, addresses) not in (0, base):
            raise FormatError("its superblock stands elsewhere than it says")
        self.end = u64(head, addresses + 16)
        """Position behind the last byte."""

    def read(self, address: int, n_bytes: int) -> memoryview:
        """Read bytes at an address; raises `FormatError`."""
        if address + n_bytes > MAX_ADDRESS:
            raise FormatError("an address is outside of the file")
        self.spend(n_bytes)
        return self._read(self.base + address, n_bytes)

    def spend(self, n_bytes: int) -> None:
        """Count work that a hostile file may ask for many times, such as the reads of one header from many places."""
        self._n_read_bytes += n_bytes
        if self._n_read_bytes > _FREE_READ_BYTES + _MAX_OVERREAD * self._known_bytes():
            raise FormatError("its structures share bytes")


# --- numbers


def check_address(address: int) -> int:
    """Return an address; raise `FormatError` if it is outside of any file."""
    if address > MAX_ADDRESS:
        raise FormatError("an address is outside of the file")
    return address


def width(number: int) -> int:
    """Return the number of bytes that a number takes."""
    return max(1, -(-number.bit_length() // 8))


def text_at(data: memoryview) -> str:
    """Read a name that ends with NUL; raise `FormatError` if it is empty or does not end."""
    raw = bytes(data)
    end = raw.find(b"\0")
    if end < 1:
        raise FormatError("a link has no name")
    return raw[:end].decode("utf-8")


def u32(data: memoryview, at: int) -> int:
    """Read a number of 4 bytes."""
    return int(struct.unpack_from("<I", data, at)[0])


def u64(data: memoryview, at: int) -> int:
    """Read a number of 8 bytes."""
    return int(struct.unpack_from("<Q", data, at)[0])
