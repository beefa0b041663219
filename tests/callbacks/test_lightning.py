"""The Lightning callback, with the Trainers of both packages."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import mlflow
import pytest
import torch

from tensorcas_mlflow.callbacks.lightning import TensorCasCheckpoint, write_trainer_checkpoint
from tensorcas_mlflow.integration.checkpoints import Keep, load_checkpoint
from tests.callbacks.loops import make_module, make_trainer, same, steps_of

pytestmark = pytest.mark.long

N_BATCHES = 4

PACKAGES = [
    ("lightning.pytorch", "tensorcas_mlflow.callbacks.lightning"),
    ("pytorch_lightning", "tensorcas_mlflow.callbacks.pytorch_lightning"),
]


@pytest.fixture(params=PACKAGES, ids=lambda package: package[0])
def package(request: pytest.FixtureRequest) -> tuple[ModuleType, ModuleType]:
    framework, ours = request.param
    return importlib.import_module(framework), importlib.import_module(ours)


def fit(folder: Path, callback: Any, *, max_epochs: int = 3, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = make_trainer(lightning.pytorch, folder, max_epochs=max_epochs, callbacks=[callback], **options)
    trainer.fit(make_module(lightning.pytorch), ckpt_path=ckpt_path)
    return trainer


def test_every_epoch_is_logged_to_the_active_run(package: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    framework, ours = package
    trainer = make_trainer(framework, tmp_path, max_epochs=3, callbacks=[ours.TensorCasCheckpoint()])
    with mlflow.start_run() as run:
        trainer.fit(make_module(framework))

    assert steps_of(run.info.run_id) == [N_BATCHES, 2 * N_BATCHES, 3 * N_BATCHES]


def test_a_resumed_training_ends_as_an_uninterrupted_one(
    package: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    framework, ours = package
    whole = make_trainer(framework, tmp_path, max_epochs=4, enable_checkpointing=False)
    whole.fit(make_module(framework))
    with mlflow.start_run() as run:
        first = make_trainer(framework, tmp_path, max_epochs=2, callbacks=[ours.TensorCasCheckpoint()])
        first.fit(make_module(framework))
        file = ours.write_trainer_checkpoint(run.info.run_id, tmp_path / "resume.ckpt")
        second = make_trainer(framework, tmp_path, max_epochs=4, callbacks=[ours.TensorCasCheckpoint()])
        second.fit(make_module(framework), ckpt_path=file)

    assert same(whole.lightning_module.state_dict(), second.lightning_module.state_dict())
    assert same(whole.optimizers[0].state_dict(), second.optimizers[0].state_dict())
    assert steps_of(run.info.run_id) == [4, 8, 12, 16]


def test_a_checkpoint_is_what_a_model_checkpoint_writes(tmp_path: Path) -> None:
    writer = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, filename="theirs", save_top_k=-1)
    with mlflow.start_run() as run:
        make_trainer(lightning.pytorch, tmp_path, max_epochs=1, callbacks=[TensorCasCheckpoint(), writer]).fit(
            make_module(lightning.pytorch)
        )
    theirs = torch.load(tmp_path / "theirs.ckpt", weights_only=False)
    ours = load_checkpoint(run.info.run_id)

    assert ours.keys() == theirs.keys()
    for part in theirs.keys() - {"callbacks"}:
        assert same(ours[part], theirs[part])


def test_no_checkpoint_file_is_written(tmp_path: Path) -> None:
    fit(tmp_path, TensorCasCheckpoint())

    assert not list(tmp_path.rglob("*.ckpt"))


def test_every_n_train_steps_counts_global_steps(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(every_n_train_steps=5))

    assert steps_of(run.info.run_id) == [5, 10, 12]


def test_a_step_of_several_batches_is_logged_once(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(every_n_train_steps=1), accumulate_grad_batches=2, max_epochs=2)

    assert steps_of(run.info.run_id) == [1, 2, 3, 4]


def test_save_weights_only_leaves_the_optimizer_out(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(save_weights_only=True), max_epochs=1)

    assert "optimizer_states" not in load_checkpoint(run.info.run_id)


def test_keep_deletes_while_training_goes_on(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(every_n_train_steps=1, keep=Keep(last=2)))

    assert steps_of(run.info.run_id) == [11, 12]


def test_keep_goes_by_a_metric_that_the_module_logs(tmp_path: Path) -> None:
    class Scoring(lightning.pytorch.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            pl_module.log("score", float(trainer.current_epoch == 1))

    with mlflow.start_run() as run:
        make_trainer(
            lightning.pytorch,
            tmp_path,
            max_epochs=4,
            callbacks=[Scoring(), TensorCasCheckpoint(keep=Keep(best="score", mode="max"))],
        ).fit(make_module(lightning.pytorch))

    assert steps_of(run.info.run_id) == [8, 16]


def test_saves_in_the_background_are_done_when_fit_returns(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        trainer = fit(tmp_path, TensorCasCheckpoint(every_n_train_steps=3, blocking=False))
        last = load_checkpoint(run.info.run_id)

    assert steps_of(run.info.run_id) == [3, 6, 9, 12]
    assert same(last["state_dict"], trainer.lightning_module.state_dict())


def test_the_run_of_an_mlflow_logger_comes_before_the_active_one(tmp_path: Path) -> None:
    logger = lightning.pytorch.loggers.MLFlowLogger("theirs", tracking_uri=mlflow.get_tracking_uri())
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(), logger=logger, max_epochs=1)

    assert steps_of(logger.run_id) == [4]
    assert steps_of(run.info.run_id) == []


def test_a_logger_with_another_tracking_server_is_refused(tmp_path: Path) -> None:
    logger = lightning.pytorch.loggers.MLFlowLogger("theirs", tracking_uri=f"sqlite:///{tmp_path}/other.db")
    uri = mlflow.get_tracking_uri()
    _ = logger.experiment
    mlflow.set_tracking_uri(uri)

    with pytest.raises(ValueError, match=r"call mlflow\.set_tracking_uri"):
        fit(tmp_path, TensorCasCheckpoint(), logger=logger)


def test_a_step_that_is_there_already_stops_the_training(tmp_path: Path) -> None:
    with mlflow.start_run():
        fit(tmp_path, TensorCasCheckpoint(), max_epochs=1)

        with pytest.raises(Exception, match="checkpoint"):
            fit(tmp_path, TensorCasCheckpoint(), max_epochs=1)


def test_overwrite_lets_lightning_log_a_step_again(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(), max_epochs=1)
        fit(tmp_path, TensorCasCheckpoint(overwrite=True), max_epochs=1)

    assert steps_of(run.info.run_id) == [4]


def test_fit_may_be_called_again_and_goes_on(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        trainer = fit(tmp_path, TensorCasCheckpoint(), max_epochs=1)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module)

    assert steps_of(run.info.run_id) == [4, 8]


def test_a_failed_training_keeps_what_was_logged(tmp_path: Path) -> None:
    class Failing(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                raise RuntimeError("out of memory")

    with mlflow.start_run() as run, pytest.raises(RuntimeError, match="out of memory"):
        make_trainer(
            lightning.pytorch, tmp_path, max_epochs=3, callbacks=[Failing(), TensorCasCheckpoint(blocking=False)]
        ).fit(make_module(lightning.pytorch))

    assert load_checkpoint(run.info.run_id)["global_step"] == 4


def test_a_fast_dev_run_logs_nothing(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(), fast_dev_run=True)

    assert steps_of(run.info.run_id) == []


def test_the_exported_file_makes_a_module(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        trainer = fit(tmp_path, TensorCasCheckpoint(), max_epochs=1)
    file = write_trainer_checkpoint(run.info.run_id, tmp_path / "last.ckpt")
    loaded = type(trainer.lightning_module).load_from_checkpoint(file)

    assert same(loaded.state_dict(), trainer.lightning_module.state_dict())


def test_lightning_checkpoint_loads_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlflow.start_run() as run:
        fit(tmp_path, TensorCasCheckpoint(), max_epochs=1)
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")

    assert load_checkpoint(run.info.run_id)["global_step"] == 4


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every_n_epochs must be at least 1"):
        TensorCasCheckpoint(every_n_epochs=0)
