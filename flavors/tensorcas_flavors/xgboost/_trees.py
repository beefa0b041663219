"""Trees of an XGBoost document as columns: one record per node, and one row per tree.

An XGBoost model (https://xgboost.readthedocs.io/en/stable/tutorials/saving_model.html, with a JSON schema) is a list of
trees, each an object of some sixteen short arrays, of which eleven have an item per node. A hundred trees are a
thousand arrays, and a step of boosting adds some at the end. The columns are

* ``trees``: a 1-d structured array, packed, with a record per node of all trees. Its fields are the arrays that have
  the same number of items per node in every tree, named as in XGBoost;
* ``trees/<name>``: each other array that is not empty everywhere (``categories``, ``leaf_weights``), joined;
* ``tree_table``: int32, a row per tree: number of nodes, then the length of each of the joined arrays, then those of
  its ``tree_param`` that differ between trees;
* ``tree_info`` and ``iteration_indptr``, unless every round of boosting added the same sequence of trees;
* ``weight_drop`` (dart) and ``weights`` (gblinear).

The rest stays in the document, and the **layout** tells how to put the columns back: the first tree with its arrays
emptied and its numbers blanked (``tree``), the fields and their number of items per node (``fields``), the joined
arrays (``ragged``), the differing parameters (``params``), and the ``tree_info`` of one round (``round``). Neither the
document nor the layout changes when trees are added. Derived numbers (``id``, ``num_nodes``, ``num_trees``) are assumed
to be regular: the caller compares the rebuilt document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

from tensorcas_flavors.xgboost._checks import (
    Frame,
    TreeArrays,
    booster_of,
    check_frame,
    check_trees,
    member,
    model_of,
    number,
)
from tensorcas_mlflow.adapter import Array
from tensorcas_mlflow.base.content_cuts import group_ends
from tensorcas_mlflow.base.ubjson import Encoded, Value, array_head, encoded_key, encoded_list_head, parse, write

TREES = "trees"
TABLE = "tree_table"
_MAX_TREE_BYTES = 4096


# A tree without its arrays takes 700 bytes. The bound limits a forged layout, which a million trees multiply.


def take_trees(document: Value) -> tuple[dict[str, Array], dict[str, Value]]:
    """Take the trees, or the weights of a linear model, out of a document, which this changes.

    Args:
        document: Result of `ubjson.parse`.

    Returns:
        The columns by name, and the layout.

    Raises:
        ValueError: The document has no trees of the known kind, or they differ too much among each other.
    """
    columns: dict[str, Array] = {}
    layout: dict[str, Value] = {}
    model = model_of(document)
    if "trees" in model and member(model, "trees", list):
        columns, layout = _columns(model["trees"])
        _take_rounds(model, columns, layout)
        member(model, "gbtree_model_param", dict)["num_trees"] = ""
        model["trees"] = []
    for owner, name in _weights(document):
        value = owner[name]
        if not (isinstance(value, np.ndarray) or all(isinstance(item, np.float32) for item in value)):
            raise ValueError(f"{name} holds other numbers than float32")
        columns[name] = np.asarray(value, dtype="<f4")
        owner[name] = value[:0]
    return columns, layout


def put_trees(document: Value, layout: Value, columns: Mapping[str, Array]) -> None:
    """Put columns back into a document, which this changes; the inverse of `take_trees`.

    Raises:
        ValueError: The parts do not fit together.
    """
    model = model_of(document)
    if layout:
        table = _checked_table(layout, columns)
        model["trees"] = _encoded_trees(layout, table, columns)
        model["tree_info"], model["iteration_indptr"] = _rounds(layout, len(table), columns)
        member(model, "gbtree_model_param", dict)["num_trees"] = str(len(table))
    for owner, name in _weights(document):
        column = _column(columns, name, np.dtype("<f4"))
        owner[name] = column if isinstance(owner[name], np.ndarray) else list(column)
    frame = check_frame(document, len(table) if layout else 0)
    if layout:
        _check(layout, table, columns, frame)


def tree_cuts(layout: Value, columns: Mapping[str, Array]) -> dict[str, list[int]]:
    """Return ends for chunks of the columns: ends of trees, which do not depend on the trees that follow.

    Raises:
        ValueError: The parts do not fit together.
    """
    if not layout:
        return {}
    table = _checked_table(layout, columns)
    names = [TREES, *(f"{TREES}/{name}" for name in layout["ragged"])]
    return {
        name: group_ends(np.cumsum(table[:, position]).tolist(), columns[name].itemsize, growth=160)
        for position, name in enumerate(names)
    }


def _weights(document: Value) -> Iterator[tuple[dict[str, Value], str]]:
    """Yield the objects that hold weights outside of trees, with the name of the member."""
    booster, model = booster_of(document), model_of(document)
    for owner, name in ((booster, "weight_drop"), (model, "weight_drop"), (model, "weights")):
        if isinstance(owner.get(name), list | np.ndarray):
            yield owner, name


def _int32(values: list[Any]) -> Array:
    if not {int}.issuperset(map(type, values)) or (values and not -(2**31) <= min(values) <= max(values) < 2**31):
        raise ValueError("a value of a tree is no whole number, or does not fit 32 bits")
    return np.array(values, dtype="<i4")


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _record(tree: Value, fields: Mapping[str, int]) -> np.dtype[Any]:
    """Return the packed dtype of a node's record, or raise ValueError."""
    members: list[Any] = []
    for name, width in fields.items():
        dtype = _little(member(tree, name, np.ndarray).dtype)
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
    tree_params = [member(tree, "tree_param", dict) for tree in trees]
    n_nodes = _int32([int(member(param, "num_nodes", str)) for param in tree_params])
    if n_nodes.min() < 1:
        raise ValueError("a tree has no nodes")

    fields: dict[str, int] = {}
    joined: dict[str, Array] = {}
    table = [n_nodes]
    for name in names:
        if not isinstance(first[name], np.ndarray):
            continue
        parts = [tree[name] for tree in trees]
        if not {np.ndarray}.issuperset(map(type, parts)):
            raise ValueError(f"{name} is not an array in every tree")
        lengths = _int32(list(map(len, parts)))
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
    table += [_int32([int(member(param, key, str)) for param in tree_params]) for key in params]

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
    """Return the table of the trees, as int64, after a check of the layout and all columns."""
    tree = member(layout, "tree", dict)
    member(tree, "tree_param", dict)
    fields = member(layout, "fields", dict)
    ragged = member(layout, "ragged", list)
    params = member(layout, "params", list)
    if not all(isinstance(name, str) for name in (*ragged, *params)):
        raise ValueError("a name in the layout is not text")
    if len({*fields, *ragged}) < len(fields) + len(ragged) or len({*params, "num_nodes"}) <= len(params):
        raise ValueError("a name in the layout occurs twice")
    if not tree["tree_param"].keys() >= {*params}:
        raise ValueError("the parameters of the trees are not those of the layout")
    if not all(type(width) is int and 0 < width < 2**20 for width in fields.values()):
        raise ValueError("a field has no sensible number of items")
    if any(isinstance(value, list | np.ndarray) and len(value) for value in tree.values()):
        raise ValueError("the arrays of a tree are in the layout")
    if len(write(tree)) > _MAX_TREE_BYTES:
        raise ValueError("a tree without its arrays is too large")
    table = columns.get(TABLE)
    if table is None or table.dtype != np.dtype("<i4") or table.ndim != 2:
        raise ValueError("there is no table of the trees")
    if len(table) == 0 or table.shape[1] != 1 + len(ragged) + len(params):
        raise ValueError("the table of the trees has another shape")
    wide = table.astype(np.int64)
    joined = [(TREES, _record(tree, fields))]
    joined += [(f"{TREES}/{name}", _little(member(tree, name, np.ndarray).dtype)) for name in ragged]
    for position, (name, dtype) in enumerate(joined):
        lengths = wide[:, position]
        if lengths.min() < 0 or lengths.sum() != len(_column(columns, name, dtype)):
            raise ValueError(f"column {name!r} has another length than in the table")
    if wide[:, 0].min() < 1:
        raise ValueError("a tree has no nodes")
    return wide


def _families(layout: Value, table: Array, columns: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Return the items of each array of the trees, and their number in each tree."""
    n_nodes, records = table[:, 0], columns[TREES]
    families = {name: (records[name].reshape(-1), n_nodes * width) for name, width in layout["fields"].items()}
    for position, name in enumerate(layout["ragged"], start=1):
        families[name] = (columns[f"{TREES}/{name}"], table[:, position])
    return families


def _check(layout: Value, table: Array, columns: Mapping[str, Array], frame: Frame) -> None:
    """Refuse trees that XGBoost must not read; see `check_trees`."""
    n_nodes = table[:, 0]
    params = layout["params"]
    constant = {key: number(text) for key, text in layout["tree"]["tree_param"].items() if text != ""}
    if (table[:, table.shape[1] - len(params) :] < 0).any():
        raise ValueError("a parameter of a tree is below zero")
    if "size_leaf_vector" in params:
        leaf_sizes = table[:, params.index("size_leaf_vector") - len(params)]
    else:
        leaf_sizes = np.full(len(table), constant.get("size_leaf_vector", 1))
    check_trees(TreeArrays(n_nodes=n_nodes, arrays=_families(layout, table, columns), leaf_sizes=leaf_sizes), frame)


def check_whole(raw: bytes) -> None:
    """Refuse a whole document that XGBoost must not read.

    Raises:
        ValueError: It is neither UBJSON nor JSON, or has other trees than are known, or trees that point anywhere.
    """
    document = _json(raw) if re.match(rb'\{\s*"', raw) else parse(raw)
    trees = model_of(document).get("trees", [])
    if not isinstance(trees, list):
        raise ValueError("the trees are no list")
    frame = check_frame(document, len(trees))
    for tree in trees:
        columns, layout = _columns([{**tree, **dict(_lists(tree))} if isinstance(tree, dict) else tree])
        _check(layout, _checked_table(layout, columns), columns, frame)


def _json(raw: bytes) -> Value:
    """Read a document in JSON, which XGBoost wrote before UBJSON, or raise ValueError."""

    def once(members: list[tuple[str, Value]]) -> dict[str, Value]:
        if len(dict(members)) < len(members):
            raise ValueError("a key occurs twice in one object")
        return dict(members)

    try:
        return json.loads(raw, object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError("the document is nested too deep") from error


def _lists(tree: dict[str, Value]) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a tree that are lists, as in JSON."""
    for name, value in tree.items():
        if isinstance(value, list):
            if not all(type(item) in (int, float, bool) or isinstance(item, np.number) for item in value):
                raise ValueError(f"{name!r} holds something else than numbers")
            yield name, np.array(value)


def _encoded_trees(layout: Value, table: Array, columns: Mapping[str, Array]) -> Encoded:
    """Cut the columns into trees, and encode them as `write` would encode the list of trees."""
    template = layout["tree"]
    families = _families(layout, table, columns)
    numbers = dict(zip(layout["params"], table.T[table.shape[1] - len(layout["params"]) :], strict=True))
    numbers["num_nodes"] = table[:, 0]
    # One entry for each piece that every tree has: its bytes in tree after tree.
    pieces: list[Iterable[bytes]] = [repeat(b"{")]
    for name, value in template.items():
        pieces.append(repeat(encoded_key(name)))
        if name == "id":
            pieces.append(map(write, range(len(table))))
        elif name == "tree_param":
            pieces.append(repeat(b"{"))
            for key, text in value.items():
                pieces += (repeat(encoded_key(key)), _texts(numbers[key]) if key in numbers else repeat(write(text)))
            pieces.append(repeat(b"}"))
        elif name in families:
            items, lengths = families[name]
            packed = items.astype(value.dtype.newbyteorder(">")).tobytes()
            ends = (np.cumsum(lengths) * value.dtype.itemsize).tolist()
            counts = lengths.astype(">i8").tobytes()
            pieces.append(repeat(array_head(value.dtype)))
            pieces.append([counts[start : start + 8] for start in range(0, len(counts), 8)])
            pieces.append([packed[start:end] for start, end in zip([0, *ends], ends, strict=False)])
        else:
            pieces.append(repeat(write(value)))
    pieces.append(repeat(b"}"))
    trees = islice(zip(*pieces, strict=False), len(table))
    return Encoded(encoded_list_head(len(table)) + b"".join(chain.from_iterable(trees)))


def _texts(numbers: Array) -> list[bytes]:
    """Encode numbers as text; most of them are equal."""
    encoded = {number: write(str(number)) for number in np.unique(numbers).tolist()}
    return [encoded[number] for number in numbers.tolist()]


def _take_rounds(model: dict[str, Value], columns: dict[str, Array], layout: dict[str, Value]) -> None:
    """Take out the round and output of each tree, as the pattern of one round if all rounds are alike."""
    info = member(model, "tree_info", list)
    ends = member(model, "iteration_indptr", list)
    columns["tree_info"], columns["iteration_indptr"] = _int32(info), _int32(ends)
    layout["round"] = info[: ends[1]] if len(ends) > 1 else []
    if layout["round"] and _rounds(layout, len(model["trees"]), {}) == (info, ends):
        del columns["tree_info"], columns["iteration_indptr"]
    else:
        layout["round"] = []
    model["tree_info"] = model["iteration_indptr"] = []


def _rounds(layout: Value, n_trees: int, columns: Mapping[str, Array]) -> tuple[list[int], list[int]]:
    """Return ``tree_info`` and ``iteration_indptr``."""
    pattern = member(layout, "round", list)
    if pattern:
        return pattern * (n_trees // len(pattern)), list(range(0, n_trees + 1, len(pattern)))
    info, ends = (_column(columns, name, np.dtype("<i4")) for name in ("tree_info", "iteration_indptr"))
    return info.tolist(), ends.tolist()
