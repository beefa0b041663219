"""Verification evaluates derived tensors, and reads the inputs that they have in common once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend, MeteredBackend, ReadCounter
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import _verify_derived, verify
from tensorcas_mlflow.store import Store
from tests.derived.checkpoints import Made, save_derived
from tests.derived.test_maintenance import drop, flip_chunk
from tests.derived.test_reading import CHUNK_BYTES

Tensors = dict[str, Any]
N = 6


def inputs() -> Tensors:
    rng = np.random.default_rng(0)
    return {f"w{at}": rng.normal(0, 1, (64, 128)).astype(np.float32) for at in range(N)}


def derived_of(store: Store, tensors: Tensors) -> None:
    """Save copies, transposed copies and means of neighbours, each in a checkpoint of its own."""
    made: list[Callable[[int], tuple[Any, Made]]] = [
        lambda at: (tensors[f"w{at}"].astype(np.float16), Made("cast", [tensors[f"w{at}"]])),
        lambda at: (np.ascontiguousarray(tensors[f"w{at}"].T), Made("permute", [tensors[f"w{at}"]], {"axes": [1, 0]})),
        lambda at: (
            (tensors[f"w{at}"] + tensors[f"w{(at + 1) % N}"]) / 2,
            Made("mean", [tensors[f"w{at}"], tensors[f"w{(at + 1) % N}"]]),
        ),
    ]
    for step, make in enumerate(made, 2):
        rows = {f"x{at}": make(at) for at in range(N)}
        whole: Tensors = {name: array for name, (array, _) in rows.items()}
        functions: Mapping[str, Made] = {name: each for name, (_, each) in rows.items()}
        save_derived(store, RefTarget(run_id="r", step=step), whole, functions)


@pytest.fixture
def store() -> Store:
    made = Store.init_backend(MemoryBackend(), chunk_bytes=CHUNK_BYTES)
    with made.write_checkpoint(inputs()) as save:
        save.commit(RefTarget(run_id="r", step=1))
    derived_of(made, inputs())
    return made


def n_read(store: Store) -> int:
    """Return the bytes that a full verification reads."""
    tally = ReadCounter()
    report = verify(Store.open_backend(MeteredBackend(store.backend, tally)), full=True)
    assert report.problems == ()
    return tally.n_bytes


def n_input_bytes(store: Store) -> int:
    return sum(info.size for info in store.backend.list("packs"))


def test_a_full_verification_reads_each_input_once_to_evaluate_all_tensors(store: Store) -> None:
    with_derived = n_read(store)
    size = n_input_bytes(store)
    for step in (2, 3, 4):
        drop(store, step)
    alone = n_read(store)

    assert 0.5 * size < with_derived - alone < 1.2 * size


def test_a_bound_of_memory_divides_the_evaluation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    once = n_read(store)
    monkeypatch.setattr(_verify_derived, "MOST_HELD_BYTES", 1)
    held: list[int] = []
    batches = _verify_derived._batches

    def noted(waiting: Any) -> Any:
        for wanted, rows in batches(waiting):
            held.append(len(rows))
            yield wanted, rows

    monkeypatch.setattr(_verify_derived, "_batches", noted)
    divided = n_read(store)

    assert once < divided
    assert max(held) == 2


@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
def test_each_tensor_of_a_wrong_function_is_named(
    store: Store, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_verify_derived, "MOST_HELD_BYTES", most_bytes)
    monkeypatch.setattr(_verify_derived, "_MOST_MANIFEST_BYTES", most_bytes)
    w = inputs()
    tensors = {"right": (w["w0"] + w["w1"]) / 2, "wrong": (w["w0"] + w["w2"]) / 2, "other": w["w3"].astype(np.float16)}
    means = {name: Made("mean", [w["w0"], w["w1"]]) for name in ("right", "wrong")}
    forged = save_derived(store, RefTarget(run_id="r", step=9), tensors, {**means, "other": Made("cast", [w["w4"]])})
    problems = verify(Store.open_backend(store.backend), full=True).problems

    assert sorted(each.tensors for each in problems) == [("other",), ("wrong",)]
    assert {(each.checkpoint, each.key) for each in problems} == {(forged.label, f"manifests/{forged.manifest}")}


def test_a_damaged_input_is_named_with_all_tensors_derived_of_it(store: Store) -> None:
    flip_chunk(store, inputs()["w3"].tobytes()[:CHUNK_BYTES])
    problems = verify(Store.open_backend(store.backend), full=True).problems

    named = {each.checkpoint: set(each.tensors) for each in problems}
    assert sorted(map(sorted, named.values())) == [["w3"], ["x2", "x3"], ["x3"], ["x3"]]
