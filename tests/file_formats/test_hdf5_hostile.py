"""HDF5 files changed where they say what lies where: read or refused by the lister, and stored bit for bit."""

from __future__ import annotations

import io
import random
import re
import struct
import tracemalloc
from collections.abc import Iterator
from functools import cache
from typing import Any

import h5py
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptError, MalformedFileError, NewerFormatError
from tensorcas_mlflow.file_formats import list_source
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tests.file_formats.hdf5_samples import hdf5_file
from tests.file_formats.test_read_fuzz import Held, read_all

LIBVERS = ["earliest", "latest"]
SIDES = (30, 40)
DRAW = np.random.default_rng(0)
WEIGHT = (DRAW.standard_normal((210, 160)) * 0.02).astype(np.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "pieces": {"chunks": SIDES},
    "growing": {"chunks": SIDES, "maxshape": (None, 160)},
    "growing in two": {"chunks": SIDES, "maxshape": (None, None)},
    "gzip": {"chunks": SIDES, "compression": "gzip"},
    "all filters": {"chunks": SIDES, "compression": "gzip", "shuffle": True, "fletcher32": True},
    "single": {"chunks": WEIGHT.shape, "compression": "gzip"},
}
_SIGNATURES = (
    *(rb"\x89HDF", b"OHDR", b"OCHK", b"TREE", b"SNOD", b"HEAP", b"FRHP", b"FHDB", b"FHIB", b"BTHD", b"BTLF", b"BTIN"),
    *(b"FAHD", b"FADB", b"EAHD", b"EAIB", b"EADB", b"EASB"),
)
_STRUCTURE = re.compile(b"|".join(_SIGNATURES))
_STRUCTURE_BYTES = 240
_HEAD_BYTES = 1000
"""The first structures of a file, of which headers of version 1 have no signature."""


@cache
def sample(name: str, libver: str) -> bytes:
    def write(file: h5py.File) -> None:
        file.create_dataset("a/w", data=WEIGHT, **SETTINGS[name])
        file.create_dataset("b/w", data=WEIGHT[::-1], **SETTINGS[name])
        file["c"] = np.arange(50)

    return hdf5_file(write, libver=libver)


def changed(data: bytes, draw: random.Random, n_times: int) -> Iterator[bytes]:
    """Change numbers in the structures of a file: other bytes, other sizes, and addresses of other structures."""
    starts = [found.start() for found in _STRUCTURE.finditer(data)]
    for _ in range(n_times):
        out = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            begin = draw.choice((draw.choice(starts), draw.randrange(_HEAD_BYTES)))
            at = min(begin + draw.randrange(_STRUCTURE_BYTES), len(data) - 8)
            match draw.randrange(5):
                case 0:
                    out[at] ^= 1 << draw.randrange(8)
                case 1:
                    out[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:
                    out[at : at + 8] = struct.pack(
                        "<Q", draw.choice(starts) + draw.choice((0, 0, 0, 8, -8)) & (1 << 64) - 1
                    )
                case 3:
                    size = draw.choice((1 << 16, len(data), 1 << 24, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1))
                    out[at : at + 8] = struct.pack("<Q", size)
                case _:
                    out[at : at + 4] = struct.pack("<I", draw.choice((0, 1, 1 << 16, 1 << 30, (1 << 32) - 1)))
        yield bytes(out)


def check_listed(data: bytes) -> bool:
    """Tell whether a file is listed; else it is refused. Its structures are read a bounded number of times."""
    held = Held(data)
    try:
        listing = list_source(held)
        assert held.n_read_bytes <= (4 << 20) + 5 * len(data)
        if listing is not None:
            read_all(listing)
    except (MalformedFileError, CorruptError, NewerFormatError):
        return False
    return listing is not None


def check_listed_in_little_memory(name: str, libver: str, n_times: int) -> None:
    data = sample(name, libver)
    found = [check_listed(data)]
    tracemalloc.start()
    try:
        found += [check_listed(broken) for broken in changed(data, random.Random(f"{name} {libver}"), n_times)]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found[0]
    assert False in found
    assert found.count(True) > 1
    assert peak_bytes < 70 << 20


def check_stored(data: bytes, *, is_verified: bool = False) -> int:
    """Store a file, compare it with what comes back, and return the number of its derived rows."""
    store = Store.init_backend(MemoryBackend())
    with store.write_stream(io.BytesIO(data)) as pending:
        ref = pending.commit(RefTarget(path="w.h5"))
    fresh = Store.open_backend(store.backend)

    assert b"".join(map(bytes, fresh.iter_file(ref))) == data
    if is_verified:
        assert verify(fresh, full=True).problems == ()
    return len(fresh.manifest(ref).derived)


@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_file_with_changed_structures_is_listed_or_refused(name: str, libver: str) -> None:
    check_listed_in_little_memory(name, libver, 60)


@pytest.mark.long
@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_file_changed_in_hundreds_of_ways_is_listed_or_refused(name: str, libver: str) -> None:
    check_listed_in_little_memory(name, libver, 800)


@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "contiguous"])
def test_file_with_changed_structures_comes_back_from_a_store(name: str, libver: str) -> None:
    data = sample(name, libver)
    n_derived = [check_stored(broken) for broken in changed(data, random.Random(f"{name} {libver} stored"), 12)]

    assert check_stored(data, is_verified=True) == 2
    assert any(n_derived)


@pytest.mark.long
@pytest.mark.parametrize("libver", LIBVERS)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "contiguous"])
def test_file_changed_in_many_ways_comes_back_from_a_store(name: str, libver: str) -> None:
    for broken in changed(sample(name, libver), random.Random(f"{name} {libver} again"), 150):
        check_stored(broken, is_verified=True)


@pytest.mark.parametrize("libver", LIBVERS)
def test_file_with_changed_chunks_comes_back_from_a_store(libver: str) -> None:
    """A chunk with a changed byte is no chunk of its filters, or another one: the proof at the save tells."""
    data = sample("all filters", libver)
    draw = random.Random(libver)
    for _ in range(20):
        out = bytearray(data)
        out[draw.randrange(_HEAD_BYTES, len(data))] ^= 1 << draw.randrange(8)
        check_stored(bytes(out))
