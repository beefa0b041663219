"""Every injected fault matters: with the rule against it taken out of the package, its test fails."""

from __future__ import annotations

import ast
import dataclasses
import os
import shutil
import subprocess
import sys
from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, all_mutants

ALL = all_mutants()


@cache
def dumped_parts(path: str) -> list[str]:
    """Return the syntax of each statement of a module, without its places."""
    return list(map(ast.dump, ast.parse((ROOT / path).read_text()).body))


def test_no_two_mutants_are_the_same() -> None:
    assert len({mutant.fault for mutant in ALL}) == len(ALL)
    assert len({(mutant.test, mutant.definition, mutant.before, mutant.after) for mutant in ALL}) == len(ALL)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.fault)
def test_mutant_is_another_program_and_its_test_exists(mutant: Mutant) -> None:
    path, text = mutant.apply()

    changed = map(ast.dump, ast.parse(text).body)
    assert any(new != old for new, old in zip_longest(changed, dumped_parts(path)))
    assert mutant.node_id()


def test_mutant_keeps_the_text_around_the_change() -> None:
    mutant = Mutant(fault="", test="", definition="Lock.open_all", before="list(cls._all)", after="()")
    path, text = mutant.apply()

    assert text == (ROOT / path).read_text().replace("list(cls._all)", "(())")


def test_mutant_of_moved_code_names_where_the_code_is_now() -> None:
    [mutant] = [mutant for mutant in ALL if mutant.fault == "a fork while another thread holds a lock"]
    moved = dataclasses.replace(mutant, definition="Lock.open_all")

    with pytest.raises(
        ValueError, match=r"Lock\.open_all is defined in tensorcas_mlflow/.*not there, but in _begin_anew"
    ):
        moved.apply()


@pytest.mark.long
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.fault)
def test_test_sees_its_mutant(mutant: Mutant, tmp_path: Path) -> None:
    # All of it is a copy, so that processes which tests start run the mutant too.
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "demo")
    shutil.copytree(ROOT, tree, ignore=skip)
    path, text = mutant.apply()
    (tree / path).write_text(text)
    places = [str(tree), str(tree / "flavors")]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, mutant.node_id()],
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
