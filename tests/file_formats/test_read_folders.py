"""Folders of one checkpoint: shards, snapshots of the hub, and ServerlessLLM's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from tensorcas_mlflow.errors import BackendError, FormatError, MalformedFileError
from tensorcas_mlflow.file_formats import OTHER_FILE, left_out_parts, open_listing
from tensorcas_mlflow.reader import open_path
from tests.file_formats.samples import (
    ARRAYS,
    Array,
    hub_snapshot,
    same,
    serverlessllm_folder,
    serverlessllm_of,
    torch_file,
)

FIRST = {"a": ARRAYS["encoder.weight"], "b": ARRAYS["encoder.bias"]}
SECOND = {"c": ARRAYS["head.weight"]}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def contents(weight_map: Any = None) -> dict[str, bytes]:
    """The files of a checkpoint in two shards."""
    if weight_map is None:
        weight_map = {**dict.fromkeys(FIRST, SHARDS[0]), **dict.fromkeys(SECOND, SHARDS[1])}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return {
        SHARDS[0]: safetensors.numpy.save(FIRST, {"format": "pt", "shard": "1"}),
        SHARDS[1]: safetensors.numpy.save(SECOND, {"format": "pt", "shard": "2"}),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": b'{"model_type": "llama"}',
    }


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def arrays_of(path: Path) -> dict[str, Array]:
    listing = open_listing(path)
    return {name: listing.array(name) for name in listing.locations}


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", contents())
    listing = open_listing(folder)
    found = arrays_of(folder)

    assert (listing.format, len(listing.sources)) == ("safetensors", 2)
    assert [*found] == ["a", "b", "c"]
    assert all(same(found[name], array) for name, array in {**FIRST, **SECOND}.items())
    assert listing.metadata == {"format": "pt", "config": {"model_type": "llama"}}
    assert [*arrays_of(folder / "model.safetensors.index.json")] == ["a", "b", "c"]


def test_shards_without_an_index_are_read_by_name(tmp_path: Path) -> None:
    files = contents()
    del files["model.safetensors.index.json"]

    assert [*arrays_of(written(tmp_path / "model", files))] == ["a", "b", "c"]


def test_a_snapshot_in_the_cache_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, contents())

    assert [*arrays_of(snapshot)] == ["a", "b", "c"]
    assert [*arrays_of(snapshot / SHARDS[0])] == ["a", "b"]


def test_shards_of_torch_are_one_checkpoint(tmp_path: Path) -> None:
    names = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    files = {
        name: torch_file({key: torch.from_numpy(array) for key, array in shard.items()})
        for name, shard in zip(names, (FIRST, SECOND), strict=True)
    }
    weight_map = {**dict.fromkeys(FIRST, names[0]), **dict.fromkeys(SECOND, names[1])}
    files["pytorch_model.bin.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["training_args.bin"] = b"something else"
    folder = written(tmp_path / "model", files)

    assert open_listing(folder).format == "torch"
    assert [*arrays_of(folder)] == ["a", "b", "c"]


def test_safetensors_files_are_preferred_to_torch_files_beside_them(tmp_path: Path) -> None:
    files = {"model.safetensors": safetensors.numpy.save(FIRST), "pytorch_model.bin": torch_file({"x": torch.ones(1)})}
    folder = written(tmp_path / "model", files)

    assert [*arrays_of(folder)] == ["a", "b"]
    assert [*open_listing(folder, format="torch").locations] == ["x"]


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": SHARDS[0], "b": SHARDS[0]},
        {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]},
        {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1], "d": SHARDS[1]},
        {"a": SHARDS[0], "b": SHARDS[0], "c": "../model/" + SHARDS[1]},
        {"a": SHARDS[0], "b": SHARDS[0], "c": "/etc/passwd"},
        {"a": SHARDS[0], "b": SHARDS[0], "c": ".."},
        {"a": SHARDS[0], "b": SHARDS[0], "c": "config.json"},
        {"a": SHARDS[0], "b": SHARDS[0], "c": 1},
        {"a": SHARDS[0], "b": SHARDS[0], "c": "x\0y"},
        ["a"],
    ],
)
def test_an_index_that_says_other_than_the_shards_is_refused(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(MalformedFileError):
        open_listing(written(tmp_path / "model", contents(weight_map)))


def test_an_index_that_names_a_missing_shard_says_which(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", contents())
    (folder / SHARDS[1]).unlink()

    with pytest.raises(BackendError, match=SHARDS[1]):
        open_listing(folder)


def test_an_index_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    files = contents()
    files["model.safetensors.index.json"] = f'{{"weight_map": {{"a": "{SHARDS[0]}", "a": "{SHARDS[0]}"}}}}'.encode()

    with pytest.raises(MalformedFileError, match="twice"):
        open_listing(written(tmp_path / "model", files))


def test_missing_shard_is_refused_without_an_index(tmp_path: Path) -> None:
    for number in (1, 3):
        file = tmp_path / f"model-0000{number}-of-00003.safetensors"
        safetensors.numpy.save_file({f"w{number}": np.ones(3)}, file)

    with pytest.raises(MalformedFileError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_listing(tmp_path)


def test_one_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    files = {"one.safetensors": safetensors.numpy.save(FIRST), "two.safetensors": safetensors.numpy.save(FIRST)}

    with pytest.raises(MalformedFileError, match="two tensors are called 'a'"):
        open_listing(written(tmp_path / "model", files))


@pytest.mark.parametrize("target", ["secret.safetensors", "blobs/secret.safetensors"])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / target).write_bytes(safetensors.numpy.save(FIRST))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / target)

    with pytest.raises(MalformedFileError, match="outside"):
        open_listing(tmp_path / "model")


def test_a_link_in_circles_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")

    for name in ("loop.safetensors", "pipe.safetensors"):
        with pytest.raises(BackendError):
            open_listing(tmp_path / name)


def test_an_empty_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no checkpoint"):
        open_listing(tmp_path)


def test_a_folder_of_serverlessllm_is_read(tmp_path: Path) -> None:
    folder = serverlessllm_folder(tmp_path / "model", ARRAYS)
    listing = open_listing(folder)

    assert (listing.format, len(listing.sources)) == ("serverlessllm", 2)
    assert all(same(listing.array(name), array) for name, array in ARRAYS.items())
    assert [*open_listing(folder / "tensor_index.json").locations] == [*ARRAYS]


def test_strides_of_serverlessllm_are_heeded_and_tied_tensors_allowed(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    index = {
        "plain": [0, 24, [2, 3], [3, 1], "torch.float32", 0],
        "tied": [0, 24, [2, 3], [3, 1], "f32", 0],
        "transposed": [64, 24, [3, 2], [1, 3], "F32", 0],
        "odd": [128, 4, [8], [1], "torch.int4", 0],
    }
    data = matrix.tobytes().ljust(64, b"\0") + matrix.tobytes().ljust(64, b"\0") + bytes(4)
    listing = open_listing(serverlessllm_of(tmp_path / "model", index, [data]))

    assert same(listing.array("plain"), matrix)
    assert same(listing.array("tied"), matrix)
    assert same(listing.array("transposed"), np.ascontiguousarray(matrix.T))
    assert listing.left_out == {"odd": "torch.int4"}


@pytest.mark.parametrize(
    "index",
    [
        {"a": [0, 24, [2, 3], [3, 1], "torch.float32"]},
        {"a": [0, 24, [2, 3], [3, 1], "torch.float32", 0, 0]},
        {"a": [0, 24, [2, 3], [3], "torch.float32", 0]},
        {"a": [0, 20, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [0, 32, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [0, 24, [2, 3], [4, 1], "torch.float32", 0]},
        {"a": [0, 24, [2, 3], [-3, 1], "torch.float32", 0]},
        {"a": [80, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [-1, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [1 << 64, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [0.0, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [True, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": ["0", 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [0, 24, [2, 3], [3, 1], "torch.float32", "0/../../x"]},
        {"a": [0, 24, [2, 3], [3, 1], "torch.float32", -1]},
        {"a": [0, 24, [2, 3], [3, 1], "torch.float32", 0], "b": [20, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"": [0, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"__skeleton__": [0, 24, [24], [1], "torch.uint8", 0]},
        {"a\nb": [0, 24, [2, 3], [3, 1], "torch.float32", 0]},
        {"a": [0, 4, [1 << 40], [0], "torch.float32", 0]},
        b'{"a": [0, 24, [2, 3], [3, 1], "torch.float32", 0], "a": [0, 24, [2, 3], [3, 1], "torch.float32", 0]}',
        b'{"a": [0, 24, [2, 3], [3, 1], "torch.float32", 0]} x',
        b'{"a": [0, 24, [2, NaN], [3, 1], "torch.float32", 0]}',
        b'{"a": ' + b"[" * 100_000,
        b'{"\xff": [0, 24, [2, 3], [3, 1], "torch.float32", 0]}',
        b"[]",
        b"",
    ],
    ids=lambda index: repr(index)[:60],
)
def test_an_index_of_serverlessllm_that_is_not_sound_is_refused(tmp_path: Path, index: Any) -> None:
    folder = serverlessllm_of(tmp_path / "model", index, [bytes(100)])

    with pytest.raises(MalformedFileError):
        open_listing(folder)


def test_a_link_among_the_files_of_serverlessllm_stays_in_the_folder(tmp_path: Path) -> None:
    folder = serverlessllm_of(tmp_path / "model", {"a": [0, 4, [4], [1], "torch.uint8", 0]}, [])
    (tmp_path / "secret").write_bytes(b"data")
    (folder / "tensor.data_0").symlink_to("../secret")

    with pytest.raises(MalformedFileError, match="outside"):
        open_listing(folder)


def test_files_beside_a_checkpoint_are_named(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.ones(3, "f4")}, tmp_path / "model.safetensors")
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}}, tmp_path / "optimizer.pt")
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    (tmp_path / "config.json").write_text("{}")
    listing = open_listing(tmp_path)

    assert [*listing.locations] == ["w"]
    assert listing.left_out == {"optimizer.pt": OTHER_FILE, "x.npz": OTHER_FILE}
    assert left_out_parts(listing.left_out) == {}
    with open_path(tmp_path) as reader:
        assert "beside it, to be opened by themselves: optimizer.pt, x.npz" in str(reader.summary())
        assert [*reader.match("*")] == ["w"]
