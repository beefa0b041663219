"""Many processes save, read, drop, collect, copy and are killed in one root: nothing is lost, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensorcas_mlflow.store import Store
from tests.backends.objects.conftest import s3, second_s3
from tests.backends.objects.servers import S3Server
from tests.race.content import make_files
from tests.race.race import Race, assert_empties, assert_sound

__all__ = ["s3", "second_s3"]

SMOKE_S = 4.0
LONG_S = float(os.environ.get("TENSORCAS_RACE_S", "40"))
GRACE_S = 20.0
"""Longer than a save takes, even where the machine is busy."""


@pytest.fixture(params=["files", "database"])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new stores, those of other processes too, have a database or none."""
    monkeypatch.setenv("TENSORCAS_DATABASE", str(request.param == "database"))


def race_in(tmp_path: Path, seconds: float, *, grace_s: float, with_torch: bool) -> tuple[Race, Store]:
    store = Store.init(tmp_path / "root", chunk_bytes=4096)
    make_files(tmp_path / "samples", with_torch=with_torch)
    return Race(folder=tmp_path, root=store.uri, seconds=seconds, grace_s=grace_s), store


def assert_nothing_is_lost(race: Race) -> None:
    store = Store.open(race.root)

    assert race.wrong(store) == []
    assert_sound(store)
    assert_empties(store)
    copy = race.folder / "copy"
    if copy.exists():
        assert_sound(Store.open(copy))
        assert_empties(Store.open(copy))


@pytest.mark.long
@pytest.mark.usefixtures("places")
def test_savers_readers_and_collectors_of_many_processes_lose_nothing(tmp_path: Path) -> None:
    race, _ = race_in(tmp_path, SMOKE_S, grace_s=0, with_torch=False)
    counts = race.run(["save", "save", "read", "collect"], killed=["save"], every_s=1.5)
    print(counts, race.n_killed)

    assert all(counts[role]["done"] > 0 for role in ("save", "read", "collect"))
    assert_nothing_is_lost(race)


@pytest.mark.long
@pytest.mark.usefixtures("places")
def test_everything_at_once_loses_nothing_while_collectors_take_everybody_for_dead(tmp_path: Path) -> None:
    race, _ = race_in(tmp_path, LONG_S, grace_s=0, with_torch=True)
    roles = ["save", "save", "log", "log", "upload", "read", "show", "collect", "check", "copy"]
    counts = race.run(roles, killed=["save", "log", "upload", "collect"])
    print(counts, race.n_killed)

    assert counts.keys() >= set(roles)
    assert_nothing_is_lost(race)


@pytest.mark.long
@pytest.mark.usefixtures("places")
def test_racing_processes_with_a_grace_see_no_error(tmp_path: Path) -> None:
    race, _ = race_in(tmp_path, LONG_S, grace_s=GRACE_S, with_torch=True)
    roles = ["save", "save", "log", "upload", "upload", "read", "collect", "collect", "check", "copy"]
    counts = race.run(roles, killed=["save", "collect"])
    print(counts, race.n_killed)

    assert not any(each.get("fenced") for each in counts.values()), counts
    assert_nothing_is_lost(race)


@pytest.mark.long
@pytest.mark.parametrize("server", ["s3", "second_s3"])
def test_processes_in_one_bucket_lose_nothing(
    server: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: S3Server = request.getfixturevalue(server)
    for name, value in reached.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    store = Store.init(f"tensorcas-s3://{reached.make_bucket('race')}/root", chunk_bytes=4096)
    make_files(tmp_path / "samples", with_torch=False)
    race = Race(folder=tmp_path, root=store.uri, seconds=min(LONG_S, 20.0), grace_s=GRACE_S)
    counts = race.run(["save", "save", "read", "collect"], killed=["save"], every_s=4)
    print(counts, race.n_killed)

    assert all(counts[role]["done"] > 0 for role in ("save", "read", "collect"))
    assert not any(each.get("fenced") for each in counts.values()), counts
    assert_nothing_is_lost(race)
