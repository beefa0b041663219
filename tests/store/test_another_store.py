"""A store that is deleted, or made anew, while a program has it open: no save into it is acknowledged."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend
from tensorcas_mlflow.errors import ConflictError, StoreNotFoundError, TensorCasError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import copy_refs, plan_gc, plan_optimize, read_source
from tensorcas_mlflow.store import PendingSave, Store
from tests.faulty import FaultyBackend

CHUNK_BYTES = 4096
TARGET = RefTarget(run_id="run", step=1)
TENSORS: dict[str, Any] = {"w": np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)}


class Place:
    """One kind of backend, and what somebody does to all that is in it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.memory = MemoryBackend(is_remote=kind == "remote")
        self.folder = folder / "root" if kind == "local" else None

    def backend(self) -> Backend:
        """Return the backend that a process opens."""
        return self.memory if self.folder is None else LocalBackend(self.folder)

    def delete(self) -> None:
        if self.folder is None:
            self.memory._blobs.clear()
        else:
            shutil.rmtree(self.folder)

    def make_anew(self) -> None:
        self.delete()
        Store.init_backend(self.backend(), chunk_bytes=CHUNK_BYTES)

    def keep(self, folder: Path) -> None:
        """Copy all of it, for `put_back`."""
        if self.folder is None:
            self._kept = dict(self.memory._blobs)
        else:
            shutil.copytree(self.folder, folder, symlinks=True)

    def put_back(self, folder: Path) -> None:
        """Put the blobs that are gone back, as somebody does who restores a backup in place."""
        if self.folder is None:
            self.memory._blobs.update(self._kept)
        else:
            shutil.copytree(folder, self.folder, symlinks=True, dirs_exist_ok=True)

    def n_refs(self) -> int:
        return len(list(self.backend().list("refs")))


@pytest.fixture(params=["local", "memory", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")
    return Place(str(request.param), tmp_path)


@pytest.fixture
def store(place: Place) -> Store:
    """A store that a training has open, with a step in it."""
    Store.init_backend(place.backend(), chunk_bytes=CHUNK_BYTES)
    opened = Store.open_backend(place.backend())
    commit(opened.write_checkpoint(TENSORS), 0)
    return opened


def commit(save: PendingSave, step: int = 1) -> None:
    with save:
        save.commit(RefTarget(run_id="run", step=step))


def save_unchanged(store: Store) -> None:
    commit(store.write_checkpoint(TENSORS))


def save_changed(store: Store) -> None:
    commit(store.write_checkpoint({"w": TENSORS["w"][::-1].copy()}))


def stream(store: Store) -> None:
    with store.write_stream(io.BytesIO(np.random.default_rng(1).bytes(100_000))) as save:
        save.commit(RefTarget(path="a/file"))


def adopt(store: Store) -> None:
    known = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)
    with known.write_checkpoint(TENSORS) as save:
        manifest = save.manifest
    commit(store.adopt(manifest))


def copy_into(store: Store) -> None:
    source = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    commit(source.write_checkpoint(TENSORS))
    copy_refs(source, store, read_source(source)[0])


DOORS = pytest.mark.parametrize("door", [save_unchanged, save_changed, stream, adopt, copy_into])


@DOORS
def test_nothing_is_committed_to_a_store_that_was_made_anew(
    place: Place, store: Store, door: Callable[[Store], None]
) -> None:
    place.make_anew()

    with pytest.raises(TensorCasError) as caught:
        door(store)

    if door is not adopt:  # which finds first that the chunks are not there
        assert isinstance(caught.value, ConflictError)
        assert f"no longer {store.id}" in str(caught.value)
    assert place.n_refs() == 0
    assert list(place.backend().list("intents")) == []


@DOORS
def test_a_store_that_was_deleted_is_not_made_again_by_a_save(
    place: Place, store: Store, door: Callable[[Store], None]
) -> None:
    place.delete()

    with pytest.raises(StoreNotFoundError):
        door(store)

    assert [info.key for info in place.memory.list("packs")] == []
    assert place.folder is None or not place.folder.exists()


def test_commit_into_a_store_made_anew_during_the_save_is_refused(place: Place, store: Store) -> None:
    with store.write_checkpoint({"w": TENSORS["w"] + 1}) as save:
        place.make_anew()
        with pytest.raises(ConflictError, match="no longer"):
            save.commit(TARGET)

    assert place.n_refs() == 0


def test_commit_into_a_deleted_store_is_refused(place: Place, store: Store) -> None:
    with store.begin_checkpoint({"w": TENSORS["w"] + 1}) as save:
        place.delete()
        with pytest.raises(StoreNotFoundError):
            save.commit(TARGET)

    assert place.n_refs() == 0
    assert place.folder is None or not place.folder.exists()


def test_a_store_of_the_same_id_that_was_made_anew_holds_what_is_saved_into_it(place: Place, store: Store) -> None:
    # As a copy does that begins once more: what this process knows of packs must be forgotten.
    place.delete()
    Store.init_backend(place.backend(), chunk_bytes=CHUNK_BYTES, store_id=store.id)

    save_unchanged(store)

    fresh = Store.open_backend(place.backend())
    [ref] = fresh.checkpoints()
    assert np.array_equal(fresh.read_tensors(fresh.manifest(ref))["w"], TENSORS["w"])


def test_a_format_that_was_put_back_from_a_backup_is_the_same_store(place: Place, store: Store) -> None:
    blob = store.backend.get("format")
    store.backend.delete("format")
    store.backend.put_new("format", [blob])

    save_unchanged(store)

    assert len(Store.open_backend(place.backend()).checkpoints()) == 2


def test_a_collection_and_an_optimization_of_another_store_are_refused(place: Place, store: Store) -> None:
    place.make_anew()

    for plan in (plan_gc, plan_optimize):
        with pytest.raises(ConflictError, match="no longer"):
            plan(store)


def test_an_unchanged_store_far_away_is_asked_for_its_format_once() -> None:
    backend = FaultyBackend(MemoryBackend(is_remote=True))
    Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    store = Store.open_backend(backend)
    reads: list[int] = []
    for step in range(3):
        backend.calls.clear()
        commit(store.write_checkpoint({"w": TENSORS["w"] + step}), step)
        reads.append(backend.calls.count("get"))

    assert reads == [1, 0, 0]


def test_a_store_far_away_that_says_no_generation_is_asked_each_time() -> None:
    # As an earlier release made it.
    memory = MemoryBackend(is_remote=True)
    store = Store.init_backend(memory, chunk_bytes=CHUNK_BYTES)
    memory.delete("condemned/@generation")
    commit(store.write_checkpoint(TENSORS), 0)
    memory._blobs.clear()
    Store.init_backend(memory, chunk_bytes=CHUNK_BYTES)
    memory.delete("condemned/@generation")

    with pytest.raises(ConflictError, match="no longer"):
        commit(store.write_checkpoint(TENSORS), 1)


def test_a_generation_that_was_left_behind_is_not_the_new_stores() -> None:
    memory = MemoryBackend(is_remote=True)
    store = Store.init_backend(memory, chunk_bytes=CHUNK_BYTES)
    commit(store.write_checkpoint(TENSORS), 0)
    for key in [key for key in memory._blobs if key != "condemned/@generation"]:
        memory.delete(key)
    Store.init_backend(memory, chunk_bytes=CHUNK_BYTES)

    with pytest.raises(ConflictError, match="no longer"):
        commit(store.write_checkpoint(TENSORS), 1)


# --- a backup that is put back in place


@pytest.fixture(params=["a reader", "a collector"])
def missed(request: pytest.FixtureRequest, place: Place, store: Store, tmp_path: Path) -> Store:
    """A store that was put back after a program that has it open has missed, or has deleted, all its packs."""
    place.keep(tmp_path / "kept")
    (ref,) = store.checkpoints()
    if request.param == "a reader":
        store.read_tensors(store.manifest(ref))
        for info in list(place.backend().list("packs")):
            place.backend().delete(info.key)
        with pytest.raises(TensorCasError):
            store.read_tensors(store.manifest(ref))
    else:
        store.drop(ref)
        plan_gc(store, grace_s=0, max_waste=0).execute()
    place.put_back(tmp_path / "kept")
    return store


def test_packs_that_are_put_back_are_read_by_a_program_that_has_missed_them(missed: Store) -> None:
    (ref,) = missed.checkpoints()

    assert np.array_equal(missed.read_tensors(missed.manifest(ref))["w"], TENSORS["w"])


def test_a_save_after_packs_were_put_back_is_whole(missed: Store, place: Place) -> None:
    save_unchanged(missed)

    opened = Store.open_backend(place.backend())
    for ref in opened.checkpoints():
        assert np.array_equal(opened.read_tensors(opened.manifest(ref))["w"], TENSORS["w"])


def test_a_folder_that_replaces_another_with_the_same_times_is_opened_anew(tmp_path: Path) -> None:
    root, kept = tmp_path / "root", tmp_path / "kept"
    with Store.init(root).write_checkpoint(TENSORS) as save:
        save.commit(TARGET)
    shutil.copytree(root, kept)
    before = Store.find(root)[0]

    shutil.rmtree(root)
    shutil.copytree(kept, root)  # the file `format` has the same size and time, and often the same inode

    assert Store.find(root)[0] is not before
