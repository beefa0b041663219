"""Damaged chunks and packs: what is good of them stays, what is not is put aside, and other copies heal it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend, Token
from tensorcas_mlflow.base.digest import Buffer, digest
from tensorcas_mlflow.codecs import Codec
from tensorcas_mlflow.errors import BackendError, CorruptChunkError, FencedError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import PackWriter, Payload, pack_key
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, full_payload, list_packs
from tests.maintenance.repair.damaging import (
    CHUNK_BYTES,
    afresh,
    flip,
    flip_chunk,
    flip_ignored_bit,
    keys,
    loads,
    new_store,
    pack_of,
    packs_of,
    repair,
    save,
    target,
    tensors,
)


def test_a_repair_changes_nothing_in_a_sound_store(store: Store) -> None:
    before = {
        key: store.backend.get(key) for prefix in ("packs", "index", "refs") for key in keys(store.backend, prefix)
    }
    plan = plan_repair(afresh(store))
    report = plan.execute()

    assert plan.is_empty
    assert report.is_whole
    assert str(plan) == "nothing is damaged"
    assert {key: store.backend.get(key) for key in before} == before
    assert keys(store.backend, "quarantine") == []


def test_a_plan_changes_nothing_and_says_which_step_loses_which_tensor(store: Store) -> None:
    name = flip_chunk(store.backend, "b")
    before = keys(store.backend, "packs")
    plan = plan_repair(afresh(store))

    reason = "1 of 2 chunks damaged or missing (1 tensor of 4,096 bytes)"
    assert [(loss.checkpoint, loss.tensors, loss.reason) for loss in plan.losses] == [
        ("run run step 0", ("b",), reason),
        ("run run step 1", ("b",), reason),
    ]
    assert f"packs/{name}.pack: 1 damaged chunk" in str(plan)
    assert f"does not load now: run run step 0, tensor 'b', {target(0).key}: {reason}" in str(plan)
    assert keys(store.backend, "packs") == before


def test_a_damaged_chunk_leaves_the_store_and_the_good_ones_of_its_pack_stay(store: Store) -> None:
    name = flip_chunk(store.backend, "b")
    report = repair(store)

    assert report.packs_gone == (pack_key(name),)
    assert pack_key(name) not in keys(store.backend, "packs")
    assert loads(store, "ab", 0, "a")
    assert loads(store, "bc", 1, "c")
    assert packs_of(store.backend, "b") == []
    assert keys(store.backend, "condemned") == []
    assert [loss.tensors for loss in report.losses] == [("b",), ("b",)]


def test_a_damaged_pack_is_kept_as_it_was(store: Store) -> None:
    name = flip_chunk(store.backend, "b")
    damaged = store.backend.get(pack_key(name))
    repair(store)

    assert keys(store.backend, "quarantine") == [f"quarantine/{name}.pack"]
    assert store.backend.get(f"quarantine/{name}.pack") == damaged


def test_a_chunk_that_decodes_although_its_bytes_have_changed_is_not_lost() -> None:
    store, steps = new_store(), np.arange(CHUNK_BYTES // 4, dtype=np.int32) // 3
    with store.write_checkpoint({"steps": steps}) as pending:
        ref = pending.commit(target(0))
    [(name, _)] = list_packs(store.backend)
    flip_ignored_bit(store.backend, name, steps)
    report = repair(store)

    assert report.packs_gone == (pack_key(name),)
    assert report.is_whole
    assert np.array_equal(store.read_tensors(store.manifest(ref))["steps"], steps)
    assert verify(afresh(store), full=True).problems == ()


def test_the_next_save_of_the_same_tensors_makes_the_old_step_load_again(store: Store) -> None:
    flip_chunk(store.backend, "b")
    training = afresh(store)
    training.catalog.refresh()
    assert repair(store).losses != ()
    save(training, "bd", 3)

    assert loads(store, "bd", 3)
    assert loads(store, "ab", 0)
    assert loads(store, "bc", 1)
    assert repair(store).is_whole


def test_without_a_repair_the_next_save_relies_on_the_damaged_chunk(store: Store) -> None:
    flip_chunk(store.backend, "b")
    save(afresh(store), "bd", 3)

    with pytest.raises(CorruptChunkError):
        loads(store, "bd", 3)


def test_a_chunk_of_which_another_pack_has_a_good_copy_is_dropped_and_nothing_is_lost(store: Store) -> None:
    everything = frozenset(name.removeprefix("packs/").removesuffix(".pack") for name in keys(store.backend, "packs"))
    store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(everything, frozenset())])
    save(afresh(store), "b", 3)
    store.backend.delete("condemned/" + "a" * 32)
    bad = flip_chunk(store.backend, "b", packs_of(store.backend, "b")[0])
    report = repair(store)

    assert report.is_whole
    assert pack_key(bad) not in keys(store.backend, "packs")
    assert loads(store, "ab", 0)
    assert loads(store, "b", 3)


def test_a_good_copy_that_a_collector_is_about_to_delete_is_copied_and_does_not_count(store: Store) -> None:
    bad = flip_chunk(store.backend, "b")
    other = new_store()
    save(other, "b", 0)
    [copy] = keys(other.backend, "packs")
    store.backend.put_new(copy, [other.backend.get(copy)])
    doomed = frozenset([copy.removeprefix("packs/").removesuffix(".pack")])
    store.backend.put_new("condemned/" + "a" * 32, [condemned_bytes(doomed, frozenset())])
    report = repair(store)
    store.backend.delete(copy)  # as the collector does

    assert report.is_whole
    assert pack_key(bad) not in keys(store.backend, "packs")
    assert loads(store, "ab", 0)
    assert loads(store, "bc", 1)


def test_another_store_heals_what_is_damaged(store: Store, backup: Store) -> None:
    flip_chunk(store.backend, "b")
    plan = plan_repair(afresh(store), sources=[backup])
    report = plan.execute()

    assert len(plan.losses) == 2
    assert report.n_healed == 1
    assert report.is_whole
    assert loads(store, "ab", 0)
    assert loads(store, "bc", 1)
    assert verify(afresh(store), full=True).problems == ()


def test_another_store_heals_packs_that_are_gone(store: Store, backup: Store) -> None:
    for key in keys(store.backend, "packs"):
        store.backend.delete(key)
    report = repair(store, backup)

    assert report.is_whole
    assert report.n_healed == 4
    assert loads(store, "ab", 0)
    assert loads(store, "d", 2)
    assert verify(afresh(store), full=True).problems == ()


def test_repair_takes_no_chunk_that_is_damaged_in_the_other_store(store: Store, backup: Store) -> None:
    flip_chunk(store.backend, "b")
    flip_chunk(backup.backend, "b")
    report = repair(store, backup)

    assert report.n_healed == 0
    assert [loss.tensors for loss in report.losses] == [("b",), ("b",)]
    assert packs_of(store.backend, "b") == []


def test_chunk_that_one_backup_lacks_is_taken_from_the_next_backup(store: Store, backup: Store) -> None:
    flip_chunk(store.backend, "b")
    flip_chunk(store.backend, "d")
    flip_chunk(backup.backend, "b")
    second = new_store()
    save(second, "b", 0)

    assert repair(store, backup, second).is_whole
    assert loads(store, "ab", 0)
    assert loads(store, "d", 2)


class Unsteady(MemoryBackend):
    """A machine that reads payloads of packs wrongly some times, as one with bad memory does."""

    def __init__(self, store: Store, *, n_wrong: int) -> None:
        super().__init__()
        self._blobs = store.backend._blobs  # type: ignore[attr-defined]
        self.pack = pack_key(pack_of(store.backend, "a"))
        self.n_wrong = n_wrong

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        super().read_into(key, start, out)
        if key == self.pack and 0 < start < 100 and self.n_wrong:
            self.n_wrong -= 1
            out[7] ^= 1


def test_damage_that_a_second_look_does_not_see_is_left_alone(store: Store) -> None:
    before = keys(store.backend, "packs")
    plan = plan_repair(Store.open_backend(Unsteady(store, n_wrong=1)))
    report = plan.execute()

    assert [finding.key for finding in plan.findings] == [pack_key(pack_of(store.backend, "a"))]
    assert "check the memory and the disks of this machine" in str(report)
    assert keys(store.backend, "packs") == before
    assert keys(store.backend, "quarantine") == []


def test_a_good_pack_in_quarantine_is_put_back_by_hand(store: Store) -> None:
    report = plan_repair(Store.open_backend(Unsteady(store, n_wrong=3))).execute()
    [pack] = report.packs_gone
    store.backend.put_new(pack, [store.backend.get(pack.replace("packs", "quarantine"))])

    assert (report.n_quarantined, report.is_whole) == (1, False)
    assert repair(store).is_whole
    assert loads(store, "ab", 0)


# --- saves under way


def test_a_save_under_way_that_relies_on_a_damaged_chunk_begins_again_and_writes_it(store: Store) -> None:
    flip_chunk(store.backend, "b")
    with afresh(store).write_checkpoint(tensors("be")) as pending:
        report = repair(store)
        assert report.n_fenced == 1
        pending.commit(target(3))

    assert loads(store, "be", 3)
    assert loads(store, "ab", 0)


def test_a_save_under_way_that_cannot_write_a_damaged_chunk_again_fails_and_commits_nothing(store: Store) -> None:
    flip_chunk(store.backend, "b")
    fresh = afresh(store)
    stored = fresh.copy(tensors("ba"))
    stored.note_stored()
    with fresh.begin_checkpoint(fresh.copy(tensors("be"), before=stored)) as pending:
        repair(store)
        with pytest.raises(FencedError):
            pending.commit(target(3))

    assert store.ref(target(3).key) is None


def test_a_save_under_way_that_relies_on_a_good_chunk_of_a_damaged_pack_goes_on(store: Store) -> None:
    flip_chunk(store.backend, "b")
    with afresh(store).write_checkpoint(tensors("ae")) as pending:
        assert repair(store).n_fenced == 0
        pending.commit(target(3))

    assert loads(store, "ae", 3)


def test_repair_copies_good_chunks_that_nothing_needs_yet(store: Store) -> None:
    ref = store.ref(target(0).key)
    assert ref is not None
    flip_chunk(store.backend, "b")
    store.drop(ref)
    repair(store)

    assert len(packs_of(store.backend, "a")) == 1


# --- what the storage does not give


class BadSector(MemoryBackend):
    """A disk that does not give one stretch of a pack: that of chunk a."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._blobs = store.backend._blobs  # type: ignore[attr-defined]
        self.pack = pack_key(pack_of(store.backend, "a"))
        self.is_bad = True

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if self.is_bad and key == self.pack and start <= 100 < start + len(out):
            raise BackendError("read", key, "Input/output error")
        super().read_into(key, start, out)


def test_unreadable_chunk_is_not_damaged_until_it_is_given_up(store: Store) -> None:
    disk = BadSector(store)
    before = store.backend.get(disk.pack)
    first = plan_repair(Store.open_backend(disk)).execute()
    assert disk.pack in keys(disk, "packs")
    assert f"tensorcas repair --abandon {disk.pack}" in first.left[disk.pack]
    report = plan_repair(Store.open_backend(disk), abandon=[disk.pack]).execute()

    assert report.packs_gone == (disk.pack,)
    assert [loss.tensors for loss in report.losses] == [("a",)]
    assert loads(store, "ab", 0, "b")
    assert store.backend.get(disk.pack.replace("packs", "quarantine")) == bytes(4096) + before[4096:]


def test_a_pack_with_a_bad_sector_stays_although_another_chunk_of_it_is_damaged(store: Store) -> None:
    flip_chunk(store.backend, "b")
    disk = BadSector(store)
    report = plan_repair(Store.open_backend(disk)).execute()
    disk.is_bad = False

    assert disk.pack in report.left
    assert loads(store, "ab", 0, "a")


def test_chunks_healed_from_a_backup_outlive_the_next_collection(store: Store, backup: Store) -> None:
    disk = BadSector(store)
    report = plan_repair(Store.open_backend(disk), sources=[backup]).execute()
    plan_gc(Store.open_backend(disk), grace_s=0, max_waste=0).execute()

    assert report.packs_gone == (disk.pack,)
    assert report.n_healed == 1
    assert loads(Store.open_backend(disk), "ab", 0)


def test_a_plan_is_not_empty_that_replaces_a_pack_which_cannot_be_read(store: Store) -> None:
    disk = BadSector(store)
    raw = tensors("a")["a"].tobytes()
    copy = full_payload(digest(raw), raw, 1, begins_row=True)
    store.backend.put_new(pack_key("9" * 32), PackWriter().pieces([copy]))
    plan = plan_repair(Store.open_backend(disk))

    assert [(finding.key, finding.is_mended) for finding in plan.findings if "packs/" in finding.key] == [
        (disk.pack, True)
    ]
    assert not plan.is_empty
    assert plan.execute().packs_gone == (disk.pack,)


def test_a_plan_that_may_replace_an_unreadable_pack_from_a_backup_is_not_empty(store: Store, backup: Store) -> None:
    disk = BadSector(store)
    for step in (0, 1):
        ref = store.ref(target(step).key)
        if ref is not None:
            store.drop(ref)
    plan = plan_repair(Store.open_backend(disk), sources=[backup])

    assert plan.losses == ()
    assert not plan.is_empty
    assert plan.execute().packs_gone == (disk.pack,)


class LateBadSector(BadSector):
    """A disk whose sector goes bad once a list condemns the pack."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.is_bad = False

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        self.is_bad |= key.startswith("condemned/")
        return super().put_new(key, pieces, durable=durable)


def test_a_pack_stays_if_a_good_chunk_of_it_could_not_be_copied(store: Store) -> None:
    flip_chunk(store.backend, "b")
    disk = LateBadSector(store)
    report = plan_repair(Store.open_backend(disk)).execute()
    disk.is_bad = False

    assert report.left[disk.pack] == "not all of its good chunks could be copied: repair again"
    assert loads(store, "ab", 0, "a")


def test_a_collection_after_a_repair_deletes_nothing_that_is_needed(store: Store, backup: Store) -> None:
    flip_chunk(store.backend, "b")
    repair(store, backup)
    plan_gc(afresh(store), grace_s=0, max_waste=0).execute()

    assert loads(store, "ab", 0)
    assert loads(store, "bc", 1)
    assert loads(store, "d", 2)


def test_a_chunk_of_every_codec_is_kept_and_healed() -> None:
    arrays: dict[str, Any] = {
        "raw": tensors("a")["a"],
        "text": np.frombuffer(b"the same again and again " * 200, np.uint8),
        "floats": np.linspace(0, 1, 3000, dtype=np.float32),
    }
    store, backup = new_store(), new_store()
    for each in (store, backup):
        with each.write_checkpoint(arrays) as pending:
            pending.commit(RefTarget(run_id="run", step=0))
    [key] = keys(store.backend, "packs")
    for at in (100, CHUNK_BYTES + 60, CHUNK_BYTES + 400):
        flip(store.backend, key, at)
    report = repair(store, backup)
    fresh = afresh(store)
    ref = fresh.ref(target(0).key)
    assert ref is not None
    found = fresh.read_tensors(fresh.manifest(ref))

    assert report.is_whole
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_a_chunk_of_a_codec_of_a_later_release_is_left_where_it_is(store: Store) -> None:
    class Later(Codec):
        number, name = 9, "later"

        def encode(self, raw: Buffer, typesize: int) -> Buffer:
            return bytes(raw)[::-1]

        def decode_into(self, stored: Buffer, out: memoryview) -> None:
            raise NotImplementedError

    raw = tensors("e")["e"].tobytes()
    payload = Payload(
        digest=digest(raw), raw_bytes=len(raw), codec=Later(), typesize=1, data=raw[::-1], begins_row=True
    )
    known = tensors("f")["f"].tobytes()
    writer = PackWriter()
    key = pack_key("9" * 32)
    store.backend.put_new(key, writer.pieces([payload, full_payload(digest(known), known, 1, begins_row=True)]))
    flip_chunk(store.backend, "f", "9" * 32)
    before = store.backend.get(key)
    report = repair(store)

    assert "later release" in report.left[key]
    assert store.backend.get(key) == before
    assert keys(store.backend, "quarantine") == []


def test_a_save_that_is_half_committed_to_a_lost_chunk_begins_again(store: Store) -> None:
    ref = store.ref(target(0).key)
    assert ref is not None
    half = "intents/" + "1" * 32
    store.backend.put_new(half, [store.backend.get(ref.key)])  # as a commit leaves it before it moves it
    flip_chunk(store.backend, "b")
    report = repair(store)

    assert report.n_fenced == 1
    assert store.backend.stat(half) is None
