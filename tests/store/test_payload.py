"""Self-contained checkpoints: written, moved, read in part, damaged."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import TensorsFile
from tensorcas_mlflow.errors import (
    BlobExistsError,
    BlobNotFoundError,
    ChunkNotFoundError,
    ConflictError,
    CorruptChunkError,
    CorruptError,
    FormatError,
    NewerFormatError,
    NotFoundError,
    TensorNotFoundError,
)
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import (
    MANIFEST_FILE,
    PAYLOAD_FILE,
    Store,
    copy_payload,
    payload_bytes,
    payload_pieces,
    read_payload,
    write_payload,
)
from tensorcas_mlflow.store._payload import _from_arrays
from tensorcas_mlflow.store._sources import TensorSource

TENSORS = {
    "a": np.arange(100_000, dtype=np.float32),
    "b": np.random.default_rng(0).normal(size=(7, 9)),
    "twin": np.arange(100_000, dtype=np.float32),
    "empty": np.zeros((0, 2)),
    "raw": np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8),
    "fortran": np.asfortranarray(np.arange(60.0).reshape(6, 10)),
    "scalar": np.array(3),
    "last": np.zeros((3, 0)),
}


def assert_are_tensors(loaded: dict[str, np.ndarray]) -> None:
    assert list(loaded) == list(TENSORS)
    for name, array in TENSORS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_a_payload_is_read_back_without_any_store_wherever_it_is(tmp_path: Path) -> None:
    write_payload(tmp_path / "here", TENSORS, flavor="pytorch", metadata={"n": 1})
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")

    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == sorted([MANIFEST_FILE, PAYLOAD_FILE])
    assert_are_tensors(read_payload(tmp_path / "there"))


def test_the_file_alone_tells_what_it_holds(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS, flavor="pytorch", metadata={"n": 1})
    file = TensorsFile((tmp_path / PAYLOAD_FILE).rename(tmp_path / "step 1.tensors"))

    assert (file.manifest.flavor, file.manifest.metadata, file.manifest.store_id) == ("pytorch", {"n": 1}, None)
    assert_are_tensors(file.read())


def test_arrays_of_a_payload_are_aligned_and_may_be_written_to(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)

    for array in read_payload(tmp_path).values():
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.size == 0 or array.ctypes.data % 64 == 0


def test_every_row_of_a_payload_begins_at_a_multiple_of_64_bytes(tmp_path: Path) -> None:
    write_payload(tmp_path, {"odd": np.zeros(7, np.uint8), "text": np.full(90, 0x41, np.uint8)})

    assert (tmp_path / PAYLOAD_FILE).read_bytes().index(b"A" * 90) % 64 == 0


def test_some_tensors_of_a_payload_are_read_by_name(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)

    assert list(read_payload(tmp_path, names=["raw", "b"])) == ["raw", "b"]
    assert read_payload(tmp_path, names=[]) == {}
    with pytest.raises(TensorNotFoundError):
        read_payload(tmp_path, names=["absent"])


def test_damage_of_one_tensor_does_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)
    damage(tmp_path / PAYLOAD_FILE, TENSORS["raw"].tobytes())

    np.testing.assert_array_equal(read_payload(tmp_path, names=["b"])["b"], TENSORS["b"])
    with pytest.raises(CorruptChunkError, match=rf"{PAYLOAD_FILE}.*of tensor 'raw'"):
        read_payload(tmp_path, names=["raw"])
    assert (read_payload(tmp_path, names=["raw"], verify=False)["raw"] != TENSORS["raw"]).sum() == 1


def damage(file: Path, wanted: bytes) -> None:
    """Flip a bit of some bytes in a file."""
    data = bytearray(file.read_bytes())
    data[data.index(wanted)] ^= 0x04
    file.write_bytes(data)


@pytest.mark.long
def test_many_small_tensors_and_long_ones_are_read_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(0, 300, 3_000), 5_000_000, *rng.integers(0, 300, 10), 2_000_001, 40_000]
    tensors = {f"t{at}": rng.integers(0, 256, size).astype(np.uint8) for at, size in enumerate(sizes)}
    write_payload(tmp_path, tensors)
    loaded = read_payload(tmp_path)
    some = read_payload(tmp_path, names=list(tensors)[::7])

    assert all(np.array_equal(loaded[name], array) for name, array in tensors.items())
    assert all(np.array_equal(some[name], tensors[name]) for name in some)


def test_a_payload_is_not_written_over_another(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)

    with pytest.raises(BlobExistsError):
        write_payload(tmp_path, {"a": np.zeros(3)})
    assert list(read_payload(tmp_path)) == list(TENSORS)


def test_folder_without_a_payload_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BlobNotFoundError, match=MANIFEST_FILE):
        read_payload(tmp_path)
    write_payload(tmp_path, TENSORS)
    (tmp_path / PAYLOAD_FILE).unlink()
    with pytest.raises(BlobNotFoundError, match=PAYLOAD_FILE):
        read_payload(tmp_path)


def test_a_payload_beside_another_manifest_is_refused(tmp_path: Path) -> None:
    write_payload(tmp_path / "one", TENSORS)
    write_payload(tmp_path / "two", {"a": np.zeros(100_000, np.float32)})
    shutil.copy(tmp_path / "two" / PAYLOAD_FILE, tmp_path / "one" / PAYLOAD_FILE)

    with pytest.raises(CorruptError, match=MANIFEST_FILE):
        read_payload(tmp_path / "one")


def test_payload_of_a_later_version_is_reported_as_newer(tmp_path: Path) -> None:
    write_payload(tmp_path, TENSORS)
    file = tmp_path / PAYLOAD_FILE
    data = bytearray(file.read_bytes())
    data[7] = 2
    file.write_bytes(data)

    with pytest.raises(NewerFormatError):
        TensorsFile(file)


@pytest.mark.long
def test_any_flipped_byte_of_a_payload_is_seen_or_without_effect(tmp_path: Path) -> None:
    small = {"a": np.arange(40.0), "raw": TENSORS["raw"], "zeros": np.zeros(500, np.float32)}
    write_payload(tmp_path, small)
    for file in (tmp_path / MANIFEST_FILE, tmp_path / PAYLOAD_FILE):
        whole = file.read_bytes()
        for at in range(0, len(whole), 3):
            damaged = bytearray(whole)
            damaged[at] ^= 0x04
            file.write_bytes(damaged)
            try:
                loaded = read_payload(tmp_path)
            except (FormatError, NotFoundError):
                continue
            assert all(loaded[name].tobytes() == array.tobytes() for name, array in small.items())
        file.write_bytes(whole)


@pytest.mark.long
def test_a_payload_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    write_payload(tmp_path, {"a": np.arange(40.0), "b": np.arange(3)})
    file = tmp_path / PAYLOAD_FILE
    whole = file.read_bytes()
    for n_bytes in range(len(whole)):
        file.write_bytes(whole[:n_bytes])
        with pytest.raises(FormatError, match=PAYLOAD_FILE):
            read_payload(tmp_path)
    file.write_bytes(whole + b"\0")
    with pytest.raises(FormatError, match=PAYLOAD_FILE):
        read_payload(tmp_path)


def test_arrays_that_change_while_they_are_written_are_refused() -> None:
    array = np.zeros(1_000)
    source = TensorSource({"a": array}, {}, 4096)
    manifest = Manifest(kind="checkpoint", chunk_bytes=4096, store_id=None, flavor=None, rows=source.rows)
    fill = _from_arrays(source, manifest)
    array[999] = 1

    fill(0, [memoryview(bytearray(4096))])
    with pytest.raises(ConflictError):
        fill(1, [memoryview(bytearray(8000 - 4096))])


def test_a_checkpoint_streams_out_of_its_store_in_the_size_that_was_said(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=4096)
    with store.write_checkpoint(TENSORS, flavor="pytorch", cuts={"a": [10, 99_000, 100_000]}) as save:
        manifest = save.manifest
        ref = save.commit(RefTarget(run_id="r", step=1))
    pieces = [bytes(piece) for piece in payload_pieces(store, manifest)]
    (tmp_path / "x.tensors").write_bytes(b"".join(pieces))
    file = TensorsFile(tmp_path / "x.tensors")

    assert sum(map(len, pieces)) == payload_bytes(store, ref)
    assert file.manifest.stream == manifest.stream
    assert file.manifest.store_id == store.id
    assert_are_tensors(file.read())


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"scalar": np.array(1.5)},
        {"empty": np.zeros((3, 0, 5))},
        {"a": np.zeros(3, np.int8), "last": np.zeros((0, 2))},
        {"__skeleton__": np.zeros(77, np.uint8), "s": np.array(["text", "more"]), "b": np.zeros((2, 3, 5, 7), ">f4")},
    ],
)
def test_a_size_is_known_before_the_file_is(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    store = Store.init(tmp_path / "root")
    with store.write_checkpoint(tensors) as save:
        ref = save.commit(RefTarget(run_id="r", step=1))

    assert payload_bytes(store, ref) == sum(len(piece) for piece in payload_pieces(store, store.manifest(ref)))


def test_a_large_checkpoint_streams_in_bounded_memory(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root")
    tensors = {name: np.zeros(12 << 20, np.float32) for name in ("a", "b")}
    with store.write_checkpoint(tensors) as save:
        del tensors
        tracemalloc.start()
        n_bytes = sum(len(piece) for piece in payload_pieces(store, save.manifest))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert n_bytes > 96 << 20
    assert peak < 48 << 20


@pytest.mark.usefixtures("store_of_files")
def test_a_chunk_that_is_gone_from_the_store_ends_the_stream(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root")
    with store.write_checkpoint(TENSORS) as save:
        manifest = save.manifest
    shutil.rmtree(tmp_path / "root/.tensorcas/packs")

    with pytest.raises((ChunkNotFoundError, NotFoundError)):
        list(payload_pieces(store, manifest))


def test_a_copy_of_a_payload_names_no_store(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "root")
    with store.write_checkpoint(TENSORS, flavor="pytorch") as save:
        copy_payload(tmp_path / "first", store, save.manifest)
    second = copy_payload(
        tmp_path / "second", tmp_path / "first", TensorsFile(tmp_path / "first" / PAYLOAD_FILE).manifest
    )

    assert (second.store_id, second.flavor) == (None, "pytorch")
    for folder in ("first", "second"):
        assert Manifest.from_bytes((tmp_path / folder / MANIFEST_FILE).read_bytes()).store_id is None
        assert_are_tensors(read_payload(tmp_path / folder))
