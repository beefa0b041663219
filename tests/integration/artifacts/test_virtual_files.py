"""Virtual files of a checkpoint: its page and its self-contained file, generated during a download."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.models.flavor_backend_registry import get_flavor_backend
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.chunk_io import TensorsFile
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.integration.artifacts.pages import Page
from tests.integration.checkpoints.states import log, make_state
from tests.stored_bytes import pack_bytes
from tests.zygote import run_program

X = np.random.default_rng(0).normal(size=(50, 4))
MODEL = LinearRegression().fit(X, np.random.default_rng(1).normal(size=(50, 3)))
WEIGHTS = np.random.default_rng(2).normal(size=(300, 200))

LOAD = "import sys, mlflow; print(mlflow.pyfunc.load_model(sys.argv[1]).get_raw_model().coef_.tobytes().hex())"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> Store:
    store = Store.init(root)
    with store.write_checkpoint({"weights": WEIGHTS}, flavor="test") as save:
        save.commit(RefTarget(path="model/data/x.arrow", model_id="m-1"))
    return store


@pytest.fixture
def repo(root: Path, store: Store) -> TensorCasArtifactRepository:
    return TensorCasArtifactRepository(f"tensorcas://{root}")


def listed(repo: ArtifactRepository, folder: str) -> dict[str, int | None]:
    return {info.path: info.file_size for info in repo.list_artifacts(folder)}


def files(folder: str | Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def fetch(repo: ArtifactRepository, path: str, tmp_path: Path) -> Path:
    (tmp_path / "fetched").mkdir(exist_ok=True)
    return Path(repo.download_artifacts(path, str(tmp_path / "fetched")))


# --- files


def test_a_checkpoint_is_listed_with_its_page_and_its_self_contained_file(
    repo: TensorCasArtifactRepository, tmp_path: Path
) -> None:
    found = listed(repo, "model/data")

    assert list(found) == ["model/data/x.arrow", "model/data/x.html", "model/data/x.tensors"]
    assert found["model/data/x.tensors"] == fetch(repo, "model/data/x.tensors", tmp_path).stat().st_size
    assert found["model/data/x.html"] == fetch(repo, "model/data/x.html", tmp_path).stat().st_size


def test_a_self_contained_file_that_is_downloaded_holds_every_tensor(
    repo: TensorCasArtifactRepository, store: Store, tmp_path: Path
) -> None:
    file = TensorsFile(fetch(repo, "model/data/x.tensors", tmp_path))

    assert file.manifest.to_bytes() == fetch(repo, "model/data/x.arrow", tmp_path).read_bytes()
    np.testing.assert_array_equal(file.read()["weights"], WEIGHTS)


def test_nothing_virtual_is_stored(repo: TensorCasArtifactRepository, root: Path, tmp_path: Path) -> None:
    before = sorted(root.rglob("*"))
    repo.list_artifacts("model/data")
    fetch(repo, "model/data/x.tensors", tmp_path)
    fetch(repo, "model/data/x.html", tmp_path)

    assert sorted(root.rglob("*")) == before
    assert repo.get_local_path("model/data/x.tensors") is None
    assert repo.get_local_path("model/data/x.html") is None


def test_virtual_files_are_listed_as_files(repo: TensorCasArtifactRepository) -> None:
    assert not repo._is_directory("model/data/x.tensors")
    assert repo.list_artifacts("model/data/x.html") == []


@pytest.mark.parametrize("content", [b"small text", b"\0" * 70_000])
def test_a_real_artifact_goes_before_a_virtual_one(
    repo: TensorCasArtifactRepository, tmp_path: Path, content: bytes
) -> None:
    for name in ("x.tensors", "x.html"):
        (tmp_path / name).write_bytes(content)
        repo.log_artifact(tmp_path / name, "model/data")

        assert fetch(repo, f"model/data/{name}", tmp_path).read_bytes() == content
    assert listed(repo, "model/data") == listed(repo, "model/data") | {
        "model/data/x.html": len(content),
        "model/data/x.tensors": len(content),
    }
    repo.delete_artifacts("model/data/x.tensors")
    assert listed(repo, "model/data")["model/data/x.tensors"] != len(content)


def test_a_folder_of_that_name_goes_before_a_virtual_file(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("note")
    (tmp_path / "noise.bin").write_bytes(b"\0" * 100)
    repo.log_artifact(tmp_path / "note.txt", "model/data/x.html")
    repo.log_artifact(tmp_path / "noise.bin", "model/data/x.tensors")

    assert listed(repo, "model/data") == {
        "model/data/x.arrow": listed(repo, "model/data")["model/data/x.arrow"],
        "model/data/x.html": None,
        "model/data/x.tensors": None,
    }
    assert [info.is_dir for info in repo.list_artifacts("model/data")] == [False, True, True]
    for path in ("model/data/x.html", "model/data/x.tensors"):
        with pytest.raises(MlflowException, match="No such artifact"):
            repo._download_file(path, tmp_path / "out")


def test_deleting_a_virtual_file_does_nothing(repo: TensorCasArtifactRepository) -> None:
    before = listed(repo, "model/data")
    repo.delete_artifacts("model/data/x.tensors")
    repo.delete_artifacts("model/data/x.html")

    assert listed(repo, "model/data") == before


def test_virtual_files_go_with_their_checkpoint(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    repo.delete_artifacts("model/data/x.arrow")

    assert repo.list_artifacts("model/data") == []
    for path in ("model/data/x.html", "model/data/x.tensors"):
        with pytest.raises(MlflowException) as refusal:
            fetch(repo, path, tmp_path)
        assert refusal.value.error_code == "RESOURCE_DOES_NOT_EXIST"


def test_nothing_virtual_stands_beside_other_files(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    (tmp_path / "noise.arrow").write_bytes(b"\0" * 100)
    repo.log_artifact(tmp_path / "noise.arrow")

    assert "noise.html" not in listed(repo, "")
    with pytest.raises(MlflowException):
        fetch(repo, "noise.tensors", tmp_path)


def test_a_self_contained_file_that_was_logged_has_a_page(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    fetch(repo, "model/data/x.tensors", tmp_path).rename(tmp_path / "step-00000003.tensors")
    repo.log_artifact(tmp_path / "step-00000003.tensors", "checkpoints/net")

    assert list(listed(repo, "checkpoints/net")) == [
        "checkpoints/net/step-00000003.html",
        "checkpoints/net/step-00000003.tensors",
    ]
    page = Page(fetch(repo, "checkpoints/net/step-00000003.html", tmp_path).read_bytes())
    assert page.tensors["weights"][0] == "float64"


@pytest.mark.usefixtures("store_of_files")
def test_damage_is_told_and_leaves_no_file(repo: TensorCasArtifactRepository, root: Path, tmp_path: Path) -> None:
    for pack in (root / ".tensorcas/packs").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        data[100] ^= 0xFF
        pack.write_bytes(data)

    with pytest.raises(MlflowException, match="damaged") as refusal:
        fetch(repo, "model/data/x.tensors", tmp_path)
    assert refusal.value.error_code == "BAD_REQUEST"
    assert files(tmp_path / "fetched") == []


@pytest.mark.usefixtures("store_of_files")
def test_a_manifest_that_cannot_be_read_does_not_keep_a_folder_from_being_listed(
    root: Path, store: Store, repo: TensorCasArtifactRepository
) -> None:
    with store.write_checkpoint({"weights": WEIGHTS + 1}) as save:
        ref = save.commit(RefTarget(path="model/data/y.arrow"))
    (root / ".tensorcas/manifests" / ref.manifest).write_bytes(b"damaged")

    assert listed(repo, "model/data")["model/data/y.tensors"] is None
    assert listed(repo, "model/data")["model/data/x.tensors"] is not None


# --- folders


def test_a_folder_that_is_downloaded_for_this_process_holds_no_tensors(repo: TensorCasArtifactRepository) -> None:
    assert files(repo.download_artifacts("model")) == ["data/x.arrow"]
    assert files(repo.download_artifacts("")) == ["model/data/x.arrow"]


def test_a_folder_that_is_downloaded_to_a_place_is_complete_without_pages(
    repo: TensorCasArtifactRepository, tmp_path: Path
) -> None:
    assert files(fetch(repo, "model", tmp_path)) == ["data/x.arrow", "data/x.tensors"]


def test_download_brings_pages_that_were_logged(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("real")
    repo.log_artifact(tmp_path / "x.html", "model/data")

    assert files(repo.download_artifacts("model")) == ["data/x.arrow", "data/x.html"]


def test_in_a_server_a_folder_is_complete(
    repo: TensorCasArtifactRepository, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", f"tensorcas://{root}")

    assert files(repo.download_artifacts("model")) == ["data/x.arrow", "data/x.tensors"]


def test_downloads_side_by_side_do_not_confuse_each_other(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    wrong: list[object] = []

    def download(number: int) -> None:
        place = tmp_path / str(number)
        place.mkdir()
        for _ in range(5):
            with_tensors = repo.download_artifacts("model", str(place)) if number % 2 else None
            found = files(with_tensors or repo.download_artifacts("model"))
            if ("data/x.tensors" in found) != bool(number % 2):
                wrong.append(found)

    threads = [threading.Thread(target=download, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_the_steps_of_a_run_do_not_come_along_with_all_their_tensors(cas_experiment: str, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        for step in range(2):
            log(make_state(step), step=step)
    folder = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, dst_path=str(tmp_path / "out"))
    one = mlflow.artifacts.download_artifacts(
        run_id=run.info.run_id,
        artifact_path="checkpoints/checkpoint/step-00000001.tensors",
        dst_path=str(tmp_path / "one"),
    )

    assert files(folder) == [f"checkpoints/checkpoint/step-0000000{step}.arrow" for step in range(2)]
    assert any(array.tobytes() == make_state(1)["weights"].tobytes() for array in TensorsFile(one).read().values())


# --- models


@pytest.fixture
def moved_away(tmp_path: Path) -> Callable[[], None]:
    return lambda: Path(tmp_path / "artifacts").rename(tmp_path / "gone") and None


def load_elsewhere(folder: str | Path, tmp_path: Path) -> str:
    return run_program(LOAD, folder, cwd=tmp_path, check=True).stdout.strip()


@pytest.mark.long
def test_loading_a_model_by_its_uri_writes_no_weights(
    cas_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model", registered_model_name="best")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    for uri in (info.model_uri, "models:/best/1", info.artifact_path):
        for load in (mlflow.pyfunc.load_model, mlflow.tensorcas.load_model):
            assert np.allclose(load(uri).predict(X), MODEL.predict(X))
    assert any(path.name == "checkpoint.arrow" for path in scratch.rglob("*"))
    assert not [path for path in scratch.rglob("*") if path.suffix in (".tensors", ".html")]


@pytest.mark.long
def test_a_model_that_is_downloaded_to_a_place_loads_where_its_store_is_not(
    cas_experiment: str, tmp_path: Path, moved_away: Callable[[], None]
) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    folder = mlflow.artifacts.download_artifacts(info.model_uri, dst_path=str(tmp_path / "here"))
    moved_away()

    assert load_elsewhere(folder, tmp_path) == MODEL.coef_.tobytes().hex()


def test_the_folder_of_a_docker_image_is_complete(
    cas_experiment: str, tmp_path: Path, moved_away: Callable[[], None]
) -> None:
    info = mlflow.tensorcas.log_model(MODEL, name="model")
    backend = get_flavor_backend(info.model_uri, docker_build=True, env_manager="virtualenv")
    backend.generate_dockerfile(info.model_uri, str(tmp_path / "image"))
    moved_away()

    [folder] = [path.parent for path in (tmp_path / "image").rglob("MLmodel")]
    assert (tmp_path / "image/Dockerfile").is_file()
    assert not (folder / "data/checkpoint.html").exists()
    np.testing.assert_array_equal(mlflow.tensorcas.load_model(folder).coef_, MODEL.coef_)


def test_a_folder_that_was_downloaded_is_logged_again_for_next_to_nothing(cas_experiment: str, tmp_path: Path) -> None:
    model = LinearRegression().fit(np.random.default_rng(0).normal(size=(9, 8_000)), np.arange(9.0))
    info = mlflow.tensorcas.log_model(model, name="model")
    folder = mlflow.artifacts.download_artifacts(info.model_uri, dst_path=str(tmp_path / "here"))
    before = pack_bytes(tmp_path / "artifacts")
    with mlflow.start_run() as run:
        mlflow.log_artifacts(folder, "copy")
    after = pack_bytes(tmp_path / "artifacts")

    assert before > 0.8 * model.coef_.nbytes
    assert after - before < 0.2 * model.coef_.nbytes
    loaded = mlflow.tensorcas.load_model(f"runs:/{run.info.run_id}/copy")
    np.testing.assert_array_equal(loaded.coef_, model.coef_)
    assert Model.load(folder).flavors["tensorcas"]["store_id"]
