"""``tensorcas optimize``: asks, tells what it does, and answers no with doing nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

Tensorcas = Callable[..., Any]


def packs(store: Store) -> set[str]:
    return {info.key for info in store.backend.list("packs")}


def values(store: Store) -> list[Any]:
    fresh = Store.open(store.uri)
    return [each for ref in fresh.checkpoints() for each in fresh.read_tensors(fresh.manifest(ref)).values()]


def test_optimize_works_after_a_yes_and_then_finds_nothing(tensorcas: Tensorcas, store: Store) -> None:
    before = packs(store), values(store)
    done = tensorcas("optimize", "--root", store.uri, typed="y\n")
    again = tensorcas("optimize", "--root", store.uri)

    assert (done.status, again.status) == (0, 0)
    assert done.out.startswith("to optimize: ")
    assert "of new packs" in done.out
    assert done.err.endswith("[y/N] ")
    assert packs(store).isdisjoint(before[0])
    assert all(np.array_equal(now, then) for now, then in zip(values(store), before[1], strict=True))
    assert again.out.startswith("nothing to optimize in ")


def test_optimize_changes_nothing_without_a_yes_or_in_a_dry_run(tensorcas: Tensorcas, store: Store) -> None:
    before = packs(store)
    refused = tensorcas("optimize", "--root", store.uri, typed="n\n")
    dry = tensorcas("optimize", "--dry-run", "--root", store.uri)

    assert refused.out.endswith("nothing was changed\n")
    assert "nothing was changed" not in dry.out
    assert packs(store) == before


def test_optimize_in_json_prints_a_report(tensorcas: Tensorcas, store: Store) -> None:
    answered = tensorcas("optimize", "--yes", "--effort", "balanced", "--root", store.uri, "--json").json

    assert answered["effort"] == "balanced"
    assert answered["plan"]["n_chunks"] > 0
    assert answered["report"]["bytes_after"] == sum(file.size for file in store.backend.files())


def test_optimize_with_quiet_prints_no_progress(tensorcas: Tensorcas, store: Store) -> None:
    assert tensorcas("optimize", "--yes", "--quiet", "--root", store.uri).err == ""


def test_optimize_for_restore_names_its_checkpoints_in_json(tensorcas: Tensorcas, store: Store) -> None:
    answered = tensorcas("optimize", "--yes", "--for", "restore", "--root", store.uri, "--json").json
    keys = [ref.key for ref in store.checkpoints()]
    pinned = tensorcas(
        "optimize", "--dry-run", "--for", "restore", "--pin", keys[0], "--root", store.uri, "--json"
    ).json

    assert answered["for"] == "restore"
    assert answered["plan"]["one_hop"]
    assert answered["report"] is not None
    assert store.checkpoints()[0].label in pinned["plan"]["one_hop"]


def test_optimize_takes_a_run_or_a_path_as_a_pin(tensorcas: Tensorcas, store: Store, tmp_path: Path) -> None:
    words = ["optimize", "--dry-run", "--for", "restore", "--root", store.uri, "--json"]
    with store.write_checkpoint({"w": np.ones(5)}) as pending:  # now the run has a later model than m-1
        pending.commit(RefTarget(run_id="train", step=4, model_id="m-2", copy_path="models/m-2/checkpoint.arrow"))
    without = tensorcas(*words).json["plan"]["one_hop"]
    pins = [
        "--pin",
        "m-1",
        "--pin",
        f"{store.uri}/notes/a.txt",
        "--pin",
        store.checkpoints()[0].key,
        "--pin",
        "runs:/other",
    ]
    pinned = tensorcas(*words, *pins).json
    other = Store.init(tmp_path / "other")
    with other.write_checkpoint({"w": np.ones(9)}) as pending:
        pending.commit(RefTarget(path="1/elsewhere/artifacts/w.arrow", run_id="elsewhere", step=1))
    elsewhere = tensorcas(*words, "--pin", f"{other.uri}/1/elsewhere/artifacts/w.arrow")

    assert {*pinned["plan"]["one_hop"]} - {*without} == {
        "notes/a.txt",
        "run train step 1",
        "models/m-1/checkpoint.arrow",
    }
    assert elsewhere.status == 1
    assert "the store to optimize is" in elsewhere.err


def test_optimize_refuses_a_pin_without_for_restore_and_a_pin_of_nothing(tensorcas: Tensorcas, store: Store) -> None:
    alone = tensorcas("optimize", "--pin", "m-1", "--root", store.uri)
    unknown = tensorcas("optimize", "--for", "restore", "--pin", "m-none", "--root", store.uri)

    assert (alone.status, unknown.status) == (2, 1)
    assert "--pin needs --for restore" in alone.err
    assert "'m-none'" in unknown.err
