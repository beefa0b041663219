"""The same weights in HDF5, in Keras's files, and in archives around other formats: their rows, and their price."""

from __future__ import annotations

import io
import os
import tarfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.numpy
import torch

from tensorcas_mlflow.errors import CorruptError, MalformedFileError
from tensorcas_mlflow.file_formats import Listing, LocalFile, PlainBytes, Skeleton, Tensor, list_source, open_listing
from tensorcas_mlflow.file_formats._source import MemorySource
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.hdf5_samples import WEIGHT, hdf5_file, hdf5_of
from tests.file_formats.parts import joined, take_apart, tensors
from tests.file_formats.samples import tar_of, torch_file, zip_of
from tests.file_formats.test_read_fuzz import Held

KERAS = Path(__file__).parent / "keras"
DRAW = np.random.default_rng(0)
WEIGHTS = {f"layers/{n}/{name}": DRAW.normal(size=(500, 700)).astype(np.float32) for n in range(3) for name in "ab"}
N_BYTES = sum(array.nbytes for array in WEIGHTS.values())
MAX_SHARE = 0.003
"""Largest part of the weights that a store may take again for one more container of them."""


def rows_of(file: h5py.File) -> None:
    for name, array in WEIGHTS.items():
        file.create_dataset(name, data=array, chunks=(33, 700))


def plain() -> bytes:
    return bytes(safetensors.numpy.save(WEIGHTS))


def weights_h5(**settings: Any) -> bytes:
    return hdf5_file(hdf5_of(WEIGHTS), **settings)


def torch_weights() -> bytes:
    return torch_file({name: torch.from_numpy(array.copy()) for name, array in WEIGHTS.items()})


CONTAINERS: Mapping[str, Callable[[], bytes]] = {
    "HDF5": weights_h5,
    "HDF5, latest": lambda: weights_h5(libver="latest"),
    "HDF5, ordered": lambda: weights_h5(track_order=True),
    "HDF5, user block": lambda: weights_h5(userblock_size=1024),
    "HDF5, rows in chunks": lambda: hdf5_file(rows_of),
    "Keras": lambda: zip_of({"config.json": b"{}", "model.weights.h5": weights_h5()}),
    "zip of safetensors": lambda: zip_of({"model.safetensors": plain()}),
    "TorchServe": lambda: zip_of({"model.pt": torch_weights(), "MAR-INF/MANIFEST.json": b"{}"}),
    "NeMo": lambda: tar_of({"./model_config.yaml": b"a: 1", "./model_weights.ckpt": torch_weights()}),
    "tar of safetensors": lambda: tar_of({"model.safetensors": plain()}),
    "tar of safetensors, GNU": lambda: tar_of({"a/" * 90 + "model.safetensors": plain()}, tarfile.GNU_FORMAT),
    "tar of HDF5": lambda: tar_of({"model.weights.h5": weights_h5()}),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_weights_in_another_container_take_no_more_room(container: str, tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    data = CONTAINERS[container]()
    n_stored = {}
    for name, content in (("first.safetensors", plain()), ("second", data)):
        (tmp_path / name).write_bytes(content)
        with store.write_file(tmp_path / name) as pending:
            pending.commit(RefTarget(path=name))
            n_stored[name] = pending.n_stored_bytes

    assert n_stored["first.safetensors"] > 0.5 * N_BYTES
    assert n_stored["second"] <= MAX_SHARE * N_BYTES
    assert joined(take_apart(data)) == data


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras", "legacy.h5"])
def test_each_weight_that_keras_saves_is_a_row_and_is_listed(name: str) -> None:
    data = (KERAS / name).read_bytes()
    rows = {taken for _, taken in tensors(data).values()}
    listing = open_listing(KERAS / name)
    listed = {listing.array(each).tobytes() for each in listing.locations}

    with np.load(KERAS / "weights.npz") as weights:
        saved = {array.tobytes() for array in weights.values()}
    assert saved <= listed
    assert {each for each in saved if len(each) >= 64} <= rows
    assert joined(take_apart(data)) == data


def test_a_weight_of_keras_has_its_path_type_and_shape() -> None:
    found = tensors((KERAS / "model.weights.h5").read_bytes())

    assert (found["layers/dense/vars/0"][0].dtype, found["layers/dense/vars/0"][0].shape) == ("float32", (6, 10))
    assert (found["layers/dense_1/vars/0"][0].dtype, found["layers/dense_1/vars/0"][0].shape) == ("bfloat16", (10, 10))


def test_chunks_of_rows_are_the_tensor_without_the_rows_behind_it() -> None:
    (row,) = tensors(hdf5_file(lambda file: file.create_dataset("w", data=WEIGHT, chunks=(16, 90)))).values()

    assert (row[0].name, row[0].dtype, row[0].shape) == ("w", "float32", WEIGHT.shape)
    assert row[1] == WEIGHT.tobytes()


def test_chunks_that_no_function_makes_are_stored_in_pieces_that_end_where_they_do() -> None:
    array = DRAW.normal(size=(500, 512)).astype(np.float32)
    settings: Any = {"chunks": (128, 256), "fillvalue": 7.0}
    parts = take_apart(hdf5_file(lambda file: file.create_dataset("w", data=array, **settings)))
    (row, taken), *_ = ((part, taken) for part, taken in parts if isinstance(part, Tensor))

    assert row.cuts is not None
    assert list(row.cuts) == [*range(128 << 10, len(taken) + 1, 128 << 10)]
    assert taken[: 128 << 10] == array[:128, :256].tobytes()


def test_data_sets_far_apart_from_their_names_have_them_all() -> None:
    names = {f"group/{'x' * 40} {n}": np.full(300, n, np.float32) for n in range(400)}
    found = tensors(hdf5_file(hdf5_of(names)))

    assert {*found} == {*names}


def test_a_stored_hdf5_file_lists_its_data_sets(tmp_path: Path) -> None:
    (tmp_path / "w.keras").write_bytes((KERAS / "model.keras").read_bytes())
    store = Store.init(tmp_path / "store")
    with store.write_file(tmp_path / "w.keras") as pending:
        pending.commit(RefTarget(path="w.keras"))
    from tensorcas_mlflow.reader import open_ref

    ref = store.artifact("w.keras")
    assert ref is not None
    with open_ref(store, ref) as reader, np.load(KERAS / "weights.npz") as weights:
        assert reader.tensor("model.weights.h5/layers/dense/vars/0").tobytes() == weights["arr_0"].tobytes()


def test_a_text_in_a_tar_archive_is_cut_by_its_content_and_unknown_bytes_are_plain() -> None:
    data = tar_of({"a.txt": b"some text " * 999, "b.bin": DRAW.bytes(9000)})
    kinds = {len(taken): type(part) for part, taken in take_apart(data)}

    assert kinds[-(-9000 // 512) * 512] is PlainBytes
    assert joined(take_apart(data)) == data


def test_a_member_whose_size_is_a_lie_stays_within_the_archive() -> None:
    inner = bytearray(plain())
    inner[:8] = (len(inner) * 2).to_bytes(8, "little")
    data = zip_of({"a.safetensors": bytes(inner), "b.safetensors": plain()})

    assert joined(take_apart(data)) == data
    assert "b.safetensors/layers/0/a" in tensors(data)


def test_hdf5_chunks_of_an_unknown_filter_are_plain_bytes() -> None:
    array = np.random.default_rng(0).integers(0, 1000, size=(500, 1000)).astype(np.float32)
    data = hdf5_file(lambda file: file.create_dataset("w", data=array, chunks=array.shape, compression="lzf"))
    n_plain = sum(len(taken) for part, taken in take_apart(data) if isinstance(part, PlainBytes))

    assert n_plain > 0.6 * len(data)


@pytest.mark.long
def test_chunks_that_no_index_before_them_announces_are_plain_bytes() -> None:
    array = np.random.default_rng(0).normal(size=(4096, 1024)).astype(np.float32)

    def write(file: h5py.File) -> None:
        data_set = file.create_dataset("w", array.shape, "f4", chunks=(50, 200))
        for begin in range(0, len(array), 512):
            data_set[begin : begin + 512] = array[begin : begin + 512]

    data = hdf5_file(write)
    n_skeleton_bytes = sum(len(taken) for part, taken in take_apart(data) if isinstance(part, Skeleton))

    assert n_skeleton_bytes < 0.05 * len(data)


@pytest.mark.long
def test_a_data_set_of_many_small_chunks_is_listed() -> None:
    array = np.arange(140_000, dtype=np.uint8)
    data = hdf5_file(lambda file: file.create_dataset("w", data=array, chunks=(1,), maxshape=(None,)), libver="latest")
    listing = list_source(Held(data))

    assert listing is not None
    np.testing.assert_array_equal(listing.array("w"), array)


@pytest.mark.parametrize("shape", [(1, 40, 60_000), (2, 1_200_000)])
def test_pieces_of_a_long_row_in_chunks_read_only_the_bytes_they_need(shape: tuple[int, ...]) -> None:
    array = np.arange(2_400_000, dtype=np.float32).reshape(shape)
    sides = (*[1] * (len(shape) - 1), 6000)
    held = Held(hdf5_file(lambda file: file.create_dataset("w", data=array, chunks=sides)))
    listing = list_source(held)
    assert listing is not None
    place = listing.locations["w"]
    source, read_before = listing.sources[place.source], held.n_read_bytes
    pieces = [bytes(source.read(at, 10_000)) for at in range(0, source.size, 10_000)]

    assert b"".join(pieces) == array.tobytes()
    assert held.n_read_bytes - read_before < 4 * array.nbytes


# --- refused


def listed(data: bytes) -> Listing:
    listing = list_source(MemorySource("model.h5", data))
    assert listing is not None
    return listing


def refused(data: bytes, match: str) -> None:
    with pytest.raises(MalformedFileError, match=match):
        list_source(Held(data))


def test_data_sets_that_share_bytes_are_refused() -> None:
    data = hdf5_file(hdf5_of({"a": WEIGHT, "b": WEIGHT}))
    with h5py.File(io.BytesIO(data)) as file:
        first, second = (file[name].id.get_offset() for name in "ab")

    refused(data.replace(second.to_bytes(8, "little"), first.to_bytes(8, "little")), "share bytes")


def test_a_chunk_far_outside_of_the_file_is_refused() -> None:
    data = hdf5_file(lambda file: file.create_dataset("w", data=WEIGHT, chunks=(40, 90)), libver="earliest")
    with h5py.File(io.BytesIO(data)) as file:
        last = file["w"].id.get_chunk_info(1).byte_offset

    refused(data.replace(last.to_bytes(8, "little"), ((1 << 63) - 1).to_bytes(8, "little")), "outside of the file")


def test_an_hdf5_file_with_its_end_cut_off_is_refused() -> None:
    refused(hdf5_file(hdf5_of({"a": WEIGHT}))[:-1], "truncated file")


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("user_block", [0, 512])
def test_hdf5_file_with_bytes_behind_its_end_is_read_as_the_library_reads_it(libver: str, user_block: int) -> None:
    data = hdf5_file(hdf5_of({"a": WEIGHT}), libver=libver, userblock_size=user_block) + bytes(range(6))
    with h5py.File(io.BytesIO(data)) as file:
        expected = file["a"][()].tobytes()

    assert listed(data).array("a").tobytes() == expected == WEIGHT.tobytes()
    assert joined(take_apart(data)) == data


def test_an_hdf5_file_that_is_cut_off_while_it_is_open_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    path.write_bytes(hdf5_file(hdf5_of({f"{nth}/w": WEIGHT for nth in range(30)})))
    file = LocalFile(path)
    os.truncate(path, 8192)

    with pytest.raises(CorruptError, match="ends before"):
        list_source(file)


def test_an_hdf5_file_with_offsets_of_four_bytes_is_read() -> None:
    settings = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    settings.set_sizes(4, 4)
    made = h5py.h5f.create(b"x", h5py.h5f.ACC_TRUNC, settings, _in_memory())
    file = h5py.File(made)
    file["w"] = WEIGHT
    file.flush()
    data = made.get_file_image()
    file.close()

    assert listed(data).array("w").tobytes() == WEIGHT.tobytes()
    assert tensors(data)["w"][1] == WEIGHT.tobytes()


def _in_memory() -> Any:
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_core(backing_store=False)
    return access


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_chunks_of_every_shape_and_order_are_put_together(libver: str) -> None:
    """The library names wrong places for chunks of arrays that grow along another axis than the first one."""
    draw, arrays = np.random.default_rng(libver == "latest"), dict[str, Any]()

    def write(file: h5py.File) -> None:
        for nth in range(100):
            shape = draw.integers(1, 30, draw.integers(1, 4)).tolist()
            chunks = tuple(int(draw.integers(1, side + 1)) for side in shape)
            most = tuple([None, side, side + int(draw.integers(40))][draw.integers(3)] for side in shape)
            arrays[f"{nth}"] = array = draw.integers(0, 1 << 30, shape, np.int32)
            compression = "gzip" if nth % 3 == 0 else None
            file.create_dataset(f"{nth}", data=array, chunks=chunks, maxshape=most, compression=compression)

    listing = listed(hdf5_file(write, libver=libver))

    assert {*listing.locations} == {*arrays}
    for name, array in arrays.items():
        np.testing.assert_array_equal(listing.array(name), array)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:100] + b"x" + data[101:], "tensor"),
        (lambda data: data[: 512 + 10240], "exceeds the file"),
        (lambda data: data + bytes(512) + b"x" * 512, "bytes follow"),
        (lambda data: data + b"\0", "bytes follow"),
    ],
    ids=["checksum", "cut off", "bytes behind", "half a block"],
)
def test_a_malformed_tar_archive_is_refused_or_not_recognised(change: Callable[[bytes], bytes], match: str) -> None:
    data = change(tar_of({"m.safetensors": plain()}, tarfile.USTAR_FORMAT))
    assert joined(take_apart(data)) == data
    if match == "tensor":
        assert list_source(Held(data)) is None
    else:
        refused(data, match)


def test_archives_within_archives_end_somewhere() -> None:
    data = plain()
    for _ in range(30):
        data = tar_of({"a": data})
    listing = list_source(Held(data))

    assert listing is not None
    assert listing.left_out == {"a/a/a/a": "archives within archives"}
    assert joined(take_apart(data)) == data


@pytest.mark.long
@pytest.mark.parametrize("archive_of", [zip_of, tar_of])
def test_an_archive_within_an_archive_names_what_it_leaves_out(archive_of: Callable[..., bytes]) -> None:
    deflated = zip_of({"a.safetensors": plain()}, zipfile.ZIP_DEFLATED)
    listing = list_source(Held(archive_of({"in.zip": deflated, "in.tar": tar_of({"b": bytes(range(256)) * 9})})))

    assert listing is not None
    assert listing.left_out == {"in.zip/a.safetensors": "deflated", "in.tar/b": "of an unknown format"}


@pytest.mark.long
def test_many_members_of_one_name_are_soon_listed() -> None:
    data = tar_of({"a": bytes([1, 0, 255])})
    data = data[:1024] * 20_000 + data[1024:]
    begin = time.process_time()
    listing = list_source(Held(data))

    assert listing is not None
    assert list(listing.left_out)[::19_999] == ["a", "a (20000)"]
    assert time.process_time() - begin < 10


@pytest.mark.long
def test_a_deflated_member_of_a_zip_archive_is_left_out_by_its_name() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.safetensors", plain())
        archive.writestr("b.safetensors", plain(), zipfile.ZIP_DEFLATED)
    listing = list_source(Held(out.getvalue()))

    assert listing is not None
    assert listing.left_out == {"b.safetensors": "deflated"}
    assert [*listing.locations] == [f"a.safetensors/{name}" for name in WEIGHTS]
