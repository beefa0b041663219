"""Checks of arrays that compiled code of scikit-learn and SciPy follows unchecked.

A damaged index there reads or writes outside of an array. Python code indexes with stored arrays too, but numpy checks
those indices. `_trees` checks the trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tensorcas_flavors.sklearn._walk import PER_STAGE, SPACE_ARRAYS, SpaceTree, is_ensemble, is_space_tree
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

ValueOf = Callable[[Any], Any]
Check = Callable[[Any, ValueOf], str | None]
_N_CATEGORIES = 256
_WORDS_PER_BITSET = 8
_PATH_LENGTHS = ("_decision_path_lengths", "_average_path_length_per_tree")
_SUPPORT_VECTORS = ("support_", "support_vectors_", "_dual_coef_", "dual_coef_")


def check_objects(adapter: str, objects: Iterable[Any], value_of: ValueOf = lambda array: array) -> None:
    """Refuse a model whose arrays would lead compiled code out of bounds.

    Args:
        adapter: The adapter's name, for errors.
        objects: The model's objects that have attributes, and its k-d trees and ball trees.
        value_of: Returns the array that is to replace an array that one of them holds.

    Raises:
        AdapterError: No fit of the class can have made an array.
    """
    for part in objects:
        for find in _checks_of(part):
            try:
                reason = find(part, value_of)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # The sizes do not fit together at all.
                reason = str(error)
            if reason:
                raise AdapterError(adapter, f"the stored arrays of a {type(part).__name__} are damaged: {reason}")


def resizable(objects: Iterable[Any]) -> set[int]:
    """Return the ids of arrays whose length may differ from fit to fit, and which `check_objects` checks."""
    ids: set[int] = set()
    for part in objects:
        if type(part).__name__ == "TreePredictor":
            ids.update(map(id, vars(part).values()))
        elif _fault_of_support_vectors in _checks_of(part):
            ids.update(id(vars(part)[name]) for name in _SUPPORT_VECTORS)
        elif is_ensemble(part):
            ids.update(id(vars(part)[name]) for name in PER_STAGE & vars(part).keys())
            ids.update(id(array) for name in _PATH_LENGTHS for array in vars(part).get(name, ()))
    return ids


def _checks_of(part: Any) -> list[Check]:
    if is_space_tree(part):
        return [_fault_of_space_tree]
    keys = _CHECKS.keys() & vars(part).keys()
    if not keys:
        return []
    # Other classes may use the same names for something else.
    modules = [base.__module__ for base in type(part).__mro__]
    return [check for key in keys for module, check in [_CHECKS[key]] if any(m.startswith(module) for m in modules)]


def _fault_of_histogram_trees(part: Any, value_of: ValueOf) -> str | None:
    bins = part._bin_mapper
    is_categorical = value_of(bins.is_categorical_) != 0
    for feature in np.flatnonzero(is_categorical):
        categories = value_of(bins.bin_thresholds_[feature])
        if not ((categories >= 0) & (categories < _N_CATEGORIES)).all():
            return "a category is out of range"
    if not (value_of(bins.n_bins_non_missing_) < bins.n_bins).all():
        return "a feature has more bins than there are"
    for predictor in (predictor for stage in part._predictors for predictor in stage):
        bitsets = [value_of(predictor.raw_left_cat_bitsets), value_of(predictor.binned_left_cat_bitsets)]
        reason = _fault_of_nodes(value_of(predictor.nodes), is_categorical, bitsets)
        if reason:
            return reason
    return None


def _fault_of_nodes(nodes: Array, is_categorical: Array, bitsets: list[Array]) -> str | None:
    inner = np.flatnonzero(nodes["is_leaf"] == 0)
    # Children come after their parents, so every path ends at a leaf.
    for side in ("left", "right"):
        child = nodes[side][inner].astype(np.int64)
        if not len(nodes) or ((child <= inner) | (child >= len(nodes))).any():
            return "its nodes do not form trees"
    feature = nodes["feature_idx"][inner].astype(np.int64)
    if ((feature < 0) | (feature >= len(is_categorical))).any():
        return f"a tree splits on a feature outside the model's {len(is_categorical)}"
    by_category = nodes["is_categorical"][inner] != 0
    bitset = nodes["bitset_idx"][inner][by_category].astype(np.int64)
    if not is_categorical[feature[by_category]].all():
        return "a tree splits a feature by category that has no categories"
    if any(rows.shape[1:] != (_WORDS_PER_BITSET,) or (bitset >= len(rows)).any() for rows in bitsets):
        return "a tree splits by a set of categories that does not exist"
    return None


def _fault_of_space_tree(tree: Any, value_of: ValueOf) -> str | None:
    state = SpaceTree(tree)
    names = ("data", "idx_array", "node_data", "node_bounds")
    points, order, nodes, bounds = (value_of(state[SPACE_ARRAYS[name]]) for name in names)
    if len(order) != len(points) or bounds.shape[1:] != (len(nodes), points.shape[1]):
        return "its sizes differ"
    if ((order < 0) | (order >= len(points))).any():
        return "it names points that do not exist"
    start, end, is_leaf = nodes["idx_start"], nodes["idx_end"], nodes["is_leaf"] != 0
    level = np.zeros(1, dtype=np.int64)
    if not len(nodes) or start[0] != 0 or end[0] != len(points):
        return "its root does not hold all points"
    while len(level):
        inner = level[~is_leaf[level]]
        left, right = 2 * inner + 1, 2 * inner + 2
        if (right >= len(nodes)).any():
            return "its nodes do not form a tree"
        ends_differ = (start[left] != start[inner]) | (end[left] != start[right]) | (end[right] != end[inner])
        # A node of negative length would let its sibling hold more points than there are.
        if (ends_differ | (start[left] > end[left]) | (start[right] > end[right])).any():
            return "its nodes do not divide their parents' points"
        level = np.concatenate([left, right])
    return None


def _fault_of_sparse(part: Any, value_of: ValueOf) -> str | None:
    if part.format not in ("csr", "csc", "bsr"):
        return None
    starts, indices, data = (value_of(array) for array in (part.indptr, part.indices, part.data))
    block_rows, block_columns = part.blocksize if part.format == "bsr" else (1, 1)
    n_major, n_minor = part.shape[::-1] if part.format == "csc" else part.shape
    n_major, n_minor = n_major // block_rows, n_minor // block_columns
    if len(starts) != n_major + 1 or starts[0] != 0 or (np.diff(starts) < 0).any():
        return "its rows do not follow each other"
    if starts[-1] > min(len(indices), len(data)):
        return "its rows are longer than its data"
    stored = indices[: starts[-1]]
    if ((stored < 0) | (stored >= n_minor)).any():
        return "an index is out of range"
    return None


def _fault_of_coordinates(part: Any, value_of: ValueOf) -> str | None:
    for coordinate, size in zip(part.coords, part.shape, strict=True):
        values = value_of(coordinate)
        if ((values < 0) | (values >= size)).any():
            return "an index is out of range"
    return None


def _fault_of_support_vectors(part: Any, value_of: ValueOf) -> str | None:
    counts, support = value_of(part._n_support), value_of(part.support_)
    live, vectors, live_weights = part.support_vectors_, value_of(part.support_vectors_), part._dual_coef_
    weights = value_of(live_weights)
    is_classifier = part._impl in ("c_svc", "nu_svc")
    # Other kinds leave half of the counts uninitialized, and count the vectors.
    if is_classifier and ((counts < 0).any() or counts.sum(dtype=np.int64) != len(support)):
        return "the counts of support vectors do not add up"
    if ((support < 0) | (support >= part.shape_fit_[0])).any():
        return "a support vector is none of the fitted points"
    if vectors.shape[1:] != live.shape[1:] or weights.shape[:-1] != live_weights.shape[:-1]:
        return "the support vectors have other features or classes"
    if len(support) != weights.shape[-1] or vectors.shape[0] not in (0, len(support)):
        return "there are not as many support vectors as weights of them"
    return None


def _fault_of_labels(part: Any, value_of: ValueOf) -> str | None:
    """Return a fault of the labels of neighbours, which index a row of class scores."""
    labels = value_of(part._y)
    if "classes_" not in vars(part) or not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu":
        return None
    classes = part.classes_ if isinstance(part.classes_, list) else [part.classes_]
    columns = labels.T if labels.ndim == 2 else [labels]
    for column, known in zip(columns, classes, strict=False):
        if ((column < 0) | (column >= len(known))).any():
            return "a point has a class that does not exist"
    return None


def _fault_of_hierarchy(part: Any, value_of: ValueOf) -> str | None:
    merges = value_of(part._single_linkage_tree_)
    for side in ("left_node", "right_node"):
        if ((merges[side] < 0) | (merges[side] > 2 * len(merges))).any():
            return "it merges clusters that do not exist"
    return None


def _fault_of_categories(part: Any, value_of: ValueOf) -> str | None:
    """Return a fault of the order of categories: a search that ends behind the last one yields a column too many."""
    for live in part.categories_ if isinstance(part.categories_, list) else ():
        known = value_of(live)
        if known.dtype.kind in "fiu" and not (np.diff(known[~np.isnan(known)]) > 0).all():
            return "its categories are not in order"
    return None


_CHECKS: dict[str, tuple[str, Check]] = {
    "_predictors": ("sklearn.ensemble._hist", _fault_of_histogram_trees),
    "indptr": ("scipy.sparse", _fault_of_sparse),
    "coords": ("scipy.sparse", _fault_of_coordinates),
    "_n_support": ("sklearn.svm", _fault_of_support_vectors),
    "_y": ("sklearn.neighbors", _fault_of_labels),
    "_single_linkage_tree_": ("sklearn.cluster", _fault_of_hierarchy),
    "categories_": ("sklearn.preprocessing", _fault_of_categories),
}
