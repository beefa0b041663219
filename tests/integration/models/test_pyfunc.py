"""Through ``mlflow.pyfunc`` a model predicts what the native model predicts, to the bit."""

from __future__ import annotations

from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
import xgboost
from mlflow.exceptions import MlflowException
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(int)
FRAME = pd.DataFrame(X, columns=list("abcd"))


def log_and_load(model: Any) -> mlflow.pyfunc.PyFuncModel:
    return mlflow.pyfunc.load_model(mlflow.tensorcas.log_model(model, name="model").model_uri)


def test_a_torch_module_predicts_the_same(experiment: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    loaded = log_and_load(net)

    with torch.no_grad():
        expected = net.eval()(torch.from_numpy(X)).numpy()
        # pandas gives its columns one after the other, and in that order a product has other last digits.
        expected_of_frame = net(torch.from_numpy(FRAME.to_numpy(dtype=np.float32).copy(order="K"))).numpy()
    np.testing.assert_array_equal(loaded.predict(X), expected)
    np.testing.assert_array_equal(loaded.predict(FRAME).to_numpy(), expected_of_frame)


def test_a_scikit_learn_pipeline_predicts_the_same(experiment: str) -> None:
    model = make_pipeline(StandardScaler(), GradientBoostingClassifier(n_estimators=3)).fit(FRAME, Y)
    loaded = log_and_load(model)

    np.testing.assert_array_equal(loaded.predict(FRAME), model.predict(FRAME))
    np.testing.assert_array_equal(loaded.get_raw_model().predict_proba(FRAME), model.predict_proba(FRAME))


def test_an_xgboost_booster_predicts_the_same(experiment: str) -> None:
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(FRAME, Y), num_boost_round=3)
    loaded = log_and_load(booster)

    np.testing.assert_array_equal(loaded.predict(FRAME), booster.predict(xgboost.DMatrix(FRAME)))


def test_an_xgboost_classifier_predicts_the_same(experiment: str) -> None:
    model = xgboost.XGBClassifier(n_estimators=3, n_jobs=1).fit(FRAME, Y)
    loaded = log_and_load(model)

    np.testing.assert_array_equal(loaded.predict(FRAME), model.predict(FRAME))
    assert type(loaded.get_raw_model()) is xgboost.XGBClassifier


def test_inference_parameters_reach_the_model(plain_experiment: str) -> None:
    booster = xgboost.train({"nthread": 1}, xgboost.DMatrix(FRAME, Y), num_boost_round=3)
    signature = mlflow.models.infer_signature(FRAME, booster.predict(xgboost.DMatrix(FRAME)), {"output_margin": False})
    info = mlflow.tensorcas.log_model(booster, name="model", signature=signature)
    loaded = mlflow.pyfunc.load_model(info.model_uri)

    expected = booster.predict(xgboost.DMatrix(FRAME), output_margin=True)
    np.testing.assert_array_equal(loaded.predict(FRAME, params={"output_margin": True}), expected)


def test_a_state_dict_says_that_it_cannot_predict(plain_experiment: str) -> None:
    loaded = log_and_load(torch.nn.Linear(4, 2).state_dict())

    with pytest.raises(MlflowException, match="a state dict cannot predict"):
        loaded.predict(X)


def test_bad_input_is_told_in_the_frameworks_own_words(plain_experiment: str) -> None:
    model = GradientBoostingClassifier(n_estimators=1).fit(X, Y)
    loaded = log_and_load(model)

    with pytest.raises(ValueError, match="features"):
        loaded.predict(X[:, :2])
