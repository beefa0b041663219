"""Weights that a store has, logged again in another container: the store's files grow by the container alone."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import joblib
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
import safetensors.numpy
import torch

from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.store import Store
from tests.file_formats.samples import flax_file, of_torch, pt2_of_2_7, pt2_of_2_8, tensorflow_folder
from tests.stored_bytes import bytes_below

Array = np.ndarray[Any, np.dtype[Any]]

MOST = 0.003
"""Greatest growth of the store, as a share of the weights."""
SEED = int(os.environ.get("TENSORCAS_SEED", "0"))


@cache
def weights() -> dict[str, Array]:
    draw = np.random.default_rng(SEED)
    sides = [(700 + 37 * nth, 512) for nth in range(6)] + [(512,)] * 6 + [(3001, 300)]
    return {f"layer{nth}_w": draw.normal(size=shape).astype(np.float32) for nth, shape in enumerate(sides)}


class Holder(torch.nn.Module):
    """The weights as parameters of their names."""

    def __init__(self) -> None:
        super().__init__()
        for name, array in weights().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array.copy())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer6_w.sum()


def state() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in weights().items()}


def onnx_model(arrays: dict[str, Array]) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors))


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, array in weights().items():
        writer.add_tensor(name, array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def export(path: Path, module: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (torch.ones(2),)), path)


def script(path: Path, module: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), path)


Write = Callable[[Path], Any]


def to_file(save: Callable[[BinaryIO], Any]) -> Write:
    """Save to an open file: numpy appends a suffix to the name of a path."""

    def write(path: Path) -> None:
        with path.open("wb") as out:
            save(out)

    return write


CONTAINERS: dict[str, Write] = {
    "torch.save": lambda path: torch.save(state(), path),
    "torch.save, before zip": lambda path: torch.save(state(), path, _use_new_zipfile_serialization=False),
    "torch.save, a module": lambda path: torch.save(Holder(), path),
    "torch.export": lambda path: export(path, Holder()),
    "torch.export 2.8": lambda path: path.write_bytes(pt2_of_2_8(state(), {})),
    "torch.export 2.7": lambda path: path.write_bytes(pt2_of_2_7(state(), None)),
    "TorchScript": lambda path: script(path, Holder()),
    "npz": to_file(lambda out: np.savez(out, **weights())),
    "npy": to_file(lambda out: np.save(out, weights()["layer0_w"])),
    "pickle": lambda path: path.write_bytes(pickle.dumps(weights(), 4)),
    "pickle, protocol 5": lambda path: path.write_bytes(pickle.dumps(weights(), 5)),
    "joblib": lambda path: joblib.dump(weights(), path),
    "gguf": write_gguf,
    "onnx": lambda path: onnx.save(onnx_model(weights()), path),
    "flax": lambda path: path.write_bytes(flax_file({"params": weights()})),
}


def write_external_data(folder: Path, arrays: dict[str, Array]) -> None:
    onnx.save(
        onnx_model(arrays), folder / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0
    )


FOLDERS: dict[str, Write] = {
    "onnx, external data": lambda folder: write_external_data(folder, weights()),
    "tensorflow": lambda folder: tensorflow_folder(folder, weights()),
    "tensorflow, files": lambda folder: tensorflow_folder(folder, weights(), n_shards=3),
}
"""Containers of several files. Raw tensors are told by another file of the folder."""


def log(store: Store, path: Path, name: str) -> None:
    with store.write_file(path) as pending:
        pending.commit(RefTarget(path=name))


@pytest.mark.parametrize("container", [*CONTAINERS, *FOLDERS])
def test_weights_that_a_store_has_are_not_stored_again(container: str, tmp_path: Path) -> None:
    store = Store.init(tmp_path / "store")
    first, again = tmp_path / "model.safetensors", tmp_path / "again"
    safetensors.numpy.save_file(weights(), first)
    log(store, first, "first/model.safetensors")
    before = bytes_below(tmp_path / "store")
    again.mkdir()
    if container in FOLDERS:
        FOLDERS[container](again)
    else:
        CONTAINERS[container](again / "file")
    paths = sorted(again.iterdir())
    for path in paths:
        log(store, path, f"again/{path.name}")
    n_weight_bytes = sum(array.nbytes for array in weights().values())

    assert bytes_below(tmp_path / "store") - before <= MOST * n_weight_bytes
    for path in paths:
        ref = store.artifact(f"again/{path.name}")
        assert ref is not None
        assert b"".join(store.iter_file(ref)) == path.read_bytes()


def steps_of(container: str, folder: Path) -> list[int]:
    """Log a model of bfloat16 weights after each of some small updates, and return the growth of the store at each."""
    store = Store.init(folder / "store")
    torch.manual_seed(SEED)
    module = Holder().bfloat16()
    exact = [weight.detach().double() for weight in module.parameters()]
    sizes = [bytes_below(folder)]
    for step in range(4):
        saved = folder / "saved"
        saved.mkdir()
        if container in STEPPED_FOLDERS:
            STEPPED_FOLDERS[container](saved, {name: of_torch(weight) for name, weight in module.state_dict().items()})
        else:
            STEPPED[container](saved / "model.pt2", module)
        for path in sorted(saved.iterdir()):
            log(store, path, f"{step}/{path.name}")
        shutil.rmtree(saved)
        sizes.append(bytes_below(folder))
        with torch.no_grad():
            for weight, to in zip(module.parameters(), exact, strict=True):
                to += 1e-6 * torch.randn(to.shape)
                weight.copy_(to)
    return np.diff(sizes).tolist()


STEPPED: dict[str, Callable[[Path, torch.nn.Module], Any]] = {
    "torch.save": lambda path, module: torch.save(module.state_dict(), path),
    "torch.export": export,
    "torch.export 2.8": lambda path, module: path.write_bytes(pt2_of_2_8(module.state_dict(), {})),
    "torch.export 2.7": lambda path, module: path.write_bytes(pt2_of_2_7(module.state_dict(), None)),
    "TorchScript": script,
}
STEPPED_FOLDERS: dict[str, Callable[[Path, dict[str, Array]], Any]] = {
    "flax": lambda folder, arrays: (folder / "model.msgpack").write_bytes(flax_file({"params": arrays})),
    "onnx, external data": lambda folder, arrays: write_external_data(folder, arrays),
    "tensorflow": lambda folder, arrays: tensorflow_folder(folder, arrays),
}


@pytest.mark.long
@pytest.mark.parametrize("container", [name for name in (*STEPPED, *STEPPED_FOLDERS) if name != "torch.save"])
def test_a_step_of_a_model_takes_as_little_as_in_a_file_of_torch_save(container: str, tmp_path: Path) -> None:
    (tmp_path / "peer").mkdir()
    (tmp_path / "own").mkdir()
    peer, own = steps_of("torch.save", tmp_path / "peer"), steps_of(container, tmp_path / "own")

    assert all(step < 0.02 * peer[0] for step in peer[1:])
    assert all(step <= its_peer + (20 << 10) for step, its_peer in zip(own, peer, strict=True))
