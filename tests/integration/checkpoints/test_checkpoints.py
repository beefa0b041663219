"""Checkpoints of a run: what is logged comes back, and every step stays what it was."""

from __future__ import annotations

import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.store import Store
from tests.integration.checkpoints.states import assert_same, load, log, make_state, steps

# --- logging and loading


@pytest.mark.long
def test_every_step_comes_back_as_it_was_logged(experiment: str) -> None:
    state = make_state()
    logged = []
    with mlflow.start_run():
        for step in (0, 3, 10):
            state["weights"][step] += 1
            state["epoch"] = step
            log(state, step)
            logged.append((step, {**state, "weights": state["weights"].copy()}))

    for step, expected in logged:
        assert_same(load(step=step), expected)


@pytest.mark.long
def test_a_checkpoint_is_loaded_in_another_process(experiment: str, tracking_uri: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        log(make_state(), 5)
    program = (
        "import mlflow, sys, numpy as np\n"
        f"mlflow.set_tracking_uri({tracking_uri!r})\n"
        "from tensorcas_mlflow.integration.checkpoints import load_checkpoint\n"
        "np.save(sys.argv[2], load_checkpoint(sys.argv[1], step=5)['weights'])"
    )
    subprocess.run([sys.executable, "-c", program, run.info.run_id, tmp_path / "out.npy"], check=True)

    assert np.array_equal(np.load(tmp_path / "out.npy"), make_state()["weights"])


def test_the_latest_step_is_loaded_unless_one_is_named(experiment: str) -> None:
    with mlflow.start_run():
        for step in (9, 10, 2):
            log(make_state(step), step)

    assert load()["epoch"] == 10
    assert load(step=2)["epoch"] == 2


def test_a_checkpoint_is_loaded_by_the_uri_it_was_logged_at(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(1), 1, name="other")
        info = log(make_state(2), 2, name="other")
        log(make_state(3), 3, name="other")

    assert load(info.uri)["epoch"] == 2
    with pytest.raises(MlflowException, match="step=7 was given"):
        load(info.uri, step=7)
    with pytest.raises(MlflowException, match="of the series 'other', and name='ema' was given"):
        load(info.uri, name="ema")


def test_a_live_state_is_filled_in_place(experiment: str) -> None:
    live = make_state(1)
    weights = live["weights"]
    with mlflow.start_run():
        log(make_state(2), 2)

    assert load(into=live) is live
    assert np.array_equal(weights, make_state(2)["weights"])


def test_weights_are_loaded_without_a_pickle(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    with mlflow.start_run():
        log(make_state(2), 2)

    arrays = load(weights_only=True).values()
    assert any(np.array_equal(array, make_state(2)["weights"]) for array in arrays)
    with pytest.raises(MlflowException, match="MLFLOW_ALLOW_PICKLE_DESERIALIZATION"):
        load()


def test_an_option_that_the_adapter_does_not_have_is_refused(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(), 0)

    with pytest.raises(MlflowException, match="no option 'device'"):
        load(device="cpu")


def test_a_step_that_is_not_there_is_named_with_those_that_are(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(), 3)

    with pytest.raises(MlflowException, match=r"at step 4; there are steps 3"):
        load(step=4)
    with pytest.raises(MlflowException, match="no checkpoint 'other' in run"):
        load(name="other")


# --- what is stored


def test_unchanged_tensors_are_not_stored_again(experiment: str) -> None:
    state = make_state()
    with mlflow.start_run():
        first = log(state, 0)
        state["epoch"] = 1
        second = log(state, 1)
        third = log(state, 2)

    arrays = state["weights"].nbytes + state["moments"]["m"].nbytes
    assert arrays < first.new_bytes <= first.total_bytes == second.total_bytes
    assert second.new_bytes < 1_000
    assert third.new_bytes == 0
    assert third.stored_bytes is not None
    assert third.stored_bytes < 1_000
    assert third.n_tensors == 2


def test_an_array_changed_in_place_is_seen(experiment: str) -> None:
    state = make_state()
    with mlflow.start_run():
        log(state, 0)
        state["weights"][17, 2] = 42.0
        info = log(state, 1)

    assert 0 < info.new_bytes < state["weights"].nbytes
    assert load(step=1)["weights"][17, 2] == 42.0
    assert_same(load(step=0), make_state())


@pytest.mark.long
def test_runs_and_logged_models_share_what_they_store(experiment: str) -> None:
    from sklearn.linear_model import LinearRegression

    X = np.random.default_rng(0).normal(size=(50, 4))
    model = LinearRegression().fit(X, X @ np.random.default_rng(1).normal(size=(4, 5_000)))
    with mlflow.start_run():
        mlflow.tensorcas.log_model(model, name="model")
    with mlflow.start_run():
        info = mlflow.tensorcas.log_checkpoint(model, step=0)

    assert info.total_bytes > model.coef_.nbytes
    assert info.new_bytes == 0


# --- steps that are there already


def test_a_step_that_is_there_is_refused_and_untouched(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
        with pytest.raises(MlflowException, match="already a checkpoint") as caught:
            log(make_state(2), 1)

    assert caught.value.error_code == "RESOURCE_ALREADY_EXISTS"
    assert_same(load(step=1), make_state(1))


@pytest.mark.long
def test_a_step_is_replaced_on_request(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
        log(make_state(2), 1, overwrite=True)

    assert_same(load(step=1), make_state(2))
    assert steps() == [1]


# --- runs and names


def test_a_run_is_started_if_none_is_active(experiment: str) -> None:
    info = log(make_state(), 0)
    active = mlflow.active_run()

    assert active is not None
    assert info.run_id == active.info.run_id


def test_checkpoint_can_be_logged_to_a_named_run(experiment: str) -> None:
    run_id = mlflow.MlflowClient().create_run(experiment).info.run_id
    with mlflow.start_run():
        log(make_state(1), 1)
        info = log(make_state(2), 2, run_id=run_id)

    assert info.run_id == run_id
    assert load(run_id)["epoch"] == 2
    assert steps(run_id=run_id) == [2]
    assert steps() == [1]


def test_a_run_that_is_not_there_is_an_error(experiment: str) -> None:
    with pytest.raises(MlflowException, match="not found"):
        log(make_state(), 0, run_id="0" * 32)


def test_names_keep_series_apart(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
        log(make_state(2), 1, name="ema weights é")

    assert load(name="ema weights é")["epoch"] == 2
    records = mlflow.tensorcas.list_checkpoints()
    assert [(record.name, record.step) for record in records] == [("checkpoint", 1), ("ema weights é", 1)]
    assert [load(record.uri)["epoch"] for record in records] == [1, 2]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../../x", "a\nb", "a\0b", "x" * 101, "\x1b[2J", "a#b", "a?b", "%41", "%2e%2e"]
)
def test_a_name_that_can_be_no_files_is_refused(experiment: str, name: str) -> None:
    with pytest.raises(MlflowException, match="a checkpoint's name"):
        log(make_state(), 0, name=name)


@pytest.mark.long
def test_mlflow_downloads_a_checkpoint_of_every_name_that_is_taken(experiment: str) -> None:
    with mlflow.start_run():
        for sign in set(string.punctuation) - set("/%?#"):
            info = log({"w": np.ones(3)}, 1, name=f"a{sign}b", log_metrics=False)
            mlflow.tensorcas.wait()

            assert Path(mlflow.artifacts.download_artifacts(info.uri)).stat().st_size > 0, sign


def test_a_name_that_is_no_text_is_refused(experiment: str) -> None:
    with mlflow.start_run(), pytest.raises(TypeError, match="a checkpoint's name is a text, not 5"):
        log(make_state(), 0, name=5)


def test_a_run_is_named_by_its_id_its_uri_or_itself(experiment: str) -> None:
    with mlflow.start_run() as run:
        log(make_state(1), 1)

    for named in (run.info.run_id, f"runs:/{run.info.run_id}", f"runs:/{run.info.run_id}/", run):
        assert load(named)["epoch"] == 1
        assert steps(run_id=named) == [1]
        with mlflow.tensorcas.open_checkpoint(named) as reader:
            assert "weights" in reader
    mlflow.tensorcas.delete_checkpoint(run, step=1)
    assert steps(run_id=run) == []


def test_uri_of_neither_run_nor_model_is_refused_with_what_to_pass(experiment: str) -> None:
    for call in (load, mlflow.tensorcas.list_checkpoints):
        with pytest.raises(TypeError, match="a run id is a text"):
            call(5)
    with pytest.raises(TypeError, match="a run's id, a URI or a path, not 5"):
        mlflow.tensorcas.open_checkpoint(5)
    with pytest.raises(TypeError, match="a model is named by its URI"):
        mlflow.tensorcas.load_model(None)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_artifact_of_the_users_that_has_the_name_of_a_step_stays(
    experiment: str, tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "step-00000009.arrow").write_text("mine")
    with mlflow.start_run() as run:
        mlflow.log_artifact(str(tmp_path / "step-00000009.arrow"), "checkpoints/checkpoint")
        with pytest.raises(MlflowException, match="is no checkpoint and stays as it is"):
            log(make_state(), 9, overwrite=overwrite)

    kept = mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/checkpoints/checkpoint/step-00000009.arrow")
    assert (kept, steps(run_id=run.info.run_id)) == ("mine", [])


@pytest.mark.parametrize("step", [1.5, "1", None, 2**63])
def test_invalid_step_of_a_checkpoint_is_refused(experiment: str, step: Any) -> None:
    with pytest.raises(MlflowException, match="step must"):
        log(make_state(), step)


def test_negative_and_numpy_steps_are_steps(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(), -5)
        log(make_state(), np.int64(7))  # type: ignore[arg-type]

    assert steps() == [-5, 7]
    assert load(step=-5)["epoch"] == 0


def test_a_run_without_checkpoints_has_none(experiment: str) -> None:
    with mlflow.start_run():
        pass

    assert steps() == []


def test_a_named_place_without_a_store_is_refused_and_does_not_pass_for_a_run_without_checkpoints(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mlflow.start_run():
        log(make_state(1), 1)
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "typo"))

    for options in ({}, {"name": "checkpoint"}):
        with pytest.raises(MlflowException, match=r"there is no store at .*typo"):
            steps(**options)
    assert not (tmp_path / "typo").exists()


def test_a_relative_path_is_refused_as_the_name_of_a_store(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORCAS_STORE", "stores/one")
    with mlflow.start_run():
        for call in (lambda: log(make_state(1), 1), steps, load):
            with pytest.raises(MlflowException, match="TENSORCAS_STORE is the relative path 'stores/one'"):
                call()

    assert not (tmp_path / "stores").exists()


@pytest.mark.long
def test_a_store_elsewhere_is_used_where_it_is_named(
    plain_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "elsewhere"))
    with mlflow.start_run():
        log(make_state(1), 1)

    assert_same(load(), make_state(1))
    assert len(Store.open(tmp_path / "elsewhere").checkpoints()) == 1
    assert not (tmp_path / "artifacts/.tensorcas").exists()


def test_a_damaged_step_is_left_out_of_the_list_and_told_when_it_is_loaded(
    experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run() as run:
        for step in (-1, 2, 3):
            log(make_state(abs(step)), step)
    store, _ = Store.find(run.info.artifact_uri)
    key = next(ref.key for ref in store.checkpoints() if ref.step == 2)
    store.backend.delete(key)
    store.backend.put_new(key, [b"no ref"])

    assert steps() == [-1, 3]
    assert "step 2 of 'checkpoint' is left out of the list" in caplog.text
    with pytest.raises(MlflowException, match="is damaged"):
        load(step=2)
    before = f"runs:/{run.info.run_id}/checkpoints/checkpoint/step-minus-00000001.arrow"
    assert mlflow.tensorcas.list_checkpoints()[0].uri == before
    assert load(before)["epoch"] == 1
