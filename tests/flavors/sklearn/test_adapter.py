"""Estimators come back bit for bit from their tensors alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import (
    RandomForestClassifier,
)
from sklearn.linear_model import Ridge
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.sklearn.cases import (
    ADAPTER,
    CANCER,
    ESTIMATORS,
    IRIS,
    answers,
    fit,
    read_back,
    round_trip,
)
from tests.flavors.sklearn.models import differences


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_attribute_comes_back_bit_for_bit(name: str) -> None:
    model = fit(name)

    assert differences(model, round_trip(model)) == []


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_restored_model_answers_with_the_same_bits(name: str) -> None:
    model = fit(name)
    restored = round_trip(model)
    x = ESTIMATORS[name][1][0]

    assert [a.tobytes() for a in answers(restored, x)] == [a.tobytes() for a in answers(model, x)]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_same_model_gives_the_same_tensors_twice(name: str) -> None:
    model = fit(name)
    first, second = ADAPTER.extract(model), ADAPTER.extract(model)

    assert [(n, a.dtype, a.tobytes()) for n, a in first.items()] == [
        (n, a.dtype, a.tobytes()) for n, a in second.items()
    ]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_restored_model_gives_the_tensors_it_came_from(name: str) -> None:
    tensors = ADAPTER.extract(fit(name))
    again = ADAPTER.extract(ADAPTER.reconstruct(read_back(tensors)))
    pickled = (SKELETON, "__strings__")

    assert {n: a.tobytes() for n, a in again.items() if n not in pickled} == {
        n: a.tobytes() for n, a in tensors.items() if n not in pickled
    }


def test_arrays_are_named_by_the_attributes_that_lead_to_them() -> None:
    tensors = ADAPTER.extract(fit("pipeline"))

    assert {"steps/scale/mean_", "steps/scale/var_", "steps/clf/coef_", "steps/clf/intercept_"} <= set(tensors)


def test_fortran_order_comes_back() -> None:
    model = Ridge()
    model.coef_ = np.asfortranarray(np.arange(6.0).reshape(2, 3))

    assert round_trip(model).coef_.flags.f_contiguous


def test_one_array_under_two_names_comes_back_as_one() -> None:
    model = Ridge()
    model.coef_ = model.also_coef_ = np.arange(3.0)
    restored = round_trip(model)

    assert restored.coef_ is restored.also_coef_


def test_members_of_a_family_keep_their_aliases_and_shapes() -> None:
    model = Ridge()
    shared = np.arange(5.0)
    model.parts_ = [*(np.arange(float(n)) for n in range(10)), shared, shared]
    restored = round_trip(model)

    assert differences(model, restored) == []
    assert restored.parts_[-1] is restored.parts_[-2]


def test_given_arrays_are_used_without_a_copy() -> None:
    tensors = read_back(ADAPTER.extract(fit("logistic regression")))

    assert np.shares_memory(ADAPTER.reconstruct(tensors).intercept_, tensors["intercept_"])


def test_strings_and_objects_of_a_column_transformer_come_back() -> None:
    frame = pd.DataFrame({"colour": ["red", "blüe", "green"] * 4, "size": np.arange(12.0)})
    model = ColumnTransformer([("cat", OneHotEncoder(), ["colour"]), ("num", StandardScaler(), ["size"])])
    expected = model.fit_transform(frame)
    restored = round_trip(model)

    assert "transformers_/num/mean_" in ADAPTER.extract(model)
    assert list(restored.transformers_[0][1].categories_[0]) == ["blüe", "green", "red"]
    assert restored.transform(frame).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["__array__/0", "trees", "random_states", "a/b", "*", "", "line\nbreak"])
def test_any_attribute_name_is_safe(name: str) -> None:
    model = RandomForestClassifier(n_estimators=9, random_state=0).fit(*IRIS)
    vars(model)[name] = np.arange(100.0)
    tensors = ADAPTER.extract(model)

    assert all(key and "\n" not in key and "\0" not in key for key in tensors)
    assert differences(model, ADAPTER.reconstruct(read_back(tensors))) == []


def test_unpickles_depends_on_the_skeleton_alone() -> None:
    tensors = ADAPTER.extract(fit("ridge"))

    assert ADAPTER.unpickles(tensors)
    assert not ADAPTER.unpickles({})


class Foreign:
    """A look-alike with fit and predict that is not scikit-learn's."""

    def predict(self, x: Array) -> Array:
        return x


def test_only_estimators_that_are_not_of_xgboost_are_accepted() -> None:
    from xgboost import XGBClassifier

    class Mine(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        pass

    class MyBooster(XGBClassifier):
        pass

    assert all(ADAPTER.accepts(model) for model in (Ridge(), Pipeline([("a", Ridge())]), Mine()))
    assert not any(ADAPTER.accepts(model) for model in (XGBClassifier(), MyBooster(), Foreign(), 3, Ridge))


def test_predict_calls_the_estimators_own_method() -> None:
    model = fit("random forest")

    assert ADAPTER.predict(model, CANCER[0]).tobytes() == model.predict(CANCER[0]).tobytes()


def test_predicting_with_an_estimator_without_predict_is_refused() -> None:
    with pytest.raises(AdapterError, match="StandardScaler has no predict"):
        ADAPTER.predict(StandardScaler().fit(IRIS[0]), IRIS[0])


def test_requirements_are_those_of_mlflows_own_flavor() -> None:
    from mlflow.sklearn import get_default_pip_requirements
    from sklearn.linear_model import LinearRegression

    found = ADAPTER.requirements(ADAPTER.extract(LinearRegression().fit(*IRIS)))

    assert found == get_default_pip_requirements(include_cloudpickle=True)  # type: ignore[no-untyped-call]


SAVE = """
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.ensemble import RandomForestRegressor
from tensorcas_flavors.sklearn import SklearnAdapter

class Halved(BaseEstimator):
    def fit(self, x, y):
        self.forest_ = RandomForestRegressor(9, random_state=0).fit(x, y)
        return self
    def predict(self, x):
        return self.forest_.predict(x) / 2

x = np.random.default_rng(0).normal(size=(60, 4))
model = Halved().fit(x, x[:, 0])
np.savez("model.npz", **{n.replace("/", "|"): a for n, a in SklearnAdapter().extract(model).items()})
np.savez("answer.npz", x=x, y=model.predict(x))
"""


LOAD = """
import sys
import numpy as np
from tensorcas_flavors.sklearn import SklearnAdapter
assert not any(name.split(".")[0] in ("sklearn", "torch", "xgboost") for name in sys.modules)
with np.load("model.npz") as stored:
    model = SklearnAdapter().reconstruct({n.replace("|", "/"): stored[n] for n in stored.files})
with np.load("answer.npz") as answer:
    assert model.predict(answer["x"]).tobytes() == answer["y"].tobytes()
"""


@pytest.mark.long
def test_a_class_of_main_is_restored_in_a_fresh_process_that_had_not_imported_sklearn(tmp_path: Path) -> None:
    for script in (SAVE, LOAD):
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)

        assert done.returncode == 0, done.stderr
