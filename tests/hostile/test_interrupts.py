"""Ctrl-C ends each operation soon, also where stored bytes make it work for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorcas_mlflow.maintenance import verify
from tensorcas_mlflow.store import Store
from tests.hostile.deep import make

ROOT = Path(__file__).parents[2]
DELAY_S = 1.0
MOST_S = 3.0
"""It is a second on an idle machine."""
HANG_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep")
    make(path)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "n_threads"),
    [
        ("load", "2"),
        ("verify", "2"),
        *(
            pytest.param(operation, n_threads, marks=pytest.mark.long)
            for operation in ("load", "verify", "repair", "copy", "save")
            for n_threads in ("1", "3")
        ),
    ],
)
def test_interrupt_ends_an_operation_within_seconds(operation: str, n_threads: str, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hostile.deep", operation, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TENSORCAS_THREADS": n_threads},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(DELAY_S)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=HANG_S)
    finally:
        process.kill()

    assert process.returncode == 0
    assert float(told) - sent < MOST_S
    assert verify(Store.open(folder)).problems == ()
