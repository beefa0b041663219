"""Backends and stores on the servers of these tests."""

from __future__ import annotations

from obstore.store import S3Store

from tensorcas_mlflow.backends import Bucket, ObjectBackend
from tests.backends.objects.servers import S3Server


def bucket_of(server: S3Server, name: str, prefix: str = "") -> Bucket:
    """A bucket, without asking the environment where it is."""
    settings = {**server.config, "bucket": name, "disable_bulk_delete": True}
    views = tuple(S3Store(**settings, retry_config={"max_retries": retries}) for retries in (5, 0))
    return Bucket(
        lambda: (views[0], views[1]), uri=f"tensorcas-s3://{name}/{prefix}", prefix=prefix, has_versions=False
    )


def backend_of(server: S3Server, name: str, prefix: str = ".tensorcas") -> ObjectBackend:
    """The backend of a store at the top of a bucket."""
    return ObjectBackend(bucket_of(server, name, prefix), uri=f"tensorcas-s3://{name}")
