"""The page of a series: what it says, in which places it is, and what it costs."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64decode
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.integration import _background
from tensorcas_mlflow.integration.checkpoints import Keep, _pages
from tensorcas_mlflow.integration.pages import SeriesFacts, history_page
from tensorcas_mlflow.layout import Manifest
from tensorcas_mlflow.store import Store
from tests.integration.artifacts.test_pages import Page

LAYERS = 4


def manifest(store: Store, state: dict[str, np.ndarray]) -> Manifest:
    with store.write_checkpoint(state) as pending:
        return pending.manifest


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.init_backend(MemoryBackend())


def state_of(step: int) -> dict[str, np.ndarray]:
    """A state whose layer of the step's number has changed; from step 3 on it has another tensor."""
    state = {f"model.{n}.weight": np.full(100 * (n + 1), float(n)) for n in range(LAYERS)}
    if step:
        state[f"model.{step % LAYERS}.weight"] = np.full(100 * (step % LAYERS + 1), step + 0.5)
    if step >= 3:
        state["head.weight"] = np.ones(7)
    return state


@pytest.fixture(scope="module")
def facts(store: Store) -> SeriesFacts:
    made = SeriesFacts()
    for step in range(4):
        made.add(10 * step, f"2026-11-24T0{step}:00:00.000+00:00", manifest(store, state_of(step)), stored_bytes=100)
    return made


def test_facts_tell_what_changed_and_since_when(facts: SeriesFacts) -> None:
    assert [each.n_changed for each in facts.steps] == [4, 1, 2, 3]
    assert facts.steps[1].shares == {"model.0": 0.0, "model.1": 1.0, "model.2": 0.0, "model.3": 0.0}
    assert facts.steps[3].n_changed_bytes == 8 * (300 + 400 + 7)
    assert [(each.name, each.since, each.is_new) for each in facts.latest()] == [
        ("model.3.weight", 30, False),
        ("model.2.weight", 30, False),
        ("head.weight", 30, True),
        ("model.0.weight", 0, False),
        ("model.1.weight", 20, False),
    ]


def test_page_shows_changed_tensors_first_and_draws_each_part_and_step(facts: SeriesFacts) -> None:
    data = history_page("net", "lively-ant-7", facts, dropped={10}, n_left_out=2)
    page = Page(data)

    assert "net of lively-ant-7" in page.text
    assert "Not shown: 2 other steps" in page.text
    rows = [row for row in page.rows if row and row[0].endswith(".weight")]
    states = {"model.3": "changed", "model.2": "changed", "head": "new", "model.0": "shared since step 0"}
    states["model.1"] = "shared since step 20"
    assert [(row[0], row[-1]) for row in rows] == [(f"{part}.weight", words) for part, words in states.items()]
    assert [row[0] for row in page.rows if len(row) == 6] == ["Step", "30", "20", "10 (deleted)", "0"]
    width, height, pixels = picture(data)
    assert (width, height) == (4, 5)
    shades = np.array(pixels).reshape(height, width)
    assert (shades[:4] > 0).tolist() == [
        [True, False, False, False],
        [True, True, True, False],
        [True, False, True, True],
        [True, False, False, True],
    ]
    absent = shades[4, 0]
    assert shades[4].tolist() == [absent] * 3 + [shades[0, 0]]
    assert absent != shades[0, 0]


def picture(page: bytes) -> tuple[int, int, list[int]]:
    """Decode the picture of a page as a browser does."""
    encoded = re.search(rb"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert encoded is not None
    data = b64decode(encoded[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = zlib.decompress(chunks[b"IDAT"])
    return width, height, [shade for line in range(height) for shade in lines[line * (width + 1) + 1 :][:width]]


def test_names_of_tensors_and_runs_cannot_break_the_page(store: Store) -> None:
    facts = SeriesFacts()
    facts.add(1, "2026-11-24", manifest(store, {'<script>alert(1)</script>."x': np.ones(3), "a\u202eb": np.ones(2)}))
    data = history_page("<b>", "</title><script>x</script>", facts)

    assert data.count(b"<script>") == 1
    assert b"alert(1)<" not in data
    assert b"\\u{202e}" in data
    assert b"default-src 'none'" in data


def test_script_of_a_page_is_the_one_that_its_policy_allows(facts: SeriesFacts) -> None:
    from base64 import b64encode
    from hashlib import sha256

    data = history_page("net", "run", facts)
    script = data.partition(b"<script>")[2].partition(b"</script>")[0]

    assert f"script-src 'sha256-{b64encode(sha256(script).digest()).decode()}'".encode() in data


def test_page_of_a_long_history_is_small(store: Store) -> None:
    facts = SeriesFacts()
    state = {f"model.layers.{n // 10}.part{n % 10}.weight": np.full(2, n) for n in range(500)}
    made = manifest(store, state)
    for step in range(1000):
        facts.add(step, "2026-11-24T00:00:00.000+00:00", made, stored_bytes=100)

    assert len(history_page("checkpoint", "run", facts)) < 300_000


def test_all_tensors_of_a_large_state_are_named(store: Store) -> None:
    facts = SeriesFacts()
    facts.add(1, "2026", manifest(store, {f"layer.{n // 100}.{n}": np.full(1, n) for n in range(4000)}))
    data = history_page("checkpoint", "run", facts)

    assert all(f"layer.{n // 100}.{n}".encode() in data for n in range(4000))


# --- beside the steps


def page_of(run_id: str, name: str = "checkpoint") -> Page:
    mlflow.tensorcas.wait()
    path = mlflow.artifacts.download_artifacts(f"runs:/{run_id}/checkpoints/{name}/history.html")
    return Page(Path(path).read_bytes())


def steps_of(page: Page) -> list[str]:
    return [row[0] for row in page.rows if len(row) == 6][1:]


def test_page_lies_beside_the_steps_and_follows_them(experiment: str) -> None:
    with mlflow.start_run(run_name="lively-ant-7") as run:
        for step in range(3):
            mlflow.tensorcas.log_checkpoint(state_of(step), step=step)
        first = page_of(run.info.run_id)
        mlflow.tensorcas.log_checkpoint(state_of(3), step=3)
        second = page_of(run.info.run_id)

    listed = MlflowClient().list_artifacts(run.info.run_id, "checkpoints/checkpoint")
    assert "checkpoints/checkpoint/history.html" in [file.path for file in listed]
    assert steps_of(first) == ["2", "1", "0"]
    assert steps_of(second) == ["3", "2", "1", "0"]


def test_page_tells_what_a_rule_has_deleted(plain_experiment: str) -> None:
    with mlflow.start_run(run_name="lively-ant-7") as run:
        for step in range(4):
            mlflow.tensorcas.log_checkpoint(state_of(step), step=step, keep=Keep(last=2))

    page = page_of(run.info.run_id)
    assert "lively-ant-7" in page.text
    assert steps_of(page) == ["3", "2", "1 (deleted)", "0 (deleted)"]


def test_page_of_another_process_begins_with_the_earlier_steps(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run() as run:
        for step in (1, 2):
            mlflow.tensorcas.log_checkpoint(state_of(step), step=step)
        mlflow.tensorcas.wait()
        monkeypatch.setattr(_pages, "_histories", type(_pages._histories)())
        mlflow.tensorcas.log_checkpoint(state_of(3), step=5)
        mlflow.tensorcas.log_checkpoint(state_of(2), step=4)  # out of order

    assert steps_of(page_of(run.info.run_id)) == ["5", "4", "2", "1"]


def test_page_can_be_turned_off(plain_experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_PAGES", "off")
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint(state_of(1), step=1)
    mlflow.tensorcas.wait()

    listed = MlflowClient().list_artifacts(run.info.run_id, "checkpoints/checkpoint")
    assert [Path(file.path).name for file in listed] == ["step-00000001.arrow"]


def test_failure_to_write_a_page_costs_no_checkpoint(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(history: object, page: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(_pages, "_put", failing)
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint(state_of(1), step=1)
        mlflow.tensorcas.wait()
        assert "the page of a series of checkpoints cannot be written: no space left" in caplog.text
        assert mlflow.tensorcas.load_checkpoint(run.info.run_id).keys() == state_of(1).keys()


def test_many_quick_steps_write_few_pages_and_hold_few_manifests(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    put = _pages._put
    monkeypatch.setattr(_pages, "_put", lambda history, page: (written.append(page), put(history, page)))
    n_held = []
    with mlflow.start_run() as run:
        for step in range(150):
            mlflow.tensorcas.log_checkpoint({"w": np.full(3, step)}, step=step)
            n_held.append(max(len(history.waiting) for history in _pages._histories.values()))
    page = page_of(run.info.run_id)

    assert len(written) <= 5
    assert max(n_held) <= 64
    assert steps_of(page)[0] == "149"
    n_left_out = re.search(r"Not shown: (\d+) other steps", page.text)
    assert len(steps_of(page)) + (int(n_left_out[1]) if n_left_out else 0) == 150
    assert not _background.pages._jobs
