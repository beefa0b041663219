"""Names that the room exports."""

from __future__ import annotations

import ast
from pathlib import Path

from tensorcas_mlflow import maintenance


def declared() -> set[str]:
    """Names that type checkers see."""
    tree = ast.parse(Path(maintenance.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_every_name_that_type_checkers_see_can_be_imported() -> None:
    assert declared() == set(maintenance._MODULES)
    assert all(getattr(maintenance, name) is not None for name in declared())
    assert declared() <= set(dir(maintenance))
