"""Files of other formats become steps of a run, and steps become files."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from mlflow.exceptions import MlflowException

from tests.reader.checkpoints import moe, same

STATE = moe()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(STATE, path, metadata={"format": "pt"})
    return path


def test_a_file_becomes_a_step_that_is_listed_opened_and_loaded(experiment: str, file: Path) -> None:
    with mlflow.start_run() as run:
        info = mlflow.tensorcas.import_checkpoint(file, step=3)

    assert [record.step for record in mlflow.tensorcas.list_checkpoints(run.info.run_id)] == [3]
    reader = mlflow.tensorcas.open_checkpoint(info.uri)
    assert reader.tensors_digest() == mlflow.tensorcas.open_checkpoint(file).tensors_digest()
    assert reader.metadata == {"format": "pt"}
    weights = mlflow.tensorcas.load_checkpoint(info.uri, weights_only=True)
    assert same({name: weights[name].numpy() for name in STATE}, STATE)
    assert (info.n_tensors, info.total_bytes) == (len(STATE), sum(array.nbytes for array in STATE.values()))


def test_imported_step_fills_a_model(experiment: str, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with mlflow.start_run():
        info = mlflow.tensorcas.import_checkpoint(tmp_path / "model.safetensors", step=0)

    mlflow.tensorcas.load_checkpoint(info.uri, into=other)

    assert torch.equal(model.weight, other.weight)


def test_a_file_that_was_imported_before_costs_nothing_again(experiment: str, file: Path) -> None:
    with mlflow.start_run():
        mlflow.tensorcas.import_checkpoint(file, step=1)
        again = mlflow.tensorcas.import_checkpoint(file, step=2)
        logged = mlflow.tensorcas.log_checkpoint(STATE, step=3, name="logged")

    assert again.new_bytes == 0
    assert logged.new_bytes is not None
    assert logged.new_bytes < 10_000  # the skeleton


def test_step_becomes_a_file_and_the_file_a_step(experiment: str, file: Path, tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        mlflow.tensorcas.log_checkpoint(STATE, step=1)
    done: list[tuple[int, int]] = []

    written = mlflow.tensorcas.export_checkpoint(
        run.info.run_id, tmp_path / "out.safetensors", step=1, progress=lambda *at: done.append(at)
    )

    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert same({name: found[name] for name in STATE}, STATE)
    assert written.n_tensors == len(STATE)
    assert done[-1][0] == done[-1][1] > 0
    with mlflow.start_run():
        back = mlflow.tensorcas.import_checkpoint(tmp_path / "out.safetensors", step=2)
    compared = mlflow.tensorcas.diff(back.uri, file)
    assert set(compared.equal) == set(STATE)
    assert compared.changed == compared.added == compared.removed == ()


def test_part_of_an_open_checkpoint_becomes_a_file(experiment: str, file: Path, tmp_path: Path) -> None:
    with mlflow.tensorcas.open_checkpoint(file) as reader:
        mlflow.tensorcas.export_checkpoint(reader, tmp_path / "one.npz", match="*.experts.2.*")

        assert reader.tensor("model.embed_tokens.weight").shape == (1000, 64)
    with np.load(tmp_path / "one.npz") as found:
        assert set(found) == {name for name in STATE if ".experts.2." in name}


def test_failed_import_leaves_the_earlier_step_alone(experiment: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(file.read_bytes()[:-1])
    with mlflow.start_run() as run:
        mlflow.tensorcas.import_checkpoint(file, step=1)
        with pytest.raises(MlflowException, match="step 1"):
            mlflow.tensorcas.import_checkpoint(file, step=1)
        for name, reason in (("bad.safetensors", "not a sound safetensors file"), ("nothing", "nothing")):
            with pytest.raises(MlflowException, match=reason):
                mlflow.tensorcas.import_checkpoint(tmp_path / name, step=2)

    assert [record.step for record in mlflow.tensorcas.list_checkpoints(run.info.run_id)] == [1]
