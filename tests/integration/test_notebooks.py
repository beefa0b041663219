"""Results shown in a notebook: HTML, tables of pandas, and figures."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.errors import CheckpointNotFoundError
from tensorcas_mlflow.maintenance import plan_gc, plan_optimize, plan_repair
from tensorcas_mlflow.store import Store

NOTEBOOK = Path(__file__).parents[2] / "examples/compare_steps.ipynb"
PNG = b"\x89PNG"
HOSTILE = "<script>alert('$1$')</script>"


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as Jupyter does, and return the value of its last line if that is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # type: ignore[attr-defined]


@pytest.mark.long
def test_notebook_of_the_examples_runs_and_shows_its_results(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    names: dict[str, Any] = {}
    shown = [run_cell("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]
    results = [value for value in shown if value is not None]

    assert len(results) == 8
    for value in results:
        picture = getattr(value, "_repr_png_", None)
        assert picture()[:4] == PNG if picture is not None else len(value._repr_html_()) > 100
    map_of_layers = results[-1].axes[0].images[0].get_array()
    assert np.array(map_of_layers).tolist() == [[1, 0, 0, 1, 1, 1]] * 4 + [[1, 1, 1, 1, 1, 1]]


@pytest.fixture
def run_id(plain_experiment: str) -> str:
    """A run with two steps whose names are hostile to HTML."""
    first = {"small": np.ones(10, "f4"), HOSTILE: np.ones(100, "f4"), "gone": np.zeros(5), "same": np.arange(3)}
    second = {"small": np.full(10, 1.5, "f4"), HOSTILE: np.full(100, 3, "f4"), "new": np.zeros(7), "same": np.arange(3)}
    with mlflow.start_run() as run:
        for step, state in enumerate([first, second]):
            tensorcas.log_checkpoint(state, step=step)
    return str(run.info.run_id)


def test_diff_lists_the_largest_change_first(run_id: str) -> None:
    found = tensorcas.diff((run_id, 0), (run_id, 1), values=True)
    rows = found.to_pandas()

    assert rows["name"].tolist() == ["new", "gone", HOSTILE, "small", "same"]
    assert rows["change"].tolist() == ["added", "removed", "changed", "changed", "equal"]
    assert rows["n_bytes"].tolist() == [56, 40, 400, 40, 24]
    assert rows["relative_norm"].tolist()[2:4] == [2.0, 0.5]
    assert math.isnan(rows["relative_norm"][4])
    assert found._repr_html_().index("alert") < found._repr_html_().index("small")


def test_html_escapes_names(run_id: str) -> None:
    found = tensorcas.diff((run_id, 0), (run_id, 1))
    with tensorcas.open_checkpoint(run_id) as reader:
        shown = [found._repr_html_(), reader._repr_html_()]

    assert [html.count("&lt;script&gt;") for html in shown] == [1, 1]
    assert not any("<script>" in html for html in shown)


def test_long_diff_is_cut_in_a_notebook_and_whole_in_pandas(tmp_path: Path) -> None:
    for step in range(2):
        np.savez(tmp_path / f"{step}.npz", **{f"t{at}": np.full(1, step) for at in range(300)})  # type: ignore[arg-type]
    found = tensorcas.diff(tmp_path / "0.npz", tmp_path / "1.npz")

    assert "and 100 more" in found._repr_html_()
    assert len(found.to_pandas()) == 300


def test_tree_of_a_checkpoint_folds(plain_experiment: str) -> None:
    state = {f"layers.{at}.mlp.{part}.weight": np.ones(4) for at in range(3) for part in ("up", "down")}
    with mlflow.start_run() as run:
        tensorcas.log_checkpoint(state, step=0)
    with tensorcas.open_checkpoint(run.info.run_id) as reader:
        html = reader._repr_html_()

    assert html.count("<details") == html.count("</details>") >= 1
    assert "in 3" in html


def test_figures_of_a_store_are_a_table_of_one_row(tmp_path: Path) -> None:
    with tensorcas.TensorCasStore(tmp_path, run_id="r") as store:
        store.save({"w": np.ones(1000)}, 3)
        rows = store.stats().to_pandas()
        html = store.stats()._repr_html_()
    figures = tensorcas.TensorCasStore.store_stats(tmp_path).to_arrow().to_pylist()[0]

    assert 8000 <= rows.loc[0, "total_bytes"] < 8200
    assert list(rows.loc[0, "steps"]) == [3]
    assert figures["disk_total"] == figures["disk_bytes"] > 0
    assert '<td style="text-align: left">total bytes</td><td style="text-align: right">8.1 KB</td>' in html


def test_plans_say_that_nothing_has_changed_yet(tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    shown = [plan._repr_html_() for plan in (plan_gc(store), plan_optimize(store), plan_repair(store))]

    assert all("nothing has changed yet" in html for html in shown)
    assert "<li>0 chunks kept by 0 checkpoints and files," in shown[0]
    assert "<li>nothing is damaged</li>" in shown[2]


@pytest.mark.long
def test_plots_take_names_with_dollars_and_unlike_steps(run_id: str) -> None:
    history = tensorcas.plot_history(run_id)
    difference = tensorcas.plot_diff((run_id, 0), (run_id, 1))

    assert history._repr_png_()[:4] == PNG  # type: ignore[attr-defined]
    assert difference._repr_png_()[:4] == PNG  # type: ignore[attr-defined]
    assert [bar.get_width() for bar in difference.axes[0].patches] == [2.0, 0.5]
    lines = {line.get_label(): line.get_ydata()[-1] for line in history.axes[1].lines}
    assert lines["plain files"] == 504 + 520
    assert lines["changed tensors"] == 504 + 496


def test_history_of_nothing_is_refused(plain_experiment: str, run_id: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="'ema'"):
        tensorcas.plot_history(run_id, name="ema")
    with pytest.raises(ValueError, match="has no metric 'los'"):
        tensorcas.plot_history(run_id, metric="los")
    with pytest.raises(ValueError, match="above 0"):
        tensorcas.plot_diff((run_id, 0), (run_id, 1), most=0)


def test_list_of_an_empty_run_is_an_empty_table(plain_experiment: str) -> None:
    with mlflow.start_run() as run:
        pass

    steps = tensorcas.list_checkpoints(run.info.run_id)

    assert steps == []
    assert steps.to_pandas().columns.tolist() == ["run_id", "name", "step", "uri", "created", "flavor"]
