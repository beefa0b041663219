"""A store in a bucket that is deleted, or made anew, while a training has it open."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.backends import ObjectBackend
from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of, bucket_of

STATE = {"w": np.arange(50_000)}


@pytest.fixture
def store(s3: S3Server, bucket: str, way: Proxy) -> Store:
    Store.init_backend(backend_of(s3, bucket))
    opened = Store.open_backend(backend_of(s3.at(way.endpoint), bucket))
    save(opened, 0)
    return opened


def save(store: Store, step: int) -> None:
    with store.write_checkpoint(STATE) as pending:
        pending.commit(RefTarget(run_id="run", step=step))


def delete_all(s3: S3Server, name: str) -> None:
    bucket = bucket_of(s3, name, ".tensorcas")
    for info in list(bucket.walk("")):
        bucket.delete(info.path)


@pytest.mark.long
def test_save_into_a_bucket_store_that_was_made_anew_is_refused(store: Store, s3: S3Server, bucket: str) -> None:
    delete_all(s3, bucket)
    other = Store.init_backend(backend_of(s3, bucket))

    with pytest.raises(ConflictError, match=f"is store {other.id} by now, and no longer {store.id}"):
        save(store, 1)

    assert other.checkpoints() == []


def test_save_into_a_deleted_bucket_store_is_refused_and_leaves_nothing(
    store: Store, s3: S3Server, bucket: str
) -> None:
    delete_all(s3, bucket)

    with pytest.raises(StoreNotFoundError):
        save(store, 1)

    assert isinstance(store.backend, ObjectBackend)
    assert list(store.backend._bucket.walk("")) == []


def test_check_for_another_store_costs_no_request(store: Store, way: Proxy) -> None:
    way.forget()
    save(store, 1)

    assert way.traffic().n_billed == 5, str(way.traffic())
