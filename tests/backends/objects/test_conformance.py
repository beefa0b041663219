"""Object stores keep every promise of the contract, as files do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import AzureStore

from tensorcas_mlflow.backends import Bucket, ObjectBackend
from tensorcas_mlflow.errors import ForbiddenError, RefusedError
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.testing import BackendConformance
from tests.backends.objects.conftest import fresh_name
from tests.backends.objects.servers import AzureServer, S3Server
from tests.backends.objects.stores import backend_of, bucket_of

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def shared_bucket(s3: S3Server) -> str:
    return s3.make_bucket(fresh_name())


@pytest.fixture(scope="session")
def second_bucket(second_s3: S3Server) -> str:
    return second_s3.make_bucket(fresh_name())


@pytest.fixture(scope="session")
def container(azure: AzureServer) -> str:
    return azure.make_container(fresh_name())


class TestS3(BackendConformance):
    rounds = 12

    @pytest.fixture
    def backend(self, s3: S3Server, shared_bucket: str) -> ObjectBackend:
        return backend_of(s3, shared_bucket, f"team/{next(_prefixes)}/.tensorcas")


@pytest.mark.long
class TestAnotherS3(BackendConformance):
    rounds = 12

    @pytest.fixture
    def backend(self, second_s3: S3Server, second_bucket: str) -> ObjectBackend:
        return backend_of(second_s3, second_bucket, f"team/{next(_prefixes)}/.tensorcas")


@pytest.mark.long
class TestAzure(BackendConformance):
    @pytest.fixture
    def backend(self, azure: AzureServer, container: str) -> ObjectBackend:
        views = tuple(AzureStore(container, **azure.config, retry_config={"max_retries": n}) for n in (5, 0))
        prefix = f"team/{next(_prefixes)}/.tensorcas"
        uri = f"tensorcas-az://{container}"
        return ObjectBackend(Bucket(lambda: (views[0], views[1]), uri=uri, prefix=prefix, has_versions=False), uri=uri)


def test_a_bucket_that_is_not_there_is_said_to_be_missing(s3: S3Server) -> None:
    backend = backend_of(s3, "no-such-bucket")

    with pytest.raises(RefusedError, match="no such bucket"):
        backend.put_new("a", [b"x"])


@pytest.mark.long
def test_denied_user_gets_an_error_without_a_secret(s3: S3Server, bucket: str, way: object) -> None:
    from tests.backends.objects.faults import EXPIRED_TOKEN
    from tests.backends.objects.proxy import Proxy

    assert isinstance(way, Proxy)
    way.inject(EXPIRED_TOKEN, times=None)
    backend = backend_of(s3.at(way.endpoint), bucket)

    with pytest.raises(ForbiddenError, match="credentials have expired") as caught:
        backend.get("format")
    assert s3.secret_key not in str(caught.value)


@pytest.mark.long
def test_objects_that_are_no_keys_are_passed_over(s3: S3Server, bucket: str) -> None:
    backend = backend_of(s3, bucket)
    backend.put_new("a/blob", [b"x"])
    for name in ("a/no key", "a/b/c+d", "a/é"):
        bucket_of(s3, bucket, ".tensorcas").put(name, b"x")

    assert [info.key for info in backend.list("a")] == ["a/blob"]
    found = backend.list_dir("a")
    assert (found.facts(), found.blobs, found.segments) == (list(backend.list("a")), {"blob": True}, {"b"})


@pytest.mark.long
def test_a_child_made_by_fork_is_told_instead_of_waiting_for_ever(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    import os

    backend = backend_of(s3, bucket)
    backend.put_new("a", [b"x"])
    child = os.fork()
    if child == 0:
        try:
            backend.get("a")
        except Exception as error:  # noqa: BLE001 - told to the parent
            (tmp_path / "said").write_text(str(error))
        os._exit(0)
    os.waitpid(child, 0)

    assert "'spawn'" in (tmp_path / "said").read_text()


class CarelessBucket(Bucket):
    """A storage that takes conditional writes for others, as some do that speak S3."""

    careless = "create"

    def create(self, path: str, data: bytes | Callable[[], bytes]) -> str:
        if self.careless == "create":
            self.put(path, data if isinstance(data, bytes) else data())
            info = self.head(path)
            assert info is not None
            return info.token
        return super().create(path, data)

    def swap(self, path: str, data: bytes, token: str) -> str | None:
        if self.careless == "swap":
            self.put(path, data)
            info = self.head(path)
            assert info is not None
            return info.token
        return super().swap(path, data, token)


@pytest.mark.parametrize(("careless", "header"), [("create", "If-None-Match"), ("swap", "If-Match")])
def test_no_store_is_made_where_conditions_are_not_honoured(
    s3: S3Server, bucket: str, careless: str, header: str
) -> None:
    plain = bucket_of(s3, bucket, ".tensorcas")
    storage = CarelessBucket(plain._connect, uri=plain.uri, prefix=".tensorcas", has_versions=False)
    storage.careless = careless

    with pytest.raises(RefusedError, match=f"does not honour {header}"):
        Store.init_backend(ObjectBackend(storage, uri=plain.uri))
    assert list(plain.walk("")) == []
