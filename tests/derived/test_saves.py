"""Derived tensors as saves find, prove and store them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.errors import FencedError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc
from tensorcas_mlflow.store import Store, _ingest
from tests.deltas.test_files import Stream
from tests.derived.checkpoints import Made, save_derived
from tests.derived.conftest import InAnotherProcess
from tests.derived.made import (
    Tensors,
    as_bfloat16,
    as_dtype,
    check_loads,
    check_loads_file,
    functions_of,
    gguf_file,
    manifest_of,
    model,
    n_bytes,
    renamed,
    save,
    save_file,
    share_taken,
    share_taken_by_file,
    tuned,
)


@pytest.mark.long
@pytest.mark.parametrize("has_other_names", [False, True])
@pytest.mark.parametrize(
    ("stored", "copied"),
    [("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_copy_in_another_dtype_is_derived(
    store: Store, in_another_process: InAnotherProcess, stored: str, copied: str, has_other_names: bool
) -> None:
    base = as_dtype(model(0), np.dtype(getattr(ml_dtypes, stored, stored)))
    save(store, base)
    copy = as_dtype(base, np.dtype(getattr(ml_dtypes, copied, copied)))

    assert share_taken(in_another_process(store), renamed(copy) if has_other_names else copy) < 0.01


@pytest.mark.long
def test_copy_in_another_dtype_is_derived_in_the_same_process(store: Store) -> None:
    save(store, model(0))

    assert share_taken(store, as_bfloat16(model(0))) < 0.01


@pytest.mark.long
@pytest.mark.parametrize("has_other_names", [False, True])
def test_transposed_matrices_are_derived(
    store: Store, in_another_process: InAnotherProcess, has_other_names: bool
) -> None:
    save(store, model(0))
    turned = {name: np.ascontiguousarray(array.T) for name, array in model(0).items()}

    assert share_taken(in_another_process(store), renamed(turned) if has_other_names else turned) < 0.01


@pytest.mark.parametrize("has_other_names", [False, True])
@pytest.mark.parametrize("axes", [(2, 3, 1, 0), (0, 2, 3, 1)])
def test_convolutions_in_another_order_of_axes_are_derived(
    store: Store, in_another_process: InAnotherProcess, has_other_names: bool, axes: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    stored = {f"conv{n}.weight": rng.normal(0, 0.1, (128, 32 << n, 3, 3)).astype(np.float32) for n in range(3)}
    save(store, stored)
    turned = {name: np.ascontiguousarray(array.transpose(axes)) for name, array in stored.items()}

    assert share_taken(in_another_process(store), renamed(turned) if has_other_names else turned) < 0.01


@pytest.mark.long
def test_transposed_copy_in_another_dtype_is_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    turned = {name: np.ascontiguousarray(array.T) for name, array in as_bfloat16(model(0)).items()}

    assert share_taken(in_another_process(store), turned) < 0.01


@pytest.mark.long
@pytest.mark.parametrize("has_other_names", [False, True])
@pytest.mark.parametrize("n_shards", [2, 4])
def test_shards_of_columns_are_derived(
    store: Store, in_another_process: InAnotherProcess, n_shards: int, has_other_names: bool
) -> None:
    save(store, model(0))
    for number in range(n_shards):
        shard = {name: np.split(array, n_shards, axis=1)[number].copy() for name, array in model(0).items()}
        shard = renamed(shard) if has_other_names else shard

        assert share_taken(in_another_process(store), shard, f"shard {number}") < 0.01


@pytest.mark.long
def test_shards_of_rows_are_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    for number in range(2):
        shard = {name: np.split(array, 2)[number].copy() for name, array in model(0).items()}

        assert share_taken(in_another_process(store), shard, f"shard {number}") < 0.01


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_gguf_file_of_stored_weights_is_derived(
    store: Store, in_another_process: InAnotherProcess, stored: str
) -> None:
    base = as_dtype({"w": normal(4)}, np.dtype(getattr(ml_dtypes, stored, stored)))
    save(store, base)

    assert share_taken_by_file(in_another_process(store), gguf_file(renamed(base))) < 0.05


def normal(seed: int) -> Any:
    return np.random.default_rng(seed).normal(0, 0.02, (512, 1024)).astype(np.float32)


def test_gguf_file_of_the_same_names_is_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, {"w": normal(4)})

    assert share_taken_by_file(in_another_process(store), gguf_file({"w": normal(4)})) < 0.05


def test_gguf_file_of_other_weights_is_stored(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, {"w": normal(4)})
    again, data = in_another_process(store), gguf_file({"w": normal(5)})
    ref = save_file(again, data, "model")

    assert functions_of(again, ref) == set()
    check_loads_file(again, ref, data)


def test_gguf_file_with_one_other_bit_is_stored(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, {"w": normal(4)})
    again, data = in_another_process(store), bytearray(gguf_file({"w": normal(4)}))
    data[-100] ^= 1
    ref = save_file(again, bytes(data), "model")

    assert functions_of(again, ref) == set()
    check_loads_file(again, ref, bytes(data))


@pytest.mark.long
def test_gguf_file_in_other_dtypes_is_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))

    assert share_taken_by_file(in_another_process(store), gguf_file(renamed(as_bfloat16(model(0))), None)) < 0.02


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is many batches, and large tensors are in several of them."""
    monkeypatch.setattr(_ingest, "BATCH_BYTES", 600_000)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", 200_000)


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
def test_gguf_file_stored_in_batches_is_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))

    assert share_taken_by_file(in_another_process(store), gguf_file(renamed(model(0)))) < 0.02


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
def test_safetensors_file_stored_in_batches_is_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    data = safetensors.numpy.save(renamed(as_bfloat16(model(0))))

    assert share_taken_by_file(in_another_process(store), data) < 0.01


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("place", ["first", "last"])
def test_tensor_that_differs_in_a_batch_is_stored(
    store: Store, in_another_process: InAnotherProcess, place: str
) -> None:
    save(store, model(0))
    copy = as_bfloat16(model(0))
    words = copy["embed.weight"].reshape(-1).view(np.uint16)
    words[0 if place == "first" else -1] ^= 1
    share = share_taken_by_file(in_another_process(store), safetensors.numpy.save(copy))

    assert 0.05 < share < 0.3  # the tensor is a fifth of the file


@pytest.mark.long
def test_file_is_derived_from_a_file(store: Store, in_another_process: InAnotherProcess) -> None:
    save_file(store, safetensors.numpy.save(model(0)), "fp32.safetensors")
    data = safetensors.numpy.save(as_bfloat16(model(0)))

    assert share_taken_by_file(in_another_process(store), data) < 0.01


@pytest.mark.long
def test_mean_of_two_fine_tunes_is_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    base = model(0, n_layers=3)
    tunes = [tuned(base, 1), tuned(base, 2)]
    for number, each in enumerate([base, *tunes]):
        save(in_another_process(store), each, run_id=f"run {number}")
    mean = {name: (array + tunes[1][name]) / np.float32(2) for name, array in tunes[0].items()}

    assert share_taken(in_another_process(store), mean) < 0.01


@pytest.mark.long
def test_mean_of_bfloat16_fine_tunes_under_other_names_is_derived(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    tunes = [as_bfloat16(tuned(model(0, n_layers=4), seed)) for seed in (1, 2)]
    for number, each in enumerate(tunes):
        save(in_another_process(store), each, run_id=f"run {number}")
    mean = {
        name: ((array.astype(np.float32) + tunes[1][name].astype(np.float32)) / 2).astype(ml_dtypes.bfloat16)
        for name, array in tunes[0].items()
    }

    assert share_taken(in_another_process(store), renamed(mean)) < 0.01


def test_copy_that_a_function_does_not_reproduce_is_stored(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    truncated = {
        name: (array.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
        for name, array in model(0).items()
    }
    again = in_another_process(store)
    share = share_taken(again, truncated)

    assert share > 0.5
    assert functions_of(store, next(ref for ref in again.checkpoints() if ref.run_id == "other")) == set()


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    """Compute in this thread without subnormal numbers."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always keeps subnormal numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.long
@pytest.mark.usefixtures("flushed_subnormals")
def test_copy_without_subnormals_is_read_by_a_process_that_keeps_them(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    whole = {name: array.astype(np.float64) * 1e-38 for name, array in model(0).items()}
    copy = as_dtype(whole, np.float32)
    save(store, whole)
    ref = save(in_another_process(store), copy, run_id="other")
    torch.set_flush_denormal(False)

    assert all((array == 0).mean() > 0.5 for array in copy.values())
    check_loads(store, ref, copy)


def test_model_without_relatives_is_not_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    ref = save(in_another_process(store), as_bfloat16(model(1)), run_id="other")

    assert functions_of(store, ref) == set()
    check_loads(store, ref, as_bfloat16(model(1)))


@pytest.mark.long
def test_derived_copy_loads_after_its_inputs_checkpoint_is_dropped(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    base = save(store, model(0))
    copy = save(in_another_process(store), as_bfloat16(model(0)), run_id="other")
    store.drop(base)
    plan_gc(store, grace_s=0).execute()

    assert functions_of(store, copy) == {"cast"}
    check_loads(store, copy, as_bfloat16(model(0)))


def collected(store: Store) -> None:
    """Drop all checkpoints, and collect their chunks."""
    other = Store.open_backend(store.backend)
    for ref in other.checkpoints():
        other.drop(ref)
    plan_gc(other, grace_s=0).execute()


def test_inputs_collected_before_the_intent_are_not_relied_on(
    in_another_process: InAnotherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = in_another_process(Store.init_backend(MemoryBackend()))
    save(store, model(0))
    again = in_another_process(store)
    found = []

    def declare_late(*args: object, **kwargs: object) -> object:
        if not found:
            found.append(True)
            collected(store)
        return declare(*args, **kwargs)

    from tensorcas_mlflow.store import _save

    declare = _save.declare
    monkeypatch.setattr(_save, "declare", declare_late)
    ref = save(again, as_bfloat16(model(0)), run_id="other")

    assert found
    assert functions_of(store, ref) == set()
    check_loads(store, ref, as_bfloat16(model(0)))


def test_save_given_up_by_a_collector_begins_again_without_inputs(in_another_process: InAnotherProcess) -> None:
    store = in_another_process(Store.init_backend(MemoryBackend()))
    save(store, model(0))
    again = in_another_process(store)
    with again.write_checkpoint(as_bfloat16(model(0))) as pending:
        for info in list(store.backend.list("intents")):
            store.backend.delete(info.key)
        collected(store)
        ref = pending.commit(RefTarget(run_id="other", step=0))

    assert functions_of(store, ref) == set()
    check_loads(store, ref, as_bfloat16(model(0)))


@pytest.mark.long
def test_unchanged_derived_tensor_of_a_series_stays_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    again, copy = in_another_process(store), as_bfloat16(model(0))
    save(again, copy, 0, "other", series="s")
    copy["embed.weight"] = as_bfloat16(model(1))["embed.weight"]
    before = n_bytes(store)
    ref = save(again, copy, 1, "other", series="s")

    assert n_bytes(store) - before < 1.05 * copy["embed.weight"].nbytes
    assert {each.function for each in manifest_of(store, ref).derived} == {"cast"}
    check_loads(store, ref, copy)


@pytest.mark.long
def test_changed_derived_tensor_of_a_series_is_the_next_base(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    save(store, model(0))
    again = in_another_process(store)
    steps: list[Tensors] = [as_bfloat16(model(0))]
    for seed in (1, 2):
        moved = {
            name: (array.astype(np.float32) + np.random.default_rng(seed).normal(0, 1e-6, array.shape)).astype(
                array.dtype
            )
            for name, array in steps[-1].items()
        }
        steps.append(moved)
    refs = [save(again, tensors, step, "other", series="s") for step, tensors in enumerate(steps)]
    sizes = [manifest_of(store, ref).derived for ref in refs]

    assert [len(each) > 0 for each in sizes] == [True, False, False]
    for ref, tensors in zip(refs, steps, strict=True):
        check_loads(store, ref, tensors)


@pytest.mark.long
def test_stored_copy_is_found_by_a_later_save_of_the_same_tensors(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    save(store, model(0))
    save(in_another_process(store), as_bfloat16(model(0)), run_id="other")

    assert share_taken(in_another_process(store), as_bfloat16(model(0)), "third") < 0.01


@pytest.mark.long
def test_relative_of_a_checkpoint_with_derived_and_stored_tensors_is_saved(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    save(store, model(0))
    mixed = {**as_bfloat16(model(0)), **{f"new.{name}": array for name, array in as_bfloat16(model(1)).items()}}
    save(in_another_process(store), mixed, run_id="mixed")
    later = {f"new.{name}": array for name, array in as_bfloat16(tuned(model(1), 2)).items()}

    assert share_taken(in_another_process(store), renamed(later), "later") < 0.6


def test_function_of_an_earlier_checkpoint_is_proven_again(store: Store) -> None:
    copy = as_bfloat16(model(0))
    wrong = {name: Made("cast", [array]) for name, array in model(1).items()}
    save_derived(store, RefTarget(run_id="forged", step=0), copy, wrong)
    ref = save(store, copy, run_id="other")

    fresh = Store.open_backend(store.backend)
    found = fresh.read_tensors(fresh.manifest(ref))
    assert all(found[name].tobytes() == array.tobytes() for name, array in copy.items())


def test_equal_tensors_are_all_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    tied = {**model(0), "head.weight": model(0)["embed.weight"]}
    save(store, tied)

    assert share_taken(in_another_process(store), renamed(as_bfloat16(tied))) < 0.01


def test_equal_tensors_of_a_file_are_all_derived(store: Store, in_another_process: InAnotherProcess) -> None:
    tied = {**model(0), "head.weight": model(0)["embed.weight"]}
    save(store, tied)

    assert share_taken_by_file(in_another_process(store), safetensors.numpy.save(renamed(as_bfloat16(tied)))) < 0.02


@pytest.mark.long
def test_file_that_is_saved_twice_shares_a_manifest(store: Store, in_another_process: InAnotherProcess) -> None:
    save(store, model(0))
    data = gguf_file(renamed(model(0)))
    first = save_file(in_another_process(store), data, "one")
    second = save_file(in_another_process(store), data, "two")

    assert first.manifest.partition(".")[0] == second.manifest.partition(".")[0]
    check_loads_file(store, second, data)


@pytest.mark.long
def test_copy_of_a_later_state_has_the_chunks_of_a_derived_tensor(
    store: Store, in_another_process: InAnotherProcess
) -> None:
    save(store, model(0))
    again, tensors = in_another_process(store), as_bfloat16(model(0))
    copy = again.copy(tensors)
    with again.begin_checkpoint(copy, series="s") as pending:
        first = pending.commit(RefTarget(run_id="other", step=0))
    copy.note_stored(derived=[each.row for each in pending.manifest.derived])
    changed = dict(tensors, **{"embed.weight": tensors["embed.weight"].copy()})
    changed["embed.weight"][0, 0] += 1
    later = again.copy(changed, before=copy)
    with again.begin_checkpoint(later, series="s") as pending:
        second = pending.commit(RefTarget(run_id="other", step=1))

    assert again.relies_on(copy)
    assert later.n_copied_bytes < changed["embed.weight"].nbytes
    check_loads(store, first, tensors)
    check_loads(store, second, changed)


@pytest.mark.long
@pytest.mark.usefixtures("small_batches")
def test_file_is_refused_or_whole_if_a_collector_deletes_inputs_between_batches(
    in_another_process: InAnotherProcess,
) -> None:
    data = safetensors.numpy.save(as_bfloat16(model(0)))
    n_fenced = 0
    for at in range(600_000, len(data), 1_500_000):
        store = in_another_process(Store.init_backend(MemoryBackend()))
        save(store, model(0))
        again = in_another_process(store)

        def give_up(store: Store = store) -> None:
            for info in list(store.backend.list("intents")):
                store.backend.delete(info.key)
            collected(store)

        source = Stream(data, at=at, then=give_up)
        try:
            with again.write_stream(source) as pending:
                ref = pending.commit(RefTarget(path="model"))
        except FencedError:
            n_fenced += 1
        else:
            check_loads_file(store, ref, data)

    assert n_fenced > 0
