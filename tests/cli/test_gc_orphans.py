"""``tensorcas gc --orphans``, on stores beside models that MLflow keeps in folders of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.models.model import ModelInfo
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import fluent
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.backends import Token
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.integration.forgotten import drop_orphans, orphaned_refs
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tracking database with nothing in it; making one takes longer than a test."""
    file = tmp_path_factory.mktemp("database") / "mlflow.db"
    SqlAlchemyStore(f"sqlite:///{file}", str(file.parent / "mlruns"))
    return file


@pytest.fixture(autouse=True)
def _fresh_tracking(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TENSORCAS_STORE", raising=False)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    yield
    mlflow.set_tracking_uri(before)
    fluent._active_experiment_id = None


def log_plainly(tmp_path: Path) -> tuple[LinearRegression, ModelInfo, Path]:
    """Log a model below a root of MLflow's own."""
    location = tmp_path / "artifacts"
    mlflow.create_experiment("plain", artifact_location=location.as_uri())
    mlflow.set_experiment("plain")
    data = np.random.default_rng(0).normal(size=(50, 3))
    model = LinearRegression().fit(data, data[:, 0])
    return model, mlflow.tensorcas.log_model(model, name="model", step=1), location


@pytest.mark.long
def test_gc_drops_models_that_are_gone_from_a_folder_of_mlflows_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, gone, location = log_plainly(tmp_path)
    data = np.random.default_rng(1).normal(size=(50, 3))
    model = LinearRegression().fit(data, data[:, 1])
    kept = mlflow.tensorcas.log_model(model, name="kept")
    shutil.rmtree(location / "models" / gone.model_id)

    assert main(["gc", "--root", str(location), "--orphans", "--yes", "--grace", "1h"]) == 0
    assert len(Store.open(location).checkpoints()) == 2
    assert main(["gc", "--root", str(location), "--orphans", "--yes", "--grace", "0"]) == 0

    assert [ref.model_id for ref in Store.open(location).checkpoints()] == [kept.model_id]
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gone: ")]
    assert gone.model_id in told
    assert mlflow.tensorcas.load_model(kept.model_uri).coef_.tobytes() == model.coef_.tobytes()


def test_gc_keeps_all_refs_of_an_experiment_folder_that_is_not_mounted(tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    with store.write_checkpoint({"w": np.arange(10)}) as pending:
        uri = f"file://{tmp_path}/not-mounted/models/m-{'0' * 32}/artifacts/data/checkpoint.arrow"
        pending.commit(RefTarget(uri=uri))

    assert main(["gc", "--root", str(tmp_path / "store"), "--orphans", "--yes", "--grace", "0"]) == 0

    assert len(store.checkpoints()) == 1


def test_gc_drops_refs_only_with_orphans(tmp_path: Path) -> None:
    _, info, location = log_plainly(tmp_path)
    shutil.rmtree(location / "models" / info.model_id)

    assert main(["gc", "--root", str(location), "--yes", "--grace", "0"]) == 0

    assert len(Store.open(location).checkpoints()) == 1


def test_gc_of_a_copied_store_judges_the_models_copied_with_it(tmp_path: Path) -> None:
    model, info, location = log_plainly(tmp_path)
    shutil.copytree(location, tmp_path / "backup")
    shutil.copytree(location / ".tensorcas", tmp_path / "store alone" / ".tensorcas")
    shutil.rmtree(location / "models" / info.model_id)

    for root in ("backup", "store alone"):
        assert main(["gc", "--root", str(tmp_path / root), "--orphans", "--yes", "--grace", "0"]) == 0
        assert len(Store.open(tmp_path / root).checkpoints()) == 1
    copy = mlflow.tensorcas.load_model(tmp_path / "backup/models" / info.model_id / "artifacts")
    assert copy.coef_.tobytes() == model.coef_.tobytes()


def test_a_model_outlives_a_collection_between_its_commit_and_the_end_of_its_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = LocalArtifactRepository.log_artifacts
    collected: list[int] = []

    def collect_first(self: LocalArtifactRepository, *arguments: object) -> None:
        (tmp_path / "artifacts/models").mkdir(exist_ok=True)
        collected.append(main(["gc", "--root", str(tmp_path / "artifacts"), "--orphans", "--yes", "--grace", "0"]))
        upload(self, *arguments)

    monkeypatch.setattr(LocalArtifactRepository, "log_artifacts", collect_first)
    model, info, location = log_plainly(tmp_path)

    assert collected == [0]
    assert main(["gc", "--root", str(location), "--orphans", "--yes", "--grace", "0"]) == 0
    assert mlflow.tensorcas.load_model(info.model_uri).coef_.tobytes() == model.coef_.tobytes()


def test_a_ref_is_made_again_if_its_manifest_turns_up_while_it_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, info, location = log_plainly(tmp_path)
    store = Store.open(location)
    [ref] = store.checkpoints()
    place = location / str(ref.copy_path)
    manifest = place.read_bytes()
    place.unlink()
    withdraw = store.backend.withdraw

    def finish_the_upload(key: str, token: Token) -> bool:
        is_withdrawn = withdraw(key, token)
        if key == ref.key:
            place.write_bytes(manifest)
        return is_withdrawn

    monkeypatch.setattr(store.backend, "withdraw", finish_the_upload)

    assert drop_orphans(store, orphaned_refs(store, grace_s=0)) == 0
    assert [(new.copy_path, new.step, new.model_id) for new in store.checkpoints()] == [
        (ref.copy_path, ref.step, ref.model_id)
    ]
    assert mlflow.tensorcas.load_model(info.model_uri).coef_.tobytes() == model.coef_.tobytes()


def test_gc_drops_the_checkpoint_of_a_model_that_was_logged_over(tmp_path: Path) -> None:
    _, first, location = log_plainly(tmp_path)
    data = np.random.default_rng(1).normal(size=(50, 3))
    later = LinearRegression().fit(data, data[:, 1])
    mlflow.tensorcas.log_model(later, name="model", model_id=first.model_id, step=2)

    assert main(["gc", "--root", str(location), "--orphans", "--yes", "--grace", "0"]) == 0

    assert [ref.step for ref in Store.open(location).checkpoints()] == [2]
    assert mlflow.tensorcas.load_model(first.model_uri).coef_.tobytes() == later.coef_.tobytes()


def test_the_gc_plan_counts_what_the_orphans_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, info, location = log_plainly(tmp_path)
    shutil.rmtree(location / "models" / info.model_id)
    command = ["gc", "--root", str(location), "--orphans", "--grace", "0", "--json"]
    capsys.readouterr()

    assert main([*command, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert len(Store.open(location).checkpoints()) == 1
    assert main([*command, "--yes"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert plan["packs_bytes"] > 0
    assert (plan["n_packs"], plan["n_manifests"]) == (report["n_packs"], report["n_manifests"]) == (1, 1)
