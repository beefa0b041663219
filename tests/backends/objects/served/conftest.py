"""MLflow servers whose artifact destination is a store in S3, for the tests of this folder and of ``tests/deploy``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.backends.objects.conftest import fresh_name
from tests.backends.objects.served.calls import PREFIX
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import backend_of
from tests.deploy.conftest import (
    empty_database,
    new_server_folder,
    plain_client,
    postgresql_uri,
    proxy,
    pytest_runtest_makereport,
)
from tests.deploy.servers import GUNICORN, UVICORN, Server, serve

__all__ = [
    "empty_database",
    "new_server_folder",
    "plain_client",
    "postgresql_uri",
    "proxy",
    "pytest_runtest_makereport",
]


@contextmanager
def serve_bucket(
    s3: S3Server, bucket: str, folder: Path, options: tuple[str, ...], *, backend_store_uri: str | None = None
) -> Iterator[Server]:
    """Run ``mlflow server`` whose artifact destination is a folder of a bucket, for as long as the block lasts."""
    options += ("--artifacts-destination", f"tensorcas-s3://{bucket}/{PREFIX}")
    backend = backend_of(s3, bucket, f"{PREFIX}/.tensorcas")
    with serve(
        folder, options, backend_store_uri=backend_store_uri, settings=s3.environment, backend=backend
    ) as server:
        yield server


@pytest.fixture(scope="session")
def team_bucket(s3: S3Server) -> str:
    """The bucket of the server under uvicorn."""
    return s3.make_bucket(fresh_name())


@pytest.fixture(scope="session")
def uvicorn(
    s3: S3Server, team_bucket: str, postgresql_uri: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server under uvicorn, with PostgreSQL."""
    folder = tmp_path_factory.mktemp("uvicorn")
    with serve_bucket(s3, team_bucket, folder, UVICORN, backend_store_uri=postgresql_uri) as server:
        yield server


@pytest.fixture(scope="session")
def gunicorn(s3: S3Server, new_server_folder: Callable[[], Path]) -> Iterator[Server]:
    """A server under gunicorn, with SQLite."""
    with serve_bucket(s3, s3.make_bucket(fresh_name()), new_server_folder(), GUNICORN) as server:
        yield server
