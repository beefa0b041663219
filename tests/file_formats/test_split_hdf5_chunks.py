"""Chunks of HDF5 files and compressed variables of MAT-files, taken apart for the store."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from scipy.io import savemat

from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.file_formats import DerivedBytes, Learned, Tape, Tensor, open_listing, split
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.hdf5_samples import hdf5_file

W = (np.random.default_rng(0).standard_normal((403, 301)) * 0.02).astype(np.float32)
GZIP = {"compression": "gzip", "compression_opts": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "pieces": {"chunks": (64, 50)},
    "growing": {"chunks": (64, 50), "maxshape": (None, None)},
    "gzip": {**GZIP, "chunks": (64, 50)},
    "gzip, growing": {**GZIP, "chunks": (64, 50), "maxshape": (None, 301)},
    "gzip, growing in two": {**GZIP, "chunks": (64, 50), "maxshape": (None, None)},
    "gzip, rows": {**GZIP, "chunks": (31, 301)},
    "gzip, single": {**GZIP, "chunks": (403, 301)},
    "gzip, many": {**GZIP, "chunks": (16, 20)},
    "shuffle": {"shuffle": True, "chunks": (64, 50)},
    "fletcher32": {"fletcher32": True, "chunks": (64, 50)},
    "all": {**GZIP, "shuffle": True, "fletcher32": True, "chunks": (64, 50)},
}


def derived(data: bytes) -> tuple[list[DerivedBytes], dict[str, tuple[Tensor, bytes]]]:
    """Split a file, and check that its parts are the whole file.

    Returns:
        The derived parts, and the tensors in their contents by name, each with its bytes.
    """
    tape, found, tensors, whole = Tape(io.BytesIO(data)), [], {}, b""
    for part in split(tape):
        if isinstance(part, Learned):
            for name, tensor in part.tensors.items():
                if name in tensors:
                    tensors[tensor.name] = tensor, tensors.pop(name)[1]
            continue
        if isinstance(part, DerivedBytes):
            found.append(part)
            for inner in part.parts:
                assert not isinstance(inner, Learned | DerivedBytes)
                taken = bytes(part.content.take(inner.n_bytes))
                if isinstance(inner, Tensor):
                    tensors[inner.name] = inner, taken
            assert part.content.is_at_end()
        whole += bytes(tape.take(part.n_bytes))
    assert whole == data
    return found, tensors


def two_data_sets(settings: dict[str, Any], libver: str) -> bytes:
    def write(file: h5py.File) -> None:
        file.create_dataset("a/w", data=W, **settings)
        file.create_dataset("b/w", data=W + 1, **settings)

    return hdf5_file(write, libver=libver)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_chunks_are_derived_of_the_whole_tensor(name: str, libver: str) -> None:
    parts, tensors = derived(two_data_sets(SETTINGS[name], libver))

    assert [part.function for part in parts] == ["hdf5_chunks"] * 2
    assert {key: (tensor.dtype, tensor.shape) for key, (tensor, _) in tensors.items()} == {
        "a/w": ("float32", W.shape),
        "b/w": ("float32", W.shape),
    }
    assert tensors["a/w"][1] == W.tobytes()
    assert tensors["b/w"][1] == (W + 1).tobytes()


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_stored_file_with_chunks_comes_back_bit_for_bit(name: str, libver: str, tmp_path: Path) -> None:
    data = two_data_sets(SETTINGS[name], libver)
    store = Store.init(tmp_path / "store", chunk_bytes=1 << 16)
    with store.write_stream(io.BytesIO(data)) as pending:
        ref = pending.commit(RefTarget(path="w.h5"))

    assert len(store.manifest(ref).derived) == 2
    assert b"".join(map(bytes, Store.open(tmp_path / "store").iter_file(ref))) == data


def test_a_data_set_longer_than_a_stretch_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.file_formats._hdf5_chunks.MOST_RAW_BYTES", 300_000)
    parts, tensors = derived(two_data_sets(SETTINGS["gzip"], "earliest"))
    pieces = sorted((int(name[4:-1]), data) for name, (_, data) in tensors.items() if name[0] == "a")
    joined = b"".join(data for _, data in pieces)

    assert len(parts) == 4
    assert W.tobytes().startswith(joined)
    assert len(joined) > 0.9 * W.nbytes  # the last rows are less than a stretch


def test_chunks_filled_up_with_other_values_stay_as_they_are() -> None:
    data = hdf5_file(lambda file: file.create_dataset("w", data=W, chunks=(64, 50), fillvalue=7.0))
    parts, _ = derived(data)

    assert parts == []


def test_chunks_of_another_encoder_stay_as_they_are() -> None:
    def write(file: h5py.File) -> None:
        data_set = file.create_dataset("w", W.shape, "f4", chunks=W.shape, **GZIP)
        data_set.id.write_direct_chunk((0, 0), zlib.compress(W.tobytes(), 9))

    parts, _ = derived(hdf5_file(write))

    assert parts == []


def test_a_header_between_chunks_is_found() -> None:
    def write(file: h5py.File) -> None:
        first = file.create_dataset("first", W.shape, "f4", chunks=(64, 50), **GZIP)
        first[:200] = W[:200]
        file["second"] = W
        first[200:] = W[200:]

    data = hdf5_file(write)
    derived(data)

    assert data.count(W.tobytes()) == 1


# --- the lister


def test_a_damaged_chunk_is_an_error(tmp_path: Path) -> None:
    data = bytearray(hdf5_file(lambda file: file.create_dataset("w", data=W, chunks=(64, 50), fletcher32=True)))
    data[len(data) // 2] ^= 1
    path = tmp_path / "w.h5"
    path.write_bytes(data)

    with pytest.raises(CorruptError, match="does not match its checksum"):
        open_listing(path).array("w")


# --- MAT-files


def mat(**arrays: Any) -> bytes:
    out = io.BytesIO()
    savemat(out, arrays, do_compression=True)
    return out.getvalue()


def test_compressed_variables_of_a_mat_file_are_tensors() -> None:
    parts, tensors = derived(mat(w=W, v=W[:200].astype(np.float64)))

    assert [part.function for part in parts] == ["deflate", "deflate"]
    assert tensors["w"][0].shape == W.shape[::-1]
    assert tensors["w"][1] == W.tobytes("F")
    assert tensors["v"][1] == W[:200].astype(np.float64).tobytes("F")


def test_a_compressed_element_with_malformed_content_is_plain_bytes() -> None:
    content = struct.pack("<II", 14, 400_000) + W.tobytes()[:400_000]
    stream = zlib.compress(content)
    data = mat(v=1)[:128] + struct.pack("<II", 15, len(stream)) + stream
    parts, tensors = derived(data)

    assert len(parts) == 1
    assert tensors == {}
