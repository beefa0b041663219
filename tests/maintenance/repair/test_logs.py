"""Stores in use after the repair of a damaged log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorcas_mlflow.backends import LoggedBackend
from tensorcas_mlflow.backends._log_reader import LogReader
from tensorcas_mlflow.backends._log_writer import close_writer
from tensorcas_mlflow.cli import main
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.maintenance import plan_repair, verify
from tensorcas_mlflow.store import Store

N_STEPS = 6


def arrays(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(step, step + 640, dtype=np.float32), "b": np.full(8, step, np.float32)}


def steps_of(root: Path) -> list[int | None]:
    """Load every step of a store, and return the steps."""
    store = Store.open(root)
    refs = store.checkpoints()
    for ref in refs:
        assert ref.step is not None
        loaded = store.read_tensors(store.manifest(ref))
        assert {name: array.tobytes() for name, array in loaded.items()} == {
            name: array.tobytes() for name, array in arrays(ref.step).items()
        }
    return sorted(ref.step for ref in refs if ref.step is not None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with logs and some steps, one of them dropped."""
    store = Store.init(tmp_path / "root", chunk_bytes=4096, logs=True)
    for step in range(N_STEPS):
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(RefTarget(run_id="run", step=step))
    store.drop(store.checkpoints()[1])
    assert isinstance(store.backend, LoggedBackend)
    close_writer(store.backend._view)
    return tmp_path / "root"


@pytest.fixture
def log(root: Path) -> Path:
    (path,) = (root / ".tensorcas/logs").glob("*.log")
    return path


def flip_in_record(log: Path, number: int) -> None:
    """Flip a bit in the meta of one record."""
    with log.open("r+b") as file:
        records, _, _ = LogReader(log.stem, file.fileno(), log.name).records(0, log.stat().st_size)
        at = records[number].offset + 70
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_saves_go_on_after_the_repair_of_a_log(root: Path, log: Path) -> None:
    running = Store.open(root)
    assert len(running.checkpoints()) == 5
    flip_in_record(log, 3)
    plan_repair(Store.open(root)).execute()
    for store, step in ((running, 7), (Store.open(root), 8)):
        with store.write_checkpoint(arrays(step)) as pending:
            pending.commit(RefTarget(run_id="run", step=step))

    assert steps_of(root) == [0, 2, 4, 5, 7, 8]


def test_repair_of_a_damaged_header_loses_nothing(root: Path, log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[20] ^= 1
    log.write_bytes(data)
    assert len(verify(Store.open(root)).problems) == 1
    plan_repair(Store.open(root)).execute()

    assert steps_of(root) == [0, 2, 3, 4, 5]


def test_the_command_repairs_a_damaged_log(root: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_in_record(log, 3)

    assert main(["verify", "--root", str(root)]) == 3
    assert main(["repair", "--root", str(root), "--dry-run"]) == 3
    assert main(["repair", "--root", str(root), "--yes"]) == 3
    assert f"rewrote logs/{log.name}" in capsys.readouterr().out
    assert main(["repair", "--root", str(root), "--yes"]) == 0
    assert main(["verify", "--root", str(root)]) == 0
