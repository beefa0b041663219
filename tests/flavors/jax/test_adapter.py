"""States of JAX: every leaf that is an array is a row, and comes back to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcas_flavors._facts import read_tail, with_tail
from tensorcas_flavors.jax import JaxAdapter
from tensorcas_mlflow.adapter import SKELETON, Array, adapter_for
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.jax.states import (
    X,
    assert_same,
    jax,
    jnp,
    linen_state,
    nnx,
    nnx_state,
    train_linen,
    train_nnx,
)

ADAPTER = JaxAdapter()
P = jax.sharding.PartitionSpec


def mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


def over_two(array: Any, *axes: str | None) -> Any:
    return jax.device_put(array, jax.sharding.NamedSharding(mesh(), P(*axes)))


def taken(state: Any) -> dict[str, Array]:
    """Take a state apart, and copy what the store would read back."""
    return {name: np.array(row, order="C") for name, row in ADAPTER.extract(state).items()}


def plain_state(seed: int = 0) -> dict[str, Any]:
    key = jax.random.key(seed)
    with jax.enable_x64(True):
        wide = jnp.arange(3, dtype=jnp.int64) + (1 << 40) + seed
    return {
        "params": {
            "layer.0": {"w": jax.random.normal(key, (3, 4)), "b": jnp.full(4, seed, jnp.bfloat16)},
            "none": None,
        },
        "small": [jnp.full(3, seed, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "int4", "bool", "complex64")],
        "keys": (key, jax.random.split(jax.random.key(seed, impl="rbg"), 2), jax.random.PRNGKey(seed)),
        "wide": wide,
        "weak": jnp.asarray(seed + 0.5),
        "empty": jnp.zeros((0, 4)),
        "counter": np.arange(seed, seed + 3),
        "step": seed,
        "note": "text",
        "rate": np.float32(seed),
    }


# --- taking apart and rebuilding


@pytest.mark.long
def test_a_nest_comes_back_to_the_bit_and_needs_no_pickle() -> None:
    state = plain_state(3)
    rows = taken(state)
    back = ADAPTER.reconstruct(rows)

    assert not ADAPTER.unpickles(rows)
    assert list(back) == list(state)
    assert back["params"]["none"] is None
    assert_same(back, state)


def test_rows_have_the_dtypes_and_shapes_of_the_arrays_under_their_paths() -> None:
    rows = taken(plain_state())

    assert rows["params.layer.0.w"].dtype == np.float32
    assert rows["params.layer.0.b"].dtype == jnp.bfloat16
    assert rows["small.0"].dtype == jnp.float8_e4m3fn
    assert rows["wide"].dtype == np.int64
    assert rows["keys.0"].dtype == np.uint32
    assert rows["empty"].shape == (0, 4)


@pytest.mark.long
def test_the_adapter_takes_trees_with_arrays_of_jax_and_nothing_else() -> None:
    import torch

    assert adapter_for(plain_state()).name == "jax"
    assert adapter_for(nnx_state(0)["model"]).name == "jax"
    assert adapter_for(jnp.zeros(3)).name == "jax"
    assert adapter_for({"w": np.zeros(3)}).name == "generic"
    assert adapter_for({"w": torch.zeros(3), "x": jnp.zeros(3)}).name == "pytorch"


def test_two_keys_that_give_one_path_have_two_names() -> None:
    state = {"a": {"b": jnp.zeros(2)}, "a.b": jnp.ones(2)}
    rows = taken(state)

    assert set(rows) == {"a.b", "a%2Eb", SKELETON}
    assert ADAPTER.reconstruct(taken({"b": jnp.ones(1), 1: 2}))[1] == 2
    assert_same(ADAPTER.reconstruct(rows, original={"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}), state)
    with pytest.raises(AdapterError, match="rename a key"):
        ADAPTER.extract({1: jnp.zeros(1), "1": jnp.zeros(1)})


def test_an_array_on_two_devices_is_assembled() -> None:
    whole = jnp.arange(16.0).reshape(4, 4)
    state = {"rows": over_two(whole, "data"), "columns": over_two(whole, None, "data"), "copies": over_two(whole)}
    rows = taken(state)

    for name in state:
        assert np.array_equal(rows[name], whole)
        assert state[name]._npy_value is None, "a copy stays with the array"


def test_arrays_inside_of_other_objects_are_rows_too() -> None:
    class Box:
        def __init__(self, array: Any) -> None:
            self.array = array

    rows = taken({"w": jnp.zeros(2), "box": Box(jnp.ones(3, jnp.bfloat16))})
    back = ADAPTER.reconstruct(rows)

    assert rows["__array__/0"].dtype == jnp.bfloat16
    assert np.array_equal(back["box"].array, jnp.ones(3))
    with pytest.raises(AdapterError, match="stored as a pickle alone"):
        ADAPTER.reconstruct(rows, original={"w": jnp.zeros(2), "box": Box(jnp.ones(3))})
    kept = ADAPTER.reconstruct(rows, original={"w": jnp.ones(2), "box": None}, strict=False)
    assert kept["box"] is None


class Agent:
    def __init__(self, seed: int) -> None:
        self.params = {"w": jnp.full((3, 4), seed, jnp.bfloat16)}
        self.key, self.scale, self.seed = jax.random.key(seed), jnp.asarray(0.5), seed
        self.shared = [self.params["w"]]


@pytest.mark.long
def test_arrays_in_attributes_of_any_object_are_rows() -> None:
    adapter, agent = adapter_for(Agent(1)), Agent(2)
    rows = {name: np.array(row) for name, row in adapter.extract(agent).items()}
    back = adapter.reconstruct(rows)

    assert adapter.name == "generic"
    assert rows["params.w"].dtype == jnp.bfloat16
    assert_same(vars(back), vars(agent))
    assert back.shared[0] is back.params["w"]
    assert any(line.startswith("jax==") for line in adapter.requirements(rows))
    with pytest.raises(AdapterError, match="cannot be changed in place"):
        adapter.reconstruct(rows, original=Agent(1))


def test_a_deleted_array_and_a_tracer_are_refused() -> None:
    array = jnp.zeros(3)
    array.delete()

    with pytest.raises(AdapterError, match="'w' is deleted, probably donated"):
        ADAPTER.extract({"w": array})
    with pytest.raises(AdapterError, match="outside of jit"):
        jax.eval_shape(lambda x: ADAPTER.extract({"w": x}) and x, jnp.zeros(3))


def test_weights_are_arrays_of_jax_by_name() -> None:
    rows = taken(plain_state(1))
    weights = ADAPTER.weights(
        {"params.layer.0.b": rows["params.layer.0.b"], "keys.0": rows["keys.0"], SKELETON: rows[SKELETON]}
    )

    assert set(weights) == {"params.layer.0.b", "keys.0"}
    assert weights["keys.0"] == jax.random.key(1)
    assert isinstance(ADAPTER.weights({"x": np.zeros(3)})["x"], jax.Array)
    with pytest.raises(AdapterError, match="no arrays of <U1"):
        ADAPTER.weights({"x": np.array(["a"])})


READ: list[int] = []


class Hostile:
    """Unpickling it shows."""

    def __reduce__(self) -> Any:
        return make_hostile, ()


def make_hostile() -> Hostile:
    READ.append(1)
    return Hostile()


def test_weights_and_filling_read_no_pickle() -> None:
    rows = taken({"w": jnp.ones(2), "other": Hostile()})
    READ.clear()
    ADAPTER.weights(rows)
    ADAPTER.reconstruct(rows, original={"w": jnp.zeros(2), "other": None}, strict=False)

    assert ADAPTER.unpickles(rows)
    assert READ == []
    ADAPTER.reconstruct(rows)
    assert READ == [1]


# --- filling


def test_a_filled_nest_is_the_stored_one_and_the_dict_itself_is_filled() -> None:
    state, into = plain_state(3), plain_state(0)
    params = into["params"]
    back = ADAPTER.reconstruct(taken(state), original=into)

    assert back is into
    assert_same(into, state)
    assert_same(params, plain_state(0)["params"])


@pytest.mark.long
def test_a_filled_array_has_the_sharding_of_the_one_in_its_place() -> None:
    rows = taken({"w": jnp.arange(8.0), "k": jax.random.split(jax.random.key(0), 4), "on": jnp.ones(2)})
    two = jax.sharding.NamedSharding(mesh(), P("data"))
    into = {
        "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=two),
        "k": jax.device_put(jax.random.split(jax.random.key(9), 4), two),
        "on": jax.device_put(jnp.zeros(2), jax.devices()[1]),
    }
    back = ADAPTER.reconstruct(rows, original=into)

    assert back["w"].sharding == two
    assert back["k"].sharding == two
    assert back["on"].devices() == {jax.devices()[1]}
    assert not ADAPTER.reconstruct(rows, original={"w": jnp.zeros(8)})["w"].committed
    assert np.array_equal(back["w"], np.arange(8))
    assert np.array_equal(jax.random.key_data(back["k"]), rows["k"])


def test_a_state_with_donated_arrays_can_be_filled() -> None:
    into = {"w": jnp.zeros(3)}
    rows = taken({"w": jnp.arange(3.0)})
    into["w"].delete()

    assert np.array_equal(ADAPTER.reconstruct(rows, original=into)["w"], [0, 1, 2])


@pytest.mark.parametrize(
    ("into", "reason"),
    [
        ({"w": jnp.zeros(3, jnp.bfloat16), "n": 0}, r"'w' is bfloat16\[3\] in it, and float32\[3\] is stored"),
        ({"w": jnp.zeros(4), "n": 0}, r"'w' is float32\[4\] in it"),
        ({"w": jnp.zeros(3), "n": 0, "more": 1}, "it has 'more', not stored"),
        ({"w": {"x": jnp.zeros(3)}, "n": 0}, "it has 'w.x', not stored"),
        ({"w": jnp.zeros(3), "n": None}, "'n' is None in it, and the plain value 1 is stored"),
        ({"w": 0.0, "n": 0}, r"'w' is 0.0 in it, and float32\[3\] is stored"),
        ({"w": jnp.zeros(3), "n": jnp.zeros(2, jnp.int32)}, "and the plain value 1 is stored"),
        ([jnp.zeros(3), 0], "it has '0', '1', not stored"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_stays_as_it_was(into: Any, reason: str) -> None:
    rows = taken({"w": jnp.ones(3), "n": 1})
    before = list(into.items()) if isinstance(into, dict) else list(into)

    with pytest.raises(AdapterError, match=reason):
        ADAPTER.reconstruct(rows, original=into)
    assert (list(into.items()) if isinstance(into, dict) else into) == before


def test_keys_of_another_generator_are_refused() -> None:
    with pytest.raises(AdapterError, match=r"'k' is key<rbg>\[\] in it, and key<fry>\[\] is stored"):
        ADAPTER.reconstruct(taken({"k": jax.random.key(0)}), original={"k": jax.random.key(0, impl="rbg")})


def test_entries_that_the_dict_does_not_name_are_left_out_and_inner_ones_are_not() -> None:
    rows = taken({"params": {"a": jnp.ones(2), "b": jnp.ones(2)}, "ema": jnp.ones(2)})

    assert set(ADAPTER.reconstruct(rows, original={"ema": jnp.zeros(2)})) == {"ema"}
    with pytest.raises(AdapterError, match=r"it lacks 'params\.b', stored"):
        ADAPTER.reconstruct(rows, original={"params": {"a": jnp.zeros(2)}})
    assert ADAPTER.reconstruct(rows, original={"params": {"a": jnp.zeros(2)}}, strict=False)["params"]["a"][0] == 1


def test_leaves_that_are_not_stored_stay_with_strict_false() -> None:
    rows = taken({"body": jnp.ones(2), "old": jnp.ones(3)})
    into = {"body": jnp.zeros(2), "head": jnp.full(4, 7.0)}

    back = ADAPTER.reconstruct(rows, original=dict(into), strict=False)
    assert_same(back, {"body": jnp.ones(2), "head": into["head"]})
    with pytest.raises(AdapterError, match="it has 'head', not stored"):
        ADAPTER.reconstruct(rows, original={**into, "head": jax.ShapeDtypeStruct((4,), jnp.float32)}, strict=False)
    with pytest.raises(AdapterError, match="it has 'head', not stored"):
        ADAPTER.reconstruct(rows, original={"head": into["head"]}, strict=False)


def test_a_counter_may_be_a_number_before_the_first_step_and_an_array_after_it() -> None:
    number, array = {"w": jnp.ones(1), "step": 0}, {"w": jnp.ones(1), "step": jnp.asarray(7)}

    assert ADAPTER.reconstruct(taken(array), original=dict(number))["step"].weak_type
    assert ADAPTER.reconstruct(taken(number), original=dict(array))["step"] == 0
    with pytest.raises(AdapterError, match=r"'step' is 0\.5 in it"):
        ADAPTER.reconstruct(taken(array), original={"w": jnp.ones(1), "step": 0.5})


# --- Flax and Optax


@pytest.mark.long
def test_a_train_state_of_linen_resumes_to_the_bit() -> None:
    state = train_linen(train_linen(linen_state(0), X), X)
    rows = taken(state)
    resumed = ADAPTER.reconstruct(rows, original=linen_state(5))
    rebuilt = ADAPTER.reconstruct(rows)

    assert "params.Dense_0.kernel" in rows
    assert "opt_state.1.0.mu.Dense_0.kernel" in rows
    assert_same(resumed, state)
    assert_same(rebuilt, state)
    assert resumed.tx is state.tx
    assert_same(train_linen(resumed, X), train_linen(state, X))


@pytest.mark.long
def test_modules_and_optimizers_of_nnx_resume_in_place_and_to_the_bit() -> None:
    live, into = nnx_state(0), nnx_state(5)
    for _ in range(2):
        train_nnx(**live, x=X)
    rows = taken(live)
    model = into["model"]
    ADAPTER.reconstruct(rows, original=into)
    rebuilt = ADAPTER.reconstruct(rows)

    assert "model.first.kernel" in rows
    assert into["model"] is model
    assert model.tied is model.first.kernel
    assert rebuilt["model"].tied is rebuilt["model"].first.kernel
    for state in (into, rebuilt):
        assert_same(state, live)
    train_nnx(**live, x=X)
    for state in (into, rebuilt):
        train_nnx(**state, x=X)
        assert_same(state, live)


def test_a_module_of_shapes_alone_is_filled() -> None:
    model = nnx_state(0)["model"]
    shapes = nnx.eval_shape(lambda: nnx_state(0)["model"])
    ADAPTER.reconstruct(taken(model), original=shapes)

    assert_same(shapes, model)


def test_attributes_of_a_module_must_be_the_stored_ones_but_for_its_mode() -> None:
    model, into = nnx_state(0)["model"], nnx_state(1)["model"]
    model.eval()
    rows = taken(model)
    into.epoch = 3

    with pytest.raises(AdapterError, match="'epoch' is no leaf, and is 3 in it and 0 as stored"):
        ADAPTER.reconstruct(rows, original=into)
    ADAPTER.reconstruct(rows, original=into, strict=False)
    assert into.epoch == 3
    assert not into.drop.deterministic
    assert np.array_equal(into.first.kernel[...], model.first.kernel[...])


def test_a_tied_weight_with_two_stored_values_is_refused() -> None:
    rows = taken(nnx_state(0)["model"])
    rows["tied"] = rows["tied"] + 1
    into = nnx_state(1)["model"]
    before = np.array(into.first.kernel[...])

    with pytest.raises(AdapterError, match=r"'first\.kernel' and 'tied' are one object"):
        ADAPTER.reconstruct(rows, original=into)
    assert np.array_equal(into.first.kernel[...], before)


def test_a_large_state_is_read_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorcas_flavors.jax import _fill

    state = {str(i): jnp.full(100, i) for i in range(6)}
    rows = taken(state)
    asked: list[list[str]] = []

    def read(names: list[str]) -> dict[str, Array]:
        asked.append(list(names))
        return {name: rows[name] for name in names}

    monkeypatch.setattr(_fill, "_GROUP_BYTES", 900)
    stored = {name: _fill.RowFacts.of(name, row) for name, row in rows.items()}
    into = {str(i): jnp.zeros(100, jnp.int32) for i in range(6)}
    assert_same(ADAPTER.fill(into, stored, read, check=None), state)
    assert asked == [[SKELETON], ["0", "1"], ["2", "3"], ["4", "5"]]


def test_a_failed_read_changes_nothing() -> None:
    rows = taken(nnx_state(0))
    into = nnx_state(5)
    before = {name: np.array(row) for name, row in taken(into).items()}
    from tensorcas_flavors.jax._fill import RowFacts

    def read(names: list[str]) -> dict[str, Array]:
        if "optimizer.step" in names:
            raise OSError("the disk is gone")
        return {name: rows[name] for name in names}

    stored = {name: RowFacts.of(name, row) for name, row in rows.items()}
    with pytest.raises(OSError, match="the disk is gone"):
        ADAPTER.fill(into, stored, read, check=None)
    after = taken(into)
    assert all(np.array_equal(after[name], before[name]) for name in before)


# --- skeletons of earlier releases, and hostile ones


def golden_state() -> dict[str, Any]:
    return {
        "params": {"layer.0": {"w": jnp.arange(6.0).reshape(2, 3)}, 1: jnp.zeros((0, 2), jnp.int32)},
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 2)),
        "weak": jnp.asarray(0.5),
        "counter": np.arange(3),
        "plain": [1, 2.5, True, None, "text", b"bytes", 1 << 70, float("inf"), np.float32(3)],
    }


def test_a_state_of_the_first_release_is_read() -> None:
    """Written by ``np.savez("jax_v1.npz", **JaxAdapter().extract(golden_state()))``, once and for all."""
    with np.load(Path(__file__).with_name("jax_v1.npz")) as file:
        rows = dict(file)

    back, state = ADAPTER.reconstruct(rows), golden_state()
    assert list(back) == list(state)
    assert_same(list(back["params"].values()), list(state["params"].values()))
    for name in ("keys", "weak", "counter", "plain"):
        assert_same(back[name], state[name])
    filled = ADAPTER.reconstruct(rows, original=golden_state())
    assert_same(filled["plain"], state["plain"])


def test_a_forged_skeleton_is_refused() -> None:
    rows = taken({"w": jnp.ones(2), "k": jax.random.key(0), "n": 1})
    facts = read_tail("jax", rows[SKELETON])
    forged: list[Any] = [
        None,
        [],
        facts | {"version": 2},
        facts | {"rows": {"gone": None}},
        facts | {"rows": {"w": {"kind": "other"}}},
        facts | {"rows": {"w": {"kind": "key", "impl": "no such generator"}, "k": None}},
        facts | {"rows": {"w": None, "k": {"kind": "key", "impl": "rbg"}}},
        facts | {"rows": {"w": {"weak": 3}}},
        facts | {"values": {"w": 1}},
        facts | {"tree": {"d": [["w", "gone"]]}},
        facts | {"tree": {"x": []}},
        facts | {"tree": 3},
        facts | {"values": {"n": {"i": "zz"}}},
    ]
    deep: Any = "w"
    for _ in range(3000):
        deep = [deep]
    for each in forged:
        skeleton = with_tail(np.empty(0, np.uint8), each)
        with pytest.raises(AdapterError):
            ADAPTER.reconstruct({**rows, SKELETON: skeleton})
    text = json.dumps(facts | {"tree": "@"}).replace('"@"', "[" * 3000 + "]" * 3000).encode()
    tail = text + len(text).to_bytes(8, "little") + b"TCFACT1\n"
    with pytest.raises(AdapterError):
        ADAPTER.reconstruct({**rows, SKELETON: np.frombuffer(tail, np.uint8)})
    with pytest.raises(AdapterError, match="'w' is missing"):
        ADAPTER.reconstruct({name: row for name, row in rows.items() if name != "w"})
