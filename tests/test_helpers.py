"""What tests rely on: forked programs are like fresh ones, and a selection of combinations has every pair."""

from __future__ import annotations

import os
import signal
import subprocess
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.pairs import pairs_of
from tests.zygote import run_program

PROGRAM = """
import os, sys
print(sorted(name for name in sys.modules if name.startswith("tensorcas")), "torch" in sys.modules)
print(sys.argv[1:], os.environ["WORD"], os.environ.get("HOME"), os.getcwd(), __name__)
print("wrong", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.long
def test_forked_program_finds_what_it_was_given_and_of_this_project_the_plugin_alone(tmp_path: Path) -> None:
    done = run_program(PROGRAM, "a b", 1, env={"WORD": "w"}, cwd=tmp_path)

    assert done.stdout.splitlines() == [
        "['tensorcas_mlflow', 'tensorcas_mlflow.plugin'] True",
        f"['a b', '1'] w None {tmp_path} __main__",
    ]
    assert done.stderr == "wrong\n"
    assert done.returncode == 3


@pytest.mark.long
def test_forked_programs_do_not_see_each_other() -> None:
    run_program("import sys, torch; torch.left = 1; sys.left = 1", check=True)
    done = run_program("import sys, torch; print(hasattr(torch, 'left'), hasattr(sys, 'left'))")

    assert done.stdout == "False False\n"


def test_forked_program_ends_by_a_signal_or_a_time_limit() -> None:
    assert run_program("import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        run_program("import time; time.sleep(600)", timeout=0.5)


@pytest.mark.long
def test_error_of_a_forked_program_is_shown() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_program("1 / 0", check=True)
    assert "ZeroDivisionError" in run_program("1 / 0", env=dict(os.environ)).stderr


def test_quick_combinations_have_every_pair_of_values() -> None:
    axes = ["abcdefgh", "12345", "xyz"]
    params = pairs_of(*axes)
    quick = [param.values for param in params if not param.marks]

    assert {param.values for param in params} == set(product(*axes))
    assert len(quick) == 8 * 5
    for one, other in combinations(range(3), 2):
        assert {(values[one], values[other]) for values in quick} == set(product(axes[one], axes[other]))
