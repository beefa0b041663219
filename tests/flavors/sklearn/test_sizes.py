"""A live ensemble gets the trees of a stored one with more or fewer of them, and no pickle is read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import (
    AdaBoostClassifier,
    AdaBoostRegressor,
    BaggingClassifier,
    BaggingRegressor,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    VotingClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tensorcas_flavors._facts import END
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import ADAPTER, CANCER, DIABETES, IRIS, read_back
from tests.flavors.sklearn.models import differences

Make = Callable[[int], Any]
Data = tuple[Array, Array]

WARM: dict[str, tuple[Make, Data]] = {
    "gradient boosting": (
        lambda n: GradientBoostingRegressor(n_estimators=n, warm_start=True, random_state=0),
        DIABETES,
    ),
    "boosted classes": (lambda n: GradientBoostingClassifier(n_estimators=n, warm_start=True, random_state=0), IRIS),
    "stochastic boosting": (
        lambda n: GradientBoostingRegressor(n_estimators=n, subsample=0.5, warm_start=True, random_state=0),
        DIABETES,
    ),
    "random forest": (lambda n: RandomForestClassifier(n, warm_start=True, random_state=0), CANCER),
    "forest of a regression": (lambda n: RandomForestRegressor(n, warm_start=True, random_state=0), DIABETES),
    "forest with scores": (
        lambda n: RandomForestClassifier(n, warm_start=True, oob_score=True, random_state=0),
        CANCER,
    ),
    "extra trees": (lambda n: ExtraTreesClassifier(n, warm_start=True, random_state=0), CANCER),
    "extra trees of a regression": (lambda n: ExtraTreesRegressor(n, warm_start=True, random_state=0), DIABETES),
    "bagging": (lambda n: BaggingClassifier(n_estimators=n, warm_start=True, random_state=0), CANCER),
    "bagging of some features": (
        lambda n: BaggingRegressor(n_estimators=n, max_features=0.5, warm_start=True, random_state=0),
        DIABETES,
    ),
    "bagging of forests": (
        lambda n: BaggingClassifier(
            RandomForestClassifier(n, random_state=0), n_estimators=n // 3, warm_start=True, random_state=0
        ),
        IRIS,
    ),
    "bagging of pipelines": (
        lambda n: BaggingClassifier(
            make_pipeline(StandardScaler(), LogisticRegression()), n_estimators=n, warm_start=True, random_state=0
        ),
        IRIS,
    ),
    "isolation forest": (lambda n: IsolationForest(n_estimators=n, warm_start=True, random_state=0), CANCER),
    "histograms": (lambda n: HistGradientBoostingRegressor(max_iter=n, warm_start=True, random_state=0), DIABETES),
    "histograms of classes": (
        lambda n: HistGradientBoostingClassifier(max_iter=n, warm_start=True, random_state=0),
        IRIS,
    ),
    "histograms with scores": (
        lambda n: HistGradientBoostingRegressor(
            max_iter=n, warm_start=True, early_stopping=True, n_iter_no_change=99, random_state=0
        ),
        DIABETES,
    ),
}

ANEW: dict[str, tuple[Make, Data]] = {
    "boosted stumps": (lambda n: AdaBoostClassifier(n_estimators=n, random_state=0), CANCER),
    "boosted stumps of a regression": (lambda n: AdaBoostRegressor(n_estimators=n, random_state=0), DIABETES),
    "pipeline": (lambda n: make_pipeline(StandardScaler(), RandomForestClassifier(n, random_state=0)), CANCER),
    "vote": (
        lambda n: VotingClassifier(
            [("a", RandomForestClassifier(n, random_state=0)), ("b", RandomForestClassifier(n // 2, random_state=1))],
            voting="soft",
        ),
        CANCER,
    ),
    "several outputs": (
        lambda n: MultiOutputRegressor(GradientBoostingRegressor(n_estimators=n, random_state=0)),
        (DIABETES[0], np.stack([DIABETES[1], -DIABETES[1]], axis=1)),
    ),
    "calibrated": (lambda n: CalibratedClassifierCV(RandomForestClassifier(n, random_state=0), cv=2), CANCER),
}


def filled(stored: Any, original: Any) -> Any:
    return ADAPTER.reconstruct(read_back(ADAPTER.extract(stored)), original)


def answers(model: Any, x: Array) -> list[bytes]:
    names = ("predict", "predict_proba", "decision_function", "score_samples", "staged_predict")
    found = [getattr(model, name)(x) for name in names if hasattr(model, name)]
    return [np.asarray(answer if isinstance(answer, np.ndarray) else list(answer)).tobytes() for answer in found]


@pytest.mark.long
@pytest.mark.parametrize("name", [*WARM, *ANEW])
@pytest.mark.parametrize(("n_stored", "n_live"), [(6, 12), (12, 6), (12, 3), (3, 12)])
def test_a_model_of_another_size_answers_like_the_stored_one(name: str, n_stored: int, n_live: int) -> None:
    make, (x, y) = {**WARM, **ANEW}[name]
    stored, live = make(n_stored).fit(x, y), make(n_live).fit(x, y[::-1])
    original = filled(stored, live)

    assert original is live
    assert answers(original, x) == answers(stored, x)
    assert [array.shape for array in ADAPTER.extract(original).values() if array.dtype != np.uint8] == [
        array.shape for array in ADAPTER.extract(stored).values() if array.dtype != np.uint8
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", WARM)
@pytest.mark.parametrize(("n_stored", "n_live"), [(6, 12), (12, 6)])
def test_a_model_of_another_size_trains_on_once_filled(name: str, n_stored: int, n_live: int) -> None:
    make, data = WARM[name]
    stored = make(n_stored).fit(*data)
    original = filled(stored, make(n_live).fit(*data))
    before = trees(original)
    original.set_params(**{("max_iter" if "histograms" in name else "n_estimators"): 15}).fit(*data)
    after = trees(original)

    assert len(before) == len(trees(stored))
    assert len(after) == 15
    assert after[: len(before)] == before


def trees(model: Any) -> list[bytes]:
    """Return the members of an ensemble, each as bytes that are equal if they answer alike."""
    if hasattr(model, "_predictors"):
        return [b"".join(tree.nodes.tobytes() for tree in stage) for stage in model._predictors]
    stages = model.estimators_ if isinstance(model.estimators_, np.ndarray) else [[tree] for tree in model.estimators_]
    rows = [ADAPTER.extract(make_pipeline(*stage)) for stage in stages]
    return [b"".join(row.tobytes() for name, row in found.items() if name[:2] != "__") for found in rows]


def test_a_warm_started_model_takes_an_early_step_and_grows_again() -> None:
    model = GradientBoostingRegressor(n_estimators=10, warm_start=True, random_state=0).fit(*DIABETES)
    early = read_back(ADAPTER.extract(model))
    ADAPTER.reconstruct(early, model.set_params(n_estimators=20).fit(*DIABETES))

    assert (len(model.estimators_), len(model.train_score_), model.n_estimators_) == (10, 10, 10)
    assert model.n_estimators == 10
    assert len(model.set_params(n_estimators=20).fit(*DIABETES).estimators_) == 20


def test_a_resized_bagging_ensemble_knows_its_number_of_members() -> None:
    stored, original = (BaggingRegressor(n_estimators=n, random_state=0).fit(*DIABETES) for n in (6, 12))

    assert filled(stored, original).n_estimators == 6


@pytest.mark.parametrize("n_live", [6, 12])
def test_the_seeds_of_trees_are_those_of_the_stored_model(n_live: int) -> None:
    stored = RandomForestClassifier(9, random_state=0).fit(*IRIS)
    original = filled(stored, RandomForestClassifier(n_live, random_state=1).fit(*IRIS))

    assert [tree.random_state for tree in original.estimators_] == [tree.random_state for tree in stored.estimators_]


def test_a_model_that_grows_writes_no_more_than_the_stored_one() -> None:
    stored, live = (
        GradientBoostingRegressor(n_estimators=n, subsample=0.5, warm_start=True, random_state=0).fit(*DIABETES)
        for n in (20, 10)
    )
    names = ADAPTER.extract(filled(stored, live)).keys()

    assert names == ADAPTER.extract(stored).keys()


def test_a_resized_ensemble_is_unchanged_if_the_stored_one_does_not_fit() -> None:
    stored = RandomForestClassifier(12, random_state=0).fit(*IRIS)
    original = RandomForestClassifier(6, random_state=0).fit(*CANCER)
    members, before = original.estimators_, copy.deepcopy(original)

    with pytest.raises(AdapterError):
        filled(stored, original)
    assert original.estimators_ is members
    assert differences(before, original) == []


def test_an_ensemble_without_members_cannot_grow() -> None:
    stored = HistGradientBoostingRegressor(max_iter=3).fit(*DIABETES)
    original = copy.deepcopy(stored)
    original._predictors = []

    with pytest.raises(AdapterError, match="has none to make them from"):
        filled(stored, original)


def skeleton_ending(text: str) -> Array:
    """Return a skeleton with a text where its facts should be; see `with_tail`."""
    return np.frombuffer(text.encode() + len(text).to_bytes(8, "little") + END, np.uint8)


@pytest.mark.parametrize("size", [-1, 10**9])
def test_an_impossible_ensemble_size_is_refused(size: int) -> None:
    model = RandomForestClassifier(9, random_state=0).fit(*IRIS)
    tensors = read_back(ADAPTER.extract(model))
    tensors[SKELETON] = skeleton_ending(json.dumps({"=sizes": {"=": size}}))

    with pytest.raises(AdapterError, match="damaged"):
        ADAPTER.reconstruct(tensors, model)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"=sizes": 3}',
        '{"=sizes": {"=": "=9"}}',
        '{"=sizes": {"=": true}}',
        '{"=x": {}}',
        '{"": {}}',
        '{"#99999": {}}',
        '{"=numbers": 5}',
        '{"=items": {"=": 3}}',
        '{"=attributes": {"=": [1, 3]}}',
    ],
)
def test_a_damaged_end_of_a_skeleton_is_refused(text: str) -> None:
    model = RandomForestClassifier(9, random_state=0).fit(*IRIS)
    tensors = read_back(ADAPTER.extract(model))
    tensors[SKELETON] = skeleton_ending(text)

    with pytest.raises(AdapterError, match="the end of the skeleton cannot be read"):
        ADAPTER.reconstruct(tensors, model)


def test_resizing_an_ensemble_reads_no_pickle() -> None:
    stored, original = (RandomForestClassifier(n, random_state=0).fit(*IRIS) for n in (12, 9))
    tensors = read_back(ADAPTER.extract(stored))
    start = tensors[SKELETON].tobytes().rindex(b'{"=sizes"')
    tensors[SKELETON][:start] = 255

    assert answers(ADAPTER.reconstruct(tensors, original), IRIS[0]) == answers(stored, IRIS[0])
