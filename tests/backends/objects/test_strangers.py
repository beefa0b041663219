"""Objects that are not of a store, between its blobs in a bucket."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.errors import RefusedError
from tensorcas_mlflow.maintenance import plan_gc
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of, bucket_of
from tests.store.strangers import FOLDERS, KEYS, OTHER_NAMES, fill, use

OF_OBJECTS = tuple(name for name in OTHER_NAMES if name.isprintable())


@pytest.mark.long
@pytest.mark.parametrize("names", [KEYS, OF_OBJECTS], ids=["keys", "others"])
def test_objects_that_are_not_of_the_store_change_nothing(s3: S3Server, bucket: str, names: tuple[str, ...]) -> None:
    backend = backend_of(s3, bucket)
    fill(backend)
    raw = bucket_of(s3, bucket, ".tensorcas")
    paths = [f"{folder}/{name}".lstrip("/") for folder in FOLDERS for name in names]
    for path in paths:
        raw.put(path, b"not of the store")
    # A folder that cannot hold blobs is named, and what lies in it is not.
    use(backend, [path.removesuffix("#123") for path in paths])

    for path in paths:
        found = raw.get(path)
        assert found is not None
        assert found[0] == b"not of the store"


def test_an_object_whose_name_our_client_cannot_list_is_named_and_nothing_is_deleted(s3: S3Server, bucket: str) -> None:
    backend = backend_of(s3, bucket)
    store = fill(backend)
    store.drop(store.checkpoints()[0])
    before = [info.key for info in backend.list("packs")]
    there = {"Bucket": bucket, "Key": ".tensorcas/packs/Icon\r"}
    s3.client().put_object(**there, Body=b"x")

    with pytest.raises(RefusedError, match="packs/Icon"):
        plan_gc(store, grace_s=0)
    s3.client().delete_object(**there)
    assert [info.key for info in backend.list("packs")] == before
