"""Trees of scikit-learn as rows of one table, and back.

The trees of one shape lie one after the other in a 1-d packed structured array with a record per node: the fields of
scikit-learn's own node, without its padding, and the node's ``value``. Nothing else is stored, because the rest follows
from the records: nodes come after their parents, so a tree ends where it has one leaf more than inner nodes.
`odd_trees` names trees that are not like that (pruned by hand, say); the pickle keeps those.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.errors import AdapterError

_NO_CHILD = -1
_COUNT = "n_node_samples"
_WEIGHT = "weighted_n_node_samples"


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Properties that trees must have in common to share a table."""

    n_features: int
    """Number of columns of the data; every split is on one of them."""
    n_classes: tuple[int, ...]
    """Number of classes of each output; 1 for a regression."""


def is_tree(part: object) -> bool:
    """Tell whether an object is a `sklearn.tree._tree.Tree`, without importing scikit-learn."""
    return type(part).__name__ == "Tree" and type(part).__module__ == "sklearn.tree._tree"


def tree_shape(tree: Any) -> TreeShape:
    """Return the shape of a tree."""
    return TreeShape(int(tree.n_features), tuple(int(n) for n in tree.n_classes))


def odd_trees(trees: Sequence[Any]) -> set[int]:
    """Return the positions of the trees that cannot be rebuilt from their records alone."""
    states = {i: tree.__getstate__() for i, tree in enumerate(trees)}
    whole = {i: state for i, state in states.items() if 0 < state["node_count"] == len(state["nodes"])}
    broken = _broken(*_children(whole.values()))
    whole = {i: state for (i, state), is_broken in zip(whole.items(), broken, strict=True) if not is_broken}
    depths = _depths(*_children(whole.values()))
    whole = {i: state for (i, state), depth in zip(whole.items(), depths, strict=True) if state["max_depth"] == depth}
    return states.keys() - whole.keys()


def read_trees(trees: Sequence[Any]) -> Array:
    """Return the table of some trees of one shape, in the given order.

    Args:
        trees: At least one tree; none of them odd.
    """
    states = [tree.__getstate__() for tree in trees]
    nodes = np.concatenate([state["nodes"] for state in states])
    values = np.concatenate([state["values"] for state in states])
    is_unweighted = (nodes[_WEIGHT] == nodes[_COUNT]).all()
    names = [name for name in nodes.dtype.names or () if not (is_unweighted and name == _WEIGHT)]
    fields = [(name, nodes.dtype[name]) for name in names]
    table = np.empty(len(nodes), dtype=[*fields, ("value", values.dtype, values.shape[1:])])
    for name in names:
        table[name] = nodes[name]
    table["value"] = values
    return table


def build_trees(adapter: str, table: Array, shape: TreeShape) -> list[Any]:
    """Build the trees of a table; the inverse of `read_trees`.

    Args:
        adapter: The adapter's name, for errors.
        table: Result of `read_trees`; it is not trusted, since scikit-learn follows children unchecked.
        shape: The shape of all its trees.

    Raises:
        AdapterError: The table holds no such trees, or nodes of this scikit-learn have other fields.
    """
    from sklearn.tree._tree import NODE_DTYPE, Tree

    stored = table.dtype.names or ()
    source = {name: _COUNT if name == _WEIGHT and name not in stored else name for name in NODE_DTYPE.names}
    expected = {*source.values(), "value"}
    found = set(stored)
    if found != expected:
        differing = ", ".join(sorted(found ^ expected))
        raise AdapterError(adapter, f"stored trees and the installed scikit-learn differ in node fields: {differing}")
    value_shape = (len(shape.n_classes), max(shape.n_classes, default=0))
    kinds_differ = any(table.dtype[name].kind != NODE_DTYPE[name].kind for name in found - {"value"})
    if table.ndim != 1 or kinds_differ or table.dtype["value"] != np.dtype((np.float64, value_shape)):
        raise AdapterError(adapter, f"the stored trees are not of nodes with {value_shape} values each")
    left, right, feature = (table[name].astype(np.int64) for name in ("left_child", "right_child", "feature"))
    ends = tree_ends(table)
    sizes = np.diff(ends, prepend=0)
    if sizes.sum() != len(table) or _broken(left, right, sizes).any():
        raise AdapterError(adapter, "the stored nodes do not form trees")
    is_inner = left != _NO_CHILD
    if ((feature < 0) | (feature >= shape.n_features))[is_inner].any():
        raise AdapterError(adapter, f"a stored tree splits on a feature outside the model's {shape.n_features}")

    nodes = np.zeros(len(table), dtype=NODE_DTYPE)
    for name in NODE_DTYPE.names:
        nodes[name] = table[source[name]]
    values = np.ascontiguousarray(table["value"])
    depths = _depths(left, right, sizes)
    n_classes = np.array(shape.n_classes, dtype=np.intp)
    trees = []
    for end, size, depth in zip(ends.tolist(), sizes.tolist(), depths.tolist(), strict=True):
        tree = Tree(shape.n_features, n_classes, len(n_classes))
        rows = slice(end - size, end)
        tree.__setstate__({"max_depth": depth, "node_count": size, "nodes": nodes[rows], "values": values[rows]})
        trees.append(tree)
    return trees


def is_table(array: Array) -> bool:
    """Tell whether an array is a table of `read_trees`."""
    return array.ndim == 1 and {"left_child", "right_child", "value"} <= set(array.dtype.names or ())


def tree_ends(table: Array) -> Array:
    """Return one past the last row of every whole tree of a table."""
    surplus = np.cumsum(np.where(table["left_child"] == _NO_CHILD, 1, -1))
    highest = np.maximum.accumulate(surplus, dtype=np.int64)
    is_end = (surplus > 0) & (np.diff(highest, prepend=0) > 0)
    ends: Array = np.flatnonzero(is_end) + 1
    return ends


def _children(states: Collection[dict[str, Any]]) -> tuple[Array, Array, Array]:
    """Return left children, right children and sizes of trees from their states."""
    empty = np.zeros(0, dtype=np.int64)
    left = np.concatenate([empty, *(state["nodes"]["left_child"] for state in states)])
    right = np.concatenate([empty, *(state["nodes"]["right_child"] for state in states)])
    return left, right, np.array([len(state["nodes"]) for state in states], dtype=np.int64)


def _broken(left: Array, right: Array, sizes: Array) -> Array:
    """Tell of each tree whether it is no binary tree, or has a node before its parent."""
    if not len(sizes):
        return np.zeros(0, dtype=bool)
    starts = np.cumsum(sizes) - sizes
    size = np.repeat(sizes, sizes)
    start = np.repeat(starts, sizes)
    own = np.arange(len(left)) - start
    is_leaf = (left == _NO_CHILD) & (right == _NO_CHILD)
    is_inner = (left > own) & (left < size) & (right > own) & (right < size)
    children = np.concatenate([(left + start)[is_inner], (right + start)[is_inner]])
    n_parents = np.bincount(children, minlength=len(left))
    is_bad = ~(is_leaf | is_inner) | (n_parents != (own != 0))
    broken: Array = np.logical_or.reduceat(is_bad, starts)
    return broken


def _depths(left: Array, right: Array, sizes: Array) -> Array:
    """Return the depth of the deepest node of each tree; none of them is broken."""
    starts = np.cumsum(sizes) - sizes
    start = np.repeat(starts, sizes)
    depth = np.zeros(len(left), dtype=np.int64)
    level = starts
    n_above = 0
    while len(level):
        depth[level] = n_above
        inner = level[left[level] != _NO_CHILD]
        level = np.concatenate([left[inner], right[inner]]) + np.tile(start[inner], 2)
        n_above += 1
    deepest: Array = np.maximum.reduceat(depth, starts) if len(starts) else depth
    return deepest
