"""The page of a series: what it says, in which places it is, and what it costs."""

from __future__ import annotations

import itertools
import re
import struct
import time
import zlib
from base64 import b64decode
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.backends import MemoryBackend
from tensorcas_mlflow.base.sketch import positions, words_of
from tensorcas_mlflow.base.text import size_text
from tensorcas_mlflow.integration import _background
from tensorcas_mlflow.integration.checkpoints import Keep, _pages
from tensorcas_mlflow.integration.pages import RunFacts, SeriesFacts, _history, history_page
from tensorcas_mlflow.layout.manifests import Manifest, sketch_bytes, sketched_rows
from tensorcas_mlflow.store import Store
from tests.integration.artifacts.pages import Page

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
    assert history_of(facts, "model.1.weight") == ["new", "changed", "changed", "shared"]
    assert history_of(facts, "model.3.weight") == ["new", "shared", "shared", "changed"]
    assert history_of(facts, "head.weight") == ["", "", "", "new"]


def history_of(facts: SeriesFacts, name: str) -> list[str]:
    """Return the history of a tensor of the latest step, as the script of the page reads it."""
    page = Page(history_page("net", "run", facts))
    at, n = page.facts["names"].index(name), len(page.facts["names"])
    first, begin = page.facts["first"][at], page.facts["from"]
    rows = np.unpackbits(np.frombuffer(page.bits, np.uint8).reshape(-1, -(-n // 8)), axis=1)
    marks = ["changed" if row[at] else "shared" for row in rows]
    return ["" if step < first else "new" if step == first else marks[step - begin] for step in range(len(facts.steps))]


def test_page_draws_each_part_and_step(facts: SeriesFacts) -> None:
    data = history_page("net", "lively-ant-7", facts, dropped={10}, n_left_out=2)
    page = Page(data)

    assert "net of lively-ant-7" in page.text
    assert "Not shown: 2 other steps" in page.text
    assert [row[0] for row in page.rows if len(row) == 6] == ["Step", "30", "20", "10 (deleted)", "0"]
    width, height, pixels = picture(data)
    assert (width, height) == (4, 6)
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
    assert (shades[5] > 0).tolist() == [False, True, False, False]  # the deleted step


@pytest.mark.parametrize(("n_steps", "height"), [(_history._MOST_SHARP, 1), (_history._MOST_SHARP + 1, 14)])
def test_map_of_many_steps_has_rows_that_stay_sharp(store: Store, n_steps: int, height: int) -> None:
    facts = SeriesFacts()
    one = manifest(store, {"a.w": np.ones(3)})
    for step in range(n_steps):
        facts.add(step, "2026", one)
    page = history_page("net", "run", facts)

    assert picture(page)[:2] == (n_steps, height)
    assert (b'class="picture fine"' in page) == (height > 1)


def test_page_that_is_a_file_counts_its_own_bytes(facts: SeriesFacts) -> None:
    made_on_reading, file = history_page("net", "run", facts), history_page("net", "run", facts, is_stored=True)
    stored = Page(file).text.partition("Stored, with this page")[2].strip()

    assert Page(made_on_reading).text.partition("Stored")[2].split()[:2] == ["400", "B,"]
    assert stored.startswith(f"{size_text(400 + len(file))}, {size_text(len(file))} of it the page")
    assert "own size" not in file.decode()


def test_more_change_is_more_opaque_so_that_it_shows_on_any_background(facts: SeriesFacts) -> None:
    opacity = list(chunks_of(history_page("net", "run", facts))[b"tRNS"])[: _history._N_SHADES]

    assert opacity[0] == 0
    assert opacity == sorted(set(opacity))
    assert opacity[-1] == 255


def test_chart_says_its_range_and_ends_in_the_size_of_the_page(facts: SeriesFacts) -> None:
    """Texts in a picture shrink with it."""
    page = Page(history_page("net", RunFacts(metrics={"loss": [(0, 2.0), (30, 0.25)]}), facts))

    assert "text" not in page.elements
    assert "0.25 to 2" in page.texts
    assert page.texts.count("step 0") == page.texts.count("step 30") == 3


def test_label_of_a_part_is_one_run_of_text(store: Store) -> None:
    """A label is cut off at its left, which would move a mark at its end to the left too."""
    facts = SeriesFacts()
    for step in range(2):
        facts.add(step, "2026", manifest(store, {"net_.<x>.w": np.full(9, float(step)), "b": np.ones(3)}))

    assert b"><bdi>net_.&lt;x&gt;</bdi></div>" in history_page("net", "run", facts)


def picture(page: bytes) -> tuple[int, int, list[int]]:
    """Decode the picture of a page as a browser does."""
    chunks = chunks_of(page)
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = zlib.decompress(chunks[b"IDAT"])
    return width, height, [shade for line in range(height) for shade in lines[line * (width + 1) + 1 :][:width]]


def chunks_of(page: bytes) -> dict[bytes, bytes]:
    """Return the chunks of the picture of a page."""
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
    return chunks


def test_tensors_of_other_names_have_histories_of_their_own(store: Store) -> None:
    facts = SeriesFacts()
    states = [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 1.0, "c": 1.0}, {"c": 2.0, "b": 2.0, "a": 1.0}]
    for step, state in enumerate(states):
        facts.add(step, "2026", manifest(store, {name: np.full(20, value) for name, value in state.items()}))

    assert history_of(facts, "a") == ["new", "shared", "shared", "shared"]
    assert history_of(facts, "b") == ["", "", "", "new"]
    assert history_of(facts, "c") == ["", "", "new", "changed"]


def test_names_of_tensors_and_runs_cannot_break_the_page(store: Store) -> None:
    facts = SeriesFacts()
    facts.add(1, "2026-11-24", manifest(store, {'<script>alert(1)</script>."x': np.ones(3), "a\u202eb": np.ones(2)}))
    data = history_page("<b>", "</title><script>x</script>", facts)

    assert data.count(b"<script>") == 1
    assert b"alert(1)" not in data
    assert Page(data).facts["names"] == ['<script>alert(1)</script>."x', "a\\u{202e}b"]
    assert b"default-src 'none'" in data


def test_script_of_a_page_is_the_one_that_its_policy_allows(facts: SeriesFacts) -> None:
    from base64 import b64encode
    from hashlib import sha256

    data = history_page("net", "run", facts)
    script = data.partition(b"<script>")[2].partition(b"</script>")[0]

    assert f"script-src 'sha256-{b64encode(sha256(script).digest()).decode()}'".encode() in data


@pytest.mark.long
def test_page_of_a_long_history_is_small_even_if_its_changes_do_not_compress(store: Store) -> None:
    facts = SeriesFacts()
    names = [f"model.layers.{n // 10}.part{n % 10}.weight" for n in range(500)]
    chosen = np.random.default_rng(0).integers(0, 2, (10, 500))
    made = [manifest(store, {name: np.full(9, kind) for name, kind in zip(names, row, strict=True)}) for row in chosen]
    order = np.random.default_rng(1).integers(0, 10, 1000).tolist()
    for step, kind in enumerate(order):
        facts.add(step, "2026-11-24T00:00:00.000+00:00", made[kind], stored_bytes=step)
    data = history_page("checkpoint", RunFacts(metrics={"loss": [(n, n**0.5) for n in range(1000)]}), facts)

    assert len(data) < 300_000
    assert Page(data).facts["from"] == 0
    expected = [
        "changed" if chosen[kind][77] != chosen[before][77] else "shared" for before, kind in itertools.pairwise(order)
    ]
    assert history_of(facts, names[77])[1:] == expected


def test_page_leaves_out_what_changed_at_early_steps_if_it_takes_too_much_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_history, "MOST_FACTS_CHARS", 6_000)
    facts = SeriesFacts()
    kinds = np.random.default_rng(0).integers(0, 9, (40, 800))
    for step, row in enumerate(kinds):
        facts.add(step, "2026", manifest(store, {f"w{n}": np.full(8, kind) for n, kind in enumerate(row)}))
    page = Page(history_page("net", "run", facts))

    assert 0 < page.facts["from"] < 40
    assert len(page.facts["steps"]) == 40
    assert len(page.bits) == 100 * (40 - page.facts["from"])


def test_all_tensors_of_a_large_state_are_on_its_page(store: Store) -> None:
    facts = SeriesFacts()
    names = [f"layer.{n // 100}.{n}" for n in range(4000)]
    facts.add(1, "2026", manifest(store, {name: np.full(8, 1.0) for name in names}))
    data = history_page("checkpoint", "run", facts)

    assert Page(data).facts["names"] == names
    assert len(data) < 100_000


def test_page_shows_metrics_of_the_run_at_its_steps(facts: SeriesFacts) -> None:
    metrics = {"loss": [(0, 3.0), (9, 2.5), (10, 2.0), (25, float("nan")), (29, 1.0)], "late": [(99, 1.0)]}
    run = RunFacts(run_id="r", name="ant", experiment_id="7", metrics=metrics, ui="http://u:5000/ml")
    page = Page(history_page("net", run, facts, rule="keep the last 2 steps"))

    assert "loss: 1" in page.text
    assert "late: " not in page.text
    assert "Rule: keep the last 2 steps." in page.text
    assert page.links == ["/#/experiments/7/runs/r"]


def test_sketches_tell_about_how_much_tensors_changed() -> None:
    store = Store.init_backend(MemoryBackend())
    rng = np.random.default_rng(0)
    weights = {f"layers.{n}.w": rng.standard_normal((256, 256)).astype(np.float32) for n in range(2)}
    facts = SeriesFacts()
    facts.add(0, "2026", sketched_manifest(store, weights))
    weights["layers.1.w"] = weights["layers.1.w"] * np.float32(1.25)
    facts.add(1, "2026", sketched_manifest(store, weights))
    page = Page(history_page("net", "run", facts))

    assert facts.steps[1].amounts["layers.0"] == 0
    assert facts.steps[1].amounts["layers.1"] == pytest.approx(0.25, abs=0.01)
    assert page.facts["isEstimate"]
    assert page.value("layers.0.w") is None
    norm, equal, largest = page.value("layers.1.w") or []
    assert norm == pytest.approx(0.25, abs=0.01)
    assert (equal, largest) == (0.0, None)
    assert "by how much, estimated" in page.text


def sketched_manifest(store: Store, state: dict[str, np.ndarray]) -> Manifest:
    made = manifest(store, state)
    rows = [state[made.rows[row].spec.name].ravel() for row in sketched_rows(made.columns)]
    return made.sketched(sketch_bytes(np.array([words_of(row[positions(len(row))]) for row in rows])))


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
    assert "Rule: keep the last 2 steps." in page.text
    assert "Deleted: 2 steps." in page.text
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


def test_page_of_another_process_counts_the_steps_deleted_before(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run() as run:
        for step in (1, 2, 3):
            mlflow.tensorcas.log_checkpoint(state_of(step), step=step, keep=Keep(last=1))
        mlflow.tensorcas.wait()
        monkeypatch.setattr(_pages, "_histories", type(_pages._histories)())
        mlflow.tensorcas.log_checkpoint(state_of(3), step=4)

    page = page_of(run.info.run_id)
    assert steps_of(page) == ["4", "3"]
    assert "Deleted: 2 steps." in page.text


def test_page_shows_the_metric_of_the_rule_first(plain_experiment: str) -> None:
    with mlflow.start_run() as run:
        for step in range(3):
            mlflow.log_metrics({"a_loss": 3.0 - step, "val_loss": 1.0 / (1 + step)}, step=step)
            mlflow.tensorcas.log_checkpoint(state_of(step), step=step, keep=Keep(best="val_loss", n_best=5))

    page = page_of(run.info.run_id)
    assert re.findall(r"([a-z_]+): ([0-9.]+)", page.text.partition("Metric")[2])[:2] == [
        ("val_loss", "0.3333"),
        ("a_loss", "1"),
    ]


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


@pytest.mark.long
def test_steps_between_two_writings_of_a_page_are_all_on_it(plain_experiment: str) -> None:
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint({"w": np.zeros(3)}, step=0)
        mlflow.tensorcas.wait()
        (history,) = (each for each in _pages._histories.values() if each.series.run.run_id == run.info.run_id)
        history.next_s = time.monotonic() + 3600
        for step in range(1, 100):
            mlflow.tensorcas.log_checkpoint({"w": np.full(3, step)}, step=step)
            assert len(history.waiting) <= 64
    page = page_of(run.info.run_id)

    assert len(steps_of(page)) == 100
    assert "Not shown" not in page.text


@pytest.mark.long
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
