"""Artifact URIs: the folder each names, the place of its store, and the folders a server leaves alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration._artifact_uri import ArtifactOwner, owner_of, store_root_for
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.store import Store

RUN = "0123456789abcdef" * 2
MODEL = f"m-{RUN}"


@pytest.mark.parametrize(
    "experiment", ["tensorcas:///data/exp", "tensorcas:/data/exp", "/data/exp", "file:///data/exp"]
)
@pytest.mark.parametrize(
    "below",
    [
        f"{RUN}/artifacts",
        f"{RUN}/artifacts/",
        f"{RUN}/artifacts/model/data",
        f"models/{MODEL}/artifacts",
        f"models/{MODEL}/artifacts/data",
        f"traces/tr-{RUN}/artifacts",
        f"traces/{RUN}/artifacts",
        f"{RUN}/artifacts/{RUN}/artifacts",
    ],
)
def test_a_store_is_made_at_the_experiments_location(experiment: str, below: str) -> None:
    assert store_root_for(f"{experiment}/{below}") == experiment


@pytest.mark.parametrize(
    "uri",
    [
        "tensorcas:///data",
        "tensorcas:///data/exp",
        "tensorcas:///data/models/mine/artifacts",
        "tensorcas:///data/run-7/artifacts",
        f"tensorcas:///data/{RUN}",
        f"tensorcas:///data/models/{MODEL}",
        f"tensorcas:///{RUN}/artifacts",
        f"/{RUN}/artifacts",
    ],
)
def test_a_store_is_made_at_the_root_itself_where_no_experiment_shows(uri: str) -> None:
    assert store_root_for(uri) == uri
    assert store_root_for(uri + "/") == uri


def test_a_uri_tells_whose_artifact_it_names() -> None:
    assert owner_of(f"tensorcas:///exp/{RUN}/artifacts/a/b.bin") == ArtifactOwner(run_id=RUN)
    assert owner_of(f"tensorcas:///exp/models/{MODEL}/artifacts/a") == ArtifactOwner(model_id=MODEL)
    assert owner_of(f"tensorcas:///exp/traces/tr-{RUN}/artifacts/a") == ArtifactOwner()
    assert owner_of("tensorcas:///exp/a.bin") == ArtifactOwner()


def note(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "note.txt").write_text("text")
    return folder / "note.txt"


def binary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.bin").write_bytes(b"\0" * 1000)
    return folder / "weights.bin"


@pytest.mark.parametrize("form", ["tensorcas://{}", "tensorcas:{}", "tensorcas://{}/"])
def test_uris_with_and_without_slashes_name_one_folder(form: str, tmp_path: Path) -> None:
    repo = TensorCasArtifactRepository(form.format(tmp_path / "root"))
    repo.log_artifact(note(tmp_path / "inbox"))

    assert (tmp_path / "root/note.txt").read_text() == "text"


def test_percent_escapes_in_a_uri_are_decoded(tmp_path: Path) -> None:
    repo = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/my%20exp%C3%A9%2F1%25")
    repo.log_artifact(note(tmp_path / "inbox"))
    repo.log_artifact(binary(tmp_path / "inbox"))

    assert (tmp_path / "my expé/1%/note.txt").read_text() == "text"
    assert [info.path for info in repo.list_artifacts()] == ["note.txt", "weights.bin"]


@pytest.mark.parametrize(
    "uri",
    [
        "tensorcas://data/mlflow",
        "tensorcas://host/data/mlflow",
        "tensorcas:data/mlflow",
        "tensorcas:///",
        "tensorcas:/",
        "tensorcas:",
        "tensorcas:///data/../etc",
        "tensorcas:///data/%2e%2e/etc",
        "tensorcas:///data?x=1",
        "tensorcas:///data#x",
        "tensorcas:///data/%00",
        "tensorcas:///data/.tensorcas",
        "tensorcas:///data/.tensorcas/packs",
        "tensorcas-s3:///data",
        "tensorcas-s3://bucket/a/../b",
        "tensorcas-s3://bucket/a/.tensorcas/b",
        "tensorcas-s3://bucket/a?x=1",
        "tensorcas-s3://bucket/a//b",
        "tensorcas-ftp://bucket/a",
        "/data",
    ],
)
def test_a_uri_that_names_no_folder_for_artifacts_is_refused(uri: str) -> None:
    with pytest.raises(MlflowException) as caught:
        TensorCasArtifactRepository(uri)

    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


def test_making_a_repository_touches_nothing(tmp_path: Path) -> None:
    TensorCasArtifactRepository(f"tensorcas://{tmp_path}/root")

    assert list(tmp_path.iterdir()) == []


def test_repositories_at_several_roots_show_the_same_artifacts(tmp_path: Path) -> None:
    exp = tmp_path / "exp"
    run = TensorCasArtifactRepository(f"tensorcas://{exp}/{RUN}/artifacts")
    run.log_artifact(note(tmp_path / "inbox"), "data")
    run.log_artifact(binary(tmp_path / "inbox"), "data")

    for root in (tmp_path, exp, exp / RUN, exp / RUN / "artifacts", exp / RUN / "artifacts/data"):
        repo = TensorCasArtifactRepository(f"tensorcas://{root}")
        prefix = (exp / RUN / "artifacts/data").relative_to(root).as_posix() + "/"
        prefix = "" if prefix == "./" else prefix
        sizes = {info.path: info.file_size for info in repo.list_artifacts(prefix)}
        assert sizes == {f"{prefix}note.txt": 4, f"{prefix}weights.bin": 1000}
        assert Path(repo.download_artifacts(f"{prefix}weights.bin")).read_bytes() == b"\0" * 1000
        found = {info.path for info in repo._iter_artifacts_recursive("") if not info.path.startswith("inbox/")}
        assert found == {f"{prefix}note.txt", f"{prefix}weights.bin"}


def test_a_root_above_stores_writes_into_each_and_makes_none_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Store.init(tmp_path / "exps" / name)
    repo = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/exps")

    repo.log_artifact(binary(tmp_path / "inbox"), "a/data")
    with pytest.raises(MlflowException) as caught:
        repo.log_artifact(binary(tmp_path / "inbox"), "c")

    assert [ref.path for ref in Store.open(tmp_path / "exps/a").checkpoints()] == ["data/weights.bin"]
    assert caught.value.error_code == "RESOURCE_CONFLICT"


@pytest.fixture
def in_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make this process a server's; its own artifact destination is the folder returned."""
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", f"tensorcas://{tmp_path}/own")
    return tmp_path / "own"


def test_a_server_makes_its_store_at_its_own_destination(in_server: Path, tmp_path: Path) -> None:
    repo = TensorCasArtifactRepository(f"tensorcas://{in_server}/1/{RUN}/artifacts")

    repo.log_artifact(binary(tmp_path / "inbox"))

    assert [ref.path for ref in Store.open(in_server).checkpoints()] == [f"1/{RUN}/artifacts/weights.bin"]


def test_a_server_goes_on_with_what_it_kept_as_plain_files_before(in_server: Path, tmp_path: Path) -> None:
    artifacts = in_server / f"1/{RUN}/artifacts"
    before = Path(binary(artifacts / "old"))
    note(artifacts)
    repo = TensorCasArtifactRepository(f"tensorcas://{artifacts}")

    assert [info.path for info in repo.list_artifacts()] == ["note.txt", "old"]
    repo.log_artifact(binary(tmp_path / "inbox"))
    assert [(info.path, info.is_dir) for info in repo.list_artifacts("old")] == [("old/weights.bin", False)]
    assert Path(repo.download_artifacts("old/weights.bin")).read_bytes() == before.read_bytes()
    repo.delete_artifacts("old")
    assert [info.path for info in repo.list_artifacts()] == ["note.txt", "weights.bin"]


def test_a_server_reads_and_writes_no_folder_of_others_without_a_store(in_server: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "home"
    note(foreign / "data")
    repo = TensorCasArtifactRepository(f"tensorcas://{foreign}")
    attempts = [
        lambda: repo.list_artifacts(),
        lambda: repo.list_artifacts("data"),
        lambda: repo.download_artifacts("data/note.txt"),
        lambda: repo._download_file("data/note.txt", tmp_path / "stolen"),
        lambda: repo.get_local_path("data/note.txt"),
        lambda: list(repo._iter_artifacts_recursive("data")),
        lambda: repo.delete_artifacts(),
        lambda: repo.delete_artifacts("data/note.txt"),
        lambda: repo.log_artifact(note(tmp_path / "inbox")),
        lambda: repo.log_artifacts(tmp_path / "inbox", "data"),
    ]

    for attempt in attempts:
        with pytest.raises(MlflowException) as caught:
            attempt()
        assert caught.value.error_code == "PERMISSION_DENIED"
    assert sorted(path.name for path in foreign.rglob("*")) == ["data", "note.txt"]
    assert not (tmp_path / "stolen").exists()


def test_a_server_shows_a_root_where_nothing_is_yet_as_empty_but_does_not_write(
    in_server: Path, tmp_path: Path
) -> None:
    repo = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/new/{RUN}/artifacts")

    assert repo.list_artifacts() == []
    repo.delete_artifacts()
    with pytest.raises(MlflowException, match="no store at or above it") as caught:
        repo.log_artifact(note(tmp_path / "inbox"))
    assert caught.value.error_code == "PERMISSION_DENIED"
    assert not (tmp_path / "new").exists()


def test_a_server_serves_what_clients_have_put_into_a_store(
    in_server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = TensorCasArtifactRepository(f"tensorcas://{tmp_path}/exp/{RUN}/artifacts")
    assert repo.list_artifacts() == []

    with monkeypatch.context() as client:
        client.delenv("_MLFLOW_SERVER_ARTIFACT_ROOT")
        client.delenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION")
        repo.log_artifact(note(tmp_path / "inbox"))

    assert [info.path for info in repo.list_artifacts()] == ["note.txt"]
    assert Path(repo.download_artifacts("note.txt")).read_text() == "text"


@pytest.mark.usefixtures("store_of_files")
def test_damage_is_in_the_servers_log(in_server: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    repo = TensorCasArtifactRepository(f"tensorcas://{in_server}")
    weights = binary(tmp_path / "inbox")
    weights.write_bytes(random.Random(0).randbytes(100_000))
    repo.log_artifact(weights)
    [pack] = (in_server / ".tensorcas/packs").iterdir()
    data = pack.read_bytes()
    pack.chmod(0o644)
    pack.write_bytes(data[:50_000] + bytes(byte ^ 1 for byte in data[50_000:50_010]) + data[50_010:])

    with pytest.raises(MlflowException):
        repo._download_file("weights.bin", tmp_path / "out")
    assert [record.levelname for record in caplog.records] == ["ERROR"], caplog.text
