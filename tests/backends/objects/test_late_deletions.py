"""A request to delete that the storage carries out a second time, late: it takes nothing that came after it."""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import pytest

from tensorcas_mlflow.backends import ObjectBackend
from tensorcas_mlflow.backends._objects import VOID_BYTES
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tests.backends.objects.faults import Twice
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

__all__ = ["empty_database", "no_stray_settings", "tracking_uri"]


@pytest.fixture
def store(s3: S3Server, bucket: str, way: Proxy) -> Store:
    """A store in a bucket whose requests to delete are all kept, to be carried out again."""
    way.inject(Twice(), kinds=(Kind.DELETE,), times=None)
    return Store.init_backend(backend_of(s3.at(way.endpoint), bucket))


def model_of(seed: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(seed).integers(0, 256, 20_000, dtype=np.uint8)}


def save(store: Store, seed: int, *, step: int = 0) -> None:
    with store.write_checkpoint(model_of(seed)) as pending:
        pending.commit(RefTarget(run_id="run", step=step))


def assert_holds(store: Store, seeds: dict[int, int]) -> None:
    fresh = Store.open_backend(store.backend)
    found = {ref.step: fresh.read_tensors(fresh.manifest(ref)) for ref in fresh.checkpoints()}
    assert found.keys() == seeds.keys()
    assert all(np.array_equal(found[step]["w"], model_of(seed)["w"]) for step, seed in seeds.items())
    assert verify(fresh, full=True).problems == ()


def test_a_step_that_is_saved_again_outlives_a_deletion_that_is_carried_out_again(store: Store, way: Proxy) -> None:
    for step in range(3):
        save(store, step, step=step)
    for ref in store.checkpoints():
        store.drop(ref)
    save(store, 7, step=0)
    save(store, 2, step=2)

    assert way.repeat() > 0
    assert_holds(store, {0: 7, 2: 2})


@pytest.mark.long
def test_step_saved_again_after_a_collection_outlives_a_repeated_deletion(store: Store, way: Proxy) -> None:
    save(store, 0)
    save(store, 1, step=1)
    [first] = [ref for ref in store.checkpoints() if ref.step == 0]
    store.drop(first)
    plan_gc(store, grace_s=0).execute()
    save(store, 0)
    plan_gc(store, grace_s=0).execute()

    assert way.repeat() > 0
    assert_holds(store, {0: 0, 1: 1})
    assert plan_gc(store, grace_s=0).is_empty


def test_artifacts_that_are_stored_again_outlive_the_deletion_of_their_folder(store: Store, way: Proxy) -> None:
    for seed in (0, 1):
        if seed:
            assert store.drop_artifacts("model") == 2
        for name in ("a", "b"):
            with store.write_checkpoint(model_of(seed)) as pending:
                pending.commit(RefTarget(path=f"model/{name}"))

    assert way.repeat() > 0
    assert [ref.path for ref in store.walk_artifacts("model")] == ["model/a", "model/b"]


@pytest.mark.long
def test_a_logged_checkpoint_that_is_deleted_and_logged_again_is_there(
    tracking_uri: str, s3: S3Server, bucket: str, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.at(way.endpoint).environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", "off")
    way.inject(Twice(), kinds=(Kind.DELETE,), times=None)
    api: Any = mlflow.tensorcas  # type: ignore[attr-defined]
    with active_experiment("deleted and again", f"tensorcas-s3://{bucket}/team/experiment"), mlflow.start_run() as run:
        api.log_checkpoint(model_of(0), step=3)
        api.delete_checkpoint(step=3)
        assert api.list_checkpoints(run_id=run.info.run_id) == []
        api.log_checkpoint(model_of(1), step=3)
        way.repeat()
        found = api.load_checkpoint(step=3)

    assert np.array_equal(found["w"], model_of(1)["w"])


@pytest.mark.long
def test_process_looks_once_at_a_key_that_another_process_deleted(
    store: Store, s3: S3Server, bucket: str, way: Proxy
) -> None:
    for step in range(20):
        save(store, 0, step=step)
    for ref in store.checkpoints():
        store.drop(ref)
    way.forget()
    assert store.checkpoints() == []
    assert len(way.traffic()) == 1

    other = Store.open_backend(backend_of(s3.at(way.endpoint), bucket))
    way.forget()
    assert other.checkpoints() == []
    assert len(way.traffic()) == 1 + 20
    way.forget()
    assert other.checkpoints() == []
    assert len(way.traffic()) == 1


@pytest.mark.long
def test_nothing_of_a_ref_stays_but_a_void(store: Store) -> None:
    save(store, 0)
    store.drop(store.checkpoints()[0])
    plan_gc(store, grace_s=0).execute()

    assert isinstance(store.backend, ObjectBackend)
    left = list(store.backend._bucket.walk("refs"))
    assert [info.size for info in left] == [VOID_BYTES]
