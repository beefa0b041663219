"""Sketches of tensors, and their comparison."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcas_mlflow.base.sketch import (
    HEAD_ELEMENTS,
    N_WORDS,
    SURE_BITS,
    chance_of,
    compare,
    is_sketched,
    positions,
    words_of,
)


def sketch(array: np.ndarray) -> Any:
    return words_of(array.reshape(-1)[positions(array.size)])


def normal(seed: int, n: int = 60_000, scale: float = 0.02) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, n).astype(np.float32)


def is_related(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(compare(sketch(one), sketch(other)[:, None]).evidence[0] >= SURE_BITS)


@pytest.mark.parametrize("n", [1, 31, 8192, HEAD_ELEMENTS, 10**12])
def test_sampled_positions_are_among_the_first_elements(n: int) -> None:
    at = positions(n)

    assert at.shape == (N_WORDS,)
    assert at.min() >= 0
    assert at.max() < min(n, HEAD_ELEMENTS)


def test_sampled_positions_do_not_fall_into_few_columns_of_a_matrix() -> None:
    at = positions(4096 * 4096)

    assert len({*(at % 512).tolist()}) > 24


@pytest.mark.parametrize("dtype", ["float64", "float16", ">f4", ml_dtypes.bfloat16])
def test_cast_tensor_is_related_to_the_original(dtype: str) -> None:
    assert is_related(normal(0), normal(0).astype(dtype))


def test_reshaped_tensor_has_the_same_sketch() -> None:
    assert sketch(normal(0)).tobytes() == sketch(normal(0).reshape(-1, 100)).tobytes()


def test_tensor_with_zeros_in_half_of_its_places_is_related_to_the_original() -> None:
    pruned = normal(0) * (np.abs(normal(0)) > np.median(np.abs(normal(0))))  # some zeros are negative

    assert is_related(pruned, normal(0))
    assert is_related(normal(0), pruned)


@pytest.mark.long
def test_independent_tensors_of_equal_distribution_are_never_related() -> None:
    others = np.stack([sketch(normal(seed, 8192)) for seed in range(1, 20_001)], axis=1)

    assert compare(sketch(normal(0, 8192)), others).evidence.max() < SURE_BITS


@pytest.mark.parametrize(
    "constant",
    [
        np.zeros(10_000, np.float32),
        np.ones(10_000, np.float32),
        1 + 1e-3 * normal(0, 10_000),
        np.arange(10_000),
        np.arange(10_000) % 2,
        np.random.default_rng(0).integers(0, 16, 10_000, dtype=np.uint8),
    ],
    ids=["zeros", "ones", "nearly ones", "positions", "flags", "four bits"],
)
def test_tensor_of_few_different_words_is_related_to_none(constant: np.ndarray) -> None:
    assert chance_of(sketch(constant)) > 0.2
    assert not is_related(constant, constant)


@pytest.mark.long
def test_quantized_weights_are_related_to_their_fine_tune_and_not_to_others() -> None:
    def quantized(array: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(array / 0.02 * 40), -127, 127).astype(np.int8)

    assert is_related(quantized(normal(0)), quantized(normal(0) + normal(1, scale=1e-4)))
    assert not any(is_related(quantized(normal(0)), quantized(normal(seed))) for seed in range(1, 200))


def test_numbers_beyond_single_precision_and_negative_integers_have_words() -> None:
    assert words_of(np.array([1e300, -1.0])).tolist() == [0x7F80, 0xBF80]
    assert words_of(np.array([-1, 1], np.int8)).tolist() == [0xFFFF, 1]
    assert words_of(np.array([2**64 - 1], np.uint64)).tolist() == [0xFFFF]


def test_only_real_numbers_have_sketches() -> None:
    assert all(is_sketched(name) for name in ("float32", ">float64", "bfloat16", "float8_e4m3fn", "int8"))
    assert not any(is_sketched(name) for name in (None, "bool", "complex64", "S4", "int4", "datetime64[s]", "nonsense"))
