"""Keep rules for the checkpoints of a run."""

from __future__ import annotations

from typing import Any

import mlflow
import pytest

from tensorcas_mlflow.integration.checkpoints import Keep
from tests.integration.checkpoints.states import load, log, make_state, shown, steps


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (Keep(last=2), {6, 7}),
        (Keep(every=3), {0, 3, 6, 7}),
        (Keep(last=1, every=4), {0, 4, 7}),
        (Keep(best="loss"), {2, 7}),
        (Keep(best="loss", n_best=2), {2, 5, 7}),
        (Keep(best="loss", mode="max"), {1, 7}),
        (Keep(last=2, best="loss"), {2, 6, 7}),
        (Keep(last=100), set(range(8))),
    ],
)
def test_a_rule_keeps_what_one_of_its_parts_wants(keep: Keep, kept: set[int]) -> None:
    loss = {0: 3.0, 1: 9.0, 2: 0.5, 3: float("nan"), 5: 0.5, 6: 4.0}

    assert keep.choose(range(8), loss) == kept


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"last": 0},
        {"every": -1},
        {"last": 1.5},
        {"best": "x", "mode": "low"},
        {"last": 1, "n_best": 5},
        {"last": 1, "mode": "max"},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="keep rule"):
        Keep(**rule)


@pytest.mark.long
@pytest.mark.parametrize("blocking", [True, False])
def test_a_run_keeps_what_the_rule_says(experiment: str, blocking: bool) -> None:
    with mlflow.start_run() as run:
        for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0]):
            mlflow.log_metric("loss", loss, step=step)
            log(make_state(step), step, keep=Keep(last=2, best="loss"), blocking=blocking)

    assert steps() == [1, 3, 4]
    assert [load(step=step)["epoch"] for step in steps()] == [1, 3, 4]
    mlflow.tensorcas.wait()
    assert len(shown(run.info.run_id)) == 3


def test_a_file_of_the_user_takes_no_place_among_those_that_a_rule_keeps(experiment: str) -> None:
    with mlflow.start_run():
        for step in range(2):
            log(make_state(step), step)
        mlflow.log_text("mine", "checkpoints/checkpoint/900.arrow")
        log(make_state(2), 2, keep=Keep(last=2))

    assert steps() == [1, 2]


def test_the_step_just_saved_stays_though_there_are_higher_ones(experiment: str) -> None:
    with mlflow.start_run():
        for step in (10, 20, 5):
            log(make_state(step), step, keep=Keep(last=1))

    assert steps() == [5, 20]


@pytest.mark.long
def test_long_histories_of_a_metric_are_not_read_at_every_step(
    experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    whole_history = mlflow.MlflowClient.get_metric_history

    def count(client: mlflow.MlflowClient, run_id: str, key: str) -> Any:
        asked.append(key)
        return whole_history(client, run_id, key)

    monkeypatch.setattr(mlflow.MlflowClient, "get_metric_history", count)
    monkeypatch.setattr("tensorcas_mlflow.integration.checkpoints._log._VALUES_PER_DROP", 2)
    with mlflow.start_run():
        for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0, 9.0]):
            mlflow.log_metric("loss", loss, step=step)
            log(make_state(step, n_rows=10), step, keep=Keep(best="loss"))

    assert 1 in steps()
    assert steps()[-1] == 11
    assert len(steps()) <= 2 + 12 // 2
    assert len(asked) < 8


def test_a_value_that_is_logged_late_counts(experiment: str) -> None:
    with mlflow.start_run():
        for step, loss in enumerate([5.0, 4.0, None, 3.0, 2.0, 2.5]):
            if loss is not None:
                mlflow.log_metric("loss", loss, step=step)
            log(make_state(step, n_rows=10), step, keep=Keep(last=3, best="loss"))
            if step == 3:
                mlflow.log_metric("loss", 0.1, step=2)

    assert steps() == [2, 3, 4, 5]


def test_a_value_that_is_corrected_counts(experiment: str) -> None:
    with mlflow.start_run():
        for step, loss in enumerate([5.0, 1.0, 6.0, 7.0, 8.0, 9.0]):
            mlflow.log_metric("loss", loss, step=step)
            log(make_state(step, n_rows=10), step, keep=Keep(last=3, best="loss"))
            if step == 3:
                mlflow.log_metric("loss", 9.5, step=1)
                mlflow.log_metric("loss", 0.5, step=2)

    assert steps() == [2, 3, 4, 5]


def test_a_metric_that_the_run_does_not_have_drops_nothing_and_is_told_once(
    experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    with mlflow.start_run():
        for step in range(4):
            mlflow.log_metric("val_loss", 1.0, step=step)
            log(make_state(step, n_rows=10), step, keep=Keep(best="val_los"))

    assert steps() == [0, 1, 2, 3]
    assert len([record for record in caplog.records if "has no metric 'val_los'" in record.getMessage()]) == 1


def test_a_keep_that_is_no_rule_is_refused_before_anything_is_stored(experiment: str) -> None:
    with mlflow.start_run():
        log(make_state(0), 0)
        with pytest.raises(mlflow.MlflowException, match=r"Keep\(last=3\)"):
            log(make_state(1), 1, keep=3)

    assert steps() == [0]


def test_metrics_logged_after_the_checkpoint_count_at_the_next_one(experiment: str) -> None:
    with mlflow.start_run():
        for step, loss in enumerate([5.0, 1.0, 3.0, 2.0]):
            log(make_state(step, n_rows=10), step, keep=Keep(best="loss"))
            mlflow.log_metric("loss", loss, step=step)

    assert steps() == [1, 3]


def test_metrics_that_came_between_two_looks_count(experiment: str) -> None:
    with mlflow.start_run():
        for step in range(4):
            log(make_state(step, n_rows=10), step)
        for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 9.0]):
            mlflow.log_metric("loss", loss, step=step)
        log(make_state(4, n_rows=10), 4, keep=Keep(best="loss"))

    assert steps() == [1, 4]
