"""Logged artifacts, listed and downloaded: texts as plain files, all else from the store."""

from __future__ import annotations

import asyncio
import io
import os
import random
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.store import Store
from tests.stored_bytes import pack_bytes

RUN_ID = uuid.uuid4().hex


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return tmp_path / "experiment"


@pytest.fixture
def root(experiment: Path) -> Path:
    return experiment / RUN_ID / "artifacts"


@pytest.fixture
def repo(root: Path) -> TensorCasArtifactRepository:
    return TensorCasArtifactRepository(f"tensorcas://{root}")


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    """Create the folder of the files to log."""
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    return inbox


def noise(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that no codec makes smaller, and that are no text."""
    return b"\0" + random.Random(seed).randbytes(n_bytes - 1)


def put(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def shown(repo: TensorCasArtifactRepository, path: str | None = None) -> dict[str, int | None]:
    """A listing: sizes by path, None for folders."""
    infos = repo.list_artifacts(path)
    assert [info.path for info in infos] == sorted(info.path for info in infos)
    assert all(info.is_dir == (info.file_size is None) for info in infos)
    return {info.path: info.file_size for info in infos}


def fetch(repo: TensorCasArtifactRepository, path: str) -> bytes:
    return Path(repo.download_artifacts(path)).read_bytes()


def files_below(folder: Path) -> dict[str, bytes | None]:
    return {
        file.relative_to(folder).as_posix(): None if file.is_dir() else file.read_bytes() for file in folder.rglob("*")
    }


def test_a_small_text_stays_a_plain_file(repo: TensorCasArtifactRepository, root: Path, inbox: Path) -> None:
    repo.log_artifact(put(inbox / "MLmodel", "flavors: {größe: 1}\n".encode()), "model")

    assert (root / "model/MLmodel").read_text() == "flavors: {größe: 1}\n"
    assert shown(repo) == {"model": None}
    assert shown(repo, "model") == {"model/MLmodel": 22}
    assert fetch(repo, "model/MLmodel") == "flavors: {größe: 1}\n".encode()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(noise(3_000_000), id="of 3 MB"),
        pytest.param(noise(10), id="of ten bytes"),
        pytest.param(b"\0", id="of a NUL"),
        pytest.param("ä".encode("latin-1"), id="in another encoding"),
        pytest.param(b"text " * 20_000, id="of long text"),
    ],
)
def test_any_other_file_is_kept_by_the_store_and_listed_in_full_size(
    repo: TensorCasArtifactRepository, root: Path, inbox: Path, data: bytes
) -> None:
    repo.log_artifact(put(inbox / "weights.bin", data), "data")

    assert not (root / "data/weights.bin").exists()
    assert shown(repo, "data") == {"data/weights.bin": len(data)}
    assert fetch(repo, "data/weights.bin") == data


def test_an_empty_file_comes_back_empty(repo: TensorCasArtifactRepository, inbox: Path) -> None:
    repo.log_artifact(put(inbox / "weights.bin", b""))

    assert shown(repo) == {"weights.bin": 0}
    assert fetch(repo, "weights.bin") == b""


def test_the_store_is_made_at_the_experiment(repo: TensorCasArtifactRepository, experiment: Path, inbox: Path) -> None:
    repo.log_artifact(put(inbox / "note.txt", b"first"))

    assert Store.find(experiment)[1] == ""
    assert (experiment / ".tensorcas/format").is_file()


def test_repository_uses_the_store_above_its_root(
    tmp_path: Path, repo: TensorCasArtifactRepository, inbox: Path
) -> None:
    store = Store.init(tmp_path)

    repo.log_artifact(put(inbox / "weights.bin", noise(1000)))

    assert [ref.path for ref in store.checkpoints()] == [f"experiment/{RUN_ID}/artifacts/weights.bin"]


def test_a_ref_says_whose_file_it_keeps(repo: TensorCasArtifactRepository, experiment: Path, inbox: Path) -> None:
    repo.log_artifact(put(inbox / "weights.bin", noise(1000)), "data")

    [ref] = Store.open(experiment).checkpoints()
    assert (ref.kind, ref.n_bytes, ref.run_id, ref.model_id) == ("file", 1000, RUN_ID, None)
    assert ref.uri == f"{repo.artifact_uri}/data/weights.bin"


def test_the_same_bytes_at_two_paths_are_stored_once(
    repo: TensorCasArtifactRepository, experiment: Path, inbox: Path
) -> None:
    repo.log_artifact(put(inbox / "a.bin", noise(3_000_000)))
    once = pack_bytes(experiment)

    repo.log_artifact(put(inbox / "b.bin", noise(3_000_000)), "again")

    assert once > 3_000_000
    assert pack_bytes(experiment) == once
    assert fetch(repo, "a.bin") == fetch(repo, "again/b.bin") == noise(3_000_000)


def test_a_folder_comes_back_as_it_was(repo: TensorCasArtifactRepository, inbox: Path, tmp_path: Path) -> None:
    put(inbox / "MLmodel", b"flavors: {}")
    put(inbox / "data/weights.bin", noise(500_000))
    put(inbox / "data/deep/er/table.csv", b"a,b\n1,2\n")
    (inbox / "empty/inside").mkdir(parents=True)

    repo.log_artifacts(inbox, "model")
    repo.log_artifacts(inbox, "model")

    out = tmp_path / "out"
    out.mkdir()
    assert Path(repo.download_artifacts("model", str(out))) == out / "model"
    assert files_below(out / "model") == files_below(inbox)


def test_a_folder_is_logged_into_the_root(repo: TensorCasArtifactRepository, inbox: Path) -> None:
    put(inbox / "note.txt", b"text")
    put(inbox / "data/weights.bin", noise(1000))

    repo.log_artifacts(inbox)

    assert shown(repo) == {"data": None, "note.txt": 4}
    assert files_below(Path(repo.download_artifacts(""))) == files_below(inbox)


def test_each_download_has_a_folder_of_its_own(repo: TensorCasArtifactRepository, root: Path, inbox: Path) -> None:
    repo.log_artifact(put(inbox / "MLmodel", b"flavors: {}"), "model")

    first, second = Path(repo.download_artifacts("model")), Path(repo.download_artifacts("model"))
    put(first / "registered_model_meta", b"written by MLflow")

    assert first != second
    assert files_below(second) == {"MLmodel": b"flavors: {}"}
    assert shown(repo, "model") == {"model/MLmodel": 11}


def test_listing_tells_files_from_folders(repo: TensorCasArtifactRepository, inbox: Path) -> None:
    put(inbox / "a/note.txt", b"text")
    put(inbox / "a/b/weights.bin", noise(1000))
    repo.log_artifacts(inbox)

    assert shown(repo, "a") == shown(repo, "a/") == {"a/b": None, "a/note.txt": 4}
    assert shown(repo, "a/note.txt") == shown(repo, "a/b/weights.bin") == {}
    assert shown(repo, "nothing") == {}
    assert [repo._is_directory(path) for path in ("a", "a/", "a/b", "a/b/weights.bin", "a/note.txt", "x")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_root_where_nothing_was_logged_is_empty(repo: TensorCasArtifactRepository, experiment: Path) -> None:
    assert shown(repo) == {}
    assert shown(repo, "model") == {}
    assert files_below(Path(repo.download_artifacts(""))) == {}
    assert not experiment.exists()


@pytest.mark.parametrize("path", ["missing.bin", "data/missing.bin", "data/weights.bin/below"])
def test_download_of_an_unknown_artifact_says_that_it_is_missing(
    repo: TensorCasArtifactRepository, inbox: Path, path: str
) -> None:
    repo.log_artifact(put(inbox / "weights.bin", noise(1000)), "data")

    with pytest.raises(MlflowException) as caught:
        repo.download_artifacts(path)

    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"


@pytest.mark.usefixtures("store_of_files")
def test_artifact_of_a_store_that_is_gone_is_missing_as_a_whole(
    repo: TensorCasArtifactRepository, experiment: Path, inbox: Path, tmp_path: Path
) -> None:
    repo.log_artifact(put(inbox / "weights.bin", noise(1000)))
    for pack in (experiment / ".tensorcas/packs").rglob("*.pack"):
        pack.unlink()

    with pytest.raises(MlflowException) as caught:
        repo._download_file("weights.bin", tmp_path / "out.bin")

    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    assert not (tmp_path / "out.bin").exists()


def test_plain_files_that_others_put_there_are_shown(
    repo: TensorCasArtifactRepository, root: Path, inbox: Path
) -> None:
    put(root / "data/by_hand.bin", noise(1000))

    assert shown(repo, "data") == {"data/by_hand.bin": 1000}
    assert fetch(repo, "data/by_hand.bin") == noise(1000)


def test_a_later_file_replaces_an_earlier_one_of_either_kind(
    repo: TensorCasArtifactRepository, root: Path, experiment: Path, inbox: Path
) -> None:
    for data in (b"text", noise(1000), noise(2000, seed=1), b"text again", b"and again"):
        repo.log_artifact(put(inbox / "thing", data), "data")

        is_plain = data.isascii()
        assert shown(repo, "data") == {"data/thing": len(data)}
        assert fetch(repo, "data/thing") == data
        assert (root / "data/thing").exists() == is_plain
        assert len(Store.open(experiment).checkpoints()) == (0 if is_plain else 1)


def test_ref_wins_over_a_plain_file_that_a_crash_left(
    repo: TensorCasArtifactRepository, root: Path, inbox: Path
) -> None:
    repo.log_artifact(put(inbox / "thing", noise(1000)))
    put(root / "thing", b"from before")

    assert shown(repo) == {"thing": 1000}
    assert fetch(repo, "thing") == noise(1000)
    assert [info.file_size for info in repo._iter_artifacts_recursive("")] == [1000]
    assert repo.get_local_path("thing") is None


@pytest.mark.long
@pytest.mark.parametrize("first", [b"text", noise(1000)], ids=["text", "binary"])
@pytest.mark.parametrize("second", [b"text", noise(1000)], ids=["text", "binary"])
def test_a_file_does_not_become_a_folder_nor_a_folder_a_file(
    repo: TensorCasArtifactRepository, inbox: Path, first: bytes, second: bytes
) -> None:
    repo.log_artifact(put(inbox / "a", first))
    repo.log_artifact(put(inbox / "leaf", first), "folder")

    for name, folder in (("leaf", "a"), ("leaf", "a/b"), ("folder", None)):
        with pytest.raises(MlflowException) as caught:
            repo.log_artifact(put(inbox / "again" / name, second), folder)
        assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    with pytest.raises(MlflowException) as caught:
        repo.log_artifacts(inbox / "again", "a")
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    assert fetch(repo, "a") == fetch(repo, "folder/leaf") == first


@pytest.mark.parametrize("call", ["log_artifact", "log_artifacts"])
def test_a_local_file_that_is_not_there_is_a_wrong_call(
    repo: TensorCasArtifactRepository, inbox: Path, call: str
) -> None:
    with pytest.raises(MlflowException, match="missing") as caught:
        getattr(repo, call)(inbox / "missing")

    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"


@pytest.mark.parametrize("data", [b"text", noise(3_000_000)], ids=["text", "binary"])
def test_a_stream_is_logged_as_a_file_is(repo: TensorCasArtifactRepository, root: Path, data: bytes) -> None:
    repo.log_artifact_from_stream(io.BytesIO(data), "ignored/thing", "data")

    assert shown(repo, "data") == {"data/thing": len(data)}
    assert fetch(repo, "data/thing") == data
    assert (root / "data/thing").exists() == (data == b"text")


@pytest.mark.parametrize("data", [b"text", noise(3_000_000)], ids=["text", "binary"])
def test_an_asynchronous_stream_is_logged_as_a_file_is(
    repo: TensorCasArtifactRepository, root: Path, data: bytes
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(data), 65536):
            yield data[begin : begin + 65536]

    asyncio.run(repo.log_artifact_from_async_stream(chunks(), "thing", "data"))

    assert shown(repo, "data") == {"data/thing": len(data)}
    assert fetch(repo, "data/thing") == data
    assert (root / "data/thing").exists() == (data == b"text")


def test_a_stream_that_breaks_off_leaves_what_was_there(repo: TensorCasArtifactRepository, inbox: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"new"
        raise ConnectionAbortedError

    repo.log_artifact(put(inbox / "thing", noise(1000)))
    with pytest.raises(MlflowException):
        asyncio.run(repo.log_artifact_from_async_stream(chunks(), "thing"))

    assert fetch(repo, "thing") == noise(1000)


def test_a_local_path_is_given_for_plain_files_only(repo: TensorCasArtifactRepository, root: Path, inbox: Path) -> None:
    repo.log_artifact(put(inbox / "note.txt", b"text"), "data")
    repo.log_artifact(put(inbox / "weights.bin", noise(1000)), "data")

    assert repo.get_local_path("data/note.txt") == str((root / "data/note.txt").resolve())
    assert repo.get_local_path("data/weights.bin") is None
    assert repo.get_local_path("data/missing") is None


def test_the_data_of_traces_comes_back(repo: TensorCasArtifactRepository) -> None:
    attachment = str(uuid.uuid4())
    repo.upload_trace_data('{"spans": []}')
    repo.upload_attachment(attachment, noise(1000))

    assert repo.download_trace_data() == {"spans": []}
    assert repo.download_trace_attachment(attachment) == noise(1000)


@pytest.mark.parametrize("data", [b"text", noise(100_000)], ids=["text", "weights"])
def test_a_file_that_is_logged_onto_itself_stays(repo: TensorCasArtifactRepository, root: Path, data: bytes) -> None:
    file = put(root / "file", data)

    for _ in range(2):
        repo.log_artifact(file)
    assert file.read_bytes() == data
    assert Path(repo.download_artifacts("file")).read_bytes() == data


def test_a_file_beside_what_hides_it_can_be_logged_and_stays(
    repo: TensorCasArtifactRepository, root: Path, inbox: Path
) -> None:
    repo.log_artifact(put(inbox / "file", noise(100_000)))
    file = put(root / "file", noise(100_000, seed=1))

    repo.log_artifact(file)
    assert file.read_bytes() == noise(100_000, seed=1)
    assert Path(repo.download_artifacts("file")).read_bytes() == noise(100_000, seed=1)


def test_a_small_text_says_when_it_was_last_modified(
    repo: TensorCasArtifactRepository, root: Path, inbox: Path
) -> None:
    file = put(inbox / "note.txt", b"text")
    os.utime(file, ns=(0, 1_700_000_000_123_456_789))

    repo.log_artifact(file)
    assert (root / "note.txt").stat().st_mtime_ns == file.stat().st_mtime_ns


def test_download_onto_its_own_place_is_refused(repo: TensorCasArtifactRepository, root: Path) -> None:
    put(root / "note.txt", b"text")

    with pytest.raises(MlflowException, match="onto itself") as caught:
        repo.download_artifacts("note.txt", str(root))
    assert caught.value.error_code == "INVALID_PARAMETER_VALUE"
    assert (root / "note.txt").read_bytes() == b"text"
