"""A manifest that is logged commits the save it came from, or pins a copy; what cannot be trusted is any file."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository, _repository
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store, hold_pending, take_pending

MODEL_ID = f"m-{uuid.uuid4().hex}"
HOME = f"models/{MODEL_ID}/artifacts"


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return tmp_path / "experiment"


@pytest.fixture
def store(experiment: Path) -> Store:
    return Store.init(experiment)


@pytest.fixture
def repo(experiment: Path) -> TensorCasArtifactRepository:
    return TensorCasArtifactRepository(f"tensorcas://{experiment}/{HOME}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The manifest's name in a model folder that is logged."""
    return tmp_path / "checkpoint.arrow"


def fetch(repo: TensorCasArtifactRepository, path: str) -> bytes:
    return Path(repo.download_artifacts(path)).read_bytes()


def make_checkpoint(store: Store, folder: str = "data", *, step: int | None = None) -> bytes:
    """Store a checkpoint, hold it as the flavor does for an artifact folder, and return its manifest."""
    weights = np.random.default_rng(0).normal(size=(64, 64))
    save = store.write_checkpoint({"weights": weights}, flavor="test")
    path = f"{HOME}/{folder}/checkpoint.arrow"
    hold_pending(store, save, RefTarget(path=path, run_id="a run", step=step, model_id=MODEL_ID))
    return save.manifest.to_bytes()


def test_a_manifest_commits_the_save_that_waits_for_it(
    repo: TensorCasArtifactRepository, store: Store, experiment: Path, file: Path
) -> None:
    data = make_checkpoint(store)
    file.write_bytes(data)

    repo.log_artifact(file, "data")

    [ref] = store.checkpoints()
    assert (ref.kind, ref.path) == ("checkpoint", f"{HOME}/data/checkpoint.arrow")
    assert take_pending(store, ref.manifest, str(ref.path)) is None
    assert {info.path: info.file_size for info in repo.list_artifacts("data")}["data/checkpoint.arrow"] == len(data)
    assert fetch(repo, "data/checkpoint.arrow") == data
    assert not (experiment / HOME / "data/checkpoint.arrow").exists()


def test_a_ref_says_what_its_save_said_of_the_model(
    repo: TensorCasArtifactRepository, store: Store, file: Path
) -> None:
    file.write_bytes(make_checkpoint(store, step=7))

    repo.log_artifact(file, "data")

    [ref] = store.checkpoints()
    assert (ref.model_id, ref.run_id, ref.step) == (MODEL_ID, "a run", 7)


def test_equal_checkpoints_under_way_at_once_keep_their_own_refs(
    repo: TensorCasArtifactRepository, store: Store, file: Path
) -> None:
    file.write_bytes(make_checkpoint(store, "first", step=1))
    make_checkpoint(store, "second", step=2)

    repo.log_artifact(file, "second")
    repo.log_artifact(file, "first")

    assert {ref.path: ref.step for ref in store.checkpoints()} == {
        f"{HOME}/first/checkpoint.arrow": 1,
        f"{HOME}/second/checkpoint.arrow": 2,
    }


def test_a_copy_does_not_pass_for_the_model_it_was_copied_from(
    repo: TensorCasArtifactRepository, store: Store, file: Path
) -> None:
    file.write_bytes(make_checkpoint(store, "elsewhere", step=7))

    repo.log_artifact(file, "data")

    [ref] = store.checkpoints()
    assert (ref.model_id, ref.run_id, ref.step) == (MODEL_ID, None, None)


def test_a_copied_manifest_pins_what_it_names(repo: TensorCasArtifactRepository, store: Store, file: Path) -> None:
    file.write_bytes(make_checkpoint(store, "first"))
    repo.log_artifact(file, "first")

    repo.log_artifact(file, "second")
    repo.delete_artifacts("first")

    [ref] = store.checkpoints()
    assert (ref.kind, ref.path) == ("checkpoint", f"{HOME}/second/checkpoint.arrow")
    assert store.read_tensors(store.manifest(ref))["weights"].shape == (64, 64)


def test_in_a_server_an_uploaded_manifest_opens_nobodys_weights(
    repo: TensorCasArtifactRepository, store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_bytes(make_checkpoint(store, "mine"))
    repo.log_artifact(file, "mine")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "/somewhere")

    repo.log_artifact(file, "theirs")

    kinds = {ref.path: ref.kind for ref in store.checkpoints()}
    assert kinds == {f"{HOME}/mine/checkpoint.arrow": "checkpoint", f"{HOME}/theirs/checkpoint.arrow": "file"}
    assert fetch(repo, "theirs/checkpoint.arrow") == file.read_bytes()


def test_a_manifest_of_another_store_is_any_file(
    repo: TensorCasArtifactRepository, store: Store, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(make_checkpoint(Store.init(tmp_path / "elsewhere")))

    repo.log_artifact(file)

    assert [ref.kind for ref in store.checkpoints()] == ["file"]
    assert fetch(repo, "checkpoint.arrow") == file.read_bytes()


@pytest.mark.usefixtures("store_of_files")
def test_a_manifest_whose_chunks_are_gone_is_any_file(
    repo: TensorCasArtifactRepository, store: Store, file: Path, experiment: Path
) -> None:
    save = store.write_checkpoint({"weights": np.arange(100.0)}, flavor="test")
    save.abandon()
    for pack in (experiment / ".tensorcas/packs").rglob("*.pack"):
        pack.unlink()
    file.write_bytes(save.manifest.to_bytes())

    repo.log_artifact(file)

    assert [ref.kind for ref in store.checkpoints()] == ["file"]
    assert fetch(repo, "checkpoint.arrow") == file.read_bytes()


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_manifest_that_is_cut_off_is_any_file(
    repo: TensorCasArtifactRepository, store: Store, file: Path, cut: int
) -> None:
    file.write_bytes(make_checkpoint(store)[:-cut])

    repo.log_artifact(file)

    assert fetch(repo, "checkpoint.arrow") == file.read_bytes()


def test_the_manifest_of_a_file_is_any_file(
    repo: TensorCasArtifactRepository, store: Store, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\0" * 1000)
    repo.log_artifact(tmp_path / "weights.bin")
    file.write_bytes(store.manifest(store.checkpoints()[0]).to_bytes())

    repo.log_artifact(file)

    assert fetch(repo, "checkpoint.arrow") == file.read_bytes()


def test_in_a_server_an_uploaded_manifest_is_not_even_read(
    repo: TensorCasArtifactRepository, store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its rows would take memory, and they may be as many as fit the upload."""
    file.write_bytes(make_checkpoint(store, "mine"))
    repo.log_artifact(file, "mine")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "/somewhere")
    monkeypatch.setattr(_repository, "_manifest_in", lambda data: pytest.fail("a manifest was read"))

    repo.log_artifact(file, "theirs")
    assert fetch(repo, "theirs/checkpoint.arrow") == file.read_bytes()


def test_an_arrow_stream_that_is_no_manifest_is_not_read_into_memory(
    repo: TensorCasArtifactRepository, store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"tensorcas": np.arange(100_000)})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    monkeypatch.setattr(_repository, "_manifest_in", lambda data: pytest.fail("a manifest was read"))

    repo.log_artifact(file)
    assert fetch(repo, "checkpoint.arrow") == file.read_bytes()
