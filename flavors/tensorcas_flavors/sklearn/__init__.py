"""Adapter for scikit-learn: fitted arrays under their attribute paths, and all trees of an ensemble as one table.

In: an estimator. Out: rows, and a skeleton that is a pickle without the parts in rows (`_parts`), followed by facts
(`_facts`) from which a live estimator is filled (`_fill`) without reading the pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tensorcas_flavors._pickle_tree import named_modules
from tensorcas_flavors._pickling import (
    dump_skeleton,
    installed_version,
    is_pickle,
    load_skeleton,
    pinned_packages,
    try_back,
    view_of_map,
)
from tensorcas_flavors.sklearn._checks import check_objects
from tensorcas_flavors.sklearn._facts import model_facts, read_facts, with_facts
from tensorcas_flavors.sklearn._fill import ModelFill
from tensorcas_flavors.sklearn._parts import (
    RESERVED,
    ROWS,
    SEEDS,
    STRINGS,
    StoredEstimatorParts,
    TakenEstimatorParts,
    booster_cuts,
    booster_paths,
    split_off,
)
from tensorcas_flavors.sklearn._trees import is_table, odd_trees, tree_ends
from tensorcas_flavors.sklearn._walk import PER_STAGE, Graph, Resizing, walk
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array
from tensorcas_mlflow.base.content_cuts import MIN_BYTES, content_cuts, group_ends
from tensorcas_mlflow.errors import AdapterError

_COME_BACK: set[type] = set()
"""Classes that came back from a pickle in this process; a save of a model with others loads it once."""
_GROWING = PER_STAGE | {SEEDS}
"""Names of rows with one random number for each stage of an ensemble."""
_OF_RANDOM = {"least": 256, "growth": 64}
"""Groups of random numbers, which do not compress; trees compress to a third, and badly in small groups."""
_MIN_CUT_SKELETON_BYTES = 1 << 16
_BROUGHT_ALONG = frozenset({"sklearn", "cloudpickle", "numpy", "scipy", "joblib"})


class SklearnAdapter(Adapter):
    """Adapter for scikit-learn estimators, nested ones and those of user code included.

    Arrays of numbers become tensors, named by the path of attributes that leads to them; many small similar ones become
    one tensor (see `walk`). Trees become the table ``trees``. The skeleton keeps arrays of less than 256 bytes that no
    attribute holds, masked arrays, memory maps, strings and objects.
    """

    name: ClassVar[str] = "sklearn"

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Tell whether a model is a scikit-learn estimator, and not one of XGBoost."""
        bases = type(model).__mro__
        roots = {base.__module__.partition(".")[0] for base in bases}
        is_estimator = any(
            base.__qualname__ == "BaseEstimator" and base.__module__.partition(".")[0] == "sklearn" for base in bases
        )
        return is_estimator and "xgboost" not in roots

    def extract(self, model: Any) -> dict[str, Array]:
        """Take an estimator apart; see `Adapter.extract`."""
        graph = walk(model, RESERVED)
        parts, skeleton = self._take_apart(model, graph)
        skeleton = with_facts(skeleton, model_facts(self.name, model, parts), parts.strings)
        tensors = {**parts.tensors(), **graph.number_rows(), SKELETON: skeleton}
        if not parts.kinds <= _COME_BACK:
            try_back(self.name, model, tensors, self.reconstruct)
            _COME_BACK.update(parts.kinds)
        return tensors

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None, **options: Any) -> Any:
        """Put an estimator together again, or fill one that is alive.

        Args:
            tensors: What `extract` returned, read back.
            original: An estimator to fill, whose own `extract` gives the same names, dtypes and shapes. Trees, and
                support vectors with their weights, may have another size; an ensemble of trees may have another
                number of members, but one at least. The stored arrays, trees, boosters of XGBoost, random states and
                plain values replace those of ``original``, hyperparameters such as ``n_estimators`` included. All
                else, such as functions and models of other libraries, must be equal.
            options: There are none.

        Raises:
            AdapterError: The arrays are not those of an estimator, or do not fit ``original``, which then stays as it
            was.
        """
        if original is not None:
            facts = read_facts(self.name, tensors.get(SKELETON), StoredEstimatorParts(self.name, tensors).strings)
            n_rows = sum(len(array) for array in tensors.values() if array.ndim)
            resizing = Resizing(self.name, lambda: walk(original, RESERVED), facts.sizes, n_rows)
            try:
                taken, _ = self._take_apart(original, resizing.graph)
                ModelFill(self.name, original, taken, tensors, facts).apply()
            except BaseException:
                resizing.undo()
                raise
            return original
        parts = StoredEstimatorParts(self.name, tensors)
        model = load_skeleton(self.name, parts.tensor(SKELETON), parts.put_back)
        parts.check_all_used()
        check_objects(self.name, walk(model, RESERVED).objects)
        return model

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Cut tables of trees and families of arrays at groups of whole members; see `group_ends`."""
        cuts: dict[str, Sequence[int]] = {}
        tensors, boosters = split_off(tensors)
        for path, rows in boosters.items():
            cuts.update(booster_cuts(path, rows))
        for name, array in tensors.items():
            if not array.size:
                continue
            if name in (STRINGS, SKELETON):
                # A LightGBM model is a string that grows in the middle; a vocabulary is in both rows.
                if len(array) > (MIN_BYTES if name == STRINGS else _MIN_CUT_SKELETON_BYTES):
                    cuts[name] = content_cuts(array)
                continue
            row_bytes = array.nbytes // len(array) if array.ndim else 0
            is_random = name.rpartition("/")[2] in _GROWING
            if is_table(array):
                cuts[name] = group_ends(tree_ends(array).tolist(), row_bytes)
            elif name + ROWS in tensors:
                cuts[name] = group_ends(np.cumsum(tensors[name + ROWS]).tolist(), row_bytes)
            elif array.ndim and (is_random or "*" in name):
                ends = range(1, len(array) + 1)
                cuts[name] = group_ends(ends, row_bytes, **(_OF_RANDOM if is_random else {}))
        return cuts

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Tell whether there is a skeleton with a pickle."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the result of the estimator's own ``predict``, as MLflow's scikit-learn flavor does.

        Args:
            model: A fitted estimator.
            data: Data for its ``predict``.
            params: Not used, as in MLflow's flavor.

        Raises:
            AdapterError: The estimator has no ``predict``; a transformer has none.
        """
        if not hasattr(model, "predict"):
            raise AdapterError(self.name, f"a {type(model).__name__} has no predict: load it and call it yourself")
        return model.predict(data)

    def requirements(self, tensors: Mapping[str, Array]) -> list[str]:
        """List the requirements of MLflow's flavor for a cloudpickled model, and the packages of other parts."""
        own = [f"{package}=={installed_version(package)}" for package in ("scikit-learn", "cloudpickle")]
        boosters = {"xgboost"} if booster_paths(tensors) else set()
        return own + pinned_packages(named_modules(tensors[SKELETON]) | boosters, but=_BROUGHT_ALONG)

    def _take_apart(self, model: Any, graph: Graph) -> tuple[TakenEstimatorParts, Array]:
        odd: set[int] = set()
        while True:
            parts = TakenEstimatorParts(graph, odd)
            skeleton = dump_skeleton(self.name, model, parts.take_out, view_of=view_of_map)
            more_odd = {id(trees[i]) for _, trees in parts.trees.values() for i in odd_trees(trees)}
            if not more_odd:
                return parts, skeleton
            odd |= more_odd
