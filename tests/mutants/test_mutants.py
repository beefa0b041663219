"""Every injected fault matters: with the rule against it taken out of the package, its test fails.

Each ``of_<subject>.py`` beside this file lists some, as ``MUTANTS``.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutant import ROOT, Mutant

SUBJECTS = sorted(path.stem for path in Path(__file__).parent.glob("of_*.py"))
ALL: list[Mutant] = [mutant for subject in SUBJECTS for mutant in importlib.import_module(subject).MUTANTS]


def test_they_differ() -> None:
    assert len({mutant.fault for mutant in ALL}) == len(ALL)
    assert len({(mutant.path, mutant.before, mutant.after) for mutant in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.fault)
def test_a_mutant_is_a_program_and_its_test_is_there(mutant: Mutant) -> None:
    path, _, names = mutant.test.partition("::")
    *classes, name = names.partition("[")[0].split("::")
    tree = ast.parse((ROOT / path).read_text())
    body = tree.body
    for each in classes:
        [found] = [node for node in body if isinstance(node, ast.ClassDef) and node.name == each]
        body = found.body

    assert ast.dump(ast.parse(mutant.source())) != ast.dump(ast.parse((ROOT / mutant.path).read_text()))
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.long
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.fault)
def test_its_test_sees_it(mutant: Mutant, tmp_path: Path) -> None:
    # All of it is a copy, so that processes which tests start run the mutant too.
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "demo")
    shutil.copytree(ROOT, tree, ignore=skip)
    (tree / mutant.path).write_text(mutant.source())
    places = [str(tree), str(tree / "flavors")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-n", "0", "-p", "no:cacheprovider", mutant.test]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    # 1 is "tests were run and some failed"; anything else means that none was run.
    assert done.returncode == 1, f"pytest ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert " failed" in done.stdout, done.stdout[-3000:]
