"""Train three models for twenty steps each, log every step, load some steps back, and count the bytes.

Run it with ``make demo``. Or install the package with ``[all]`` and run ``python examples/quickstart.py [FOLDER]``. The
program writes only to FOLDER (default ``demo``): an SQLite tracking database, and one store shared by all models.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pytorch
import mlflow.sklearn
import mlflow.xgboost
import numpy as np
import torch
import xgboost
from sklearn.datasets import load_digits
from sklearn.ensemble import GradientBoostingClassifier

from tensorcas_mlflow.store import Store

N_STEPS = 20
CHECKED_STEPS = (1, 10, 20)
MLFLOW_TEXT_FILES = {"MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt"}
MARKER = "made-by-tensorcas-quickstart"

PIXELS, LABELS = load_digits(return_X_y=True)
PIXELS = (PIXELS / 16).astype(np.float32)


# --- three models, trained step by step


def train_torch() -> Iterator[torch.nn.Module]:
    """Train an MLP on the digits data set, with its first half frozen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 10),
    )
    model[:4].requires_grad_(False)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    pixels, labels = torch.from_numpy(PIXELS), torch.from_numpy(LABELS)
    for _ in range(N_STEPS):
        for rows in torch.randperm(len(pixels)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels[rows]), labels[rows]).backward()
            optimizer.step()
        yield model


def train_sklearn() -> Iterator[GradientBoostingClassifier]:
    """Train gradient boosting with warm start: every step adds a tree for each of the ten classes."""
    model = GradientBoostingClassifier(n_estimators=1, warm_start=True, random_state=0)
    for step in range(1, N_STEPS + 1):
        model.n_estimators = step
        yield model.fit(PIXELS, LABELS)


def train_xgboost() -> Iterator[xgboost.Booster]:
    """Train a booster for one more round per step."""
    data = xgboost.DMatrix(PIXELS, LABELS)
    booster = None
    for _ in range(N_STEPS):
        booster = xgboost.train({"objective": "multi:softprob", "num_class": 10}, data, 1, xgb_model=booster)
        yield booster


# --- the bits to compare, for each framework


def torch_bits(model: torch.nn.Module) -> list[tuple[str, bytes]]:
    return [(name, tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()]


def sklearn_bits(model: GradientBoostingClassifier) -> list[bytes]:
    trees = [tree.tree_ for tree in model.estimators_.ravel()]
    fields = ("children_left", "children_right", "feature", "threshold", "impurity", "value", "weighted_n_node_samples")
    arrays = [getattr(tree, field) for tree in trees for field in fields]
    return [array.tobytes() for array in [*arrays, model.classes_, model.train_score_, model.predict_proba(PIXELS)]]


def xgboost_bits(model: xgboost.Booster) -> bytes:
    return bytes(model.save_raw("ubj"))


def torch_answers(model: torch.nn.Module) -> Any:
    with torch.no_grad():
        return model(torch.from_numpy(PIXELS)).numpy()


@dataclass
class Case:
    """One framework's part of the demo."""

    name: str
    train: Callable[[], Iterator[Any]]
    bits: Callable[[Any], Any]
    answers: Callable[[Any], Any]
    """The native model's answers to `PIXELS`."""
    log_plain: Callable[[Any], Any]
    """Log the model with MLflow's own flavor."""
    uris: dict[int, str] = field(default_factory=dict)
    snapshots: dict[int, Any] = field(default_factory=dict)
    plain_bytes: int = 0
    plain_s: float = 0.0
    stored_bytes: int = 0
    stored_s: float = 0.0
    changed_bytes: int = 0
    """Size of the tensors changed since the previous step; torch only."""


CASES = [
    Case(
        name="torch",
        train=train_torch,
        bits=torch_bits,
        answers=torch_answers,
        log_plain=lambda model: mlflow.pytorch.log_model(
            model, name="model", serialization_format="pickle", pip_requirements=["torch"]
        ),
    ),
    Case(
        name="sklearn",
        train=train_sklearn,
        bits=sklearn_bits,
        answers=lambda model: model.predict(PIXELS),
        # MLflow's default here, skops, writes about twenty times as many bytes, so the pickle is the stronger baseline.
        log_plain=lambda model: mlflow.sklearn.log_model(
            model, name="model", serialization_format="cloudpickle", pip_requirements=["scikit-learn"]
        ),
    ),
    Case(
        name="xgboost",
        train=train_xgboost,
        bits=xgboost_bits,
        answers=lambda model: model.predict(xgboost.DMatrix(PIXELS)),
        log_plain=lambda model: mlflow.xgboost.log_model(model, name="model", pip_requirements=["xgboost"]),
    ),
]


# --- the demo


def main(folder: Path) -> None:
    artifacts, database = prepare(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            log_plainly(case, Path(scratch) / case.name)
    mlflow.set_tracking_uri(database)
    store = Store.open(artifacts, create=True)
    for case in CASES:
        log_deduplicated(case, f"{store.uri}/{case.name}", artifacts)
    for case in CASES:
        load_back(case)
    print_table(artifacts)
    print(f"\nSee the models in the MLflow UI:\n  {ui_command(database)}")


def prepare(folder: Path) -> tuple[Path, str]:
    """Make an empty folder; delete the output of an earlier run of this script."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            sys.exit(f"{folder} is not empty and was not made by this script: name another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder / "artifacts", f"sqlite:///{folder / 'mlflow.db'}"


def log_plainly(case: Case, scratch: Path) -> None:
    """Log one model per step with MLflow's own flavor, as the baseline."""
    scratch.mkdir()
    mlflow.set_tracking_uri(f"sqlite:///{scratch / 'mlflow.db'}")
    mlflow.create_experiment(case.name, artifact_location=(scratch / "artifacts").as_uri())
    mlflow.set_experiment(case.name)
    with mlflow.start_run():
        for step, model in enumerate(case.train(), start=1):
            show_progress(f"{case.name}: plain MLflow", step)
            start = time.perf_counter()
            case.log_plain(model)
            case.plain_s += time.perf_counter() - start
    case.plain_bytes = folder_bytes(scratch / "artifacts")


def log_deduplicated(case: Case, location: str, artifacts: Path) -> None:
    """Log every step into the store shared by all frameworks; its growth is the cost of this one."""
    before = folder_bytes(artifacts)
    mlflow.create_experiment(case.name, artifact_location=location)
    mlflow.set_experiment(case.name)
    known: dict[str, bytes] = {}
    with mlflow.start_run(run_name="quickstart"):
        for step, model in enumerate(case.train(), start=1):
            show_progress(f"{case.name}: mlflow.tensorcas", step)
            start = time.perf_counter()
            info = mlflow.tensorcas.log_model(model, name="model", step=step)
            case.stored_s += time.perf_counter() - start
            case.uris[step] = info.model_uri
            if case.name == "torch":
                case.changed_bytes += sum(len(bits) for name, bits in torch_bits(model) if known.get(name) != bits)
                known = dict(torch_bits(model))
            if step in CHECKED_STEPS:
                case.snapshots[step] = copy.deepcopy((case.bits(model), case.answers(model)))
    case.stored_bytes = folder_bytes(artifacts) - before


def load_back(case: Case) -> None:
    """Load some steps and compare them with the trained models, bit for bit."""
    for step, (bits, answers) in case.snapshots.items():
        model = mlflow.tensorcas.load_model(case.uris[step])
        assert case.bits(model) == bits, f"{case.name} step {step} did not come back bit for bit"
        served = mlflow.pyfunc.load_model(case.uris[step]).predict(PIXELS)
        assert np.array_equal(served, answers), f"{case.name} step {step} answers differently through pyfunc"
    print(f"{case.name}: steps {', '.join(map(str, case.snapshots))} came back bit for bit")


def print_table(artifacts: Path) -> None:
    print(f"\n{N_STEPS} steps each        plain MLflow    tensorcas     saved    s/step plain   s/step tensorcas")
    for case in CASES:
        saved = 100 * (1 - case.stored_bytes / case.plain_bytes)
        print(
            f"{case.name:16} {case.plain_bytes:>12,} B {case.stored_bytes:>10,} B {saved:>8.1f} % "
            f"{case.plain_s / N_STEPS:>12.3f} {case.stored_s / N_STEPS:>15.3f}"
        )
    torch_case = CASES[0]
    print(
        f"torch: {torch_case.changed_bytes:,} B of tensors changed; "
        f"the store grew by {torch_case.stored_bytes / torch_case.changed_bytes:.3f} times as much"
    )
    print(f"Counted: every file under {artifacts}, without MLflow's own text files on either side.")


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, except MLflow's own text files."""
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return sum(file.stat().st_size for file in files if file.name not in MLFLOW_TEXT_FILES)


def show_progress(title: str, step: int) -> None:
    if sys.stdout.isatty():
        print(f"\r{title}, step {step} of {N_STEPS}", end="\n" if step == N_STEPS else "", flush=True)
    elif step % 5 == 0:
        print(f"{title}, step {step} of {N_STEPS}", flush=True)


def ui_command(database: str) -> str:
    return f"{Path(sys.executable).parent / 'mlflow'} server --backend-store-uri {database} --port 5000"


if __name__ == "__main__":
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo").absolute())
