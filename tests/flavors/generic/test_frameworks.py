"""Models of other frameworks, through the adapter that the store finds for them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import statsmodels.api as sm
import torch
from sklearn.datasets import make_regression
from sklearn.linear_model import Ridge

from tensorcas_flavors.generic import GenericAdapter
from tensorcas_mlflow.adapter import SKELETON, adapter_for
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.stored_bytes import bytes_below

pytestmark = pytest.mark.long

X, Y = make_regression(2000, 12, random_state=0)
SETTINGS = {"verbose": -1, "seed": 0, "num_threads": 1}


def boosters(n_steps: int) -> Iterator[lightgbm.Booster]:
    data = lightgbm.Dataset(X, Y, free_raw_data=False)
    booster = None
    for _ in range(n_steps):
        booster = lightgbm.train(SETTINGS, data, 5, init_model=booster)
        yield booster


def fit_catboost(n_rounds: int, **settings: Any) -> Any:
    model = catboost.CatBoostRegressor(iterations=n_rounds, verbose=0, thread_count=1, allow_writing_files=False)
    return model.fit(X, Y, **settings)


@dataclass
class Ensemble:
    """A user's model, of several frameworks."""

    linear: Any
    table: pd.DataFrame
    kernel: Any
    tensor: torch.Tensor

    def predict(self, data: Any) -> Any:
        return self.linear.predict(data) + (data @ self.kernel.toarray()).sum(axis=1) + self.tensor.sum().item()


def make_ensemble() -> Ensemble:
    table = pd.DataFrame({"x": X[:, 0], "word": ["abc", None] * 1000, "kind": pd.Categorical(["a", "b"] * 1000)})
    kernel = scipy.sparse.random(12, 12, 0.5, format="csr", random_state=0)
    return Ensemble(Ridge().fit(X, Y), table.set_index("x"), kernel, torch.arange(2000.0))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "LightGBM booster": (lambda: next(boosters(1)), "generic"),
    "LightGBM wrapper": (lambda: lightgbm.LGBMRegressor(n_estimators=5, verbose=-1, n_jobs=1).fit(X, Y), "sklearn"),
    "CatBoost": (lambda: fit_catboost(5), "generic"),
    "statsmodels": (lambda: sm.OLS(Y, X).fit(), "generic"),
    "users' own": (make_ensemble, "generic"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_framework_predicts_the_same_after_loading(name: str, tmp_path: Path) -> None:
    make, adapter = MODELS[name]
    model = make()
    store = TensorCasStore(tmp_path, "run")

    store.save(model, step=1)

    again = store.load(step=1)
    assert adapter_for(model).name == adapter
    assert type(again) is type(model)
    assert np.array_equal(again.predict(X), model.predict(X))


def test_parts_of_other_libraries_come_back_whole() -> None:
    model = make_ensemble()
    rows = GenericAdapter().extract(model)

    again = GenericAdapter().reconstruct({name: np.array(row) for name, row in rows.items()})

    pd.testing.assert_frame_equal(again.table, model.table)
    assert (again.kernel != model.kernel).nnz == 0
    assert torch.equal(again.tensor, model.tensor)
    assert {"kernel.data", "kernel.indices"} <= rows.keys()
    assert any(name.startswith("__buffer__/") for name in rows)  # the words, which pyarrow holds
    assert len(rows[SKELETON]) < 10_000


def test_a_step_of_a_growing_booster_stores_only_its_growth(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    texts = []
    for step, booster in enumerate(boosters(20)):
        store.save(booster, step=step)
        texts.append(booster.model_to_string())

    assert bytes_below(tmp_path) < 0.1 * sum(map(len, texts))
    assert [store.load(step).model_to_string() for step in range(20)] == texts


def test_steps_of_a_catboost_model_take_far_less_room_than_its_pickles(tmp_path: Path) -> None:
    store = TensorCasStore(tmp_path, "run")
    model = None
    n_bytes = 0
    for step in range(10):
        model = fit_catboost(5, init_model=model)
        store.save(model, step=step)
        n_bytes += len(pickle.dumps(model))

    assert bytes_below(tmp_path) < 0.35 * n_bytes
    assert np.array_equal(store.load(9).predict(X), model.predict(X))


WRITE = """
import sys
import numpy as np
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.stored_bytes import bytes_below

class Mean:
    def fit(self, X):
        self.mean = X.mean(axis=0)
        return self
    def predict(self, X):
        return X - self.mean

X = np.arange(2000.0).reshape(20, 100)
TensorCasStore(sys.argv[1], "run").save(Mean().fit(X), step=1)
"""
READ = """
import sys
import numpy as np
from tensorcas_mlflow.tensorcas_store import TensorCasStore
from tests.stored_bytes import bytes_below

X = np.arange(2000.0).reshape(20, 100)
model = TensorCasStore(sys.argv[1], "run").load(step=1)
assert np.array_equal(model.predict(X), X - X.mean(axis=0))
print(type(model).__name__)
"""


def test_a_class_of_main_comes_back_in_a_process_without_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE, tmp_path], check=True)
    done = subprocess.run([sys.executable, "-c", READ, tmp_path], check=True, capture_output=True, text=True)

    assert done.stdout.strip() == "Mean"
