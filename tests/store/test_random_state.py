"""Saving and loading leave the program's random numbers alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import random, sys
import numpy as np
from tensorcas_mlflow import TensorCasStore

store = TensorCasStore(sys.argv[1], "run")
weights = {"w": np.random.default_rng(0).normal(size=100_000).astype(complex)}
random.seed(0)
before = random.getstate()
if sys.argv[2] == "save":
    store.save(weights, 1)
elif sys.argv[2] == "copy":
    with store.store.begin_checkpoint(store.store.copy(weights)) as save:
        save.write()
else:
    store.load_tensors(1)
sys.exit(0 if random.getstate() == before else 7)
"""


@pytest.mark.parametrize("what", ["save", "copy", "load"])
def test_the_state_of_the_global_generator_stays(tmp_path: Path, what: str) -> None:
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    if what == "load":
        subprocess.run([*program, "save"], check=True)

    assert subprocess.run([*program, what], check=False).returncode == 0
