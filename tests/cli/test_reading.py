"""``explain`` and ``calibrate`` on a real store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.chunk_io import rule_of_machine
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

Tensorcas = Callable[..., Any]


def test_explain_prints_how_a_checkpoint_would_be_read(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("explain", "--run", "train", "--step", "1", "--root", store.uri)

    assert done.status == 0
    assert "1 read by " in done.out
    assert ", because it " in done.out
    assert done.out.splitlines()[-1].startswith("rule: measured by the authors")


def test_explain_answers_in_json_for_some_tensors_and_a_forced_way(tensorcas: Tensorcas, store: Store) -> None:
    [ref] = [ref for ref in store.checkpoints() if ref.run_id == "other"]
    name = store.manifest(ref).names()[0]
    words = ("explain", "--run", "other", "--tensor", name, "--way", "map", "--root", store.uri, "--json")
    told = tensorcas(*words).json

    assert told["checkpoint"]["key"] == ref.key
    assert told["n_tensors"] == 1
    # Of a bucket there are only requests, whatever is asked for.
    is_far = store.backend.is_remote
    assert {pack["way"] for pack in told["packs"]} == {"ranges" if is_far else "map"}
    assert {pack["reason"] == "it was asked for" for pack in told["packs"]} == {not is_far}


def test_calibrate_reports_a_store_too_small_to_measure(tensorcas: Tensorcas, store: Store) -> None:
    done = tensorcas("calibrate", "--root", store.uri)

    assert done.status == 1
    assert "are needed" in done.err


@pytest.mark.long
def test_calibrate_measures_and_later_reads_follow_the_rule(
    tensorcas: Tensorcas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    rule_of_machine.cache_clear()
    store = Store.init(tmp_path / "root")
    with store.write_checkpoint({"w": np.random.default_rng(0).integers(0, 256, 40 << 20, dtype=np.uint8)}) as pending:
        ref = pending.commit(RefTarget(run_id="run", step=1))
    done = tensorcas("calibrate", "--root", store.uri)
    plan = store.explain(store.manifest(ref))
    rule_of_machine.cache_clear()

    assert done.status == 0
    assert done.out.startswith("in memory, ")
    assert plan.rule in done.out
    assert plan.rule.startswith("measured on this machine")
