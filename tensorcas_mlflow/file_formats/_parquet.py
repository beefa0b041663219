"""Files of Parquet: pages, each behind a header, up to a description of the file at its end.

Sources: the format's ``README.md`` and ``parquet.thrift`` (github.com/apache/parquet-format), and Thrift's compact
protocol (github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md). A header is a structure in that
protocol. The bytes of its page follow.

A page is compressed by itself. So two files with equal rows in a page have equal bytes there, and the splitter has the
store cut between pages. It follows the headers forward. The description would give their places, but it comes last. The
first bytes that are no header end the search: they are the description, an index, or something else. The splitter reads
nothing else, and a file of Parquet holds no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.file_formats._protobuf import read_varint
from tensorcas_mlflow.file_formats._tape import PlainBytes, Tape

_MAGIC = b"PAR1"
_HEADER_BYTES = 64 << 10
"""A longer header is not understood: one has statistics with two values of a column at most."""
_LEAST_BYTES = 16 << 10
"""Least distance of cuts: a chunk of few bytes costs more than it saves."""
_FREE_PAGES = 10_000
_BYTES_A_PAGE = 256
"""A file may have one page for so many of its bytes; more of them are not worth the search."""
_MAX_FIELDS = 100
"""Bound of the fields of a header, those within others included; known headers have fewer than 30."""

_PAGE_KINDS = range(4)
_KIND, _PLAIN_BYTES, _PAGE_BYTES = 1, 2, 3
"""Ids of fields: the kind of the page, its size before and after the compression."""
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY = range(1, 9)
_STRUCT = 12
"""Types of the compact protocol. No field of a header is a list, a set or a map."""


def is_parquet(head: memoryview) -> bool:
    """Recognise a file by its first four bytes."""
    return head[: len(_MAGIC)] == _MAGIC


def split_parquet(tape: Tape) -> Iterator[PlainBytes]:
    """Announce pages, with cuts between them, up to the first bytes that are no page.

    Small pages stay together, and the first page stays with the four bytes before it.

    Raises:
        FormatError: The pages are too small to be worth a search.
    """
    yield PlainBytes(n_bytes=len(_MAGIC))
    n_since_cut = n_pages = 0
    while (n_bytes := _page_bytes(tape.peek(_HEADER_BYTES))) is not None:
        n_pages += 1
        if n_pages > _FREE_PAGES + tape.position // _BYTES_A_PAGE:
            raise FormatError(f"{n_pages} pages in {tape.position} bytes")
        is_cut = n_pages > 1 and (n_bytes >= _LEAST_BYTES or n_since_cut >= _LEAST_BYTES)
        yield PlainBytes(n_bytes=n_bytes, starts_piece=is_cut)
        n_since_cut = n_bytes if is_cut else n_since_cut + n_bytes
    if n_rest := len(tape.peek(_HEADER_BYTES)):
        yield PlainBytes(n_bytes=n_rest, starts_piece=True)


def _page_bytes(view: memoryview) -> int | None:
    """Return the size of a page with its header; None if the bytes begin with no whole header."""
    try:
        numbers, header_bytes = _read_header(view)
    except (FormatError, IndexError):
        return None
    kind, n_plain, n_bytes = (numbers.get(field, -1) for field in (_KIND, _PLAIN_BYTES, _PAGE_BYTES))
    return header_bytes + n_bytes if kind in _PAGE_KINDS and n_plain >= 0 and n_bytes >= 0 else None


def _read_header(view: memoryview) -> tuple[dict[int, int], int]:
    """Read a structure, and return its 32-bit numbers by their ids, and the size of the structure.

    Raises:
        FormatError: It is no header of a page.
        IndexError: It is longer than the bytes.
    """
    numbers: dict[int, int] = {}
    at = field = depth = 0
    for _ in range(_MAX_FIELDS):
        kind, step = view[at] & 15, view[at] >> 4
        at += 1
        if kind == 0:
            if depth == 0:
                return numbers, at
            depth -= 1
            continue
        number = 0
        if not step:
            number, at = _read_number(view, at)
        if depth == 0:
            field = field + step if step else number
        if kind in (_I16, _I32, _I64):
            number, at = _read_number(view, at)
            if kind == _I32 and depth == 0:
                numbers[field] = number
        elif kind == _BINARY:
            n_bytes, at = read_varint(view, at)
            at += n_bytes
        elif kind == _STRUCT:
            depth += 1
        elif kind in (_BYTE, _DOUBLE):
            at += 1 if kind == _BYTE else 8
        elif kind not in (_TRUE, _FALSE):  # of these the type is the value
            raise FormatError(f"a field of type {kind}")
    raise FormatError(f"more than {_MAX_FIELDS} fields")


def _read_number(view: memoryview, at: int) -> tuple[int, int]:
    """Read a signed number, and return it with the position behind it."""
    value, at = read_varint(view, at)
    return (value >> 1) ^ -(value & 1), at
