"""Ctrl-C at any moment: it is raised where it was pressed, nothing is lost, and whoever catches it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorcas_mlflow.store import Store
from tests.race.race import ROOT, assert_empties, assert_sound

SMOKE_S = 1.5
LONG_S = float(os.environ.get("TENSORCAS_RACE_S", "15"))
HANG_S = 120


def interrupted(way: str, seconds: float, tmp_path: Path) -> dict[str, object]:
    store = Store.init(tmp_path / "root", chunk_bytes=4096)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.race.interrupted", way, str(seconds), tmp_path, store.uri],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TENSORCAS_THREADS": "3"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        ("save", SMOKE_S),
        *(pytest.param(way, LONG_S, marks=pytest.mark.long) for way in ("save", "load", "collect")),
        *(pytest.param(way, LONG_S, marks=pytest.mark.long) for way in ("upload", "log", "log in the background")),
    ],
)
def test_an_interrupt_is_raised_and_loses_nothing(way: str, seconds: float, tmp_path: Path) -> None:
    found = interrupted(way, seconds, tmp_path)

    assert found["sent"] == found["caught"]
    assert found["wrong"] == []
    assert_sound(Store.open(tmp_path / "root"))
    assert_empties(Store.open(tmp_path / "root"))
