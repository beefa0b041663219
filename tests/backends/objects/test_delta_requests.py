"""Deltas in an object store: bytes of a step, and requests of a save and of a restore."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import Backend, LocalBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.layout.packs import is_delta
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import read_pack_table
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of
from tests.deltas.another_process import forget_all
from tests.deltas.made import packs_of
from tests.derived.made import as_dtype, gguf_file

N_TENSORS = 4
N_WORDS = 1 << 20
MODEL_BYTES = N_TENSORS * N_WORDS * 2

Reopen = Callable[[], Store]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_all(monkeypatch)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def reopen(s3: S3Server, bucket: str, way: Proxy, monkeypatch: pytest.MonkeyPatch) -> Reopen:
    """Opens the store as a new process does."""

    def opened() -> Store:
        forget_all(monkeypatch)
        store = Store.open_backend(backend_of(s3.at(way.endpoint), bucket))
        way.forget()
        return store

    return opened


@pytest.fixture
def store(s3: S3Server, bucket: str, way: Proxy) -> Store:
    return Store.init_backend(backend_of(s3.at(way.endpoint), bucket))


def training(
    n_steps: int, step_size: float = 1e-6, dtype: object = ml_dtypes.bfloat16, *, n_words: int = N_WORDS, seed: int = 1
) -> Iterator[dict[str, Array]]:
    """Weights in bfloat16, which a master copy in single precision moves a little in each step."""
    draw = np.random.default_rng(seed)
    masters = [draw.normal(0, 0.02, n_words).astype(np.float32) for _ in range(N_TENSORS)]
    for step in range(n_steps):
        if step:
            for master in masters:
                master += draw.normal(0, step_size, n_words).astype(np.float32)
        yield {f"layer.{number}": master.astype(dtype) for number, master in enumerate(masters)}


def save(store: Store, state: dict[str, Array], step: int, run: str = "run") -> Ref:
    def before() -> Manifest | None:
        ref = store.ref(RefTarget(run_id=run, step=step - 1).key)
        return None if ref is None else store.manifest(ref)

    with store.write_checkpoint(state, series=run, earlier=before if step else None) as pending:
        return pending.commit(RefTarget(run_id=run, step=step))


def load(store: Store, ref: Ref) -> dict[str, Array]:
    return store.read_tensors(store.manifest(ref))


def are_equal(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return all(one[name].tobytes() == array.tobytes() for name, array in other.items())


def stored_bytes(backend: Backend) -> int:
    return sum(info.size for folder in ("packs", "manifests", "refs", "index") for info in backend.list(folder))


def n_deltas(store: Store) -> int:
    return sum(int(is_delta(read_pack_table(store.backend, name)).sum()) for name in packs_of(store.backend))


@pytest.mark.long
def test_step_takes_as_many_bytes_as_in_a_folder_and_eight_requests(
    store: Store, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Store.init_backend(LocalBackend(tmp_path / "folder"), database=False)
    for step, state in enumerate(training(6)):
        before = stored_bytes(folder.backend), stored_bytes(store.backend)
        save(folder, state, step)
        way.forget()
        save(store, state, step)
        traffic = way.traffic()
        in_folder, in_bucket = stored_bytes(folder.backend) - before[0], stored_bytes(store.backend) - before[1]

        assert in_bucket <= in_folder + 4096, f"step {step}"
        assert traffic.n_billed == 1 + 7, str(traffic)  # one pack
        if step:
            assert in_bucket < 0.05 * MODEL_BYTES
            assert traffic.up_bytes < in_bucket + 20_000
            assert traffic.down_bytes < 20_000


@pytest.mark.long
def test_new_process_on_the_same_machine_goes_on_with_deltas_and_fetches_no_base(
    store: Store, way: Proxy, reopen: Reopen
) -> None:
    *first, last = training(3)
    for step, state in enumerate(first):
        save(store, state, step)
    other = reopen()
    ref = save(other, last, 2)
    traffic = way.traffic()

    # Beside the requests of any first save: the ref and the manifest before, and a listing and the tables of two packs.
    assert traffic.n_billed <= 9 + 5, str(traffic)
    assert traffic.up_bytes < 0.05 * MODEL_BYTES
    assert traffic.down_bytes < 250_000
    assert are_equal(load(other, ref), last)


@pytest.mark.long
@pytest.mark.parametrize("has_cache", [True, False])
def test_process_on_another_machine_fetches_the_bases_in_few_requests(
    store: Store, way: Proxy, reopen: Reopen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_cache: bool
) -> None:
    *first, last, after = training(4)
    for step, state in enumerate(first):
        save(store, state, step)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "another cache") if has_cache else "off")
    other = reopen()
    save(other, last, 2)
    traffic = way.traffic()
    way.forget()
    ref = save(other, after, 3)
    traffic_after = way.traffic()

    assert traffic.up_bytes < 0.05 * MODEL_BYTES
    # Without a cache, the samples are fetched again with the rest.
    assert traffic.down_bytes < (0.75 if has_cache else 0.9) * MODEL_BYTES
    assert len(traffic.of(Kind.GET)) <= 24, str(traffic)
    assert traffic_after.up_bytes < 0.05 * MODEL_BYTES
    if has_cache:
        assert traffic_after.n_billed == 8, str(traffic_after)
    assert are_equal(load(reopen(), ref), after)


def test_bases_are_not_fetched_if_they_save_too_little(
    store: Store, way: Proxy, reopen: Reopen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = training(2, step_size=1e-3, dtype=np.float32)
    save(store, first, 0)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "another cache"))
    other = reopen()
    ref = save(other, second, 1)
    traffic = way.traffic()

    assert n_deltas(store) == 0
    assert traffic.down_bytes < 0.15 * MODEL_BYTES, str(traffic)
    assert are_equal(load(other, ref), second)


@pytest.mark.long
def test_bases_at_hand_are_used_even_if_they_save_little(store: Store, way: Proxy) -> None:
    for step, state in enumerate(training(2, step_size=1e-3, dtype=np.float32)):
        way.forget()
        save(store, state, step)
    traffic = way.traffic()

    assert traffic.n_billed <= 2 + 7, str(traffic)
    assert n_deltas(store) > 0


def safetensors_file(state: dict[str, Array]) -> io.BytesIO:
    header, begin = {}, 0
    for name, array in state.items():
        end = begin + array.nbytes
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    return io.BytesIO(b"".join([len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in state.values())]))


@pytest.mark.long
def test_file_finds_the_bases_of_an_earlier_process(store: Store, way: Proxy, reopen: Reopen) -> None:
    first, second = training(2)
    with store.write_stream(safetensors_file(first)) as pending:
        pending.commit(RefTarget(path="0/model.safetensors"))
    for number in range(20):
        with store.write_stream(io.BytesIO(b"text %d" % number)) as pending:
            pending.commit(RefTarget(path=f"0/{number}.txt"))
    other = reopen()
    with other.write_stream(safetensors_file(second)) as pending:
        pending.commit(RefTarget(path="1/model.safetensors"))
    traffic = way.traffic()

    assert traffic.up_bytes < 0.1 * MODEL_BYTES
    assert traffic.n_billed <= 8 + 48 + 24, str(traffic)
    assert len(traffic.of(Kind.HEAD)) == 0, str(traffic)  # a listing shows the packs of the bases
    assert traffic.most_at_once > 1


def renamed(state: dict[str, Array]) -> dict[str, Array]:
    return {f"base_model.model.{name}": array for name, array in state.items()}


@pytest.mark.long
@pytest.mark.parametrize("n_others", [0, 6])
def test_new_process_finds_bases_under_other_names_with_few_requests(
    store: Store, way: Proxy, reopen: Reopen, n_others: int
) -> None:
    first, second, third = training(3)
    save(store, first, 0, "the base")  # listed after the others, even if all have the same time
    for number in range(n_others):
        other = np.random.default_rng(number).normal(size=1 << 17).astype(np.float32)
        save(store, {"other": other}, 0, f"run {number}")
    tuning = reopen()
    save(tuning, renamed(second), 0, "tuned")
    traffic = way.traffic()
    way.forget()
    ref = save(tuning, renamed(third), 1, "tuned")
    traffic_after = way.traffic()

    assert traffic.up_bytes < 0.05 * MODEL_BYTES
    # Beside the requests of any first save: two listings, and of each run a ref, a manifest, and the table of its pack.
    # Some refs are read twice.
    assert traffic.n_billed <= 8 + 5 + 4 * n_others, str(traffic)
    assert traffic_after.n_billed == 8, str(traffic_after)
    assert are_equal(load(tuning, ref), renamed(third))


@pytest.mark.long
@pytest.mark.parametrize("n_files", [0, 60])
def test_quantized_file_finds_the_weights_of_another_process_with_few_requests(
    store: Store, way: Proxy, reopen: Reopen, n_files: int
) -> None:
    draw = np.random.default_rng(0)
    weights = {f"layer.{number}": draw.normal(0, 0.02, (1 << 10, 1 << 9)).astype(np.float32) for number in range(8)}
    save(store, as_dtype(weights, ml_dtypes.bfloat16), 0, "the weights")
    for number in range(n_files):
        with store.write_stream(io.BytesIO(b"text %d" % number)) as pending:
            pending.commit(RefTarget(path=f"{number}.txt"))
    file = gguf_file(renamed(as_dtype(weights, ml_dtypes.bfloat16)), "Q8_0")
    other = reopen()
    with other.write_stream(io.BytesIO(file)) as pending:
        ref = pending.commit(RefTarget(path="model.gguf"))
    traffic = way.traffic()

    assert traffic.up_bytes < 0.02 * len(file)
    # Of each file a ref and the table of its pack.
    assert traffic.n_billed <= 8 + 8 + 2 * n_files, str(traffic)
    assert b"".join(other.iter_file(ref)) == file


SMALL_WORDS = 1 << 16
"""Words of a tensor of a model of 512 KiB, which takes less than the manifests of many others are worth."""


@pytest.mark.long
def test_small_save_ends_its_search_with_the_first_manifest_that_is_surely_related(
    store: Store, way: Proxy, reopen: Reopen
) -> None:
    *first, last = training(6, n_words=SMALL_WORDS)
    for number, state in enumerate(first):
        save(store, renamed(state) if number % 2 else state, 0, f"run {number}")
    tuning = reopen()
    ref = save(tuning, last, 0, "tuned")
    traffic = way.traffic()
    requests = str(traffic.of(Kind.GET))

    assert requests.count("/refs/") == 1, str(traffic)
    assert requests.count("/manifests/") == 1, str(traffic)
    assert n_deltas(store) == 5 * N_TENSORS
    assert are_equal(load(tuning, ref), last)


def test_search_that_ended_early_goes_on_for_another_model(store: Store, reopen: Reopen) -> None:
    states = [list(training(2, n_words=SMALL_WORDS, seed=seed)) for seed in range(2)]
    for number, (state, _) in enumerate(states):
        save(store, state, 0, f"run {number}")
    other = reopen()
    for number, (_, state) in enumerate(states):
        save(other, state, 0, f"another run {number}")

    assert n_deltas(store) == 2 * N_TENSORS


def test_large_save_looks_for_a_nearer_base_behind_a_related_one(store: Store, way: Proxy, reopen: Reopen) -> None:
    (_, near, nearer), (_, other) = training(3), training(2, step_size=3e-5)
    save(store, near, 0, "mine")
    save(store, other, 0, "other")
    tuning = reopen()
    save(tuning, nearer, 0, "mine again")
    traffic = way.traffic()

    assert str(traffic.of(Kind.GET)).count("/manifests/") == 2, str(traffic)
    assert traffic.up_bytes < 0.05 * MODEL_BYTES, str(traffic)


def test_small_save_of_a_process_that_has_read_the_base_lists_no_refs(store: Store, way: Proxy, reopen: Reopen) -> None:
    first, second = training(2, n_words=SMALL_WORDS)
    base = save(store, first, 0, "the base")
    tuning = reopen()
    load(tuning, base)
    way.forget()
    save(tuning, renamed(second), 0, "tuned")
    traffic = way.traffic()

    assert not [each for each in traffic.of(Kind.LIST).exchanges if "refs%2F" in each.query], str(traffic)
    assert traffic.n_billed <= 2 + 8, str(traffic)  # the table of one pack is read, and another pack is written
    assert n_deltas(store) == N_TENSORS


@pytest.mark.long
def test_search_fetches_few_manifests_from_a_bucket_with_many(store: Store, way: Proxy, reopen: Reopen) -> None:
    for number in range(40):
        save(store, {"other": np.random.default_rng(number).normal(size=1 << 13)}, 0, f"run {number}")
    [state] = training(1)
    save(reopen(), state, 0, "new")
    traffic = way.traffic()
    requests = str(traffic.of(Kind.GET))

    assert requests.count("/manifests/") == 3 + 8, str(traffic)
    assert requests.count("/refs/") <= 32, str(traffic)  # two searches, each eight at a time, and eight ahead


@pytest.mark.long
def test_process_that_created_the_bucket_lists_no_refs_for_its_searches(store: Store, way: Proxy) -> None:
    for run, state in enumerate(training(2)):
        way.forget()
        save(store, state if run == 0 else renamed(state), 0, str(run))
        traffic = way.traffic()

        assert traffic.n_billed == 8, str(traffic)
    assert traffic.up_bytes < 0.05 * MODEL_BYTES


@pytest.mark.long
def test_last_step_of_many_is_restored_with_few_requests_and_bytes(
    store: Store, way: Proxy, reopen: Reopen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [save(store, state, step) for step, state in enumerate(training(20))]
    *_, last = training(20)
    traffic = []
    for number in (0, 19):
        monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / f"cache {number}"))
        other = reopen()
        found = load(other, refs[number])
        traffic.append(way.traffic())

    assert are_equal(found, last)
    # The ref, the manifest, a listing, and for each of eight packs at most its table and its chunks.
    assert traffic[1].down_bytes < 1.5 * traffic[0].down_bytes
    assert len(traffic[1]) <= 3 + 2 * 8, str(traffic[1])


@pytest.mark.long
def test_restore_finds_chunks_that_were_moved_from_the_packs_in_the_hints(
    store: Store, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")
    states = list(training(3))
    refs = [save(store, state, step) for step, state in enumerate(states)]
    before = packs_of(store.backend)
    for ref in refs[:2]:
        store.drop(ref)
    plan_optimize(Store.open_backend(store.backend)).execute()
    plan_gc(Store.open_backend(store.backend), grace_s=0).execute()
    other = reopen()

    assert not before & packs_of(other.backend)
    assert are_equal(load(other, refs[2]), states[2])
    assert verify(other).problems == ()


@pytest.mark.long
def test_several_runs_store_deltas_at_once(store: Store, way: Proxy, reopen: Reopen) -> None:
    states = list(training(3))

    def train(run: str) -> None:
        for step, state in enumerate(states):
            save(store, {name: array + array.dtype.type(run) for name, array in state.items()}, step, run)

    threads = [Thread(target=train, args=(str(run),)) for run in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = reopen()
    refs = {(ref.run_id, ref.step): ref for ref in other.checkpoints()}

    assert len(refs) == 9
    for (run, step), ref in refs.items():
        expected = {name: array + array.dtype.type(run or 0) for name, array in states[step or 0].items()}
        assert are_equal(load(other, ref), expected)
