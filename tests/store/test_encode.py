"""Chunks on their way into packs: encoded in groups, on all threads, in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tensorcas_mlflow.digest import digest
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.store._encode import _GROUP_BYTES, _MAX_GROUP_PIECES, Piece, encode_pieces

SIZES = [1, 40, 5000, _GROUP_BYTES - 1, 30, _GROUP_BYTES, 7, 3 * _GROUP_BYTES, *[8] * (_MAX_GROUP_PIECES + 3)]


@pytest.fixture(autouse=True, params=["1", "3"])
def n_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_THREADS", request.param)


def piece(data: bytes | memoryview, *, origin: str | None = None) -> Piece:
    return Piece(digest=digest(data), data=data, itemsize=4, begins_row=True, origin=origin)


def test_payloads_come_in_the_order_of_the_pieces_whatever_their_sizes() -> None:
    contents = [np.random.default_rng(nth).bytes(size) for nth, size in enumerate(SIZES)]

    payloads = list(encode_pieces(piece(content) for content in contents))

    assert [payload.digest for payload in payloads] == [digest(content) for content in contents]
    assert [payload.raw_bytes for payload in payloads] == SIZES


def test_pieces_are_drawn_only_as_payloads_are_taken() -> None:
    n_drawn = 0

    def pieces() -> Iterator[Piece]:
        nonlocal n_drawn
        for nth in range(100_000):
            n_drawn += 1
            yield piece(b"%1000d" % nth)

    next(encode_pieces(pieces()))

    assert n_drawn < 2000


@pytest.mark.parametrize("n_bytes", [100, 2 * _GROUP_BYTES])
def test_bytes_that_are_not_those_that_were_hashed_are_refused(n_bytes: int) -> None:
    data = bytearray(n_bytes)
    changed = piece(memoryview(data), origin="tensor 'a'")
    data[7] = 1

    with pytest.raises(ConflictError, match="tensor 'a' was changed while it was saved"):
        list(encode_pieces([piece(b"before"), changed, piece(b"after")]))
