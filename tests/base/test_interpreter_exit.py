"""Objects that hold files until the interpreter exits: no `__del__`, which runs when the modules' names are gone."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorcas_flavors
import tensorcas_mlflow
from tensorcas_mlflow.file_formats._source import LocalFile
from tensorcas_mlflow.integration.server_store._backend import Download


@pytest.mark.long
def test_no_class_relies_on_del() -> None:
    files = [
        file
        for package in (tensorcas_mlflow, tensorcas_flavors)
        for file in Path(str(package.__file__)).parent.rglob("*.py")
    ]
    found = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]

    assert len(files) > 100
    assert found == []


@pytest.mark.parametrize("hold", [Download, LocalFile])
def test_a_held_file_is_closed_with_its_last_reference(tmp_path: Path, hold: Callable[[Path], Any]) -> None:
    (tmp_path / "file").write_bytes(b"data")
    held = hold(tmp_path / "file")
    descriptor = held._descriptor
    os.fstat(descriptor)
    del held

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
