"""Types of the public API as type checkers of users see them, in an environment that has the packages installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

SCRIPT = """\
import mlflow
import mlflow.tensorcas
import tensorcas_mlflow as tensorcas
from mlflow import tensorcas as of_mlflow

reveal_type(mlflow.tensorcas.log_model(object(), name="model", step=3))
reveal_type(mlflow.tensorcas.log_checkpoint({}, step=1))
reveal_type(of_mlflow.open_checkpoint("runs:/1", step=1))
reveal_type(of_mlflow.errors.TensorNotFoundError("w").name)
reveal_type(tensorcas.open_checkpoint("runs:/1").summary())
reveal_type(list(tensorcas.open_checkpoint("runs:/1")))
reveal_type(tensorcas.list_checkpoints(name="ema")[0].step)
reveal_type(tensorcas.delete_checkpoint("run", step=3))
reveal_type(tensorcas.Keep(last=3).last)
reveal_type(tensorcas.TensorCasStore("root", "run").best("loss"))
reveal_type(mlflow.active_run())

tensorcas.log_modle
mlflow.tensorcas.log_modle
mlflow.log_modle
tensorcas.delete_checkpoint("run", 3)
"""

REVEALED = [
    "ModelInfo",
    "CheckpointInfo",
    "CheckpointReader",
    "str",
    "Summary",
    "list[str]",
    "int",
    "bool",
    "int | None",
    "int | None",
    "ActiveRun | None",
]
WRONG_LINES = [18, 19, 20, 21]

SKIPPED = (
    "IPython PIL accelerate aiohttp cryptography databricks docker fastapi flask google graphene huggingface_hub "
    "hypothesis jinja2 langchain lightning lightning_fabric matplotlib openai opentelemetry pandas polars pyarrow "
    "pydantic pytorch_lightning rich scipy sklearn sqlalchemy starlette sympy tokenizers torch torchmetrics "
    "transformers werkzeug xgboost"
)
"""Packages that mlflow imports and of which the script reveals nothing: reading them takes mypy a minute."""
MYPY_INI = f"""\
[mypy]
strict = true
[mypy-{",".join(f"{name}.*" for name in SKIPPED.split())}]
follow_imports = skip
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python with this checkout and its dependencies in its path, as after an installation."""
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv/lib").glob("python*/site-packages")
    found = find_spec("mlflow")
    assert found is not None
    assert found.origin is not None
    (site / "of_test.pth").write_text(f"{CHECKOUT}\n{Path(found.origin).parents[1]}\n")
    return tmp_path / "venv/bin/python"


def run_mypy(python: Path, script: Path, cache: Path) -> tuple[list[str], list[int]]:
    config = script.with_name("mypy.ini")
    config.write_text(MYPY_INI)
    options = ["--python-executable", python, "--config-file", config, "--cache-dir", cache, "--no-error-summary"]
    told = output_of([sys.executable, "-m", "mypy", *options, script])
    types = re.findall(r'note: Revealed type is "(.*)"', told)
    return types, [int(line) for line in re.findall(r":(\d+): error:", told)]


def run_pyright(python: Path, script: Path, cache: Path) -> tuple[list[str], list[int]]:
    told = json.loads(output_of([sys.executable, "-m", "basedpyright", "--pythonpath", python, "--outputjson", script]))
    found = told["generalDiagnostics"]
    types = [re.findall(r'is "(.*)"$', each["message"])[0] for each in found if each["severity"] == "information"]
    rules = ("reportAttributeAccessIssue", "reportCallIssue")
    return types, sorted({each["range"]["start"]["line"] + 1 for each in found if each.get("rule") in rules})


def output_of(command: list[str | Path]) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, timeout=600).stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "check", [run_mypy, pytest.param(run_pyright, marks=pytest.mark.long)], ids=["mypy", "pyright"]
)
def test_checker_of_a_user_sees_the_types_of_the_api(
    check: Callable[[Path, Path, Path], tuple[list[str], list[int]]],
    python: Path,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    types, wrong_lines = check(python, script, pytestconfig.cache.mkdir("mypy_of_users"))

    assert [re.sub(r"\b[\w.]+\.", "", each) for each in types] == REVEALED
    assert wrong_lines == WRONG_LINES
