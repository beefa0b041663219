"""Records that have changed, or stand where they do not belong."""

from __future__ import annotations

import json

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import CorruptError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import TABLE_ENTRY
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, read_condemned
from tests.maintenance.verify.stores import noise, put, save, told


@pytest.fixture
def store() -> Store:
    return Store.init_backend(MemoryBackend(), chunk_bytes=4096)


def replace(store: Store, key: str, data: bytes) -> None:
    assert isinstance(store.backend, MemoryBackend)
    put(store.backend, key, data)


def test_the_ref_of_another_step_is_refused(store: Store) -> None:
    first = save(store, {"w": noise(1)}, run_id="run", step=1)
    second = save(store, {"w": noise(2)}, run_id="run", step=2)
    replace(store, first.key, store.backend.get(second.key))

    with pytest.raises(CorruptError, match="it is the ref of run 'run', name None, step 2"):
        store.ref(first.key)
    # What stood there may have named any manifest.
    plan = plan_gc(store, grace_s=0)
    assert (list(plan.unread_refs), dict(plan.packs), plan.manifests) == ([first.key], {}, ())
    [problem] = told(store.backend, full=False)
    assert (problem.key, problem.checkpoint) == (first.key, "run run step 1")


def test_the_ref_of_another_copy_is_refused(store: Store) -> None:
    first = save(store, {"w": noise(1)}, uri="s3://a/checkpoint.arrow")
    second = save(store, {"w": noise(2)}, uri="s3://b/checkpoint.arrow")
    replace(store, first.key, store.backend.get(second.key))

    with pytest.raises(CorruptError, match=r"a copy at 's3://b/checkpoint\.arrow'"):
        store.ref(first.key)


def test_a_figure_that_has_changed_in_a_ref_is_damage(store: Store) -> None:
    ref = save(store, {"w": noise(1)}, run_id="run", step=1, metrics={"loss": 0.5})
    replace(store, ref.key, store.backend.get(ref.key).replace(b'"loss": 0.5', b'"loss": 0.7'))

    with pytest.raises(CorruptError, match=r"refs/runs/run/@1.*does not hash to the check"):
        store.ref(ref.key)


def test_a_byte_that_has_changed_in_a_packs_table_is_seen_without_reading_a_chunk(store: Store) -> None:
    save(store, {"w": noise(1)}, run_id="run", step=1)
    [info] = store.backend.list("packs")
    data = bytearray(store.backend.get(info.key))
    data[-FOOTER_BYTES - TABLE_ENTRY.itemsize + 40] ^= 1  # in the digest of the stored bytes
    replace(store, info.key, bytes(data))
    pack, checkpoint = told(store.backend, full=False)

    assert (pack.key, checkpoint.key, checkpoint.tensors) == (info.key, info.key, ("w",))
    assert "its table does not hash" in pack.reason


def test_a_ref_without_a_check_is_damage(store: Store) -> None:
    key = save(store, {"w": noise(1)}, run_id="run", step=1).key
    record = json.loads(store.backend.get(key))
    del record["check"]
    replace(store, key, json.dumps(record, sort_keys=True).encode())

    assert [problem.key for problem in told(store.backend, full=False)] == [key]


def test_an_intent_of_which_a_digest_has_changed_is_refused(store: Store) -> None:
    with store.write_checkpoint({"w": noise(1)}) as pending:
        [info] = store.backend.list("intents")
        data = bytearray(store.backend.get(info.key))
        data[-1] ^= 1
        replace(store, info.key, bytes(data))

        with pytest.raises(CorruptError, match="the digests in it"):
            plan_gc(store)
        assert [problem.key for problem in told(store.backend, full=False)] == [info.key]
        pending.abandon()


def test_a_condemned_list_of_which_a_name_has_changed_stops_saves_and_collections(store: Store) -> None:
    save(store, {"w": noise(1)}, run_id="run", step=1)
    data = condemned_bytes(frozenset(["a" * 32]), frozenset())
    store.backend.put_new("condemned/" + "1" * 32, [data.replace(b"aa", b"ab", 1)])

    with pytest.raises(CorruptError, match="it does not hash to the check in it"):
        read_condemned(store.backend)
    with pytest.raises(CorruptError), store.write_checkpoint({"w": noise(1)}) as pending:
        pending.commit(RefTarget(run_id="run", step=2))
