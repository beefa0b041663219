"""Examples of the page on reading parts, run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

from tests.reader.checkpoints import moe

PAGE = Path(__file__).parents[2] / "docs/reading-parts.md"
QUERIES = ("duckdb", "polars")


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.long)])
def test_page_about_reading_runs_and_prints_what_it_says(cas_experiment: str, is_whole: bool) -> None:
    """`make venv-all` installs the libraries of the page's queries, for the long tests."""
    state = moe()
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint(state, step=10)
        gate = state["model.layers.1.mlp.gate.weight"]
        gate.view(np.uint32)[0] ^= 1
        mlflow.tensorcas.log_checkpoint(state, step=20)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    seen: dict[str, Any] = {"run_id": run.info.run_id}

    for block in blocks:
        if not any(word in block for word in ("load_into", "naming=", *(() if is_whole else QUERIES))):
            exec(block, seen)

    assert len(blocks) == 8
    assert seen["rows"].tobytes() == state["model.embed_tokens.weight"][1000:1010].tobytes()
    assert list(seen["expert"]) == [f"model.layers.1.mlp.experts.3.{name}_proj.weight" for name in ("up", "down")]
    assert seen["found"].changed == ("model.layers.1.mlp.gate.weight",)
    if not is_whole:
        return
    assert seen["largest"].fetchall()[0] == ("model.embed_tokens.weight", "float32", [1000, 64], 64_000)
    assert seen["changed"].to_list() == ["model.layers.1.mlp.gate.weight"]
    layers = dict(seen["by_layer"].fetchall())
    assert layers[0] == sum(array.nbytes for name, array in state.items() if ".layers.0." in name)
    assert layers[None] == state["model.embed_tokens.weight"].nbytes
