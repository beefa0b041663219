"""Growing models of trees: five trees a step, one hundred at the end."""

from __future__ import annotations

from collections.abc import Iterator

import xgboost
from sklearn.datasets import make_regression
from sklearn.ensemble import GradientBoostingRegressor

N_STEPS = 20


def gradient_boosting(n_steps: int = N_STEPS) -> Iterator[GradientBoostingRegressor]:
    """Grow a model of scikit-learn; the same object each time."""
    features, target = make_regression(2000, 12, random_state=0)
    model = GradientBoostingRegressor(n_estimators=5, max_depth=3, warm_start=True, random_state=0)
    for step in range(1, n_steps + 1):
        model.n_estimators = 5 * step
        yield model.fit(features, target)


def boosters(n_steps: int = N_STEPS) -> Iterator[xgboost.Booster]:
    """Grow a model of XGBoost; another object each time."""
    features, target = make_regression(2000, 12, random_state=0)
    data = xgboost.DMatrix(features, target)
    booster = None
    for _ in range(n_steps):
        booster = xgboost.train({"max_depth": 4}, data, 5, xgb_model=booster)
        yield booster
