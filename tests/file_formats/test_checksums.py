"""Files with checksums: what the library of a format refuses as damaged is refused, and not read as other numbers."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.numpy
import scipy.io
import skops.io

from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.file_formats import open_listing
from tests.file_formats.hdf5_samples import hdf5_file
from tests.file_formats.samples import Array, mat_file, npz, zip_of

ARRAY = np.arange(400, dtype=np.float64).reshape(20, 20)
PADDED = np.zeros(60, np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f8"], "offsets": [0, 8], "itemsize": 16}))
PADDED["a"] = np.arange(60)

Sample = tuple[bytes, Callable[[bytes], Mapping[str, Array]]]


def mat_stored() -> bytes:
    """Return a MAT-file whose zlib streams are not compressed: any change of their bytes inflates to other numbers."""
    data = mat_file({"w": np.arange(3000.0)}, do_compression=True)
    return data[:128] + mat_element(zlib.decompress(data[136:]), level=0)


def mat_element(content: bytes, level: int = 6) -> bytes:
    stream = zlib.compress(content, level)
    return struct.pack("<II", 15, len(stream)) + stream


def by_scipy(data: bytes) -> Mapping[str, Array]:
    return {name: array for name, array in scipy.io.loadmat(io.BytesIO(data)).items() if name[:2] != "__"}


def by_numpy(data: bytes) -> Mapping[str, Array]:
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    fields = {f"{name}.{part}": array[part] for name, array in arrays.items() for part in array.dtype.names or ()}
    return {name: array for name, array in arrays.items() if array.dtype.names is None} | fields


def by_zipfile(data: bytes) -> Mapping[str, Array]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        arrays = safetensors.numpy.load(file.read("m.safetensors"))
    return {f"m.safetensors/{name}": array for name, array in arrays.items()}


def by_h5py(data: bytes) -> Mapping[str, Array]:
    with h5py.File(io.BytesIO(data)) as file:
        return {"w": file["w"][()]}


def h5(**settings: object) -> bytes:
    return hdf5_file(lambda file: file.create_dataset("w", data=ARRAY, chunks=(5, 20), **settings))


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "mat": lambda: (mat_file({"w": ARRAY, "v": ARRAY[:1]}, do_compression=True), by_scipy),
    "mat, stored": lambda: (mat_stored(), by_scipy),
    "npz": lambda: (npz({"w": ARRAY}), by_numpy),
    "npz, Fortran order": lambda: (npz({"w": np.asfortranarray(ARRAY)}), by_numpy),
    "npz, padded records": lambda: (npz({"w": PADDED}), by_numpy),
    "npz, deflated": lambda: (npz({"w": ARRAY}, compressed=True), by_numpy),
    "npz, deflated padded records": lambda: (npz({"w": PADDED}, compressed=True), by_numpy),
    "zip": lambda: (zip_of({"m.safetensors": safetensors.numpy.save({"w": ARRAY})}), by_zipfile),
    "skops": lambda: (skops.io.dumps({"w": ARRAY}), skops.io.loads),
    "hdf5, Fletcher-32": lambda: (h5(fletcher32=True), by_h5py),
    "hdf5, gzip": lambda: (h5(compression="gzip"), by_h5py),
    "hdf5, gzip, Fletcher-32": lambda: (h5(compression="gzip", fletcher32=True), by_h5py),
}


def ours(data: bytes, path: Path) -> Mapping[str, Array]:
    path.write_bytes(data)
    listing = open_listing(path)
    return {name: np.array(listing.array(name)) for name in listing.locations}


@pytest.mark.parametrize("name", SAMPLES)
def test_no_changed_byte_is_read_as_other_numbers(name: str, tmp_path: Path) -> None:
    data, read = SAMPLES[name]()
    whole = ours(data, tmp_path / "file")
    assert {key: array.tobytes() for key, array in whole.items()} == {
        key: array.tobytes() for key, array in read(data).items()
    }

    n_refused = 0
    for at in np.random.default_rng(0).integers(len(data) // 4, len(data), 60).tolist():
        changed = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        expected: Mapping[str, Array] | None = None
        with contextlib.suppress(Exception):
            expected = read(changed)
        try:
            found = ours(changed, tmp_path / "file")
        except TensorCasError:
            n_refused += 1
            continue
        # h5py stumbles over structures that are not needed here: it refuses, or gives zeros for a chunk.
        right = [each for each in (expected, whole if "hdf5" in name else None) if each is not None]
        assert right or not found, f"the library refuses a change at byte {at}"
        for key, array in found.items():
            assert any(array.tobytes() == other[key].tobytes() for other in right), (at, key)
    assert n_refused > 10


@pytest.mark.parametrize("change", ["longer", "shorter", "other checksum"])
def test_compressed_variable_of_another_length_or_checksum_is_refused(change: str, tmp_path: Path) -> None:
    data = mat_file({"w": ARRAY}, do_compression=True)
    content = zlib.decompress(data[136:])
    if change == "other checksum":
        changed = data[:-1] + bytes([data[-1] ^ 1])
    else:
        changed = data[:128] + mat_element(content + bytes(8) if change == "longer" else content[:-8])

    with pytest.raises(Exception, match=r".*"):
        by_scipy(changed)
    with pytest.raises(TensorCasError, match=r"'w'|incorrect data check"):
        ours(changed, tmp_path / "file.mat")


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 5), (7, 3)])
@pytest.mark.parametrize("dtype", ["i1", "u2", "f4", "f8"])
def test_compressed_variable_of_any_padding_is_read(shape: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)

    found = ours(mat_file({"w": array, "v": array.T}, do_compression=True), tmp_path / "file.mat")
    assert np.array_equal(found["w"], array)
    assert np.array_equal(found["v"], array.T)


def test_stream_of_a_member_with_checksum_is_checked_when_it_is_read_in_pieces(tmp_path: Path) -> None:
    data = zip_of({"m.safetensors": safetensors.numpy.save({"w": ARRAY})})
    at = data.index(ARRAY[3].tobytes())
    (tmp_path / "file.zip").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    listing = open_listing(tmp_path / "file.zip")

    for read in (partial(listing.array, "m.safetensors/w"), lambda: list(listing.stream(["m.safetensors/w"]))):
        with pytest.raises(TensorCasError, match="CRC-32"):
            read()
