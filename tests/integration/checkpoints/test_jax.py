"""Checkpoints of trainings in JAX share chunks with all others, and resume to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.errors import AdapterError
from tests.flavors.jax.states import X, assert_same, jax, jnp, linen_state, nnx_state, train_linen, train_nnx


@pytest.mark.long
def test_weights_are_stored_once_for_jax_numpy_torch_and_safetensors(cas_experiment: str, tmp_path: Path) -> None:
    params = {"w": jax.random.normal(jax.random.key(0), (256, 512)), "b": jnp.arange(4096, dtype=jnp.bfloat16)}
    arrays = {name: np.array(value) for name, value in params.items()}
    n_bytes = sum(array.nbytes for array in arrays.values())
    save_file({"w": arrays["w"]}, tmp_path / "model.safetensors")
    bf16 = torch.from_numpy(arrays["b"].view(np.int16)).view(torch.bfloat16)
    with mlflow.start_run():
        first = tensorcas.log_checkpoint(params, step=0)
        others: list[Any] = [arrays, {"w": torch.from_numpy(arrays["w"]), "b": bf16}, {"params": params}]
        infos = [tensorcas.log_checkpoint(state, step=step) for step, state in enumerate(others, 1)]
        infos.append(tensorcas.import_checkpoint(tmp_path / "model.safetensors", step=9))

    assert first.new_bytes is not None
    assert n_bytes <= first.new_bytes < n_bytes + 2000
    for info in infos:
        assert info.new_bytes is not None
        assert info.new_bytes < 4000, info


def test_a_state_is_filled_from_what_other_programs_stored(cas_experiment: str, tmp_path: Path) -> None:
    arrays = {"params.w": np.arange(6, dtype=np.float32), "params.b": np.ones(3, dtype=np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    of_torch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with mlflow.start_run():
        tensorcas.import_checkpoint(tmp_path / "model.safetensors", step=1)
        tensorcas.log_checkpoint({"params": {"w": arrays["params.w"], "b": arrays["params.b"]}}, step=2)
        tensorcas.log_checkpoint({"params": {"w": of_torch["params.w"], "b": of_torch["params.b"]}}, step=3)
        for step in (1, 2, 3):
            shapes = jax.eval_shape(lambda: {"params": {"w": jnp.zeros(6), "b": jnp.zeros(3)}})
            for into in (shapes, {"params": {"w": jnp.zeros(6), "b": jnp.zeros(3)}}):
                back = tensorcas.load_checkpoint(into=into, step=step)
                assert_same(back, {"params": {"w": jnp.arange(6.0), "b": jnp.ones(3)}})
            with pytest.raises(AdapterError, match=r"'params\.w' is float32\[5\] in it"):
                tensorcas.load_checkpoint(into={"params": {"w": jnp.zeros(5), "b": jnp.zeros(3)}}, step=step)
            with pytest.raises(AdapterError, match="it has 'more', not stored"):
                tensorcas.load_checkpoint(into={**into, "more": 1}, step=step)


@pytest.mark.long
def test_a_training_resumes_in_jax_to_the_bit(cas_experiment: str) -> None:
    linen, live = linen_state(0), nnx_state(0)
    with mlflow.start_run():
        for step in range(2):
            linen = train_linen(linen, X)
            train_nnx(**live, x=X)
            tensorcas.log_checkpoint({"linen": linen, **live, "step": step}, step=step, blocking=step == 1)
            if step == 0:
                resumed = tensorcas.load_checkpoint(into={"linen": linen_state(1), **nnx_state(1), "step": 5})
        resumed["linen"] = train_linen(resumed["linen"], X)
        train_nnx(resumed["model"], resumed["optimizer"], X)

    assert_same(resumed, {"linen": linen, **live, "step": 0})


def test_a_large_state_is_filled_from_the_store(cas_experiment: str) -> None:
    params = {f"layer{i}": jnp.full((1 << 20,), i, jnp.float32) for i in range(9)}
    with mlflow.start_run():
        tensorcas.log_checkpoint({"params": params, "key": jax.random.key(4)}, step=0)
        into = {"params": jax.eval_shape(lambda: params), "key": jax.random.key(0)}
        back = tensorcas.load_checkpoint(into=into)

    assert_same(back, {"params": params, "key": jax.random.key(4)})
