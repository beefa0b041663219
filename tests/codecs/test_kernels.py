"""Tests of the compiled loops: they return what numpy returns, and no argument makes them touch other memory."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.codecs import DELTA, PLANES, Effort, Transform, _codec, _words
from tensorcas_mlflow.codecs._words import UNIT_WORDS, WORDS, Groups, join, room_for_planes, split

rng = np.random.default_rng(0)
N_WORDS = 9_000
KERNELS: Any = _words.KERNELS


@pytest.fixture(scope="module", autouse=True)
def loops() -> Iterator[None]:
    """Run each test once, and not for each kind of loop: these tests compare both, below the Python encoder."""
    if KERNELS is None:
        pytest.skip("the package was built without a compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_codec, "_ENCODER", None)
        yield


def words_of(width: int) -> tuple[Any, Any]:
    """Make words, and a base from which they differ a little."""
    base = rng.integers(0, 1 << 8 * width, N_WORDS, dtype=np.uint64, endpoint=False) if width < 8 else None
    base = rng.integers(0, 1 << 63, N_WORDS, dtype=np.uint64) if base is None else base
    base = base.astype(WORDS[width])
    return base + rng.integers(-9, 9, N_WORDS).astype(WORDS[width]), base


def test_the_loops_are_built_where_there_is_a_compiler() -> None:
    spec = importlib.util.find_spec("tensorcas_mlflow.native._core")

    assert shutil.which("cc") is None or spec is not None


@pytest.mark.parametrize("width", WORDS)
@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("effort", Effort)
def test_a_delta_has_the_same_bytes_with_compiled_loops_and_with_numpy(
    width: int, transform: Transform, effort: Effort, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, base = (each.tobytes() + b"end" for each in words_of(width))
    compiled = DELTA.encode_as(words, width, base, transform, effort)
    monkeypatch.setattr(_words, "KERNELS", None)

    assert DELTA.encode_as(words, width, base, transform, effort) == compiled


@pytest.mark.parametrize("width", WORDS)
def test_planes_have_the_same_bytes_with_compiled_loops_and_with_numpy(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = words_of(width)[0].tobytes() + b"x"
    compiled = PLANES.encode(raw, width)
    monkeypatch.setattr(_words, "KERNELS", None)

    assert PLANES.encode(raw, width) == compiled


GROUPINGS = [
    (width, unit, thresholds)
    for width, unit in itertools.product(WORDS, WORDS)
    for thresholds in ([], [7], [3, 200], [0, 1, 254, 255], [10 * at for at in range(1, 15)])
    if (len(thresholds) + 1) ** unit <= 256 and width * unit <= 8
]


@pytest.mark.parametrize(("width", "unit", "thresholds"), GROUPINGS)
def test_compiled_loops_and_numpy_group_words_alike_and_restore_them(
    width: int, unit: int, thresholds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, base = words_of(width)
    found = []
    for kernels in (KERNELS, None):
        monkeypatch.setattr(_words, "KERNELS", kernels)
        groups = Groups(base, thresholds, unit)
        planes = [plane.copy() for plane in split(words, base, groups)]
        room = room_for_planes(N_WORDS, width)
        room[:] = np.concatenate(planes)
        back = np.empty_like(words)
        join(room, back, base, groups)
        found.append((groups.lengths, groups.classes.tolist(), np.concatenate(planes).tobytes()))

        assert back.tolist() == words.tolist()
    assert found[0] == found[1]


def call(function: str, **changed: Any) -> None:
    """Call a loop with arguments that fit, except those given."""
    width, unit = changed.pop("width", 2), changed.pop("unit", 4)
    arguments: dict[str, Any] = {
        "words": np.zeros(64, "u2"),
        "planes": np.zeros(128, "u1"),
        "width": width,
        "base": np.zeros(64, "u2"),
        "classes": np.zeros(16, "u1"),
        "n_groups": 3,
        "unit": unit,
        **changed,
    }
    getattr(KERNELS, function)(*arguments.values())


WRONG: dict[str, dict[str, Any]] = {
    "planes too short": {"planes": np.zeros(127, "u1")},
    "planes too long": {"planes": np.zeros(129, "u1")},
    "half a word": {"words": np.zeros(127, "u1"), "planes": np.zeros(127, "u1")},
    "a short base": {"base": np.zeros(63, "u2")},
    "no base for groups": {"base": None},
    "too few classes": {"classes": np.zeros(15, "u1")},
    "a class of more groups": {"classes": np.full(16, 81, "u1")},
    "no groups": {"n_groups": 0},
    "fewer than no groups": {"n_groups": -1},
    "too many groups": {"n_groups": 5},
    "groups without end": {"n_groups": 1 << 62},
    "a unit of three": {"unit": 3},
    "no unit": {"unit": 0},
    "a unit of less than nothing": {"unit": -4},
    "a unit without end": {"unit": 1 << 62},
    "words of three bytes": {"width": 3},
    "words of nothing": {"width": 0},
    "words of less than nothing": {"width": -2},
}


@pytest.mark.parametrize("function", ["split", "join"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_loop_refuses_arguments_that_do_not_fit_each_other(function: str, wrong: str) -> None:
    call(function)

    with pytest.raises(ValueError, match="do not fit each other"):
        call(function, **WRONG[wrong])


@pytest.mark.parametrize(
    ("width", "thresholds", "unit", "n_classes"),
    [
        (2, b"\1\2", 4, 15),
        (2, b"\1\2", 4, 17),
        (2, b"\1\2\3\4", 4, 16),
        (2, bytes(256), 1, 64),
        (2, b"", 3, 16),
        (3, b"", 4, 16),
        (0, b"", 4, 16),
        (-2, b"", 4, 16),
        (2, b"", 0, 16),
        (2, b"", -4, 16),
        (2, b"", 1 << 62, 16),
    ],
)
def test_number_units_refuses_units_that_do_not_fit_their_words(
    width: int, thresholds: bytes, unit: int, n_classes: int
) -> None:
    with pytest.raises(ValueError, match="do not fit each other"):
        KERNELS.number_units(np.zeros(64, "u2"), width, thresholds, unit, np.zeros(n_classes, "u1"))


def test_a_loop_refuses_to_write_to_a_read_only_buffer() -> None:
    with pytest.raises((TypeError, BufferError)):
        KERNELS.join(bytes(128), np.zeros(128, "u1"), 2, None, None, 1, 1)


def test_no_unit_of_a_delta_is_longer_than_eight_bytes() -> None:
    assert all(width * unit <= 8 for width, unit in UNIT_WORDS.items())
