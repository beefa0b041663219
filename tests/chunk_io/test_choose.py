"""Choice of a way to read a pack, by constants."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcas_mlflow.chunk_io import (
    WAYS,
    Situation,
    choose,
    way_named,
    way_of_environment,
)

MANY = 200 << 20


def situation(share: float = 1.0, **options: Any) -> Situation:
    given: dict[str, Any] = {"n_bytes": MANY, "total_bytes": MANY, "n_chunks": 800, "pack_bytes": 256 << 20}
    given |= {"share_in_memory": lambda: share, "can_direct": lambda: True} | options
    return Situation(**given)


def test_cached_pages_are_read_on_one_thread_per_core() -> None:
    choice = choose(situation(1.0))

    assert (choice.way, choice.waits, choice.is_alone) == ("pread", False, False)
    assert choice.reason == "100% of it is in memory"


def test_long_read_from_disk_bypasses_the_page_cache() -> None:
    choice = choose(situation(0.1))

    assert (choice.way, choice.waits) == ("direct", True)


@pytest.mark.parametrize(
    "options",
    [
        {"n_bytes": 3 << 20},
        {"n_stretches": 20_000},
        {"can_direct": lambda: False},
    ],
)
def test_other_read_from_disk_uses_many_threads(options: dict[str, Any]) -> None:
    choice = choose(situation(0.1, **options))

    assert (choice.way, choice.waits) == ("pread", True)


def test_plan_of_a_small_read_does_not_check_the_page_cache() -> None:
    def refuse() -> float:
        raise AssertionError("it was asked")

    of_one_pack = situation(share_in_memory=refuse, n_bytes=3 << 20, total_bytes=3 << 20)
    of_one_of_many = situation(0.1, n_bytes=3 << 20, total_bytes=MANY)

    assert not choose(of_one_pack).waits
    assert choose(of_one_of_many).waits


def test_threads_pay_for_less_where_chunks_have_to_be_decoded() -> None:
    given = {"n_bytes": 2 << 20, "total_bytes": 2 << 20, "n_chunks": 8}

    assert choose(situation(is_raw=True, **given)).is_alone
    assert not choose(situation(is_raw=False, **given)).is_alone


def test_a_part_of_a_pack_is_read_with_nothing_read_ahead() -> None:
    assert choose(situation(0.0, n_bytes=6 << 20)).is_exact
    assert not choose(situation(0.0)).is_exact


def test_small_read_is_done_by_the_calling_thread() -> None:
    def ask() -> float:
        raise AssertionError

    few = situation(n_bytes=1000, total_bytes=1000, n_chunks=1, share_in_memory=ask)

    assert choose(few).is_alone
    assert choose(few).way == "pread"


def test_remote_store_is_read_by_ranges_whatever_is_forced() -> None:
    remote = situation(pack_bytes=None, is_remote=True)

    assert choose(remote).reason == "it lies on another machine"
    assert choose(remote, "map").way == "ranges"
    assert "map reads need a file of this machine" in choose(remote, "map").reason


@pytest.mark.parametrize("way", ["pread", "direct", "map", "ranges"])
def test_way_of_reading_can_be_forced(way: Any) -> None:
    assert choose(situation(1.0), way).way == way


def test_unavailable_forced_way_is_reported_and_replaced() -> None:
    choice = choose(situation(1.0, can_direct=lambda: False), "direct")

    assert choice.way == "pread"
    assert choice.reason.endswith("100% of it is in memory")


def test_unknown_way_of_reading_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [way_named(way) for way in WAYS] == list(WAYS)
    monkeypatch.setenv("TENSORCAS_READ", "telepathy")

    with pytest.raises(ValueError, match="TENSORCAS_READ: a way of reading is one of pread,"):
        way_of_environment()


@pytest.mark.parametrize("said", ["", "auto"])
def test_the_environment_may_leave_the_choice_open(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("TENSORCAS_READ", said)

    assert way_of_environment() is None
