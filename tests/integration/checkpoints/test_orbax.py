"""Orbax saves and restores steps of a run through the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import orbax.checkpoint as ocp
import pytest
from mlflow.exceptions import MlflowException

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.errors import MalformedFileError
from tensorcas_mlflow.orbax import TensorCasHandler, TensorCasRestore, TensorCasSave
from tests.flavors.jax.states import (
    X,
    assert_same,
    jax,
    jnp,
    linen_state,
    nnx,
    nnx_state,
    optax,
    train_linen,
    train_nnx,
)


@pytest.fixture
def run_id(cas_experiment: str) -> str:
    return str(mlflow.MlflowClient().create_run(cas_experiment).info.run_id)


@pytest.mark.long
def test_a_manager_saves_steps_of_the_run_and_restores_them_to_the_bit(run_id: str, tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, step_prefix="step")
    handler = TensorCasHandler(run_id=run_id, keep=tensorcas.Keep(last=2))
    state, states = linen_state(0), {}
    with ocp.CheckpointManager(tmp_path / "orbax", item_handlers=handler, options=options) as manager:
        for step in range(3):
            state = states[step] = train_linen(state, X)
            manager.save(step, args=TensorCasSave(state))
        manager.wait_until_finished()
        kept = [record.step for record in tensorcas.list_checkpoints(run_id)]
        described = manager.item_metadata(2)

        assert manager.all_steps() == kept == [1, 2]
        assert handler.info is not None
        assert handler.info.new_bytes is not None
        assert described["params.Dense_0.kernel"].shape == (4, 3)
        assert_same(manager.restore(2, args=TensorCasRestore(linen_state(5))), state)
    # A program that only restores needs no handler: Orbax finds it by the arguments.
    with ocp.CheckpointManager(tmp_path / "orbax", options=options) as manager:
        shapes = jax.eval_shape(lambda: linen_state(5))
        assert_same(manager.restore(1, args=TensorCasRestore(shapes)), states[1])
    assert_same(tensorcas.load_checkpoint(run_id, into=linen_state(6)), state)


@pytest.mark.long
def test_items_of_nnx_are_saved_beside_others(run_id: str, tmp_path: Path) -> None:
    live = nnx_state(0)
    train_nnx(**live, x=X)
    weights = {"ema": jnp.ones(3, jnp.bfloat16)}
    handlers = {"ema": TensorCasHandler(run_id=run_id, name="ema"), "state": TensorCasHandler(run_id=run_id)}
    handlers["notes"] = ocp.JsonCheckpointHandler()
    with ocp.CheckpointManager(tmp_path / "orbax", item_handlers=handlers) as manager:
        saved = {"state": TensorCasSave(nnx.state(live)), "ema": TensorCasSave(weights)}
        manager.save(7, args=ocp.args.Composite(**saved, notes=ocp.args.JsonSave({"x": 1})))
        manager.wait_until_finished()
        target, into = nnx_state(3), {"ema": jnp.zeros(3, jnp.bfloat16)}
        wanted = {"state": TensorCasRestore(nnx.state(target)), "ema": TensorCasRestore(into)}
        back = manager.restore(7, args=ocp.args.Composite(**wanted, notes=ocp.args.JsonRestore()))

    nnx.update(target, back.state)
    assert_same(target, live)
    assert_same(back.ema, weights)
    assert into["ema"][0] == 0, "the target was changed"
    assert back.notes == {"x": 1}


@pytest.mark.long
def test_a_donated_array_is_saved_as_it_was(run_id: str, tmp_path: Path) -> None:
    # Donation writes the result into the array's own memory.
    grow = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = {"w": jnp.arange(1 << 20, dtype=jnp.float32)}
    with ocp.AsyncCheckpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave(state, step=3))
        state["w"] = grow(state["w"])
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "orbax")

    assert_same(back, {"w": state["w"] - 1})


def test_a_save_that_cannot_be_done_is_refused(run_id: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": jnp.ones(3)}
    with ocp.Checkpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        with pytest.raises(ValueError, match=r"pass TensorCasSave\(state, step="):
            checkpointer.save(tmp_path / "first", args=TensorCasSave(state))
        checkpointer.save(tmp_path / "second", args=TensorCasSave(state, step=1))
        with pytest.raises(MlflowException, match="there is already a checkpoint"):
            checkpointer.save(tmp_path / "third", args=TensorCasSave(state, step=1))
    with ocp.Checkpointer(TensorCasHandler()) as checkpointer, pytest.raises(ValueError, match="no active run"):
        checkpointer.save(tmp_path / "fourth", args=TensorCasSave(state, step=2))
    assert not (tmp_path / "third").exists()
    assert [record.step for record in tensorcas.list_checkpoints(run_id)] == [1]


def test_a_folder_that_names_no_step_is_refused(run_id: str, tmp_path: Path) -> None:
    with ocp.Checkpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave({"w": jnp.ones(3)}, step=1))
        file = tmp_path / "orbax" / "tensorcas.json"
        facts = json.loads(file.read_text())
        long = " " * (1 << 24) + file.read_text()
        wrong = ["", "[]", "{}", '{"uri": 3}', '{"uri": "/etc/passwd", "shardings": {}}', "[" * 100_000, long]
        wrong += [json.dumps({**facts, "shardings": each}) for each in (None, [1], {"": [3]}, {"": []}, {"": 3})]
        for text in wrong:
            file.write_text(text)
            with pytest.raises(MalformedFileError, match="names no checkpoint"):
                checkpointer.restore(tmp_path / "orbax")
        file.unlink()
        with pytest.raises(MalformedFileError, match="another handler has written this folder"):
            checkpointer.restore(tmp_path / "orbax")
        tensorcas.delete_checkpoint(run_id, step=1)
        file.write_text(json.dumps(facts))
        with pytest.raises(MlflowException, match="step 1"):
            checkpointer.restore(tmp_path / "orbax")


P, NamedSharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding


def mesh(*sizes: int, names: tuple[str, ...] = ("x",)) -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_restore_without_an_item_gives_arrays_the_shardings_that_they_were_saved_with(
    run_id: str, tmp_path: Path, asynchronous: bool
) -> None:
    shardings = [
        NamedSharding(mesh(2), P("x")),
        NamedSharding(mesh(2), P(None, "x")),
        NamedSharding(mesh(2), P()),
        NamedSharding(mesh(2, 1, names=("x", "y")), P(("x", "y"))),
        NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("x",)), P("x")),
    ]
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    state: dict[str, Any] = {"some": [jax.device_put(values, each) for each in shardings]}
    state |= {"key": jax.device_put(jax.random.key(3), NamedSharding(mesh(2), P())), "one": jnp.ones(3), "n": 4}
    make = ocp.AsyncCheckpointer if asynchronous else ocp.Checkpointer
    with make(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave(state, step=1))
        if asynchronous:
            checkpointer.wait_until_finished()
        restored = [
            checkpointer.restore(tmp_path / "orbax"),
            checkpointer.restore(tmp_path / "orbax", args=TensorCasRestore(jax.eval_shape(lambda: state) | {"n": 0})),
        ]

    for back in restored:
        assert_same(back, state)
        assert [each.sharding for each in back["some"]] == shardings
        assert back["key"].sharding == state["key"].sharding
        assert back["n"] == 4


def test_a_restore_onto_fewer_devices_says_what_to_pass(run_id: str, tmp_path: Path) -> None:
    state = {"w": jax.device_put(np.arange(4, dtype=np.float32), NamedSharding(mesh(2), P("x")))}
    with ocp.Checkpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave(state, step=1))
        file = tmp_path / "orbax" / "tensorcas.json"
        facts = json.loads(file.read_text())
        facts["shardings"] = {text.replace('"id": 1', '"id": 7'): paths for text, paths in facts["shardings"].items()}
        file.write_text(json.dumps(facts))
        with pytest.raises(ValueError, match=r"\['w'\] in .* pass TensorCasRestore\(item\)"):
            checkpointer.restore(tmp_path / "orbax")
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        here = {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=first)}
        back = checkpointer.restore(tmp_path / "orbax", args=TensorCasRestore(here))

    assert_same(back, {"w": jax.device_put(state["w"], first)})


def test_parts_that_an_item_masks_stay_masked(run_id: str, tmp_path: Path) -> None:
    state = {"a": jnp.ones(3), "b": {"c": jnp.zeros(2), "d": jnp.arange(4)}}
    with ocp.Checkpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave(state, step=1))
        item = {"a": None, "b": {"c": optax.MaskedNode(), "d": jnp.zeros(4, int)}}
        with pytest.raises(MlflowException, match="stored"):
            checkpointer.restore(tmp_path / "orbax", args=TensorCasRestore(item))
        back = checkpointer.restore(tmp_path / "orbax", args=TensorCasRestore(item, strict=False))

    assert back["a"] is None
    assert back["b"]["c"] == optax.MaskedNode()
    assert_same(back["b"]["d"], state["b"]["d"])


def test_an_array_of_numpy_stays_one_where_the_item_has_its_shape_alone(run_id: str, tmp_path: Path) -> None:
    state = {"numpy": np.arange(4), "jax": jnp.arange(4)}
    with ocp.Checkpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave(state, step=1))
        shapes = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in state.items()}
        back = checkpointer.restore(tmp_path / "orbax", args=TensorCasRestore(shapes))

    assert type(back["numpy"]) is np.ndarray
    assert isinstance(back["jax"], jax.Array)


def test_an_item_of_another_dtype_or_shape_is_refused_and_not_cast(run_id: str, tmp_path: Path) -> None:
    with ocp.Checkpointer(TensorCasHandler(run_id=run_id)) as checkpointer:
        checkpointer.save(tmp_path / "orbax", args=TensorCasSave({"w": jnp.ones(8)}, step=1))
        for item in ({"w": jnp.ones(8, jnp.bfloat16)}, {"w": jax.ShapeDtypeStruct((4,), np.float32)}):
            with pytest.raises(MlflowException, match=r"float32\[8\] is stored"):
                checkpointer.restore(tmp_path / "orbax", args=TensorCasRestore(item))
