"""Buckets whose storage does what the servers of the other tests do not."""

from __future__ import annotations

from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from tensorcas_mlflow.backends import Bucket, Root, _open, open_bucket
from tensorcas_mlflow.backends._buckets import PART_BYTES
from tensorcas_mlflow.errors import BackendError, RefusedError


@pytest.fixture
def bucket() -> Bucket:
    views = MemoryStore(), MemoryStore()
    return Bucket(lambda: (views[0], views[0]), uri="tensorcas-s3://bucket", prefix="", has_versions=False)


def test_a_listing_out_of_order_is_refused_and_leaves_nothing_out(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("refs/a/@1", "refs/a-b/@1"):
        bucket.put(name, b"x")
    found = [list(page)[::-1] for page in obstore.list(bucket._reader, "refs")]
    monkeypatch.setattr(obstore, "list", lambda *_, **__: iter(found))

    with pytest.raises(RefusedError, match="order"):
        list(bucket.walk("refs"))


def test_an_upload_that_fails_is_not_taken_for_done_by_an_object_of_its_size_that_was_there(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = PART_BYTES + 2
    bucket.put("model.bin", b"a" * size)
    put = obstore.put

    def failing(store: Any, path: str, data: Any, **options: Any) -> Any:
        if isinstance(data, bytes):
            return put(store, path, data, **options)
        for _ in data:
            pass
        raise obstore.exceptions.GenericError("the last request failed")

    monkeypatch.setattr(obstore, "put", failing)

    with pytest.raises(BackendError):
        bucket.write("model.bin", [b"b" * (size - 1), b"b"])


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_CA_BUNDLE", "/there/is/no/such.pem"), ("AWS_PROFILE", "no-such-profile")]
)
def test_a_setting_that_leads_nowhere_is_a_value_error(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match="cannot be opened"):
        open_bucket(Root.parse("tensorcas-s3://bucket/path"), "")


def test_however_many_buckets_are_named_few_are_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_open, "_MAX_VIEWS", 3)
    monkeypatch.setattr(_open, "_views", {})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for n in range(5):
        open_bucket(Root.parse(f"tensorcas-s3://bucket{n}/path"), "")

    assert len(_open._views) == 3
