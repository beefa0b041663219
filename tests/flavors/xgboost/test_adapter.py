from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_digits
from xgboost import Booster, DMatrix

from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_flavors.xgboost._trees import put_trees
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.ubjson import parse, write
from tensorcas_mlflow.errors import AdapterError

ADAPTER = XGBoostAdapter()
X, Y = load_breast_cancer(return_X_y=True)
NAMES = [f"feature {i}" for i in range(X.shape[1])]
RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "size": X[:, 0],
        "code": pd.Categorical(RNG.integers(0, 9, len(X))),
        "word": pd.Categorical(np.array(["red", "grün", "blue"])[RNG.integers(0, 3, len(X))]),
    }
)


def train(params: dict[str, Any] | None = None, n_rounds: int = 4, data: DMatrix | None = None, **more: Any) -> Booster:
    return xgboost.train({"max_depth": 3, "nthread": 2, **(params or {})}, data or DMatrix(X, Y), n_rounds, **more)


def early_stopped() -> Booster:
    return train(n_rounds=40, evals=[(DMatrix(X, 1 - Y), "other")], early_stopping_rounds=2, verbose_eval=False)


def with_attributes() -> Booster:
    booster = train()
    booster.set_attr(author="Ada", note="ünï")
    return booster


BOOSTERS = {
    "regression": lambda: train(),
    "binary": lambda: train({"objective": "binary:logistic"}),
    "multiclass": lambda: train(
        {"objective": "multi:softprob", "num_class": 10}, data=DMatrix(*load_digits(return_X_y=True))
    ),
    "forest": lambda: train({"num_parallel_tree": 3, "subsample": 0.5}),
    "many rounds": lambda: train({"max_depth": 1}, n_rounds=140),
    "pruned": lambda: train({"tree_method": "exact", "gamma": 20}),
    "dart": lambda: train({"booster": "dart", "rate_drop": 0.5}),
    "gblinear": lambda: train({"booster": "gblinear"}),
    "categorical": lambda: train({"max_cat_to_onehot": 1}, data=DMatrix(FRAME, Y, enable_categorical=True)),
    "output per tree": lambda: train(data=DMatrix(X, X[:, :3])),
    "vector leaves": lambda: train({"multi_strategy": "multi_output_tree"}, data=DMatrix(X, X[:, :3])),
    "named features": lambda: train(data=DMatrix(X, Y, feature_names=NAMES, feature_types=["float"] * len(NAMES))),
    "attributes": with_attributes,
    "early stopping": early_stopped,
    "monotone": lambda: train({"monotone_constraints": "(1,-1)"}),
    "base score": lambda: train({"base_score": 0.25}),
    "one node": lambda: train({"gamma": 1e9}),
    "no rounds": lambda: train(n_rounds=0),
    "slice": lambda: train(n_rounds=6)[1:5],
}


def read_back(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Copy arrays as a store returns them."""
    return {name: np.array(array, order="C") for name, array in tensors.items()}


def restored(model: Any, original: Any = None) -> Any:
    return ADAPTER.reconstruct(read_back(ADAPTER.extract(model)), original)


def raw(model: Any) -> bytes:
    return bytes((model if isinstance(model, Booster) else model.get_booster()).save_raw("ubj"))


def chunks(tensors: Mapping[str, Array], name: str) -> list[bytes]:
    ends = ADAPTER.cuts(tensors)[name]
    return [tensors[name][start:end].tobytes() for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("kind", BOOSTERS)
def test_a_booster_comes_back_with_the_bytes_of_save_raw(kind: str) -> None:
    booster = BOOSTERS[kind]()
    tensors = ADAPTER.extract(booster)

    assert "booster" not in tensors
    assert not ADAPTER.unpickles(tensors)
    assert raw(ADAPTER.reconstruct(read_back(tensors))) == raw(booster)


@pytest.mark.parametrize("kind", BOOSTERS)
def test_a_booster_is_restored_over_an_unlike_one(kind: str) -> None:
    booster = BOOSTERS[kind]()
    original = train(n_rounds=2, data=DMatrix(X[:, :4], Y, feature_names=list("abcd")))
    original.set_attr(stale="yes")

    assert restored(booster, original) is original
    assert raw(original) == raw(booster)


@pytest.mark.parametrize("kind", BOOSTERS)
def test_a_booster_comes_back_with_its_configuration(kind: str) -> None:
    booster = BOOSTERS[kind]()

    assert restored(booster).save_config() == booster.save_config()


def test_a_booster_predicts_the_same_bits() -> None:
    booster = BOOSTERS["categorical"]()
    data = DMatrix(FRAME, enable_categorical=True)

    assert restored(booster).predict(data).tobytes() == booster.predict(data).tobytes()


@pytest.mark.parametrize("in_place", [False, True])
def test_training_continues_as_if_uninterrupted(in_place: bool) -> None:
    data = DMatrix(X, Y)
    booster = train({"eta": 0.05, "max_depth": 4, "eval_metric": "mae"}, data=data)
    again = restored(booster, train(data=data) if in_place else None)
    for step in range(4, 7):
        booster.update(data, step)
        again.update(data, step)

    assert raw(again) == raw(booster)
    assert again.eval(data) == booster.eval(data)


def test_training_continues_through_train() -> None:
    booster = train()

    assert raw(train(xgb_model=restored(booster))) == raw(train(xgb_model=booster))


def test_saving_does_not_change_an_xgboost_model() -> None:
    booster = with_attributes()
    before = bytes(booster.__getstate__()["handle"])
    ADAPTER.extract(booster)

    assert bytes(booster.__getstate__()["handle"]) == before


def test_attributes_of_the_python_object_come_back() -> None:
    booster = train()
    booster.note = ("x", {"n": 2})

    assert restored(booster).note == ("x", {"n": 2})


def test_an_attribute_that_contains_itself_is_pickled() -> None:
    booster = train()
    booster.ring = [1]
    booster.ring.append(booster.ring)
    ring = restored(booster).ring

    assert ring[1] is ring


def test_an_untrained_booster_is_refused() -> None:
    with pytest.raises(AdapterError, match="is the booster trained"):
        ADAPTER.extract(Booster())


def test_a_class_derived_from_booster_is_refused() -> None:
    class Mine(Booster):
        pass

    with pytest.raises(AdapterError, match="not exactly"):
        ADAPTER.extract(Mine(model_file=bytearray(raw(train()))))


def test_trees_are_one_packed_record_per_node() -> None:
    tensors = ADAPTER.extract(train())

    assert set(tensors) == {"trees", "tree_table", SKELETON}
    assert tensors["trees"].dtype.itemsize == 34
    assert tensors["trees"].dtype["split_conditions"] == np.dtype("<f4")
    assert len(tensors["trees"]) == tensors["tree_table"].sum()


def test_non_empty_categories_are_columns_of_their_own() -> None:
    tensors = ADAPTER.extract(BOOSTERS["categorical"]())

    assert {"trees/categories", "trees/categories_nodes"} < set(tensors)
    assert ADAPTER.cuts(tensors)["trees/categories"][-1] == len(tensors["trees/categories"])


def save_as(monkeypatch: pytest.MonkeyPatch, booster: Booster, saved: bytes) -> dict[str, Array]:
    """Extract a booster whose XGBoost saves it as these bytes."""
    with monkeypatch.context() as patch:
        patch.setattr(Booster, "save_raw", lambda self, raw_format: bytearray(saved))
        return ADAPTER.extract(booster)


def of_old(document: Any) -> Any:
    """Rewrite a document as XGBoost 1.5 had it: one base score, no rounds of boosting, no names of categories."""
    parts = document["learner"]["learner_model_param"]
    parts["base_score"] = parts["base_score"].strip("[]").split(",")[0]
    model = document["learner"]["gradient_booster"]["model"]
    del model["iteration_indptr"], model["cats"]
    document["version"] = [1, 5, 2]
    return document


def as_lists(value: Any) -> Any:
    """Turn arrays of a document into lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: as_lists(member) for key, member in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [as_lists(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ["binary", "multiclass", "categorical"])
@pytest.mark.parametrize("form", ["ubj", "json"])
def test_a_document_of_an_old_release_is_stored_whole(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    booster = BOOSTERS[kind]()
    document = of_old(parse(raw(booster)))
    old = write(document) if form == "ubj" else json.dumps(as_lists(document)).encode()
    tensors = save_as(monkeypatch, booster, old)
    again, original = ADAPTER.reconstruct(read_back(tensors)), train()
    ADAPTER.reconstruct(read_back(tensors), original)

    assert tensors["booster"].tobytes() == old
    assert raw(again) == raw(original) == raw(Booster(model_file=bytearray(old)))


@pytest.mark.parametrize("kind", ["binary", "categorical"])
def test_a_booster_read_from_a_file_of_an_old_release_is_saved_as_the_new_one_has_it(kind: str) -> None:
    booster = Booster(model_file=bytearray(write(of_old(parse(raw(BOOSTERS[kind]()))))))
    tensors = ADAPTER.extract(booster)

    assert "booster" not in tensors
    assert raw(ADAPTER.reconstruct(read_back(tensors))) == raw(booster)


def test_a_document_in_no_known_form_is_refused_while_the_model_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AdapterError, match="too new for this release"):
        save_as(monkeypatch, train(), b"{Unheard of}")


def test_a_document_that_cannot_be_taken_apart_is_stored_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    booster = train()
    document = parse(raw(booster))
    document["learner"]["gradient_booster"]["model"]["trees"][1]["id"] = np.int32(1)
    irregular = write(document)
    tensors = save_as(monkeypatch, booster, irregular)

    assert set(tensors) == {"booster", SKELETON}
    assert tensors["booster"].tobytes() == irregular
    assert ADAPTER.cuts(tensors) == {}
    assert raw(ADAPTER.reconstruct(read_back(tensors))) == raw(booster)


@pytest.mark.long
@pytest.mark.parametrize(
    ("params", "data", "n_rounds"),
    [
        ({"objective": "binary:logistic", "max_depth": 6}, DMatrix(X, Y), 5),
        ({"objective": "multi:softprob", "num_class": 10, "max_depth": 6}, DMatrix(*load_digits(return_X_y=True)), 1),
    ],
    ids=["binary", "multiclass"],
)
def test_twenty_steps_store_each_tree_about_once(params: dict[str, Any], data: DMatrix, n_rounds: int) -> None:
    booster, before, stored, files = None, [], {}, 0
    for _ in range(20):
        booster = train(params, n_rounds, data, xgb_model=booster)
        tensors = ADAPTER.extract(booster)
        now, finished = chunks(tensors, "trees"), before[:-1]
        stored |= {part: len(part) for part in (*now, *(tensors[key].tobytes() for key in tensors if key != "trees"))}
        files += len(raw(booster))

        assert raw(ADAPTER.reconstruct(read_back(tensors))) == raw(booster)
        assert now[: len(finished)] == finished
        before = now

    assert sum(stored.values()) < 0.15 * files  # before any codec


def test_the_skeleton_does_not_change_when_trees_are_added() -> None:
    booster = train()

    assert np.array_equal(ADAPTER.extract(booster)[SKELETON], ADAPTER.extract(train(xgb_model=booster))[SKELETON])


def test_chunks_end_at_trees_and_hold_some_kilobytes() -> None:
    tensors = ADAPTER.extract(train({"max_depth": 5}, 80))
    cuts = ADAPTER.cuts(tensors)["trees"]
    tree_ends = set(np.cumsum(tensors["tree_table"][:, 0]).tolist())
    sizes = np.diff([0, *cuts]) * 34

    assert tree_ends.issuperset(cuts)
    assert cuts[-1] == len(tensors["trees"])
    assert sizes[:-1].min() >= 4096
    assert sizes.max() < 8192


WRAPPERS = {
    "classifier": lambda: xgboost.XGBClassifier(n_estimators=4, missing=np.nan).fit(X, Y),
    "multiclass": lambda: xgboost.XGBClassifier(n_estimators=2).fit(*load_digits(return_X_y=True)),
    "regressor": lambda: xgboost.XGBRegressor(n_estimators=np.int64(4), base_score=np.float32(0.5)).fit(X, X[:, 0]),
    "ranker": lambda: xgboost.XGBRanker(n_estimators=4).fit(X, Y, qid=np.arange(len(X)) // 40),
    "random forest": lambda: xgboost.XGBRFClassifier(n_estimators=4).fit(X, Y),
    "rf regressor": lambda: xgboost.XGBRFRegressor(n_estimators=4).fit(X, X[:, 0]),
    "frame": lambda: xgboost.XGBClassifier(n_estimators=4, enable_categorical=True).fit(FRAME, Y),
    "constraints": lambda: xgboost.XGBRegressor(
        n_estimators=4, monotone_constraints=(1, -1), feature_weights=np.ones(30), interaction_constraints="[[0,1]]"
    ).fit(X, Y),
    "early stopping": lambda: xgboost.XGBClassifier(
        n_estimators=40, early_stopping_rounds=2, eval_metric=["auc", "logloss"]
    ).fit(X, Y, eval_set=[(X, 1 - Y)], verbose=False),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_wrapper_comes_back_whole_and_without_a_pickle(kind: str, in_place: bool) -> None:
    model = WRAPPERS[kind]()
    again = restored(model, type(model)(max_depth=9) if in_place else None)
    data = FRAME if kind == "frame" else load_digits().data if kind == "multiclass" else X

    assert not ADAPTER.unpickles(ADAPTER.extract(model))
    assert type(again) is type(model)
    assert raw(again) == raw(model)
    assert repr(again.get_params()) == repr(model.get_params())
    assert {k: repr(v) for k, v in vars(again).items() if k != "_Booster"} == {
        k: repr(v) for k, v in vars(model).items() if k != "_Booster"
    }
    assert again.predict(data).tobytes() == model.predict(data).tobytes()
    if hasattr(model, "predict_proba"):
        assert again.predict_proba(data).tobytes() == model.predict_proba(data).tobytes()
        assert again.classes_.tolist() == model.classes_.tolist()


def test_a_wrapper_keeps_what_early_stopping_found() -> None:
    model = WRAPPERS["early stopping"]()
    again = restored(model)

    assert again.best_iteration == model.best_iteration
    assert again.best_score == model.best_score
    assert again.evals_result() == model.evals_result()
    assert again.n_features_in_ == 30


def test_a_wrapper_is_restored_over_a_fitted_one() -> None:
    model = WRAPPERS["classifier"]()
    original = WRAPPERS["early stopping"]()

    assert restored(model, original) is original
    assert raw(original) == raw(model)
    assert not hasattr(original, "evals_result_")


def test_an_unfitted_wrapper_comes_back_unfitted() -> None:
    again = restored(xgboost.XGBRegressor(max_depth=7))

    assert again.max_depth == 7
    assert not again.__sklearn_is_fitted__()


def squared(labels: Array, predictions: Array) -> tuple[Array, Array]:
    return predictions - labels, np.ones_like(labels)


def test_a_callable_objective_is_the_only_pickled_attribute() -> None:
    model = xgboost.XGBRegressor(n_estimators=3, objective=squared).fit(X, Y)
    tensors = ADAPTER.extract(model)
    again = ADAPTER.reconstruct(read_back(tensors))

    assert ADAPTER.unpickles(tensors)
    assert len(parse(tensors[SKELETON].tobytes())["pickle"]) < 3000
    assert raw(again) == raw(model)
    assert again.objective(np.zeros(1), np.ones(1))[0] == 1


def test_no_pickle_is_read_with_an_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model = xgboost.XGBRegressor(n_estimators=3, objective=squared).fit(X, Y)
    tensors = ADAPTER.extract(model)
    monkeypatch.setattr("pickle.Unpickler", None)
    original = ADAPTER.reconstruct(read_back(tensors), xgboost.XGBRegressor(objective=squared))

    assert raw(original) == raw(model)
    assert original.objective is squared
    assert original.n_estimators == 3


class Careful(xgboost.XGBClassifier):
    """A user's own wrapper."""

    margin = 0.1


def test_a_users_own_wrapper_is_pickled_without_its_booster() -> None:
    model = Careful(n_estimators=30).fit(X, Y)
    model.seen = {1, 2}
    tensors = ADAPTER.extract(model)
    again = ADAPTER.reconstruct(read_back(tensors))

    assert ADAPTER.unpickles(tensors)
    assert len(parse(tensors[SKELETON].tobytes())["pickle"]) < 3000
    assert type(again).__name__ == "Careful"
    assert again.seen == {1, 2}
    assert raw(again) == raw(model)
    assert again.predict(X).tobytes() == model.predict(X).tobytes()


def test_a_wrapper_does_not_fill_one_of_another_class() -> None:
    tensors = ADAPTER.extract(WRAPPERS["classifier"]())

    for unlike in (xgboost.XGBRegressor(), train(), object()):
        with pytest.raises(AdapterError, match="cannot be put into"):
            ADAPTER.reconstruct(tensors, unlike)


def test_a_users_own_wrapper_fills_only_its_own_class() -> None:
    model = Careful(n_estimators=3).fit(X, Y)
    original = Careful(max_depth=2)

    assert restored(model, original) is original
    assert repr(original.get_params()) == repr(model.get_params())
    for stored, unlike in ((model, xgboost.XGBClassifier()), (WRAPPERS["classifier"](), Careful())):
        with pytest.raises(AdapterError, match="load a new one, without into="):
            restored(stored, unlike)


OTHER_PARAMETERS: dict[str, Any] = {
    "base_score": 0.25,
    "booster": "gblinear",
    "colsample_bytree": 0.5,
    "early_stopping_rounds": None,
    "eval_metric": ["mae", "rmse"],
    "gamma": 3,
    "importance_type": "cover",
    "learning_rate": 0.01,
    "max_depth": 1,
    "missing": -1.0,
    "n_estimators": 7,
    "num_parallel_tree": 3,
    "random_state": 5,
    "reg_lambda": 40,
    "subsample": np.float32(0.5),
    "tree_method": "exact",
}


@pytest.mark.parametrize("name", OTHER_PARAMETERS)
def test_other_parameters_of_a_wrapper_come_back(name: str) -> None:
    data = np.where(X > 2, np.nan, X)
    stored = xgboost.XGBRegressor(n_estimators=3, n_jobs=1).fit(data, Y)
    original = xgboost.XGBRegressor(n_estimators=3, n_jobs=1).set_params(**{name: OTHER_PARAMETERS[name]})
    original.fit(np.nan_to_num(data), Y[::-1])
    for one, other in ((stored, original), (original, stored)):
        rows, expected = read_back(ADAPTER.extract(one)), one.predict(data)
        ADAPTER.reconstruct(rows, other)

        assert repr(other.get_params()) == repr(one.get_params())
        assert other.predict(data).tobytes() == expected.tobytes()


def absolute(labels: Array, predictions: Array) -> tuple[Array, Array]:
    return np.sign(predictions - labels), np.ones_like(labels)


@pytest.mark.parametrize(
    "change",
    [
        {"objective": absolute},
        {"objective": lambda labels, predictions: squared(labels, predictions)},
        {"objective": "reg:squarederror"},
        {"callbacks": [xgboost.callback.LearningRateScheduler([0.1, 0.1])]},
        {"random_state": np.random.RandomState(5)},
    ],
)
def test_wrapper_attributes_that_need_a_pickle_must_be_equal(change: dict[str, Any]) -> None:
    parameters = {"objective": squared, "callbacks": [xgboost.callback.EvaluationMonitor()]}
    parameters["random_state"] = np.random.RandomState(0)
    stored = xgboost.XGBRegressor(n_estimators=3, **parameters).fit(X, Y, verbose=False)
    original = xgboost.XGBRegressor(n_estimators=2, **{**parameters, **change}).fit(X, Y, verbose=False)
    before, attributes = raw(original), repr(vars(original))

    with pytest.raises(AdapterError, match="load a new one, without into="):
        restored(stored, original)
    assert raw(original) == before
    assert repr(vars(original)) == attributes


def test_counts_of_a_callback_come_back() -> None:
    def stopped(n: int) -> Any:
        callback = xgboost.callback.EarlyStopping(n, metric_name="rmse")
        return xgboost.XGBRegressor(n_estimators=9, callbacks=[callback]).fit(X, Y, eval_set=[(X, Y)], verbose=False)

    stored, original = stopped(2), xgboost.XGBRegressor(callbacks=[xgboost.callback.EarlyStopping(5)])
    callback = original.callbacks[0]
    restored(stored, original)

    assert original.callbacks[0] is callback
    assert callback.rounds == 2
    assert callback.metric_name == "rmse"
    assert callback.best_scores == stored.callbacks[0].best_scores


def test_the_configuration_is_for_the_version_that_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    booster = train({"eta": 0.05})
    tensors = ADAPTER.extract(booster)
    skeleton = parse(tensors[SKELETON].tobytes())
    skeleton |= {"version": "1.0.0", "config": "of old"}
    tensors[SKELETON] = np.frombuffer(write(skeleton), np.uint8)
    again = ADAPTER.reconstruct(tensors)

    assert raw(again) == raw(booster)
    assert "saved with xgboost 1.0.0" in caplog.text


def test_only_models_of_xgboost_are_accepted() -> None:
    class Booster:
        pass

    accepted = [train(n_rounds=1), xgboost.XGBRanker(), Careful()]

    assert [ADAPTER.accepts(model) for model in accepted] == [True] * 3
    assert not any(ADAPTER.accepts(model) for model in (Booster(), DMatrix(X), None, {}))


@pytest.mark.long
def test_importing_and_asking_the_adapter_does_not_import_xgboost() -> None:
    code = (
        "import sys; from tensorcas_flavors.xgboost import XGBoostAdapter; XGBoostAdapter.accepts(object());"
        "sys.exit('xgboost' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.long
def test_a_fresh_process_restores_the_same_bytes(tmp_path: Path) -> None:
    model = WRAPPERS["frame"]()
    np.savez(tmp_path / "tensors.npz", **{k.replace("/", "|"): v for k, v in ADAPTER.extract(model).items()})
    code = (
        "import sys, numpy; from tensorcas_flavors.xgboost import XGBoostAdapter\n"
        "tensors = {k.replace('|', '/'): v for k, v in numpy.load(sys.argv[1]).items()}\n"
        "model = XGBoostAdapter().reconstruct(tensors)\n"
        "sys.stdout.buffer.write(type(model).__name__.encode() + model.get_booster().save_raw('ubj'))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "tensors.npz"], check=True, capture_output=True)

    assert done.stdout == b"XGBClassifier" + raw(model)


def test_predictions_equal_those_of_mlflow() -> None:
    from mlflow.xgboost import _XGBModelWrapper

    frame = pd.DataFrame(X, columns=NAMES)
    booster = train(data=DMatrix(frame, Y))
    model = xgboost.XGBClassifier(n_estimators=3).fit(frame, Y)

    for native, params in (
        (booster, None),
        (booster, {"output_margin": True, "unknown": 1}),
        (booster, {"pred_leaf": True}),
        (model, None),
        (model, {"output_margin": True, "unknown": 1}),
    ):
        expected = _XGBModelWrapper(native).predict(frame, params)
        assert ADAPTER.predict(native, frame, params).tobytes() == expected.tobytes()


def test_predict_sees_that_features_are_missing() -> None:
    booster = train(data=DMatrix(pd.DataFrame(X, columns=NAMES), Y))

    with pytest.raises(ValueError, match="feature"):
        ADAPTER.predict(booster, pd.DataFrame(X[:, :3], columns=NAMES[:3]))


def test_requirements_begin_with_those_of_mlflow() -> None:
    from mlflow.xgboost import get_default_pip_requirements

    requirements = ADAPTER.requirements({})

    assert requirements[:1] == get_default_pip_requirements()
    assert requirements[1].startswith("scikit-learn==")


def damage(tensors: dict[str, Array], name: str, array: Array | None) -> dict[str, Array]:
    return {**{k: v for k, v in tensors.items() if k != name}, **({} if array is None else {name: array})}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        (SKELETON, None),
        (SKELETON, np.zeros(0, np.uint8)),
        (SKELETON, np.frombuffer(b"TCPK1\nnonsense", np.uint8)),
        (SKELETON, np.frombuffer(write({"format": 2}), np.uint8)),
        (SKELETON, np.frombuffer(write([1]), np.uint8)),
        ("trees", None),
        ("trees", np.zeros(3, np.uint8)),
        ("tree_table", None),
        ("tree_table", np.zeros((0, 1), "<i4")),
        ("tree_table", np.full((4, 1), 2**31 - 1, "<i4")),
        ("tree_table", np.array([[-1], [61]], "<i4")),
        ("tree_table", np.zeros(4, "<f8")),
    ],
)
def test_a_skeleton_of_garbage_is_an_adapter_error(name: str, array: Array | None) -> None:
    tensors = damage(ADAPTER.extract(train()), name, array)

    with pytest.raises(AdapterError):
        ADAPTER.cuts(tensors)
    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize(
    "state", [{"handle": 5}, {"x": {"unknown": 1}}, {"x": {"number": np.zeros(0)}}, {"x": np.ones(2)}]
)
def test_a_forged_state_is_an_adapter_error(state: dict[str, Any]) -> None:
    tensors = ADAPTER.extract(train())
    forged = {**parse(tensors[SKELETON].tobytes()), "state": state}

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(damage(tensors, SKELETON, np.frombuffer(write(forged), np.uint8)))


@pytest.mark.parametrize("link", ["left_children", "right_children", "parents"])
def test_a_node_that_points_out_of_its_tree_is_refused(link: str) -> None:
    tensors = ADAPTER.extract(train())
    records = tensors["trees"].copy()
    records[link][0] = 10_000

    with pytest.raises(AdapterError, match=r"points out of its tree|another than its parent"):
        ADAPTER.reconstruct(damage(tensors, "trees", records))


def test_bytes_that_are_no_document_are_an_adapter_error() -> None:
    tensors = ADAPTER.extract(train())
    whole = {"booster": np.frombuffer(b"no model", np.uint8), SKELETON: tensors[SKELETON]}

    with pytest.raises(AdapterError, match="damaged, or too new"):
        ADAPTER.reconstruct(whole)


def test_a_document_that_xgboost_refuses_is_an_adapter_error() -> None:
    tensors = ADAPTER.extract(train())
    skeleton = parse(tensors[SKELETON].tobytes())
    skeleton["document"]["learner"]["objective"]["name"] = "of:another:world"

    with pytest.raises(AdapterError, match="xgboost cannot read"):
        ADAPTER.reconstruct(damage(tensors, SKELETON, np.frombuffer(write(skeleton), np.uint8)))


DAMAGED = ADAPTER.extract(BOOSTERS["categorical"]())


@pytest.mark.long
@given(st.data())
@settings(max_examples=300)
def test_a_damaged_skeleton_is_refused_or_stays_consistent(data: st.DataObject) -> None:
    skeleton = bytearray(DAMAGED[SKELETON].tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(skeleton) - 1))
        cut = data.draw(st.integers(0, 9))
        skeleton[at : at + cut] = data.draw(st.binary(max_size=9))
    tensors = damage(DAMAGED, SKELETON, np.frombuffer(bytes(skeleton), np.uint8))
    try:
        cuts = ADAPTER.cuts(tensors)
    except AdapterError:
        return

    assert all(ends == sorted(set(ends)) and ends[-1] == len(tensors[name]) for name, ends in cuts.items())


PARTS = parse(DAMAGED[SKELETON].tobytes())
wrong = st.sampled_from([None, 0, -1, 2**40, "", "trees", [], [1], ["id"], {}, np.zeros(0, "u1"), np.ones(3, ">f4")])


@pytest.mark.long
@given(st.data())
@settings(max_examples=300)
def test_forged_parts_are_refused_or_make_a_document(data: st.DataObject) -> None:
    parts = parse(write({"document": PARTS["document"], "layout": PARTS["layout"]}))
    columns = {name: array for name, array in DAMAGED.items() if name != SKELETON}
    for _ in range(data.draw(st.integers(1, 3))):
        owner = parts
        while True:
            key = data.draw(st.sampled_from(sorted(owner)))
            if not (isinstance(owner[key], dict) and owner[key] and data.draw(st.integers(0, 5))):
                break
            owner = owner[key]
        owner[key] = data.draw(wrong)
        if data.draw(st.booleans()):
            table = columns["tree_table"].copy()
            table.flat[data.draw(st.integers(0, table.size - 1))] = data.draw(st.integers(-(2**31), 2**31 - 1))
            columns["tree_table"] = table
    try:
        put_trees(parts["document"], parts["layout"], columns)
        made = write(parts["document"])
    except ValueError:
        return

    assert len(made) < 2**20
