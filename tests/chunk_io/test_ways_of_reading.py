"""Tensors are the same whichever way they are read, into new memory, into memory that is there, or mapped."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.chunk_io import WAYS
from tensorcas_mlflow.errors import CorruptChunkError, NotFoundError, TensorCasError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store

CHUNK_BYTES = 64 * 1024


def noise(seed: int, *shape: int, dtype: Any = np.uint8) -> Array:
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8).view(dtype).reshape(shape)


def model() -> dict[str, Array]:
    """Raw and encoded, large and small, some twice: all that takes another path."""
    small = {f"small{n}": noise(n, n * 37 % 900) for n in range(60)}
    return {
        **small,
        "raw": noise(100, 5, 70_001),
        "smooth": np.arange(200_000, dtype=np.float32).reshape(2, -1),
        "twice": noise(100, 5, 70_001),
        "zeros": np.zeros(300_000, np.float16),
        "raw16": noise(101, 1_000, 100, dtype=np.uint16),
        "text": np.array(["a", "bc"] * 300),
        "scalar": np.array(3.5),
        "empty": np.empty((0, 3)),
        "begin": noise(0, 64),
    }


def save(store: Store, tensors: Mapping[str, Array], step: int = 1) -> Ref:
    with store.write_checkpoint(tensors) as pending:
        return pending.commit(RefTarget(run_id="run", step=step))


MODEL = model()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    save(Store.init(root, chunk_bytes=CHUNK_BYTES), MODEL)
    return root


@pytest.fixture
def store(root: Path) -> Store:
    return Store.open(root)


@pytest.fixture
def manifest(store: Store) -> Manifest:
    [ref] = store.checkpoints()
    return store.manifest(ref)


def is_right(found: Mapping[str, Array], wanted: Mapping[str, Array] = MODEL) -> bool:
    return list(found) == list(wanted) and all(
        array.dtype == wanted[name].dtype and array.shape == wanted[name].shape and np.array_equal(array, wanted[name])
        for name, array in found.items()
    )


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("way", [None, *WAYS])
def test_every_way_of_reading_gives_the_same_bytes(store: Store, manifest: Manifest, way: Any, verify: bool) -> None:
    assert is_right(store.read_tensors(manifest, verify=verify, way=way))
    assert is_right(store.read_tensors(manifest, verify=verify, way=way, copy=False))


@pytest.mark.parametrize("way", WAYS)
def test_the_environment_forces_a_way(
    store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setenv("TENSORCAS_READ", way)

    assert is_right(store.read_tensors(manifest))
    assert {pack.choice.way for pack in store.explain(manifest).packs} == {way}


def test_new_arrays_can_be_written_and_share_no_byte(store: Store, manifest: Manifest) -> None:
    found = store.read_tensors(manifest)
    for array in found.values():
        array[...] = np.zeros(array.shape, array.dtype)
        assert not array.tobytes().strip(b"\0")
        array[...] = MODEL["text"][0] if array.dtype.kind == "U" else 1

    ones = [array for array in found.values() if array.dtype.kind != "U"]
    assert all((array == 1).all() for array in ones)
    assert (found["text"] == MODEL["text"][0]).all()
    assert all(array.ctypes.data % 64 == 0 for array in found.values() if array.size)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_are_read_into_arrays_that_are_there(store: Store, manifest: Manifest, way: Any) -> None:
    outs = {name: np.full_like(array, array.flat[0]) if array.size else array for name, array in MODEL.items()}
    found = store.read_tensors(manifest, out=outs, way=way)

    assert is_right(found)
    assert all(found[name] is out for name, out in outs.items())


def test_read_fills_only_the_tensors_named_in_out(store: Store, manifest: Manifest) -> None:
    out = np.empty_like(MODEL["raw"])
    found = store.read_tensors(manifest, ["small5", "raw"], out={"raw": out}, copy=False)

    assert is_right(found, {name: MODEL[name] for name in ("small5", "raw")})
    assert found["raw"] is out


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ({"raw": np.empty((70_001, 5), np.uint8)}, "tensor 'raw' is uint8 .* cannot be read into uint8"),
        ({"raw": np.empty((5, 70_001), np.int8)}, "cannot be read into int8"),
        ({"raw": np.empty((70_001, 5), np.uint8).T}, "read-only or not in C order"),
        ({"raw": np.broadcast_to(np.uint8(0), (5, 70_001))}, "read-only or not in C order"),
        ({"other": np.empty(3)}, "'other'"),
    ],
)
def test_array_that_cannot_hold_its_tensor_is_refused(
    store: Store, manifest: Manifest, out: dict[str, Array], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        store.read_tensors(manifest, out=out)


@pytest.mark.parametrize("start", [-1, 0, 1, 350_004])
def test_arrays_to_read_into_that_share_memory_are_refused(store: Store, manifest: Manifest, start: int) -> None:
    small = manifest.row("small5").spec
    memory = np.zeros(1_000_000, np.uint8)
    raw = memory[400_000:750_005].reshape(5, 70_001)
    begin = (400_000 + start) // small.numpy_dtype.itemsize * small.numpy_dtype.itemsize
    other = memory[begin : begin + small.n_bytes].view(small.numpy_dtype).reshape(small.shape)

    with pytest.raises(ValueError, match="'raw' and 'small5' cannot be read into arrays that share memory"):
        store.read_tensors(manifest, ["raw", "small5"], out={"raw": raw, "small5": other})


def test_arrays_to_read_into_may_lie_beside_each_other(store: Store, manifest: Manifest) -> None:
    memory = np.zeros(2 * 350_005, np.uint8)
    whole = store.read_tensors(manifest, ["raw"])["raw"]
    outs = {"raw": memory[350_005:].reshape(5, 70_001)}
    store.read_tensors(manifest, ["raw"], out=outs)

    assert np.array_equal(outs["raw"], whole)
    assert not memory[:350_005].any()


@pytest.mark.long
def test_reading_into_place_takes_little_memory_besides(tmp_path: Path) -> None:
    wanted = {"raw": noise(1, 20 << 20), "smooth": np.arange(5 << 20, dtype=np.float32)}
    store = Store.init(tmp_path)
    manifest = store.manifest(save(store, wanted))
    outs = {name: np.zeros_like(array) for name, array in wanted.items()}
    store.read_tensors(manifest, ["smooth"])
    tracemalloc.start()
    store.read_tensors(manifest, out=outs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert is_right(outs, wanted)
    assert peak < 12 << 20


# --- mapped


def test_tensor_stored_raw_in_one_piece_is_a_view_of_the_pack(store: Store, manifest: Manifest) -> None:
    found = store.read_tensors(manifest, copy=False)
    mapped = [name for name, array in found.items() if not array.flags.writeable]

    assert {"raw", "raw16", "twice"} <= set(mapped)
    assert not {"smooth", "zeros", "empty"} & set(mapped)
    assert store.explain(manifest, copy=False).n_mapped == len(mapped)
    assert all(found[name].ctypes.data % 64 == 0 for name in mapped)


@pytest.mark.usefixtures("store_of_files")
def test_view_of_a_pack_outlives_the_pack(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    ref = save(store, MODEL)
    found = store.read_tensors(store.manifest(ref), copy=False)
    store.drop(ref)
    plan_gc(store, grace_s=0).execute()

    assert not list((tmp_path / ".tensorcas" / "packs").iterdir())
    assert is_right(found)


def test_a_tensor_of_which_a_chunk_is_in_another_pack_is_copied(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    first = noise(1, 3 * CHUNK_BYTES)
    save(store, {"w": first}, 1)
    second = first.copy()
    second[CHUNK_BYTES] ^= 1
    found = store.read_tensors(store.manifest(save(store, {"w": second}, 2)), copy=False)

    assert is_right(found, {"w": second})
    assert found["w"].flags.writeable


def pack_of(root: Path) -> Path:
    [pack] = (root / ".tensorcas" / "packs").iterdir()
    return pack


def flip(root: Path, tensor: Array) -> None:
    """Change a byte of a tensor that is stored raw."""
    pack = pack_of(root)
    data = bytearray(pack.read_bytes())
    data[data.index(tensor.tobytes()[:64]) + 63] ^= 1
    pack.write_bytes(data)


@pytest.mark.usefixtures("store_of_files")
@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize("way", [None, *WAYS])
def test_damage_is_told_alike_whichever_way_it_is_read(tmp_path: Path, way: Any, copy: bool | None) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    manifest = store.manifest(save(store, MODEL))
    flip(tmp_path, MODEL["raw16"])

    with pytest.raises(CorruptChunkError) as caught:
        store.read_tensors(manifest, way=way, copy=copy)
    assert caught.value.tensors == ("raw16",)
    assert caught.value.key == f"packs/{pack_of(tmp_path).name}"
    assert caught.value.digest == manifest.row("raw16").digests[0].tobytes().hex()
    others = [name for name in MODEL if name != "raw16"]
    assert is_right(store.read_tensors(manifest, others, way=way, copy=copy), {name: MODEL[name] for name in others})


@pytest.mark.usefixtures("store_of_files")
@pytest.mark.parametrize("way", [None, *WAYS])
def test_rest_of_a_pack_cut_short_is_read_in_every_way(tmp_path: Path, way: Any) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    wanted = {f"w{n}": noise(n, CHUNK_BYTES) for n in range(4)}
    manifest = store.manifest(save(store, wanted))
    pack_of(tmp_path).write_bytes(pack_of(tmp_path).read_bytes()[: 64 + 3 * CHUNK_BYTES - 10])

    with pytest.raises(CorruptChunkError, match=r"tensors 'w2', 'w3'.*it ends before byte|tensors 'w2', 'w3'"):
        store.read_tensors(manifest, way=way, copy=False)
    assert is_right(
        store.read_tensors(manifest, ["w0", "w1"], way=way, copy=False), {name: wanted[name] for name in ("w0", "w1")}
    )


@pytest.mark.parametrize("way", ["pread", "direct", "map"])
def test_a_pack_that_a_collector_moves_while_it_is_read_is_read_elsewhere(tmp_path: Path, way: Any) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    kept = {"kept": noise(1, 300_000)}
    gone = save(store, {**kept, "gone": noise(2, 900_000)}, 1)
    manifest = store.manifest(save(store, kept, 2))
    reader = Store.open(tmp_path)
    reader.read_tensors(manifest)  # knows where it lies
    store.drop(gone)
    plan_gc(store, grace_s=0).execute()

    assert is_right(reader.read_tensors(manifest, way=way), kept)
    assert is_right(reader.read_tensors(manifest, way=way, copy=False), kept)


@pytest.mark.usefixtures("store_of_files")
def test_a_store_that_has_lost_its_pack_says_so_to_who_maps(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    manifest = store.manifest(save(store, MODEL))
    pack_of(tmp_path).unlink()

    with pytest.raises(NotFoundError, match="raw16"):
        store.read_tensors(manifest, ["raw16"], copy=False)


def test_many_threads_read_one_store_at_once(store: Store, manifest: Manifest) -> None:
    results: list[bool] = []

    def read(way: Any) -> None:
        results.append(is_right(store.read_tensors(manifest, way=way, copy=False if way == "map" else None)))

    threads = [threading.Thread(target=read, args=(way,)) for way in (*WAYS, *WAYS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [True] * len(threads)


def test_a_load_leaves_no_file_open(store: Store, manifest: Manifest) -> None:
    store.read_tensors(manifest, way="direct")
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for way in WAYS:
        store.read_tensors(manifest, way=way)

    assert before == (len(list(Path("/proc/self/fd").iterdir())) if before else 0)


# --- explain


def test_a_plan_tells_ways_and_reasons_and_reads_nothing(store: Store, manifest: Manifest) -> None:
    plan = store.explain(manifest)

    assert (plan.n_tensors, plan.n_bytes, plan.n_mapped) == (len(MODEL), manifest.n_bytes, 0)
    assert plan.ways == {"pread": sum(pack.n_bytes for pack in plan.packs)}
    assert sum(pack.n_chunks for pack in plan.packs) == len(manifest.digests)
    assert "by pread" in str(plan)
    assert "because" in str(plan)


def test_a_plan_for_what_is_not_there_is_an_error(store: Store, manifest: Manifest) -> None:
    with pytest.raises(TensorCasError, match="nobody"):
        store.explain(manifest, ["nobody"])
