"""Names as patterns and the numbers in them."""

from __future__ import annotations

import random

import pytest

from tensorcas_mlflow.base.texts import Texts
from tensorcas_mlflow.reader._outline import NUMBER, Patterns


def as_expected(name: str) -> tuple[str, list[int]]:
    parts = name.split(".")
    numbers = [part for part in parts if part.isascii() and part.isdigit() and len(part) <= 18]
    return ".".join(NUMBER if part in numbers else part for part in parts), list(map(int, numbers))


@pytest.mark.parametrize("seed", range(20))
def test_each_name_is_its_pattern_with_its_numbers(seed: int) -> None:
    rng = random.Random(seed)
    names = [
        ".".join(rng.choice(["0", "12", "007", "w", "w1", "1w", "", "é", "9" * 18, "9" * 19]) for _ in range(size))
        for size in (rng.randrange(1, 5) for _ in range(rng.randrange(40)))
    ]

    found = Patterns.of(Texts.of(names))

    for row, name in enumerate(names):
        numbers = found.numbers[found.number_at[row] : found.number_at[row + 1]].tolist()
        assert (found.texts[found.pattern[row]], numbers) == as_expected(name)


def test_names_are_gathered_by_their_pattern() -> None:
    found = Patterns.of(Texts.of(["a.1", "b", "a.2", "b.2", "a.1.w"]))

    assert found.texts == [f"a.{NUMBER}", "b", f"b.{NUMBER}", f"a.{NUMBER}.w"]
    assert [rows.tolist() for rows in found.rows_by_pattern()] == [[0, 2], [1], [3], [4]]


def test_no_names_have_no_patterns() -> None:
    assert Patterns.of(Texts.of([])).rows_by_pattern() == []
