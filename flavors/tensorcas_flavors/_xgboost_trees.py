"""The trees of an XGBoost document as columns: one record per node, and what cannot be derived per tree.

An XGBoost model (https://xgboost.readthedocs.io/en/stable/tutorials/saving_model.html, with a JSON schema) is a list of
trees, each an object of some sixteen short arrays, of which eleven have an item per node. A hundred trees are a
thousand arrays of which a step of boosting adds some at the end. Here they are

* ``trees``: a 1-d structured array, packed, with a record per node of all trees. Its fields are the arrays that have
  the same number of items per node in every tree, named as XGBoost names them;
* ``trees/<name>``: what is left of the arrays and not empty everywhere (``categories``, ``leaf_weights``), joined;
* ``tree_table``: int32, a row per tree: number of nodes, then the length of each of the joined arrays, then those of
  its ``tree_param`` that differ between trees;
* ``tree_info`` and ``iteration_indptr``, unless every round of boosting added the same sequence of trees;
* ``weight_drop`` (dart) and ``weights`` (gblinear).

The rest stays in the document, and the **layout** says how to put the columns back: the first tree with its arrays
emptied and its numbers blanked (``tree``), the fields and how many items each has per node (``fields``), the joined
arrays (``ragged``), the differing parameters (``params``), and the ``tree_info`` of one round (``round``). Neither the
document nor the layout changes when trees are added. Numbers that are derived (``id``, ``num_nodes``, ``num_trees``)
are assumed to be regular: whoever takes trees out compares what comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isqrt
from typing import Any

import numpy as np

from tensorcas_flavors._ubjson import Value, write
from tensorcas_mlflow.adapter import Array

TREES = "trees"
TABLE = "tree_table"
GROUP_BYTES = 4096
"""A chunk of records ends at the first end of a tree at which it has this many bytes, or more further on."""

_NO_PARENT = 2**31 - 1
"""What XGBoost writes as the parent of a root."""

_MAX_TREE_BYTES = 4096
# A tree without its arrays takes 700 bytes. The bound keeps a forged layout from being multiplied by a million trees.


def take_trees(document: Value) -> tuple[dict[str, Array], dict[str, Value]]:
    """Take the trees, or the weights of a linear model, out of a document, which is changed.

    Args:
        document: What `_ubjson.parse` makes of a model.

    Returns:
        The columns by name, and the layout.

    Raises:
        ValueError: The document has no trees of the known kind, or they differ too much among each other.
    """
    columns: dict[str, Array] = {}
    layout: dict[str, Value] = {}
    model = _model(document)
    if "trees" in model and _member(model, "trees", list):
        columns, layout = _columns(model["trees"])
        _take_rounds(model, columns, layout)
        _member(model, "gbtree_model_param", dict)["num_trees"] = ""
        model["trees"] = []
    for owner, name in _weights(document):
        value = owner[name]
        if not (isinstance(value, np.ndarray) or all(isinstance(item, np.float32) for item in value)):
            raise ValueError(f"{name} holds other numbers than float32")
        columns[name] = np.asarray(value, dtype="<f4")
        owner[name] = value[:0]
    return columns, layout


def put_trees(document: Value, layout: Value, columns: Mapping[str, Array]) -> None:
    """Put back what `take_trees` took out; the document is changed.

    Raises:
        ValueError: The parts do not fit together.
    """
    model = _model(document)
    if layout:
        table = _checked_table(layout, columns)
        model["trees"] = _trees(layout, table, columns)
        model["tree_info"], model["iteration_indptr"] = _rounds(layout, len(table), columns)
        _member(model, "gbtree_model_param", dict)["num_trees"] = str(len(table))
    for owner, name in _weights(document):
        column = _column(columns, name, np.dtype("<f4"))
        owner[name] = column if isinstance(owner[name], np.ndarray) else list(column)


def tree_cuts(layout: Value, columns: Mapping[str, Array]) -> dict[str, list[int]]:
    """Say where chunks of the columns should end: at ends of trees, the same ones whatever trees follow.

    Raises:
        ValueError: The parts do not fit together.
    """
    if not layout:
        return {}
    table = _checked_table(layout, columns)
    names = [TREES, *(f"{TREES}/{name}" for name in layout["ragged"])]
    return {
        name: _group_ends(np.cumsum(table[:, position]).tolist(), columns[name].itemsize)
        for position, name in enumerate(names)
    }


def _group_ends(tree_ends: list[int], record_bytes: int) -> list[int]:
    """Join consecutive trees into groups that are large enough, from the start on."""
    group_ends: list[int] = []
    start = 0
    for end in tree_ends:
        # Every step writes the last, unfinished group again, and names all finished groups in its manifest, in some 32
        # bytes each. The sum is least when groups grow with the root of what lies before them.
        if (end - start) * record_bytes >= max(GROUP_BYTES, isqrt(160 * start * record_bytes)):
            group_ends.append(end)
            start = end
    if start < tree_ends[-1]:
        group_ends.append(tree_ends[-1])
    return group_ends


def _member(owner: Value, key: str, kind: type) -> Any:
    """Return a member of an object, or raise ValueError if it is missing or of another kind."""
    value = owner.get(key) if isinstance(owner, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"there is no {kind.__name__} at {key!r}")
    return value


def _booster(document: Value) -> dict[str, Value]:
    booster: dict[str, Value] = _member(_member(document, "learner", dict), "gradient_booster", dict)
    return booster


def _model(document: Value) -> dict[str, Value]:
    booster = _booster(document)
    if "gbtree" in booster:  # dart is a gbtree and the weights of its trees
        booster = _member(booster, "gbtree", dict)
    model: dict[str, Value] = _member(booster, "model", dict)
    return model


def _weights(document: Value) -> Iterator[tuple[dict[str, Value], str]]:
    """Yield the objects that hold weights outside of trees, and under which name."""
    for owner, name in ((_booster(document), "weight_drop"), (_model(document), "weights")):
        if isinstance(owner.get(name), list | np.ndarray):
            yield owner, name


def _int32(values: list[Any]) -> Array:
    if not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        raise ValueError("what should be a number per tree is none, or does not fit 32 bits")
    return np.array(values, dtype="<i4")


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _record(tree: Value, fields: Mapping[str, int]) -> np.dtype[Any]:
    """Return the packed dtype of a node's record, or raise ValueError."""
    members: list[Any] = []
    for name, width in fields.items():
        dtype = _little(_member(tree, name, np.ndarray).dtype)
        members.append((name, dtype) if width == 1 else (name, dtype, (width,)))
    if not members:
        raise ValueError("the trees have no arrays of an item per node")
    return np.dtype(members)


def _columns(trees: list[Value]) -> tuple[dict[str, Array], dict[str, Value]]:
    """Join the arrays of all trees; see the head of this module."""
    first = trees[0]
    names = list(first) if isinstance(first, dict) else []
    if any(not isinstance(tree, dict) or list(tree) != names for tree in trees):
        raise ValueError("the trees have different members")
    tree_params = [_member(tree, "tree_param", dict) for tree in trees]
    n_nodes = _int32([int(_member(param, "num_nodes", str)) for param in tree_params])
    if n_nodes.min() < 1:
        raise ValueError("a tree has no nodes")

    fields: dict[str, int] = {}
    joined: dict[str, Array] = {}
    table = [n_nodes]
    for name in names:
        if not isinstance(first[name], np.ndarray):
            continue
        parts = [_member(tree, name, np.ndarray) for tree in trees]
        lengths = _int32([len(part) for part in parts])
        width = int(lengths[0] // n_nodes[0])
        if not lengths.any():
            continue
        joined[name] = np.concatenate(parts).astype(_little(first[name].dtype))
        if width and np.array_equal(lengths, n_nodes.astype(np.int64) * width):
            fields[name] = width
        else:
            table.append(lengths)
    ragged = [name for name in joined if name not in fields]
    params = [
        key for key in tree_params[0] if key != "num_nodes" and len({param.get(key) for param in tree_params}) > 1
    ]
    table += [_int32([int(_member(param, key, str)) for param in tree_params]) for key in params]

    records = np.empty(int(n_nodes.sum(dtype=np.int64)), dtype=_record(first, fields))
    for name in fields:
        records[name] = joined[name].reshape(records[name].shape)
    tree = {name: value[:0] if isinstance(value, np.ndarray) else value for name, value in first.items()}
    tree["id"] = None
    tree["tree_param"] = {key: "" if key in ("num_nodes", *params) else text for key, text in tree_params[0].items()}
    columns = {TREES: records, **{f"{TREES}/{name}": joined[name] for name in ragged}, TABLE: np.stack(table, axis=1)}
    return columns, {"tree": tree, "fields": fields, "ragged": ragged, "params": params}


def _column(columns: Mapping[str, Array], name: str, dtype: np.dtype[Any]) -> Array:
    """Return a 1-d column of that dtype, or raise ValueError."""
    column = columns.get(name)
    if column is None or column.ndim != 1 or column.dtype != dtype:
        raise ValueError(f"there is no column {name!r} of {dtype}")
    return column


def _checked_table(layout: Value, columns: Mapping[str, Array]) -> Array:
    """Return the table of the trees, as int64, after seeing that the layout and all columns fit it."""
    tree = _member(layout, "tree", dict)
    _member(tree, "tree_param", dict)
    fields = _member(layout, "fields", dict)
    ragged = _member(layout, "ragged", list)
    params = _member(layout, "params", list)
    if not all(isinstance(name, str) for name in (*ragged, *params)):
        raise ValueError("a name in the layout is not text")
    if not all(type(width) is int and 0 < width < 2**20 for width in fields.values()):
        raise ValueError("a field has no sensible number of items")
    if len(write(tree)) > _MAX_TREE_BYTES:
        raise ValueError("a tree without its arrays is too large")
    table = columns.get(TABLE)
    if table is None or table.dtype != np.dtype("<i4") or table.ndim != 2:
        raise ValueError("there is no table of the trees")
    if len(table) == 0 or table.shape[1] != 1 + len(ragged) + len(params):
        raise ValueError("the table of the trees has another shape")
    wide = table.astype(np.int64)
    joined = [(TREES, _record(tree, fields))]
    joined += [(f"{TREES}/{name}", _little(_member(tree, name, np.ndarray).dtype)) for name in ragged]
    for position, (name, dtype) in enumerate(joined):
        lengths = wide[:, position]
        if lengths.min() < 0 or lengths.sum() != len(_column(columns, name, dtype)):
            raise ValueError(f"column {name!r} has another length than the table says")
    _check_links(columns[TREES], wide[:, 0])
    return wide


def _check_links(records: Array, n_nodes: Array) -> None:
    """Refuse nodes that point out of their tree: XGBoost follows them unchecked."""
    size = np.repeat(n_nodes, n_nodes)
    for name in {"left_children", "right_children", "parents"}.intersection(records.dtype.names or ()):
        link = records[name].astype(np.int64)
        inside = (link >= -1) & (link < size)
        if name == "parents":
            inside |= link == _NO_PARENT
        if not inside.all():
            raise ValueError(f"the column {name!r} points out of its tree")


def _trees(layout: Value, table: Array, columns: Mapping[str, Array]) -> list[Value]:
    """Cut the columns into trees."""
    template = layout["tree"]
    rows = table.tolist()
    tree_param = dict(template["tree_param"])
    trees: list[Value] = [{**template, "id": number} for number in range(len(rows))]
    for tree, row in zip(trees, rows, strict=True):
        varying = row[len(row) - len(layout["params"]) :]
        numbers = {"num_nodes": row[0], **dict(zip(layout["params"], varying, strict=True))}
        tree["tree_param"] = {**tree_param, **{key: str(number) for key, number in numbers.items()}}
    # (name of the array, its items in all trees, where each tree's items end)
    families = [
        (name, columns[TREES][name].reshape(-1), table[:, 0] * width) for name, width in layout["fields"].items()
    ]
    families += [
        (name, columns[f"{TREES}/{name}"], table[:, position])
        for position, name in enumerate(layout["ragged"], start=1)
    ]
    for name, items, lengths in families:
        big_endian = items.astype(template[name].dtype)
        start = 0
        for tree, end in zip(trees, np.cumsum(lengths).tolist(), strict=True):
            tree[name] = big_endian[start:end]
            start = end
    return trees


def _take_rounds(model: dict[str, Value], columns: dict[str, Array], layout: dict[str, Value]) -> None:
    """Take out which tree belongs to which round and output, as the pattern of one round if all are alike."""
    info = _member(model, "tree_info", list)
    ends = _member(model, "iteration_indptr", list)
    columns["tree_info"], columns["iteration_indptr"] = _int32(info), _int32(ends)
    layout["round"] = info[: ends[1]] if len(ends) > 1 else []
    if layout["round"] and _rounds(layout, len(model["trees"]), {}) == (info, ends):
        del columns["tree_info"], columns["iteration_indptr"]
    else:
        layout["round"] = []
    model["tree_info"] = model["iteration_indptr"] = []


def _rounds(layout: Value, n_trees: int, columns: Mapping[str, Array]) -> tuple[list[int], list[int]]:
    """Return ``tree_info`` and ``iteration_indptr``."""
    pattern = _member(layout, "round", list)
    if pattern:
        return pattern * (n_trees // len(pattern)), list(range(0, n_trees + 1, len(pattern)))
    info, ends = (_column(columns, name, np.dtype("<i4")) for name in ("tree_info", "iteration_indptr"))
    return info.tolist(), ends.tolist()
