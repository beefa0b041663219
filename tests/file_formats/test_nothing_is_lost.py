"""Files of every format, made in the ways their libraries have: each tensor that the library gives is listed, bit for
bit, or named as left out; or the file is refused."""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import shutil
import tarfile
import types
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bintensors.numpy
import cloudpickle
import joblib
import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pandas as pd
import pytest
import safetensors.torch
import scipy.io
import scipy.sparse
import skops.io
import torch
import torch.distributed.checkpoint as dcp
import xgboost as xgb
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tensorcas_mlflow.file_formats import FORMATS_IN, open_listing
from tensorcas_mlflow.layout import RefTarget
from tensorcas_mlflow.reader import CheckpointReader, diff, import_checkpoint, open_path, open_ref, plan_export
from tensorcas_mlflow.store import PAYLOAD_FILE, Store, write_payload
from tests.file_formats.hdf5_samples import arrays_in, hdf5_file, hdf5_of, hdf5_samples
from tests.file_formats.samples import (
    ARRAYS,
    bhckpt_file,
    flax_file,
    gguf_file,
    hub_snapshot,
    mat_file,
    message,
    of_torch,
    onnx_model,
    read_flax,
    serverlessllm_folder,
    tar_of,
    tensorflow_folder,
    torch_file,
    ubj,
    zip_of,
)
from tests.golden import make_tensorflow

DRAW = np.random.default_rng(0)
WEIGHT = DRAW.normal(size=(70, 90)).astype(np.float32)
Array = np.ndarray[Any, np.dtype[Any]]


# --- what a library gives


@dataclass(slots=True)
class Given:
    """Contents of an object: its arrays by their bits, and the number of other arrays."""

    arrays: Counter[tuple[str, tuple[int, ...], bytes]] = field(default_factory=Counter)
    n_others: int = 0

    def add(self, array: Array) -> None:
        names = array.dtype.names or ()
        is_padded = array.dtype.itemsize != sum(array.dtype[name].itemsize for name in names)
        for each in [array[name] for name in names] if names and is_padded else [array]:
            self.arrays[_bits(each)] += 1


def _bits(array: Array) -> tuple[str, tuple[int, ...], bytes]:
    """Say dtype, shape and bytes; in this machine's order, into which pickles and joblib turn what they load."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return str(array.dtype), array.shape, array.tobytes()


def given_in(what: Any) -> Given:
    """Look through an object as its library loaded it, each way to an array once."""
    given = Given()
    _look(what, given, ())
    return given


def _look(what: Any, given: Given, inside: tuple[int, ...]) -> None:
    if id(what) in inside or len(inside) > 60:
        return
    inside = (*inside, id(what))
    if isinstance(what, torch.Tensor):
        _look_at_tensor(what, given)
    elif isinstance(what, torch.UntypedStorage | torch.TypedStorage):
        given.add(of_torch(torch.tensor([], dtype=torch.uint8).set_(_untyped(what))))
    elif isinstance(what, np.ma.MaskedArray):
        given.n_others += 1
    elif isinstance(what, np.ndarray):
        if what.dtype.hasobject or what.dtype == np.longdouble:
            given.n_others += 1
            for each in what.reshape(-1).tolist() if what.dtype.hasobject else ():
                _look(each, given, inside)
        else:
            given.add(what)
    elif isinstance(what, bytes):
        given.n_others += len(what) >= 4096
    elif isinstance(what, (np.generic, str, int, float, complex, type, np.dtype)) or what is None or _is_global(what):
        pass
    else:
        for each in _within(what):
            _look(each, given, inside)


def _untyped(storage: Any) -> torch.UntypedStorage:
    return storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()


def _is_global(what: Any) -> bool:
    return isinstance(what, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | torch.dtype | np.ufunc)


def _look_at_tensor(tensor: torch.Tensor, given: Given) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_nested:
        given.n_others += 1
    else:
        given.add(of_torch(tensor))


def _within(what: Any) -> Iterator[Any]:
    if isinstance(what, dict):
        yield from what
        yield from what.values()
    elif isinstance(what, list | tuple | set | frozenset):
        yield from what
    else:
        state = what.__reduce_ex__(4)
        if isinstance(state, tuple):
            yield from state[1]
            yield from state[2:3]
            yield from state[3] or () if len(state) > 3 else ()
            for pair in (state[4] or ()) if len(state) > 4 else ():
                yield from pair


# --- files


@dataclass(frozen=True, slots=True)
class Made:
    """One file, and what its library gives of it."""

    path: Path
    given: Given


Make = Callable[[Path], Made]


def of_torch_save(what: Any, **settings: Any) -> Make:
    def make(folder: Path) -> Made:
        path = folder / "model.pt"
        torch.save(what, path, **settings)
        return Made(path, given_in(torch.load(path, weights_only=False)))

    return make


def of_pickle(what: Any, protocol: int = 4, dumps: Callable[..., bytes] = pickle.dumps) -> Make:
    def make(folder: Path) -> Made:
        path = folder / "model.pkl"
        path.write_bytes(dumps(what, protocol))
        return Made(path, given_in(pickle.loads(path.read_bytes())))

    return make


def of_bytes(name: str, data: Callable[[], bytes], arrays: Callable[[], Any]) -> Make:
    def make(folder: Path) -> Made:
        (folder / name).write_bytes(data())
        return Made(folder / name, given_in(arrays()))

    return make


def of_folder(write: Callable[[Path], Path], arrays: Callable[[Path], Any]) -> Make:
    def make(folder: Path) -> Made:
        path = write(folder)
        return Made(path, given_in(arrays(path)))

    return make


class Weights(torch.Tensor):
    """A subclass that is pickled as torch pickles subclasses."""


class Holder:
    """An object with slots, and attributes that are set by a function of its own."""

    __slots__ = ("array", "deep")

    def __init__(self) -> None:
        self.array = WEIGHT[:3]
        self.deep = {"list": [WEIGHT[1], (WEIGHT[2],)]}


class WithNamedArguments:
    """An object whose arguments have names, which takes protocol 4."""

    def __new__(cls, *, array: Array) -> WithNamedArguments:
        made = super().__new__(cls)
        made.array = array  # type: ignore[attr-defined]
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), {"array": self.array}  # type: ignore[attr-defined]

    def __getstate__(self) -> None:
        return None


class Twice:
    """A tensor of numpy's that sets its state by a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Twice, (), {"array": WEIGHT[5:9]}, None, None, _set_state


def _set_state(what: Any, state: dict[str, Any]) -> None:
    what.__dict__.update(state)


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2))


def training() -> dict[str, Any]:
    net = module()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(4, 30)).sum().backward()
    optimizer.step()
    return {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "numpy": np.random.RandomState(0).get_state(),
        "torch": torch.get_rng_state(),
        "epoch": 3,
        "curve": [0.5, np.float64(0.25)],
    }


BASE = torch.arange(600.0).reshape(20, 30)
VIEWS = {
    "tied": [BASE, BASE],
    "transposed": BASE.t(),
    "rows": BASE[3:7],
    "steps": BASE[::2, 1::3],
    "expanded": BASE[:1].expand(5, 30),
    "last": BASE.reshape(-1)[-7:],
    "channels": torch.arange(120.0).reshape(1, 2, 3, 20).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}


def kinds() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "quantized": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "meta": torch.ones(3, device="meta"),
            "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
            "complex": torch.ones(3, dtype=torch.complex64),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "parameter": torch.nn.Parameter(torch.ones(2, 2)),
            "subclass": torch.ones(3).as_subclass(Weights),
            "storage": torch.ones(9).untyped_storage(),
            "set": {torch.ones(5)},
            "keys": {torch.ones(6): 1},
            "objects": np.array(["a", None, WEIGHT[3]], object),
            "array": WEIGHT,
            "ordered": OrderedDict(a=torch.ones(1)),
            "default": defaultdict(list, a=[torch.ones(2)]),
        }


NUMPY = {
    "plain": WEIGHT,
    "small": np.arange(3),
    "fortran": np.asfortranarray(WEIGHT),
    "turned": DRAW.normal(size=(4, 5, 6)).transpose(1, 2, 0),
    "part": WEIGHT[::2, 3:9],
    "swapped": np.arange(700).astype(">i4"),
    "record": np.zeros(5, [("x", "f4"), ("y", "i8", (2,))]),
    "padded": np.ones(5, np.dtype([("x", "u1"), ("y", "f8")], align=True)),
    "masked": np.ma.masked_array(np.arange(4.0), [0, 1, 0, 1]),
    "objects": np.array([WEIGHT[0], "text"], object),
    "times": np.array(["2020-01-01", "2021-01-01"], "M8[ns]"),
    "texts": np.array(["a", "bcd"]),
    "long": np.ones(2, np.longdouble),
    "scalar": np.array(2.5),
    "empty": np.zeros((0, 7), np.float16),
    "one": np.float32(7),
    "bits": np.array([True, False]),
    "half": WEIGHT[0].astype(ml_dtypes.bfloat16),
}
NESTED = {
    "arrays": NUMPY,
    "list": [WEIGHT, [WEIGHT[:2], (WEIGHT[:3],)]],
    "again": NUMPY["plain"],
    "frame": pd.DataFrame({"a": np.arange(5), "b": np.arange(5.0), "c": np.arange(5, 10)}),
    "sparse": scipy.sparse.eye(5).tocsr(),
    "holder": Holder(),
    "twice": Twice(),
    "sets": frozenset([1, 2]),
    "bytes": bytes(5000),
}
X = DRAW.normal(size=(60, 4))
Y = np.arange(60) % 3


def estimators() -> dict[str, Any]:
    return {
        "forest": RandomForestClassifier(3, random_state=0).fit(X, Y),
        "boosted": GradientBoostingRegressor(n_estimators=3, random_state=0).fit(X, Y),
        "pipe": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y),
    }


def npz(arrays: dict[str, Any], save: Callable[..., None]) -> Callable[[], bytes]:
    def data() -> bytes:
        out = io.BytesIO()
        save(out, **arrays)
        return out.getvalue()

    return data


def dumped(what: Any, dump: Callable[[Any, Any], Any]) -> Callable[[], bytes]:
    def data() -> bytes:
        out = io.BytesIO()
        dump(what, out)
        return out.getvalue()

    return data


def with_gaps_in_the_memo(what: Any) -> bytes:
    """Write a file of `torch.save` whose pickle remembers things as Python 2 did, from 1 on, and leaves numbers out."""
    out = io.BytesIO()
    torch.save(what, out)

    def renumbered(data: bytes) -> bytes:
        made = b""
        spans = [(op, arg, at) for op, arg, at in pickletools.genops(data)]
        for (op, arg, at), end in zip(spans, [*(at for _, _, at in spans[1:]), len(data)], strict=True):
            if op.name in ("BINPUT", "LONG_BINPUT"):
                made += pickle.LONG_BINPUT + (3 * arg + 1).to_bytes(4, "little")
            elif op.name in ("BINGET", "LONG_BINGET"):
                made += pickle.LONG_BINGET + (3 * arg + 1).to_bytes(4, "little")
            else:
                made += data[at:end]
        return made

    changed = io.BytesIO()
    with zipfile.ZipFile(out) as old, zipfile.ZipFile(changed, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, renumbered(data) if info.filename.endswith("data.pkl") else data)
    return changed.getvalue()


def in_onnx(path: Path) -> Any:
    """Give what the library reads: initializers, constants, and those of graphs within graphs."""
    found: list[Any] = []

    def look(graph: Any) -> None:
        found.extend(graph.initializer)
        found.extend(graph.sparse_initializer)
        for node in graph.node:
            for attribute in node.attribute:
                found.extend([attribute.t] if attribute.HasField("t") else [])
                if attribute.HasField("g"):
                    look(attribute.g)

    look(onnx.load(path).graph)
    others = (onnx.TensorProto.STRING, onnx.TensorProto.UINT4)
    is_plain = [isinstance(each, onnx.TensorProto) and each.data_type not in others for each in found]
    arrays = [onnx.numpy_helper.to_array(each) for each, plain in zip(found, is_plain, strict=True) if plain]
    left_out = [np.array([None], object)] * (len(found) - len(arrays))
    return [*arrays, *left_out]


def write_onnx(folder: Path, **settings: Any) -> Path:
    onnx.save(onnx_model(), folder / "model.onnx", **settings)
    return folder / "model.onnx"


def write_pt2(folder: Path) -> Path:
    net = module().eval()
    torch.export.save(torch.export.export(net, (torch.ones(1, 30),)), folder / "model.pt2")
    return folder / "model.pt2"


def in_pt2(path: Path) -> Any:
    """Give the weights, and an object for the one example input."""
    return [dict(torch.export.load(path).state_dict), NO_ARRAYS]


def write_torchscript(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module()), folder / "model.pt")
    return folder / "model.pt"


def write_dcp(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(training() | {"array": WEIGHT, "nested": {"list": [torch.ones(3), 4]}}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def in_dcp(_: Path) -> Any:
    return training() | {"array": WEIGHT, "nested": {"list": [torch.ones(3), 4]}}


def write_shards(folder: Path) -> Path:
    state = {f"layers.{n}.weight": torch.full((5, 5), float(n)) for n in range(4)}
    index = {}
    for nth, names in enumerate((list(state)[:2], list(state)[2:]), 1):
        file = f"model-0000{nth}-of-00002.safetensors"
        safetensors.torch.save_file({name: state[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def in_shards(folder: Path) -> Any:
    return [safetensors.torch.load_file(path) for path in folder.glob("*.safetensors")]


def write_snapshot(folder: Path) -> Path:
    return hub_snapshot(folder, {"model.safetensors": safetensors.torch.save({"w": torch.from_numpy(WEIGHT)})})


def write_self_contained(folder: Path) -> Path:
    write_payload(folder, {"w": WEIGHT, "tiny": np.arange(3)}, flavor="generic")
    return folder / PAYLOAD_FILE


def both_of(stored: dict[str, bytes], deflated: dict[str, bytes]) -> bytes:
    """Write an archive with members of two kinds."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in stored.items():
            archive.writestr(name, content)
        for name, content in deflated.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED)
    return out.getvalue()


NO_ARRAYS = np.array([None, "text"], object)
IN_NPZ = {name: array for name, array in NUMPY.items() if name not in ("masked", "one", "half", "objects")}
IN_NPZ["objects"] = NO_ARRAYS
IN_SKOPS = {"w": WEIGHT, "small": np.arange(3), "objects": NO_ARRAYS}
STATE = {"w": torch.from_numpy(WEIGHT), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 2)}


def trusted(data: bytes) -> Any:
    return skops.io.loads(data, trusted=skops.io.get_untrusted_types(data=data))


def of_skops(what: Any, **settings: Any) -> Make:
    def make(folder: Path) -> Made:
        path = folder / "model.skops"
        path.write_bytes(skops.io.dumps(what, **settings))
        return Made(path, given_in(trusted(path.read_bytes())))

    return make


def of_mat(variables: dict[str, Any], **settings: Any) -> Make:
    def arrays() -> Any:
        read = scipy.io.loadmat(io.BytesIO(mat_file(variables, **settings)))
        return [NO_ARRAYS if name in NOT_IN_MAT else read[name] for name in variables]

    return of_bytes("model.mat", lambda: mat_file(variables, **settings), arrays)


IN_MAT = {name: NUMPY[name] for name in ("plain", "small", "fortran", "turned", "part", "scalar", "bits", "swapped")}
IN_MAT |= {"none": np.zeros((0, 7)), "bytes": np.arange(5, dtype=np.uint8), "one": np.float32(7)}
NOT_IN_MAT = {
    "text": "a text",
    "cell": np.array([WEIGHT[0], "text"], object),
    "struct": {"a": WEIGHT[0], "b": 1},
    "sparse": scipy.sparse.eye(5).tocsc(),
    "complex": WEIGHT[0] + 1j,
}
GOLDEN = Path(make_tensorflow.__file__).parent / "tensorflow"
IN_TENSORFLOW = {
    f"layer-{name}/kernel/.ATTRIBUTES/VARIABLE_VALUE": np.ascontiguousarray(NUMPY[name])
    for name in ("plain", "small", "fortran", "scalar", "empty", "bits", "half")
}


def of_flax(tree: Any, **settings: Any) -> Make:
    data = flax_file(tree, **settings)
    return of_bytes("params.msgpack", lambda: data, lambda: read_flax(data))


IN_FLAX = {name: NUMPY[name] for name in ("plain", "small", "fortran", "turned", "part", "scalar", "empty", "bits")}
IN_FLAX |= {"half": NUMPY["half"], "small.2": np.arange(3), "eighths": WEIGHT[0].astype(ml_dtypes.float8_e4m3fn)}


def of_hdf5(write: Callable[[], bytes]) -> Make:
    def make(folder: Path) -> Made:
        path = folder / "model.h5"
        path.write_bytes(write())
        arrays, others = arrays_in(path.read_bytes())
        return Made(path, given_in([*arrays.values(), *[NO_ARRAYS] * len(others)]))

    return make


FILES: dict[str, dict[str, Make]] = {
    "torch": {
        "training": of_torch_save(training()),
        "training, before zip": of_torch_save(training(), _use_new_zipfile_serialization=False),
        "views": of_torch_save(VIEWS),
        "views, before zip": of_torch_save(VIEWS, _use_new_zipfile_serialization=False),
        "kinds": of_torch_save(kinds()),
        # torch cannot load a storage by itself that it has saved so.
        "kinds, before zip": of_torch_save(
            {name: kind for name, kind in kinds().items() if name != "storage"}, _use_new_zipfile_serialization=False
        ),
        "a module": of_torch_save(module()),
        "an optimizer": of_torch_save(torch.optim.SGD(module().parameters(), momentum=0.9)),
        "an array": of_torch_save(WEIGHT),
        "arrays": of_torch_save(NESTED),
        **{f"arrays, protocol {n}": of_torch_save(NESTED, pickle_protocol=n) for n in (3, 4, 5)},
        "TorchScript": of_folder(write_torchscript, lambda path: dict(torch.jit.load(path).state_dict())),
        "gaps in the memo": of_bytes("m.pt", lambda: with_gaps_in_the_memo(training()), training),
    },
    "pt2": {"a module": of_folder(write_pt2, in_pt2)},
    "pickle": {
        **{f"arrays, protocol {n}": of_pickle(NESTED, n) for n in (2, 3, 4, 5)},
        "named arguments": of_pickle(WithNamedArguments(array=WEIGHT)),
        "optimized": of_pickle(NESTED, 4, lambda what, n: pickletools.optimize(pickle.dumps(what, n))),
        "cloudpickle": of_pickle({"f": NESTED, "g": estimators()}, 5, cloudpickle.dumps),
        "estimators": of_pickle(estimators()),
        "a module": of_pickle(module()),
        "views": of_pickle(VIEWS),
        "two": of_bytes("two.pkl", lambda: pickle.dumps([WEIGHT]) + pickle.dumps({"a": X}), lambda: [WEIGHT, X]),
        "joblib": of_bytes("m.joblib", dumped(NESTED, joblib.dump), lambda: NESTED),
        "joblib, estimators": of_bytes("e.joblib", dumped(estimators(), joblib.dump), estimators),
    },
    "npz": {
        "stored": of_bytes("a.npz", npz(IN_NPZ, np.savez), lambda: IN_NPZ),
        "deflated": of_bytes("a.npz", npz(IN_NPZ, np.savez_compressed), lambda: IN_NPZ),
    },
    "npy": {
        name: of_bytes(
            "a.npy", dumped(NUMPY[name], lambda array, out: np.save(out, array)), lambda name=name: NUMPY[name]
        )
        for name in ("plain", "fortran", "swapped", "record", "scalar", "empty")
    },
    "skops": {
        "estimators": of_skops([estimators()["forest"], estimators()["pipe"]]),
        "arrays": of_skops(IN_SKOPS),
        "deflated": of_skops({"w": WEIGHT, "small": np.arange(3)}, compression=zipfile.ZIP_DEFLATED),
    },
    "onnx": {
        "in one file": of_folder(write_onnx, in_onnx),
        "external data": of_folder(
            lambda folder: write_onnx(folder, save_as_external_data=True, size_threshold=0), in_onnx
        ),
        "external data, a file each": of_folder(
            lambda folder: write_onnx(
                folder, save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0
            ),
            in_onnx,
        ),
    },
    "flax": {
        "a tree": of_flax({"params": {"dense": IN_FLAX}, "scalar": np.float32(2), "complex": 1j, "step": 7}),
        "chunks": of_flax({"params": {"dense": IN_FLAX, "kernel": WEIGHT}}, chunk_bytes=1000),
        "an array": of_flax(WEIGHT),
    },
    "mat": {
        "plain": of_mat({**IN_MAT, **NOT_IN_MAT}),
        "compressed": of_mat({**IN_MAT, **NOT_IN_MAT}, do_compression=True),
    },
    "tensorflow": {
        "one file": of_folder(lambda folder: tensorflow_folder(folder, IN_TENSORFLOW), lambda _: IN_TENSORFLOW),
        "of TensorFlow": of_folder(
            lambda folder: shutil.copytree(GOLDEN, folder / "variables") / "variables.index",
            lambda _: [make_tensorflow.ARRAYS, NO_ARRAYS, NO_ARRAYS],
        ),
        "files, and a text": of_folder(
            lambda folder: tensorflow_folder(folder, IN_TENSORFLOW, n_shards=3, extra=message(f1=7, f5=9)),
            lambda _: [IN_TENSORFLOW, NO_ARRAYS],
        ),
    },
    "dcp": {"one process": of_folder(write_dcp, in_dcp)},
    "safetensors": {
        "one file": of_bytes("m.safetensors", lambda: safetensors.torch.save(dict(STATE)), lambda: STATE),
        "shards": of_folder(write_shards, in_shards),
        "snapshot": of_folder(write_snapshot, lambda _: WEIGHT),
    },
    "bintensors": {"one file": of_bytes("m.bt", lambda: bytes(bintensors.numpy.save(ARRAYS)), lambda: ARRAYS)},
    "gguf": {"one file": of_bytes("m.gguf", lambda: gguf_file(ARRAYS), lambda: ARRAYS)},
    "bhckpt": {"one file": of_bytes("m.bckpt", lambda: bhckpt_file(ARRAYS), lambda: ARRAYS)},
    "serverlessllm": {
        "a folder": of_folder(lambda folder: serverlessllm_folder(folder / "m", ARRAYS), lambda _: ARRAYS)
    },
    "hdf5": {name: of_hdf5(make) for name, make in hdf5_samples().items()},
    "zip": {
        "Keras": of_bytes(
            "m.keras",
            lambda: zip_of({"config.json": b"{}", "model.weights.h5": hdf5_file(hdf5_of(ARRAYS)), "x": bytes(99)}),
            lambda: [ARRAYS, NO_ARRAYS],
        ),
        "TorchServe": of_bytes(
            "m.mar",
            lambda: zip_of({"MAR-INF/MANIFEST.json": b"{}", "m.safetensors": safetensors.torch.save(dict(STATE))}),
            lambda: STATE,
        ),
        "deflated": of_bytes(
            "m.zip",
            lambda: both_of({"a.txt": b"text", "a.pt": torch_file(STATE)}, {"b.npz": gguf_file(ARRAYS)}),
            lambda: [STATE, NO_ARRAYS],
        ),
    },
    "tar": {
        "NeMo": of_bytes(
            "m.nemo",
            lambda: tar_of({"./model_config.yaml": b"a: 1", "./model_weights.ckpt": torch_file(STATE), "x": bytes(99)}),
            lambda: [STATE, NO_ARRAYS],
        ),
        **{
            f"long names, {format}": of_bytes(
                "m.tar",
                lambda format=format: tar_of(
                    {
                        "é" * 80 + "/a.safetensors": safetensors.torch.save(dict(STATE)),
                        "b.h5": hdf5_file(hdf5_of(ARRAYS)),
                    },
                    format,
                ),
                lambda: [STATE, ARRAYS],
            )
            for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
        },
        "within each other": of_bytes(
            "m.tar",
            lambda: tar_of(
                {"a.tar": tar_of({"b.zip": zip_of({"c.safetensors": safetensors.torch.save(dict(STATE))})})}
            ),
            lambda: STATE,
        ),
    },
    "self-contained": {"one file": of_folder(write_self_contained, lambda _: [WEIGHT, np.arange(3)])},
}
CASES = [(kind, name) for kind, named in FILES.items() for name in named]
FOLDERS_OF_ONE_FILE_EACH = {("safetensors", "shards"), ("safetensors", "snapshot"), ("serverlessllm", "a folder")}
"""Of these a store shows each file by itself."""


def stored(path: Path, folder: Path) -> CheckpointReader:
    """Store a file as it is, with those beside it that it names."""
    store = Store.init(folder)
    files = [*path.iterdir()] if path.is_dir() else [*path.parent.iterdir()]
    for file in files:
        if file.is_file():
            with store.write_file(file) as pending:
                pending.commit(RefTarget(path=f"model/{file.name}"))
    ref = store.artifact(f"model/{'.metadata' if path.is_dir() else path.name}")
    assert ref is not None
    return open_ref(store, ref)


def imported(path: Path, folder: Path) -> CheckpointReader:
    store = Store.init(folder)
    return open_ref(
        store, import_checkpoint(store, open_listing(path), RefTarget(run_id="r", step=1), allow_left_out=True)
    )


def converted(path: Path, folder: Path) -> CheckpointReader:
    """Write a file into the first format that can hold all its tensors; none can hold both texts and bfloat16."""
    folder.mkdir()
    listing = open_listing(path)
    for suffix in ("npz", "pt", "safetensors"):
        out = folder / f"all.{suffix}"
        try:
            plan_export(listing, out, allow_left_out=True).execute()
        except ValueError as error:
            assert "cannot hold" in str(error)  # noqa: PT017 -- refused, and said so
            continue
        return open_path(out)
    return open_path(path)


DOORS = {
    "where it lies": lambda path, _: open_path(path),
    "stored": stored,
    "imported": imported,
    "converted": converted,
}


# Files of version 1.10 of HDF5 lie between those of 1.8 and of the latest.
LONG = {("hdf5", name) for name in FILES["hdf5"] if name.endswith(", 1.10")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(*each, id=", ".join(each), marks=pytest.mark.long if each in LONG else ()) for each in CASES],
)
def test_every_tensor_that_a_library_reads_is_listed_or_named(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    made = FILES[kind][name](tmp_path / "files")
    assert made.given.arrays

    listing = open_listing(made.path)
    listed = Counter(_bits(listing.array(each)) for each in listing.locations)
    given = made.given.arrays
    if kind == "skops":
        # It writes numbers as arrays, and what one object is asked for twice is there once.
        listed, given = (Counter({bits: 1 for bits in each if bits[1]}) for each in (listed, given))

    assert listing.format == kind
    assert listed == given
    assert len(listing.left_out) == made.given.n_others
    for nth, (door, opens) in enumerate(DOORS.items()):
        if door == "stored" and (kind, name) in FOLDERS_OF_ONE_FILE_EACH:
            continue
        with opens(made.path, tmp_path / f"{nth}") as reader:
            arrays = {each: reader.tensor(each) for each in reader}
            assert list(arrays) == list(listing.locations), door
            assert all(_bits(array) == _bits(listing.array(each)) for each, array in arrays.items()), door
            if door in ("where it lies", "stored"):
                assert reader.left_out == listing.left_out


@pytest.mark.parametrize("booster", ["gbtree", "gblinear", "dart"])
def test_the_arrays_of_an_xgboost_model_are_those_of_its_json(booster: str, tmp_path: Path) -> None:
    (tmp_path / "m.ubj").write_bytes(ubj(booster))
    text = json.loads(bytes(xgb.Booster(model_file=tmp_path / "m.ubj").save_raw("json")))
    numbers: dict[str, list[Any]] = {}

    def look(value: Any, name: str) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
            numbers[name] = value
        for key, each in items:
            look(each, f"{name}.{key}" if name else key)

    look(text, "")
    with stored(tmp_path / "m.ubj", tmp_path / "store") as reader:
        listed = {name: reader.tensor(name) for name in reader}
        empty = {name for name, value in numbers.items() if not value}

        assert listed.keys() | empty == numbers.keys()
        assert all(array.tolist() == np.array(numbers[name], array.dtype).tolist() for name, array in listed.items())


def test_skops_arrays_are_named_by_their_path_at_every_save(tmp_path: Path) -> None:
    model = {"forest": estimators()["forest"], "sparse": scipy.sparse.eye(5).tocsr(), "twice": [WEIGHT, WEIGHT]}
    readers = []
    for nth in range(2):
        path = tmp_path / f"{nth}.skops"
        skops.io.dump(copy.deepcopy(model), path)
        readers.append(stored(path, tmp_path / f"{nth}"))
    trees = [tree.tree_.__getstate__() for tree in model["forest"].estimators_]

    assert {f"sparse.{name}" for name in ("data", "indices", "indptr", "shape", "format")} <= {*readers[0]}
    assert all(
        readers[0].tensor(f"forest.estimators_.{nth}.tree_.values").tobytes() == tree["values"].tobytes()
        and (readers[0].tensor(f"forest.estimators_.{nth}.tree_.nodes.threshold") == tree["nodes"]["threshold"]).all()
        for nth, tree in enumerate(trees)
    )
    assert readers[0].tensor("twice.0").tobytes() == readers[0].tensor("twice.1").tobytes() == WEIGHT.tobytes()
    found = diff(*readers)
    assert (found.added, found.removed, found.changed) == ((), (), ())


def test_no_format_is_passed_over() -> None:
    assert {*FILES, "xgboost"} == {*FORMATS_IN}
