"""Give a live ensemble of scikit-learn as many members as a stored one has, before it is filled.

Members that are too many are dropped. Those that lack are copies of the live model's last one; what they hold is then
replaced by what is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

if TYPE_CHECKING:
    from tensorcas_flavors._sklearn_walk import Graph

_MEMBERS = {
    "BaseForest": "estimators_",
    "BaseBagging": "estimators_",
    "BaseWeightBoosting": "estimators_",
    "BaseGradientBoosting": "estimators_",
    "BaseHistGradientBoosting": "_predictors",
}
_BESIDE_MEMBERS = ("estimators_features_", "_decision_path_lengths", "_average_path_length_per_tree")
PER_STAGE = frozenset(
    (
        "_seeds",
        "train_score_",
        "validation_score_",
        "oob_improvement_",
        "oob_scores_",
        "estimator_weights_",
        "estimator_errors_",
    )
)
"""Attributes of ensembles: arrays with a number for each member."""


def is_ensemble(part: object) -> bool:
    """Tell whether an object is a fitted ensemble of scikit-learn whose members are all alike."""
    return _members_key(part) is not None


def n_members(ensemble: Any) -> int:
    """Return how many members an ensemble has; of boosted trees, how many stages."""
    return len(_members(ensemble))


class Resizing:
    """The change of the sizes of a model's ensembles, which can be undone."""

    def __init__(self, adapter: str, find: Callable[[], Graph], sizes: Mapping[str, int], n_rows: int) -> None:
        """Give each ensemble of a live model the stored size. If it cannot be done, the model stays as it was.

        Args:
            adapter: The adapter's name, for errors.
            find: Walks the live model.
            sizes: What the stored model says, by path.
            n_rows: Rows of all that is stored: no ensemble can have more members.

        Raises:
            AdapterError: An ensemble without a member has to grow, or a size is impossible.
        """
        self._adapter = adapter
        self._undo: list[tuple[dict[str, Any], str, Any]] = []
        self.graph = find()
        try:
            # Members may be ensembles themselves, and those of copied ones are found once they are there.
            while self._resize(sizes, n_rows):
                self.graph = find()
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put everything back that was there."""
        for attributes, key, value in reversed(self._undo):
            attributes[key] = value
        self._undo.clear()

    def _resize(self, sizes: Mapping[str, int], n_rows: int) -> bool:
        changed: list[str] = []
        for path, ensemble in self.graph.ensembles.items():
            n_live, n_stored = n_members(ensemble), sizes.get(path)
            is_inside = any(path.startswith(f"{outer}/" if outer else "") for outer in changed)
            if n_stored is None or n_live == n_stored or is_inside:
                continue
            if not 0 <= n_stored <= n_rows:
                raise AdapterError(self._adapter, f"the stored model cannot have {n_stored} members: it is damaged")
            if not n_live:
                raise AdapterError(
                    self._adapter,
                    f"{n_stored} members are stored, and the original has none to make them from: "
                    "fit it with one member first, or load a new model, without an original",
                )
            self._resize_one(ensemble, n_live, n_stored)
            changed.append(path)
        return bool(changed)

    def _resize_one(self, ensemble: Any, n_live: int, n_stored: int) -> None:
        attributes = vars(ensemble)
        for key in (_members_key(ensemble) or "", *_BESIDE_MEMBERS):
            if key in attributes and len(attributes[key]) == n_live:
                self._undo.append((attributes, key, attributes[key]))
                attributes[key] = _resized(attributes[key], n_stored)


def _members_key(part: object) -> str | None:
    attributes = getattr(part, "__dict__", {})
    if "estimators_" not in attributes and "_predictors" not in attributes:
        return None
    for base in type(part).__mro__:
        key = _MEMBERS.get(base.__name__)
        if key in attributes and base.__module__.startswith("sklearn.ensemble."):
            return key
    return None


def _members(ensemble: Any) -> Any:
    return vars(ensemble)[_members_key(ensemble) or ""]


def _resized(members: Any, n: int) -> Any:
    if n <= len(members):
        return members[:n].copy() if isinstance(members, np.ndarray) else members[:n]
    shared = _shared(members)
    added = [copy.deepcopy(members[-1], dict(shared)) for _ in range(n - len(members))]
    if not isinstance(members, np.ndarray):
        return type(members)([*members, *added])
    grown: Array = np.concatenate([members, np.array(added, dtype=object).reshape(-1, *members.shape[1:])])
    return grown


def _shared(members: Any) -> dict[int, Any]:
    """Return by id what copies of the last member share with it: what it shares with the first, and random states."""
    from tensorcas_flavors._sklearn_walk import walk

    own = walk([members[-1]], ())
    shared: dict[int, Any] = {}
    if len(members) > 1:
        first = walk([members[0]], ())
        of_first = {id(part) for part in (*first.objects, *first.arrays)}
        shared = {id(part): part for part in (*own.objects, *own.arrays) if id(part) in of_first}
    for part in own.objects:
        # Trees that were grown one after the other draw from one state.
        states = (value for value in getattr(part, "__dict__", {}).values() if _is_random(value))
        shared.update((id(state), state) for state in states)
    return shared


def _is_random(value: object) -> bool:
    return type(value).__module__.startswith("numpy.random")
