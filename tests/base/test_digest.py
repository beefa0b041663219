from __future__ import annotations

import blake3
import numpy as np
import pytest

from tensorcas_mlflow.base.digest import digest, digest_all, hex_of, unique_rows


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 7], [100] * 500, [9 << 20, 1, 5 << 20, 5 << 20, 0]])
def test_many_buffers_are_hashed_as_each_alone(sizes: list[int]) -> None:
    rng = np.random.default_rng(3)
    pieces = [memoryview(rng.bytes(size)) for size in sizes]

    rows = digest_all(pieces)

    assert rows.shape == (len(sizes), 32)
    assert [row.tobytes() for row in rows] == [blake3.blake3(piece).digest() for piece in pieces]


def test_unique_rows_are_ascending_and_point_both_ways() -> None:
    rows = np.frombuffer(b"".join(digest(bytes([n % 5])) for n in range(20)), np.uint8).reshape(-1, 32)

    unique, first, which = unique_rows(rows)

    names = [row.tobytes() for row in unique]
    assert names == sorted({row.tobytes() for row in rows})
    assert (rows[first] == unique).all()
    assert (unique[which] == rows).all()
    assert sorted(first.tolist()) == [0, 1, 2, 3, 4]


def test_no_rows_have_no_unique_rows() -> None:
    unique, first, which = unique_rows(np.empty((0, 32), np.uint8))

    assert len(unique) == len(first) == len(which) == 0


def test_digests_that_end_or_begin_with_zero_bytes_stay_apart() -> None:
    rows = np.zeros((4, 32), np.uint8)
    rows[1, 31] = 1
    rows[2, 0] = 1
    rows[3, 0] = 255

    unique, _, _ = unique_rows(rows[::-1])

    assert [row.tobytes() for row in unique] == [row.tobytes() for row in rows[[0, 1, 2, 3]]]


def test_a_digest_is_written_in_64_hex_digits() -> None:
    rows = digest_all([memoryview(b"hello")])

    assert hex_of(rows[0]) == "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f"
