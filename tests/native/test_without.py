"""Tests of the package with its compiled core turned off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import numpy as np
from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.native import core

folder, native, first = sys.argv[1:]
assert native == "1" or core is None
store = TensorCasStore(folder, "run")
weights = np.random.default_rng(0).normal(size=100_000)
for step in (int(first), int(first) + 1):
    store.save({"w": weights + step}, step)
for step in range(int(first) + 2):
    assert np.array_equal(store.load_tensors(step)["w"], weights + step)
"""


def test_package_with_and_without_its_core_reads_what_the_other_has_written(tmp_path: Path) -> None:
    for native, first in (("1", "0"), ("0", "2"), ("1", "4")):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), native, first],
            env={**os.environ, "TENSORCAS_NATIVE": native},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
