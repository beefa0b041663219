"""Commands that work in several processes say and do what they do in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.cli.conftest import Tensorcas


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    store = Store.init(folder, chunk_bytes=4096)
    random = np.random.default_rng(0)
    for step in range(3):
        with store.write_checkpoint({"a": random.standard_normal(5000).astype(np.float32)}) as pending:
            pending.commit(RefTarget(run_id="8f3c", step=step))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("words", [["gc", "--dry-run"], ["optimize", "--yes"]])
def test_two_processes_say_what_one_says(tensorcas: Tensorcas, folder: Path, words: list[str]) -> None:
    plan = [words[0], "--dry-run", "--json", "--root", folder]
    one, two = tensorcas(*plan), tensorcas(*plan, "--jobs", "2")
    done = tensorcas(*words, "--json", "--root", folder, "--jobs", "2")

    assert (two.status, two.out) == (one.status, one.out)
    assert done.status == 0
    assert tensorcas("verify", "--full", "--root", folder).status == 0


@pytest.mark.long
def test_two_processes_copy_all(tensorcas: Tensorcas, folder: Path, tmp_path: Path) -> None:
    done = tensorcas("copy", folder, tmp_path / "copy", "--jobs", "2")

    assert done.status == 0
    assert "copied 3 checkpoints" in done.out
    assert tensorcas("verify", "--full", "--root", tmp_path / "copy").status == 0


@pytest.mark.parametrize("words", [["gc", "--root", "."], ["optimize", "--root", "."], ["copy", "a", "b"]])
def test_number_of_processes_of_a_cluster_is_refused(tensorcas: Tensorcas, words: list[str]) -> None:
    done = tensorcas(*words, "--engine", "ray", "--jobs", "2")

    assert done.status == 2
    assert "--jobs is for processes of this machine" in done.err
