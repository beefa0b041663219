"""Composed models on data of many kinds, and estimators of a user's own module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy import sparse
from sklearn import config_context
from sklearn import ensemble as e
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import BisectingKMeans
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 - makes HalvingGridSearchCV importable
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.model_selection import GridSearchCV, HalvingGridSearchCV, RandomizedSearchCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier, MultiOutputRegressor
from sklearn.naive_bayes import MultinomialNB
from sklearn.neighbors import KernelDensity, KNeighborsClassifier, LocalOutlierFactor, NearestNeighbors
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from tests.flavors.sklearn import models

Array = np.ndarray[Any, np.dtype[Any]]
Made = tuple[Any, Any]


class Shrunk(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A user's estimator: arrays, numbers, a table and a nested estimator, one array under two names."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def fit(self, x: Array, y: Array) -> Shrunk:
        self.inner_ = e.RandomForestRegressor(9, random_state=0).fit(x, y)
        self.means_ = self.also_means_ = np.asfortranarray(np.outer(x.mean(axis=0), x.std(axis=0)))
        self.offset_ = float(y.mean())
        self.spread_ = np.float32(y.std())
        self.missing_ = np.array([np.nan, -0.0, np.inf, y.max()])
        self.names_ = np.array(["a", "bç", None], dtype=object)
        self.labels_ = np.array(["x", "long"])
        self.lookup_ = {1: x[0].copy(), "two": [x[1].copy(), {"deep": x[2].astype(np.float16)}]}
        self.table_ = pd.DataFrame({"n": [1, 2], "s": ["a", "b"]})
        return self

    def predict(self, x: Array) -> Array:
        total: Array = self.offset_ + self.factor * self.inner_.predict(x) + self.spread_ * (x @ self.means_)[:, 0]
        return total


def double(x: Array) -> Array:
    """Stand for a user's function."""
    return x * 2


def numbers(seed: int) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    y = np.arange(90) % 3
    return random.normal(size=(90, 5)) + y[:, None], y


def table(seed: int) -> tuple[pd.DataFrame, Array]:
    x, y = numbers(seed)
    frame = pd.DataFrame(x[:, :2], columns=["height", "weight"])
    frame.loc[::7, "height"] = np.nan
    frame["colour"] = np.array(["red", "gré", "blue", "black"])[np.arange(90) % 4]
    frame["size"] = pd.Categorical(np.array(["s", "m", "l"])[(np.arange(90) * 7) % 3])
    return frame, y


def columns() -> ColumnTransformer:
    scaled = make_pipeline(SimpleImputer(), StandardScaler())
    return ColumnTransformer(
        [
            ("numbers", scaled, make_column_selector(dtype_include=float)),
            ("colours", OneHotEncoder(sparse_output=False, handle_unknown="ignore"), ["colour"]),
            ("sizes", OrdinalEncoder(), ["size"]),
        ],
        verbose_feature_names_out=False,
    )


def on(data: Callable[[int], tuple[Any, Any]], model: Callable[[], Any], seed: int, **fit_params: Any) -> Made:
    x, y = data(seed)
    return model().fit(x, y, **fit_params), data(0)[0]


def changed(data: Callable[[int], tuple[Any, Any]], change: Callable[[Any, Any], tuple[Any, Any]], seed: int) -> Any:
    return change(*data(seed))


on_numbers = partial(partial, on, numbers)
on_table = partial(partial, on, table)


def on_changed(change: Callable[[Any, Any], tuple[Any, Any]], model: Callable[[], Any]) -> Callable[[int], Made]:
    return partial(on, partial(changed, numbers, change), model)


def on_float32(model: Callable[[], Any]) -> Callable[[int], Made]:
    return on_changed(lambda x, y: (x.astype(np.float32), y), model)


def on_sparse(model: Callable[[], Any]) -> Callable[[int], Made]:
    # Where values are kept depends on y alone, so that sparse models of other data have the same shape.
    return on_changed(lambda x, y: (sparse.csr_matrix(np.abs(x) * (np.arange(5) % 3 != y[:, None])), y), model)


def on_two_outputs(model: Callable[[], Any]) -> Callable[[int], Made]:
    return on_changed(lambda x, y: (x, np.stack([y, y > 0], axis=1).astype(int)), model)


def routed(seed: int) -> Made:
    x, y = numbers(seed)
    with config_context(enable_metadata_routing=True):
        steps = make_pipeline(
            StandardScaler().set_fit_request(sample_weight=True),
            LogisticRegression().set_fit_request(sample_weight=True),
        )
        return steps.fit(x, y, sample_weight=np.linspace(0.5, 1, len(y))), numbers(0)[0]


def in_pandas(seed: int) -> Made:
    model, x = on(table, lambda: Pipeline([("columns", columns()), ("clf", LogisticRegression())]), seed)
    return model[0].set_output(transform="pandas"), x


def continued(seed: int) -> Made:
    x, y = numbers(seed)
    model = SGDClassifier(random_state=0, average=True)
    for _ in range(3):
        model.partial_fit(x, y, classes=[0, 1, 2])
    return model, numbers(0)[0]


def sparsified(seed: int) -> Made:
    model, x = on(numbers, LogisticRegression, seed)
    return model.sparsify(), x


def texts(seed: int) -> Made:
    words = np.array(["cat", "dog", "mat", "on", "the", "sat", "éléphant"])
    # Every word is in use, whatever the seed.
    documents = [" ".join([*words[:3], *np.random.default_rng(seed + i).choice(words, 6)]) for i in range(40)]
    documents.append(" ".join(words))
    return make_pipeline(TfidfVectorizer(), MultinomialNB()).fit(documents, np.arange(41) % 2), documents


hist = partial(e.HistGradientBoostingClassifier, max_iter=6, min_samples_leaf=4, random_state=0)
forests = [("trees", e.RandomForestClassifier(5, random_state=0)), ("lines", LogisticRegression())]

MODELS: dict[str, Callable[[int], Made]] = {
    "column transformer": on_table(lambda: Pipeline([("columns", columns()), ("clf", LogisticRegression())])),
    "pandas out": in_pandas,
    "feature union": on_numbers(
        lambda: FeatureUnion([("pca", PCA(2)), ("poly", PolynomialFeatures())]).set_output(transform="pandas")
    ),
    "grid search": on_numbers(
        lambda: GridSearchCV(make_pipeline(StandardScaler(), SVC()), {"svc__C": [0.5, 1.0], "svc__kernel": ["rbf"]})
    ),
    "random search": on_numbers(
        lambda: RandomizedSearchCV(Ridge(), {"alpha": [0.1, 1.0, 2.0]}, n_iter=2, random_state=0)
    ),
    "halving search": on_numbers(
        lambda: HalvingGridSearchCV(
            e.RandomForestClassifier(random_state=0), {"max_depth": [2, 3]}, resource="n_estimators", max_resources=9
        )
    ),
    "stacking": on_numbers(lambda: e.StackingClassifier(forests, cv=3, passthrough=True)),
    "voting": on_numbers(lambda: e.VotingClassifier(forests, voting="soft", weights=[1, 2])),
    "calibrated": on_numbers(lambda: CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=3)),
    "calibrated trees": on_numbers(lambda: CalibratedClassifierCV(DecisionTreeClassifier(max_depth=3), cv=3)),
    "multi-output classes": on_two_outputs(lambda: MultiOutputClassifier(LogisticRegression())),
    "multi-output numbers": on_two_outputs(lambda: MultiOutputRegressor(Ridge())),
    "chain": on_changed(
        lambda x, y: (x, np.stack([y > 0, y > 1], axis=1).astype(int)),
        lambda: ClassifierChain(LogisticRegression(), order="random", random_state=0),
    ),
    "one against the rest": on_numbers(lambda: OneVsRestClassifier(SVC(probability=False))),
    "one against the rest, many": on_changed(
        lambda x, y: (x, np.eye(3, dtype=int)[y] | np.eye(3, dtype=int)[0]),
        lambda: OneVsRestClassifier(LogisticRegression()),
    ),
    "target encoder": on_table(lambda: TargetEncoder(random_state=0).set_output(transform="pandas")),
    "a user's estimator": on_numbers(Shrunk),
    "a user's estimator in a search": on_numbers(lambda: GridSearchCV(Shrunk(), {"factor": [0.1, 0.9]}, cv=2)),
    "a user's function": on_numbers(lambda: FunctionTransformer(double, np.negative)),
    "a nameless function": on_numbers(lambda: make_pipeline(FunctionTransformer(lambda x: x + 1), PCA(2))),
    "functions of the target": on_numbers(
        lambda: TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1)
    ),
    "metadata routing": routed,
    "float32 network": on_float32(lambda: MLPClassifier((8,), max_iter=20, random_state=0)),
    "float32 forest": on_float32(lambda: e.RandomForestClassifier(9, oob_score=True, random_state=0)),
    "float32 pca": on_float32(lambda: PCA(3)),
    "float32 lines": on_float32(LogisticRegression),
    "sparse lines": on_sparse(LogisticRegression),
    "sparse support vectors": on_sparse(SVC),
    "sparse neighbours": on_sparse(lambda: KNeighborsClassifier(metric="cosine")),
    "sparse components": on_sparse(lambda: TruncatedSVD(2, random_state=0)),
    "sparse forest": on_sparse(lambda: e.ExtraTreesClassifier(5, random_state=0)),
    "sparse coefficients": sparsified,
    "texts": texts,
    "forest of two outputs": on_two_outputs(lambda: e.RandomForestClassifier(5, random_state=0)),
    "trees of two outputs": on_two_outputs(lambda: e.ExtraTreesRegressor(5, random_state=0)),
    "named classes": on_changed(
        lambda x, y: (x, np.array(["no", "maybe", "yes"])[y]), lambda: e.GradientBoostingClassifier(n_estimators=3)
    ),
    "missing values": on_changed(
        lambda x, y: (np.where(x > 2, np.nan, x), y), lambda: e.RandomForestClassifier(5, random_state=0)
    ),
    "monotonic forest": on_changed(
        lambda x, y: (x, y > 0), lambda: e.RandomForestClassifier(5, monotonic_cst=[1, 0, -1, 0, 0], random_state=0)
    ),
    "categories of pandas": on_table(
        lambda: Pipeline([("drop", FunctionTransformer(lambda t: t.drop(columns="colour"))), ("hist", hist())])
    ),
    "categories by number": on_changed(
        lambda x, y: (np.column_stack([x, np.arange(90) % 5]), y), lambda: hist(categorical_features=[5])
    ),
    "monotonic boosting": on_changed(lambda x, y: (x, y > 0), lambda: hist(monotonic_cst=[1, 0, -1, 0, 0])),
    "stopped boosting": on_numbers(
        lambda: hist(early_stopping=True, n_iter_no_change=2, interaction_cst="no_interactions")
    ),
    "stopped gradient boosting": on_numbers(
        lambda: e.GradientBoostingClassifier(n_estimators=12, n_iter_no_change=9, subsample=0.7, random_state=0)
    ),
    "bagged features": on_numbers(
        lambda: e.BaggingRegressor(DecisionTreeRegressor(), n_estimators=9, max_features=0.5, random_state=0)
    ),
    "partial fits": continued,
    "kernels": on_numbers(
        lambda: GaussianProcessRegressor(ConstantKernel() * RBF([1.0] * 5) + WhiteKernel(), random_state=0)
    ),
    "novelties": on_numbers(lambda: LocalOutlierFactor(novelty=True, metric="manhattan", algorithm="ball_tree")),
    "weighted density": partial(
        on, numbers, lambda: KernelDensity(metric="minkowski", leaf_size=5), sample_weight=np.linspace(1, 2, 90)
    ),
    "many neighbours": on_numbers(lambda: NearestNeighbors(leaf_size=4, p=3, metric="minkowski")),
    "bisected": on_numbers(lambda: BisectingKMeans(4, random_state=0)),
}


def run(action: str, folder: str) -> None:
    """Save or load these models; see `models.run`."""
    models.run(action, folder, MODELS)
