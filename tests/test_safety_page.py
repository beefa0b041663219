"""Every promise of docs/safety.md names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "safety.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| promise |", "|---"))]
SHOWN_BY = re.compile(r"`(tests/[^`:]+\.py)::([^`]+)`")
TESTS = sorted(set(SHOWN_BY.findall(PAGE)))


def names_in(path: Path) -> set[str]:
    """The names of a module's tests, those in classes too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_promise_of_the_safety_page_names_a_test() -> None:
    assert len(ROWS) > 100
    assert [row for row in ROWS if not SHOWN_BY.search(row.rpartition(" | ")[2])] == []


@pytest.mark.parametrize("module", sorted({module for module, _ in TESTS}))
def test_every_test_that_the_safety_page_names_exists(module: str) -> None:
    assert {name for at, name in TESTS if at == module} - names_in(ROOT / module) == set()
