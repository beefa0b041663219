"""The function that logs a model: tensors go straight to the store, all other files where MLflow puts artifacts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlflow.models import Model, ModelSignature
from mlflow.models.model import ModelInfo
from mlflow.tracking._model_registry import DEFAULT_AWAIT_MAX_SLEEP_SECONDS

from tensorcas_mlflow._home import sends_files
from tensorcas_mlflow._mlflow_errors import translate_errors
from tensorcas_mlflow.adapter import Adapter, Array
from tensorcas_mlflow.adapters import adapter_for, take_apart
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.flavor._folder import Extras, Stored, write_folder
from tensorcas_mlflow.flavor._places import Place, place_for, withdraw
from tensorcas_mlflow.store import MANIFEST_FILE, PendingSave, Ref, abandon_pending, hold_pending, write_payload


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

    TENSORCAS_STORE names the store; by default it is the one that the experiment's artifact location lies in, and the
    call makes it if there is none. A server that keeps its artifacts in a store of its own gets the whole model. Errors
    are also `mlflow.exceptions.MlflowException`.

    Args:
        model: A model of a framework that has an adapter. It may change once this returns.
        name: The name of the logged model; by default MLflow makes one up.
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
    # Before MLflow makes a logged model, so that a model that is refused leaves none behind.
    flavor = _StoringFlavor(model, adapter, take_apart(adapter, model), extras)
    try:
        info: ModelInfo = Model.log(
            artifact_path=None,
            name=name,
            flavor=flavor,
            registered_model_name=registered_model_name,
            await_registration_for=await_registration_for,
            params=params,
            tags=tags,
            model_type=model_type,
            model_id=model_id,
            step=extras.step or 0,
            # It would load the model again, at every step. The example went through the live model already.
            validate_serving_input=False,
        )
    except BaseException:
        flavor.withdraw()
        raise
    finally:
        flavor.let_go()
    flavor.confirm()
    return info


class _StoringFlavor:
    """Stand-in for a flavor's module in one call of `Model.log`.

    Only its `save_model` is told where the model is going, so the store is found there.
    """

    __name__ = "mlflow.tensorcas"

    def __init__(self, model: Any, adapter: Adapter, tensors: dict[str, Array], extras: Extras) -> None:
        self._adapter = adapter
        self._tensors = tensors
        self._extras = extras
        self._held: PendingSave | None = None
        self._committed: tuple[Place, Ref] | None = None

    def save_model(self, path: str | os.PathLike[str], mlflow_model: Model, **_: Any) -> None:
        """Store the tensors, and write the rest to the folder that MLflow uploads next."""

        def write_tensors(data: Path) -> Stored:
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
        """Take back what was committed for an upload that failed."""
        if self._committed is not None:
            # The ref that stays if this fails costs space; the reader wants to know why the upload failed.
            with suppress(TensorCasError):
                withdraw(*self._committed)

    def confirm(self) -> None:
        """See that what was committed before the upload is still committed, now that its manifest is in its place.

        Until then a collection told to drop the refs of models that are gone may have taken it for one of those.
        """
        if self._committed is not None:
            place, ref = self._committed
            place.settle()
            if place.store.ref(ref.key) is None:
                self._write(place).commit(place.target)

    def let_go(self) -> None:
        """Abandon what no artifact repository has taken over."""
        if self._held is not None:
            abandon_pending(self._held)

    def _store(self, data: Path, mlflow_model: Model) -> Stored:
        if sends_files(mlflow_model.artifact_path):
            cuts, left_out = self._adapter.cuts(self._tensors), self._adapter.left_out(self._tensors)
            manifest = write_payload(data, self._tensors, flavor=self._adapter.name, cuts=cuts, left_out=left_out)
            return Stored(manifest=manifest, store=None)
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
        except BaseException:
            save.abandon()
            raise
        return Stored(manifest=save.manifest, store=place.store)

    def _write(self, place: Place) -> PendingSave:
        cuts, left_out = self._adapter.cuts(self._tensors), self._adapter.left_out(self._tensors)
        return place.store.write_checkpoint(self._tensors, flavor=self._adapter.name, cuts=cuts, left_out=left_out)
