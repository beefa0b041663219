"""Bytes are cut by content: equal stretches of two versions give equal chunks, wherever they lie."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256, shake_256
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.content_cuts import (
    _GEAR,
    MIN_BYTES,
    ContentCutter,
    content_cuts,
    opaque_sizes,
    piece_sizes,
)
from tests.reference.content_cuts import _BLOCK_BYTES, ReferenceCutter


def random_bytes(n_bytes: int, seed: int = 0) -> Array:
    return np.frombuffer(shake_256(b"%d" % seed).digest(n_bytes), dtype=np.uint8)


def pieces(data: Array) -> list[bytes]:
    cuts = content_cuts(data)
    return [data[start:stop].tobytes() for start, stop in zip([0, *cuts], cuts, strict=False)]


def slow_cuts(data: bytes, gear: list[int]) -> list[int]:
    """The definition, a byte at a time."""
    least, wanted, greatest = piece_sizes(len(data))
    cuts: list[int] = []
    last = hashed = 0
    for i, byte in enumerate(data, start=1):
        hashed = ((hashed << 1) + gear[byte]) % 2**32
        if (i - last >= least and hashed < 2**32 // (wanted - least)) or i - last == greatest:
            cuts.append(i)
            last = i
    return cuts if last == len(data) else [*cuts, len(data)]


def test_content_cuts_follow_their_definition() -> None:
    data = random_bytes(3 * _BLOCK_BYTES + 5)

    assert content_cuts(data) == slow_cuts(data.tobytes(), _GEAR.tolist())


def test_cuts_are_the_same_in_every_release_and_on_every_machine() -> None:
    cuts = np.array(content_cuts(random_bytes(100_000)), dtype="<i8")

    assert len(cuts) == 28
    assert sha256(cuts.tobytes()).hexdigest()[:16] == "b71bb068ae053f5f"


@pytest.mark.parametrize("n_inserted", [1, 100, 5000])
def test_bytes_put_in_front_change_only_the_first_chunks(n_inserted: int) -> None:
    data = random_bytes(200_000)

    before = pieces(data)
    after = pieces(np.concatenate([random_bytes(n_inserted, seed=1), data]))

    assert len(before) > 40
    assert len(set(after) - set(before)) <= 2 + n_inserted // MIN_BYTES
    assert after[-30:] == before[-30:]


def test_bytes_changed_in_the_middle_change_only_the_chunks_around_them() -> None:
    data = random_bytes(200_000)
    edited = np.concatenate([data[:90_000], random_bytes(321, seed=1), data[90_010:]])

    assert len(set(pieces(edited)) - set(pieces(data))) <= 3


def test_a_text_that_is_appended_to_keeps_all_chunks_but_the_last() -> None:
    data = random_bytes(200_000)

    before = pieces(data[:150_000])
    after = pieces(data)

    assert after[: len(before) - 1] == before[:-1]


def test_bytes_that_outgrow_their_piece_size_keep_it_for_a_factor_of_four() -> None:
    sizes = [piece_sizes(n_bytes)[0] for n_bytes in (0, 2**20 - 1, 2**20, 2**22 - 1, 2**22, 2**24, 2**26, 2**40)]

    assert sizes == [MIN_BYTES * factor for factor in (1, 1, 2, 2, 4, 8, 16, 16)]


@given(
    n_bytes=st.integers(0, 150_000),
    seed=st.integers(0, 1000),
    mask=st.sampled_from([0, 1, 255]),
    period=st.sampled_from([None, 7, 31, 4096]),
)
def test_pieces_are_whole_and_within_their_limits(n_bytes: int, seed: int, mask: int, period: int | None) -> None:
    data = random_bytes(n_bytes, seed) & np.uint8(mask)
    data = data if period is None else np.resize(data[:period], n_bytes).astype(np.uint8)
    least, _, greatest = piece_sizes(n_bytes)

    parts = pieces(data)

    assert b"".join(parts) == data.tobytes()
    assert all(least <= len(part) <= greatest for part in parts[:-1])
    assert all(0 < len(part) <= greatest for part in parts)
    assert content_cuts(data.copy()) == content_cuts(data)


@given(
    seed=st.integers(0, 1000),
    mask=st.sampled_from([0, 1, 255]),
    sizes=st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2000), st.integers(0, 100_000)), max_size=60),
)
def test_cuts_do_not_depend_on_how_bytes_are_fed(seed: int, mask: int, sizes: list[int]) -> None:
    data = random_bytes(sum(sizes), seed) & np.uint8(mask)
    at_once, in_parts = ContentCutter(), ContentCutter()

    borders = [0, *accumulate(sizes)]
    cuts = [cut for start, stop in pairwise(borders) for cut in in_parts.feed(data[start:stop])]

    assert cuts == at_once.feed(data)


@given(
    seed=st.integers(0, 1000),
    mask=st.sampled_from([0, 1, 3, 255]),
    sizes=st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2000), st.integers(0, 100_000)), max_size=40),
    chunk_bytes=st.sampled_from([None, 4096, 65536]),
)
def test_numpy_finds_the_cuts_that_the_compiled_core_finds(
    seed: int, mask: int, sizes: list[int], chunk_bytes: int | None
) -> None:
    data = random_bytes(sum(sizes), seed) & np.uint8(mask)
    distances = piece_sizes if chunk_bytes is None else lambda _: opaque_sizes(chunk_bytes)
    borders = [0, *accumulate(sizes)]

    def cuts(cutter: ContentCutter) -> list[int]:
        return [cut for start, stop in pairwise(borders) for cut in cutter.feed(data[start:stop])]

    assert cuts(ReferenceCutter(distances)) == cuts(ContentCutter(distances))


def test_pieces_of_unknown_bytes_are_whole_chunks_or_nearly() -> None:
    data = random_bytes(8 << 20)
    cuts = ContentCutter(lambda _: opaque_sizes(256 << 10)).feed(data)
    sizes = np.diff([0, *cuts])

    assert 128 << 10 <= sizes.min() <= sizes.max() <= 256 << 10
    assert (sizes == 256 << 10).mean() < 0.2


def test_memory_of_the_content_cutter_is_bounded() -> None:
    data = np.zeros(16 << 20, dtype=np.uint8)

    tracemalloc.start()
    try:
        content_cuts(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2 << 20


def test_only_rows_of_bytes_and_the_skeleton_are_cut_by_content() -> None:
    row = random_bytes(50_000)
    rows = {
        "text": row,
        "short": row[:MIN_BYTES],
        "matrix": row.reshape(100, 500),
        "numbers": row.astype(np.float32),
        SKELETON: row,
    }

    assert GenericAdapter().cuts(rows) == {"text": content_cuts(row), SKELETON: content_cuts(row)}
