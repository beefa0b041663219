"""`mlflow.tensorcas.log_model` step after step, beside MLflow's own flavors."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.tracking import MlflowClient

from benchmarks.harness import Options, Section, Table, Turn, at_most, counts_of, interleave, show_ms, show_ratio

TITLE = "log_model, step after step, in one run with a database of SQLite"
OURS = at_most(1.1, "x", "log_model of a changed small model, to MLflow's own flavor")
N_ROUNDS = 40

Log = Callable[[Any, int], object]


def run(options: Options) -> Section:
    """Log changed models of three frameworks by ours and by MLflow's flavor, in turns."""
    section = Section("log_model", TITLE)
    section.note("MLflow's flavors get their requirements: inferring them takes a new process, and seconds, each step")
    table = Table(TITLE, ("model, logged by", "ms", "middle half", "to MLflow's own", "Python calls", "fsyncs"))
    before = mlflow.get_tracking_uri()
    with options.folder() as scratch, _quiet():
        mlflow.set_tracking_uri(f"sqlite:///{scratch}/mlflow.db")
        try:
            for kind in _KINDS:
                location = str(scratch / kind)
                experiment = MlflowClient().create_experiment(kind, artifact_location=location)
                with mlflow.start_run(experiment_id=experiment):
                    _measure(kind, options, section, table)
        finally:
            mlflow.set_tracking_uri(before)
    section.tables.append(table)
    return section


def _measure(kind: str, options: Options, section: Section, table: Table) -> None:
    states, theirs = _KINDS[kind]()
    logs: dict[str, Log] = {f"mlflow.{kind}": theirs, "mlflow.tensorcas": _log_ours}
    steps = itertools.count()
    model: list[Any] = [None]

    def train() -> None:
        model[0] = next(states)

    turns = {name: Turn(lambda log=log: log(model[0], next(steps)), before=train) for name, log in logs.items()}
    taken = interleave(turns, options.n_rounds or (1 if options.is_smoke else N_ROUNDS), n_warm=2)
    section.keep(kind, taken)
    peer = taken[f"mlflow.{kind}"]
    for name, seconds in taken.items():
        train()
        counts = counts_of(lambda log=logs[name]: log(model[0], next(steps)))
        ratio = seconds.over(peer)
        work = f"{counts.n_calls:,}", str(counts.n_fsyncs)
        table.add(f"{kind}, {name}", *show_ms(seconds), show_ratio(ratio), *work)
        if name == "mlflow.tensorcas":
            section.verdicts.append(OURS.judge(kind, ratio.median))


def _log_ours(model: Any, step: int) -> object:
    return mlflow.tensorcas.log_model(model, name="ours", step=step)  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep MLflow's advice on every logged model out of the output."""
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _torch_nets() -> tuple[Iterator[Any], Log]:
    import mlflow.pytorch

    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def trained() -> Iterator[Any]:
        while True:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1 + 0.001 * torch.randn(parameter.shape))
            yield net

    def log(model: Any, step: int) -> object:
        own: dict[str, Any] = {"serialization_format": "pickle", "pip_requirements": ["torch"]}
        return mlflow.pytorch.log_model(model, name="theirs", step=step, **own)

    return trained(), log


def _estimators() -> tuple[Iterator[Any], Log]:
    import mlflow.sklearn
    from sklearn.linear_model import LogisticRegression

    data = np.random.default_rng(0).normal(size=(200, 20))

    def trained() -> Iterator[Any]:
        for number in itertools.count():
            yield LogisticRegression(C=1 / (1 + number)).fit(data, data[:, 0] > 0)

    def log(model: Any, step: int) -> object:
        own: dict[str, Any] = {"serialization_format": "cloudpickle", "pip_requirements": ["scikit-learn"]}
        return mlflow.sklearn.log_model(model, name="theirs", step=step, **own)

    return trained(), log


def _boosters() -> tuple[Iterator[Any], Log]:
    import mlflow.xgboost
    import xgboost

    data = np.random.default_rng(0).normal(size=(200, 20))
    matrix = xgboost.DMatrix(data, data[:, 0] > 0)

    def trained() -> Iterator[Any]:
        booster = xgboost.train({"objective": "binary:logistic", "max_depth": 3}, matrix, num_boost_round=5)
        while True:
            booster.update(matrix, booster.num_boosted_rounds())
            yield booster

    def log(model: Any, step: int) -> object:
        return mlflow.xgboost.log_model(model, name="theirs", step=step, pip_requirements=["xgboost"])

    return trained(), log


_KINDS: dict[str, Callable[[], tuple[Iterator[Any], Log]]] = {
    "pytorch": _torch_nets,
    "sklearn": _estimators,
    "xgboost": _boosters,
}
"""Models that change at each step, and MLflow's own way to log them, by the name of the flavor."""
