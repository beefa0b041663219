"""Artifacts that several write at once, as texts and as other files: one of them is there at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorcas_mlflow.backends import LocalPlainFiles
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository
from tensorcas_mlflow.store import Store

TEXT, OTHER = b"text\n" * 10, b"\0bin" * 1000

WRITER = """
import sys, time
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

uri, file, run_s = sys.argv[1:]
repo, until = TensorCasArtifactRepository(uri), time.monotonic() + float(run_s)
while time.monotonic() < until:
    repo.log_artifact(file)
"""

READER = """
import sys, tempfile, time
from pathlib import Path
from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

uri, run_s, *files = sys.argv[1:]
repo, until = TensorCasArtifactRepository(uri), time.monotonic() + float(run_s)
whole = [Path(file).read_bytes() for file in files]
with tempfile.TemporaryDirectory() as folder:
    while time.monotonic() < until:
        repo._download_file("x", f"{folder}/x")
        assert Path(folder, "x").read_bytes() in whole
"""


@pytest.fixture
def repo(tmp_path: Path) -> TensorCasArtifactRepository:
    Store.init(tmp_path / "root")
    return TensorCasArtifactRepository(f"tensorcas://{tmp_path}/root")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A text and another file of one name."""
    text, other = tmp_path / "text/x", tmp_path / "other/x"
    for file, data in ((text, TEXT), (other, OTHER)):
        file.parent.mkdir()
        file.write_bytes(data)
    return text, other


def shown(repo: TensorCasArtifactRepository, out: Path) -> bytes:
    out.mkdir()
    return Path(repo.download_artifacts("x", str(out))).read_bytes()


def test_a_text_that_is_written_during_a_commit_leaves_one_of_the_two(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other = files
    drop = LocalPlainFiles._drop

    def after_a_text(*args: object, **kwargs: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LocalPlainFiles, "_drop", drop)
            repo.log_artifact(text)
        drop(*args, **kwargs)  # type: ignore[arg-type]

    repo.log_artifact(text)
    monkeypatch.setattr(LocalPlainFiles, "_drop", after_a_text)
    repo.log_artifact(other)

    assert shown(repo, tmp_path / "out") == TEXT


def test_a_commit_while_a_text_is_written_leaves_one_of_the_two(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other = files
    drop = Store.drop_artifact

    def after_a_commit(*args: object) -> bool:
        repo.log_artifact(other)
        return drop(*args)  # type: ignore[arg-type]

    repo.log_artifact(other)
    monkeypatch.setattr(Store, "drop_artifact", after_a_commit)
    repo.log_artifact(text)

    assert shown(repo, tmp_path / "out") == OTHER


def test_a_commit_between_the_writing_of_a_text_and_its_drop_is_not_dropped(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text takes the place of the ref that stood there before it was written, and of no other."""
    text, other = files
    write = LocalPlainFiles.write
    dropped: list[bool] = []

    def then_a_commit(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        monkeypatch.setattr(LocalPlainFiles, "write", write)
        repo.log_artifact(other)

    drop = Store.drop_artifact

    def noted(*args: Any) -> bool:
        dropped.append(drop(*args))
        return dropped[-1]

    repo.log_artifact(other)
    monkeypatch.setattr(LocalPlainFiles, "write", then_a_commit)
    monkeypatch.setattr(Store, "drop_artifact", noted)
    repo.log_artifact(text)

    assert dropped == [False]
    assert shown(repo, tmp_path / "out") == OTHER


def test_a_ref_that_is_dropped_with_another_in_mind_does_not_take_the_text_along(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the token and the removal are two steps: what is removed may be younger than what was looked at."""
    text, other = files

    def drop_what_is_there(store: Store, path: str, token: object) -> bool:
        monkeypatch.undo()
        repo.log_artifact(other)
        return bool(store.drop_artifacts(path))

    repo.log_artifact(other)
    monkeypatch.setattr(Store, "drop_artifact", drop_what_is_there)
    repo.log_artifact(text)

    assert shown(repo, tmp_path / "out") == TEXT


@pytest.mark.long
def test_reader_of_an_overwritten_artifact_gets_one_version_whole(
    repo: TensorCasArtifactRepository, files: tuple[Path, Path], tmp_path: Path
) -> None:
    repo.log_artifact(files[0])
    programs = [(WRITER, str(files[0]), "1.5"), (WRITER, str(files[1]), "1.5"), (READER, "1.2", *map(str, files))]
    together = [
        subprocess.Popen([sys.executable, "-c", code, repo.artifact_uri, *words], stderr=subprocess.PIPE, text=True)
        for code, *words in programs
    ]
    said = [process.communicate(timeout=120)[1] for process in together]

    assert [process.returncode for process in together] == [0, 0, 0], said
    assert shown(repo, tmp_path / "out") in (TEXT, OTHER)
    assert not list((tmp_path / "root").glob(".artifact*"))
