"""Saves that store what has changed little as deltas."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest, digest_all
from tensorcas_mlflow.chunk_io import ChunkReader, _recent_chunks
from tensorcas_mlflow.codecs import CODECS, DELTA, PLANES, Codec
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import is_delta
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store, _bases
from tensorcas_mlflow.store._base_plans import BasePlan
from tensorcas_mlflow.store._choose import MAX_SAVED_DEPTH
from tensorcas_mlflow.store._recent import RecentManifests
from tensorcas_mlflow.store.protocol import begin_generation, condemned_bytes, read_pack_table
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.deltas.made import base_packs, flip, packs_of, put_pack, save, weights

N = 100_000


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bases, "RECENT", RecentManifests())
    monkeypatch.setattr("tensorcas_mlflow.store._store.RECENT", _bases.RECENT)


@pytest.fixture(
    params=[
        "in memory",
        "of files",
        "of files, without remembered chunks",
        "of objects",
        "of objects, without remembered chunks",
        "of objects, without remembered chunks and a cache",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a new store. Bases are remembered, or read into memory, or decoded by the encoder from files.

    Those in an object store are remembered, or in the cache, or fetched.
    """
    if "without remembered chunks" in request.param:
        monkeypatch.setattr(_recent_chunks, "_MOST_BYTES", 0)
    monkeypatch.setenv("TENSORCAS_CACHE", "off" if request.param.endswith("cache") else str(tmp_path / "cache"))
    if request.param.startswith("of files"):
        return Store.init_backend(LocalBackend(tmp_path / "store"))
    return Store.init_backend(MemoryBackend(is_remote=request.param.startswith("of objects")))


def depths(store: Store) -> set[int]:
    return {
        int(depth)
        for name in packs_of(store.backend)
        for depth in read_pack_table(store.backend, name)["depth"].tolist()
    }


def stored_bytes(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs"))


def loads(store: Store, step: int, run_id: str = "run") -> Any:
    fresh = Store.open_backend(store.backend)
    ref = fresh.ref(RefTarget(run_id=run_id, step=step).key)
    assert ref is not None
    return fresh.read_tensors(fresh.manifest(ref))["w"]


def test_a_state_that_has_moved_a_little_is_stored_as_deltas_and_comes_back(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    in_full = stored_bytes(store)
    save(store, {"w": weights(1, N)}, 1)

    assert depths(store) == {0, 1}
    assert stored_bytes(store) < 1.6 * in_full
    assert [loads(store, step).tobytes() == weights(step, N).tobytes() for step in (0, 1)] == [True, True]


def test_chain_of_dense_deltas_is_no_longer_than_two(store: Store) -> None:
    for step in range(8):
        save(store, {"w": weights(step, N)}, step)

    assert max(depths(store)) == 2
    assert all(loads(store, step).tobytes() == weights(step, N).tobytes() for step in range(8))


def sparse_steps(share: float, n_steps: int) -> list[np.ndarray]:
    """Return weights of which each step changes a share."""
    rng = np.random.default_rng(5)
    steps = [weights(0, N)]
    for _ in range(1, n_steps):
        is_changed = rng.random(N) < share
        steps.append(steps[-1] + np.float32(1e-4) * is_changed * rng.standard_normal(N, dtype=np.float32))
    return steps


@pytest.mark.long
def test_chain_of_sparse_deltas_is_as_long_as_its_restore_allows(store: Store) -> None:
    steps = sparse_steps(0.004, 12)
    sizes = [stored_bytes(store)]
    for step, array in enumerate(steps):
        save(store, {"w": array}, step)
        sizes.append(stored_bytes(store))

    assert max(depths(store)) == len(steps) - 1
    assert max(np.diff(sizes)[1:]) < 0.07 * 4 * N
    assert all(loads(store, step).tobytes() == array.tobytes() for step, array in enumerate(steps))


def test_deltas_of_more_changed_words_end_their_chain_earlier(store: Store) -> None:
    steps = sparse_steps(0.03, 8)
    for step, array in enumerate(steps):
        save(store, {"w": array}, step)

    assert 2 < max(depths(store)) < MAX_SAVED_DEPTH
    assert all(loads(store, step).tobytes() == array.tobytes() for step, array in enumerate(steps))


@pytest.mark.parametrize(
    ("share", "least_bytes", "wanted"),
    [
        (0.004, 0, {"w": DELTA, "b": DELTA, "tiny": PLANES}),
        (1.0, 0, {"w": DELTA, "b": PLANES, "tiny": PLANES}),
        (0.004, 4 << 20, {"w": DELTA, "b": PLANES, "tiny": PLANES}),
    ],
    ids=["sparse", "dense", "few bytes"],
)
def test_small_tensors_have_bases_in_sparse_steps_of_many_bytes_alone(
    store: Store, share: float, least_bytes: int, wanted: dict[str, Codec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bases, "_LEAST_WITH_SMALL_BYTES", least_bytes)
    states = [{"w": array, "b": array[:600].copy(), "tiny": array[:200].copy()} for array in sparse_steps(share, 6)]
    for step, state in enumerate(states):
        for name in ("b", "tiny"):
            state[name][step] += 1
        save(store, state, step)
    fresh = Store.open_backend(store.backend)
    entries = np.concatenate([read_pack_table(store.backend, name) for name in packs_of(store.backend)])
    codec_of = {row["digest"].tobytes(): int(row["codec"]) for row in entries}

    found = {name: CODECS[codec_of[digest(array.tobytes()[: store.chunk_bytes])]] for name, array in states[-1].items()}
    assert found == wanted
    for step, state in enumerate(states):
        ref = fresh.ref(RefTarget(run_id="run", step=step).key)
        assert ref is not None
        tensors = fresh.read_tensors(fresh.manifest(ref))
        assert all(tensors[name].tobytes() == array.tobytes() for name, array in state.items())


def test_save_finds_bases_that_another_process_saved(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, {"w": weights(0, N)}, 0)
    monkeypatch.setattr(_bases, "RECENT", RecentManifests())
    save(Store.open_backend(store.backend), {"w": weights(1, N)}, 1, run_id="other")

    assert depths(store) == {0, 1}


def test_a_run_goes_on_from_its_own_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {run: TensorCasStore(tmp_path / "store", run, _Plain()) for run in ("a", "b")}
    far = np.random.default_rng(1).normal(0, 1, N).astype(np.float32)
    runs["a"].save(weights(0, N), 0)
    runs["b"].save(far, 0)
    monkeypatch.setattr(_bases, "RECENT", RecentManifests())
    runs["a"].save(weights(1, N), 1)

    assert depths(runs["a"].store) == {0, 1}
    assert runs["a"].load_tensors(1)["w"].tobytes() == weights(1, N).tobytes()


class _Plain:
    def extract(self, model: Any) -> dict[str, Any]:
        return {"w": model}

    def reconstruct(self, tensors: Any, original: Any) -> Any:
        return tensors["w"]


def test_a_fast_save_stores_no_deltas(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    with store.write_checkpoint({"w": weights(1, N)}, policy="fast") as pending:
        pending.commit(RefTarget(run_id="run", step=1))

    assert depths(store) == {0}


def test_the_intent_of_a_save_names_the_packs_of_its_bases(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    [pack] = packs_of(store.backend)
    with store.begin_checkpoint({"w": weights(1, N)}):
        [info] = store.backend.list("intents")

        assert f'"bases": ["{pack}"]'.encode() in store.backend.get(info.key)


def test_nothing_is_stored_against_a_condemned_pack(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    [pack] = packs_of(store.backend)
    store.backend.put_new("condemned/" + "c" * 32, [condemned_bytes(frozenset([pack]), frozenset())])
    save(store, {"w": weights(1, N)}, 1)

    assert depths(store) == {0}


def test_nothing_is_stored_against_a_pack_that_is_gone(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    [pack] = packs_of(store.backend)
    store.backend.delete(f"packs/{pack}.pack")
    begin_generation(store.backend)
    save(store, {"w": weights(1, N)}, 1)

    assert depths(store) == {0}
    assert loads(store, 1).tobytes() == weights(1, N).tobytes()


def test_a_damaged_base_is_not_relied_on(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    [pack] = packs_of(store.backend)
    key = f"packs/{pack}.pack"
    data = bytearray(store.backend.get(key))
    data[len(data) // 2] ^= 1
    store.backend.delete(key)
    store.backend.put_new(key, [bytes(data)])
    save(store, {"w": weights(1, N)}, 1)

    assert loads(store, 1).tobytes() == weights(1, N).tobytes()


@pytest.mark.long
def test_save_compares_its_sample_with_the_remembered_sample_of_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.init_backend(LocalBackend(tmp_path))
    n_read: list[int] = []
    read = ChunkReader.read

    def counted(self: ChunkReader, digests: Any, *args: Any, **options: Any) -> None:
        n_read.append(len(digests))
        read(self, digests, *args, **options)

    monkeypatch.setattr(ChunkReader, "read", counted)
    for step in range(4):
        save(store, {"w": weights(step, 1_000_000)}, step)

    assert depths(store) == {0, 1, 2}
    assert n_read == [1]  # the sample of the first save, which had none to compare
    assert all(loads(store, step).tobytes() == weights(step, 1_000_000).tobytes() for step in range(4))


def test_damaged_base_costs_only_the_chunks_encoded_with_its_own_their_deltas(tmp_path: Path) -> None:
    store = Store.init_backend(LocalBackend(tmp_path))
    before, after = weights(0, 1_000_000), weights(1, 1_000_000)
    save(store, {"w": before}, 0)
    [first] = packs_of(store.backend)
    flip(store, first, before.tobytes()[len(before.tobytes()) // store.chunk_bytes * store.chunk_bytes :])
    save(Store.open_backend(store.backend), {"w": after}, 1)

    assert loads(store, 1).tobytes() == after.tobytes()
    [second] = packs_of(store.backend) - {first}
    deltas = is_delta(read_pack_table(store.backend, second))
    assert deltas.any()
    assert not deltas[-1]


def test_a_base_whose_checkpoint_is_dropped_while_the_save_is_under_way_is_kept(store: Store) -> None:
    first = save(store, {"w": weights(0, N)}, 0)
    with store.begin_checkpoint({"w": weights(1, N)}) as pending:
        store.drop(first)
        plan_gc(Store.open_backend(store.backend), grace_s=3600).execute()
        pending.commit(RefTarget(run_id="run", step=1))
    plan_gc(Store.open_backend(store.backend), grace_s=0).execute()

    assert depths(store) == {0, 1}
    assert loads(store, 1).tobytes() == weights(1, N).tobytes()


def test_a_save_that_was_given_up_finds_other_bases(store: Store) -> None:
    first = save(store, {"w": weights(0, N)}, 0)
    with store.begin_checkpoint({"w": weights(1, N)}) as pending:
        store.drop(first)
        plan_gc(Store.open_backend(store.backend), grace_s=0, abandon=[]).execute()
        for info in list(store.backend.list("intents")):
            store.backend.withdraw(info.key, info.token)
        plan_gc(Store.open_backend(store.backend), grace_s=0).execute()
        pending.commit(RefTarget(run_id="run", step=1))

    assert loads(store, 1).tobytes() == weights(1, N).tobytes()


def test_an_array_that_changes_while_it_is_stored_as_a_delta_fails_the_save(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    live = weights(1, N)
    pending = store.begin_checkpoint({"w": live})
    live += 1
    with pytest.raises(ConflictError), pending:
        pending.commit(RefTarget(run_id="run", step=1))


def test_tensor_of_another_dtype_is_stored_in_full(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    save(store, {"w": weights(1, N).astype(np.float16)}, 1)
    save(store, {"w": weights(2, N).astype(np.float64)}, 2)

    assert depths(store) == {0}


def test_save_stores_a_delta_only_for_chunks_that_shrink(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    unlike = np.random.default_rng(5).normal(0, 3, N).astype(np.float32)
    save(store, {"w": unlike}, 1)
    tables = [read_pack_table(store.backend, name) for name in packs_of(store.backend)]

    assert not any(is_delta(table).any() for table in tables)
    assert base_packs(store.backend) == {}


def test_plan_of_bases_leaves_out_a_copy_found_damaged_after_the_plan(store: Store) -> None:
    data, size = weights(0, N).tobytes(), store.chunk_bytes
    save(store, {"w": weights(0, N)}, 0)
    [pack] = packs_of(store.backend)
    digests = digest_all([memoryview(data)[at : at + size] for at in range(0, len(data), size)])
    chunks = np.arange(len(digests))
    reopened = Store.open_backend(store.backend)
    plan = BasePlan(reopened.catalog, reopened.chunks, chunks, digests)
    reopened.catalog.distrust(pack, digests[0].tobytes())
    found = plan.bases(chunks, digests ^ 1, 0)

    assert found.is_found.tolist() == [False, *[True] * (len(chunks) - 1)]
    assert [base is None for base in found.data] == [True, *[False] * (len(chunks) - 1)]


@pytest.mark.parametrize("bad", [0, 1])
def test_save_names_the_readable_one_of_two_copies_of_a_base(
    store: Store, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = count()
    monkeypatch.setattr("tensorcas_mlflow.store._save.new_pack_name", lambda backend: f"{next(number):032x}")
    before, after = weights(0, N), weights(1, N)
    save(store, {"w": before}, 0)
    [first] = packs_of(store.backend)
    data, size = before.tobytes(), store.chunk_bytes
    put_pack(store, *(data[at : at + size] for at in range(0, len(data), size)))
    [second] = packs_of(store.backend) - {first}
    flip(store, (first, second)[bad], data[len(data) // size * size :])  # the sample is another one
    save(Store.open_backend(store.backend), {"w": after}, 1)

    assert loads(store, 1).tobytes() == after.tobytes()
