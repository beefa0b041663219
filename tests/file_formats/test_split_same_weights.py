"""The same weights, whatever library wrote them into whatever container: the same tensors, and so the same chunks."""

from __future__ import annotations

import pytest

from tests.file_formats.parts import tensors
from tests.file_formats.split_samples import ARRAYS, samples

PREFIXES = {
    "torch, state": "",
    "torch, before zip": "",
    "safetensors": "",
    "npz": "",
    "gguf": "",
    "onnx": "",
    "flax": "",
    "bintensors": "",
    "bhckpt": "",
    "hdf5": "",
    "hdf5, latest": "",
    "keras": "model.weights.h5/",
    "zip": "a/model.safetensors/",
    "nemo": "model_weights.ckpt/",
    "tar": "é" * 90 + "/",
    "self-contained": "",
    "pickle, protocol 3": "0.arrays.",
    "pickle, protocol 4": "0.arrays.",
    "pickle, protocol 5": "0.arrays.",
    "cloudpickle": "arrays.",
    "joblib": "objects.arrays.",
    "skops": None,
}


@pytest.mark.parametrize(("container", "prefix"), PREFIXES.items(), ids=PREFIXES)
def test_a_tensor_is_the_same_in_every_container(container: str, prefix: str | None) -> None:
    weight = ARRAYS["encoder.weight"]

    found = tensors(samples()[container])

    name = next(name for name, (_, taken) in found.items() if taken == weight.tobytes())
    assert (found[name][0].dtype, found[name][0].shape) == ("float32", weight.shape)
    if prefix is not None:
        assert name == f"{prefix}encoder.weight"
