"""Whatever the bytes of a store are, who reads them gets what was written or one of our errors, for a little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import parsers

ROOT = Path(__file__).parents[2]
N_DAMAGES = 150
NAMES = sorted(parsers.parsers(Path()))


def attacked(first: int, last: int, names: list[str]) -> dict[str, Any]:
    """Damage blobs in another process, and say by parser what came of it."""
    found: dict[str, Any] = {}
    # A parser that ends the process has said nothing; the others are tried again.
    while left := [name for name in names if name not in found]:
        done = subprocess.run(
            [sys.executable, parsers.__file__, str(first), str(last), *left],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "flavors")])},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        told = [json.loads(line) for line in done.stdout.splitlines()]
        found |= {each["name"]: each for each in told if "name" in each}
        if len(told) % 2:
            found[told[-1]["begun"]] = {"died": f"{done.returncode}: {done.stderr[-2000:]}"}
        elif not told:
            found |= {name: {"died": done.stderr[-2000:]} for name in left}
    return found


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return attacked(0, N_DAMAGES, NAMES)


def check(answer: dict[str, Any]) -> None:
    assert "died" not in answer, answer
    assert answer["alien"] == []
    assert answer["greedy"] == []
    assert answer["slow"] == []


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes_are_read_or_refused_with_our_own_errors(name: str, told: dict[str, Any]) -> None:
    check(told[name])


@pytest.mark.parametrize("name", NAMES)
def test_parsers_read_the_undamaged_samples(name: str, told: dict[str, Any]) -> None:
    assert told[name]["sound"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_parsers_read_or_refuse_heavily_damaged_bytes(name: str) -> None:
    check(attacked(N_DAMAGES, 10_000, [name])[name])
