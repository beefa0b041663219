"""Files of bhckpt 0.1 (``.bckpt``): a table in JSON, and blocks of bytes that it names.

Source: the package's writer. ``BCK1``; the size of a first object in 4 bytes, and it: the architecture, and how many
tensors and bytes there are; the size of the table in 4 bytes, and it: an array of objects with a tensor's name, shape,
dtype, codec, size and place; the blocks, without gaps.

Neither the package's reader nor its writer checks anything. Here a table is refused that is not as the writer's.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from tensorcas_mlflow.containers._dtype_words import dtype_called
from tensorcas_mlflow.containers._json import SPACE, entries, strict_json, whole
from tensorcas_mlflow.containers._parts import Part, Skeleton
from tensorcas_mlflow.containers._tape import MAX_PEEK_BYTES, Tape
from tensorcas_mlflow.containers._tensor_fact import TensorFact, check_shape, in_order, item_bytes, parts_of
from tensorcas_mlflow.errors import FormatError

MAX_HEADER_BYTES = 64 << 20
_MAGIC = b"BCK1"
_LENGTH = struct.Struct("<I")
_MAX_ARCH_BYTES = 1 << 20
_MAX_TENSORS = 1 << 20

_PLAIN_CODECS = frozenset({"", "none", "raw", "fp16"})
"""``fp16`` is what a tensor has unless its writer says another, whatever its dtype."""

_ENTRY = re.compile(SPACE + rb"(\{[^{}]{0,4096}+\})")


def is_bhckpt(head: memoryview) -> bool:
    """Tell such a file by its first bytes."""
    return bytes(head[:4]) == _MAGIC


def bhckpt_header_bytes(tape: Tape) -> tuple[int, int]:
    """Say where the table begins and where it ends, in a file at whose beginning the tape stands.

    Raises:
        FormatError: No file has so long a header.
    """
    (n_arch_bytes,) = _LENGTH.unpack_from(tape.peek(8), 4)
    if n_arch_bytes > _MAX_ARCH_BYTES:
        raise FormatError(f"an architecture of {n_arch_bytes} bytes")
    table = 8 + n_arch_bytes + 4
    (n_table_bytes,) = _LENGTH.unpack_from(tape.peek(table), table - 4)
    if n_table_bytes > MAX_HEADER_BYTES - table:
        raise FormatError(f"a table of {n_table_bytes} bytes")
    return table, table + n_table_bytes


def bhckpt_header(header: memoryview, table: int) -> tuple[Any, list[TensorFact]]:
    """Read all that comes before the blocks.

    Args:
        header: The file up to its first block.
        table: Where in it the table begins.

    Returns:
        The architecture, any JSON value, and the tensors in the order in which they lie.

    Raises:
        FormatError: It is not sound.
    """
    first = strict_json(header[8 : table - 4])
    facts: list[TensorFact] = []
    for match in entries(header[table:], _ENTRY, b"[]"):
        facts.append(_fact(strict_json(match[1])))
        if len(facts) > _MAX_TENSORS:
            raise FormatError(f"a table of more than {_MAX_TENSORS} tensors")
    ordered = in_order(facts)
    n_bytes = ordered[-1].end if ordered else 0
    if type(first) is not dict or (first.get("n_tensors"), first.get("total_bytes")) != (len(facts), n_bytes):
        raise FormatError(f"its header counts other tensors than the table, which has {len(facts)} of {n_bytes} bytes")
    return first.get("arch"), ordered


def split_bhckpt(tape: Tape) -> Iterator[Part]:
    """Announce the header, and the tensors in the order in which they lie; raises `FormatError` if it is not sound."""
    table, n_bytes = bhckpt_header_bytes(tape)
    if n_bytes > MAX_PEEK_BYTES:
        raise FormatError(f"a header of {n_bytes} bytes")
    header = tape.peek(n_bytes)
    if len(header) < n_bytes:
        raise FormatError("the file ends in its header")
    _, facts = bhckpt_header(header, table)
    yield Skeleton(n_bytes=n_bytes)
    yield from parts_of(facts)


def _fact(fields: dict[str, Any]) -> TensorFact:
    name, kind, codec, shape = fields.get("name"), fields.get("dtype"), fields.get("codec"), fields.get("shape")
    if not all(type(text) is str for text in (name, kind, codec)) or type(shape) is not list:
        raise FormatError(f"its table says of tensor {str(name)[:80]!r} no dtype, codec or shape")
    begin, n_bytes = whole(fields.get("off")), whole(fields.get("size"))
    if whole(fields.get("nbytes")) != n_bytes:
        raise FormatError(f"its table says of tensor {str(name)[:80]!r} two sizes")
    sides = tuple(map(whole, shape))
    dtype = dtype_called(str(kind))
    if codec not in _PLAIN_CODECS and codec != kind:
        return TensorFact(str(name), f"{kind}, codec {codec}", None, sides, begin, begin + n_bytes)
    if dtype is not None:
        check_shape(str(name), sides, item_bytes(dtype), n_bytes)
    return TensorFact(str(name), str(kind), dtype, sides, begin, begin + n_bytes)
