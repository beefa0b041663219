"""A chunk that is damaged in one pack and whole in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, LocalBackend, MemoryBackend
from tensorcas_mlflow.codecs import codec_numbered
from tensorcas_mlflow.errors import BackendError, CorruptChunkError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import PackWriter, Payload
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, mark_loose, new_pack_name, read_pack_table
from tests.maintenance.verify.stores import CHUNK_BYTES, noise, put, save, told


@pytest.fixture(params=[False, True], ids=["local", "remote"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # it would hide the damage from a load
    return Store.init_backend(MemoryBackend(is_remote=request.param), chunk_bytes=CHUNK_BYTES)


def packs_of(backend: Backend) -> list[str]:
    return [f"packs/{name}.pack" for name, _ in list_packs(backend)]


def second_copy(store: Store) -> str:
    """Put what the only pack holds into another one too."""
    [key] = packs_of(store.backend)
    name = key.removeprefix("packs/").removesuffix(".pack")
    data = store.backend.get(key)
    payloads = [
        Payload(
            digest=entry["digest"].tobytes(),
            raw_bytes=int(entry["raw_bytes"]),
            codec=codec_numbered(int(entry["codec"])),
            typesize=int(entry["typesize"]),
            data=data[int(entry["offset"]) :][: int(entry["stored_bytes"])],
            begins_row=True,
        )
        for entry in read_pack_table(store.backend, name)
    ]
    other = new_pack_name(store.backend)
    store.backend.put_new(f"packs/{other}.pack", PackWriter().pieces(payloads))
    mark_loose(store.backend, other)
    return f"packs/{other}.pack"


def flip(backend: Backend, key: str, at: int) -> None:
    data = bytearray(backend.get(key))
    data[at] ^= 1
    assert isinstance(backend, MemoryBackend)
    put(backend, key, bytes(data))


def load(store: Store, ref: Ref) -> dict[str, Any]:
    fresh = Store.open_backend(store.backend)
    return fresh.read_tensors(fresh.manifest(ref))


WANTED = {"a": noise(1), "b": noise(2), "zeros": np.zeros(2_000)}


def test_the_whole_copy_is_read_whichever_pack_is_damaged(store: Store) -> None:
    ref = save(store, WANTED, run_id="run", step=1)
    second_copy(store)
    for key in packs_of(store.backend):
        flip(store.backend, key, 100)

        assert {name: array.tobytes() for name, array in load(store, ref).items()} == {
            name: array.tobytes() for name, array in WANTED.items()
        }
        [problem] = told(store.backend)
        assert (problem.key, problem.checkpoint) == (key, None)
        assert problem.reason.endswith("another pack has a whole copy")
        flip(store.backend, key, 100)


def test_chunks_that_are_damaged_in_different_packs_are_read_from_the_others(store: Store) -> None:
    ref = save(store, WANTED, run_id="run", step=1)
    second_copy(store)
    first, second = packs_of(store.backend)
    flip(store.backend, first, 100)
    flip(store.backend, second, 100 + CHUNK_BYTES)

    assert all(load(store, ref)[name].tobytes() == array.tobytes() for name, array in WANTED.items())


def test_an_error_names_all_tensors_that_are_damaged_in_every_pack(store: Store) -> None:
    ref = save(store, WANTED, run_id="run", step=1)
    second_copy(store)
    for key in packs_of(store.backend):
        flip(store.backend, key, 100)
        flip(store.backend, key, 100 + CHUNK_BYTES)

    with pytest.raises(CorruptChunkError) as caught:
        load(store, ref)
    assert (caught.value.checkpoint, caught.value.tensors) == ("run run step 1", ("a", "b"))
    assert "run run step 1, tensors 'a', 'b': chunk" in str(caught.value)
    assert caught.value.key in packs_of(store.backend)


def test_a_save_of_the_process_that_found_a_copy_damaged_writes_another(store: Store) -> None:
    ref = save(store, WANTED, run_id="run", step=1)
    [key] = packs_of(store.backend)
    flip(store.backend, key, 100)
    reader = Store.open_backend(store.backend)
    with pytest.raises(CorruptChunkError):
        reader.read_tensors(reader.manifest(ref))
    with reader.write_checkpoint(WANTED) as pending:
        pending.commit(RefTarget(run_id="run", step=2))

    assert pending.n_new_bytes == CHUNK_BYTES
    assert load(store, ref)["a"].tobytes() == WANTED["a"].tobytes()


@pytest.mark.usefixtures("store_of_files")
def test_a_pack_cut_short_still_gives_what_is_left_of_it(tmp_path: Path) -> None:
    store = Store.init(tmp_path, chunk_bytes=CHUNK_BYTES)
    ref = save(store, {"a": noise(1), "b": noise(2)}, run_id="run", step=1)
    [path] = (tmp_path / ".tensorcas" / "packs").iterdir()
    path.write_bytes(path.read_bytes()[: 64 + CHUNK_BYTES + 100])
    manifest = store.manifest(ref)

    assert store.read_tensors(manifest, ["a"])["a"].tobytes() == noise(1).tobytes()
    with pytest.raises(CorruptChunkError, match=f"run run step 1, tensor 'b'.*{path.name}"):
        store.read_tensors(manifest)


@pytest.mark.usefixtures("store_of_files")
@pytest.mark.parametrize("what", ["refs/runs", "refs/runs/run/@1"])
def test_a_collection_takes_nothing_that_a_linked_ref_or_folder_of_refs_keeps(tmp_path: Path, what: str) -> None:
    store = Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)
    save(store, WANTED, run_id="run", step=1)
    place = tmp_path / "root" / ".tensorcas" / what
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")

    plan = plan_gc(Store.open(tmp_path / "root"), grace_s=0)
    assert "links are not followed" in plan.unread_refs[what]
    assert plan.execute().n_packs == plan.execute().n_manifests == 0
    assert [problem.key for problem in told_at(LocalBackend(tmp_path / "root" / ".tensorcas"))] == [what]


def told_at(backend: Backend) -> tuple[Any, ...]:
    return verify(Store.open_backend(backend)).problems


class BadSector(MemoryBackend):
    """A disk that does not give one byte of one blob."""

    place = ("", 0)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if key == self.place[0] and start <= self.place[1] < start + len(out):
            raise BackendError("read", key, "OSError: [Errno 5] Input/output error")
        super().read_into(key, start, out)


@pytest.mark.parametrize("where", ["a chunk near the table", "the table"])
def test_a_bad_sector_in_one_of_two_copies_keeps_no_new_process_from_loading(where: str) -> None:
    backend = BadSector()
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    ref = save(store, WANTED, run_id="run", step=1)
    [first] = packs_of(backend)
    second_copy(store)
    backend.place = (first, 100 if where == "a chunk near the table" else len(backend.get(first)) - 8)
    loaded = load(store, ref)

    assert all(loaded[name].tobytes() == array.tobytes() for name, array in WANTED.items())
