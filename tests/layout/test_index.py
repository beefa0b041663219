from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import CorruptError, FormatError, NewerFormatError
from tensorcas_mlflow.layout import (
    DELTA,
    EMPTY,
    ENTRY,
    Entries,
    Table,
    make_table,
    merge_tables,
    read_segment,
    segment_bytes,
    with_bases,
)
from tensorcas_mlflow.layout._index import _read_any, _read_own
from tensorcas_mlflow.layout._manifest_stream import stream_in_file


def name(n: int) -> str:
    return f"{n:032x}"


def digests(numbers: list[int]) -> np.ndarray:
    flat = np.frombuffer(b"".join(digest(str(n).encode()) for n in numbers), np.uint8)
    return flat.reshape(-1, 32)


def entries(numbers: list[int]) -> Entries:
    out = np.zeros(len(numbers), dtype=ENTRY)
    if numbers:
        out["digest"] = digests(numbers)
    out["offset"] = numbers
    out["stored_bytes"] = 5
    out["raw_bytes"] = 5
    return out


def places(table: Table, numbers: list[int]) -> list[tuple[str, int] | None]:
    rows = table.find(digests(numbers))
    return [None if row < 0 else (table.key_of(row), int(table.entries["offset"][row])) for row in rows.tolist()]


TABLE = make_table({name(0): entries([1, 2, 3]), name(1): entries([3, 4]), name(2): entries([])})


def test_chunks_are_found_where_they_lie_and_others_are_not() -> None:
    assert places(TABLE, [4, 1, 9, 2]) == [
        (f"packs/{name(1)}.pack", 4),
        (f"packs/{name(0)}.pack", 1),
        None,
        (f"packs/{name(0)}.pack", 2),
    ]


def test_an_empty_table_finds_nothing() -> None:
    assert places(EMPTY, [1]) == [None]
    assert make_table({}).find(np.empty((0, 32), np.uint8)).tolist() == []


def test_a_copy_in_a_pack_that_does_not_count_is_passed_over() -> None:
    wanted = digests([3])
    first = TABLE.find(wanted, np.array([True, False, True]))
    second = TABLE.find(wanted, np.array([False, True, True]))
    none = TABLE.find(wanted, np.array([False, False, True]))

    assert TABLE.key_of(first[0]) == f"packs/{name(0)}.pack"
    assert TABLE.key_of(second[0]) == f"packs/{name(1)}.pack"
    assert none.tolist() == [-1]


def test_digests_with_one_prefix_are_told_apart() -> None:
    rows = entries([1, 2, 3])
    rows["digest"][:, :8] = 255
    table = make_table({name(0): rows})

    found = table.find(np.ascontiguousarray(rows["digest"]))

    assert table.entries["offset"][found].tolist() == [1, 2, 3]
    other = rows["digest"][:1].copy()
    other[0, 31] ^= 1
    assert table.find(other).tolist() == [-1]


@given(st.lists(st.lists(st.integers(0, 50), max_size=20, unique=True), max_size=6))
def test_merged_tables_find_what_each_finds(parts: list[list[int]]) -> None:
    tables = [make_table({name(n): entries(part)}) for n, part in enumerate(parts)]

    merged = merge_tables(tables)

    whole = {n for part in parts for n in part}
    for n, place in zip(range(51), places(merged, list(range(51))), strict=True):
        assert (place is not None) == (n in whole)
        if place is not None:
            assert n in parts[int(place[0][6:38], 16)]


def test_a_segment_is_read_back_as_the_table_it_was_written_from() -> None:
    table = read_segment("index/x.arrow", segment_bytes(TABLE))

    assert table.packs == TABLE.packs
    assert (table.pack == TABLE.pack).all()
    assert (table.entries == TABLE.entries).all()
    assert (table.prefix == TABLE.prefix).all()


def test_an_empty_table_can_be_a_segment() -> None:
    assert len(read_segment("index/x.arrow", segment_bytes(EMPTY))) == 0


def segment_with(head: object, **columns: object) -> bytes:
    batch = pa.ipc.open_file(segment_bytes(TABLE)).get_batch(0)
    arrays = {field: columns.get(field, batch.column(field)) for field in batch.schema.names}
    metadata = {b"tensorcas": head if isinstance(head, bytes) else json.dumps(head).encode()}
    changed = pa.record_batch({key: value for key, value in arrays.items() if value is not None})
    changed = changed.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, changed.schema) as writer:
        writer.write_batch(changed)
    return sink.getvalue().to_pybytes()


PACKS = [name(0), name(1), name(2)]


@pytest.mark.parametrize(
    "head",
    [
        [],
        "x",
        {},
        {"format": 1},
        {"format": "1", "packs": PACKS},
        {"format": True, "packs": PACKS},
        {"format": float("inf"), "packs": PACKS},
        {"format": 1, "packs": None},
        {"format": 1, "packs": PACKS[:1]},
        {"format": 1, "packs": [1, 2, 3]},
        {"format": 1, "packs": ["../../../../etc/passwd", *PACKS]},
        {"format": 1, "packs": ["é" * 32, *PACKS]},
        {"format": 1, "packs": "x" * 32},
        b"not json",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
    ids=repr,
)
def test_a_segment_with_a_hostile_head_is_corrupt(head: object) -> None:
    with pytest.raises(CorruptError):
        read_segment("index/x.arrow", segment_with(head))


@pytest.mark.parametrize(
    "columns",
    [
        {"pack": None},
        {"digest": pa.array([b"x"] * 5)},
        {"digest": pa.array([b"x" * 31] * 5, pa.binary(31))},
        {"offset": pa.array([1.5] * 5)},
        {"offset": pa.array([None] * 5, pa.uint64())},
        {"offset": pa.array([2**64 - 1] * 5, pa.uint64())},
        {"offset": pa.array([-1] * 5, pa.int64())},
        {"pack": pa.array([3] * 5, pa.uint32())},
        {"pack": pa.array([-1] * 5, pa.int64())},
        {"codec": pa.array(["x"] * 5)},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_a_segment_with_hostile_columns_is_corrupt(columns: dict[str, object]) -> None:
    with pytest.raises(CorruptError):
        read_segment("index/x.arrow", segment_with({"format": 1, "packs": PACKS}, **columns))


def test_segment_of_a_later_release_is_refused_with_its_version() -> None:
    with pytest.raises(NewerFormatError, match="version 9"):
        read_segment("index/x.arrow", segment_with({"format": 9, "packs": PACKS}))


SEGMENT = segment_bytes(TABLE)


@settings(max_examples=500)
@given(st.data())
def test_a_damaged_segment_is_a_table_or_a_format_error(data: st.DataObject) -> None:
    damaged = bytearray(SEGMENT)
    for _ in range(data.draw(st.integers(1, 5))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        table = read_segment("index/x.arrow", bytes(damaged[: data.draw(st.sampled_from([len(damaged), 300, 9, 0]))]))
    except FormatError:
        return

    for row in range(len(table)):
        table.key_of(row)
    assert len(table.find(digests([1, 2, 3]))) == 3


def read_by_arrow(stream: memoryview) -> Any:
    try:
        return _read_any("index/x.arrow", stream)
    except FormatError:
        return None


def facts(found: Any) -> Any:
    """Return what was read of a segment, comparable."""
    head, columns = found
    return {**head, "packs": tuple(head["packs"])}, {name: column.tolist() for name, column in columns.items()}


def test_changed_bytes_of_a_segment_never_read_as_other_contents_than_pyarrow_finds() -> None:
    changes = random.Random(1)
    n_read = 0
    for segment in (SEGMENT, segment_bytes(MIXED)):
        for at in changes.sample(range(8, len(segment) - 8), 300):
            changed = bytearray(segment)
            changed[at] = changes.choice([changed[at] ^ 1 << changes.randrange(8), 0, 0xFF])
            stream = stream_in_file(bytes(changed))
            found = _read_own(stream)
            if found is not None:
                n_read += 1
                expected = read_by_arrow(stream)
                # pyarrow refuses a few streams for bytes that mean nothing.
                assert expected is None or facts(found) == facts(expected), at

    assert n_read > 100


def test_segment_is_read_without_pyarrow_as_pyarrow_reads_it() -> None:
    many = make_table({f"{number:032x}": entries(list(range(9 * number, 9 * number + 9))) for number in range(70)})
    for table in (TABLE, MIXED, EMPTY, many):
        stream = stream_in_file(segment_bytes(table))
        found = _read_own(stream)

        assert found is not None
        assert facts(found) == facts(read_by_arrow(stream))
        assert all(column.dtype.isnative for column in found[1].values())


def test_cut_segment_is_left_to_pyarrow() -> None:
    stream = stream_in_file(SEGMENT)
    body_ends = next(n for n in range(len(stream)) if _read_own(stream[:n]) is not None)

    assert body_ends > len(SEGMENT) // 2
    assert {read_by_arrow(stream[:n]) is None for n in range(8, body_ends, 16)} == {True}


# --- deltas


def as_deltas(made: Entries, base_pack: str, base: bytes = b"base") -> Entries:
    made["codec"] = DELTA
    made["depth"] = 1
    made["base_pack"] = np.frombuffer(bytes.fromhex(base_pack), np.uint8)
    made["base_digest"] = np.frombuffer(digest(base), np.uint8)
    return made


MIXED = make_table({name(7): entries([1, 2]), name(8): as_deltas(entries([2, 3]), name(7))})


def test_a_segment_says_what_deltas_are_to_be_added_to() -> None:
    table = read_segment("index/x.arrow", segment_bytes(MIXED))

    assert (table.entries == MIXED.entries).all()
    assert b'"format": 2' in segment_bytes(MIXED)
    assert b'"format": 1' in segment_bytes(TABLE)


def test_a_chunk_is_found_in_the_one_pack_that_is_asked_for() -> None:
    rows = MIXED.find(digests([2, 2, 3, 9]), packs=np.array([0, 1, 0, 1]))

    assert [None if row < 0 else MIXED.key_of(row) for row in rows.tolist()] == [
        f"packs/{name(7)}.pack",
        f"packs/{name(8)}.pack",
        None,
        None,
    ]


def chain(*depths: int) -> Table:
    """Packs of one chunk each, every one a delta against the next, by the depths that their entries say."""
    parts = {}
    for at, depth in enumerate(depths):
        made = entries([at])
        if depth:
            as_deltas(made, name(at + 1), str(at + 1).encode())["depth"] = depth
        parts[name(at)] = made
    return make_table(parts)


def held(table: Table) -> list[int]:
    return sorted(with_bases(table).entries["offset"].tolist())


def test_a_delta_is_held_where_all_are_that_it_takes() -> None:
    assert held(chain(2, 1, 0)) == [0, 1, 2]
    assert held(chain(3, 2, 1)) == []
    assert held(chain(8, 7, 6, 5, 4, 3, 2, 1, 0)) == list(range(9))


def test_a_chain_whose_depths_do_not_descend_is_not_held_beyond_that() -> None:
    assert held(chain(1, 1, 0)) == [1, 2]
    assert held(chain(1, 2, 0)) == [1, 2]


def test_deltas_that_are_each_others_bases_are_not_held() -> None:
    ring = make_table(
        {name(1): as_deltas(entries([1]), name(2), b"2"), name(2): as_deltas(entries([2]), name(1), b"1")}
    )

    assert held(ring) == []


def test_a_changed_base_in_a_segment_is_seen() -> None:
    blob = segment_bytes(MIXED)
    at = blob.index(digest(b"base"))

    for data in (blob[:at] + b"x" + blob[at + 1 :], blob.replace(bytes.fromhex(name(7)), b"x" * 16)):
        with pytest.raises(CorruptError):
            read_segment("index/x.arrow", data)
