"""No more is read than what is asked for, counted by the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.reader import open_ref
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.reader.checkpoints import opened, save

MODEL = {
    f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": np.random.default_rng(
        layer * 100 + expert * 10 + nth
    ).integers(0, 256, 1_500_000, dtype=np.uint8)
    for layer in range(2)
    for expert in range(4)
    for nth, name in enumerate(("w1", "w2"))
}
N_BYTES = sum(array.nbytes for array in MODEL.values())


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    io = Path("/proc/self/io")
    if not io.exists():
        pytest.skip("the system does not count what a process reads")
    return int(io.read_text().split("rchar:")[1].split()[0])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.init(tmp_path_factory.mktemp("store"))
    warm = opened(store, {"model.layers.0.w": np.ones(3)}, 99)  # what is imported when it is first needed
    warm.summary(), warm.layer(0), warm.tensor("model.layers.0.w")
    save(store, MODEL)
    return Store.open(store.uri)


def test_summary_reads_a_thousandth_of_the_bytes(store: Store) -> None:
    ref = next(ref for ref in store.checkpoints() if ref.step == 1)
    before = bytes_read()

    str(open_ref(store, ref).summary())

    assert bytes_read() - before < N_BYTES / 1000


FIRST_SUMMARY = """
import sys
from pathlib import Path
from tensorcas_mlflow.tensorcas_store import TensorCasStore
import tensorcas_mlflow.reader

def bytes_read():
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])

before = bytes_read()
str(TensorCasStore(sys.argv[1], "run").open().summary())
print(bytes_read() - before)
"""


@pytest.mark.long
def test_first_summary_of_a_process_reads_few_bytes_of_code(tmp_path: Path) -> None:
    bytes_read()
    store = Store.init(tmp_path / "store")
    weights = {f"model.layers.{n}.w": torch.zeros(300, 300, dtype=torch.bfloat16) for n in range(8)}
    TensorCasStore(store.uri, "run").save(weights, step=1)
    # The first process writes the bytecode that the second one reads.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    counts = [
        int(subprocess.check_output([sys.executable, "-c", FIRST_SUMMARY, store.uri], env=env, cwd=tmp_path))
        for _ in range(2)
    ]

    # Five modules of the reader have 140 KB of bytecode. Modules that read chunks and file formats have 250 KB more.
    assert counts[1] < 190_000


def test_an_expert_reads_little_more_than_its_own_bytes(store: Store) -> None:
    ref = next(ref for ref in store.checkpoints() if ref.step == 1)
    reader = open_ref(store, ref)
    before = bytes_read()

    found = reader.expert(1, 3)

    own = sum(array.nbytes for array in found.values())
    assert own == 3_000_000
    assert all(array.tobytes() == MODEL[name].tobytes() for name, array in found.items())
    assert bytes_read() - before + reader.stats.mapped_bytes < 1.05 * own


def test_rows_read_the_chunks_that_they_touch(store: Store) -> None:
    reader = opened(store, {"w": np.random.default_rng(0).integers(0, 256, (1 << 22), dtype=np.uint8)}, 2)
    reader.rows("w", 0)  # what is learnt of the store is learnt once
    before = reader.stats.read_bytes

    reader.rows("w", slice(1_000_000, 1_000_010))
    first = reader.stats.read_bytes - before
    reader.get_slice("w")[::1_500_000]

    assert first == 1 << 18
    assert reader.stats.read_bytes - before - first == 3 * (1 << 18)


def test_counted_bytes_are_those_that_the_storage_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # a save fills it

    class Counting(MemoryBackend):
        n_bytes = 0

        def read_into(self, key: str, start: int, out: memoryview) -> None:
            out[:] = MemoryBackend.get(self, key)[start : start + len(out)]
            Counting.n_bytes += len(out)

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            blob = super().get(key, max_bytes=max_bytes)
            Counting.n_bytes += len(blob)
            return blob

    store = Store.init_backend(Counting(is_remote=True))
    ref = save(store, MODEL)
    Counting.n_bytes = 0
    reader = open_ref(store, ref)
    reader.expert(1, 1)

    assert reader.stats.read_bytes == Counting.n_bytes
    assert reader.stats.n_requests > 1
    assert reader.stats.read_s > 0


def test_bytes_from_the_cache_make_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path))
    store = Store.init_backend(MemoryBackend(is_remote=True))
    ref = save(store, MODEL)
    open_ref(store, ref).expert(0, 0)
    reader = open_ref(store, ref)
    before = reader.stats

    reader.expert(0, 0)

    assert reader.stats.n_cache_hits == 12
    assert reader.stats.read_bytes - before.read_bytes < 100_000


def test_index_that_the_store_knows_is_not_read_again(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    name = "model.layers.0.mlp.experts.0.w1.weight"
    ref = save(store, MODEL, policy="fast")
    manifest_bytes = open_ref(store, ref).stats.read_bytes

    reader = open_ref(store, ref)
    reader.tensor(name)

    assert (reader.stats.read_bytes, reader.stats.mapped_bytes) == (manifest_bytes, MODEL[name].nbytes)


def test_slices_of_many_small_tensors_are_read_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layers.{number}.weight": np.full((64, 64), number, np.float32) for number in range(50)}
    reader = opened(Store.init(tmp_path), tensors)
    reader.slices([("layers.0.weight", 0)])
    reads: list[int] = []
    read = reader._contents.read_chunks  # type: ignore[attr-defined]
    monkeypatch.setattr(reader._contents, "read_chunks", lambda parts: (reads.append(len(parts)), read(parts)))

    found = reader.slices([(name, slice(8, 16)) for name in tensors])

    assert all((part == array[8:16]).all() for part, array in zip(found, tensors.values(), strict=True))
    assert reads == [50]
