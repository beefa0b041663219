"""The files of a model folder, wherever it is: only those that are asked for are fetched."""

from __future__ import annotations

import os
import posixpath
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository
from mlflow.tracking.artifact_utils import _get_root_uri_and_artifact_path
from mlflow.utils.file_utils import get_local_path_or_none

from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.backends import is_ours
from tensorcas_mlflow.errors import NotFoundError


class ModelFolder(ABC):
    """A model folder, as MLflow's flavors lay it out."""

    uri: str
    """Where it is; a path or an artifact URI."""

    @abstractmethod
    def file(self, path: str) -> Path:
        """Give a local copy of a file, or the file itself; it is there as long as the folder is open.

        Raises:
            NotFoundError: There is no such file.
        """

    @abstractmethod
    def has(self, path: str) -> bool:
        """Tell whether there is such a file, without fetching it."""

    @abstractmethod
    def copy_to(self, out: Path) -> None:
        """Copy all files into a folder that is empty.

        Where our artifact repository serves the folder, the tensors it would bring along for others are left out.
        """

    @abstractmethod
    def code(self, path: str) -> Path:
        """Give a local copy of a folder of code, or the folder itself; it stays when this folder is closed."""


class LocalFolder(ModelFolder):
    """A model folder in the file system; read in place."""

    def __init__(self, root: Path) -> None:
        self.uri = os.fspath(root)
        self._root = root

    def file(self, path: str) -> Path:
        if not self.has(path):
            raise NotFoundError(f"there is no {path!r} in {without_secrets(self.uri)!r}: is it a model?")
        return self._root / path

    def has(self, path: str) -> bool:
        return (self._root / path).is_file()

    def copy_to(self, out: Path) -> None:
        if out.resolve().is_relative_to(self._root.resolve()):
            raise ValueError(f"{without_secrets(self.uri)!r} cannot be copied into itself, to {os.fspath(out)!r}")
        shutil.copytree(self._root, out, dirs_exist_ok=True)

    def code(self, path: str) -> Path:
        return self._root / path


class _RemoteFolder(ModelFolder):
    """A model folder behind an artifact repository."""

    def __init__(self, repository: ArtifactRepository, path: str, scratch: str) -> None:
        self.uri = posixpath.join(repository.artifact_uri, path) if path else repository.artifact_uri
        self._repository = repository
        self._path = path
        self._scratch = scratch

    def file(self, path: str) -> Path:
        return Path(self._repository.download_artifacts(posixpath.join(self._path, path), self._scratch))

    def has(self, path: str) -> bool:
        path = posixpath.join(self._path, path)
        return any(info.path == path for info in self._repository.list_artifacts(posixpath.dirname(path)))

    def copy_to(self, out: Path) -> None:
        n_folders = len(Path(self._path).parts)
        with TemporaryDirectory(prefix=".tensorcas-", dir=out.parent) as scratch:
            # A download to nowhere in particular is one for this process, which reads tensors from the store.
            place = None if is_ours(self.uri) else scratch
            fetched = Path(self._repository.download_artifacts(self._path, place))
            for child in list(fetched.iterdir()):
                shutil.move(child, out / child.name)
        if place is None:
            shutil.rmtree([fetched, *fetched.parents][n_folders])

    def code(self, path: str) -> Path:
        # Modules in it may be imported much later, so MLflow's own temporary folder is the place.
        return Path(self._repository.download_artifacts(posixpath.join(self._path, path)))


@contextmanager
def open_folder(model_uri: str) -> Iterator[ModelFolder]:
    """Find the folder of a model by any URI that MLflow has for one, or by a local path.

    Raises:
        NotFoundError: There is none.
    """
    local = get_local_path_or_none(model_uri)
    if local is not None:
        if not Path(local).is_dir():
            hint = f"; did you mean 'models:/{model_uri}'?" if model_uri.startswith("m-") else ""
            raise NotFoundError(f"there is no folder {without_secrets(model_uri)!r}{hint}")
        yield LocalFolder(Path(local).absolute())
        return
    repository, path = resolve(model_uri)
    if isinstance(repository, LocalArtifactRepository):
        yield LocalFolder(Path(repository.artifact_dir, path))
        return
    with TemporaryDirectory(prefix="tensorcas-") as scratch:
        yield _RemoteFolder(repository, path, scratch)


def resolve(model_uri: str) -> tuple[ArtifactRepository, str]:
    """Resolve a URI once, so that all files come from one model though a later one takes over the alias or name."""
    root, path = _get_root_uri_and_artifact_path(model_uri)
    repository = get_artifact_repository(root)
    if isinstance(repository, RunsArtifactRepository):
        run_id, full_path = RunsArtifactRepository.parse_runs_uri(model_uri)
        name, _, rest = (full_path or "").partition("/")
        # As MLflow has it: a logged model of the run goes before an artifact folder of the same name.
        logged = repository._get_logged_model_artifact_repo(run_id=run_id, name=name) if name else None
        if logged is not None:
            repository, path = logged, rest
    while hasattr(repository, "repo"):
        repository = repository.repo
    return repository, path
