"""Shares of the bytes of a store, by owner."""

from __future__ import annotations

import io
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.maintenance import By, RefOwner, disk_usage, find_shares, plan_gc
from tensorcas_mlflow.maintenance._stats import owners_of
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table

KB = 4096


def tensors(letters: str) -> dict[str, Any]:
    """One incompressible chunk a letter."""
    return {letter: np.random.default_rng(ord(letter)).integers(0, 256, KB, dtype=np.uint8) for letter in letters}


def save(store: Store, letters: str, run_id: str, step: int, experiment: str = "1") -> Ref:
    path = f"{experiment}/{run_id}/artifacts/checkpoints/{step}/checkpoint.arrow"
    with store.write_checkpoint(tensors(letters)) as pending:
        return pending.commit(RefTarget(path=path, run_id=run_id, step=step))


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=KB)


def manifest_bytes(store: Store, *refs: Ref) -> int:
    infos = [store.backend.stat(f"manifests/{name}") for name in {ref.manifest for ref in refs}]
    return sum(info.size for info in infos if info is not None)


def brute_force(store: Store, by: By) -> dict[RefOwner, tuple[int, int, int]]:
    """Exclusive, shared and marginal bytes, one chunk at a time."""
    refs = sorted(store.checkpoints(), key=lambda ref: (ref.created, ref.key))
    size = {
        row["digest"].tobytes(): int(row["stored_bytes"])
        for name, _ in list_packs(store.backend)
        for row in read_pack_table(store.backend, name)
    }
    needed_by: dict[bytes, list[RefOwner]] = defaultdict(list)
    for ref, owner in zip(refs, owners_of(refs, by, store_uri=store.uri), strict=True):
        size[ref.manifest.encode()] = manifest_bytes(store, ref)
        for item in {*(row.tobytes() for row in store.manifest(ref).digests), ref.manifest.encode()}:
            needed_by[item].append(owner)
    found: dict[RefOwner, list[int]] = defaultdict(lambda: [0, 0, 0])
    for item, owners in needed_by.items():
        for owner in set(owners):
            found[owner][len(set(owners)) > 1] += size[item]
        found[owners[0]][2] += size[item]
    return {owner: (alone, shared, added) for owner, (alone, shared, added) in found.items()}


def test_a_run_needs_alone_what_no_other_does(store: Store) -> None:
    one, two = save(store, "abc", "one", 0), save(store, "cd", "two", 0)
    found = {share.run_id: share for share in find_shares(store, "run").shares}

    assert found["one"].exclusive_bytes == 2 * KB + manifest_bytes(store, one)
    assert found["two"].exclusive_bytes == KB + manifest_bytes(store, two)
    assert found["one"].shared_bytes == found["two"].shared_bytes == KB


def test_each_series_and_each_model_of_a_run_has_bytes_of_its_own(store: Store) -> None:
    for letters, name in [("ab", None), ("bc", "ema"), ("cd", "ema")]:
        with store.write_checkpoint(tensors(letters)) as pending:
            pending.commit(RefTarget(run_id="run", name=name, step=ord(letters[0])))
    with store.write_checkpoint(tensors("e")) as pending:
        pending.commit(RefTarget(path="1/models/m-1/artifacts/checkpoint.arrow", run_id="run", model_id="m-1"))
    with store.write_stream(io.BytesIO(bytes(KB))) as pending:
        pending.commit(RefTarget(path="1/run/artifacts/zeros.bin", run_id="run"))
    found = {share.series: (share.refs, share.exclusive_bytes // KB) for share in find_shares(store, "series").shares}

    assert found == {"checkpoint": (1, 1), "ema": (2, 2), "m-1": (1, 1), None: (1, 0)}


def test_chunks_of_an_earlier_run_add_no_marginal_bytes(store: Store) -> None:
    one, two = save(store, "abc", "one", 0), save(store, "cd", "two", 0)
    found = {share.run_id: share.marginal_bytes for share in find_shares(store, "run").shares}

    assert found == {"one": 3 * KB + manifest_bytes(store, one), "two": KB + manifest_bytes(store, two)}


def test_the_exclusive_bytes_of_a_run_are_what_deleting_it_frees(store: Store) -> None:
    save(store, "abc", "one", 0)
    gone = [save(store, "cd", "two", 0), save(store, "cde", "two", 1)]
    [two] = [share for share in find_shares(store, "run").shares if share.run_id == "two"]
    before = find_shares(store, "run").needed_bytes
    for ref in gone:
        store.drop(ref)
    plan_gc(store, grace_s=0, max_waste=0).execute()

    assert before - find_shares(store, "run").needed_bytes == two.exclusive_bytes
    payload = sum(
        int(read_pack_table(store.backend, name)["stored_bytes"].sum()) for name, _ in list_packs(store.backend)
    )
    assert find_shares(store, "run").needed_bytes == payload + manifest_bytes(store, *store.checkpoints())


@pytest.mark.parametrize("by", ["experiment", "run", "series", "step"])
@pytest.mark.parametrize("seed", range(4))
def test_shares_are_what_counting_each_chunk_gives(
    store: Store, by: By, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._stats._MAX_PAIRS", 7)
    draw = random.Random(seed)
    for step in range(20):
        letters = "".join(sorted(draw.sample("abcdefghij", draw.randrange(1, 7))))
        run = draw.choice(["r", "s", "t"])
        save(store, letters, run, draw.randrange(8), experiment="2" if run == "t" else "1")
        if step % 7 == 0:
            store.drop(draw.choice(store.checkpoints()))
    found = find_shares(store, by)
    counted = {
        RefOwner(share.experiment, share.run_id, share.step, share.series): (
            share.exclusive_bytes,
            share.shared_bytes,
            share.marginal_bytes,
        )
        for share in found.shares
    }

    assert counted == brute_force(store, by)
    assert found.needed_bytes == found.exclusive_bytes + found.shared_bytes
    assert found.exclusive_bytes == sum(share.exclusive_bytes for share in found.shares)
    assert found.needed_bytes == sum(share.marginal_bytes for share in found.shares)


def test_shares_are_the_same_by_a_census(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorcas_mlflow.maintenance._census.LEAST_NEW", 1)
    for step, letters in enumerate(["abc", "bcd", "cde", "fg"]):
        save(store, letters, "run", step)
    plan_gc(store, grace_s=0).execute()
    assert list(store.backend.list("census"))
    save(store, "ag", "other", 0)

    assert {tuple(share.values()) for share in find_shares(store, "step").shares} == {
        (owner.experiment, owner.run_id, None, owner.step, 1, *sizes)
        for owner, sizes in brute_force(store, "step").items()
    }


def test_stats_of_one_run_tell_the_bytes_it_shares_with_others(store: Store) -> None:
    save(store, "ab", "one", 0)
    save(store, "bc", "two", 0)
    [share] = find_shares(store, "step", run_id="one").shares

    assert (share.run_id, share.step, share.shared_bytes) == ("one", 0, KB)


def test_bytes_that_many_small_blobs_share_in_a_database_add_up(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=KB, database=True)
    for step in range(20):
        arrays = {f"layer.{n}.weight": np.full(100 + step, step + n, np.int32) for n in range(20)}
        with store.write_checkpoint(arrays) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    packs = dict(list_packs(store.backend))
    payloads = sum(int(read_pack_table(store.backend, name)["stored_bytes"].sum()) for name in packs)
    manifests = manifest_bytes(store, *store.checkpoints())
    share = disk_usage(store.backend).database / (sum(packs.values()) + manifests)

    assert share < 1
    assert find_shares(store, "run").needed_bytes == int((payloads + manifests) * share)


def test_an_empty_store_has_no_shares(store: Store) -> None:
    found = find_shares(store, "run")

    assert (found.needed_bytes, found.shares) == (0, ())


def test_experiments_are_read_from_paths(store: Store, tmp_path: Path) -> None:
    def owner(**said: Any) -> tuple[str | None, str | None, int | None]:
        with store.write_checkpoint(tensors("a")) as pending:
            ref = pending.commit(RefTarget(**said))
        [found] = owners_of([ref], "step", store_uri="file:///data/7")
        return found.experiment, found.run_id, found.step

    assert owner(path="3/8f/artifacts/x", step=2) == ("3", "8f", 2)
    assert owner(path="8f/artifacts/x") == ("7", "8f", None)
    assert owner(path="3/models/m-1/artifacts/x", run_id="8f") == ("3", "8f", None)
    assert owner(path="models/m-1/artifacts/x") == ("7", None, None)
    assert owner(path="notes/x") == (None, None, None)
    assert owner(run_id="8f", step=1) == (None, "8f", 1)
    assert owner(uri="file:///mlruns/5/8f/artifacts/checkpoints/1", run_id="8f", step=1) == ("5", "8f", 1)


def test_a_run_is_of_the_experiment_that_any_of_its_refs_shows(store: Store) -> None:
    save(store, "a", "8f", 1, experiment="3")
    with store.write_checkpoint(tensors("b")) as pending:
        pending.commit(RefTarget(run_id="8f", step=2))

    assert {(share.experiment, share.step) for share in find_shares(store, "step").shares} == {("3", 1), ("3", 2)}


@pytest.mark.long
def test_thousands_of_steps_are_counted_with_bounded_memory() -> None:
    from tensorcas_mlflow.maintenance import inventory_of_manifests, merge_inventories
    from tensorcas_mlflow.maintenance._stats import _Ownership, _Sums

    universe = np.random.default_rng(0).integers(0, 256, (40_000, 32), dtype=np.uint8)
    names = [f"{n:064x}.00000000" for n in range(3_000)]
    parts = [
        inventory_of_manifests([(names[n], 1, universe[n : n + 2600]) for n in range(at, at + 100)])
        for at in range(0, 3_000, 100)
    ]
    inventory = merge_inventories(parts)
    every = np.arange(3_000)
    begin = time.perf_counter()
    sums = _Sums(3_000)
    n_pairs = 0
    for chunk, owner in _Ownership(manifest=every, owner=every, n_manifests=3_000).pairs(inventory):
        n_pairs += len(chunk)
        assert len(chunk) < 3 << 20
        sums.add(chunk, owner, np.ones(len(inventory.digests), np.int64))
    print(f"{n_pairs} pairs in {time.perf_counter() - begin:.1f} s")

    assert n_pairs == 7_800_000
    assert (sums.needed == 2600).all()
