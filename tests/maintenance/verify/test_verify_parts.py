"""``verify`` of a part or a sample of the chunks."""

from __future__ import annotations

import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.progress import Progress
from tensorcas_mlflow.maintenance import Problem, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import list_packs, read_pack_table
from tests.maintenance.verify.stores import CHUNK_BYTES, noise, put, save


@pytest.fixture
def backend() -> MemoryBackend:
    backend = MemoryBackend()
    store = Store.init_backend(backend, chunk_bytes=CHUNK_BYTES)
    save(store, {f"t{n:02}": noise(n) for n in range(40)}, run_id="run", step=1)
    return backend


def damage_all(backend: MemoryBackend) -> None:
    for name, _ in list_packs(backend):
        data = bytearray(backend.get(f"packs/{name}.pack"))
        for entry in read_pack_table(backend, name):
            data[int(entry["offset"]) + 9] ^= 16
        put(backend, f"packs/{name}.pack", bytes(data))


def tensors_of(problems: tuple[Problem, ...]) -> list[str]:
    return [name for problem in problems for name in problem.tensors]


@pytest.mark.parametrize("full", [False, True])
def test_the_parts_together_find_every_damaged_chunk_once(backend: MemoryBackend, full: bool) -> None:
    damage_all(backend)
    reports = [verify(Store.open_backend(backend), full=full, part=(k, 7)) for k in range(1, 8)]

    assert sorted(name for report in reports for name in tensors_of(report.problems)) == [f"t{n:02}" for n in range(40)]
    assert sum(report.n_read for report in reports) == 40


def test_a_part_stays_the_same_as_a_store_grows(backend: MemoryBackend) -> None:
    damage_all(backend)
    before = set(tensors_of(verify(Store.open_backend(backend), part=(2, 3)).problems))
    save(Store.open_backend(backend), {f"new{n}": noise(100 + n) for n in range(40)}, run_id="run", step=2)
    after = set(tensors_of(verify(Store.open_backend(backend), part=(2, 3)).problems))

    assert before == after


def test_a_sample_is_drawn_again_by_its_seed(backend: MemoryBackend) -> None:
    damage_all(backend)
    first = verify(Store.open_backend(backend), sample=0.3)
    again = verify(Store.open_backend(backend), sample=0.3, seed=first.seed)
    others = [verify(Store.open_backend(backend), sample=0.3, seed=seed).n_read for seed in range(20)]

    assert first == again
    assert 0 < sum(others) / len(others) < 24
    assert len(set(others)) > 1


def test_a_sample_may_be_nothing_or_everything(backend: MemoryBackend) -> None:
    store = Store.open_backend(backend)

    assert verify(store, sample=0).n_read == 0
    assert verify(store, sample=1).n_read == 40


@pytest.mark.parametrize(
    ("sample", "part"), [(-0.1, None), (1.1, None), (None, (0, 3)), (None, (4, 3)), (None, (1, 0))]
)
def test_impossible_sample_or_part_is_refused(
    backend: MemoryBackend, sample: float | None, part: tuple[int, int] | None
) -> None:
    with pytest.raises(ValueError, match="a part the k-th of n"):
        verify(Store.open_backend(backend), sample=sample, part=part)


def test_progress_is_told_up_to_the_last_byte(backend: MemoryBackend) -> None:
    seen: list[Progress] = []
    verify(Store.open_backend(backend), full=True, watch=seen.append)

    assert seen[-1] == Progress(done_bytes=40 * CHUNK_BYTES, n_bytes=40 * CHUNK_BYTES)


def test_a_report_says_how_many_chunks_were_read(backend: MemoryBackend) -> None:
    store = Store.open_backend(backend)

    assert "40 chunks, every one read as it is stored" in str(verify(store, sample=1))
    assert "40 chunks, none of them read" in str(verify(store))
