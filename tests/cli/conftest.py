"""A way to give commands, and a store to give them about."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_mlflow.cli import main
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.backends.objects.conftest import fresh_name, s3
from tests.backends.objects.servers import S3Server

__all__ = ["s3"]


@pytest.fixture(autouse=True)
def no_tracking_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no database: MLflow leaves the one of another test in the environment."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Answers(io.StringIO):
    """Answers typed at a terminal."""

    def isatty(self) -> bool:
        return True


Tensorcas = Callable[..., Done]


@pytest.fixture
def tensorcas(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Tensorcas:
    """Give a command; ``typed`` is what is typed at a terminal, ``piped`` what a program gives it."""
    monkeypatch.delenv("TENSORCAS_STORE", raising=False)

    def give(*words: str | Path, typed: str | None = None, piped: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(piped) if typed is None else Answers(typed))
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = int(end.code or 0)
        told = capsys.readouterr()
        return Done(status=status, out=told.out, err=told.err)

    return give


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.long)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Root for a store: a folder, or a place in a bucket."""
    if request.param == "local":
        return str(tmp_path / "store")
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache"))
    return f"tensorcas-s3://{server.make_bucket(fresh_name())}/store"


@pytest.fixture
def store(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A run of three steps that share a tensor, a second run of one, a model and a file."""
    store = Store.init(place)
    fixed = np.random.default_rng(0).normal(size=1000)
    for step in range(1, 4):
        save(store, {"fixed": fixed, "w": np.full((10, 3), step, "f4")}, run_id="train", step=step)
    save(store, {"w": np.ones(3)}, run_id="other", step=1, name="ema", parent_step=0, metrics={"loss": float("nan")})
    save(store, {"w": np.ones(3)}, run_id="train", step=3, model_id="m-1", copy_path="models/m-1/checkpoint.arrow")
    (tmp_path / "file").write_bytes(b"text" * 1000)
    with store.write_file(tmp_path / "file") as pending:
        pending.commit(RefTarget(path="notes/a.txt"))
    # The commands run on another machine than the saves.
    monkeypatch.setenv("TENSORCAS_CACHE", str(tmp_path / "cache of the commands"))
    return store


def save(store: Store, tensors: dict[str, Any], **target: Any) -> None:
    with store.write_checkpoint(tensors, flavor="test") as pending:
        pending.commit(RefTarget(**target))
