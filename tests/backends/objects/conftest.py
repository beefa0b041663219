"""Object stores for all tests of a worker, each started when first wanted, and one proxy in front of moto's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.backends.objects.proxy import Proxy, proxy
from tests.backends.objects.relay import Link
from tests.backends.objects.servers import AzureServer, S3Server, azurite, localstack, moto

_numbers = itertools.count(1)


def fresh_name() -> str:
    """A name that no bucket or container has yet."""
    return f"bucket-{next(_numbers)}"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A server that speaks S3."""
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def second_s3() -> Iterator[S3Server]:
    """Another implementation of S3, for long tests."""
    with localstack() as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[AzureServer]:
    """A server that speaks as Azure does, for long tests."""
    with azurite() as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """An empty bucket of that server."""
    return s3.make_bucket(fresh_name())


@pytest.fixture(scope="session")
def _way(s3: S3Server) -> Iterator[Proxy]:
    with proxy(s3.endpoint) as running:
        yield running


@pytest.fixture
def way(_way: Proxy) -> Proxy:
    """A way to that server: as fast as it can, without faults, nothing counted yet."""
    _way.calm()
    _way.shape(Link())
    _way.forget()
    return _way
