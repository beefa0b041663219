"""Clients with our package: of a server that keeps a store in S3, and of a stock server with plain files there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends.objects.conftest import fresh_name
from tests.backends.objects.served.calls import PREFIX, objects_in
from tests.backends.objects.servers import S3Server
from tests.deploy.clients import Client, client
from tests.deploy.models import round_trip_sklearn, round_trip_tensorcas
from tests.deploy.servers import UVICORN, Server, serve
from tests.deploy.test_both_ends import (
    files_of,
    load_step,
    log_weights,
    test_checkpoints_of_a_training_come_back,
    test_models_of_mlflows_flavors_come_back_as_they_were,
    test_models_of_our_flavor_come_back_as_they_were,
    user,
)

__all__ = [
    "test_checkpoints_of_a_training_come_back",
    "test_models_of_mlflows_flavors_come_back_as_they_were",
    "test_models_of_our_flavor_come_back_as_they_were",
    "user",
]

pytestmark = pytest.mark.long


def test_there_is_one_store_in_the_bucket(s3: S3Server, team_bucket: str, user: Client) -> None:
    _, uri = user(log_weights, 2)

    names = objects_in(s3, team_bucket)
    assert {name.partition("/.tensorcas/")[0] for name in names if "/.tensorcas/" in name} == {PREFIX}
    assert "MLmodel" in user(files_of, uri)


@pytest.fixture(scope="module")
def stock_bucket(s3: S3Server) -> str:
    """The bucket of a stock server."""
    return s3.make_bucket(fresh_name())


@pytest.fixture(scope="module")
def stock(s3: S3Server, stock_bucket: str, new_server_folder: Callable[[], Path]) -> Iterator[Server]:
    """A server without our package, whose artifact destination is a bucket."""
    options = (*UVICORN, "--artifacts-destination", f"s3://{stock_bucket}/{PREFIX}")
    with serve(new_server_folder(), options, plugin=False, settings=s3.environment) as server:
        yield server


@pytest.fixture(scope="module")
def carrier(stock: Server) -> Iterator[Client]:
    """A client of that server where our package is installed, and which cannot reach the bucket."""
    with client(stock.uri, plugin=True) as process:
        yield process


def test_clients_carry_a_store_through_a_stock_server(s3: S3Server, stock_bucket: str, carrier: Client) -> None:
    run_id, uri = carrier(log_weights, 8)

    names = objects_in(s3, stock_bucket)
    packs = sum(size for name, size in names.items() if "/.tensorcas/packs/" in name)
    assert carrier(load_step, run_id, 0) == [-1.0, 1.0, 2.0, 3.0, 4.0]
    assert carrier(load_step, run_id, 2) == [-1.0, -1.0, -1.0, 3.0, 4.0]
    assert "MLmodel" in carrier(files_of, uri)
    # Eight steps of four chunks each, of which one changes.
    assert 0 < packs < 3 * 800_000


@pytest.mark.parametrize("round_trip", [round_trip_sklearn, round_trip_tensorcas])
def test_a_model_comes_back_through_a_stock_server(carrier: Client, round_trip: Callable[[], list[str]]) -> None:
    assert carrier(round_trip) == []
