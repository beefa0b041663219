"""A shelf in an MLflow artifact root, by the artifact API that every MLflow client has."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from tensorcas_mlflow.carrier._shelf import Entry, NoAnswerError, Shelf
from tensorcas_mlflow.errors import BackendError, BlobNotFoundError

_NOT_FOUND = 404
_SERVER_ERROR = 500


class ArtifactShelf(Shelf):
    """A folder below an artifact root. MLflow repeats by itself what fails for want of an answer."""

    def __init__(self, repository: ArtifactRepository, folder: str) -> None:
        """Say where the shelf is; nothing is asked yet.

        Args:
            repository: Of the artifact root.
            folder: Artifact path below it.
        """
        self._repository = repository
        self._folder = folder

    def put(self, path: str, file: Path) -> None:
        with _translated("write", path):
            self._repository.log_artifact(str(file), posixpath.dirname(self._at(path)))

    def fetch(self, path: str, out: Path) -> None:
        # download_artifacts() would list the path first, to see whether it is a folder.
        with _translated("read", path):
            self._repository._download_file(self._at(path), str(out))

    def entries(self, folder: str) -> list[Entry]:
        with _translated("list", folder):
            infos = self._repository.list_artifacts(self._at(folder))
        return [
            Entry(name=posixpath.basename(info.path), size=None if info.is_dir else int(info.file_size or 0))
            for info in infos
        ]

    def delete(self, path: str) -> None:
        with _translated("delete", path):
            self._repository.delete_artifacts(self._at(path))

    def _at(self, path: str) -> str:
        return posixpath.join(self._folder, path) if path else self._folder


@contextmanager
def _translated(action: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Those of the requests package are OSErrors, and carry the answer if there was one.
        answer = getattr(error, "response", None)
        if answer is None and getattr(error, "request", None) is None:
            raise BackendError(action, path, f"{type(error).__name__}: {error}") from error
        if answer is None or answer.status_code >= _SERVER_ERROR:
            raise NoAnswerError(action, path, str(error)) from error
        if answer.status_code == _NOT_FOUND:
            raise BlobNotFoundError(path) from error
        raise BackendError(action, path, f"the server refuses it: {error}") from error
    except MlflowException as error:
        raise NoAnswerError(action, path, str(error)) from error
