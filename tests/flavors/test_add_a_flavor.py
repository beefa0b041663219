"""The page on adding a flavor is short, and the package on it works as it stands there."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.zygote import run_program

PAGE = Path(__file__).resolve().parents[2] / "docs/add-a-flavor.md"

CHECK_MORE = """
import json
import sys

import mlflow
import numpy as np
import tinymeans
from tensorcas_mlflow.adapter import adapter_for, adapter_named
from tensorcas_mlflow.errors import AdapterError

model = tinymeans.KMeans(np.eye(4), n_rounds=3)
info = mlflow.tensorcas.log_model(model, name="more")
live = tinymeans.KMeans(np.zeros((4, 4)))
filled = mlflow.tensorcas.load_model(info.model_uri, into=live)
try:
    mlflow.tensorcas.load_model(info.model_uri, into=tinymeans.KMeans(np.zeros((2, 4))))
    refusal = ""
except mlflow.MlflowException as error:
    refusal = str(error)
print(json.dumps({
    "adapter": adapter_for(model).name,
    "named": type(adapter_named("tinymeans")).__module__,
    "others": adapter_for({"w": np.zeros(3)}).name,
    "filled in place": filled is live and bool((live.centres == np.eye(4)).all()) and live.n_rounds == 3,
    "weights": list(mlflow.tensorcas.load_model(info.model_uri, weights_only=True)),
    "pyfunc": mlflow.pyfunc.load_model(info.model_uri).predict(np.eye(4)).tolist(),
    "refusal": refusal,
    "folder": mlflow.artifacts.download_artifacts(info.model_uri, dst_path=sys.argv[1]),
}))
"""


def blocks() -> dict[str, str]:
    """The files on the page: a fenced block each, named in its first line."""
    found = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return dict(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's package installed: its modules, and the metadata that an installer makes."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads(blocks()["pyproject.toml"])["project"]
    for name, text in blocks().items():
        (site / name).write_text(text)
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(header + "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"]))
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items()) for group, points in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site


@pytest.fixture(scope="module")
def printed(site: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the output of the page's program and of the program above it, run in one process to start MLflow once."""
    work = tmp_path_factory.mktemp("work")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_"))}
    env |= {
        "MLFLOW_TRACKING_URI": f"sqlite:///{work}/mlflow.db",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    }
    begin = f"import runpy, sys\nsys.path.insert(1, {str(site)!r})\nrunpy.run_path({str(site / 'check.py')!r})\n"
    done = run_program(begin + CHECK_MORE, work / "downloaded", cwd=work, env=env, timeout=300, check=True)
    return done.stdout.splitlines()


def test_the_page_is_shorter_than_60_lines() -> None:
    assert len(PAGE.read_text().splitlines()) < 60


def test_the_page_shows_a_package_and_a_program_that_checks_it() -> None:
    assert list(blocks()) == ["pyproject.toml", "tinymeans.py", "check.py"]


@pytest.mark.long
def test_the_pages_program_prints_what_the_page_says(printed: list[str]) -> None:
    assert printed[0] == blocks()["check.py"].rpartition("  # ")[2].strip()


def test_the_packages_models_are_logged_and_loaded_by_its_adapter(printed: list[str]) -> None:
    told = json.loads(printed[1])

    [mlmodel] = Path(told.pop("folder")).rglob("MLmodel")
    assert yaml.safe_load(mlmodel.read_text())["flavors"]["tensorcas"]["adapter"] == "tinymeans"
    assert "tinymeans==1.0" in (mlmodel.parent / "requirements.txt").read_text()
    assert told.pop("refusal").endswith("the model to fill has other centres")
    assert told == {
        "adapter": "tinymeans",
        "named": "tinymeans",
        "others": "generic",
        "filled in place": True,
        "weights": ["centres"],
        "pyfunc": [0, 1, 2, 3],
    }
