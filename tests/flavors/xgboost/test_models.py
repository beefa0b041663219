"""Models of every kind are stored, and restored by another process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from xgboost import Booster

from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.store import Store
from tests.flavors.xgboost.models import (
    BINARY,
    BOOSTERS,
    FRAME,
    MODELS,
    TARGETS,
    WRAPPERS,
    X,
    Y,
    answers,
    model,
    plain,
    save,
    train,
    trained_on,
)

pytestmark = pytest.mark.long

ADAPTER = XGBoostAdapter()
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Answers of each model after another process restored it from a store."""
    root = tmp_path_factory.mktemp("store")
    store = Store.open(root, create=True)
    for step, name in enumerate(MODELS):
        save(store, model(name), step)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "flavors")))
    done = subprocess.run(
        [sys.executable, "-m", "tests.flavors.xgboost.models", root],
        check=True,
        capture_output=True,
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_all_questions_the_same_in_another_process(name: str, restored: dict[str, Any]) -> None:
    original = model(name)
    expected = answers(original, MODELS[name][1]())
    found = {key: value for key, value in restored[name].items() if key != "trained on"}

    assert {key for key in expected | found if expected.get(key) != found.get(key)} == set()


@pytest.mark.parametrize("name", MODELS)
def test_no_model_is_stored_whole(name: str) -> None:
    assert "booster" not in ADAPTER.extract(model(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_filled_without_unpickling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = model(name)
    tensors = {key: np.array(array) for key, array in ADAPTER.extract(saved).items()}
    if isinstance(saved, Booster):
        original = train({"eta": 0.5}, n_rounds=2)
    else:
        original = type(saved)(n_estimators=2, objective=saved.objective, eval_metric=saved.eval_metric)
        original = original.set_params(callbacks=saved.callbacks)
    monkeypatch.setattr("pickle.Unpickler", None)
    filled = ADAPTER.reconstruct(tensors, original)
    monkeypatch.undo()
    data = MODELS[name][1]()
    expected, found = answers(saved, data), answers(original, data)

    assert filled is original
    assert {key for key in expected | found if expected.get(key) != found.get(key)} == set()


@pytest.mark.parametrize("name", ["binary classifier", "regressor", "frame"])
def test_a_fitted_wrapper_keeps_its_booster_object(name: str) -> None:
    original = MODELS[name][0]()
    booster = original.get_booster()
    saved = MODELS[name][0]().set_params(n_estimators=3)
    saved.fit(*(FRAME, Y) if name == "frame" else (X, BINARY))
    ADAPTER.reconstruct({key: np.array(array) for key, array in ADAPTER.extract(saved).items()}, original)

    assert original.get_booster() is booster
    assert bytes(booster.save_raw("ubj")) == bytes(saved.get_booster().save_raw("ubj"))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_restored_wrapper_can_be_cloned_and_fitted(name: str) -> None:
    saved = model(name)
    again = ADAPTER.reconstruct({key: np.array(array) for key, array in ADAPTER.extract(saved).items()})
    fresh = clone(again)

    assert type(fresh).__qualname__ == type(saved).__qualname__
    assert plain(fresh.get_params()) == plain(clone(saved).get_params())
    assert not fresh.__sklearn_is_fitted__()


@pytest.mark.parametrize("name", BOOSTERS)
def test_training_continues_in_another_process(name: str, restored: dict[str, Any]) -> None:
    copy = BOOSTERS[name][0]()

    assert isinstance(copy, Booster)
    assert hashlib.sha256(trained_on(copy, MODELS[name][1]())).hexdigest() == restored[name]["trained on"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: make_pipeline(StandardScaler(), WRAPPERS["binary classifier"][0]()),
        lambda: GridSearchCV(xgboost.XGBClassifier(n_estimators=3, n_jobs=1), {"max_depth": [1, 2]}, cv=2),
        lambda: MultiOutputRegressor(xgboost.XGBRegressor(n_estimators=3, n_jobs=1)),
    ],
    ids=["pipeline", "grid search", "outputs"],
)
def test_a_wrapper_inside_a_model_of_scikit_learn_comes_back(build: Callable[[], Any]) -> None:
    outer = build()
    outer.fit(X, TARGETS if isinstance(outer, MultiOutputRegressor) else BINARY)
    adapter = SklearnAdapter()
    again = adapter.reconstruct({key: np.array(array) for key, array in adapter.extract(outer).items()})

    assert adapter.accepts(outer)
    assert not ADAPTER.accepts(outer)
    assert again.predict(X).tobytes() == outer.predict(X).tobytes()
    assert [bytes(part.save_raw("ubj")) for part in boosters(again)] == [
        bytes(part.save_raw("ubj")) for part in boosters(outer)
    ]


def boosters(outer: Any) -> list[Booster]:
    """Return the boosters inside a fitted model of scikit-learn."""
    if isinstance(outer, GridSearchCV):
        return [outer.best_estimator_.get_booster()]
    parts = getattr(outer, "estimators_", None) or [outer[-1]]
    return [part.get_booster() for part in parts]
