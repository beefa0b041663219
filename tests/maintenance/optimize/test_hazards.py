"""Hazards of an optimization: it does the rest, and loses nothing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import Buffer, digest
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.codecs import Codec
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.layout.packs import PackWriter, Payload, bases_of, is_delta, pack_key
from tensorcas_mlflow.maintenance import plan_optimize, verify
from tensorcas_mlflow.store import Policy, Store
from tests.faulty import FaultyBackend
from tests.maintenance.optimize.hooks import Interrupted
from tests.maintenance.optimize.trainings import CHUNK_BYTES, collect, loads, new_store, optimize, state, tables, train


def replace_one(store: Store) -> None:
    """Put another state in the place of a step, and collect what was there."""
    fresh = Store.open_backend(store.backend)
    with fresh.write_checkpoint(state(2, seed=9)) as pending:
        pending.commit(RefTarget(run_id="run", step=2))
    collect(store)


def copy_of(store: Store) -> Store:
    memory = MemoryBackend()
    memory._blobs = dict(store.backend._blobs)  # type: ignore[attr-defined]
    memory._versions = store.backend._versions  # type: ignore[attr-defined]
    return Store.open_backend(memory)


def digests_of(store: Store, step: int, name: str) -> list[bytes]:
    ref = store.ref(RefTarget(run_id="run", step=step).key)
    assert ref is not None
    return [each.tobytes() for each in store.manifest(ref).row(name).digests]


def spoil(store: Store, digest: bytes) -> None:
    """Change a bit of every copy of a chunk."""
    for name, rows in tables(store.backend).items():
        blob = bytearray(store.backend.get(pack_key(name)))
        for entry in rows:
            if entry["digest"].tobytes() == digest:
                blob[int(entry["offset"]) + int(entry["stored_bytes"]) - 4] ^= 1
        store.backend.delete(pack_key(name))
        store.backend.put_new(pack_key(name), [bytes(blob)])


def test_a_step_that_is_replaced_and_collected_meanwhile_is_no_damage() -> None:
    made = train(new_store(), range(4))
    counting = FaultyBackend(copy_of(made).backend)
    plan_optimize(Store.open_backend(counting))
    n_calls = len(counting.calls)
    for nth in range(n_calls + 1, n_calls + 8, 3):  # while it reads what is to be done
        store = copy_of(made)
        plan_optimize(Store.open_backend(Interrupted(store.backend, nth, partial(replace_one, store)))).execute()

        assert all(loads(store, step) for step in (0, 1, 3))
        assert loads(store, 2, seed=9)


@pytest.mark.long
def test_deltas_against_a_damaged_base_stay_and_the_rest_is_optimized(store: Store) -> None:
    weights = {step: np.asarray(state(step, n=40_000)["layers.0.weight"]) for step in range(3)}
    for step, array in weights.items():
        with store.write_checkpoint({"w": array, "step": np.full(3_000, step)}) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    assert any(is_delta(rows).any() for rows in tables(store.backend).values())
    hurt = digests_of(store, 0, "w")[3]
    before = {problem.checkpoint for problem in verify(store, full=True).problems}
    spoil(store, hurt)
    damaged = {problem.checkpoint for problem in verify(store, full=True).problems}

    optimize(store)

    fresh = Store.open_backend(store.backend)
    assert before == set()
    assert {problem.checkpoint for problem in verify(fresh, full=True).problems} == damaged
    assert plan_optimize(fresh).n_chunks == len(damaged)


def test_an_optimization_on_a_full_disk_leaves_the_store_as_it_was() -> None:
    made = train(new_store(), range(3))
    for nth in range(2):  # the intent, and a pack
        faulty = FaultyBackend(made.backend)
        faulty.fail(nth, operations=["put_new"])
        with pytest.raises(BackendError):
            plan_optimize(Store.open_backend(faulty)).execute()

        assert faulty.has_met()
        assert all(loads(made, step) for step in range(3))
        assert list(made.backend.list("intents")) == []


def test_a_copy_that_has_rotted_is_no_base_though_another_is_sound(store: Store) -> None:
    optimize(train(store, range(2)))
    done = set(tables(store.backend))
    hurt = digests_of(store, 0, "layers.0.weight") + digests_of(store, 1, "layers.0.weight")
    for each in hurt:
        spoil(store, each)
    # Saved again where nobody knows of those: sound copies of the same chunks, in full, in a pack of their own.
    other = new_store()
    for step in (0, 1):
        with other.write_checkpoint({"layers.0.weight": state(step)["layers.0.weight"]}, policy=Policy.FAST) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    for name in tables(other.backend):
        store.backend.put_new(pack_key(name), [other.backend.get(pack_key(name))])
    store = Store.open_backend(store.backend)
    with store.write_checkpoint(state(2), policy=Policy.FAST) as pending:
        pending.commit(RefTarget(run_id="run", step=2))
    assert loads(store, 2)

    optimize(store)

    assert loads(store, 2)
    new = [rows for name, rows in tables(store.backend).items() if name not in done]
    mine = set(digests_of(store, 2, "layers.0.weight"))
    bases = {base.digest for rows in new for base in bases_of(rows[is_delta(rows)])}
    assert mine
    assert not bases & set(hurt)


def test_progress_counts_the_bytes_that_have_been_encoded(store: Store) -> None:
    optimize(train(store, range(3)))
    train(store, range(3, 5))
    plan = plan_optimize(Store.open_backend(store.backend))
    taken = {name: len(store.backend.get(pack_key(name))) for name in tables(store.backend)}
    seen: list[Progress] = []

    plan.execute(watch=seen.append)

    assert taken
    assert seen[-1].done_bytes == seen[-1].n_bytes == plan.n_bytes
    assert sum(each.done_bytes == each.n_bytes for each in seen) == 1


def test_a_plan_with_nothing_to_do_says_so(store: Store) -> None:
    optimize(train(store, range(2)))

    assert str(plan_optimize(Store.open_backend(store.backend))) == "nothing to optimize in 2 checkpoints and files"


@pytest.mark.long
def test_one_damaged_chunk_among_many_costs_few_reads_more(store: Store) -> None:
    n = 200
    with store.write_checkpoint({f"w{at}": np.random.default_rng(at).random(500) for at in range(n)}) as pending:
        pending.commit(RefTarget(run_id="run", step=0))
    counting = FaultyBackend(copy_of(store).backend)
    plan_optimize(Store.open_backend(counting)).execute()
    spoil(store, digests_of(store, 0, "w7")[0])
    damaged = FaultyBackend(store.backend)

    plan_optimize(Store.open_backend(damaged)).execute()

    assert plan_optimize(Store.open_backend(store.backend)).n_chunks == 1
    assert len(damaged.calls) < len(counting.calls) + n


def test_a_chunk_of_a_codec_of_a_later_release_stays_as_it_is(store: Store) -> None:
    class Later(Codec):
        number, name = 9, "later"

        def encode(self, raw: Buffer, typesize: int) -> Buffer:
            return bytes(raw)[::-1]

        def decode_into(self, stored: Buffer, out: memoryview) -> None:
            raise NotImplementedError

    train(store, range(2))
    data = np.arange(800.0)
    raw = data.tobytes()[:CHUNK_BYTES]
    payload = Payload(
        digest=digest(raw), raw_bytes=len(raw), codec=Later(), typesize=1, data=raw[::-1], begins_row=True
    )
    store.backend.put_new(pack_key("9" * 32), PackWriter().pieces([payload]))
    store = Store.open_backend(store.backend)
    store.catalog.refresh_from_packs()
    with store.write_checkpoint({"later": data}) as pending:
        pending.commit(RefTarget(run_id="later", step=0))
    before = store.backend.get(pack_key("9" * 32))

    optimize(store)

    assert loads(store, 0)
    assert loads(store, 1)
    assert store.backend.get(pack_key("9" * 32)) == before
    assert plan_optimize(Store.open_backend(store.backend)).labels == ("run later step 0",)
