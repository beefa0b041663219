"""Compressed files in a store, which keeps their content."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import DerivedTensorError, FencedError
from tensorcas_mlflow.file_formats import open_listing
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, verify
from tensorcas_mlflow.store import Store, _ingest
from tests.derived.conftest import InAnotherProcess
from tests.derived.made import (
    Tensors,
    check_loads_file,
    functions_of,
    manifest_of,
    model,
    n_bytes,
    save,
    save_file,
    share_taken_by_file,
    tuned,
)


def savez(tensors: Tensors, *, compressed: bool = True) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **tensors)
    return out.getvalue()


def dumped(tensors: Any, compress: int) -> bytes:
    out = io.BytesIO()
    joblib.dump(tensors, out, compress=compress)
    return out.getvalue()


def frozen(tensors: Tensors, seed: int) -> Tensors:
    """Change one small tensor."""
    [name] = [name for name in tensors if name.endswith("0.q.weight")]
    return {**tensors, name: tuned({name: tensors[name]}, seed)[name]}


@pytest.mark.long
def test_a_compressed_file_of_stored_weights_takes_no_room(store: Store) -> None:
    save(store, model(0))
    ref_bytes = share_taken_by_file(store, savez(model(0)))

    assert ref_bytes < 0.01


@pytest.mark.long
def test_a_compressed_file_shares_its_arrays_with_a_plain_one(store: Store) -> None:
    save_file(store, savez(model(0), compressed=False), "plain")

    assert share_taken_by_file(store, savez(model(0)), "packed") < 0.01
    assert share_taken_by_file(store, dumped(model(0), 3), "dumped") < 0.01


@pytest.mark.long
@pytest.mark.parametrize("write", [savez, lambda tensors: dumped(tensors, 3)], ids=["savez_compressed", "joblib"])
def test_a_step_of_compressed_files_takes_what_has_changed(
    store: Store, in_another_process: InAnotherProcess, write: Any
) -> None:
    tensors = model(0)
    save_file(store, write(tensors), "step-0")
    changed = sum(array.nbytes for name, array in tensors.items() if name.endswith("0.q.weight"))
    whole = sum(array.nbytes for array in tensors.values())

    for step in (1, 2):
        tensors = frozen(tensors, step)
        taken = share_taken_by_file(in_another_process(store), write(tensors), f"step-{step}")
        assert taken < 1.1 * changed / whole


@pytest.mark.long
def test_a_step_of_compressed_files_takes_as_much_as_one_of_plain_files() -> None:
    taken = {}
    for compressed in (False, True):
        store = Store.init_backend(MemoryBackend())
        save_file(store, savez(model(0), compressed=compressed), "step-0")
        before = n_bytes(store)
        save_file(store, savez(tuned(model(0), 1), compressed=compressed), "step-1")
        taken[compressed] = n_bytes(store) - before

    assert taken[True] < 1.02 * taken[False]


@pytest.mark.long
def test_a_stream_is_stored_in_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 300_000)
    data = savez(model(0))
    ref = save_file(store, data, "model")

    assert functions_of(store, ref) == {"deflate"}
    check_loads_file(store, ref, data)
    again = savez(frozen(model(0), 1))
    assert share_taken_by_file(store, again, "again") < 0.1


@pytest.mark.long
def test_contents_of_streams_are_no_rows_of_the_file(store: Store) -> None:
    data = savez(model(0))
    manifest = manifest_of(store, save_file(store, data, "model"))

    assert manifest.n_bytes == len(data)
    assert manifest.n_inputs > len(model(0))
    assert set(manifest.names()) == {""}
    for name in model(0):
        assert manifest.input_named(name) is not None


@pytest.mark.long
def test_a_stream_of_many_arrays_has_few_inputs(store: Store) -> None:
    rng = np.random.default_rng(0)
    data = dumped([rng.integers(0, 50, 40).astype(np.int64) for _ in range(3000)], 3)
    ref = save_file(store, data, "forest")

    assert functions_of(store, ref) == {"deflate"}
    assert manifest_of(store, ref).n_inputs <= 1024
    check_loads_file(store, ref, data)


@pytest.mark.long
def test_equal_streams_share_their_content(store: Store) -> None:
    array = model(0)["embed.weight"]
    data = savez({"a": array, "b": array})
    ref = save_file(store, data, "model")
    manifest = manifest_of(store, ref)

    assert len(manifest.derived) == 2
    assert sum(row.spec.n_bytes > 1000 for row in manifest.inputs) == 1
    check_loads_file(store, ref, data)


@pytest.mark.long
def test_a_bfloat16_copy_in_a_stream_is_stored_beside_the_one_of_the_file(store: Store) -> None:
    save(store, model(0))
    data = dumped({"half": [array.astype(np.float16) for array in model(0).values()]}, 3)
    ref = save_file(store, data, "half")

    assert functions_of(store, ref) == {"deflate"}
    check_loads_file(store, ref, data)


@pytest.mark.long
def test_collection_keeps_the_content_of_a_stream(store: Store) -> None:
    first = save(store, model(0))
    data = savez(model(0))
    ref = save_file(store, data, "model")
    store.drop(first)
    plan_gc(store, grace_s=0, max_waste=0).execute()

    check_loads_file(store, ref, data)
    fresh = Store.open_backend(store.backend)
    kept = fresh.ref(ref.key)
    assert kept is not None
    fresh.drop(kept)
    plan_gc(fresh, grace_s=0, max_waste=0).execute()
    assert not list(store.backend.list("packs"))


@pytest.mark.long
def test_a_collector_between_batches_makes_the_stream_begin_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 300_000)
    data = savez(model(0))
    with store.write_stream(io.BytesIO(data)) as pending:
        # The collector takes the save for dead.
        for info in list(store.backend.list("intents")):
            store.backend.delete(info.key)
        plan_gc(Store.open_backend(store.backend), grace_s=0, max_waste=0).execute()
        with pytest.raises(FencedError):
            pending.commit(RefTarget(path="model"))

    check_loads_file(store, save_file(store, data, "model"), data)


def test_a_damaged_content_is_reported_for_its_file(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    ref = save_file(store, savez(model(0)), "model.npz")
    for pack in (tmp_path / "store").rglob("*.pack"):
        damaged = bytearray(pack.read_bytes())
        damaged[len(damaged) // 3] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(damaged)
    problems = verify(Store.open_backend(store.backend), full=True).problems

    assert any("model.npz" in str(problem) for problem in problems)
    assert ref.path == "model.npz"


def test_a_stream_of_another_level_than_its_manifest_says_is_refused(store: Store) -> None:
    from dataclasses import replace

    data = savez({"w": model(0)["embed.weight"]})
    manifest = manifest_of(store, save_file(store, data, "model"))
    forged = replace(manifest, derived=tuple(replace(each, params={"level": 1}) for each in manifest.derived))
    with store.adopt(forged) as pending:
        ref = pending.commit(RefTarget(path="forged"))

    with pytest.raises(DerivedTensorError, match="deflate"):
        b"".join(map(bytes, Store.open_backend(store.backend).iter_file(ref)))


@pytest.mark.long
def test_arrays_of_a_stored_compressed_file_are_read(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    data = savez(model(0))
    ref = save_file(store, data, "model.npz")
    (tmp_path / "model.npz").write_bytes(b"".join(map(bytes, store.iter_file(ref))))
    listing = open_listing(tmp_path / "model.npz")

    assert {name: listing.array(name).tobytes() for name in model(0)} == {
        name: array.tobytes() for name, array in model(0).items()
    }
