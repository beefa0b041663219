"""Two versions of a tensor are compared as exact arithmetic would compare them, whatever their bits."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.reader import ValueChange
from tensorcas_mlflow.reader._diff import ValueDifference

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4", ">u8", "int4", "uint2"]
FLOATS = ["float16", "float32", "float64", ">f4", ">f8", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
COMPLEX = ["complex64", "complex128", ">c8"]


def dtype_called(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def compared(a: Array, b: Array, n_pieces: int = 1) -> ValueChange:
    difference = ValueDifference(a.dtype)
    size = a.dtype.itemsize
    ends = [len(a) * part // n_pieces * size for part in range(n_pieces + 1)]
    data = [memoryview(x.tobytes()) for x in (a, b)]
    for start, stop in pairwise(ends):
        difference.add(data[0][start:stop], data[1][start:stop])
    return difference.result()


def exactly(value: Any) -> tuple[Fraction, Fraction] | None:
    """A number as it is, or None if it is infinite or no number."""
    if isinstance(value, np.integer | np.bool_ | int):
        return Fraction(int(value)), Fraction(0)
    parts = (float(value.real), float(value.imag)) if isinstance(value, np.complexfloating) else (float(value), 0.0)
    return (Fraction(parts[0]), Fraction(parts[1])) if all(map(math.isfinite, parts)) else None


def root(value: Fraction) -> Fraction:
    return Fraction(math.isqrt(math.floor(value * 4**1300)), 2**1300)


def reference(a: Array, b: Array) -> tuple[int, int, Fraction, Fraction, Fraction, Fraction]:
    """Equal elements, ones that are not finite, largest and mean change, squares of the change and before."""
    n_equal = sum(a[i : i + 1].tobytes() == b[i : i + 1].tobytes() for i in range(len(a)))
    pairs = [(exactly(x), exactly(y)) for x, y in zip(a, b, strict=True)]
    numbers = [(x, y) for x, y in pairs if x is not None and y is not None]
    squares = [(y[0] - x[0]) ** 2 + (y[1] - x[1]) ** 2 for x, y in numbers]
    changes = [root(square) for square in squares]
    before = sum((x[0] ** 2 + x[1] ** 2 for x, _ in numbers), Fraction(0))
    mean = sum(changes, Fraction(0)) / max(len(numbers), 1)
    largest = max(changes, default=Fraction(0))
    return n_equal, len(pairs) - len(numbers), largest, mean, sum(squares, Fraction(0)), before


def close(found: float | None, expected: Fraction) -> bool:
    assert found is not None
    try:
        exact = float(expected)
    except OverflowError:
        exact = math.inf
    return math.isclose(found, exact, rel_tol=1e-11, abs_tol=1e-320)


@st.composite
def versions(draw: st.DrawFn) -> tuple[Array, Array]:
    """Two versions of any bits; where they are floats, many of the same size, and some that are not finite."""
    dtype = dtype_called(draw(st.sampled_from(INTEGERS + FLOATS + COMPLEX)))
    n = draw(st.integers(0, 12))
    size = n * dtype.itemsize
    a = bytearray(draw(st.binary(min_size=size, max_size=size)))
    b = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if draw(st.booleans()):
        same = draw(st.integers(0, n)) * dtype.itemsize
        b[:same] = a[:same]
    return np.frombuffer(a, dtype), np.frombuffer(b, dtype)


@given(versions(), st.integers(1, 4))
def test_every_figure_is_that_of_exact_arithmetic(pair: tuple[Array, Array], n_pieces: int) -> None:
    a, b = pair
    n_equal, n_not_finite, largest, mean, squares, before = reference(a, b)

    found = compared(a, b, n_pieces)

    assert (found.n_elements, found.n_equal, found.n_not_finite) == (len(a), n_equal, n_not_finite)
    assert close(found.max_absolute, largest)
    assert close(found.mean_absolute, mean)
    if not before:
        assert found.relative_norm == (math.inf if squares else 0)
    elif not squares or squares > Fraction(2) ** -1900:  # below, abs() of complex numbers has few digits
        assert close(found.relative_norm, root(squares / before))


def test_pieces_and_blocks_make_no_difference() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=200_001).astype(np.float32)
    b = a + rng.normal(size=a.size).astype(np.float32) * np.float32(0.01)
    wide = a.astype(np.longdouble)
    change = b.astype(np.longdouble) - wide

    found = compared(a, b, 7)

    assert found.n_elements == a.size
    assert found.max_absolute == float(np.abs(change).max())
    assert found.mean_absolute == pytest.approx(float(np.abs(change).mean()), rel=1e-14)
    assert found.relative_norm == pytest.approx(float(np.sqrt((change**2).sum() / (wide**2).sum())), rel=1e-14)


def test_sums_of_a_value_diff_do_not_drift() -> None:
    a = np.zeros(1 << 21)

    assert compared(a, a + 0.1).mean_absolute == pytest.approx(0.1, rel=1e-15)


def test_large_integers_are_subtracted_exactly() -> None:
    a = np.array([2**63 - 1, -(2**63), 2**53 + 1], np.int64)
    b = np.array([-(2**63), 2**63 - 1, 2**53], np.int64)

    assert compared(a, b).max_absolute == 2.0**64
    assert compared(a[2:], b[2:]).max_absolute == 1
    assert compared(np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64)).max_absolute == 1


def test_changes_at_the_edge_of_float64_are_no_overflow() -> None:
    huge = np.full(1000, 1.5e308)

    found = compared(huge, -huge)

    assert found.max_absolute == math.inf
    assert found.relative_norm == 2
    assert compared(huge, huge * 0.5).mean_absolute == pytest.approx(0.75e308)
    assert compared(huge * 1e-320, huge * 1.5e-320).relative_norm == pytest.approx(0.5, rel=1e-3)


def test_value_diff_counts_and_leaves_out_infinities_and_nans() -> None:
    a = np.array([1, np.nan, np.inf, np.inf, 3, 0.0], np.float32)
    b = np.array([2, np.nan, np.inf, -np.inf, np.nan, -0.0], np.float32)

    found = compared(a, b)

    assert found == ValueChange(
        n_elements=6, n_equal=2, n_not_finite=4, max_absolute=1, mean_absolute=0.5, relative_norm=1
    )
    assert found.share_equal == 1 / 3


def test_a_nan_of_other_bits_is_not_equal() -> None:
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001], np.uint32).view(np.float32)

    assert compared(quiet, quiet).n_equal == 1
    assert compared(quiet, other).n_equal == 0


def test_booleans_change_by_one() -> None:
    found = compared(np.array([True, False, True, True]), np.array([True, True, False, True]))

    assert (found.max_absolute, found.mean_absolute, found.share_equal) == (1, 0.5, 0.5)


def test_any_byte_but_zero_is_true() -> None:
    found = compared(np.array([1, 7, 0], np.uint8).view(np.bool_), np.array([2, 0, 0], np.uint8).view(np.bool_))

    assert (found.n_equal, found.max_absolute, found.mean_absolute) == (1, 1, pytest.approx(1 / 3))


@pytest.mark.parametrize("name", ["S5", "U3", ">U2", "datetime64[s]", "timedelta64[ns]", "{a:int8,b:float32}", "S16"])
def test_elements_that_are_no_numbers_are_equal_or_not(name: str) -> None:
    dtype = parse_dtype(name)
    a = np.zeros(5 * dtype.itemsize, np.uint8)
    b = a.copy()
    b[-1] = 1

    found = compared(a.view(dtype), b.view(dtype))

    assert found == ValueChange(
        n_elements=5, n_equal=4, n_not_finite=None, max_absolute=None, mean_absolute=None, relative_norm=None
    )


def test_empty_tensors_are_equal() -> None:
    found = compared(np.zeros(0, np.float32), np.zeros(0, np.float32))

    assert found.share_equal == 1
    assert (found.max_absolute, found.mean_absolute, found.relative_norm) == (0, 0, 0)


def test_records_of_a_megabyte_are_compared_one_by_one() -> None:
    dtype = np.dtype(f"S{1 << 20}")
    a = np.zeros(3, dtype)
    b = a.copy()
    b[1] = b"x"

    assert compared(a, b).n_equal == 2


def test_value_diff_takes_unaligned_bytes() -> None:
    a, b = np.arange(5, dtype=np.float64), np.arange(5, dtype=np.float64) * 2
    difference = ValueDifference(a.dtype)

    difference.add(memoryview(b"x" + a.tobytes())[1:], memoryview(b"xyz" + b.tobytes())[3:])

    assert difference.result() == compared(a, b)


@pytest.mark.parametrize(("n_a", "n_b"), [(8, 4), (6, 6)])
def test_pieces_that_are_not_the_same_elements_are_refused(n_a: int, n_b: int) -> None:
    with pytest.raises(ValueError, match="not the same elements of 4 bytes"):
        ValueDifference(np.dtype(np.float32)).add(memoryview(bytes(n_a)), memoryview(bytes(n_b)))


def test_a_large_tensor_takes_little_memory() -> None:
    import tracemalloc

    a = memoryview(bytes(16 << 20))
    tracemalloc.start()
    difference = ValueDifference(np.dtype(np.float32))
    difference.add(a, a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 3 << 20
