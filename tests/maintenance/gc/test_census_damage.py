"""Collections that find a census which is damaged, hostile, or tells of what is there no longer or otherwise."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest

from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.errors import CorruptError, NewerFormatError
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.maintenance import merge_inventories, read_census
from tensorcas_mlflow.store import Store
from tests.maintenance.gc.censuses import always_worth_it, census_of, inventory_in, put_census, sealed
from tests.maintenance.gc.collecting import keys, loads, overwrite, plan_now, save, target, tensors

__all__ = ["always_worth_it"]


# --- damage


def test_a_census_with_a_flipped_bit_is_not_believed(store: Store) -> None:
    kept, dropped = save(store, "ab", 0), save(store, "cd", 1)
    plan_now(store).execute()
    key = census_of(store)
    inventory = inventory_in(store)
    # The first entry of the kept pack is turned into one of the pack that is about to go: all of it that was needed
    # is then told to be elsewhere or nowhere.
    data = bytearray(store.backend.get(key))
    at = len(data) - 17 * len(inventory.entry_chunk)  # the last five columns have 17 bytes for each entry
    wrong = inventory.find(store.manifest(dropped).digests[:1])[0]
    of_kept = np.flatnonzero(np.isin(inventory.entry_chunk, inventory.find(store.manifest(kept).digests)))
    for row in of_kept.tolist():
        data[at + 4 * row] = wrong
    overwrite(store.backend, key, bytes(data))
    store.drop(dropped)
    plan_now(store).execute()

    assert loads(store, "ab", 0)
    assert len(keys(store, "packs")) == 1
    assert key not in keys(store, "census")


def test_every_flipped_byte_and_every_cut_of_a_census_is_seen(store: Store) -> None:
    save(store, "ab", 0)
    plan_now(store).execute()
    blob = store.backend.get(census_of(store))

    for at in range(len(blob)):
        with pytest.raises(CorruptError):
            read_census("census/x", blob[:at] + bytes([blob[at] ^ 0x10]) + blob[at + 1 :])
        with pytest.raises(CorruptError):
            read_census("census/x", blob[:at])


def test_a_census_whose_spans_are_not_what_the_manifests_said_is_refused(store: Store) -> None:
    save(store, "ab", 0)
    save(store, "abc", 1)
    plan_now(store).execute()
    inventory = inventory_in(store)
    data = bytearray(store.backend.get(census_of(store)))
    at = len(data) - 17 * len(inventory.entry_chunk) - 4 * len(inventory.span_chunk)
    stops = data[at : at + 4]
    assert stops == b"\x02\0\0\0"
    data[at] = 1

    with pytest.raises(CorruptError, match="contradicts itself"):
        read_census("census/x", sealed(bytes(data)))


@pytest.mark.long
def test_no_census_however_made_ends_in_anything_but_our_errors(store: Store) -> None:
    for step, letters in enumerate(["ab", "bc", "cde"]):
        save(store, letters, step)
    plan_now(store).execute()
    blob = store.backend.get(census_of(store))
    draw = random.Random(0)
    n_refused = 0
    for _ in range(3000):
        data = bytearray(blob)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(8, len(data))] = draw.choice([0, 1, 2, 127, 255, draw.randrange(256)])
        if draw.random() < 0.2:
            del data[draw.randrange(64, len(data)) :]
        try:
            inventory = read_census("census/x", sealed(bytes(data)))
        except (CorruptError, NewerFormatError):
            n_refused += 1
        else:
            merge_inventories([inventory, inventory]).only(manifests=inventory.manifests, packs=inventory.sizes)

    assert n_refused > 2000


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b"{}",
        pytest.param(b"[" * 100_000, id="deep"),
        b'{"format": 1}',
        b'{"format": "1"}',
        b"\xff",
        b'{"format": 3, "manifests": 7}',
    ],
)
def test_a_census_with_an_impossible_head_is_refused(head: bytes) -> None:
    blob = b"\x89TCCN\r\n\x01" + len(head).to_bytes(8, "little") + bytes(16)

    with pytest.raises(CorruptError):
        read_census("census/x", sealed(blob + bytes(32) + head))


def test_a_later_releases_census_is_left_alone(store: Store) -> None:
    save(store, "ab", 0)
    plan_now(store).execute()
    head = b'{"format": 9}'
    blob = sealed(b"\x89TCCN\r\n\x01" + len(head).to_bytes(8, "little") + bytes(16) + bytes(32) + head)
    store.backend.put_new("census/" + "8" * 32, [blob])
    store.drop(save(store, "cd", 1))
    plan_now(store).execute()

    assert "census/" + "8" * 32 in keys(store, "census")
    assert loads(store, "ab", 0)


# --- what was counted and is there no longer, or otherwise


def test_a_needed_manifest_that_is_gone_stops_a_collection_that_knows_what_it_said(store: Store) -> None:
    ref = save(store, "ab", 0)
    plan_now(store).execute()
    store.backend.delete(f"manifests/{ref.manifest}")

    with pytest.raises(CorruptError, match="run run step 0 needs it"):
        plan_now(store)


def test_a_needed_manifest_that_was_cut_short_stops_a_collection(store: Store) -> None:
    ref = save(store, "ab", 0)
    plan_now(store).execute()
    key = f"manifests/{ref.manifest}"
    overwrite(store.backend, key, store.backend.get(key)[:-10])

    with pytest.raises(CorruptError, match="run run step 0 needs it"):
        plan_now(store)


def test_a_pack_that_was_cut_short_since_it_was_counted_holds_nothing(store: Store) -> None:
    save(store, "ab", 0)
    plan_now(store).execute()
    [pack] = keys(store, "packs")
    overwrite(store.backend, pack, store.backend.get(pack)[:-10])

    with pytest.raises(CorruptError, match="no other pack has all that is needed"):
        plan_now(store)


def test_a_dropped_step_is_not_needed_though_the_census_tells_of_it(store: Store) -> None:
    save(store, "ab", 0)
    ref = save(store, "bc", 1)
    plan_now(store).execute()
    store.drop(ref)
    report = plan_now(store, max_waste=0).execute()

    assert (report.n_packs, report.n_manifests) == (1, 1)
    assert loads(store, "ab", 0)


@pytest.mark.usefixtures("store_of_files")
def test_a_ref_in_a_file_is_read_though_its_file_looks_as_it_did(local_store: Store) -> None:
    save(local_store, "ab", 0)
    other = save(local_store, "cd", 1)
    plan_now(local_store).execute()
    assert isinstance(local_store.backend, LocalBackend)
    path = local_store.backend.root / target(0).key
    before = os.stat(path)
    said = json.loads(local_store.backend.get(target(1).key))
    del said["check"]
    # A file number is given out again, and clocks may stand still.
    path.write_bytes(record_bytes({**said, "step": 0}).ljust(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    local_store.drop(other)
    plan_now(local_store).execute()

    assert os.stat(path).st_ino == before.st_ino
    assert loads(local_store, "cd", 0)


def test_census_rows_of_packs_that_are_gone_are_ignored(store: Store) -> None:
    save(store, "ab", 0)
    plan_now(store).execute()
    inventory = inventory_in(store)
    store.drop(store.checkpoints()[0])
    plan_now(store).execute()
    put_census(store, inventory)
    save(store, "ab", 1)

    assert plan_now(store).is_empty
    assert loads(store, "ab", 1)


def test_a_pack_that_is_rewritten_is_read_itself(store: Store) -> None:
    save(store, "a", 0)
    with store.write_checkpoint(tensors("abcd")) as pending:
        ref = pending.commit(target(1))
    save(store, "bc", 2)
    plan_now(store).execute()
    inventory = inventory_in(store)
    put_census(store, inventory)
    store.drop(ref)
    plan_now(store, max_waste=0).execute()

    assert loads(store, "bc", 2)
    assert plan_now(store, max_waste=0).is_empty
