"""A saved model folder, wherever it lies: its files, fetched on demand, and its settings."""

from __future__ import annotations

import logging
import os
import posixpath
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import pyfunc
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository
from mlflow.tracking.artifact_utils import _get_root_uri_and_artifact_path
from mlflow.utils.file_utils import get_local_path_or_none
from mlflow.utils.model_utils import _add_code_from_conf_to_system_path, _get_overridden_pyfunc_model_config

from tensorcas_mlflow.backends import is_ours
from tensorcas_mlflow.base.threads import Lazy
from tensorcas_mlflow.errors import (
    CorruptError,
    FormatError,
    MalformedFileError,
    NewerFormatError,
    NotFoundError,
    without_secrets,
)
from tensorcas_mlflow.integration.models._folder import FLAVOR, STORE_KEY
from tensorcas_mlflow.layout import list_blobs
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE, Store


class ModelFolder(ABC):
    """A model folder, as MLflow's flavors lay it out."""

    uri: str
    """Its location; a path or an artifact URI."""

    @abstractmethod
    def file(self, path: str) -> Path:
        """Return a local copy of a file, or the file itself; it exists as long as the folder is open.

        Raises:
            NotFoundError: There is no such file.
        """

    @abstractmethod
    def has(self, path: str) -> bool:
        """Tell whether there is such a file, without fetching it."""

    @abstractmethod
    def copy_to(self, out: Path) -> None:
        """Copy all files into an empty folder.

        A folder served by our artifact repository comes without its tensors, otherwise part of a download.
        """

    @abstractmethod
    def code(self, path: str) -> Path:
        """Return a local copy of a folder of code, or the folder itself; it stays when this folder is closed."""

    @abstractmethod
    def check_place(self) -> None:
        """Refuse a folder where MLflow loads no model; see MLFLOW_ALLOW_MODEL_CODE_EXECUTION.

        Raises:
            MlflowException: The folder is on Python's search path, and code of models is forbidden.
        """


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

    def check_place(self) -> None:
        # MLflow's flavors make this call; without the key of the code it adds nothing to the path.
        _add_code_from_conf_to_system_path(os.fspath(self._root), {})


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
            # A download without a destination is for this process, and the process reads tensors from the store.
            place = None if is_ours(self.uri) else scratch
            fetched = Path(self._repository.download_artifacts(self._path, place))
            for child in list(fetched.iterdir()):
                shutil.move(child, out / child.name)
        if place is None:
            shutil.rmtree([fetched, *fetched.parents][n_folders])

    def code(self, path: str) -> Path:
        # Its modules may be imported much later, so the code goes into MLflow's own temporary folder.
        return Path(self._repository.download_artifacts(posixpath.join(self._path, path)))

    def check_place(self) -> None:
        pass  # its files come into new temporary folders


@contextmanager
def open_folder(model_uri: str) -> Iterator[ModelFolder]:
    """Open the folder of a model by any MLflow URI, or by a local path.

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
    """Resolve a URI once, so all files come from one model even if the alias or name moves to another."""
    root, path = _get_root_uri_and_artifact_path(model_uri)
    repository = get_artifact_repository(root)
    if isinstance(repository, RunsArtifactRepository):
        run_id, full_path = RunsArtifactRepository.parse_runs_uri(model_uri)
        name, _, rest = (full_path or "").partition("/")
        # As in MLflow, a logged model of the run precedes an artifact folder of the same name.
        logged = repository._get_logged_model_artifact_repo(run_id=run_id, name=name) if name else None
        if logged is not None:
            repository, path = logged, rest
    while hasattr(repository, "repo"):
        repository = repository.repo
    return repository, path


_logger = logging.getLogger(__name__)

_NEEDED = ("adapter", "data")
_FOLDERS = ("data", "code")


def load_mlmodel(folder: ModelFolder) -> Model:
    """Read the MLmodel of a folder.

    Raises:
        NotFoundError: The folder holds none.
        MalformedFileError: The file is not a valid MLmodel.
    """
    file = folder.file(MLMODEL_FILE_NAME)
    try:
        model = Model.load(file)
        if not all(isinstance(section, dict) for section in model.flavors.values()):
            raise TypeError("a section of its flavors is no mapping")
    except MlflowException:
        raise
    except Exception as error:  # any error of MLflow's parser
        reason = f"{type(error).__name__}: {error}"
        raise MalformedFileError(f"{folder.uri}/{MLMODEL_FILE_NAME}", "MLmodel", reason) from error
    return model


def _is_inside(path: str) -> bool:
    return not os.path.isabs(path) and ".." not in Path(path).parts


class SavedModel:
    """A model folder's MLmodel, and its manifest, read on first use."""

    def __init__(self, folder: ModelFolder) -> None:
        """Read the MLmodel.

        Raises:
            NotFoundError: The folder holds no model, or one of another flavor.
            MalformedFileError: The MLmodel is invalid, or leads out of the folder.
        """
        self.folder = folder
        model = load_mlmodel(folder)
        flavors: Mapping[str, Any] = model.flavors
        if FLAVOR not in flavors:
            raise NotFoundError(
                f"the model at {without_secrets(folder.uri)!r} was not saved by mlflow.tensorcas, "
                f"but by {', '.join(flavors) or 'no flavor'}"
            )
        section: Mapping[str, Any] = flavors[FLAVOR]
        texts = ("adapter", "data", "code", "store", "manifest")
        wrong = [key for key in texts if not isinstance(section.get(key), str if key in _NEEDED else str | None)]
        wrong += [key for key in _FOLDERS if key not in wrong and not _is_inside(section.get(key) or "")]
        if wrong:
            reason = f"of the section {FLAVOR!r}, {wrong[0]!r} cannot be {section.get(wrong[0])!r}"
            raise MalformedFileError(f"{folder.uri}/{MLMODEL_FILE_NAME}", "MLmodel", reason)
        self.adapter: str = section["adapter"]
        self.data: str = section["data"]
        self.code: str | None = section.get("code")
        self.store_uri: str | None = section.get("store")
        self._manifest_digest: str | None = section.get("manifest")
        self.config: dict[str, Any] = dict(flavors.get(pyfunc.FLAVOR_NAME, {}).get(pyfunc.MODEL_CONFIG) or {})
        """The declared model configuration; a load may override it."""
        self._artifact_path: str | None = model.artifact_path
        # MLflow may have downloaded the model to this folder.
        self.label = folder.uri if model.model_id is None else f"model {model.model_id}"

    @property
    def is_local(self) -> bool:
        """True if the folder is read in place."""
        return isinstance(self.folder, LocalFolder)

    @property
    def places(self) -> Iterator[str]:
        """The place of the folder, and its place when the model was logged."""
        yield self.folder.uri
        if self._artifact_path is not None:
            yield self._artifact_path

    @Lazy
    def manifest_file(self) -> Path:
        """A local copy of the manifest, or the manifest itself."""
        return self.folder.file(f"{self.data}/{MANIFEST_FILE}")

    @Lazy
    def manifest(self) -> Manifest:
        """The manifest of the model's tensors.

        Raises:
            CorruptError: Its damage is detectable here; see `check_manifest`.
            NewerFormatError: A later release wrote it.
        """
        try:
            manifest = Manifest.from_bytes(self.manifest_file.read_bytes())
        except NewerFormatError:
            raise
        except FormatError as error:
            raise CorruptError(self._manifest_place, str(error)) from error
        return manifest.labelled(self.label)

    def check_manifest(self, store: Store) -> None:
        """Check that the manifest was saved as it is: with a changed name or shape, all chunks would still be found.

        Args:
            store: The store with its chunks.

        Raises:
            CorruptError: The manifest is not the one named by the MLmodel, and the store lacks it, too.
        """
        actual = self.manifest.digest
        if self._manifest_digest in (None, actual):
            return
        # A store copied under a new id has manifests with that id, and the MLmodel keeps the old one.
        if not any(info.key.startswith(f"manifests/{actual}") for info in list_blobs(store.backend, "manifests")):
            reason = f"it hashes to {actual}, and the MLmodel says {self._manifest_digest}"
            raise CorruptError(self._manifest_place, reason)

    @property
    def _manifest_place(self) -> str:
        return f"{self.folder.uri}/{self.data}/{MANIFEST_FILE}"

    @Lazy
    def payload(self) -> str | None:
        """Path of the file with the tensors in a self-contained folder; None in any other."""
        path = f"{self.data}/{PAYLOAD_FILE}"
        return path if self.folder.has(path) else None

    def configured_store(self) -> str | None:
        """Return the store set by MLFLOW_PYFUNC_INFERENCE_CONFIG in place of the declared one, if any.

        MLflow reads this setting for pyfunc only, but a moved store has moved for every way of loading.
        """
        if not self.config:
            return None
        return self.named_store(_get_overridden_pyfunc_model_config(dict(self.config), {}, _logger))

    def named_store(self, config: Mapping[str, Any] | None) -> str | None:
        """Return the store set by a model configuration in place of the declared one, if any."""
        store = (config or {}).get(STORE_KEY)
        return None if store is None or store == self.config.get(STORE_KEY) else str(store)
