"""Requests of a file logged below a location in a bucket, and what it refuses to be written over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository, _finder
from tensorcas_mlflow.layout import artifact_key
from tensorcas_mlflow.store import Store, _ingest
from tests.backends.objects.proxy import Proxy
from tests.backends.objects.requests_seen import Kind
from tests.backends.objects.servers import S3Server
from tests.tracking import no_stray_settings

__all__ = ["no_stray_settings"]

N_BYTES = 1 << 20


@pytest.fixture
def repo(
    s3: S3Server, bucket: str, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> TensorCasArtifactRepository:
    """A repository at the root of a store into which this process has logged a file."""
    for name, value in s3.at(way.endpoint).environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    made = TensorCasArtifactRepository(f"tensorcas-s3://{bucket}/root")
    made.log_artifact(written(tmp_path / "model.bin"), "step-0")
    way.forget()
    return made


def written(path: Path, seed: int = 0) -> Path:
    path.write_bytes(np.random.default_rng(seed).bytes(N_BYTES))
    return path


def stores_of(repo: TensorCasArtifactRepository) -> list[Store]:
    return [held.store for held in repo._stores.holding("")]


def test_file_in_a_new_folder_makes_nine_requests_beside_its_pack(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path
) -> None:
    repo.log_artifact(written(tmp_path / "model.bin", 1), "step-1")
    traffic = way.traffic()

    # Seven of the save, one that looks for a file in the folder's place and for the folder, and one for a plain file.
    assert traffic.n_billed == 1 + 9, str(traffic)
    assert len(traffic.of(Kind.LIST)) == 3
    assert len(traffic.of(Kind.HEAD)) == 1


def test_file_of_many_batches_makes_twelve_requests_beside_its_packs(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ingest, "BATCH_BYTES", N_BYTES // 4)
    monkeypatch.setattr(_ingest, "_TAKE_BYTES", N_BYTES // 4)
    repo.log_artifact(written(tmp_path / "model.bin", 1), "step-1")
    traffic = way.traffic()
    n_packs = sum("/packs/" in each.path for each in traffic.of(Kind.PUT, Kind.CREATE).exchanges)

    assert n_packs > 2
    assert traffic.n_billed == n_packs + 12, str(traffic)


def test_file_in_a_folder_with_files_makes_nine_requests_beside_its_pack(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path
) -> None:
    repo.log_artifact(written(tmp_path / "other.bin", 1), "step-0")

    assert way.traffic().n_billed == 1 + 9, str(way.traffic())


def test_file_of_another_process_in_that_folder_makes_one_request_more(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in stores_of(repo):
        monkeypatch.setattr(store, "filled_folders", set())
    repo.log_artifact(written(tmp_path / "other.bin", 1), "step-0")

    assert way.traffic().n_billed == 1 + 10, str(way.traffic())


def test_file_in_place_of_another_makes_eight_requests_beside_its_pack(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path
) -> None:
    repo.log_artifact(written(tmp_path / "model.bin", 1), "step-0")

    assert way.traffic().n_billed == 1 + 8, str(way.traffic())
    assert Path(repo.download_artifacts("step-0/model.bin")).read_bytes() == (tmp_path / "model.bin").read_bytes()


def test_each_further_file_of_a_folder_makes_eight_requests_beside_its_pack(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path
) -> None:
    counts = []
    for n_files in (1, 4):
        folder = tmp_path / f"{n_files}"
        folder.mkdir()
        for number in range(n_files):
            written(folder / f"{number}.bin", 10 * n_files + number)
        way.forget()
        repo.log_artifacts(str(folder), f"step-{n_files}")
        counts.append(way.traffic().n_billed)

    assert counts == [1 + 9, 4 + 9 + 3 * 8]


@pytest.mark.long
def test_folders_in_a_new_folder_are_not_listed(repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for number in range(3):
        (folder / f"part-{number}").mkdir(parents=True)
        written(folder / f"part-{number}" / "weights.bin", number + 1)
    repo.log_artifacts(str(folder), "step-1")
    traffic = way.traffic()

    assert traffic.n_billed == 3 + 9 + 2 * 8, str(traffic)
    assert [info.path for info in repo.list_artifacts("step-1")] == [f"step-1/part-{number}" for number in range(3)]


def test_folder_in_a_new_folder_is_known_for_as_long_as_that_one(
    repo: TensorCasArtifactRepository, way: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    [store] = stores_of(repo)
    checked = _finder.Checked()
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(_finder, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    for now_s, folder, is_known in [(0.0, "a", True), (0.6, "a/b", True), (1.2, "a/b", False)]:
        clock.now_s = now_s
        if is_known:
            _finder._list_around(store, folder, [folder], checked)
        assert (checked.listing(store, folder) is not None) == is_known

    assert way.traffic().n_billed == 1


def test_texts_of_a_folder_make_two_requests_each(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number}")
    repo.log_artifacts(str(folder), "step-1")

    # One listing shows that the folder is new. Each text is written, and seen to be there.
    assert way.traffic().n_billed == 1 + 5 * 2, str(way.traffic())


def test_file_hides_a_text_that_a_dead_process_left_in_its_place(
    repo: TensorCasArtifactRepository, tmp_path: Path
) -> None:
    repo._plain.write("step-0/model.bin", [b"left over"])
    repo.log_artifact(written(tmp_path / "model.bin", 1), "step-0")

    assert [(info.path, info.file_size) for info in repo.list_artifacts("step-0")] == [("step-0/model.bin", N_BYTES)]
    assert Path(repo.download_artifacts("step-0/model.bin")).read_bytes() == (tmp_path / "model.bin").read_bytes()
    repo.delete_artifacts("step-0/model.bin")
    assert repo.list_artifacts("step-0") == []


@pytest.mark.long
def test_first_file_in_a_folder_of_thousands_lists_one_page_of_it(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [store] = stores_of(repo)
    key = artifact_key("wide/0.bin")
    for number in range(2100):
        store.backend.put_new(key.replace("0.bin", f"{number}.bin"), [b"{}"])
    counts = []
    for number in range(2):
        way.forget()
        repo.log_artifact(written(tmp_path / f"new-{number}.bin", number + 1), "wide")
        counts.append(len(way.traffic().of(Kind.LIST)))

    # One page of the folder; then each file looks whether it is a folder.
    assert counts == [2 + 1 + 1 + 1, 2 + 1]


@pytest.mark.parametrize("kind", ["folder", "text"])
def test_what_another_client_wrote_during_an_upload_is_seen(
    repo: TensorCasArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each listing serves a short time only."""
    folder = tmp_path / "folder"
    folder.mkdir()
    names = ["a.bin", "b.bin"] if kind == "folder" else ["a.bin", "b.txt"]
    written(folder / "a.bin", 1)
    (folder / "b.txt").write_text("b") if kind == "text" else written(folder / "b.bin", 2)
    write = TensorCasArtifactRepository._write_file

    def write_between(self: TensorCasArtifactRepository, source: Path, path: str, checked: _finder.Checked) -> None:
        write(self, source, path, checked)
        monkeypatch.setattr(TensorCasArtifactRepository, "_write_file", write)
        monkeypatch.setattr(_finder, "_LISTING_S", 0.0)
        [other] = set(names) - {source.name}
        if kind == "folder":
            self.log_artifact(written(tmp_path / "x.bin", 3), f"step-9/{other}")
        else:
            self.log_artifact(written(tmp_path / other, 3), "step-9")

    monkeypatch.setattr(TensorCasArtifactRepository, "_write_file", write_between)
    if kind == "folder":
        with pytest.raises(MlflowException, match="it is a folder"):
            repo.log_artifacts(str(folder), "step-9")
    else:
        repo.log_artifacts(str(folder), "step-9")
        assert Path(repo.download_artifacts("step-9/b.txt")).read_text() == "b"


@pytest.mark.long
def test_folders_above_the_artifact_root_are_looked_at_once(
    repo: TensorCasArtifactRepository, way: Proxy, tmp_path: Path
) -> None:
    root = f"{repo.artifact_uri}/0123456789abcdef/artifacts"
    counts = []
    for seed in range(3):
        way.forget()
        run = TensorCasArtifactRepository(root)
        run.log_artifact(written(tmp_path / "model.bin", seed + 1), f"step-{seed}")
        counts.append(way.traffic().n_billed)

    assert counts[1:] == [1 + 9, 1 + 9]
    assert counts[0] == counts[1] + 2


def test_file_in_the_place_of_an_artifact_root_is_refused_there(
    repo: TensorCasArtifactRepository, tmp_path: Path
) -> None:
    repo.log_artifact(written(tmp_path / "artifacts", 1), "0123456789abcdef")
    run = TensorCasArtifactRepository(f"{repo.artifact_uri}/0123456789abcdef/artifacts")
    for _ in range(2):
        with pytest.raises(MlflowException, match="is not a folder"):
            run.log_artifact(written(tmp_path / "model.bin", 2), "step-0")


@pytest.mark.long
@pytest.mark.parametrize("most", [1000, 0])
def test_file_is_refused_below_a_file_and_in_the_place_of_a_folder(
    repo: TensorCasArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(_finder, "_MOST_LISTED", most)
    repo.log_artifact(written(tmp_path / "x.bin", 1), "a/b")
    for _ in range(2):
        with pytest.raises(MlflowException, match=r"'a/b/x\.bin' is not a folder"):
            repo.log_artifact(written(tmp_path / "y.bin", 2), "a/b/x.bin")
        with pytest.raises(MlflowException, match=r"'a/b/x\.bin' is not a folder"):
            repo.log_artifact(written(tmp_path / "y.bin", 2), "a/b/x.bin/c")
        with pytest.raises(MlflowException, match="it is a folder"):
            repo.log_artifact(written(tmp_path / "b", 3), "a")
        with pytest.raises(MlflowException, match="it is a folder"):
            repo.log_artifact(written(tmp_path / "a", 3))
    repo.log_artifact(written(tmp_path / "x.bin", 4), "a/b")

    assert [info.path for info in repo.list_artifacts("a/b")] == ["a/b/x.bin"]
    assert Path(repo.download_artifacts("a/b/x.bin")).read_bytes() == (tmp_path / "x.bin").read_bytes()


def test_file_takes_the_place_of_a_folder_whose_files_are_deleted(
    repo: TensorCasArtifactRepository, tmp_path: Path
) -> None:
    repo.log_artifact(written(tmp_path / "x.bin", 1), "a/b")
    repo.delete_artifacts("a/b")
    repo.log_artifact(written(tmp_path / "b", 2), "a")
    with pytest.raises(MlflowException, match="'a/b' is not a folder"):
        repo.log_artifact(written(tmp_path / "x.bin", 3), "a/b")
    repo.delete_artifacts("a/b")
    repo.log_artifact(written(tmp_path / "x.bin", 3), "a/b")

    assert [info.path for info in repo.list_artifacts("a")] == ["a/b"]
    assert [info.path for info in repo.list_artifacts("a/b")] == ["a/b/x.bin"]
