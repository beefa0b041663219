"""Models of any size, made from trained weights.

A benchmark cannot train a net of 650 MB, and random numbers compress differently from trained ones. So each tensor of a
large model is made from the trained tensor of its kind (embedding, attention, neurons, norm), repeated as often as
needed with a different start each time, and with a noise of a few per cent of each weight. The distribution of values,
and its variation over rows and tensors, are then those of trained weights, and no bytes repeat.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.data._case import Array, Case
from benchmarks.data._histories import trained_weights
from benchmarks.data._training import State

_DTYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32}


def transformer(n_bytes: int, data: Path, *, dtype: str = "bf16", seed: int = 0, is_smoke: bool = False) -> Case:
    """Make a transformer of about a size.

    Its width and depth grow with the size, up to a width of 1024; so 650 MB in bf16 are some 300 tensors of 2 KB to
    8 MB, and an embedding of 34 MB.

    Args:
        n_bytes: Size; met to within a layer.
        data: Folder of trained weights; see `histories`.
        dtype: ``bf16`` or ``fp32``.
        seed: Another seed makes another model.
        is_smoke: Whether to use small trained weights, available in seconds.
    """
    trained = trained_weights(data, is_smoke=is_smoke)
    n_values = n_bytes / np.dtype(_DTYPES[dtype]).itemsize
    # A layer holds twelve squares of the width, the embedding sixteen.
    width = next((w for w in (64, 128, 256, 512, 1024) if n_values < 18 * 12 * w * w), 1024)
    draw = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    total = 0
    for name, shape in _names(width):
        if total >= n_bytes:
            break
        arrays[name] = _grown(_of_kind(trained, name), shape, draw).astype(_DTYPES[dtype])
        total += arrays[name].nbytes
    return Case(f"{dtype} transformer, {total / 1e6:.3g} MB", arrays)


def mixture(
    n_bytes: int, data: Path, *, is_fused: bool, dtype: str = "bf16", seed: int = 0, is_smoke: bool = False
) -> Case:
    """Make a mixture of experts of about a size: four layers of eight experts.

    Args:
        n_bytes: Size; met to within a few per cent.
        data: Folder of trained weights; see `histories`.
        is_fused: Whether all experts of a layer are one tensor for each of their weights, or each has tensors of its
            own.
        dtype: ``bf16`` or ``fp32``.
        seed: Another seed makes another model.
        is_smoke: Whether to use small trained weights, available in seconds.
    """
    trained = trained_weights(data, is_smoke=is_smoke)
    # An expert is three matrices of three squares of the width, and there are 32.
    n_values = n_bytes / np.dtype(_DTYPES[dtype]).itemsize
    width = max(64, round((n_values / (4 * 8 * 9)) ** 0.5 / 64) * 64)
    draw = np.random.default_rng(seed)

    def weight(kind: str, *shape: int) -> Array:
        return _grown(_of_kind(trained, kind), shape, draw).astype(_DTYPES[dtype])

    arrays = {"model.embed_tokens.weight": weight("symbols.weight", 8 * width, width)}
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        arrays[f"{prefix}.self_attn.qkv_proj.weight"] = weight(f"blocks.{layer}.qkv.weight", 3 * width, width)
        arrays[f"{prefix}.mlp.gate.weight"] = weight(f"blocks.{layer}.out.weight", 8, width)
        if is_fused:
            up = weight(f"blocks.{layer}.up.weight", 8, 6 * width, width)
            arrays[f"{prefix}.mlp.experts.gate_up_proj"] = up
            arrays[f"{prefix}.mlp.experts.down_proj"] = weight(f"blocks.{layer}.down.weight", 8, width, 3 * width)
        for expert in range(0 if is_fused else 8):
            for name, shape in (("gate", (3 * width, width)), ("up", (3 * width, width)), ("down", (width, 3 * width))):
                kind = f"blocks.{layer}.{'down' if name == 'down' else 'up'}.weight"
                arrays[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = weight(kind, *shape)
    total = sum(array.nbytes for array in arrays.values())
    how = "one tensor for all experts" if is_fused else "tensors for each expert"
    return Case(f"mixture of 4 x 8 experts, {how}, {total / 1e6:.3g} MB", arrays)


def mlp(data: Path, *, is_smoke: bool = False) -> Case:
    """Make a chain of linear layers of 330 KB: 256 by 256 and 256 by 64."""
    trained = trained_weights(data, is_smoke=is_smoke)
    draw = np.random.default_rng(0)
    shapes = {"0.weight": (256, 256), "0.bias": (256,), "1.weight": (64, 256), "1.bias": (64,)}
    kinds = {"weight": "w/blocks.0.up.weight", "bias": "w/blocks.0.up.bias"}
    return Case(
        "330 KB MLP",
        {name: _grown(trained[kinds[name.split(".")[1]]], shape, draw) for name, shape in shapes.items()},
    )


def tiny_tensors(n_tensors: int, n_bytes: int, data: Path, *, is_smoke: bool = False) -> Case:
    """Make many fp32 tensors of a size, as rows of one large trained matrix, apart in memory."""
    trained = trained_weights(data, is_smoke=is_smoke)
    n_values = n_bytes // 4
    whole = _grown(trained["w/blocks.0.up.weight"], (n_tensors, n_values), np.random.default_rng(0))
    arrays = {f"layers.{number // 8}.part.{number % 8}.weight": row.copy() for number, row in enumerate(whole)}
    return Case(f"{n_tensors:,} tensors of {n_bytes:,} B", arrays)


def _names(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "symbols.weight", (16 * width, width)
    for number in itertools.count():
        layer = f"blocks.{number}"
        yield f"{layer}.norm_attention.weight", (width,)
        yield f"{layer}.norm_attention.bias", (width,)
        yield f"{layer}.qkv.weight", (3 * width, width)
        yield f"{layer}.qkv.bias", (3 * width,)
        yield f"{layer}.out.weight", (width, width)
        yield f"{layer}.out.bias", (width,)
        yield f"{layer}.norm_mlp.weight", (width,)
        yield f"{layer}.norm_mlp.bias", (width,)
        yield f"{layer}.up.weight", (4 * width, width)
        yield f"{layer}.up.bias", (4 * width,)
        yield f"{layer}.down.weight", (width, 4 * width)
        yield f"{layer}.down.bias", (width,)


def _of_kind(trained: State, name: str) -> Array:
    """Return the trained tensor in place of one: of its own layer, modulo the number of trained ones."""
    if not name.startswith("blocks."):
        return trained[f"w/{name}"]
    _, number, kind = name.split(".", 2)
    n_layers = 1 + max(int(key.split(".")[1]) for key in trained if key.startswith("w/blocks."))
    return trained[f"w/blocks.{int(number) % n_layers}.{kind}"]


def _grown(trained: Array, shape: tuple[int, ...], draw: np.random.Generator) -> Array:
    """Repeat a trained tensor to fill a shape, with a different start each time and a little noise."""
    n_values = int(np.prod(shape))
    values = trained.ravel()
    out = np.empty(n_values, np.float32)
    for start in range(0, n_values, len(values)):
        part = out[start : start + len(values)]
        part[:] = np.roll(values, int(draw.integers(len(values))))[: len(part)]
    out *= 1 + 0.03 * draw.standard_normal(n_values, np.float32)
    return out.reshape(shape)
