"""Servers and clients that tests share, each started when first wanted, and the servers' logs where a test fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy.clients import Client, client
from tests.deploy.postgres import postgresql
from tests.deploy.servers import GUNICORN, UVICORN, Server, running, serve
from tests.tracking import empty_database

__all__ = ["empty_database"]

LOG_CHARS = 6000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield
    if report.failed:
        report.sections += [(f"log of {server.uri}", server.log[-LOG_CHARS:]) for server in running]
    return report


@pytest.fixture(scope="session")
def postgresql_uri() -> Iterator[str]:
    """An empty database of PostgreSQL, as a backend store."""
    with postgresql() as uri:
        yield uri


@pytest.fixture(scope="session")
def new_server_folder(empty_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Make working directories of servers; in each, an SQLite backend store lies ready."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("server")
        (folder / "mlflow.db").write_bytes(empty_database.read_bytes())
        return folder

    return make


@pytest.fixture(scope="session")
def uvicorn(postgresql_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server under uvicorn, with PostgreSQL, whose artifact destination is a store."""
    folder = tmp_path_factory.mktemp("uvicorn")
    options = (*UVICORN, "--artifacts-destination", f"tensorcas://{folder}/artifacts")
    with serve(folder, options, backend_store_uri=postgresql_uri) as server:
        yield server


@pytest.fixture(scope="session")
def gunicorn(new_server_folder: Callable[[], Path]) -> Iterator[Server]:
    """A server under gunicorn, with SQLite, whose artifact destination is a store."""
    folder = new_server_folder()
    options = (*GUNICORN, "--artifacts-destination", f"tensorcas://{folder}/artifacts")
    with serve(folder, options) as server:
        yield server


@pytest.fixture(scope="session", params=["uvicorn", "gunicorn"])
def proxy(request: pytest.FixtureRequest) -> Server:
    """A server whose artifact destination is a store: once of each kind."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session")
def plain_client(proxy: Server) -> Iterator[Client]:
    """A client of that server where our package is not installed."""
    with client(proxy.uri, plugin=False) as process:
        yield process
