"""Nothing of a model is imported unless all of the model is loaded, and its code never stands before what is installed.

Models whose ``code/`` has a file of the name of every module there is, and an entry point for an adapter, are logged by
one process; another does with them all that there is to be done, each thing in a child of its own, which has imported
nothing of ours yet, and of other packages MLflow, with or without those of `HEAVY`. Each of the files tells that it was
imported, and fails. This file is the program of both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

OWN = "tensorcas_test_own_code"
"""A module that only the model has."""

SHADOW = """
import os
with open(os.environ["TENSORCAS_TEST_IMPORTED"], "a") as file:
    file.write(__name__ + "\\n")
raise ImportError(f"the model's own {__name__} was imported")
"""

HEAVY = ("torch", "pyarrow", "mlflow.store.tracking.sqlalchemy_store")
"""Modules that take each child seconds to import."""

OWN_CODE = "from torch.nn import Linear\n\n\nclass Own(Linear):\n    pass\n"


def make_state(seed: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(40, 20).state_dict()


def make_generic(seed: int) -> Any:
    import numpy as np

    return {"w": np.arange(999.0) + seed, "step": seed}


MAKERS: dict[str, Callable[[int], Any]] = {
    "pytorch": make_state,  # needs no pickle
    "generic": make_generic,
}


def load(place: dict[str, str], **options: Any) -> Any:
    import mlflow

    return mlflow.tensorcas.load_model(place["uri"], **options)


def load_pyfunc(place: dict[str, str]) -> Any:
    import mlflow

    return mlflow.pyfunc.load_model(place["uri"], suppress_warnings=True)


def open_it(place: dict[str, str]) -> Any:
    import mlflow

    with mlflow.tensorcas.open_checkpoint(place["uri"]) as reader:
        return str(reader.summary()), reader.digest(), [reader.tensor(name) for name in reader]


def compare(place: dict[str, str]) -> Any:
    import mlflow

    return mlflow.tensorcas.diff(place["uri"], place["saved"], values=True)


def export(place: dict[str, str]) -> Any:
    import mlflow

    out = Path(place["folder"], "exports", place["adapter"])
    mlflow.tensorcas.export_checkpoint(place["uri"], out / "weights.safetensors")
    mlflow.tensorcas.export_model(place["uri"], out / "model")
    mlflow.tensorcas.export_model(place["saved"], out / "saved")


def command(*words: str) -> None:
    from tensorcas_mlflow.cli import main

    assert main(list(words)) == 0


def show(place: dict[str, str]) -> None:
    command("--root", place["artifacts"], "show", "--name", place["model_id"], "--run", place["run_id"])
    command("--root", place["artifacts"], "verify", "--full")
    command("--root", place["artifacts"], "list")


def with_pickles_forbidden(
    act: Callable[[dict[str, str]], Any], switch: str = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"
) -> Callable[[dict[str, str]], Any]:
    def acting(place: dict[str, str]) -> Any:
        os.environ[switch] = "false"
        return act(place)

    return acting


def fill(place: dict[str, str]) -> Any:
    import numpy as np

    live = MAKERS[place["adapter"]](1)
    filled = load(place, into=live)
    if place["adapter"] == "generic":
        np.testing.assert_array_equal(filled["w"], MAKERS["generic"](0)["w"])


ACTS: dict[str, Callable[[dict[str, str]], Any]] = {
    "load_model(into=…)": fill,
    "load_model(weights_only=True)": lambda place: load(place, weights_only=True),
    "load_model where pickles are forbidden": with_pickles_forbidden(load),
    "load_model where all code is forbidden": with_pickles_forbidden(load, "MLFLOW_ALLOW_MODEL_CODE_EXECUTION"),
    "pyfunc where pickles are forbidden": with_pickles_forbidden(load_pyfunc),
    "open_checkpoint": open_it,
    "diff": compare,
    "export": export,
    "commands": show,
}
"""These put nothing of a model on the path."""
TRUSTING: dict[str, Callable[[dict[str, str]], Any]] = {"load_model": load, "pyfunc": load_pyfunc}
"""These run a model's code, and what is installed goes before it."""
REFUSED = {f"generic {act}" for act in ACTS if act.endswith("forbidden")}


# --- the two programs


def write(folder: Path) -> None:
    """Log a model of each adapter, and put a file for every module there is into its code."""
    from importlib.metadata import packages_distributions

    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    experiment = mlflow.create_experiment("shadows", artifact_location=f"{folder}/artifacts")
    (folder / f"{OWN}.py").write_text(OWN_CODE)
    sys.path.append(str(folder))
    own = __import__(OWN).Own(4, 2)
    codes = [str(folder / f"{OWN}.py")]
    places: dict[str, dict[str, str]] = {}
    with mlflow.start_run(experiment_id=experiment) as run:
        for adapter, model in [("own", own), *((name, make(0)) for name, make in MAKERS.items())]:
            info = mlflow.tensorcas.log_model(model, name=adapter, code_paths=codes)
            mlflow.tensorcas.save_model(model, folder / "saved" / adapter, code_paths=codes)
            places[adapter] = {
                "adapter": adapter,
                "folder": str(folder),
                "artifacts": str(folder / "artifacts"),
                "uri": str(folder / "models" / adapter),
                "saved": str(folder / "saved" / adapter),
                "model_id": info.model_id,
                "run_id": run.info.run_id,
            }
            Path(places[adapter]["uri"]).parent.mkdir(exist_ok=True)
            Path(info.artifact_path).rename(places[adapter]["uri"])
    (folder / f"{OWN}.py").unlink()
    names = {*sys.stdlib_module_names, *packages_distributions(), *(name.partition(".")[0] for name in sys.modules)}
    for place in places.values():
        for model_folder in (place["uri"], place["saved"]):
            code = Path(model_folder, "code")
            for name in {name for name in names if "/" not in name} - {OWN}:  # tensorstore lists a path as a module
                (code / f"{name}.py").write_text(SHADOW)
            facts = code / "shadow-1.0.dist-info"
            facts.mkdir()
            (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: shadow\nVersion: 1.0\n")
            (facts / "entry_points.txt").write_text("[tensorcas.flavors]\nshadow = shadow_adapter:Adapter\n")
            (code / "shadow_adapter.py").write_text(SHADOW)
    (folder / "places.json").write_text(json.dumps(places))


def read(folder: Path, *imported_before: str) -> None:
    """Do everything to each model, and print what was imported of it."""
    import mlflow

    for name in imported_before:
        import_module(name)

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    places = json.loads((folder / "places.json").read_text())
    cases = [(name, act, place) for name, act in ACTS.items() for place in places.values() if place["adapter"] != "own"]
    cases += [(name, act, place) for name, act in TRUSTING.items() for place in places.values()]
    told = {}
    for name, act, place in cases:
        out, imported = folder / "answer.json", folder / "imported.txt"
        imported.write_text("")
        child = os.fork()
        if not child:
            os.environ["TENSORCAS_TEST_IMPORTED"] = str(imported)
            os.dup2(os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            out.write_text(json.dumps(answer_of(act, place)))
            os._exit(0)
        os.waitpid(child, 0)
        told[f"{place['adapter']} {name}"] = json.loads(out.read_text()) | {"imported": imported.read_text().split()}
    print(json.dumps(told))


def answer_of(act: Callable[[dict[str, str]], Any], place: dict[str, str]) -> dict[str, Any]:
    error, before = "", list(sys.path)
    try:
        act(place)
    except BaseException as raised:  # noqa: BLE001 -- whatever it is, a test tells it
        error = f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_exc())}"
    return {
        "error": error,
        "added": [entry for entry in sys.path if entry not in before],
        "is_last": sys.path[: len(before)] == before,
        "own": str(getattr(sys.modules.get(OWN), "__file__", None)),
    }


# --- the tests


@pytest.fixture(
    scope="module",
    params=[pytest.param(HEAVY, id="after others"), pytest.param((), id="first", marks=pytest.mark.long)],
)
def told(
    request: pytest.FixtureRequest, empty_database: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shadows")
    shutil.copy(empty_database, folder / "mlflow.db")
    outputs = []
    for program in (["write", str(folder)], ["read", str(folder), *request.param]):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
        done = subprocess.run(
            [sys.executable, __file__, *program],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    answers: dict[str, Any] = json.loads(outputs[-1])
    return answers


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("adapter", MAKERS)
def test_code_of_a_model_is_not_imported_by(adapter: str, act: str, told: dict[str, Any]) -> None:
    answer = told[f"{adapter} {act}"]

    assert answer["imported"] == []
    assert answer["added"] == []
    if f"{adapter} {act}" in REFUSED:
        assert "this model holds a pickle" in answer["error"]
    else:
        assert answer["error"] == ""


@pytest.mark.parametrize("act", TRUSTING)
@pytest.mark.parametrize("adapter", [*MAKERS, "own"])
def test_installed_modules_come_before_the_code_of_a_model_loaded_by(
    adapter: str, act: str, told: dict[str, Any]
) -> None:
    answer = told[f"{adapter} {act}"]

    assert answer["error"] == ""
    assert [name for name in answer["imported"] if find_spec(name)] == []
    assert answer["is_last"]
    assert len(answer["added"]) == 1


@pytest.mark.parametrize("act", TRUSTING)
def test_a_models_own_code_is_found_by(act: str, told: dict[str, Any]) -> None:
    assert told[f"own {act}"]["own"].endswith(f"models/own/code/{OWN}.py")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
