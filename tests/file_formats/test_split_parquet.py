"""Files of Parquet, which the store cuts between pages."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tensorcas_mlflow.file_formats import PlainBytes, Tape, split
from tensorcas_mlflow.file_formats._parquet import split_parquet
from tests.file_formats.parts import damaged, joined, take_apart
from tests.file_formats.samples import tar_of, zip_of

DRAW = np.random.default_rng(0)
N = 60_000
TABLE = pa.table(
    {
        "number": DRAW.integers(0, 1 << 60, N),
        "word": DRAW.choice([f"word {nth}" * 3 for nth in range(300)], N),
        "text": [f"{nth}: {nth * nth}" for nth in range(N)],
        "list": [[nth, nth + 1] for nth in range(N)],
        "empty": pa.nulls(N, pa.float64()),
    }
)


def file_of(table: pa.Table = TABLE, **options: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out, **options)
    return out.getvalue()


def edges(data: bytes) -> list[int]:
    """Return the offsets of the parts."""
    return [0, *itertools.accumulate(len(taken) for _, taken in take_apart(data))]


def columns_of(data: bytes) -> list[tuple[int, int]]:
    """Return where the pages of each column begin and end, by the description at the file's end."""
    metadata = pyarrow.parquet.ParquetFile(io.BytesIO(data)).metadata
    found = []
    for group in range(metadata.num_row_groups):
        for nth in range(metadata.num_columns):
            column = metadata.row_group(group).column(nth)
            begin = column.data_page_offset
            if column.has_dictionary_page:
                begin = min(begin, column.dictionary_page_offset)
            found.append((begin, begin + column.total_compressed_size))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_content_defined_chunking": True},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "gzip", "row_group_size": 20_000},
        {"write_page_index": True, "write_page_checksum": True},
        {"version": "1.0", "data_page_size": 5_000, "write_statistics": False},
    ],
    ids=str,
)
def test_every_column_begins_and_ends_with_a_part(options: dict[str, Any]) -> None:
    data = file_of(**options)
    parts = take_apart(data)

    assert joined(parts) == data
    assert {type(part) for part, _ in parts} == {PlainBytes}
    assert {edge for column in columns_of(data) for edge in column} <= {*edges(data)}


def test_a_table_of_many_small_columns_has_few_pieces() -> None:
    table = pa.table({f"column {nth}": DRAW.normal(size=100) for nth in range(500)})
    parts = take_apart(file_of(table))
    n_pieces = sum(isinstance(part, PlainBytes) and part.starts_piece for part, _ in parts)

    assert len(parts) > 500
    assert 2 <= n_pieces <= sum(len(taken) for _, taken in parts) // (16 << 10) + 1


def test_large_pages_begin_pieces_and_the_first_stays_with_the_bytes_before_it() -> None:
    table = pa.table({"a": DRAW.normal(size=100_000)})
    parts = take_apart(file_of(table, use_dictionary=False, data_page_size=100_000))
    sizes = [len(taken) for _, taken in parts]

    assert sizes[0] == 4
    assert min(sizes[1:-2]) > 16 << 10
    assert [part.starts_piece for part, _ in parts if isinstance(part, PlainBytes)] == [
        *(False, False),
        *[True] * (len(parts) - 2),
    ]


def test_the_description_of_a_file_begins_a_piece() -> None:
    data = file_of()
    end = max(end for _, end in columns_of(data))
    at = dict(zip(edges(data), (part for part, _ in take_apart(data)), strict=False))
    part = at[end]

    assert isinstance(part, PlainBytes)
    assert part.starts_piece


@pytest.mark.parametrize(
    "table", [TABLE.slice(0, 0), TABLE.slice(0, 1), pa.table({})], ids=["no row", "one", "no column"]
)
def test_a_table_of_few_rows_comes_back(table: pa.Table) -> None:
    data = file_of(table)

    assert joined(take_apart(data)) == data


@pytest.mark.parametrize("wrap", [zip_of, tar_of])
def test_a_table_in_an_archive_is_cut_between_its_pages(wrap: Any) -> None:
    data = wrap({"a/table.parquet": file_of()})
    parts = take_apart(data)

    assert joined(parts) == data
    assert sum(isinstance(part, PlainBytes) and part.starts_piece for part, _ in parts) >= 4


def test_damaged_files_come_back() -> None:
    for broken in damaged(file_of(TABLE.slice(0, 2000)), n=80):
        assert joined(take_apart(broken)) == broken


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def header(kind: int = 0, n_plain: int = 100, n_bytes: int = 100, more: bytes = b"") -> bytes:
    """Write a page's header with three fields, and others."""
    numbers = [kind, n_plain, n_bytes]
    return (
        b"".join(b"\x15" + varint(2 * number if number >= 0 else -2 * number - 1) for number in numbers) + more + b"\0"
    )


def announced(data: bytes) -> list[int]:
    tape, sizes = Tape.over(data), []
    for part in split_parquet(tape):
        sizes.append(part.n_bytes)
        tape.take(part.n_bytes)
    return sizes


PAGE = header() + bytes(100)


def test_a_header_may_have_fields_of_later_versions() -> None:
    inner = (
        b"\x15\x02" + b"\x11" + b"\x12" + b"\x18\x03abc" + b"\x17" + bytes(8) + b"\x13\x07" + b"\x16\x09" + b"\x14\x01"
    )
    long_form = b"\x0c" + varint(400) + inner + b"\0"  # a field with the id 200, not counted from the one before
    page = header(more=b"\x2c" + inner + b"\x1c" + inner + b"\0\0" + long_form) + bytes(100)

    assert announced(b"PAR1" + page + PAGE) == [4, len(page), len(PAGE)]


@pytest.mark.parametrize(
    "page",
    [
        header(kind=4),
        header(kind=-1),
        header(n_plain=-1),
        header(n_bytes=-1),
        b"\x15\x00\x15\x02\0",  # no size
        b"\x16\x00\x16\x02\x16\x02\0",  # numbers of 64 bits
        header(more=b"\x19\x15\x02"),  # a list
        header(more=b"\x1f\x02"),  # an unknown type
        header(more=b"\x18" + b"\xff" * 9 + b"\x01"),  # a value of 2**64 bytes
        header(more=b"\x18" + b"\xff" * 20),  # a number without an end
        header(more=b"\x1c" * 50_000),  # structures within each other
        header(more=b"\x15\x00" * 30_000),  # many fields
        header(more=b"\x18" + varint(100_000) + bytes(100_000)),  # longer than a splitter looks ahead
        b"\x15",
        b"\0",
    ],
    ids=lambda page: bytes(page[:14]).hex(),
)
def test_what_is_no_header_ends_the_search_and_nothing_is_lost(page: bytes) -> None:
    rest = page + bytes(200)
    data = b"PAR1" + PAGE + rest

    assert announced(data) == [4, len(PAGE), min(len(rest), 64 << 10)]
    assert joined(take_apart(data)) == data


def test_a_page_that_claims_more_bytes_than_the_file_has_sets_no_memory_aside() -> None:
    data = b"PAR1" + PAGE + header(n_bytes=(1 << 31) - 1) + b"end"

    assert announced(data)[-1] > 1 << 30
    assert joined(take_apart(data)) == data


def test_a_file_of_empty_pages_is_searched_no_further_than_is_worth_it() -> None:
    data = b"PAR1" + header(n_bytes=0) * 200_000
    n_parts = sum(1 for _ in _taken(data))

    assert n_parts <= 10_500


def _taken(data: bytes) -> Any:
    tape = Tape(io.BytesIO(data))
    n_bytes = 0
    for part in split(tape):
        n_bytes += len(tape.take(part.n_bytes))
        yield part
    assert n_bytes == len(data)
