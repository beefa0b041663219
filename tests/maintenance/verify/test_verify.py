"""Damage of every kind, and what a look at the store says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, BlobInfo, LocalBackend, MemoryBackend
from tensorcas_mlflow.base.digest import digest
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.layout.packs import TABLE_ENTRY
from tensorcas_mlflow.layout.packs._pack import FOOTER_BYTES
from tensorcas_mlflow.maintenance import Problem, VerifyReport, plan_gc, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import condemned_bytes, list_packs, read_pack_table
from tests.faulty import FaultyBackend

CHUNK_BYTES = 4096


def noise(seed: int, n_bytes: int = CHUNK_BYTES) -> Any:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def save(store: Store, step: int, tensors: dict[str, Any]) -> Ref:
    with store.write_checkpoint(tensors) as pending:
        return pending.commit(RefTarget(run_id="run", step=step))


def overwrite(backend: Backend, key: str, data: bytes) -> None:
    backend.delete(key)
    backend.put_new(key, [data])


def pack_with(store: Store, tensor: Any) -> str:
    wanted = digest(tensor)
    for name, _ in list_packs(store.backend):
        if any(entry["digest"].tobytes() == wanted for entry in read_pack_table(store.backend, name)):
            return f"packs/{name}.pack"
    raise AssertionError("no pack holds it")


def flip(store: Store, key: str, offset: int) -> None:
    data = bytearray(store.backend.get(key))
    data[offset] ^= 1
    overwrite(store.backend, key, bytes(data))


def flip_payload(store: Store, tensor: Any) -> str:
    """Damage the one chunk of a tensor, and say in which pack."""
    key = pack_with(store, tensor)
    for entry in read_pack_table(store.backend, key[len("packs/") : -len(".pack")]):
        if entry["digest"].tobytes() == digest(tensor):
            flip(store, key, int(entry["offset"]) + 7)
    return key


@pytest.fixture
def store() -> Store:
    """Two steps that share a tensor, one more of their own each, and a file."""
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    save(store, 1, {"shared": noise(0), "own": noise(1), "compressible": np.zeros(10_000)})
    save(store, 2, {"shared": noise(0), "own": noise(2)})
    return store


def found_in(store: Store, *, full: bool = False) -> tuple[Problem, ...]:
    # A store that is opened anew has not read a table before.
    return verify(Store.open_backend(store.backend), full=full).problems


# --- sound stores


@pytest.mark.parametrize("full", [False, True])
def test_a_sound_store_has_no_problems(store: Store, tmp_path: Path, full: bool) -> None:
    (tmp_path / "file").write_bytes(noise(3, 20_000).tobytes())
    with store.write_file(tmp_path / "file") as pending:
        pending.commit(RefTarget(path="data/file"))
    save(store, 3, {})
    save(store, 4, {"empty": np.empty((0, 3)), "scalar": np.float64(1), "cut": np.arange(5000)})

    n_read = 23 if full else 0
    assert verify(store, full=full) == VerifyReport(
        n_refs=5, n_packs=4, n_chunks=23, n_read=n_read, full=full, problems=()
    )


def test_a_store_with_nothing_in_it_is_sound() -> None:
    report = verify(Store.init_backend(MemoryBackend()), full=True)

    assert str(report) == "0 checkpoints and files, 0 packs, 0 chunks, every one read: no problem found"


def test_a_report_says_in_words_what_was_looked_at(store: Store) -> None:
    assert str(verify(store)) == "2 checkpoints and files, 2 packs, 5 chunks, none of them read: no problem found"


def test_verification_changes_nothing(store: Store) -> None:
    backend = FaultyBackend(store.backend)
    verify(Store.open_backend(backend), full=True)

    assert not {"put_new", "promote", "withdraw", "delete", "sweep"} & set(backend.calls)


def test_a_save_that_was_abandoned_or_is_under_way_is_no_problem(store: Store) -> None:
    with store.write_checkpoint({"w": noise(9)}):
        assert found_in(store, full=True) == ()
    assert found_in(store, full=True) == ()


# --- chunks


def test_a_damaged_chunk_is_named_with_its_checkpoints_tensors_and_pack(store: Store) -> None:
    key = flip_payload(store, noise(0))
    problems = found_in(store, full=True)

    assert {(problem.checkpoint, problem.tensors, problem.key) for problem in problems} == {
        ("run run step 1", ("shared",), key),
        ("run run step 2", ("shared",), key),
    }
    assert all(digest(noise(0)).hex() in problem.reason for problem in problems)
    assert f"run run step 1, tensor 'shared', {key}: chunk" in str(verify(store, full=True))


def test_damage_inside_a_chunk_is_seen_only_by_reading_it(store: Store) -> None:
    flip_payload(store, noise(0))

    assert found_in(store) == ()


@pytest.mark.long
def test_every_flipped_byte_of_a_pack_is_seen_or_without_effect() -> None:
    store = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    tensors = {"raw": noise(1, 100), "packed": np.zeros(3000), "text": np.arange(60)}
    ref = save(store, 1, tensors)
    [(name, size)] = list_packs(store.backend)
    key = f"packs/{name}.pack"
    whole = store.backend.get(key)
    for at in range(size):
        flip(store, key, at)
        if found_in(store, full=True) == ():
            fresh = Store.open_backend(store.backend)
            loaded = fresh.read_tensors(fresh.manifest(ref))
            assert all(loaded[name].tobytes() == tensors[name].tobytes() for name in tensors), at
        overwrite(store.backend, key, whole)


def test_verify_reports_damage_that_no_checkpoint_needs_separately(store: Store) -> None:
    store.drop(save(store, 3, {"a": noise(5), "b": noise(6)}))
    key = flip_payload(store, noise(5))
    assert flip_payload(store, noise(6)) == key
    [problem] = found_in(store, full=True)

    assert (problem.key, problem.checkpoint, problem.tensors) == (key, None, ())
    assert problem.reason.endswith("and 1 more damaged chunk; nothing needs it yet")


def test_chunks_of_one_pack_make_one_problem_a_checkpoint(store: Store) -> None:
    save(store, 3, {f"t{n:03}": noise(100 + n) for n in range(50)})
    for n in range(50):
        flip_payload(store, noise(100 + n))
    [problem] = found_in(store, full=True)

    assert problem.tensors == tuple(f"t{n:03}" for n in range(50))
    assert "tensors 't000', 't001', 't002' and 47 more" in str(problem)


# --- packs


@pytest.mark.parametrize("full", [False, True])
def test_a_pack_that_is_gone_is_named_with_what_it_breaks(store: Store, full: bool) -> None:
    key = pack_with(store, noise(2))
    store.backend.delete(key)

    [problem] = found_in(store, full=full)
    assert (problem.checkpoint, problem.tensors, problem.key) == ("run run step 2", ("own",), key)
    assert "no pack that can be read holds chunk" in problem.reason


def test_a_pack_that_the_folded_index_names_is_named_when_it_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorcas_mlflow.chunk_io._catalog._FOLD_AT", 1)
    save(store, 3, {"w": noise(7)})
    key = pack_with(store, noise(7))
    store.backend.delete(key)

    assert [problem.key for problem in found_in(store)] == [key]


@pytest.mark.parametrize("n_bytes", [0, 40, 4200])
def test_verify_reports_a_pack_cut_short_and_the_checkpoints_it_breaks(store: Store, n_bytes: int) -> None:
    key = pack_with(store, noise(2))
    overwrite(store.backend, key, store.backend.get(key)[:n_bytes])
    pack, checkpoint = found_in(store)

    assert (pack.key, pack.checkpoint) == (key, None)
    assert (checkpoint.key, checkpoint.checkpoint, checkpoint.tensors) == (key, "run run step 2", ("own",))


def test_without_an_index_a_lost_chunk_is_named_and_its_pack_is_not(store: Store) -> None:
    store.backend.delete(pack_with(store, noise(2)))
    for info in list(store.backend.list("index")):
        store.backend.delete(info.key)
    [problem] = found_in(store)

    assert (problem.key, problem.tensors) == (None, ("own",))
    assert digest(noise(2)).hex() in problem.reason


def test_a_table_that_claims_impossible_sizes_costs_no_memory(store: Store) -> None:
    key = pack_with(store, noise(2))
    data = bytearray(store.backend.get(key))
    table = np.frombuffer(data, TABLE_ENTRY, offset=len(data) - FOOTER_BYTES - TABLE_ENTRY.itemsize, count=1)
    table["raw_bytes"] = 0xFFFFFFFF
    body = bytes(data[-FOOTER_BYTES - TABLE_ENTRY.itemsize : -32])
    data[-32:] = digest(body)
    overwrite(store.backend, key, bytes(data))

    problems = found_in(store, full=True)
    assert {problem.tensors for problem in problems if problem.checkpoint} == {("own",)}
    assert any("4294967295" in problem.reason for problem in problems)


# --- what is not a pack


def test_a_damaged_manifest_is_named_for_each_checkpoint_that_needs_it(store: Store) -> None:
    store.drop(save(store, 3, {"shared": noise(0), "own": noise(2)}))
    with store.write_checkpoint({"shared": noise(0), "own": noise(2)}) as pending:
        shared = pending.commit(RefTarget(run_id="other", step=5))
    key = f"manifests/{shared.manifest}"
    flip(store, key, 30)

    assert sorted((problem.key, problem.checkpoint) for problem in found_in(store)) == [
        (key, "run other step 5"),
        (key, "run run step 2"),
    ]


def test_a_manifest_that_is_gone_is_named(store: Store) -> None:
    [_, ref] = store.checkpoints()
    store.backend.delete(f"manifests/{ref.manifest}")
    [problem] = found_in(store)

    assert (problem.checkpoint, problem.key) == ("run run step 2", f"manifests/{ref.manifest}")


def test_a_manifest_of_another_store_is_named(store: Store) -> None:
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    ref = save(other, 9, {"shared": noise(0)})
    for key in (ref.key, f"manifests/{ref.manifest}"):
        store.backend.put_new(key, [other.backend.get(key)])
    [problem] = found_in(store)

    assert problem.checkpoint == "run run step 9"
    assert other.id in problem.reason


DAMAGE = {
    "refs/runs/run/@7": b"{}",
    "refs/runs/run/@8": record_bytes({"format": 99}),
    "intents/" + "1" * 32: b"{}",
    "condemned/" + "1" * 32: b"{}",
    "index/" + "1" * 32 + ".segment": b"not Arrow",
}


@pytest.mark.parametrize("key", DAMAGE)
def test_a_small_blob_that_cannot_be_read_is_named(store: Store, key: str) -> None:
    store.backend.put_new(key, [DAMAGE[key]])

    assert [problem.key for problem in found_in(store)] == [key]


def test_verify_reports_all_problems_and_not_only_the_first(store: Store) -> None:
    for key, data in DAMAGE.items():
        store.backend.put_new(key, [data])
    flip_payload(store, noise(1))
    store.backend.delete(pack_with(store, noise(2)))

    assert len(found_in(store, full=True)) == len(DAMAGE) + 2


@pytest.mark.usefixtures("store_of_files")
def test_storage_that_fails_to_read_a_blob_is_a_problem_of_that_blob(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    save(store, 1, {"w": noise(1)})
    backend = FaultyBackend(store.backend)
    # One read for the table, one for the chunk; broken off there, the second again for the chunk alone.
    backend.fail(1, operations=["read_into"])
    [problem] = verify(Store.open_backend(backend), full=True).problems

    assert problem.tensors == ("w",)
    assert "it cannot be read: it was told to fail" in problem.reason


@pytest.mark.usefixtures("store_of_files")
def test_one_bad_read_is_not_taken_for_damage_of_all_that_lies_near(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    save(store, 1, {f"t{n}": noise(n) for n in range(9)})
    backend = FaultyBackend(store.backend)
    backend.fail(1, operations=["read_into"])

    assert verify(Store.open_backend(backend), full=True).problems == ()


# --- while others work


class Meanwhile(LocalBackend):
    """Files, and something that happens once, just before a prefix is listed for the nth time."""

    def happens(self, prefix: str, act: Callable[[], object], nth: int = 0) -> None:
        self._prefix, self._act, self._left = prefix, act, nth

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        if prefix == getattr(self, "_prefix", None):
            self._left -= 1
            if self._left < 0:
                self._prefix = ""
                self._act()
        return super().list(prefix, after=after)


@pytest.mark.parametrize("full", [False, True])
def test_steps_dropped_and_collected_during_verify_are_no_problem(tmp_path: Path, full: bool) -> None:
    backend = Meanwhile(tmp_path)
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    save(store, 1, {"w": noise(1), "shared": noise(0)})
    ref = save(store, 2, {"w": noise(2), "shared": noise(0)})

    def drop() -> None:
        other = Store.open_backend(LocalBackend(tmp_path))
        other.drop(ref)
        plan_gc(other, grace_s=0, max_waste=0).execute()

    backend.happens("packs", drop)
    report = verify(store, full=full)

    assert (report.n_refs, report.problems) == (2, ())


@pytest.mark.parametrize("full", [False, True])
def test_verify_finds_chunks_that_move_during_the_check(tmp_path: Path, full: bool) -> None:
    class Slow(LocalBackend):
        """Files; a pack's table is read only once a collector has moved what is in it."""

        def read_into(self, key: str, start: int, out: memoryview) -> None:
            if key.startswith("packs/") and not moved:
                moved.append(key)
                plan_gc(Store.open_backend(LocalBackend(tmp_path)), grace_s=0, max_waste=0).execute()
            super().read_into(key, start, out)

    store = Store.init_backend(LocalBackend(tmp_path), chunk_bytes=CHUNK_BYTES)
    store.drop(save(store, 1, {"gone": noise(1), "shared": noise(0)}))
    save(store, 2, {"shared": noise(0)})
    moved: list[str] = []

    assert verify(Store.open_backend(Slow(tmp_path)), full=full).problems == ()
    assert moved


def test_a_list_of_a_collector_at_work_is_no_problem(store: Store) -> None:
    store.backend.put_new("condemned/" + "1" * 32, [condemned_bytes(frozenset(), frozenset())])

    assert found_in(store) == ()


def test_storage_that_fails_to_list_is_an_error(store: Store) -> None:
    backend = FaultyBackend(store.backend)
    backend.fail(0, operations=["list"])

    with pytest.raises(TensorCasError):
        verify(Store.open_backend(backend))
