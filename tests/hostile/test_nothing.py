"""Chunks and payloads of 0 bytes are damage, and no reader of them hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANG_S = 120


@pytest.mark.long
def test_no_reader_of_chunks_of_0_bytes_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.hostile.nothing"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 20
