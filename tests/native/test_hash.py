"""Tests of the core's BLAKE3: every kernel returns the digests of the package `blake3`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest

from tensorcas_mlflow.backends import BlobFile
from tensorcas_mlflow.native import core

rng = np.random.default_rng(0)
DATA = rng.integers(0, 256, (3 << 20) + 9, dtype=np.uint8)
PART = 256 << 10
AROUND_POWERS = [(1 << power) + change for power in range(13, 22) for change in (-1, 0, 1)]
LARGE = [
    *AROUND_POWERS,
    *(number * PART + change for number in (3, 5, 7, 11) for change in (-1024, -1, 0, 1, 1025)),
    *rng.integers(4_097, len(DATA) - 8, 40).tolist(),
]


@pytest.fixture(params=core.hash_kernels())
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use one of the kernels that run on this processor."""
    before = core.hash_kernels()[0]
    core.use_hash_kernel(request.param)
    yield request.param
    core.use_hash_kernel(before)


def of_package(pieces: Sequence[Any]) -> list[bytes]:
    return [blake3.blake3(piece).digest() for piece in pieces]


def of_core(pieces: Sequence[Any], n_threads: int = 1) -> list[bytes]:
    out = np.full((len(pieces), 32), 255, np.uint8)
    core.hash_each(pieces, out, n_threads)
    return [row.tobytes() for row in out]


def test_the_fastest_kernel_of_the_processor_is_in_use() -> None:
    order = ["avx512", "avx2", "vectors", "plain"]

    assert core.hash_kernels() == [name for name in order if name in core.hash_kernels()]


def test_digest_of_every_short_length_is_that_of_the_package(kernel: str) -> None:
    pieces = [DATA[at % 61 : at % 61 + at] for at in range(4_098)]

    assert [core.digest(piece) for piece in pieces] == of_package(pieces)


def test_messages_of_all_short_lengths_side_by_side_have_their_digests(kernel: str) -> None:
    pieces = [DATA[at % 61 : at % 61 + at] for at in rng.permutation(4_098).tolist()]

    assert of_core(pieces) == of_package(pieces)


@pytest.mark.parametrize("n_equal", [1, 2, 3, 15, 16, 17, 300])
@pytest.mark.parametrize("n_bytes", [0, 1, 64, 65, 1_000, 1_024, 4_096, 5_000])
def test_messages_of_one_length_side_by_side_have_their_digests(kernel: str, n_equal: int, n_bytes: int) -> None:
    pieces = [DATA[at : at + n_bytes] for at in range(n_equal)]

    assert of_core(pieces) == of_package(pieces)


def test_digest_of_large_messages_is_that_of_the_package(kernel: str) -> None:
    pieces = [DATA[at % 7 : at % 7 + n_bytes] for at, n_bytes in enumerate(LARGE)]

    assert [core.digest(piece) for piece in pieces] == of_package(pieces)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 16])
def test_threads_that_share_messages_return_their_digests(n_threads: int) -> None:
    sizes = [*LARGE, *range(0, 4_097, 7)]
    pieces = [DATA[at % 7 : at % 7 + n_bytes] for at, n_bytes in enumerate(rng.permutation(sizes).tolist())]

    assert of_core(pieces, n_threads) == of_package(pieces)


def test_child_of_a_fork_hashes_with_threads_of_its_own() -> None:
    pieces = [DATA[at:] for at in range(3)]
    expected = of_core(pieces, 4)
    child = os.fork()
    if child == 0:
        os._exit(0 if of_core(pieces, 4) == expected else 1)

    assert os.waitpid(child, 0)[1] == 0
    assert of_core(pieces, 4) == expected


@pytest.mark.parametrize("is_direct", [False, True], ids=["through the page cache", "past it"])
@pytest.mark.parametrize("n_threads", [1, 2, 16])
def test_check_finds_the_damaged_payloads_of_a_file(tmp_path: Path, n_threads: int, is_direct: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    stops = np.sort(rng.choice(len(DATA), 3_000, replace=False)).astype("u8")
    starts, sizes = stops[:-1], np.diff(stops)
    pieces = [DATA[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    expected = np.frombuffer(b"".join(digest[:16] for digest in of_package(pieces)), "u1").reshape(-1, 16).copy()
    is_damaged = rng.integers(0, 20, len(pieces)) == 0
    expected[is_damaged, 15] ^= 1
    is_good = np.ones(len(pieces), bool)
    with BlobFile("file", os.open(path, os.O_RDONLY), str(path)) as file:
        source = file.direct_descriptor if is_direct and file.open_direct() else file.descriptor
        core.check_stored(np.full(len(pieces), source, "i4"), starts, sizes, expected, is_good, n_threads)

    assert (is_good == ~is_damaged).all()


def test_check_calls_payloads_damaged_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA[:1_000])
    with path.open("rb") as file:
        sources = np.array([file.fileno(), -1, file.fileno()], "i4")
        starts, sizes = np.array([0, 0, 990], "u8"), np.array([1_000, 1_000, 11], "u8")
        good = of_package([DATA[:1_000]])[0][:16]
        is_good = np.ones(3, bool)
        core.check_stored(sources, starts, sizes, good * 3, is_good, 1)

    assert is_good.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("sources", "starts", "sizes", "n_digests"),
    [
        (1, [0, 0], [1, 1], 2),
        (2, [0], [1, 1], 2),
        (2, [0, 0], [1], 2),
        (2, [0, 0], [1, 1], 3),
        (2, [0, 1 << 63], [1, 1], 2),
        (2, [0, 0], [1, 1 << 32], 2),
    ],
)
def test_columns_of_payloads_that_do_not_fit_are_refused(
    sources: int, starts: list[int], sizes: list[int], n_digests: int
) -> None:
    columns = np.full(sources, -1, "i4"), np.array(starts, "u8"), np.array(sizes, "u8"), bytes(16 * n_digests)
    with pytest.raises(ValueError, match=r"number of rows|too long"):
        core.check_stored(*columns, bytearray(2), 1)


@pytest.mark.parametrize("n_bytes", [0, 31, 33, 64, 95, 128])
def test_output_that_has_not_one_digest_for_each_buffer_is_refused(n_bytes: int) -> None:
    with pytest.raises(ValueError, match="has not 32 bytes for each buffer"):
        core.hash_each([b"1", b"2", b"3"], bytearray(n_bytes), 1)


@pytest.mark.parametrize("pieces", [[b"1", 2], ["text"], [np.zeros((4, 4))[:, 1]], 7, [None]])
def test_piece_that_is_no_contiguous_buffer_is_refused(pieces: Any) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        core.hash_each(pieces, bytearray(32 * (len(pieces) if isinstance(pieces, list) else 1)), 1)


def test_kernel_that_the_processor_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel abacus"):
        core.use_hash_kernel("abacus")
