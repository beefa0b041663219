"""HDF5 files whose library dies, lies or is not there: read or refused by the lister, and stored bit for bit."""

from __future__ import annotations

import io
import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptError, MalformedFileError
from tensorcas_mlflow.file_formats import Tape, Tensor, _hdf5_file, list_source
from tensorcas_mlflow.file_formats._source import spool
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tests.file_formats.hdf5_samples import hdf5_file
from tests.file_formats.parts import joined, take_apart, tensors
from tests.file_formats.test_read_fuzz import Held, read_all

MODULE = "tensorcas_mlflow.file_formats._hdf5_file"
SIDES = (30, 40)
WEIGHT = (np.random.default_rng(0).standard_normal((210, 160)) * 0.02).astype(np.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "pieces": {"chunks": SIDES},
    "growing": {"chunks": SIDES, "maxshape": (None, 160)},
    "growing in two": {"chunks": SIDES, "maxshape": (None, None)},
    "gzip": {"chunks": SIDES, "compression": "gzip"},
    "all filters": {"chunks": SIDES, "compression": "gzip", "shuffle": True, "fletcher32": True},
    "single": {"chunks": WEIGHT.shape, "compression": "gzip"},
}
_HEAD_BYTES = 1000
_NUMBERS = (-1, 0, 1, 7, 1 << 16, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1)


@cache
def sample(name: str, libver: str = "latest") -> bytes:
    def write(file: h5py.File) -> None:
        file.create_dataset("a/w", data=WEIGHT, **SETTINGS[name])
        file.create_dataset("b/w", data=WEIGHT[::-1], **SETTINGS[name])
        file["c"] = np.arange(50)

    return hdf5_file(write, libver=libver)


def check_listed(data: bytes) -> bool:
    """Tell whether a file is listed; else it is refused. Its structures are read a bounded number of times."""
    held = Held(data)
    try:
        listing = list_source(held)
        assert held.n_read_bytes <= (4 << 20) + 5 * len(data)
        if listing is not None:
            read_all(listing)
    except (MalformedFileError, CorruptError):
        return False
    return listing is not None


def check_stored(data: bytes) -> int:
    """Store a file, compare it with what comes back, and return the number of its derived rows."""
    store = Store.init_backend(MemoryBackend())
    with store.write_stream(io.BytesIO(data)) as pending:
        ref = pending.commit(RefTarget(path="w.h5"))
    fresh = Store.open_backend(store.backend)

    assert b"".join(map(bytes, fresh.iter_file(ref))) == data
    assert verify(fresh, full=True).problems == ()
    return len(fresh.manifest(ref).derived)


@pytest.mark.long
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("name", SETTINGS)
def test_file_with_a_changed_byte_comes_back_from_a_store(name: str, libver: str) -> None:
    """A chunk with a changed byte is no chunk of its filters, or another one: the proof at the save tells."""
    data, draw = sample(name, libver), random.Random(f"{name} {libver}")
    n_wanted = 2 if name != "contiguous" else 0

    assert check_stored(data) == n_wanted
    for begin in (0, 0, 0, _HEAD_BYTES, _HEAD_BYTES, _HEAD_BYTES):
        out = bytearray(data)
        out[draw.randrange(begin, len(data) if begin else _HEAD_BYTES)] ^= 1 << draw.randrange(8)
        check_stored(bytes(out))


# --- whatever the library says


def lies(said: Any, draw: random.Random) -> Any:
    """Return an answer with some values changed or dropped."""
    if isinstance(said, dict):
        return {key: lies(each, draw) for key, each in said.items() if draw.random() > 0.003}
    if isinstance(said, list):
        return [lies(each, draw) for each in said if draw.random() > 0.003]
    if draw.random() > 0.02:
        return said
    return draw.choice((*_NUMBERS, "", "x", None, [], [[[1]]], "<f8", "|V0", said))


ANSWERS = [pytest.param(name, 50, id=name) for name in SETTINGS]
ANSWERS += [pytest.param(name, 150, id=f"{name}, more often", marks=pytest.mark.long) for name in SETTINGS]


@pytest.mark.parametrize(("name", "n_answers"), ANSWERS)
def test_file_comes_back_whatever_its_library_says(name: str, n_answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, draw = sample(name), random.Random(name)
    said, numbers = _hdf5_file._ask(Held(data))
    outcomes = set()
    for _ in range(n_answers):
        table = numbers.copy()
        for _ in range(draw.randrange(3) if len(table) else 0):
            table[draw.randrange(len(table))] = draw.choice((*_NUMBERS, len(data), int(draw.choice(table))))
        answer = lies(json.loads(json.dumps(said)), draw), table
        monkeypatch.setattr(f"{MODULE}._ask", lambda source, answer=answer: answer)
        parts = take_apart(data)
        outcomes.add((check_listed(data), len(parts) > 1))

        assert joined(parts) == data
    assert {(True, True), (False, False)} <= outcomes


CONNECT = """
import os, socket, struct
[connection] = socket.recv_fds(socket.socket(fileno=0), 1, 1)[1]
link = socket.socket(fileno=connection).makefile("rwb")
link.read(8)
def say(at, n_bytes, data=b""):
    link.write(struct.pack("<QQ", at, n_bytes) + data)
    link.flush()
"""
PROGRAMS = {
    "crashes": "os.abort()",
    "reads forever": "while True: say(0, 512); link.read(512)",
    "reads elsewhere": "say(1 << 62, 512); link.read(512)",
    "says too much": "say((1 << 64) - 1, 1 << 40)",
    "says nonsense": "for _ in '12': say((1 << 64) - 1, 7, b'[[[[[[[')",
    "ends amid an answer": "say((1 << 64) - 1, 7, b'[[[')",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_library_that_fails_costs_one_file_its_rows(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sample("contiguous")
    path = tmp_path / "program.py"
    path.write_text(CONNECT + PROGRAMS[program])
    with monkeypatch.context() as patch:
        patch.setattr(f"{MODULE}._PROGRAM", path)
        patch.setattr(f"{MODULE}._server", None)
        parts = take_apart(data)

        assert joined(parts) == data
        assert not any(isinstance(part, Tensor) for part, _ in parts)
        assert not check_listed(data)
    assert {"a/w", "b/w"} <= tensors(data).keys()


@pytest.mark.long
def test_the_program_that_reads_files_is_started_again_if_it_has_ended() -> None:
    assert check_listed(sample("contiguous"))
    assert _hdf5_file._server is not None
    _hdf5_file._server[0].kill()
    _hdf5_file._server[0].wait()

    assert check_listed(sample("contiguous"))


def test_without_h5py_a_file_is_cut_by_content_and_its_listing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._server", None)
    monkeypatch.setattr(f"{MODULE}.find_spec", lambda name: None)

    assert check_stored(sample("gzip")) == 0
    with pytest.raises(MalformedFileError, match=r"tensorcas-mlflow\[keras\]"):
        list_source(Held(sample("gzip")))


def test_a_full_disk_of_temporary_files_costs_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    class Full(io.FileIO):
        def write(self, block: Any, /) -> int:
            if written:
                raise OSError(28, "No space left on device")
            written.append(super().write(memoryview(block)[:5000]))
            return written[0]

    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Full(tmp_path / "copy", "w+"))

    assert check_stored(sample("gzip")) == 0
    assert written == [5000]


def test_a_process_that_is_killed_while_it_copies_a_file_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: list[list[str]] = []

    class Looking(io.BytesIO):
        def readinto(self, buffer: Any, /) -> int:
            names.append(os.listdir(tmp_path))
            return super().readinto(buffer[: 16 << 10])

    data = sample("contiguous")
    copy = spool(Tape(Looking(data)))

    assert copy.size == len(data)
    assert bytes(copy.read(0, len(data))) == data
    assert len(names) > 3
    assert not any(names)


def test_a_machine_without_a_folder_of_temporary_files_costs_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))

    assert check_stored(sample("gzip")) == 0
