"""An optimization finds tensors that are functions of others, in checkpoints that exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.backends import Backend, FolderBackend, LocalBackend, MemoryBackend
from tensorcas_mlflow.maintenance import plan_optimize, verify
from tensorcas_mlflow.store import Ref, Store
from tests.derived.made import (
    Tensors,
    as_bfloat16,
    as_dtype,
    check_loads,
    check_loads_file,
    gguf_file,
    model,
    n_bytes,
    renamed,
    save,
    save_file,
    tuned,
)
from tests.forms.made import Family, derived_forms, digests_of, drop, forms_of, held, no_search, optimize, transposed


def shards(tensors: Mapping[str, Any]) -> Tensors:
    return {name: np.ascontiguousarray(np.split(array, 2, axis=-1)[1]) for name, array in tensors.items()}


RELATED: Mapping[str, Callable[[Tensors], Tensors]] = {
    "bf16": as_bfloat16,
    "bf16, renamed": lambda tensors: renamed(as_bfloat16(tensors)),
    "fp16": lambda tensors: as_dtype(tensors, np.float16),
    "fp8": lambda tensors: as_dtype(tensors, ml_dtypes.float8_e4m3fn),
    "transposed": transposed,
    "transposed bf16, renamed": lambda tensors: renamed(transposed(as_bfloat16(tensors))),
    "column shard": shards,
}


@pytest.mark.long
@pytest.mark.parametrize("order", ["model first", "model last"])
@pytest.mark.parametrize("related", RELATED)
def test_related_checkpoint_takes_no_room_after_an_optimization(related: str, order: str) -> None:
    tensors = model(3, d=256, n_layers=1)
    other = RELATED[related](tensors)
    store = Store.init_backend(MemoryBackend())
    refs: list[tuple[Ref, Tensors]] = []
    with no_search():
        for each in [tensors, other] if order == "model first" else [other, tensors]:
            refs.append((save(store, each, run_id=f"run-{len(refs)}"), each))

    report = optimize(store)

    assert report.n_forms == 1
    alone = Store.init_backend(MemoryBackend())
    save(alone, tensors, run_id="alone")
    optimize(alone)
    share = (n_bytes(store) - n_bytes(alone)) / sum(array.nbytes for array in other.values())
    assert share < 0.02, share
    for ref, each in refs:
        check_loads(store, ref, each)


@pytest.mark.long
def test_quantized_file_takes_no_room_after_an_optimization() -> None:
    tensors = model(4, d=384, n_layers=1)
    data = gguf_file(tensors)
    store = Store.init_backend(MemoryBackend())
    with no_search():
        of_file = save_file(store, data, "model.gguf")
        of_model = save(store, tensors)
    before = n_bytes(store)

    assert optimize(store).n_forms == 1

    assert before - n_bytes(store) > 0.9 * len(data)
    check_loads_file(store, of_file, data)
    check_loads(store, of_model, tensors)


@pytest.mark.long
def test_mean_of_two_fine_tunes_takes_no_room_after_an_optimization() -> None:
    base = model(5, d=256, n_layers=1)
    one, two = tuned(base, 1), tuned(base, 2)
    mean = {name: (one[name] * np.float32(0.5)) + two[name] * np.float32(0.5) for name in base}
    store = Store.init_backend(MemoryBackend())
    with no_search():
        refs = [save(store, each, run_id=f"run-{at}") for at, each in enumerate([mean, one, two])]

    assert optimize(store).n_forms == 1

    assert digests_of(store, refs[0]).isdisjoint(held(store.backend))
    for ref, each in zip(refs, [mean, one, two], strict=True):
        check_loads(store, ref, each)


def test_second_optimization_has_nothing_to_do() -> None:
    family = Family(MemoryBackend()).optimized()
    forms, packs = forms_of(family.store), held(family.store.backend)

    plan = plan_optimize(Store.open_backend(family.store.backend))
    report = plan.execute()

    assert plan.is_empty
    assert report.n_forms == report.written_bytes == report.n_left == 0
    assert (forms_of(family.store), held(family.store.backend)) == (forms, packs)


@pytest.mark.long
def test_optimized_checkpoint_is_made_of_one_that_is_saved_later() -> None:
    tensors = model(6, d=256, n_layers=1)
    store = Store.init_backend(MemoryBackend())
    with no_search():
        of_copy = save(store, as_bfloat16(tensors), run_id="copy")
        save(store, as_bfloat16(model(7, d=256, n_layers=1)), run_id="unrelated")
    assert optimize(store).n_forms == 0
    with no_search():
        save(store, tensors, run_id="model")

    assert optimize(store).n_forms == 1

    assert digests_of(store, of_copy).isdisjoint(held(store.backend))
    check_loads(store, of_copy, as_bfloat16(tensors))


@pytest.mark.long
def test_inputs_of_a_form_are_never_made_by_another() -> None:
    """Of three transposed copies of each other, one stays in packs, and makes both others."""
    cubes = {name: array.reshape(len(array), -1, 2) for name, array in model(8, d=256, n_layers=1).items()}
    one = {name: np.ascontiguousarray(np.moveaxis(array, 2, 0)) for name, array in cubes.items()}
    two = {name: np.ascontiguousarray(np.moveaxis(array, 0, 2)) for name, array in cubes.items()}
    store = Store.init_backend(MemoryBackend())
    with no_search():
        refs = [save(store, each, run_id=f"run-{at}") for at, each in enumerate([cubes, one, two])]

    optimize(store)

    there = held(store.backend)
    assert sum(digests_of(store, ref) <= there for ref in refs) == 1
    for ref, each in zip(refs, [cubes, one, two], strict=True):
        check_loads(store, ref, each)


@pytest.mark.long
def test_checkpoint_that_is_to_be_restored_fast_is_not_made_by_a_form() -> None:
    family = Family(MemoryBackend())

    report = optimize(family.store, for_restore=True)

    assert report.n_forms == 0
    assert digests_of(family.store, family.of_copy) <= held(family.store.backend)


@pytest.mark.long
def test_optimization_for_restore_puts_what_forms_make_into_packs_again() -> None:
    family = Family(MemoryBackend()).optimized()

    optimize(family.store, for_restore=True)

    assert digests_of(family.store, family.of_copy) <= held(family.store.backend)
    assert derived_forms(family.store) == []
    check_loads(family.store, family.of_copy, family.copy)
    assert plan_optimize(Store.open_backend(family.store.backend), for_restore=True).is_empty


@pytest.mark.long
def test_base_of_deltas_is_not_made_by_a_form() -> None:
    """It would have to stay in its pack all the same."""
    tensors = model(9, d=256, n_layers=1)
    copy = as_bfloat16(tensors)
    store = Store.init_backend(MemoryBackend())
    with no_search():
        of_copy = save(store, copy, run_id="copy")
    save(store, {name: (array * np.float32(1.0001)).astype(array.dtype) for name, array in copy.items()}, 1, "copy")
    with no_search():
        save(store, tensors, run_id="model")

    optimize(store)

    check_loads(store, of_copy, copy)
    assert verify(Store.open_backend(store.backend), full=True).problems == ()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["files", "database", "objects"])
def test_forms_are_written_and_read_in_stores_of_each_kind(kind: str, tmp_path: Any) -> None:
    backends: dict[str, Backend] = {
        "files": LocalBackend(tmp_path),
        "database": FolderBackend(tmp_path),
        "objects": MemoryBackend(is_remote=True),
    }
    family = Family(backends[kind]).optimized()

    check_loads(family.store, family.of_copy, family.copy)
    check_loads(family.store, family.of_model, family.model)


def test_report_names_the_forms() -> None:
    family = Family(MemoryBackend())

    assert "derived tensors of 1 checkpoint or file from others; freed " in str(optimize(family.store))


@pytest.mark.long
def test_unrelated_models_get_no_forms() -> None:
    store = Store.init_backend(MemoryBackend())
    with no_search():
        for seed in range(4):
            save(store, model(20 + seed, d=256, n_layers=1), run_id=f"run-{seed}")

    assert optimize(store).n_forms == 0
    assert forms_of(store) == []


@pytest.mark.long
def test_thread_that_flushes_subnormal_numbers_writes_no_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(MemoryBackend())
    monkeypatch.setattr("tensorcas_mlflow.store._stored_rows.computes_exactly", lambda: False)

    assert optimize(family.store).n_forms == 0


@pytest.mark.long
def test_save_of_what_a_form_makes_stores_it_again_and_a_collection_frees_it() -> None:
    family = Family(MemoryBackend()).optimized()
    before = held(family.store.backend)
    with no_search():
        again = save(Store.open_backend(family.store.backend), family.copy, run_id="again")
    assert digests_of(family.store, again) <= held(family.store.backend)
    drop(family.store, family.of_copy)

    plan_optimize(Store.open_backend(family.store.backend)).execute()

    assert held(family.store.backend) == before
    check_loads(family.store, again, family.copy)


def family_of_eight() -> dict[str, Tensors]:
    base = model(5, d=128, n_layers=1)
    tunes = [tuned(base, seed) for seed in range(4)]
    mean = {name: (tunes[0][name] * np.float32(0.5)) + tunes[1][name] * np.float32(0.5) for name in base}
    return {
        "model": base,
        **{f"tuned {at}": each for at, each in enumerate(tunes)},
        "bf16": as_bfloat16(base),
        "transposed": transposed(base),
        "mean": mean,
    }


ORDERS = {
    "in order": (0, 1, 2, 3, 4, 5, 6, 7),
    "backward": (7, 6, 5, 4, 3, 2, 1, 0),
    "copies first": (5, 6, 7, 0, 1, 2, 3, 4),
    "mixed": (3, 5, 0, 7, 1, 6, 2, 4),
}


def optimized_family(order: tuple[int, ...]) -> int:
    """Save the family without a search, optimize, check that all of it loads, and return the bytes of the store."""
    members = list(family_of_eight().items())
    store = Store.init_backend(MemoryBackend(), chunk_bytes=64 << 10)
    with no_search():
        refs = {name: save(store, tensors, run_id=name) for name, tensors in (members[at] for at in order)}
    assert optimize(store).n_forms == 3
    for name, tensors in members:
        check_loads(store, refs[name], tensors)
    assert plan_optimize(Store.open_backend(store.backend)).is_empty
    return n_bytes(store)


@pytest.mark.parametrize("order", ["copies first", pytest.param("backward", marks=pytest.mark.long), "mixed"])
def test_family_takes_the_same_room_in_any_order_of_its_saves(order: str) -> None:
    assert optimized_family(ORDERS[order]) < 1.01 * optimized_family(ORDERS["in order"])


def test_fine_tunes_are_bases_of_each_other_though_a_copy_of_their_model_comes_first() -> None:
    assert optimized_family(ORDERS["copies first"]) < 3.8 * sum(
        array.nbytes for array in family_of_eight()["model"].values()
    )
