"""Buffers that reads go through."""

from __future__ import annotations

import itertools

import pytest

from tensorcas_mlflow.backends import PAGE_BYTES, SCRATCH_BYTES, Scratch


@pytest.mark.parametrize("n_bytes", [0, 1, 300_000, SCRATCH_BYTES, 5 * SCRATCH_BYTES + 1])
def test_a_buffer_is_long_enough_and_begins_with_a_page(n_bytes: int) -> None:
    buffer = Scratch().take(n_bytes)

    assert len(buffer) >= n_bytes
    assert buffer.ctypes.data % PAGE_BYTES == 0


def test_no_two_callers_share_a_buffer() -> None:
    scratch = Scratch()
    buffers = [scratch.take(n_bytes) for n_bytes in (100, 100, 600_000, 600_000, 600_000, SCRATCH_BYTES, SCRATCH_BYTES)]
    begins = sorted((buffer.ctypes.data, len(buffer)) for buffer in buffers)

    assert all(at + n_bytes <= after for (at, n_bytes), (after, _) in itertools.pairwise(begins))


def test_a_buffer_that_was_given_back_is_used_again_where_it_is_long_enough() -> None:
    scratch = Scratch()
    first = scratch.take(600_000)
    scratch.give_back(first)

    assert scratch.take(SCRATCH_BYTES) is first
    assert len(scratch.take(2 * SCRATCH_BYTES)) == 2 * SCRATCH_BYTES
