"""Imports of each way into a checkpoint, in a new process: no tensor waits for what it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow import TensorCasStore
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

HEAVY = {
    "asyncio",
    "boto3",
    "concurrent.futures",
    "email",
    "importlib.metadata",
    "logging",
    "mlflow",
    "ml_dtypes",
    "multiprocessing",
    "numpy.ma",
    "obstore",
    "pandas",
    "pyarrow",
    "sklearn",
    "sqlalchemy",
    "tempfile",
    "torch",
    "transformers",
    "uuid",
    "xgboost",
    "zstandard",
}
"""Modules whose import takes a millisecond to a second."""

ROOMS = {
    "tensorcas_mlflow.codecs._choose",
    "tensorcas_mlflow.file_formats._formats",
    "tensorcas_mlflow.maintenance._gc",
    "tensorcas_mlflow.maintenance._inventory",
    "tensorcas_mlflow.reader._exchange",
    "tensorcas_mlflow.reader._summary",
    "tensorcas_mlflow.store._save",
}
"""Modules of this package that stand for the writers, the collectors and the file formats."""

WITH_FORMATS = {"logging", "zstandard", "tensorcas_mlflow.file_formats._formats"}
FIND = "from tensorcas_mlflow.store import Store; store = Store.open(root); ref = store.ref(key); "

DOORS = {
    "step": ("from tensorcas_mlflow import TensorCasStore; TensorCasStore(root, 'run').open()['w0']", {"zstandard"}),
    "step of a long series": (
        "from tensorcas_mlflow import TensorCasStore; TensorCasStore(root, 'series').open(3)['w0']",
        {"zstandard"},
    ),
    "first rows": (
        "from tensorcas_mlflow import TensorCasStore; TensorCasStore(root, 'run').open().rows('w0', slice(2))",
        {"zstandard"},
    ),
    "steps": (
        "from tensorcas_mlflow import TensorCasStore; TensorCasStore(root, 'run').list_checkpoints()",
        {"zstandard"},
    ),
    "summary": (
        "from tensorcas_mlflow import TensorCasStore; str(TensorCasStore(root, 'run').open().summary())",
        {"zstandard", "tensorcas_mlflow.reader._summary"},
    ),
    "load of arrays": (
        "from tensorcas_mlflow import TensorCasStore; TensorCasStore(root, 'run').load_tensors()",
        {"zstandard", "concurrent.futures", "logging"},
    ),
    "store": (FIND + "store.read_tensors(store.manifest(ref), ['w0'])", {"zstandard"}),
    "path below a store": (
        "import tensorcas_mlflow as t; t.open_checkpoint(root + '/file.npz')['w0']",
        {"ml_dtypes", *WITH_FORMATS},
    ),
    "URI of a store": (
        "import tensorcas_mlflow as t; t.open_checkpoint('tensorcas://' + root + '/file.npz')['w0']",
        {"ml_dtypes", *WITH_FORMATS},
    ),
    "checkpoint below a store": (
        "import tensorcas_mlflow as t; t.open_checkpoint('tensorcas://' + root + '/model/step-1.arrow')['w0']",
        {"logging", "zstandard"},
    ),
    "foreign file": (
        "import tensorcas_mlflow as t; t.open_checkpoint(root + '/plain.safetensors')['w0']",
        {"ml_dtypes", *WITH_FORMATS},
    ),
    "safe_open": (
        "import tensorcas_mlflow as t; t.safe_open(root + '/plain.safetensors').get_tensor('w0')",
        {"ml_dtypes", *WITH_FORMATS},
    ),
    "command list": ("from tensorcas_mlflow.cli import main; main(['list', '--root', root])", {"zstandard"}),
    "command show": (
        "from tensorcas_mlflow.cli import main; main(['show', '--root', root, '--run', 'run'])",
        {"zstandard"},
    ),
}
"""Doors of a process without MLflow, each with the modules that it may import."""


class Arrays:
    """Takes arrays as they are."""

    def extract(self, model: dict[str, Any]) -> dict[str, Any]:
        return model

    def reconstruct(self, tensors: Mapping[str, Any], original: Any = None) -> Any:
        return dict(tensors)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doors")
    weights = {f"w{n}": np.arange(90_000, dtype=np.float32) for n in range(3)}
    steps = TensorCasStore(folder, "run", adapter=Arrays())
    steps.save(weights, step=1, policy="fast")
    np.savez(folder / "file.npz", **weights)
    with open(folder / "file.npz", "rb") as file, steps.store.write_stream(file) as save:
        save.commit(RefTarget(path="file.npz"))
    (folder / "file.npz").unlink()
    # So many packs that their tables are folded into a segment of the index.
    series = TensorCasStore(folder, "series", adapter=Arrays())
    for step in range(70):
        series.save({"w0": np.full(90_000, step, dtype=np.float32)}, step=step, policy="fast")
    with steps.store.write_checkpoint(weights, policy="fast") as save:
        save.commit(RefTarget(path="model/step-1.arrow"))
    steps.export_file(folder / "plain.safetensors", 1)
    return folder


def output(script: str, folder: Path) -> str:
    """Run a script in a new process, and return what it prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(script: str, folder: Path) -> set[str]:
    """Run a script in a new process, and return the modules of our lists that it imports."""
    report = "import json, sys; print('\\n' + json.dumps(sorted(sys.modules)))"
    return set(json.loads(output(f"{script}\n{report}", folder).splitlines()[-1])) & (HEAVY | ROOMS)


@pytest.mark.parametrize("door", DOORS)
def test_door_imports_nothing_beyond_its_list(door: str, root: Path) -> None:
    script, allowed = DOORS[door]
    [ref] = [ref for ref in Store.open(root).checkpoints() if ref.run_id == "run"]

    assert modules_of(f"root, key = {os.fspath(root)!r}, {ref.key!r}; {script}", root) <= allowed


NOTE_DATACLASSES = """
import dataclasses
compiled, compile_one = [], dataclasses._process_class
def note(cls, *settings):
    compiled.append(f"{cls.__module__}.{cls.__qualname__}")
    return compile_one(cls, *settings)
dataclasses._process_class = note
"""
MOST_DATACLASSES = 15
"""Each takes 0.3 to 0.5 ms of the import, a named tuple 0.1: the standard library compiles their methods."""


def test_opening_of_a_step_compiles_few_dataclasses(root: Path) -> None:
    script, _ = DOORS["step"]
    script = f"{NOTE_DATACLASSES}root = {os.fspath(root)!r}; {script}; print('\\n', *compiled)"
    compiled = output(script, root).splitlines()[-1].split()

    assert "tensorcas_mlflow.layout.manifests._manifest.Manifest" in compiled
    assert len(compiled) <= MOST_DATACLASSES, compiled


LOG = """
import mlflow, numpy as np
mlflow.set_tracking_uri("sqlite:///" + root + "/mlflow.db")
mlflow.set_experiment(experiment_id=mlflow.create_experiment("doors", artifact_location=root + "/runs"))
with mlflow.start_run() as run:
    model = {f"w{n}": np.arange(90_000, dtype=np.float32) for n in range(3)}
    mlflow.tensorcas.log_checkpoint(model, step=1)
    print(run.info.run_id, mlflow.tensorcas.log_model(model, name="model").model_uri)
"""

OF_MLFLOW = {
    "load_checkpoint": "mlflow.tensorcas.load_checkpoint(run)",
    "open_checkpoint": "mlflow.tensorcas.open_checkpoint(run)['w0']",
    "list_checkpoints": "mlflow.tensorcas.list_checkpoints(run)",
    "load_model": "mlflow.tensorcas.load_model(model)",
    "pyfunc": "mlflow.pyfunc.load_model(model)",
}
"""Doors of a process with MLflow; ``run`` and ``model`` name what to open."""


@pytest.mark.long
def test_doors_of_mlflow_import_no_framework_and_no_writer(tmp_path: Path) -> None:
    root = os.fspath(tmp_path)
    run, model = output(f"root = {root!r}\n{LOG}", tmp_path).split()[-2:]
    begin = f"import mlflow; mlflow.set_tracking_uri('sqlite:///{root}/mlflow.db'); run, model = {run!r}, {model!r}; "
    found = {door: modules_of(begin + script, tmp_path) for door, script in OF_MLFLOW.items()}

    plain = modules_of(begin + "mlflow.get_run(run); import mlflow.pyfunc", tmp_path)
    for door, modules in found.items():
        assert modules - plain <= {"zstandard"}, door
