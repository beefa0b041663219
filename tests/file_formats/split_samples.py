"""A small file of every format that is taken apart, made by the library whose format it is."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import bintensors.numpy
import cloudpickle
import gguf
import joblib
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pyarrow
import pyarrow.parquet
import safetensors.torch
import skops.io
import torch
import xgboost as xgb
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression

from tensorcas_mlflow.store import PAYLOAD_FILE, write_payload
from tests.file_formats.hdf5_samples import hdf5_file, hdf5_of
from tests.file_formats.samples import files, flax_file, flax_tree, mat_file, tar_of, zip_of

DRAW = np.random.default_rng(0)
ARRAYS = {
    "encoder.weight": DRAW.normal(size=(40, 50)).astype(np.float32),
    "encoder.bias": DRAW.normal(size=50).astype(np.float32),
    "head.weight": DRAW.normal(size=(50, 30)),
    "tiny": np.arange(3),
}


@cache
def samples() -> dict[str, bytes]:
    """Make them all, by the name of the format."""
    made = {**_of_torch(), **_of_pickle(), **_of_xgboost(), **_of_numpy()}
    made["safetensors"] = safetensors.torch.save(_state())
    made["gguf"] = _written(_write_gguf)
    made["bintensors"] = bytes(bintensors.numpy.save(ARRAYS, {"format": "np"}))
    made["bhckpt"] = _bhckpt()
    made["onnx"] = _onnx()
    made["mat"] = mat_file({name.replace(".", "_"): array for name, array in ARRAYS.items()} | {"text": "abc"})
    made["flax"] = flax_file({**flax_tree(ARRAYS), "step": 3, "text": "x" * 500})
    made["hdf5"] = hdf5_file(hdf5_of(ARRAYS))
    made["hdf5, latest"] = hdf5_file(hdf5_of(ARRAYS), libver="latest")
    made["hdf5, chunked"] = hdf5_file(hdf5_of(ARRAYS, is_chunked=True))
    made["keras"] = zip_of({"config.json": b"{}" * 999, "model.weights.h5": made["hdf5"]})
    made["zip"] = zip_of({"a/model.safetensors": made["safetensors"], "b.gguf": made["gguf"]})
    made["nemo"] = tar_of({"./model_config.yaml": b"a: 1", "./model_weights.ckpt": made["torch, state"]})
    made["tar"] = tar_of({"é" * 90: made["safetensors"], "b.h5": made["hdf5"]}, tarfile.GNU_FORMAT)
    made["parquet"] = _parquet()
    made["self-contained"] = _written(lambda path: write_payload(path.parent, ARRAYS, cuts={}, flavor="pytorch"))
    return made


def _parquet() -> bytes:
    """Write two columns in pages of 4 KB."""
    out = io.BytesIO()
    table = pyarrow.table({"a": ARRAYS["encoder.weight"].ravel(), "b": [str(nth) for nth in range(2000)]})
    pyarrow.parquet.write_table(table, out, data_page_size=4096)
    return out.getvalue()


def _state() -> OrderedDict[str, torch.Tensor]:
    return OrderedDict((name, torch.from_numpy(array.copy())) for name, array in ARRAYS.items())


def _written(write: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PAYLOAD_FILE
        write(path)
        return path.read_bytes()


def _of_torch() -> dict[str, bytes]:
    net = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 5))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 30)).sum().backward()
    optimizer.step()

    def saved(what: Any, **settings: Any) -> bytes:
        out = io.BytesIO()
        torch.save(what, out, **settings)
        return out.getvalue()

    return {
        "torch, state": saved(_state()),
        "torch, module": saved(net),
        "torch, checkpoint": saved({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}),
        "torch, before zip": saved(_state(), _use_new_zipfile_serialization=False),
        "torch, exported": files()["exported by hand.pt2"],
        "torch, exported by torch": files()["exported.pt2"],
        "torch, exported by torch 2.8": files()["exported by torch 2.8.pt2"],
        "torch, exported by torch 2.7": files()["exported by torch 2.7.pt2"],
        "torch, scripted": files()["scripted.pt"],
        "torch, pickled": pickle.dumps(net),
    }


def _of_pickle() -> dict[str, bytes]:
    X = DRAW.normal(size=(500, 4))
    forest = RandomForestRegressor(2, random_state=0).fit(X, X.sum(axis=1))
    objects = {"arrays": ARRAYS, "text": "x" * 5000, "columns": np.asfortranarray(DRAW.normal(size=(30, 40)))}
    made = {f"pickle, protocol {n}": pickle.dumps([objects, LinearRegression().fit(X, X)], n) for n in range(6)}
    made["pickle, forest"] = pickle.dumps(forest)
    made["cloudpickle"] = cloudpickle.dumps({"f": lambda x: x + len(objects), "objects": objects})
    made["joblib"] = _written(lambda path: joblib.dump({"forest": forest, "objects": objects}, path))
    made["skops"] = skops.io.dumps({"model": LinearRegression().fit(X, X), "objects": objects})
    made["joblib, zlib"] = _written(lambda path: joblib.dump(objects, path, compress=3))
    return made


def _of_xgboost() -> dict[str, bytes]:
    X = DRAW.normal(size=(50, 3000)).astype(np.float32)
    matrix = xgb.DMatrix(X, X[:, 0])
    linear = xgb.train({"booster": "gblinear"}, matrix, 1)
    trees = xgb.train({"max_depth": 3}, matrix, 5)
    return {
        "xgboost, linear": bytes(linear.save_raw("ubj")),
        "xgboost, trees": bytes(trees.save_raw("ubj")),
        "xgboost, json": bytes(trees.save_raw("json")),
        "xgboost, pickled": pickle.dumps(trees),
    }


def _of_numpy() -> dict[str, bytes]:
    def saved(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
        out = io.BytesIO()
        save(out, *arrays, **named)
        return out.getvalue()

    return {
        "npy": saved(np.save, ARRAYS["head.weight"]),
        "npy, objects": saved(np.save, np.array([{"a": 1}, ARRAYS["head.weight"]], dtype=object)),
        "npz": saved(np.savez, **ARRAYS),
        "npz, compressed": saved(np.savez_compressed, **ARRAYS),
    }


def _write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {i}" for i in range(50)])
    for name, array in ARRAYS.items():
        writer.add_tensor(name, array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _onnx() -> bytes:
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    floats = onnx.helper.make_tensor("floats", onnx.TensorProto.FLOAT, [100], np.arange(100.0))
    constant = onnx.helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(ARRAYS["head.weight"]))
    initializers = [*(onnx.numpy_helper.from_array(array, name) for name, array in ARRAYS.items()), floats]
    graph = onnx.helper.make_graph([constant], "g", ends[:1], ends[1:], initializers)
    return onnx.helper.make_model(graph, producer_name="tests").SerializeToString()


def _bhckpt() -> bytes:
    """Write as bhckpt's `CheckpointStore.save` does."""
    table, blocks = [], b""
    for name, array in ARRAYS.items():
        place = {"codec": "fp16", "nbytes": array.nbytes, "off": len(blocks), "size": array.nbytes}
        table.append({"name": name, "shape": list(array.shape), "dtype": array.dtype.name, **place})
        blocks += array.tobytes()
    first = {"arch": {"layers": 1}, "n_tensors": len(table), "total_bytes": len(blocks)}
    texts = [json.dumps(value).encode() for value in (first, table)]
    return b"BCK1" + b"".join(struct.pack("<I", len(text)) + text for text in texts) + blocks
