"""The commands of the pages on the command line and on tasks, each run by a shell as it stands."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from tensorcas_mlflow.cli._main import _commands
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.arrays import ArrayTensors, write
from tests.tracking import empty_database, no_stray_settings

__all__ = ["empty_database", "no_stray_settings"]

SHOWN = ("du", "diff", "lineage", "verify", "copy")
"""Commands whose examples in their help run in the folder of these tests."""
DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    block
    for page in ("command-line.md", "tasks.md")
    for block in re.findall(r"^```sh\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
]
BLOCKS += [
    "".join(f"tensorcas {line}\n" for line in command.examples) for command in _commands(None) if command.name in SHOWN
]
SYNOPSIS = re.compile(r"\b(?:SRC|PATH|ID|OUT|IN|ROOT|SHELL)\b")
RUNS = [begin + "0" * 26 for begin in ("8f3c21", "90ab7e")]


def save(store: Store, run_id: str, step: int) -> None:
    with store.write_checkpoint({"w": np.arange(300.0) + step}, flavor="generic") as pending:
        pending.commit(RefTarget(run_id=run_id, step=step))


def name_runs_and_models(store: Store, database: Path) -> None:
    """Name a run with two steps ``baseline``, of the experiment ``vision``, and two models ``digits`` in MLflow."""
    client = MlflowClient(f"sqlite:///{database}")
    experiment = client.create_experiment("vision", artifact_location=store.uri)
    baseline = client.create_run(experiment, run_name="baseline").info.run_id
    for step in (10, 20):
        save(store, baseline, step)
    client.create_registered_model("digits")
    for nth in (1, 2):
        path = f"models/m-digits{nth}/artifacts"
        with store.write_checkpoint({"w": np.arange(300.0) * nth}, flavor="generic") as pending:
            pending.commit(RefTarget(path=f"{path}/data/checkpoint.arrow", model_id=f"m-digits{nth}"))
        client.create_model_version("digits", f"{store.uri}/{path}")


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path) -> Path:
    """A working directory with a store at ``data/mlflow``, its backup, MLflow's database, and files to convert."""
    store = Store.init(tmp_path / "data/mlflow")
    for run in RUNS:
        for step in (10, 20):
            save(store, run, step)
    with store.write_checkpoint({"w": np.arange(9000.0)}, flavor="generic") as pending:
        pending.commit(RefTarget(path="models/m-2fd1/artifacts/data/checkpoint.arrow", model_id="m-2fd1"))
    weights = io.BytesIO()
    torch.save({"w": torch.arange(9000.0)}, weights)
    with store.write_stream(io.BytesIO(weights.getvalue())) as pending:
        pending.commit(RefTarget(path="models/m-2fd1/artifacts/data/model.pth"))
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    name_runs_and_models(store, tmp_path / "mlflow.db")
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    tensors = ArrayTensors({name: np.ones(300) for name in "ab"})
    write(tensors, tmp_path / "llama", format="safetensors", shard_bytes=2500)
    return tmp_path


def run(commands: str, folder: Path) -> None:
    # Status 5 says that a diff has found a difference.
    commands = re.sub(r"^(tensorcas diff .*)$", r"\1 || [ $? = 5 ]", commands, flags=re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["HOME"] = str(folder)
    environment["TENSORCAS_STORE"] = str(folder / "data/mlflow")
    done = subprocess.run(
        ["bash", "-e", "-c", re.sub(r"(?<= )/(data|backup)/", rf"{folder}/\1/", commands)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("block", [block for block in BLOCKS if not SYNOPSIS.search(block)])
def test_the_commands_on_documentation_pages_run(block: str, folder: Path) -> None:
    lines = block.splitlines()
    run("\n".join(line for line in lines if "--name" not in line), folder)
    named = [line for line in lines if "--name" in line]
    if named:
        store = Store.open(folder / "data/mlflow")
        for name in ("raw", "ema"):
            with store.write_checkpoint({"w": np.arange(300.0)}, flavor="generic") as pending:
                pending.commit(RefTarget(run_id=RUNS[0], step=20, name=name))
        run("\n".join(named), folder)


def test_documentation_pages_have_commands_to_run() -> None:
    assert sum(not SYNOPSIS.search(block) for block in BLOCKS) == 10
