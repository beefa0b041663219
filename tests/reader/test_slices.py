"""Bytes to read for an index in numpy's sense."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.reader import _slices
from tensorcas_mlflow.reader._slices import Selection, divided, select


def some_index(rng: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    parts: list[Any] = []
    has_list = False
    for side in shape[: rng.randint(0, len(shape))]:
        kind = rng.random()
        if kind < 0.3 and side:
            parts.append(rng.randint(-side, side - 1))
        elif kind < 0.8 or has_list or not side:
            bounds = [None, *range(-6, 7)]
            parts.append(slice(rng.choice(bounds), rng.choice(bounds), rng.choice([None, 1, 2, -1, -2, 3])))
        elif kind < 0.9:
            has_list = True
            parts.append([rng.randint(-side, side - 1) for _ in range(rng.randint(1, 4))])
        else:
            has_list = True
            parts.append(np.array([rng.random() < 0.5 for _ in range(side)]))
    for extra in (None, Ellipsis):
        if rng.random() < 0.3:
            parts.insert(rng.randint(0, len(parts)), extra)
    return tuple(parts)


def window_of(selection: Selection) -> Any:
    """Return the window of a selection of 0, 1, 2, …; -1 marks elements that are not read."""
    window = np.full(selection.window, -1)
    for start, stop in zip(selection.starts.tolist(), selection.stops.tolist(), strict=True):
        window.reshape(-1)[start - selection.origin : stop - selection.origin] = np.arange(start, stop)
    return window


@pytest.mark.parametrize("most_runs", [1, 3, 1 << 20])
def test_an_index_finds_in_what_was_read_what_numpy_finds_in_all(
    most_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_slices, "_MOST_RUNS", most_runs)
    rng = random.Random(most_runs)
    for _ in range(1500):
        shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 4)))
        index = some_index(rng, shape)
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        try:
            whole[index]
        except IndexError:
            with pytest.raises(IndexError):
                select(shape, index)
            continue

        found = select(shape, index)

        assert (found.starts[1:] > found.stops[:-1]).all()
        assert window_of(found)[found.index].tolist() == whole[index].tolist(), (shape, index)


@pytest.mark.parametrize("most_elements", [1, 2, 7])
def test_a_selection_that_is_divided_is_put_together_again(most_elements: int) -> None:
    rng = random.Random(most_elements)
    for _ in range(500):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        index = some_index(rng, shape)
        whole = np.arange(int(np.prod(shape))).reshape(shape)
        try:
            found = select(shape, index)
        except IndexError:
            continue
        together = np.full(tuple(map(len, found.places)), -1)
        if together.size:
            for box, part in divided(shape, found, lambda part: part.n_read <= most_elements):
                assert part.is_one_run or part.n_read <= most_elements
                together[box] = window_of(part)[part.index]

        assert together[found.index_of_places].tolist() == whole[index].tolist(), (shape, index)


def test_a_part_of_a_flat_tensor_of_very_many_elements_is_found_at_once() -> None:
    everything = select((1 << 50,), ...)
    scattered = select((1 << 50,), slice(5, None, 2))

    assert (everything.starts.tolist(), everything.stops.tolist()) == ([0], [1 << 50])
    assert (scattered.starts.tolist(), scattered.stops.tolist()) == ([5], [1 << 50])
    assert not scattered.is_one_run


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        (slice(2, 5), [(8, 20)]),
        (3, [(12, 16)]),
        (slice(None, None, 3), [(0, 4), (12, 16), (24, 28), (36, 40)]),
        ((slice(None), 1), [(n * 4 + 1, n * 4 + 2) for n in range(10)]),
        ((slice(4, 6), slice(1, 3)), [(17, 19), (21, 23)]),
        ([7, 2, 3], [(8, 16), (28, 32)]),
        (np.array([True] + [False] * 9), [(0, 4)]),
        (..., [(0, 40)]),
    ],
    ids=str,
)
def test_slice_reads_no_more_bytes_than_it_chooses(index: Any, runs: list[tuple[int, int]]) -> None:
    found = select((10, 4), index)

    assert list(zip(found.starts.tolist(), found.stops.tolist(), strict=True)) == runs


@pytest.mark.parametrize(
    "index",
    [10, -11, (0, 4), (0, 0, 0), [10], np.ones(9, bool), "name", 1.5, True, (..., ...), ([0], [0]), [[0]], [1.5]],
    ids=str,
)
def test_index_that_does_not_fit_the_shape_is_refused(index: Any) -> None:
    with pytest.raises(IndexError):
        select((10, 4), index)
