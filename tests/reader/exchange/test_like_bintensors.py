"""Files of bintensors, read by every reader with the same result. Modelled on the library's own tests."""

from __future__ import annotations

from pathlib import Path

import bintensors
import bintensors.numpy
import bintensors.torch
import numpy as np
import pytest
import torch

from tensorcas_mlflow.errors import FormatError
from tensorcas_mlflow.reader import SafeOpen
from tests.reader.exchange.doors import DOORS, Door

TENSORS = {
    "wte": torch.randn(20, 6),
    "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    "h.0.ln_1.weight": torch.arange(6, dtype=torch.bfloat16),
    "h.0.steps": torch.arange(4),
    "scalar": torch.tensor(5.0, dtype=torch.float64),
    "ln.weight": torch.zeros(0),
    "ln.bias": torch.zeros(0, 0, 0),
}


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Door:
    return DOORS[request.param]


@pytest.mark.parametrize("metadata", [None, {"hello": "world"}])
def test_reader_of_ours_agrees_with_bintensors(door: Door, tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "model.bt"
    bintensors.torch.save_file(TENSORS, str(path), metadata=metadata)
    with SafeOpen(door(path, framework="pt")) as ours, bintensors.safe_open(str(path), "pt") as theirs:
        assert ours.keys() == sorted(theirs.keys())
        assert ours.metadata() == theirs.metadata()
        for name, expected in TENSORS.items():
            got, given = ours.get_tensor(name), theirs.get_tensor(name)
            assert (got.dtype, got.shape) == (given.dtype, given.shape) == (expected.dtype, expected.shape)
            assert torch.equal(got, expected)
        for index in (np.s_[:2], np.s_[3], np.s_[:, 1:3], np.s_[..., -1]):
            assert torch.equal(ours.get_slice("wte")[index], theirs.get_slice("wte")[index])


def test_file_of_bintensors_fills_a_module(door: Door, tmp_path: Path) -> None:
    saved, filled = torch.nn.Linear(10, 4), torch.nn.Linear(10, 4)
    bintensors.torch.save_model(saved, str(tmp_path / "model.bt"))
    door(tmp_path / "model.bt").load_into(filled)

    assert torch.equal(filled.weight, saved.weight)


def test_equal_tensors_have_one_digest_whichever_framework_saved_them(door: Door, tmp_path: Path) -> None:
    bintensors.torch.save_file({"a": torch.zeros(2, 2), "b": torch.ones(10)}, str(tmp_path / "one.bt"))
    bintensors.numpy.save_file({"b": np.ones(10, "f4"), "a": np.zeros((2, 2), "f4")}, str(tmp_path / "two.bt"))
    bintensors.numpy.save_file({"b": np.ones(10, "f4"), "a": np.ones((2, 2), "f4")}, str(tmp_path / "three.bt"))
    digests = [door(tmp_path / f"{name}.bt").tensors_digest() for name in ("one", "two", "three")]

    assert digests[0] == digests[1] != digests[2]


def entry(name: str, start: int) -> bytes:
    """Describe a tensor of F32 (2, 2) in a header."""
    return bytes([len(name)]) + name.encode() + bytes([11, 2, 2, 2, start, start + 16])


def file_of(count: bytes, *entries: bytes, n_bytes: int = 32) -> bytes:
    header = b"\0" + count + b"".join(entries)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(n_bytes)


TWO = (entry("w0", 0), entry("w1", 16))
SOUND = file_of(b"\2", *TWO)
UNSOUND = {
    "more tensors counted than there are": file_of(b"\xfb\xd0\x07", *TWO),
    "fewer tensors counted than there are": file_of(b"\1", *TWO),
    "two tensors of the same bytes": file_of(b"\2", TWO[0], entry("w1", 0), n_bytes=16),
    "a header longer than the file": (1000).to_bytes(8, "little") + SOUND[8:],
    "bytes behind the tensors": SOUND + bytes(16),
    "an end within the tensors": SOUND[:-1],
}


@pytest.mark.parametrize("data", UNSOUND.values(), ids=UNSOUND)
@pytest.mark.parametrize("door", ["where it lies", "stored as a file"])
def test_files_that_bintensors_refuses_are_refused(tmp_path: Path, door: str, data: bytes) -> None:
    (tmp_path / "sound.bt").write_bytes(SOUND)
    (tmp_path / "unsound.bt").write_bytes(data)

    assert list(DOORS[door](tmp_path / "sound.bt")) == sorted(bintensors.numpy.load(SOUND)) == ["w0", "w1"]
    with pytest.raises(bintensors.BintensorError):
        bintensors.numpy.load(data)
    with pytest.raises(FormatError):
        DOORS[door](tmp_path / "unsound.bt")
