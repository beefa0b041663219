"""The catalog of a remote store's packs in one process, while other processes change the store."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.backends import BlobInfo, MemoryBackend, Token
from tensorcas_mlflow.base.digest import Buffer
from tensorcas_mlflow.chunk_io import _catalog, _read
from tensorcas_mlflow.errors import BackendError, ChunkNotFoundError
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.packs import _index, merge_segments, read_segment
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store import protocol as p
from tests.faulty import FaultyBackend, SimulatedCrash
from tests.python_calls import calls_of


class Watched(MemoryBackend):
    """Lets another thread have its turn once a pack is in the index, before the thread that put it there goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] = lambda: None

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        token = super().put_new(key, pieces, durable=durable)
        if key.endswith(".loose"):
            thread = threading.Thread(target=self.meanwhile)
            thread.start()
            thread.join()
        return token


class Remote(MemoryBackend):
    """Lists in order, as remote ones do, and notes what is drawn of listings of packs."""

    def __init__(self) -> None:
        super().__init__(is_remote=True)
        self.n_drawn = 0
        self.meanwhile: Callable[[], object] = lambda: None
        """Called as a segment of the index is written."""
        self.is_down = False

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        for info in super().list(prefix, after=after):
            self.n_drawn += prefix == "packs"
            yield info

    def put_new(self, key: str, pieces: Iterable[Buffer], *, durable: bool = True) -> Token:
        if key.startswith("index/"):
            self.meanwhile()
        return super().put_new(key, pieces, durable=durable)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if self.is_down:
            raise BackendError("read", key, "it is down")
        super().read_into(key, start, out)


def weights(seed: int) -> dict[str, Array]:
    return {"w": np.random.default_rng(seed).integers(0, 256, 5_000, dtype=np.uint8)}


def save(store: Store, seed: int) -> int:
    with store.write_checkpoint(weights(seed)) as pending:
        pending.commit(RefTarget(path=f"m/{seed}"))
        return pending.n_new_bytes


@pytest.fixture
def backend() -> Remote:
    return Remote()


def test_a_process_that_meets_many_packs_lists_those_that_no_segment_tells_of(
    backend: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_catalog, "_FOLD_AT", 8)
    monkeypatch.setattr(_catalog, "_LATE_S", 0.0)
    store = Store.init_backend(backend)
    for seed in range(40):
        save(store, seed)
    backend.n_drawn = 0
    Store.open_backend(backend).catalog.refresh()

    assert backend.n_drawn < 20


def test_a_pack_that_is_published_while_others_are_folded_is_in_the_next_segment(
    backend: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_catalog, "_FOLD_AT", 2)
    store = Store.init_backend(backend)
    save(store, 0)
    late = "f" * 32
    backend.meanwhile = lambda: store.catalog._loose.setdefault(late)
    save(store, 1)

    assert list(store.catalog._loose) == [late]


def test_a_catalog_that_could_not_be_read_anew_still_knows_what_it_knew(
    backend: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_catalog, "_LATE_S", 0.0)
    store = Store.init_backend(backend)
    save(store, 0)
    time.sleep(0.01)  # so that the second pack has a later name
    save(store, 1)
    store.catalog.refresh()
    backend.is_down = True
    with pytest.raises(BackendError):
        store.catalog.refresh_from_packs()
    backend.is_down = False

    assert save(store, 0) == 0


def test_every_checkpoint_that_needed_a_lost_pack_says_which_one_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_catalog, "_FOLD_AT", 1)  # a pack that has a marker of its own is missed when it is looked for
    backend = MemoryBackend()
    store = Store.init_backend(backend)
    refs = []
    for step in (1, 2):
        with store.write_checkpoint({"frozen": np.arange(99), "step": np.array(step)}) as pending:
            refs.append(pending.commit(RefTarget(run_id="run", step=step)))
        store.catalog.refresh()
        store.catalog.fold()
    frozen = store.manifest(refs[0]).row("frozen").digests
    places = store.catalog.find(frozen)
    lost = f"packs/{places.packs[int(places.pack[0])]}.pack"
    backend.delete(lost)
    reader = Store.open_backend(backend)
    said = []
    for ref in refs:
        with pytest.raises(ChunkNotFoundError) as caught:
            reader.read_tensors(reader.manifest(ref), ["frozen"])
        said.append(caught.value.suspects)

    assert said == [(lost,), (lost,)]


@pytest.mark.usefixtures("store_of_files")
def test_stale_catalog_finds_chunks_after_many_packs_were_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_read, "_MAX_ATTEMPTS", 5)
    store = Store.init(tmp_path / "store")
    packs = tmp_path / "store/.tensorcas/packs"
    for n in range(12):
        other = Store.init(tmp_path / str(n))
        save(other, 0)
        for pack in (tmp_path / str(n) / ".tensorcas/packs").rglob("*.pack"):
            packs.mkdir(exist_ok=True)
            pack.rename(packs / pack.name)
    store.catalog.refresh_from_packs()
    assert save(store, 0) == 0
    ref = store.checkpoints()[0]
    last = store.catalog.find(store.manifest(ref).digests, set()).packs
    found = sorted(packs.rglob("*.pack"), key=lambda pack: pack.stem in last)

    for pack in found[1:]:
        pack.unlink()

    assert np.array_equal(store.read_tensors(store.manifest(ref))["w"], weights(0)["w"])


def model(*seeds: int) -> dict[str, Array]:
    return {str(seed): weights(seed)["w"] for seed in seeds}


def save_model(store: Store, path: str, *seeds: int) -> Ref:
    with store.write_checkpoint(model(*seeds)) as pending:
        return pending.commit(RefTarget(path=path))


def packs_of(store: Store) -> list[str]:
    return [info.key.removeprefix("packs/").removesuffix(".pack") for info in store.backend.list("packs")]


@pytest.fixture
def shared() -> Store:
    """A store of which another thread reads the index whenever a pack of this one is in it and not yet taken up."""
    backend = Watched()
    store = Store.init_backend(backend)
    backend.meanwhile = store.catalog.refresh
    return store


def test_chunk_is_read_when_a_collector_deletes_the_copy_that_two_threads_took_up(shared: Store) -> None:
    with shared.begin_checkpoint(model(1)) as pending:
        save_model(shared, "kept", 1)  # neither save knows of the other's chunk, so each stores it
        kept = set(packs_of(shared))
        ref = pending.commit(RefTarget(path="late"))
    assert plan_gc(Store.open_backend(shared.backend), grace_s=0, max_waste=0, prefer=kept).execute().n_packs == 1

    assert np.array_equal(shared.read_tensors(shared.manifest(ref))["1"], weights(1)["w"])


def test_save_relies_on_no_condemned_pack_that_two_threads_took_up(shared: Store) -> None:
    save_model(shared, "first", 1, 2)
    [condemned] = packs_of(shared)
    shared.backend.put_new("condemned/" + "7" * 32, [p.condemned_bytes([condemned], ())])
    ref = save_model(shared, "again", 1, 2)
    shared.backend.delete(f"packs/{condemned}.pack")

    assert shared.read_tensors(shared.manifest(ref)).keys() == {"1", "2"}


def test_save_relies_on_no_condemned_pack_that_hints_name_twice(
    backend: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_CACHE", "off")  # it would give the chunks of a deleted pack
    writer = Store.init_backend(backend)
    save_model(writer, "all", 1, 2, 3)
    [condemned] = packs_of(writer)
    few = [save_model(Store.open_backend(backend), str(seed), seed) for seed in (1, 2)]
    # Who has read two manifests and no index finds the pack in the hints of both.
    store = Store.open_backend(backend)
    for ref in few:
        store.manifest(ref)
    both = save_model(store, "both", 1, 2)
    backend.put_new("condemned/" + "7" * 32, [p.condemned_bytes([condemned], ())])
    reader = Store.open_backend(backend)
    reader.manifest(both)
    ref = save_model(reader, "again", 1, 2)
    backend.delete(f"packs/{condemned}.pack")

    assert reader.read_tensors(reader.manifest(ref)).keys() == {"1", "2"}


def test_segment_names_a_pack_once_that_two_threads_took_up(shared: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(shared, "first", 1, 2)
    monkeypatch.setattr(_catalog, "_FOLD_AT", 1)
    shared.catalog.fold()
    [segment] = [info.key for info in shared.backend.list("index") if info.key.endswith(".segment")]
    table = read_segment(segment, shared.backend.get(segment))

    assert list(table.packs) == packs_of(shared)
    assert len(table) == 2


def segments_of(store: Store) -> list[str]:
    return [info.key for info in store.backend.list("index") if info.key.endswith(".segment")]


@pytest.mark.usefixtures("store_of_files")
def test_packs_that_another_process_has_folded_are_not_folded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Store.init(tmp_path)
    for seed in range(8):
        save(one, seed)
    other = Store.open(tmp_path)
    other.catalog.refresh()
    monkeypatch.setattr(_catalog, "_FOLD_AT", 4)
    one.catalog.fold()
    folded = segments_of(one)
    other.catalog.fold()

    assert len(folded) == 1
    assert segments_of(one) == folded
    assert len(read_segment(folded[0], one.backend.get(folded[0])).packs) == 8
    assert save(other, 3) == 0


def test_writers_of_a_bucket_name_each_pack_in_one_segment(backend: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_catalog, "_FOLD_AT", 4)
    writers = [Store.init_backend(backend), *(Store.open_backend(backend) for _ in range(3))]
    for seed in range(30):
        save(writers[seed % 4], seed)
    packs = [pack for key in segments_of(writers[0]) for pack in read_segment(key, backend.get(key)).packs]

    assert len(packs) > 20
    assert len(packs) == len(set(packs))


@pytest.mark.parametrize("how", ["fails", "dies"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_fold_that_ends_at_any_call_loses_nothing_and_a_later_one_does_it(
    is_remote: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n_calls in itertools.count():
        inner = MemoryBackend(is_remote=is_remote)
        monkeypatch.setattr(_catalog, "_FOLD_AT", 100)
        writer = Store.init_backend(inner)
        for seed in range(4):
            save(writer, seed)
        monkeypatch.setattr(_catalog, "_FOLD_AT", 4)
        faulty = FaultyBackend(inner)
        store = Store.open_backend(faulty)
        store.catalog.refresh()
        (faulty.fail if how == "fails" else faulty.crash)(n_calls)
        with contextlib.suppress(SimulatedCrash):
            store.catalog.fold()

        after = Store.open_backend(inner)
        for ref in after.checkpoints():
            seed = int(ref.key.rpartition("/@")[2])
            assert np.array_equal(after.read_tensors(after.manifest(ref))["w"], weights(seed)["w"])
        after.catalog.refresh()
        assert [save(after, seed) for seed in range(4)] == [0] * 4
        after.catalog.fold()
        assert {pack for key in segments_of(after) for pack in read_segment(key, inner.get(key)).packs} == {
            *packs_of(after)
        }
        if not faulty.has_met():
            break

    assert n_calls >= 3


@pytest.mark.usefixtures("store_of_files")
def test_index_is_left_to_the_process_that_folds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.init(tmp_path)
    for seed in range(8):
        save(store, seed)
    monkeypatch.setattr(_catalog, "_FOLD_AT", 4)
    with Store.open(tmp_path).backend.alone() as is_alone:
        assert is_alone
        store.catalog.fold()
        assert not segments_of(store)
    store.catalog.fold()
    assert len(segments_of(store)) == 1


@pytest.mark.usefixtures("store_of_files")
def test_refresh_reads_only_new_names_of_a_local_index(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    counts = []
    for seed in range(24):
        save(store, seed)
        with calls_of() as calls:
            store.catalog.refresh()
        counts.append(len(calls))

    assert len(list(store.backend.list("index"))) == 24
    assert counts[-1] <= counts[4]


@pytest.mark.usefixtures("store_of_files")
def test_refresh_takes_up_a_pack_that_another_process_has_added(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    save(store, 0)
    store.catalog.refresh()
    save(Store.open(tmp_path), 1)

    assert save(store, 1) == 0
    assert len(store.catalog._loose) == 2


class Noting(MemoryBackend):
    """Notes the packs of which something was read."""

    def __init__(self) -> None:
        super().__init__()
        self.packs: set[str] = set()

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        if key.startswith("packs/"):
            self.packs.add(key)
        super().read_into(key, start, out)


@pytest.mark.parametrize("n_back", [0, 3])
def test_reader_of_a_late_checkpoint_reads_no_pack_before_it(n_back: int) -> None:
    backend = Noting()
    store = Store.init_backend(backend)
    refs = [save_model(store, str(seed), seed) for seed in range(20)]
    backend.packs.clear()

    reader = Store.open_backend(backend)
    found = reader.read_tensors(reader.manifest(refs[-1 - n_back]))

    assert np.array_equal(found[str(19 - n_back)], weights(19 - n_back)["w"])
    assert len(backend.packs) <= 1 + n_back


def test_reader_of_an_early_checkpoint_finds_it_in_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Noting()
    store = Store.init_backend(backend)
    refs = [save_model(store, str(seed), seed) for seed in range(20)]
    for n_latest in (0, 8):
        monkeypatch.setattr(_catalog, "_MAX_LATEST", n_latest)
        reader = Store.open_backend(backend)

        assert np.array_equal(reader.read_tensors(reader.manifest(refs[0]))["0"], weights(0)["w"])
        assert len(backend.packs) == 20


def test_reader_of_the_latest_checkpoint_finds_chunks_of_earlier_ones() -> None:
    store = Store.init_backend(Noting())
    save_model(store, "first", 0)
    ref = [save_model(store, str(seed), 0, seed) for seed in range(1, 20)][-1]

    reader = Store.open_backend(store.backend)

    assert reader.read_tensors(reader.manifest(ref)).keys() == {"0", "19"}


class _Counted(MemoryBackend):
    """Counts the reads of packs."""

    n_reads = 0

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        self.n_reads += key.startswith("packs/")
        super().read_into(key, start, out)


def test_small_save_into_a_bucket_reads_one_table_however_many_others_write() -> None:
    backend = _Counted(is_remote=True)
    writers = [Store.init_backend(backend, chunk_bytes=4096), *(Store.open_backend(backend) for _ in range(7))]
    counts = []
    for number in range(3):
        for at, writer in enumerate(writers):
            backend.n_reads = 0
            save(writer, 100 * number + at)
            counts.append(backend.n_reads)

    assert max(counts) == 1


def test_large_save_into_a_bucket_shares_what_others_have_just_written() -> None:
    backend = MemoryBackend(is_remote=True)
    first = Store.init_backend(backend, chunk_bytes=64 << 10)
    second = Store.open_backend(backend)
    save(second, 0)
    for seed in range(1, 12):
        save(first, seed)
    whole = {f"{seed}": np.random.default_rng(seed).bytes(200_000) for seed in range(20, 30)}
    state = {name: np.frombuffer(data, np.uint8) for name, data in whole.items()}
    with first.write_checkpoint(state) as pending:
        pending.commit(RefTarget(run_id="first", step=1))
    with second.write_checkpoint(state) as again:
        again.commit(RefTarget(run_id="second", step=1))

    assert again.n_new_bytes == 0


@pytest.mark.parametrize("is_remote", [False, True])
def test_segment_merged_by_another_process_during_a_search_hides_no_chunk(
    is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_index, "_SMALL_BYTES", 0)
    monkeypatch.setattr(_catalog, "_FOLD_AT", 3)
    monkeypatch.setattr(_catalog, "_LATE_S", -1e6)  # every known pack is an old one
    backend = MemoryBackend(is_remote=is_remote)
    writer = Store.init_backend(backend, chunk_bytes=4096)
    for seed in range(7):
        save(writer, seed)
    reader = Store.open_backend(backend)
    reader.catalog.refresh()
    assert reader.catalog._large
    keys = [info.key for info in backend.list("index") if info.key.endswith(".segment")]
    merge_segments(backend, keys)

    refs = reader.checkpoints()
    assert len(refs) == 7
    digests = np.concatenate([reader.manifest(ref).digests for ref in refs])
    assert reader.catalog.find(digests).found.all()


def test_small_save_into_a_folder_reads_no_table_however_many_others_write() -> None:
    backend = _Counted()
    writers = [Store.init_backend(backend, chunk_bytes=4096), *(Store.open_backend(backend) for _ in range(14))]
    for number in range(4):
        for at, writer in enumerate(writers):
            save(writer, 100 * number + at)
        if number == 1:
            backend.n_reads = 0

    assert backend.n_reads == 0


def test_large_save_into_a_folder_shares_what_others_have_just_written() -> None:
    first = Store.init_backend(MemoryBackend(), chunk_bytes=64 << 10)
    second = Store.open_backend(first.backend)
    save(first, 0)
    save(second, 100)
    for seed in range(1, 12):
        save(first, seed)
    state = {f"{seed}": np.frombuffer(np.random.default_rng(seed).bytes(200_000), np.uint8) for seed in range(20, 30)}
    with first.write_checkpoint(state) as pending:
        pending.commit(RefTarget(run_id="first", step=1))
    with second.write_checkpoint(state) as again:
        again.commit(RefTarget(run_id="second", step=1))

    assert again.n_new_bytes == 0


def test_tables_that_saves_have_left_unread_are_read_once_by_the_process_that_folds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_catalog, "_FOLD_AT", 40)
    backend = _Counted()
    writers = [Store.init_backend(backend, chunk_bytes=4096), *(Store.open_backend(backend) for _ in range(3))]
    for at in range(8):
        save(writers[at % 4], at)
    backend.n_reads = 0
    n_reads = []
    while not segments_of(writers[0]):
        for at, writer in enumerate(writers):
            save(writer, 100 * len(n_reads) + at + 100)
        n_reads.append(backend.n_reads)
    [segment] = segments_of(writers[0])

    assert n_reads[-2] == 0
    assert len(read_segment(segment, backend.get(segment)).packs) >= 40
    assert n_reads[-1] <= 40  # besides, it has the tables of its own packs
    assert writers[0].catalog.find(writers[0].manifest(writers[0].checkpoints()[0]).digests).found.all()
