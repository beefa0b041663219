"""Pairs of the related tensors of two models, found by sketches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.sketch import LIKELY_BITS, compare
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import Store, _relatives
from tensorcas_mlflow.store._relatives import pairs_of
from tensorcas_mlflow.store._sketches import Sketched
from tests.deltas.made import save


def model(words: Any, names: list[str], shape: tuple[int, ...] = (64, 64)) -> tuple[Sketched, Manifest]:
    """A model whose tensors have these sketches."""
    store = Store.init_backend(MemoryBackend())
    ref = save(store, {name: np.zeros(shape, np.float32) for name in names}, 0)
    manifest = store.manifest(ref)
    numbers = np.array([manifest.by_name.number(name) for name in names])
    return Sketched.of("", manifest.columns, numbers, words), manifest


def sketches(rng: np.random.Generator, n: int) -> Any:
    numbers = rng.normal(0, 0.02, (n, 32)).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def each_with_each(one: Sketched, manifest: Manifest, other: Sketched, others: Manifest) -> dict[int, int]:
    """The pairs, by comparing each tensor with each other one."""
    names, taken, pairs = others.names(), set[int](), dict[int, int]()
    for at, row in enumerate(one.rows.tolist()):
        if not one.words[at].any():
            continue
        likeness = compare(one.words[at], np.ascontiguousarray(other.words.T))
        found = [
            (-likeness.share[place], names[number] != manifest.names()[row], number)
            for place, number in enumerate(other.rows.tolist())
            if likeness.evidence[place] >= LIKELY_BITS
            and other.n_elements[place] == one.n_elements[at]
            and number not in taken
        ]
        if found:
            pairs[row] = min(found)[2]
            taken.add(pairs[row])
    return pairs


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sketches in each comparison from now on."""
    counts: list[int] = []

    def counted(words: Any, others: Any) -> Any:
        counts.append(others.shape[1])
        return compare(words, others)

    monkeypatch.setattr(_relatives, "compare", counted)
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_those_of_a_comparison_of_each_tensor_with_each_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    some = sketches(rng, 5)
    near = (some + rng.integers(0, 3, some.shape) * (rng.random(some.shape) < 0.3)).astype(np.uint16)
    every = np.concatenate([some, near, np.zeros((1, 32), np.uint16)])
    names = [f"t{number}" for number in range(24)]
    one, manifest = model(every[rng.integers(0, len(every), 24)], names)
    renamed = [name if rng.random() < 0.5 else f"{name}.renamed" for name in rng.permutation(names).tolist()]
    other, others = model(every[rng.integers(0, len(every), 24)], renamed)

    assert pairs_of(one, manifest.columns, other, others.columns) == each_with_each(one, manifest, other, others)


def test_tensors_with_equal_sketches_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = noted(monkeypatch)
    names = [f"t{number}" for number in range(500)]
    words = np.repeat(sketches(np.random.default_rng(0), 1), 500, axis=0)
    one, manifest = model(words, names)
    other, others = model(words, names[::-1])
    pairs = pairs_of(one, manifest.columns, other, others.columns)

    assert {manifest.names()[row]: others.names()[number] for row, number in pairs.items()} == {n: n for n in names}
    assert sum(counts) == 500


def test_a_pairing_of_many_different_sketches_compares_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = noted(monkeypatch)
    monkeypatch.setattr(_relatives, "_MOST_COMPARED", 1_000)
    names = [f"t{number}" for number in range(100)]
    words = sketches(np.random.default_rng(0), 100)
    one, manifest = model(words, names)
    other, others = model(words, names)
    pairs = pairs_of(one, manifest.columns, other, others.columns)

    assert len(pairs) == 100
    assert sum(counts) <= 1_000 + 100
