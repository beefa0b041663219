"""A server with a store goes on serving the stores that clients had carried to it before, as plain files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.layout import is_carried
from tensorcas_mlflow.store import Store
from tensorcas_mlflow.store.protocol import new_format

RUN = "0123456789abcdef" * 2
OTHER = b"\0bin" * 1000


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The artifact destination of the server that this process is made to be."""
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", f"tensorcas://{tmp_path}/own")
    return tmp_path / "own"


@pytest.fixture
def carried(own: Path) -> Path:
    """An experiment's folder with a store that clients have carried there."""
    folder = own / "1/.tensorcas"
    folder.mkdir(parents=True)
    (folder / "format").write_bytes(new_format(65536, is_carried=True))
    return folder


@pytest.fixture
def repo(own: Path) -> TensorCasArtifactRepository:
    return TensorCasArtifactRepository(f"tensorcas://{own}")


def send(repo: TensorCasArtifactRepository, path: str, data: bytes) -> None:
    folder, _, name = path.rpartition("/")
    repo.log_artifact_from_stream(io.BytesIO(data), name, folder)


def test_server_lists_fetches_writes_and_removes_the_files_of_a_carried_store(
    repo: TensorCasArtifactRepository, carried: Path, tmp_path: Path
) -> None:
    send(repo, "1/.tensorcas/packs/new.pack", OTHER)
    send(repo, "1/.tensorcas/packs/new.pack", OTHER[::-1])
    repo._download_file("1/.tensorcas/packs/new.pack", tmp_path / "out")

    assert (carried / "packs/new.pack").read_bytes() == (tmp_path / "out").read_bytes() == OTHER[::-1]
    top = {info.path: info.is_dir for info in repo.list_artifacts("1/.tensorcas")}
    assert top == {"1/.tensorcas/format": False, "1/.tensorcas/packs": True}
    assert [(info.path, info.file_size) for info in repo.list_artifacts("1/.tensorcas/packs")] == [
        ("1/.tensorcas/packs/new.pack", len(OTHER))
    ]
    repo.delete_artifacts("1/.tensorcas/packs/new.pack")
    repo.delete_artifacts("1/.tensorcas/packs/new.pack")
    assert repo.list_artifacts("1/.tensorcas/packs") == []
    assert repo.list_artifacts("1/.tensorcas/refs") == []


def test_an_upload_that_breaks_off_leaves_none_of_its_files(repo: TensorCasArtifactRepository, carried: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise ConnectionError("gone")

    with pytest.raises(MlflowException):
        repo.log_artifact_from_stream(Broken(), "new.pack", "1/.tensorcas/packs")
    assert list((carried / "packs").iterdir()) == []


def test_other_experiments_get_the_servers_own_store_around_it(
    repo: TensorCasArtifactRepository, own: Path, carried: Path, tmp_path: Path
) -> None:
    send(repo, f"2/{RUN}/artifacts/weights.bin", OTHER)
    send(repo, f"1/{RUN}/artifacts/weights.bin", OTHER)

    for experiment, root in (("2", own), ("1", own / "1")):
        refs = [ref.path for ref in Store.open(root).checkpoints()]
        assert [path for path in refs if path is not None and path.endswith("weights.bin")] != []
        repo._download_file(f"{experiment}/{RUN}/artifacts/weights.bin", tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == OTHER
    assert not is_carried(own)


def test_the_servers_own_store_and_those_of_others_stay_hidden(
    repo: TensorCasArtifactRepository, own: Path, carried: Path, tmp_path: Path
) -> None:
    send(repo, f"2/{RUN}/artifacts/weights.bin", OTHER)
    Store.init_backend(Store.open(own).backend.__class__(own / "3/.tensorcas"))

    for folder in ("", "3/"):
        announced = [info.path for info in repo.list_artifacts(f"{folder}.tensorcas")]
        assert announced == [f"{folder}.tensorcas/served-by-tensorcas"]
        with pytest.raises(MlflowException, match="No such artifact"):
            repo._download_file(f"{folder}.tensorcas/format", tmp_path / "out")
        with pytest.raises(MlflowException, match="reserved"):
            send(repo, f"{folder}.tensorcas/packs/new.pack", OTHER)
    before = sorted(own.rglob("*"))
    repo.delete_artifacts(".tensorcas/format")
    assert sorted(own.rglob("*")) == before


def test_carried_store_that_became_the_servers_own_stays_hidden(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", f"tensorcas://{carried.parent}")
    repo = TensorCasArtifactRepository(f"tensorcas://{carried.parent}")

    assert [info.path for info in repo.list_artifacts(".tensorcas")] == [".tensorcas/served-by-tensorcas"]
    with pytest.raises(MlflowException, match="No such artifact"):
        repo._download_file(".tensorcas/format", tmp_path / "out")


@pytest.mark.parametrize(
    "path",
    [
        "1/.tensorcas/../../secret",
        "1/.tensorcas/.tensorcas/format",
        "1/.TensorCAS/format",
        "1/.tensorcas/packs/.artifact.uploading.x",
        "1/.tensorcas/packs/a b",
        "link/.tensorcas/format",
    ],
)
def test_no_other_path_leads_into_or_out_of_a_carried_store(
    repo: TensorCasArtifactRepository, own: Path, carried: Path, tmp_path: Path, path: str
) -> None:
    (own / "link").symlink_to(carried.parent)
    (own.parent / "secret").write_text("secret")
    before = sorted(own.rglob("*"))

    with pytest.raises(MlflowException):
        repo._download_file(path, tmp_path / "out")
    with pytest.raises(MlflowException):
        send(repo, path, OTHER)
    assert sorted(own.rglob("*")) == before


def test_repository_outside_of_a_server_shows_no_store(
    repo: TensorCasArtifactRepository, carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MLFLOW_SERVER_ARTIFACT_ROOT", "_MLFLOW_SERVER_ARTIFACT_DESTINATION"):
        monkeypatch.delenv(name)

    assert repo.list_artifacts("1/.tensorcas") == []
    with pytest.raises(MlflowException):
        repo._download_file("1/.tensorcas/format", tmp_path / "out")
