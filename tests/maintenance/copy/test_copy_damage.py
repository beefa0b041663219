"""Copies of a damaged source: damage is reported and left out, and the rest is copied."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import BackendError
from tensorcas_mlflow.maintenance import copy_refs, plan_copy, read_source, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs
from tests.faulty import FaultyBackend
from tests.maintenance.copy.copying import assert_steps_load, copy, damage, new_store, payloads, save, save_steps, state


class BadSector(MemoryBackend):
    """A disk that cannot read one range of one blob."""

    bad: tuple[str, int] = ("", 0)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if key == self.bad[0] and start <= self.bad[1] < start + len(out):
            raise BackendError("read", key, "Input/output error")
        super().read_into(key, start, out)


def test_a_checkpoint_with_a_damaged_chunk_is_told_with_its_tensor_and_the_others_are_copied() -> None:
    source = new_store()
    destination = new_store(like=source)
    refs = save_steps(source, 1, 2, 3)
    damage(source, "changing", refs[1])
    report = copy(Store.open_backend(source.backend), destination)

    assert report.n_copied == 2
    [failure] = report.failed
    assert (failure.what, failure.tensors) == ("run run step 2", ("changing",))
    assert "damaged" in failure.reason
    assert_steps_load(destination, 1, 3)
    assert verify(destination, full=True).problems == ()
    assert list(destination.backend.list("intents")) == []


@pytest.mark.parametrize("tensor", ["changing", "noise"])
def test_copy_checks_encoded_and_raw_bytes_before_it_moves_them(tensor: str) -> None:
    source = new_store()
    destination = new_store(like=source)
    [ref] = save_steps(source, 1)
    damage(source, tensor, ref)
    report = copy(Store.open_backend(source.backend), destination)

    assert [failure.tensors for failure in report.failed] == [(tensor,)]
    spoilt = source.manifest(ref).row(tensor).digests[0].tobytes()
    assert spoilt not in payloads(destination)


def test_a_chunk_that_is_damaged_in_one_pack_is_taken_from_another() -> None:
    source = new_store()
    destination = new_store(like=source)
    [ref] = save_steps(source, 1)
    apart = new_store(like=source)
    save_steps(apart, 1)
    for name, _ in list_packs(apart.backend):
        source.backend.put_new(f"packs/{name}.pack", [apart.backend.get(f"packs/{name}.pack")])
    damage(source, "changing", ref)
    report = copy(Store.open_backend(source.backend), destination)

    assert (report.n_copied, report.failed) == (1, ())
    assert_steps_load(destination, 1)


def test_a_lost_pack_is_told_with_all_tensors_it_had() -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, 1, 2)
    [first, _] = sorted(list_packs(source.backend), key=lambda pack: -pack[1])
    source.backend.delete(f"packs/{first[0]}.pack")
    report = copy(Store.open_backend(source.backend), destination)

    assert report.n_copied == 0
    assert report.failed[0].tensors == ("same", "changing", "noise")
    assert "no pack holds it" in report.failed[0].reason


def test_a_pack_that_is_cut_short_spoils_only_what_lay_behind_the_cut() -> None:
    source = new_store()
    destination = new_store(like=source)
    save(source, {"a": state(1)["noise"], "b": state(2)["noise"]}, step=1)
    save(source, {"a": state(1)["noise"]}, step=2)
    store = Store.open_backend(source.backend)
    store.catalog.refresh()
    [(name, size)] = list_packs(source.backend)
    data = source.backend.get(f"packs/{name}.pack")
    source.backend.delete(f"packs/{name}.pack")
    source.backend.put_new(f"packs/{name}.pack", [data[: size // 2]])
    report = copy(store, destination)

    assert [failure.what for failure in report.failed] == ["run run step 1"]
    assert report.n_copied == 1


def test_a_range_that_cannot_be_read_fails_what_needs_it_and_no_more() -> None:
    backend = BadSector()
    source = new_store(backend)
    destination = new_store(like=source)
    tensors = {name: np.frombuffer(np.random.default_rng(n).bytes(100_000), np.uint8) for n, name in enumerate("abc")}
    save(source, tensors, step=1)
    save(source, {"a": tensors["a"], "c": tensors["c"]}, step=2)
    places = source.catalog.find(source.manifest(source.checkpoints()[0]).row("b").digests)
    backend.bad = (f"packs/{places.packs[int(places.pack[3])]}.pack", int(places.entries["offset"][3]) + 5)
    report = copy(source, destination)

    assert [(failure.what, failure.tensors) for failure in report.failed] == [("run run step 1", ("b",))]
    assert "Input/output error" in report.failed[0].reason
    assert report.n_copied == 1


def test_a_damaged_manifest_fails_its_checkpoint() -> None:
    source = new_store()
    destination = new_store(like=source)
    refs = save_steps(source, 1, 2)
    source.backend.delete(f"manifests/{refs[0].manifest}")
    source.backend.put_new(f"manifests/{refs[0].manifest}", [b"damaged"])
    report = copy(source, destination)
    plan = plan_copy(source, new_store(like=source), read_source(source)[0])

    assert [failure.what for failure in report.failed] == ["run run step 1"]
    assert [failure.what for failure in plan.failed] == ["run run step 1"]
    assert_steps_load(destination, 2)


def test_a_ref_that_cannot_be_read_is_told_by_its_key() -> None:
    source = new_store()
    save_steps(source, 1)
    source.backend.put_new("refs/runs/x/@1", [b"damaged"])
    refs, failed = read_source(source)

    assert [ref.step for ref in refs] == [1]
    assert [failure.what for failure in failed] == ["refs/runs/x/@1"]


def test_a_manifest_of_another_store_is_told() -> None:
    source, other = new_store(), new_store()
    [ref] = save_steps(source, 1)
    mine = source.backend
    assert isinstance(mine, MemoryBackend)
    report = copy(Store(mine, store_id=other.id, chunk_bytes=4096), new_store(like=other))

    assert [failure.what for failure in report.failed] == [ref.label]
    assert source.id in report.failed[0].reason


def test_step_dropped_during_its_copy_is_left_out_without_a_failure() -> None:
    source = new_store()
    destination = new_store(like=source)
    save_steps(source, 1, 2)
    refs, _ = read_source(source)
    source.drop(refs[0])
    source.backend.delete(f"manifests/{refs[0].manifest}")
    report = copy_refs(source, destination, refs)

    assert (report.n_copied, report.deleted, report.failed) == (1, ("run run step 1",), ())
    assert_steps_load(destination, 2)


def test_a_storage_that_does_not_answer_ends_the_copy() -> None:
    inner = new_store()
    save_steps(inner, 1)
    source = Store.open_backend(Dead(inner.backend))
    refs, _ = read_source(source)
    source.backend.is_dead = True  # type: ignore[attr-defined]

    with pytest.raises(BackendError):
        copy_refs(source, new_store(like=source), refs)


class Dead(FaultyBackend):
    """Another backend, which at some time does nothing any more."""

    is_dead = False

    def _call(self, operation: str, key: str, act):  # type: ignore[no-untyped-def]
        if self.is_dead:
            raise BackendError(operation, key, "no answer")
        return act()


def test_a_hostile_size_costs_no_memory() -> None:
    source = new_store()
    destination = new_store(like=source)
    save(source, {"a": np.zeros(5_000)}, step=1)
    store = Store.open_backend(source.backend)
    store.catalog.refresh()
    for table in store.catalog._tables:
        table.entries["raw_bytes"] = 0xFFFFFFFF
    report = copy(store, destination)

    # The index is not believed, and the packs' own tables are read.
    assert (report.n_copied, report.failed) == (1, ())
