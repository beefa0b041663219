"""Files of every format, cut off and changed anywhere: read to the end or refused, and in little memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcas_mlflow.errors import BackendError, CorruptError, MalformedFileError, NewerFormatError
from tensorcas_mlflow.file_formats import ByteSource, Listing, list_source, open_listing
from tests.file_formats.samples import ARRAYS, files, serverlessllm_folder, tensorflow_folder

MAX_S = 5.0
"""Of one file of some kilobytes: what takes so long never ends."""
BY_PROCESS = (".h5", ".keras")
"""Suffixes of files that are read fewer times, since a process of its own reads each."""
CLAIMS = [
    number.to_bytes(n, "little") for n in (1, 2, 4, 8) for number in (0, 1, (1 << 8 * n - 1) - 1, (1 << 8 * n) - 1)
]


class Held(ByteSource):
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.name = "held"
        self.size = len(data)
        self.n_read_bytes = 0
        self._data = memoryview(data)

    def read_into(self, start: int, out: memoryview) -> None:
        assert start + len(out) <= self.size
        self.n_read_bytes += len(out)
        out[:] = self._data[start : start + len(out)]

    def view(self, start: int, n_bytes: int) -> memoryview | None:
        return self._data[start : start + n_bytes] if start + n_bytes <= self.size else None


def damaged(data: bytes, draw: random.Random, n_times: int) -> Iterator[bytes]:
    """Cut a file off, and change it, nearer to its edges more often: there stands what says where things are."""
    for _ in range(n_times):
        edge = draw.choice((min(600, len(data)), len(data)))
        at = draw.randrange(edge)
        at = at if draw.random() < 0.6 else len(data) - 1 - at
        other = draw.choice(
            (draw.randbytes(draw.randint(1, 4)), draw.choice(CLAIMS), bytes([data[at] ^ 1 << draw.randrange(8)]))
        )
        match draw.randrange(5):
            case 0:
                yield data[:at]
            case 1:
                yield data[:at] + data[at + draw.randint(1, 9) :]
            case 2:
                yield data[:at] + other + data[at:]
            case _:
                yield data[:at] + other + data[at + len(other) :]


def read_all(listing: Listing) -> None:
    for name, place in listing.locations.items():
        try:
            array = listing.array(name)
        except CorruptError:
            continue
        assert (array.dtype, array.shape) == (place.spec.numpy_dtype, place.spec.shape)
        assert sum(len(piece) for _, piece in listing.stream([name])) == array.nbytes


def check(data: bytes) -> None:
    try:
        listing = list_source(Held(data))
        if listing is not None:
            read_all(listing)
    except (MalformedFileError, CorruptError, NewerFormatError):
        pass


@pytest.mark.parametrize("name", files())
def test_a_damaged_file_is_read_or_refused(name: str) -> None:
    for data in damaged(files()[name], random.Random(name), 60 if name.endswith(BY_PROCESS) else 300):
        check(data)


@pytest.mark.long
@pytest.mark.parametrize("name", files())
def test_a_file_damaged_in_thousands_of_ways_is_read_or_refused(name: str) -> None:
    data = files()[name]
    for at in range(0, len(data), 20 if name.endswith(BY_PROCESS) else 1):
        check(data[:at])
        check(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    draw = random.Random(name)
    for once in damaged(data, draw, 3000):
        check(once)
        if once:
            for twice in damaged(once, draw, 2):
                check(twice)


@pytest.mark.parametrize("name", files())
def test_a_damaged_file_takes_little_memory(name: str) -> None:
    data = files()[name]
    tracemalloc.start()
    try:
        for broken in damaged(data, random.Random(name + "!"), 20):
            check(broken)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 70 << 20


@pytest.mark.long
def test_a_damaged_index_of_tensorflow_is_read_or_refused(tmp_path: Path) -> None:
    path = tensorflow_folder(tmp_path / "model", ARRAYS, n_shards=2)
    index = path.read_bytes()
    for broken in [*damaged(index, random.Random(0), 400), *(index[:at] for at in range(len(index)))]:
        path.write_bytes(broken)
        try:
            read_all(open_listing(path))
        except (MalformedFileError, CorruptError, BackendError):
            continue


def test_a_damaged_index_of_a_folder_is_read_or_refused(tmp_path: Path) -> None:
    folder = serverlessllm_folder(tmp_path / "model", ARRAYS)
    index = (folder / "tensor_index.json").read_bytes()
    for broken in damaged(index, random.Random(0), 100):
        (folder / "tensor_index.json").write_bytes(broken)
        try:
            read_all(open_listing(folder))
        except (MalformedFileError, CorruptError):
            continue
