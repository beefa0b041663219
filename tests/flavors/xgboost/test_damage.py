"""A damaged or forged model is refused, and never reaches the unchecked reads of XGBoost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st
from xgboost import Booster

from tensorcas_flavors.xgboost import XGBoostAdapter
from tensorcas_mlflow.adapter import SKELETON, Array
from tensorcas_mlflow.base.ubjson import parse, write
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.xgboost.models import model

pytestmark = pytest.mark.long

ADAPTER = XGBoostAdapter()
ROOT = Path(__file__).parents[3]
KINDS = ("hist", "partitioned categories", "vector leaves", "dart", "gblinear", "frame")


def taken(kind: str) -> dict[str, Array]:
    return {name: np.array(array) for name, array in ADAPTER.extract(model(kind)).items()}


def forged(tensors: dict[str, Array], change: Callable[[Any], object]) -> dict[str, Array]:
    """Change the skeleton of some tensors."""
    skeleton = parse(tensors[SKELETON].tobytes())
    change(skeleton)
    return {**tensors, SKELETON: np.frombuffer(write(skeleton), np.uint8)}


def learner(skeleton: Any) -> Any:
    return skeleton["document"]["learner"]


def whole(tensors: dict[str, Array], raw: bytes) -> dict[str, Array]:
    return {"booster": np.frombuffer(raw, np.uint8), SKELETON: tensors[SKELETON]}


def first_leaf(records: Array) -> int:
    return int(np.flatnonzero(records["left_children"] == -1)[0])


def point_to_itself(trees: Array) -> None:
    trees["left_children"][1], trees["right_children"][1] = 1, 2


def share_a_child(trees: Array) -> None:
    trees["left_children"][2], trees["right_children"][2] = trees["left_children"][1], trees["right_children"][1]


def ask_for(feature: int) -> Callable[[Array], None]:
    def change(trees: Array) -> None:
        trees["split_indices"][0] = feature

    return change


def root_has_parent(trees: Array) -> None:
    trees["parents"][0] = 3


def no_parent(trees: Array) -> None:
    trees["parents"][3] = 2**31 - 1


def children_apart(trees: Array) -> None:
    trees["right_children"][0] = 3


NODES = {
    "a node that is its own child": point_to_itself,
    "two parents of a child": share_a_child,
    "a feature too many": ask_for(6),
    "a feature below zero": ask_for(-1),
    "a root with a parent": root_has_parent,
    "a node without parent": no_parent,
    "children that are not side by side": children_apart,
}


@pytest.mark.parametrize("fault", NODES)
@pytest.mark.parametrize("stored", ["in columns", "whole"])
def test_nodes_that_lead_xgboost_out_of_bounds_are_refused(fault: str, stored: str) -> None:
    tensors = taken("hist")
    NODES[fault](tensors["trees"])
    if stored == "whole":
        document = parse(bytes(model("hist").save_raw("ubj")))
        trees = document["learner"]["gradient_booster"]["model"]["trees"]
        n_nodes = len(trees[0]["parents"])
        for name in ("left_children", "right_children", "parents", "split_indices"):
            trees[0][name] = tensors["trees"][name][:n_nodes]
        tensors = whole(tensors, write(document))

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trees/categories", 2**24),
        ("trees/categories", -1),
        ("trees/categories_nodes", 99),
        ("trees/categories_segments", 10_000),
        ("trees/categories_segments", -1),
        ("trees/categories_sizes", 2**62),
        ("trees/categories_sizes", 0),
    ],
)
def test_categories_that_a_tree_does_not_have_are_refused(name: str, value: int) -> None:
    tensors = taken("partitioned categories")
    tensors[name][0] = value

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


def test_a_split_by_category_without_categories_is_refused() -> None:
    tensors = taken("partitioned categories")
    kinds = tensors["trees"]["split_type"]
    kinds[np.flatnonzero(kinds)[0]] = 0

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


def test_a_leaf_that_points_to_weights_of_another_tree_is_refused() -> None:
    tensors = taken("vector leaves")
    tensors["trees"]["right_children"][first_leaf(tensors["trees"])] = 40

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("missing", ["loss_changes", "sum_hessian", "leaf_weights", "base_weights"])
def test_vector_leaves_that_lack_a_member_are_refused(missing: str) -> None:
    document = parse(bytes(model("vector leaves").save_raw("ubj")))
    for tree in document["learner"]["gradient_booster"]["model"]["trees"]:
        del tree[missing]

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(whole(taken("hist"), write(document)))


FRAMES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a weight too few": ("dart", lambda s: s["document"]["learner"]["gradient_booster"].pop("weight_drop")),
    "another booster": ("hist", lambda s: learner(s)["gradient_booster"].update(name="dart")),
    "an unknown booster": ("hist", lambda s: learner(s)["gradient_booster"].update(name="x")),
    "fewer features": ("gblinear", lambda s: learner(s)["learner_model_param"].update(num_feature="3")),
    "more outputs": ("gblinear", lambda s: learner(s)["learner_model_param"].update(num_class="3")),
    "outputs without end": ("hist", lambda s: learner(s)["learner_model_param"].update(num_class="2147483647")),
    "a number that is none": ("hist", lambda s: learner(s)["learner_model_param"].update(num_feature="0x6")),
    "leaves of another size": ("vector leaves", lambda s: learner(s)["learner_model_param"].update(num_target="2")),
    "an output too many": ("hist", lambda s: s["layout"].update(round=[1])),
    "arrays in the layout": ("hist", lambda s: s["layout"]["tree"].update(categories=np.ones(3, "i4"))),
    "categories out of order": (
        "frame",
        lambda s: learner(s)["gradient_booster"]["model"]["cats"].update(sorted_idx=np.full(41, 7, "i4")),
    ),
    "categories without end": (
        "frame",
        lambda s: learner(s)["gradient_booster"]["model"]["cats"]["enc"][2].update(offsets=np.array([0, 99], "i4")),
    ),
}


@pytest.mark.parametrize("fault", FRAMES)
def test_a_document_that_does_not_fit_its_trees_is_refused(fault: str) -> None:
    kind, change = FRAMES[fault]
    tensors = taken(kind)

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(forged(tensors, change))


def test_a_tree_as_deep_as_it_has_nodes_is_refused() -> None:
    n_levels = 20_000
    tensors = taken("hist")
    trees = np.zeros(2 * n_levels + 1, dtype=tensors["trees"].dtype)
    trees["left_children"][0:-1:2], trees["right_children"][0:-1:2] = (
        np.arange(1, 2 * n_levels, 2),
        np.arange(2, 2 * n_levels + 1, 2),
    )
    trees["left_children"][1::2] = trees["right_children"][1::2] = trees["left_children"][-1] = -1
    trees["parents"][1:] = np.repeat(np.arange(0, 2 * n_levels, 2), 2)
    trees["parents"][0] = 2**31 - 1
    tensors |= {"trees": trees, "tree_table": np.array([[len(trees)]], "<i4")}

    with pytest.raises(AdapterError, match="deeper"):
        ADAPTER.reconstruct(tensors)


@pytest.mark.parametrize("config", ["[" * 100_000, "\udcff", "null", ""])
def test_a_damaged_configuration_is_refused(config: str) -> None:
    tensors = forged(taken("hist"), lambda skeleton: skeleton.update(config=config))

    with pytest.raises(AdapterError):
        ADAPTER.reconstruct(tensors)


def empty_configuration(skeleton: Any) -> None:
    skeleton["config"] = json.dumps({**json.loads(skeleton["config"]), "learner": {}})


def test_a_whole_document_must_be_readable_here() -> None:
    tensors = taken("hist")

    for raw in (
        b"",
        b"{",
        b"{}",
        b'{"learner": 1}',
        b'{"a":1,"a":1}',
        b"{L" + bytes(9),
        b"[" * 50_000,
        b'{"a":' * 50_000,
    ):
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(whole(tensors, raw))


def test_an_unreadable_booster_leaves_the_live_one_unchanged() -> None:
    tensors = taken("hist")
    original = model("dart").copy()
    before = bytes(original.save_raw("ubj"))
    handle = original.handle

    for change in (
        lambda s: learner(s)["objective"].update(name="of:another:world"),
        empty_configuration,
        lambda s: s.update(state={"x": {}}),
    ):
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(forged(tensors, change), original)

    assert bytes(original.save_raw("ubj")) == before
    assert original.handle is handle


@pytest.mark.parametrize("name", ["", "Other", "DMatrix"])
def test_a_class_that_cannot_be_made_is_refused(name: str) -> None:
    with pytest.raises(AdapterError, match="can be made"):
        ADAPTER.reconstruct(forged(taken("hist"), lambda skeleton: skeleton.update({"class": name})))


def test_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device"):
        ADAPTER.reconstruct(taken("hist"), device="cpu")


def mutate(tensors: dict[str, Array], data: st.DataObject) -> dict[str, Array]:
    """Overwrite, cut or double some bytes of some tensors."""
    damaged = dict(tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(tensors)))
        array = damaged[name]
        raw = bytearray(array.tobytes())
        if not raw:
            continue
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + 4] = data.draw(
            st.sampled_from([b"\0", b"\x01\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"~"])
        )
        width = array.dtype.itemsize
        flat = np.frombuffer(bytes(raw[: len(raw) // width * width]), array.dtype)
        row = int(np.prod(array.shape[1:], dtype=int))
        damaged[name] = flat[: len(flat) // row * row].reshape(-1, *array.shape[1:])
    return damaged


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40)
def test_damaged_tensors_are_refused_or_make_a_model(kind: str, data: st.DataObject) -> None:
    tensors = mutate(taken(kind), data)
    asked: list[Callable[[], object]] = [
        lambda: ADAPTER.cuts(tensors),
        lambda: ADAPTER.unpickles(tensors),
        lambda: ADAPTER.weights(tensors),
    ]
    for ask in asked:
        try:
            ask()
        except AdapterError:
            continue
    try:
        made = ADAPTER.reconstruct(tensors)
    except AdapterError:
        return

    assert isinstance(made, Booster | xgboost.XGBModel)


def test_claimed_sizes_reserve_no_memory() -> None:
    tensors = taken("hist")
    tensors["tree_table"][:] = 2**31 - 1
    tracemalloc.start()
    for change in (
        lambda s: s["layout"]["fields"].update(left_children=2**19),
        lambda s: s["layout"].update(round=[0] * 1000),
        lambda s: s,
    ):
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct(forged(tensors, change))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 2**21


WALK = """
import json, sys
import numpy as np, xgboost
from tests.flavors.xgboost.test_damage import ADAPTER, AdapterError, KINDS, taken
from tests.flavors.xgboost.models import MODELS, booster_answers
xgboost.set_config(verbosity=0)
rng = np.random.default_rng(0)
values = np.array([-(2**31), -1, 0, 1, 2, 6, 7, 255, 2**24, 2**31 - 1])
n_loaded = n_refused = 0
for kind in KINDS[:4]:
    data = MODELS[kind][1]()
    for _ in range(25):
        tensors = taken(kind)
        name = rng.choice(["trees", *sorted(n for n in tensors if n[:2] != "__")])
        array = tensors[name]
        if array.dtype.names:
            array = array[rng.choice(array.dtype.names)]
        array.flat[rng.integers(array.size)] = np.array(rng.choice(values)).astype(array.dtype)
        try:
            booster = ADAPTER.reconstruct(tensors)
        except AdapterError:
            n_refused += 1
            continue
        n_loaded += 1
        try:
            booster_answers(booster, data)
        except xgboost.core.XGBoostError:
            pass
print(json.dumps([n_loaded, n_refused]))
"""


def test_a_model_that_passes_the_checks_does_not_crash_the_process() -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "flavors")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WALK],
        check=False,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )

    assert done.returncode == 0, done.stderr[-2000:].decode()
    assert min(json.loads(done.stdout.splitlines()[-1])) > 8
