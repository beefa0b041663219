"""Import a checkpoint from a file of numpy, read one expert of it, and measure the changes of a training step.

Install the package and run ``python examples/read_parts.py [FOLDER]``. The program writes only to FOLDER (default
``parts``), a new folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import tensorcas_mlflow as tensorcas
from tensorcas_mlflow.file_formats import open_listing

N_LAYERS, N_EXPERTS, WIDTH = 4, 8, 256


def mixture_of_experts() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(4096, WIDTH)).astype(np.float32)}
    for layer in range(N_LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = rng.normal(size=(N_EXPERTS, WIDTH)).astype(np.float32)
        for expert in range(N_EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = rng.normal(size=(2 * WIDTH, WIDTH)).astype(np.float32)
                tensors[f"{prefix}.experts.{expert}.{name}.weight"] = weight
    return tensors


def main(folder: Path) -> None:
    folder.mkdir()
    tensors = mixture_of_experts()
    np.savez(folder / "model.npz", **tensors)
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"] *= np.float32(1.01)
    np.savez(folder / "trained.npz", **tensors)

    store = tensorcas.TensorCasStore(folder / "store", run_id="moe")
    for step, name in enumerate(("model.npz", "trained.npz")):
        store.import_file(folder / name, step)

    with store.open(0) as before, store.open(1) as after:
        print(before.summary())
        read = before.stats.read_bytes
        expert = before.expert(layer=2, expert=5)
        size = sum(array.nbytes for array in expert.values())
        took = before.stats.read_bytes + before.stats.mapped_bytes - read
        print(f"one expert: {size:,} bytes, read {took:,} of the {before.summary().n_bytes:,} there are")

        found = tensorcas.diff(before, after, values=True)
        for name, change in found.values.items():
            print(f"changed: {name}, by {change.relative_norm:.1%} of its norm; {len(found.equal)} others are equal")

        written = store.export_file(folder / "shards", step=1, format="safetensors", shard_bytes=16 << 20)
        print(f"exported as {len(written.files)} files, {written.n_bytes:,} bytes")
        assert open_listing(folder / "shards").locations.keys() == after.keys()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "parts"))
