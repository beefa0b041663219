"""Data of the benchmark: trained, kept, and made larger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.data import HISTORIES, Case, bytes_of, histories, tiny_tensors, transformer
from benchmarks.data._histories import RECIPE, SMOKE, _keep
from benchmarks.data._nets import Transformer
from benchmarks.data._training import State


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that keeps the weights of a small transformer as they are initialised: training takes seconds."""
    data = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    weights = Transformer(SMOKE.width, SMOKE.n_layers, 128).state_dict()
    _keep(
        data / f"{SMOKE.name}-{RECIPE}" / "pretraining",
        lambda: iter([{f"w/{name}": tensor.numpy() for name, tensor in weights.items()}]),
    )
    return data


def test_the_last_tensors_change_until_enough_bytes_have() -> None:
    case = Case("four", {name: np.ones(100, np.float32) for name in "abcd"})

    after = case.changed(30, seed=0)

    assert [name for name in case.arrays if after.arrays[name] is not case.arrays[name]] == ["c", "d"]
    assert not np.array_equal(after.arrays["d"], case.arrays["d"])


def test_another_seed_changes_to_other_bytes() -> None:
    case = Case("one", {"a": np.ones(100, np.float32)})

    assert not np.array_equal(case.changed(100, 1).arrays["a"], case.changed(100, 2).arrays["a"])


def test_a_transformer_is_about_as_large_as_asked_for(data: Path) -> None:
    case = transformer(2_000_000, data, is_smoke=True)

    assert 2_000_000 <= case.n_bytes < 2_400_000
    assert {array.dtype.name for array in case.arrays.values()} == {"bfloat16"}


def test_no_bytes_of_a_large_model_repeat(data: Path) -> None:
    case = transformer(2_000_000, data, is_smoke=True)
    words = np.concatenate([bytes_of(array) for array in case.arrays.values()])
    words = words[: len(words) // 16 * 16].view(np.dtype((np.void, 16)))

    assert len(np.unique(words)) > 0.99 * len(words)


def test_tiny_tensors_have_names_and_memory_of_their_own(data: Path) -> None:
    case = tiny_tensors(100, 64, data, is_smoke=True)

    assert len(case.arrays) == 100
    assert all(array.base is None and array.nbytes == 64 for array in case.arrays.values())


@pytest.mark.long
def test_all_histories_are_there_and_none_is_empty(tmp_path: Path) -> None:
    found = histories(tmp_path, is_smoke=True)

    assert [history.name for history in found] == list(HISTORIES)
    assert all(case.n_bytes > 0 for history in found for _, _, case in history.cases())


@pytest.mark.long
def test_a_frozen_backbone_changes_in_its_batch_statistics_and_head_alone(tmp_path: Path) -> None:
    history = next(history for history in histories(tmp_path, is_smoke=True) if history.name == "frozen backbone")
    first, second = (case.arrays for _, _, case in list(history.cases())[:2])

    changed = {name for name in first if not np.array_equal(first[name], second[name])}

    assert changed
    assert all("head" in name or "running" in name or "num_batches" in name for name in changed)


def test_a_training_that_broke_off_is_trained_anew(tmp_path: Path) -> None:
    def breaks() -> Iterator[State]:
        yield {"w/a": np.zeros(3, np.float32)}
        raise KeyboardInterrupt

    def goes_on() -> Iterator[State]:
        yield {"w/a": np.ones(3, np.float32)}

    with pytest.raises(KeyboardInterrupt):
        _keep(tmp_path / "kept", breaks)
    broken = (tmp_path / "kept").exists()
    _keep(tmp_path / "kept", goes_on)

    assert not broken
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["000.safetensors"]


def test_stored_history_is_not_trained_again(tmp_path: Path) -> None:
    def never() -> Iterator[State]:
        raise AssertionError("trained again")
        yield {}

    (tmp_path / "kept").mkdir()
    _keep(tmp_path / "kept", never)

    assert list((tmp_path / "kept").iterdir()) == []
