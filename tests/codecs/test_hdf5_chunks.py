"""The function ``hdf5_chunks`` against the chunks that h5py stores, and with parameters of an enemy."""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tensorcas_mlflow.codecs import Kind, check, evaluate, fletcher32
from tensorcas_mlflow.errors import FormatError

DRAW = np.random.default_rng(0)
SOUND: dict[str, Any] = {
    "shape": [30, 21],
    "sides": [8, 10],
    "itemsize": 4,
    "shuffle": 1,
    "level": None,
    "fletcher32": False,
    "runs": [[0, 0, 5], [3, 5, 7]],
}
"""12 chunks of 320 bytes, and 3 other bytes."""


def stored_chunks(array: Any, sides: tuple[int, ...], **filters: Any) -> list[bytes]:
    """Return the chunks of a file that h5py writes, in C order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("w", data=array, chunks=sides, **filters)
        data = path.read_bytes()
        with h5py.File(path) as file:
            one = file["w"].id
            places = [one.get_chunk_info(number) for number in range(one.get_num_chunks())]
    places.sort(key=lambda place: place.chunk_offset)
    return [data[place.byte_offset : place.byte_offset + place.size] for place in places]


def refused(n_bytes: int = 12 * 320 + 3, n_input_bytes: int = 30 * 21 * 4 + 3, **changes: Any) -> bool:
    """Tell whether the function's parameters are refused with some of them changed."""
    try:
        check("hdf5_chunks", {**SOUND, **changes}, [Kind(None, (n_input_bytes,))], Kind(None, (n_bytes,)))
    except FormatError:
        return True
    return False


@pytest.mark.parametrize(
    ("shape", "sides", "dtype"),
    [
        ((300, 211), (64, 50), "float32"),
        ((20, 10, 33), (7, 10, 33), "float16"),
        ((9, 10, 11), (4, 3, 5), "float64"),
        ((1000,), (300,), "uint8"),
    ],
)
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"shuffle": True},
        {"fletcher32": True},
        {"compression": "gzip", "compression_opts": 1},
        {"compression": "gzip", "compression_opts": 4, "fletcher32": True},
        {"compression": "gzip", "compression_opts": 6, "shuffle": True},
        {"compression": "gzip", "compression_opts": 9, "shuffle": True, "fletcher32": True},
    ],
)
def test_chunks_are_the_bytes_that_h5py_stores(
    shape: tuple[int, ...], sides: tuple[int, ...], dtype: str, filters: dict[str, Any]
) -> None:
    array = (DRAW.standard_normal(shape) * 50).astype(dtype)
    chunks = stored_chunks(array, sides, **filters)
    first, n = len(chunks) // 2, len(chunks)
    wanted = b"".join([*chunks[first:], b"other", *chunks[:first]])
    params = {
        "shape": list(shape),
        "sides": list(sides),
        "itemsize": array.itemsize,
        "shuffle": array.itemsize if filters.get("shuffle") else 1,
        "level": filters.get("compression_opts"),
        "fletcher32": filters.get("fletcher32", False),
        "runs": [[0, first, n - first], [5, 0, first]],
    }
    inputs, output = [array, np.frombuffer(b"other", np.uint8)], Kind(None, (len(wanted),))
    check("hdf5_chunks", params, [Kind(dtype, shape), Kind(None, (5,))], output)

    assert evaluate("hdf5_chunks", params, inputs, output).tobytes() == wanted


def test_inputs_may_end_anywhere() -> None:
    raw = DRAW.integers(0, 256, 30 * 21 * 4 + 3).astype(np.uint8)
    output = Kind(None, (12 * 320 + 3,))
    whole = evaluate("hdf5_chunks", SOUND, [raw], output)

    assert evaluate("hdf5_chunks", SOUND, [raw[:7], raw[7:2000], raw[2000:]], output).tobytes() == whole.tobytes()


def test_a_result_that_is_too_long_or_too_short_is_evaluated_within_its_room() -> None:
    raw, params = np.zeros(30 * 21 * 4 + 3, np.uint8), {**SOUND, "level": 6}

    assert evaluate("hdf5_chunks", params, [raw], Kind(None, (40,))).shape == (40,)
    assert not evaluate("hdf5_chunks", params, [raw], Kind(None, (9000,)))[-5000:].any()


@pytest.mark.parametrize("n_words", [0, 1, 2, 359, 360, 361, 65_535, 100_000])
@pytest.mark.parametrize("value", [0, 1, 0xFF])
def test_fletcher32_is_the_sum_of_its_definition(n_words: int, value: int) -> None:
    data = bytes([value]) * (2 * n_words + (n_words % 2))
    first = second = 0
    for at in range(0, len(data), 2):
        first = first + int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        first = first - 0xFFFF if first > 0xFFFF else first
        second = second + first
        second = second - 0xFFFF if second > 0xFFFF else second

    assert fletcher32(data) == second << 16 | first


@pytest.mark.long
def test_parameters_that_pass_the_check_cost_no_more_than_the_result_may() -> None:
    """DEFLATE expands no byte to more than 1,032, so chunks of any claimed size have a result of some size."""
    draw = random.Random(0)
    n_taken = 0
    for _ in range(20_000):
        params, n_bytes = changed(draw)
        n_inputs = draw.choice([30 * 21 * 4 + 3, 7, 0, 4096])
        output = Kind(None, (n_bytes,))
        try:
            check("hdf5_chunks", params, [Kind(None, (n_inputs,))], output)
        except FormatError:
            continue
        n_taken += 1
        n_padded_bytes = 4 * math.prod(params["sides"]) * sum(run[2] for run in params["runs"])
        assert n_padded_bytes <= (1032 if params["level"] else 1) * n_bytes
        assert evaluate("hdf5_chunks", params, [np.zeros(n_inputs, np.uint8)], output).shape == (n_bytes,)

    assert n_taken > 100


def changed(draw: random.Random) -> tuple[dict[str, Any], int]:
    """Draw parameters near the sound ones, and the size of a result."""
    params = {**SOUND, "level": draw.choice([None, 1, 6, 9]), "fletcher32": draw.random() < 0.5}
    if draw.random() < 0.3:
        params["shape"] = [draw.choice([1, 30, 1 << 10]), draw.choice([1, 21])]
    if draw.random() < 0.3:
        params["sides"] = [draw.choice([1, 8, 30, 1 << 12]), draw.choice([1, 10, 21, 1 << 12])]
    grid = math.prod(-(-whole // side) for whole, side in zip(params["shape"], params["sides"], strict=True))
    params["runs"] = draw.choice(
        [[[3, 0, grid]], [[0, 0, grid], [3, 0, 0]], [[0, 0, 5], [3, 5, grid - 5]], SOUND["runs"]]
    )
    params["shuffle"] = draw.choice([1, 1, 2, 4, 8, 3])
    return params, draw.choice([3, 4, 17, 200, 3843, 3891, 1 << 16])


def test_sound_parameters_are_taken() -> None:
    assert not refused()
    assert not refused(level=6, n_bytes=17)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [30]},
        {"shape": []},
        {"shape": [], "sides": []},
        {"shape": [30, 0]},
        {"shape": [30, -21]},
        {"shape": [30, 21.0]},
        {"shape": [30, True]},
        {"shape": "30"},
        {"shape": [1 << 40, 21]},
        {"shape": [1] * 65, "sides": [1] * 65},
        {"sides": [8, 1 << 31]},
        {"sides": [1, 1], "shape": [1 << 20, 2]},
        {"sides": [0, 10]},
        {"sides": None},
        {"itemsize": 0},
        {"itemsize": 1 << 31},
        {"itemsize": "4"},
        {"shuffle": 0},
        {"shuffle": 3},
        {"shuffle": True},
        {"level": 0},
        {"level": 10},
        {"level": False},
        {"level": "6"},
        {"fletcher32": 1},
        {"fletcher32": None},
        {"fletcher32": True},
        {"runs": []},
        {"runs": [[0, 0, 12]]},
        {"runs": [[3, 0, 11]]},
        {"runs": [[3, 0, 13]]},
        {"runs": [[3, 0, 6], [0, 5, 7]]},
        {"runs": [[3, 0, 12], [0, 12, 0]]},
        {"runs": [[3, 0, 12, 0]]},
        {"runs": [[3, 0, -12]]},
        {"runs": [3, 0, 12]},
        {"runs": [[1 << 40, 0, 12]]},
        {"runs": None},
        {"n_bytes": 12 * 320},
        {"level": 6, "n_bytes": 5},
        {"level": 6, "n_bytes": 3},
        {"level": 6, "shape": [1, 1], "sides": [1 << 14, 1 << 13], "runs": [[3, 0, 1]], "n_input_bytes": 7},
        {"n_input_bytes": 30 * 21 * 4},
        {"more": 1},
    ],
)
def test_parameters_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    assert refused(**changes)
