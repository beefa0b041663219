"""Size of a history of scikit-learn's models in a store, in the two forms that MLflow writes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import skops.io
from sklearn.ensemble import GradientBoostingRegressor

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store

N_STEPS = 12


def taken_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_history_of_skops_files_in_packs_takes_less_than_half_more_than_one_of_pickles(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(500, 8))
    model = GradientBoostingRegressor(random_state=0, warm_start=True)
    stores = {kind: Store.init(tmp_path / kind, logs=False) for kind in ("skops", "pickle")}
    for step in range(1, N_STEPS + 1):
        model.set_params(n_estimators=step).fit(X, X @ np.arange(8) + np.sin(9 * X[:, 0]))
        for kind, data in {"skops": skops.io.dumps(model), "pickle": pickle.dumps(model, 4)}.items():
            (tmp_path / "file").write_bytes(data)
            with stores[kind].write_file(tmp_path / "file") as pending:
                pending.commit(RefTarget(path=f"{step}/model.{kind}"))

    assert taken_bytes(tmp_path / "skops") < 1.5 * taken_bytes(tmp_path / "pickle")
