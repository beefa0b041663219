"""Tools for versions of files, used by teams without a store for tensors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from benchmarks.contenders._contender import module_missing


class Tool(ABC):
    """A place for versions of files; any version can be restored.

    Nothing is written outside of that place: a tool's settings and caches are put there too.
    """

    name: str
    """Name in tables."""

    @property
    def missing(self) -> str | None:
        """Return the reason it cannot take part here; None if it can."""
        return None

    @abstractmethod
    def prepare(self, place: Path) -> None:
        """Create the tool's repository."""

    @abstractmethod
    def keep(self, place: Path, file: Path, step: int) -> None:
        """Keep a file as a step."""

    @abstractmethod
    def give_back(self, place: Path, step: int) -> bytes:
        """Restore the file of a step."""

    def kept(self, place: Path) -> Path:
        """Return the folder to measure."""
        return place


class _Command(Tool):
    """A command-line tool."""

    command: str
    comes_from: str
    """Package or project of the command."""

    @property
    def missing(self) -> str | None:
        program = self._program
        if program is None:
            return f"the command `{self.command}` is not installed ({self.comes_from})"
        done = subprocess.run([program, "version"], capture_output=True, timeout=60, check=False)
        return f"`{self.command} version` failed" if done.returncode else None

    @property
    def _program(self) -> str | None:
        """Return its path: beside this interpreter, else on the search path."""
        places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        return shutil.which(self.command, path=os.pathsep.join(places))

    def _run(self, place: Path, *arguments: str | Path) -> bytes:
        home = place / "home"
        env = {
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "XDG_CONFIG_HOME": str(home),
            "RESTIC_PASSWORD": "benchmark",
            "DVC_NO_ANALYTICS": "1",
            "DVC_GLOBAL_CONFIG_DIR": str(home),
            "DVC_SITE_CACHE_DIR": str(home),
            "DVC_SYSTEM_CONFIG_DIR": str(home),
        }
        # The tools' own Python is not this checkout's.
        env.pop("PYTHONPATH", None)
        program = self._program
        assert program is not None
        done = subprocess.run(
            [program, *map(str, arguments)], cwd=place / "work", env=env, capture_output=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{self.command} failed: {done.stderr.decode(errors='replace')}")
        return done.stdout

    def prepare(self, place: Path) -> None:
        for folder in ("home", "work"):
            (place / folder).mkdir(parents=True)

    def kept(self, place: Path) -> Path:
        return place / "kept"


class Dvc(_Command):
    """DVC with its local cache: equal files are kept once."""

    name = "DVC"
    command = "dvc"
    comes_from = "the extra `bench` has it"

    def prepare(self, place: Path) -> None:
        super().prepare(place)
        self._run(place, "init", "--quiet", "--no-scm")
        self._run(place, "cache", "dir", "--quiet", place / "kept")

    def keep(self, place: Path, file: Path, step: int) -> None:
        shutil.copyfile(file, place / "work" / f"model-{step}")
        self._run(place, "add", "--quiet", f"model-{step}")

    def give_back(self, place: Path, step: int) -> bytes:
        path = place / "work" / f"model-{step}"
        path.unlink()
        self._run(place, "checkout", "--quiet", f"{path.name}.dvc")
        return path.read_bytes()


class Restic(_Command):
    """restic: content-defined chunks, deduplicated, compressed by zstd, encrypted."""

    name = "restic"
    command = "restic"
    comes_from = "a package of Debian"

    def prepare(self, place: Path) -> None:
        super().prepare(place)
        self._restic(place, "init")

    def keep(self, place: Path, file: Path, step: int) -> None:
        # By its contents alone: with the same path each time, restic compares the file with the last one.
        with open(file, "rb") as source, open(place / "work" / "model", "wb") as out:
            shutil.copyfileobj(source, out)
        self._restic(place, "backup", "--quiet", "--tag", f"step-{step}", "model")

    def give_back(self, place: Path, step: int) -> bytes:
        return self._restic(place, "dump", "--tag", f"step-{step}", "latest", "model")

    def _restic(self, place: Path, *arguments: str) -> bytes:
        return self._run(place, "--repo", place / "kept", "--no-cache", *arguments)


class MlflowModel(Tool):
    """MLflow's own `log_model` of PyTorch: each model in a folder, uncompressed."""

    name = "MLflow log_model"

    def prepare(self, place: Path) -> None:
        import mlflow

        (place / "artifacts").mkdir(parents=True)
        mlflow.set_tracking_uri(f"sqlite:///{place}/mlflow.db")
        mlflow.create_experiment("benchmark", artifact_location=str(place / "artifacts"))

    def keep(self, place: Path, file: Path, step: int) -> None:
        import mlflow
        import torch
        from safetensors.torch import load_file

        module = torch.nn.Module()
        for name, tensor in load_file(file).items():
            module.register_buffer(name.replace(".", "|"), tensor)
        mlflow.set_experiment("benchmark")
        with mlflow.start_run():
            mlflow.pytorch.log_model(module, name=f"step-{step}", pip_requirements=[], serialization_format="pickle")

    def give_back(self, place: Path, step: int) -> bytes:
        import mlflow
        from safetensors.torch import save

        (model,) = mlflow.search_logged_models(filter_string=f"name = 'step-{step}'", output_format="list")
        loaded = mlflow.pytorch.load_model(model.model_uri)
        return save({name.replace("|", "."): tensor for name, tensor in loaded.state_dict().items()})


class ZipnnScript(Tool):
    """ZipNN of each file."""

    name = "ZipNN"

    @property
    def missing(self) -> str | None:
        return module_missing("zipnn")

    def prepare(self, place: Path) -> None:
        place.mkdir(parents=True)

    def keep(self, place: Path, file: Path, step: int) -> None:
        import zipnn
        from safetensors import safe_open

        with safe_open(file, "np") as opened:
            names = list(opened.keys())
            is_bfloat16 = any(opened.get_slice(name).get_dtype() == "BF16" for name in names)
        dtype = "bfloat16" if is_bfloat16 else "float32"
        coder = zipnn.ZipNN(bytearray_dtype=dtype, input_format="byte")
        (place / str(step)).write_bytes(coder.compress(file.read_bytes()))

    def give_back(self, place: Path, step: int) -> bytes:
        import zipnn

        return bytes(zipnn.ZipNN(input_format="byte").decompress((place / str(step)).read_bytes()))


TOOLS: tuple[Tool, ...] = (MlflowModel(), Dvc(), Restic(), ZipnnScript())
