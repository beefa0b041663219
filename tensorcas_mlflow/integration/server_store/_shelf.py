"""Shelf: whole files by path in an MLflow artifact root."""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests
import urllib3
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository
from mlflow.utils.request_utils import augmented_raise_for_status
from mlflow.utils.rest_utils import http_request

from tensorcas_mlflow.errors import BackendError, BlobNotFoundError, ForbiddenError, RefusedError, TensorCasError


class NoAnswerError(BackendError):
    """A server did not confirm a request, and may still carry it out."""

    def __str__(self) -> str:
        return f"{super().__str__()}; no earlier save is lost, and it is safe to try again"


class BrokenOffError(NoAnswerError):
    """A reachable server's response broke off."""


class UnreachableError(NoAnswerError):
    """A server did not answer any of MLflow's attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder in a listing."""

    name: str
    size: int | None
    """Bytes of a file; None for a folder."""


class Shelf(ABC):
    """Files by path below one root: put whole, fetched whole, listed and deleted.

    A file is complete once its `put` has returned, and every later call of any process sees the effect of a returned
    call. But if the process ends or the connection breaks *within* a put, an incomplete or empty file may stay: some
    servers do not compare the received length with the announced one. So a reader of a file must check that it is
    complete.

    All methods raise `RefusedError` if the server refuses, `NoAnswerError` if it may have carried out the request, and
    another `BackendError` if this machine failed.
    """

    @abstractmethod
    def put(self, path: str, file: Path) -> None:
        """Put a copy of a local file, of the same name, at a path, atomically replacing an existing file."""

    @abstractmethod
    def fetch(self, path: str, out: Path) -> None:
        """Write a copy of a file to a local path.

        Raises:
            BlobNotFoundError: There is no such file.
        """

    @abstractmethod
    def head(self, path: str, n_bytes: int) -> bytes:
        """Read the start of a file: this many bytes, or all of a shorter one. Little more is fetched.

        Raises:
            BlobNotFoundError: There is no such file.
        """

    @abstractmethod
    def entries(self, folder: str) -> list[Entry]:
        """List the direct children of a folder, in no order; nothing for a missing folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete a file; a missing file is no error."""


_FORBIDDEN = (401, 403)
_NOT_FOUND = 404
_SERVER_ERROR = 500


class ArtifactShelf(Shelf):
    """A folder below an artifact root. MLflow itself retries unanswered requests."""

    def __init__(self, repository: ArtifactRepository, folder: str) -> None:
        """Set the place of the shelf, without a request.

        Args:
            repository: The repository of the artifact root, behind an MLflow server.
            folder: Artifact path below it.
        """
        self._repository = repository
        self._folder = folder

    def put(self, path: str, file: Path) -> None:
        with self._translated("write", path):
            self._repository.log_artifact(str(file), posixpath.dirname(self._at(path)))

    def fetch(self, path: str, out: Path) -> None:
        # download_artifacts() would first list the path, to check whether it is a folder.
        with self._translated("read", path):
            self._repository._download_file(self._at(path), str(out))

    def head(self, path: str, n_bytes: int) -> bytes:
        # As at the start of _download_file(); MLflow has no call for a part of a file.
        assert isinstance(self._repository, HttpArtifactRepository)
        begun = bytearray()
        with (
            self._translated("read", path),
            http_request(self._repository._host_creds, f"/{self._at(path)}", "GET", stream=True) as answer,
        ):
            augmented_raise_for_status(answer)
            for piece in answer.iter_content(n_bytes):
                begun += piece
                if len(begun) >= n_bytes:
                    break
        return bytes(begun[:n_bytes])

    def entries(self, folder: str) -> list[Entry]:
        with self._translated("list", folder):
            infos = self._repository.list_artifacts(self._at(folder))
        return [
            Entry(name=posixpath.basename(info.path), size=None if info.is_dir else int(info.file_size or 0))
            for info in infos
        ]

    def delete(self, path: str) -> None:
        with self._translated("delete", path):
            self._repository.delete_artifacts(self._at(path))

    def _at(self, path: str) -> str:
        return posixpath.join(self._folder, path) if path else self._folder

    @contextmanager
    def _translated(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except requests.RequestException as error:
            raise _of_request(action, self._place(path), error, str(error)) from error
        except OSError as error:
            raise BackendError(action, self._place(path), f"{type(error).__name__}: {error}") from error
        except MlflowException as error:
            # MLflow's messages for a request with all retries failed, or refused before sending.
            cause = error.__cause__ or error.__context__
            if isinstance(cause, requests.RequestException):
                raise _of_request(action, self._place(path), cause, str(error)) from error
            kind = RefusedError if error.get_http_status_code() < _SERVER_ERROR else NoAnswerError
            raise kind(action, self._place(path), str(error)) from error

    def _place(self, path: str) -> str:
        """Return the place of a file, with its server, for messages."""
        return posixpath.join(self._repository.artifact_uri, self._at(path))


def _of_request(action: str, place: str, error: requests.RequestException, words: str) -> TensorCasError:
    """Return the error for a failed request."""
    answer = error.response
    if answer is None:
        return _kind_of_silence(error)(action, place, words)
    if answer.status_code >= _SERVER_ERROR:
        return NoAnswerError(action, place, words)
    if answer.status_code == _NOT_FOUND:
        return BlobNotFoundError(place)
    kind = ForbiddenError if answer.status_code in _FORBIDDEN else RefusedError
    return kind(action, place, f"the server refuses it: {words}")


def _kind_of_silence(error: requests.RequestException) -> type[NoAnswerError]:
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return BrokenOffError
    if not isinstance(error, requests.ConnectionError | requests.Timeout):
        return NoAnswerError  # such as too many server errors
    cause = error.args[0] if error.args else None
    # A server that hangs up on a failed upload sometimes loses its answer.
    hung_up = isinstance(getattr(cause, "reason", cause), urllib3.exceptions.ProtocolError)
    return NoAnswerError if hung_up else UnreachableError
