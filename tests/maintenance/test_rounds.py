"""Records and the lease of scheduled maintenance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.layout import find_strangers, record_bytes
from tensorcas_mlflow.maintenance import Lease, Round, read_rounds, running_round, verify
from tensorcas_mlflow.maintenance._rounds import LEASE, LEASE_S, MOST_ROUNDS, record_round
from tensorcas_mlflow.store import Store

ROUND = Round(action="verify", began_s=100.0, ended_s=101.0, outcome="done", summary="sound", host="here")


@pytest.fixture(params=["memory", "folder"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    if request.param == "memory":
        return MemoryBackend()
    return Store.init(tmp_path_factory.mktemp("store")).backend


def hold(backend: Backend, **facts: object) -> None:
    """Put a lease of another process."""
    record = {"action": "optimize", "began_s": 50.0, "format": 1, "host": "elsewhere", **facts}
    backend.put_new(LEASE, [record_bytes(record)])


def test_round_is_recorded_and_read_back(backend: Backend) -> None:
    lease = Lease.take(backend, "verify")
    assert lease is not None
    done = lease.end("problems", "1 problem")

    assert read_rounds(backend) == [done]
    assert (done.action, done.outcome, done.summary) == ("verify", "problems", "1 problem")
    assert running_round(backend) is None


def test_second_process_does_not_get_the_lease(backend: Backend) -> None:
    first = Lease.take(backend, "verify")
    assert first is not None

    assert Lease.take(backend, "collect") is None
    now = running_round(backend)
    assert now is not None
    assert now.action == "verify"
    assert first.renew()
    assert Lease.take(backend, "collect") is None
    first.give_back()
    assert Lease.take(backend, "collect") is not None


def test_lease_of_a_process_that_is_gone_is_taken_over_and_its_round_recorded(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(backend)
    assert Lease.take(backend, "verify") is None
    monkeypatch.setattr("tensorcas_mlflow.maintenance._rounds.LEASE_S", -1.0)

    assert Lease.take(backend, "verify") is not None
    [died] = read_rounds(backend)
    assert (died.action, died.outcome, died.host, died.began_s) == ("optimize", "died", "elsewhere", 50.0)
    assert LEASE_S > 60


def test_holder_notices_that_its_lease_was_taken_over(backend: Backend) -> None:
    lease = Lease.take(backend, "verify")
    assert lease is not None
    backend.delete(LEASE)
    hold(backend)

    assert not lease.renew()
    lease.end("done", "")
    assert backend.stat(LEASE) is not None


def test_only_the_newest_rounds_are_kept_newest_first(backend: Backend) -> None:
    for number in range(MOST_ROUNDS + 3):
        record_round(backend, replace(ROUND, began_s=float(number), ended_s=1000.0))

    began = [each.began_s for each in read_rounds(backend)]
    assert began == [float(number) for number in range(MOST_ROUNDS + 2, 2, -1)]
    assert len(list(backend.list("maintenance"))) == MOST_ROUNDS


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"[]",
        record_bytes({"format": 99}),
        record_bytes({"format": 1, "outcome": "fine", "began_s": 1, "ended_s": 2}),
        record_bytes({"format": 1, "outcome": "done", "began_s": 1, "ended_s": float("inf")}),
        record_bytes({"format": 1, "outcome": "done", "began_s": "now", "ended_s": 2}),
    ],
)
def test_unreadable_record_is_left_out(backend: Backend, forged: bytes) -> None:
    backend.put_new("maintenance/" + "f" * 32, [forged])
    record_round(backend, ROUND)

    assert read_rounds(backend) == [ROUND]


def test_records_are_blobs_of_the_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store.init(tmp_path_factory.mktemp("store"))
    record_round(store.backend, ROUND)
    assert Lease.take(store.backend, "verify") is not None

    assert find_strangers(store.backend) == ()
    assert verify(store, full=True).problems == ()
