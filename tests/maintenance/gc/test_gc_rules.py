"""Rules of a collection: refusals, waiting for saves, reasons, and deaths."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

import pytest

from tensorcas_mlflow.backends import LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import BackendError, ConflictError, CorruptError, NewerFormatError, StoreNotFoundError
from tensorcas_mlflow.layout._format_blob import FORMAT_VERSION
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.layout.packs import pack_name
from tensorcas_mlflow.maintenance import GcPlan, plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.maintenance.gc.collecting import (
    CHUNK_BYTES,
    everything,
    keys,
    loads,
    overwrite,
    plan_now,
    save,
    save_apart,
    target,
    tensors,
)

# --- a store it does not understand


def damaged(store: Store) -> None:
    overwrite(store.backend, "format", b"{}")


def write_format(store: Store, **changes: Any) -> None:
    said = json.loads(store.backend.get("format"))
    del said["check"]
    overwrite(store.backend, "format", record_bytes({**said, **changes}))


def of_a_later_release(store: Store) -> None:
    write_format(store, format=FORMAT_VERSION + 1)


def gone(store: Store) -> None:
    store.backend.delete("format")


def of_another_id(store: Store) -> None:
    write_format(store, id="0" * 32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damaged, CorruptError),
        (of_a_later_release, NewerFormatError),
        (gone, StoreNotFoundError),
        (of_another_id, ConflictError),
    ],
)
def test_a_store_that_is_not_what_was_opened_any_more_is_not_collected(
    store: Store, change: Any, error: type[Exception]
) -> None:
    store.drop(save(store, "ab", 0))
    plan = plan_now(store)
    change(store)
    before = everything(store)

    with pytest.raises(error):
        plan_now(store)
    with pytest.raises(error):
        plan.execute()
    assert everything(store) == before


def test_collection_leaves_blobs_below_unknown_prefixes_alone(store: Store) -> None:
    store.backend.put_new("quarantine/some/thing", [b"?"])
    store.drop(save(store, "ab", 0))
    plan_now(store).execute()

    assert store.backend.get("quarantine/some/thing") == b"?"
    assert everything(store) == {}


# --- whom it waits for


def test_a_save_is_waited_for_as_long_as_the_grace_and_no_longer(
    local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now_ns() - 3600 * 10**9)
        pending = local_store.write_checkpoint(tensors("ab"))
        pending.write()
    assert isinstance(local_store.backend, LocalBackend)
    [intent] = (local_store.backend.root / "intents").iterdir()
    os.utime(intent, (time.time() - 3600,) * 2)

    assert plan_gc(local_store, grace_s=4000).execute().n_withdrawn == 0
    assert len(keys(local_store, "packs")) == 1
    assert plan_gc(local_store, grace_s=3000).execute().n_withdrawn == 1
    assert keys(local_store, "packs") == []
    pending.commit(target(0))
    assert loads(local_store, "ab", 0)


@pytest.mark.usefixtures("store_of_files")
def test_a_dead_collection_is_finished_when_its_list_is_older_than_the_grace(local_store: Store) -> None:
    assert isinstance(local_store.backend, LocalBackend)
    store = dying_store(local_store, 0)
    local_store.drop(save(local_store, "ab", 0))
    with pytest.raises(SimulatedCrash):
        plan_now(store).execute()
    [condemned] = keys(local_store, "condemned")
    an_hour_ago = time.time() - 3600
    os.utime(local_store.backend.root / condemned, (an_hour_ago, an_hour_ago))

    assert plan_gc(local_store, grace_s=4000).dead_lists == ()
    plan_gc(local_store, grace_s=3000).execute()
    assert everything(local_store) == {}


def test_a_list_that_has_come_since_the_plan_was_made_is_left_to_its_collector(store: Store) -> None:
    """With a grace of zero any list is old enough; but who made this one has not been seen to stand still."""
    store.drop(save(store, "ab", 0))
    plan = plan_now(store)
    [pack] = keys(store, "packs")
    others = "condemned/" + "b" * 32
    store.backend.put_new(others, [condemned_bytes(frozenset({pack_name(pack)}), frozenset())])
    plan.execute()

    assert keys(store, "condemned") == [others]
    assert keys(store, "packs") == [pack]
    plan_now(store).execute()
    assert everything(store) == {}


# --- what is left when it dies


def dying_store(store: Store, nth_delete: int) -> Store:
    """The store as a process sees it that dies at one of its deletions."""
    backend = FaultyBackend(store.backend)
    backend.crash(nth_delete, operations=["delete"])
    return Store.open_backend(backend)


@pytest.mark.parametrize("nth", range(6))
def test_a_collection_that_dies_at_any_deletion_is_finished_by_the_next(store: Store, nth: int) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "cd", 1))
    store.drop(save(store, "ef", 2))
    with pytest.raises(SimulatedCrash):
        plan_now(dying_store(store, nth)).execute()

    assert loads(store, "ab", 0)
    # What was condemned is on a list until all of it is gone: who saves meanwhile relies on none of it.
    assert len(keys(store, "condemned")) == (nth < 5)
    save(store, "cdef", 3)
    plan_now(store).execute()
    assert keys(store, "condemned") == []
    assert (loads(store, "ab", 0), loads(store, "cdef", 3)) == (True, True)
    assert (len(keys(store, "packs")), len(keys(store, "manifests"))) == (2, 2)


def test_a_deletion_that_fails_leaves_the_list(store: Store) -> None:
    backend = FaultyBackend(store.backend)
    store.drop(save(store, "ab", 0))
    plan = plan_now(Store.open_backend(backend))
    backend.fail(0, operations=["delete"])

    with pytest.raises(BackendError):
        plan.execute()
    assert len(keys(store, "condemned")) == 1
    plan_now(store).execute()
    assert everything(store) == {}


def test_collection_spares_chunks_a_save_relied_on_before_the_condemned_list() -> None:
    class Overtaken(MemoryBackend):
        """Lets a save go through just before the first list of a collector is there."""

        def put_new(self, key: str, pieces: Iterable[Any], *, durable: bool = True) -> str:
            if key.startswith("condemned/") and self.stat(target(1).key) is None:
                save(Store.open_backend(self), "ab", 1)
            return super().put_new(key, pieces, durable=durable)

    store = Store.init_backend(Overtaken(), chunk_bytes=CHUNK_BYTES)
    store.drop(save(store, "ab", 0))
    report = plan_now(store).execute()

    assert (report.n_packs, report.n_spared) == (0, 1)
    assert loads(store, "ab", 1)


# --- why


def reasons(plan: GcPlan) -> list[str]:
    return sorted({plan.reasons[name] for name in plan.packs})


def test_a_plan_says_why_a_pack_goes(store: Store) -> None:
    save(store, "ab", 0)
    store.drop(save(store, "cd", 1))
    assert reasons(plan_now(store)) == ["deleted"]
    plan_now(store).execute()

    store.write_checkpoint(tensors("ef")).write()
    assert reasons(plan_now(store)) == ["died"]
    [intent] = keys(store, "intents")
    store.backend.delete(intent)
    for key in set(keys(store, "manifests")) - {f"manifests/{store.checkpoints()[0].manifest}"}:
        store.backend.delete(key)
    assert reasons(plan_now(store)) == ["uncommitted"]
    plan_now(store).execute()

    save_apart(store, "ab", 3)
    assert reasons(plan_now(store)) == ["copied"]
    plan_now(store).execute()

    store.backend.put_new("packs/" + "0" * 32 + ".pack", [b"cut"])
    assert reasons(plan_now(store)) == ["cut"]


def test_a_plan_adds_up_the_bytes_of_each_reason(store: Store) -> None:
    store.drop(save(store, "abc", 0))
    store.write_checkpoint(tensors("de")).write()
    plan = plan_now(store)

    assert plan.bytes_by_reason() == {
        reason: sum(size for name, size in plan.packs.items() if plan.reasons[name] == reason)
        for reason in ("deleted", "died")
    }
    assert "2 packs to delete (21.1 KB: 12.6 KB of deleted checkpoints, 8.5 KB of dead saves)" in str(plan)


def test_collection_deletes_an_unneeded_manifest_that_cannot_be_read(store: Store) -> None:
    ref = save(store, "ab", 0)
    store.drop(ref)
    overwrite(store.backend, f"manifests/{ref.manifest}", b"?")
    plan = plan_now(store)

    assert reasons(plan) == ["uncommitted"]
    plan.execute()
    assert everything(store) == {}
