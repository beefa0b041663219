"""Files of foreign formats: what a store that has taken one apart gives is what the file itself gives."""

from __future__ import annotations

import random
from collections import ChainMap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.backends import MemoryBackend, ReadCounter
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader import CheckpointReader, diff, open_manifest, open_path, open_ref
from tensorcas_mlflow.reader import _contents as contents_module
from tensorcas_mlflow.store import Store
from tests.file_formats.samples import files, npz, torch_file
from tests.reader.checkpoints import opened, same, save
from tests.reader.test_slices import some_index

BASE = torch.arange(300 * 70, dtype=torch.float32).reshape(300, 70)
DRAW = np.random.default_rng(0)
NOISE = DRAW.normal(size=(500, 90))
FILES = ChainMap(
    {
        "views.pt": torch_file(
            {"a": BASE, "tied": BASE, "t": BASE.t(), "rows": BASE[7:90], "first": BASE[:90]}
            | {"part": BASE[7:90, 3:9], "wide": BASE[:1].expand(50, 70)}
        ),
        "views-legacy.pt": torch_file({"a": BASE, "t": BASE.t()}, _use_new_zipfile_serialization=False),
        "all.npz": npz(
            {"x": NOISE, "f": np.asfortranarray(NOISE), "be": NOISE.astype(">f4"), "s": np.array(["a", "bcd"])}
        ),
        "deflated-all.npz": npz({"x": NOISE, "f": np.asfortranarray(NOISE)}, compressed=True),
    },
    files(),
)


def stored(path: Path, store: Store) -> CheckpointReader:
    with store.write_file(path) as pending:
        return open_ref(store, pending.commit(RefTarget(path=path.name)))


def some_store(chunk_bytes: int) -> Store:
    return Store.init_backend(MemoryBackend(is_remote=chunk_bytes == 4096), chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 18])
@pytest.mark.parametrize("name", FILES)
def test_a_stored_file_gives_what_the_file_gives(
    name: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_module, "SPARSE_BYTES", 2000)
    monkeypatch.setattr(contents_module, "BATCH_BYTES", 1 << 18)
    path = tmp_path / name
    path.write_bytes(FILES[name])
    file, reader = open_path(path), stored(path, some_store(chunk_bytes))
    whole = file.full()
    rng = random.Random(name)

    assert same(reader.full(), whole)
    assert file.tensors_digest() == reader.tensors_digest()
    # Of a file of our own that a store has as an artifact the skeleton is what any other bytes of a file are.
    assert (file.digest() == reader.digest()) == (name != "checkpoint.tensors")
    assert diff(file, reader).equal == tuple(whole)
    for tensor, array in whole.items():
        for _ in range(5):
            index = some_index(rng, array.shape)
            try:
                expected = np.array(array[index], array.dtype)
            except IndexError:
                continue
            for each in (file, reader):
                found = each.get_slice(tensor)[index]
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
                assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["all.npz", "deflated-all.npz", "views.pt"])
def test_pieces_of_a_foreign_file_are_those_of_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_module, "BATCH_BYTES", 10_000)
    (tmp_path / name).write_bytes(FILES[name])
    file = open_path(tmp_path / name)
    checkpoint = opened(some_store(4096), file.full())

    of_file = [(tensor, bytes(data)) for tensor, data in file.stream(list(file))]

    assert of_file == [(tensor, bytes(data)) for tensor, data in checkpoint.stream(list(file))]


def test_reader_inflates_each_compressed_member_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_module, "BATCH_BYTES", 10_000)
    (tmp_path / "a.npz").write_bytes(FILES["deflated-all.npz"])
    file = open_path(tmp_path / "a.npz")
    before = file.stats.read_bytes

    for _ in file.stream(["x"]):
        pass

    assert file.stats.read_bytes - before < 1.1 * NOISE.nbytes


def test_bytes_that_do_not_have_the_checksum_of_their_file_are_never_given_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_module, "BATCH_BYTES", 10_000)
    data = bytearray(npz({"w": NOISE}))
    data[5000] ^= 1
    path = tmp_path / "a.npz"
    path.write_bytes(data)

    for reader in (open_path(path), stored(path, some_store(4096)), stored(path, some_store(1 << 18))):
        for read in (
            lambda r: r.tensor("w"),
            lambda r: list(r.stream(["w"])),
            lambda r: r._contents.arrays(np.array([0]), {0: np.empty_like(NOISE)}),
        ):
            with pytest.raises(CorruptError, match="CRC-32"):
                read(reader)


def test_a_skeleton_is_no_tensor_whatever_a_manifest_says_of_it() -> None:
    store = some_store(4096)
    honest = store.manifest(save(store, {"w": np.ones(3)})).columns.row(0)
    rows = [replace(honest, spec=replace(honest.spec, name=name)) for name in (SKELETON, "w")]
    forged = Manifest(kind="checkpoint", chunk_bytes=4096, store_id=store.id, flavor=None, rows=rows)

    reader = open_manifest(store, forged, ReadCounter(), label="forged")

    assert list(reader) == ["w"]
    assert SKELETON not in reader


@pytest.mark.parametrize("name", ["plain.safetensors", "one.npy", "stored.npz"])
def test_writing_into_a_tensor_does_not_change_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    reader = open_path(tmp_path / name)
    for array in reader.full().values():
        array[...] = 0

    assert (tmp_path / name).read_bytes() == FILES[name]
