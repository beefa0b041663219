"""Uploads that a server receives: stored while they come in, whole or not at all."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.store import Store

LONG = 50 << 20
"""More than may wait between the event loop and the thread that stores, and more than a batch."""


@pytest.fixture
def repository(tmp_path: Path) -> TensorCasArtifactRepository:
    Store.init(tmp_path / "root")
    return TensorCasArtifactRepository(f"tensorcas://{tmp_path}/root")


@pytest.fixture(scope="module")
def long() -> bytes:
    return np.random.default_rng(0).bytes(LONG)


async def pieces(data: bytes, n_bytes: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(data), n_bytes):
        yield data[start : start + n_bytes]
        await asyncio.sleep(0)


def fetch(repository: TensorCasArtifactRepository, path: str, out: Path) -> bytes:
    out.mkdir(exist_ok=True)
    return Path(repository.download_artifacts(path, str(out))).read_bytes()


def upload(repository: TensorCasArtifactRepository, chunks: AsyncIterator[bytes], path: str = "file.bin") -> None:
    asyncio.run(repository.log_artifact_from_async_stream(chunks, path))


@pytest.mark.parametrize("n_bytes", [0, 1, 70_000, LONG])
def test_an_upload_comes_back_bit_for_bit(
    repository: TensorCasArtifactRepository, tmp_path: Path, long: bytes, n_bytes: int
) -> None:
    upload(repository, pieces(long[:n_bytes]))

    assert fetch(repository, "file.bin", tmp_path / "out") == long[:n_bytes]


def test_an_upload_in_many_small_pieces_comes_back_bit_for_bit(
    repository: TensorCasArtifactRepository, tmp_path: Path, long: bytes
) -> None:
    upload(repository, pieces(long[:200_001], 7))

    assert fetch(repository, "file.bin", tmp_path / "out") == long[:200_001]


@pytest.mark.long
def test_an_upload_that_is_read_in_turn_comes_back_bit_for_bit(
    repository: TensorCasArtifactRepository, tmp_path: Path, long: bytes
) -> None:
    repository.log_artifact_from_stream(io.BytesIO(long), "file.bin", "folder")

    assert fetch(repository, "folder/file.bin", tmp_path / "out") == long


@pytest.mark.long
def test_many_uploads_at_once_do_not_wait_for_each_other(
    repository: TensorCasArtifactRepository, tmp_path: Path, long: bytes
) -> None:
    n_begun = 0

    async def together(nth: int) -> AsyncIterator[bytes]:
        nonlocal n_begun
        n_begun += 1
        yield long[nth : nth + 100_000]
        while n_begun < 40:
            await asyncio.sleep(0.001)
        yield long[nth : nth + 1000]

    async def all_of_them() -> None:
        uploads = [repository.log_artifact_from_async_stream(together(nth), f"{nth}.bin") for nth in range(40)]
        await asyncio.wait_for(asyncio.gather(*uploads), timeout=60)

    asyncio.run(all_of_them())

    for nth in (0, 20, 39):
        expected = long[nth : nth + 100_000] + long[nth : nth + 1000]
        assert fetch(repository, f"{nth}.bin", tmp_path / "out") == expected


@pytest.mark.parametrize("n_pieces", [0, 1, 45])
def test_an_upload_that_breaks_off_leaves_what_was_there(
    repository: TensorCasArtifactRepository, tmp_path: Path, long: bytes, n_pieces: int
) -> None:
    class ClientGoneError(Exception):
        pass

    async def broken() -> AsyncIterator[bytes]:
        async for piece in pieces(long[: n_pieces << 20]):
            yield piece
        raise ClientGoneError

    upload(repository, pieces(b"\0before"))

    with pytest.raises(ClientGoneError):
        upload(repository, broken())
    for thread in threading.enumerate():
        if thread.name == "tensorcas-upload":
            thread.join()
    assert fetch(repository, "file.bin", tmp_path / "out") == b"\0before"
    assert list(Store.open(tmp_path / "root").backend.list("intents")) == []


def test_an_upload_that_cannot_be_stored_fails_at_once_and_is_not_drawn_to_its_end(
    repository: TensorCasArtifactRepository,
) -> None:
    n_drawn = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal n_drawn
        while True:
            n_drawn += 1
            yield bytes(1 << 20)
            await asyncio.sleep(0)

    upload(repository, pieces(b"\0a file"), "taken")

    with pytest.raises(MlflowException, match="not a folder"):
        asyncio.run(repository.log_artifact_from_async_stream(endless(), "file", "taken"))
    assert n_drawn < 100


def test_the_event_loop_goes_on_while_an_upload_is_stored(repository: TensorCasArtifactRepository, long: bytes) -> None:
    n_turns = 0

    async def turn() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await asyncio.sleep(0.001)

    async def both() -> None:
        turning = asyncio.ensure_future(turn())
        # One piece: everything after it is done in the thread.
        await repository.log_artifact_from_async_stream(pieces(long, LONG), "file.bin")
        turning.cancel()

    asyncio.run(both())

    assert n_turns > 10


def test_a_cancelled_upload_leaves_what_was_there(
    repository: TensorCasArtifactRepository, tmp_path: Path, long: bytes
) -> None:
    async def stalled() -> AsyncIterator[bytes]:
        async for piece in pieces(long[: 5 << 20]):
            yield piece
        await asyncio.sleep(60)

    async def cancelled() -> None:
        await asyncio.wait_for(repository.log_artifact_from_async_stream(stalled(), "file.bin"), timeout=0.5)

    upload(repository, pieces(b"\0before"))

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    for thread in threading.enumerate():
        if thread.name == "tensorcas-upload":
            thread.join(10)
    assert fetch(repository, "file.bin", tmp_path / "out") == b"\0before"
    assert list(Store.open(tmp_path / "root").backend.list("intents")) == []


@pytest.fixture(autouse=True)
def no_upload_is_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "tensorcas-upload"]
    for thread in left:
        thread.join(10)  # its upload is known to be done a moment before it ends
    assert not any(thread.is_alive() for thread in left)
