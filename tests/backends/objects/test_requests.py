"""Requests to an object store are few: each takes its time and costs money."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import CheckpointExistsError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store, _ingest
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of

TENSOR_BYTES = 1 << 20
N_TENSORS = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local cache of a test: none is there at first."""
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(s3: S3Server, bucket: str, way: Proxy, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store that this process has made, with a cache of its own: others are on another machine."""
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache of the saver"))
    made = Store.init_backend(backend_of(s3.at(way.endpoint), bucket))
    monkeypatch.setenv("TENSORCAS_CACHE", str(cache))
    way.forget()
    return made


@pytest.fixture
def model() -> dict[str, Array]:
    draw = np.random.default_rng(0)
    return {f"layer.{n}": draw.integers(0, 256, TENSOR_BYTES, dtype=np.uint8) for n in range(N_TENSORS)}


def save(store: Store, model: dict[str, Array], step: int) -> Ref:
    with store.write_checkpoint(model) as pending:
        return pending.commit(RefTarget(run_id="run", step=step))


def opened_elsewhere(store: Store, s3: S3Server, bucket: str, way: Proxy) -> Store:
    """The same store, of which this object knows nothing yet."""
    other = Store.open_backend(backend_of(s3.at(way.endpoint), bucket))
    way.forget()
    return other


@pytest.mark.long
def test_a_first_save_makes_seven_requests_beside_its_packs(store: Store, model: dict[str, Array], way: Proxy) -> None:
    save(store, model, 0)
    traffic = way.traffic()
    n_packs = len(list(store.backend.list("packs")))

    assert n_packs == 1
    assert traffic.n_billed == n_packs + 7, str(traffic)


@pytest.mark.long
def test_a_save_of_an_unchanged_model_makes_five_requests(store: Store, model: dict[str, Array], way: Proxy) -> None:
    save(store, model, 0)
    way.forget()
    save(store, model, 1)
    traffic = way.traffic()

    assert traffic.n_billed == 5, str(traffic)
    assert traffic.up_bytes < 20_000


@pytest.mark.long
def test_a_save_of_a_changed_model_sends_what_changed(store: Store, model: dict[str, Array], way: Proxy) -> None:
    save(store, model, 0)
    way.forget()
    save(store, {**model, "layer.3": model["layer.3"][::-1].copy()}, 1)
    traffic = way.traffic()

    assert traffic.n_billed == 8, str(traffic)
    assert traffic.up_bytes < 1.1 * TENSOR_BYTES


@pytest.mark.parametrize("n_batches", [2, 6])
def test_file_of_many_batches_makes_ten_requests_beside_its_packs(
    store: Store, way: Proxy, monkeypatch: pytest.MonkeyPatch, n_batches: int
) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", TENSOR_BYTES)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", TENSOR_BYTES)
    data = np.random.default_rng(0).bytes(n_batches * TENSOR_BYTES + 1000)
    with store.write_stream(io.BytesIO(data)) as pending:
        ref = pending.commit(RefTarget(path="file"))
    traffic = way.traffic()
    n_packs = len(list(store.backend.list("packs")))

    assert n_packs > n_batches // 2
    # Two intents, each with a listing of condemned lists and a deletion; a listing of packs; and of the commit the
    # manifest, the note in the intent, and the ref.
    assert traffic.n_billed == n_packs + 10, str(traffic)
    assert b"".join(store.iter_file(ref)) == data


@pytest.fixture
def steps(s3: S3Server, bucket: str, way: Proxy, monkeypatch: pytest.MonkeyPatch) -> TensorCasStore:
    """The steps of a run in an empty store."""
    for name, value in s3.at(way.endpoint).environment.items():
        monkeypatch.setenv(name, value)
    return TensorCasStore(f"tensorcas-s3://{bucket}/root", "run")


def test_next_step_of_a_run_makes_seven_requests_beside_its_packs(steps: TensorCasStore, way: Proxy) -> None:
    draw = np.random.default_rng(0)
    steps.save({"w": draw.normal(size=10_000)}, 1)
    for step in (2, 5):
        way.forget()
        steps.save({"w": draw.normal(size=10_000)}, step)

        assert way.traffic().n_billed == 1 + 7, str(way.traffic())


@pytest.mark.long
def test_step_that_another_process_has_saved_meanwhile_is_refused(steps: TensorCasStore) -> None:
    other = TensorCasStore(steps.store.uri, "run")
    steps.save({"w": np.ones(10)}, 1)
    other.save({"w": np.full(10, 2.0)}, 2)
    with pytest.raises(CheckpointExistsError):
        steps.save({"w": np.full(10, 3.0)}, 2)
    with pytest.raises(CheckpointExistsError):
        other.save({"w": np.full(10, 3.0)}, 1)

    assert (steps.load_tensors(2)["w"] == 2).all()
    assert (steps.load_tensors(1)["w"] == 1).all()
    assert steps.list_checkpoints() == [1, 2]


def test_step_saved_again_by_its_process_makes_no_more_requests(steps: TensorCasStore, way: Proxy) -> None:
    draw = np.random.default_rng(0)
    steps.save({"w": draw.normal(size=10_000)}, 1)
    way.forget()
    steps.save({"w": draw.normal(size=10_000)}, 1, overwrite=True)

    assert way.traffic().n_billed == 1 + 7, str(way.traffic())


@pytest.mark.long
def test_step_saved_again_by_another_process_makes_three_requests_more(
    store: Store, model: dict[str, Array], s3: S3Server, bucket: str, way: Proxy
) -> None:
    save(store, model, 0)
    other = opened_elsewhere(store, s3, bucket, way)
    save(other, model, 1)
    way.forget()
    save(other, model, 0)

    # It creates the ref, finds one, and replaces that: a request that fails, a look, and another note in the intent.
    assert way.traffic().n_billed == 5 + 3, str(way.traffic())


@pytest.mark.long
def test_opening_a_checkpoint_makes_two_requests(
    store: Store, model: dict[str, Array], s3: S3Server, bucket: str, way: Proxy
) -> None:
    ref = save(store, model, 0)
    other = opened_elsewhere(store, s3, bucket, way)
    found = other.ref(ref.key)
    assert found is not None
    other.manifest(found)

    assert way.traffic().n_billed == 2


@pytest.mark.long
@pytest.mark.parametrize(("names", "n_most"), [([3], 1), ([3, 12, 20], 3), ([3, 4, 5, 6], 1), ([0, 1, 22, 23], 2)])
def test_reading_tensors_makes_a_request_for_each_that_is_not_near_another(
    store: Store,
    model: dict[str, Array],
    s3: S3Server,
    bucket: str,
    way: Proxy,
    names: list[int],
    n_most: int,
) -> None:
    ref = save(store, model, 0)
    other = opened_elsewhere(store, s3, bucket, way)
    manifest = other.manifest(ref)
    way.forget()
    wanted = [f"layer.{n}" for n in names]
    tensors = other.read_tensors(manifest, wanted)
    traffic = way.traffic()

    assert all(np.array_equal(tensors[name], model[name]) for name in wanted)
    assert len(traffic.of(Kind.GET)) == len(traffic) <= n_most, str(traffic)
    assert traffic.down_bytes < 1.01 * TENSOR_BYTES * len(names)


@pytest.mark.long
def test_a_whole_checkpoint_is_read_in_large_pieces_many_at_once(
    store: Store, model: dict[str, Array], s3: S3Server, bucket: str, way: Proxy
) -> None:
    ref = save(store, model, 0)
    other = opened_elsewhere(store, s3, bucket, way)
    manifest = other.manifest(ref)
    way.forget()
    other.read_tensors(manifest)
    traffic = way.traffic()

    assert len(traffic) <= 4, str(traffic)
    assert traffic.most_at_once > 1


@pytest.mark.long
def test_the_next_step_is_loaded_by_what_changed_alone(
    store: Store, model: dict[str, Array], s3: S3Server, bucket: str, way: Proxy
) -> None:
    first = save(store, model, 0)
    changed = {**model, "layer.3": model["layer.3"][::-1].copy()}
    second = save(store, changed, 1)
    other = opened_elsewhere(store, s3, bucket, way)
    other.read_tensors(other.manifest(first))
    # Another process, as it were: nothing but the cache is left of the first load.
    other = opened_elsewhere(store, s3, bucket, way)
    manifest = other.manifest(second)
    way.forget()
    tensors = other.read_tensors(manifest)
    traffic = way.traffic()

    assert all(np.array_equal(tensors[name], changed[name]) for name in changed)
    assert len(traffic) == 1, str(traffic)
    assert traffic.down_bytes < 1.1 * TENSOR_BYTES


@pytest.mark.long
def test_a_spoilt_cache_costs_requests_and_nothing_else(
    store: Store, model: dict[str, Array], s3: S3Server, bucket: str, way: Proxy, cache: Path
) -> None:
    ref = save(store, model, 0)
    other = opened_elsewhere(store, s3, bucket, way)
    manifest = other.manifest(ref)
    other.read_tensors(manifest)
    files = [file for file in cache.rglob("*") if file.is_file() and file.stat().st_size > TENSOR_BYTES]
    for nth, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[len(data) * (nth + 1) // (len(files) + 1)] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
    way.forget()
    tensors = other.read_tensors(manifest, verify=False)

    assert files
    assert all(np.array_equal(tensors[name], model[name]) for name in model)
    assert len(way.traffic()) > 0


@pytest.mark.long
def test_a_chunk_that_was_moved_is_found_although_the_manifest_says_where_it_was(
    store: Store, model: dict[str, Array], s3: S3Server, bucket: str, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")
    save(store, model, 0)
    half = {name: model[name] for name in list(model)[: N_TENSORS // 2]}
    ref = save(store, half, 1)
    before = {info.key for info in store.backend.list("packs")}
    for dropped in store.checkpoints():
        if dropped.step == 0:
            store.drop(dropped)
    plan_gc(store, grace_s=0).execute()
    other = opened_elsewhere(store, s3, bucket, way)
    tensors = other.read_tensors(other.manifest(ref))

    assert before.isdisjoint(info.key for info in store.backend.list("packs"))
    assert all(np.array_equal(tensors[name], half[name]) for name in half)


@pytest.mark.long
def test_a_store_of_many_packs_is_known_by_few_requests(
    s3: S3Server, bucket: str, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 8)
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._LATE_S", 0.0)
    store = Store.init_backend(backend_of(s3.at(way.endpoint), bucket))
    states = [{"w": np.random.default_rng(n).integers(0, 256, 5000, dtype=np.uint8)} for n in range(20)]
    for step, state in enumerate(states):
        save(store, state, step)
    other = opened_elsewhere(store, s3, bucket, way)
    save(other, states[3], 100)
    traffic = way.traffic()

    assert len(list(store.backend.list("packs"))) == 20
    # A first save looks at `format`. Two segments tell of sixteen packs, and four are read one by one.
    assert len(traffic) <= 7 + 1 + 2 + 1 + 1 + 4 + 1, str(traffic)
