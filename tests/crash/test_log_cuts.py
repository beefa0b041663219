"""A power cut or a kill at any moment loses nothing that was committed to logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.scenarios import SCENARIOS
from tests.crash.test_cuts import check_cuts, check_kills, check_second_cuts
from tests.crash.world import forget_stores


@pytest.fixture(autouse=True)
def _logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give new stores logs."""
    monkeypatch.setenv("TENSORCAS_LOGS", "true")
    # The files of a machine keep their inodes in a power cut; those of this test do not.
    monkeypatch.setattr("tensorcas_mlflow.backends._log_folder.inode_of", lambda descriptor: 1)
    forget_stores()


@pytest.mark.parametrize("name", ["the first save", "saves in the place of others", "a compaction"])
def test_a_cut_at_some_moment_loses_nothing_that_was_committed_to_logs(tmp_path: Path, name: str) -> None:
    cuts = check_cuts(name, tmp_path, n_drawn=1, stride=29)

    assert cuts.n_checked > 1


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cut_at_any_moment_loses_nothing_that_was_committed_to_logs(tmp_path: Path, name: str) -> None:
    cuts = check_cuts(name, tmp_path, n_drawn=4, stride=1)

    assert cuts.n_checked > 15


@pytest.mark.parametrize("name", ["the first save", "a compaction"])
def test_a_cut_after_others_went_on_with_the_logs_of_a_killed_one_loses_nothing(tmp_path: Path, name: str) -> None:
    n_kills, n_checked = check_kills(name, tmp_path, every=23, n_drawn=1, stride=31)

    assert n_kills > 1
    assert n_checked > 2


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_cut_after_others_went_on_with_the_logs_of_any_killed_one_loses_nothing(tmp_path: Path, name: str) -> None:
    n_kills, n_checked = check_kills(name, tmp_path, every=1, n_drawn=2, stride=17)

    assert n_kills > 20
    assert n_checked > 20


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_second_cut_after_a_first_loses_nothing_that_was_committed_to_logs(tmp_path: Path, name: str) -> None:
    assert check_second_cuts(name, tmp_path, n_first=12, n_drawn=1, stride=7) > 10
