"""Tests that no argument makes the core touch memory that is not its own: every entry runs under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
SECONDS = os.environ.get("TENSORCAS_FUZZ_S", "60")


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=CHECKOUT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=3_600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the sanitizers are gcc's")
def test_no_entry_of_the_core_touches_memory_that_is_not_its_own(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    run(*build, CC="gcc", CFLAGS=SANITIZERS, LDFLAGS=SANITIZERS)
    [core] = tmp_path.rglob("_core*.so")
    runtimes = [run("gcc", f"-print-file-name={name}").strip() for name in ("libasan.so", "libubsan.so")]

    output = run(
        *(sys.executable, "-m", "tests.native.fuzz", str(core), SECONDS, "0"),
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter keeps what it has until its end
        PYTHONMALLOC="malloc",
    )

    assert "turns" in output
