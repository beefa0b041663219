"""Print the folders of tests that `make quick ROOM=…` runs: the room's own, and those of the line above it."""

from __future__ import annotations

import sys
import tomllib
from itertools import takewhile
from pathlib import Path

TESTS = Path(__file__).parent


def lines_of_rooms() -> list[list[str]]:
    """Return the lines of the contract on layers, from the top down: the rooms of each that have tests of their own."""
    contracts = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["name"] == "Imports point down")
    lines = [[room for room in line.split(" | ") if (TESTS / room).is_dir()] for line in layers]
    return [line for line in lines if line]


def folders_of(room: str) -> list[str]:
    """Return the folder of a room, and the folders of the rooms on the line above it, which import it first.

    Raises:
        ValueError: No room with tests has that name.
    """
    if room == "flavors":
        return ["tests/flavors"]
    lines = lines_of_rooms()
    if not any(room in line for line in lines):
        rooms = ", ".join(sorted(["flavors", *(each for line in lines for each in line)]))
        raise ValueError(f"no room with tests is named {room!r}; those are {rooms}")
    above = list(takewhile(lambda line: room not in line, lines))[-1:]
    return [f"tests/{each}" for each in (room, *(each for line in above for each in line))]


if __name__ == "__main__":
    try:
        print(*folders_of(" ".join(sys.argv[1:])))
    except ValueError as error:
        sys.exit(f"{error}; try: make quick ROOM=store")
