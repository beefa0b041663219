"""scikit-learn models as tensors: fitted arrays under their attribute paths, all trees of an ensemble as one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from tensorcas_flavors._forest import build_trees, check_histogram_trees, group_ends, is_table, odd_trees, tree_ends
from tensorcas_flavors._pickling import dump_skeleton, is_pickle, load_skeleton
from tensorcas_flavors._sklearn_parts import (
    RANDOM,
    RESERVED,
    ROWS,
    SEEDS,
    STRINGS,
    UNNAMED,
    PartsToPutBack,
    TakenParts,
    split_family,
)
from tensorcas_flavors._sklearn_walk import Graph, packed, walk
from tensorcas_mlflow.adapter import SKELETON, Adapter, Array
from tensorcas_mlflow.errors import AdapterError


class SklearnAdapter(Adapter):
    """Takes any scikit-learn estimator, also nested ones and those of user code.

    Arrays of numbers become tensors named by the path of attributes that leads to them; many small alike ones become
    one tensor (see `walk`). Trees become the table ``trees``. Arrays that no attribute holds and that are smaller than
    256 bytes stay in the skeleton, as do masked arrays, memory maps, strings and objects.
    """

    name: ClassVar[str] = "sklearn"

    @classmethod
    def accepts(cls, model: object) -> bool:
        """Tell whether a model is a scikit-learn estimator, and not one of XGBoost's."""
        bases = type(model).__mro__
        roots = {base.__module__.partition(".")[0] for base in bases}
        is_estimator = any(
            base.__qualname__ == "BaseEstimator" and base.__module__.partition(".")[0] == "sklearn" for base in bases
        )
        return is_estimator and "xgboost" not in roots

    def extract(self, model: Any) -> dict[str, Array]:
        """Take an estimator apart; see `Adapter.extract`."""
        parts, skeleton = self._take_apart(model, walk(model, RESERVED))
        return {**parts.tensors(), SKELETON: skeleton}

    def reconstruct(self, tensors: Mapping[str, Array], original: Any = None) -> Any:
        """Put an estimator together again, or fill one that is alive.

        Args:
            tensors: What `extract` returned, read back.
            original: An estimator whose own `extract` gives the same names, dtypes and shapes. Its arrays get the
                stored values, its trees are replaced by the stored ones. What is not an array (hyperparameters,
                counters, strings, the state of random number generators) stays as it is in ``original``.

        Raises:
            AdapterError: The arrays are not those of an estimator, or do not fit ``original``, which is then untouched.
        """
        if original is not None:
            self._fill(original, tensors)
            return original
        parts = PartsToPutBack(self.name, tensors)
        model = load_skeleton(self.name, parts.tensor(SKELETON), parts.put_back)
        parts.check_all_used()
        return model

    def cuts(self, tensors: Mapping[str, Array]) -> dict[str, Sequence[int]]:
        """Cut tables of trees and families of arrays at groups of whole members; see `group_ends`."""
        ends: dict[str, Sequence[int]] = {}
        for name, array in tensors.items():
            if is_table(array):
                ends[name] = tree_ends(array).tolist()
            elif name + ROWS in tensors:
                ends[name] = np.cumsum(tensors[name + ROWS]).tolist()
            elif name == SEEDS or "*" in name:
                ends[name] = range(1, len(array) + 1)
        return {
            name: group_ends(part_ends, tensors[name].nbytes // len(tensors[name]))
            for name, part_ends in ends.items()
            if len(tensors[name])
        }

    def unpickles(self, tensors: Mapping[str, Array]) -> bool:
        """Tell whether there is a skeleton with a pickle."""
        return SKELETON in tensors and is_pickle(tensors[SKELETON])

    def predict(self, model: Any, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return what the estimator's own ``predict`` returns, as MLflow's scikit-learn flavor does.

        Args:
            model: A fitted estimator.
            data: Whatever its ``predict`` takes.
            params: Not used, as in MLflow's flavor.

        Raises:
            AdapterError: The estimator has no ``predict``; a mere transformer, for example.
        """
        if not hasattr(model, "predict"):
            raise AdapterError(self.name, f"a {type(model).__name__} has no predict: load it and call it yourself")
        return model.predict(data)

    def requirements(self) -> list[str]:
        """Name what MLflow's scikit-learn flavor requires for a cloudpickled model."""
        return [f"{package}=={version(package)}" for package in ("scikit-learn", "cloudpickle")]

    def _take_apart(self, model: Any, graph: Graph) -> tuple[TakenParts, Array]:
        odd: set[int] = set()
        while True:
            parts = TakenParts(graph, odd)
            skeleton = dump_skeleton(self.name, model, parts.take_out)
            more_odd = {id(trees[i]) for _, trees in parts.trees.values() for i in odd_trees(trees)}
            if not more_odd:
                return parts, skeleton
            odd |= more_odd

    def _fill(self, original: Any, tensors: Mapping[str, Array]) -> None:
        graph = walk(original, RESERVED)
        parts, _ = self._take_apart(original, graph)
        self._check_names(parts, tensors)
        copies: list[tuple[Array, Array]] = []
        for name, live in parts.arrays.items():
            if name.startswith(UNNAMED):
                self._check_equal(name, live, tensors[name])
            elif not name.startswith(RANDOM):
                copies.append((live, tensors[name]))
        for name, members in parts.families.items():
            stored = list(split_family(self.name, tensors, name))
            if len(stored) != len(members):
                raise self._misfit(f"it has {len(members)} arrays {name!r} and {len(stored)} are stored")
            copies.extend(zip(members, stored, strict=True))
        grown: list[tuple[Any, Any]] = []
        for name, (shape, trees) in parts.trees.items():
            built = build_trees(self.name, tensors[name], shape)
            if len(built) != len(trees) or any(id(tree) not in graph.trees for tree in trees):
                raise self._misfit(f"it has {len(trees)} trees to fill and {len(built)} are stored")
            grown.extend(zip(trees, built, strict=True))
        for live, values in copies:
            if live.shape != values.shape or packed(live.dtype) != values.dtype or not live.flags.writeable:
                raise self._misfit(f"an array of shape {live.shape} cannot take one of shape {values.shape}")
            check_histogram_trees(self.name, values)
        for live, values in copies:
            live[...] = values
        for tree, new_tree in grown:
            for attributes, key in graph.trees[id(tree)]:
                attributes[key] = new_tree

    def _check_names(self, parts: TakenParts, tensors: Mapping[str, Array]) -> None:
        """Refuse tensors of another structure than the original's."""
        filled = {*parts.arrays, *parts.families, *parts.trees}
        stored = {name for name in tensors if name not in (SKELETON, SEEDS, STRINGS) and not name.endswith(ROWS)}
        differing = [name for name in sorted(filled ^ stored) if not name.startswith(RANDOM)]
        if differing:
            raise self._misfit(f"only one of the two has {', '.join(map(repr, differing[:5]))}")

    def _check_equal(self, name: str, live: Array, stored: Array) -> None:
        """Refuse a difference that cannot be filled in, since no attribute holds the array."""
        if live.dtype != stored.dtype or live.shape != stored.shape or live.tobytes() != stored.tobytes():
            raise self._misfit(f"{name!r} differs and is held by no attribute")

    def _misfit(self, reason: str) -> AdapterError:
        return AdapterError(self.name, f"the stored model does not fit the original: {reason}")
