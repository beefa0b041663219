"""The Trainer callback, with the real Trainer and a tiny model that nobody downloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import transformers

from tensorcas_mlflow.callbacks.transformers import TensorCasCallback, write_trainer_checkpoint
from tensorcas_mlflow.integration.checkpoints import Keep, load_checkpoint
from tests.callbacks.loops import only_run, same, steps_of
from tests.callbacks.tokens import make_trainer

pytestmark = pytest.mark.long


def train(folder: Path, *callbacks: Any, resume: str | None = None, **options: Any) -> Any:
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged_steps(run_id: str, metric: str) -> list[int]:
    return sorted(point.step for point in mlflow.MlflowClient().get_metric_history(run_id, metric))


@pytest.mark.parametrize("eval_strategy", ["no", "steps", "epoch"])
@pytest.mark.parametrize("step", [3, 4])
def test_a_resumed_training_ends_as_an_uninterrupted_one(tmp_path: Path, step: int, eval_strategy: str) -> None:
    evaluation = {"eval_strategy": eval_strategy, "eval_steps": 1}
    with mlflow.start_run() as run:
        whole = train(tmp_path, TensorCasCallback(every_n_steps=step), **evaluation)
        folder = write_trainer_checkpoint(run.info.run_id, tmp_path / "resume", step=step)
    resumed = train(tmp_path, resume=folder, **evaluation)

    assert same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert same(resumed.lr_scheduler.state_dict(), whole.lr_scheduler.state_dict())
    assert [log["loss"] for log in resumed.state.log_history if "loss" in log] == [
        log["loss"] for log in whole.state.log_history if "loss" in log
    ]


def test_state_that_the_trainer_saves_is_logged(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        train(tmp_path, TensorCasCallback(), save_strategy="steps", save_steps=3)
        folder = write_trainer_checkpoint(run.info.run_id, tmp_path / "resume", step=6)
    theirs = tmp_path / "out" / "checkpoint-6"

    assert steps_of(run.info.run_id) == [3, 6, 8]
    for file in ("optimizer.pt", "scheduler.pt"):
        assert same(torch.load(f"{folder}/{file}"), torch.load(theirs / file))
    assert json.loads(Path(folder, "trainer_state.json").read_text()) == json.loads(
        (theirs / "trainer_state.json").read_text()
    )


def test_every_n_steps_and_the_last_are_logged(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        train(tmp_path, TensorCasCallback(every_n_steps=3))

    assert steps_of(run.info.run_id) == [3, 6, 8]
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").glob("checkpoint-*"))


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        train(tmp_path, TensorCasCallback(every_n_steps=8))
    state = load_checkpoint(run.info.run_id)["model"]

    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


def test_transformers_checkpoint_loads_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mlflow.start_run() as run:
        train(tmp_path, TensorCasCallback(every_n_steps=8))
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")

    assert load_checkpoint(run.info.run_id).keys() == {"model", "optimizer", "scheduler", "rng", "trainer_state"}


def test_transformers_callback_follows_the_run_of_mlflows_callback(tmp_path: Path) -> None:
    train(tmp_path, TensorCasCallback(every_n_steps=4), report_to=["mlflow"])
    run = only_run()

    assert steps_of(run.info.run_id) == [4, 8]
    assert run.info.status == "FINISHED"
    assert "loss" in run.data.metrics


def test_the_given_run_comes_before_the_active_one(tmp_path: Path) -> None:
    with mlflow.start_run() as given:
        pass
    with mlflow.start_run() as active:
        train(tmp_path, TensorCasCallback(every_n_steps=8, run_id=given.info.run_id))

    assert steps_of(given.info.run_id) == [8]
    assert steps_of(active.info.run_id) == []


def test_keep_goes_by_a_metric_that_the_trainer_logs(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        train(
            tmp_path,
            TensorCasCallback(every_n_steps=1, keep=Keep(best="eval_loss", mode="max")),
            eval_strategy="steps",
            eval_steps=1,
            learning_rate=0.1,
        )
    losses = {each.step: each.value for each in mlflow.MlflowClient().get_metric_history(run.info.run_id, "eval_loss")}

    assert len(losses) == 8
    assert steps_of(run.info.run_id) == sorted({max(losses, key=lambda step: losses[step]), 8})


@pytest.mark.parametrize("eval_strategy", ["steps", "epoch"])
def test_the_best_step_may_be_the_last_one(tmp_path: Path, eval_strategy: str) -> None:
    with mlflow.start_run() as run:
        train(
            tmp_path,
            TensorCasCallback(every_n_steps=4, keep=Keep(best="eval_loss")),
            eval_strategy=eval_strategy,
            eval_steps=4,
            learning_rate=0.01,
        )

    assert steps_of(run.info.run_id) == [8]
    assert logged_steps(run.info.run_id, "eval_loss") == [4, 8]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_the_last_step_is_rated_though_the_best_model_is_loaded_after_it(tmp_path: Path, strategy: str) -> None:
    with mlflow.start_run() as run:
        train(
            tmp_path,
            TensorCasCallback(every_n_steps=4, keep=Keep(best="eval_loss")),
            eval_strategy=strategy,
            eval_steps=4,
            save_strategy=strategy,
            save_steps=4,
            load_best_model_at_end=True,
            learning_rate=0.01,
        )

    assert 8 in steps_of(run.info.run_id)
    assert logged_steps(run.info.run_id, "eval_loss") == [4, 8]


def test_saves_in_the_background_are_done_when_training_ends(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        trainer = train(tmp_path, TensorCasCallback(every_n_steps=1, blocking=False))

    assert steps_of(run.info.run_id) == list(range(1, 9))
    assert same(dict(load_checkpoint(run.info.run_id)["model"]), dict(trainer.model.state_dict()))


def test_the_best_model_does_not_pass_for_the_last_step(tmp_path: Path) -> None:
    class Diverging(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step > 2:
                torch.nn.init.constant_(model.transformer.wpe.weight, 1e3 * state.global_step)

    with mlflow.start_run() as run:
        train(
            tmp_path,
            Diverging(),
            TensorCasCallback(every_n_steps=5),
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
        )
    weight = load_checkpoint(run.info.run_id, step=8)["model"]["transformer.wpe.weight"]

    assert steps_of(run.info.run_id) == [5, 8]
    assert torch.equal(weight, torch.full_like(weight, 8e3))


def test_the_step_that_early_stopping_ends_at_is_logged(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        train(
            tmp_path,
            TensorCasCallback(every_n_steps=1),
            transformers.EarlyStoppingCallback(early_stopping_patience=1),
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            learning_rate=0.0,
        )

    assert steps_of(run.info.run_id) == [1, 2]


def test_a_step_that_is_there_already_stops_the_training(tmp_path: Path) -> None:
    with mlflow.start_run():
        train(tmp_path, TensorCasCallback(every_n_steps=8))

        with pytest.raises(Exception, match="checkpoint"):
            train(tmp_path, TensorCasCallback(every_n_steps=8))


def test_a_failed_training_keeps_what_was_logged(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:
                raise KeyboardInterrupt

    with mlflow.start_run() as run, pytest.raises(KeyboardInterrupt):
        train(tmp_path, TensorCasCallback(every_n_steps=2, blocking=False), Failing())

    assert steps_of(run.info.run_id) == [2, 4]


def test_a_training_whose_parts_nobody_can_log_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.args.fsdp = True

    with pytest.raises(ValueError, match="in a form that no callback logs"):
        TensorCasCallback().on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("interval", ["every_n_steps", "every_n_epochs"])
def test_an_interval_below_one_is_refused(interval: str) -> None:
    with pytest.raises(ValueError, match=f"{interval} must be at least 1"):
        TensorCasCallback(**{interval: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("intervals", "steps"),
    [
        ({"every_n_epochs": 1}, [4, 8, 12]),
        ({"every_n_epochs": 2}, [8, 12]),
        ({"every_n_epochs": 2, "every_n_steps": 5}, [5, 8, 10, 12]),
    ],
)
def test_the_last_step_of_every_n_epochs_is_logged(tmp_path: Path, intervals: dict[str, int], steps: list[int]) -> None:
    with mlflow.start_run() as run:
        train(tmp_path, TensorCasCallback(**intervals), num_train_epochs=3)  # type: ignore[arg-type]

    assert steps_of(run.info.run_id) == steps


def test_epoch_that_the_training_does_not_complete_is_no_epoch(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        train(tmp_path, TensorCasCallback(every_n_epochs=1), max_steps=6)

    assert steps_of(run.info.run_id) == [4, 6]


def test_training_resumed_after_an_epoch_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "epoch"}
    with mlflow.start_run() as run:
        whole = train(tmp_path, TensorCasCallback(every_n_epochs=1), **evaluation)
        folder = write_trainer_checkpoint(run.info.run_id, tmp_path / "resume", step=4)
    resumed = train(tmp_path, resume=folder, **evaluation)

    assert same(dict(resumed.model.state_dict()), dict(whole.model.state_dict()))
    assert same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())


def test_callback_that_logs_the_last_step_alone_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mlflow.start_run(), caplog.at_level("WARNING", logger="mlflow.tensorcas"):
        train(tmp_path, TensorCasCallback())
        assert "save_strategy='no'" in caplog.text
        assert "every_n_steps" in caplog.text

        caplog.clear()
        train(tmp_path, TensorCasCallback(name="other"), save_strategy="epoch")
        assert "save_strategy" not in caplog.text


@pytest.mark.parametrize("report_to", [[], ["mlflow"]])
@pytest.mark.parametrize("options", [{}, {"every_n_steps": 4}])
def test_each_training_of_one_trainer_has_one_run_that_ends_with_it(
    tmp_path: Path, report_to: list[str], options: dict[str, int]
) -> None:
    callback = TensorCasCallback(**options)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, callback, report_to=report_to)
    trainer.train()
    first = callback.recorder.run_id
    trainer.train()
    runs = mlflow.search_runs(output_format="list")

    assert mlflow.active_run() is None
    assert {run.info.run_id for run in runs} == {first, callback.recorder.run_id}
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    assert all(steps_of(run.info.run_id)[-1] == 8 for run in runs)
