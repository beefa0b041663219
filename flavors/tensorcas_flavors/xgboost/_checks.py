"""Checks of the parts of a model that XGBoost follows unchecked: links between nodes, indices, and sizes.

XGBoost's reader checks that a document has the right members and that most arrays have the right length. It does not
check the targets of children, features, categories and outputs, and reads or writes there. Nor does it check that trees
are trees: it walks a circle for ever. These checks run on everything from a store before XGBoost sees it. They also run
at a save, so that a model is refused while it still exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.ubjson import Value

_NO_PARENT = 2**31 - 1
"""Parent of a root as XGBoost writes it; in a tree with vector leaves it is -1."""
_MAX_DEPTH = 10_000


# XGBoost recurses into a tree on the stacks of its threads.

_MAX_CATEGORY = 2**24


# XGBoost's own bound in training. A node's categories are a bit set as long as the largest of them.

_MAX_BIT_SET_BYTES = 2**30
_MAX_UNTOLD_OUTPUTS = 2**16


# Documents before 3.1 have one base score, which XGBoost repeats for each output.

_PER_NODE = (
    "left_children",
    "right_children",
    "parents",
    "split_indices",
    "split_conditions",
    "default_left",
    "loss_changes",
    "sum_hessian",
    "split_type",
)
_LINKS = _PER_NODE[:4]
_CATEGORIES = ("categories_nodes", "categories_segments", "categories_sizes", "categories")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArrays:
    """Arrays of some trees, each joined over the trees."""

    n_nodes: Array
    """Number of nodes of each tree, int64, none below 1."""
    arrays: Mapping[str, tuple[Array, Array]]
    """By XGBoost's name: the items of all trees, and their number in each tree, int64. An array that is empty in all
    trees is left out."""
    leaf_sizes: Array
    """Number of outputs of a leaf in each tree, int64; XGBoost takes 0 for 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Sizes that a document states for all its trees."""

    n_features: int
    n_outputs: int


def member(owner: Value, key: str, kind: type | UnionType) -> Any:
    """Return a member of an object, or raise ValueError if it is missing or of another kind."""
    value = owner.get(key) if isinstance(owner, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"there is no {getattr(kind, '__name__', 'array')} at {key!r}")
    return value


def booster_of(document: Value) -> dict[str, Value]:
    """Return the part of a document that a gradient booster writes, or raise ValueError."""
    booster: dict[str, Value] = member(member(document, "learner", dict), "gradient_booster", dict)
    return booster


def model_of(document: Value) -> dict[str, Value]:
    """Return the part of a document that holds the trees or the weights of features, or raise ValueError."""
    booster = booster_of(document)
    if "gbtree" in booster:  # dart is a gbtree and the weights of its trees
        booster = member(booster, "gbtree", dict)
    model: dict[str, Value] = member(booster, "model", dict)
    return model


def number(text: Value) -> int:
    """Read a count that XGBoost wrote as text, or raise ValueError if it may read it differently."""
    if not isinstance(text, str) or not re.fullmatch("0|[1-9][0-9]{0,9}", text):
        raise ValueError(f"{text!r:.40} is not a count")
    return int(text)


def check_frame(document: Value, n_trees: int) -> Frame:
    """Check all of a document but its trees.

    Args:
        document: With trees or without.
        n_trees: Number of trees.

    Raises:
        ValueError: XGBoost must not read this document.
    """
    learner = member(document, "learner", dict)
    parameters = member(learner, "learner_model_param", dict)
    n_outputs = max(1, number(parameters.get("num_class")), number(parameters.get("num_target", "1")))
    if n_outputs > max(_MAX_UNTOLD_OUTPUTS, len(member(parameters, "base_score", str))):
        raise ValueError(f"there are {n_outputs} outputs, and no base score for them")
    frame = Frame(n_features=number(parameters.get("num_feature")), n_outputs=n_outputs)
    booster, model = booster_of(document), model_of(document)
    name = member(booster, "name", str)
    if name == "gblinear":
        n_weights = len(member(model, "weights", np.ndarray | list))
        if n_weights != (frame.n_features + 1) * n_outputs and (n_weights or model.get("boosted_rounds", 0)):
            raise ValueError(f"there are {n_weights} weights for {frame.n_features} features")
        return frame
    if name not in ("gbtree", "dart") or (name == "dart") != ("gbtree" in booster):
        raise ValueError(f"the booster is no {name!r:.40}")
    weights = [owner["weight_drop"] for owner in (booster, model) if "weight_drop" in owner]
    if (name == "dart" and not weights) or any(not isinstance(w, list) or len(w) != n_trees for w in weights):
        raise ValueError("there is not one weight per tree")
    outputs = _whole(model, "tree_info")
    if len(outputs) != n_trees or not ((outputs >= 0) & (outputs < n_outputs)).all():
        raise ValueError("a tree belongs to an output that the model does not have")
    ends = _whole(model, "iteration_indptr") if "iteration_indptr" in model else np.array([0, n_trees])  # before 1.7
    if not len(ends) or ends[0] != 0 or ends[-1] != n_trees or (np.diff(ends) < 0).any():
        raise ValueError("the rounds of boosting do not cover the trees")
    if "cats" in model:
        _check_category_names(model["cats"], frame.n_features)
    return frame


def check_trees(trees: TreeArrays, frame: Frame) -> None:
    """Check the insides of trees.

    Raises:
        ValueError: XGBoost must not read such trees.
    """
    for name in _PER_NODE:
        if name in trees.arrays and not np.array_equal(trees.arrays[name][1], trees.n_nodes):
            raise ValueError(f"there is not one item of {name!r} per node")
    if not all(name in trees.arrays and trees.arrays[name][0].dtype.kind == "i" for name in _LINKS):
        raise ValueError("nodes of trees are not linked")
    if not np.isin(trees.leaf_sizes, (0, 1, frame.n_outputs)).all():
        raise ValueError("leaves have another number of outputs than the model")
    sizes = np.repeat(trees.n_nodes, trees.n_nodes)
    roots = np.cumsum(trees.n_nodes) - trees.n_nodes
    starts = np.repeat(roots, trees.n_nodes)
    left, right, parents, features = (trees.arrays[name][0].astype(np.int64) for name in _LINKS)
    _check_parents(parents, sizes, roots)
    inner = np.flatnonzero(left != -1)
    left, right = left[inner], right[inner]
    if not ((left > 0) & (left < sizes[inner] - 1) & (right == left + 1)).all():
        raise ValueError("a node points out of its tree, or its children are not side by side")
    children = starts[inner] + left
    if not ((parents[children] == inner - starts[inner]) & (parents[children + 1] == inner - starts[inner])).all():
        raise ValueError("a node is the child of another than its parent")
    if not ((features[inner] >= 0) & (features[inner] < frame.n_features)).all():
        raise ValueError("a node asks for a feature that the model does not have")
    _check_depth(roots, inner, children, len(sizes))
    _check_vector_leaves(trees)
    _check_categories(trees)


def _check_parents(parents: Array, sizes: Array, roots: Array) -> None:
    inside = (parents >= 0) & (parents < sizes)
    inside[roots] = np.isin(parents[roots], (-1, _NO_PARENT))
    if not inside.all():
        raise ValueError("a node points out of its tree to a parent")


def _check_depth(roots: Array, inner: Array, children: Array, n_nodes: int) -> None:
    """Refuse trees that are too deep. Every node has one parent, so the walk meets no node twice, and ends."""
    left = np.zeros(n_nodes, dtype=np.int64)
    left[inner] = children
    level = roots
    for _ in range(_MAX_DEPTH):
        level = left[level]
        level = level[level > 0]  # no child is the first of all nodes
        if not len(level):
            return
        level = np.concatenate((level, level + 1))
    raise ValueError(f"a tree is deeper than {_MAX_DEPTH} levels")


def _check_vector_leaves(trees: TreeArrays) -> None:
    is_vector = trees.leaf_sizes > 1
    if not is_vector.any():
        return
    sizes = trees.leaf_sizes
    empty = (np.empty(0, dtype=np.int64), np.zeros_like(trees.n_nodes))
    n_weights, n_leaf_weights = (trees.arrays.get(name, empty)[1] for name in ("base_weights", "leaf_weights"))
    if not _leaves_have_weights_of_their_own():
        if (n_weights != trees.n_nodes * sizes)[is_vector].any():
            raise ValueError("a node has too few weights, or too many")
        return
    if not {"loss_changes", "sum_hessian"} <= trees.arrays.keys():
        raise ValueError("trees with vector leaves are of a release before 3.2, which later ones cannot read")
    if ((n_weights < trees.n_nodes) | (n_weights % trees.n_nodes > 0))[is_vector].any():
        raise ValueError("a node has too few weights, or too many")
    left, right = (trees.arrays[name][0].astype(np.int64) for name in ("left_children", "right_children"))
    is_leaf = np.repeat(is_vector, trees.n_nodes) & (left == -1)
    rows, limits = right[is_leaf], np.repeat(n_leaf_weights // np.maximum(sizes, 1), trees.n_nodes)[is_leaf]
    if not ((rows >= 0) & (rows < limits)).all():
        raise ValueError("a leaf asks for weights that its tree does not have")


def _leaves_have_weights_of_their_own() -> bool:
    """Tell whether the installed XGBoost reads, unchecked, the weights of vector leaves that it writes since 3.2."""
    import xgboost

    return tuple(int(part) for part in xgboost.__version__.split(".")[:2]) >= (3, 2)


def _check_categories(trees: TreeArrays) -> None:
    """Check that exactly the nodes that split by category have categories, and that these are in range."""
    if "split_type" not in trees.arrays:
        return
    kinds = trees.arrays["split_type"][0]
    if (kinds > 1).any():
        raise ValueError("a node splits neither by number nor by category")
    none = (np.empty(0, dtype=np.int64), np.zeros_like(trees.n_nodes))
    (nodes, n_nodes), (firsts, n_firsts), (counts, n_counts), (values, n_values) = (
        trees.arrays.get(name, none) for name in _CATEGORIES
    )
    if not (np.array_equal(n_nodes, n_firsts) and np.array_equal(n_nodes, n_counts)):
        raise ValueError("nodes that split by category are counted differently")
    starts = np.repeat(np.cumsum(trees.n_nodes) - trees.n_nodes, n_nodes)
    if not np.array_equal(starts + nodes.astype(np.int64), np.flatnonzero(kinds)):
        raise ValueError("nodes that split by category have no categories, or others have")
    firsts, counts = firsts.astype(np.int64), counts.astype(np.int64)
    limits = np.repeat(n_values, n_nodes)
    if not ((firsts >= 0) & (counts > 0) & (counts <= limits) & (firsts <= limits - counts)).all():
        raise ValueError("a node asks for categories that its tree does not have")
    if len(values) and not (values.min() >= 0 and values.max() < _MAX_CATEGORY):
        raise ValueError("a category is not one that XGBoost has")
    firsts = firsts + np.repeat(np.cumsum(n_values) - n_values, n_nodes)
    spans = np.stack((firsts, firsts + counts), axis=1).reshape(-1)
    if (
        len(spans)
        and (np.maximum.reduceat(np.append(values, 0), spans)[::2].astype(np.int64) // 8).sum() > _MAX_BIT_SET_BYTES
    ):
        raise ValueError("the categories take too much memory")


def _check_category_names(cats: Value, n_features: int) -> None:
    """Check the names of categories, which XGBoost stores since 3.1."""
    columns = member(cats, "enc", list)
    sizes = [_n_categories(column) for column in columns]
    if len(columns) not in (0, n_features):
        raise ValueError("there are categories of features that the model does not have")
    ends = _whole(cats, "feature_segments")
    if len(ends) and not np.array_equal(ends, np.cumsum([0, *sizes])):
        raise ValueError("categories are counted differently")
    if not len(ends) and any(sizes):
        raise ValueError("categories are not counted")
    order = _whole(cats, "sorted_idx")
    if len(order) != sum(sizes):
        raise ValueError("the categories are not in order")
    for start, size in zip(np.cumsum([0, *sizes]).tolist(), sizes, strict=False):
        if not np.array_equal(np.sort(order[start : start + size]), np.arange(size)):
            raise ValueError("the categories are not in order")


def _n_categories(column: Value) -> int:
    """Return the number of categories of a feature, or raise ValueError if their names overlap."""
    if not isinstance(column, dict):
        raise ValueError("there is no object for the categories of a feature")
    values = _whole(column, "values")
    if "offsets" not in column:
        return len(values)
    offsets = _whole(column, "offsets")
    if len(offsets) and (offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any()):
        raise ValueError("the name of a category ends before it begins")
    return max(0, len(offsets) - 1)


def _whole(owner: Value, key: str) -> Array:
    """Return a member with whole numbers, or raise ValueError."""
    value: Array | list[Value] = member(owner, key, np.ndarray | list)
    if isinstance(value, list):
        if not all(type(item) is int or isinstance(item, np.integer) for item in value):
            raise ValueError(f"{key!r} holds something else than whole numbers")
        try:
            return np.array(value, dtype=np.int64)
        except OverflowError as error:
            raise ValueError(f"{key!r} holds a number that is too large") from error
    if value.dtype.kind not in "iu":
        raise ValueError(f"{key!r} holds something else than whole numbers")
    return value.astype(np.int64)
