"""The work of two processes of JAX, of two devices each, in `test_jax_processes`; this file is their program."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest


def whole_state(seed: int) -> dict[str, Any]:
    """Return the state as arrays of numpy, numbers and texts."""
    import ml_dtypes

    rng = np.random.default_rng(7)
    rows = rng.normal(size=(8192, 64)).astype(np.float32)
    rows[:8] += seed
    return {
        "rows": rows,
        "columns": rng.normal(size=(64, 256)).astype(np.float32) + seed,
        "grid": rng.normal(size=(64, 64)).astype(ml_dtypes.bfloat16),
        "copies": np.arange(6, dtype=np.int32) + seed,
        "scalar": np.float32(seed),
    }


def mesh(shape: tuple[int, ...] = (2, 2)) -> Any:
    import jax

    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))


def spread(seed: int, places: dict[str, Any], shape: tuple[int, ...] = (2, 2)) -> dict[str, Any]:
    """Return the state as arrays over all devices."""
    import jax

    on = mesh(shape)
    return {
        name: jax.make_array_from_callback(
            np.shape(value),
            jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*places.get(name, ()))),
            lambda index, value=value: np.asarray(value)[index],
        )
        for name, value in whole_state(seed).items()
    }


PLACES: dict[str, Any] = {"rows": (("x", "y"),), "columns": (None, "y"), "grid": ("y", "x")}
OTHERS: dict[str, Any] = {"rows": (None, "x"), "columns": (("x", "y"),), "grid": ("x",)}


def assert_local(state: dict[str, Any], seed: int) -> None:
    """Compare this process's shards with the whole state."""
    for name, value in whole_state(seed).items():
        assert state[name].dtype == np.asarray(value).dtype, name
        for shard in state[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(value)[shard.index].tobytes(), name


def work(rank: int, tracking: str, run_id: str, folder: str) -> None:
    import jax
    import optax
    import orbax.checkpoint as ocp

    import tensorcas_mlflow as tensorcas
    from tensorcas_mlflow.errors import AdapterError, CheckpointExistsError
    from tensorcas_mlflow.orbax import TensorCasHandler, TensorCasRestore, TensorCasSave

    mine = run_id if rank == 0 else None
    optimizer = optax.adam(1e-3)
    for seed in (1, 2):
        params = spread(seed, PLACES)
        opt_state = jax.jit(optimizer.init)(params)
        key = jax.random.key(seed)
        state = {"params": params, "opt_state": opt_state, "key": key, "step": seed}
        info = tensorcas.log_checkpoint(state, step=seed, run_id=mine)
        assert info.step == seed
    mlflow.set_tracking_uri(tracking)
    other = spread(5, OTHERS, (4, 1))
    into = {"params": other, "opt_state": jax.jit(optimizer.init)(other), "key": jax.random.key(9), "step": 0}
    back = tensorcas.load_checkpoint(mine, into=into, step=1)
    assert_local(back["params"], 1)
    assert back["params"]["rows"].sharding == other["rows"].sharding
    assert (back["key"], back["step"]) == (jax.random.key(1), 1)

    names = ("rows", "columns", "grid")
    if rank == 0:
        tensorcas.log_checkpoint({name: whole_state(3)[name] for name in names}, step=1, run_id=mine, name="numpy")
    back = tensorcas.load_checkpoint(mine, into={name: other[name] for name in names}, step=1, name="numpy")
    assert_local({**spread(3, OTHERS), **back}, 3)
    for wrong, error, word in (
        ({"step": seed, "run_id": mine}, CheckpointExistsError, "step 2"),
        ({"step": 8, "run_id": "none" if rank == 0 else None}, Exception, "none"),
    ):
        with pytest.raises(error, match=word):
            tensorcas.log_checkpoint(state, **wrong)
    with pytest.raises(AdapterError, match="'rank' differs between the processes 0 and 1"):
        tensorcas.log_checkpoint({**state, "rank": rank}, step=9, run_id=mine)

    handler = TensorCasHandler(run_id=mine, name="orbax")
    with ocp.CheckpointManager(folder, item_handlers=handler) as manager:
        manager.save(4, args=TensorCasSave(params))
        manager.wait_until_finished()
        assert manager.all_steps() == [4]
        assert_local(manager.restore(4, args=TensorCasRestore(other)), 2)


def die(rank: int, tracking: str, run_id: str, folder: str) -> None:
    """Save a step; then another one, before whose commit the second process dies."""
    import jax

    import tensorcas_mlflow as tensorcas
    from tensorcas_mlflow import jax_processes

    tensorcas.log_checkpoint(spread(1, PLACES), step=1, run_id=run_id)
    store_part = jax_processes._store_part

    def store_and_die(*given: Any) -> Any:
        store_part(*given)
        os._exit(9)

    if rank == 1:
        jax_processes._store_part = store_and_die  # type: ignore[assignment]
    with pytest.raises(jax.errors.JaxRuntimeError, match="Gloo"):
        tensorcas.log_checkpoint(spread(2, PLACES), step=2, run_id=run_id)
    Path(folder, f"done-{rank}").touch()
    os._exit(0)


def main() -> None:
    rank, port, work_name, tracking, run_id, folder = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
    # A save needs MLflow in the first process alone, a load in all.
    mlflow.set_tracking_uri(tracking if rank == 0 else "sqlite:////dev/null/nothing")
    globals()[work_name](rank, tracking, run_id, folder)
    sys.stdout.flush()
    jax.distributed.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
