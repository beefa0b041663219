"""Tests of a core that was built without libzstd, for which the package `zstandard` makes and reads frames."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PROGRAM = """
import importlib.util, sys
import numpy as np

folder, path, first = sys.argv[1:]
if path:
    spec = importlib.util.spec_from_file_location("tensorcas_mlflow.native._core", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ZSTD_VERSION == ""

from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.native import core

assert core.__file__ == path or (not path and core.ZSTD_VERSION)
store = TensorCasStore(folder, "run")
weights = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
small = {f"b{n}": np.full(40 + n, n, np.float32) for n in range(100)}
pixels = np.random.default_rng(1).integers(0, 9, (9_000, 3)).astype(np.uint8).view([("rgb", "u1", 3)])
for step in (int(first), int(first) + 1):
    store.save({"w": weights + step * np.float32(1e-4), "pixels": pixels, **small}, step)
for step in range(int(first) + 2):
    found = store.load_tensors(step)
    assert np.array_equal(found["w"], weights + step * np.float32(1e-4))
    assert found["pixels"].tobytes() == pixels.tobytes()
    assert all(np.array_equal(found[name], array) for name, array in small.items())
"""


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=CHECKOUT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def core_without_zstd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the core where the header of libzstd says nothing, as if there were none."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "no_zstd.h").write_text("#define ZSTD_H_235446\n#define ZSTD_ERRORS_H_398273423\n")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder)]
    run(*build, CFLAGS=f"-include {folder / 'no_zstd.h'}")
    [core] = folder.rglob("_core*.so")
    return str(core)


def test_cores_with_and_without_libzstd_read_what_the_other_has_written(tmp_path: Path, core_without_zstd: str) -> None:
    for core, first in (("", "0"), (core_without_zstd, "2"), ("", "4")):
        run(sys.executable, "-c", PROGRAM, str(tmp_path / "store"), core, first)


FRAMES = """
import importlib.util, sys
import numpy as np

spec = importlib.util.spec_from_file_location("tensorcas_mlflow.native._core", sys.argv[1])
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

from tests.native.test_decode import SAMPLES, run_core, run_python

n_refused = 0
for chunk, chain in SAMPLES:
    assert run_core(chunk, chain) == chunk
    codec, payload = chain[0]
    for at in range(0, len(payload), max(1, len(payload) // 20)):
        cut = [(codec, payload[:at]), *chain[1:]]
        made = run_core(chunk, cut)
        assert made == run_python(chunk, cut)
        n_refused += made is None
print(n_refused)
"""


def test_core_without_libzstd_refuses_the_payloads_that_the_reference_refuses(core_without_zstd: str) -> None:
    python_path = os.pathsep.join(filter(None, [str(CHECKOUT), *sys.path]))

    assert int(run(sys.executable, "-c", FRAMES, core_without_zstd, PYTHONPATH=python_path)) > 500
