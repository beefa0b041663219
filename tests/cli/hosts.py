"""Fixtures for tests of ``gc --orphans``: MLflow with experiments in a store, and the command that collects it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mlflow import MlflowClient
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from tensorcas_mlflow.store import Store
from tests.cli.conftest import Done, Tensorcas


class Host:
    """An MLflow tracking store, and the root of a store in which its experiments have their artifacts."""

    def __init__(self, uri: str, root: Path) -> None:
        self.uri = uri
        self.root = root
        self.client = MlflowClient(uri)

    def experiment(self, folder: str, *, location: str | None = None) -> str:
        return str(self.client.create_experiment(folder, location or f"tensorcas://{self.root}/{folder}"))

    def run(self, experiment_id: str, *, folder: str | None = None) -> str:
        """Log a file and a note as a run's."""
        info = self.client.create_run(experiment_id).info
        self.write(info.artifact_uri if folder is None else f"tensorcas://{self.root}/{folder}/{info.run_id}/artifacts")
        return str(info.run_id)

    def model(self, experiment_id: str, *, folder: str | None = None) -> str:
        """Log a file and a note as a logged model's."""
        model = self.client.create_logged_model(experiment_id)
        in_folder = f"tensorcas://{self.root}/{folder}/models/{model.model_id}/artifacts"
        self.write(model.artifact_location if folder is None else in_folder)
        return str(model.model_id)

    def registered(self, name: str, model_id: str, *, registry_uri: str | None = None) -> str:
        """Register a version of a logged model, copy it to another name, and delete the first; give the other name."""
        client = MlflowClient(self.uri, registry_uri or self.uri)
        client.create_registered_model(name)
        client.create_model_version(name, f"models:/{model_id}", model_id=model_id)
        copy = client.copy_model_version(f"models:/{name}/1", f"copy of {name}")
        client.delete_registered_model(name)
        return str(copy.name)

    def write(self, root: str) -> None:
        file = self.root.parent / "weights.bin"
        file.write_bytes(np.random.default_rng(0).bytes(1000))
        note = self.root.parent / "note.txt"
        note.write_text("a note")
        repository = get_artifact_repository(root)
        repository.log_artifact(str(file))
        repository.log_artifact(str(note), "notes")

    def forget(self, *ids: str) -> None:
        store = self.client._tracking_client.store
        for each in ids:
            if each.startswith("m-"):
                store._hard_delete_logged_model(each)
            else:
                store._hard_delete_run(each)

    def kept(self) -> set[str]:
        """Ids in the paths of all that is left, in the store and beside it."""
        paths = [ref.path or ref.uri or "" for ref in Store.open(self.root).checkpoints()]
        paths += [str(path.relative_to(self.root)) for path in self.root.rglob("note.txt")]
        return {part for path in paths for part in path.split("/") if len(part) in (32, 34)}


class Gc:
    def __init__(self, host: Host, tensorcas: Tensorcas) -> None:
        self.host = host
        self.tensorcas = tensorcas

    def __call__(self, *words: str, uri: str | None = None, grace: str = "0") -> Done:
        tracking = ("--tracking-uri", uri or self.host.uri)
        return self.tensorcas("gc", "--root", self.host.root, "--orphans", *tracking, "--yes", "--grace", grace, *words)
