"""Tests of the released files: wheel and sdist hold all packages whole and work away from the checkout."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "tensorcas_mlflow": CHECKOUT / "tensorcas_mlflow",
    "tensorcas_flavors": CHECKOUT / "flavors/tensorcas_flavors",
    "mlflow-stubs": CHECKOUT / "mlflow-stubs",
}

LOG_AND_LOAD = """
import sys
from pathlib import Path

import mlflow
import numpy as np
import tensorcas_mlflow
from sklearn.linear_model import LogisticRegression

site, work = map(Path, sys.argv[1:])
assert Path(tensorcas_mlflow.__file__).is_relative_to(site), tensorcas_mlflow.__file__

X = np.random.default_rng(0).normal(size=(40, 3))
model = LogisticRegression().fit(X, X[:, 0] > 0)

mlflow.set_tracking_uri(f"sqlite:///{work}/mlflow.db")
experiment_id = mlflow.create_experiment("wheel", artifact_location=f"tensorcas://{work}/artifacts")
with mlflow.start_run(experiment_id=experiment_id):
    info = mlflow.tensorcas.log_model(model, name="model", step=3)

expected = model.predict(X)
assert np.array_equal(mlflow.tensorcas.load_model(info.model_uri).predict(X), expected)
assert np.array_equal(mlflow.pyfunc.load_model(info.model_uri).predict(X), expected)

import tensorcas_flavors.sklearn
assert Path(tensorcas_flavors.sklearn.__file__).is_relative_to(site), tensorcas_flavors.sklearn.__file__
print("loaded and equal")
"""


def run_python(*args: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run this interpreter on its own: no checkout in its path, nothing of the tester's MLflow settings."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TENSORCAS_", "PYTHON"))
    }
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_files() -> set[str]:
    """Every file of the packages that goes into a wheel as it is, as the wheel names them."""
    return {
        f"{name}/{file.relative_to(root).as_posix()}"
        for name, root in PACKAGES.items()
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".c", ".h", ".so")
    }


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def read_metadata(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        [member] = [member for member in archive.namelist() if member.endswith(f".dist-info/{name}")]
        return archive.read(member)


def copy_checkout(tree: Path) -> Path:
    """Copy what is built from: setuptools leaves `build/` where it builds, and would pick up an old one."""
    leftovers = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for folder in ("tensorcas_mlflow", "flavors", "mlflow-stubs", "tests"):
        shutil.copytree(CHECKOUT / folder, tree / folder, ignore=leftovers)
    for file in ("pyproject.toml", "setup.py", "setup.cfg", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / file, tree)
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run_python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", out, tree, cwd=out)
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run_python("-m", "build", "--sdist", "--outdir", out, tree, cwd=out)
    [sdist] = out.glob("*.tar.gz")
    return sdist


@pytest.mark.long
def test_wheel_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)

    compiled = {name for name in names if name.endswith(".so")}
    assert {name for name in names if ".dist-info/" not in name} - compiled == package_files()
    assert compiled <= {"tensorcas_mlflow/native/_core.abi3.so"}
    assert {"tensorcas_mlflow/py.typed", "tensorcas_flavors/py.typed"} <= names
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("mlflow-stubs/py.typed") == b"partial\n"


def test_the_wheel_names_its_entry_points_and_ships_the_modules_behind_them(wheel: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(read_metadata(wheel, "entry_points.txt").decode())
    entry_points = {group: dict(parser[group]) for group in parser.sections()}

    assert entry_points == {
        "console_scripts": {"tensorcas": "tensorcas_mlflow.cli:main"},
        "mlflow.app": {
            "tensorcas": "tensorcas_mlflow.integration.server_app:create_app",
            "tensorcas-basic-auth": "tensorcas_mlflow.integration.server_app:create_auth_app",
        },
        "mlflow.artifact_repository": dict.fromkeys(
            ("tensorcas", "tensorcas-s3", "tensorcas-gs", "tensorcas-az"), "tensorcas_mlflow.plugin:artifact_repository"
        ),
        "tensorcas.flavors": {
            "generic": "tensorcas_flavors.generic:GenericAdapter",
            "jax": "tensorcas_flavors.jax:JaxAdapter",
            "pytorch": "tensorcas_flavors.pytorch:PyTorchAdapter",
            "sklearn": "tensorcas_flavors.sklearn:SklearnAdapter",
            "xgboost": "tensorcas_flavors.xgboost:XGBoostAdapter",
        },
    }
    modules = {target.split(":")[0] for group in entry_points.values() for target in group.values()}
    stems = {module.replace(".", "/") for module in modules}
    names = names_in(wheel)
    assert {stem for stem in stems if not {f"{stem}.py", f"{stem}/__init__.py"} & names} == set()


def test_the_core_requires_no_framework(wheel: Path) -> None:
    requirements = BytesParser().parsebytes(read_metadata(wheel, "METADATA")).get_all("Requires-Dist", [])
    core = [requirement for requirement in requirements if "extra ==" not in requirement]

    assert core
    assert not [line for line in core if line.startswith(("torch", "scikit-learn", "xgboost", "jax"))]


@pytest.mark.long
def test_a_model_logged_through_the_wheel_alone_loads_and_predicts_the_same(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run_python("-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()

    # PYTHONPATH stands before site-packages and an editable install's path hook is asked last, so the wheel wins; the
    # script looks. Dependencies are the running environment's.
    output = run_python("-c", LOG_AND_LOAD, site, work, cwd=work, path=site)

    assert "loaded and equal" in output


def test_the_wheel_has_the_compiled_core(wheel: Path) -> None:
    assert "tensorcas_mlflow/native/_core.abi3.so" in names_in(wheel)
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]


NO_HEADERS = """#!/bin/sh
for word; do
    shift
    case "$word" in -I*) ;; *) set -- "$@" "$word" ;; esac
done
exec cc "$@"
"""


def build_with(compiler: Path, out: Path) -> str:
    """Try to build the core; return the errors."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(out), "--build-temp", str(out)]
    env = {**os.environ, "CC": str(compiler)}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.long
def test_a_build_without_a_compiler_names_the_packages_to_install(tmp_path: Path) -> None:
    errors = build_with(Path("/nonexistent/cc"), tmp_path)

    assert "needs a C compiler" in errors
    assert "apt install gcc libzstd-dev" in errors


@pytest.mark.long
def test_a_build_without_the_headers_of_python_names_their_package(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(NO_HEADERS)
    compiler.chmod(0o755)
    errors = build_with(compiler, tmp_path)

    assert "Python's headers" in errors
    assert "python3-dev" in errors


@pytest.mark.long
def test_the_sdist_holds_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert [name for name in archive.getnames() if "tests" in name.split("/")] == []


@pytest.mark.long
def test_a_wheel_built_from_the_sdist_is_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    run_python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    [rebuilt] = tmp_path.glob("*.whl")

    assert names_in(rebuilt) == names_in(wheel)
