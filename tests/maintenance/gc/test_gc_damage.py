"""Collection where something cannot be read, and after a collector that died."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, MemoryBackend
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout.packs import pack_key
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, store_stats, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, intent_bytes, list_packs
from tests.faulty import FaultyBackend
from tests.maintenance.gc.collecting import (
    CHUNK_BYTES,
    everything,
    keys,
    loads,
    overwrite,
    plan_now,
    save,
    target,
    tensors,
)

# --- what cannot be read


@pytest.mark.parametrize("prefix", ["manifests", "packs", "condemned"])
def test_collection_stops_at_an_unreadable_blob_that_tells_what_is_needed(store: Store, prefix: str) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "cd", 1))
    store.backend.put_new("condemned/" + "c" * 32, [condemned_bytes(frozenset(), frozenset())])
    plan = plan_now(store)
    needed = {
        "manifests": f"manifests/{store.checkpoints()[0].manifest}",
        "packs": pack_key(next(name for name, _ in list_packs(store.backend) if name not in plan.packs)),
    }
    overwrite(store.backend, needed.get(prefix, keys(store, prefix)[0]), b"not what it was")
    before = everything(store)

    with pytest.raises(CorruptError):
        plan_now(store)
    with pytest.raises(CorruptError):
        plan.execute()
    assert everything(store) == before


def test_a_pack_that_cannot_be_read_goes_when_all_that_is_needed_is_elsewhere(store: Store) -> None:
    save(store, "ab", 0)
    before = keys(store, "packs")
    store.drop(save(store, "cd", 1))
    [cut] = set(keys(store, "packs")) - set(before)
    overwrite(store.backend, cut, store.backend.get(cut)[:-100])

    assert plan_now(store).execute().n_packs == 1
    assert keys(store, "packs") == before
    assert loads(store, "ab", 0)


def test_an_unreadable_pack_stays_while_a_save_under_way_may_have_written_it(store: Store) -> None:
    save(store, "ab", 0)
    before = keys(store, "packs")
    with store.write_checkpoint(tensors("cd")) as pending:
        pending.write()
        [cut] = set(keys(store, "packs")) - set(before)
        overwrite(store.backend, cut, store.backend.get(cut)[:-100])
        with pytest.raises(CorruptError, match="no other pack has all that is needed"):
            plan_gc(store, grace_s=3600)
    assert cut in keys(store, "packs")


def test_a_damaged_ref_is_given_up_by_its_key(store: Store) -> None:
    save(store, "ab", 0)
    lost = save(store, "cd", 1).key
    overwrite(store.backend, lost, b"")

    assert f"gc --abandon {lost}" in str(plan_now(store))
    assert plan_now(store).manifests == ()
    plan = plan_now(store, abandon=[lost])
    assert "1 damaged ref to abandon" in str(plan)
    assert plan.execute().n_packs == 1
    assert keys(store, "refs") == [target(0).key]
    assert loads(store, "ab", 0)


def test_a_sound_ref_is_not_given_up(store: Store) -> None:
    ref = save(store, "ab", 0)

    with pytest.raises(ValueError, match="nor a damaged ref"):
        plan_now(store, abandon=[ref.key])
    overwrite(store.backend, ref.key, b"")
    plan = plan_now(store, abandon=[ref.key])
    store.backend.delete(ref.key)
    save(store, "cd", 0)
    plan.execute()
    assert loads(store, "cd", 0)


def test_a_step_that_is_saved_anew_while_its_damaged_ref_is_given_up_stays(store: Store) -> None:
    key = save(store, "ab", 0).key

    class SavedMeanwhile(FaultyBackend):
        """Once it is told to, somebody saves the step anew right after the next look at its ref."""

        is_due = False

        def get(self, wanted: str, *, max_bytes: int | None = None) -> bytes:
            blob = super().get(wanted, max_bytes=max_bytes)
            if wanted == key and self.is_due:
                self.is_due = False
                save(Store.open_backend(store.backend), "cd", 0)
            return blob

    overwrite(store.backend, key, b"{}")
    backend = SavedMeanwhile(store.backend)
    plan = plan_now(Store.open_backend(backend), abandon=[key])
    backend.is_due = True
    plan.execute()

    assert loads(store, "cd", 0)


def test_a_manifest_that_is_gone_stops_a_collection_and_the_error_names_who_needs_it(store: Store) -> None:
    ref = save(store, "ab", 0)
    store.backend.delete(f"manifests/{ref.manifest}")

    with pytest.raises(CorruptError, match="run run step 0 needs it"):
        plan_now(store)


def test_an_unreadable_intent_stops_a_collection_until_it_has_been_silent_for_the_grace(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    store.backend.put_new("intents/" + "1" * 32, [b"half an int"])
    before = everything(store)

    with pytest.raises(CorruptError):
        plan_gc(store, grace_s=3600)
    assert everything(store) == before
    assert plan_now(store).execute().n_withdrawn == 1
    assert everything(store) == {}


def test_blob_that_becomes_unreadable_during_a_collection_leaves_no_list_behind(store: Store) -> None:
    class Spoiling(MemoryBackend):
        def put_new(self, key: str, pieces: Any, *, durable: bool = True) -> str:
            token = super().put_new(key, pieces, durable=durable)
            if key.startswith("condemned/"):
                super().put_new("intents/" + "1" * 32, [b"?"])
            return token

    store = Store.init_backend(Spoiling(), chunk_bytes=CHUNK_BYTES)
    store.drop(save(store, "ab", 0))

    with pytest.raises(CorruptError):
        plan_gc(store, grace_s=3600).execute()
    assert keys(store, "condemned") == []
    assert len(keys(store, "packs")) == 1


# --- collectors that died


def test_the_list_of_a_dead_collector_is_finished(store: Store) -> None:
    store.drop(save(store, "abcd", 0))
    packs = frozenset(name for name, _ in list_packs(store.backend))
    manifests = frozenset(key.removeprefix("manifests/") for key in keys(store, "manifests"))
    store.backend.put_new("condemned/" + "d" * 32, [condemned_bytes(packs, manifests)])

    assert plan_gc(store, grace_s=3600).dead_lists == ()
    plan = plan_now(store)
    assert "1 dead collection to finish" in str(plan)
    plan.execute()
    assert everything(store) == {}


def test_living_chunks_are_copied_out_of_the_packs_of_a_dead_collector(store: Store) -> None:
    save(store, "ab", 0)
    packs = frozenset(name for name, _ in list_packs(store.backend))
    store.backend.put_new("condemned/" + "d" * 32, [condemned_bytes(packs, frozenset())])
    plan_now(store).execute()

    assert packs.isdisjoint(name for name, _ in list_packs(store.backend))
    assert keys(store, "condemned") == []
    assert loads(store, "ab", 0)


def test_the_list_of_a_dead_collector_stays_while_a_manifest_on_it_is_needed(store: Store) -> None:
    ref = save(store, "ab", 0)
    store.backend.put_new("condemned/" + "d" * 32, [condemned_bytes(frozenset(), frozenset([ref.manifest]))])
    plan_now(store).execute()

    assert len(keys(store, "condemned")) == 1
    assert plan_now(store).is_empty
    store.drop(ref)
    plan_now(store).execute()
    assert everything(store) == {}


TORN = "intents/" + "7" * 32


def torn(backend: Backend) -> None:
    """Leave an intent of which only half was written, as a save does whose process dies."""
    backend.put_new(TORN, [intent_bytes("0" * 64, np.zeros((9, 32), np.uint8))[:150]])


def test_an_intent_torn_while_a_plan_waits_does_not_stop_its_execution(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    save(store, "cd", 1)
    plan = plan_now(store)
    torn(store.backend)

    assert plan.execute().n_packs == 1
    assert keys(store, "intents") == []
    assert loads(store, "cd", 1)


def test_a_torn_intent_keeps_nobody_from_listing_loading_and_saving(store: Store) -> None:
    save(store, "ab", 0)
    torn(store.backend)
    save(store, "cd", 1)

    assert [ref.step for ref in store.checkpoints()] == [0, 1]
    assert loads(store, "ab", 0)
    assert store_stats(store).checkpoints == 2
    assert plan_repair(store).is_whole
    [problem] = verify(store).problems
    assert (problem.key, problem.checkpoint) == (TORN, None)
    assert "gc frees it once its grace is over" in problem.reason


def test_an_error_of_a_torn_intent_says_how_to_give_it_up(store: Store) -> None:
    store.drop(save(store, "ab", 0))
    torn(store.backend)

    with pytest.raises(CorruptError, match=r"its save is under way.*gc --abandon 7777"):
        plan_gc(store)
    assert plan_gc(store, abandon=["7" * 32]).execute().n_withdrawn == 1
    assert everything(store) == {}


def test_old_quarantined_blobs_are_collected_and_the_plan_names_them(store: Store) -> None:
    save(store, "ab", 0)
    piece, note = f"quarantine/{'a' * 32}.pack", "quarantine/@" + "c" * 32
    store.backend.put_new(piece, [b"bytes"])
    store.backend.put_new(note, [b"{}"])

    assert plan_now(store).quarantine == {}
    plan = plan_now(store, quarantine_s=0)
    assert "1 damaged piece in quarantine to delete (5 B)" in str(plan)
    assert not plan.is_empty
    assert plan.execute().freed_bytes == 5
    assert keys(store, "quarantine") == [note]
    with pytest.raises(ValueError, match="quarantine_s"):
        plan_now(store, quarantine_s=-1)
