"""Tests of the core's loops over words: numpy returns the same, and no argument makes them touch other memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.codecs._delta import _UNIT_WORDS
from tensorcas_mlflow.codecs._words import WORDS
from tensorcas_mlflow.native import core
from tests.reference.words import Groups, join, room_for_planes, split

rng = np.random.default_rng(0)
N_WORDS = 9_000


def words_of(width: int) -> tuple[Any, Any]:
    """Make words, and a base from which they differ a little."""
    base = rng.integers(0, 1 << 8 * width, N_WORDS, dtype=np.uint64, endpoint=False) if width < 8 else None
    base = rng.integers(0, 1 << 63, N_WORDS, dtype=np.uint64) if base is None else base
    base = base.astype(WORDS[width])
    return base + rng.integers(-9, 9, N_WORDS).astype(WORDS[width]), base


GROUPINGS = [
    (width, unit, thresholds)
    for width, unit in itertools.product(WORDS, WORDS)
    for thresholds in ([], [7], [3, 200], [0, 1, 254, 255], [10 * at for at in range(1, 15)])
    if (len(thresholds) + 1) ** unit <= 256 and width * unit <= 8
]


@pytest.mark.parametrize(("width", "unit", "thresholds"), GROUPINGS)
def test_the_core_and_numpy_group_words_alike_and_restore_them(width: int, unit: int, thresholds: list[int]) -> None:
    words, base = words_of(width)
    groups = Groups(base, thresholds, unit)
    expected = np.concatenate([plane.copy() for plane in split(words, base, groups)])

    classes, planes, back = np.empty(N_WORDS // unit, np.uint8), np.empty_like(expected), np.empty_like(words)
    lengths = core.number_units(base, width, bytes(thresholds), unit, classes)
    core.split(words, planes, width, base, classes, groups.n_groups, unit)
    core.join(back, planes, width, base, classes, groups.n_groups, unit)

    assert (lengths, classes.tolist()) == (groups.lengths, groups.classes.tolist())
    assert planes.tobytes() == expected.tobytes()
    assert back.tolist() == words.tolist()
    room = room_for_planes(N_WORDS, width)
    room[:] = planes
    back[:] = 0
    join(room, back, base, groups)
    assert back.tolist() == words.tolist()


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
    getattr(core, function)(*arguments.values())


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
        core.number_units(np.zeros(64, "u2"), width, thresholds, unit, np.zeros(n_classes, "u1"))


def test_a_loop_refuses_to_write_to_a_read_only_buffer() -> None:
    with pytest.raises((TypeError, BufferError)):
        core.join(bytes(128), np.zeros(128, "u1"), 2, None, None, 1, 1)


def test_no_unit_of_a_delta_is_longer_than_eight_bytes() -> None:
    assert all(width * unit <= 8 for width, unit in _UNIT_WORDS.items())
