"""Commands about a store in a bucket; the long tests of ``tests/cli`` give all the others there too."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.backends.objects.servers import S3Server
from tests.cli.conftest import Tensorcas, tensorcas
from tests.tracking import active_experiment, empty_database, no_stray_settings, tracking_uri

pytestmark = pytest.mark.long

__all__ = ["empty_database", "no_stray_settings", "tensorcas", "tracking_uri"]


@pytest.fixture
def root(s3: S3Server, bucket: str, no_stray_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Root for a store in a bucket that the environment tells of."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    return f"tensorcas-s3://{bucket}/team"


def save(store: Store, step: int) -> None:
    with store.write_checkpoint({"w": np.random.default_rng(step).normal(size=1000)}, flavor="test") as pending:
        pending.commit(RefTarget(run_id="run", step=step))


def keys_of(s3: S3Server, root: str) -> list[str]:
    bucket = root.split("/")[2]
    return [found["Key"] for found in s3.client().list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_every_command_works_on_a_bucket(tensorcas: Tensorcas, root: str) -> None:
    at = ("--root", root)
    made = tensorcas("init", root)
    store = Store.open(root)
    save(store, 1)
    save(store, 2)

    assert made.out == f"made store {store.id} at {root}\n"
    assert tensorcas("list", *at).out.startswith(f"store {root}\nrun run\n  checkpoints  steps 1, 2  ")
    assert tensorcas("stats", *at).out.startswith(f"store {root}\n1 run, 2 checkpoints, 0 files\n")
    assert "w       float64  1000 " in tensorcas("show", "--run", "run", *at).out
    assert "~  w  float64 1000" in tensorcas("diff", "--run", "run", "--steps", "1", "2", *at).out
    assert tensorcas("delete", "--run", "run", "--step", "1", "--yes", *at).status == 0
    assert "deleted 1 pack and 1 manifest" in tensorcas("gc", "--yes", *at).out
    checked = tensorcas("verify", "--full", *at)
    assert (checked.status, checked.err) == (0, "")
    assert checked.out == "1 checkpoint or file, 1 pack, 1 chunk, every one read: no problem found\n"


def test_a_place_in_a_bucket_without_a_store_is_an_error_that_says_what_to_do(tensorcas: Tensorcas, root: str) -> None:
    done = tensorcas("list", "--root", root)

    assert (done.status, done.out) == (1, "")
    assert f"tensorcas init {root}" in done.err


def test_a_lost_pack_is_told_by_the_name_it_had_when_it_was_saved(tensorcas: Tensorcas, root: str) -> None:
    store = Store.init(root)
    save(store, 1)
    (pack,) = store.backend.list("packs")
    store.backend.delete(pack.key)
    done = tensorcas("verify", "--root", root)

    assert done.status == 3
    assert f"when it was saved it lay in {pack.key}" in done.out


def test_artifacts_that_mlflow_forgot_are_dropped_from_a_bucket(
    tensorcas: Tensorcas, root: str, s3: S3Server, tracking_uri: str, tmp_path: Path
) -> None:
    Store.init(root)
    client = MlflowClient(tracking_uri)
    experiment = client.create_experiment("in a bucket", f"{root}/first")
    (tmp_path / "weights.bin").write_bytes(np.random.default_rng(0).bytes(1000))
    (tmp_path / "note.txt").write_text("a note")
    kept, gone = (client.create_run(experiment).info for _ in range(2))
    for info in (kept, gone):
        repository = get_artifact_repository(info.artifact_uri)
        repository.log_artifact(str(tmp_path / "weights.bin"))
        repository.log_artifact(str(tmp_path / "note.txt"), "notes")
    client._tracking_client.store._hard_delete_run(gone.run_id)
    words = ("--orphans", "--tracking-uri", tracking_uri, "--grace", "0", "--yes", "--root", root)
    done = tensorcas("gc", *words)

    assert f"gone: run first/{gone.run_id}/artifacts: 1 file in the store, 1 plain file (6 B)\n" in done.out
    assert [ref.run_id for ref in Store.open(root).checkpoints()] == [kept.run_id]
    assert f"team/first/{kept.run_id}/artifacts/notes/note.txt" in keys_of(s3, root)
    assert not [key for key in keys_of(s3, root) if f"/{gone.run_id}/" in key and "/notes/" in key]


def test_models_that_are_gone_from_a_folder_of_mlflows_own_are_dropped_from_a_bucket(
    tensorcas: Tensorcas, root: str, tracking_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.tensorcas

    monkeypatch.setenv("TENSORCAS_STORE", root)
    with active_experiment("plain", f"{tmp_path}/artifacts"):
        kept, gone = (mlflow.tensorcas.log_model({"w": np.arange(9.0) * n}, name="model") for n in range(2))
    shutil.rmtree(tmp_path / "artifacts/models" / gone.model_id)
    done = tensorcas("gc", "--orphans", "--grace", "0", "--yes")

    assert done.status == 0, done.err
    assert [ref.model_id for ref in Store.open(root).checkpoints()] == [kept.model_id]
