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
from tests.recipes.made import Family, digests_of, drop, held, no_search, optimize, recipes_of, transposed


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

    assert report.n_recipes == 1
    alone = Store.init_backend(MemoryBackend())
    save(alone, tensors, run_id="alone")
    optimize(alone)
    share = (n_bytes(store) - n_bytes(alone)) / sum(array.nbytes for array in other.values())
    assert share < 0.02, share
    for ref, each in refs:
        check_loads(store, ref, each)


def test_quantized_file_takes_no_room_after_an_optimization() -> None:
    tensors = model(4, d=384, n_layers=1)
    data = gguf_file(tensors)
    store = Store.init_backend(MemoryBackend())
    with no_search():
        of_file = save_file(store, data, "model.gguf")
        of_model = save(store, tensors)
    before = n_bytes(store)

    assert optimize(store).n_recipes == 1

    assert before - n_bytes(store) > 0.9 * len(data)
    check_loads_file(store, of_file, data)
    check_loads(store, of_model, tensors)


def test_mean_of_two_fine_tunes_takes_no_room_after_an_optimization() -> None:
    base = model(5, d=256, n_layers=1)
    one, two = tuned(base, 1), tuned(base, 2)
    mean = {name: (one[name] * np.float32(0.5)) + two[name] * np.float32(0.5) for name in base}
    store = Store.init_backend(MemoryBackend())
    with no_search():
        refs = [save(store, each, run_id=f"run-{at}") for at, each in enumerate([mean, one, two])]

    assert optimize(store).n_recipes == 1

    assert digests_of(store, refs[0]).isdisjoint(held(store.backend))
    for ref, each in zip(refs, [mean, one, two], strict=True):
        check_loads(store, ref, each)


def test_second_optimization_has_nothing_to_do() -> None:
    family = Family(MemoryBackend()).optimized()
    recipes, packs = recipes_of(family.store), held(family.store.backend)

    plan = plan_optimize(Store.open_backend(family.store.backend))
    report = plan.execute()

    assert plan.is_empty
    assert report.n_recipes == report.written_bytes == report.n_left == 0
    assert (recipes_of(family.store), held(family.store.backend)) == (recipes, packs)


def test_optimized_checkpoint_is_made_of_one_that_is_saved_later() -> None:
    tensors = model(6, d=256, n_layers=1)
    store = Store.init_backend(MemoryBackend())
    with no_search():
        of_copy = save(store, as_bfloat16(tensors), run_id="copy")
        save(store, as_bfloat16(model(7, d=256, n_layers=1)), run_id="unrelated")
    assert optimize(store).n_recipes == 0
    with no_search():
        save(store, tensors, run_id="model")

    assert optimize(store).n_recipes == 1

    assert digests_of(store, of_copy).isdisjoint(held(store.backend))
    check_loads(store, of_copy, as_bfloat16(tensors))


def test_inputs_of_a_recipe_are_never_made_by_another() -> None:
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


def test_checkpoint_that_is_to_be_restored_fast_is_not_made_by_a_recipe() -> None:
    family = Family(MemoryBackend())

    report = optimize(family.store, for_restore=True)

    assert report.n_recipes == 0
    assert digests_of(family.store, family.of_copy) <= held(family.store.backend)


def test_optimization_for_restore_puts_what_recipes_make_into_packs_again() -> None:
    family = Family(MemoryBackend()).optimized()

    optimize(family.store, for_restore=True)

    assert digests_of(family.store, family.of_copy) <= held(family.store.backend)
    assert recipes_of(family.store) == []
    check_loads(family.store, family.of_copy, family.copy)
    assert plan_optimize(Store.open_backend(family.store.backend), for_restore=True).is_empty


def test_base_of_deltas_is_not_made_by_a_recipe() -> None:
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


@pytest.mark.parametrize("kind", ["files", "database", "objects"])
def test_recipes_are_written_and_read_in_stores_of_each_kind(kind: str, tmp_path: Any) -> None:
    backends: dict[str, Backend] = {
        "files": LocalBackend(tmp_path),
        "database": FolderBackend(tmp_path),
        "objects": MemoryBackend(is_remote=True),
    }
    family = Family(backends[kind]).optimized()

    check_loads(family.store, family.of_copy, family.copy)
    check_loads(family.store, family.of_model, family.model)


def test_report_names_the_recipes() -> None:
    family = Family(MemoryBackend())

    assert " and 1 recipe; freed " in str(optimize(family.store))


def test_unrelated_models_get_no_recipes() -> None:
    store = Store.init_backend(MemoryBackend())
    with no_search():
        for seed in range(4):
            save(store, model(20 + seed, d=256, n_layers=1), run_id=f"run-{seed}")

    assert optimize(store).n_recipes == 0
    assert recipes_of(store) == []


def test_thread_that_flushes_subnormal_numbers_writes_no_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(MemoryBackend())
    monkeypatch.setattr("tensorcas_mlflow.store._recipes.computes_exactly", lambda: False)

    assert optimize(family.store).n_recipes == 0


def test_save_of_what_a_recipe_makes_stores_it_again_and_a_collection_frees_it() -> None:
    family = Family(MemoryBackend()).optimized()
    before = held(family.store.backend)
    with no_search():
        again = save(Store.open_backend(family.store.backend), family.copy, run_id="again")
    assert digests_of(family.store, again) <= held(family.store.backend)
    drop(family.store, family.of_copy)

    plan_optimize(Store.open_backend(family.store.backend)).execute()

    assert held(family.store.backend) == before
    check_loads(family.store, again, family.copy)
