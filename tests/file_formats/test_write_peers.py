"""Written files, read to the same bits by the formats' own libraries."""

from __future__ import annotations

import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bintensors.numpy
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from tensorcas_mlflow.base.dtypes import parse_dtype
from tensorcas_mlflow.file_formats import FORMATS_OUT
from tests.file_formats.arrays import ArrayTensors, write

PLAIN = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]
FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
OF_FORMAT = {
    "safetensors": [*PLAIN, *FLOAT8, "bfloat16", "complex64"],
    "torch": [*PLAIN, *FLOAT8, "bfloat16", "complex64", "complex128"],
    "npz": [*PLAIN, "complex64", "complex128", ">float32", "S3", "U2", "datetime64[ns]", "{a:int8,b:float32[2]}"],
    "bintensors": [*PLAIN, "float8_e5m2", "float8_e4m3fn", "bfloat16"],
}
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5,), (4, 3), (2, 1, 3, 2)]


def arrays(dtypes: list[str]) -> dict[str, Any]:
    """Arrays of every dtype in every shape, of any bits."""
    draw = np.random.default_rng(7)
    made: dict[str, Any] = {}
    for dtype in map(parse_dtype, dtypes):
        for shape in SHAPES:
            n_bytes = int(np.prod(shape)) * dtype.itemsize
            bits = draw.integers(0, 2 if dtype.kind == "b" else 256, n_bytes, np.uint8)
            if dtype.kind == "U":
                bits = np.full(int(np.prod(shape)) * 2, ord("x"), "u4").view(np.uint8)
            made[f"{dtype.kind}.{dtype.name}.{len(made)}"] = bits.view(dtype).reshape(shape)
    return made


def bits(values: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in values.items()}


def torch_bits(values: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(value.dtype)[6:], tuple(value.shape), _bytes(value)) for name, value in values.items()}


def _bytes(value: torch.Tensor) -> bytes:
    # torch views no empty tensor as another dtype.
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


# --- safetensors


def test_safetensors_are_read_by_the_library_in_every_dtype(tmp_path: Path) -> None:
    given = arrays(OF_FORMAT["safetensors"])
    write(ArrayTensors(given), tmp_path / "m.safetensors")

    assert torch_bits(safetensors.torch.load_file(tmp_path / "m.safetensors")) == bits(given)


def test_safetensors_are_the_librarys_bytes(tmp_path: Path) -> None:
    given = arrays(PLAIN) | {'quote"\\ é \x7f\t': np.arange(3), "b" * 300: np.ones((2, 2), ml_dtypes.bfloat16)}
    write(ArrayTensors(given, metadata={"format": "pt"}), tmp_path / "m.safetensors")

    assert (tmp_path / "m.safetensors").read_bytes() == safetensors.numpy.save(given, metadata={"format": "pt"})


def test_safetensors_hold_metadata_as_texts(tmp_path: Path) -> None:
    metadata = {"note": "plain é", "depth": 3, "nested": {"b": [1, None], "a": "x"}}
    write(ArrayTensors({"w": np.ones(2)}, metadata=metadata), tmp_path / "m.safetensors")

    with safetensors.safe_open(tmp_path / "m.safetensors", "np") as file:
        assert file.metadata() == {
            "note": "plain é",
            "depth": "3",
            "nested": '{"a": "x", "b": [1, null]}',
            "format": "pt",
        }


def test_shards_are_filled_in_order_and_the_index_says_which_holds_what(tmp_path: Path) -> None:
    sizes = {"big": 500, "z": 40, "e": 60, "b": 1, "r": 200, "a": 5}
    given = {name: np.full(n, n % 7, np.uint8) for name, n in sizes.items()}
    written = write(ArrayTensors(given), tmp_path / "model", shard_bytes=100)

    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 806}
    assert [int(index["weight_map"][name][6:11]) for name in given] == [1, 2, 2, 3, 4, 5]
    assert [file.path.name for file in written.files[:2]] == [f"model-0000{n}-of-00005.safetensors" for n in (1, 2)]
    found: dict[str, Any] = {}
    for shard in sorted((tmp_path / "model").glob("*.safetensors")):
        found |= safetensors.numpy.load_file(shard)
    assert bits(found) == bits(given)


def test_a_single_shard_is_one_file_without_an_index(tmp_path: Path) -> None:
    write(ArrayTensors({"w": np.ones(3)}), tmp_path / "model", shard_bytes=10**9)

    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


@pytest.mark.long
def test_transformers_loads_shards(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8,
    )  # fmt: skip
    model = BertModel(config).eval()
    given = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    written = write(ArrayTensors(given), tmp_path / "model", shard_bytes=2000)
    config.save_pretrained(tmp_path / "model")

    loaded = BertModel.from_pretrained(tmp_path / "model", local_files_only=True)
    assert len(written.files) > 3
    assert torch_bits(loaded.state_dict()) == torch_bits(model.state_dict())


# --- torch


@pytest.mark.parametrize("options", [{}, {"mmap": True}])
def test_torch_files_are_read_by_torch_in_every_dtype(tmp_path: Path, options: dict[str, Any]) -> None:
    given = arrays(OF_FORMAT["torch"])
    write(ArrayTensors(given), tmp_path / "m.pt")

    loaded = torch.load(tmp_path / "m.pt", weights_only=True, **options)
    assert type(loaded).__name__ == "OrderedDict"
    assert torch_bits(loaded) == bits(given)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in loaded.values())


def test_the_pickle_of_a_torch_file_does_what_that_of_torch_does(tmp_path: Path) -> None:
    given = arrays(OF_FORMAT["torch"])
    write(ArrayTensors(given), tmp_path / "ours.pt")
    torch.save(torch.load(tmp_path / "ours.pt", weights_only=True), tmp_path / "theirs.pt")

    ours, theirs = (_operations(tmp_path / name) for name in ("ours.pt", "theirs.pt"))
    assert ours == theirs


def _operations(path: Path) -> list[tuple[str, Any]]:
    """Return the operations of a pickle, with each memo reference replaced by the operation it refers to."""
    with zipfile.ZipFile(path) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    done: list[tuple[str, Any]] = []
    notes: dict[int, tuple[str, Any]] = {}
    n_tuple = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
    for operation, argument, _ in pickletools.genops(data):
        if operation.name in ("BINPUT", "LONG_BINPUT"):
            notes[argument] = done[-1]
        elif operation.name in ("BINGET", "LONG_BINGET"):
            done.append(notes[argument])
        elif operation.name in n_tuple:
            done.insert(len(done) - n_tuple[operation.name], ("MARK", None))
            done.append(("TUPLE", None))
        elif operation.name == "EMPTY_TUPLE":
            done += [("MARK", None), ("TUPLE", None)]
        else:
            done.append((operation.name, argument))
    return done


def test_records_of_a_torch_file_begin_at_multiples_of_64_and_have_their_checksums(tmp_path: Path) -> None:
    write(ArrayTensors(arrays(PLAIN)), tmp_path / "m.pt")

    data = (tmp_path / "m.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "archive/data.pkl"
        for info in archive.infolist():
            begin = info.header_offset + 30 + sum(struct.unpack_from("<HH", data, info.header_offset + 26))
            assert begin % 64 == 0
            assert data[begin : begin + info.file_size] == archive.read(info)


# --- npz


def test_npz_archives_are_read_by_numpy_in_every_dtype(tmp_path: Path) -> None:
    given = arrays(OF_FORMAT["npz"]) | {"a/b": np.arange(3), "é": np.ones(2), "x.npy": np.zeros(1)}
    write(ArrayTensors(given), tmp_path / "m.npz")

    with np.load(tmp_path / "m.npz", allow_pickle=False) as loaded:
        assert bits({name: loaded[name] for name in loaded.files}) == bits(given)
    with zipfile.ZipFile(tmp_path / "m.npz") as archive:
        assert archive.testzip() is None


def test_the_members_of_an_npz_archive_are_numpys_own_bytes(tmp_path: Path) -> None:
    given = arrays(PLAIN)
    write(ArrayTensors(given), tmp_path / "m.npz")

    with zipfile.ZipFile(tmp_path / "m.npz") as archive:
        for name, value in given.items():
            file = io.BytesIO()
            np.save(file, value)
            assert archive.read(f"{name}.npy") == file.getvalue()


# --- bintensors


@pytest.mark.parametrize("metadata", [{}, {"b": "1", "a": "2" * 300, "é": ""}])
def test_bintensors_are_the_librarys_bytes(tmp_path: Path, metadata: dict[str, str]) -> None:
    given = arrays(PLAIN) | {"n" * 260: np.ones((300, 70_000), np.bool_), "é": np.arange(3)}
    write(ArrayTensors(given, metadata=metadata), tmp_path / "m.bt")

    assert (tmp_path / "m.bt").read_bytes() == bintensors.numpy.save(given, metadata=metadata or None)


def test_bintensors_are_read_by_the_library_in_every_dtype(tmp_path: Path) -> None:
    import bintensors.torch

    given = arrays(OF_FORMAT["bintensors"])
    given = {name: value for name, value in given.items() if value.dtype.name not in ("uint16", "uint32", "uint64")}
    write(ArrayTensors(given), tmp_path / "m.bt")

    assert torch_bits(bintensors.torch.load_file(tmp_path / "m.bt")) == bits(given)


# --- ServerlessLLM


def test_partitions_hold_what_their_index_says(tmp_path: Path) -> None:
    given = arrays(OF_FORMAT["torch"])
    write(ArrayTensors(given), tmp_path / "m", format="serverlessllm", partitions=3)

    index = json.loads((tmp_path / "m" / "tensor_index.json").read_text())
    found: dict[str, Any] = {}
    for name, (offset, size, shape, strides, dtype, partition) in index.items():
        data = (tmp_path / "m" / f"tensor.data_{partition}").read_bytes()[offset : offset + size]
        array = np.frombuffer(data, parse_dtype(dtype.removeprefix("torch."))).reshape(shape)
        assert list(torch.empty(shape).stride()) == strides
        assert offset % 64 == 0
        found[name] = array
    assert bits(found) == bits({name: given[name] for name in index})
    assert index.keys() == given.keys()


def test_the_largest_tensor_goes_first_into_the_emptiest_partition(tmp_path: Path) -> None:
    sizes = {"a": 640, "b": 1280, "c": 640, "d": 128, "e": 2560}
    given = {name: np.zeros(n, np.uint8) for name, n in sizes.items()}
    write(ArrayTensors(given), tmp_path / "m", partitions=2)

    index = json.loads((tmp_path / "m" / "tensor_index.json").read_text())
    assert {name: (entry[5], entry[0]) for name, entry in index.items()} == {
        "e": (0, 0), "b": (1, 0), "a": (1, 1280), "c": (1, 1920), "d": (0, 2560)
    }  # fmt: skip


def test_partition_without_a_tensor_is_not_written(tmp_path: Path) -> None:
    write(ArrayTensors({"w": np.ones(3)}), tmp_path / "m", partitions=8)

    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["tensor.data_0", "tensor_index.json"]


# --- all


@pytest.mark.parametrize("format", FORMATS_OUT)
def test_empty_set_of_tensors_is_written_as_a_file(tmp_path: Path, format: str) -> None:
    written = write(ArrayTensors({}), tmp_path / "none", format=format)

    assert written.n_tensors == 0
    assert sum(file.path.stat().st_size for file in written.files) == written.n_bytes > 0
