"""Files whose tensors have moved a little since an earlier file or checkpoint: stored as deltas as they stream in."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.digest import digest_all
from tensorcas_mlflow.base.tensors import Spec
from tensorcas_mlflow.errors import FencedError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest, Row
from tensorcas_mlflow.layout.packs import bases_of, is_delta
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store, _bases, _ingest
from tensorcas_mlflow.store._recent import RecentManifests
from tensorcas_mlflow.store.protocol import condemned_bytes, read_pack_table
from tests.deltas.made import packs_of, save, weights
from tests.file_formats.samples import pt2_entry, pt2_of, pt2_table

N = 100_000
CHUNK_BYTES = 16 << 10
BATCH_BYTES = 8 * CHUNK_BYTES


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the recent manifests, as in a new process."""
    monkeypatch.setattr(_bases, "RECENT", RecentManifests())
    monkeypatch.setattr("tensorcas_mlflow.store._store.RECENT", _bases.RECENT)


@pytest.fixture(params=["on this machine", "of objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    backend = MemoryBackend(is_remote=request.param == "of objects")
    return Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of these tests is many batches, and no tensor is in one."""
    monkeypatch.setattr(_ingest, "BATCH_BYTES", BATCH_BYTES)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", 3 * CHUNK_BYTES)


class Stream(io.BytesIO):
    """Bytes, and something that happens once, before a read from some offset on."""

    def __init__(self, data: bytes, *, at: int, then: Callable[[], None]) -> None:
        super().__init__(data)
        self._at = at
        self._then: Callable[[], None] | None = then

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self.tell() >= self._at and self._then is not None:
            then, self._then = self._then, None
            then()
        return super().readinto(buffer[:CHUNK_BYTES])


def safetensors(**tensors: Any) -> bytes:
    header, begin = {}, 0
    for name, array in tensors.items():
        end = begin + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    said = json.dumps(header).encode()
    return len(said).to_bytes(8, "little") + said + b"".join(array.tobytes() for array in tensors.values())


def epoch(seed: int) -> bytes:
    """A file of tensors that are like those of the next seed."""
    return safetensors(w=weights(seed, N), v=weights(seed + 100, N))


LONG = 6 * 4 * N
"""Longer than what is looked at ahead, so that batches are stored before all is read."""


def long_epoch(seed: int) -> bytes:
    return safetensors(**{f"w{number}": weights(seed + 100 * number, N) for number in range(6)})


def commit(store: Store, data: bytes | io.BytesIO, path: str = "file") -> tuple[Ref, int]:
    """Store a file: its ref, and by how much the store has grown."""
    stream = io.BytesIO(data) if isinstance(data, bytes) else data
    with store.write_stream(stream) as pending:
        return pending.commit(RefTarget(path=path)), pending.n_stored_bytes


def read(store: Store, ref: Ref) -> bytes:
    fresh = Store.open_backend(store.backend)
    assert verify(fresh, full=True).problems == ()
    return b"".join(fresh.iter_file(ref))


def tables(store: Store) -> dict[str, Any]:
    return {name: read_pack_table(store.backend, name) for name in packs_of(store.backend)}


def n_deltas(store: Store) -> int:
    return sum(int(is_delta(table).sum()) for table in tables(store).values())


def network_files(suffix: str) -> list[bytes]:
    """A small network as torch writes it, at the ends of two epochs of training."""
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    optimiser = torch.optim.Adam(network.parameters(), 1e-4)
    inputs = torch.randn(256, 64)
    files = []
    for _ in range(2):
        for batch in inputs.split(64):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(network(batch), batch.flip(1)).backward()
            optimiser.step()
        if suffix == "safetensors":
            files.append(safetensors(**{name: each.numpy() for name, each in network.state_dict().items()}))
        else:
            out = io.BytesIO()
            torch.save(network, out)
            files.append(out.getvalue())
    return files


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_next_epoch_of_a_trained_network_is_clearly_smaller_and_comes_back(store: Store, suffix: str) -> None:
    first, second = network_files(suffix)
    one, in_full = commit(store, first, "one")
    two, as_deltas = commit(store, second, "two")

    assert as_deltas < 0.85 * in_full
    assert (read(store, one), read(store, two)) == (first, second)


@pytest.mark.usefixtures("small_batches")
def test_batches_are_stored_as_deltas_as_whole_files_are(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _, in_full = commit(store, epoch(0), "0")
    batched, in_batches = commit(store, epoch(1), "1")
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 32 << 20)
    _, in_one = commit(store, epoch(2), "2")

    assert in_one < 0.6 * in_full
    assert in_batches < 1.05 * in_one
    assert read(store, batched) == epoch(1)


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
def test_many_epochs_come_back_and_no_chain_is_deeper_than_the_bound(store: Store) -> None:
    files = [safetensors(w=weights(seed, N)) for seed in range(5)]
    refs = [commit(store, data, f"{seed}")[0] for seed, data in enumerate(files)]

    assert {int(each) for table in tables(store).values() for each in table["depth"]} == {0, 1, 2}
    assert [read(store, ref) for ref in refs] == files


def test_a_file_is_stored_against_a_checkpoint_and_a_checkpoint_against_a_file(store: Store) -> None:
    save(store, {"w": weights(0, N)}, 0)
    ref, _ = commit(store, safetensors(w=weights(1, N)))
    against_checkpoint = n_deltas(store)
    save(store, {"w": weights(2, N)}, 2)

    assert 0 < against_checkpoint < n_deltas(store)
    assert read(store, ref) == safetensors(w=weights(1, N))


def test_the_one_nameless_tensor_of_a_file_is_compared_with_that_of_the_last(store: Store) -> None:
    for seed in range(2):
        out = io.BytesIO()
        np.save(out, weights(seed, N))
        ref, _ = commit(store, out.getvalue(), f"{seed}.npy")

    assert n_deltas(store) > 0
    assert read(store, ref) == out.getvalue()


@pytest.mark.long
def test_the_file_before_is_found_behind_many_that_hold_no_tensors(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        if seed == 2:
            forget(monkeypatch)
        before = n_deltas(store)
        commit(store, epoch(seed), f"{seed}/model")
        grown = n_deltas(store) > before
        for number in range(20):
            commit(store, f"{seed} {number}".encode() * 5_000, f"{seed}/{number}.txt")

        assert grown == (seed > 0)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("foresees", [True, False])
def test_the_intent_of_a_batch_names_the_packs_of_its_bases(
    store: Store, monkeypatch: pytest.MonkeyPatch, *, foresees: bool
) -> None:
    if not foresees:
        monkeypatch.setattr(_ingest, "_MOST_FORESEEN", 0)
    commit(store, long_epoch(0))
    packs = packs_of(store.backend)
    named: set[str] = set()
    seen: set[str] = set()

    def look() -> None:
        seen.update(packs_of(store.backend))
        for info in store.backend.list("intents"):
            named.update(json.loads(store.backend.get(info.key).split(b"\n")[0]).get("bases", []))

    commit(store, Stream(long_epoch(1), at=LONG * 3 // 4, then=look), "next")

    tables = [read_pack_table(store.backend, name) for name in seen - packs]
    bases = {base.pack for table in tables for base in bases_of(table[is_delta(table)])}
    # They also name the packs of the batches themselves.
    assert seen - packs
    assert seen - packs <= named
    assert bases
    assert bases <= named


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
def test_stream_keeps_the_bases_that_others_drop_meanwhile(store: Store) -> None:
    commit(store, long_epoch(0), "one")
    dropped = packs_of(store.backend)

    def drop_and_collect() -> None:
        store.drop_artifacts("one")
        plan_gc(Store.open_backend(store.backend), grace_s=3600).execute()

    ref, _ = commit(store, Stream(long_epoch(1), at=LONG * 3 // 4, then=drop_and_collect), "two")
    kept = packs_of(store.backend) & dropped
    plan_gc(Store.open_backend(store.backend), grace_s=0).execute()

    assert kept
    assert n_deltas(store) > 0
    assert read(store, ref) == long_epoch(1)


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
def test_a_stream_of_deltas_given_up_for_dead_fails_whole_and_can_be_stored_again(store: Store) -> None:
    commit(store, long_epoch(0), "one")

    def drop_and_collect() -> None:
        store.drop_artifacts("one")
        plan_gc(Store.open_backend(store.backend), grace_s=0).execute()

    with pytest.raises(FencedError):
        commit(store, Stream(long_epoch(1), at=LONG * 3 // 4, then=drop_and_collect), "two")
    assert store.walk_artifacts() == []
    assert list(store.backend.list("intents")) == []

    assert read(store, commit(store, long_epoch(1), "two")[0]) == long_epoch(1)


@pytest.mark.usefixtures("small_batches")
def test_no_batch_is_stored_against_a_condemned_pack(store: Store) -> None:
    commit(store, epoch(0))
    packs = frozenset(packs_of(store.backend))
    store.backend.put_new("condemned/" + "c" * 32, [condemned_bytes(packs, frozenset())])
    commit(store, epoch(1), "next")

    assert n_deltas(store) == 0


@pytest.mark.usefixtures("small_batches")
def test_a_fast_store_of_a_file_makes_no_deltas(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_POLICY", "fast")
    commit(store, epoch(0))
    commit(store, epoch(1), "next")

    assert n_deltas(store) == 0


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("left", [100, BATCH_BYTES + 1, N * 4 + 7, N * 8 - 3])
def test_a_file_that_is_cut_short_is_stored_as_it_came(store: Store, left: int) -> None:
    commit(store, epoch(0))
    ref, _ = commit(store, epoch(1)[:left], "cut")

    assert read(store, ref) == epoch(1)[:left]


def test_a_manifest_that_gives_a_place_a_chunk_of_another_size_is_no_harm(store: Store) -> None:
    data = weights(0, N)
    raw = memoryview(data.tobytes())
    odd = [raw[:5_000]] * -(-len(raw) // CHUNK_BYTES)
    save(store, {"odd": np.frombuffer(odd[0], np.uint8)}, 0)
    row = Row(spec=Spec(name="w", dtype="float32", shape=(N,)), cuts=None, digests=digest_all(odd))
    lie = Manifest(kind="file", chunk_bytes=CHUNK_BYTES, store_id=store.id, flavor=None, rows=[row])
    _bases.RECENT.note(store.id, "lie", lie)
    ref, _ = commit(store, safetensors(w=weights(1, N)))

    assert read(store, ref) == safetensors(w=weights(1, N))


def test_a_model_that_mlflow_logs_each_epoch_is_stored_as_deltas_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log the files of `mlflow.pytorch.log_model` through the repository that MLflow returns."""
    import mlflow
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    files = network_files("pth")
    repository = get_artifact_repository(f"tensorcas://{tmp_path}/root")
    for number, data in enumerate(files):
        model = tmp_path / f"model-{number}"
        (model / "data").mkdir(parents=True)
        (model / "data" / "model.pth").write_bytes(data)
        mlflow.models.Model(flavors={"pytorch": {"model_data": "data"}}).save(model / "MLmodel")
        repository.log_artifacts(str(model), f"models/{number}")
        (tmp_path / f"out-{number}").mkdir()
        repository.download_artifacts(f"models/{number}", str(tmp_path / f"out-{number}"))
    back = [tmp_path / f"out-{number}" / "models" / f"{number}" / "data" / "model.pth" for number in range(2)]

    assert [path.read_bytes() for path in back] == files
    assert n_deltas(Store.open(tmp_path / "root")) > 0


@cache  # an archive says when it was made
def exported(seed: int, *, n_weights: int = 2, names: str = "layers.{}.weight", root: str = "model/") -> bytes:
    """An archive of `torch.export`, which names its weights after their bytes."""
    arrays = {f"weight_{number}": weights(seed + 100 * number, N) for number in range(n_weights)}
    entries = {names.format(path.rpartition("_")[2]): pt2_entry(path, 7, (N,), (1,)) for path in arrays}
    data = {f"weights/{path}": array.tobytes() for path, array in arrays.items()}
    made = pt2_of({**data, "weights/model_weights_config.json": pt2_table(entries)})
    return made.replace(b"model/", root.encode())


@pytest.mark.usefixtures("small_batches")
def test_weights_that_are_named_after_their_bytes_are_stored_as_deltas(store: Store) -> None:
    _, in_full = commit(store, exported(0), "0")
    two, exported_bytes = commit(store, exported(1), "1")
    other = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    commit(other, epoch(0), "0")
    _, named_bytes = commit(other, epoch(1), "1")

    assert exported_bytes < 0.6 * in_full
    assert exported_bytes < 1.05 * named_bytes
    assert read(store, two) == exported(1)
    rows = [row.spec for row in store.manifest(two).rows if row.spec.dtype]
    assert [(spec.name, spec.dtype, spec.shape) for spec in rows] == [
        (f"layers.{number}.weight", "float32", (N,)) for number in range(2)
    ]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("seconds", [{"n_weights": 3}, {"names": "other.{}"}, {"root": "modem/"}])
def test_weights_are_taken_for_those_at_their_places_until_they_are_named(
    store: Store, seconds: dict[str, Any]
) -> None:
    commit(store, exported(0), "0")
    _, same = commit(store, exported(1), "1")
    two, stored = commit(store, exported(2, **seconds), "2")

    n_more = seconds.get("n_weights", 2) - 2
    assert stored < 1.1 * same + n_more * 4 * N
    assert read(store, two) == exported(2, **seconds)


def test_a_whole_archive_in_one_batch_finds_bases_by_name(store: Store) -> None:
    _, in_full = commit(store, epoch(0), "0")
    _, as_deltas = commit(store, exported(1, names="{}").replace(b'"0"', b'"w"').replace(b'"1"', b'"v"'), "1")

    assert as_deltas < 0.6 * in_full


@pytest.mark.usefixtures("small_batches")
def test_weights_of_another_size_at_the_same_places_are_stored_in_full_and_come_back(store: Store) -> None:
    commit(store, exported(0), "0")
    long = pt2_of(
        {
            "weights/weight_0": weights(0, 2 * N).tobytes(),
            "weights/weight_1": weights(1, 3 * N).tobytes(),
            "weights/model_weights_config.json": pt2_table({"w": pt2_entry("weight_0", 7, (2 * N,), (1,))}),
        }
    )
    ref, _ = commit(store, long, "1")

    assert read(store, ref) == long
