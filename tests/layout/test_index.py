from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.layout.packs import DELTA, EMPTY, ENTRY, Entries, Table, make_table, merge_tables, with_bases


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


@pytest.mark.long
@given(st.lists(st.lists(st.integers(0, 50), max_size=20, unique=True), max_size=6))
def test_merged_tables_find_what_each_finds(parts: list[list[int]]) -> None:
    tables = [make_table({name(n): entries(part)}) for n, part in enumerate(parts)]

    merged = merge_tables(tables)

    whole = {n for part in parts for n in part}
    for n, place in zip(range(51), places(merged, list(range(51))), strict=True):
        assert (place is not None) == (n in whole)
        if place is not None:
            assert n in parts[int(place[0][6:38], 16)]


# --- deltas


def as_deltas(made: Entries, base_pack: str, base: bytes = b"base") -> Entries:
    made["codec"] = DELTA
    made["depth"] = 1
    made["base_pack"] = np.frombuffer(bytes.fromhex(base_pack), np.uint8)
    made["base_digest"] = np.frombuffer(digest(base), np.uint8)
    return made


MIXED = make_table({name(7): entries([1, 2]), name(8): as_deltas(entries([2, 3]), name(7))})


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
