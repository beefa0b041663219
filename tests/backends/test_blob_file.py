"""A blob that is a file, read in the ways only files have."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import PAGE_BYTES, BlobFile, LocalBackend, MemoryBackend, aligned_buffer
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, CorruptError

CONTENT = np.random.default_rng(0).integers(0, 256, 50 * PAGE_BYTES + 777, dtype=np.uint8).tobytes()


@pytest.fixture
def backend(disk: Path) -> LocalBackend:
    backend = LocalBackend(disk)
    backend.put_new("packs/1", [CONTENT])
    return backend


@pytest.fixture
def file(backend: LocalBackend) -> Iterator[BlobFile]:
    with backend.open_file("packs/1") as opened:
        yield opened


def test_backend_without_files_opens_no_file() -> None:
    assert MemoryBackend().open_file("packs/1") is None


def test_a_blob_that_is_not_there_cannot_be_opened(backend: LocalBackend) -> None:
    with pytest.raises(BlobNotFoundError):
        backend.open_file("packs/2")


def test_a_link_cannot_be_opened(backend: LocalBackend, disk: Path) -> None:
    (disk / "packs" / "2").symlink_to("1")

    with pytest.raises(CorruptError, match="links are not followed"):
        backend.open_file("packs/2")


@pytest.mark.parametrize("sizes", [[5], [0, 7, 0, 4_096], [1] * 2_500, [100_000, 1, 50_000]])
def test_buffers_are_filled_one_after_the_other(file: BlobFile, sizes: list[int]) -> None:
    outs = [memoryview(bytearray(size)) for size in sizes]
    file.read_into(333, outs)

    assert b"".join(outs) == CONTENT[333 : 333 + sum(sizes)]


@pytest.mark.parametrize("start", [0, len(CONTENT) - 5, len(CONTENT) + 5])
def test_a_read_beyond_the_end_is_corrupt(file: BlobFile, start: int) -> None:
    outs = [memoryview(bytearray(10)), memoryview(bytearray(len(CONTENT)))]

    with pytest.raises(CorruptError, match="it ends before"):
        file.read_into(start, outs)


def test_open_file_of_a_deleted_blob_can_be_read_to_the_end(backend: LocalBackend, file: BlobFile) -> None:
    backend.delete("packs/1")
    out = bytearray(100)
    file.read_into(50, [memoryview(out)])

    assert bytes(out) == CONTENT[50:150]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (4_095, 4_097), (64, 200_000), (len(CONTENT) - 1, len(CONTENT))])
def test_direct_reads_give_any_stretch(file: BlobFile, start: int, stop: int) -> None:
    if not file.open_direct():
        pytest.skip("this file system has no direct reads")
    scratch = aligned_buffer(stop - start + 2 * PAGE_BYTES)

    assert bytes(file.read_direct(start, stop, scratch)) == CONTENT[start:stop]
    with pytest.raises(CorruptError):
        file.read_direct(len(CONTENT) - 1, len(CONTENT) + 1, scratch)


def test_direct_reads_are_of_the_file_that_was_opened(backend: LocalBackend, file: BlobFile, disk: Path) -> None:
    (disk / "other").write_bytes(b"x" * len(CONTENT))
    os.replace(disk / "other", disk / "packs" / "1")

    assert not file.open_direct()


def test_a_map_outlives_the_file_and_cannot_be_written(backend: LocalBackend) -> None:
    with backend.open_file("packs/1") as file:
        stretch = file.map(70_000, 150_000)
    backend.delete("packs/1")
    stretch.populate(70_000, 150_000)

    assert stretch.data[70_000 - stretch.begin :].tobytes() == CONTENT[70_000:150_000]
    assert not stretch.data.flags.writeable


def test_a_map_beyond_the_end_is_corrupt(file: BlobFile) -> None:
    with pytest.raises(CorruptError):
        file.map(0, len(CONTENT) + 1)


def test_populating_a_file_that_was_cut_short_is_an_error_and_kills_nobody(file: BlobFile, disk: Path) -> None:
    stretch = file.map(0, len(CONTENT))
    os.truncate(disk / "packs" / "1", PAGE_BYTES)

    with pytest.raises(BackendError):
        stretch.populate(0, len(CONTENT))


def test_bytes_written_just_now_are_in_the_page_cache(file: BlobFile) -> None:
    assert file.share_in_memory([(0, len(CONTENT))]) == 1.0
    assert file.share_in_memory([(10, 20), (90_000, 100_000)]) == 1.0


def test_eviction_from_the_page_cache_is_seen(disk: Path) -> None:
    backend = LocalBackend(disk)
    backend.put_new("packs/1", [bytes(4 << 20)])
    with backend.open_file("packs/1") as file:
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if file.share_in_memory([(0, 4 << 20)]) == 1.0:
            pytest.skip("this file system keeps files in memory")
        file.read_at_random()
        file.read_into(0, [memoryview(bytearray(1 << 20))])
        shares = [file.share_in_memory([(at << 20, (at + 1) << 20)]) for at in range(4)]

    assert shares == [1.0, 0.0, 0.0, 0.0]


def test_share_in_the_page_cache_of_a_read_beyond_the_end_is_one(file: BlobFile) -> None:
    assert file.share_in_memory([(0, len(CONTENT) + 1)]) == 1.0
    assert file.share_in_memory([]) == 1.0


def test_file_whose_size_cannot_be_read_is_closed(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = disk / "blob"
    path.write_bytes(b"abc")
    descriptor = os.open(path, os.O_RDONLY)

    def fail(_: int) -> os.stat_result:
        raise OSError(errno.EIO, "the disk failed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fail)
        with pytest.raises(OSError, match="the disk failed"):
            BlobFile("blob", descriptor, str(path))

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
