"""Tests of a core that was built without libzstd, for which the package `zstandard` makes and reads frames."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON_PATH = os.pathsep.join(filter(None, [str(CHECKOUT), *sys.path]))
MOST_S = 5
LOAD = """
import importlib.util, sys

path = sys.argv[1]
if path:
    spec = importlib.util.spec_from_file_location("tensorcas_mlflow.native._core", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ZSTD_VERSION == ""
"""
PROGRAM = """
import numpy as np

folder, first = sys.argv[2:]
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


@pytest.mark.long
def test_cores_with_and_without_libzstd_read_what_the_other_has_written(tmp_path: Path, core_without_zstd: str) -> None:
    for core, first in (("", "0"), (core_without_zstd, "2"), ("", "4")):
        run(sys.executable, "-c", LOAD + PROGRAM, core, str(tmp_path / "store"), first)


FRAMES = """
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


@pytest.mark.long
def test_core_without_libzstd_refuses_the_payloads_that_the_reference_refuses(core_without_zstd: str) -> None:
    assert int(run(sys.executable, "-c", LOAD + FRAMES, core_without_zstd, PYTHONPATH=PYTHON_PATH)) > 500


@pytest.mark.parametrize("way", ["decode", "encode_group"])
def test_interrupt_ends_a_long_call_of_a_core_without_libzstd(way: str, core_without_zstd: str) -> None:
    program = LOAD + "from tests.native.interrupted import main\nmain(sys.argv[2], 1)"

    assert float(run(sys.executable, "-c", program, core_without_zstd, way, PYTHONPATH=PYTHON_PATH)) < MOST_S


STOPPED = """
import signal
from tensorcas_mlflow.native import core

class Stopped(Exception):
    pass

def stop(*_):
    raise Stopped

signal.signal(signal.SIGALRM, stop)
for call in (
    lambda: core.compress(bytes(1 << 20), 3),
    lambda: core.encode_best(bytes(1 << 20), 4),
    lambda: core.choose_codings(bytes(1 << 20), 4, None),
    lambda: core.choose_transform(bytes(1 << 20), 4, bytes(1 << 20), bytes(4), True),
):
    for _ in range(5):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            while True:
                call()
        except Stopped:
            pass
"""


def test_exception_of_a_handler_ends_a_short_call_of_a_core_without_libzstd(core_without_zstd: str) -> None:
    run(sys.executable, "-c", LOAD + STOPPED, core_without_zstd)
