"""Models of XGBoost of every kind, their data, and all questions that they answer.

A test saves them in one process, and this module, run as a program, restores them in another.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import xgboost
from sklearn.base import clone
from xgboost import Booster, DMatrix

from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

N_ROWS = 240
RNG = np.random.default_rng(7)
X = RNG.normal(size=(N_ROWS, 6))
Y = X @ RNG.normal(size=6) + RNG.normal(size=N_ROWS)
BINARY = (Y > 0).astype(int)
CLASSES = np.digitize(Y, [-1, 0, 1])
TARGETS = np.stack((Y, X[:, 0] - Y, Y**2), axis=1)
QUERIES = np.arange(N_ROWS) // 20
HOLES = np.where(RNG.random(X.shape) < 0.3, np.nan, X)
WORDS = np.array(["red", "grün", "blue", ""])
FRAME = pd.DataFrame(
    {
        "size": X[:, 0],
        "code": pd.Categorical(RNG.integers(3, 40, N_ROWS)),
        "word": pd.Categorical(WORDS[RNG.integers(0, 4, N_ROWS)]),
        "flag": X[:, 1] > 0,
    }
)
COMMON = {"max_depth": 3, "nthread": 1, "seed": 3}


def categorical() -> DMatrix:
    return DMatrix(FRAME, Y, enable_categorical=True)


def named() -> DMatrix:
    names = ["a", "b c", "ü", ">", "d\te", "#"]
    return DMatrix(X, Y, feature_names=names, feature_types=["float", "q", "int", "i", "float", "q"])


def survival() -> DMatrix:
    data = DMatrix(X)
    data.set_float_info("label_lower_bound", np.exp(Y))
    data.set_float_info("label_upper_bound", np.where(BINARY, np.exp(Y), np.inf))
    return data


def matrix(values: Any = X, labels: Any = Y, **more: Any) -> Callable[[], DMatrix]:
    return lambda: DMatrix(values, labels, **more)


regression = matrix()


def train(
    params: dict[str, Any] | None = None, data: Callable[[], DMatrix] = regression, n_rounds: int = 5, **more: Any
) -> Booster:
    if (params or {}).get("booster") == "gblinear":
        params = {"nthread": 1, "seed": 3, **(params or {})}
    return xgboost.train({**COMMON, **(params or {})}, data(), n_rounds, **more)


def squared(predictions: Any, data: DMatrix) -> tuple[Any, Any]:
    residuals = predictions - data.get_label()
    return residuals, np.ones_like(residuals)


def largest_error(predictions: Any, data: DMatrix) -> tuple[str, float]:
    return "largest", float(np.abs(predictions - data.get_label()).max())


def squared_sklearn(labels: Any, predictions: Any) -> tuple[Any, Any]:
    return predictions - labels, np.ones_like(labels)


def mean_error(labels: Any, predictions: Any) -> float:
    return float(np.abs(labels - predictions).mean())


class Counting(xgboost.callback.TrainingCallback):
    """A user's own callback."""

    def __init__(self) -> None:
        super().__init__()
        self.n_rounds = 0

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self.n_rounds += 1
        return False


class Careful(xgboost.XGBClassifier):
    """A user's own wrapper with a parameter of its own."""

    def __init__(self, *, margin: float = 0.1, **more: Any) -> None:
        self.margin = margin
        super().__init__(**more)


def stopped(n_rounds: int = 30, **more: Any) -> Booster:
    history: dict[str, Any] = {}
    evals = [(DMatrix(X, Y), "train"), (DMatrix(X, -Y), "other")]
    return train(n_rounds=n_rounds, evals=evals, evals_result=history, verbose_eval=False, **more)


def attributed() -> Booster:
    booster = train()
    booster.set_attr(author="Ada", note="ünï\n", best_iteration="2")
    booster.note = {"depth": (1, 2.5, None), "a": np.arange(3)}
    return booster


def continued(n_rounds: int = 3) -> Booster:
    return train({"eta": 0.1}, n_rounds=n_rounds, xgb_model=train())


def refreshed() -> Booster:
    update = {"process_type": "update", "updater": "refresh,prune", "gamma": 5}
    return train(update, matrix(X[::2], Y[::2]), xgb_model=train())


Case = tuple[Callable[[], Any], Callable[[], Any]]
multi = {"objective": "multi:softprob", "num_class": 4}

BOOSTERS: dict[str, Case] = {
    "hist": (partial(train, {"tree_method": "hist"}), matrix()),
    "exact": (partial(train, {"tree_method": "exact", "gamma": 5}), matrix()),
    "approx": (partial(train, {"tree_method": "approx"}), matrix()),
    "binary": (partial(train, {"objective": "binary:logistic"}, matrix(X, BINARY)), matrix(X, BINARY)),
    "softprob": (partial(train, multi, matrix(X, CLASSES)), matrix(X, CLASSES)),
    "softmax": (partial(train, {**multi, "objective": "multi:softmax"}, matrix(X, CLASSES)), matrix(X, CLASSES)),
    "rank": (
        partial(train, {"objective": "rank:ndcg"}, matrix(X, BINARY, qid=QUERIES)),
        matrix(X, BINARY, qid=QUERIES),
    ),
    "dart": (partial(train, {"booster": "dart", "rate_drop": 0.5, "one_drop": 1}), matrix()),
    "dart multi-class": (partial(train, {**multi, "booster": "dart"}, matrix(X, CLASSES)), matrix(X, CLASSES)),
    "gblinear": (partial(train, {"booster": "gblinear", "max_depth": None}), matrix()),
    "gblinear multi-class": (
        partial(
            train, {**multi, "booster": "gblinear", "updater": "coord_descent", "max_depth": None}, matrix(X, CLASSES)
        ),
        matrix(X, CLASSES),
    ),
    "one-hot categories": (partial(train, {"max_cat_to_onehot": 99}, categorical), categorical),
    "partitioned categories": (partial(train, {"max_cat_to_onehot": 1}, categorical, 20), categorical),
    "approx categories": (partial(train, {"tree_method": "approx"}, categorical), categorical),
    "codes as categories": (
        partial(train, {}, matrix(QUERIES[:, None], Y, feature_types=["c"], enable_categorical=True)),
        matrix(QUERIES[:, None], Y, feature_types=["c"], enable_categorical=True),
    ),
    "an output per tree": (partial(train, {}, matrix(X, TARGETS)), matrix(X, TARGETS)),
    "vector leaves": (partial(train, {"multi_strategy": "multi_output_tree"}, matrix(X, TARGETS)), matrix(X, TARGETS)),
    "vector leaves of classes": (
        partial(train, {**multi, "multi_strategy": "multi_output_tree"}, matrix(X, CLASSES)),
        matrix(X, CLASSES),
    ),
    "names": (partial(train, {}, named), named),
    "attributes": (attributed, matrix()),
    "early stopping": (partial(stopped, early_stopping_rounds=3), matrix()),
    "save best": (
        lambda: stopped(callbacks=[xgboost.callback.EarlyStopping(3, save_best=True, metric_name="rmse")]),
        matrix(),
    ),
    "own objective": (partial(train, {"disable_default_eval_metric": 1}, obj=squared), matrix()),
    "own metric": (partial(stopped, 6, custom_metric=largest_error), matrix()),
    "several metrics": (partial(stopped, 4, params={"eval_metric": ["mae", "rmse", "mape"]}), matrix()),
    "missing": (partial(train, {}, matrix(HOLES)), matrix(HOLES)),
    "missing is zero": (partial(train, {}, matrix(np.nan_to_num(HOLES), missing=0.0)), matrix(HOLES)),
    "monotone": (partial(train, {"monotone_constraints": "(1,-1,0,1)"}), matrix()),
    "interactions": (partial(train, {"interaction_constraints": "[[0,1],[2,3,4]]"}), matrix()),
    "lossguide": (partial(train, {"grow_policy": "lossguide", "max_leaves": 11, "max_depth": 0}), matrix()),
    "forest": (partial(train, {"num_parallel_tree": 3, "subsample": 0.5, "colsample_bynode": 0.5}), matrix()),
    "base margin": (partial(train, {}, matrix(base_margin=X[:, 0])), matrix(base_margin=X[:, 0])),
    "base score": (partial(train, {"base_score": 0.25}), matrix()),
    "weights": (partial(train, {}, matrix(weight=BINARY + 0.5)), matrix()),
    "quantiles": (partial(train, {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.5, 0.9]}), matrix()),
    "absolute error": (partial(train, {"objective": "reg:absoluteerror"}), matrix()),
    "tweedie": (partial(train, {"objective": "reg:tweedie", "tweedie_variance_power": 1.3}, matrix(X, Y**2)), matrix()),
    "cox": (partial(train, {"objective": "survival:cox"}, matrix(X, np.exp(Y))), matrix()),
    "aft": (partial(train, {"objective": "survival:aft", "aft_loss_distribution": "logistic"}, survival), survival),
    "quantile matrix": (lambda: xgboost.train(COMMON, xgboost.QuantileDMatrix(X, Y), 5), matrix()),
    "slice": (lambda: train(n_rounds=8)[2:5], matrix()),
    "sliced dart": (lambda: train({"booster": "dart", "rate_drop": 0.5}, n_rounds=8)[1:7:2], matrix()),
    "sliced classes": (lambda: train(multi, matrix(X, CLASSES))[1:3], matrix(X, CLASSES)),
    "continued": (continued, matrix()),
    "rounds of unlike size": (lambda: train({"num_parallel_tree": 3}, xgb_model=train()), matrix()),
    "refreshed": (refreshed, matrix()),
    "no rounds": (partial(train, n_rounds=0), matrix()),
    "stumps": (partial(train, {"gamma": 1e9}), matrix()),
    "deep": (partial(train, {"max_depth": 0, "tree_method": "hist", "min_child_weight": 0}, n_rounds=3), matrix()),
    "gpu parameters": (partial(train, {"sampling_method": "uniform", "max_bin": 17}), matrix()),
}


def fitted(cls: type, labels: Any = Y, data: Any = X, *, fit: dict[str, Any] | None = None, **params: Any) -> Any:
    params = {"n_estimators": 5, "max_depth": 3, "n_jobs": 1, **params}
    return cls(**params).fit(data, labels, **(fit or {}))


def again(cls: type, labels: Any, **params: Any) -> Any:
    first = fitted(cls, labels, **params)
    return fitted(cls, labels, fit={"xgb_model": first}, **params)


watched = {"fit": {"eval_set": [(X, BINARY), (X, 1 - BINARY)], "verbose": False}}

WRAPPERS: dict[str, Case] = {
    "binary classifier": (partial(fitted, xgboost.XGBClassifier, BINARY), lambda: X),
    "classifier": (partial(fitted, xgboost.XGBClassifier, CLASSES, subsample=0.5, random_state=4), lambda: X),
    "regressor": (partial(fitted, xgboost.XGBRegressor, base_score=np.float32(0.5)), lambda: X),
    "several outputs": (partial(fitted, xgboost.XGBRegressor, TARGETS), lambda: X),
    "vector leaf wrapper": (
        partial(fitted, xgboost.XGBRegressor, TARGETS, multi_strategy="multi_output_tree"),
        lambda: X,
    ),
    "multi-label": (partial(fitted, xgboost.XGBClassifier, (TARGETS > 0).astype(int)), lambda: X),
    "ranker": (partial(fitted, xgboost.XGBRanker, BINARY, fit={"qid": QUERIES}), lambda: X),
    "forest classifier": (partial(fitted, xgboost.XGBRFClassifier, CLASSES), lambda: X),
    "forest regressor": (partial(fitted, xgboost.XGBRFRegressor), lambda: X),
    "dart wrapper": (partial(fitted, xgboost.XGBRegressor, booster="dart", rate_drop=0.3), lambda: X),
    "linear wrapper": (partial(fitted, xgboost.XGBRegressor, booster="gblinear", max_depth=None), lambda: X),
    "frame": (partial(fitted, xgboost.XGBRegressor, Y, FRAME, enable_categorical=True), lambda: FRAME),
    "missing value": (partial(fitted, xgboost.XGBRegressor, missing=-1.0), lambda: X),
    "weighted": (partial(fitted, xgboost.XGBRegressor, fit={"sample_weight": BINARY + 1.0}), lambda: X),
    "constraints": (
        partial(
            fitted,
            xgboost.XGBRegressor,
            monotone_constraints=(1, -1),
            feature_weights=np.ones(6),
            interaction_constraints="[[0, 1], [2, 3]]",
        ),
        lambda: X,
    ),
    "early stopping wrapper": (
        partial(
            fitted,
            xgboost.XGBClassifier,
            BINARY,
            early_stopping_rounds=2,
            n_estimators=30,
            eval_metric="auc",
            **watched,
        ),
        lambda: X,
    ),
    "keywords": (partial(fitted, xgboost.XGBRegressor, kwargs={"max_cat_threshold": 7}, max_bin=17), lambda: X),
    "wrapper continued": (partial(again, xgboost.XGBClassifier, CLASSES), lambda: X),
    "wrapper with callback": (partial(fitted, xgboost.XGBRegressor, callbacks=[Counting()]), lambda: X),
    "wrapper stopped by callback": (
        partial(
            fitted,
            xgboost.XGBClassifier,
            BINARY,
            callbacks=[xgboost.callback.EarlyStopping(2, save_best=True)],
            n_estimators=20,
            **watched,
        ),
        lambda: X,
    ),
    "wrapper with own objective": (partial(fitted, xgboost.XGBRegressor, objective=squared_sklearn), lambda: X),
    "wrapper with own metric": (
        partial(fitted, xgboost.XGBRegressor, BINARY, eval_metric=mean_error, **watched),
        lambda: X,
    ),
    "own wrapper": (partial(fitted, Careful, BINARY, margin=0.5), lambda: X),
    "unfitted": (partial(xgboost.XGBRegressor, max_depth=7, callbacks=None), lambda: X),
    "own unfitted": (partial(Careful, margin=2.0), lambda: X),
}

MODELS = BOOSTERS | WRAPPERS


@cache
def model(name: str) -> Any:
    """Return the model of a name, the same one every time: tests must not change it."""
    return MODELS[name][0]()


def booster_answers(booster: Booster, data: DMatrix) -> dict[str, Any]:
    """Ask a booster for all it has."""
    answers: dict[str, Any] = {
        "save_raw": bytes(booster.save_raw("ubj")),
        "save_config": booster.save_config(),
        "attributes": booster.attributes(),
        "names": (booster.feature_names, booster.feature_types),
        "shape": (booster.num_features(), booster.num_boosted_rounds()),
        "python": {key: repr(value) for key, value in vars(booster).items() if key != "handle"},
        "dump": booster.get_dump(),
    }
    for key in ("best_iteration", "best_score"):
        answers[key] = repr(getattr(booster, key, None))
    kinds: list[dict[str, Any]] = [{}, {"output_margin": True}, {"pred_contribs": True}]
    if (
        not booster.num_boosted_rounds()
        or json.loads(booster.save_config())["learner"]["gradient_booster"]["name"] == "gblinear"
    ):
        kinds = kinds[:2]
    else:
        kinds += [{"pred_leaf": True}, {"iteration_range": (1, 2)}, {"pred_interactions": True}]
    for kind in kinds:
        try:
            answers[f"predict {kind}"] = booster.predict(data, **kind).tobytes()
        except xgboost.core.XGBoostError as error:  # vector leaves explain nothing
            answers[f"predict {kind}"] = str(error).split("\n", 1)[0][11:]
    return answers


def answers(model: Any, data: Any) -> dict[str, str]:
    """Ask a model for all it has; equal models give equal answers, in any process."""
    if isinstance(model, Booster):
        found = booster_answers(model, data)
    else:
        fitted = {key: value for key, value in vars(model).items() if key != "_Booster"}
        found = {
            "class": type(model).__qualname__,
            "attributes": plain(fitted),
            "params": plain(clone(model).get_params()),
        }
        if model.__sklearn_is_fitted__():
            booster = model.get_booster()
            found |= (
                booster_answers(booster, DMatrix(data, enable_categorical=True))
                if data is FRAME
                else booster_answers(booster, DMatrix(data))
            )
            found["fitted predict"] = model.predict(data).tobytes()
            found["n_features_in_"] = model.n_features_in_
            if hasattr(model, "predict_proba"):
                found["predict_proba"] = model.predict_proba(data).tobytes()
                found["classes_"] = plain(model.classes_)
            if hasattr(model, "evals_result_"):
                found["evals_result"] = plain(model.evals_result())
    return {
        key: hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()
        for key, value in found.items()
    }


def plain(value: Any) -> str:
    """Describe a value the same way in every process: functions by name, not by address."""
    if isinstance(value, dict):
        return repr({key: plain(member) for key, member in value.items()})
    if isinstance(value, list | tuple):
        return type(value).__name__ + repr([plain(item) for item in value])
    if isinstance(value, xgboost.callback.TrainingCallback):
        return type(value).__name__ + plain(vars(value))
    if callable(value):
        return str(getattr(value, "__qualname__", type(value)))
    if isinstance(value, Booster):
        return "a booster"
    return f"{type(value).__name__} {value!r}"


def trained_on(model: Any, data: Any) -> bytes:
    """Train a booster for two more rounds and return what `save_raw` gives."""
    train(n_rounds=1)  # XGBoost's random state belongs to the thread, not to a booster: here it is seeded
    settings = json.loads(model.save_config())["learner"]["learner_train_param"]
    custom = {"obj": squared} if settings["disable_default_eval_metric"] == "1" else {}
    for step in range(2):
        model.update(data, model.num_boosted_rounds() + step, custom.get("obj"))
    return bytes(model.save_raw("ubj"))


def save(store: Store, model: Any, step: int) -> None:
    """Save a model as a step of a run."""
    adapter = XGBoostAdapter()
    tensors = adapter.extract(model)
    with store.write_checkpoint(tensors, flavor=adapter.name, cuts=adapter.cuts(tensors)) as pending:
        pending.commit(RefTarget(run_id="run", step=step), replace=False)


def load(store: Store, step: int, original: Any = None) -> Any:
    """Load a step of that run."""
    ref = store.ref(RefTarget(run_id="run", step=step).key)
    return XGBoostAdapter().reconstruct(store.read_tensors(store.manifest(ref)), original)


def main(root: str) -> None:
    """Restore all models from a store and print what they answer, and what they become with more training."""
    store = Store.open(root)
    found: dict[str, Any] = {}
    for step, name in enumerate(MODELS):
        restored = load(store, step)
        data = MODELS[name][1]()
        found[name] = answers(restored, data)
        if isinstance(restored, Booster):
            found[name]["trained on"] = hashlib.sha256(trained_on(restored, data)).hexdigest()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
