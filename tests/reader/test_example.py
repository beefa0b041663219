"""The example of reading parts runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/read_parts.py"


def test_example_of_reading_parts_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](tmp_path / "parts")

    told = capsys.readouterr().out
    assert "layers of model.layers: 0..3, up to 8 experts each" in told
    assert "changed: model.layers.2.mlp.experts.5.up_proj.weight, by 1.0% of its norm; 100 others are equal" in told
