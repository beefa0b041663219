"""Callbacks in trainings that are spread over ranks: each rank stores its part, and nothing is gathered."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from tensorcas_mlflow.callbacks.transformers import write_trainer_checkpoint
from tensorcas_mlflow.errors import FormatError
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.long

SPREAD = "tests.callbacks.spread"


@pytest.fixture
def run_id() -> str:
    with mlflow.start_run() as run:
        return str(run.info.run_id)


def test_a_lightning_training_of_two_ranks_continues_as_if_never_interrupted(run_id: str, tmp_path: Path) -> None:
    assert run_ranks(2, f"{SPREAD}:fit_lightning", mlflow.get_tracking_uri(), run_id, str(tmp_path)) == [0, 0]


def test_a_transformers_training_of_two_ranks_is_one_checkpoint_that_accelerate_loads(
    run_id: str, tmp_path: Path
) -> None:
    given = mlflow.get_tracking_uri(), run_id, str(tmp_path)
    assert run_ranks(2, f"{SPREAD}:train_transformers", *given) == [0, 0]

    folder = write_trainer_checkpoint(run_id, tmp_path / "resume")
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "optimizer_0",
        "pytorch_model_fsdp_0",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
    ]
    assert run_ranks(2, f"{SPREAD}:resume_accelerate", mlflow.get_tracking_uri(), str(tmp_path), folder) == [0, 0]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_training_of_torchtitan_continues_from_steps_in_the_store_and_from_files(
    mode: str, run_id: str, tmp_path: Path
) -> None:
    given = mlflow.get_tracking_uri(), run_id, str(tmp_path), mode
    assert run_ranks(2, "tests.callbacks.titan:train", *given) == [0, 0]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_cut_file_in_the_folder_of_torchtitan_is_refused(is_remote: bool, tmp_path: Path) -> None:
    from tensorcas_mlflow.callbacks.torchtitan import TensorCasCheckpoints

    (tmp_path / ".metadata").write_text('{"kind": "tensorcas checkpoint", "run_id": "')
    folder = f"file://{tmp_path}" if is_remote else str(tmp_path)
    with pytest.raises(FormatError, match="is cut short"):
        TensorCasCheckpoints().dcp_load({}, folder)


def test_the_folder_of_torchtitan_may_be_of_a_remote_file_system(run_id: str, tmp_path: Path) -> None:
    given = mlflow.get_tracking_uri(), run_id, str(tmp_path)
    assert run_ranks(2, "tests.callbacks.titan:train_in_a_bucket", *given) == [0, 0]
