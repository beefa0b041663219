"""Parameters of a test over several axes: every pair of values on every change, every combination in the long tests."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, product
from typing import Any

import pytest


def pairs_of(*axes: Collection[Any]) -> list[Any]:
    """Return all combinations of values; those that are not needed for every pair of two axes are marked as long."""
    # Combinations along the diagonals first: they cover most pairs with the fewest.
    places = sorted(product(*(range(len(axis)) for axis in axes)), key=lambda at: sum(at) % len(axes[-1]))
    values, seen, found = [list(axis) for axis in axes], set(), []
    for at in places:
        pairs = set(combinations(enumerate(at), 2))
        marks = [pytest.mark.long] if pairs <= seen else []
        seen |= pairs
        found.append(pytest.param(*(axis[n] for axis, n in zip(values, at, strict=True)), marks=marks))
    return found
