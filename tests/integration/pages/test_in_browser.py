"""Pages as a browser shows them: what the script makes of their data."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.integration.pages import RunFacts, SeriesFacts, history_page
from tensorcas_mlflow.store import Store
from tests.integration.artifacts.pages import Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.long, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]


def shown(data: bytes, folder: Path, script: str = "", *, width: int = 1280) -> Page:
    """Open a page in a window of some width and run a script in it; return the elements that are there then."""
    assert BROWSER is not None
    file = folder / "page.html"
    # Only a page without a policy runs a script of the test's own.
    file.write_bytes(data.replace(b'http-equiv="Content-Security-Policy"', b"") + f"<script>{script}</script>".encode())
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    command += [f"--window-size={width},900", "--virtual-time-budget=20000", "--dump-dom", file.as_uri()]
    return Page(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


def tensor_rows(page: Page) -> list[list[str]]:
    begin = next(at for at, row in enumerate(page.rows) if row[:1] == ["Tensor"])
    end = next((at for at, row in enumerate(page.rows) if row[:1] == ["Step"]), len(page.rows))
    return [[row[0], row[4]] for row in page.rows[begin + 1 : end]]


@pytest.fixture(scope="module")
def data() -> bytes:
    store = Store.init_backend(MemoryBackend())
    facts = SeriesFacts()
    for step in range(4):
        state = {f"model.layers.{n}.{kind}.w": np.full(50, float(n)) for n in range(3) for kind in ("attn", "mlp")}
        state["model.layers.1.mlp.w"] = np.full(50, 9.0 + min(step, 2))
        if step >= 2:
            state["head"] = np.full(9, float(step))
        with store.write_checkpoint(state) as pending:
            facts.add(step * 10, "2026-11-24T00:00:00", pending.manifest)
    return history_page("net", RunFacts(run_id="r", name="ant", experiment_id="7", ui="http://u:5000/ml"), facts)


def test_table_shows_changed_parts_first_and_opens_them(data: bytes, tmp_path: Path) -> None:
    rows = tensor_rows(shown(data, tmp_path))

    assert rows == [
        ["head", "changed"],
        ["\u25b8 model.layers", "shared"],
    ]


def test_another_step_is_shown_on_choice(data: bytes, tmp_path: Path) -> None:
    choose = 'setTimeout(() => { document.getElementById("earlier").click() }, 3000)'
    rows = tensor_rows(shown(data, tmp_path, choose))

    assert rows == [
        ["\u25be model.layers", "1 of 6 changed"],
        ["\u25be 1", "1 of 2 changed"],
        ["mlp.w", "changed"],
        ["attn.w", "shared since step 0"],
        ["\u25b8 0", "shared"],
        ["\u25b8 2", "shared"],
        ["head", "new"],
    ]


def test_search_finds_tensors_in_closed_parts(data: bytes, tmp_path: Path) -> None:
    search = """setTimeout(() => { const box = document.getElementById("search"); box.value = "MLP";
      box.dispatchEvent(new Event("input")); document.querySelector('[data-sort="name"]').click() }, 3000)"""
    page = shown(data, tmp_path, search)

    assert [name for name, _ in tensor_rows(page)] == ["\u25be model.layers", "0.mlp.w", "1.mlp.w", "2.mlp.w"]
    assert "3 of 7 tensors" in page.text


def history_of(*states: dict[str, np.ndarray]) -> bytes:
    store = Store.init_backend(MemoryBackend())
    facts = SeriesFacts()
    for step, state in enumerate(states):
        with store.write_checkpoint(state) as pending:
            facts.add(step, "2026-11-24T00:00:00", pending.manifest)
    return history_page("net", "ant", facts)


def test_first_changed_part_is_open_however_many_parts_there_are(tmp_path: Path) -> None:
    before = {f"layers.{n}.{kind}": np.full(50, float(n)) for n in range(60) for kind in "abc"}
    after = before | {"layers.40.b": np.full(50, 0.5), "layers.40.c": np.full(50, 0.5), "layers.7.a": np.full(50, 0.5)}
    rows = tensor_rows(shown(history_of(before, after), tmp_path))

    assert rows[:7] == [
        ["\u25be layers", "3 of 180 changed"],
        ["\u25be 40", "2 of 3 changed"],
        ["b", "changed"],
        ["c", "changed"],
        ["a", "shared since step 0"],
        ["\u25b8 7", "1 of 3 changed"],
        ["\u25b8 0", "shared"],
    ]


def test_part_with_very_many_parts_stays_closed(tmp_path: Path) -> None:
    before = {f"layers.{n}.{kind}": np.full(50, float(n)) for n in range(101) for kind in "ab"}
    rows = tensor_rows(shown(history_of(before, before | {"layers.40.b": np.full(50, 0.5)}), tmp_path))

    assert rows == [["\u25b8 layers", "1 of 202 changed"]]


@pytest.mark.parametrize("width", [514, 1280])
def test_page_is_no_wider_than_its_window(data: bytes, tmp_path: Path, width: int) -> None:
    """MLflow's viewer gives a page 514 pixels of a window of 1280."""
    measure = """setTimeout(() => { const page = document.documentElement;
      const wide = [...document.querySelectorAll(".wide")].filter((each) => each.scrollWidth > each.clientWidth);
      page.append(`wide: ${page.scrollWidth - page.clientWidth} of ${innerWidth}; tables: ${wide.length}`)
    }, 3000)"""

    assert f"wide: 0 of {width}; tables: 0" in shown(data, tmp_path, measure, width=width).text
