"""Logging and saving a model: tensors go to the store, everything else to MLflow."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.model import ModelInfo
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking._model_registry import DEFAULT_AWAIT_MAX_SLEEP_SECONDS

from tensorcas_mlflow.adapter import Adapter, Array, adapter_for, take_apart
from tensorcas_mlflow.backends import settle_tree
from tensorcas_mlflow.base import config, threads
from tensorcas_mlflow.base.text import check_path
from tensorcas_mlflow.errors import BackendError, TensorCasError, without_secrets
from tensorcas_mlflow.integration._errors import translate_errors
from tensorcas_mlflow.integration._figures import model_tags, tag_model_later
from tensorcas_mlflow.integration._home import artifact_place, home_of, local_folder, sends_files
from tensorcas_mlflow.integration.models._folder import DATA, Extras, StoredModel, write_folder
from tensorcas_mlflow.integration.server_store import is_carrier_uri
from tensorcas_mlflow.layout import Ref, RefTarget
from tensorcas_mlflow.layout.manifests import Manifest
from tensorcas_mlflow.store import MANIFEST_FILE, PendingSave, Store, abandon_pending, hold_pending, write_payload

_logger = logging.getLogger(__name__)

_AHEAD_BYTES = 2 * 1024 * 1024
"""Bytes of tensors from which a head start saves time with a local store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStore:
    """The store for one logged model, and the content of its future ref."""

    store: Store
    destination: str
    """Artifact root of the model."""
    target: RefTarget
    is_committed_on_arrival: bool
    """True if our artifact repository serves the destination from this very store, and commits when the manifest
    arrives."""

    def settle(self) -> None:
        """Make MLflow's upload durable, if it is in a local folder.

        The ref is durable already. A manifest lost in a crash of the machine would look like that of a deleted model.

        Raises:
            BackendError: Making it durable failed.
        """
        place = artifact_place(self.destination)
        if place is not None and not place.is_ours:
            try:
                settle_tree(place.root.path)
            except OSError as error:
                raise BackendError("sync", place.root.path, f"{type(error).__name__}: {error}") from error


def place_for(destination: str, *, run_id: str | None, model_id: str | None, step: int | None) -> ModelStore:
    """Find the store for a model, or create it; raises as `home_of` does.

    Args:
        destination: Artifact root of the model, as MLflow gave it.
    """
    home = home_of(destination, create=True)
    path = None if home.path is None else posixpath.join(home.path, DATA, MANIFEST_FILE)
    return ModelStore(
        store=home.store,
        destination=destination,
        target=RefTarget(
            path=path if home.is_ours else None,
            copy_path=None if home.is_ours else path,
            uri=posixpath.join(destination, DATA, MANIFEST_FILE),
            run_id=run_id,
            step=step,
            model_id=model_id,
        ),
        is_committed_on_arrival=home.is_ours,
    )


def withdraw(place: ModelStore, ref: Ref) -> None:
    """Drop the ref of a model after a failed upload, if MLflow certainly does not show its manifest.

    The failure may have come after the upload, for example while registering a version, and its cause may hide the
    manifest. In doubt the ref stays. An extra ref costs space until ``tensorcas gc --orphans`` drops it; a model
    without its ref is lost.
    """
    try:
        shown = _shown_at(place.destination)
    except Exception as error:  # noqa: BLE001 -- MLflow's repositories fail in their own ways
        _logger.warning(
            "the tensors of a model stay, because reading its place %r failed: %s",
            ref.uri,
            without_secrets(str(error)),
        )
        return
    if shown is None or shown.digest != place.store.manifest(ref).digest:
        place.store.drop(ref)


def _shown_at(destination: str) -> Manifest | None:
    """Read the manifest at a model's artifact root; return None if it certainly has none.

    Raises:
        FormatError: The root has another file in its place.
        Exception: The content of the root cannot be determined.
    """
    repository = get_artifact_repository(destination)
    try:
        names = {posixpath.basename(info.path) for info in repository.list_artifacts(DATA)}
    except MlflowException as error:
        if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return None
        raise
    if MANIFEST_FILE not in names:
        return None
    with TemporaryDirectory(prefix="tensorcas-") as scratch:
        file = repository.download_artifacts(f"{DATA}/{MANIFEST_FILE}", scratch)
        return Manifest.from_bytes(Path(file).read_bytes())


@translate_errors()
def save_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    mlflow_model: Model | None = None,
    step: int | None = None,
    signature: ModelSignature | bool | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | str | None = None,
    extra_pip_requirements: Sequence[str] | str | None = None,
    conda_env: Mapping[str, Any] | str | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a model to a self-contained folder. The folder can be moved, and loads without any store.

    Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        model: A model of a framework with an adapter.
        path: A new or empty folder.
        mlflow_model: The `mlflow.models.Model` to add this flavor to.
        step: The training step to record with the model.
        signature: The signature; None infers it from ``input_example``, False records none.
        input_example: An input of the model, to save with it.
        pip_requirements: All requirements of the model, or a requirements file. By default the framework and this
            package, in the installed versions; nothing is inferred.
        extra_pip_requirements: Requirements besides the default ones.
        conda_env: A conda environment, or a file with one, instead of requirements.
        code_paths: Files and folders of code to save with the model.
        metadata: Values for MLmodel, as they are.

    Raises:
        AdapterError: No adapter takes the model, or it cannot be stored exactly.
        BackendError: The folder cannot be written.
        ValueError: An argument is wrong.
        mlflow.exceptions.MlflowException: The folder holds something, or MLflow refuses an argument.
    """
    adapter = adapter_for(model)
    extras = Extras(
        step=step,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
        conda_env=conda_env,
        code_paths=code_paths,
        metadata=metadata,
    )
    check_path(os.fspath(path))
    tensors = take_apart(adapter, model)

    def write_tensors(data: Path) -> StoredModel:
        cuts, left_out = adapter.cuts(tensors), adapter.left_out(tensors)
        manifest = write_payload(data, tensors, flavor=adapter.name, cuts=cuts, left_out=left_out)
        return StoredModel(manifest=manifest, store=None)

    write_folder(
        path,
        adapter=adapter,
        tensors=tensors,
        mlflow_model=mlflow_model,
        extras=extras,
        write_tensors=write_tensors,
    )


@translate_errors()
def log_model(
    model: Any,
    name: str | None = None,
    *,
    step: int | None = None,
    registered_model_name: str | None = None,
    await_registration_for: int | None = DEFAULT_AWAIT_MAX_SLEEP_SECONDS,
    params: Mapping[str, Any] | None = None,
    tags: Mapping[str, Any] | None = None,
    model_type: str | None = None,
    model_id: str | None = None,
    signature: ModelSignature | bool | None = None,
    input_example: Any = None,
    pip_requirements: Sequence[str] | str | None = None,
    extra_pip_requirements: Sequence[str] | str | None = None,
    conda_env: Mapping[str, Any] | str | None = None,
    code_paths: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> ModelInfo:
    """Log a model as deduplicated tensors, to the active run if there is one.

    TENSORCAS_STORE names the store; by default it is the store around the experiment's artifact location, created if
    missing. A server with a store of its own gets the whole model.

    Storage figures become tags of the logged model and of its registered version; TENSORCAS_LOG_METRICS=false turns
    them off. Errors are also `mlflow.exceptions.MlflowException`.

    Args:
        model: A model of a framework with an adapter. It may change once this returns.
        name: The name of the logged model; by default MLflow generates one.
        step: The training step of the model.
        registered_model_name: Register the model as a new version of this name.
        await_registration_for: Seconds to wait until the version is ready; 0 or None does not wait.
        params: Parameters of the logged model, besides those of the run.
        tags: Tags of the logged model.
        model_type: The kind of model, in words of your own.
        model_id: Log into this existing logged model instead of a new one.
        signature: The signature; None infers it from ``input_example``, False records none.
        input_example: An input of the model, to save with it.
        pip_requirements: All requirements of the model, or a requirements file. By default the framework and this
            package, in the installed versions; nothing is inferred.
        extra_pip_requirements: Requirements besides the default ones.
        conda_env: A conda environment, or a file with one, instead of requirements.
        code_paths: Files and folders of code to save with the model.
        metadata: Values for MLmodel, as they are.

    Returns:
        MLflow's description of the model; ``model_uri`` loads it.

    Raises:
        AdapterError: No adapter takes the model, or it cannot be stored exactly.
        BackendError: The storage failed.
        ValueError: An argument is wrong, or there is no place for a store.
        mlflow.exceptions.MlflowException: MLflow refuses the model's name or another argument.
    """
    adapter = adapter_for(model)
    extras = Extras(
        step=step,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
        conda_env=conda_env,
        code_paths=code_paths,
        metadata=metadata,
    )
    # Before MLflow creates a logged model, so a refused model leaves none behind.
    run = mlflow.active_run()
    series = None if run is None or name is None else f"models/{run.info.run_id}/{name}"
    # MLflow gives this very mapping to the logged model before the save, and to the registered version after it.
    all_tags = dict(tags or {})
    flavor = _StoringFlavor(
        adapter,
        take_apart(adapter, model),
        extras,
        series,
        version_tags=all_tags if registered_model_name is not None else None,
        log_metrics=config.logs_metrics(),
    )
    try:
        flavor.start_ahead()
        info: ModelInfo = Model.log(
            artifact_path=None,
            name=name,
            flavor=flavor,
            registered_model_name=registered_model_name,
            await_registration_for=await_registration_for,
            params=params,
            tags=all_tags if tags is not None or registered_model_name is not None else None,
            model_type=model_type,
            model_id=model_id,
            step=extras.step or 0,
            # It would load the model again, at every step. The live model has already processed the example.
            validate_serving_input=False,
        )
    except BaseException:
        flavor.withdraw()
        raise
    finally:
        flavor.let_go()
    flavor.confirm()
    flavor.report(info)
    return info


class _StoringFlavor:
    """Stand-in for a flavor's module in one call of `Model.log`.

    Only its `save_model` learns the destination of the model, so the store is found there.
    """

    __name__ = "mlflow.tensorcas"

    def __init__(
        self,
        adapter: Adapter,
        tensors: dict[str, Array],
        extras: Extras,
        series: str | None,
        *,
        version_tags: dict[str, Any] | None,
        log_metrics: bool,
    ) -> None:
        self._adapter = adapter
        self._tensors = tensors
        self._extras = extras
        self._series = series
        """Name shared by the models that a run logs under one name: the last one has the bases of the next."""
        self._ahead: Future[tuple[Store, PendingSave] | None] | None = None
        """A save begun before MLflow names the destination, and the store it goes to."""
        self._version_tags = version_tags
        """Tags of the version to be registered; the save adds its own. None if there will be no version."""
        self._log_metrics = log_metrics
        self._saved: tuple[Store, PendingSave] | None = None
        """The finished save and its store, for figures; None if a server has the store."""
        self._model_tags: dict[str, str] | None = None
        self._held: PendingSave | None = None
        self._committed: tuple[ModelStore, Ref] | None = None

    def start_ahead(self) -> None:
        """Begin to write the tensors while MLflow creates its logged model, which takes about as long.

        The store of the active run almost always serves the model as well. `_write` compares it with the store of the
        destination. A small save on this machine has no head start: two threads of Python code share one interpreter.
        """
        run = mlflow.active_run()
        uri = None if run is None else config.store_uri() or run.info.artifact_uri
        if run is None or uri is None or is_carrier_uri(uri):
            return
        n_bytes = sum(array.nbytes for array in self._tensors.values())
        if n_bytes < _AHEAD_BYTES and local_folder(uri) is not None:
            return
        artifact_uri = run.info.artifact_uri

        def save() -> tuple[Store, PendingSave] | None:
            # The save without a head start meets the same error, and raises it.
            with suppress(TensorCasError, ValueError):
                store = home_of(artifact_uri, create=False).store
                return store, self._save_to(store)
            return None

        self._ahead = threads.start(save, "tensorcas-model")

    def save_model(self, path: str | os.PathLike[str], mlflow_model: Model, **_: Any) -> None:
        """Store the tensors, and write the other files to the folder. MLflow uploads the folder next."""

        def write_tensors(data: Path) -> StoredModel:
            return self._store(data, mlflow_model)

        write_folder(
            path,
            adapter=self._adapter,
            tensors=self._tensors,
            mlflow_model=mlflow_model,
            extras=self._extras,
            write_tensors=write_tensors,
        )

    def withdraw(self) -> None:
        """Undo the commit of a failed upload."""
        if self._committed is not None:
            # If this fails, the leftover ref costs space. The user needs the upload's error, so that one is raised.
            with suppress(TensorCasError):
                withdraw(*self._committed)

    def confirm(self) -> None:
        """Check that the commit made before the upload still stands, now that the manifest is in place.

        Before, a collection of orphans may have taken the model for a deleted one.
        """
        if self._committed is not None:
            place, ref = self._committed
            place.settle()
            if place.store.ref(ref.key) is None:
                self._write(place).commit(place.target)

    def report(self, info: ModelInfo) -> None:
        """Log the figures of the save as tags of the logged model, in the background."""
        if self._saved is None or not self._log_metrics or info.model_id is None:
            return
        known, found = self._model_tags, self._tags(info.model_id)
        tag_model_later(info.model_id, lambda: known or found(), mlflow.get_tracking_uri())

    def _tags(self, model_id: str | None) -> Callable[[], dict[str, str]]:
        """Return a function that makes the tags of the save, at any later time."""
        assert self._saved is not None
        store, save = self._saved
        figures = {"new_bytes": save.n_new_bytes, "stored_bytes": save.n_stored_bytes}
        return partial(model_tags, store, save.manifest, **figures, model_id=model_id, until=datetime.now(UTC))

    def _note(self, place: ModelStore, save: PendingSave) -> None:
        """Remember the save for `report`, and add its tags to those of the version that MLflow registers next."""
        self._saved = place.store, save
        if self._version_tags is not None and self._log_metrics:
            self._model_tags = self._tags(place.target.model_id)()
            self._version_tags |= self._model_tags

    def let_go(self) -> None:
        """Abandon pending content that nothing has taken over."""
        if self._held is not None:
            abandon_pending(self._held)
        with suppress(Exception):  # an error of a save that nobody has asked for hides no other
            self._take_ahead(None)

    def _store(self, data: Path, mlflow_model: Model) -> StoredModel:
        if sends_files(mlflow_model.artifact_path):
            cuts, left_out = self._adapter.cuts(self._tensors), self._adapter.left_out(self._tensors)
            manifest = write_payload(data, self._tensors, flavor=self._adapter.name, cuts=cuts, left_out=left_out)
            return StoredModel(manifest=manifest, store=None)
        place = place_for(
            mlflow_model.artifact_path,
            run_id=mlflow_model.run_id,
            model_id=mlflow_model.model_id,
            step=self._extras.step,
        )
        save = self._write(place)
        try:
            (data / MANIFEST_FILE).write_bytes(save.manifest.to_bytes())
            if place.is_committed_on_arrival:
                hold_pending(place.store, save, place.target)
                self._held = save
            else:
                self._committed = place, save.commit(place.target)
            self._note(place, save)
        except BaseException:
            save.abandon()
            raise
        return StoredModel(manifest=save.manifest, store=place.store)

    def _write(self, place: ModelStore) -> PendingSave:
        return self._take_ahead(place.store) or self._save_to(place.store)

    def _take_ahead(self, store: Store | None) -> PendingSave | None:
        """Return the save that has a head start if it goes to a store; abandon it if it goes to another one."""
        ahead, self._ahead = self._ahead, None
        found = None if ahead is None else ahead.result()
        if found is None or found[0] is store:
            return None if found is None else found[1]
        found[1].abandon()
        return None

    def _save_to(self, store: Store) -> PendingSave:
        cuts, left_out = self._adapter.cuts(self._tensors), self._adapter.left_out(self._tensors)
        return store.write_checkpoint(
            self._tensors, flavor=self._adapter.name, cuts=cuts, left_out=left_out, series=self._series
        )
