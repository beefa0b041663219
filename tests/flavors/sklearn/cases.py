"""Estimators of many kinds, each fitted once, and a round trip through the adapter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    BaggingClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from tensorcas_flavors.sklearn import SklearnAdapter
from tensorcas_mlflow.adapter import SKELETON, Array

ADAPTER = SklearnAdapter()


IRIS = load_iris(return_X_y=True)


CANCER = load_breast_cancer(return_X_y=True)


DIGITS = load_digits(return_X_y=True)


DIABETES = load_diabetes(return_X_y=True)


ESTIMATORS: dict[str, tuple[Any, tuple[Array, Array]]] = {
    "gradient boosting": (GradientBoostingClassifier(n_estimators=4, random_state=0), IRIS),
    "stochastic boosting": (GradientBoostingRegressor(n_estimators=9, subsample=0.5, random_state=0), DIABETES),
    "random forest": (RandomForestClassifier(n_estimators=12, random_state=0), CANCER),
    "extra trees, two outputs": (ExtraTreesRegressor(n_estimators=9), (DIABETES[0], DIABETES[0][:, :2])),
    "forest, two outputs": (RandomForestClassifier(n_estimators=3), (IRIS[0], np.stack([IRIS[1], IRIS[1] > 1], 1))),
    "isolation forest": (IsolationForest(n_estimators=10, random_state=0), CANCER),
    "one tree": (DecisionTreeClassifier(random_state=0), CANCER),
    "best-first tree": (DecisionTreeClassifier(max_leaf_nodes=9, random_state=0), CANCER),
    "pruned tree": (DecisionTreeClassifier(ccp_alpha=0.01, random_state=0), CANCER),
    "stump without a split": (DecisionTreeClassifier(min_samples_split=10_000), CANCER),
    "bagged trees": (BaggingClassifier(n_estimators=9, max_features=0.5, random_state=0), CANCER),
    "histogram boosting": (HistGradientBoostingClassifier(max_iter=5, random_state=0), CANCER),
    "histogram boosting, categories": (HistGradientBoostingClassifier(max_iter=5, categorical_features=[0]), IRIS),
    "logistic regression": (LogisticRegression(max_iter=500), IRIS),
    "ridge": (Ridge(), DIABETES),
    "svc": (SVC(probability=False), IRIS),
    "kd-tree neighbours": (KNeighborsClassifier(algorithm="kd_tree"), IRIS),
    "brute neighbours": (KNeighborsClassifier(algorithm="brute"), IRIS),
    "k-means": (KMeans(3, n_init=1, random_state=0), IRIS),
    "pca": (PCA(2), DIGITS),
    "pipeline": (Pipeline([("scale", StandardScaler()), ("clf", LogisticRegression())]), CANCER),
    "grid search": (GridSearchCV(Ridge(), {"alpha": [0.1, 1.0]}, cv=2), DIABETES),
    "mlp": (MLPClassifier((20, 20), max_iter=5, random_state=0), IRIS),
}


@cache
def fit(name: str) -> Any:
    """Return a fitted estimator, the same one each time: copy it before changing it."""
    estimator, (x, y) = ESTIMATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(estimator).fit(x, y)


def read_back(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the rows as a store returns them: C-contiguous, writable and owned."""
    return {name: np.array(array, order="C", copy=True) for name, array in tensors.items()}


def without_pickle(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a store gives back, with nothing left of the pickle but the facts that follow it."""
    rows = read_back(tensors)
    end = rows[SKELETON].tobytes()
    n_bytes = int.from_bytes(end[-15:-7], "little") + 15
    rows[SKELETON][:-n_bytes] = 255
    return rows


def round_trip(model: Any) -> Any:
    return ADAPTER.reconstruct(read_back(ADAPTER.extract(model)))


def answers(model: Any, x: Array) -> list[Array]:
    methods = ("predict", "predict_proba", "decision_function", "transform", "score_samples", "apply")
    found = [getattr(model, method)(x) for method in methods if hasattr(model, method)]
    return [part for answer in found for part in (answer if isinstance(answer, list) else [answer])]
