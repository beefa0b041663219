"""Nothing but loading a model reads its pickle: neither its weights, nor listings, summaries, checks or downloads.

Models with a pickle that leaves a marker when it is read are stored by one process, and another does with them all that
there is to be done. This file is the program of both.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tracking import empty_database
from tests.zygote import run_program

__all__ = ["empty_database"]

X = np.random.default_rng(0).normal(size=(40, 3))
Y = X @ np.ones(3)


class Hostile:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> Any:
        return go_off, (self._marker,)

    def __call__(self, truth: Any, answers: Any) -> Any:
        """Stand for an objective of XGBoost: squared error."""
        return answers - truth, np.ones_like(answers)


def go_off(marker: str) -> Hostile:
    """Make the file, and what a save wants to see come back."""
    Path(marker).touch()
    return Hostile(Path(marker))


def make_pytorch(note: Any) -> Any:
    import torch

    module = torch.nn.Linear(3, 2)
    module.note = note
    return module


def make_sklearn(note: Any) -> Any:
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit(X, Y)
    model.note = note
    return model


def make_xgboost(note: Any) -> Any:
    from xgboost import XGBRegressor

    return XGBRegressor(n_estimators=2, n_jobs=1, objective=note).fit(X, Y)


def make_generic(note: Any) -> Any:
    return {"w": np.arange(99.0), "note": note}


MAKERS: dict[str, Callable[[Any], Any]] = {
    "pytorch": make_pytorch,
    "sklearn": make_sklearn,
    "xgboost": make_xgboost,
    "generic": make_generic,
}


@dataclass
class Case:
    """One hostile model, and where it is stored."""

    adapter: str
    folder: Path
    model_uri: str = ""
    run_id: str = ""

    @property
    def marker(self) -> Path:
        return self.folder / f"{self.adapter}.was-unpickled"

    @property
    def root(self) -> Path:
        """Of a store without MLflow, where each case is steps 1 and 2 of a run of its name."""
        return self.folder / "store"

    def store(self) -> Any:
        from tensorcas_mlflow.adapter import adapter_named
        from tensorcas_mlflow.tensorcas_store import TensorCasStore

        return TensorCasStore(self.root, self.adapter, adapter_named(self.adapter))

    def live(self) -> Any:
        """Make a model to fill, with an equal hostile part: only a pickle could restore another one."""
        return MAKERS[self.adapter](Hostile(self.marker))

    def load(self, **options: Any) -> Any:
        import mlflow

        return mlflow.tensorcas.load_model(self.model_uri, **options)

    def pyfunc(self) -> Any:
        import mlflow

        return mlflow.pyfunc.load_model(self.model_uri)

    def list_artifacts(self) -> Any:
        import mlflow

        model_id = self.model_uri.removeprefix("models:/")
        return [mlflow.MlflowClient().list_logged_model_artifacts(model_id, path) for path in (None, "data")]

    def download(self) -> Any:
        import mlflow

        return mlflow.artifacts.download_artifacts(artifact_uri=self.model_uri, dst_path=str(self.folder / "downloads"))

    def identities(self) -> Any:
        store = self.store().store
        return [row.identity for ref in store.checkpoints() for row in store.manifest(ref).rows]

    def read_tensors(self) -> Any:
        store = self.store().store
        return [store.read_tensors(store.manifest(ref)) for ref in store.checkpoints()]

    def export(self) -> Any:
        import mlflow

        return mlflow.tensorcas.export_model(self.model_uri, str(self.folder / "exports" / self.adapter))

    def copy(self) -> Any:
        from tensorcas_mlflow.cli import main

        return main(["copy", str(self.root), str(self.folder / "copies" / self.adapter), "--quiet"])

    def pages(self) -> Any:
        from tensorcas_mlflow.integration.pages import render_page

        store = self.store().store
        return [render_page(store, ref) for ref in store.checkpoints()]

    def read_a_file_of_its_own(self) -> Any:
        from tensorcas_mlflow.chunk_io import TensorsFile
        from tensorcas_mlflow.store import payload_pieces

        store = self.store().store
        file = self.folder / f"{self.adapter}.tensors"
        file.write_bytes(b"".join(payload_pieces(store, store.manifest(store.checkpoints()[0]))))
        return TensorsFile(file).read()

    def upload_again(self) -> Any:
        from tensorcas_mlflow.integration.artifacts import TensorCasArtifactRepository

        repository = TensorCasArtifactRepository(f"tensorcas://{self.folder}/uploads/{self.adapter}")
        for file in (self.folder / "downloads").rglob("*"):
            if file.is_file():
                repository.log_artifact(str(file))
        return repository.list_artifacts()

    def load_checkpoint(self, **options: Any) -> Any:
        import mlflow

        return mlflow.tensorcas.load_checkpoint(self.run_id, name=self.adapter, **options)

    def load_on_ranks(self) -> Any:
        """Begin a load as each rank begins it."""
        from tensorcas_mlflow.distributed import TensorCasStorageReader

        return TensorCasStorageReader(run_id=self.run_id, name=self.adapter).read_metadata()

    def list_checkpoints(self) -> Any:
        import mlflow

        return mlflow.tensorcas.list_checkpoints(self.run_id)


SAFE: dict[str, Callable[[Case], Any]] = {
    "load_model(weights_only=True)": lambda case: case.load(weights_only=True),
    "load_model(into=…)": lambda case: case.load(into=case.live()),
    "load_checkpoint(weights_only=True)": lambda case: case.load_checkpoint(weights_only=True),
    "load_checkpoint(into=…)": lambda case: case.load_checkpoint(into=case.live()),
    "list_checkpoints": Case.list_checkpoints,
    "list artifacts": Case.list_artifacts,
    "download artifacts": Case.download,
    "upload what was downloaded": Case.upload_again,
    "export_model": Case.export,
    "tensorcas copy": Case.copy,
    "pages": Case.pages,
    "a self-contained file": Case.read_a_file_of_its_own,
    "manifests and identities": Case.identities,
    "Store.read_tensors": Case.read_tensors,
    "TensorCasStore.load_tensors": lambda case: case.store().load_tensors(1),
    "TensorCasStore.load(original=…)": lambda case: case.store().load(1, case.live()),
    "TensorCasStore.stats": lambda case: case.store().stats(),
}
COMMANDS = (
    "list",
    "list --run {run}",
    "stats",
    "stats --run {run}",
    "show --run {run} --step 1",
    "diff --run {run} --steps 1 2",
    "verify",
    "verify --full",
    "gc --dry-run",
    "delete --run {run} --step 2 --yes",
    "gc --yes --grace 0",
)
FORBIDDEN: dict[str, Callable[[Case], Any]] = {
    "load_model": Case.load,
    "load_checkpoint": Case.load_checkpoint,
    "mlflow.pyfunc.load_model": Case.pyfunc,
    "TensorCasStore.load": lambda case: case.store().load(1),
    "TensorCasStorageReader": Case.load_on_ranks,
}
"""These read the pickle, unless one of MLflow's switches is false."""
SWITCHES = ("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "MLFLOW_ALLOW_MODEL_CODE_EXECUTION")


# --- the two programs


def write(folder: Path, *adapters: str) -> None:
    """Store a hostile model of each kind in every way there is."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    experiment = mlflow.create_experiment("hostile", artifact_location=f"tensorcas://{folder}/artifacts")
    places = {}
    with mlflow.start_run(experiment_id=experiment) as run:
        for adapter in adapters:
            case = Case(adapter, folder)
            model = MAKERS[adapter](Hostile(case.marker))
            info = mlflow.tensorcas.log_model(model, name=adapter)
            assert info.flavors["tensorcas"]["adapter"] == adapter
            mlflow.tensorcas.log_checkpoint(model, step=1, name=adapter)
            for step in (1, 2):
                case.store().save(model, step=step)
            places[adapter] = {"model_uri": info.model_uri, "run_id": run.info.run_id}
    (folder / "places.json").write_text(json.dumps(places))


def read(folder: Path) -> None:
    """Do everything to each case, and write down what was unpickled."""
    import mlflow

    from tensorcas_mlflow.cli import main

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    found: list[str] = []
    sys.addaudithook(lambda event, facts: found.append(".".join(facts)) if event == "pickle.find_class" else None)
    told: dict[str, Any] = {}

    def watch(case: Case, name: str, act: Callable[[], Any]) -> None:
        case.marker.unlink(missing_ok=True)
        found.clear()
        error = ""
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
            try:
                status = act()
            except Exception as raised:  # noqa: BLE001 -- whatever it is, a test tells it
                status, error = None, f"{type(raised).__name__}: {raised}"
        if isinstance(status, int) and status:
            error = printed.getvalue()
        told[f"{case.adapter} {name}"] = {"error": error, "ran": case.marker.exists(), "unpickled": list(found)}

    for adapter, place in json.loads((folder / "places.json").read_text()).items():
        case = Case(adapter, folder, **place)
        for name, safe in SAFE.items():
            watch(case, name, partial(safe, case))
        for name, forbidden in FORBIDDEN.items():
            for switch in SWITCHES:
                os.environ[switch] = "false"
                watch(case, f"{name} while {switch} is false", partial(forbidden, case))
                del os.environ[switch]
            watch(case, name, partial(forbidden, case))
        for command in COMMANDS:
            words = ["--root", str(case.root), *command.format(run=adapter).split()]
            watch(case, f"{command} text", partial(main, words))
            if not command.startswith(("delete", "gc")):
                watch(case, f"{command} json", partial(main, [*words, "--json"]))
    print(json.dumps(told))


# --- the tests

PROGRAM = "import runpy; runpy.run_module('tests.test_nothing_unpickles', run_name='__main__', alter_sys=True)"
"""This file as a program, which finds its words where `python -m` puts them."""


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copy(empty_database, folder / "mlflow.db")
    wanted = {item.callspec.params["adapter"] for item in request.session.items if item.path == request.path}
    outputs = []
    for program in (["write", str(folder), *sorted(wanted)], ["read", str(folder)]):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        done = run_program(PROGRAM, *program, env=env, cwd=folder, timeout=300, check=True)
        outputs.append(done.stdout)
    answers: dict[str, Any] = json.loads(outputs[-1])
    return answers


def command_names() -> Iterator[str]:
    for command in COMMANDS:
        yield f"{command} text"
        if not command.startswith(("delete", "gc")):
            yield f"{command} json"


ADAPTERS = [pytest.param(name, marks=() if name in ("pytorch", "generic") else pytest.mark.long) for name in MAKERS]


@pytest.mark.parametrize("name", [*SAFE, *command_names()])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_pickle_of_a_model_is_not_read_by(adapter: str, name: str, told: dict[str, Any]) -> None:
    assert told[f"{adapter} {name}"] == {"error": "", "ran": False, "unpickled": []}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_pickle_that_mlflow_forbids_is_not_read_by(adapter: str, name: str, switch: str, told: dict[str, Any]) -> None:
    answer = told[f"{adapter} {name} while {switch} is false"]

    assert switch in answer["error"]
    assert not answer["ran"]
    assert answer["unpickled"] == []


@pytest.mark.parametrize("name", FORBIDDEN)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_pickle_of_a_model_is_read_by(adapter: str, name: str, told: dict[str, Any]) -> None:
    assert told[f"{adapter} {name}"]["ran"]


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
