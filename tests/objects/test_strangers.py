"""Objects that are not of a store, between its blobs in a bucket."""

from __future__ import annotations

import pytest

from tests.objects.servers import S3Server
from tests.objects.stores import backend_of, bucket_of
from tests.strangers import FOLDERS, KEYS, OTHER_NAMES, fill, use


@pytest.mark.parametrize("names", [KEYS, OTHER_NAMES], ids=["keys", "others"])
def test_objects_that_are_not_of_the_store_change_nothing(s3: S3Server, bucket: str, names: tuple[str, ...]) -> None:
    backend = backend_of(s3, bucket)
    fill(backend)
    raw = bucket_of(s3, bucket, ".tensorcas")
    paths = [f"{folder}/{name}".lstrip("/") for folder in FOLDERS for name in names]
    for path in paths:
        raw.put(path, b"not of the store")
    use(backend, paths)

    assert {raw.get(path)[0] for path in paths} == {b"not of the store"}
