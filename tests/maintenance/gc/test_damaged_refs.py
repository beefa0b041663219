"""A damaged ref costs itself: the rest of the store is listed, counted, verified and collected around it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import numpy as np
import pytest

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.maintenance import find_shares, plan_repair, store_stats, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.maintenance.gc.collecting import keys, loads, overwrite, plan_now, save, target, tensors


def changed(data: bytes, **said: object) -> bytes:
    """A ref that says something else, and is whole by its check."""
    record = json.loads(data) | said
    del record["check"]
    return record_bytes(record)


UNKNOWN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "no JSON": lambda data: b"\xff" * 100,
    "a flipped digit": lambda data: data.replace(b'"manifest": "', b'"manifest": "0', 1),
    "another's": lambda data: changed(data, step=7),
    "too long": lambda data: b"{" + b" " * 100_000 + b"}",
}
KNOWN: dict[str, Callable[[bytes], bytes]] = {
    "a size that no reader takes": lambda data: changed(data, n_bytes=-1),
    "a kind that no reader takes": lambda data: changed(data, kind="other"),
    "a metric that is no number": lambda data: changed(data, metrics={"loss": "low"}),
    "a step before that is no number": lambda data: changed(data, parent_step="1"),
}


@pytest.mark.parametrize("damage", [*UNKNOWN, *KNOWN])
def test_everything_goes_on_around_a_damaged_ref(store: Store, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = save(store, "ab", 0)
    save(store, "cd", 1)
    dropped = save(store, "ef", 2)
    overwrite(store.backend, bad.key, (UNKNOWN | KNOWN)[damage](store.backend.get(bad.key)))
    store.drop(dropped)
    with caplog.at_level(logging.WARNING):
        assert [ref.step for ref in store.checkpoints()] == [1]

    assert bad.key in caplog.text
    assert store_stats(store).damaged_refs == (bad.key,)
    assert find_shares(store, "steps").needed_bytes > 0
    assert [problem.key for problem in verify(store, full=True).problems] == [bad.key]
    plan = plan_now(store)
    plan.execute()
    assert list(plan.unread_refs) == [bad.key]
    assert f"gc --abandon {bad.key}" in str(plan)
    assert [finding.key for finding in plan_repair(store).findings] == [bad.key]
    plan_repair(store).execute()
    save(store, "gh", 3)
    assert loads(store, "cd", 1)
    # All that the ref may have kept is there.
    assert f"manifests/{bad.manifest}" in keys(store, "manifests")
    assert np.array_equal(store.read_tensors(store.manifest(bad))["a"], tensors("a")["a"])
    # Where its manifest is known, others go as ever.
    assert (f"manifests/{dropped.manifest}" in keys(store, "manifests")) == (damage in UNKNOWN)


def test_collection_deletes_unnamed_chunks_beside_a_damaged_ref(store: Store) -> None:
    bad = save(store, "ab", 0)
    overwrite(store.backend, bad.key, b"")
    pending = store.write_checkpoint(tensors("cd"))
    pending.write()
    pending.abandon()
    # As if its process had died between the packs and the manifest.
    store.backend.delete(next(key for key in keys(store, "manifests") if not key.endswith(bad.manifest)))
    before = keys(store, "packs")
    report = plan_now(store).execute()

    assert (report.n_packs, report.n_manifests) == (1, 0)
    assert len(keys(store, "packs")) == len(before) - 1


def test_a_damaged_manifest_beside_a_damaged_ref_stops_a_collection(store: Store) -> None:
    bad, dropped = save(store, "ab", 0), save(store, "cd", 1)
    store.drop(dropped)
    overwrite(store.backend, bad.key, b"")
    overwrite(store.backend, f"manifests/{dropped.manifest}", b"not a manifest")

    with pytest.raises(Exception, match=f"{bad.key} cannot be read, and perhaps needs it"):
        plan_now(store)


def test_an_abandoned_damaged_ref_is_deleted_with_what_it_kept(store: Store) -> None:
    bad = save(store, "ab", 0)
    save(store, "cd", 1)
    overwrite(store.backend, bad.key, b"")
    plan_now(store, abandon=[bad.key]).execute()

    assert plan_now(store).unread_refs == {}
    assert len(keys(store, "packs")) == len(keys(store, "manifests")) == 1


def test_a_stand_in_stays_while_a_ref_is_damaged_that_it_may_stand_in_for(store: Store) -> None:
    bad = save(store, "ab", 0)
    store.backend.put_new("refs/replacing/@" + "a" * 32, [store.backend.get(bad.key)])
    overwrite(store.backend, bad.key, b"")
    plan_now(store).execute()

    assert keys(store, "refs") == ["refs/replacing/@" + "a" * 32, bad.key]
    overwrite(store.backend, bad.key, store.backend.get("refs/replacing/@" + "a" * 32))
    plan_now(store).execute()
    assert keys(store, "refs") == [bad.key]
    assert loads(store, "ab", 0)


def test_a_run_lists_its_other_steps_and_refuses_the_damaged_one(local_store: Store) -> None:
    run = TensorCasStore(local_store.backend.root.parent, "run")  # type: ignore[attr-defined]
    for step in range(3):
        run.save({"w": np.arange(300.0) + step}, step=step)
    key = target(2).key
    overwrite(run.store.backend, key, b"")

    # The latest one is not passed over: a training would go on from an earlier one.
    with pytest.raises(Exception, match="is damaged"):
        run.load()
    assert run.load(step=1)["w"][0] == 1.0


def test_a_folder_of_artifacts_with_a_damaged_ref_names_its_path(store: Store) -> None:
    for path in ("models/a.bin", "models/b.bin", "models/deep/c.bin"):
        with store.write_checkpoint(tensors("a")) as pending:
            ref = pending.commit(RefTarget(path=path))
        if path != "models/a.bin":
            overwrite(store.backend, ref.key, b"")
    damaged: list[str] = []
    refs, names = store.artifacts("models", damaged=damaged)

    assert ([ref.path for ref in refs], names, damaged) == (["models/a.bin"], ["deep"], ["models/b.bin"])
    damaged = []
    assert [ref.path for ref in store.walk_artifacts(damaged=damaged)] == ["models/a.bin"]
    assert sorted(damaged) == ["models/b.bin", "models/deep/c.bin"]
