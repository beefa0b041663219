"""Records of maintenance: what commands leave in the store for the health page of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import MOST_ROUNDS, OptimizePlan, Round, read_rounds, record_round, round_since
from tensorcas_mlflow.store import Store

Tensorcas = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a store of one checkpoint in one pack."""
    store = Store.init(tmp_path / "root", database=False)
    with store.write_checkpoint({"w": np.random.default_rng(0).normal(size=1000)}) as pending:
        pending.commit(RefTarget(run_id="run", step=1))
    return tmp_path / "root"


def rounds(folder: Path) -> list[Round]:
    return read_rounds(Store.open(folder).backend)


def damage(folder: Path) -> None:
    [pack] = folder.glob(".tensorcas/packs/**/*.pack")
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)


@pytest.mark.parametrize(
    ("words", "action"),
    [
        (["verify", "--full"], "verify"),
        (["verify"], "verify, quick"),
        (["verify", "--sample", "50%"], "verify, in part"),
        (["verify", "--full", "--sample", "50%"], "verify, in part"),
        (["verify", "--full", "--part", "1/1"], "verify, in part"),
        (["repair", "--yes"], "repair"),
        (["gc", "--yes"], "collect"),
        (["optimize", "--yes"], "optimize"),
    ],
)
def test_command_leaves_a_record(tensorcas: Tensorcas, folder: Path, words: list[str], action: str) -> None:
    done = tensorcas(*words, "--root", folder)
    [found] = rounds(folder)

    assert (done.status, found.action, found.outcome) == (0, action, "done")
    assert found.summary
    # The output counts the bytes of the record too. A repair says only that nothing is damaged.
    assert found.summary.partition("freed ")[0] in done.out or action == "repair"
    assert 0 < found.began_s <= found.ended_s


@pytest.mark.parametrize("command", ["verify", "repair", "gc", "optimize"])
def test_command_leaves_no_record_if_asked_or_if_nothing_is_done(
    tensorcas: Tensorcas, folder: Path, command: str
) -> None:
    yes = [] if command == "verify" else ["--yes"]

    assert tensorcas(command, "--no-record", *yes, "--root", folder).status == 0
    if command != "verify":
        assert tensorcas(command, "--dry-run", "--root", folder).status == 0
    assert rounds(folder) == []


def test_refused_command_leaves_no_record(tensorcas: Tensorcas, folder: Path) -> None:
    store = Store.open(folder)
    [ref] = store.checkpoints()
    store.drop(ref)

    assert tensorcas("gc", "--root", folder, typed="n\n").status == 0
    assert tensorcas("gc", "--json", "--root", folder).status == 1  # nobody can be asked
    assert tensorcas("gc", "--dry-run", "--abandon", "intents/none", "--root", folder).status == 1
    assert rounds(folder) == []


def test_many_records_leave_the_last_one_of_each_action(folder: Path) -> None:
    backend = Store.open(folder).backend
    for number, action in enumerate(["optimize", "verify", "verify", *["verify, quick"] * (MOST_ROUNDS + 5)]):
        record_round(backend, replace(round_since(number, action, "done", str(number)), ended_s=number + 1.0))
    found = rounds(folder)

    assert len(found) == MOST_ROUNDS + 2
    assert [each.summary for each in found if each.action != "verify, quick"] == ["2", "0"]
    assert found[0].summary == str(MOST_ROUNDS + 7)
    assert len(list(backend.list("maintenance"))) == len(found)


def test_record_tells_the_problems_that_a_verification_finds(tensorcas: Tensorcas, folder: Path) -> None:
    damage(folder)
    done = tensorcas("verify", "--full", "--root", folder, "--json")
    [found] = rounds(folder)

    assert done.status == 3
    assert found.outcome == "problems"
    assert done.json["problems"][0]["reason"] in found.summary


def test_record_tells_the_error_that_ends_a_command(
    tensorcas: Tensorcas, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(OptimizePlan, "execute", fail)
    done = tensorcas("optimize", "--yes", "--root", folder)
    [found] = rounds(folder)

    assert done.status == 1
    assert (found.outcome, found.summary) == ("failed", "no space left on device")


def test_record_that_cannot_be_written_costs_a_line_and_no_result(tensorcas: Tensorcas, folder: Path) -> None:
    (folder / ".tensorcas" / "maintenance").write_bytes(b"a file in place of the folder")
    done = tensorcas("verify", "--full", "--root", folder, "--quiet")

    assert "no record of this is left in the store" in done.err
    assert len(done.err.splitlines()) == 1
    assert "1 checkpoint" in done.out
