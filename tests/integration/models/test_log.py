"""Logging: where the tensors go, what MLflow gets to know, and what is left behind when it fails."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.base import config
from tensorcas_mlflow.layout._records import record_bytes
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, Store
from tests.python_calls import calls_of
from tests.stored_bytes import pack_bytes

X = np.random.default_rng(0).normal(size=(300, 40))


def make_model(seed: int = 0, *, n_targets: int = 50) -> LinearRegression:
    """Fit a model that differs from those of other seeds."""
    return LinearRegression().fit(X, np.random.default_rng(seed).normal(size=(300, n_targets)))


ENOUGH_FOR_A_HEAD_START = 8000
"""Targets of a model of 2.5 MB."""


def location(experiment_id: str) -> str:
    return str(mlflow.get_experiment(experiment_id).artifact_location)


def folder(experiment_id: str) -> Path:
    return Path("/", location(experiment_id).removeprefix("tensorcas:").lstrip("/"))


def stores_below(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.rglob(".tensorcas"))


def intents(root: Path) -> list[Path]:
    return [path for path in (root / ".tensorcas/intents").rglob("*") if path.is_file()]


def assert_same(model: LinearRegression, other: Any) -> None:
    np.testing.assert_array_equal(model.coef_, other.coef_)
    np.testing.assert_array_equal(model.intercept_, other.intercept_)


@pytest.mark.long
def test_the_weights_are_in_the_store_and_not_in_the_artifacts(experiment: str) -> None:
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(make_model(), name="model")

    roots = (info.artifact_path, f"{info.artifact_path}/data")
    files = [file for root in roots for file in mlflow.artifacts.list_artifacts(root) if not file.is_dir]
    real = [file for file in files if not file.path.endswith((".html", ".tensors"))]
    sizes = {Path(file.path).name: file.file_size for file in real}
    assert {"MLmodel", "requirements.txt", "conda.yaml", "python_env.yaml"} <= set(sizes)
    assert sum(sizes.values()) < make_model().coef_.nbytes / 2


@pytest.mark.long
def test_steps_become_logged_models_at_their_step(experiment: str) -> None:
    with mlflow.start_run() as run:
        infos = [mlflow.tensorcas.log_model(make_model(step), name="model", step=step) for step in range(3)]

    outputs = mlflow.get_run(run.info.run_id).outputs.model_outputs
    assert {(output.model_id, output.step) for output in outputs} == {
        (info.model_id, step) for step, info in enumerate(infos)
    }
    for step, info in enumerate(infos):
        logged = mlflow.get_logged_model(info.model_id)
        assert (logged.name, logged.source_run_id, logged.status) == ("model", run.info.run_id, "READY")
        assert mlflow.models.get_model_info(info.model_uri).flavors["tensorcas"]["step"] == step
        assert_same(make_model(step), mlflow.tensorcas.load_model(info.model_uri))


def test_the_ref_of_a_model_says_its_run_step_and_logged_model(experiment: str) -> None:
    with mlflow.start_run() as run:
        info = mlflow.tensorcas.log_model(make_model(), name="model", step=7)

    [ref] = Store.open(location(experiment)).checkpoints()
    assert (ref.run_id, ref.step, ref.model_id) == (run.info.run_id, 7, info.model_id)
    assert (ref.kind, ref.flavor) == ("checkpoint", "sklearn")
    assert ref.label.endswith(f"models/{info.model_id}/artifacts/data/{MANIFEST_FILE}")


@pytest.mark.long
def test_a_numpy_integer_is_a_step(experiment: str) -> None:
    with mlflow.start_run():
        info = mlflow.tensorcas.log_model(make_model(), name="model", step=np.int64(4))

    assert mlflow.models.get_model_info(info.model_uri).flavors["tensorcas"]["step"] == 4


def test_a_step_that_the_database_cannot_hold_is_refused(experiment: str) -> None:
    with pytest.raises(MlflowException, match="64 bits"):
        mlflow.tensorcas.log_model(make_model(), name="model", step=2**70)


def test_a_fraction_is_no_step(experiment: str) -> None:
    with pytest.raises(MlflowException, match="step must be a whole number"):
        mlflow.tensorcas.log_model(make_model(), name="model", step=0.5)

    assert mlflow.search_logged_models(output_format="list") == []


@pytest.mark.long
def test_all_runs_and_steps_of_an_experiment_share_one_store(experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run():
        mlflow.tensorcas.log_model(make_model(0), name="first", step=0)
        mlflow.tensorcas.log_model(make_model(1), name="first", step=1)
        with mlflow.start_run(nested=True) as child:
            nested = mlflow.tensorcas.log_model(make_model(2), name="nested")
    with mlflow.start_run():
        mlflow.tensorcas.log_model(make_model(3), name="second")
    mlflow.tensorcas.log_model(make_model(4), name="no run")

    assert stores_below(tmp_path) == [folder(experiment)]
    assert len(Store.open(location(experiment)).checkpoints()) == 5
    assert mlflow.get_logged_model(nested.model_id).source_run_id == child.info.run_id


def test_without_an_active_run_a_model_is_logged_and_no_run_is_made(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model", step=2)

    assert mlflow.active_run() is None
    assert mlflow.search_runs(output_format="list") == []
    assert mlflow.get_logged_model(info.model_id).experiment_id == experiment
    assert_same(make_model(), mlflow.tensorcas.load_model(info.model_uri))


def test_a_model_logged_twice_adds_no_tensor_bytes(experiment: str) -> None:
    mlflow.tensorcas.log_model(make_model(), name="model", step=0)
    before = pack_bytes(folder(experiment))
    mlflow.tensorcas.log_model(make_model(), name="model", step=1)

    assert before > 0
    assert pack_bytes(folder(experiment)) == before


def test_params_tags_type_and_metadata_mean_what_they_mean_in_mlflow(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(
        make_model(),
        name="model",
        params={"depth": 3},
        tags={"stage": "try"},
        model_type="regressor",
        metadata={"origin": "here"},
    )

    logged = mlflow.get_logged_model(info.model_id)
    assert logged.params == {"depth": "3"}
    assert logged.tags["stage"] == "try"
    assert logged.model_type == "regressor"
    assert info.metadata == {"origin": "here"}


def test_the_size_mlflow_shows_is_that_of_the_tensors(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")

    size = mlflow.models.Model.load(info.model_uri).model_size_bytes
    assert make_model().coef_.nbytes < size < 2 * make_model().coef_.nbytes


def test_a_model_can_be_logged_into_an_existing_logged_model(experiment: str) -> None:
    existing = mlflow.initialize_logged_model(name="existing")
    info = mlflow.tensorcas.log_model(make_model(), model_id=existing.model_id)

    assert info.model_id == existing.model_id
    assert_same(make_model(), mlflow.tensorcas.load_model(f"models:/{existing.model_id}"))


def test_metrics_of_the_step_are_linked_to_the_model(experiment: str) -> None:
    with mlflow.start_run():
        mlflow.log_metric("loss", 0.5, step=3)
        info = mlflow.tensorcas.log_model(make_model(), name="model", step=3)

    metrics = {metric.key: metric.value for metric in mlflow.get_logged_model(info.model_id).metrics}
    assert metrics == {"loss": 0.5}


def test_an_input_example_leaves_the_live_model_as_it_is(experiment: str) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)
            self.register_buffer("n_calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n_calls += 1
            return self.linear(x)

    model = Counting().train()
    info = mlflow.tensorcas.log_model(model, name="model", input_example=np.ones((2, 4), dtype=np.float32))

    assert info.signature is not None
    assert model.training
    assert model.linear.training
    assert model.n_calls == 0
    assert mlflow.tensorcas.load_model(info.model_uri).n_calls == 0


@pytest.mark.long
def test_an_input_example_gives_the_signature(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model", input_example=X[:2])

    assert info.signature == mlflow.models.infer_signature(X[:2], make_model().predict(X[:2]))
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(info.model_uri).input_example, X[:2])


def test_a_signature_that_is_given_counts(experiment: str) -> None:
    signature = mlflow.models.infer_signature(X[:, :1])
    info = mlflow.tensorcas.log_model(make_model(), name="model", input_example=X[:2], signature=signature)

    assert info.signature == signature


def test_requirements_are_the_framework_and_this_package_without_asking_a_process(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model", extra_pip_requirements=["tabulate"])

    names = [line.partition("==")[0] for line in _requirements(info.model_uri)]
    assert {"mlflow", "scikit-learn", "tensorcas-mlflow", "tabulate"} <= set(names)


def test_requirements_that_are_given_count(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model", pip_requirements=["mlflow", "scikit-learn"])

    assert _requirements(info.model_uri) == ["mlflow", "scikit-learn"]


def test_requirements_given_at_every_step_are_processed_once(experiment: str) -> None:
    options: dict[str, Any] = {"name": "model", "pip_requirements": ["mlflow", "scikit-learn", "made-up-once"]}

    mlflow.tensorcas.log_model(make_model(), **options)
    with calls_of("_process_pip_requirements") as calls:
        info = mlflow.tensorcas.log_model(make_model(), **options)

    assert calls == []
    assert _requirements(info.model_uri) == options["pip_requirements"]


@pytest.mark.parametrize("by", ["name", "line"])
def test_a_file_of_requirements_is_read_at_every_step(experiment: str, tmp_path: Path, by: str) -> None:
    file = tmp_path / "needed.txt"
    given: Any = str(file) if by == "name" else [f"-r {file}"]

    for name in ("first-package", "second-package"):
        file.write_text(f"mlflow\n{name}\n")
        info = mlflow.tensorcas.log_model(make_model(), name="model", pip_requirements=given)

        assert _requirements(info.model_uri) == ["mlflow", name]


@pytest.mark.long
def test_step_syncs_few_files_and_waits_for_the_disk_a_few_times(experiment: str, tmp_path: Path) -> None:
    waits = DiskWaits()
    with mlflow.start_run():
        for seed in range(2):
            mlflow.tensorcas.log_model(make_model(seed), name="model")
        with waits.counted():
            mlflow.tensorcas.log_model(make_model(2), name="model")

    assert len(waits.synced) <= 20
    assert all(Path(path).is_relative_to(tmp_path / "artifacts") for path in waits.synced)
    # The packs; the ref's bytes; its name; the texts' bytes; their names. The rest are syncs that began late.
    assert waits.n_in_turn <= 8


@pytest.mark.long
def test_small_model_is_one_record_of_its_store(experiment: str) -> None:
    with mlflow.start_run():
        mlflow.tensorcas.log_model(make_model(), name="model")
        with calls_of("Change._append") as commits:
            mlflow.tensorcas.log_model(make_model(1), name="model")

    assert len(commits) == 1


@pytest.mark.long
def test_next_model_of_a_name_has_its_bases_in_the_last_one(experiment: str) -> None:
    with mlflow.start_run():
        for seed, name in enumerate(["first", "second"]):
            mlflow.tensorcas.log_model(make_model(seed, n_targets=500), name=name)
        with calls_of("find_relative") as searches:
            mlflow.tensorcas.log_model(make_model(2, n_targets=500), name="first")
            assert searches == []
            mlflow.tensorcas.log_model(make_model(3, n_targets=500), name="third")

    assert searches != []


@pytest.mark.long
def test_upload_looks_once_for_files_in_place_of_its_folders(tracking_uri: str, tmp_path: Path) -> None:
    experiment = mlflow.create_experiment("served", artifact_location=f"tensorcas://{tmp_path}/served")
    with mlflow.start_run(experiment_id=experiment):
        mlflow.tensorcas.log_model(make_model(), name="model")
        with calls_of("has_ref") as looks:
            mlflow.tensorcas.log_model(make_model(1), name="model")

    # One look for models/<id>/artifacts/data and each of the three folders above it. A look at the root reads nothing.
    assert len(looks) == 4


class DiskWaits:
    """Files and folders synced through `os.fsync`, and how often a sync began while no other was under way."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.n_in_turn = 0
        self._n_under_way = 0
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count, with a slow disk."""
        real = os.fsync

        def fsync(descriptor: int) -> None:
            with self._lock:
                self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
                self.n_in_turn += self._n_under_way == 0
                self._n_under_way += 1
            time.sleep(0.05)
            real(descriptor)
            with self._lock:
                self._n_under_way -= 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            yield


def test_two_ways_to_say_the_requirements_are_one_too_many(experiment: str) -> None:
    with pytest.raises(MlflowException, match="Only one of"):
        mlflow.tensorcas.log_model(make_model(), name="model", pip_requirements=["a"], conda_env={})


@pytest.mark.long
def test_with_mlflows_defaults_untouched_the_store_is_made_in_the_experiments_folder(
    tracking_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment_id = mlflow.create_experiment("defaults")
    with mlflow.start_run(experiment_id=experiment_id) as run:
        mlflow.tensorcas.log_model(make_model(), name="model", step=0)

    assert stores_below(tmp_path) == [tmp_path / "mlruns" / experiment_id]
    assert_same(make_model(), mlflow.tensorcas.load_model(f"runs:/{run.info.run_id}/model"))


def test_a_store_that_is_there_already_is_used(plain_experiment: str, tmp_path: Path) -> None:
    store = Store.init(tmp_path)
    mlflow.tensorcas.log_model(make_model(), name="model")

    assert stores_below(tmp_path) == [tmp_path]
    assert len(store.checkpoints()) == 1


def test_the_named_store_is_used_and_made_whatever_the_destination(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "named"))
    info = mlflow.tensorcas.log_model(make_model(), name="model", step=1)

    named = Store.open(tmp_path / "named")
    [ref] = named.checkpoints()
    assert (ref.path, ref.step, ref.model_id) == (None, 1, info.model_id)
    assert mlflow.models.get_model_info(info.model_uri).flavors["tensorcas"]["store"] == named.uri
    monkeypatch.delenv("TENSORCAS_STORE")
    assert_same(make_model(), mlflow.tensorcas.load_model(info.model_uri))


def test_the_named_store_may_be_the_one_of_the_artifact_location(
    cas_experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", location(cas_experiment))
    info = mlflow.tensorcas.log_model(make_model(), name="model", step=1)

    [ref] = Store.open(location(cas_experiment)).checkpoints()
    assert (ref.path, ref.step) == (f"models/{info.model_id}/artifacts/data/{MANIFEST_FILE}", 1)


def test_a_destination_with_no_place_for_a_store_is_refused_with_a_way_out(tracking_uri: str) -> None:
    mlflow.create_experiment("remote", artifact_location="s3://bucket/models")
    mlflow.set_experiment("remote")

    with pytest.raises(MlflowException, match=r"s3://bucket.*TENSORCAS_STORE") as refusal:
        mlflow.tensorcas.log_model(make_model(), name="model")
    assert refusal.value.error_code == "INVALID_PARAMETER_VALUE"


def test_a_server_process_makes_no_store(plain_experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "/elsewhere")
    assert config.in_mlflow_server()

    with pytest.raises(MlflowException, match="there is no store") as refusal:
        mlflow.tensorcas.log_model(make_model(), name="model")
    assert refusal.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    assert stores_below(folder(plain_experiment)) == []


def test_a_model_no_adapter_takes_is_refused_and_leaves_nothing(experiment: str, tmp_path: Path) -> None:
    with pytest.raises(MlflowException, match=r"builtins\.frozenset.*pytorch, sklearn, xgboost") as refusal:
        mlflow.tensorcas.log_model(frozenset(), name="model")

    assert refusal.value.error_code == "INVALID_PARAMETER_VALUE"
    assert mlflow.search_logged_models(output_format="list") == []
    assert stores_below(tmp_path) == []


@pytest.mark.parametrize("name", ["a/b", "a:b"])
def test_a_name_mlflow_refuses_is_refused_before_anything_is_written(
    name: str, experiment: str, tmp_path: Path
) -> None:
    with pytest.raises(MlflowException, match="Invalid model name"):
        mlflow.tensorcas.log_model(make_model(), name=name)

    assert mlflow.search_logged_models(output_format="list") == []
    assert stores_below(tmp_path) == []


@pytest.mark.long
def test_name_refused_by_mlflow_leaves_no_intent_in_the_store_of_the_run(experiment: str) -> None:
    with mlflow.start_run():
        mlflow.tensorcas.log_model(make_model(), name="model")
        with pytest.raises(MlflowException, match="Invalid model name"):
            mlflow.tensorcas.log_model(make_model(1, n_targets=ENOUGH_FOR_A_HEAD_START), name="a/b")

    assert intents(folder(experiment)) == []
    assert len(Store.open(location(experiment)).checkpoints()) == 1


@pytest.mark.long
@pytest.mark.parametrize(("n_targets", "has_head_start"), [(50, False), (ENOUGH_FOR_A_HEAD_START, True)])
def test_save_of_a_large_model_alone_has_a_thread_of_its_own(
    experiment: str, monkeypatch: pytest.MonkeyPatch, n_targets: int, has_head_start: bool
) -> None:
    names: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    with mlflow.start_run():
        mlflow.tensorcas.log_model(make_model(), name="model")
        monkeypatch.setattr(threading.Thread, "start", note)
        mlflow.tensorcas.log_model(make_model(1, n_targets=n_targets), name="model")

    assert ("tensorcas-model" in names) == has_head_start


@pytest.mark.long
def test_model_of_another_experiment_than_the_run_goes_to_the_store_of_its_own(experiment: str, tmp_path: Path) -> None:
    other = mlflow.create_experiment("other", artifact_location=f"tensorcas://{tmp_path}/other")
    with mlflow.start_run():
        mlflow.tensorcas.log_model(make_model(), name="model")
        with mlflow.start_run(experiment_id=other, nested=True):
            theirs = mlflow.initialize_logged_model(name="theirs")
        model = make_model(1, n_targets=ENOUGH_FOR_A_HEAD_START)
        info = mlflow.tensorcas.log_model(model, model_id=theirs.model_id)

    assert intents(folder(experiment)) == []
    assert len(Store.open(location(experiment)).checkpoints()) == 1
    assert Store.find(location(other))[0].checkpoints()[0].model_id == theirs.model_id
    assert_same(model, mlflow.tensorcas.load_model(info.model_uri))


def test_a_store_of_a_newer_format_is_refused(experiment: str) -> None:
    info = mlflow.tensorcas.log_model(make_model(), name="model")
    file = folder(experiment) / ".tensorcas/format"
    said = {name: value for name, value in json.loads(file.read_text()).items() if name != "check"}
    file.write_bytes(record_bytes(said | {"format": 99}))

    for call in (lambda: mlflow.tensorcas.log_model(make_model(1), name="model"), lambda: _load(info.model_uri)):
        with pytest.raises(MlflowException, match="upgrade tensorcas-mlflow"):
            call()


def _load(model_uri: str) -> Any:
    return mlflow.tensorcas.load_model(model_uri)


def block_uploads(experiment_id: str) -> None:
    """Put a file where MLflow wants a folder."""
    folder(experiment_id).mkdir(parents=True, exist_ok=True)
    (folder(experiment_id) / "models").write_text("in the way")


def test_a_failed_upload_leaves_no_ref_and_no_intent(experiment: str) -> None:
    block_uploads(experiment)
    with pytest.raises(Exception, match=r"models|artifacts|file"):
        mlflow.tensorcas.log_model(make_model(), name="model")

    assert Store.open(location(experiment)).checkpoints() == []
    assert intents(folder(experiment)) == []
    assert [model.status for model in mlflow.search_logged_models(output_format="list")] == ["FAILED"]


def test_a_failed_upload_leaves_no_ref_in_a_store_elsewhere(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAS_STORE", str(tmp_path / "named"))
    block_uploads(experiment)
    with pytest.raises(Exception, match=r"models|artifacts|file|folder"):
        mlflow.tensorcas.log_model(make_model(), name="model")

    assert Store.open(tmp_path / "named").checkpoints() == []
    assert intents(tmp_path / "named") == []


def test_a_model_whose_registration_fails_is_logged_all_the_same(experiment: str) -> None:
    with pytest.raises(MlflowException):
        mlflow.tensorcas.log_model(make_model(), name="model", registered_model_name="a/b")

    [logged] = mlflow.search_logged_models(output_format="list")
    assert len(Store.open(location(experiment)).checkpoints()) == 1
    assert_same(make_model(), mlflow.tensorcas.load_model(logged.model_uri))


@pytest.mark.long
@pytest.mark.parametrize("broken", ["list_artifacts", "download_artifacts"])
@pytest.mark.parametrize("error", [MlflowException("the server is busy"), OSError("the line went dead")])
def test_a_model_that_is_there_keeps_its_ref_where_that_cannot_be_seen(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception
) -> None:
    class Blind(LocalArtifactRepository):  # type: ignore[misc]
        """Cannot be looked at, once the model is there."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    setattr(Blind, broken, fail)
    with monkeypatch.context() as patch:
        patch.setattr("tensorcas_mlflow.integration.models._log.get_artifact_repository", Blind)
        with pytest.raises(MlflowException, match="a/b"):
            mlflow.tensorcas.log_model(make_model(), name="model", registered_model_name="a/b")

    [logged] = mlflow.search_logged_models(output_format="list")
    assert len(Store.open(location(plain_experiment)).checkpoints()) == 1
    assert_same(make_model(), mlflow.tensorcas.load_model(logged.model_uri))


def test_a_failed_upload_over_an_earlier_model_keeps_the_earlier_one(
    plain_experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = mlflow.tensorcas.log_model(make_model(0), name="model", step=0)

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(LocalArtifactRepository, "log_artifacts", fail)
    with pytest.raises(OSError, match="the disk is full"):
        mlflow.tensorcas.log_model(make_model(1), model_id=info.model_id)

    assert_the_ref_is_of_what_is_shown(info.artifact_path)
    assert_same(make_model(0), mlflow.tensorcas.load_model(info.model_uri))


def test_an_upload_over_an_earlier_model_that_fails_half_way_keeps_what_is_shown(
    plain_experiment: str, tmp_path: Path
) -> None:
    info = mlflow.tensorcas.log_model(make_model(0), name="model", step=0)
    first, _ = shown_and_refs(info.artifact_path)
    Path(info.artifact_path, "code").write_text("in the way")
    (tmp_path / "helper.py").touch()
    with pytest.raises(Exception, match="code"):
        mlflow.tensorcas.log_model(make_model(1), model_id=info.model_id, code_paths=[str(tmp_path / "helper.py")])

    # The order in which the disk lists files decides how far MLflow came. The ref of an overwritten manifest stays.
    shown, refs = shown_and_refs(info.artifact_path)
    assert shown in refs
    assert refs == [shown] or shown != first


def shown_and_refs(artifacts: str) -> tuple[str, list[str]]:
    """Return the digest of the manifest that MLflow shows, and those of the manifests with refs."""
    shown = Manifest.from_bytes(Path(artifacts, "data", MANIFEST_FILE).read_bytes())
    store, _ = Store.find(artifacts)
    return shown.digest, [store.manifest(ref).digest for ref in store.checkpoints()]


def assert_the_ref_is_of_what_is_shown(artifacts: str) -> None:
    shown, refs = shown_and_refs(artifacts)
    assert refs == [shown]


def test_the_model_may_be_trained_on_once_it_is_logged(experiment: str) -> None:
    model = make_model()
    info = mlflow.tensorcas.log_model(model, name="model")
    model.coef_ += 1

    assert_same(make_model(), mlflow.tensorcas.load_model(info.model_uri))


def _requirements(model_uri: str) -> list[str]:
    return Path(mlflow.pyfunc.get_model_dependencies(model_uri)).read_text().splitlines()
