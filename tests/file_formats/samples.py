"""A small file of every format that is read, made by the library whose format it is, or by hand where there is none."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import bintensors.numpy
import gguf
import joblib
import ml_dtypes
import msgpack
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import safetensors.torch
import scipy.io
import scipy.sparse
import skops.io
import torch
import xgboost as xgb

from tensorcas_mlflow.store import PAYLOAD_FILE, write_payload
from tests.file_formats.hdf5_samples import hdf5_file, hdf5_of

Array = np.ndarray[Any, np.dtype[Any]]

DRAW = np.random.default_rng(0)
ARRAYS: dict[str, Array] = {
    "encoder.weight": DRAW.normal(size=(12, 10)).astype(np.float32),
    "encoder.bias": DRAW.normal(size=10).astype(np.float16),
    "head.weight": DRAW.normal(size=(3, 4, 5)),
    "steps": np.arange(7),
    "scalar": np.array(3, np.int32),
    "empty": np.zeros((0, 4), np.float32),
}

TORCH_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


class Files(Mapping[str, bytes]):
    """Files by name. Each is made when it is first read: names alone cost the collection of the tests nothing."""

    def __init__(self, makers: Mapping[str, Callable[[], bytes]]) -> None:
        self._makers = makers
        self._made: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@cache
def files() -> Mapping[str, bytes]:
    """Return a file of every format, with the tensors of `ARRAYS` or, of torch, more; by names with usual suffixes."""
    state = torch_state()
    makers: dict[str, Callable[[], bytes]] = {
        "plain.safetensors": lambda: safetensors.torch.save(state, {"format": "pt", "note": 'a "quoted" {brace}'}),
        "state.pt": lambda: torch_file(state),
        "nested.pt": lambda: torch_file(
            {"model": state, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "epoch": 2}
        ),
        "legacy.pt": lambda: torch_file(state, _use_new_zipfile_serialization=False),
        "exported.pt2": lambda: pt2_file(Exported()),
        "exported by hand.pt2": lambda: pt2_of(
            {
                "weights/weight_0": ARRAYS["head.weight"].tobytes(),
                "weights/weight_1": torch_file(state["encoder.weight"]),
                "weights/model_weights_config.json": pt2_table(
                    {
                        "head.weight": pt2_entry("weight_0", 8, (3, 4, 5), (20, 5, 1)),
                        "head.part": pt2_entry("weight_0", 8, (2, 5), (5, 1), 10),
                        "encoder.weight": pt2_entry("weight_1", 7, (12, 10), (10, 1), use_pickle=True),
                    }
                ),
                "sample_inputs/model.pt": torch_file(((torch.ones(2, 3),), {})),
            }
        ),
        "exported by torch 2.8.pt2": lambda: pt2_of_2_8(state, {"constant": torch.ones(3)}),
        "exported by torch 2.7.pt2": lambda: pt2_of_2_7(state, {"constant": torch.ones(3)}),
        "scripted.pt": lambda: scripted_file(),
        "stored.npz": lambda: npz(ARRAYS),
        "deflated.npz": lambda: npz(ARRAYS, compressed=True),
        "one.npy": lambda: npy(ARRAYS["head.weight"]),
        "fortran.npy": lambda: npy(np.asfortranarray(ARRAYS["head.weight"])),
        "plain.bt": lambda: bytes(bintensors.numpy.save(ARRAYS, {"format": "np", "note": "x" * 300})),
        "plain.gguf": lambda: gguf_file(ARRAYS),
        "plain.bckpt": lambda: bhckpt_file(ARRAYS),
        "arrays.pkl": lambda: pickle.dumps({"arrays": ARRAYS, "tensor": state["head.weight"]}, 4),
        "arrays-2.pkl": lambda: pickle.dumps([ARRAYS], 2),
        "arrays-5.pkl": lambda: pickle.dumps({"arrays": ARRAYS, "turned": ARRAYS["head.weight"].transpose(1, 0, 2)}, 5),
        "arrays.joblib": lambda: written(
            partial(joblib.dump, {"arrays": ARRAYS, "objects": np.array([None, 1], object)})
        ),
        "arrays.skops": lambda: skops.io.dumps({"arrays": ARRAYS, "sparse": scipy.sparse.eye(5).tocsr()}),
        "model.ubj": lambda: ubj(),
        "model.onnx": lambda: onnx_model().SerializeToString(),
        "plain.mat": lambda: mat_file(MATRICES),
        "compressed.mat": lambda: mat_file(MATRICES, do_compression=True),
        "params.msgpack": lambda: flax_file({**flax_tree(ARRAYS), "step": 3}),
        "chunked.msgpack": lambda: flax_file({"params": ARRAYS}, chunk_bytes=64),
        "plain.h5": lambda: hdf5_file(hdf5_of(ARRAYS)),
        "latest.h5": lambda: hdf5_file(hdf5_of(ARRAYS), libver="latest"),
        "chunked.h5": lambda: hdf5_file(hdf5_of(ARRAYS, is_chunked=True)),
        "chunked, latest.h5": lambda: hdf5_file(hdf5_of(ARRAYS, is_chunked=True), libver="latest"),
        "weights.keras": lambda: zip_of(
            {
                "config.json": b"{}",
                "model.weights.h5": hdf5_file(hdf5_of(ARRAYS)),
                "assets/vocabulary": bytes(range(99)),
            }
        ),
        "model.mar": lambda: zip_of(
            {"MAR-INF/MANIFEST.json": b"{}", "model.safetensors": safetensors.torch.save(state)}
        ),
        "model.nemo": lambda: tar_of({"./model_config.yaml": b"a: 1", "./model_weights.ckpt": torch_file(state)}),
        "gnu.tar": lambda: tar_of(
            {"a/" * 60 + "model.safetensors": safetensors.torch.save(state), "data": bytes(range(99))},
            tarfile.GNU_FORMAT,
        ),
        "checkpoint.tensors": lambda: written(
            lambda to: write_payload(Path(to).parent, ARRAYS, flavor="generic"), PAYLOAD_FILE
        ),
    }
    return Files(makers)


def written(write: Callable[[Path], Any], name: str = "file") -> bytes:
    """Give the bytes of a file that its library writes by name."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def ubj(booster: str = "gbtree") -> bytes:
    """Train a model of XGBoost."""
    X = np.random.default_rng(0).normal(size=(60, 4))
    return bytes(xgb.train({"booster": booster, "max_depth": 3}, xgb.DMatrix(X, X[:, 0]), 3).save_raw("ubj"))


def onnx_model() -> onnx.ModelProto:
    """Make a model that has tensors in every field that one can be in."""
    helper, tensor, from_array = onnx.helper, onnx.helper.make_tensor, onnx.numpy_helper.from_array
    kinds = onnx.TensorProto
    inner = helper.make_graph([], "then", [], [], [from_array(ARRAYS["encoder.bias"], "inner")])
    nodes = [
        helper.make_node("Constant", [], ["constant"], value=from_array(np.arange(3.0))),
        helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner),
    ]
    initializers = [
        *(from_array(array, name) for name, array in ARRAYS.items()),
        tensor("floats", kinds.FLOAT, [3], [1.0, 2.0, -3.0]),
        tensor("doubles", kinds.DOUBLE, [2], [1.5, -2.5]),
        tensor("whole", kinds.INT64, [2], [-1, 1 << 40]),
        tensor("bytes", kinds.INT8, [3], [-1, 2, -128]),
        tensor("shorts", kinds.UINT16, [2], [65535, 1]),
        tensor("bools", kinds.BOOL, [2], [True, False]),
        tensor("halves", kinds.FLOAT16, [2], [1.5, -2.5]),
        tensor("brains", kinds.BFLOAT16, [2], [1.5, -2.5]),
        tensor("unsigned", kinds.UINT64, [2], [1, (1 << 64) - 1]),
        tensor("complex", kinds.COMPLEX64, [2], [1 + 2j, -3j]),
        tensor("texts", kinds.STRING, [1], [b"a"]),
        tensor("fours", kinds.UINT4, [2], [1, 2]),
    ]
    sparse = helper.make_sparse_tensor(tensor("s", kinds.FLOAT, [1], [1.0]), tensor("i", kinds.INT64, [1], [2]), [5])
    return helper.make_model(helper.make_graph(nodes, "g", [], [], initializers, sparse_initializer=[sparse]))


def torch_state() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in ARRAYS.items()}


def torch_file(what: Any, **settings: Any) -> bytes:
    out = io.BytesIO()
    torch.save(what, out, **settings)
    return out.getvalue()


class Exported(torch.nn.Module):
    """Weights of every kind that an exported program has a place for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.head = torch.nn.Linear(32, 50)
        self.head.weight = self.embedding.weight
        self.turned = torch.nn.Parameter(torch.randn(16, 8).t())
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        shared = torch.randn(40, 4)
        self.register_buffer("first", shared[:16])
        self.register_buffer("second", shared[16:])
        self.register_buffer("whole", shared)
        self.register_buffer("passing", torch.arange(60.0), persistent=False)
        self.constant = torch.full((3, 3), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.turned, self.first, self.second, self.whole, self.passing, self.constant, self.nothing)
        found: torch.Tensor = self.head(self.norm(self.embedding(x))) * self.scale
        return found + sum(part.sum() for part in parts)


EXAMPLE = torch.arange(5)


def pt2_file(module: torch.nn.Module, *example: torch.Tensor, **settings: Any) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.eval(), example or (EXAMPLE,)), out, **settings)
    return out.getvalue()


def scripted_file() -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(Exported().eval(), (EXAMPLE,)), out)
    return out.getvalue()


def zip_of(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def tar_of(members: Mapping[str, bytes], format: int = tarfile.PAX_FORMAT, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=format) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def pt2_of(data: Mapping[str, bytes], **others: bytes) -> bytes:
    """Write as ``package_pt2`` of ``torch/export/pt2_archive/_package.py`` does, with any files in ``data``."""
    members = {f"model/data/{name}": content for name, content in data.items()}
    said = {
        "archive_format": b"pt2",
        "archive_version": b"0",
        ".data/version": b"6\n",
        "byteorder": b"little",
        **others,
    }
    return zip_of({**members, **{f"model/{name}": content for name, content in said.items()}})


def pt2_entry(
    path: str, dtype: int, size: Sequence[int], stride: Sequence[int], offset: int = 0, *, use_pickle: bool = False
) -> dict[str, Any]:
    """Say of a tensor what a weight table does (``PayloadMeta`` in ``torch/_export/serde/schema.py``)."""
    meta = {
        "dtype": dtype,
        "sizes": [{"as_int": side} for side in size],
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "strides": [{"as_int": step} for step in stride],
        "storage_offset": {"as_int": offset},
        "layout": 7,
    }
    return {"path_name": path, "is_param": False, "use_pickle": use_pickle, "tensor_meta": meta}


def pt2_table(entries: Mapping[str, Any]) -> bytes:
    return json.dumps({"config": entries}).encode()


def pt2_of_2_8(state: Mapping[str, Any], constants: Mapping[str, Any], *, model: str = "model") -> bytes:
    """Write as ``package_pt2`` of torch 2.8 does, by hand."""
    return pt2_of(
        {
            f"weights/{model}.pt": torch_file(dict(state)),
            f"constants/{model}.pt": torch_file(dict(constants)),
            f"sample_inputs/{model}.pt": torch_file(((torch.ones(2, 3),), {})),
        },
        **{f"models/{model}.json": b'{"graph_module": {}}'},
    )


def pt2_of_2_7(state: Mapping[str, Any], constants: Mapping[str, Any] | None) -> bytes:
    """Write as `torch.export.save` of torch 2.2 to 2.7 does (``torch/export/__init__.py`` there), by hand."""
    return zip_of(
        {
            "serialized_exported_program.json": b'{"graph_module": {}}',
            "serialized_state_dict.pt": torch_file(dict(state)),
            "serialized_constants.pt": b"" if constants is None else torch_file(dict(constants)),
            "serialized_example_inputs.pt": torch_file(((torch.ones(2, 3),), {})),
            "version": b"8.2",
            "extra_files/note.txt": b"a note",
        }
    )


def npz(arrays: Mapping[str, Array], *, compressed: bool = False) -> bytes:
    out = io.BytesIO()
    save = np.savez_compressed if compressed else np.savez
    save(out, **arrays)
    return out.getvalue()


def npy(array: Array) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def gguf_file(arrays: Mapping[str, Array], **settings: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama", **settings)
        writer.add_name("a model")
        writer.add_context_length(512)
        writer.add_token_list(["a", "b", "c"])
        for name, array in arrays.items():
            writer.add_tensor(name, array.copy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


_TENSORFLOW_TYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
}


MATRICES = {name.replace(".", "_"): array for name, array in ARRAYS.items() if array.dtype != np.float16}
"""The arrays that a MAT-file can hold, under names that it can have."""


def mat_file(arrays: Mapping[str, Any], **settings: Any) -> bytes:
    out = io.BytesIO()
    scipy.io.savemat(out, {**arrays}, **settings)
    return out.getvalue()


def varint(number: int) -> bytes:
    made = b""
    while number > 127:
        made += bytes([number & 127 | 128])
        number >>= 7
    return made + bytes([number])


def message(**fields: int | bytes | list[bytes]) -> bytes:
    """Write a message of protobuf; a field is called ``f<number>``."""
    made = b""
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            tag = varint(int(name[1:]) << 3 | (0 if isinstance(each, int) else 2))
            made += tag + (varint(each) if isinstance(each, int) else varint(len(each)) + each)
    return made


def leveldb_table(entries: Sequence[tuple[bytes, bytes]], *, entries_a_block: int = 4) -> bytes:
    """Write a table of LevelDB without compression; the checksums are zero."""
    out = b""

    def block(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
        nonlocal out
        made, last, start = b"", b"", len(out)
        for key, value in pairs:
            shared = len(last) if key.startswith(last) else 0
            made += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
            last = key
        made += struct.pack("<II", 0, 1)
        out += made + bytes(5)
        return varint(start) + varint(len(made))

    handles = []
    for at in range(0, len(entries), entries_a_block):
        part = entries[at : at + entries_a_block]
        handles.append((part[-1][0], block(part)))
    footer = block([]) + block(handles)
    return out + footer.ljust(40, b"\0") + (0xDB4775248B80FB57).to_bytes(8, "little")


def tensorflow_entry(array: Array, start: int, shard: int = 0) -> bytes:
    """Write a ``BundleEntryProto``; protobuf omits zeros."""
    shape = message(f2=[message(f1=side) if side else b"" for side in array.shape])
    numbers = {"f3": shard, "f4": start, "f5": array.nbytes}
    entry = message(f1=_TENSORFLOW_TYPES[array.dtype.name], f2=shape, **{key: n for key, n in numbers.items() if n})
    return entry + bytes([6 << 3 | 5]) + bytes(4)


def tensorflow_files(arrays: Mapping[str, Array], *, n_shards: int = 1, extra: bytes = b"") -> list[bytes]:
    """Write an index and its files as TensorFlow's ``BundleWriter`` does; ``extra`` is the entry of a text."""
    files, entries = [b""] * n_shards, [(b"", message(f1=n_shards, f3=message(f1=1)))]
    for nth, (name, array) in enumerate(sorted(arrays.items())):
        shard = nth % n_shards
        entries.append((name.encode(), tensorflow_entry(array, len(files[shard]), shard)))
        files[shard] += array.tobytes()
    if extra:
        entries.append((b"~graph", extra))
    return [leveldb_table(entries), *files]


def tensorflow_folder(folder: Path, arrays: Mapping[str, Array], **settings: Any) -> Path:
    """Write a folder of variables, and return its index."""
    folder.mkdir(exist_ok=True)
    index, *files = tensorflow_files(arrays, **settings)
    (folder / "variables.index").write_bytes(index)
    for nth, data in enumerate(files):
        (folder / f"variables.data-{nth:05d}-of-{len(files):05d}").write_bytes(data)
    return folder / "variables.index"


def flax_tree(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Make a tree of parameters: the points in names become levels."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *above, own = name.split(".")
        level = tree
        for key in above:
            level = level.setdefault(key, {})
        level[own] = array
    return tree


def flax_file(tree: Any, *, chunk_bytes: int = 1 << 30) -> bytes:
    """Write as `flax.serialization.msgpack_serialize` does; ``chunk_bytes`` is its ``MAX_CHUNK_SIZE``."""

    def packed(array: Array) -> bytes:
        return bytes(msgpack.packb((array.shape, array.dtype.name, array.tobytes("C")), use_bin_type=True))

    def extended(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return msgpack.ExtType(1, packed(value))
        if isinstance(value, np.generic):
            return msgpack.ExtType(3, packed(np.asarray(value)))
        if isinstance(value, complex):
            return msgpack.ExtType(2, msgpack.packb((value.real, value.imag)))
        return value

    def chunked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: chunked(each) for key, each in value.items()}
        if not isinstance(value, np.ndarray) or value.nbytes <= chunk_bytes:
            return value
        n = max(1, chunk_bytes // value.itemsize)
        flat = value.reshape(-1)
        chunks = {str(nth): flat[at : at + n] for nth, at in enumerate(range(0, flat.size, n))}
        shape = {str(nth): side for nth, side in enumerate(value.shape)}
        return {"__msgpack_chunked_array__": True, "shape": shape, "chunks": chunks}

    return bytes(msgpack.packb(chunked(tree), default=extended, strict_types=True))


def read_flax(data: bytes) -> Any:
    """Read as `flax.serialization.msgpack_restore` does."""

    def array_of(data: bytes) -> Array:
        shape, name, content = msgpack.unpackb(data, raw=True)
        dtype = getattr(ml_dtypes, name.decode(), None) or np.dtype(name.decode())
        return np.frombuffer(content, dtype).reshape(shape)

    def extended(code: int, data: bytes) -> Any:
        if code == 2:
            return complex(*msgpack.unpackb(data))
        return array_of(data) if code == 1 else array_of(data)[()]

    def whole(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "__msgpack_chunked_array__" in value:
            chunks, shape = ([part[str(nth)] for nth in range(len(part))] for part in (value["chunks"], value["shape"]))
            return np.concatenate(chunks).reshape(shape)
        return {key: whole(each) for key, each in value.items()}

    return whole(msgpack.unpackb(data, ext_hook=extended, raw=False))


_WORDS = {"float32": "fp32", "float16": "fp16", "float64": "fp64", "bfloat16": "bf16"}


def bhckpt_file(arrays: Mapping[str, Array], **first: Any) -> bytes:
    """Write as bhckpt's `CheckpointStore.save` does."""
    table, blocks = [], b""
    for name, array in arrays.items():
        data = array.tobytes()
        word = _WORDS.get(array.dtype.name, array.dtype.name)
        place = {"codec": "fp16", "nbytes": len(data), "off": len(blocks), "size": len(data)}
        table.append({"name": name, "shape": list(array.shape), "dtype": word, **place})
        blocks += data
    return bhckpt_of(table, blocks, **first)


def bhckpt_of(table: Any, blocks: bytes, **first: Any) -> bytes:
    said = {"arch": {"dim": 10}, "n_tensors": len(table), "total_bytes": len(blocks), **first}
    texts = [json.dumps(said).encode(), table if isinstance(table, bytes) else json.dumps(table).encode()]
    return b"BCK1" + b"".join(struct.pack("<I", len(text)) + text for text in texts) + blocks


def serverlessllm_folder(folder: Path, arrays: Mapping[str, Array], *, n_files: int = 2) -> Path:
    """Write as ServerlessLLM does: tensors at multiples of 64 bytes, in files by turns."""
    index: dict[str, Any] = {}
    data = [b""] * n_files
    for nth, (name, array) in enumerate(arrays.items()):
        number = nth % n_files
        data[number] += bytes(-len(data[number]) % 64)
        strides = [step // array.itemsize for step in array.strides]
        place = [len(data[number]), array.nbytes]
        index[name] = [*place, list(array.shape), strides, f"torch.{array.dtype.name}", number]
        data[number] += array.tobytes()
    return serverlessllm_of(folder, index, data)


def serverlessllm_of(folder: Path, index: Any, data: Sequence[bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    text = index if isinstance(index, bytes) else json.dumps(index, indent=2).encode()
    (folder / "tensor_index.json").write_bytes(text)
    for number, content in enumerate(data):
        (folder / f"tensor.data_{number}").write_bytes(content)
    return folder


def hub_snapshot(cache: Path, contents: Mapping[str, bytes]) -> Path:
    """Lay files out as the hub's cache does: links in a snapshot to blobs that are named by their content."""
    blobs, snapshot = cache / "models--a--b" / "blobs", cache / "models--a--b" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for nth, (name, content) in enumerate(contents.items()):
        (blobs / f"{nth:064x}").write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / f"{nth:064x}")
    return snapshot


def safetensors_of(header: Any, n_data_bytes: int) -> bytes:
    """Write a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (
        len(text).to_bytes(8, "little") + text + bytes(range(256)) * (n_data_bytes // 256) + bytes(n_data_bytes % 256)
    )


def same(left: Array, right: Array) -> bool:
    """Tell whether two arrays are alike to the bit."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def of_torch(tensor: torch.Tensor) -> Array:
    """Make numpy's array of a tensor of any dtype, without a change of its bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    return plain.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tensor.shape)


def some_of(dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of any dtype, with bytes of many kinds in it."""
    if dtype == torch.bool:
        return torch.arange(24).reshape(4, 6) % 3 == 0
    return torch.arange(256, dtype=torch.uint8).view(dtype).reshape(4, -1)
