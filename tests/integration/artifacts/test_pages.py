"""The page of a checkpoint: what it says of tensors, of what was there before, and of hostile names."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.integration.artifacts import _virtual
from tensorcas_mlflow.integration.pages import _checkpoint, _earlier, render_page
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tests.integration.artifacts.pages import Page
from tests.integration.checkpoints.states import log, make_state

CHUNK_BYTES = 4096


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.init(tmp_path / "root", chunk_bytes=CHUNK_BYTES)


def noise(seed: int, n_bytes: int = 3 * CHUNK_BYTES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n_bytes).astype(np.uint8)


def save(store: Store, tensors: dict[str, np.ndarray], path: str, **said: object) -> Ref:
    with store.write_checkpoint(tensors, flavor="test") as pending:
        return pending.commit(RefTarget(path=path, **said))  # type: ignore[arg-type]


def step(store: Store, number: int, tensors: dict[str, np.ndarray], *, name: str = "net", run_id: str = "r1") -> Ref:
    path = f"{run_id}/artifacts/checkpoints/{name}/step-{number:08d}.arrow"
    return save(store, tensors, path, run_id=run_id, step=number, name=name)


def page(store: Store, ref: Ref) -> Page:
    return Page(render_page(store, ref))


# --- what is said


def test_a_page_says_what_the_tensors_are(store: Store) -> None:
    tensors = {"w": np.zeros((30, 100), np.float32), "n": np.array(3), "__skeleton__": np.zeros(5_000, np.uint8)}
    shown = page(store, step(store, 3, tensors))

    assert shown.rows[0] == ["Tensor", "Dtype", "Shape", "Size", "This step"]
    assert shown.tensors["w"][:3] == ["float32", "30 \N{MULTIPLICATION SIGN} 100", "12.0 KB"]
    assert shown.tensors["n"][:3] == ["int64", "scalar", "8 B"]
    assert shown.tensors["__skeleton__"][:3] == ["bytes", "5000", "5.0 KB"]
    assert "Run r1, net, step 3" in shown.texts
    assert "by the adapter test" in shown.text


def test_tensors_of_the_first_step_are_new(store: Store) -> None:
    shown = page(store, step(store, 0, {"a": noise(0), "b": noise(1)}))

    assert {shown.before(name) for name in "ab"} == {"new at this step"}
    assert "New here 24.6 KB (100.0 %)" in shown.text


def test_a_tensor_is_shared_with_the_earliest_step_that_held_it(store: Store) -> None:
    step(store, 1, {"frozen": noise(0), "head": noise(1)})
    step(store, 2, {"frozen": noise(0), "head": noise(2)})
    ref = step(store, 3, {"frozen": noise(0), "head": noise(2), "added": noise(3), "empty": np.zeros(0)})
    step(store, 4, {"added": noise(3)})
    shown = page(store, ref)

    assert shown.before("frozen") == "shared with step 1"
    assert shown.before("head") == "shared with step 2"
    assert shown.before("added") == "new at this step"
    assert shown.before("empty") == "empty"
    assert "New here 12.3 KB (33.3 %)" in shown.text


def test_a_tensor_under_another_name_is_the_same_tensor(store: Store) -> None:
    step(store, 1, {"before": noise(0)})

    assert page(store, step(store, 2, {"after": noise(0)})).before("after") == "shared with step 1"


def test_a_tensor_of_another_shape_or_dtype_is_not_the_same(store: Store) -> None:
    step(store, 1, {"a": np.arange(4096.0)})
    shown = page(store, step(store, 2, {"a": np.arange(4096.0).reshape(64, 64)}))

    assert shown.before("a") == "rearranged: all of 8 chunks are known"
    assert "New here 0 B (0.0 %)" in shown.text


def test_a_tensor_that_changed_in_part_says_how_much(store: Store) -> None:
    changed = noise(0).copy()
    changed[CHUNK_BYTES] ^= 1
    step(store, 1, {"a": noise(0)})
    shown = page(store, step(store, 2, {"a": changed}))

    assert shown.before("a") == "in part: 1 of 3 chunks are new"
    assert "New here 4.1 KB (33.3 %)" in shown.text


def test_page_names_the_checkpoint_outside_the_series_that_holds_a_tensor(store: Store) -> None:
    step(store, 7, {"a": noise(0)}, name="ema")
    save(store, {"b": noise(1)}, "models/m-1/artifacts/data/checkpoint.arrow", run_id="r1", model_id="m-1", step=5)
    step(store, 2, {"c": noise(2)}, run_id="r0")
    shown = page(store, step(store, 1, {"a": noise(0), "b": noise(1), "c": noise(2)}))

    assert shown.before("a") == "shared with ema step 7"
    assert shown.before("b") == "shared with model m-1 step 5"
    assert shown.before("c") == "shared with net step 2 of run r0"


def test_models_of_one_run_are_steps_of_each_other(store: Store) -> None:
    for number in (1, 2, 3):
        path = f"models/m-{number}/artifacts/data/checkpoint.arrow"
        tensors = {"frozen": noise(0), "head": noise(number)}
        ref = save(store, tensors, path, run_id="r1", model_id=f"m-{number}", step=number)
    shown = page(store, ref)

    assert shown.before("frozen") == "shared with step 1"
    assert shown.before("head") == "changed in all chunks"
    assert "Model m-3, step 3" in shown.texts
    assert "of run r1" in shown.text


def test_page_of_a_step_ignores_later_steps(store: Store) -> None:
    ref = step(store, 1, {"a": noise(0)})
    step(store, 2, {"a": noise(0)})
    step(store, 0, {"a": noise(0)}, run_id="r2")

    assert page(store, ref).before("a") == "new at this step"


def test_files_that_hold_the_same_tensors_are_named(store: Store, tmp_path: Path) -> None:
    np.save(tmp_path / "weights.npy", noise(0, 80_000))
    with store.write_file(tmp_path / "weights.npy") as pending:
        pending.commit(RefTarget(path="r0/artifacts/weights.npy", run_id="r0"))

    assert page(store, step(store, 1, {"a": noise(0, 80_000)})).before("a") == "shared with weights.npy of run r0"


def test_a_file_that_is_a_step_of_another_run_is_named_as_that(store: Store, tmp_path: Path) -> None:
    write_payload(tmp_path, {"a": noise(0, 80_000)}, flavor="test")
    with store.write_file(tmp_path / PAYLOAD_FILE) as pending:
        pending.commit(RefTarget(path="r0/artifacts/checkpoints/net/step-00000002.tensors", run_id="r0"))

    assert page(store, step(store, 1, {"a": noise(0, 80_000)})).before("a") == "shared with net step 2 of run r0"


def test_steps_that_came_as_files_are_steps_of_each_other(store: Store, tmp_path: Path) -> None:
    for number in (8, 9, 10):
        folder = tmp_path / str(number)
        write_payload(folder, {"frozen": noise(0), "head": noise(number)})
        path = f"r1/artifacts/checkpoints/net/step-{number:08d}.tensors"
        with store.write_file(folder / PAYLOAD_FILE) as pending:
            ref = pending.commit(RefTarget(path=path, run_id="r1"))
    shown = page(store, ref)

    assert "Run r1, step 10" in shown.texts
    assert shown.before("frozen") == "shared with step 8"
    assert shown.before("head") == "changed in all chunks"


def test_steps_that_came_as_files_have_a_page_of_their_series(store: Store, tmp_path: Path) -> None:
    """A server that keeps a store gets the steps of a training so."""
    folder = "r1/artifacts/checkpoints/net"
    for number in (8, 9, 10):
        write_payload(tmp_path / str(number), {"frozen": noise(0), "head": noise(number)})
        with store.write_file(tmp_path / str(number) / PAYLOAD_FILE) as pending:
            ref = pending.commit(RefTarget(path=f"{folder}/step-{number:08d}.tensors", run_id="r1"))
    history = _virtual.virtual_at(store, f"{folder}/history.html")
    assert isinstance(history, _virtual.HistoryFile)
    data = b"".join(history.pieces())

    assert len(data) == history.n_bytes
    shown = Page(data)
    assert "net of run r1" in shown.texts
    assert [row[0] for row in shown.rows if len(row) == 6] == ["Step", "10", "9", "8"]
    assert [each["nChanged"] for each in shown.facts["steps"]] == [2, 1, 1]
    assert shown.facts["names"] == ["frozen", "head"]  # and not the bytes between them
    assert "before: step 9, all steps" in page(store, ref).text


@pytest.mark.usefixtures("store_of_files")
def test_page_leaves_out_and_names_an_unreadable_checkpoint(store: Store, tmp_path: Path) -> None:
    step(store, 1, {"a": noise(0)})
    damaged = step(store, 2, {"a": noise(0), "b": noise(1)})
    (tmp_path / "root/.tensorcas/manifests" / damaged.manifest).write_bytes(b"damaged")
    shown = page(store, step(store, 3, {"a": noise(0), "b": noise(2)}))

    assert shown.before("a") == "shared with step 1"
    assert "Compared with 1 earlier" in shown.text


# --- in a server


def test_a_server_names_no_run_of_another_experiment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ids = [digit * 32 for digit in "012"]
    for experiment, run_id in zip(("1", "2", "2"), run_ids, strict=True):
        path = f"{experiment}/{run_id}/artifacts/x.arrow"
        ref = save(store, {"a": noise(0)}, path, run_id=run_id, uri=f"tensorcas:///own/{path}")

    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "tensorcas:///own")
    assert page(store, ref).before("a") == f"shared with x.arrow of run {run_ids[1]}"
    assert run_ids[0] not in page(store, ref).text


def test_a_server_names_the_other_steps_of_a_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    step(store, 1, {"a": noise(0)})
    ref = step(store, 2, {"a": noise(0)})
    path = "other/r1x/artifacts/checkpoints/net/step-00000001.arrow"
    save(
        store, {"b": noise(1)}, path, run_id="r1", step=1, name="net"
    )  # says that it is of this run, and lies elsewhere
    forged = step(store, 3, {"b": noise(1)})

    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "tensorcas:///own")
    assert page(store, ref).before("a") == "shared with step 1"
    assert page(store, forged).before("b") == "new at this step"


# --- bounds


def test_a_page_says_when_it_has_not_looked_at_everything(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_earlier, "MAX_CHECKPOINTS", 3)
    refs = [step(store, number, {"a": noise(0), "b": noise(number)}) for number in range(6)]

    assert page(store, refs[5]).before("a") == "shared with step 2"
    assert "Compared with 3 earlier" in page(store, refs[5]).text
    assert "Compared with" not in page(store, refs[3]).text


def test_a_page_stops_at_so_many_rows_and_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_earlier, "MAX_ROWS", 1)
    refs = [step(store, number, {"a": noise(number)}) for number in range(3)]

    assert "Compared with 1 earlier" in page(store, refs[2]).text


def test_a_page_reads_a_bounded_number_of_refs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_earlier, "MAX_REFS", 2)
    for number in range(5):
        step(store, number, {"a": noise(number)}, run_id=f"r{number}")
    shown = page(store, step(store, 9, {number: noise(int(number)) for number in "01234"}, run_id="r9"))

    assert [shown.before(number)[:6] for number in "01234"] == ["new at", "new at", "new at", "shared", "shared"]
    assert "Compared with 2 earlier" in shown.text


def test_many_tensors_are_counted_and_not_all_shown(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint, "MAX_ROWS_SHOWN", 10)
    shown = page(store, step(store, 1, {f"t{number}": np.full(100, number) for number in range(25)}))

    assert len(shown.tensors) == 10
    assert "and 15 more tensors of 12.0 KB together" in shown.text


# --- hostile names

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "</td></tr></table><h1>taken over</h1>",
    "a\u202etxt.exe\u2066",
    "zero\u200bwidth\u0007\u2028",
    "&lt;b&gt;",
    "{{7*7}} ${x} <!--",
]
EXPECTED = {"html", "head", "meta", "title", "style", "body", "h1", "p", "ul", "li", "span"}
EXPECTED |= {"table", "thead", "tbody", "tr", "th", "div", "label", "input", "script", "data", "noscript", "button"}


def test_names_are_shown_as_text_whatever_they_are(store: Store) -> None:
    tensors = {name: noise(number) for number, name in enumerate(HOSTILE)}
    for name in HOSTILE:
        step(store, 1, tensors, name=name.replace("/", ""), run_id="r1")
    path = "models/x/artifacts/data/checkpoint.arrow"
    ref = save(store, tensors, path, run_id=HOSTILE[0], model_id=HOSTILE[1], name=HOSTILE[2], metrics={HOSTILE[4]: 1.0})
    data = render_page(store, ref)
    shown = Page(data)

    assert set(shown.elements) == EXPECTED
    assert shown.elements.count("h1") == 1
    for name in HOSTILE[:3] + HOSTILE[5:]:
        assert name in shown.tensors
    assert "a\\u{202e}txt.exe\\u{2066}" in shown.tensors
    assert not any(ord(c) < 32 or 0x2000 <= ord(c) <= 0x206F for c in data.decode().replace("\n", "").replace("…", ""))


def test_a_long_name_is_cut_off(store: Store) -> None:
    shown = page(store, step(store, 1, {"x" * 4_000: noise(0)}))

    assert shown.facts["names"] == ["x" * 300 + "…"]


def test_a_page_loads_nothing_and_runs_its_script_alone(store: Store) -> None:
    data = render_page(store, step(store, 1, {"a": noise(0)})).decode()

    assert "default-src 'none'" in data
    assert data.count("<script") == 1
    assert not any(word in data for word in ("http:", "https:", "src=", "url(", "@import", "innerHTML", "eval("))


# --- how much


def test_page_tells_how_much_tensors_changed_since_the_step_before(store: Store) -> None:
    before = {"a": np.array([3.0, 4.0]).repeat(20), "same": np.ones(40), "shape": np.ones(40)}
    step(store, 1, before)
    after = {"a": before["a"] + np.array([0.0, 0.5]).repeat([39, 1]), "same": np.ones(40), "shape": np.zeros((8, 8))}
    shown = page(store, step(store, 2, after))

    norm, equal, largest = shown.value("a") or []
    assert norm == pytest.approx(0.5 / (20 * 25) ** 0.5, rel=0.01)
    assert (equal, largest) == (0.975, 0.5)
    assert shown.value("same") is None
    assert shown.value("shape") is None
    assert "How much: the change since step 1. Not measured: 1 tensor." in shown.text


def test_page_measures_the_smallest_tensors_within_its_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint, "MOST_MEASURED_BYTES", 3_000)
    for number in (1, 2):
        ref = step(store, number, {f"t{n}": np.full(100 * n, number * 1.5) for n in (3, 2, 1)})
    shown = page(store, ref)

    assert [shown.value(f"t{n}") for n in (1, 2)] == [[1.0, 0.0, 1.5]] * 2
    assert shown.value("t3") is None


@pytest.mark.usefixtures("store_of_files")
def test_page_of_tensors_that_cannot_be_read_says_no_amounts(store: Store, tmp_path: Path) -> None:
    step(store, 1, {"a": noise(0)})
    ref = step(store, 2, {"a": noise(1)})
    for pack in (tmp_path / "root/.tensorcas/packs").rglob("*.pack"):
        pack.write_bytes(b"damaged")
    shown = page(store, ref)

    assert shown.facts["values"] is None
    assert shown.before("a") == "changed in all chunks"


# --- through MLflow


def test_a_page_is_downloaded_from_a_run(cas_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        for number in range(2):
            log({**make_state(number, 100), "frozen": np.arange(10_000.0)}, step=number)
    artifact = "checkpoints/checkpoint/step-00000001.html"
    file = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=artifact, dst_path=str(tmp_path))
    shown = Page(Path(file).read_bytes())

    assert f"{run.info.run_name}, checkpoint, step 1" in shown.texts
    assert shown.before("frozen") == "shared with step 0"
    assert shown.before("weights") == "changed in all chunks"


def test_page_links_to_run_and_neighbors_and_has_its_listed_size(cas_experiment: str) -> None:
    with mlflow.start_run() as run:
        for number in range(3):
            log(make_state(number, 100), step=number)
    run_id = run.info.run_id
    listed = {file.path: file.file_size for file in MlflowClient().list_artifacts(run_id, "checkpoints/checkpoint")}
    found = {}
    for path in ("step-00000001.html", "history.html"):
        file = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=f"checkpoints/checkpoint/{path}")
        found[path] = Path(file).read_bytes()

    for path, data in found.items():
        assert listed[f"checkpoints/checkpoint/{path}"] == len(data)
    top = f"/#/experiments/{run.info.experiment_id}/runs/{run_id}"
    below = f"{top}/artifacts/checkpoints/checkpoint"
    assert Page(found["step-00000001.html"]).links == [
        top,
        *(f"{below}/{name}.html" for name in ("step-00000000", "step-00000002", "history")),
    ]
    assert Page(found["history.html"]).links == [top]


def test_page_names_the_registered_versions_of_a_model(cas_experiment: str) -> None:
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit(np.arange(6.0).reshape(3, 2), np.arange(3.0))
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(model, name="m", registered_model_name="prices")
    files = mlflow.artifacts.list_artifacts(info.artifact_path) or []
    [path] = [file.path for file in files if file.path.endswith("html")] or ["data/checkpoint.html"]
    shown = Page(Path(mlflow.artifacts.download_artifacts(f"{info.artifact_path}/{path}")).read_bytes())

    assert "registered as prices version 1" in shown.text
    assert "/#/models/prices/versions/1" in shown.links
