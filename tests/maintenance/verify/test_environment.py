"""Failures of this machine: they are raised as they are, and no command calls a store damaged for them."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard

from tensorcas_mlflow.base.dtypes import _learn_ml_dtypes
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.errors import BackendError, StarvedError
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_gc, plan_repair, verify
from tensorcas_mlflow.store import Store

LOOKS: dict[str, Callable[[Store], Any]] = {
    "load": lambda store: [store.read_tensors(store.manifest(ref)) for ref in store.checkpoints()],
    "verify": lambda store: verify(store, full=True),
    "gc": lambda store: plan_gc(store, grace_s=0),
    "repair": plan_repair,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with two checkpoints and a segment of its index, without a database."""
    return filled(tmp_path / "root", database=False)


def filled(root: Path, *, database: bool) -> Path:
    store = Store.init(root, chunk_bytes=4096, database=database)
    for step in range(2):
        with store.write_checkpoint({"w": np.arange(5000) % 7 + step, "i": np.arange(3)}) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    return root


def break_ml_dtypes(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next import of ml_dtypes fail."""
    (folder / "ml_dtypes.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    _learn_ml_dtypes.cache_clear()


@pytest.fixture
def root_of_rare(tmp_path: Path) -> Path:
    """A store with a checkpoint of a dtype that only ml_dtypes has."""
    with Store.init(tmp_path / "root").write_checkpoint({"w": np.zeros(9, ml_dtypes.int4)}) as pending:
        pending.commit(RefTarget(run_id="run", step=0))
    return tmp_path / "root"


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    "code",
    ["raise ValueError('numpy.dtype size changed, may indicate binary incompatibility')", "import no_such_package"],
    ids=["a value", "an import"],
)
def test_a_package_that_cannot_be_imported_is_no_damage(
    root_of_rare: Path, look: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_ml_dtypes(code, tmp_path, monkeypatch)

    with pytest.raises(ImportError):
        LOOKS[look](Store.open(root_of_rare))


def test_the_command_reports_a_missing_package_in_one_line(
    root_of_rare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_ml_dtypes("raise ImportError('no such build')", tmp_path, monkeypatch)

    assert main(["verify", "--root", str(root_of_rare)]) == 1
    assert capsys.readouterr().err == "tensorcas: error: ml_dtypes cannot be imported here: no such build\n"


@pytest.mark.long
def test_a_broken_pandas_is_not_met_at_all(root: Path, tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("raise ValueError('numpy.dtype size changed')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = f"from tensorcas_mlflow.cli import main; main(['verify', '--full', '--root', {str(root)!r}])"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)

    assert (done.returncode, done.stderr) == (0, "")
    assert "no problem found" in done.stdout


@pytest.mark.parametrize("look", LOOKS)
def test_too_little_memory_for_the_rows_of_a_manifest_is_no_damage(
    root: Path, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starving(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("no")

    monkeypatch.setattr(np, "unpackbits", starving)

    with pytest.raises(MemoryError):
        LOOKS[look](Store.open(root))


@pytest.mark.parametrize("look", LOOKS)
def test_too_little_memory_for_zstandard_is_no_damage(root: Path, look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def starving(*arguments: Any) -> Any:
        raise zstandard.ZstdError("zstd decompress error: Allocation error : not enough memory")

    monkeypatch.setattr(zstandard, "frame_content_size", starving)

    with pytest.raises(MemoryError):
        LOOKS[look](Store.open(root))


def refusing(*arguments: Any, **options: Any) -> sqlite3.Connection:
    """Fail like SQLite if the system does not open a file."""
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    raise error


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("folder", ["packs", "manifests", "refs", "database"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_too_few_descriptors_are_no_damage(
    tmp_path: Path, look: str, folder: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(filled(tmp_path, database=folder == "database"))
    open_file = os.open
    prefix = os.devnull if folder == "database" else f".tensorcas/{folder}/"  # SQLite does not tell why it cannot open

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        if prefix in os.fspath(path):
            raise OSError(number, os.strerror(number))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)
    if folder == "database":
        monkeypatch.setattr(sqlite3, "connect", refusing)

    with pytest.raises(StarvedError):
        LOOKS[look](store)


@pytest.mark.parametrize("folder", ["packs", "manifests", "refs"])
def test_permission_error_is_reported_as_such_and_not_as_damage(
    root: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(root)
    open_file = os.open

    def refused(path: Any, *arguments: Any, **options: Any) -> int:
        if f".tensorcas/{folder}/" in os.fspath(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refused)

    with pytest.raises(BackendError, match="Permission denied"):
        LOOKS["load"](store)
    with pytest.raises(BackendError, match="Permission denied"):
        LOOKS["gc"](store)
    assert all("Permission denied" in problem.reason for problem in verify(store).problems if problem.key is not None)
    assert not any(finding.is_mended for finding in plan_repair(store).findings)


@pytest.mark.parametrize("look", LOOKS)
def test_database_that_cannot_be_opened_is_no_damage(
    tmp_path: Path, look: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(filled(tmp_path, database=True))
    monkeypatch.setattr(sqlite3, "connect", refusing)

    with pytest.raises(BackendError, match="unable to open database file"):
        LOOKS[look](store)
