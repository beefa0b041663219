"""Runs and names of the logged models in a store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tensorcas_mlflow.backends import Root, map_requests
from tensorcas_mlflow.errors import TensorCasError
from tensorcas_mlflow.integration.directory._directory import NamedModel
from tensorcas_mlflow.layout import Ref
from tensorcas_mlflow.store import Store

_RUN_ID = re.compile(rb"^run_id: ['\"]?([0-9A-Za-z_-]+)['\"]?\s*$", re.MULTILINE)
_MOST_BYTES = 1 << 20


def models_by_file(store: Store, refs: Iterable[Ref]) -> dict[str, NamedModel]:
    """Read the runs of logged models, without their names, from the MLmodel files beside a store.

    A model of a flavor of MLflow's own is a few files of the store, whose refs name no run.
    """
    places = {ref.model_id: ref.path for ref in refs if ref.model_id is not None and ref.run_id is None and ref.path}
    if not places or store.backend.is_carrier or ":" not in store.uri:
        return {}
    from tensorcas_mlflow.backends import open_plain_files  # the import takes longer than a listing without models

    plain = open_plain_files(Root.parse(store.uri))

    def read(item: tuple[str, str]) -> NamedModel | None:
        model_id, path = item
        root, _, _ = path.partition(f"{model_id}/artifacts/")
        try:
            with plain.open(f"{root}{model_id}/artifacts/MLmodel") as file:
                found = _RUN_ID.search(file.read(_MOST_BYTES))
        except (TensorCasError, OSError):
            return None
        return None if found is None else NamedModel(model_id, "", found[1].decode())

    models = map_requests(store.backend, read, places.items())
    return {model.model_id: model for model in models if model is not None}


def with_runs(refs: Sequence[Ref], models: dict[str, NamedModel]) -> list[Ref]:
    """Return refs of which those of logged models name the run that logged the model, if it is known."""
    known = {model_id: model.run_id for model_id, model in models.items()}
    return [
        replace(ref, run_id=known.get(ref.model_id)) if ref.run_id is None and ref.model_id is not None else ref
        for ref in refs
    ]
