from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tensorcas_mlflow.adapter import SKELETON
from tensorcas_mlflow.backends import LocalBackend
from tensorcas_mlflow.errors import (
    CheckpointExistsError,
    ChunkNotFoundError,
    ConflictError,
    CorruptError,
    FormatError,
    NotFoundError,
    TensorNotFoundError,
    WrongStoreError,
)
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store

CHUNK = 4096
rng = np.random.default_rng(5)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "root", chunk_bytes=CHUNK)


def again(store: Store) -> Store:
    """The same store as another process sees it."""
    return Store.open(store.uri)


def target(step: int, run_id: str = "r") -> RefTarget:
    return RefTarget(run_id=run_id, step=step)


def save(store: Store, tensors: Mapping[str, np.ndarray], step: int = 1, **options: object) -> Ref:
    with store.write_checkpoint(tensors, **options) as pending:  # type: ignore[arg-type]
        return pending.commit(target(step))


def load(store: Store, ref: Ref, **options: object) -> dict[str, np.ndarray]:
    return store.read_tensors(store.manifest(ref), **options)  # type: ignore[arg-type]


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == np.asarray(other).tobytes()


def keys(store: Store, prefix: str) -> list[str]:
    return sorted(info.key for info in store.backend.list(prefix))


def folder(store: Store) -> Path:
    assert isinstance(store.backend, LocalBackend)
    return store.backend.root


def weights(seed: int, n: int = 5_000) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


RECORD = np.dtype([("left", "<i4"), ("gain", ">f8", (2, 3)), ("name", "S5")])
LONG_RECORD = np.dtype([("row", "<f4", (75,)), ("n", "<i4")])
KINDS: dict[str, np.ndarray] = {
    "float32": weights(0),
    "float16": weights(1).astype(np.float16),
    "bfloat16": weights(2).astype(ml_dtypes.bfloat16),
    "float8": weights(3).astype(ml_dtypes.float8_e4m3fn),
    "int4": rng.integers(-8, 8, 500).astype(ml_dtypes.int4),
    "big-endian": weights(4).astype(">f8"),
    "complex": (weights(5) + 1j * weights(6)).astype(np.complex64),
    "bool": rng.integers(0, 2, 9_000).astype(bool),
    "bytes": np.array([b"a", b"bcd", b""]),
    "text": np.array(["eins", "zwei", "模型"]),
    "dates": np.array(["2020-01-01", "NaT"], "datetime64[ns]"),
    "spans": np.array([1, 2], "timedelta64[25s]"),
    "record": np.array([(1, np.ones((2, 3)), b"x")] * 300, RECORD),
    "long record": np.zeros(70, LONG_RECORD),
    "0-d": np.array(3.25),
    "0-d record": np.array((1, np.ones((2, 3)), b"x"), RECORD),
    "empty": np.zeros((0, 4), np.int8),
    "empty inside": np.zeros((3, 0, 2)),
    "nan": np.array([np.nan, -np.nan, -0.0, np.inf]),
    "many chunks": weights(7, 300_000).reshape(3, 100, 1000),
    "exactly one chunk": np.zeros(CHUNK, np.uint8),
    "noise": rng.integers(0, 256, 50_000).astype(np.uint8),
    "transposed": weights(8).reshape(50, 100).T,
    "strided": weights(9)[::-3],
    "broadcast": np.broadcast_to(np.arange(7.0), (40, 7)),
    "fortran": np.asfortranarray(weights(10).reshape(50, 100)),
    "read-only": np.frombuffer(b"some bytes", np.uint8),
    SKELETON: np.frombuffer(b"{}" * 40, np.uint8),
    "../../etc/passwd": np.arange(3),
    "名前 %41": np.arange(4),
}


def test_every_kind_of_array_is_read_back_bit_for_bit(store: Store) -> None:
    ref = save(store, KINDS)

    for loaded in (load(store, ref), load(again(store), ref), load(store, ref, verify=False)):
        assert list(loaded) == list(KINDS)
        for name, array in KINDS.items():
            assert same(loaded[name], array), name
            assert loaded[name].flags.c_contiguous
            assert loaded[name].flags.writeable


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=npst.arrays(st.one_of(npst.scalar_dtypes(), npst.array_dtypes(max_size=3)), npst.array_shapes(min_dims=0)))
def test_an_array_is_refused_or_read_back_bit_for_bit(store: Store, array: np.ndarray) -> None:
    try:
        ref = save(store, {"x": array})
    except ValueError:
        return

    assert same(load(store, ref)["x"], array)


def test_tensors_are_read_by_name_in_the_order_asked_for(store: Store) -> None:
    ref = save(store, {"a": weights(1), "b": weights(2), "c": weights(3)})

    assert list(load(store, ref, names=["c", "a"])) == ["c", "a"]
    assert load(store, ref, names=[]) == {}
    with pytest.raises(TensorNotFoundError, match="'d'"):
        load(store, ref, names=["a", "d"])


def test_a_checkpoint_of_nothing_is_a_checkpoint(store: Store) -> None:
    assert load(store, save(store, {})) == {}


# --- what is stored once


def test_a_model_that_did_not_change_costs_one_ref(store: Store) -> None:
    model = {"a": weights(1), "b": weights(2)}
    save(store, model, 1)
    before = keys(store, "packs"), keys(store, "manifests"), keys(store, "index")
    with store.write_checkpoint(model) as pending:
        pending.commit(target(2))

    assert pending.n_new_bytes == 0
    assert (keys(store, "packs"), keys(store, "manifests"), keys(store, "index")) == before
    assert keys(store, "refs") == ["refs/runs/r/@1", "refs/runs/r/@2"]


def test_a_model_that_another_process_stored_costs_one_manifest_and_one_ref(store: Store) -> None:
    model = {"a": weights(1), "b": weights(2)}
    save(store, model, 1)
    before = keys(store, "packs"), keys(store, "index")
    with again(store).write_checkpoint(model) as pending:
        pending.commit(target(2))

    assert pending.n_new_bytes == 0
    assert (keys(store, "packs"), keys(store, "index")) == before
    assert len(keys(store, "manifests")) <= 2


def pack_bytes(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs"))


def test_equal_tensors_are_stored_once_whatever_their_names_runs_and_steps(store: Store) -> None:
    shared = weights(1, 50_000)
    with store.write_checkpoint({"a": shared, "b": shared, "c": np.concatenate([shared, shared])}) as pending:
        pending.commit(target(1, "one"))
        first = pack_bytes(store)
    with again(store).write_checkpoint({"other": shared, "new": weights(2, 10)}) as pending:
        pending.commit(target(500, "two"))
        second = pack_bytes(store) - first

    assert first < 1.8 * shared.nbytes
    assert second < 500


def test_only_changed_chunks_of_a_tensor_are_written(store: Store) -> None:
    array = rng.integers(0, 256, 100 * CHUNK).astype(np.uint8)
    save(store, {"a": array}, 1)
    array[50 * CHUNK] ^= 1
    with store.write_checkpoint({"a": array}) as pending:
        pending.commit(target(2))

    assert pending.n_new_bytes == CHUNK


def test_cuts_let_a_family_that_grows_share_what_was_there(store: Store) -> None:
    trees = rng.integers(0, 256, (1000, 30)).astype(np.uint8)
    save(store, {"trees": trees[:500]}, 1, cuts={"trees": [300, 500]})
    before = pack_bytes(store)
    with store.write_checkpoint({"trees": trees}, cuts={"trees": [300, 500, 1000]}) as pending:
        ref = pending.commit(target(2))

    assert pending.n_new_bytes == 500 * 30
    assert pack_bytes(store) - before < 500 * 30 + 1_000
    assert same(load(again(store), ref)["trees"], trees)


@pytest.mark.parametrize(
    "cuts",
    [{"absent": [1]}, {"a": [3]}, {"a": [0, 10]}, {"a": [5, 5, 10]}, {"a": [5, 11]}, {"a": [[5, 10], [1, 2]]}],
    ids=repr,
)
def test_invalid_cuts_are_refused(store: Store, cuts: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match="cuts"):
        store.write_checkpoint({"a": np.zeros((10, 2))}, cuts=cuts)
    assert keys(store, "intents") == []


def test_cuts_of_a_0d_array_are_refused_and_of_an_empty_one_ignored(store: Store) -> None:
    with pytest.raises(ValueError, match="cuts"):
        store.write_checkpoint({"a": np.array(3.0)}, cuts={"a": [1, 2]})
    ref = save(store, {"a": np.zeros((0, 3))}, cuts={"a": [0]})

    assert load(store, ref)["a"].shape == (0, 3)


# --- commit


def test_a_save_that_is_not_committed_leaves_no_ref_and_no_intent(store: Store) -> None:
    with store.write_checkpoint({"a": weights(1)}):
        assert len(keys(store, "intents")) == 1

    assert keys(store, "intents") == keys(store, "refs") == []


def test_a_save_that_raises_leaves_no_ref_and_no_intent(store: Store) -> None:
    with pytest.raises(KeyError), store.write_checkpoint({"a": weights(1)}):
        raise KeyError
    with pytest.raises(ValueError, match="cannot be stored"):
        store.write_checkpoint({"a": np.array([object()])})

    assert keys(store, "intents") == keys(store, "refs") == []


def test_a_commit_replaces_a_ref_in_one_step_or_leaves_it_untouched(store: Store) -> None:
    save(store, {"a": weights(1)}, 1)
    ref = save(store, {"a": weights(2)}, 1)
    with store.write_checkpoint({"a": weights(3)}) as pending, pytest.raises(CheckpointExistsError, match="step 1"):
        pending.commit(target(1), replace=False)

    found = store.ref(target(1).key)
    assert found == ref
    assert same(load(store, ref)["a"], weights(2))
    assert keys(store, "intents") == []


def test_a_save_refused_for_its_place_can_be_committed_to_another(store: Store) -> None:
    save(store, {"a": weights(1)}, 1)
    with store.write_checkpoint({"a": weights(3)}) as pending:
        with pytest.raises(CheckpointExistsError):
            pending.commit(target(1), replace=False)
        ref = pending.commit(target(2), replace=False)

    assert same(load(store, ref)["a"], weights(3))
    assert keys(store, "intents") == []


def test_a_save_is_committed_once(store: Store) -> None:
    with store.write_checkpoint({"a": weights(1)}) as pending:
        pending.commit(target(1))
        with pytest.raises(ValueError, match="already"):
            pending.commit(target(2))


@pytest.mark.usefixtures("store_of_files")
def test_a_save_whose_intent_was_withdrawn_starts_again_and_commits(store: Store) -> None:
    with store.write_checkpoint({"a": weights(1)}) as pending:
        for info in list(store.backend.list("intents")):
            assert store.backend.withdraw(info.key, info.token)
        shutil.rmtree(folder(store) / "packs")
        shutil.rmtree(folder(store) / "manifests")
        ref = pending.commit(target(1))

    assert same(load(again(store), ref)["a"], weights(1))


@pytest.mark.usefixtures("store_of_files")
def test_an_array_that_changed_before_it_was_stored_again_is_refused_and_spoils_nothing(store: Store) -> None:
    live = weights(1)
    with store.write_checkpoint({"a": live}) as pending:
        for info in list(store.backend.list("intents")):
            store.backend.withdraw(info.key, info.token)
        shutil.rmtree(folder(store) / "packs")
        live += 1
        with pytest.raises(ConflictError, match="tensor 'a' was changed while it was saved"):
            pending.commit(target(1))
    ref = save(again(store), {"a": weights(1)}, 2)

    assert same(load(again(store), ref)["a"], weights(1))
    assert keys(store, "intents") == []


def test_a_ref_too_long_to_be_read_again_is_refused(store: Store) -> None:
    with store.write_checkpoint({"a": weights(1)}) as pending, pytest.raises(ValueError, match="too long"):
        pending.commit(RefTarget(path="a/" + "x" * 100_000))

    assert keys(store, "refs") == keys(store, "intents") == []


@pytest.mark.parametrize("flavor", ["", "x" * 300])
def test_a_flavor_that_could_not_be_read_back_is_refused(store: Store, flavor: str) -> None:
    with pytest.raises(ValueError, match="flavor"):
        store.write_checkpoint({"a": weights(1)}, flavor=flavor)


def test_refs_are_listed_in_the_order_of_their_creation(store: Store) -> None:
    for step in (3, 1, 2):
        save(store, {"a": weights(step)}, step)

    assert [ref.step for ref in store.checkpoints()] == [3, 1, 2]


# --- adopt


def test_a_manifest_from_elsewhere_is_pinned_if_its_chunks_are_here(store: Store) -> None:
    manifest = store.manifest(save(store, {"a": weights(1)}))
    with again(store).adopt(Manifest.from_bytes(manifest.to_bytes())) as pending:
        ref = pending.commit(RefTarget(path="copy/checkpoint.arrow"))

    assert same(load(store, ref)["a"], weights(1))


def test_a_manifest_whose_chunks_are_not_here_is_not_pinned(store: Store, tmp_path: Path) -> None:
    other = Store.init(tmp_path / "other", chunk_bytes=CHUNK)
    foreign = other.manifest(save(other, {"a": weights(1)}))
    claimed = Manifest(kind="checkpoint", chunk_bytes=CHUNK, store_id=store.id, flavor=None, rows=foreign.rows)

    with pytest.raises(WrongStoreError, match=other.id):
        store.adopt(foreign)
    with pytest.raises(ChunkNotFoundError):
        store.adopt(claimed)
    with pytest.raises(WrongStoreError):
        store.read_tensors(foreign)
    assert keys(store, "intents") == keys(store, "refs") == []


# --- damage


def flip(path: Path, at: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.chmod(0o644)
    path.write_bytes(bytes(data))


@pytest.mark.long
@pytest.mark.usefixtures("store_of_files")
def test_every_flipped_byte_of_a_pack_is_seen_or_without_effect(store: Store) -> None:
    model = {"raw": np.frombuffer(rng.bytes(100), np.uint8), "text": np.zeros(300, np.uint8), "floats": weights(1, 60)}
    model["ordered"] = np.arange(100, dtype=np.int64)
    ref = save(store, model)
    (pack,) = (folder(store) / "packs").iterdir()
    whole = pack.read_bytes()
    n_seen = 0
    for at in range(len(whole)):
        flip(pack, at, 0x10)
        try:
            loaded = load(again(store), ref)
            assert all(same(loaded[name], array) for name, array in model.items())
        except (FormatError, NotFoundError):
            n_seen += 1
        pack.write_bytes(whole)

    # The gap before a raw tensor and the magic are not read.
    assert n_seen > 0.8 * len(whole)


@pytest.mark.usefixtures("store_of_files")
def test_every_flipped_byte_of_a_manifest_is_seen(store: Store) -> None:
    ref = save(store, {"a": weights(1, 60)})
    path = folder(store) / "manifests" / ref.manifest
    whole = path.read_bytes()
    n_seen = 0
    for at in range(len(whole)):
        flip(path, at, 0x10)
        try:
            assert same(load(store, ref)["a"], weights(1, 60))
        except CorruptError:
            n_seen += 1
        path.write_bytes(whole)

    assert n_seen > 0.9 * len(whole)


@pytest.mark.usefixtures("store_of_files")
def test_error_names_a_missing_manifest(store: Store) -> None:
    ref = save(store, {"a": weights(1)})
    (folder(store) / "manifests" / ref.manifest).unlink()

    with pytest.raises(CorruptError, match="run r step 1 needs it"):
        store.manifest(ref)


@pytest.mark.usefixtures("store_of_files")
def test_a_missing_pack_is_a_missing_chunk(store: Store) -> None:
    ref = save(store, {"a": weights(1)})
    shutil.rmtree(folder(store) / "packs")

    for other in (store, again(store)):
        with pytest.raises(ChunkNotFoundError, match="no pack of this store holds chunk"):
            load(other, ref)


@pytest.mark.usefixtures("store_of_files")
def test_a_save_does_not_rely_on_a_pack_that_is_gone(store: Store) -> None:
    save(store, {"a": weights(1)}, 1)
    shutil.rmtree(folder(store) / "packs")
    ref = save(store, {"a": weights(1)}, 2)

    assert same(load(store, ref)["a"], weights(1))


@pytest.mark.usefixtures("store_of_files")
def test_a_pack_that_moved_while_it_was_read_is_found_again(store: Store) -> None:
    ref = save(store, {"a": weights(1)})
    (pack,) = (folder(store) / "packs").iterdir()
    reader = again(store)
    assert same(load(reader, ref)["a"], weights(1))
    pack.rename(pack.with_name("a" * 32 + ".pack"))

    assert same(load(reader, ref)["a"], weights(1))


@pytest.mark.usefixtures("store_of_files")
def test_without_an_index_chunks_are_found_in_their_packs(store: Store) -> None:
    refs = [save(store, {"a": weights(n)}, n) for n in range(3)]
    shutil.rmtree(folder(store) / "index")

    for n, ref in enumerate(refs):
        assert same(load(again(store), ref)["a"], weights(n))


def fold(store: Store, n_saves: int = 70) -> list[Ref]:
    refs = [save(store, {"a": np.full(10, n)}, n) for n in range(n_saves)]
    assert any(key.endswith(".segment") for key in keys(store, "index"))
    return refs


@pytest.mark.long
@pytest.mark.usefixtures("store_of_files")
def test_many_loose_packs_are_folded_and_found_by_others(store: Store) -> None:
    refs = fold(store, 140)

    assert len(keys(store, "index")) < 80
    other = again(store)
    for n, ref in enumerate(refs):
        assert same(load(other, ref)["a"], np.full(10, n))
    with other.write_checkpoint({"b": np.full(10, 3)}) as pending:
        assert pending.n_new_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("damage", [b"", b"garbage" * 100, None])
@pytest.mark.usefixtures("store_of_files")
def test_a_garbage_segment_costs_no_checkpoint(store: Store, damage: bytes | None) -> None:
    refs = fold(store)
    for path in (folder(store) / "index").glob("*.segment"):
        path.write_bytes(path.read_bytes()[:-20] if damage is None else damage)

    other = again(store)
    for n, ref in enumerate(refs):
        assert same(load(other, ref)["a"], np.full(10, n))
    for n, ref in [*enumerate(refs)][::10]:
        assert same(load(again(store), ref)["a"], np.full(10, n))


@pytest.mark.long
@pytest.mark.usefixtures("store_of_files")
def test_a_flipped_bit_of_a_segment_costs_no_checkpoint(store: Store) -> None:
    refs = fold(store)
    (path,) = (folder(store) / "index").glob("*.segment")
    whole = path.read_bytes()
    chance = np.random.default_rng(1)
    for at in chance.integers(0, len(whole), 60).tolist():
        flip(path, at, 1 << (at % 8))
        other = again(store)
        for n, ref in enumerate(refs[:64:8]):
            assert same(load(other, ref)["a"], np.full(10, 8 * n)), at
        path.write_bytes(whole)


@pytest.mark.usefixtures("store_of_files")
def test_a_damaged_pack_does_not_keep_other_checkpoints_from_being_read(store: Store) -> None:
    first = save(store, {"a": weights(1)}, 1)
    (bad,) = (folder(store) / "packs").iterdir()
    second = save(store, {"a": weights(2)}, 2)
    flip(bad, bad.stat().st_size - 1)
    other = again(store)

    assert same(load(other, second)["a"], weights(2))
    with pytest.raises((FormatError, NotFoundError)):
        load(other, first)
