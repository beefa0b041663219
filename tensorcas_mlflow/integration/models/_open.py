"""Opening of MLflow artifacts for partial reads: a model of this flavor, or a file with tensors."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tensorcas_mlflow.backends import ReadCounter, is_ours
from tensorcas_mlflow.errors import (
    BackendError,
    CorruptError,
    FormatError,
    MalformedFileError,
    NewerFormatError,
    NoCheckpointError,
    NotFoundError,
    StoreNotFoundError,
)
from tensorcas_mlflow.integration._home import find_store, home_of, is_plain_path
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.reader import CheckpointReader, open_manifest, open_path, open_ref

MLMODEL_FILE_NAME = "MLmodel"
"""MLflow's name for the description of a model, as in `mlflow.models.model`."""
_HEAD_BYTES = 64 << 10
_MOST_LISTED = 10
_MOST_TRIED = 1000
"""A folder with more files is no artifact, but a user's home."""


def open_artifact(uri: str, **options: Any) -> CheckpointReader:
    """Open a model, a file artifact, or a file of this machine.

    Args:
        uri: Any URI of MLflow for a model or an artifact, or a local path. In a folder that is not one checkpoint as a
            whole, the only file with tensors is opened.
        options: See `open_ref`.

    Raises:
        MlflowException: There is no such artifact, or the store of a model cannot be found.
        FormatError: It holds no tensors, or is damaged.
        ValueError: Several of its files hold tensors; the message names them.
    """
    # MLflow decodes a path, such as that of the file "50%25.npz": one that is there is meant as it is.
    if is_plain_path(uri) or os.path.lexists(uri):
        return _open_local(Path(uri), options)
    if is_ours(uri):
        found = _open_in_store(uri, options)
        if found is not None:
            return found
    from tempfile import TemporaryDirectory

    from mlflow.utils.file_utils import get_local_path_or_none

    from tensorcas_mlflow.integration.models._saved import resolve

    local = get_local_path_or_none(uri)
    if local is not None:
        return _open_local(Path(local), options)
    repository, path = resolve(uri)
    place = posixpath.join(repository.artifact_uri, path) if path else repository.artifact_uri
    if is_ours(place):
        found = _open_in_store(place, options)
        if found is not None:
            return found
    local = get_local_path_or_none(place)
    if local is not None:
        return _open_local(Path(local), options)
    if any(posixpath.basename(info.path) == MLMODEL_FILE_NAME for info in repository.list_artifacts(path)):
        found = _open_model(uri, options)
        if found is not None:
            return found
    kept = ExitStack()
    with ExitStack() as opened:
        scratch = opened.enter_context(TemporaryDirectory(prefix="tensorcas-"))
        fetched = Path(repository.download_artifacts(path, scratch))
        reader = _open_local(fetched, options | {"end": kept.close})
        kept.push(opened.pop_all())  # an artifact that fails to open is not kept
        return reader


def _open_local(path: Path, options: dict[str, Any]) -> CheckpointReader:
    if not os.path.exists(path):  # Path.exists raises if the name is too long
        found = _open_in_store(os.fspath(path.absolute()), options)
        if found is not None:
            return found
        from tensorcas_mlflow.integration._mlflow_errors import NoSuchFileError

        raise NoSuchFileError(os.fspath(path))
    if (path / MLMODEL_FILE_NAME).is_file():
        found = _open_model(os.fspath(path), options)
        return _one_of_files(path, options) if found is None else found
    try:
        return _open_file(path, options)
    except NoCheckpointError:
        return _one_of_files(path, options)


def _open_file(path: Path, options: dict[str, Any]) -> CheckpointReader:
    """Open a file of tensors, a folder of them, or MLflow's copy of a manifest."""
    try:
        return open_path(path, **options)
    except MalformedFileError:
        manifest = manifest_in(path)
        if manifest is None or manifest.store_id is None:
            raise
    place = os.fspath(path.absolute())
    try:
        store = home_of(place, create=False).store
    except (StoreNotFoundError, ValueError):
        store = None
    if store is None or manifest.store_id != store.id:
        where = "no store is there" if store is None else f"the store there, {store.uri!r}, is another one"
        raise NotFoundError(
            f"{place!r} is the manifest of a checkpoint, whose tensors are in the store {manifest.store_id}, "
            f"and {where}: name the run, or set TENSORCAS_STORE to that store"
        )
    tally = ReadCounter()
    return open_manifest(store.metered(tally), manifest, tally, label=place, **options)


def manifest_in(path: Path) -> Manifest | None:
    """Read the manifest of a checkpoint in a file of this machine; None for anything else."""
    if not os.path.isfile(path):
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if not Manifest.looks_like(head):
                return None
            return Manifest.from_bytes(head + file.read())
    except OSError as error:
        raise BackendError("read", os.fspath(path), f"{type(error).__name__}: {error}") from error


def _one_of_files(folder: Path, options: dict[str, Any]) -> CheckpointReader:
    below = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    files = sorted(islice((each for each in below if os.path.isfile(each)), _MOST_TRIED + 1))
    if len(files) > _MOST_TRIED:
        raise FormatError(f"{folder.name!r} is no checkpoint, and holds more files than are tried: name one of them")
    return _the_one(folder.name, (partial(_open_file, each, options) for each in files))


def _open_in_store(place: str, options: dict[str, Any]) -> CheckpointReader | None:
    """Open the stored file at an artifact's path, or in the folder there; None if the store has neither."""
    try:
        found = find_store(place)
    except StoreNotFoundError:
        return None
    if found is None:
        return None
    store, path = found
    ref = store.artifact(path)
    if ref is not None:
        return open_ref(store, ref, **options)
    refs = store.walk_artifacts(path)
    return _the_one(path, (partial(open_ref, store, each, **options) for each in refs)) if refs else None


def _the_one(label: str, files: Iterable[Callable[[], CheckpointReader]]) -> CheckpointReader:
    """Open the only one of several files with tensors."""
    found: list[CheckpointReader] = []
    for opens in files:
        try:
            reader = opens()
        except FormatError as error:
            # The damaged file may be the one, or another part of the same checkpoint.
            if isinstance(error, CorruptError | NewerFormatError) or _is_of_tensors(error):
                raise
            continue
        if len(reader) or reader.left_out:
            found.append(reader)
    if not found:
        raise FormatError(f"there is no file with tensors in {label!r}")
    if len(found) > 1:
        listed = ", ".join(repr(reader.label) for reader in found[:_MOST_LISTED])
        raise ValueError(f"{len(found)} files in {label!r} hold tensors, name one of them: {listed}")
    return found[0]


def _is_of_tensors(error: FormatError) -> bool:
    """Tell whether the refused file ought to hold tensors, or to locate them."""
    from tensorcas_mlflow.file_formats import FORMATS_IN

    return isinstance(error, MalformedFileError) and error.format in (*FORMATS_IN, "index")


def _open_model(uri: str, options: dict[str, Any]) -> CheckpointReader | None:
    """Open a model logged by this flavor; None for one of another flavor."""
    from tensorcas_mlflow.integration.models._folder import FLAVOR
    from tensorcas_mlflow.integration.models._load import store_for
    from tensorcas_mlflow.integration.models._saved import LocalFolder, SavedModel, load_mlmodel, open_folder

    kept = ExitStack()
    with ExitStack() as opened:
        folder = opened.enter_context(open_folder(uri))
        if FLAVOR not in load_mlmodel(folder).flavors:
            return None
        saved = SavedModel(folder)
        store = store_for(saved, saved.configured_store())
        if store is None:
            file = folder.file(saved.payload or "")
            ends = {} if isinstance(folder, LocalFolder) else {"end": kept.close}
            reader = open_path(file, label=saved.label, **(options | ends))
            if ends:
                kept.push(opened.pop_all())
            return reader
        saved.check_manifest(store)
        tally = ReadCounter()
        tally.add(len(saved.manifest.stream))
        return open_manifest(store.metered(tally), saved.manifest, tally, label=saved.label, **options)
