"""Storage figures of logged models: tags of the model and of its registered version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from tensorcas_mlflow.integration.models import _log
from tensorcas_mlflow.store import Store
from tests.integration.models.test_log import make_model
from tests.stored_bytes import bytes_below


def log(seed: int, **options: Any) -> Any:
    return mlflow.tensorcas.log_model(make_model(seed), **{"name": "net", "pip_requirements": [], **options})


def tags_of(info: Any) -> dict[str, str]:
    tags = MlflowClient().get_logged_model(info.model_id).tags
    return {key: value for key, value in tags.items() if key.startswith("tensorcas.")}


@pytest.mark.long
def test_figures_of_models_are_tags(experiment: str) -> None:
    with mlflow.start_run() as run:
        first, second = log(1, step=1), log(1, step=2)
    mlflow.tensorcas.wait()
    tags, again = tags_of(first), tags_of(second)

    assert tags.keys() == {"tensorcas.new_bytes", "tensorcas.stored_bytes"}
    assert int(tags["tensorcas.new_bytes"]) > make_model(1).coef_.nbytes
    assert int(tags["tensorcas.stored_bytes"]) > int(again.pop("tensorcas.stored_bytes")) > 0
    assert again == {"tensorcas.new_bytes": "0", "tensorcas.shares_with": f"models:/{first.model_id} (100.0%)"}
    assert MlflowClient().get_run(run.info.run_id).data.metrics == {}


def test_tags_that_are_made_late_do_not_name_a_later_model(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_are_logged = threading.Event()
    tag_later = _log.tag_model_later

    def tag_late(model_id: str, tags: Callable[[], Mapping[str, str]], tracking_uri: str) -> None:
        def wait_for_both() -> Mapping[str, str]:
            assert both_are_logged.wait(timeout=300)
            return tags()

        tag_later(model_id, wait_for_both, tracking_uri)

    monkeypatch.setattr(_log, "tag_model_later", tag_late)
    with mlflow.start_run():
        first, second = log(1), log(1)
    both_are_logged.set()
    mlflow.tensorcas.wait()

    assert "tensorcas.shares_with" not in tags_of(first)
    assert first.model_id in tags_of(second)["tensorcas.shares_with"]


def test_stored_bytes_of_a_model_are_all_that_the_store_has_grown_by(cas_experiment: str, tmp_path: Path) -> None:
    Store.open(tmp_path / "artifacts", create=True)
    before = bytes_below(tmp_path / "artifacts/.tensorcas")
    # Of a small one, the database takes less than its blobs have, since they share records.
    model = make_model(1, n_targets=400)
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(model, name="net", pip_requirements=[])
    mlflow.tensorcas.wait()

    stored = int(tags_of(info)["tensorcas.stored_bytes"])
    assert stored == pytest.approx(bytes_below(tmp_path / "artifacts/.tensorcas") - before, rel=0.1)


@pytest.mark.long
def test_registered_version_names_the_run_whose_checkpoint_it_shares(experiment: str) -> None:
    with mlflow.start_run() as earlier:
        mlflow.tensorcas.log_checkpoint({"coef": make_model(1).coef_, "more": np.arange(99.0)}, step=1)
    with mlflow.start_run():
        info = log(1, registered_model_name="best", tags={"mine": "1"})
    mlflow.tensorcas.wait()
    tags = MlflowClient().get_model_version("best", "1").tags

    assert tags == {"mine": "1", **tags_of(info)}
    assert tags["tensorcas.shares_with"].startswith(f"runs:/{earlier.info.run_id} (9")
    assert 0 < int(tags["tensorcas.new_bytes"]) < make_model(1).coef_.nbytes / 2


def test_figures_of_models_can_be_switched_off(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORCAS_LOG_METRICS", "false")
    with mlflow.start_run() as run:
        info = log(1, registered_model_name="best")
    mlflow.tensorcas.wait()

    assert MlflowClient().get_run(run.info.run_id).data.metrics == {}
    assert tags_of(info) == MlflowClient().get_model_version("best", "1").tags == {}


def test_model_without_a_run_has_tags_and_starts_no_run(experiment: str) -> None:
    info = log(1)
    mlflow.tensorcas.wait()

    assert set(tags_of(info)) == {"tensorcas.new_bytes", "tensorcas.stored_bytes"}
    assert MlflowClient().search_runs([experiment]) == []


def test_figures_that_mlflow_refuses_cost_no_model(
    experiment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(MlflowClient, "set_logged_model_tags", fail)
    monkeypatch.setattr("tensorcas_mlflow.integration._figures.find_shared", fail)
    with mlflow.start_run():
        info = log(1)
    mlflow.tensorcas.wait()

    np.testing.assert_array_equal(mlflow.tensorcas.load_model(info.model_uri).coef_, make_model(1).coef_)
    assert "a logged model's tags cannot be set: no answer" in caplog.text
    assert "share a model's bytes cannot be found" in caplog.text
