"""The rooms of the package: few, without circles, and imported through their front doors.

The linter holds the order of the rooms (``pyproject.toml``). It does not see all of this.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.quick import folders_of, lines_of_rooms

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"tensorcas_mlflow": ROOT, "tensorcas_flavors": ROOT / "flavors"}


def modules() -> dict[str, Path]:
    """Return the file of each module of both packages."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (folder / package).rglob("*.py*"):
            if path.suffix not in (".py", ".pyi"):  # a stub stands for a compiled module
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
ROOMS = {name for name, path in MODULES.items() if path.name == "__init__.py" and name not in FOLDERS}


def imports(name: str) -> Iterator[str]:
    """Yield the modules that a module imports, also in functions and for type checkers alone."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def test_package_has_at_most_a_dozen_rooms_and_the_compiled_core() -> None:
    rooms = {name for name in ROOMS if name.startswith("tensorcas_mlflow.") and name.count(".") == 1}

    assert len(rooms - {"tensorcas_mlflow.native"}) <= 12


SOURCES = (".py", ".pyi", ".c", ".h", ".js", ".html", ".css")
SLACK = 100
"""Lines that a room may stay below its budget before the budget falls."""


def sizes() -> dict[str, dict[str, int]]:
    """Return the lines of each room with its tests left out, and the names that a room exports."""
    found: dict[str, dict[str, int]] = {}
    for package, folder in FOLDERS.items():
        for path in sorted((folder / package).rglob("*")):
            if path.suffix in SOURCES:
                below = path.relative_to(folder / package).parts
                room = f"{package}.{below[0]}" if len(below) > 1 else package
                lines = len(path.read_text(encoding="utf-8").splitlines())
                found.setdefault(room, {"lines": 0})["lines"] += lines
    for room in lazy_rooms():
        found.setdefault(room, {})["names"] = len(" ".join(import_module(room)._NAMES.values()).split())
    backend = import_module("tensorcas_mlflow.backends").Backend
    found["tensorcas_mlflow.backends"]["methods"] = sum(
        not name.startswith("_") and callable(each) for name, each in vars(backend).items()
    )
    return found


def test_no_room_is_larger_than_its_budget_and_no_budget_is_larger_than_its_room_needs() -> None:
    budgets: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tensorcas"]["budget"]
    measured = sizes()

    assert budgets.keys() == measured.keys()
    assert {room: each.keys() for room, each in budgets.items()} == {
        room: each.keys() for room, each in measured.items()
    }
    for room, budget in budgets.items():
        for what, limit in budget.items():
            slack = SLACK if what == "lines" else 0
            assert limit - slack <= measured[room][what] <= limit, f"{what} of {room}; see CONTRIBUTING.md"


@pytest.mark.long
def test_no_import_leads_in_a_circle() -> None:
    # The root of the package imports its public names on first use.
    graph = {name: {other for other in imports(name) if other not in FOLDERS} for name in MODULES}
    graph["tensorcas_mlflow"] = set()

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module_imports_other_rooms_through_their_init(name: str) -> None:
    own = name if name in ROOMS else name.rpartition(".")[0]
    private = {
        other
        for other in imports(name)
        if other.rpartition(".")[2].startswith("_") and not f"{own}.".startswith(other.rpartition(".")[0] + ".")
    }

    assert private == set()


def lazy_rooms() -> list[str]:
    """Return the rooms that import their names on first use."""
    return sorted(name for name in ROOMS if hasattr(import_module(name), "_NAMES"))


@pytest.mark.parametrize("name", lazy_rooms())
def test_room_exports_every_name_that_type_checkers_see(name: str) -> None:
    room = import_module(name)
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    declared = {
        (node.module.removeprefix(f"{name}."), alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }

    assert declared == {(module, each) for module, names in room._NAMES.items() for each in names.split()}
    assert all(getattr(room, each) is not None for _, each in declared)
    assert {each for _, each in declared} <= set(dir(room))
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {name} import no_such_name", {})


def test_quick_tests_of_a_room_are_its_own_and_those_of_the_line_above() -> None:
    rooms = [room for line in lines_of_rooms() for room in line]

    assert folders_of("layout") == ["tests/layout", "tests/chunk_io", "tests/file_formats"]
    assert all((ROOT / folder).is_dir() for room in [*rooms, "flavors"] for folder in folders_of(room))
    with pytest.raises(ValueError, match="no room with tests is named 'stores'"):
        folders_of("stores")
