"""Tables with rows put in anywhere or dropped: a save stores little besides the new rows, and all comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.maintenance import disk_bytes, plan_gc, plan_optimize, verify
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store._shifts import find_runs, row_hashes

Change = Callable[[Any, np.random.Generator], Any]

TABLES: dict[str, Callable[[int, np.random.Generator], Any]] = {
    "float32": lambda n, rng: rng.standard_normal((n, 512)).astype(np.float32),
    "narrow": lambda n, rng: rng.standard_normal((n, 6)),
    "bfloat16": lambda n, rng: rng.standard_normal((n, 768)).astype(ml_dtypes.bfloat16),
    "3-d": lambda n, rng: rng.standard_normal((n, 5, 33)).astype(np.float16),
    "ids": lambda n, rng: rng.integers(0, 1 << 40, n),
    "tokens": lambda n, rng: rng.integers(0, 50_000, n).astype(np.uint16),
    "labels": lambda n, rng: rng.integers(0, 10, n).astype(np.int8),
    "odd rows": lambda n, rng: rng.integers(0, 256, (n, 333)).astype(np.uint8),
    "mostly zeros": lambda n, rng: rng.standard_normal((n, 64)) * (rng.random((n, 1)) < 0.5),
    "records": lambda n, rng: np.frombuffer(rng.bytes(n * 12), dtype=[("a", "<i4"), ("b", "<f8")]),
}
N_BYTES = 4 << 20


def pairs(tables: Iterable[str]) -> list[Any]:
    """Return all pairs of a table and a change; every change runs a third of them, in which each change occurs."""
    return [
        pytest.param(kind, change, marks=() if (nth + mth) % 3 == 0 else pytest.mark.long)
        for nth, kind in enumerate(tables)
        for mth, change in enumerate(CHANGES)
    ]


def table(kind: str, rng: np.random.Generator) -> Any:
    return TABLES[kind](N_BYTES // TABLES[kind](1, rng).nbytes, rng)


def rows_like(a: Any, n: int, rng: np.random.Generator) -> Any:
    return np.frombuffer(rng.bytes(n * a[:1].nbytes), a.dtype).reshape(n, *a.shape[1:])


def insert(a: Any, at: int, n: int, rng: np.random.Generator) -> Any:
    return np.concatenate([a[:at], rows_like(a, n, rng), a[at:]])


def drop(a: Any, at: int, n: int = 1) -> Any:
    return np.concatenate([a[:at], a[at + n :]])


def at_many_places(a: Any, rng: np.random.Generator) -> Any:
    for at in rng.integers(0, len(a), 10).tolist():
        a = insert(a, at, 1, rng) if rng.integers(0, 2) else drop(a, at)
    return a


CHANGES: dict[str, Change] = {
    "put in front": lambda a, rng: insert(a, 0, 1, rng),
    "put in the middle": lambda a, rng: insert(a, len(a) // 2 + 7, 1, rng),
    "put behind": lambda a, rng: insert(a, len(a), 1, rng),
    "dropped in front": lambda a, _: drop(a, 0),
    "dropped in the middle": lambda a, _: drop(a, len(a) // 3),
    "dropped behind": lambda a, _: a[:-1],
    "a block dropped": lambda a, _: drop(a, len(a) // 4, len(a) // 5),
    "at many places": at_many_places,
    "a window": lambda a, rng: insert(a[len(a) // 100 :], len(a), len(a) // 100, rng),
}


def save(store: Store, tensors: Mapping[str, Any], step: int, series: str | None = "run/steps") -> tuple[int, Manifest]:
    """Save a step; return the bytes that it added, and its manifest."""
    with store.write_checkpoint(tensors, series=series) as pending:
        pending.commit(RefTarget(run_id="run", step=step))
    return pending.n_stored_bytes, pending.manifest


def check_loads(store: Store, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
    loaded = store.read_tensors(manifest)
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "change"), pairs(TABLES))
def test_rows_put_in_or_dropped_store_little_besides_them(kind: str, change: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    store, other = Store.init(tmp_path), rng.standard_normal((40, 40))
    a = table(kind, rng)
    _, first = save(store, {"t": a, "other": other}, 0)
    saved = [(first, a)]
    new_rows = N_BYTES // 100 if change == "a window" else 0
    for step in (1, 2):
        a = CHANGES[change](a, rng)
        n_stored, manifest = save(store, {"t": a, "other": other}, step)
        saved.append((manifest, a))

        assert n_stored < 0.02 * N_BYTES + new_rows
    n_stored, manifest = save(store, {"t": a, "other": other + 1}, 3)
    assert n_stored < 20_000
    assert manifest.row("t").digests.tobytes() == saved[-1][0].row("t").digests.tobytes()
    for one, before in saved:
        check_loads(store, one, {"t": before, "other": other})
    assert verify(Store.open(tmp_path), full=True).problems == ()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "first"), pairs(["float32", "bfloat16", "ids"]))
def test_window_of_a_table_whose_rows_moved_before_stores_little(kind: str, first: str, tmp_path: Path) -> None:
    """Short chunks of earlier shifts lie between the others, in the middle too."""
    rng, store = np.random.default_rng(4), Store.init(tmp_path)
    a = table(kind, rng)
    save(store, {"t": a}, 0)
    for step, change in enumerate((first, "a window", "put in the middle", "a window"), 1):
        a = CHANGES[change](a, rng)
        n_stored, manifest = save(store, {"t": a}, step)
        check_loads(store, manifest, {"t": a})

        assert n_stored < 0.03 * N_BYTES


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.ones((1024, 64), np.float32), np.ones((1324, 64), np.float32)),  # the old one ends at a chunk's end
        (np.array(1.5, np.float32), np.ones(100_000, np.float32)),
        (np.full((2000, 64), np.inf, np.float32), np.full((2500, 64), np.inf, np.float32)),
        (np.ones((2000, 64), np.complex64), np.full((2002, 64), 1.01 + 2j, np.complex64)),
        (np.full((2000, 64), np.nan), np.full((1500, 64), -np.nan)),
    ],
)
def test_tables_at_the_edges_are_saved_without_a_warning(before: Any, after: Any, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    for step, change in enumerate((before, after, np.concatenate([after, np.zeros_like(after[:3])]), before)):
        _, manifest = save(store, {"t": change}, step)

        check_loads(store, manifest, {"t": change})


@pytest.mark.long
@pytest.mark.parametrize("database", [False, True])
def test_optimization_keeps_parts_of_longer_bases(
    database: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, rng = Store.init(tmp_path, chunk_bytes=64 << 10, database=database), np.random.default_rng(5)
    a = rng.integers(0, 1 << 31, (4000, 64)).astype(np.int32)
    drift = rng.standard_normal(400_000).cumsum().astype(np.float32)
    saved = []
    for step in range(6):
        saved.append((save(store, {"t": a, "f": drift}, step)[1], a))
        a = insert(a, 100 + 300 * step, 2, rng)
    before = disk_bytes(store.backend)

    plan_optimize(Store.open(tmp_path)).execute()

    assert "damaged" not in caplog.text
    assert disk_bytes(store.backend) <= before
    for manifest, table in saved:
        check_loads(Store.open(tmp_path), manifest, {"t": table, "f": drift})


@pytest.mark.parametrize("series", ["run/steps", None])
def test_another_process_finds_the_rows_too(
    series: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorcas_mlflow.store import _bases, _recent, _store

    rng = np.random.default_rng(2)
    a = table("float32", rng)
    save(Store.init(tmp_path), {"t": a}, 0, series)
    for step, change in enumerate(("put in front", "a window", "dropped in the middle"), 1):
        for module in (_bases, _recent, _store):
            monkeypatch.setattr(module, "RECENT", _recent.RecentManifests())
        a = CHANGES[change](a, rng)
        store = Store.open(tmp_path)
        n_stored, manifest = save(store, {"t": a}, step, None)

        assert n_stored < 0.04 * N_BYTES
        check_loads(store, manifest, {"t": a})


@pytest.mark.long
def test_rows_that_moved_and_changed_are_stored_as_deltas() -> None:
    rng = np.random.default_rng(3)
    store = Store.init_backend(MemoryBackend())
    a = (0.02 * rng.standard_normal((4_000, 512))).astype(np.float32)

    def moved(a: Any) -> Any:
        return (a + 1e-5 * rng.standard_normal(a.shape)).astype(np.float32)

    save(store, {"t": a}, 0)
    a = moved(a)
    usual, _ = save(store, {"t": a}, 1)
    for step, change in enumerate(("put in the middle", "put behind", "a block dropped"), 2):
        a = moved(CHANGES[change](a, rng) if change == "a block dropped" else CHANGES[change](a, rng) * 1)
        n_stored, manifest = save(store, {"t": a}, step)

        assert n_stored < 1.15 * usual
        check_loads(store, manifest, {"t": a})


def test_values_changed_where_rows_moved_store_little() -> None:
    rng = np.random.default_rng(4)
    store = Store.init_backend(MemoryBackend())
    a = table("float32", rng)
    save(store, {"t": a}, 0)
    for step in range(1, 5):
        a = insert(a, int(rng.integers(0, len(a))), 1, rng)
        a[int(rng.integers(0, len(a)))] = rng.standard_normal(512)
        n_stored, manifest = save(store, {"t": a}, step)

        assert n_stored < 0.02 * N_BYTES
        check_loads(store, manifest, {"t": a})


@pytest.mark.long
@pytest.mark.parametrize("n_columns", [16, 500])
def test_random_walk_of_a_table_loads_and_verifies_and_stays_small(n_columns: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(n_columns)
    store = Store.init(tmp_path, chunk_bytes=16 << 10)
    a = rng.standard_normal(((1 << 20) // (4 * n_columns), n_columns)).astype(np.float32)
    steps: dict[int, tuple[Manifest, Any]] = {}
    total, new_bytes = 0, a.nbytes
    for step in range(20):
        n_stored, manifest = save(store, {"t": a}, step)
        steps[step] = manifest, a
        total += n_stored
        check_loads(store, manifest, {"t": a})
        assert len(manifest.row("t").digests) <= 4 * (a.nbytes // store.chunk_bytes) + 17
        a = a.copy()
        for _ in range(int(rng.integers(1, 4))):
            at, n = int(rng.integers(0, len(a))), int(rng.integers(1, 4))
            kind = int(rng.integers(0, 4))
            if kind == 0:
                a = insert(a, at, n, rng)
            elif kind == 1:
                a = drop(a, at, n)
            elif kind == 2:
                a = insert(a[n:], len(a), n, rng)
            else:
                a[at : at + n] = rng.standard_normal(a[at : at + n].shape)
            new_bytes += n * 4 * n_columns + 4_096
    assert total < 1.2 * new_bytes

    for step in range(0, 20, 2):
        [ref] = [ref for ref in store.checkpoints() if ref.step == step]
        store.drop(ref)
    plan_gc(store, grace_s=0, max_waste=0).execute()
    again = Store.open(tmp_path)
    assert verify(again, full=True).problems == ()
    for step in range(1, 20, 2):
        check_loads(again, steps[step][0], {"t": steps[step][1]})


@pytest.mark.parametrize("change", ["put in the middle", "dropped in front", "a window"])
def test_file_with_a_table_that_moved_stores_little(change: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    store = Store.init(tmp_path / "store")
    a, path = table("float32", rng), tmp_path / "model.safetensors"
    sizes: list[int] = []
    for step in range(3):
        save_file({"a": np.ones(9), "emb": a}, path)
        with store.write_file(path) as pending:
            ref: Ref = pending.commit(RefTarget(path=f"{step}.safetensors"))
        sizes.append(pending.n_stored_bytes)
        a = CHANGES[change](a, rng)

        assert b"".join(store.iter_file(ref)) == path.read_bytes()
    assert max(sizes[1:]) < 0.035 * N_BYTES


@pytest.mark.long
def test_copy_in_the_background_keeps_the_bytes_of_a_table_that_moved() -> None:
    rng = np.random.default_rng(6)
    store = Store.init_backend(MemoryBackend())
    a = table("float32", rng)
    before = None
    for step, change in enumerate(("put in front", "a window", "dropped in the middle", "a window")):
        tensors = {"t": a, "s": np.full(3, step)}
        copy = store.copy(tensors, before=before, series="run/steps")
        kept = {name: array.copy() for name, array in tensors.items()}
        with store.begin_checkpoint(copy, series="run/steps") as pending:
            pending.commit(RefTarget(run_id="run", step=step))
        copy.note_stored(store.catalog.doubts(), derived=pending.recut_rows)
        before = copy

        assert step == 0 or pending.n_stored_bytes < 0.03 * N_BYTES
        check_loads(store, pending.manifest, kept)
        # The same state once more, against the copy whose bytes are stored in other cuts.
        again = store.copy(tensors, before=before, series=None)
        with store.begin_checkpoint(again, series=None) as second:
            second.commit(RefTarget(run_id="again", step=step))
        check_loads(store, second.manifest, kept)
        a = CHANGES[change](a, rng)


@pytest.mark.parametrize("seed", range(30))
def test_runs_are_rows_that_are_equal_but_for_few(seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_bytes = int(rng.choice([1, 2, 3, 4, 8, 12, 64, 500]))
    old = rng.integers(0, 256, (int(rng.integers(1, 200_000 // row_bytes)), row_bytes)).astype(np.uint8)
    new = old
    for _ in range(int(rng.integers(0, 6))):
        at, n = int(rng.integers(0, len(new) + 1)), int(rng.integers(1, 30))
        new = insert(new, at, n, rng) if rng.integers(0, 2) else drop(new, at, n)
    if not len(new):
        new = old
    cut = int(rng.integers(0, new.nbytes + 1))
    data = new.tobytes()
    hashes = row_hashes([data[:cut], data[cut:]], row_bytes, len(new))

    runs = find_runs(hashes, row_hashes([old.tobytes()], row_bytes, len(old)), row_bytes)

    assert (hashes == row_hashes([data], row_bytes, len(new))).all()
    stop = 0
    for run in runs:
        assert stop <= run.start < run.stop <= new.nbytes
        assert 0 <= run.source <= old.nbytes - (run.stop - run.start)
        assert {run.start % row_bytes, run.stop % row_bytes, run.source % row_bytes} == {0}
        assert data[run.start : run.stop] == old.tobytes()[run.source :][: run.stop - run.start]
        stop = run.stop
    if row_bytes >= 3 and len(old) > 2_000:
        assert sum(run.stop - run.start for run in runs) > 0.8 * min(new.nbytes, old.nbytes)


@pytest.mark.parametrize("data", ["shuffled", "other", "equal rows", "reversed"])
def test_table_that_only_looks_like_an_earlier_one_is_stored_as_it_is(data: str) -> None:
    rng = np.random.default_rng(7)
    store = Store.init_backend(MemoryBackend())
    a = np.zeros((3_000, 200), np.float32) if data == "equal rows" else rng.standard_normal((3_000, 200)).astype("f4")
    b = {"shuffled": rng.permutation(a), "other": rng.standard_normal(a.shape), "reversed": a[::-1], "equal rows": a}
    save(store, {"t": a}, 0)

    _, manifest = save(store, {"t": np.concatenate([b[data], a[:1]])[:-1].astype("f4")}, 1)
    _, longer = save(store, {"t": np.concatenate([b[data], a[:1]]).astype("f4")}, 2)

    check_loads(store, manifest, {"t": b[data].astype("f4")})
    check_loads(store, longer, {"t": np.concatenate([b[data], a[:1]]).astype("f4")})
    assert manifest.row("t").cuts is None


def test_array_changed_while_it_is_cut_anew_is_refused_or_stored_as_hashed() -> None:
    from tensorcas_mlflow.errors import ConflictError

    rng = np.random.default_rng(8)
    store = Store.init_backend(MemoryBackend())
    a = table("float32", rng)
    save(store, {"t": a}, 0)
    a = insert(a, 900, 1, rng)
    pending = store.begin_checkpoint({"t": a}, series="run/steps")
    assert list(pending.recut_rows) == [0]
    a[900] = 1

    with pytest.raises(ConflictError), pending:
        pending.write()


def test_large_scalar_is_no_table() -> None:
    store = Store.init_backend(MemoryBackend())
    for step in range(3):
        one = {"s": np.array(b"%d" % step * 40_000), "t": np.zeros((0, 9)), "u": np.zeros((9_000, 0))}
        _, manifest = save(store, one, step)

        check_loads(store, manifest, one)
