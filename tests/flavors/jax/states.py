"""States of trainings in JAX, for tests of its adapter; and JAX itself, with two devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

# Before the first array of the process: so no test needs an accelerator for an array on two devices.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

jnp = jax.numpy
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)


class Net(nnx.Module):
    """A small module with everything that nnx keeps: parameters, statistics, random states, a list, a tied weight."""

    def __init__(self, seed: int, n: int = 4) -> None:
        rngs = nnx.Rngs(seed, dropout=seed + 1)
        self.first = nnx.Linear(n, n, rngs=rngs)
        self.norm = nnx.BatchNorm(n, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(n, n, rngs=rngs)])
        self.tied = self.first.kernel
        self.epoch = 0

    def __call__(self, x: Any) -> Any:
        x = self.drop(self.norm(self.first(x)))
        for block in self.blocks:
            x = block(jnp.tanh(x))
        return x @ self.tied[...].T


def nnx_state(seed: int) -> dict[str, Any]:
    model = Net(seed)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


@nnx.jit
def train_nnx(model: Any, optimizer: Any, x: Any) -> None:
    optimizer.update(model, nnx.grad(lambda each: ((each(x) - 1) ** 2).mean())(model))


class Dense(nn.Module):
    """A small module of linen."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.tanh(nn.Dense(4)(x)))


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)))


def linen_state(seed: int) -> Any:
    from flax.training.train_state import TrainState

    params = Dense().init(jax.random.key(seed), X)["params"]
    return TrainState.create(apply_fn=Dense().apply, params=params, tx=TX)


@jax.jit
def train_linen(state: Any, x: Any) -> Any:
    grads = jax.grad(lambda params: (state.apply_fn({"params": params}, x) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads)


def leaves_of(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by path, for comparison."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def assert_same(one: Any, other: Any) -> None:
    """Compare all leaves to the bit: class, dtype, weak type, bytes."""
    left, right = leaves_of(one), leaves_of(other)
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        twin = right[path]
        assert type(leaf) is type(twin), path
        if not hasattr(leaf, "dtype"):
            assert leaf == twin, path
            continue
        assert (leaf.dtype, leaf.shape) == (twin.dtype, twin.shape), path
        assert getattr(leaf, "weak_type", None) == getattr(twin, "weak_type", None), path
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, twin = jax.random.key_data(leaf), jax.random.key_data(twin)
        assert np.asarray(leaf).tobytes() == np.asarray(twin).tobytes(), path
