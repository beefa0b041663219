"""Bintensors files (``.bt``): safetensors' layout with a header in binary.

The format is that of https://github.com/GnosisFoundation/bintensors, version 0.2: the size of the header in 8 bytes;
the header; the tensors, without holes. The header is in bincode 2's standard configuration
(https://github.com/bincode-org/bincode/blob/trunk/docs/spec.md: little-endian integers of variable size): metadata, an
``Option<BTreeMap<String, String>>``, and a ``Vec`` of name, dtype, shape and place. Up to 7 spaces fill it up to a
multiple of 8.

The library lets any bytes follow the decoded header. Here nothing does but those spaces.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.containers._parts import Part, Skeleton
from tensorcas_mlflow.containers._tape import MAX_PEEK_BYTES, Tape
from tensorcas_mlflow.containers._tensor_fact import TensorFact, check_shape, in_order, item_bytes, parts_of
from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.tensor import MAX_DIMENSIONS

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
_MAX_TENSORS = 1 << 20

# By the number that stands in the file: what the library calls it, and our name.
_DTYPES = (
    ("BOOL", "bool"),
    ("U8", "uint8"),
    ("I8", "int8"),
    ("F8_E5M2", "float8_e5m2"),
    ("F8_E4M3", "float8_e4m3fn"),
    ("I16", "int16"),
    ("U16", "uint16"),
    ("F16", "float16"),
    ("BF16", "bfloat16"),
    ("I32", "int32"),
    ("U32", "uint32"),
    ("F32", "float32"),
    ("F64", "float64"),
    ("I64", "int64"),
    ("U64", "uint64"),
)
_ITEM_BYTES = tuple(item_bytes(dtype) for _, dtype in _DTYPES)

# The first byte of a number that does not fit into one byte says in how many more it stands.
_WIDTHS = {251: 2, 252: 4, 253: 8}
_LEAST = {2: 251, 4: 1 << 16, 8: 1 << 32}


def is_bintensors(head: memoryview) -> bool:
    """Tell such a file by its first bytes. There is no magic number: the beginning of a header must be sound."""
    n_bytes = int.from_bytes(head[:LENGTH_BYTES], "little")
    if n_bytes > MAX_HEADER_BYTES or n_bytes % 8 or n_bytes < 8 or len(head) < LENGTH_BYTES + 2:
        return False
    reader = _Reader(bytes(head[LENGTH_BYTES : LENGTH_BYTES + n_bytes]))
    try:
        reader.metadata()
        if reader.number() == 0:
            reader.end()
        else:
            reader.tensor()
    except IndexError:
        # The header goes on behind what is seen. Names of metadata would have been texts so far.
        return reader.at > 2 and n_bytes > len(head) - LENGTH_BYTES
    except (FormatError, ValueError):
        return False
    return True


def bintensors_header(header: bytes | memoryview) -> tuple[dict[str, str], list[TensorFact]]:
    """Read a header.

    Returns:
        The metadata, and the tensors in the order in which they lie.

    Raises:
        FormatError: It is not sound. So do the others say that reading such may end in: `ValueError`, `IndexError`.
    """
    reader = _Reader(bytes(header))
    metadata = reader.metadata()
    n_tensors = reader.number()
    if n_tensors > _MAX_TENSORS:
        raise FormatError(f"a bintensors file of {n_tensors} tensors")
    facts = [reader.tensor() for _ in range(n_tensors)]
    reader.end()
    return metadata, in_order(facts)


def split_bintensors(tape: Tape) -> Iterator[Part]:
    """Announce the header, and the tensors in the order in which they lie; raises `FormatError` if it is not sound."""
    n_bytes = int.from_bytes(tape.peek(LENGTH_BYTES), "little")
    if n_bytes > MAX_PEEK_BYTES - LENGTH_BYTES:
        raise FormatError(f"a bintensors header of {n_bytes} bytes")
    header = tape.peek(LENGTH_BYTES + n_bytes)[LENGTH_BYTES:]
    if len(header) < n_bytes:
        raise FormatError("a bintensors file that ends in its header")
    _, facts = bintensors_header(header)
    yield Skeleton(n_bytes=LENGTH_BYTES + n_bytes)
    yield from parts_of(facts)


class _Reader:
    """Takes values from a header one after the other; an `IndexError` says that it ends too early."""

    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data

    def number(self) -> int:
        """Read an unsigned integer of at most 64 bits, in the shortest form."""
        first = self._data[self.at]
        self.at += 1
        if first < 251:
            return first
        width = _WIDTHS.get(first)
        if width is None:
            raise FormatError(f"a number of more than 64 bits at byte {self.at - 1} of the header")
        number = int.from_bytes(self._take(width), "little")
        if number < _LEAST[width]:
            raise FormatError(f"a number in more bytes than it needs at byte {self.at - width - 1} of the header")
        return number

    def text(self) -> str:
        return self._take(self.number()).decode()

    def metadata(self) -> dict[str, str]:
        tag = self.number()
        if tag > 1:
            raise FormatError(f"its metadata are neither there nor not: {tag}")
        found: dict[str, str] = {}
        for _ in range(self.number() if tag else 0):
            key = self.text()
            if key in found:
                raise FormatError(f"metadata {key[:80]!r} are there twice")
            found[key] = self.text()
        return found

    def tensor(self) -> TensorFact:
        name = self.text()
        code = self.number()
        if code >= len(_DTYPES):
            raise FormatError(f"tensor {name[:80]!r} has a dtype that does not exist: {code}")
        n_dimensions = self.number()
        if n_dimensions > MAX_DIMENSIONS:
            raise FormatError(f"tensor {name[:80]!r} has {n_dimensions} dimensions")
        shape = tuple([self.number() for _ in range(n_dimensions)])
        begin, end = self.number(), self.number()
        check_shape(name, shape, _ITEM_BYTES[code], end - begin)
        return TensorFact(name, *_DTYPES[code], shape, begin, end)

    def end(self) -> None:
        """Check that nothing follows but what fills up to a multiple of 8."""
        if self._data[self.at :].strip(b" ") or len(self._data) - self.at > 7:
            raise FormatError(f"its header goes on after the tensors, at byte {self.at}")

    def _take(self, n_bytes: int) -> bytes:
        taken = self._data[self.at : self.at + n_bytes]
        if len(taken) < n_bytes:
            raise IndexError("the header ends too early")
        self.at += n_bytes
        return taken
