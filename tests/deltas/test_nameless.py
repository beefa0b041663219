"""Delta bases of tensors under other names, in other runs and files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.sketch import SKETCH_BYTES
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest, sketch_bytes
from tensorcas_mlflow.layout.packs import is_delta
from tensorcas_mlflow.maintenance import copy_refs, plan_gc, read_source, verify
from tensorcas_mlflow.store import Store, _bases, _ingest, _sketches, _sketching
from tensorcas_mlflow.store.protocol import read_pack_table
from tests.deltas.another_process import forget_all
from tests.deltas.made import packs_of, save
from tests.deltas.test_files import safetensors

Tensors = dict[str, Any]


@pytest.fixture
def in_another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store], Store]:
    """Return a function that forgets what this process knows about a store."""

    def forget(store: Store) -> Store:
        forget_all(monkeypatch)
        return Store.open_backend(store.backend)

    return forget


@pytest.fixture(params=["in memory", "of files"])
def store(request: pytest.FixtureRequest, tmp_path: Path, in_another_process: Callable[[Store], Store]) -> Store:
    is_in_memory = request.param == "in memory"
    return in_another_process(Store.init_backend(MemoryBackend() if is_in_memory else LocalBackend(tmp_path / "store")))


def model(seed: int, *, d: int = 128, n_layers: int = 3) -> Tensors:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (700, d)}
    for layer in range(n_layers):
        shapes |= {f"layers.{layer}.{name}": (d, d) for name in "qkvo"} | {f"layers.{layer}.up": (4 * d, d)}
    tensors = {f"{name}.weight": rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {f"layers.{layer}.norm.weight": np.ones(8192, np.float32) for layer in range(n_layers)}


def tuned(tensors: Mapping[str, Any], seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    return {
        name: (array + 1e-6 * rng.standard_normal(array.shape) * (array != 1)).astype(np.float32)
        for name, array in tensors.items()
    }


def as_bfloat16(tensors: Mapping[str, Any]) -> Tensors:
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}


def renamed(tensors: Mapping[str, Any]) -> Tensors:
    """Return tensors under the names that PEFT gives them."""
    return {f"base_model.model.{name}": array for name, array in tensors.items()}


def n_bytes(store: Store) -> int:
    return sum(info.size for folder in ("packs", "manifests", "refs", "index") for info in store.backend.list(folder))


def share_of_deltas(store: Store) -> float:
    tables = [read_pack_table(store.backend, name) for name in packs_of(store.backend)]
    sizes = np.concatenate([table["raw_bytes"] for table in tables]).astype(np.int64)
    return float(sizes[np.concatenate([is_delta(table) for table in tables])].sum() / sizes.sum())


def loads(store: Store, ref: Ref, tensors: Mapping[str, Any]) -> bool:
    fresh = Store.open_backend(store.backend)
    found = fresh.read_tensors(fresh.manifest(ref))
    return all(found[name].tobytes() == array.tobytes() for name, array in tensors.items()) and found.keys() == {
        *tensors
    }


def growth(store: Store, tensors: Tensors, run_id: str) -> int:
    before = n_bytes(store)
    ref = save(store, tensors, 0, run_id=run_id)

    assert loads(store, ref, tensors)
    assert verify(Store.open_backend(store.backend), full=True).problems == ()
    return n_bytes(store) - before


def test_fine_tune_under_other_names_takes_the_bytes_of_one_under_the_same_names(
    store: Store, tmp_path: Path, in_another_process: Callable[[Store], Store]
) -> None:
    base = as_bfloat16(model(0))
    other = Store.init_backend(MemoryBackend())
    for each in (store, other):
        save(each, base, 0)
    same = growth(in_another_process(other), as_bfloat16(tuned(model(0), 1)), "other")
    under_other_names = growth(in_another_process(store), renamed(as_bfloat16(tuned(model(0), 1))), "other")

    assert same < 0.1 * sum(array.nbytes for array in base.values())
    assert under_other_names < 1.05 * same + 200  # the names are longer


@pytest.mark.long
def test_fine_tune_finds_its_base_among_models_with_its_names(
    store: Store, in_another_process: Callable[[Store], Store]
) -> None:
    for seed in range(8):
        save(store, model(seed), seed, run_id=f"run {seed}")
    again = in_another_process(store)
    before = share_of_deltas(store)
    ref = save(again, tuned(model(0), 1), 0, run_id="tuned")

    assert before == 0
    assert share_of_deltas(store) > 0.09
    assert loads(store, ref, tuned(model(0), 1))


def test_model_without_relatives_is_stored_in_full(store: Store, in_another_process: Callable[[Store], Store]) -> None:
    save(store, model(0), 0)
    save(in_another_process(store), renamed(model(1)), 0, run_id="other")

    assert share_of_deltas(store) == 0


@pytest.mark.parametrize("batch_bytes", [100_000, 32 << 20])
def test_file_under_other_names_is_stored_against_a_checkpoint(
    store: Store, batch_bytes: int, monkeypatch: pytest.MonkeyPatch, in_another_process: Callable[[Store], Store]
) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", 50_000)
    save(store, model(0), 0)
    file = safetensors(**renamed(tuned(model(0), 1)))
    with in_another_process(store).write_stream(io.BytesIO(file)) as pending:
        ref = pending.commit(RefTarget(path="file"))

    assert share_of_deltas(store) > 0.45
    assert b"".join(Store.open_backend(store.backend).iter_file(ref)) == file


def test_checkpoint_is_stored_against_a_file_stored_in_many_batches(
    store: Store, monkeypatch: pytest.MonkeyPatch, in_another_process: Callable[[Store], Store]
) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 100_000)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", 50_000)
    with store.write_stream(io.BytesIO(safetensors(**model(0)))) as pending:
        pending.commit(RefTarget(path="file"))
    save(in_another_process(store), renamed(tuned(model(0), 1)), 0)

    assert share_of_deltas(store) > 0.45


def test_search_finds_the_last_step_of_a_series_without_sketches(
    store: Store, in_another_process: Callable[[Store], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr("tensorcas_mlflow.store._save.FIRST_BYTES", 1 << 60)
        save(store, model(0), 0)
    assert not store.manifest(store.checkpoints()[0]).sketches
    save(in_another_process(store), renamed(tuned(model(0), 1)), 0, run_id="other")

    assert share_of_deltas(store) > 0.45


def test_reshaped_tensor_is_stored_as_a_delta(store: Store) -> None:
    save(store, {"w": model(0)["embed.weight"]}, 0)
    save(store, {"w": tuned(model(0), 1)["embed.weight"].reshape(-1)}, 0, run_id="other")

    assert share_of_deltas(store) == pytest.approx(0.5)


def test_small_step_of_a_series_gets_no_sketches(store: Store) -> None:
    state = model(0)
    refs = []
    for step in range(2):
        state["embed.weight"][step] += 1
        with store.write_checkpoint(state, series="s") as pending:
            refs.append(pending.commit(RefTarget(run_id="run", step=step)))
    first, second = (store.manifest(ref) for ref in refs)

    assert len(first.sketches) == SKETCH_BYTES * len(state) + 28
    assert second.sketches == b""


def test_search_survives_the_deletion_of_the_checkpoint_it_found(store: Store) -> None:
    ref = save(store, model(0), 0)
    store.drop(ref)
    plan_gc(store, grace_s=0).execute()
    tensors = renamed(tuned(model(0), 1))

    assert loads(store, save(store, tensors, 0, run_id="other"), tensors)
    assert share_of_deltas(store) == 0


def test_damaged_sketches_cost_only_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_another_process: Callable[[Store], Store]
) -> None:
    store = in_another_process(Store.init_backend(LocalBackend(tmp_path / "store")))

    def damaged(words: Any) -> bytes:
        data = bytearray(sketch_bytes(words))
        data[5] ^= 1
        return bytes(data)

    with monkeypatch.context() as damage:
        damage.setattr(_sketching, "sketch_bytes", damaged)
        save(store, model(0), 0)
    fresh = in_another_process(store)
    tensors = renamed(tuned(model(0), 1))

    assert loads(store, save(fresh, tensors, 0, run_id="other"), tensors)
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    """Return a function that counts the blobs another function reads."""

    def count(function: Callable[[], Any]) -> int:
        n_read = 0
        with monkeypatch.context() as patch:
            for backend in (MemoryBackend, LocalBackend):

                def counted(*args: Any, get: Any = backend.get, **options: Any) -> Any:
                    nonlocal n_read
                    n_read += 1
                    return get(*args, **options)

                patch.setattr(backend, "get", counted)
            function()
        return n_read

    return count


def test_search_reads_a_bounded_number_of_manifests_and_goes_on_later(
    store: Store, in_another_process: Callable[[Store], Store], count_reads: Callable[[Callable[[], Any]], int]
) -> None:
    for seed in range(10):
        save(store, {"w": model(seed)["embed.weight"]}, 0, run_id=f"run {seed}")
    again = in_another_process(store)
    counts = [count_reads(lambda: _sketches.read_more(again, 1)) for _ in range(3)]

    assert counts == [8 + 8, 2 + 2, 0]  # refs and manifests
    assert len(_sketches.sketches_of(store.id)._by_key) == 10


def test_search_of_a_larger_save_reads_more_manifests(
    store: Store, in_another_process: Callable[[Store], Store]
) -> None:
    for seed in range(10):
        save(store, {"w": model(seed)["embed.weight"]}, 0, run_id=f"run {seed}")
    again = in_another_process(store)
    _sketches.read_more(again, 64 << 20)

    assert len(_sketches.sketches_of(store.id)._by_key) == 10


@pytest.mark.long
@pytest.mark.parametrize("store", ["in memory"], indirect=True)  # a process reads as many in any place
def test_first_save_of_a_process_reads_few_of_many_refs(
    store: Store, in_another_process: Callable[[Store], Store], count_reads: Callable[[Callable[[], Any]], int]
) -> None:
    for number in range(300):
        with store.write_stream(io.BytesIO(b"%d" % number)) as pending:
            pending.commit(RefTarget(path=f"{number}.txt"))
    again = in_another_process(store)

    assert count_reads(lambda: save(again, {"w": model(0)["embed.weight"]}, 0)) < 200


def test_search_does_not_list_the_refs_each_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, in_another_process: Callable[[Store], Store]
) -> None:
    n_listed = 0
    listed = _sketches.list_blobs

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_listed
        n_listed += 1
        return listed(*args, **options)

    monkeypatch.setattr(_sketches, "list_blobs", counted)
    again = in_another_process(store)
    for seed in range(5):
        save(again, {"w": model(seed)["embed.weight"]}, 0, run_id=f"run {seed}")

    assert n_listed == 1


def test_copy_of_a_store_keeps_its_sketches(store: Store) -> None:
    save(store, model(0), 0)
    copy = Store.init_backend(MemoryBackend())
    refs, _ = read_source(store)
    copy_refs(store, copy, refs)
    [ref], [copied] = store.checkpoints(), copy.checkpoints()

    assert copy.manifest(copied).sketches == store.manifest(ref).sketches != b""


def test_search_compares_no_tensor_with_strangers_by_their_sketches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    read_some = _bases._read_some

    def noted(*args: Any) -> Any:
        compared.append(len(args[2]))
        return read_some(*args)

    monkeypatch.setattr(_bases, "_read_some", noted)
    for seed in range(6):
        save(store, {"w": model(seed)["embed.weight"]}, 0, run_id=f"run {seed}")
    assert sum(compared) == 0

    save(store, tuned({"w": model(3)["embed.weight"]}, 1), 0, run_id="tuned")
    assert share_of_deltas(store) > 0.1


def test_tensor_whose_words_tell_nothing_has_no_strangers() -> None:
    rng = np.random.default_rng(0)
    known = _sketches.Sketches()
    other = Manifest(kind="checkpoint", chunk_bytes=1 << 20, store_id="0" * 32, flavor=None, rows=[])
    known.note("other", sketched(other.digest, rng.integers(1, 1 << 16, (1, 32), dtype=np.uint16)))
    weights, constants = rng.integers(1, 1 << 16, (1, 32), dtype=np.uint16), np.full((1, 32), 7, dtype=np.uint16)

    def strangers(*words: Any) -> object:
        return known.search(sketched("", np.concatenate(words)), [other]).strangers

    assert strangers(weights) == {other.digest}
    assert strangers(constants) == strangers(weights, constants) == set()


def test_checkpoint_with_an_unknown_sketch_is_no_stranger(store: Store) -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(1, 1 << 16, (2, 32), dtype=np.uint16)
    words[1] = 0
    manifest = store.manifest(save(store, {"a": rng.random(5000), "b": rng.random(5000)}, 0))
    known = _sketches.Sketches()
    for n_known, n_strangers in ((1, 1), (2, 0)):
        rows = np.arange(n_known)
        known.note("it", _sketches.Sketched.of(manifest.digest, manifest.columns, rows, words[:n_known]))
        query = _sketches.Sketched.of("", manifest.columns, np.arange(1), words[:1] ^ 0x5555)

        assert len(known.search(query, [manifest]).strangers) == n_strangers


@pytest.mark.parametrize("n_parts", [1, 200])
def test_search_among_many_tensors_compares_all_of_them(n_parts: int) -> None:
    rng = np.random.default_rng(0)
    known = _sketches.Sketches()
    n = 20_000 // n_parts
    words = [rng.integers(1, 1 << 16, (n, 32), dtype=np.uint16) for _ in range(n_parts)]
    for number, each in enumerate(words):
        known.note(str(number), sketched(str(number), each))
    match = known.search(sketched("", words[n_parts // 2][-4:])).nearest

    assert match is not None
    assert match.sketched.manifest == str(n_parts // 2)
    assert match.likeness == 1


def sketched(name: str, words: Any) -> _sketches.Sketched:
    sizes = np.full(len(words), 1 << 20)
    return _sketches.Sketched(manifest=name, rows=np.arange(len(words)), n_bytes=sizes, n_elements=sizes, words=words)
