from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_mlflow.chunk_io import MAX_GAP_BYTES, MAX_READ_BYTES, plan_reads


def plan(places: list[tuple[int, int, int]]):  # type: ignore[no-untyped-def]
    pack, offset, size = (np.array(column, dtype=np.int64) for column in zip(*places, strict=True))
    return list(plan_reads(pack, offset.astype("<u8"), size.astype("<u4")))


def test_plan_without_chunks_reads_nothing() -> None:
    empty = np.empty(0, np.int64)

    assert list(plan_reads(empty, empty, empty)) == []


def test_near_chunks_are_read_together_and_far_ones_apart() -> None:
    (first, second) = plan([(0, 100, 50), (0, 150 + MAX_GAP_BYTES, 10), (0, 161 + 2 * MAX_GAP_BYTES, 5)])

    assert (first.start, first.stop) == (100, 160 + MAX_GAP_BYTES)
    assert first.members.tolist() == [0, 1]
    assert second.members.tolist() == [2]


def test_chunks_of_two_packs_are_never_read_together() -> None:
    extents = plan([(1, 8, 4), (0, 8, 4)])

    assert [(extent.pack, extent.start) for extent in extents] == [(0, 8), (1, 8)]


def test_a_chunk_longer_than_a_read_is_read_whole() -> None:
    (extent,) = plan([(0, 8, 3 * MAX_READ_BYTES)])

    assert extent.stop - extent.start == 3 * MAX_READ_BYTES


def test_a_chunk_wanted_twice_is_read_once() -> None:
    (extent,) = plan([(0, 8, 4), (0, 8, 4)])

    assert (extent.start, extent.stop) == (8, 12)
    assert sorted(extent.members.tolist()) == [0, 1]


@pytest.mark.long
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(8, 40 << 20), st.sampled_from([0, 1, 100, 300_000, 5 << 20])),
        min_size=1,
        max_size=40,
    )
)
def test_every_chunk_lies_whole_in_one_read_even_where_a_hostile_table_overlaps(
    places: list[tuple[int, int, int]],
) -> None:
    extents = plan(places)

    assert sorted(at for extent in extents for at in extent.members.tolist()) == list(range(len(places)))
    for extent in extents:
        for at in extent.members.tolist():
            pack, offset, size = places[at]
            assert extent.pack == pack
            assert extent.start <= offset
            assert offset + size <= extent.stop
