"""Size of a history of scikit-learn's models in a store, in the two forms that MLflow writes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import skops.io
from sklearn.ensemble import GradientBoostingRegressor

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.stored_bytes import bytes_below

N_STEPS = 12
KINDS = ("skops", "pickle")
ROUNDING_BYTES = 1_024
"""Two pages: a database has a whole number of them, and a history of twelve steps few."""


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], int]:
    """Sizes of stores with one history, by MLflow's form of the models and by whether the store has a database."""
    folder = tmp_path_factory.mktemp("histories")
    X = np.random.default_rng(0).normal(size=(500, 8))
    model = GradientBoostingRegressor(random_state=0, warm_start=True)
    stores = {
        (kind, has_database): Store.init(folder / f"{kind}-{has_database}", database=has_database)
        for kind in KINDS
        for has_database in (False, True)
    }
    for step in range(1, N_STEPS + 1):
        model.set_params(n_estimators=step).fit(X, X @ np.arange(8) + np.sin(9 * X[:, 0]))
        for kind, data in {"skops": skops.io.dumps(model), "pickle": pickle.dumps(model, 4)}.items():
            (folder / "file").write_bytes(data)
            for has_database in (False, True):
                with stores[kind, has_database].write_file(folder / "file") as pending:
                    pending.commit(RefTarget(path=f"{step}/model.{kind}"))
    return {(kind, has_database): bytes_below(folder / f"{kind}-{has_database}") for kind, has_database in stores}


def test_a_history_of_skops_files_takes_less_than_half_more_than_one_of_pickles(
    taken: dict[tuple[str, bool], int],
) -> None:
    assert taken["skops", False] < 1.5 * taken["pickle", False]


@pytest.mark.parametrize(("kind", "share"), [("skops", 1.0), ("pickle", 0.2)])
def test_a_history_takes_no_more_in_a_database_than_in_files(
    taken: dict[tuple[str, bool], int], kind: str, share: float
) -> None:
    assert taken[kind, True] < share * taken[kind, False] + ROUNDING_BYTES
