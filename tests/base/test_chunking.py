from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_mlflow.base.tensors import chunk_ends
from tensorcas_mlflow.errors import FormatError


def naive_ends(n_bytes: int, chunk_bytes: int, cuts: list[int]) -> list[int]:
    ends: list[int] = []
    begin = 0
    for cut in cuts or [n_bytes]:
        while begin < cut:
            begin = min(begin + chunk_bytes, cut)
            ends.append(begin)
    return ends


def test_an_empty_tensor_has_no_chunk() -> None:
    assert chunk_ends(0, 4096).tolist() == []


def test_chunks_end_at_multiples_of_the_chunk_size_and_at_the_end() -> None:
    assert chunk_ends(10, 4).tolist() == [4, 8, 10]
    assert chunk_ends(8, 4).tolist() == [4, 8]
    assert chunk_ends(3, 4).tolist() == [3]


def test_the_grid_begins_anew_at_every_cut() -> None:
    assert chunk_ends(20, 8, [3, 14, 20]).tolist() == [3, 11, 14, 20]


@given(st.sets(st.integers(1, 400), max_size=12), st.integers(1, 400), st.integers(1, 64))
def test_cuts_and_grid_agree_with_the_plain_definition(cuts: set[int], n_bytes: int, chunk_bytes: int) -> None:
    at = [*sorted(cut for cut in cuts if cut < n_bytes), n_bytes]

    assert chunk_ends(n_bytes, chunk_bytes, at).tolist() == naive_ends(n_bytes, chunk_bytes, at)
    assert chunk_ends(n_bytes, chunk_bytes).tolist() == naive_ends(n_bytes, chunk_bytes, [])


@pytest.mark.parametrize(
    "cuts", [[], [5], [11], [0, 10], [-1, 10], [5, 5, 10], [7, 3, 10], [-(2**63), 10], [2**63 - 1]]
)
def test_cuts_that_do_not_ascend_to_the_end_are_refused(cuts: list[int]) -> None:
    with pytest.raises(FormatError):
        chunk_ends(10, 4, np.array(cuts, dtype=np.int64))


def test_an_empty_tensor_has_no_cuts() -> None:
    with pytest.raises(FormatError):
        chunk_ends(0, 4, [0])
