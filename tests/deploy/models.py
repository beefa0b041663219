"""Models of three frameworks that go through a deployment and back, for `Client`."""

from __future__ import annotations

import uuid
from typing import Any

import mlflow
import numpy as np

from tests.deploy.calls import contents, download, new_experiment


def round_trip_pytorch() -> list[str]:
    """Log and load a network in both of MLflow's formats; what came back otherwise than it was."""
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    example = np.ones((2, 8), np.float32)
    wrong = []
    for options in ({"serialization_format": "pickle"}, {"input_example": example}):
        uri = _log(mlflow.pytorch, network, **options)
        loaded = mlflow.pytorch.load_model(uri)
        state = loaded.state_dict()
        for name, tensor in network.state_dict().items():
            if not torch.equal(state[name], tensor):
                wrong.append(f"{name} of {sorted(options)}")
        expected = network(torch.from_numpy(example)).detach().numpy()
        if not np.array_equal(mlflow.pyfunc.load_model(uri).predict(example), expected):
            wrong.append(f"pyfunc of {sorted(options)}")
    return wrong


def round_trip_sklearn() -> list[str]:
    """Log and load an estimator in MLflow's formats; what came back otherwise than it was."""
    from sklearn.ensemble import RandomForestClassifier

    features = np.random.default_rng(0).normal(size=(200, 5))
    model = RandomForestClassifier(10, random_state=0).fit(features, features[:, 0] > 0)
    wrong = []
    for serialization_format in ("cloudpickle", "pickle"):
        uri = _log(mlflow.sklearn, model, serialization_format=serialization_format)
        for loaded in (mlflow.sklearn.load_model(uri), mlflow.pyfunc.load_model(uri)):
            if not np.array_equal(loaded.predict(features), model.predict(features)):
                wrong.append(f"{type(loaded).__name__} of {serialization_format}")
    return wrong


def round_trip_xgboost() -> list[str]:
    """Log and load a booster in each of MLflow's formats; what came back otherwise than it was."""
    import xgboost

    features = np.random.default_rng(0).normal(size=(200, 5))
    matrix = xgboost.DMatrix(features, label=features[:, 0])
    booster = xgboost.train({"nthread": 1, "max_depth": 3}, matrix, 10)
    wrong = []
    for model_format in ("ubj", "json"):
        uri = _log(mlflow.xgboost, booster, model_format=model_format)
        if mlflow.xgboost.load_model(uri).save_raw("ubj") != booster.save_raw("ubj"):
            wrong.append(model_format)
        if contents(download(uri))[f"model.{model_format}"] != bytes(booster.save_raw(model_format)):
            wrong.append(f"file of {model_format}")
    return wrong


def round_trip_tensorcas() -> list[str]:
    """Log and load models with `mlflow.tensorcas`; what came back otherwise than it was."""
    import xgboost
    from sklearn.linear_model import LinearRegression

    features = np.random.default_rng(0).normal(size=(200, 5))
    line = LinearRegression().fit(features, features[:, 0])
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(features, label=features[:, 0]), 3)
    uris = [_log(mlflow.tensorcas, model) for model in (line, booster)]
    wrong = []
    if not np.array_equal(mlflow.pyfunc.load_model(uris[0]).predict(features), line.predict(features)):
        wrong.append("sklearn")
    if mlflow.tensorcas.load_model(uris[1]).save_raw("ubj") != booster.save_raw("ubj"):
        wrong.append("xgboost")
    return wrong


def _log(flavor: Any, model: Any, **options: Any) -> str:
    mlflow.set_experiment(experiment_id=new_experiment())
    with mlflow.start_run():
        # Without requirements of its own, a model is loaded in another process, to see what it imports.
        info = flavor.log_model(model, name=f"model-{uuid.uuid4().hex}", pip_requirements=[], **options)
    return str(info.model_uri)
