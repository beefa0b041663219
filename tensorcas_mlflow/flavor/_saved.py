"""A saved model, as its folder describes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mlflow import pyfunc
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.utils.model_utils import _get_overridden_pyfunc_model_config

from tensorcas_mlflow._texts import without_secrets
from tensorcas_mlflow.blob_names import list_blobs
from tensorcas_mlflow.errors import CorruptError, FormatError, MalformedFileError, NewerFormatError, NotFoundError
from tensorcas_mlflow.flavor._fetch import LocalFolder, ModelFolder
from tensorcas_mlflow.flavor._folder import FLAVOR, STORE_KEY
from tensorcas_mlflow.manifest import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILES, Store

_logger = logging.getLogger(__name__)

_NEEDED = ("adapter", "data")
_FOLDERS = ("data", "code")


def load_mlmodel(folder: ModelFolder) -> Model:
    """Read the MLmodel of a folder.

    Raises:
        NotFoundError: The folder holds none.
        MalformedFileError: It is none.
    """
    file = folder.file(MLMODEL_FILE_NAME)
    try:
        model = Model.load(file)
        if not all(isinstance(section, dict) for section in model.flavors.values()):
            raise TypeError("a section of its flavors is no mapping")
    except MlflowException:
        raise
    except Exception as error:  # whatever MLflow trips over
        reason = f"{type(error).__name__}: {error}"
        raise MalformedFileError(f"{folder.uri}/{MLMODEL_FILE_NAME}", "MLmodel", reason) from error
    return model


def _is_inside(path: str) -> bool:
    return not os.path.isabs(path) and ".." not in Path(path).parts


class SavedModel:
    """A model folder's MLmodel, read, and its manifest, read when it is needed."""

    def __init__(self, folder: ModelFolder) -> None:
        """Read the MLmodel.

        Raises:
            NotFoundError: The folder holds no model, or one of another flavor.
            MalformedFileError: The MLmodel is none, or leads out of the folder.
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
        """The model configuration as declared, which a load may override."""
        self._artifact_path: str | None = model.artifact_path
        # The folder may be one that MLflow has downloaded the model to.
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

    @cached_property
    def manifest_file(self) -> Path:
        """A local copy of the manifest, or the manifest itself."""
        return self.folder.file(f"{self.data}/{MANIFEST_FILE}")

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the model's tensors.

        Raises:
            CorruptError: It is damaged where that can be seen; see `check_manifest`.
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
        """See that the manifest is one that was saved: a name or a shape in it could change and all chunks be found.

        Args:
            store: That holds its chunks.

        Raises:
            CorruptError: It is not the one that the MLmodel names, and the store does not have it either.
        """
        actual = self.manifest.digest
        if self._manifest_digest in (None, actual):
            return
        # A store that was copied and given another id has manifests that say so, and the MLmodel stays as it was.
        if not any(info.key.startswith(f"manifests/{actual}") for info in list_blobs(store.backend, "manifests")):
            reason = f"it hashes to {actual}, and the MLmodel says {self._manifest_digest}"
            raise CorruptError(self._manifest_place, reason)

    @property
    def _manifest_place(self) -> str:
        return f"{self.folder.uri}/{self.data}/{MANIFEST_FILE}"

    @cached_property
    def payload(self) -> str | None:
        """Path of the file in which the folder brings its tensors along; None if it does not."""
        paths = (f"{self.data}/{name}" for name in PAYLOAD_FILES)
        return next((path for path in paths if self.folder.has(path)), None)

    def configured_store(self) -> str | None:
        """Name the store that MLFLOW_PYFUNC_INFERENCE_CONFIG puts in place of the declared one, if it does.

        MLflow reads that for pyfunc only; a moved store has moved for everybody.
        """
        if not self.config:
            return None
        return self.named_store(_get_overridden_pyfunc_model_config(dict(self.config), {}, _logger))

    def named_store(self, config: Mapping[str, Any] | None) -> str | None:
        """Name the store that a model configuration puts in place of the declared one, if it does."""
        store = (config or {}).get(STORE_KEY)
        return None if store is None or store == self.config.get(STORE_KEY) else str(store)
