"""Plain artifacts in a bucket: texts beside what a store keeps, and what others have put there."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.backends import Bucket, ObjectPlainFiles, new_void
from tensorcas_mlflow.errors import BlobNotFoundError
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.integration.forgotten import OrphanPlan, find_holdings
from tensorcas_mlflow.store import Store
from tests.backends.objects.faults import Answer
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.servers import S3Server
from tests.backends.objects.stores import bucket_of

TEXT, OTHER = b"text\n" * 10, b"\0bin" * 1000


@pytest.fixture
def settings(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables that lead this process to the server."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def repo(settings: None, bucket: str) -> TensorCasArtifactRepository:
    Store.init(f"tensorcas-s3://{bucket}/some/path")
    return TensorCasArtifactRepository(f"tensorcas-s3://{bucket}/some/path")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A text and another file of one name."""
    text, other = tmp_path / "text/x", tmp_path / "other/x"
    for file, data in ((text, TEXT), (other, OTHER)):
        file.parent.mkdir()
        file.write_bytes(data)
    return text, other


def shown(repo: TensorCasArtifactRepository, path: str | None = None) -> dict[str, int | None]:
    return {info.path: info.file_size for info in repo.list_artifacts(path)}


def fetch(repo: TensorCasArtifactRepository, path: str) -> bytes:
    return Path(repo.download_artifacts(path)).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("folder", ["", "data/"])
def test_the_marker_of_a_folder_that_a_console_has_made_is_no_file(
    repo: TensorCasArtifactRepository, s3: S3Server, bucket: str, files: tuple[Path, Path], folder: str
) -> None:
    s3.client().put_object(Bucket=bucket, Key=f"some/path/{folder}", Body=b"")
    for file in files:
        repo.log_artifact(file, f"{folder}{file.parent.name}")

    assert shown(repo, folder) == {f"{folder}other": None, f"{folder}text": None}
    below = Path(repo.download_artifacts(folder))
    assert {file.relative_to(below).as_posix() for file in below.rglob("*") if file.is_file()} == {"other/x", "text/x"}


def test_the_marker_of_a_root_hides_nothing_that_lies_there(s3: S3Server, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="some/path/", Body=b"")
    objects = bucket_of(s3, bucket, "some/path")
    for name in ("a.txt", "z.txt"):
        objects.put(name, TEXT)

    assert [info.path for info in objects.walk("")] == ["a.txt", "z.txt"]


def test_an_empty_file_is_a_file(repo: TensorCasArtifactRepository, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    repo.log_artifact(tmp_path / "empty", "folder")

    assert shown(repo, "folder") == {"folder/empty": 0}
    assert Path(repo.download_artifacts("folder"), "empty").read_bytes() == b""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content_type"),
    [("a.json", "application/json"), ("MLmodel", "text/plain"), ("a.txt", "text/plain"), ("a.csv.gz", "text/plain")],
)
def test_a_text_says_of_what_kind_it_is_to_whoever_looks_into_the_bucket(
    repo: TensorCasArtifactRepository, s3: S3Server, bucket: str, tmp_path: Path, name: str, content_type: str
) -> None:
    (tmp_path / name).write_text("{}")
    repo.log_artifact(tmp_path / name)
    found = s3.client().head_object(Bucket=bucket, Key=f"some/path/{name}")

    assert found["ContentType"] == content_type
    assert "ContentEncoding" not in found


def test_a_text_in_the_place_of_another_file_and_back_is_shown_as_what_came_last(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path]
) -> None:
    text, other = files
    for file, data in ((text, TEXT), (other, OTHER), (text, TEXT), (other, OTHER)):
        repo.log_artifact(file)

        assert shown(repo) == {"x": len(data)}
        assert fetch(repo, "x") == data


@pytest.mark.long
def test_replaced_file_does_not_come_back_after_a_deletion(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], s3: S3Server, bucket: str
) -> None:
    text, other = files
    repo.log_artifact(text)
    repo.log_artifact(other)
    Store.open(f"tensorcas-s3://{bucket}/some/path").drop_artifacts("x")

    assert shown(repo) == {}
    with pytest.raises(MlflowException, match="No such artifact"):
        repo.download_artifacts("x")
    repo.delete_artifacts()
    assert s3.client().list_objects_v2(Bucket=bucket, Prefix="some/path/x")["KeyCount"] == 0


@pytest.mark.long
def test_deletion_of_a_forgotten_run_leaves_no_void(
    settings: None, files: tuple[Path, Path], s3: S3Server, bucket: str
) -> None:
    store = Store.init(f"tensorcas-s3://{bucket}/some/path")
    run = TensorCasArtifactRepository(f"tensorcas-s3://{bucket}/some/path/1/{'0a' * 16}/artifacts")
    for file in files:
        run.log_artifact(file)
    assert s3.client().list_objects_v2(Bucket=bucket, Prefix="some/path/1/")["KeyCount"] == 1
    OrphanPlan(store=store, trackers=(), registries=(), holdings=tuple(find_holdings(store))).execute()

    assert s3.client().list_objects_v2(Bucket=bucket, Prefix="some/path/1/")["KeyCount"] == 0


@pytest.mark.long
@pytest.mark.parametrize("before", [TEXT, b"another text"], ids=["the same text", "another text"])
@pytest.mark.parametrize("moment", ["swap", "after"])
def test_a_text_that_is_written_while_another_file_takes_its_place_is_not_lost(
    repo: TensorCasArtifactRepository,
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: bytes,
    moment: str,
) -> None:
    """An object store's tokens are those of the bytes: a text that was written again looks like the one before."""
    text, other = files
    (tmp_path / "x").write_bytes(before)
    repo.log_artifact(tmp_path / "x")
    swap: Callable[..., Any] = Bucket.swap

    def after_a_text(self: Bucket, path: str, *args: Any) -> Any:
        if path != "x":
            return swap(self, path, *args)
        monkeypatch.undo()
        if moment == "swap":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Bucket, "swap", swap)
                repo.log_artifact(text)
            return swap(self, path, *args)
        token = swap(self, path, *args)
        repo.log_artifact(text)
        return token

    monkeypatch.setattr(Bucket, "swap", after_a_text)
    repo.log_artifact(other)

    assert fetch(repo, "x") == TEXT


def test_a_bucket_of_another_owner_than_the_expected_one_is_refused(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.log_artifact(files[0])
    monkeypatch.setenv("MLFLOW_S3_EXPECTED_BUCKET_OWNER", "123456789012")
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", way.endpoint)
    guarded = TensorCasArtifactRepository(repo.artifact_uri)
    way.inject(Answer(403, "AccessDenied"), header="x-amz-expected-bucket-owner", times=None)

    with pytest.raises(MlflowException) as caught:
        guarded.list_artifacts()
    assert caught.value.error_code == "PERMISSION_DENIED"
    assert shown(repo) == {"x": len(TEXT)}


def test_a_bucket_that_is_not_there_is_said_to_be_missing(settings: None, files: tuple[Path, Path]) -> None:
    repo = TensorCasArtifactRepository("tensorcas-s3://no-such-bucket/some/path")
    calls = repo.list_artifacts, lambda: repo.log_artifact(files[0]), lambda: repo.download_artifacts("x")
    for call in calls:
        with pytest.raises(MlflowException, match="there is no such bucket") as caught:
            call()

        assert caught.value.error_code == "BAD_REQUEST"


@pytest.mark.long
def test_a_name_that_others_have_put_there_and_that_nothing_can_list_is_an_error_at_once(
    repo: TensorCasArtifactRepository, s3: S3Server, bucket: str
) -> None:
    s3.client().put_object(Bucket=bucket, Key="some/path/folder//x", Body=b"text")

    with pytest.raises(MlflowException, match="empty path segment") as caught:
        repo.list_artifacts("folder")
    assert caught.value.error_code == "BAD_REQUEST"


def test_a_copy_writes_a_file_where_there_is_only_a_void(s3: S3Server, bucket: str) -> None:
    objects = bucket_of(s3, bucket)
    objects.put("file.txt", new_void())
    there = ObjectPlainFiles(objects)
    there.write("file.txt", [TEXT], replace=False)

    with there.open("file.txt") as file:
        assert file.read() == TEXT


def test_a_copy_takes_no_file_from_a_void(s3: S3Server, bucket: str) -> None:
    objects = bucket_of(s3, bucket)
    objects.put("file.txt", new_void())

    with pytest.raises(BlobNotFoundError), ObjectPlainFiles(objects).open("file.txt"):
        pass


@pytest.mark.long
def test_a_large_plain_object_is_read_piece_by_piece(
    repo: TensorCasArtifactRepository, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    data = random.Random(0).randbytes(1 << 20) * 20
    s3.client().put_object(Bucket=bucket, Key="some/path/large.bin", Body=data)
    fetched = Path(repo.download_artifacts("large.bin", str(tmp_path)))
    there = ObjectPlainFiles(bucket_of(s3, bucket, "some/path"))
    with there.open("large.bin") as file:
        parts = list(iter(lambda: file.read(3_000_000), b""))

    assert fetched.read_bytes() == data
    assert b"".join(parts) == data


def test_a_server_makes_no_store_around_another_in_a_bucket(
    settings: None, bucket: str, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.init(f"tensorcas-s3://{bucket}/mlflow/7")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", f"tensorcas-s3://{bucket}/mlflow")
    served = TensorCasArtifactRepository(f"tensorcas-s3://{bucket}/mlflow")

    with pytest.raises(MlflowException, match="lies above the store"):
        served.log_artifact(files[1], "8/run/artifacts")
    served.log_artifact(files[1], "7/run/artifacts")
    assert shown(served, "7/run/artifacts") == {"7/run/artifacts/x": len(OTHER)}
