"""Export of a model to a folder independent of any store, server or database."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow import pyfunc
from mlflow.models import Model
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS

from tensorcas_mlflow.base.text import check_path
from tensorcas_mlflow.errors import ConflictError
from tensorcas_mlflow.file_formats import appearing_at
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._mlflow_errors import to_mlflow
from tensorcas_mlflow.integration.models._folder import FLAVOR, STORE_KEY
from tensorcas_mlflow.integration.models._load import store_for
from tensorcas_mlflow.integration.models._saved import SavedModel, load_mlmodel, open_folder
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, PAYLOAD_FILE, copy_payload

_PAGE_FILE = Path(MANIFEST_FILE).with_suffix(".html").name
"""Page shown by our artifact repository beside a manifest; a download through a server includes it."""


@translate_errors()
def export_model(model_uri: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a model to a portable folder, for this flavor and ``mlflow.pyfunc`` to load anywhere.

    The folder has all files of the model. For a model of this flavor it has the tensors, too, and its MLmodel names no
    store and no place. Tensors are copied some 16 MiB at a time, and each is checked. The folder appears complete or
    not at all. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        model_uri: ``models:/…``, ``runs:/…``, an artifact URI or a local path, of a model of any flavor. The store is
            found as `load_model` finds it.
        path: A new or empty folder.

    Raises:
        NotFoundError: There is no such model, or its store is gone.
        FormatError: The model is damaged, or belongs to another store.
        ConflictError: The folder holds something.
        BackendError: The storage failed, or the folder cannot be written.
    """
    check_path(os.fspath(path))
    out = Path(path).absolute()
    _check_free(out)
    appearing = appearing_at(out, overwrite=None, is_folder=True)
    with appearing as folder, open_folder(os.fspath(model_uri)) as model:
        model.copy_to(folder)
        if FLAVOR in load_mlmodel(model).flavors:
            _bring_tensors(SavedModel(model), folder)


def _bring_tensors(saved: SavedModel, folder: Path) -> None:
    """Put a model's tensors into a copy of its folder, and record this in its MLmodel."""
    data = folder / saved.data
    # The copied data folder is replaced: it may name the original store.
    with _set_aside(data, [MANIFEST_FILE, PAYLOAD_FILE, _PAGE_FILE]) as aside:
        store = store_for(saved, saved.configured_store())
        if store is not None:
            saved.check_manifest(store)
        manifest = copy_payload(data, store if store is not None else aside, saved.manifest)
    _name_no_store(folder / MLMODEL_FILE_NAME, manifest)


def _name_no_store(file: Path, manifest: Manifest) -> None:
    model = Model.load(file)
    section = model.flavors[FLAVOR]
    section["manifest"] = manifest.digest
    for key in ("store", "store_id"):
        section.pop(key, None)
    function = model.flavors.get(pyfunc.FLAVOR_NAME, {})
    settings = function.get(pyfunc.MODEL_CONFIG)
    if settings:
        settings.pop(STORE_KEY, None)
    if not settings:
        function.pop(pyfunc.MODEL_CONFIG, None)
    model.artifact_path = None
    model.save(os.fspath(file))


def _check_free(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        there = ConflictError(f"Path {os.fspath(out)!r} already exists and is not empty")
        raise to_mlflow(there, RESOURCE_ALREADY_EXISTS)


@contextmanager
def _set_aside(folder: Path, names: list[str]) -> Iterator[Path]:
    """Move files of a folder into a temporary one beside it for the duration of the block."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    aside.mkdir()
    try:
        for name in names:
            if (folder / name).is_file():
                (folder / name).rename(aside / name)
        yield aside
    finally:
        shutil.rmtree(aside)
